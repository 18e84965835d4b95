"""The numerics of one tile of the forward: a key tile's step, and the end of a row.

Arrays have a leading tile axis. Floats are float32 bits. Only these functions are compiled, for a few fixed shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.attention import sides, softmax
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.sides import Rows


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
        last: [tiles, rows], the last key that each row sees, likewise, -1 for none.
        first: [tiles], whether it is the first key tile of the query tile.
        skipped: [tiles], whether the pair of tiles is left out.
        guarded: [tiles, rows / 32], the guarded key block of each query block, -1 for none; None without guards.
    """

    key_start: Array
    last: Array
    first: Array
    skipped: Array
    guarded: Array | None


class Stages(NamedTuple):
    """The traced values of one key tile, [tiles, rows, keys], and the scales in the shape of their blocks."""

    s: Array
    p: Array
    p_codes: Array
    p_scales: Array | None


class Ends(NamedTuple):
    """The results of finished rows: output codes, o before rounding, the log-sum-exp, and the row sum."""

    out: Array
    o: Array
    lse: Array
    row_sum: Array


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


def key_tile_step(
    state: State,
    q: Rows,
    k: Rows,
    v: Rows,
    work: Work,
    score_factor: Array,
    *,
    recipe: Recipe,
) -> tuple[State, Stages]:
    """From S to the accumulator of O, for one key tile of each query tile. `score_factor`: the recipe's c."""
    s = sides.over_channels(q, k, recipe.s, work.guarded if recipe.s.guarded else None)
    middle = _softmax(state, s, v.fold, work, score_factor, recipe=recipe)
    o = sides.over_rows(middle.left, v, middle.state.o, recipe.o)
    if recipe.o.guarded:
        o = sides.over_guarded_keys(middle.p, v, o, recipe.o, work.guarded)
    new = _kept(work.skipped, state, middle.state._replace(o=o))
    return new, Stages(s, middle.p, *middle.codes)


@_backend.jit(static=("recipe",))
def _softmax(
    state: State,
    s: Array,
    fold: Array | None,
    work: Work,
    score_factor: Array,
    *,
    recipe: Recipe,
) -> _Middle:
    keys = s.shape[2]
    p, row_max, rescale = softmax.probabilities(
        s,
        pairs_visible(work.key_start, work.last, keys),
        state.row_max,
        work.first,
        keys == recipe.tiles.key,
        score_factor,
        recipe.softmax,
    )
    row_sum = softmax.summed(state.row_sum, rescale, p, recipe.softmax)
    o = softmax.rescaled(state.o, rescale[:, :, None], recipe.softmax)
    operand = recipe.o.left
    guarded = work.guarded if recipe.o.guarded else None
    fold = None if fold is None else fold[:, None, :]
    codes = sides.encoded_pairs(sides.without_guarded(p, guarded), operand, fold)
    left = sides.left_over_keys(codes, operand)
    return _Middle(State(row_max, row_sum, o), p, codes, left)


@_backend.jit
def _kept(skipped: Array, old: State, new: State) -> State:
    """The old state where a pair of tiles is skipped."""
    xp = _backend.namespace(*new)
    wide = skipped[:, None, None]
    return State(
        xp.where(skipped[:, None], old.row_max, new.row_max),
        xp.where(wide, old.row_sum, new.row_sum),
        xp.where(wide, old.o, new.o),
    )


@_backend.jit(static=("recipe",))
def end(state: State, v_nan: Array | None, score_factor: Array, *, recipe: Recipe) -> Ends:
    """The normalisation, out and lse. `v_nan` [tiles, channels], where no tile is skipped: whether the row's document
    has a NaN code of V there, which is in the chain of every row, whether or not its key tile was computed."""
    xp = _backend.namespace(*state)
    row_sum = softmax.total(state.row_sum)
    dead = softmax.dead_rows(state.row_max, row_sum, recipe.softmax)
    inverse = softmax.inverse(row_sum, recipe.softmax)
    o = _float32.multiply(state.o, inverse[:, :, None])
    if v_nan is not None:
        o = xp.where(v_nan[:, None, :], _float32.NAN, o)
    o = xp.where(dead[:, :, None], np.uint32(0), o)
    lse = softmax.log_sum_exp(state.row_max, row_sum, score_factor, recipe.softmax)
    lse = xp.where(dead, softmax.NEGATIVE_INFINITY, lse)
    return Ends(sides.bfloat16(o), o, lse, row_sum)


def pairs_visible(key_start: Array, last: Array, keys: int) -> Array:
    """Whether each query row sees each key of a tile: bool [tiles, rows, keys]."""
    xp = _backend.namespace(key_start, last)
    place = key_start[:, None] + xp.arange(keys, dtype=np.int32)[None, :]
    return place[:, None, :] <= last[:, :, None]
