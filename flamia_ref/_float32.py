"""float32 operations on bit patterns, equal to the last bit in numpy and inside any XLA program.

Operands and results are uint32 arrays holding float32 bits. Every operation follows IEEE 754, keeps
subnormals, and returns 0x7fffffff for every NaN, as NVIDIA GPUs do. numpy uses its own float32
operations for rounding to nearest; the JAX path builds a float64 from the bits, does one float64
operation, and rounds the float64 bits to float32 bits by integers, because XLA on CPU contracts and
flushes whatever it sees as float32. In float64 XLA still takes two liberties, both repaired here:
x + 0 with a constant zero becomes x, and a division by a scalar becomes a multiplication by its
rounded reciprocal.

The float64 step is exact or harmless: products of two float32 are exact in float64; sums and
quotients of two float32 rounded to 53 bits and then to at most 24 round as if once
(53 >= 2 * 24 + 2), in the subnormal range too, where sums are exact and a quotient cannot come
closer than 2^-49 relative to a rounding boundary without being on it. Where a rounding direction
matters or three operands meet, the float64 sum is rounded to odd first. Source: IEEE 754-2019;
Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import type_of

NAN = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
MAX_FINITE = np.uint32(0x7F7FFFFF)
ONE = np.uint32(0x3F800000)
SIGN = np.uint32(0x80000000)
MAGNITUDE = np.uint32(0x7FFFFFFF)

Direction = Literal["nearest_even", "toward_zero", "up", "down"]

_SIGN64 = np.uint64(1 << 63)
_SMALLEST_NORMAL = np.uint32(1 << 23)
_REBIAS = 1023 - 127
_REBIAS_SPECIAL = np.uint64((2047 - 255) << 52)
_SPECIAL_HIGH = np.uint32(0x7FF << 20)  # upper half of a float64 infinity


def is_nan(a: Array) -> Array:
    """Where `a` is a NaN."""
    _check(a)
    return (a & MAGNITUDE) > INFINITY


def is_zero(a: Array) -> Array:
    """Where `a` is +0 or -0."""
    _check(a)
    return (a & MAGNITUDE) == 0


def negate(a: Array) -> Array:
    """-a: the sign bit flipped."""
    _check(a)
    return a ^ SIGN


def canonical(a: Array) -> Array:
    """`a` with every NaN written as 0x7fffffff."""
    return _backend.namespace(a).where(is_nan(a), NAN, a)


def _order(a: Array) -> Array:
    """uint32 keys that sort as the values do, -0 before +0."""
    xp = _backend.namespace(a)
    return xp.where((a & SIGN) != 0, ~a, a | SIGN)


def flush(a: Array) -> Array:
    """`a` with subnormals as zeros of their sign, as the .ftz of PTX does to an operand or result."""
    _check(a)
    return _backend.namespace(a).where((a & MAGNITUDE) < _SMALLEST_NORMAL, a & SIGN, a)


def less(a: Array, b: Array) -> Array:
    """a < b as values: False with a NaN, and -0 is not less than +0."""
    ordered = ~(is_nan(a) | is_nan(b) | (is_zero(a) & is_zero(b)))
    return ordered & (_order(a) < _order(b))


def maximum(a: Array, b: Array) -> Array:
    """The larger of a and b; a NaN wins; +0 over -0."""
    _check(a, b)
    xp = _backend.namespace(a, b)
    larger = xp.where(_order(a) < _order(b), b, a)
    return xp.where(is_nan(a) | is_nan(b), NAN, larger)


def max_along(a: Array, axis: int) -> Array:
    """The maximum along `axis` under the rules of `maximum`."""
    _check(a)
    xp = _backend.namespace(a)
    keys = _order(a).max(axis=axis)
    largest = xp.where((keys & SIGN) != 0, keys ^ SIGN, ~keys)
    return xp.where(is_nan(a).any(axis=axis), NAN, largest)


def maximum_number(a: Array, b: Array) -> Array:
    """The larger of a and b; a NaN beside a number is ignored; +0 over -0.

    Source: IEEE 754-2019, section 9.6, maximumNumber; max.f32 of the PTX ISA.
    """
    _check(a, b)
    return _from_number_order(_backend.namespace(a, b).maximum(_number_order(a), _number_order(b)))


def maximum_number_along(a: Array, axis: int) -> Array:
    """The maximum along `axis` under the rules of `maximum_number`: NaN only where all are NaN."""
    _check(a)
    return _from_number_order(_number_order(a).max(axis=axis))


def _number_order(a: Array) -> Array:
    """The keys of `_order`, and 0, below all of them, for every NaN."""
    return _backend.namespace(a).where(is_nan(a), np.uint32(0), _order(a))


def _from_number_order(keys: Array) -> Array:
    xp = _backend.namespace(keys)
    number = xp.where((keys & SIGN) != 0, keys ^ SIGN, ~keys)
    return xp.where(keys == 0, NAN, number)


def _widen(a: Array) -> Array:
    """float64 values of float32 bits, exact; NaN stays NaN."""
    if not _backend.is_jax(a):
        return np.asarray(a).view(np.float32).astype(np.float64)
    xp = _backend.namespace(a)
    magnitude = a & MAGNITUDE
    moved = magnitude.astype(np.uint64) << np.uint64(29)
    rebias = xp.where(magnitude < INFINITY, np.uint64(_REBIAS << 52), _REBIAS_SPECIAL)
    # m 2^-149 = (1 + m 2^-23) 2^-126 - 2^-126, exact, and no operand is a float64 subnormal.
    subnormal = _backend.from_bits(moved + np.uint64((_REBIAS + 1) << 52), np.float64) - 2.0**-126
    wide = xp.where(magnitude < _SMALLEST_NORMAL, _backend.bits(subnormal), moved + rebias)
    sign = (a & SIGN).astype(np.uint64) << np.uint64(32)
    return _backend.from_bits(wide | sign, np.float64)


def _narrow(wide: Array, direction: Direction = "nearest_even") -> Array:
    """float32 bits of float64 values, rounded once by integers. |wide| is 0 or at least 2^-1022."""
    xp = _backend.namespace(wide)
    pattern = _backend.bits(wide)
    low = pattern.astype(np.uint32)
    high = (pattern >> np.uint64(32)).astype(np.uint32)
    sign = high & SIGN
    high = high & MAGNITUDE
    # 27 bits: the 24 of a normal result, two more, and a last one set if anything below is.
    significand = ((high & np.uint32(0xFFFFF)) | np.uint32(0x100000)) << np.uint32(6)
    significand = significand | (low >> np.uint32(26))
    significand = significand | xp.minimum(low & np.uint32(0x3FFFFFF), np.uint32(1))
    exponent = (high >> np.uint32(20)).astype(np.int32)
    # Three bits go in the normal range, more as the result becomes subnormal.
    dropped = xp.clip(3 + (_REBIAS + 1 - exponent), 3, 31).astype(np.uint32)
    one = np.uint32(1)
    if direction == "nearest_even":
        odd = (significand >> dropped) & one
        kept = (significand + ((one << (dropped - one)) - one) + odd) >> dropped
    else:
        significand = xp.where((high | low) == 0, np.uint32(0), significand)
        inward = _inward(sign, direction)
        kept = (significand + xp.where(inward, np.uint32(0), (one << dropped) - one)) >> dropped
    # At the last binade the sum reaches infinity or passes it; a carry into the exponent is right.
    binade = xp.clip(exponent - (_REBIAS + 1), 0, 254).astype(np.uint32) << np.uint32(23)
    result = xp.minimum(kept + binade, INFINITY)
    if direction != "nearest_even":
        overflow = (result == INFINITY) & (high < _SPECIAL_HIGH)
        result = xp.where(overflow & inward, MAX_FINITE, result)
    nan = (high >= _SPECIAL_HIGH) & (significand > np.uint32(1 << 26))
    return xp.where(nan, NAN, result | sign)


def _inward(sign: Array, direction: Direction) -> Array:
    """Where rounding in `direction` takes a value of this sign bit toward zero."""
    if direction == "up":
        return sign != 0
    if direction == "down":
        return sign == 0
    return _backend.namespace(sign).ones_like(sign, dtype=bool)


def _sum_to_odd(p: Array, c: Array) -> Array:
    """float64 p + c rounded to odd: truncated, the last bit set if anything was lost."""
    xp = _backend.namespace(p, c)
    total = p + c
    from_c = total - p
    lost = (p - (total - from_c)) + (c - from_c)
    inexact = xp.abs(lost) > 0.0  # an infinite or NaN total loses NaN: not inexact
    pattern = _backend.bits(total)
    rounded_away = inexact & (((_backend.bits(lost) ^ pattern) & _SIGN64) != 0)
    truncated = pattern - rounded_away.astype(np.uint64)
    return _backend.from_bits(truncated | inexact.astype(np.uint64), np.float64)


def _with_zero_sign(total: Array, p: Array, c: Array, direction: Direction) -> Array:
    """`total` = p + c where an exact zero has IEEE's sign.

    Rounding down, -0 unless both are +0; else +0 unless both are -0. XLA gets it wrong by itself:
    it drops the addition of a constant +0.
    """
    xp = _backend.namespace(total)
    p, c = _backend.bits(p), _backend.bits(c)
    sign = ((p | c) if direction == "down" else (p & c)) & _SIGN64
    return xp.where(total == 0.0, _backend.from_bits(sign, np.float64), total)


def _sum(p: Array, c: Array, direction: Direction) -> Array:
    return _narrow(_with_zero_sign(_sum_to_odd(p, c), p, c, direction), direction)


def _quotient(a: Array, b: Array) -> Array:
    """float64 a / b of two widened float32, safe to round to float32.

    XLA turns a division by a scalar into a multiplication by its rounded reciprocal, a unit or two
    in the last place off. That matters only where the exact quotient is a float32 or halfway
    between two, and then it has at most 25 significant bits: so try the nearest 28-bit number,
    whose product with b is exact.
    """
    xp = _backend.namespace(a, b)
    quotient = a / b
    near = (_backend.bits(quotient) + np.uint64(1 << 24)) & ~np.uint64((1 << 25) - 1)
    near = _backend.from_bits(near, np.float64)
    return xp.where(near * b == a, near, quotient)


def _check(*operands: Array, direction: str = "nearest_even") -> None:
    for x in operands:
        _check_type(x, np.uint32, "uint32 bit patterns")
    if direction not in ("nearest_even", "toward_zero", "up", "down"):
        raise ValueError(
            f"rounding {direction!r} is not one of 'nearest_even', 'toward_zero', 'up', 'down'"
        )


def _check_type(x: Array, dtype: type, wanted: str) -> None:
    if getattr(x, "dtype", None) != dtype:
        raise TypeError(f"operand holds {type_of(x)}; float32 operations take {wanted}")
    _backend.plain("operand", x)  # refuses what is no plain array


@_backend.jit(static=("rounding",))
def add(a: Array, b: Array, *, rounding: Direction = "nearest_even") -> Array:
    """a + b in float32, rounded once."""
    _check(a, b, direction=rounding)
    if rounding != "nearest_even":
        return _sum(_widen(a), _widen(b), rounding)
    if not _backend.uses_jax(a, b):
        return canonical(_backend.bits(_native(a) + _native(b)))
    a, b = _widen(a), _widen(b)
    return _narrow(_with_zero_sign(a + b, a, b, rounding))


@_backend.jit(static=("rounding",))
def subtract(a: Array, b: Array, *, rounding: Direction = "nearest_even") -> Array:
    """a - b in float32, rounded once."""
    return add(a, negate(b), rounding=rounding)


@_backend.jit(static=("rounding",))
def multiply(a: Array, b: Array, *, rounding: Direction = "nearest_even") -> Array:
    """a * b in float32, rounded once."""
    _check(a, b, direction=rounding)
    if rounding == "nearest_even" and not _backend.uses_jax(a, b):
        return canonical(_backend.bits(_native(a) * _native(b)))
    return _narrow(_widen(a) * _widen(b), rounding)


@_backend.jit
def divide(a: Array, b: Array) -> Array:
    """a / b in float32, rounded once to nearest even."""
    _check(a, b)
    if not _backend.uses_jax(a, b):
        return canonical(_backend.bits(_native(a) / _native(b)))
    return _narrow(_quotient(_widen(a), _widen(b)))


@_backend.jit(static=("rounding",))
def fma(a: Array, b: Array, c: Array, *, rounding: Direction = "nearest_even") -> Array:
    """a * b + c in float32, rounded once."""
    _check(a, b, c, direction=rounding)
    return _sum(_widen(a) * _widen(b), _widen(c), rounding)


@_backend.jit
def shift(a: Array, k: Array) -> Array:
    """a * 2^k for int32 k, rounded once to nearest even; overflow gives infinity."""
    _check(a)
    _check_type(k, np.int32, "int32 exponents")
    xp = _backend.namespace(a, k)
    # Beyond 400 in either direction every finite float32 has overflowed or rounded to zero.
    power = (xp.clip(k, -400, 400) + 1023).astype(np.uint64) << np.uint64(52)
    return _narrow(_widen(a) * _backend.from_bits(power, np.float64))


@_backend.jit
def ceil(a: Array) -> Array:
    """The smallest integer not below a, as float32; -0.5 gives -0."""
    _check(a)
    wide = _widen(a)
    return _narrow(_backend.namespace(wide).ceil(wide))


@_backend.jit
def floor(a: Array) -> Array:
    """The largest integer not above a, as float32."""
    _check(a)
    wide = _widen(a)
    return _narrow(_backend.namespace(wide).floor(wide))


@_backend.jit
def to_int32(a: Array) -> Array:
    """Integer-valued float32 as int32, clipped to +-2^30; NaN gives 0."""
    _check(a)
    xp = _backend.namespace(a)
    wide = xp.where(is_nan(a), 0.0, _widen(a))
    return xp.clip(wide, -float(1 << 30), float(1 << 30)).astype(np.int32)


@_backend.jit
def from_int32(n: Array) -> Array:
    """float32 bits of int32 values, rounded to nearest even."""
    _check_type(n, np.int32, "int32 integers here")
    return _narrow(n.astype(np.float64))


def _native(a: Array) -> Array:
    return np.asarray(a).view(np.float32)
