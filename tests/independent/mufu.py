"""ex2.approx.ftz, lg2.approx.ftz and rcp.approx.ftz of sm_90, one table entry at a time.

An entry is the correctly rounded float32 plus a stored difference. The first is computed here by
``decimal`` (or exactly, for the reciprocal), the second is read from the data files. The models
around the tables are those measured over all 2**32 inputs on an NVIDIA H200.
"""

import lzma
from collections.abc import Callable, Mapping
from decimal import Context, Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np

from tests.independent import float32

DATA = Path(__file__).parents[2] / "flamia_ref" / "arithmetic" / "data"
ENTRIES = 1 << 23
# An int8 difference of -128 says that the true bits are in the table's exceptions file.
EXCEPTION = -128

_CONTEXT = Context(prec=60)
_LN2 = Decimal(2).ln(_CONTEXT)
# decimal's exp, ln and division are correctly rounded at 60 digits; what is built from a few of
# them is good to 50 digits with room to spare.
_RELATIVE_ERROR = Fraction(1, 10**50)


def _round_surely(x: Decimal) -> int:
    """x to float32, provided that every real within its error bound rounds to the same bits."""
    exact = Fraction(x)
    bits = float32.nearest(exact)
    for bound in (exact * (1 - _RELATIVE_ERROR), exact * (1 + _RELATIVE_ERROR)):
        if float32.nearest(bound) != bits:
            raise ArithmeticError(f"{x} is too near a rounding boundary: compute more digits")
    return bits


def _decimal(x: Fraction) -> Decimal:
    """x as a Decimal; exact for the arguments used here, which have at most 24 binary places."""
    return _CONTEXT.divide(Decimal(x.numerator), Decimal(x.denominator))


def rounded_power(index: int) -> int:
    """2**x rounded to nearest float32 at x = index * 2**-23, in [0, 1)."""
    x = _decimal(Fraction(index, ENTRIES))
    return _round_surely(_CONTEXT.exp(_CONTEXT.multiply(x, _LN2)))


def rounded_reciprocal(index: int) -> int:
    """1 / x rounded to nearest float32 at x = 1 + index * 2**-23, in [1, 2)."""
    return float32.nearest(Fraction(ENTRIES, ENTRIES + index))


def rounded_logarithm_above(index: int) -> int:
    """log2(x) rounded to nearest float32 at x = 1 + index * 2**-23, in [1, 2)."""
    return _rounded_logarithm(Fraction(ENTRIES + index, ENTRIES))


def rounded_logarithm_below(index: int) -> int:
    """log2(x) rounded to nearest float32 at x = 1/2 + index * 2**-24, in [1/2, 1)."""
    return _rounded_logarithm(Fraction(ENTRIES + index, 2 * ENTRIES))


def _rounded_logarithm(x: Fraction) -> int:
    return _round_surely(_CONTEXT.divide(_CONTEXT.ln(_decimal(x)), _LN2))


REFERENCES: Mapping[str, Callable[[int], int]] = {
    "ex2": rounded_power,
    "rcp": rounded_reciprocal,
    "lg2_above": rounded_logarithm_above,
    "lg2_below": rounded_logarithm_below,
}


@cache
def differences(table: str) -> bytes:
    """The stored differences of one table, 2**23 int8 values as bytes."""
    return lzma.decompress((DATA / f"{table}.i8.xz").read_bytes())


@cache
def exceptions(table: str) -> Mapping[int, int]:
    """Index -> float32 bits for the entries whose difference does not fit."""
    if table not in ("lg2_above", "lg2_below"):
        return {}
    with np.load(DATA / f"{table}_exceptions.npz") as stored:
        return dict(zip(stored["index"].tolist(), stored["bits"].tolist(), strict=True))


@cache
def entry(table: str, index: int) -> int:
    """float32 bits of one entry of table ``ex2``, ``rcp``, ``lg2_above`` or ``lg2_below``."""
    byte = differences(table)[index]
    difference = byte - 256 if byte >= 128 else byte
    if difference == EXCEPTION:
        return exceptions(table)[index]
    return REFERENCES[table](index) + difference


def _flush(bits: int) -> int:
    """A subnormal input counts as a zero of its sign."""
    return bits if bits & 0x7F800000 else bits & float32.SIGN


def exp2(bits: int) -> int:
    """2**x by the sm_90 unit; float32 bits in and out."""
    if float32.is_nan(bits):
        return float32.NAN
    if float32.is_infinite(bits):
        return 0 if bits & float32.SIGN else float32.INFINITY
    x = float32.value(_flush(bits))
    if x >= 128:
        return float32.INFINITY
    if x < -126:
        return 0
    cut = int(abs(x) * ENTRIES)  # toward zero
    position = cut
    if x < 0:
        # One's complement, except where the cut argument is a whole number.
        position = -cut if cut % ENTRIES == 0 else -cut - 1
    whole, index = divmod(position, ENTRIES)
    return entry("ex2", index) + (whole << 23)


def reciprocal(bits: int) -> int:
    """1 / x by the sm_90 unit; float32 bits in and out."""
    if float32.is_nan(bits):
        return float32.NAN
    bits = _flush(bits)
    sign = bits & float32.SIGN
    if float32.is_infinite(bits):
        return sign
    if float32.is_zero(bits):
        return sign | float32.INFINITY
    exponent = (bits >> 23 & 0xFF) - 127
    result = float32.value(entry("rcp", bits & 0x7FFFFF)) / float32.power_of_two(exponent)
    # No entry times a power of two rounds: results too small to be exact are flushed.
    if result < float32.power_of_two(-126):
        return sign
    return sign | float32.nearest(result)


def log2(bits: int) -> int:
    """log2(x) by the sm_90 unit; float32 bits in and out."""
    if float32.is_nan(bits):
        return float32.NAN
    bits = _flush(bits)
    if float32.is_zero(bits):
        return float32.MINUS_INFINITY
    if bits & float32.SIGN:
        return float32.NAN
    if float32.is_infinite(bits):
        return bits
    exponent = (bits >> 23) - 127
    mantissa = bits & 0x7FFFFF
    if exponent >= 0:
        part = entry("lg2_above", mantissa)
    else:
        part, exponent = entry("lg2_below", mantissa), exponent + 1
    return float32.toward_zero(exponent + float32.value(part))
