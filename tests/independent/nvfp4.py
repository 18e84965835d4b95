"""The preset `cudnn-qat-nvfp4`: e2m1 codes under a UE4M3 scale for 16 elements of a row, without a tensor scale.

Source: nvidia-cudnn-frontend 1.32.0, sdpa/bwd/qat/_nvfp4.py, `_quantize_nvfp4`: amax by a maximum that ignores NaN,
scale = e4m3(max(amax / 6, 2**-9)) saturating, element = x / scale rounded, then to nearest e2m1, saturating, NaN to the
largest code. Both quotients are float32's nearest here.
"""

from collections.abc import Sequence
from fractions import Fraction

from tests.independent import codes, float32, matrices
from tests.independent.operands import Blocks, Matrix, quantize_blocks
from tests.independent.quantized import Quantized

PRESET = "cudnn-qat-nvfp4"
GROUP = 16
SIX = float32.nearest(Fraction(6))
LEAST = float32.nearest(Fraction(1, 512))


def quantize(block: Sequence[int]) -> tuple[list[int], int]:
    """float32 bits of one block -> (e2m1 codes, the block's scale code)."""
    # Without NaN and sign, float32 bits order as the values do.
    amax = max((x & 0x7FFFFFFF for x in block if not float32.is_nan(x)), default=0)
    scale = codes.encode(max(float32.divide(amax, SIX), LEAST), codes.E4M3)
    value = float32.nearest(codes.decode(scale, codes.E4M3))
    return [codes.encode(float32.divide(x, value), codes.E2M1) for x in block], scale


def rows(values: Matrix) -> Blocks:
    """A matrix in blocks of 16 along its rows."""
    return quantize_blocks(values, 1, GROUP, quantize)


def value(code: int, scale: int) -> int:
    """The bfloat16 bits of a code times its scale, which are exact."""
    magnitude = codes.decode(code & 7, codes.E2M1) * codes.decode(scale, codes.E4M3)
    bits = float32.nearest(magnitude, code >> 3)
    if code >> 3 and magnitude:
        bits |= float32.SIGN
    assert not bits & 0xFFFF, "bfloat16 holds six significant bits"
    return bits >> 16


def values(blocks: Blocks) -> Matrix:
    """bfloat16 bits of all values."""
    return [
        [value(code, scales[column // GROUP]) for column, code in enumerate(row)]
        for row, scales in zip(blocks.codes, blocks.scales, strict=True)
    ]


def quantized(matrix: Matrix, width: int) -> Quantized:
    """float32 bits [row][column] of ``width`` columns, for the interpreter."""
    found = rows(matrix)
    return Quantized(
        codes=matrices.integers(found.codes, width),
        element=codes.E2M1,
        scales=matrices.integers(found.scales, -(-width // GROUP)),
        columns=GROUP,
        scale_format="ue4m3",
    )
