"""Rounding to a small format by an addition: the fast way to element codes.

A float32 y rounds to a format with M mantissa bits and smallest normal exponent emin when 2^(23 - M) times the power of
two at or below max(|y|, 2^emin) is added to it: the last place of the sum is that of the format, subnormals of it
included, and the sum rounds to nearest even. XLA could contract the addition with a product before it; it never meets
one, since an integer minimum lies between. The codes are those of `encode_bits`, for every bit pattern.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.formats.amax import beside
from flamia_ref.formats.factors import Factor, Multipliers, multipliers, scaled, whole
from flamia_ref.formats.rounding import Overflow, Rounding
from flamia_ref.formats.scalar import ScalarFormat

_EXPONENT = np.uint32(0x7F800000)


def fits(element: ScalarFormat, rounding: Rounding, overflow: Overflow) -> bool:
    """Whether `codes_by_factor` has elements like these."""
    return (
        rounding is Rounding.NEAREST_EVEN
        and overflow is Overflow.SATURATE
        and element.signed
        and element.has_zero
        and 0 < element.mantissa_bits <= 7
        and element.bits <= 8
        and element.exponent_bits < 8
    )


def codes_by_factor(
    x: Array, factor: Factor, element: ScalarFormat, *, divide: bool = False
) -> Array:
    """RNE codes of fl(x f), or of fl(x / f), saturated, one factor a block; the element's NaN code where that is NaN.

    Args:
        x: float32 bits (uint32) or bfloat16 bits (uint16), in blocks [..., down, rows, across, columns].
        factor: [..., down, across].
        element: as `fits` says.
        divide: the factor is a divisor.

    Returns codes like x.
    """
    bits, magnitude = _bits_and_magnitude(x)
    if _backend.uses_jax(x, *factor):
        by = Multipliers(*map(beside, multipliers(factor, divide=divide)))
        y = scaled(magnitude, by, divide=divide)
    elif divide:
        y = magnitude.view(np.float32) / beside(whole(factor))
    else:
        y = magnitude.view(np.float32) * beside(whole(factor))
    return _rounded(y, bits, element)


def _bits_and_magnitude(x: Array) -> tuple[Array, Array]:
    bits = x.astype(np.uint32) << np.uint32(16) if x.dtype == np.uint16 else x
    return bits, bits & _float32.MAGNITUDE


class Constants(NamedTuple):
    """Numbers of an element format, computed once."""

    shift: np.uint32  # mantissa bits of float32 that it lacks
    smallest: np.uint32  # its smallest normal
    largest: np.uint32
    added: np.uint32  # to the power of two below y, for the addend that rounds y
    sign_shift: np.uint32
    sign: np.uint32
    nan: np.uint32


@functools.cache
def constants(element: ScalarFormat) -> Constants:
    """Those of an element format."""
    shift, smallest = 23 - element.mantissa_bits, 127 + element.emin
    # The constant of the code's exponent is added in the last places of the sum, modulo 256; it is even.
    constant = -(smallest << element.mantissa_bits) % 256
    numbers = (
        shift,
        smallest << 23,
        int(np.float32(element.max).view(np.uint32)),
        (shift << 23) + constant,
        32 - element.bits,
        element.sign_code if element.signed else 0,
        element.nan_code,
    )
    return Constants(*map(np.uint32, numbers))


def _rounded(y: Array, bits: Array, element: ScalarFormat) -> Array:
    """Codes of magnitudes y with the signs of `bits`."""
    xp = _backend.namespace(y)
    number = constants(element)
    sign = (bits >> number.sign_shift) & number.sign
    nan = y != y
    y = xp.minimum(_backend.bits(y), number.largest)
    power = xp.maximum(y & _EXPONENT, number.smallest)
    total = _backend.from_bits(y, np.float32) + _backend.from_bits(power + number.added, np.float32)
    code = (_backend.bits(total) - power + (power >> number.shift)) | sign
    if _backend.is_jax(y) or nan.any():
        code = xp.where(nan, number.nan, code)
    return code.astype(element.code_dtype)
