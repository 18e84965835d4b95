"""2^x by a polynomial of degree 3, as attention kernels emulate it beside the special function unit.

Blackwell has too few special function units for all exponentials of a softmax, so kernels compute
some columns with ordinary multiply-adds (Cody and Waite's reduction). Step by step, on float32:

    x1 = max(x, -127)                   a NaN x gives -127
    t  = x1 + 1.5 2^23, rounded down    the low bits of t are floor(x1)
    n  = t - 1.5 2^23
    f  = x1 - n
    p  = fma(fma(fma(c3, f, c2), f, c1), f, 1)
    2^x is the bits of p plus the bits of t shifted left by 23, modulo 2^32

Each operation rounds to nearest even but for t, and flushes subnormals to zero (.ftz). Nothing is
clamped above: from 128 on the bits are what this sum gives, not 2^x. In [-127, -126) the sum is the
pattern of a subnormal, but not of 2^x. From -2^-25 to 0, f is 1 and the result
1 - 8.5e-5.

Source: nvidia-cudnn-frontend 1.32.0, frost/tile_dsl/pointwise.py, exp2_emul_pair. flash-attention
0251105a, flash_attn/cute/utils.py, ex2_emulation_2, has the same steps and coefficients. Whether it
flushes is up to its CuTe DSL (the packed operations of 4.8.1 do not, by default), and shows only for
a negative subnormal x: 0x3f7ffa6b there, where flushing gives 1. Here it is flushed.
"""

from __future__ import annotations

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array

C1 = np.uint32(0x3F31F519)
C2 = np.uint32(0x3E6906A4)
C3 = np.uint32(0x3D9DF09D)

_LOWEST = np.float32(-127).view(np.uint32)
_SHIFTER = np.float32(1.5 * 2**23).view(np.uint32)


@_backend.jit
def exp2_bits(x: Array) -> Array:
    """2^x of float32 bits: uint32 in and out; every NaN is 0x7fffffff."""
    # Nothing else can be subnormal: n is an integer, f is 0, x itself or at least 2^-24, p at least c2.
    x = _float32.maximum_number(_float32.flush(x), _LOWEST)
    t = _float32.add(x, _SHIFTER, rounding="down")
    n = _float32.subtract(t, _SHIFTER)
    f = _float32.subtract(x, n)
    p = _float32.fma(C3, f, C2)
    p = _float32.fma(p, f, C1)
    p = _float32.fma(p, f, _float32.ONE)
    return _float32.canonical((t << np.uint32(23)) + p)
