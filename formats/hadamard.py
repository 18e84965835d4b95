"""The random Hadamard transform of 16 columns that NVFP4 training applies before quantizing.

y = x D H / 4 for each 16 columns of a row, where D is a diagonal of signs and H the matrix of
Sylvester: H[i, j] is -1 where i and j have an odd number of bits in common, else +1. In the type of
x: sums in float32, one rounding to a narrower type at the end. float32 adds ascending i by fused
multiply-adds, which keep the last bits of quarters of subnormals until they are added. bfloat16 and
float16 add 1, 0, 3, 2, ..., 15, 14 and take subnormal elements and sums for zeros, as VDPBF16PS of
x86 does. Source: Transformer Engine d0067d0, NVFP4QuantizerRef._apply_rht, as PyTorch 2.13 ran it on
CPU; the order of the kernel on a GPU is not public, and most sums of bfloat16 are exact.
"""

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.formats.bits import decode_bits, encode_bits
from flamia_ref.formats.rounding import Overflow
from flamia_ref.formats.scalar import FP32, ScalarFormat

WIDTH = 16
_PART = 1 << 14  # blocks of 16 that are worked on at once


def matrix() -> npt.NDArray[np.int8]:
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
    if not _backend.is_jax(bits):
        return _in_parts(bits, signs, source)
    xp = _backend.namespace(bits)
    x = bits.reshape((*outer, columns // WIDTH, WIDTH))
    quarters = _quarters(signs).view(np.uint32).reshape((WIDTH, *(1,) * (x.ndim - 1), WIDTH))
    total = None
    narrow = source is not FP32
    x = _float32.flush(x) if narrow else x
    for i in range(WIDTH):
        place = i ^ 1 if narrow else i
        value, quarter = x[..., place : place + 1], quarters[place]
        first = total is None
        total = _float32.multiply(value, quarter) if first else _float32.fma(value, quarter, total)
        total = _float32.flush(total) if narrow else total
    if narrow:
        total = decode_bits(encode_bits(total, source, overflow=Overflow.NATIVE), source)
    return xp.reshape(total, bits.shape)


def _quarters(signs: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """D H / 4."""
    return (matrix() * np.array(signs, np.int8)[:, None]).astype(np.float32) / np.float32(4)


def _in_parts(
    bits: npt.NDArray[np.uint32], signs: tuple[int, ...], source: ScalarFormat
) -> npt.NDArray[np.uint32]:
    """`transformed` of a numpy array, some rows at a time.

    A sum of two float32, or of one and the quarter of another, is rounded to float64 and then to
    float32 as if once, 53 being 2 * 24 + 2 and more; subnormal ones are exact in float64.
    """
    narrow = source is not FP32
    rows = bits.reshape(-1, WIDTH)
    result = np.empty_like(rows)
    quarters = _quarters(signs).astype(np.float64)
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), _PART):
            part = rows[start : start + _PART]
            x = (_float32.flush(part) if narrow else part).view(np.float32).astype(np.float64)
            total = np.zeros(part.shape, np.float32)
            for i in range(WIDTH):
                place = i ^ 1 if narrow else i
                term = x[:, place : place + 1] * quarters[place]
                total = (term if i == 0 else total + term).astype(np.float32)
                if narrow:
                    total = _float32.flush(total.view(np.uint32)).view(np.float32)
            found = _float32.canonical(total.view(np.uint32))
            if narrow:
                found = decode_bits(encode_bits(found, source, overflow=Overflow.NATIVE), source)
            result[start : start + _PART] = found
    return result.reshape(bits.shape)
