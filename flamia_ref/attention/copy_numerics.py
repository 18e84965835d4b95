"""The arithmetic of copies: float32 bits of some rows or token blocks to codes and scales, and back.

Each function is compiled by itself for one shape and one operand.
"""

from __future__ import annotations

import numpy as np

from flamia_ref import _backend, _float32, _primitive
from flamia_ref._backend import Array
from flamia_ref.attention import sides
from flamia_ref.attention.product import Operand
from flamia_ref.formats import (
    BF16,
    E8M0,
    FORMATS,
    PRESETS,
    BlockFormat,
    Overflow,
    decode_bits,
    encode_bits,
    encode_blocks,
    least_power,
    quantize_bits,
    value_bits,
)


@_backend.jit
def high(x: Array) -> tuple[Array]:
    """bfloat16 codes of float32 bits."""
    return (sides.bfloat16(x),)


@_backend.jit(static=("operand",))
def scalar(x: Array, *, operand: Operand) -> tuple[Array]:
    """Codes of an operand without scales of its own, divided by its static scale."""
    if operand.static_scale is None:
        element = FORMATS[operand.format]
        overflow = Overflow.NATIVE if element is BF16 else Overflow.SATURATE
        return (encode_bits(x, element, overflow=overflow),)
    power = np.int32(E8M0.bias - operand.static_scale)
    return (encode_bits(_float32.shift(x, power), FORMATS[operand.format]),)


@_backend.jit(static=("operand",))
def descaled(x: Array, descales: Array, *, operand: Operand) -> tuple[Array]:
    """Codes of rows `x` [rows, channels] divided by the descale of each, [rows, 1]."""
    xp = _backend.namespace(x, descales)
    quotient = _float32.divide(x, xp.broadcast_to(descales, x.shape))
    return (encode_bits(quotient, FORMATS[operand.format], overflow=Overflow.SATURATE),)


@_backend.jit(static=("operand",))
def descales(amax: Array, *, operand: Operand) -> tuple[Array]:
    """float32 bits of amax / the largest element, 1 for an amax of 0: what codes are multiplied by."""
    xp = _backend.namespace(amax)
    largest = np.uint32(np.float32(FORMATS[operand.format].max).view(np.uint32))
    quotient = _float32.divide(amax, xp.full(amax.shape, largest, dtype=np.uint32))
    return (xp.where(amax == np.uint32(0), _float32.ONE, quotient),)


@_backend.jit(static=("operand",))
def blocks(x: Array, *, operand: Operand) -> tuple[Array, Array]:
    """Codes and scales of `x` [..., rows, channels], each block by its own values."""
    return quantize_bits(x, PRESETS[operand.format], operand.block)


@_backend.jit(static=("operand",))
def scales(x: Array, *, operand: Operand) -> tuple[Array]:
    """The scales of `x` alone."""
    return (quantize_bits(x, PRESETS[operand.format], operand.block)[1],)


@_backend.jit(static=("operand",))
def by_scales(x: Array, given: Array, *, operand: Operand) -> tuple[Array]:
    """Codes of `x` by scales that are given."""
    return (encode_blocks(x, given, PRESETS[operand.format], operand.block),)


@_backend.jit(static=("operand",))
def with_powers(x: Array, *, operand: Operand) -> tuple[Array, Array, Array]:
    """Codes, scales and the power of two of each row [rows, 1].

    The power is the smallest with which no value is beyond the largest element times the largest scale. It is taken
    out before the blocks are quantized; a row with a NaN is NaN throughout.
    """
    preset = PRESETS[operand.format]
    xp = _backend.namespace(x)
    amax = (x & _float32.MAGNITUDE).max(axis=-1, keepdims=True)
    powers = least_power(amax, preset.element.max * preset.scale.max)
    relative = _float32.shift(x, np.int32(E8M0.bias) - powers.astype(np.int32))
    codes, found = quantize_bits(relative, preset, operand.block)
    nan = _primitive.special(powers == np.uint8(E8M0.nan_code))
    codes = xp.where(nan, np.uint8(preset.element.nan_code), codes)
    return codes, xp.where(nan, np.uint8(preset.scale.nan_code), found), powers


@_backend.jit(static=("operand",))
def values(
    codes: Array, given: Array | None = None, powers: Array | None = None, *, operand: Operand
) -> tuple[Array]:
    """float32 bits of codes [rows, channels] times scales [rows, channel blocks] and powers [rows, 1]."""
    if given is None:
        numbers = decode_bits(codes, FORMATS[operand.format])
        if operand.static_scale is not None:
            numbers = _float32.shift(numbers, np.int32(operand.static_scale - E8M0.bias))
        return (numbers,)
    preset = PRESETS[operand.format]
    numbers = value_bits(codes, _for_channels(given, codes.shape[1], operand), preset)
    if powers is not None:
        # A power that is NaN stands beside scales that are.
        numbers = _float32.shift(numbers, powers.astype(np.int32) - np.int32(E8M0.bias))
    return (numbers,)


def _for_channels(given: Array, channels: int, operand: Operand) -> Array:
    """Scales [rows, channel blocks] as they broadcast against codes of as many channels."""
    columns = (PRESETS[operand.format].block if operand.block is None else operand.block)[1]
    if not isinstance(columns, int) or columns == 1:
        return given
    return _backend.namespace(given).repeat(given, columns, axis=1)[:, :channels]


@_backend.jit(static=("operand", "target"))
def promoted(
    codes: Array,
    given: Array,
    powers: Array | None = None,
    *,
    operand: Operand,
    target: Operand,
) -> tuple[Array, Array]:
    """Codes and scales [rows, 1] of `target` with the values of rows of `operand`.

    Where the scales of a row lie within the exponents of the target's element, its scale is the largest of them, less
    the powers that the target's element reaches beyond the other: no value is rounded. Else the values are quantized.
    """
    source, wanted = PRESETS[operand.format], PRESETS[target.format]
    if not is_exact(source, wanted):
        (numbers,) = values(codes, given, powers, operand=operand)
        return quantize_bits(numbers, wanted, target.block)
    xp = _backend.namespace(codes, given)
    largest = given.max(axis=1, keepdims=True)
    nan = _primitive.special(largest == np.uint8(E8M0.nan_code))
    room = np.int32(wanted.element.emax - source.element.emax)
    least = xp.maximum(largest.astype(np.int32) - room, np.int32(0))
    apart = _for_channels(given, codes.shape[1], operand).astype(np.int32) - least
    numbers = decode_bits(codes, source.element)
    found = encode_bits(numbers, wanted.element, exponent=apart)
    found = xp.where(nan, np.uint8(wanted.element.nan_code), found)
    return found, xp.where(nan, np.uint8(E8M0.nan_code), least.astype(np.uint8))


def is_exact(source: BlockFormat, target: BlockFormat) -> bool:
    """Whether `target`, with one scale a row, holds all values of a row of `source`."""
    if source.row_span is None or source.scale is not E8M0 or target.scale is not E8M0:
        return False
    least = source.element.emin - source.element.mantissa_bits - source.row_span
    room = target.element.emax - source.element.emax
    return (
        source.element.mantissa_bits <= target.element.mantissa_bits
        and source.element.max * 2.0**room <= target.element.max
        and least + room >= target.element.emin - target.element.mantissa_bits
    )
