"""IEEE binary32 and bfloat16 as bit patterns, computed with exact rationals.

A float32 is an ``int``, its 32 bits. Every operation decodes to :class:`fractions.Fraction`, works
exactly, and rounds once to nearest even; subnormals are kept, overflow gives an infinity, and every
NaN result is ``NAN``. Source: IEEE 754-2019, sections 3.4, 4.3.1 and 5.4.
"""

import math
from fractions import Fraction

NAN = 0x7FFFFFFF
INFINITY = 0x7F800000
MINUS_INFINITY = 0xFF800000
ONE = 0x3F800000
SIGN = 0x80000000
BFLOAT16_NAN = 0x7FFF


def is_nan(bits: int) -> bool:
    """Whether the float32 is a NaN of any payload."""
    return bits & 0x7FFFFFFF > INFINITY


def is_infinite(bits: int) -> bool:
    """Whether the float32 is plus or minus infinity."""
    return bits & 0x7FFFFFFF == INFINITY


def is_zero(bits: int) -> bool:
    """Whether the float32 is plus or minus zero."""
    return bits & 0x7FFFFFFF == 0


def value(bits: int) -> Fraction:
    """The exact value of a finite float32. Raises ValueError for NaN and infinities."""
    field = bits >> 23 & 0xFF
    if field == 0xFF:
        raise ValueError(f"float32 bits {bits:#010x} have no finite value: pass a finite one")
    significand = bits & 0x7FFFFF
    if field == 0:
        field = 1
    else:
        significand |= 0x800000
    magnitude = significand * power_of_two(field - 150)
    return -magnitude if bits & SIGN else magnitude


def power_of_two(exponent: int) -> Fraction:
    """2**exponent, exact."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def floor_log2(x: Fraction) -> int:
    """The largest e with 2**e <= x, for x > 0."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if power_of_two(exponent) <= x else exponent - 1


def nearest_even_integer(x: Fraction) -> int:
    """x >= 0 rounded to the nearest integer, ties to the even one."""
    whole, rest = divmod(x.numerator, x.denominator)
    doubled = 2 * rest
    if doubled > x.denominator or (doubled == x.denominator and whole & 1):
        return whole + 1
    return whole


def _nearest(x: Fraction, sign: int, fraction_bits: int) -> int:
    """Round to a format with float32's exponent range; ``sign`` (0 or 1) is used when x is 0."""
    if x:
        sign = int(x < 0)
    magnitude = abs(x)
    infinity = 0xFF << fraction_bits
    pattern = 0
    if magnitude:
        exponent = max(floor_log2(magnitude), -126)
        integer = nearest_even_integer(magnitude / power_of_two(exponent - fraction_bits))
        # Adding the significand with its hidden bit to the field carries into the next binade by
        # itself, and out of the subnormals too.
        pattern = min((exponent + 126 << fraction_bits) + integer, infinity)
    return sign << (8 + fraction_bits) | pattern


def nearest(x: Fraction, zero_sign: int = 0) -> int:
    """x rounded once to float32, to nearest even; a zero x gets the sign ``zero_sign``."""
    return _nearest(x, zero_sign, 23)


def toward_zero(x: Fraction) -> int:
    """x cut to float32; zero is +0 or, from below, -0; 2**128 and more is an infinity."""
    sign = int(x < 0)
    magnitude = abs(x)
    pattern = 0
    if magnitude:
        exponent = max(floor_log2(magnitude), -126)
        integer = math.floor(magnitude / power_of_two(exponent - 23))
        pattern = min((exponent + 126 << 23) + integer, INFINITY)
    return sign << 31 | pattern


def multiply(a: int, b: int) -> int:
    """a * b."""
    if is_nan(a) or is_nan(b):
        return NAN
    sign = (a ^ b) >> 31
    if is_infinite(a) or is_infinite(b):
        return NAN if is_zero(a) or is_zero(b) else sign << 31 | INFINITY
    return nearest(value(a) * value(b), sign)


def add(a: int, b: int) -> int:
    """a + b."""
    if is_nan(a) or is_nan(b):
        return NAN
    if is_infinite(a) or is_infinite(b):
        if is_infinite(a) and is_infinite(b):
            return a if a == b else NAN
        return a if is_infinite(a) else b
    # A zero sum is -0 only when both terms are -0 (x + -x is +0 under round to nearest).
    return nearest(value(a) + value(b), (a & b) >> 31)


def negate(a: int) -> int:
    """-a."""
    return NAN if is_nan(a) else a ^ SIGN


def fused_multiply_add(a: int, b: int, c: int) -> int:
    """a * b + c with one rounding."""
    if is_nan(a) or is_nan(b) or is_nan(c):
        return NAN
    sign = (a ^ b) >> 31
    if is_infinite(a) or is_infinite(b):
        if is_zero(a) or is_zero(b):
            return NAN
        product = sign << 31 | INFINITY
        return NAN if is_infinite(c) and c != product else product
    if is_infinite(c):
        return c
    return nearest(value(a) * value(b) + value(c), sign & c >> 31)


def shift(a: int, exponent: int | float) -> int:
    """a * 2**exponent with one rounding; ``-math.inf`` as exponent turns every number into zero."""
    if is_nan(a):
        return NAN
    if exponent == -math.inf:
        return a & SIGN
    if is_infinite(a) or is_zero(a):
        return a
    # Beyond these bounds every float32 overflows or vanishes: no need for a power of 2**2**128.
    bounded = max(-400, min(400, int(exponent)))
    return nearest(value(a) * power_of_two(bounded), a >> 31)


def ceiling(a: int) -> int:
    """The smallest integer not below a; a number in (-1, 0] that is not +0 gives -0."""
    if is_nan(a):
        return NAN
    if is_infinite(a):
        return a
    return nearest(Fraction(math.ceil(value(a))), a >> 31)


def from_bfloat16(bits: int) -> int:
    """bfloat16 bits (16) to float32 bits, exact; a NaN keeps its payload."""
    return bits << 16


def to_bfloat16(bits: int) -> int:
    """float32 bits rounded to nearest even bfloat16 bits (16); NaN becomes 0x7fff."""
    if is_nan(bits):
        return BFLOAT16_NAN
    if is_infinite(bits):
        return bits >> 16
    return _nearest(value(bits), bits >> 31, 7)
