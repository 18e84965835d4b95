"""The random Hadamard transform of 16 columns that NVFP4 training applies before quantizing.

y = x D H / 4 for each 16 columns of a row, where D is a diagonal of signs and H the matrix of
Sylvester: H[i, j] is -1 where i and j have an odd number of bits in common, else +1. In the type of
x: sums in float32, one rounding to a narrower type at the end. float32 adds ascending i. bfloat16
and float16 add 1, 0, 3, 2, ..., 15, 14 and take subnormal elements and sums for zeros, as VDPBF16PS
of x86 does. Source: Transformer Engine d0067d0, NVFP4QuantizerRef._apply_rht, as PyTorch 2.13 ran it
on CPU; the order of the kernel on a GPU is not public, and most sums of bfloat16 are exact.
"""

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.formats.bits import decode_bits, encode_bits
from flamia_ref.formats.rounding import Overflow
from flamia_ref.formats.scalar import FP32, ScalarFormat

WIDTH = 16


def matrix() -> np.ndarray:
    """H as int8 [16, 16]."""
    index = np.arange(WIDTH)
    common = (index[:, None] & index).astype(np.uint8)
    return (1 - 2 * (np.bitwise_count(common) & 1).astype(np.int8)).astype(np.int8)


@_backend.jit(static=("signs", "source"))
def transformed(bits: Array, signs: tuple[int, ...], source: ScalarFormat = FP32) -> Array:
    """float32 bits of y, of those of x [..., columns], columns a multiple of 16.

    Args:
        bits: uint32.
        signs: the diagonal of D, 16 of +1 and -1.
        source: the type of x, to which y is rounded.
    """
    *outer, columns = bits.shape
    if columns % WIDTH:
        raise ValueError(f"a Hadamard transform of 16 takes rows of 16 n columns, not {columns}")
    xp = _backend.namespace(bits)
    x = bits.reshape((*outer, columns // WIDTH, WIDTH))
    x = x if source is FP32 else _float32.flush(x)
    x = _float32.multiply(x, np.asarray(np.float32(0.25).view(np.uint32)))
    flips = matrix() * np.array(signs, np.int8)[:, None] < 0
    total = None
    narrow = source is not FP32
    for i in range(WIDTH):
        place = i ^ 1 if narrow else i
        flip = flips[place].astype(np.uint32) << np.uint32(31)
        term = x[..., place : place + 1] ^ flip
        total = term if total is None else _float32.add(total, term)
        total = _float32.flush(total) if narrow else total
    if source is not FP32:
        total = decode_bits(encode_bits(total, source, overflow=Overflow.NATIVE), source)
    return xp.reshape(total, bits.shape)
