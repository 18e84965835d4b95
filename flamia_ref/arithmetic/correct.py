"""2^x rounded correctly to float32, for every float32 input, by integers.

Write x = n + f with an integer n and 0 <= f < 1. For |x| >= 2^-25, f is a multiple of 2^-48:
f = j 2^-8 + k 2^-16 + r 2^-48 with j, k < 2^8 and r < 2^32. With y = r 2^-48 ln 2,

    2^f = 2^(j/256) 2^(k/65536) (1 + y + y^2/2 + y^3/6 + ...),

the first two factors from tables. `power_of_fraction` computes M, an integer near 2^f 2^62.

**The error bound.** All errors below are in units of the last place of the integer named.

- `high(a, b)` drops three fractions below 1 of a b 2^-64: error in (-3, 0].
- Table entries are rounded to 2^-63 units, error at most 1/2. Their product, scaled by 2^62, so is
  off by less than (2 + 1.003) / 4 < 0.76 either way, and `high` takes up to 3:
  `scale` has an error in (-3.76, 0.76).
- `first` = y 2^80: ln 2 is cut to 64 bits and the product is cut once, error in (-2, 0].
  y < 2^-16.5, so all that follows fits 64 bits.
- `upper` = y 2^48: error in (-1.01, 0]. `square` = `upper`^2, and y^2/2 2^64 = `square` >> 33 has
  an error in (-1.71, 0], since 2 y 2^48 1.01 < 2^33 0.71.
- y^3/6 2^64, a number below 2^12: moved by less than 2^-16 by the errors of `upper` and `square`,
  then cut: error in (-1.01, 0]. The rest of the series is below y^4/23 2^64 < 0.02.
- `growth` = (2^(r 2^-48) - 1) 2^64: the sum of those and of `first` >> 16: error in (-3.75, 0].
- M = `scale` + `high(scale, growth)`: the error of `scale` times at most 1 + 2^-16, that of
  `growth` times scale 2^-64 < 1/2, and `high`: in (-3.77 - 1.88 - 3, 0.77), so below 9.

**Why the rounding is right.** A rounding boundary of a result with at most 24 significant bits is a
multiple of 2^-24 in 2^f, which is 2^38 in M. If f = 0 then M = 2^62 exactly. Else 2^f is irrational
and no boundary. `tests/arithmetic/test_special_correct.py` computes M for each of the 427,819,007
fractions that an input with |x| >= 2^-25 can have, of either sign, and finds none nearer than 20
units to a multiple of 2^38 (the nearest are named there). As 20 is more than 9, M and 2^f 2^62 are
on the same side of every boundary. For |x| < 2^-25 there is no boundary between 2^x and 1:
|2^x - 1| < 0.7 2^-25.

Source: IEEE 754-2019, section 9.2 (exp2, correctly rounded). The method and the proof are ours.
"""

from __future__ import annotations

import functools
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic.correct_fixed import LOW_HALF, high

ERROR = 9
"""Bound of the error of `power_of_fraction`, in units of 2^-62."""

FRACTION_BITS = 48
"""Places of the fraction that `power_of_fraction` takes."""

_LN2 = 0xB17217F7D1CF79AB  # floor(2^64 ln 2)
_SIXTH = (1 << 32) // 6
_ROOT_PRECISION = 160
_OFFSET = 512  # added to x, so that the sum is positive for every |x| <= 256
_TINY = 127 - 25  # the biased exponent of 2^-25


@functools.cache
def roots() -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """2^(j/256) and 2^(k/65536) for j, k < 256, rounded to multiples of 2^-63: uint64."""
    one = 1 << _ROOT_PRECISION
    roots = [2 * one]
    for _ in range(16):
        roots.append(isqrt(roots[-1] << _ROOT_PRECISION))
    tables = []
    for ratio in (roots[8], roots[16]):
        power, entries = one, []
        for _ in range(256):
            entries.append((power + (1 << (_ROOT_PRECISION - 64))) >> (_ROOT_PRECISION - 63))
            power = power * ratio >> _ROOT_PRECISION
        tables.append(np.array(entries, dtype=np.uint64))
    return tables[0], tables[1]


def power_of_fraction(position: Array, rest: Array) -> Array:
    """2^f * 2^62 for f = position 2^-16 + rest 2^-48, with an error below ERROR; exact for f = 0.

    `position` (int32, below 2^16) and `rest` (uint64, below 2^32) broadcast against each other.
    Called with 64-bit types in scope.
    """
    coarse, fine = roots()
    upper_index = _backend.gather(coarse, position >> 8)
    scale = high(upper_index, _backend.gather(fine, position & 255))
    first = rest * np.uint64(_LN2 >> 32) + ((rest * np.uint64(_LN2 & 0xFFFFFFFF)) >> np.uint64(32))
    upper = first >> np.uint64(32)
    square = upper * upper
    cube = (upper * (square >> np.uint64(32))) >> np.uint64(32)
    growth = (
        (first >> np.uint64(16))
        + (square >> np.uint64(33))
        + ((cube * np.uint64(_SIXTH)) >> np.uint64(48))
    )
    return scale + high(scale, growth)


@_backend.jit
def exp2_bits(x: Array) -> Array:
    """2^x of float32 bits, rounded to nearest even: uint32 bits in and out.

    Subnormal results are kept; from 128 on the result is infinity; NaN gives 0x7fffffff.
    """
    xp = _backend.namespace(x)
    magnitude = x & _float32.MAGNITUDE
    exponent = (magnitude >> np.uint32(23)).astype(np.int32)
    significand = ((magnitude & np.uint32(0x7FFFFF)) | np.uint32(0x800000)).astype(np.uint64)
    # |x| in units of 2^-48, and 256 for all that is more.
    moved = significand << xp.clip(exponent - _TINY, 0, 33).astype(np.uint64)
    size = xp.minimum(moved, np.uint64(256 << FRACTION_BITS))
    origin = np.uint64(_OFFSET << FRACTION_BITS)
    place = xp.where((x & _float32.SIGN) != 0, origin - size, origin + size)
    whole = (place >> np.uint64(FRACTION_BITS)).astype(np.int32) - _OFFSET
    position = (place >> np.uint64(32)).astype(np.uint32) & np.uint32(0xFFFF)
    power = power_of_fraction(position.astype(np.int32), place & LOW_HALF)

    # 39 bits go in the normal range, more as the result becomes subnormal. No ties: see above.
    dropped = xp.clip(39 - 126 - whole, 39, 63).astype(np.uint64)
    kept = (power + (np.uint64(1) << (dropped - np.uint64(1)))) >> dropped
    binade = xp.clip(whole + 126, 0, 254).astype(np.uint32) << np.uint32(23)
    result = kept.astype(np.uint32) + binade
    result = xp.where(whole >= 128, _float32.INFINITY, result)
    # 2^-150 is halfway between 0 and the smallest subnormal, and 0 is even.
    result = xp.where(place <= np.uint64((_OFFSET - 150) << FRACTION_BITS), np.uint32(0), result)
    result = xp.where(exponent < _TINY, _float32.ONE, result)
    return xp.where(_float32.is_nan(x), _float32.NAN, result)
