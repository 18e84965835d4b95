"""IEEE binary32 and bfloat16 as bit patterns, computed with exact rationals.

A float32 is an ``int``, its 32 bits. Every operation works exactly, on an integer times a power of
two or on a :class:`fractions.Fraction`, and rounds once, to nearest even unless it says otherwise;
subnormals are kept, overflow gives an infinity, and every NaN result is ``NAN``. Source: IEEE
754-2019, sections 3.4, 4.3.1 and 5.4.

The five arithmetic operations take a ``direction`` of ``DIRECTIONS`` and ``ftz``, with which
subnormal operands are zeros of their sign, and results too that would be below 2**-126 if the
exponent had no lower limit.
"""

import math
from fractions import Fraction
from functools import cache

NAN = 0x7FFFFFFF
INFINITY = 0x7F800000
MINUS_INFINITY = 0xFF800000
ONE = 0x3F800000
SIGN = 0x80000000
BFLOAT16_NAN = 0x7FFF
DIRECTIONS = ("nearest_even", "toward_zero", "up", "down")


def is_nan(bits: int) -> bool:
    """Whether the float32 is a NaN of any payload."""
    return bits & 0x7FFFFFFF > INFINITY


def is_infinite(bits: int) -> bool:
    """Whether the float32 is plus or minus infinity."""
    return bits & 0x7FFFFFFF == INFINITY


def is_zero(bits: int) -> bool:
    """Whether the float32 is plus or minus zero."""
    return bits & 0x7FFFFFFF == 0


def split(bits: int) -> tuple[int, int]:
    """A finite float32 as (signed integer m, exponent e): its value is m * 2**e.

    Raises ValueError for NaN and infinities.
    """
    field = bits >> 23 & 0xFF
    if field == 0xFF:
        raise ValueError(f"float32 bits {bits:#010x} have no finite value: pass a finite one")
    significand = bits & 0x7FFFFF
    if field == 0:
        field = 1
    else:
        significand |= 0x800000
    return -significand if bits & SIGN else significand, field - 150


def value(bits: int) -> Fraction:
    """The exact value of a finite float32. Raises ValueError for NaN and infinities."""
    significand, exponent = split(bits)
    return significand * power_of_two(exponent)


@cache
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


def nearest_even_multiple(magnitude: int, exponent: int, unit: int) -> int:
    """magnitude * 2**exponent, not negative, as the nearest multiple of 2**unit, ties to even."""
    places = unit - exponent
    if places <= 0:
        return magnitude << -places
    whole = magnitude >> places
    doubled = (magnitude - (whole << places)) * 2
    return whole + (doubled > 1 << places or (doubled == 1 << places and whole & 1))


def round_dyadic(significand: int, exponent: int, zero_sign: int, fraction_bits: int = 23) -> int:
    """significand * 2**exponent rounded once to a format with float32's exponent range.

    A zero gets the sign ``zero_sign`` (0 or 1).
    """
    if not significand:
        return zero_sign << (8 + fraction_bits)
    magnitude = abs(significand)
    least = -126 - fraction_bits
    unit = max(exponent + magnitude.bit_length() - 1 - fraction_bits, least)
    integer = nearest_even_multiple(magnitude, exponent, unit)
    # Adding the significand with its hidden bit to the field carries into the next binade by
    # itself, and out of the subnormals too.
    pattern = min((unit - least << fraction_bits) + integer, 0xFF << fraction_bits)
    return int(significand < 0) << (8 + fraction_bits) | pattern


def round_directed(
    significand: int, exponent: int, zero_sign: int, direction: str, ftz: bool = False
) -> int:
    """significand * 2**exponent rounded once to float32 in a direction.

    A zero gets the sign ``zero_sign`` (0 or 1).
    """
    if direction == "nearest_even" and not ftz:
        return round_dyadic(significand, exponent, zero_sign)
    if not significand:
        return zero_sign << 31
    sign, magnitude = int(significand < 0), abs(significand)
    outward = direction == ("down" if sign else "up")

    def multiple(unit: int) -> int:
        if direction == "nearest_even":
            return nearest_even_multiple(magnitude, exponent, unit)
        places = unit - exponent
        if places <= 0:
            return magnitude << -places
        return -(-magnitude >> places) if outward else magnitude >> places

    unit = exponent + magnitude.bit_length() - 24
    if ftz and unit + multiple(unit).bit_length() - 1 < -126:
        return sign << 31
    unit = max(unit, -149)
    pattern = (unit + 149 << 23) + multiple(unit)
    if pattern >= INFINITY:
        pattern = INFINITY if outward or direction == "nearest_even" else INFINITY - 1
    return sign << 31 | pattern


def nearest(x: Fraction, zero_sign: int = 0) -> int:
    """x rounded once to float32, to nearest even; a zero x gets the sign ``zero_sign``."""
    if not x:
        return zero_sign << 31
    magnitude = abs(x)
    exponent = max(floor_log2(magnitude), -126)
    integer = nearest_even_integer(magnitude / power_of_two(exponent - 23))
    return int(x < 0) << 31 | min((exponent + 126 << 23) + integer, INFINITY)


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


def multiply(a: int, b: int, direction: str = "nearest_even", ftz: bool = False) -> int:
    """a * b."""
    if is_nan(a) or is_nan(b):
        return NAN
    a, b = (flush(a), flush(b)) if ftz else (a, b)
    sign = (a ^ b) >> 31
    if is_infinite(a) or is_infinite(b):
        return NAN if is_zero(a) or is_zero(b) else sign << 31 | INFINITY
    (a_significand, a_exponent), (b_significand, b_exponent) = split(a), split(b)
    product = a_significand * b_significand
    return round_directed(product, a_exponent + b_exponent, sign, direction, ftz)


def _exact_sum(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The sum of two numbers that are an integer times a power of two, as another such."""
    exponent = min(a[1], b[1])
    return (a[0] << a[1] - exponent) + (b[0] << b[1] - exponent), exponent


def add(a: int, b: int, direction: str = "nearest_even", ftz: bool = False) -> int:
    """a + b."""
    special = _special_sum(a, b)
    if special is not None:
        return special
    a, b = (flush(a), flush(b)) if ftz else (a, b)
    if is_zero(b) and not is_zero(a):
        return a
    zero_sign = _zero_sign(a >> 31, b >> 31, direction)
    return round_directed(*_exact_sum(split(a), split(b)), zero_sign, direction, ftz)


def _zero_sign(a: int, b: int, direction: str) -> int:
    """The sign of a zero sum of terms with these signs; terms that cancel have both.

    It is minus only when both are (x + -x is +0), but for rounding down, where it is plus only
    when both are.
    """
    return a | b if direction == "down" else a & b


def _special_sum(a: int, b: int) -> int | None:
    """a + b where one of them is NaN or infinite, else None."""
    if is_nan(a) or is_nan(b):
        return NAN
    if is_infinite(a) or is_infinite(b):
        if is_infinite(a) and is_infinite(b):
            return a if a == b else NAN
        return a if is_infinite(a) else b
    return None


def add_down(a: int, b: int) -> int:
    """a + b rounded toward minus infinity (IEEE 754 roundTowardNegative)."""
    special = _special_sum(a, b)
    if special is not None:
        return special
    if is_zero(a) and is_zero(b):
        return (a | b) & SIGN
    exact = value(a) + value(b)
    if not exact:
        return SIGN
    magnitude = abs(exact)
    exponent = max(floor_log2(magnitude), -126)
    multiple = magnitude / power_of_two(exponent - 23)
    if exact > 0:
        return min((exponent + 126 << 23) + math.floor(multiple), INFINITY - 1)
    return SIGN | min((exponent + 126 << 23) + math.ceil(multiple), INFINITY)


def subtract(a: int, b: int, direction: str = "nearest_even", ftz: bool = False) -> int:
    """a - b."""
    return add(a, negate(b), direction, ftz)


def divide(a: int, b: int, direction: str = "nearest_even", ftz: bool = False) -> int:
    """a / b."""
    if is_nan(a) or is_nan(b):
        return NAN
    a, b = (flush(a), flush(b)) if ftz else (a, b)
    sign = (a ^ b) & SIGN
    if is_infinite(a) or is_zero(b):
        if (is_infinite(a) and is_infinite(b)) or (is_zero(a) and is_zero(b)):
            return NAN
        return sign | INFINITY
    if is_infinite(b):
        return sign
    (a_significand, a_exponent), (b_significand, b_exponent) = split(a), split(b)
    # 64 places more than the operands have, and one that says whether anything is left.
    whole, rest = divmod(abs(a_significand) << 88, abs(b_significand))
    quotient = whole << 1 | (rest > 0)
    exponent = a_exponent - b_exponent - 89
    return round_directed(-quotient if sign else quotient, exponent, sign >> 31, direction, ftz)


def order(a: int) -> int:
    """An integer that orders float32 numbers, infinities too, as their values, -0 below +0."""
    return ~(a & 0x7FFFFFFF) if a & SIGN else a


def maxnum(a: int, b: int) -> int:
    """PTX max: the larger; a number against a NaN; NaN where both are; +0 against -0."""
    if is_nan(a):
        return NAN if is_nan(b) else b
    if is_nan(b):
        return a
    return max(a, b, key=order)


def minnum(a: int, b: int) -> int:
    """PTX min: the smaller; a number against a NaN; NaN where both are; -0 against +0."""
    if is_nan(a):
        return NAN if is_nan(b) else b
    if is_nan(b):
        return a
    return min(a, b, key=order)


def exceeds(a: int, b: int) -> bool:
    """a > b; false where one is NaN."""
    if is_nan(a) or is_nan(b) or (is_zero(a) and is_zero(b)):
        return False
    return order(a) > order(b)


def flush(a: int) -> int:
    """A subnormal becomes the zero of its sign (PTX .ftz)."""
    return a if a & 0x7F800000 else a & SIGN


def negate(a: int) -> int:
    """-a."""
    return NAN if is_nan(a) else a ^ SIGN


def fused_multiply_add(
    a: int, b: int, c: int, direction: str = "nearest_even", ftz: bool = False
) -> int:
    """a * b + c with one rounding."""
    if is_nan(a) or is_nan(b) or is_nan(c):
        return NAN
    a, b, c = (flush(a), flush(b), flush(c)) if ftz else (a, b, c)
    sign = (a ^ b) >> 31
    if is_infinite(a) or is_infinite(b):
        if is_zero(a) or is_zero(b):
            return NAN
        product = sign << 31 | INFINITY
        return NAN if is_infinite(c) and c != product else product
    if is_infinite(c):
        return c
    (a_significand, a_exponent), (b_significand, b_exponent) = split(a), split(b)
    exact = a_significand * b_significand, a_exponent + b_exponent
    zero_sign = _zero_sign(sign, c >> 31, direction)
    return round_directed(*_exact_sum(exact, split(c)), zero_sign, direction, ftz)


def shift(a: int, exponent: int | float) -> int:
    """a * 2**exponent with one rounding; ``-math.inf`` as exponent turns every number into zero."""
    if is_nan(a):
        return NAN
    if exponent == -math.inf:
        return a & SIGN
    if is_infinite(a) or is_zero(a) or not exponent:
        return a
    # Beyond these bounds every float32 overflows or vanishes: no need for a power of 2**2**128.
    bounded = max(-400, min(400, int(exponent)))
    significand, own_exponent = split(a)
    return round_dyadic(significand, own_exponent + bounded, a >> 31)


def ceiling(a: int) -> int:
    """The smallest integer not below a; a number in (-1, 0] that is not +0 gives -0."""
    if is_nan(a):
        return NAN
    if is_infinite(a):
        return a
    significand, exponent = split(a)
    whole = significand << exponent if exponent >= 0 else -(-significand >> -exponent)
    return round_dyadic(whole, 0, a >> 31)


def floor(a: int) -> int:
    """The largest integer not above a; -0 stays -0."""
    if is_nan(a):
        return NAN
    if is_infinite(a):
        return a
    significand, exponent = split(a)
    whole = significand << exponent if exponent >= 0 else significand >> -exponent
    return round_dyadic(whole, 0, a >> 31)


def from_bfloat16(bits: int) -> int:
    """bfloat16 bits (16) to float32 bits, exact; a NaN keeps its payload."""
    return bits << 16


def to_bfloat16(bits: int) -> int:
    """float32 bits rounded to nearest even bfloat16 bits (16); NaN becomes 0x7fff."""
    if is_nan(bits):
        return BFLOAT16_NAN
    if is_infinite(bits):
        return bits >> 16
    return round_dyadic(*split(bits), bits >> 31, 7)


def multiply_bfloat16(a: int, b: int) -> int:
    """a * b of two bfloat16 (16 bits), rounded once to bfloat16; NaN is 0x7fff."""
    a, b = from_bfloat16(a), from_bfloat16(b)
    exact = multiply(a, b)  # for its special values: zeros, infinities, NaN
    if is_nan(a) or is_nan(b) or is_infinite(a) or is_infinite(b):
        return to_bfloat16(exact)
    (a_significand, a_exponent), (b_significand, b_exponent) = split(a), split(b)
    significand, exponent = a_significand * b_significand, a_exponent + b_exponent
    return round_dyadic(significand, exponent, exact >> 31, 7)
