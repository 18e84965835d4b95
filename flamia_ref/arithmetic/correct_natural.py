"""e^x and the natural logarithm rounded correctly to float32, for every float32 input, by integers.

**e^x.** x log2(e) = n + f with an integer n and 0 <= f < 1, and e^x = 2^n 2^f. For |x| >= 2^-25 the product of the
significand, 24 bits, with log2(e) in 96 bits (cut, relative error 2^-95) is kept in 128 bits and then cut at 2^-64.
So f is off by less than 1.01 units of 2^-64, of either sign. With f = j 2^-8 + k 2^-16 + r 2^-64, j and k < 2^8, r <
2^48 and y = r 2^-64 ln 2, 2^f = 2^(j/256) 2^(k/65536) (1 + y + y^2/2 + y^3/6 + ...), as in `correct`, which has the
tables and most of the bound. `scaled_exp` computes M, an integer near 2^f 2^62. Errors in units of 2^-62:

- `scale` is off by (-3.76, 0.76), and what follows `first` in `growth` by (-1.71 - 1.01, 0.02), as there.
- `first` = y 2^80 by `high`: in (-4, 0], of which 2^-16 counts in `growth` 2^64, and its own cut 1. So `growth` is in
  (-3.75, 0.02), and M in (-3.77 - 1.88 - 3, 0.77) of 2^f' 2^62, where f' is the f that was taken.
- f' instead of f: less than 1.01 ln 2 2 / 4 = 0.36. Together below 10.

**Why its rounding is right.** A rounding boundary of a result of at most 24 significant bits is an odd multiple of
2^38 in M, or of a higher power of two for subnormal results. e^x is irrational for x != 0, so never one.
`tests/arithmetic/test_special_correct_natural.py` computes M for each float32 with 2^-25 <= |x| < 128, 536,870,912 of
them, and finds none nearer to such a boundary than 1,292 units (the nearest are named there). For |x| < 2^-25 there
is no boundary between e^x and 1: |e^x - 1| < 2^-25 (1 + 2^-24) above 1, where it is 2^-24 away, and below 2^-25 below
1, where it is 2^-25 away.

**ln x.** With x = 2^e m, `correct_log2` has F near 2^64 log2 m with an error in (-11.96, 3.41). As there, |e + log2
m| is a whole number w and a fraction R 2^-64, R = F or 2^64 - F. |ln x| = (w + R 2^-64) ln 2, `scaled_log`:

- w > 0: w (ln 2 2^64) and `high`(R, ln 2 2^64), ln 2 cut to 64 bits, both cut at 2^-56: (11.96 ln 2 + 3 + 1 + 149)
  2^-8 + 2 units of 2^-56, below 3.
- w = 0: `high`(R, ln 2 2^64) alone: 11.96 ln 2 + 3 + 1, below 13 units of 2^-64.
- x = 1 + t, |t| = T 2^-24 with an integer T < 2^12: t - t^2/2 + t^3/3 - t^4/4 + t^5/5 in units of 2^-76, the first
  two terms exact, the others cut, 1 + 1 + 1.2, and what follows below 2.7: below 6 units of 2^-76.

**Why its rounding is right.** ln x is irrational for x != 1, so no boundary. In the binade [2^(j-1), 2^j) of a result
a boundary is an odd multiple of 2^(j-25). The same test computes `scaled_log` for each positive float32 below
infinity, 2,139,095,039 of them, and finds none nearer to a boundary than 6 units of 2^-56 where w > 0, than 42 units
of 2^-76 where T < 2^12, and than 7,518 units of 2^-64 elsewhere.

Source: IEEE 754-2019, section 9.2 (exp and log, correctly rounded). The method and the proof are ours.
"""

from __future__ import annotations

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic.correct import roots
from flamia_ref.arithmetic.correct_fixed import HALF, LOW_HALF, high, to_float32
from flamia_ref.arithmetic.correct_log2 import log2_of_significand

EXP_ERROR = 10
"""Bound of the error of `scaled_exp`, in units of 2^-62."""
LOG_ERRORS = {-56: 3, -64: 13, -76: 6}
"""Bounds of the error of `scaled_log` by the exponent of its unit, in that unit."""

_LN2 = np.uint64(0xB17217F7D1CF79AB)  # floor(2^64 ln 2)
_LOG2E = tuple(np.uint64(x) for x in (0xB8AA3B29, 0x5C17F0BB, 0xBE87FED0))  # floor(2^95 log2 e)
_SIXTH = np.uint64((1 << 32) // 6)
_TINY = 127 - 25  # the biased exponent of 2^-25
_LARGE = 127 + 7  # of 128
_NEAR = 1 << 12
_MINUS_INFINITY = np.uint32(0xFF800000)


def scaled_exp(significand: Array, exponent: Array, negative: Array) -> tuple[Array, Array]:
    """n (int32) and 2^f 2^62 (uint64, error below EXP_ERROR) with e^x = 2^n 2^f.

    |x| = `significand` 2^(`exponent` - 150), uint64 of 24 bits and int32 from _TINY to _LARGE - 1; `negative` is the
    sign of x. Called with 64-bit types in scope.
    """
    xp = _backend.namespace(significand)
    top, middle, bottom = (significand * limb for limb in _LOG2E)
    low = (middle << HALF) + bottom
    carry = (low < bottom).astype(np.uint64)
    upper = top + (middle >> HALF) + carry
    # |x| log2 e = (upper 2^64 + low) 2^(exponent - 245), to be cut to multiples of 2^-64.
    shift = (np.int32(181) - exponent).astype(np.uint64)
    within = shift < np.uint64(64)
    small = xp.minimum(shift, np.uint64(63))
    rest = xp.where(
        within,
        (upper << (np.uint64(64) - small)) | (low >> small),
        upper >> xp.where(within, np.uint64(0), shift - np.uint64(64)),
    )
    whole = xp.where(within, upper >> small, np.uint64(0)).astype(np.int32)
    fraction = xp.where(negative, ~rest + np.uint64(1), rest)
    whole = xp.where(negative, -whole - (rest != 0).astype(np.int32), whole)
    return whole, _power(fraction)


def _power(fraction: Array) -> Array:
    """2^f 2^62 for f = fraction 2^-64."""
    coarse, fine = roots()
    coarse_index = (fraction >> np.uint64(56)).astype(np.int32)
    fine_index = ((fraction >> np.uint64(48)) & np.uint64(255)).astype(np.int32)
    scale = high(_backend.gather(coarse, coarse_index), _backend.gather(fine, fine_index))
    rest = fraction & np.uint64((1 << 48) - 1)
    first = high(rest << np.uint64(16), _LN2)
    upper = first >> HALF
    square = upper * upper
    cube = (upper * (square >> HALF)) >> HALF
    growth = (
        (first >> np.uint64(16)) + (square >> np.uint64(33)) + ((cube * _SIXTH) >> np.uint64(48))
    )
    return scale + high(scale, growth)


@_backend.jit
def exp_bits(x: Array) -> Array:
    """e^x of float32 bits, rounded to nearest even: uint32 bits in and out.

    Subnormal results are kept; above the largest float32 the result is infinity; NaN gives 0x7fffffff.
    """
    xp = _backend.namespace(x)
    magnitude = x & _float32.MAGNITUDE
    exponent = (magnitude >> np.uint32(23)).astype(np.int32)
    significand = ((magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000)).astype(np.uint64)
    negative = (x & _float32.SIGN) != 0
    inside = xp.clip(exponent, _TINY, _LARGE - 1)
    whole, power = scaled_exp(significand, inside, negative)

    # 39 bits go in the normal range, more as the result becomes subnormal. No ties: see above.
    dropped = xp.clip(39 - 126 - whole, 39, 63).astype(np.uint64)
    kept = (power + (np.uint64(1) << (dropped - np.uint64(1)))) >> dropped
    binade = xp.clip(whole + 126, 0, 254).astype(np.uint32) << np.uint32(23)
    result = kept.astype(np.uint32) + binade
    result = xp.where(whole >= 128, _float32.INFINITY, result)
    result = xp.where(whole < -150, np.uint32(0), result)
    large = exponent >= _LARGE
    result = xp.where(large & negative, np.uint32(0), result)
    result = xp.where(large & ~negative, _float32.INFINITY, result)
    result = xp.where(exponent < _TINY, _float32.ONE, result)
    return xp.where(_float32.is_nan(x), _float32.NAN, result)


def scaled_log(significand: Array, exponent: Array) -> tuple[Array, Array]:
    """|ln x| (uint64) for x = m 2^exponent in units of 2^unit, and unit (int32).

    `significand` (uint32 of 24 bits) is m 2^23, 1 <= m < 2. The errors are below LOG_ERRORS. Called with 64-bit types
    in scope.
    """
    xp = _backend.namespace(significand)
    fraction = log2_of_significand(significand)
    negative = exponent < 0
    rest = xp.where(negative, ~fraction + np.uint64(1), fraction)
    whole = xp.abs(exponent) - (negative & (fraction != 0)).astype(np.int32)
    part = high(rest, _LN2)
    many = whole.astype(np.uint64)
    above = ((many * (_LN2 >> HALF)) << np.uint64(24)) + (
        (many * (_LN2 & LOW_HALF)) >> np.uint64(8)
    )
    number = xp.where(whole != 0, above + (part >> np.uint64(8)), part)
    unit = xp.where(whole != 0, -56, -64)
    # T of x = 1 + t.
    over = (significand - np.uint32(1 << 23)).astype(np.uint64) << np.uint64(1)
    under = (np.uint32(1 << 24) - significand).astype(np.uint64)
    distance = xp.where(negative, under, over)
    near = ((exponent == 0) | (exponent == -1)) & (distance < np.uint64(_NEAR))
    number = xp.where(near, _near_one(xp.minimum(distance, np.uint64(_NEAR)), negative), number)
    return number, xp.where(near, -76, unit).astype(np.int32)


def _near_one(distance: Array, negative: Array) -> Array:
    """|ln(1 + t)| 2^76 for |t| = distance 2^-24, distance <= 2^12; `negative` is the sign of t."""
    xp = _backend.namespace(distance)
    square = distance * distance
    fourth = square * square
    odd = (
        (distance << np.uint64(52))
        + (square * distance << np.uint64(4)) // np.uint64(3)
        + (fourth * distance >> np.uint64(44)) // np.uint64(5)
    )
    even = (square << np.uint64(27)) + (fourth >> np.uint64(22))
    return xp.where(negative, odd + even, odd - even)


@_backend.jit
def log_bits(x: Array) -> Array:
    """The natural logarithm of float32 bits, rounded to nearest even: uint32 bits in and out.

    Subnormals count. Either zero gives -infinity, a negative number NaN, 1 gives +0; NaN is 0x7fffffff.
    """
    xp = _backend.namespace(x)
    magnitude = x & _float32.MAGNITUDE
    field = (magnitude >> np.uint32(23)).astype(np.int32)
    raised = 24 - _backend.bit_length(magnitude)  # places from a subnormal to 24 bits
    subnormal = field == 0
    hidden = (magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    moved = magnitude << xp.where(subnormal, raised, 0).astype(np.uint32)
    exponent = xp.where(subnormal, -126 - raised, field - 127)
    number, unit = scaled_log(xp.where(subnormal, moved, hidden), exponent)
    result = to_float32(number, unit)
    result = result | ((exponent < 0).astype(np.uint32) << np.uint32(31))

    result = xp.where(x == _float32.ONE, np.uint32(0), result)
    result = xp.where(x == _float32.INFINITY, _float32.INFINITY, result)
    result = xp.where((x & _float32.SIGN) != 0, _float32.NAN, result)
    result = xp.where(magnitude == 0, _MINUS_INFINITY, result)
    return xp.where(_float32.is_nan(x), _float32.NAN, result)
