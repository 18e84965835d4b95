"""`Interval`: the values that a number may have, elementwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _backend
from flamia_ref._errors import shown, type_of

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Interval:
    """Every number from `lower` to `upper`, ends included, and NaN where `nan` says so.

    Numbers are float32 (or float16, bfloat16) values and infinities, held as float64. -0 and +0 are one number. Where
    only NaN is permitted both ends are NaN. Ends that no float32 has are rounded outward: `lower` to the next one
    below, `upper` to the next one above.

    Attributes:
        lower: float64 [...]; given as any numpy floats.
        upper: float64 of the same shape.
        nan: bool of the same shape.

    Raises TypeError for what are no such arrays, ValueError where they do not go together.
    """

    lower: Floats
    upper: Floats
    nan: Booleans

    def __post_init__(self) -> None:
        for name in ("lower", "upper", "nan"):
            object.__setattr__(self, name, _field(name, getattr(self, name)))
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
        object.__setattr__(self, "lower", outward(self.lower, np.float32, -np.inf))
        object.__setattr__(self, "upper", outward(self.upper, np.float32, np.inf))

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
    if _backend.is_traced(values):
        raise TypeError(f"{name} is traced; intervals are numpy, so compute them outside jit")
    x = _backend.host(_backend.plain(name, values))
    if x.dtype == np.uint32:
        x = x.view(np.float32)
    elif x.dtype == np.uint16:
        x = x.view(np.float16)
    elif (x.dtype.kind != "f" or x.dtype.itemsize > 8) and x.dtype.name != "bfloat16":
        raise TypeError(
            f"{name} holds {type_of(x)}; give floats, or uint32 or uint16 bits of float32 or float16"
        )
    with np.errstate(invalid="ignore"):
        return np.asarray(x.astype(np.float64))


def exactly(values: Any) -> Interval:
    """The interval of one value each: floats, or uint32 or uint16 bits of float32 or float16.

    Raises TypeError for other types and for traced arrays, ValueError for finite values that float32 does not have.
    """
    x = floats(values, "values")
    _check_held("values", x, np.float32, "round it first, or give bounds of it to between")
    return Interval(x, x, np.isnan(x))


def between(lower: Any, upper: Any) -> Interval:
    """The interval of two arrays of numbers without NaN; types as for `exactly`.

    Ends that no float32 has are rounded outward, as in `Interval`. Raises ValueError for shapes that do not
    broadcast, for NaN, and where `lower` is above `upper`.
    """
    low, high = floats(lower, "lower"), floats(upper, "upper")
    common_shape(low, high)
    low, high = np.broadcast_arrays(low, high)
    if np.isnan(low).any() or np.isnan(high).any():
        raise ValueError("an end is NaN; use exactly for values that are NaN")
    return Interval(low, high, np.zeros(low.shape, dtype=bool))


def hull(first: Interval, *rest: Interval) -> Interval:
    """The smallest interval that holds all of some. Raises TypeError for what are none, ValueError by their shapes."""
    for given in (first, *rest):
        if not isinstance(given, Interval):
            raise TypeError(
                f"hull is given a {type(given).__name__}; it takes Intervals, such as exactly makes of values"
            )
    common_shape(first, *rest)
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


def common_shape(*given: Any) -> tuple[int, ...]:
    """The shape that arrays or Intervals broadcast to. Raises ValueError where they do not."""
    shapes = [x.shape for x in given]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        listed = " and ".join(map(str, shapes))
        raise ValueError(f"shapes {listed} do not broadcast; make them equal, or 1") from None


def outward(x: Floats, kind: type[np.floating[Any]], toward: float) -> Floats:
    """x where `kind` has it, else the next number of `kind` toward the infinity `toward`; NaN stays."""
    with np.errstate(over="ignore", invalid="ignore"):
        near = x.astype(kind)
        inside = near > x if toward < 0 else near < x
        near = np.where(inside, np.nextafter(near, kind(toward)), near)
    return near.astype(np.float64)


def float16_interval(name: str, x: Interval) -> Interval:
    """x with its ends rounded outward to float16. Raises ValueError for single numbers that float16 does not have."""
    point = np.where(x.lower == x.upper, x.lower, 0.0)
    _check_held(name, point, np.float16, "convert it to fp16 first, or widen the interval")
    low, high = outward(x.lower, np.float16, -np.inf), outward(x.upper, np.float16, np.inf)
    return Interval(low, high, x.nan)


def _check_held(name: str, x: Floats, kind: type[np.floating[Any]], advice: str) -> None:
    """Raise ValueError for finite values that `kind` does not have."""
    with np.errstate(over="ignore", invalid="ignore"):
        lost = np.isfinite(x) & (x.astype(kind).astype(np.float64) != x)
    if lost.any():
        value = float(x[lost].ravel()[0])
        raise ValueError(f"{name} holds {value}, which {kind.__name__} does not have; {advice}")


def _field(name: str, given: Any) -> NDArray[Any]:
    """A field of an Interval, as the array that it is."""
    wanted, dtype = ("bool", np.bool_) if name == "nan" else ("floats", np.float64)
    x = _backend.plain(name, given) if isinstance(given, np.ndarray | np.generic) else given
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {shown(given)}; it must be a numpy array of {wanted}")
    if x.dtype != np.bool_ if name == "nan" else x.dtype.kind != "f" or x.dtype.itemsize > 8:
        raise TypeError(f"{name} holds {type_of(x)}; it must be a numpy array of {wanted}")
    return np.asarray(x, dtype=dtype)
