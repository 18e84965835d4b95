"""float32 operations, special functions and conversions on intervals.

A function that rounds a monotone function of each argument takes its least and greatest value at ends of the
intervals, so it is evaluated at all combinations of ends, by the operations of `float32`, and nothing is added: the
results are the smallest intervals that floating point allows. A result is NaN where an argument only is, and may be
where one may be or infinities and zeros can meet; where that happens at an end the numbers are given up: [-inf, inf].

-0 and +0 are one number here, so 1 / 0 may be either infinity.

The special functions are monotone: "correct" ones because rounding is; "mufu.sm90" because its interpolation
is, at every one of its 2^23 places, and the steps around it are; "polynomial3" for every float32 below 128.
But "mufu.sm90" of tanh falls back by up to 114 float32 from one segment to the next, so its intervals are
wider by that. These were checked for every such input.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import shown
from flamia_ref.arithmetic import float32, special
from flamia_ref.arithmetic.float32 import Direction
from flamia_ref.arithmetic.interval.value import (
    Booleans,
    Floats,
    Interval,
    common_shape,
    exactly,
    float32_bits,
    floats,
    hull,
)
from flamia_ref.formats import Overflow, Rounding, ScalarFormat, decode
from flamia_ref.formats import encode as encode_values
from flamia_ref.formats.scalar import scalar_format

Operand = Any
"""An Interval, or what `exactly` takes: floats or uint32 bits that are certain."""

_SMALLEST_NORMAL = 2.0**-126
_MONOTONE = {
    ("exp2", "mufu.sm90"),
    ("exp2", "polynomial3"),
    ("exp2", "correct"),
    ("log2", "mufu.sm90"),
    ("log2", "correct"),
    ("reciprocal", "mufu.sm90"),
    ("reciprocal", "correct"),
    ("tanh", "correct"),
}
TANH_DIP = 114
"""How many float32 "mufu.sm90"'s tanh falls, at most, below what it reached before: of all inputs."""
_DIPS = {("tanh", "mufu.sm90"): TANH_DIP}
"""How many float32 a function that is not monotone falls, at most, below what it reached before."""


def add(a: Operand, b: Operand, *, rounding: Direction = "nearest_even") -> Interval:
    """a + b in float32."""
    return _at_ends(lambda x, y: float32.add(x, y, rounding=rounding), a, b)


def subtract(a: Operand, b: Operand, *, rounding: Direction = "nearest_even") -> Interval:
    """a - b in float32."""
    return _at_ends(lambda x, y: float32.subtract(x, y, rounding=rounding), a, b)


def multiply(a: Operand, b: Operand, *, rounding: Direction = "nearest_even") -> Interval:
    """a * b in float32."""
    a, b = as_interval(a), as_interval(b)
    result = _at_ends(lambda x, y: float32.multiply(x, y, rounding=rounding), a, b)
    return _maybe_nan(result, _zero_times_infinity(a, b))


def fma(a: Operand, b: Operand, c: Operand, *, rounding: Direction = "nearest_even") -> Interval:
    """a * b + c in float32, rounded once."""
    a, b, c = as_interval(a), as_interval(b), as_interval(c)
    result = _at_ends(lambda x, y, z: float32.fma(x, y, z, rounding=rounding), a, b, c)
    opposite = (_has_infinity(a) | _has_infinity(b)) & _has_infinity(c)
    return _maybe_nan(result, _zero_times_infinity(a, b) | opposite)


def divide(a: Operand, b: Operand) -> Interval:
    """a / b in float32. Anything is possible where b may be zero."""
    a, b = as_interval(a), as_interval(b)
    result = _at_ends(float32.divide, a, b)
    by_zero = _has_zero(b)
    result = _anything(result, by_zero)
    return _maybe_nan(result, (by_zero & _has_zero(a)) | (_has_infinity(a) & _has_infinity(b)))


def maximum(a: Operand, b: Operand) -> Interval:
    """The larger of a and b; a NaN wins."""
    return _at_ends(float32.maximum, a, b)


def maximum_number(a: Operand, b: Operand) -> Interval:
    """The larger of a and b; a NaN beside a number is ignored, as in max.f32 of the PTX ISA."""
    a, b = as_interval(a), as_interval(b)
    numbers = _at_ends(float32.maximum_number, a, b)
    # Where one may be NaN, the other one may be the result.
    low = np.where(a.nan, np.fmin(numbers.lower, b.lower), numbers.lower)
    low = np.where(b.nan, np.fmin(low, a.lower), low)
    # Where one is only NaN, the other one is the result.
    only_a, only_b = np.isnan(a.lower), np.isnan(b.lower)
    low = np.where(only_a, b.lower, np.where(only_b, a.lower, low))
    high = np.where(only_a, b.upper, np.where(only_b, a.upper, numbers.upper))
    return Interval(low, high, a.nan & b.nan)


def negate(a: Operand) -> Interval:
    """-a."""
    a = as_interval(a)
    return Interval(-a.upper, -a.lower, a.nan)


def exp2(x: Operand, model: str | tuple[str, ...]) -> Interval:
    """2^x by a model of `SPECIAL_MODELS`, or by any of several.

    "polynomial3" has no bound where x may be 128 or more, and makes 0 of a NaN.
    """

    def one(x: Interval, name: str) -> Interval:
        if name != "polynomial3":
            return _special(special.exp2, "exp2", x, name)
        beyond = x.upper >= 128.0
        below = float(np.nextafter(np.float32(128), np.float32(0)))
        result = _special(
            special.exp2,
            "exp2",
            Interval(np.minimum(x.lower, below), np.minimum(x.upper, below), x.nan),
            name,
        )
        low = np.where(x.nan, 0.0, result.lower)
        low, high = np.where(beyond, -np.inf, low), np.where(beyond, np.inf, result.upper)
        return Interval(low, high, beyond)

    return _by_models(one, x, model)


def log2(x: Operand, model: str | tuple[str, ...]) -> Interval:
    """log2 x by a model of `SPECIAL_MODELS`, or by any of several; NaN where x may be negative."""

    def one(x: Interval, name: str) -> Interval:
        negative, only = x.lower < 0, x.upper <= -_SMALLEST_NORMAL
        clipped = Interval(np.maximum(x.lower, 0.0), np.maximum(x.upper, 0.0), x.nan)
        result = _special(special.log2, "log2", clipped, name)
        low, high = (np.where(only, np.nan, end) for end in (result.lower, result.upper))
        return Interval(low, high, result.nan | negative)

    return _by_models(one, x, model)


def reciprocal(x: Operand, model: str | tuple[str, ...]) -> Interval:
    """1 / x by a model of `SPECIAL_MODELS`, or by any of several; anything where x may be zero."""

    def one(x: Interval, name: str) -> Interval:
        result = _special(special.reciprocal, "reciprocal", x, name)
        zero = _has_zero(x)
        return Interval(
            np.where(zero, -np.inf, result.lower), np.where(zero, np.inf, result.upper), result.nan
        )

    return _by_models(one, x, model)


def tanh(x: Operand, model: str | tuple[str, ...]) -> Interval:
    """tanh x by a model of `SPECIAL_MODELS`, or by any of several."""
    return _by_models(lambda x, name: _special(special.tanh, "tanh", x, name), x, model)


def convert(
    x: Operand,
    format: str | ScalarFormat,
    *,
    rounding: Rounding | str = Rounding.NEAREST_EVEN,
    overflow: Overflow | str = Overflow.SATURATE,
) -> Interval:
    """x rounded to a format: the values of `encode`'s codes, as an interval.

    Raises ValueError as `formats.encode`, for stochastic rounding, and for negative numbers and an unsigned format.
    """
    x = as_interval(x)
    low, high = (
        decode(codes, format, dtype=np.float64)
        for codes in encode(x, format, rounding=rounding, overflow=overflow)
    )
    nan_lost = x.nan & ~np.isnan(decode(_nan_code(format), format, dtype=np.float64))
    if nan_lost.any():  # a format without NaN stores its largest value
        largest = scalar_format(format).max
        high = np.where(nan_lost, np.fmax(high, largest), high)
        low = np.where(nan_lost & np.isnan(x.lower), largest, low)
    # Infinity may become a NaN.
    met = np.isnan(low) | np.isnan(high)
    # Both ends beyond the largest number say nothing of what is between them if they are on different sides of 0.
    one_side = np.isnan(x.lower) | (x.lower > 0) | (x.upper < 0)
    only = np.isnan(low) & np.isnan(high) & one_side
    low, high = np.where(met & ~only, -np.inf, low), np.where(met & ~only, np.inf, high)
    return Interval(low, high, (x.nan & ~nan_lost) | met)


def encode(
    x: Operand,
    format: str | ScalarFormat,
    *,
    rounding: Rounding | str = Rounding.NEAREST_EVEN,
    overflow: Overflow | str = Overflow.SATURATE,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The code of the least and of the greatest number of x. Codes between them by value are permitted, too.

    Where `x.nan` the format's NaN code is permitted besides.

    Raises ValueError as `formats.encode`, for stochastic rounding, and for negative numbers and an unsigned format.
    """
    x = as_interval(x)
    target = scalar_format(format)
    if not target.signed and (x.lower < 0).any():
        raise ValueError(
            f"x may be negative and {target.name} has no sign; take the magnitude first"
        )
    low, high = (
        encode_values(end, target, rounding=rounding, overflow=overflow)
        for end in (x.lower, x.upper)
    )
    return low, high


def as_interval(x: Operand) -> Interval:
    """An Interval itself, or that of certain values."""
    return x if isinstance(x, Interval) else exactly(x)


def _at_ends(function: Callable[..., NDArray[np.uint32]], *operands: Operand) -> Interval:
    """A function of float32 bits that is monotone in each operand, at all combinations of ends."""
    given = [as_interval(x) for x in operands]
    shape = common_shape(*given)
    ends = [[np.broadcast_to(bits, shape) for bits in x.bits()] for x in given]
    results = [floats(np.asarray(function(*corner)), "result") for corner in product(*ends)]
    nan = np.logical_or.reduce([np.broadcast_to(x.nan, shape) for x in given])
    only = np.logical_or.reduce([np.broadcast_to(np.isnan(x.lower), shape) for x in given])
    met = np.logical_or.reduce([np.isnan(x) for x in results])
    all_nan = np.logical_and.reduce([np.isnan(x) for x in results])
    certain = np.logical_and.reduce([np.broadcast_to(x.lower == x.upper, shape) for x in given])
    only = only | (all_nan & certain)
    with np.errstate(invalid="ignore"):
        low, high = np.minimum.reduce(results), np.maximum.reduce(results)
    low, high = np.where(met, -np.inf, low), np.where(met, np.inf, high)
    return Interval(np.where(only, np.nan, low), np.where(only, np.nan, high), nan | met)


def _special(function: Callable[..., Any], name: str, x: Interval, model: str) -> Interval:
    # An unknown model is refused by the function itself.
    ends = [function(float32_bits(end).view(np.float32), model) for end in (x.lower, x.upper)]
    dip = _DIPS.get((name, model), 0)
    if not dip and (name, model) not in _MONOTONE:
        raise ValueError(
            f"how far model {model} of {name} is from monotone is not known; it has no intervals"
        )
    first, last = (floats(end, "result") for end in ends)
    low, high = np.minimum(first, last), np.maximum(first, last)
    if dip:
        point = x.lower == x.upper
        low = np.where(point, low, _stepped(low, -dip))
        high = np.where(point, high, _stepped(high, dip))
    # polynomial3 makes a number of NaN; all others NaN.
    return Interval(low, high, x.nan | np.isnan(first))


def _stepped(x: Floats, steps: int) -> Floats:
    """The float32 that is `steps` further up the number line; NaN stays."""
    bits = float32_bits(x)
    order = (bits & float32.MAGNITUDE).astype(np.int64)
    order = np.where((bits & float32.SIGN) != 0, -order, order) + steps
    limit = int(float32.INFINITY)
    magnitude = np.minimum(np.abs(order), limit).astype(np.uint32)
    moved = np.where(order < 0, magnitude | float32.SIGN, magnitude)
    return np.where(np.isnan(x), x, floats(moved, "result"))


def _by_models(
    one: Callable[[Interval, str], Interval], x: Operand, model: str | tuple[str, ...]
) -> Interval:
    given = as_interval(x)
    if not isinstance(model, str | tuple | list) or not all(isinstance(x, str) for x in model):
        raise TypeError(
            f"model is {shown(model)}; it is a name in SPECIAL_MODELS or a tuple of them"
        )
    names = (model,) if isinstance(model, str) else tuple(model)
    if not names:
        raise ValueError("model is empty; name one at least")
    return hull(*(one(given, name) for name in names))


def _nan_code(format: str | ScalarFormat) -> NDArray[Any]:
    target = scalar_format(format)
    return np.asarray(target.nan_code, dtype=target.code_dtype)


def _has_zero(x: Interval) -> Booleans:
    return np.asarray((x.lower <= 0) & (x.upper >= 0))


def _has_infinity(x: Interval) -> Booleans:
    return np.isinf(x.lower) | np.isinf(x.upper)


def _zero_times_infinity(a: Interval, b: Interval) -> Booleans:
    return (_has_zero(a) & _has_infinity(b)) | (_has_zero(b) & _has_infinity(a))


def _maybe_nan(x: Interval, where: Booleans) -> Interval:
    return Interval(x.lower, x.upper, x.nan | np.broadcast_to(where, x.shape))


def _anything(x: Interval, where: Booleans) -> Interval:
    where = np.broadcast_to(where, x.shape) & ~np.isnan(x.lower)
    return Interval(np.where(where, -np.inf, x.lower), np.where(where, np.inf, x.upper), x.nan)
