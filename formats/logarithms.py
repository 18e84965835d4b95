"""Exponents of float32 bits, exact or as a library finds them by log2."""

import functools
import math

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.formats.bits import decode_bits, encode_bits
from flamia_ref.formats.block import Log2
from flamia_ref.formats.rounding import Overflow
from flamia_ref.formats.scalar import FP32, ScalarFormat

_OF_ZERO = -4096  # below all exponents: what an exponent of zero counts as


def exponents(d: Array, *, up: bool, log2: Log2 = Log2.EXACT, source: ScalarFormat = FP32) -> Array:
    """floor(log2 d), or ceil(log2 d), int32; -4096 for 0, anything for infinity and NaN.

    Args:
        d: float32 bits of magnitudes; values of `source` where that has 16 bits and `log2` is not
            EXACT.
        up: ceil, not floor.
        log2: how log2 is taken. In float32 it is exact whatever is said here.
        source: the type in which log2 is taken.
    """
    if log2 is not Log2.EXACT and source.bits == 16:
        code = encode_bits(d, source, overflow=Overflow.NATIVE).astype(np.int32)
        table = rounded_exponents(source, log2, up=up)
        return _backend.gather(table, code & np.int32(0x7FFF)).astype(np.int32)
    xp = _backend.namespace(d)
    field, mantissa = d >> np.uint32(23), d & np.uint32(0x7FFFFF)
    # A subnormal counts 2^-149.
    subnormal = _backend.bit_length(mantissa) - np.int32(150)
    found = xp.where(field == 0, subnormal, field.astype(np.int32) - np.int32(127))
    if up:
        below_one = np.uint32(1)
        rest = xp.where(field == 0, mantissa & (mantissa - below_one), mantissa)
        found = found + (rest != 0).astype(np.int32)
    return xp.where(d == 0, np.int32(_OF_ZERO), found)


@functools.cache
def rounded_exponents(source: ScalarFormat, log2: Log2, *, up: bool) -> npt.NDArray[np.int16]:
    """floor or ceil of log2 of every magnitude of a 16-bit format, log2 taken as `Log2` says.

    No logarithm of such a value lies so near to the middle of two values of the format that its
    own rounding, to float32 or to float64, could change what it rounds to.
    """
    codes = np.arange(1 << 15, dtype=np.uint16)
    values = decode_bits(codes, source).view(np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        if log2 is Log2.RATIO:
            taken = _rounded(
                _rounded(np.log(values), source) / _rounded(math.log(2.0), source), source
            )
        else:
            taken = _rounded(np.log2(values), source)
        whole = np.ceil(taken) if up else np.floor(taken)
    whole[~np.isfinite(whole)] = _OF_ZERO
    table = whole.astype(np.int16)
    table.flags.writeable = False
    return table


def _rounded(values: npt.ArrayLike, source: ScalarFormat) -> npt.NDArray[np.float64]:
    """float64 values rounded once to a format."""
    bits = np.asarray(values, np.float64).view(np.uint64)
    codes = encode_bits(bits, source, overflow=Overflow.NATIVE)
    rounded: npt.NDArray[np.float64] = (
        decode_bits(codes, source).view(np.float32).astype(np.float64)
    )
    return rounded
