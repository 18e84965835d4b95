"""The numerics of the softmax on tiles: bases, exponentials, row sums, the end of a row, by a recipe's data.

Floats are float32 bits. Arrays have axes [tiles, rows] and, for pairs, [tiles, rows, keys].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic import reductions, special
from flamia_ref.arithmetic.reductions import REDUCTIONS
from flamia_ref.attention.knobs import Softmax

NEGATIVE_INFINITY = _float32.INFINITY | _float32.SIGN
LOWEST = np.uint32(0xFF7FFFFF)  # -3.4028235e38, which stands for a masked score
LOG2_E = np.uint32(0x3FB8AA3B)
LN_2 = np.uint32(0x3F317218)
_SMALLEST_SUM = np.uint32(0x0DA24260)  # fl(1e-30)
_ROW_SUMS = {
    "eight_lanes": REDUCTIONS["fa4.row_sum"],
    "two_lanes": REDUCTIONS["cudnn.mxfp8.row_sum"],
}


class Probabilities(NamedTuple):
    """P [tiles, rows, keys], the row maximum [tiles, rows] that it is relative to, and what brings sums relative to the
    old maximum to the new one: an int32 exponent for an integer base, else a float32 factor."""

    p: Array
    row_max: Array
    rescale: Array


def start_max(softmax: Softmax) -> np.uint32:
    """The row maximum before the first key tile."""
    return LOWEST if softmax.base == "scaled_max" else NEGATIVE_INFINITY


def lanes(softmax: Softmax) -> int:
    """Partial sums that a row carries from key tile to key tile."""
    return 2 if softmax.row_sum == "two_lanes" else 1


def probabilities(
    s: Array,
    visible: Array,
    row_max: Array,
    first: Array,
    whole: bool,
    score_factor: Array,
    softmax: Softmax,
) -> Probabilities:
    """P of one key tile. `first` [tiles]: whether it is the row's first; `whole`: whether the tile is as wide as the
    recipe's, so that it holds no column past the document's end where none is masked."""
    match softmax.base:
        case "integer_max":
            return _integer_max(s, visible, row_max, score_factor, softmax)
        case "raw_max":
            return _raw_max(s, visible, row_max, first, whole, score_factor, softmax)
        case "scaled_max":
            return _scaled_max(s, visible, row_max, whole, score_factor, softmax)


def split(s: Array, score_factor: Array, softmax: Softmax) -> tuple[Array, Array]:
    """n = ceil(t) and E = 2^(t - n) with t = S c: float32 bits, n an integer, -inf, or NaN for t = +inf or NaN."""
    xp = _backend.namespace(s)
    t = _float32.multiply(s, score_factor)
    n = _float32.ceil(t)
    n = xp.where(n == _float32.INFINITY, _float32.NAN, n)
    n = xp.where(_float32.is_zero(n), np.uint32(0), n)  # an integer zero has no sign
    x = _float32.fma(s, score_factor, _float32.negate(n))  # in [-1, 0] up to the rounding of t
    return n, special.exp2_bits(x, model=softmax.exp2)


def raised(e: Array, n: Array, base: Array, offset: int = 0) -> Array:
    """E 2^(n - base + offset): 0 where n is -inf, NaN where n or base is.

    n - base is exact wherever the shift matters; base - offset need not be.
    """
    xp = _backend.namespace(e, n, base)
    difference = _float32.to_int32(_float32.subtract(n, base))
    p = _float32.shift(e, difference + np.int32(offset))
    p = xp.where(n == NEGATIVE_INFINITY, np.uint32(0), p)
    return xp.where(_float32.is_nan(n) | _float32.is_nan(base), _float32.NAN, p)


def _integer_max(
    s: Array,
    visible: Array,
    row_max: Array,
    score_factor: Array,
    softmax: Softmax,
) -> Probabilities:
    xp = _backend.namespace(s, row_max)
    n, e = split(s, score_factor, softmax)
    largest = _float32.max_along(xp.where(visible, n, NEGATIVE_INFINITY), axis=2)
    new = _float32.maximum(row_max, largest)
    p = xp.where(visible, raised(e, n, new[:, :, None], softmax.p_offset), np.uint32(0))
    rescale = _float32.to_int32(_float32.subtract(row_max, new))
    return Probabilities(p, new, rescale)


def _raw_max(
    s: Array,
    visible: Array,
    row_max: Array,
    first: Array,
    whole: bool,
    score_factor: Array,
    softmax: Softmax,
) -> Probabilities:
    xp = _backend.namespace(s, row_max)
    first = first[:, None]
    largest = _float32.maximum_number_along(xp.where(visible, s, NEGATIVE_INFINITY), axis=2)
    if not whole:
        largest = _float32.maximum_number(largest, NEGATIVE_INFINITY)
    new = xp.where(first, largest, _float32.maximum_number(row_max, largest))
    base = xp.where(new == NEGATIVE_INFINITY, np.uint32(0), new)
    distance = _float32.multiply(_float32.subtract(row_max, base), score_factor)
    rescale = special.exp2_bits(distance, model=softmax.exp2)
    limit = _float32.negate(_integer(softmax.rescale_threshold))
    near = ~(_float32.less(distance, limit) | _float32.is_nan(distance))
    kept = near & ~first & (softmax.rescale_threshold > 0)
    new, base = (xp.where(kept, row_max, x) for x in (new, base))
    rescale = xp.where(kept, _float32.ONE, xp.where(first, np.uint32(0), rescale))
    scaled = _float32.multiply(base, score_factor)
    offset = _float32.subtract(_integer(softmax.p_offset), scaled)
    x = _float32.fma(s, score_factor, offset[:, :, None])
    return Probabilities(xp.where(visible, _columns(x, softmax), np.uint32(0)), new, rescale)


def _scaled_max(
    s: Array,
    visible: Array,
    row_max: Array,
    whole: bool,
    score_factor: Array,
    softmax: Softmax,
) -> Probabilities:
    xp = _backend.namespace(s, row_max)
    candidates = _float32.flush(xp.where(visible, s, LOWEST))  # the kernel's maximum flushes
    largest = _float32.maximum_number_along(candidates, axis=2)
    if not whole:
        largest = _float32.maximum_number(largest, LOWEST)
    largest = _float32.maximum_number(_float32.multiply(largest, score_factor), LOWEST)
    first = row_max == LOWEST
    excess = _float32.subtract(largest, row_max)
    passed = _float32.less(_integer(softmax.rescale_threshold), excess)
    new = xp.where(first | passed, largest, row_max)
    distance = xp.where(first, LOWEST, _float32.subtract(row_max, new))
    rescale = special.exp2_bits(distance, model=softmax.exp2)
    base = _float32.subtract(new, _integer(softmax.p_offset))
    x = _float32.fma(s, score_factor, _float32.negate(base)[:, :, None])
    return Probabilities(xp.where(visible, _columns(x, softmax), np.uint32(0)), new, rescale)


def _columns(x: Array, softmax: Softmax) -> Array:
    """2^x, by the other model in the emulated columns."""
    e = special.exp2_bits(x, model=softmax.exp2)
    emulated = softmax.emulated
    if emulated is None:
        return e
    xp = _backend.namespace(x)
    column = np.arange(x.shape[2])
    chosen = (column >= emulated.first) & (column < emulated.stop)
    chosen &= column % emulated.period >= emulated.period - emulated.count
    (columns,) = np.nonzero(chosen)
    if not len(columns):
        return e
    # Computed where it is wanted, then spread: each column takes the next of them.
    other = special.exp2_bits(x[:, :, columns], model=emulated.exp2)
    spread = np.minimum(np.cumsum(chosen) - chosen, len(columns) - 1)
    return xp.where(xp.asarray(chosen), other[:, :, spread], e)


def rescaled(x: Array, rescale: Array, softmax: Softmax) -> Array:
    """A sum brought to the new maximum; `rescale` broadcasts against it."""
    if softmax.base == "integer_max":
        return _float32.shift(x, rescale)
    return _float32.multiply(x, rescale)


def summed(row_sum: Array, rescale: Array, p: Array, softmax: Softmax) -> Array:
    """The row sum [tiles, rows, lanes] after the columns of `p`."""
    order = _ROW_SUMS[softmax.row_sum]
    if softmax.row_sum == "eight_lanes":
        start = rescaled(row_sum[:, :, 0], rescale, softmax)
        return reductions.reduce(p, order, 2, start)[:, :, None]
    new = reductions.partial_sums(p, order, 2)
    if softmax.base == "integer_max":
        return _float32.add(_float32.shift(row_sum, rescale[:, :, None]), new)
    return _float32.fma(row_sum, rescale[:, :, None], new)


def total(row_sum: Array) -> Array:
    """The row sum [tiles, rows] from its lanes."""
    if row_sum.shape[2] == 1:
        return row_sum[:, :, 0]
    return reductions.combine(row_sum, _ROW_SUMS["two_lanes"])


def dead_rows(row_max: Array, row_sum: Array, softmax: Softmax) -> Array:
    """Rows [tiles, rows] that see nothing, from their maximum and their sum: out is 0 and lse -inf."""
    match softmax.base:
        case "integer_max":
            return row_max == NEGATIVE_INFINITY
        case "raw_max":  # a sum of zero is normalised by one instead
            return row_max != row_max
        case "scaled_max":
            return _float32.is_zero(row_sum) | _float32.less(row_sum, np.uint32(0))


def inverse(row_sum: Array, softmax: Softmax) -> Array:
    """The factor that normalises O."""
    xp = _backend.namespace(row_sum)
    if softmax.normalisation == "division":
        return _float32.divide(
            xp.full(row_sum.shape, _float32.ONE, dtype=np.uint32),
            _float32.maximum_number(row_sum, _SMALLEST_SUM),
        )
    if softmax.normalisation == "zero_safe_reciprocal":
        row_sum = xp.where(_no_sum(row_sum), _float32.ONE, row_sum)
    return special.reciprocal_bits(row_sum, model=softmax.reciprocal)


def log_sum_exp(row_max: Array, row_sum: Array, score_factor: Array, softmax: Softmax) -> Array:
    """lse of rows that are not dead."""
    xp = _backend.namespace(row_max, row_sum)
    log2 = special.log2_bits(row_sum, model=softmax.log2)
    offset = _integer(softmax.p_offset)
    match softmax.lse:
        case "log2_sum":
            base = _float32.subtract(row_max, offset) if softmax.p_offset else row_max
            return _float32.multiply(_float32.add(base, log2), LN_2)
        case "log2_fma":
            log2 = _float32.subtract(log2, offset) if softmax.p_offset else log2
            lse = _float32.multiply(_float32.fma(row_max, score_factor, log2), LN_2)
            return xp.where(_no_sum(row_sum), NEGATIVE_INFINITY, lse)
        case "natural_fma":
            lse = _float32.fma(row_max, LN_2, _float32.multiply(log2, LN_2))
            return _float32.subtract(lse, _float32.multiply(offset, LN_2))


def _no_sum(row_sum: Array) -> Array:
    return _float32.is_zero(row_sum) | _float32.is_nan(row_sum)


def _integer(value: int) -> np.uint32:
    """float32 bits of a small integer."""
    return np.uint32(np.float32(value).view(np.uint32))
