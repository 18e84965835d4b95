"""Exponentials, logarithms and tanh of float32, rounded correctly: decimals of 60 places, more than enough."""

from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache

from tests.independent import float32

_CONTEXT = Context(prec=60, Emin=-10_000, Emax=10_000)
_LN2 = _CONTEXT.ln(Decimal(2))
_MARGIN = Fraction(1, 10**45)  # of the result
_BEYOND = 256  # the exponential of more is out of float32's range


@lru_cache(maxsize=1 << 16)
def exp(x: int) -> int:
    """e**x; subnormal results are kept."""
    if float32.is_nan(x):
        return float32.NAN
    is_negative = bool(x & float32.SIGN)
    if float32.is_infinite(x) or abs(float32.value(x)) > _BEYOND:
        return 0 if is_negative else float32.INFINITY
    if float32.is_zero(x):
        return float32.ONE
    return _rounded(_CONTEXT.exp, x)


@lru_cache(maxsize=1 << 16)
def log(x: int) -> int:
    """The natural logarithm; -inf of either zero, NaN below."""
    if float32.is_nan(x) or (x & float32.SIGN and not float32.is_zero(x)):
        return float32.NAN
    if float32.is_zero(x):
        return float32.MINUS_INFINITY
    if x in (float32.ONE, float32.INFINITY):
        return 0 if x == float32.ONE else float32.INFINITY
    return _rounded(_CONTEXT.ln, x)


@lru_cache(maxsize=1 << 16)
def exp2(x: int) -> int:
    """2**x; subnormal results are kept."""
    if float32.is_nan(x):
        return float32.NAN
    is_negative = bool(x & float32.SIGN)
    if float32.is_infinite(x) or abs(float32.value(x)) > _BEYOND:
        return 0 if is_negative else float32.INFINITY
    exponent = float32.value(x)
    if exponent.denominator == 1:
        return float32.nearest(Fraction(2) ** exponent.numerator)
    return _rounded(lambda y: _CONTEXT.exp(_CONTEXT.multiply(y, _LN2)), x)


@lru_cache(maxsize=1 << 16)
def log2(x: int) -> int:
    """The logarithm of base 2; -inf of either zero, NaN below."""
    special = log(x)
    if float32.is_nan(special) or float32.is_infinite(special):
        return special
    significand, exponent = float32.split(x)
    if significand & (significand - 1) == 0:
        return float32.nearest(Fraction(significand.bit_length() - 1 + exponent))
    return _rounded(lambda y: _CONTEXT.divide(_CONTEXT.ln(y), _LN2), x)


@lru_cache(maxsize=1 << 16)
def tanh(x: int) -> int:
    """The hyperbolic tangent; zeros keep their sign."""
    if float32.is_nan(x):
        return float32.NAN
    sign = x & float32.SIGN
    if float32.is_infinite(x) or abs(float32.value(x)) > _BEYOND:
        return float32.ONE | sign
    if abs(float32.value(x)) < Fraction(1, 1 << 13):  # x - x**3 / 3 is nearest to x there
        return x

    def quotient(y: Decimal) -> Decimal:
        power = _CONTEXT.exp(_CONTEXT.multiply(2, y))
        return _CONTEXT.divide(_CONTEXT.subtract(power, 1), _CONTEXT.add(power, 1))

    return _rounded(quotient, x)


def _rounded(function: Callable[[Decimal], Decimal], x: int) -> int:
    value = float32.value(x)
    exact = _CONTEXT.divide(Decimal(value.numerator), Decimal(value.denominator))
    found = Fraction(function(exact))
    low, high = (float32.nearest(found * (1 + sign * _MARGIN)) for sign in (-1, 1))
    assert low == high, f"{x:#x} needs more places"
    return low
