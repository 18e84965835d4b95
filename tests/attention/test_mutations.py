"""Faults that people make, put into the package one at a time: the comparison with the independent implementation sees
each of them, and sees first the stage that is wrong. A fault is a changed field of a recipe, or a function replaced."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from flamia_ref import _float32, attention
from flamia_ref.attention import (
    RECIPES,
    Forward,
    Recipe,
    Use,
    backward_stages,
    backward_tile,
    forward_stages,
    forward_tile,
    row_end,
    run,
)
from flamia_ref.attention.copies import OVER_CHANNELS
from flamia_ref.attention.product import Guard
from flamia_ref.attention.stages import kept_for_backward
from tests.attention.changes import changed
from tests.attention.passes import passes, with_dout
from tests.attention.samples import BF16, bell, bits
from tests.independent import attention as independent

NAMES = tuple(independent.RECIPES)


@functools.cache
def given():
    """Two documents, the first of two blocks; tokens and channels differ by factors, so that their scales do."""
    *arrays, cu_seqlens = with_dout(bell, 1, [46, 10], 1, 1, 40)
    rng = np.random.default_rng(1)
    made = []
    for x in arrays:
        powers = np.exp2(rng.integers(-2, 3, (len(x), 1, 2))).astype(np.float32)
        powers[32:46] *= np.float32(4)
        made.append((x.astype(np.float32) * np.repeat(powers, 20, axis=2)).astype(BF16))
    return made, cu_seqlens


@functools.cache
def expected(recipe: str) -> dict[str, Any]:
    arrays, cu_seqlens = given()
    return independent.run(recipe, *(x.view(np.uint16) for x in arrays), cu_seqlens)


def same(found, wanted) -> bool:
    if isinstance(found, list):
        return all(same(one, other) for one, other in zip(found, wanted, strict=True))
    if wanted.dtype == np.uint16 and found.dtype == np.float32:
        wanted = wanted.view(BF16).astype(np.float32)
    return bool((bits(found) == bits(wanted.view(found.dtype))).all())


def departures(recipe: Recipe | str) -> list[str]:
    """What differs from the independent implementation of the recipe of that name, in the order of the dataflow.

    The backward starts from that one's out and lse, so that a fault of the forward does not hide in it.
    """
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    arrays, cu_seqlens = given()
    wanted = expected(chosen.name)
    saved = {name: wanted[name].view(BF16).astype(np.float32) for name in kept_for_backward(chosen)}
    kernel = Forward.from_kernel(
        wanted["out"].view(BF16),
        wanted["lse"].view(np.float32),
        chosen,
        saved=saved,
        cu_seqlens=cu_seqlens,
    )
    found = passes(*arrays, chosen, given=kernel, cu_seqlens=cu_seqlens)
    order = (*forward_stages(chosen), "out", "lse", *backward_stages(chosen), "dq", "dk", "dv")
    assert set(order) == set(found) == set(wanted)
    return [name for name in order if not same(found[name], wanted[name])]


@pytest.mark.parametrize("recipe", NAMES)
def test_nothing_departs_without_a_fault(recipe: str) -> None:
    assert departures(recipe) == []


def replaced_rows(monkeypatch, change) -> None:
    """`change(run, use, rows, tokens, heads)` in place of the rows that a use takes."""
    original = run.Run.rows

    def rows(self, use, tokens, heads):
        return change(functools.partial(original, self), use, tokens, heads)

    monkeypatch.setattr(run.Run, "rows", rows)


@pytest.mark.parametrize(
    ("recipe", "use", "first"),
    [
        ("flamia-mxfp8", Use.S_Q, "s"),
        ("flamia-mxfp8", Use.S_K, "s"),
        ("flamia-mxfp8", Use.O_V, "o"),
        ("flamia-mxfp8", Use.DP_DO, "dp"),
        ("flamia-mxfp8", Use.DP_V, "dp"),
        ("flamia-mxfp8", Use.DV_DO, "p.dv.codes"),
        ("flamia-mxfp8", Use.DQ_K, "dq"),
        ("flamia-mxfp8", Use.DK_Q, "ds.dk.codes"),
        ("flamia-mxfp8-folded", Use.O_V, "p.o.codes"),
        ("flamia-mxfp8-folded", Use.DQ_K, "ds.dq.codes"),
        ("cudnn-mxfp8", Use.S_K, "s"),
        ("cudnn-mxfp8", Use.O_V, "o"),
        ("cudnn-mxfp8", Use.DP_V, "dp"),
        ("cudnn-mxfp8", Use.DV_DO, "dv"),
        ("cudnn-mxfp8", Use.DQ_K, "dq"),
        ("cudnn-mxfp8", Use.DK_Q, "dk"),
    ],
)
def test_the_scale_of_the_neighbouring_block(
    recipe: str, use: Use, first: str, monkeypatch
) -> None:
    def neighbour(rows, which, tokens, heads):
        taken = rows(which, tokens, heads)
        if which is not use:
            return taken
        if taken.fold is not None:
            return taken._replace(fold=np.roll(taken.fold, 1, axis=1))
        if use in OVER_CHANNELS:
            return taken._replace(scales=np.roll(taken.scales, 32, axis=1))
        return taken._replace(scales=np.roll(taken.scales, 1, axis=0))

    replaced_rows(monkeypatch, neighbour)
    assert departures(recipe)[0] == first


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("recipe", NAMES)
def test_a_mask_off_by_one(recipe: str, off: int, monkeypatch) -> None:
    original = forward_tile.pairs_visible

    def visible(key_start, least, last, keys):
        return original(key_start, least, last + np.int32(off), keys)

    monkeypatch.setattr(forward_tile, "pairs_visible", visible)
    assert departures(recipe)[0] == "p"
    monkeypatch.setattr(forward_tile, "pairs_visible", original)
    monkeypatch.setattr(backward_tile, "pairs_visible", visible)
    assert departures(recipe)[0] == "p.dv"


@pytest.mark.parametrize(
    "recipe", [name for name in NAMES if "quotient" not in RECIPES[name].softmax.normalisation]
)
def test_the_row_sum_divided_out_twice(recipe: str, monkeypatch) -> None:
    original = row_end._inverse

    def twice(*arguments):
        factor = original(*arguments)
        return _float32.multiply(factor, factor)

    monkeypatch.setattr(row_end, "_inverse", twice)
    assert departures(recipe)[0] == "o"


@pytest.mark.parametrize(
    "recipe", ["flamia-mxfp8", "flamia-mxfp8-folded", "flamia-mxfp8-unguarded"]
)
def test_the_row_sum_divided_out_of_dout_twice(recipe: str, monkeypatch) -> None:
    original = backward_tile.prologue

    def twice(dout, *rest, **options):
        return original(original(dout, *rest, **options).dout, *rest, **options)

    monkeypatch.setattr(backward_tile, "prologue", twice)
    assert departures(recipe)[0] == "do.codes"


def unguarded(recipe: Recipe, product: str) -> Recipe:
    """The recipe without the guard of one product."""
    old = getattr(recipe, product)
    right = dataclasses.replace(old.right, guard=Guard.NONE)
    new = dataclasses.replace(old, right=right, guard_instruction=None)
    return dataclasses.replace(recipe, **{product: new})


@pytest.mark.parametrize(
    ("product", "first"), [("s", "s"), ("o", "p.o.codes"), ("dp", "dp"), ("dq", "ds.dq.codes")]
)
def test_a_product_without_its_guard(product: str, first: str) -> None:
    found = departures(unguarded(RECIPES["flamia-mxfp8"], product))
    assert found[0] == first
    assert ("out" if product == "o" else "dq") in found


def test_delta_of_an_output_without_the_guard() -> None:
    """The out of a forward whose O is not guarded, in a backward that is: delta is the first to see it."""
    (q, k, v, dout), cu_seqlens = given()
    recipe = RECIPES["flamia-mxfp8"]
    other = attention.forward(q, k, v, unguarded(recipe, "o"), cu_seqlens=cu_seqlens)
    lse = attention.forward(q, k, v, recipe, cu_seqlens=cu_seqlens).lse
    assert (other.lse == lse).all()
    kernel = Forward.from_kernel(other.out, lse, recipe, cu_seqlens=cu_seqlens)
    trace = attention.backward(q, k, v, dout, kernel, trace=backward_stages(recipe)).trace
    wanted = expected("flamia-mxfp8")
    wrong = [name for name in backward_stages(recipe) if not same(trace[name], wanted[name])]
    assert wrong[0] == "delta"
    assert "ds" in wrong


@pytest.mark.parametrize(
    ("recipe", "use", "instead", "first"),
    [
        ("flamia-mxfp8-folded", Use.DQ_K, Use.O_V, "ds.dq.codes"),  # V's scale for K's
        ("flamia-mxfp8-folded", Use.DK_Q, Use.DV_DO, "ds.dk.codes"),  # dO's for Q's
        ("flamia-mxfp8-folded", Use.DV_DO, Use.DK_Q, "p.dv.codes"),
        ("flamia-mxfp8-folded", Use.O_V, Use.DQ_K, "p.o.codes"),
        ("flamia-mxfp8", Use.DK_Q, Use.DV_DO, "ds.dk.codes"),
    ],
)
def test_folded_with_the_wrong_operands_scale(
    recipe: str, use: Use, instead: Use, first: str, monkeypatch
) -> None:
    def wrong(rows, which, tokens, heads):
        taken = rows(which, tokens, heads)
        if which is use:
            taken = taken._replace(fold=rows(instead, tokens, heads).fold)
        return taken

    replaced_rows(monkeypatch, wrong)
    assert departures(recipe)[0] == first


@pytest.mark.parametrize("recipe", ["flamia-mxfp8", "flamia-mxfp8-folded"])
def test_a_scale_not_folded_at_all(recipe: str, monkeypatch) -> None:
    def missing(rows, which, tokens, heads):
        taken = rows(which, tokens, heads)
        return taken._replace(fold=None) if which is Use.DK_Q else taken

    replaced_rows(monkeypatch, missing)
    assert departures(recipe)[0] == "ds.dk.codes"


@pytest.mark.parametrize(
    ("recipe", "path", "value", "first"),
    [
        ("flamia-mxfp8", "softmax.p_offset", 0, "p"),
        ("cudnn-mxfp8", "softmax.p_offset", 0, "p"),
        ("flamia-mxfp8-unguarded", "softmax.p_offset", 0, "p"),
        ("cudnn-mxfp8", "gradient.p_offset", 0, "p.dv.codes"),
        ("cudnn-mxfp8", "dv.left.static_scale", 127, "dv"),
        ("flamia-mxfp8", "o.left.static_scale", 119, "o"),
    ],
)
def test_the_scale_of_p_missing(recipe: str, path: str, value: int, first: str) -> None:
    assert departures(changed(RECIPES[recipe], path, value))[0] == first


@pytest.mark.parametrize(
    ("recipe", "path", "value", "first"),
    [
        ("bf16-fa4", "softmax.emulated", None, "p"),
        ("bf16-fa4", "softmax.score_factor", "exact_product", "p"),
        ("cudnn-mxfp8", "gradient.score_factor", "float64_product", "p.dv"),
        ("cudnn-mxfp8", "softmax.row_sum", "eight_lanes", "row_sum"),
        ("cudnn-mxfp8", "gradient.delta", "fma_ascending", "delta"),
        ("bf16-fa4", "gradient.delta", "half_products", "delta"),
        ("attn-qat-nvfp4", "softmax.row_sum", "ascending", "row_sum"),
        ("attn-qat-nvfp4", "softmax.mask_value", -1.0, "p"),
        ("attn-qat-nvfp4", "gradient.delta", "fma_ascending", "delta"),
        ("attn-qat-nvfp4", "o.left.format", "sage3-nvfp4", "p.o.codes"),
        ("attn-qat-nvfp4", "dv.left.format", "sage3-nvfp4", "p.dv.codes"),
        ("cudnn-mxfp8-reference", "s.instruction", "exact", "s"),
        ("cudnn-mxfp8-reference", "softmax.p_scaling", "exponent", "p.o.codes"),
        ("cudnn-mxfp8-reference", "softmax.row_sum", "eight_lanes", "row_sum"),
        ("cudnn-mxfp8-reference", "softmax.normalisation", "division", "o"),
        ("cudnn-mxfp8-reference", "gradient.delta", "half_products", "delta"),
        ("cudnn-mxfp8-reference", "gradient.normalisation", "lse", "p.dv"),
        ("cudnn-mxfp8-reference", "gradient.softmax_scale", "in_ds", "ds"),
        ("cudnn-mxfp8-reference", "gradient.softmax_scale", "epilogue", "ds"),
        ("flamia-mxfp8-folded", "softmax.exp2", "correct", "p"),
        ("flamia-mxfp8-folded", "softmax.normalisation", "division", "o"),
        ("flamia-mxfp8-folded", "o.left.format", "ocp-mx-floor-e4m3", "p.o.codes"),
        ("flamia-mxfp8-folded", "dv.left.format", "ocp-mx-floor-e4m3", "p.dv.codes"),
    ],
)
def test_other_fields(recipe: str, path: str, value, first: str) -> None:
    assert departures(changed(RECIPES[recipe], path, value))[0] == first


@functools.cache
def rising():
    """128 keys with scores near 0 and one 3.75 above them in the next tile; a score 6.25 above; a NaN."""
    q, k, v, _, cu_seqlens = with_dout(bell, 2, [129, 3, 3], 1, 1, 4)
    q, k = (x * np.float32(0.125).astype(BF16) for x in (q, k))
    q[128, 0], k[128, 0] = [1, 0, 0, 0], [7.5, 0, 0, 0]  # softmax_scale is 1 / 2
    q[131, 0], k[131, 0] = [1, 0, 0, 0], [12.5, 0, 0, 0]
    k[134] = np.nan
    wanted = independent.run(
        "cudnn-mxfp8-reference", *(x.view(np.uint16) for x in (q, k, v)), None, cu_seqlens
    )
    return (q, k, v), cu_seqlens, wanted


def test_a_base_in_natural_units_where_scores_rise() -> None:
    """The threshold, its unit, and what becomes of a P that passes its element and of one that is NaN."""
    (q, k, v), cu_seqlens, wanted = rising()
    recipe = RECIPES["cudnn-mxfp8-reference"]
    for path, value, first in (
        ("softmax.rescale_threshold", 4, None),
        ("softmax.rescale_threshold", 3, "p"),
        ("softmax.threshold_unit", "log2", "p"),
        ("softmax.p_overflow", "saturated", "p.o.codes"),
        ("softmax.nan_p", "kept", "p"),
        ("softmax.normalisation", "quotient", "o"),
    ):
        other = changed(recipe, path, value)
        found = attention.forward(
            q, k, v, other, cu_seqlens=cu_seqlens, trace=forward_stages(other)
        )
        named = {**found.trace, "out": found.out, "lse": found.lse}
        departed = [name for name in named if not same(named[name], wanted[name])]
        order = [name for name in (*forward_stages(other), "out", "lse") if name in departed]
        assert order[:1] == ([] if first is None else [first]), path
    p, codes = (wanted[name][0][0, 128] for name in ("p", "p.o.codes"))
    assert p.view(np.float32)[128] > 29
    assert codes[128] == 0
    assert (codes[:128] > 0).all()


def test_heads_dealt_out_in_turn(monkeypatch) -> None:
    """Query head h with key/value head h modulo their number."""
    *arrays, cu_seqlens = with_dout(bell, 3, [9], 4, 2, 16)
    wanted = independent.run("bf16-fa4", *(x.view(np.uint16) for x in arrays), cu_seqlens)

    def dealt(rows, which, tokens, heads):
        if which in (Use.S_K, Use.O_V):
            heads = np.tile(np.arange(2, dtype=np.int32), len(heads) // 2)
        return rows(which, tokens, heads)

    assert same(passes(*arrays, "bf16-fa4")["out"], wanted["out"])
    replaced_rows(monkeypatch, dealt)
    q, k, v, _ = arrays
    assert not same(attention.forward(q, k, v, "bf16-fa4").out, wanted["out"])
