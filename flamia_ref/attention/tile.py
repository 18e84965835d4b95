"""The numerics of one tile of the forward: quantized rows, a key tile's step, and the end of a row.

Arrays have a leading tile axis. Floats are float32 bits. Only these functions are compiled, for a few fixed shapes.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic import mufu, special
from flamia_ref.arithmetic.products import chain
from flamia_ref.attention.recipe import Product, Recipe
from flamia_ref.formats import BF16, PRESETS, Overflow, encode_bits, quantize_bits

_UNIT = np.uint8(127)  # e8m0 code of 2^0
_NEGATIVE_INFINITY = _float32.INFINITY | _float32.SIGN
_LN_2 = np.uint32(0x3F317218)
_LANES = 8


class Rows(NamedTuple):
    """Codes [tiles, rows, channels] and one scale a row [tiles, rows]."""

    codes: Array
    scales: Array


class State(NamedTuple):
    """What a query row carries from key tile to key tile: row maximum, row sum [tiles, rows] and the accumulator of O
    [tiles, rows, channels], relative to that maximum."""

    row_max: Array
    row_sum: Array
    o: Array


class Stages(NamedTuple):
    """The traced values of one key tile, [tiles, rows, keys] and for the scales [tiles, rows, keys / 32]."""

    s: Array
    p: Array
    p_codes: Array
    p_scales: Array


class Ends(NamedTuple):
    """The results of finished rows: output codes, o before rounding, and the log-sum-exp."""

    out: Array
    o: Array
    lse: Array


def start(tiles: int, rows: int, channels: int) -> State:
    """The state before the first key tile, as numpy arrays."""
    return State(
        np.full((tiles, rows), _NEGATIVE_INFINITY, dtype=np.uint32),
        np.zeros((tiles, rows), dtype=np.uint32),
        np.zeros((tiles, rows, channels), dtype=np.uint32),
    )


@_backend.jit(static=("preset",))
def quantize_rows(x: Array, *, preset: str) -> tuple[Array, Array]:
    """Codes [rows, channels] and scales [rows] of float32 bits with one scale a row, by a preset."""
    codes, scales = quantize_bits(x, PRESETS[preset], (1, "all"))
    return codes, scales[:, 0]


@_backend.jit(static=("recipe",))
def key_tile_step(
    state: State,
    q: Rows,
    k: Rows,
    v: Rows,
    key_start: Array,
    last: Array,
    score_factor: Array,
    tables: mufu.Tables,
    *,
    recipe: Recipe,
) -> tuple[State, Stages]:
    """Steps 2 to 6 of the recipe for one key tile of each query tile.

    `key_start` [tiles]: the tile's first key; `last` [tiles, rows]: the last key each row sees, -1 for none; both
    counted from the document's start. `score_factor`: c of step 3. `tables`: of the special functions.
    """
    xp = _backend.namespace(*q, *k, *v, *state)
    s = _s(q, k, recipe.s, xp)
    place = key_start[:, None] + xp.arange(k.codes.shape[1], dtype=np.int32)[None, :]
    visible = place[:, None, :] <= last[:, :, None]

    # Step 3. x stays within [-1, 0] up to the rounding of t.
    t = _float32.multiply(s, score_factor)
    n = _float32.ceil(t)
    n = xp.where(n == _float32.INFINITY, _float32.NAN, n)
    n = xp.where(_float32.is_zero(n), np.uint32(0), n)  # an integer zero has no sign
    e = special.exp2_bits(
        _float32.fma(s, score_factor, _float32.negate(n)), tables, model=recipe.softmax.exp2
    )

    # Step 4. The subtractions are exact wherever the shift matters: integers close to each other.
    row_max = _float32.max_along(xp.where(visible, n, _NEGATIVE_INFINITY), axis=2)
    row_max = _float32.maximum(state.row_max, row_max)
    p = _float32.shift(e, _float32.to_int32(_float32.subtract(n, row_max[:, :, None])))
    p = xp.where(n == _NEGATIVE_INFINITY, np.uint32(0), p)
    p = xp.where(_float32.is_nan(row_max)[:, :, None], _float32.NAN, p)
    p = xp.where(visible, p, np.uint32(0))
    rescale = _float32.to_int32(_float32.subtract(state.row_max, row_max))
    row_sum = _row_sum(_float32.shift(state.row_sum, rescale), p)

    # Step 6.
    folded = _float32.shift(p, v.scales.astype(np.int32)[:, None, :] - np.int32(127))
    p_codes, p_scales = quantize_bits(folded, PRESETS[recipe.o.left.format], recipe.o.left.block)
    o = _float32.shift(state.o, rescale[:, :, None])
    o = _o(p_codes, p_scales, v, o, recipe.o, xp)
    return State(row_max, row_sum, o), Stages(s, p, p_codes, p_scales)


@_backend.jit(static=("recipe",))
def end(state: State, v_nan: Array, tables: mufu.Tables, *, recipe: Recipe) -> Ends:
    """Step 7 of the recipe. `v_nan` [tiles, channels]: whether the row's document has a NaN code of V there, which is
    in the chain of every row, whether or not its key tile was computed."""
    xp = _backend.namespace(*state)
    dead = state.row_max == _NEGATIVE_INFINITY
    inverse = special.reciprocal_bits(state.row_sum, tables, model=recipe.softmax.reciprocal)
    o = _float32.multiply(state.o, inverse[:, :, None])
    o = xp.where(v_nan[:, None, :], _float32.NAN, o)
    o = xp.where(dead[:, :, None], np.uint32(0), o)
    log2 = special.log2_bits(state.row_sum, tables, model=recipe.softmax.log2)
    lse = _float32.multiply(_float32.add(state.row_max, log2), _LN_2)
    lse = xp.where(dead, _NEGATIVE_INFINITY, lse)
    return Ends(encode_bits(o, BF16, overflow=Overflow.NATIVE), o, lse)


def _s(q: Rows, k: Rows, product: Product, xp: ModuleType) -> Array:
    """S [tiles, rows, keys]: channels contracted, each row's byte repeated for every block of them."""
    blocks = -(-q.codes.shape[2] // 32)
    lanes = (q.codes.shape[0], q.codes.shape[1], k.codes.shape[1])
    return chain(
        xp.moveaxis(q.codes, 2, 0)[:, :, :, None],
        xp.moveaxis(k.codes, 2, 0)[:, :, None, :],
        xp.broadcast_to(q.scales[None, :, :, None], (blocks, *q.scales.shape, 1)),
        xp.broadcast_to(
            k.scales[None, :, None, :], (blocks, k.scales.shape[0], 1, k.scales.shape[1])
        ),
        xp.zeros(lanes, dtype=np.uint32),
        instruction=product.instruction,
        a_format=PRESETS[product.left.format].element.name,
        b_format=PRESETS[product.right.format].element.name,
    )


def _o(
    p_codes: Array, p_scales: Array, v: Rows, o: Array, product: Product, xp: ModuleType
) -> Array:
    """The accumulator of O [tiles, rows, channels] after the keys of one tile; V has unit scales."""
    return chain(
        xp.moveaxis(p_codes, 2, 0)[:, :, :, None],
        xp.moveaxis(v.codes, 1, 0)[:, :, None, :],
        xp.moveaxis(p_scales, 2, 0)[:, :, :, None],
        xp.full((p_scales.shape[2], v.codes.shape[0], 1, 1), _UNIT, dtype=np.uint8),
        o,
        instruction=product.instruction,
        a_format=PRESETS[product.left.format].element.name,
        b_format=PRESETS[product.right.format].element.name,
    )


def _row_sum(row_sum: Array, p: Array) -> Array:
    """Step 5: `row_sum` [tiles, rows] plus the columns of `p` [tiles, rows, keys], by eight lanes."""
    xp = _backend.namespace(row_sum, p)
    tiles, rows, keys = p.shape
    columns = xp.moveaxis(p.reshape(tiles, rows, keys // _LANES, _LANES), 2, 0)
    lanes = xp.concatenate(
        [row_sum[:, :, None], xp.zeros((tiles, rows, _LANES - 1), dtype=np.uint32)], axis=2
    )
    lanes = _backend.scan(lambda sums, x: (_float32.add(sums, x[0]), None), lanes, (columns,))
    add, lane = _float32.add, [lanes[:, :, r] for r in range(_LANES)]
    even = add(add(lane[0], lane[2]), add(lane[4], lane[6]))
    return add(even, add(add(lane[1], lane[3]), add(lane[5], lane[7])))
