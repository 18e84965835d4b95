"""The float64 step inside a float32 operation: from float32 bits and back, rounded once.

XLA on CPU contracts and flushes what it sees as float32, so a float32 operation here is one float64
operation between `widen` and `narrow`. Both use the hardware's conversions, which round to nearest
even but may flush subnormals, on the way in (XLA on CPU) or out (there, and on a GPU if told to).
So subnormals take a second way, through integers, and the two are joined by OR: where the hardware
keeps a subnormal both ways give the same bits, where it flushes the first gives a zero of its sign.
The OR also keeps a compiler from seeing a conversion to float32 and back, which XLA would drop as
excess precision.

`narrow` takes a float64 that is exact, or stands for the exact value: it lies on the same side of
every number of at most 28 significant bits (no float32, no halfway point between two, no limit of
flushing needs more). Rounding to odd makes such a number. Source: Boldo and Melquiond, "Emulation
of a FMA and correctly rounded sums", 2008.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array

NAN = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
MAX_FINITE = np.uint32(0x7F7FFFFF)
SMALLEST_NORMAL = np.uint32(1 << 23)
SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)

Direction = Literal["nearest_even", "toward_zero", "up", "down"]

_SIGN = np.uint64(1 << 63)
_TINY = 2.0**-126  # the smallest normal float32
# What a float32 significand with any exponent would round up to 2^-126: from here on.
_NOT_TINY_NEAREST = 2.0**-126 - 2.0**-151
_NOT_TINY_OUTWARD = float(np.nextafter(2.0**-126 - 2.0**-150, 1.0))
_REBIAS = np.uint32((1023 - 127 << 23) % (1 << 32))
_NEAR_UNIT = np.uint64(1 << 25)  # of numbers of 28 significant bits


def widen(a: Array, *, normal: bool = False) -> Array:
    """float64 values of float32 bits, exact; NaN stays NaN. `normal`: none is subnormal."""
    if not _backend.is_jax(a):
        return np.asarray(a).view(np.float32).astype(np.float64)
    if normal:
        return _backend.from_bits(a, np.float32).astype(np.float64)
    xp = _backend.namespace(a)
    magnitude = a & MAGNITUDE
    small = magnitude < SMALLEST_NORMAL
    flushed = _backend.from_bits(xp.where(small, a & SIGN, a), np.float32).astype(np.float64)
    units = xp.where(small, magnitude, np.uint32(0)).astype(np.int32).astype(np.float64)
    subnormal = _backend.bits(units * 2.0**-149)
    return _backend.from_bits(_backend.bits(flushed) | subnormal, np.float64)


def narrow(wide: Array, direction: Direction = "nearest_even", *, ftz: bool = False) -> Array:
    """float32 bits of float64 values, rounded once; |wide| is 0 or at least 2^-1022.

    `ftz`: a result is a zero of its sign if it would be below 2^-126 after rounding to 24 bits with
    no lower limit to the exponent. Evidence: measured, on an H200, for mul, fma and div.rn.ftz.f32.
    """
    if direction == "nearest_even":
        return _nearest(wide, ftz)
    return _directed(wide, direction, ftz)


def _nearest(wide: Array, ftz: bool) -> Array:
    xp = _backend.namespace(wide)
    magnitude = xp.abs(wide)
    pattern = _backend.bits(wide.astype(np.float32))
    if ftz:
        kept = xp.where(magnitude < _NOT_TINY_NEAREST, np.uint32(0), SMALLEST_NORMAL)
        result = xp.where(magnitude < _TINY, (pattern & SIGN) | kept, pattern)
    else:
        # 2^-97 has the last place 2^-149: the sum's low bits are the subnormal's.
        subnormal = _backend.bits(magnitude + 2.0**-97).astype(np.uint32)
        result = pattern | xp.where(magnitude < _TINY, subnormal, np.uint32(0))
    return xp.where((result & MAGNITUDE) > INFINITY, NAN, result)


def _directed(wide: Array, direction: Direction, ftz: bool) -> Array:
    xp = _backend.namespace(wide)
    magnitude = xp.abs(wide)
    sign = (_backend.bits(wide) >> np.uint64(32)).astype(np.uint32) & SIGN
    inward = _inward(sign, direction)
    # 29 bits go, and the exponent's bias changes, modulo 2^32; a carry into the exponent is right.
    raised = _backend.bits(magnitude) + xp.where(inward, np.uint64(0), np.uint64((1 << 29) - 1))
    normal = (raised >> np.uint64(29)).astype(np.uint32) - _REBIAS
    if ftz:
        lost = inward | (magnitude < _NOT_TINY_OUTWARD)
        small = xp.where(lost, np.uint32(0), SMALLEST_NORMAL)
    else:
        units = magnitude * 2.0**149
        units = xp.where(inward, xp.floor(units), xp.ceil(units))
        small = _backend.bits(units + 2.0**52).astype(np.uint32)
    result = xp.where(magnitude < _TINY, small, normal)
    overflow = xp.where(inward & (magnitude < np.inf), MAX_FINITE, INFINITY)
    result = xp.where(magnitude < 2.0**128, result, overflow)
    return xp.where(magnitude <= np.inf, result | sign, NAN)


def _inward(sign: Array, direction: Direction) -> Array:
    """Where rounding in `direction` takes a value of this sign bit toward zero."""
    if direction == "up":
        return sign != 0
    if direction == "down":
        return sign == 0
    return _backend.namespace(sign).ones_like(sign, dtype=bool)


def sum_to_odd(p: Array, c: Array) -> Array:
    """float64 p + c rounded to odd: truncated, the last bit set if anything was lost."""
    xp = _backend.namespace(p, c)
    total = p + c
    from_c = total - p
    lost = (p - (total - from_c)) + (c - from_c)
    inexact = xp.abs(lost) > 0.0  # an infinite or NaN total loses NaN: not inexact
    pattern = _backend.bits(total)
    rounded_away = inexact & (((_backend.bits(lost) ^ pattern) & _SIGN) != 0)
    truncated = pattern - rounded_away.astype(np.uint64)
    return _backend.from_bits(truncated | inexact.astype(np.uint64), np.float64)


def quotient(a: Array, b: Array) -> Array:
    """A float64 that stands for a / b of two widened float32.

    XLA turns a division by a scalar into a multiplication by its rounded reciprocal, a unit or two
    in the last place off, so the float64 quotient alone says nothing near a number of 28 bits. The
    nearest of those times b is exact in float64, and so is what it leaves of a.
    """
    xp = _backend.namespace(a, b)
    rough = a / b
    near = (_backend.bits(rough) + (_NEAR_UNIT >> np.uint64(1))) & ~(_NEAR_UNIT - np.uint64(1))
    rest = a - _backend.from_bits(near, np.float64) * b
    above = near + np.uint64(1)
    below = near - np.uint64(1)
    beside = xp.where(((_backend.bits(rest) ^ _backend.bits(a)) & _SIGN) == 0, above, below)
    exact = xp.where(xp.abs(rest) > 0.0, beside, near)
    # Infinity and NaN have no neighbours; a zero leaves NaN of an infinite b, and stays.
    return xp.where(xp.abs(rough) < np.inf, _backend.from_bits(exact, np.float64), rough)
