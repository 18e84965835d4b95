"""A range: the values that each element of an array may have, and the simulator's own functions at its ends.

The steps between products are functions of float32 bits that never fall where an argument rises (or never rise). Their
least and greatest values are at the ends, so the simulator's functions themselves are evaluated there: no rule is
written a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _float32
from flamia_ref.arithmetic.interval.tiles import Ends

Words = NDArray[np.uint32]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]

NAN = _float32.NAN
HIGHEST = _float32.INFINITY
LOWEST = np.uint32(HIGHEST | _float32.SIGN)


class Range(NamedTuple):
    """The least and the greatest value of each element as float32 bits, and whether it may be NaN.

    Where only NaN is permitted both ends are NaN. The same array twice where all elements are certain.
    """

    low: Words
    high: Words
    nan: Flags

    @property
    def certain(self) -> bool:
        """Whether every element has one value."""
        return self.low is self.high

    def mapped(self, function: Callable[[Any], Any]) -> Range:
        """The same elements by a function of their places alone: another shape or order, or a part."""
        low = function(self.low)
        return Range(low, low if self.certain else function(self.high), function(self.nan))


def exactly(bits: Words) -> Range:
    """The range of certain float32 bits."""
    return Range(bits, bits, _float32.is_nan(bits))


def between(low: Words, high: Words, nan: Flags | None = None) -> Range:
    """The range from `low` to `high`. What has a NaN at one end only may be anything."""
    if low is high:
        return exactly(low)
    bad_low, bad_high = _float32.is_nan(low), _float32.is_nan(high)
    anything = bad_low != bad_high
    if anything.any():
        low, high = np.where(anything, LOWEST, low), np.where(anything, HIGHEST, high)
    found = bad_low | bad_high if nan is None else bad_low | bad_high | nan
    if nan is None and np.array_equal(low, high):
        return Range(low, low, found)
    return Range(low, high, found)


def rising(function: Callable[..., Words], *ranges: Range) -> Range:
    """A function that does not fall in any argument."""
    low = function(*(x.low for x in ranges))
    if all(x.certain for x in ranges):
        return exactly(low)
    return between(low, function(*(x.high for x in ranges)), _nan(low, *ranges))


def corners(function: Callable[..., Words], *ranges: Range) -> Range:
    """A function that is monotone in each argument, one way or the other."""
    if all(x.certain for x in ranges):
        return exactly(function(*(x.low for x in ranges)))
    ends = [(x.low,) if x.certain else (x.low, x.high) for x in ranges]
    found = [function(*corner) for corner in product(*ends)]
    return least_and_greatest(found, _nan(found[0], *ranges))


def least_and_greatest(found: list[Words], nan: Flags | None = None) -> Range:
    """The range of some results, NaN aside; anything where some of them are NaN."""
    values = [x.view(np.float32) for x in found]
    bad = [_float32.is_nan(x) for x in found]
    only = np.logical_and.reduce(bad)
    some = np.logical_or.reduce(bad) & ~only
    with np.errstate(invalid="ignore"):
        low, high = values[0], values[0]
        for other in values[1:]:
            low, high = np.fmin(low, other), np.fmax(high, other)
    low_bits, high_bits = _bits(low), _bits(high)
    low_bits = np.where(only, NAN, np.where(some, LOWEST, low_bits))
    high_bits = np.where(only, NAN, np.where(some, HIGHEST, high_bits))
    return Range(low_bits, high_bits, only | some if nan is None else only | some | nan)


def hull(a: Range, b: Range) -> Range:
    """What either may be."""
    if a.certain and b.certain and np.array_equal(a.low, b.low):
        return a
    low = np.where(_float32.is_nan(a.low), b.low, a.low)
    high = np.where(_float32.is_nan(a.high), b.high, a.high)
    other_low = np.where(_float32.is_nan(b.low), low, b.low)
    other_high = np.where(_float32.is_nan(b.high), high, b.high)
    low = np.where(other_low.view(np.float32) < low.view(np.float32), other_low, low)
    high = np.where(other_high.view(np.float32) > high.view(np.float32), other_high, high)
    return Range(low, high, a.nan | b.nan)


def where(condition: Flags, a: Range, b: Range) -> Range:
    """`a` where the condition holds, else `b`."""
    low = np.where(condition, a.low, b.low)
    nan = np.where(condition, a.nan, b.nan)
    if a.certain and b.certain:
        return Range(low, low, nan)
    return Range(low, np.where(condition, a.high, b.high), nan)


def zeroed(condition: Flags, x: Range) -> Range:
    """+0 where the condition holds, else `x`."""
    zero = np.uint32(0)
    low = np.where(condition, zero, x.low)
    nan = x.nan & ~condition
    return Range(low, low if x.certain else np.where(condition, zero, x.high), nan)


def stepped(x: Range, steps: int) -> Range:
    """`steps` float32 further out at both ends, where they differ."""
    if x.certain:
        return x
    low, high = x.low.view(np.float32), x.high.view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for _ in range(steps):
            low = np.nextafter(low, np.float32(-np.inf))
            high = np.nextafter(high, np.float32(np.inf))
    apart = (x.low != x.high) & ~_float32.is_nan(x.low)
    return Range(np.where(apart, _bits(low), x.low), np.where(apart, _bits(high), x.high), x.nan)


def ends(x: Range) -> Ends:
    """The same as float64."""
    low = floats(x.low)
    return Ends(low, low if x.certain else floats(x.high), x.nan)


def of_ends(x: Ends) -> Range:
    """The same as float32 bits. The ends are float32 values."""
    if x.low is x.high:
        return exactly(words(x.low))
    low, high = words(x.low), words(x.high)
    if np.array_equal(low, high) and not (x.nan & ~np.isnan(x.low)).any():
        return Range(low, low, x.nan)
    return Range(low, high, x.nan)


def floats(bits: Words) -> Floats:
    """float32 bits as float64."""
    with np.errstate(invalid="ignore"):
        return np.asarray(bits.view(np.float32).astype(np.float64))


def words(x: Floats) -> Words:
    """Numbers rounded to float32, as bits with one NaN."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        bits = np.ascontiguousarray(x.astype(np.float32)).view(np.uint32).reshape(x.shape)
    return np.where(np.isnan(x), NAN, bits)


def _bits(x: NDArray[np.float32]) -> Words:
    return np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)


def _nan(result: Words, *ranges: Range) -> Flags:
    shape = result.shape
    found = np.zeros(shape, dtype=bool)
    for x in ranges:
        found |= np.broadcast_to(x.nan, shape)
    return found
