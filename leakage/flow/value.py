"""The abstract value of an array: for each element, either its value, or the set of sources it may depend on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.flow.sets import EMPTY, Ids

KNOWN = -1
"""What stands for the number of a set where the value is known, and so depends on nothing."""

Array = NDArray[Any]
Bools = NDArray[np.bool_]
Shape = tuple[int, ...]
Bounds = tuple[NDArray[np.float64], NDArray[np.float64]]

_NARROW = {np.dtype(getattr(ml_dtypes, name)) for name in ("int2", "uint2", "int4", "uint4")}


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """An abstract array.

    `ids`, `values` and `bounds` have its number of axes, and are compact: along an axis of length 1 all elements are
    alike. They need not be compact along the same axes. An array without elements has its own shape throughout.

    Attributes:
        shape: of the array.
        dtype: a numpy dtype, or JAX's own for keys of random numbers, whose values are never known.
        ids: for each element the number of its set of sources, or `KNOWN`.
        values: for each known element its value; any other entry means nothing. None where nothing is known.
        bounds: the least and the greatest value that an element that is not known may have, float64; a float between
            finite ones is not NaN. None for no more than the dtype says. Entries of known elements mean nothing.
        fields: for integers whose bits come from several places: words that have some of the bits each, no two the
            same, of which this is the sum. None for none.
    """

    shape: Shape
    dtype: Any
    ids: Ids
    values: Array | None = None
    bounds: Bounds | None = None
    fields: tuple[Field, ...] | None = None

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def known(self) -> Bools:
        """Where values are known, like `ids`."""
        return self.ids < 0

    @property
    def sources(self) -> Ids:
        """`ids` with the empty set where values are known."""
        return np.maximum(self.ids, EMPTY)

    @property
    def all_known(self) -> bool:
        """Whether every value is known."""
        return self.values is not None and bool((self.ids < 0).all())

    def compact_values(self) -> Array:
        """The values, compact, zeros where none is known."""
        return np.zeros((1,) * self.ndim, dtype=self.dtype) if self.values is None else self.values

    def full_values(self) -> Array:
        """The values in the full shape, zeros where none is known."""
        return np.broadcast_to(self.compact_values(), self.shape)

    def full_ids(self) -> Ids:
        """The sets in the full shape."""
        return np.broadcast_to(self.ids, self.shape)

    def where_known(self, value: Any) -> Bools:
        """Where an element is known to be `value`."""
        if self.values is None:
            return np.zeros((1,) * self.ndim, dtype=np.bool_)
        found: Bools = self.known & (self.values == np.asarray(value).astype(self.dtype))
        return found

    def moved(self, shape: Shape, move: Callable[[Array], Array]) -> Flow:
        """An array of `shape` whose elements are some of these: `move` takes each compact array of this to its own."""
        if 0 in shape:
            return empty(shape, self.dtype)
        plain = Flow(
            shape,
            self.dtype,
            move(self.ids),
            None if self.values is None else move(self.values),
            None if self.bounds is None else (move(self.bounds[0]), move(self.bounds[1])),
        )
        if self.fields is None:
            return plain
        parts = []
        for field in self.fields:
            word = field.word
            alone = (
                word.ids is self.ids and word.values is self.values and word.bounds is self.bounds
            )
            parts.append(Field(field.mask, plain if alone else word.moved(shape, move)))
        return Flow(shape, self.dtype, plain.ids, plain.values, plain.bounds, tuple(parts))


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """Some of the bits of integers, in their places, the others 0.

    Attributes:
        mask: the bits that may be other than 0, the same for all elements.
        word: the integers with no other bits.
    """

    mask: int
    word: Flow


def known(values: Any) -> Flow:
    """An array whose values are known."""
    values = np.asarray(values)
    if values.size == 0:
        return empty(values.shape, values.dtype)
    return Flow(values.shape, values.dtype, known_ids(values.ndim), values)


def known_ids(axes: int) -> Ids:
    """The `ids` of an array of that many axes of which all is known."""
    return np.full((1,) * axes, KNOWN, dtype=np.int32)


def empty(shape: Shape, dtype: Any) -> Flow:
    """An array without elements."""
    values = None if is_opaque(dtype) else np.zeros(shape, dtype=dtype)
    return Flow(tuple(shape), dtype, np.full(shape, KNOWN, dtype=np.int32), values)


def unknown(shape: Shape, dtype: Any, ids: Ids) -> Flow:
    """An array of which nothing is known but the sets."""
    return empty(shape, dtype) if 0 in shape else Flow(tuple(shape), dtype, ids)


def made(shape: Shape, dtype: Any, ids: Ids, values: Array | None) -> Flow:
    """An array of known and unknown elements; `values` is dropped where no element is known."""
    if 0 in shape:
        return empty(shape, dtype)
    if values is not None and not (ids < 0).any():
        values = None
    return Flow(tuple(shape), dtype, ids, values)


def alike(flow: Flow) -> Flow:
    """The same with axes along which all elements are alike made 1."""
    values = None if flow.values is None else _alike(flow.values)
    return Flow(flow.shape, flow.dtype, _alike(flow.ids), values, flow.bounds, flow.fields)


def _alike(x: Array) -> Array:
    for axis, extent in enumerate(x.shape):
        if extent > 1:
            first = x[(slice(None),) * axis + (slice(0, 1),)]
            if _same(x, first):
                x = first
    return x


def _same(x: Array, first: Array) -> bool:
    with np.errstate(invalid="ignore"):
        return bool((x == first).all()) and bool(same_bits(x, first).all())


def expanded(x: Array, shape: Shape, axes: Sequence[int]) -> Array:
    """`x`, compact in `shape`, with `axes` in full length."""
    wanted = [shape[axis] if axis in axes else extent for axis, extent in enumerate(x.shape)]
    return np.broadcast_to(x, wanted)


def with_axes(x: Flow, count: int) -> Flow:
    """A scalar as an array of `count` axes; jaxprs let scalars stand beside arrays."""
    if x.ndim == count:
        return x
    return x.moved((1,) * count, lambda part: part.reshape((1,) * count))


def same_bits(a: Array, b: Array) -> Bools:
    """Where values are the same to the bit, but for the bits of a NaN."""
    if not is_float(a.dtype):
        return np.asarray(a == b)
    if a.dtype.kind == "c":
        return same_bits(a.real, b.real) & same_bits(a.imag, b.imag)
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        same: Bools = (contiguous(a).view(unsigned) == contiguous(b).view(unsigned)) | (
            (a != a) & (b != b)
        )
    return same


def contiguous(x: Array) -> Array:
    """`x` laid out so that `view` takes it, a scalar too."""
    return np.ascontiguousarray(x).reshape(x.shape)


def elements(flags: Bools, shape: Shape) -> int:
    """How many elements of an array of `shape` a compact array of flags marks."""
    found = int(flags.sum())
    return found * (int(np.prod(shape, dtype=np.int64)) // max(1, flags.size)) if found else 0


@functools.cache
def integer_info(dtype: Any) -> Any:
    """The least and the greatest integer of a dtype and its `bits`."""
    read: Any = ml_dtypes.iinfo
    return read(dtype)


@functools.cache
def is_opaque(dtype: Any) -> bool:
    """Whether a dtype is JAX's own, of keys of random numbers and the like."""
    return not isinstance(dtype, (np.dtype, type))


@functools.cache
def is_integer(dtype: Any) -> bool:
    """Whether a dtype holds integers; booleans are none."""
    return not is_opaque(dtype) and (np.dtype(dtype).kind in "iu" or np.dtype(dtype) in _NARROW)


@functools.cache
def is_narrow(dtype: Any) -> bool:
    """Whether a dtype holds integers of fewer than 8 bits, which numpy keeps one a byte."""
    return not is_opaque(dtype) and np.dtype(dtype) in _NARROW


@functools.cache
def is_bool(dtype: Any) -> bool:
    """Whether a dtype holds booleans."""
    return not is_opaque(dtype) and np.dtype(dtype).kind == "b"


@functools.cache
def is_float(dtype: Any) -> bool:
    """Whether a dtype holds floats, real or complex."""
    return not (is_opaque(dtype) or is_integer(dtype) or is_bool(dtype))
