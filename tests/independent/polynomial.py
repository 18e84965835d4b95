"""exp2 on the FMA pipe, the model `polynomial3`: a cubic on the fractional part, one float32 at a time.

Every operation flushes subnormal operands and results to zeros of their signs (PTX .ftz). A NaN
counts as -127, for the first step is a maximum that ignores it. There is no clamp above: an
argument over 127 gives what the integer addition of the bits gives, infinities and negative
numbers among it.
"""

from collections.abc import Callable

from tests.independent import float32

LOWEST = 0xC2FE0000  # -127
MAGIC = 0x4B400000  # 1.5 * 2**23 = 12582912: the sum's last place is 1
C1, C2, C3 = 0x3F31F519, 0x3E6906A4, 0x3D9DF09D


def _flushing(operation: Callable[..., int], *operands: int) -> int:
    return float32.flush(operation(*(float32.flush(x) for x in operands)))


def exp2(bits: int) -> int:
    """2**x, off by up to 8.8e-5 of itself; float32 bits in and out."""
    fma = float32.fused_multiply_add
    x = _flushing(float32.maxnum, bits, LOWEST)
    t = _flushing(float32.add_down, x, MAGIC)
    n = _flushing(float32.subtract, t, MAGIC)
    f = _flushing(float32.subtract, x, n)
    p = _flushing(fma, C3, f, C2)
    p = _flushing(fma, p, f, C1)
    p = _flushing(fma, p, f, float32.ONE)
    result = ((t << 23) + p) & 0xFFFFFFFF
    return float32.NAN if float32.is_nan(result) else result
