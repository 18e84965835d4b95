"""The scale rule `te-mx-e4m3` on one block of float32 values.

Source: TransformerEngine's MXFP8 kernel, common/cast/mxfp8/quantize_mxfp8.cuh at commit d0067d0:
amax by a maximum that ignores NaN, d = amax * (1 / 448) in float32, scale byte = d rounded up to a
power of two (254 for infinity), element = x * 2**(127 - byte) in float32, then to nearest e4m3.
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
