"""Values of codes in blocks whose scales are powers of two."""

from __future__ import annotations

import numpy as np

from flamia_ref import _backend, _float32, _primitive
from flamia_ref._backend import Array
from flamia_ref.formats.amax import beside, in_blocks, out_of_blocks
from flamia_ref.formats.factors import power_of_two
from flamia_ref.formats.scalar import ScalarFormat


@_backend.jit(static=("element", "block"))
def power_values(
    codes: Array, scales: Array, element: ScalarFormat, block: tuple[int, int]
) -> Array:
    """float32 values of codes times 2^(scale - 127), exact; infinity beyond float32.

    Args:
        codes: element codes [..., rows, columns].
        scales: E8M0 codes [..., ceil(rows / r), ceil(columns / c)] for a block of (r, c).
        element: a signed format of 8 bits at most.
        block: (r, c).
    """
    xp = _backend.namespace(codes, scales)
    blocks = in_blocks(codes, *block)
    y, sign = element_magnitudes(blocks, element)
    power = scales.astype(np.int32) - np.int32(127)
    if not _backend.uses_jax(codes, scales):
        factor = np.where(scales == 255, np.float32(np.nan), np.ldexp(np.float32(1), power))
        value = (y.view(np.float32) * beside(factor)).view(np.uint32)
        value = np.where(value > _float32.INFINITY, _float32.NAN, value | sign)
    else:
        value = _times_power(y, power, scales == np.uint8(255)) | sign
        nan = (value & _float32.MAGNITUDE) > _float32.INFINITY
        value = xp.where(nan, _float32.NAN, value)
    return out_of_blocks(_backend.from_bits(value, np.float32), codes.shape)


def _times_power(y: Array, power: Array, nan: Array) -> Array:
    """float32 bits of y 2^power for magnitudes y from 2^-16 up, 0 or NaN, a NaN in blocks with `nan`; exact.

    What is subnormal is flushed in the product; as an integer, in units of 2^-149, it is found in another one.
    """
    xp = _backend.namespace(y, power)
    first = power >> np.int32(1)
    one = xp.where(_primitive.special(nan), np.float32(np.nan), np.float32(1))
    near, last = (
        beside(one / power_of_two(-first)),
        beside(np.float32(1) / power_of_two(first - power)),
    )
    unit = beside(np.float32(1) / power_of_two(-xp.minimum(power + np.int32(149), np.int32(126))))
    y = _backend.from_bits(y, np.float32)
    # Up to 2^23, the bits of the smallest normal.
    whole = xp.minimum(_backend.bits(y * unit), np.float32(1 << 23).view(np.uint32))
    shifted = _backend.from_bits(whole, np.float32) + np.float32(1 << 23)
    subnormal = _backend.bits(shifted) - np.float32(1 << 23).view(np.uint32)
    return xp.maximum(_backend.bits(y * near * last), subnormal)


def element_magnitudes(codes: Array, element: ScalarFormat) -> tuple[Array, Array]:
    """float32 bits of the magnitudes of codes, 0x7fffffff for a NaN, and of their signs."""
    xp = _backend.namespace(codes)
    code = codes.astype(np.uint32)
    magnitude = code & np.uint32(element.sign_code - 1)
    sign = (code & np.uint32(element.sign_code)) << np.uint32(32 - element.bits)
    least = np.uint32((127 - element.bias) << 23)
    value = (magnitude << np.uint32(23 - element.mantissa_bits)) + least
    # A subnormal m 2^-M 2^emin was read as (1 + m 2^-M) 2^(emin - 1): twice what is over the power; a normal is less.
    over = _backend.from_bits(value, np.float32) - least.view(np.float32)
    value = xp.minimum(value, _backend.bits(over + over))
    if element.infinity_code is not None:
        value = xp.where(magnitude == np.uint32(element.infinity_code), _float32.INFINITY, value)
    if element.has_nan:
        value = xp.where(magnitude >= np.uint32(element.nan_codes.start), _float32.NAN, value)
    return value, sign
