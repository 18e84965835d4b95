"""Multiplying by one factor a block, exact but for one rounding, under XLA too.

- *A factor is two.* x f is (x 2^a) g with a about half of f's exponent. The first product is exact, neither factor is
  subnormal, so a backend that flushes subnormals flushes only what is below 2^-126.
- *A subnormal is an integer.* Its bits, converted to float32, are x 2^149, exact; the bits of a normal x are at most
  x 2^149. So the larger of x 2^a (0 where x is flushed) and float(bits) 2^(a - 149) is x 2^a for every x.
- *A divisor is a power of two*, or 0, an infinity or a NaN: XLA makes of a division by one value a block a product with
  its reciprocal.
- *Factors of blocks are quotients.* XLA copies cheap operations of one value a block into the loop over elements, and
  computes them for every vector there; a division it leaves in a loop of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32, _primitive
from flamia_ref._backend import Array

_MANTISSA = np.uint32(0x7FFFFF)


class Factor(NamedTuple):
    """m 2^k, one a block: float32 bits of m, in [1, 2), 0, an infinity or a NaN, and int32 k in -149..127."""

    mantissa: Array
    exponent: Array


def power_factor(codes: Array, *, flush: bool = False) -> Factor:
    """2^(127 - code) of E8M0 codes, NaN for 255; with `flush` 0 for code 0."""
    xp = _backend.namespace(codes)
    mantissa = xp.where(_primitive.special(codes == np.uint8(255)), _float32.NAN, _float32.ONE)
    if flush:
        mantissa = xp.where(codes == np.uint8(0), np.uint32(0), mantissa)
    return Factor(mantissa, np.int32(127) - codes.astype(np.int32))


def factor_of(value: Array) -> Factor:
    """Float32 bits of any value from 0 to infinity, or a NaN, as a factor."""
    xp = _backend.namespace(value)
    whole = _backend.bits((value & _MANTISSA).astype(np.int32).astype(np.float32))
    subnormal = value < np.uint32(0x800000)
    normal = xp.where(subnormal, whole, value)
    field = (normal >> np.uint32(23)).astype(np.int32)
    exponent = field - xp.where(subnormal, np.int32(127 + 149), np.int32(127))
    odd = (value == np.uint32(0)) | (value >= _float32.INFINITY)
    mantissa = xp.where(odd, value, (normal & _MANTISSA) | _float32.ONE)
    return Factor(mantissa, xp.where(odd, np.int32(0), exponent))


class Multipliers(NamedTuple):
    """A factor f as float32 values that are normal, 0, infinite or NaN: x f = max(x near, bits(x) far) last.

    The bits of x are converted to float32 there; last is the divisor of the second step where f was one.
    """

    near: Array
    far: Array
    last: Array


def multipliers(factor: Factor, *, divide: bool = False) -> Multipliers:
    """Those of a factor, or of a divisor. Quotients, so that XLA computes them once."""
    xp = _backend.namespace(*factor)
    exponent = -factor.exponent if divide else factor.exponent
    first = exponent >> np.int32(1)
    rest = first - exponent
    # Where this power is cut off, what it is for is below 2^-80 and of no account.
    far = xp.maximum(first - np.int32(149), np.int32(-126))
    one = np.float32(1)
    mantissa = _backend.from_bits(factor.mantissa, np.float32)
    last = mantissa / power_of_two(-rest if divide else rest)
    return Multipliers(one / power_of_two(-first), one / power_of_two(-far), last)


def _computed(table: Array) -> Array:
    """`table` as the result of a sort that moves nothing: what gathers from it reads it, where XLA would compute an
    entry again wherever it is used."""
    import jax

    place = jax.lax.iota(np.int32, table.shape[0])
    return jax.lax.sort((place, table), num_keys=1)[1]


def power_of_two(exponent: Array) -> Array:
    """float32 2^exponent for int32 exponents from -126 to 127."""
    return _backend.from_bits(
        (exponent + np.int32(127)).astype(np.uint32) << np.uint32(23), np.float32
    )


def settled(codes: Array, amax: Array) -> Array:
    """8-bit scale codes, which XLA then computes once however they are made: over 1, of which it does not know that."""
    if not _backend.is_jax(codes):
        return codes
    one = _backend.from_bits(_float32.ONE | (amax >> np.uint32(31)), np.float32)
    return (codes.astype(np.float32) / one).astype(codes.dtype)


def table_factor(scales: Array, table: Array) -> Factor:
    """The factors of 8-bit scale codes, from the float32 bits of those of all 256 codes."""
    if _backend.is_jax(table):
        table = _computed(table)
    return factor_of(_backend.gather(table, scales.astype(np.int32)))


def whole(factor: Factor) -> Array:
    """The factor as float32, of numpy arrays."""
    return np.ldexp(factor.mantissa.view(np.float32), factor.exponent)


def scaled(magnitude: Array, by: Multipliers, *, divide: bool = False) -> Array:
    """x f or x / f as float32, where it is below 2^-126 perhaps 0; `by` broadcasts against x."""
    normal = _backend.from_bits(magnitude, np.float32) * by.near
    subnormal = magnitude.astype(np.int32).astype(np.float32) * by.far
    larger = _backend.namespace(magnitude).maximum(_backend.bits(normal), _backend.bits(subnormal))
    near = _backend.from_bits(larger, np.float32)
    return near / by.last if divide else near * by.last
