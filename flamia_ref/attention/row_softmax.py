"""The softmax of whole rows for the backward: its maximum and its sum, in a pass over the pairs each.

Floats are float32 bits. Only the steps are compiled, for a few fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic import special
from flamia_ref.attention import sides, softmax
from flamia_ref.attention.backward_tile import Prologue, Values, Work
from flamia_ref.attention.forward_tile import pairs_visible
from flamia_ref.attention.product import Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.softmax import NEGATIVE_INFINITY, Factors
from flamia_ref.packing import PairOrder, tile_pairs

if TYPE_CHECKING:
    from flamia_ref.attention.backward_pass import BackwardRun, Sums

Step = Callable[..., Array]


def completed(run: BackwardRun, prologue: Prologue) -> Prologue:
    """`prologue` with the maximum of each row for its base, and its sum for its total."""
    xp = run.layout
    rows = run.tokens * run.heads
    sink = None
    if run.sink is not None:
        sink = xp.broadcast_to(run.sink[None, :], (run.tokens, run.heads)).reshape(rows)
    nothing = xp.full((rows,), NEGATIVE_INFINITY, dtype=np.uint32)
    start = nothing if sink is None else sink
    found = _passed(run, prologue, start, _with_maximum, 1)
    row_max = found[:, 0]
    start = xp.zeros((rows,), dtype=np.uint32)
    if sink is not None:
        (start,) = run._in_batches(
            (sink, row_max), lambda *part: (_of_sink(*part, recipe=run.recipe),)
        )
    lanes = softmax.lanes(run.recipe.softmax)
    sums = _passed(run, prologue._replace(base=row_max), start, _with_sum, lanes)
    (total,) = run._in_batches((sums,), lambda part: (_total(part, recipe=run.recipe),))
    return prologue._replace(base=row_max, total=total)


def _passed(run: BackwardRun, prologue: Prologue, start: Array, step: Step, width: int) -> Array:
    """What `step` makes of each row's pairs, key tiles ascending, from `start` in the first lane, [rows, width]."""
    values = Values(
        run._with_last(prologue.base, 0),
        run._with_last(start, 0),
        run._with_last(prologue.dead, True),
    )
    sums: Sums = {"row": {}}
    for pairs in tile_pairs(
        run.mask, run.heads, run.batch, run.size, PairOrder(queries=None), unseen=False
    ):
        batch, work, row_values, keys = run._work(pairs, values)
        tiles = batch.queries
        places = {"row": [key[:3] for key in keys]}
        begun = np.zeros(len(batch), dtype=bool)
        begun[: len(keys)] = [place in sums["row"] for place in places["row"]]
        state = run._gathered("row", sums, places, tiles.rows, len(batch), width)
        s = sides.over_channels(
            run.rows(Use.S_Q, tiles.query_tokens(), tiles.head),
            run.rows(Use.S_K, batch.key_tokens(), tiles.head // run.group),
            run.recipe.s,
            work.guarded if run.recipe.s.guarded else None,
        )
        new = step(
            state,
            run.to_compute(begun),
            s,
            row_values,
            work,
            run.factors,
            recipe=run.recipe,
        )
        run._keep(sums["row"], places["row"], new)
    packed = run._packed(sums["row"], run.heads, run.mask.queries, width)
    return packed.reshape(run.tokens * run.heads, width)


@_backend.jit(static=("recipe",))
def _with_maximum(
    state: Array,
    begun: Array,
    s: Array,
    values: Values,
    work: Work,
    factors: Factors,
    *,
    recipe: Recipe,
) -> Array:
    xp = _backend.namespace(s)
    scores, visible = _scores(s, values, work, factors, recipe)
    old = _started(state, begun, values)
    found = softmax.largest(scores, visible)[:, :, None]
    return xp.where(work.skipped[:, None, None], old, _float32.maximum(old, found))


@_backend.jit(static=("recipe",))
def _with_sum(
    state: Array,
    begun: Array,
    s: Array,
    values: Values,
    work: Work,
    factors: Factors,
    *,
    recipe: Recipe,
) -> Array:
    xp = _backend.namespace(s)
    scores, visible = _scores(s, values, work, factors, recipe)
    old = _started(state, begun, values)
    e = softmax.natural_power(scores, values.base[:, :, None], recipe.softmax)
    new = softmax.carried(old, xp.where(visible, e, np.uint32(0)), recipe.softmax)
    return xp.where(work.skipped[:, None, None], old, new)


def _scores(
    s: Array, values: Values, work: Work, factors: Factors, recipe: Recipe
) -> tuple[Array, Array]:
    scores, _ = softmax.scores(s, factors, recipe.softmax)
    visible = pairs_visible(work.key_start, work.least, work.last, s.shape[2])
    return scores, visible & ~values.dead[:, :, None]


def _started(state: Array, begun: Array, values: Values) -> Array:
    """`state`, or in rows whose first pair of tiles this is `values.delta`, what they start from, in the first lane."""
    xp = _backend.namespace(state)
    start = xp.where(np.arange(state.shape[2]) == 0, values.delta[:, :, None], np.uint32(0))
    return xp.where(begun[:, None, None], state, start)


@_backend.jit(static=("recipe",))
def _total(sums: Array, *, recipe: Recipe) -> Array:
    return softmax.total(sums[:, None], recipe.softmax)[:, 0]


@_backend.jit(static=("recipe",))
def _of_sink(sink: Array, row_max: Array, *, recipe: Recipe) -> Array:
    return special.exp_bits(_float32.subtract(sink, row_max), model=recipe.softmax.exp2)


def of_scores(s: Array, visible: Array, recipe: Recipe) -> tuple[Array, Array]:
    """The maximum and the sum of whole rows [heads, queries] of scores S' [heads, queries, keys], without a sink."""
    xp, knobs, size = _backend.namespace(s), recipe.softmax, recipe.tiles.key
    row_max = xp.full(s.shape[:2], NEGATIVE_INFINITY, dtype=np.uint32)
    if s.shape[2]:
        row_max = softmax.largest(s, visible)
    e = xp.where(visible, softmax.natural_power(s, row_max[:, :, None], knobs), np.uint32(0))
    e = xp.pad(e, ((0, 0), (0, 0), (0, -s.shape[2] % size)))
    sums = xp.zeros((*s.shape[:2], softmax.lanes(knobs)), dtype=np.uint32)
    for first in range(0, e.shape[2], size):
        sums = softmax.carried(sums, e[:, :, first : first + size], knobs)
    return row_max, softmax.total(sums, knobs)
