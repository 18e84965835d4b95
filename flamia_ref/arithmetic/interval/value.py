"""`Interval`: the values that a number may have, elementwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _backend
from flamia_ref._errors import type_of

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """Every number from `lower` to `upper`, ends included, and NaN where `nan` says so.

    Numbers are float32 (or float16, bfloat16) values and infinities, held as float64. -0 and +0 are one number. Where
    only NaN is permitted both ends are NaN.

    Attributes:
        lower: float64 [...].
        upper: float64 of the same shape.
        nan: bool of the same shape.
    """

    lower: Floats
    upper: Floats
    nan: Booleans

    def __post_init__(self) -> None:
        if not self.lower.shape == self.upper.shape == self.nan.shape:
            raise ValueError(
                f"lower {self.lower.shape}, upper {self.upper.shape} and nan {self.nan.shape} must have one shape"
            )
        only = np.isnan(self.lower)
        if (only != np.isnan(self.upper)).any() or (only & ~self.nan).any():
            raise ValueError(
                "an end is NaN alone; where only NaN is permitted give NaN three times"
            )
        if (self.lower > self.upper).any():
            raise ValueError("lower is above upper; give the smaller end first")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the arrays."""
        return self.lower.shape

    @property
    def width(self) -> Floats:
        """upper - lower, rounded; 0 where only one number or only NaN is permitted, infinite where an end is."""
        same = (self.lower == self.upper) | np.isnan(self.lower)
        with np.errstate(invalid="ignore", over="ignore"):
            return np.where(same, 0.0, self.upper - self.lower)

    @property
    def certain(self) -> Booleans:
        """Where one value is permitted only (-0 and +0 are one)."""
        one: Booleans = np.isnan(self.lower) | ((self.lower == self.upper) & ~self.nan)
        return one

    def contains(self, values: Any) -> Booleans:
        """Where values are permitted: floats, or uint32 or uint16 bits of float32 or float16."""
        x = floats(values, "values")
        inside = (self.lower <= x) & (x <= self.upper)
        found: Booleans = (inside & ~np.isnan(x)) | (np.isnan(x) & self.nan)
        return found

    def bits(self) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """float32 bits of both ends; 0x7fffffff for NaN."""
        low, high = float32_bits(self.lower), float32_bits(self.upper)
        return low, high

    def __getitem__(self, index: Any) -> Interval:
        """The interval of some elements."""
        return Interval(
            np.asarray(self.lower[index]),
            np.asarray(self.upper[index]),
            np.asarray(self.nan[index]),
        )

    def reshape(self, *shape: int) -> Interval:
        """The same elements in another shape."""
        return Interval(
            self.lower.reshape(*shape), self.upper.reshape(*shape), self.nan.reshape(*shape)
        )


def floats(values: Any, name: str) -> Floats:
    """Floats, or uint32 or uint16 bits of float32 or float16, as float64. Raises TypeError for what is neither."""
    x = _backend.host(_backend.plain(name, values))
    if x.dtype == np.uint32:
        x = x.view(np.float32)
    elif x.dtype == np.uint16:
        x = x.view(np.float16)
    elif x.dtype.kind != "f" and x.dtype.name != "bfloat16":
        raise TypeError(
            f"{name} holds {type_of(x)}; give floats, or uint32 or uint16 bits of float32 or float16"
        )
    with np.errstate(invalid="ignore"):
        return np.asarray(x.astype(np.float64))


def exactly(values: Any) -> Interval:
    """The interval of one value each: floats, or uint32 or uint16 bits of float32 or float16."""
    x = floats(values, "values")
    return Interval(x, x, np.isnan(x))


def between(lower: Any, upper: Any) -> Interval:
    """The interval of two arrays of numbers without NaN; types as for `exactly`."""
    low, high = floats(lower, "lower"), floats(upper, "upper")
    low, high = np.broadcast_arrays(low, high)
    if np.isnan(low).any() or np.isnan(high).any():
        raise ValueError("an end is NaN; use exactly for values that are NaN")
    return Interval(low, high, np.zeros(low.shape, dtype=bool))


def hull(first: Interval, *rest: Interval) -> Interval:
    """The smallest interval that holds all of some."""
    low, high, nan = first.lower, first.upper, first.nan
    for other in rest:
        low, high = np.fmin(low, other.lower), np.fmax(high, other.upper)
        nan = nan | other.nan
    return Interval(low, high, nan)


def float32_bits(x: Floats) -> NDArray[np.uint32]:
    """float32 values held as float64, as bits; 0x7fffffff for NaN."""
    with np.errstate(invalid="ignore"):
        bits = np.ascontiguousarray(x.astype(np.float32)).view(np.uint32).reshape(x.shape)
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits)
