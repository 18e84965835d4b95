"""float32 operations in every rounding direction, by exact rationals on Python integers.

`tests.independent.float32` rounds to nearest even; here the direction is an argument. A float32 is
its 32 bits, and every NaN result is 0x7fffffff. Source: IEEE 754-2019, sections 4.3, 6.1 and 6.3.
"""

from fractions import Fraction

NAN, INFINITY, LARGEST, SIGN = 0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF, 1 << 31
DIRECTIONS = ("nearest_even", "toward_zero", "up", "down")


def is_nan(a: int) -> bool:
    return a & ~SIGN > INFINITY


def is_infinite(a: int) -> bool:
    return a & ~SIGN == INFINITY


def units(a: int) -> int:
    """|a| of a finite float32 in units of 2^-149; infinity counts as 2^128."""
    field, fraction = a >> 23 & 0xFF, a & 0x7FFFFF
    return (fraction | 1 << 23) << (field - 1) if field else fraction


def value(a: int) -> Fraction:
    """The value of a finite float32."""
    magnitude = Fraction(units(a), 1 << 149)
    return -magnitude if a & SIGN else magnitude


def rounded(x: Fraction, direction: str, zero_sign: int = 0) -> int:
    """x rounded once. The candidates are neighbouring bit patterns, found by bisection."""
    if x == 0:
        return zero_sign << 31
    sign = int(x < 0)
    # |x| is size / scale units of 2^-149.
    size, scale = abs(x.numerator) << 149, x.denominator
    below, beyond = 0, INFINITY
    if size >= units(beyond) * scale:
        below = beyond - 1
    while beyond - below > 1:
        middle = (below + beyond) // 2
        below, beyond = (middle, beyond) if units(middle) * scale <= size else (below, middle)
    if direction == "nearest_even":
        twice = 2 * size - (units(below) + units(beyond)) * scale
        away = twice > 0 or (twice == 0 and below & 1 == 1)
    else:
        away = units(below) * scale != size and direction == ("down" if sign else "up")
    return sign << 31 | (beyond if away else below)


def product_sign(a: int, b: int) -> int:
    return (a ^ b) >> 31


def add(a: int, b: int, direction: str) -> int:
    if is_nan(a) or is_nan(b) or (is_infinite(a) and is_infinite(b) and a != b):
        return NAN
    if is_infinite(a) or is_infinite(b):
        return a if is_infinite(a) else b
    return rounded(value(a) + value(b), direction, _zero_sign(a >> 31, b >> 31, direction))


def subtract(a: int, b: int, direction: str) -> int:
    return NAN if is_nan(b) else add(a, b ^ SIGN, direction)


def multiply(a: int, b: int, direction: str) -> int:
    if is_nan(a) or is_nan(b):
        return NAN
    sign = product_sign(a, b)
    if is_infinite(a) or is_infinite(b):
        return NAN if 0 in (a & ~SIGN, b & ~SIGN) else sign << 31 | INFINITY
    return rounded(value(a) * value(b), direction, sign)


def divide(a: int, b: int) -> int:
    if is_nan(a) or is_nan(b) or (is_infinite(a) and is_infinite(b)):
        return NAN
    sign = product_sign(a, b)
    if is_infinite(b):
        return sign << 31
    if b & ~SIGN == 0:
        return NAN if a & ~SIGN == 0 else sign << 31 | INFINITY
    if is_infinite(a):
        return sign << 31 | INFINITY
    return rounded(value(a) / value(b), "nearest_even", sign)


def fma(a: int, b: int, c: int, direction: str) -> int:
    product = multiply(a, b, direction)
    if is_nan(product) or is_nan(c):
        return NAN
    if is_infinite(a) or is_infinite(b):
        return NAN if is_infinite(c) and c != product else product
    if is_infinite(c):
        return c
    zero_sign = _zero_sign(product_sign(a, b), c >> 31, direction)
    return rounded(value(a) * value(b) + value(c), direction, zero_sign)


def flush(a: int) -> int:
    """Subnormals as zeros of their sign."""
    return a & SIGN if a >> 23 & 0xFF == 0 else a


def maximum_number(a: int, b: int) -> int:
    """maximumNumber of IEEE 754-2019, 9.6: the larger number, NaN only of two NaN; +0 over -0."""
    if is_nan(a) or is_nan(b):
        return NAN if is_nan(a) and is_nan(b) else b if is_nan(a) else a
    return max(a, b, key=rank)


def rank(a: int) -> tuple[int, Fraction, int]:
    """The order of numbers, -0 before +0."""
    sign = 1 - 2 * (a >> 31)
    if is_infinite(a):
        return (sign, Fraction(0), sign)
    return (0, value(a), sign)


def _zero_sign(a: int, b: int, direction: str) -> int:
    """The sign of a zero sum of terms of signs a and b (6.3); cancelling terms have both."""
    return a | b if direction == "down" else a & b


def shift(a: int, k: int) -> int:
    if is_nan(a):
        return NAN
    if is_infinite(a):
        return a
    k = max(-400, min(400, k))  # all float32 have overflowed or vanished beyond
    return rounded(value(a) * Fraction(2) ** k, "nearest_even", a >> 31)
