"""The abstract value of an array: for each element, either its value, or the set of sources it may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.flow.sets import Ids

KNOWN = -1
"""What stands for the number of a set where the value is known, and so depends on nothing."""

Array = NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """An abstract array. `ids` and `values` have its number of axes; along an axis of length 1 all elements are alike.

    Attributes:
        shape: of the array.
        ids: for each element the number of its set of sources, or `KNOWN`.
        values: for each known element its value; any other entry means nothing. None where nothing is known.
    """

    shape: Shape
    dtype: Any
    ids: Ids
    values: Array | None

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Where values are known, like `ids`."""
        return self.ids < 0

    @property
    def all_known(self) -> bool:
        """Whether every value is known."""
        return self.values is not None and bool((self.ids < 0).all())

    @property
    def none_known(self) -> bool:
        """Whether no value is known."""
        return self.values is None

    def full_values(self) -> Array:
        """All values, in the full shape, zeros where none is known."""
        if self.values is None:
            return np.zeros(self.shape, dtype=self.dtype)
        return np.broadcast_to(self.values, self.shape)

    def full_ids(self) -> Ids:
        """The sets, in the full shape."""
        return np.broadcast_to(self.ids, self.shape)


def known(values: Any) -> Flow:
    """An array whose values are known."""
    values = np.asarray(values)
    shape = values.shape
    if values.size == 0:
        return Flow(shape, values.dtype, np.full(shape, KNOWN, dtype=np.int32), values)
    return Flow(shape, values.dtype, np.full((1,) * len(shape), KNOWN, dtype=np.int32), values)


def unknown(shape: Shape, dtype: Any, ids: Ids) -> Flow:
    """An array of which nothing is known but the sets."""
    return Flow(tuple(shape), dtype, ids, None)


def made(shape: Shape, dtype: Any, ids: Ids, values: Array | None) -> Flow:
    """An array of known and unknown elements; `values` is dropped where no element is known."""
    if values is not None and not (ids < 0).any() and 0 not in shape:
        values = None
    return Flow(tuple(shape), dtype, ids, values)


def alike(flow: Flow) -> Flow:
    """The same with axes along which all elements are alike made 1."""
    ids = _alike(flow.ids)
    values = None if flow.values is None else _alike(flow.values)
    return Flow(flow.shape, flow.dtype, ids, values)


def _alike(x: Array) -> Array:
    for axis, extent in enumerate(x.shape):
        if extent > 1:
            first = x[(slice(None),) * axis + (slice(0, 1),)]
            if _same(x, first):
                x = first
    return x


def _same(x: Array, first: Array) -> bool:
    with np.errstate(invalid="ignore"):
        return bool((x == first).all())


def expanded(x: Array, shape: Shape, axes: Sequence[int]) -> Array:
    """`x`, compact in `shape`, with `axes` in full length."""
    wanted = [shape[axis] if axis in axes else extent for axis, extent in enumerate(x.shape)]
    return np.broadcast_to(x, wanted)
