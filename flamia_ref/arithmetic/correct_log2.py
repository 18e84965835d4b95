"""log2 x rounded correctly to float32, for every float32 input, by integers.

Write x = 2^e m with 1 <= m < 2, subnormals included. m is a multiple of 2^-23, and its first 12
places j choose n = ceil(2^28 / (4096 + j)), so that n 2^-16 is just above 1/m rounded to 12 places:

    log2 m = log2(2^16 / n) + log2(1 + u),   u = m n 2^-16 - 1,

the first from a table. u is a multiple of 2^-39, known exactly, with 0 <= u < 2^-11.9. (Let m' be m
cut to 12 places: n 2^-16 < 1/m' + 2^-16, so u < 2^-12/m' + 2^-16 m, at most 1.0625 2^-12; for m' = 1,
n 2^-16 = 1 exactly.) `log2_of_significand` computes F, an integer near 2^64 log2 m.

**The error bound.** All errors are in units of 2^-64 of the sum, unless another unit is named.

- u and u^2 (in units of 2^-78, below 2^54.2) are exact. u^2/2: cut, error in (-1, 0].
- `square`, u^2 in units of 2^-54, is cut. u^3 = `square` u, below 2^28.3, and cut again: error in
  (-1.27, 0], since 2^-54 u is below 0.27. A third of it, by a constant cut to 32 places, which is
  0.08 here, and cut: in (-1.51, 0].
- u^4/4 = `square`^2 / 4: `square` is below 2^30.2, so what it was cut is now below 2^-14; with the
  last cut in (-1.01, 0].
- The rest of the series, u^5/5 - ..., lies between 0 and 1.0625^5 2^-60 / 5, which is 4.34 units.
- `natural` = u - u^2/2 + u^3/3 - u^4/4, so in (-1.51 - 4.34, 1 + 1.01) of ln(1 + u), and it is
  below 2^52.2.
- log2(1 + u) = `natural` + `natural` (log2 e - 1): times 1.4427 the above; the constant is cut to
  64 places, which is below 0.01 here, and `high` takes up to 3: in (-11.46, 2.91).
- The table is made from logarithms of 128 places and rounded, at most 1/2 off. F is in (-11.96, 3.41), below 12.

**Why the rounding is right.** If m = 1 then F = 0 exactly and the result is the integer e, which
float32 holds. Else log2 m is irrational, and no rounding boundary. |e + log2 m| has the fraction
log2 m, or 1 - log2 m if e < 0.

- From 1 on, a boundary of a result of 24 significant bits is a multiple of 2^-24: of 2^40 in F.
- For e = 0 and e = -1, in the binade [2^-k, 2^(1-k)) of the result it is a multiple of 2^-(24+k):
  of 2^(40-k) in F or 2^64 - F.

`tests/arithmetic/test_special_correct_log2.py` computes F for each of the 8,388,607 significands
other than 1, and finds none nearer than 11,031 units to a multiple of 2^40 or, for e = 0, of
2^(40-k), and no 2^64 - F nearer than 1,569 (the nearest are named there). As these are more than
12, F and 2^64 log2 m are on the same side of every boundary. (k is that of F, not of log2 m; where
these differ, F is as near to a power of two, which counts as a multiple on both of its sides.)

Source: IEEE 754-2019, section 9.2 (log2, correctly rounded). The method and the proof are ours.
"""

from __future__ import annotations

import functools
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic.correct_fixed import HALF, high, to_float32

ERROR = 12
"""Bound of the error of `log2_of_significand`, in units of 2^-64."""

_INDEX_BITS = 12
_RECIPROCAL_BITS = 16
_PRECISION = 128  # of the logarithms that the table is made from
_THIRD = np.uint64((1 << 32) // 3)
_LOG2E_FRACTION = np.uint64(0x71547652B82FE177)  # floor(2^64 (log2 e - 1))
_MINUS_INFINITY = np.uint32(0xFF800000)


@functools.cache
def _table() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """n and log2(2^16 / n) in units of 2^-64, rounded, for each j < 2^12."""
    size = 1 << _INDEX_BITS
    reciprocals = [-(-(size << _RECIPROCAL_BITS) // (size + j)) for j in range(size + 1)]
    # ln(2^16 / n) by steps: ln(a / b) = 2 artanh((a - b) / (a + b)), and the last n is 2^15.
    naturals = [0]
    for a, b in pairwise(reciprocals):
        ratio = ((a - b) << _PRECISION) // (a + b)
        square = ratio * ratio >> _PRECISION
        power, step, odd = ratio, 0, 1
        while power:
            step += power // odd
            power, odd = power * square >> _PRECISION, odd + 2
        naturals.append(naturals[-1] + 2 * step)
    ln2 = naturals.pop()
    logarithms = [((natural << 65) + ln2) // (2 * ln2) for natural in naturals]
    return np.array(reciprocals[:-1], dtype=np.uint64), np.array(logarithms, dtype=np.uint64)


def log2_of_significand(significand: Array) -> Array:
    """2^64 log2 m for m = significand 2^-23 in [1, 2), error below ERROR; exact for m = 1.

    `significand` is uint32, the result uint64. Called with 64-bit types in scope.
    """
    reciprocals, logarithms = _table()
    shift = 23 - _INDEX_BITS
    index = ((significand >> np.uint32(shift)) & np.uint32((1 << _INDEX_BITS) - 1)).astype(np.int32)
    product = significand.astype(np.uint64) * _backend.gather(reciprocals, index)
    u = product - np.uint64(1 << (23 + _RECIPROCAL_BITS))
    exact_square = u * u
    square = exact_square >> np.uint64(24)
    cube = (square * u) >> np.uint64(29)
    natural = (
        (u << np.uint64(25))
        - (exact_square >> np.uint64(15))
        + ((cube * _THIRD) >> HALF)
        - ((square * square) >> np.uint64(46))
    )
    return _backend.gather(logarithms, index) + natural + high(natural, _LOG2E_FRACTION)


@_backend.jit
def log2_bits(x: Array) -> Array:
    """log2 of float32 bits, rounded to nearest even: uint32 bits in and out.

    Subnormals count. Either zero gives -infinity, a negative number NaN, 1 gives +0; NaN is
    0x7fffffff.
    """
    xp = _backend.namespace(x)
    magnitude = x & _float32.MAGNITUDE
    field = (magnitude >> np.uint32(23)).astype(np.int32)
    raised = 24 - _backend.bit_length(magnitude)  # places from a subnormal to 24 bits
    subnormal = field == 0
    hidden = (magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    moved = magnitude << xp.where(subnormal, raised, 0).astype(np.uint32)
    significand = xp.where(subnormal, moved, hidden)
    exponent = xp.where(subnormal, -126 - raised, field - 127)

    fraction = log2_of_significand(significand)
    negative = exponent < 0
    # |e + log2 m| as a whole number and a fraction.
    rest = xp.where(negative, ~fraction + np.uint64(1), fraction)
    borrowed = (negative & (fraction != 0)).astype(np.int32)
    whole = xp.abs(exponent) - borrowed
    joined = (whole.astype(np.uint64) << np.uint64(56)) | (rest >> np.uint64(8))
    number = xp.where(whole != 0, joined, rest)
    result = to_float32(number, xp.where(whole != 0, -56, -64).astype(np.int32))
    result = result | (negative.astype(np.uint32) << np.uint32(31))

    result = xp.where(x == _float32.ONE, np.uint32(0), result)
    result = xp.where(x == _float32.INFINITY, _float32.INFINITY, result)
    result = xp.where((x & _float32.SIGN) != 0, _float32.NAN, result)
    result = xp.where(magnitude == 0, _MINUS_INFINITY, result)
    return xp.where(_float32.is_nan(x), _float32.NAN, result)
