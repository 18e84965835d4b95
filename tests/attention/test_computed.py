"""Every change of one field of a recipe is computed, and then changes a bit, or is refused by its name: nothing is read
and ignored, nothing is computed wrongly in silence, and nothing fails from deep inside."""

import functools
import math

import numpy as np
import pytest

from flamia_ref.attention import RECIPES, Recipe
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.inputs import score_factor
from tests.attention.changes import changed, changes, with_tiles
from tests.attention.passes import passes, with_dout
from tests.attention.samples import BF16, bell, bits, wide, with_specials

# A scale whose factor c two of the roundings disagree on: the exact product is next to a middle of two float32.
DOUBLE_ROUNDING = 22080397 / math.log2(math.e) * 2.0**-27

TILE = 64  # so that short documents have several tiles


@functools.cache
def inputs():
    """Inputs and options, each with something that the ones before it do not reach."""
    *tiny, cu_seqlens = with_dout(bell, 4, [70], 1, 1, 32)
    tiny[3] = (tiny[3].astype(np.float32) * np.float32(2.0**-122)).astype(BF16)
    return (
        (with_dout(bell, 1, [70, 9], 2, 1, 32), {"softmax_scale": DOUBLE_ROUNDING}),
        (with_dout(bell, 2, [70, 9], 2, 1, 32, spread=2.0), {"causal": False}),
        (with_dout(with_specials, 3, [70], 1, 1, 32), {}),
        ((*tiny, cu_seqlens), {}),
        (with_dout(wide, 5, [70], 1, 1, 32), {}),
    )


def results(recipe: Recipe, index: int) -> dict[str, bytes]:
    """The bytes of every result and stage of one of `inputs`; the names of copies are not part of them."""
    (*arrays, cu_seqlens), options = inputs()[index]
    found = passes(*arrays, recipe, cu_seqlens=cu_seqlens, **options)
    flat = {
        name: b"".join(bits(x).tobytes() for x in (value if isinstance(value, list) else [value]))
        for name, value in found.items()
    }
    return {name: value for name, value in flat.items() if name.split(".")[0] not in "q k v do"}


@functools.cache
def base(name: str, index: int) -> dict[str, bytes]:
    return results(with_tiles(RECIPES[name], TILE), index)


def computed(name: str) -> list[tuple[str, object]]:
    """The changes of a recipe that this package computes."""
    recipe, found = with_tiles(RECIPES[name], TILE), []
    for path, value in changes(recipe):
        try:
            check_computed(changed(recipe, path, value))
        except ValueError:
            continue
        found.append((path, value))
    return found


def test_the_roundings_of_the_score_factor_differ() -> None:
    roundings = ("exact_product", "float64_product", "float32_product")
    double, usual = (
        [int(score_factor(scale, rounding)) for rounding in roundings]
        for scale in (DOUBLE_ROUNDING, 1 / math.sqrt(32))
    )
    assert double[0] != double[1]
    assert usual[0] != usual[2]


@pytest.mark.parametrize("name", RECIPES)
def test_a_change_that_is_not_computed_is_refused_by_name(name: str) -> None:
    recipe = with_tiles(RECIPES[name], TILE)
    refused = 0
    for path, value in changes(recipe):
        try:
            check_computed(changed(recipe, path, value))
        except ValueError as error:
            message, field = str(error), path.rpartition(".")[2]
            assert field in message or str(value) in message, (path, value, message)
            assert "\n" not in message
            assert len(message) < 300, message
            refused += 1
    assert refused > 400


def neutral(name: str, path: str, value: object) -> str | None:
    """Why a change moves no bit, None where it must."""
    field = path.rpartition(".")[2]
    if field == "same_codes_as":
        return "the same values quantized twice by the same rule give the same codes"
    return None


@pytest.mark.parametrize("name", RECIPES)
def test_a_change_that_is_computed_changes_a_bit(name: str) -> None:
    recipe = with_tiles(RECIPES[name], TILE)
    unmoved = []
    for path, value in computed(name):
        other = changed(recipe, path, value)
        moved = any(
            results(other, index) != base(name, index) for index in range(len(inputs()))
        )
        if moved == (neutral(name, path, value) is not None):
            unmoved.append((path, value, moved))
    assert not unmoved
