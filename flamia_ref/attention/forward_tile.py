"""The numerics of one tile of the forward: a key tile's step, and the end of a row.

Arrays have a leading tile axis. Floats are float32 bits. Only these functions are compiled, for a few fixed shapes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.attention import row_end, sides, softmax
from flamia_ref.attention.product import Accumulation, Operand, Scope
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.row_end import Row
from flamia_ref.attention.sides import Rows
from flamia_ref.attention.softmax import Factors
from flamia_ref.formats import PRESETS

_HIGH = Operand(format="bf16", scope=Scope.UNIT)

LARGEST_ROUNDED = {"e4m3": 464.0}
"""The largest number that rounds to a value of a format as if its exponents went on: halfway to the next, to even."""


class State(NamedTuple):
    """What a query row carries from key tile to key tile: row maximum [tiles, rows], row sum [tiles, rows, lanes] and
    the accumulator of O [tiles, rows, channels], relative to that maximum.

    Where delta takes O of high precision, its channels stand after those of O.
    """

    row_max: Array
    row_sum: Array
    o: Array


class Work(NamedTuple):
    """Which pairs of a key tile are computed.

    Attributes:
        key_start: [tiles], the tile's first key, counted from the document's start.
        least, last: [tiles, rows], the first and the last key that each row sees, likewise; 0 and -1 for none.
        first: [tiles], whether it is the first key tile that is worked on.
        skipped: [tiles], whether the pair of tiles is left out.
        guarded: [tiles, rows / 32, slots], the guarded key blocks of each query block, -1 for none; None without any.
    """

    key_start: Array
    least: Array
    last: Array
    first: Array
    skipped: Array
    guarded: Array | None


class Stages(NamedTuple):
    """The traced values of one key tile, [tiles, rows, keys], the scales in the shape of their blocks, and what P is
    relative to, [tiles, rows]."""

    s: Array
    p: Array
    p_codes: Array
    p_scales: Array | None
    base: Array


class Weights(NamedTuple):
    """P as O's product takes it: its codes, their side of the product, and their values without a scale that was taken
    over, where something counts them."""

    codes: sides.Pairs
    left: sides.Left
    values: Array | None


def start(tiles: int, rows: int, channels: int, recipe: Recipe) -> State:
    """The state before the first key tile, as numpy arrays."""
    channels *= 2 if has_high_precision(recipe) else 1
    return State(
        np.full((tiles, rows), softmax.start_max(recipe.softmax), dtype=np.uint32),
        np.zeros((tiles, rows, softmax.lanes(recipe.softmax)), dtype=np.uint32),
        np.zeros((tiles, rows, channels), dtype=np.uint32),
    )


@_backend.jit
def with_sink(state: State, sink: Array) -> State:
    """The state before the first key tile of rows that begin with a sink [tiles]: it is the maximum, 1 the sum."""
    xp = _backend.namespace(sink, *state)
    first = np.arange(state.row_sum.shape[2]) == 0
    one = xp.where(first, _float32.ONE, np.uint32(0))
    return State(
        xp.broadcast_to(sink[:, None], state.row_max.shape),
        xp.broadcast_to(one, state.row_sum.shape),
        state.o,
    )


def has_high_precision(recipe: Recipe) -> bool:
    """Whether the forward also makes an O of P in bfloat16, for delta."""
    return recipe.has_backward and recipe.backward.gradient.delta_source == "high_precision_out"


class _Middle(NamedTuple):
    """What the softmax of a key tile leaves: the state with O rescaled, P, its codes and their side of the product;
    the side of P in bfloat16, where O is made of that too; the factor of O, where a fused multiply-add rescales it."""

    state: State
    p: Array
    codes: sides.Pairs
    left: sides.Left
    base: Array
    high: sides.Left | None
    factor: Array | None


def key_tile_step(
    state: State,
    q: Rows,
    k: Rows,
    v: Rows,
    work: Work,
    factors: Factors,
    *,
    recipe: Recipe,
) -> tuple[State, Stages]:
    """From S to the accumulator of O, for one key tile of each query tile."""
    guarded = work.guarded
    s = sides.over_channels(q, k, recipe.s, guarded if recipe.s.guarded else None)
    middle = _softmax(state, s, v.fold, work, factors, recipe=recipe)
    partial = recipe.o.accumulation is Accumulation.FLOAT32_PARTIALS
    begin = middle.state.o
    if recipe.o.accumulation is not Accumulation.CHAINED:
        begin = _zeros(begin)
    if middle.high is None:
        o = sides.over_rows(middle.left, v, begin, recipe.o)
    else:
        begin, high = halves(begin)
        o = sides.over_rows(middle.left, v, begin, recipe.o)
        high = sides.over_rows(middle.high, v, high, replace(recipe.o, left=_HIGH))
        o = _side_by_side(o, high)
    if recipe.o.guarded and guarded is not None:
        o = sides.over_guarded_keys(middle.p, v, o, recipe.o, guarded)
    if middle.factor is not None:
        o = _fused(middle.state.o, middle.factor, o, work.first)
    new = _kept(work.skipped, state, middle.state, o, partial=partial)
    return new, Stages(s, middle.p, *middle.codes, middle.base)


@_backend.jit(static=("recipe",))
def _softmax(
    state: State,
    s: Array,
    fold: Array | None,
    work: Work,
    factors: Factors,
    *,
    recipe: Recipe,
) -> _Middle:
    keys = s.shape[2]
    scores, _ = softmax.scores(s, factors, recipe.softmax)
    visible = pairs_visible(work.key_start, work.least, work.last, keys)
    p, row_max, rescale, base = softmax.probabilities(
        scores,
        visible,
        state.row_max,
        work.first,
        keys == recipe.tiles.key,
        factors.c,
        recipe.softmax,
    )
    divisors = block_divisors(scores, visible, base, factors.c, recipe)
    valued = recipe.softmax.row_sum_of == "codes"
    weights = weighted(p, fold, work.guarded, recipe, valued=valued, divisors=divisors)
    terms = p if weights.values is None else weights.values
    row_sum = softmax.summed(state.row_sum, rescale, terms, recipe.softmax)
    fused = recipe.o.accumulation is Accumulation.FUSED_PARTIALS
    o = state.o if fused else softmax.rescaled(state.o, rescale[:, :, None], recipe.softmax)
    high = None
    if has_high_precision(recipe):
        high = sides.left_over_keys(sides.encoded_pairs(p, _HIGH, None), _HIGH)
    new = State(row_max, row_sum, o)
    factor = rescale if fused else None
    return _Middle(new, p, weights.codes, weights.left, base, high, factor)


def block_divisors(
    scores: Array, visible: Array, base: Array, c: Array, recipe: Recipe
) -> Array | None:
    """What P is divided by in each block of keys [tiles, rows, blocks], where that comes from the scores."""
    operand = recipe.o.left
    if operand.scope is not Scope.LARGEST_SCORE or operand.block is None:
        return None
    largest = softmax.largest_scores(scores, visible, int(operand.block[1]))
    most = float(PRESETS[operand.format].element.max)
    return softmax.divisors(largest, base, c, recipe.softmax, most)


def weighted(
    p: Array,
    fold: Array | None,
    guarded: Array | None,
    recipe: Recipe,
    *,
    valued: bool,
    divisors: Array | None = None,
) -> Weights:
    """P [tiles, rows, keys] as O's product takes it. `valued`: with its values. `divisors`: of `block_divisors`."""
    operand = recipe.o.left
    guarded = guarded if recipe.o.guarded else None
    fold = None if fold is None else fold[:, None, :]
    if divisors is None:
        taken = within_range(in_units(sides.without_guarded(p, guarded), recipe), recipe)
        codes = sides.encoded_pairs(taken, operand, fold)
    else:
        codes = sides.divided_pairs(p, divisors, operand, recipe.softmax.reciprocal)
    values = None
    if valued:
        values = sides.pair_values(codes, operand, fold)
        if guarded is not None:
            values = sides.where_guarded(guarded, sides.rounded_bfloat16(p), values)
    return Weights(codes, sides.left_over_keys(codes, operand), values)


def in_units(p: Array, recipe: Recipe) -> Array:
    """P in the units in which it is encoded for O."""
    if recipe.softmax.p_scaling == "exponent":
        return p
    return sides.in_static_units(p, recipe.o.left)


def within_range(p: Array, recipe: Recipe) -> Array:
    """P in those units, with what the recipe makes of what its element does not hold."""
    if recipe.softmax.p_overflow != "zero":
        return p
    xp = _backend.namespace(p)
    limit = np.uint32(np.float32(LARGEST_ROUNDED[recipe.o.left.format]).view(np.uint32))
    return xp.where(_float32.less(limit, p), np.uint32(0), p)


@_backend.jit
def halves(o: Array) -> tuple[Array, Array]:
    """O, and that of high precision, from both [tiles, rows, channels] side by side."""
    channels = o.shape[2] // 2
    return o[:, :, :channels], o[:, :, channels:]


@_backend.jit
def _side_by_side(o: Array, high: Array) -> Array:
    return _backend.namespace(o, high).concatenate([o, high], axis=2)


@_backend.jit
def _zeros(x: Array) -> Array:
    return _backend.namespace(x).zeros_like(x)


@_backend.jit
def _fused(o: Array, factor: Array, partial: Array, first: Array) -> Array:
    """The accumulator, rescaled as the product of a key tile is added; that product itself after a row's first."""
    xp = _backend.namespace(o, factor, partial)
    factor = xp.broadcast_to(factor[:, :, None], o.shape)
    return xp.where(first[:, None, None], partial, _float32.fma(o, factor, partial))


@_backend.jit(static=("partial",))
def _kept(skipped: Array, old: State, new: State, o: Array, *, partial: bool) -> State:
    """The new state with the accumulator `o`, or with `o` added to it; the old one where a pair of tiles is skipped."""
    xp = _backend.namespace(*new)
    wide = skipped[:, None, None]
    o = _float32.add(new.o, o) if partial else o
    return State(
        xp.where(skipped[:, None], old.row_max, new.row_max),
        xp.where(wide, old.row_sum, new.row_sum),
        xp.where(wide, old.o, o),
    )


@_backend.jit
def descaled(factors: Factors, of_q: Array | None, of_k: Array | None) -> Factors:
    """The factors of tiles whose q or k have a descale [tiles]: it goes into what S is multiplied by first."""
    given = [one for one in (of_q, of_k) if one is not None]
    if not given:
        return factors
    both = reduce(_float32.multiply, given)
    if factors.before is None:
        return factors._replace(c=_float32.multiply(both, factors.c))
    return factors._replace(before=_float32.multiply(both, factors.before))


@_backend.jit(static=("recipe",))
def end(
    state: State,
    sink: Array | None,
    unseen: Array,
    v_nan: Array | None,
    factors: Factors,
    descale: Array | None = None,
    *,
    recipe: Recipe,
) -> Row:
    """The end of rows. `sink` [tiles]; `unseen` [tiles, rows]: rows that see no key here; `v_nan` [tiles, channels],
    where no tile is skipped: whether the row's document has a NaN code of V there, which is in the chain of every row,
    whether or not its key tile was computed; `descale` [tiles]: that of V, where it has one."""
    xp = _backend.namespace(*state)
    o = state.o
    if v_nan is not None:
        o = xp.where(v_nan[:, None, :], _float32.NAN, o)
    return row_end.finished(
        o,
        state.row_max,
        state.row_sum,
        sink,
        unseen,
        factors.c,
        recipe.softmax,
        descale,
        factors.natural,
    )


@_backend.jit(static=("recipe",))
def combined(o: Array, lse: Array, sink: Array | None, *, recipe: Recipe) -> tuple[Array, Array]:
    """O and lse of rows from those of the splits of their keys."""
    return row_end.combined(o, lse, sink, recipe.softmax)


@_backend.jit
def output(o: Array) -> Array:
    """The output codes of O."""
    return sides.bfloat16(o)


def pairs_visible(key_start: Array, least: Array, last: Array, keys: int) -> Array:
    """Whether each query row sees each key of a tile: bool [tiles, rows, keys]."""
    xp = _backend.namespace(key_start, last)
    place = key_start[:, None] + xp.arange(keys, dtype=np.int32)[None, :]
    place = place[:, None, :]
    return (place >= least[:, :, None]) & (place <= last[:, :, None])
