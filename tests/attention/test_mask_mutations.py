"""Faults of masks, sinks, orders and guards, put into the package one at a time: the comparison with the interpreter
of recipes in `tests/independent` sees each, and sees first the stage that is wrong."""

import dataclasses
import functools
import json
from typing import Any

import numpy as np
import pytest

from flamia_ref import _float32
from flamia_ref.attention import (
    Forward,
    backward_pass,
    backward_stages,
    forward_pass,
    forward_stages,
    forward_tile,
    row_end,
    softmax,
)
from flamia_ref.packing import Mask, tiles
from tests.attention.samples import BF16, bits, cancelling
from tests.attention.shapes import Shape, run
from tests.independent import engine

SHAPES = {
    # A row's window spans two or three key tiles, and the diagonal is elsewhere in each document.
    "window": Shape(
        lengths=((40, 70), (20, 9)),
        mask="left window",
        heads=1,
        head_dim=16,
        value_dim=16,
        sink=(0.5,),
    ),
    "full": Shape(
        lengths=((100, 100),), mask="full", heads=1, head_dim=16, value_dim=16, spread=3.0, seed=5
    ),
}


@functools.cache
def expected(recipe: str, shape: str) -> dict[str, Any]:
    given = SHAPES[shape]
    data = json.loads(given.recipe(recipe).to_json())
    queries, keys = given.cu_seqlens
    sink = None if given.sink is None else np.array(given.sink, np.float32).view(np.uint32)
    arrays = [x.view(np.uint16) for x in given.arrays()]
    options = given.options | {"sink": sink}
    return engine.run(data, *arrays, queries, cu_seqlens_k=keys, **options)


def same(found, wanted) -> bool:
    if isinstance(found, list):
        return all(same(one, other) for one, other in zip(found, wanted, strict=True))
    if wanted.dtype == np.uint16 and found.dtype == np.float32:
        wanted = wanted.view(BF16).astype(np.float32)
    return bool((bits(found) == bits(wanted.view(found.dtype))).all())


def departures(recipe: str, shape: str, *, own: bool = False) -> list[str]:
    """The stages that differ from the interpreter's, in the order of the dataflow.

    The backward starts from that one's out and lse, so that a fault of the forward does not hide in it; or, where those
    would be refused, from its `own`.
    """
    given = SHAPES[shape]
    wanted, chosen = expected(recipe, shape), given.recipe(recipe)
    queries, keys = given.cu_seqlens
    options = {"cu_seqlens": queries, "cu_seqlens_k": keys, **given.options}
    kernel = Forward.from_kernel(
        wanted["out"].view(BF16), wanted["lse"].view(np.float32), chosen, **options
    )
    found = run(given.arrays(), chosen, given=None if own else kernel, **options)
    order = [*forward_stages(chosen), "out", "lse", *backward_stages(chosen), "dq", "dk", "dv"]
    order += [] if given.sink is None else ["dsink"]
    assert set(order) == set(found)
    return [name for name in order if not same(found[name], wanted[name])]


WITH_SINKS = ("bf16-fa4", "cudnn-mxfp8", "flamia-mxfp8", "flamia-mxfp8-folded")


@pytest.mark.parametrize("recipe", WITH_SINKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_departs_without_a_fault(recipe: str, shape: str) -> None:
    assert departures(recipe, shape) == []


@pytest.mark.parametrize("side", ["first", "last"])
@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one(side: str, off: int, monkeypatch) -> None:
    original = Mask.bounds

    def bounds(self, document, place):
        first, last = original(self, document, place)
        seen = last >= 0
        if side == "first":
            first = np.where(seen, np.clip(first + off, 0, last), first).astype(np.int32)
        else:
            moved = np.clip(last + off, first, self._table[1, document] - 1)
            last = np.where(seen, moved, last).astype(np.int32)
        return first, last

    monkeypatch.setattr(Mask, "bounds", bounds)
    assert departures("flamia-mxfp8-folded", "window")[0] == "p"
    assert departures("flamia-mxfp8", "window")[0] in ("s", "p")  # the guard may move too


def test_the_other_alignment(monkeypatch) -> None:
    original = Mask._table.func

    def table(self):
        queries, keys, shifts = original(self)
        return np.stack([queries, keys, np.where(shifts == 0, keys - queries, 0)])

    monkeypatch.setattr(Mask, "_table", property(table))
    for recipe in WITH_SINKS:
        assert departures(recipe, "window", own=True)[0] in ("s", "p")


@pytest.mark.parametrize(
    ("recipe", "function"),
    [("bf16-fa4", "_raw_sink"), ("flamia-mxfp8-folded", "_integer_sink")],
)
def test_a_sink_counted_twice(recipe: str, function: str, monkeypatch) -> None:
    original = getattr(row_end, function)

    def twice(o, row_max, row_sum, *rest):
        return original(*original(o, row_max, row_sum, *rest), *rest)

    monkeypatch.setattr(row_end, function, twice)
    assert departures(recipe, "window")[0] in ("row_max", "row_sum")


def test_a_sink_counted_twice_in_natural_units(monkeypatch) -> None:
    original = row_end._natural_sink

    def twice(row_max, row_sum, sink, knobs):
        both = _float32.add(sink, np.float32(np.log(2)).view(np.uint32) * np.ones_like(sink))
        return original(row_max, row_sum, both, knobs)

    monkeypatch.setattr(row_end, "_natural_sink", twice)
    found = departures("cudnn-mxfp8", "window")
    assert found[:3] == ["o", "out", "lse"]


def test_a_sink_in_every_row_sum_but_not_in_its_gradient(monkeypatch) -> None:
    """dsink is the last, and the only one that sees it."""
    original = backward_pass.backward_tile.sink_sums

    def without(sink, base, delta, dead, *, recipe):
        return original(np.zeros_like(sink), base, delta, dead, recipe=recipe)

    monkeypatch.setattr(backward_pass.backward_tile, "sink_sums", without)
    assert departures("flamia-mxfp8-folded", "window") == ["dsink"]


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [("flamia-mxfp8-folded", "full"), ("cudnn-mxfp8", "full"), ("bf16-fa4", "full")],
)
def test_the_maximum_of_another_tile(recipe: str, shape: str, monkeypatch) -> None:
    """P relative to the maximum of the rows of a neighbouring query tile."""
    original = softmax._relative

    def stale(s, visible, base, parts, c, knobs):
        return original(s, visible, np.roll(base, 1, axis=0), parts, c, knobs)

    monkeypatch.setattr(softmax, "_relative", stale)
    assert departures(recipe, shape)[0] == "p"


def test_a_maximum_that_is_not_handed_on(monkeypatch) -> None:
    """Each key tile begins with the state of the first: the row sum is the last tile's."""
    original = forward_tile.softmax.probabilities

    def forgets(s, visible, row_max, *rest):
        return original(s, visible, np.full_like(row_max, softmax.NEGATIVE_INFINITY), *rest)

    monkeypatch.setattr(forward_tile.softmax, "probabilities", forgets)
    found = departures("flamia-mxfp8-folded", "full")
    assert found[0] == "p"
    assert "row_max" in found


@pytest.mark.parametrize("recipe", ["flamia-mxfp8-folded", "cudnn-mxfp8", "bf16-fa4"])
def test_dq_in_the_reverse_order(recipe: str) -> None:
    """Of key tiles with big parts, their negatives, and small ones: these are lost if they come first."""
    chosen = SHAPES["full"].recipe(recipe)
    q, k, v, dout, _ = cancelling("bns", 32)
    arrays = [x.view(np.uint16) for x in (q, k, v, dout)]
    wanted = engine.run(json.loads(chosen.to_json()), *arrays, [0, 96], causal=False)
    other = dataclasses.replace(chosen.dq, tile_order="descending")
    for one, order in ((chosen, []), (dataclasses.replace(chosen, dq=other), ["dq"])):
        found = run((q, k, v, dout), one, causal=False)
        assert [name for name, value in found.items() if not same(value, wanted[name])] == order


@pytest.mark.parametrize("by", [-1, 1])
def test_a_guard_shifted_by_a_block(by: int, monkeypatch) -> None:
    original = tiles.guarded_blocks

    def shifted(first, last, inside, key_first, keys):
        return original(first, last, inside, key_first + 32 * by, keys)

    monkeypatch.setattr(forward_pass, "guarded_blocks", shifted)
    assert departures("flamia-mxfp8", "window")[0] == "s"
    monkeypatch.setattr(forward_pass, "guarded_blocks", original)
    monkeypatch.setattr(backward_pass, "guarded_blocks", shifted)
    assert departures("flamia-mxfp8", "window")[0] in ("dp", "p.dv")


@pytest.mark.parametrize("off", [-1, 1])
def test_a_document_boundary_off_by_one(off: int, monkeypatch) -> None:
    """The keys of the second document begin a token early or late."""
    original = tiles.QueryTiles.key_tokens

    def tokens(self, key_first):
        moved = np.where(self.key_start > 0, self.key_start + off, self.key_start)
        found = original(dataclasses.replace(self, key_start=moved), key_first)
        return np.minimum(found, 78)

    monkeypatch.setattr(tiles.QueryTiles, "key_tokens", tokens)
    found = departures("flamia-mxfp8-folded", "window")
    assert found[0] == "s"
    assert {"out", "dq", "dk", "dv"} <= set(found)
