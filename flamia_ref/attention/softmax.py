"""The numerics of the softmax on tiles: scores, bases, exponentials, row sums, by a recipe's data.

Floats are float32 bits. Arrays have axes [tiles, rows] and, for pairs, [tiles, rows, keys].
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic import reductions, special
from flamia_ref.arithmetic.reductions import REDUCTIONS
from flamia_ref.attention import sides
from flamia_ref.attention.knobs import Softmax

NEGATIVE_INFINITY = _float32.INFINITY | _float32.SIGN
LOWEST = np.uint32(0xFF7FFFFF)  # -3.4028235e38, which stands for a masked score
LOG2_E = np.uint32(0x3FB8AA3B)
LN_2 = np.uint32(0x3F317218)
_HALF = np.uint32(0x3F000000)
_ROW_SUMS = {
    "eight_lanes": REDUCTIONS["fa4.row_sum"],
    "two_lanes": REDUCTIONS["cudnn.mxfp8.row_sum"],
    "ascending": REDUCTIONS["ascending"],
    "by_tiles": REDUCTIONS["ascending"],
    "octets": REDUCTIONS["sage3.row_sum"],
    "quads": REDUCTIONS["fa3.row_sum"],
    "halved_lanes": REDUCTIONS["fa4.row_sum"],
}
FUSED_LANES = ("octets", "quads")
"""The row sums whose lanes are rescaled as the first term of a tile is added."""

BUTTERFLY = (1, 4, 2, 16, 8)
"""The distances at which the columns of a tile of 32 are added in bfloat16."""


class Factors(NamedTuple):
    """The constants between S and the exponent, each one for all tiles, or [tiles].

    Attributes:
        c: of the scores, to log2 units.
        before: what S is multiplied by first; None where nothing is.
        cap: of a soft cap, what tanh is multiplied by; None without.
        natural: of the scores, to natural units, where lse takes that; None elsewhere.
    """

    c: Array
    before: Array | None = None
    cap: Array | None = None
    natural: Array | None = None


class Probabilities(NamedTuple):
    """P [tiles, rows, keys], the row maximum [tiles, rows], what brings sums relative to the old maximum to the new
    one, an int32 exponent for an integer base, else a float32 factor, and what P is relative to."""

    p: Array
    row_max: Array
    rescale: Array
    base: Array


class Split(NamedTuple):
    """n = ceil(t), an integer, -inf, or NaN for t = +inf or NaN, and E = 2^(t - n) where it is wanted."""

    n: Array
    e: Array | None


def start_max(softmax: Softmax) -> np.uint32:
    """The row maximum before the first key tile."""
    return LOWEST if softmax.base == "scaled_max" else NEGATIVE_INFINITY


def lanes(softmax: Softmax) -> int:
    """Partial sums that a row carries from key tile to key tile."""
    return {"two_lanes": 2, "octets": 4, "quads": 4}.get(softmax.row_sum, 1)


def scores(s: Array, factors: Factors, softmax: Softmax) -> tuple[Array, Array | None]:
    """The scores that c multiplies, and, with a soft cap, the hyperbolic tangent that they are made of."""
    if factors.before is None:
        return s, None
    s = _float32.multiply(s, against(factors.before, s))
    if factors.cap is None:
        return s, None
    tanh = special.tanh_bits(s, model=softmax.tanh)
    return _float32.multiply(factors.cap, tanh), tanh


def probabilities(
    s: Array,
    visible: Array,
    row_max: Array,
    first: Array,
    whole: bool,
    c: Array,
    softmax: Softmax,
) -> Probabilities:
    """P of one key tile from scores. `first` [tiles]: whether it is the row's first; `whole`: whether the tile is as
    wide as the recipe's, so that it holds no column past the document's end where none is masked."""
    if softmax.mask_value is not None:
        s, visible = _with_mask_value(s, visible, softmax.mask_value)
    parts = split(s, c, softmax, emulated=True) if softmax.base == "integer_max" else None
    n = None if parts is None else parts.n
    new = advanced(s, visible, row_max, first, whole, c, softmax, n)
    base = base_of(new, softmax)
    p = _relative(s, visible, base, parts, c, softmax)
    return Probabilities(p, new, rescale(row_max, new, first, c, softmax), base)


def again(s: Array, visible: Array, base: Array, c: Array, softmax: Softmax) -> Array:
    """P as `probabilities` gave it relative to `base`."""
    if softmax.mask_value is not None:
        s, visible = _with_mask_value(s, visible, softmax.mask_value)
    parts = split(s, c, softmax, emulated=True) if softmax.base == "integer_max" else None
    return _relative(s, visible, base, parts, c, softmax)


def split(
    s: Array, c: Array, softmax: Softmax, *, emulated: bool = False, wanted: bool = True
) -> Split:
    """n, and E where the recipe splits the exponent, if `wanted`; in the forward some columns are emulated."""
    xp = _backend.namespace(s)
    t = _float32.multiply(s, against(c, s))
    n = _float32.ceil(t)
    n = xp.where(n == _float32.INFINITY, _float32.NAN, n)
    n = xp.where(_float32.is_zero(n), np.uint32(0), n)  # an integer zero has no sign
    if softmax.exp2_argument != "split" or not wanted:
        return Split(n, None)
    x = _float32.fma(s, against(c, s), _float32.negate(n))  # in [-1, 0] up to the rounding of t
    e = _columns(x, softmax) if emulated else special.exp2_bits(x, model=softmax.exp2)
    return Split(n, e)


def raised(e: Array, n: Array, base: Array, offset: int = 0) -> Array:
    """E 2^(n - base + offset): 0 where n is -inf, NaN where n or base is.

    n - base is exact wherever the shift matters; base - offset need not be.
    """
    xp = _backend.namespace(e, n, base)
    difference = _float32.to_int32(_float32.subtract(n, base))
    p = _float32.shift(e, difference + np.int32(offset))
    p = xp.where(n == NEGATIVE_INFINITY, np.uint32(0), p)
    return xp.where(_float32.is_nan(n) | _float32.is_nan(base), _float32.NAN, p)


def exponent(s: Array, c: Array, offset: Array, softmax: Softmax) -> Array:
    """S c + offset, rounded once or twice."""
    if softmax.exp2_argument == "unfused":
        return _float32.add(_float32.multiply(s, against(c, s)), offset)
    return _float32.fma(s, against(c, s), offset)


def in_log2_units(base: Array, c: Array, softmax: Softmax) -> Array:
    """What P is relative to, in log2 units."""
    return _float32.multiply(base, against(c, base)) if softmax.base == "raw_max" else base


def against(c: Array, x: Array) -> Array:
    """A constant, or one of each tile, as it broadcasts against `x` [tiles, ...]."""
    return c.reshape(c.shape + (1,) * (x.ndim - 1)) if c.ndim else c


def _with_mask_value(s: Array, visible: Array, value: float) -> tuple[Array, Array]:
    """Scores with a masked pair's, and that nothing is selected out any more."""
    xp = _backend.namespace(s, visible)
    return xp.where(visible, s, np.uint32(np.float32(value).view(np.uint32))), xp.ones_like(visible)


def _relative(
    s: Array, visible: Array, base: Array, parts: Split | None, c: Array, softmax: Softmax
) -> Array:
    """P relative to a base [tiles, rows]."""
    xp = _backend.namespace(s, base)
    if parts is not None and parts.e is not None:
        p = raised(parts.e, parts.n, base[:, :, None], softmax.p_offset)
    elif softmax.base == "natural_max":
        p = natural_power(s, base[:, :, None], softmax)
    else:
        offset = offset_of(base, c, softmax)
        p = _columns(exponent(s, c, offset[:, :, None], softmax), softmax)
        if parts is not None:
            p = xp.where(parts.n == NEGATIVE_INFINITY, np.uint32(0), p)
    return xp.where(visible, without_nan(p, softmax), np.uint32(0))


def offset_of(base: Array, c: Array, softmax: Softmax) -> Array:
    """What S c is added to in the exponent of P relative to a base [tiles, rows]."""
    offset = integer(softmax.p_offset)
    if softmax.base != "raw_max":
        return _float32.negate(_float32.subtract(base, offset))
    if softmax.p_scale == 1 and softmax.exp2_argument != "fused_base":
        return _float32.subtract(offset, _float32.multiply(base, against(c, base)))
    xp = _backend.namespace(base)
    of_p = offset if softmax.p_scale == 1 else log2_of(softmax.p_scale)
    lift = xp.full(base.shape, _float32.negate(of_p), dtype=np.uint32)
    return _float32.negate(_float32.fma(base, xp.broadcast_to(against(c, base), base.shape), lift))


def largest_scores(s: Array, visible: Array, columns: int) -> Array:
    """The largest visible score of each so many keys [tiles, rows, blocks], a NaN ignored; -inf where none is."""
    xp = _backend.namespace(s)
    seen = xp.where(visible, s, NEGATIVE_INFINITY)
    blocks = seen.reshape((*s.shape[:2], s.shape[2] // columns, columns))
    largest = _float32.maximum_number_along(blocks, axis=3)
    return _float32.maximum_number(largest, xp.full(largest.shape, NEGATIVE_INFINITY, np.uint32))


def divisors(largest: Array, base: Array, c: Array, softmax: Softmax, most: float) -> Array:
    """The exponentials of the largest scores of blocks, over the largest element `most`: [tiles, rows, blocks]."""
    x = exponent(largest, c, offset_of(base, c, softmax)[:, :, None], softmax)
    lift = _backend.namespace(x).full(x.shape, _float32.negate(log2_of(most)), dtype=np.uint32)
    return special.exp2_bits(_float32.add(x, lift), model=softmax.exp2)


def log2_of(value: float) -> np.uint32:
    """float32 bits of a logarithm, rounded from float64."""
    return np.uint32(np.float32(math.log2(value)).view(np.uint32))


def advanced(
    s: Array,
    visible: Array,
    row_max: Array,
    first: Array,
    whole: bool,
    c: Array,
    softmax: Softmax,
    n: Array | None = None,
) -> Array:
    """The row maximum after a key tile. `n`: that of `split`, where the caller has it; the rest is as in
    `probabilities`."""
    match softmax.base:
        case "integer_max":
            n = split(s, c, softmax, wanted=False).n if n is None else n
            return _integer_max(n, visible, row_max, softmax)
        case "raw_max":
            return _raw_max(s, visible, row_max, first, whole, c, softmax)
        case "scaled_max":
            return _scaled_max(s, visible, row_max, whole, c, softmax)
        case "natural_max":
            return _natural_max(s, visible, row_max, softmax)


def base_of(row_max: Array, softmax: Softmax) -> Array:
    """What P is relative to at a row maximum."""
    if softmax.base != "raw_max":
        return row_max
    return _backend.namespace(row_max).where(row_max == NEGATIVE_INFINITY, np.uint32(0), row_max)


def rescale(row_max: Array, new: Array, first: Array, c: Array, softmax: Softmax) -> Array:
    """What brings sums relative to the maximum `row_max` to `new`: an int32 exponent for an integer base, else a
    float32 factor. `first` [tiles] as in `probabilities`."""
    xp = _backend.namespace(row_max, new)
    match softmax.base:
        case "integer_max":
            return _float32.to_int32(_float32.subtract(row_max, new))
        case "raw_max":
            distance = _float32.subtract(row_max, base_of(new, softmax))
            distance = _float32.multiply(distance, against(c, distance))
            factor = special.exp2_bits(distance, model=softmax.exp2)
            if softmax.rescale_threshold:
                finite = (row_max & _float32.MAGNITUDE) < _float32.INFINITY
                factor = xp.where((new == row_max) & finite, _float32.ONE, factor)
            return xp.where(first[:, None], np.uint32(0), factor)
        case "scaled_max":
            distance = xp.where(row_max == LOWEST, LOWEST, _float32.subtract(row_max, new))
            return special.exp2_bits(distance, model=softmax.exp2)
        case "natural_max":
            distance = _float32.subtract(row_max, new)
            factor = special.exp_bits(distance, model=softmax.exp2)
            same = (row_max == new) | _float32.is_nan(distance)
            return xp.where(same, _float32.ONE, factor)


def _integer_max(n: Array, visible: Array, row_max: Array, softmax: Softmax) -> Array:
    xp = _backend.namespace(n, row_max)
    largest = _float32.max_along(xp.where(visible, n, NEGATIVE_INFINITY), axis=2)
    new = _float32.maximum(row_max, largest)
    if softmax.rescale_threshold:
        excess = _float32.subtract(largest, row_max)
        near = ~(_float32.less(integer(softmax.rescale_threshold), excess))
        kept = near & ~_float32.is_nan(excess) & (row_max != NEGATIVE_INFINITY)
        new = xp.where(kept, row_max, new)
    return new


def _raw_max(
    s: Array,
    visible: Array,
    row_max: Array,
    first: Array,
    whole: bool,
    c: Array,
    softmax: Softmax,
) -> Array:
    xp = _backend.namespace(s, row_max)
    first = first[:, None]
    largest = _float32.maximum_number_along(xp.where(visible, s, NEGATIVE_INFINITY), axis=2)
    if not whole:
        largest = _float32.maximum_number(largest, NEGATIVE_INFINITY)
    new = xp.where(first, largest, _float32.maximum_number(row_max, largest))
    if not softmax.rescale_threshold:
        return new
    distance = _float32.subtract(row_max, base_of(new, softmax))
    distance = _float32.multiply(distance, against(c, distance))
    limit = _float32.negate(integer(softmax.rescale_threshold))
    near = ~(_float32.less(distance, limit) | _float32.is_nan(distance))
    return xp.where(near & ~first, row_max, new)


def _scaled_max(
    s: Array, visible: Array, row_max: Array, whole: bool, c: Array, softmax: Softmax
) -> Array:
    xp = _backend.namespace(s, row_max)
    candidates = _float32.flush(xp.where(visible, s, LOWEST))  # the kernel's maximum flushes
    largest = _float32.maximum_number_along(candidates, axis=2)
    if not whole:
        largest = _float32.maximum_number(largest, LOWEST)
    largest = _float32.maximum_number(_float32.multiply(largest, against(c, largest)), LOWEST)
    first = row_max == LOWEST
    excess = _float32.subtract(largest, row_max)
    passed = _float32.less(integer(softmax.rescale_threshold), excess)
    return xp.where(first | passed, largest, row_max)


def _natural_max(s: Array, visible: Array, row_max: Array, softmax: Softmax) -> Array:
    xp = _backend.namespace(s, row_max)
    most = largest(s, visible)
    passed = _float32.less(natural_threshold(softmax), _float32.subtract(most, row_max))
    return xp.where((row_max == NEGATIVE_INFINITY) | passed, most, row_max)


def largest(s: Array, visible: Array) -> Array:
    """The maximum [tiles, rows] of the visible scores of a key tile, -inf for none; a NaN wins."""
    xp = _backend.namespace(s, visible)
    return _float32.max_along(xp.where(visible, s, NEGATIVE_INFINITY), axis=2)


def natural_threshold(softmax: Softmax) -> np.uint32:
    """float32 bits of the rescale threshold in natural units."""
    threshold = float(softmax.rescale_threshold)
    if softmax.threshold_unit == "log2":
        threshold *= math.log(2)
    return np.uint32(np.float32(threshold).view(np.uint32))


def natural_power(s: Array, base: Array, softmax: Softmax) -> Array:
    """e^(S' - base). Both broadcast."""
    return special.exp_bits(_float32.subtract(s, base), model=softmax.exp2)


def without_nan(p: Array, softmax: Softmax) -> Array:
    """P with what the recipe makes of a NaN."""
    if softmax.nan_p == "kept":
        return p
    return _backend.namespace(p).where(_float32.is_nan(p), np.uint32(0), p)


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
    """The row sum [tiles, rows, lanes] after the columns of `p`, or of what counts for it."""
    if softmax.row_sum in FUSED_LANES:
        return _fused_lanes(row_sum, rescale, p, softmax)
    if softmax.row_sum == "halved_lanes":
        half = _float32.multiply(rescale, _HALF)
        start = rescaled(row_sum[:, :, 0], half, softmax)
        return _onto_both(start, start, p)[:, :, None]
    if softmax.row_sum == "bfloat16_butterfly":
        new = _bfloat16_sum(p)[:, :, None]
    else:
        order = _ROW_SUMS[softmax.row_sum]
        if softmax.row_sum != "two_lanes":
            start = rescaled(row_sum[:, :, 0], rescale, softmax)
            return _onto(start, p, softmax)[:, :, None]
        new = reductions.partial_sums(p, order, 2)
    if softmax.base == "integer_max":
        return _float32.add(_float32.shift(row_sum, rescale[:, :, None]), new)
    return _float32.fma(row_sum, rescale[:, :, None], new)


def _bfloat16_sum(p: Array) -> Array:
    """The sum of 32 columns in bfloat16, by a butterfly."""
    x = sides.rounded_bfloat16(p)
    bits = [16, 8, 4, 2, 1]  # of a column's number, an axis each
    x = x.reshape((*p.shape[:2], *(2 for _ in bits)))
    for distance in BUTTERFLY:
        before = (slice(None),) * (2 + bits.index(distance))
        x = sides.rounded_bfloat16(_float32.add(x[(*before, 0)], x[(*before, 1)]))
        bits.remove(distance)
    return x


def _fused_lanes(row_sum: Array, rescale: Array, p: Array, softmax: Softmax) -> Array:
    """The sums of four lanes; the first term of each is added as its sum is rescaled."""
    order = _ROW_SUMS[softmax.row_sum]
    columns = np.arange(p.shape[2])
    first = (columns < order.dealt) & (columns % order.vector == 0)
    terms, factor = p[:, :, np.flatnonzero(first)], rescale[:, :, None]
    if softmax.base == "integer_max":
        start = _float32.add(_float32.shift(row_sum, factor), terms)
    else:
        factor = _backend.namespace(p).broadcast_to(factor, row_sum.shape)
        start = _float32.fma(row_sum, factor, terms)
    xp = _backend.namespace(p)
    rest = xp.where(xp.asarray(first), np.uint32(0), p)  # a +0 more changes no sum of P
    return reductions.partial_sums(rest, order, 2, start)


def total(row_sum: Array, softmax: Softmax) -> Array:
    """The row sum [tiles, rows] from its lanes."""
    if row_sum.shape[2] == 1:
        return row_sum[:, :, 0]
    return reductions.combine(row_sum, _ROW_SUMS[softmax.row_sum])


def carried(sums: Array, terms: Array, softmax: Softmax) -> Array:
    """Sums [tiles, rows, lanes] after the columns of `terms`, in the order of the row sum, nothing rescaled."""
    if softmax.row_sum == "bfloat16_butterfly":
        return _float32.add(sums, _bfloat16_sum(terms)[:, :, None])
    order = _ROW_SUMS[softmax.row_sum]
    if softmax.row_sum in FUSED_LANES:
        return reductions.partial_sums(terms, order, 2, sums)
    if softmax.row_sum == "halved_lanes":
        half = _float32.multiply(sums[:, :, 0], _HALF)
        return _onto_both(half, half, terms)[:, :, None]
    if softmax.row_sum != "two_lanes":
        return _onto(sums[:, :, 0], terms, softmax)[:, :, None]
    return _float32.add(sums, reductions.partial_sums(terms, order, 2))


def _onto(start: Array, terms: Array, softmax: Softmax) -> Array:
    """Sums [tiles, rows] of one lane after the columns of `terms`."""
    order = _ROW_SUMS[softmax.row_sum]
    if softmax.row_sum == "by_tiles":
        return _float32.add(start, reductions.reduce(terms, order, 2))
    return reductions.reduce(terms, order, 2, start)


def _onto_both(first: Array, second: Array, terms: Array) -> Array:
    """Sums [tiles, rows] after the columns of `terms` in eight lanes, of which two start from what there is."""
    order, xp = _ROW_SUMS["halved_lanes"], _backend.namespace(first, terms)
    zero = xp.zeros_like(first)
    start = xp.stack([first, second, *[zero] * (order.lanes - 2)], axis=-1)
    return reductions.combine(reductions.partial_sums(terms, order, 2, start), order)


def integer(value: int) -> np.uint32:
    """float32 bits of a small integer."""
    return np.uint32(np.float32(value).view(np.uint32))
