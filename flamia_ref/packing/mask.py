"""Which keys each query sees: documents of queries and of keys, causal or not, a window, an alignment."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref._errors import shown, unknown_name
from flamia_ref.packing.documents import Documents

Indices = np.ndarray[Any, np.dtype[np.int32]]

ALIGNMENTS = ("bottom_right", "top_left")

Window = tuple[int | None, int | None]

_FAR = 2**31 - 1  # more keys than there are


@dataclass(frozen=True)
class Mask:
    """Which keys the queries of packed documents see. Every query sees a run of keys of its own document, or none.

    Queries i and keys j count from their document's start. Query i stands at key i + shift, with the shift 0 for
    "top_left" and keys - queries for "bottom_right". It sees keys up to there, if causal, and from `window[0]` keys
    before it to `window[1]` keys after it.

    Attributes:
        queries, keys: the documents, equally many.
        causal: whether later keys are hidden.
        window: keys to the left and to the right that are seen besides the own, None for all.
        alignment: "bottom_right" or "top_left", where a document has more of one than of the other.
    """

    queries: Documents
    keys: Documents
    causal: bool = True
    window: Window = (None, None)
    alignment: str = "bottom_right"

    def __post_init__(self) -> None:
        if len(self.queries) != len(self.keys):
            raise ValueError(
                f"cu_seqlens has {len(self.queries)} documents and cu_seqlens_k {len(self.keys)}; give equally many"
            )

    @classmethod
    def of(
        cls, queries: Documents, keys: Documents, *, causal: Any, window: Any, alignment: Any
    ) -> Mask:
        """A mask from what callers give. Raises TypeError or ValueError of one line."""
        if not isinstance(causal, (bool, np.bool_)):
            raise TypeError(f"causal is {shown(causal)}; it must be True or False")
        if not isinstance(alignment, str) or alignment not in ALIGNMENTS:
            raise unknown_name("alignment", alignment, ALIGNMENTS)
        sides = _window(window)
        if causal and sides[1]:
            raise ValueError(
                f"window is {shown(window)} with causal=True, which hides every key to the right; give (left, 0), or"
                " causal=False"
            )
        return cls(queries, keys, bool(causal), sides, alignment)

    @property
    def same_tokens(self) -> bool:
        """Whether queries and keys are the same tokens."""
        return self.queries == self.keys

    @property
    def bounded(self) -> bool:
        """Whether queries are hidden keys of their document, by a causal mask or a window."""
        return self.causal or self.window != (None, None)

    @property
    def plain(self) -> bool:
        """Whether the mask is causal or full over the same tokens, and nothing else."""
        return self.same_tokens and self.window == (None, None)

    def shift(self, document: int) -> int:
        """The key at which a document's first query stands."""
        if self.alignment == "top_left":
            return 0
        return self.keys.lengths[document] - self.queries.lengths[document]

    def bounds(self, document: Indices, place: Indices) -> tuple[Indices, Indices]:
        """The first and the last key that queries see, counted from the document's start; (0, -1) for none.

        `document` and `place` broadcast; a place outside the document's queries sees none.
        """
        queries, keys, shifts = self._table[:, document]
        stand = place + shifts
        left, right = self.window
        first = np.zeros_like(stand) if left is None else np.maximum(stand - left, 0)
        reach = 0 if self.causal else right
        last = keys - 1 if reach is None else np.minimum(stand + reach, keys - 1)
        first, last = np.broadcast_arrays(first, last)
        seen = (place >= 0) & (place < queries) & (first <= last)
        return (
            np.where(seen, first, 0).astype(np.int32),
            np.where(seen, last, -1).astype(np.int32),
        )

    def document_bounds(self, document: int) -> tuple[Indices, Indices]:
        """`bounds` of every query of one document."""
        place = np.arange(self.queries.lengths[document], dtype=np.int32)
        return self.bounds(np.full_like(place, document), place)

    def visible(self, document: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which key each query of a document sees [queries, keys]: tokens squared, for short documents."""
        first, last = self.document_bounds(document)
        key = np.arange(self.keys.lengths[document], dtype=np.int32)
        return (key >= first[:, None]) & (key <= last[:, None])

    def dead(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which packed queries see no key, [tokens]."""
        parts = [self.document_bounds(index)[1] < 0 for index in range(len(self.queries))]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.bool_)

    @functools.cached_property
    def _table(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        queries, keys = np.array(self.queries.lengths), np.array(self.keys.lengths)
        shifts = np.zeros_like(keys) if self.alignment == "top_left" else keys - queries
        return np.stack([queries, keys, shifts])

    def __iter__(self) -> Iterator[tuple[slice, slice]]:
        """The token ranges of each document's queries and keys."""
        return zip(self.queries, self.keys, strict=True)


def _window(window: Any) -> Window:
    if window is None:
        return (None, None)
    if isinstance(window, (str, bytes)) or not isinstance(window, Sequence) or len(window) != 2:
        raise TypeError(
            f"window is {shown(window)}; it must be (left, right), keys seen on either side of the own one, or None"
        )
    left, right = (_side(window, side) for side in window)
    return left, right


def _side(window: Any, side: Any) -> int | None:
    if side is None:
        return None
    if isinstance(side, bool) or not isinstance(side, (int, np.integer)):
        raise TypeError(f"window is {shown(window)}; its sides must be whole numbers, or None")
    if side < -1:
        raise ValueError(
            f"window is {shown(window)}; its sides must be 0 or more, None or -1 for all"
        )
    return None if side == -1 else min(int(side), _FAR)
