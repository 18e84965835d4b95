"""The numerics of one tile of the forward: a key tile's step, and the end of a row.

Arrays have a leading tile axis. Floats are float32 bits. Only these functions are compiled, for a few fixed shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.attention import row_end, sides, softmax
from flamia_ref.attention.product import Accumulation
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.row_end import Row
from flamia_ref.attention.sides import Rows
from flamia_ref.attention.softmax import Factors


class State(NamedTuple):
    """What a query row carries from key tile to key tile: row maximum [tiles, rows], row sum [tiles, rows, lanes] and
    the accumulator of O [tiles, rows, channels], relative to that maximum."""

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
    return State(
        np.full((tiles, rows), softmax.start_max(recipe.softmax), dtype=np.uint32),
        np.zeros((tiles, rows, softmax.lanes(recipe.softmax)), dtype=np.uint32),
        np.zeros((tiles, rows, channels), dtype=np.uint32),
    )


class _Middle(NamedTuple):
    """What the softmax of a key tile leaves: the state with O rescaled, P, its codes and their side of the product."""

    state: State
    p: Array
    codes: sides.Pairs
    left: sides.Left
    base: Array


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
    begin = _zeros(middle.state.o) if partial else middle.state.o
    o = sides.over_rows(middle.left, v, begin, recipe.o)
    if recipe.o.guarded and guarded is not None:
        o = sides.over_guarded_keys(middle.p, v, o, recipe.o, guarded)
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
    p, row_max, rescale, base = softmax.probabilities(
        scores,
        pairs_visible(work.key_start, work.least, work.last, keys),
        state.row_max,
        work.first,
        keys == recipe.tiles.key,
        factors.c,
        recipe.softmax,
    )
    weights = weighted(p, fold, work.guarded, recipe, valued=recipe.softmax.row_sum_of == "codes")
    terms = p if weights.values is None else weights.values
    row_sum = softmax.summed(state.row_sum, rescale, terms, recipe.softmax)
    o = softmax.rescaled(state.o, rescale[:, :, None], recipe.softmax)
    return _Middle(State(row_max, row_sum, o), p, weights.codes, weights.left, base)


def weighted(
    p: Array, fold: Array | None, guarded: Array | None, recipe: Recipe, *, valued: bool
) -> Weights:
    """P [tiles, rows, keys] as O's product takes it. `valued`: with its values."""
    operand = recipe.o.left
    guarded = guarded if recipe.o.guarded else None
    fold = None if fold is None else fold[:, None, :]
    codes = sides.encoded_pairs(sides.without_guarded(p, guarded), operand, fold)
    values = None
    if valued:
        values = sides.pair_values(codes, operand, fold)
        if guarded is not None:
            values = sides.where_guarded(guarded, sides.rounded_bfloat16(p), values)
    return Weights(codes, sides.left_over_keys(codes, operand), values)


@_backend.jit
def _zeros(x: Array) -> Array:
    return _backend.namespace(x).zeros_like(x)


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


@_backend.jit(static=("recipe",))
def end(
    state: State,
    sink: Array | None,
    unseen: Array,
    v_nan: Array | None,
    factors: Factors,
    *,
    recipe: Recipe,
) -> Row:
    """The end of rows. `sink` [tiles]; `unseen` [tiles, rows]: rows that see no key here; `v_nan` [tiles, channels],
    where no tile is skipped: whether the row's document has a NaN code of V there, which is in the chain of every row,
    whether or not its key tile was computed."""
    xp = _backend.namespace(*state)
    o = state.o
    if v_nan is not None:
        o = xp.where(v_nan[:, None, :], _float32.NAN, o)
    return row_end.finished(
        o, state.row_max, state.row_sum, sink, unseen, factors.c, recipe.softmax
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
