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
_NEAR_ZERO = np.float32(-(2.0**-25)).view(np.uint32)
_SHIFTER = 1.5 * 2.0**23
_DROPPED = np.uint64(29)  # bits of a float64 that a float32 has not
_KEPT = ~np.uint64((1 << 29) - 1)
_JUST_BELOW_HALF = np.uint64((1 << 28) - 1)
_C1, _C2, _C3 = (float(c.view(np.float32)) for c in (C1, C2, C3))


def _rounded(wide: Array) -> Array:
    """float64 rounded to the 24 bits of float32, to nearest even; no value here is subnormal."""
    pattern = _backend.bits(wide)
    odd = (pattern >> _DROPPED) & np.uint64(1)
    return _backend.from_bits((pattern + _JUST_BELOW_HALF + odd) & _KEPT, np.float64)


@_backend.jit
def exp2_bits(x: Array) -> Array:
    """2^x of float32 bits: uint32 in and out; every NaN is 0x7fffffff.

    The steps are done in float64, each result rounded to 24 bits: x + 1.5 2^23 cut is it rounded down,
    because it is positive, and products of two float32 are exact. The sums are rounded twice, first
    to 53 bits; for none of the 2^32 inputs does that show in the result (checked exhaustively).
    """
    xp = _backend.namespace(x)
    # Nothing else can be subnormal: n is an integer, f is 0, x itself or at least 2^-24, p at least c2.
    flushed = xp.where((x & _float32.INFINITY) == 0, np.uint32(0), x)
    # From -2^-25 to 0 the steps give what they give at -2^-25, and float64 would lose less than that.
    moved = xp.where((flushed > _float32.SIGN) & (flushed < _NEAR_ZERO), _NEAR_ZERO, flushed)
    clamped = xp.where(_float32.is_nan(x) | (x > _LOWEST), _LOWEST, moved)
    # XLA flushes subnormals when it widens, and there are none left.
    wide = _backend.from_bits(clamped, np.float32).astype(np.float64)
    shifted = _backend.bits(wide + _SHIFTER) & _KEPT
    n = _rounded(_backend.from_bits(shifted, np.float64) - _SHIFTER)
    f = _rounded(wide - n)
    p = _rounded(_C3 * f + _C2)
    p = _rounded(p * f + _C1)
    p = _backend.bits(_rounded(p * f + 1.0)) >> _DROPPED
    exponent = (shifted >> _DROPPED).astype(np.uint32) << np.uint32(23)
    result = (p - np.uint64((1023 - 127) << 23)).astype(np.uint32) + exponent
    result = xp.where(x == _float32.INFINITY, _float32.NAN, result)  # infinity - infinity
    return _float32.canonical(result)
