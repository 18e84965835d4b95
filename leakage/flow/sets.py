"""Sets of sources, each kept once and named by a number, so that arrays of sets are arrays of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Bits = NDArray[np.uint64]

EMPTY = 0
"""The number of the empty set."""

_MOST_PAIRS = 1 << 22  # of two small sets of numbers, of which a table is made
_CHUNK = 1 << 22  # words of bits that are worked on at a time


class Sets:
    """Sets of the sources 0, 1, ... `sources` - 1."""

    def __init__(self, sources: int) -> None:
        self.sources = sources
        self._words = max(1, -(-sources // 64))
        self._bits: Bits = np.zeros((64, self._words), dtype=np.uint64)
        self._numbers: dict[bytes, int] = {}
        self.intern(np.zeros((1, self._words), dtype=np.uint64))

    def __len__(self) -> int:
        return len(self._numbers)

    def singles(self, sources: Any) -> Ids:
        """The number of the set of each source alone, an array like `sources`."""
        sources = np.asarray(sources)
        flat = sources.reshape(-1)
        rows = np.zeros((flat.size, self._words), dtype=np.uint64)
        rows[np.arange(flat.size), flat // 64] = np.uint64(1) << (flat % 64).astype(np.uint64)
        return self.intern(rows).reshape(sources.shape)

    def intern(self, rows: Bits) -> Ids:
        """The numbers of the sets whose bits are `rows` [..., words]."""
        shape, rows = rows.shape[:-1], np.ascontiguousarray(rows).reshape(-1, self._words)
        numbers = self._numbers
        found = np.empty(len(rows), dtype=np.int32)
        new = []
        for place, key in enumerate(rows.view(f"V{8 * self._words}").reshape(-1).tolist()):
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(numbers)
                new.append(place)
            found[place] = number
        if new:
            self._append(rows[new])
        return found.reshape(shape)

    def _append(self, rows: Bits) -> None:
        before = len(self._numbers) - len(rows)
        if len(self._numbers) > len(self._bits):
            larger = np.zeros((2 * len(self._numbers), self._words), dtype=np.uint64)
            larger[:before] = self._bits[:before]
            self._bits = larger
        self._bits[before : before + len(rows)] = rows

    def bits(self, ids: Ids) -> Bits:
        """The bits [..., words] of sets; a negative number stands for the empty set."""
        return self._bits[np.maximum(ids, EMPTY)]

    def union(self, a: Ids, b: Ids) -> Ids:
        """The union of sets, entry by entry of arrays that broadcast; negative numbers are the empty set."""
        if a is b:
            return a
        for one, other in ((a, b), (b, a)):
            if one.size == 1 and one.flat[0] <= EMPTY:
                shape = np.broadcast_shapes(a.shape, b.shape)
                return other if other.shape == shape else np.broadcast_to(other, shape)
        if a.shape == b.shape and np.array_equal(a, b):
            return a
        a, b = np.broadcast_arrays(np.maximum(a, EMPTY), np.maximum(b, EMPTY))
        (left, of_left), (right, of_right) = self._ranked(a), self._ranked(b)
        pairs = of_left.astype(np.int64) * len(right) + of_right
        if len(left) * len(right) <= max(_MOST_PAIRS, 4 * pairs.size):
            present = np.zeros(len(left) * len(right), dtype=np.bool_)
            present[pairs] = True
            which = np.flatnonzero(present)
            place = np.zeros(len(present), dtype=np.int32)
            place[which] = self._unions(left[which // len(right)], right[which % len(right)])
            found: Ids = place[pairs]
            return found
        which, inverse = np.unique(pairs, return_inverse=True)
        found = self._unions(left[which // len(right)], right[which % len(right)])
        return found[inverse].reshape(pairs.shape)

    def _ranked(self, ids: Ids) -> tuple[Ids, Ids]:
        """The numbers that occur, ascending, and the rank of each entry among them."""
        present = np.zeros(len(self), dtype=np.bool_)
        present[ids] = True
        which = np.flatnonzero(present).astype(np.int32)
        rank = np.zeros(len(self), dtype=np.int32)
        rank[which] = np.arange(len(which), dtype=np.int32)
        return which, rank[ids]

    def _unions(self, a: Ids, b: Ids) -> Ids:
        parts = [
            self.intern(self._bits[a[start : start + step]] | self._bits[b[start : start + step]])
            for step in (max(1, _CHUNK // self._words),)
            for start in range(0, len(a), step)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)

    def union_over(self, ids: Ids, axes: Sequence[int]) -> Ids:
        """The union of all sets along `axes`, which stay with length 1."""
        axes = [axis for axis in axes if ids.shape[axis] != 1]
        if not axes:
            return ids
        if 0 in ids.shape:
            shape = [1 if axis in axes else extent for axis, extent in enumerate(ids.shape)]
            return np.zeros(shape, dtype=np.int32)
        kept = [axis for axis in range(ids.ndim) if axis not in axes]
        rows = ids.transpose([*kept, *axes]).reshape(
            int(np.prod([ids.shape[axis] for axis in kept], dtype=np.int64)), -1
        )
        step = max(1, _CHUNK // (rows.shape[1] * self._words))
        parts = [
            np.bitwise_or.reduce(self.bits(rows[start : start + step]), axis=1)
            for start in range(0, len(rows), step)
        ]
        shape = [1 if axis in axes else extent for axis, extent in enumerate(ids.shape)]
        return self.intern(np.concatenate(parts)).reshape(shape)

    def running_union(self, ids: Ids, axis: int, *, reverse: bool = False) -> Ids:
        """The union of the sets up to each place along an axis, or from it on."""
        moved = np.moveaxis(ids, axis, 0)
        moved = moved[::-1] if reverse else moved
        rows = np.bitwise_or.accumulate(self.bits(moved), axis=0)
        found = self.intern(rows)
        return np.moveaxis(found[::-1] if reverse else found, 0, axis)

    def members(self, ids: Ids) -> NDArray[np.bool_]:
        """Which sources are in each set [..., sources]."""
        rows = np.ascontiguousarray(self.bits(ids))
        flags = np.unpackbits(rows.astype("<u8").view(np.uint8), axis=-1, bitorder="little")
        return flags[..., : self.sources].astype(np.bool_)
