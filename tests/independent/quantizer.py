"""The scale rules `te-mx-e4m3` and `cudnn-mx-e4m3` on one block of float32 values.

Source of the first: TransformerEngine's MXFP8 kernel, common/cast/mxfp8/quantize_mxfp8.cuh at
commit d0067d0: amax by a maximum that ignores NaN, d = amax * (1 / 448) in float32, scale byte = d
rounded up to a power of two (254 for infinity), element = x * 2**(127 - byte) in float32, then to
nearest e4m3. The second is cvt_amax_to_e8m0_rp of cuDNN's backward (nvidia-cudnn-frontend 1.32.0,
_bprop_mxfp8_common.py): the byte follows from the bits of amax, which rounds amax / 448 up exactly,
and in a block whose byte is 0 the inverse scale is 0, so that every number becomes a zero of its sign.
"""

from collections.abc import Sequence
from fractions import Fraction

from tests.independent import codes, float32

RECIPROCAL_OF_LARGEST = float32.nearest(Fraction(1, 448))


def quantize(block: Sequence[int]) -> tuple[list[int], int]:
    """float32 bits of one block -> (e4m3 codes, the block's E8M0 byte)."""
    # Without NaN and sign, float32 bits order as the values do.
    amax = max((x & 0x7FFFFFFF for x in block if not float32.is_nan(x)), default=0)
    byte = codes.encode_scale_up(float32.multiply(amax, RECIPROCAL_OF_LARGEST))
    return [codes.encode(float32.shift(x, 127 - byte), codes.E4M3) for x in block], byte


def quantize_flushing(block: Sequence[int]) -> tuple[list[int], int]:
    """The rule of cuDNN's backward: a block with byte 0 holds only zeros with their signs, and NaN."""
    amax = max((x & 0x7FFFFFFF for x in block if not float32.is_nan(x)), default=0)
    exponent, mantissa = amax >> 23, amax & 0x7FFFFF
    byte = 254 if exponent == 255 else max(0, exponent - 8 + (mantissa > 0x600000))
    if byte == 0:
        # The sign bit of e4m3 is 0x80.
        return [codes.E4M3.nan if float32.is_nan(x) else x >> 31 << 7 for x in block], 0
    return [codes.encode(float32.shift(x, 127 - byte), codes.E4M3) for x in block], byte
