"""tanh x rounded correctly to float32, for every float32 input, by integers.

**Small |x|.** For 0 < |x| < 2^-12, 0 < |x| - tanh |x| < |x|^3 / 3 < |x| 2^-24 / 3. The boundary next
to |x| on the side of zero is at least |x| 2^-25 away (nearest where |x| is a power of two, and
further for subnormals), so the result is x. Zeros keep their sign.

**From 2^-12 to 9.03125** write |x| = a + b with a = i 2^-8 and 0 <= b < 2^-8, b a multiple of 2^-35.
With t = tanh a, from a table, s = 1 - t^2 and v = tanh b,

    tanh |x| = t + d,   d = s v / (1 + y),   y = t v.

`scaled_tanh` computes N, an integer near 2^64 tanh |x|, and for i = 0, where t = 0, near 2^72 tanh |x|.

**From 9.03125 on**, 1 - tanh |x| < 2 e^(-2 |x|) < 2^-25, so the result is 1: |x| is replaced by the
last b below 9.03125, whose N rounds to 1.

**The error bound.** Errors are in units of the last place: 2^-72 for `odd`, `y` and `d`, else 2^-64.

- b^2 is exact, in units of 2^-70, below 2^54; `square` is its upper part, in units of 2^-48. `cube` =
  b^3 2^83, from the upper and the lower part, is cut once.
- `factor` = 1/3 - 2 b^2/15 + 17 b^4/315 to within 2^15: what b^2 was cut is at most 2^16 2/15; the
  constant 2/15, cut at 2^-34, is at most 2^14; the b^4 term is cut by less than 2^3; the next
  term, 62 b^6/2835, is below 2^10.5. As b^3 < 2^-24, this is half a unit of 2^-72.
- `odd` = v: the cuts of `cube` and of `high` are below 4 units of 2^-83; then the cut to 2^-72. All
  together in (-0.51, 1.51).
- The table t: at most 1/2. `high`(t, t) then is in (-4, 1), and `slope` = s = 2^64 - 1 - that one is
  in (-2, 3); for i = 0 it is 2^64 - 1, which is -1.
- `y`: 1.51 and 0.51 from `odd` times t < 1, 1/2 from t since `odd` < 2^64, up to 3 by `high`: in
  (-4.01, 2.01). Cut to 2^-64, `ratio` is in (-1.02, 0.01), and below 2^56.
- d is multiplied out as s v (1 - y) (1 + y^2) (1 + y^4); the rest, y^8 < 2^-64, takes less than a
  unit. s v: (-0.51 - 2 - 3, 1.51 + 3). After 1 - y: (-5.52, 4.51 + 3 + 1.03). y^2 < 2^-16 is in
  (-3.01, 0.01), and y^4 in (-3.01, 0.01); after 1 + y^2 (-11.54, 8.56), after 1 + y^4
  (-17.56, 8.57). d: (-18.57, 8.57).
- For i > 0, N = t + d / 2^8, cut: (-0.5 - 0.08 - 1, 0.5 + 0.04), so below 2.
- For i = 0, `ratio` = 0 and N = d = `high`(`odd`, 2^64 - 1): (-0.51 - 1 - 3, 1.51), so below 5.

**Why the rounding is right.** tanh of a rational number other than 0 is transcendental (Lindemann),
so no boundary. In the binade [2^-k, 2^(1-k)) of the result a boundary is a multiple of 2^-(24+k).
`tests/arithmetic/test_special_correct_tanh.py` computes N for each of the 126,910,464 float32 from
2^-12 to 9.03125, and finds none nearer to such a multiple than 1,712 units of 2^-72 below 2^-8, and
430 units of 2^-64 from there on (the nearest are named there). As these are more than 5 and 2, N and
the exact value are on the same side of every boundary. (k is that of N; where it is another
than that of tanh |x|, N is as near to a power of two, which is a multiple on both of its sides.)

Source: IEEE 754-2019, section 9.2 (tanh, correctly rounded). The method and the proof are ours.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic.correct_fixed import HALF, high, to_float32

ERROR = 2
"""Bound of the error of `scaled_tanh` in units of 2^-64, for |x| >= 2^-8."""
ERROR_BELOW = 5
"""Bound of the error of `scaled_tanh` in units of 2^-72, for |x| < 2^-8."""

PLACES = 35
"""Places of the |x| that `scaled_tanh` takes."""
STEPS = 2312
"""`scaled_tanh` takes |x| below STEPS / 2^8."""

_STEP_BITS = PLACES - 8
_SMALL = 127 - 12  # the biased exponent of 2^-12
_PRECISION = 160
_LOW_SQUARE = np.uint64((1 << 22) - 1)
_THIRD = np.uint64((1 << 64) // 3)
_FIFTH = np.uint64((2 << 34) // 15)
_SEVENTH = np.uint64((17 << 32) // 315)


@functools.cache
def _table() -> NDArray[np.uint64]:
    """tanh(i / 2^8) in units of 2^-64, rounded, for i < STEPS."""
    one = 1 << _PRECISION
    # e^(2 / 2^8) by its series, then its powers.
    ratio, term, n = 0, one, 0
    while term:
        ratio, n = ratio + term, n + 1
        term //= n << 7
    power, entries = one, []
    for _ in range(STEPS):
        quotient = ((power - one) << 65) // (power + one)
        entries.append((quotient + 1) >> 1)
        power = power * ratio >> _PRECISION
    return np.array(entries, dtype=np.uint64)


def scaled_tanh(place: Array) -> Array:
    """2^64 tanh |x| for |x| = place 2^-35 from 2^-8 on, 2^72 tanh |x| below: uint64 in and out.

    The errors are below ERROR and ERROR_BELOW. Called with 64-bit types in scope.
    """
    step = (place >> np.uint64(_STEP_BITS)).astype(np.int32)
    b = place & np.uint64((1 << _STEP_BITS) - 1)
    exact_square = b * b
    square = exact_square >> np.uint64(22)
    cube = b * square + ((b * (exact_square & _LOW_SQUARE)) >> np.uint64(22))
    factor = (
        _THIRD
        - ((square * _FIFTH) >> np.uint64(18))
        + ((((square * square) >> HALF) * _SEVENTH) >> HALF)
    )
    odd = (b << np.uint64(72 - PLACES)) - (high(cube, factor) >> np.uint64(11))

    t = _backend.gather(_table(), step)
    slope = ~high(t, t)
    ratio = high(odd, t) >> np.uint64(8)
    ratio2 = high(ratio, ratio)
    d = high(odd, slope)
    d = d - high(d, ratio)
    d = d + high(d, ratio2)
    d = d + high(d, high(ratio2, ratio2))
    return _backend.namespace(place).where(step == 0, d, t + (d >> np.uint64(8)))


@_backend.jit
def tanh_bits(x: Array) -> Array:
    """tanh of float32 bits, rounded to nearest even: uint32 bits in and out.

    Subnormals are kept, zeros keep their sign, infinities give 1 and -1; NaN gives 0x7fffffff.
    """
    xp = _backend.namespace(x)
    exponent = ((x & _float32.MAGNITUDE) >> np.uint32(23)).astype(np.int32)
    significand = ((x & np.uint32(0x7FFFFF)) | np.uint32(0x800000)).astype(np.uint64)
    # |x| in units of 2^-35; 16 and more, infinities among them, is shifted to 16 and more.
    moved = significand << xp.clip(exponent - _SMALL, 0, 16).astype(np.uint64)
    place = xp.minimum(moved, np.uint64((STEPS << _STEP_BITS) - 1))
    unit = xp.where(place < np.uint64(1 << _STEP_BITS), -72, -64).astype(np.int32)
    result = to_float32(scaled_tanh(place), unit) | (x & _float32.SIGN)
    result = xp.where(exponent < _SMALL, x, result)
    return xp.where(_float32.is_nan(x), _float32.NAN, result)
