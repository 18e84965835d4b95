"""Every change of one field of a recipe is computed, and then changes a bit, or is refused by its name: nothing is read
and ignored, nothing is computed wrongly in silence, and nothing fails from deep inside."""

import functools
import math

import numpy as np
import pytest

from flamia_ref.attention import RECIPES, Recipe
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.copies import copy_names
from flamia_ref.attention.inputs import score_factor
from flamia_ref.attention.stages import pair_names
from tests.attention.changes import changed, changes, with_tiles
from tests.attention.passes import passes, with_dout
from tests.attention.samples import (
    BF16,
    bell,
    bits,
    cancelling,
    tiny,
    wide,
    with_specials,
)

# A scale whose factor c two of the roundings disagree on: the exact product is next to a middle of two float32.
DOUBLE_ROUNDING = 26954875 / math.log2(math.e) * 2.0**-27

OTHER_SCALE = 1 / math.sqrt(20)  # the float32 product is another float32 than the other two

TILE = 64  # so that short documents have several tiles


def smallest():
    """Values near the end of bfloat16's range, whole rows of them, and a dO that makes dS as small."""
    *arrays, cu_seqlens = with_dout(tiny, 5, [70], 1, 1, 32)
    for x in arrays:
        x[::2] *= np.float32(2.0**-20).astype(BF16)
    return *arrays, cu_seqlens


def small_gradient():
    q, k, v, dout, cu_seqlens = with_dout(bell, 4, [70], 1, 1, 32)
    return q, k, v, dout * np.float32(2.0**-122).astype(BF16), cu_seqlens


def poisoned():
    """A NaN in the second tile of keys, which the first tile of queries does not see."""
    q, k, v, dout, cu_seqlens = with_dout(bell, 7, [70], 1, 1, 32)
    v[68, 0, 3] = np.nan
    return q, k, v, dout, cu_seqlens


def beyond():
    """A score beyond 2^31: the only exponential of the row is 0."""
    q, k, v, dout, cu_seqlens = with_dout(bell, 8, [2], 1, 1, 32)
    q[0], k[0] = 0, 1
    q[0, 0, 0] = -1.5 * 2.0**31
    return q, k, v, dout, cu_seqlens


@functools.cache
def inputs():
    """Inputs and options, each with something that the ones before it do not reach."""
    return (
        (with_dout(bell, 1, [70, 9], 2, 1, 32), {"softmax_scale": DOUBLE_ROUNDING}),
        (
            with_dout(bell, 2, [70, 9], 2, 1, 32, spread=2.0),
            {"causal": False, "softmax_scale": OTHER_SCALE},
        ),
        (smallest(), {}),
        (small_gradient(), {}),
        (poisoned(), {}),
        (beyond(), {"softmax_scale": 1.0}),
        (with_dout(with_specials, 3, [70], 1, 1, 32), {}),
        (with_dout(wide, 5, [70], 1, 1, 32), {}),
        (cancelling("bsn", 16, heads=2), {"causal": False}),
        (cancelling("bsn", 64, heads=2), {"causal": False}),
        (cancelling("bns", 64), {"causal": False}),
        (cancelling("bns", 64), {}),
        (cancelling("bssn", 8), {}),
    )


def results(recipe: Recipe, index: int) -> dict[str, bytes]:
    """The bytes of every result and stage of one of `inputs`; codes and scales by their uses, not their names."""
    (*arrays, cu_seqlens), options = inputs()[index]
    found = passes(*arrays, recipe, cu_seqlens=cu_seqlens, **options)
    copies = [*copy_names(recipe).items(), *pair_names(recipe).items()]
    for part in ("codes", "scales"):
        by_use = {
            f"{use} {part}": found[f"{name}.{part}"]
            for use, name in copies
            if f"{name}.{part}" in found
        }
        found = {
            name: value for name, value in found.items() if not name.endswith(f".{part}")
        } | by_use
    return {
        name: b"".join(bits(x).tobytes() for x in (value if isinstance(value, list) else [value]))
        for name, value in found.items()
    }


@functools.cache
def base(name: str, index: int) -> dict[str, bytes]:
    return results(with_tiles(RECIPES[name], TILE), index)


def computed(name: str, fields: str | tuple[str, ...] = "") -> list[tuple[str, object]]:
    """The changes of a recipe's parts, those that end in `fields`, that this package computes."""
    recipe, found = with_tiles(RECIPES[name], TILE), []
    for path, value in changes(recipe):
        if not path.endswith(fields):
            continue
        try:
            other = changed(recipe, path, value)
            check_computed(other)
        except ValueError:
            continue
        if other != recipe:  # a block of None is the preset's own
            found.append((path, value))
    return found


def test_the_roundings_of_the_score_factor_differ() -> None:
    roundings = ("exact_product", "float64_product", "float32_product")
    double, usual = (
        [int(score_factor(scale, rounding)) for rounding in roundings]
        for scale in (DOUBLE_ROUNDING, OTHER_SCALE)
    )
    assert double[0] != double[1]
    assert usual[0] == usual[1] != usual[2]


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("flamia-mxfp8", 5),  # of many changes, one in five
        *(pytest.param(name, 1, marks=pytest.mark.nightly) for name in RECIPES),
    ],
)
def test_a_change_that_is_not_computed_is_refused_by_name(name: str, every: int) -> None:
    recipe = with_tiles(RECIPES[name], TILE)
    refused = 0
    for path, value in list(changes(recipe))[::every]:
        try:
            check_computed(changed(recipe, path, value))
        except ValueError as error:
            message, field = str(error), path.rpartition(".")[2]
            part = path.rpartition(".")[0]
            words = [field, part, str(value)]
            if part in ("dq.left", "dk.left"):
                words.append("one copy of dS for dQ and dK")
            named = [x for x in words if x and x in message]
            assert named, (path, value, message)
            assert "\n" not in message
            assert len(message) < 300, message
            refused += 1
    assert refused > 400 // every


def neutral(name: str, path: str, value: object) -> str | None:
    """Why a change moves no bit, None where it must."""
    field = path.rpartition(".")[2]
    if field == "same_codes_as":
        return "the same values quantized twice by the same rule give the same codes"
    if path.startswith("softmax.emulated") and field != "exp2":
        recipe = with_tiles(RECIPES[name], TILE)
        if columns(recipe) == columns(changed(recipe, path, value)):
            return "the columns that are added or taken away are past the tile"
    return None


def columns(recipe: Recipe) -> list[int]:
    """The columns of a tile that the recipe emulates."""
    knobs = recipe.softmax.emulated
    return [
        column
        for column in range(TILE)
        if knobs
        and knobs.first <= column < knobs.stop
        and column % knobs.period >= knobs.period - knobs.count
    ]


def unexpected(name: str, chosen: list[tuple[str, object]]) -> list[tuple[str, object]]:
    """Changes that move no bit and should, or move one and should not."""
    recipe, found = with_tiles(RECIPES[name], TILE), []
    for path, value in chosen:
        other = changed(recipe, path, value)
        moved = any(results(other, index) != base(name, index) for index in range(len(inputs())))
        if moved == (neutral(name, path, value) is not None):
            found.append((path, value))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", RECIPES)
def test_a_change_that_is_computed_changes_a_bit(name: str) -> None:
    assert len(computed(name)) > 40
    assert not unexpected(name, computed(name))


def test_a_change_of_a_model_or_a_factor_changes_a_bit() -> None:
    """The test above for a few fields of a recipe."""
    fields = ("exp2", "score_factor", "p_offset", "delta", "row_sum")
    for name in ("cudnn-mxfp8", "flamia-mxfp8"):
        chosen = [
            (path, value)
            for path, value in computed(name, fields)
            if path.startswith(("softmax.", "gradient."))
        ]
        assert len(chosen) > 8
        assert not unexpected(name, chosen[::5])
