"""Where the tokens of a pack stand: which pairs are visible, which blocks hold a token, which blocks are guarded."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from flamia_ref.leakage.sharing.runs import Places, Runs
from flamia_ref.packing.mask import Mask

GUARD = 32
"""Queries and keys of a block that is guarded as one."""

Extent = int | str  # a number of tokens, "all", or, of an input, DOCUMENT

DOCUMENT = "document"
"""The extent of a scale of an input that a document has for itself, wherever blocks are counted from."""


class Side(StrEnum):
    """Which tokens: those of queries (q, dO, out, lse, dQ) or those of keys (k, v, dK, dV)."""

    QUERIES = "queries"
    KEYS = "keys"


class Grid(StrEnum):
    """Where blocks are counted from."""

    DOCUMENT = "document"
    """The start of each document: no block holds tokens of two."""
    PACK = "pack"
    """The start of the pack: blocks straddle documents, and the block before one may be another document's."""


class Visible(NamedTuple):
    """Some of the visible pairs: of each query a run of keys, and of each key a run of queries."""

    keys: Runs
    queries: Runs


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """The tokens of packed documents under a mask.

    Attributes:
        mask: which keys each query sees.
        grid: where blocks are counted from.
    """

    mask: Mask
    grid: Grid

    @functools.cached_property
    def _made(self) -> dict[tuple[str, Side, Extent], Runs]:
        """Blocks that were asked for."""
        return {}

    @functools.cached_property
    def _documents(self) -> tuple[Places, Places]:
        offsets = (self.mask.queries.offsets, self.mask.keys.offsets)
        return np.array(offsets[0], dtype=np.int64), np.array(offsets[1], dtype=np.int64)

    def offsets(self, side: Side) -> Places:
        """The first token of each document, and the number of all."""
        return self._documents[side is Side.KEYS]

    def tokens(self, side: Side) -> int:
        """How many tokens there are."""
        return int(self.offsets(side)[-1])

    @functools.cached_property
    def _of(self) -> dict[Side, Places]:
        return {
            side: np.repeat(np.arange(len(self.offsets(side)) - 1), np.diff(self.offsets(side)))
            for side in Side
        }

    def document(self, side: Side) -> Places:
        """The document of each token."""
        return self._of[side]

    def alone(self, side: Side) -> Runs:
        """Each token itself."""
        return self.block(side, 1)

    def own(self, of: Side, side: Side) -> tuple[Places, Places]:
        """The first token and the one after the last, on one side, of the document of each token of the other."""
        offsets, document = self.offsets(side), self.document(of)
        return offsets[document], offsets[document + 1]

    @functools.cached_property
    def shifts(self) -> Places:
        """The key at which each document's first query stands, counted from the document's start."""
        if self.mask.alignment == "top_left":
            return np.zeros(len(self.mask.queries), dtype=np.int64)
        queries, keys = (np.diff(x) for x in self._documents)
        return np.asarray(keys - queries)

    @functools.cached_property
    def stand(self) -> Places:
        """The packed key at which each query stands; it may lie outside the document."""
        queries, keys = self._documents
        document = self.document(Side.QUERIES)
        moved = keys[:-1] - queries[:-1] + self.shifts
        return np.arange(self.tokens(Side.QUERIES)) + moved[document]

    @functools.cached_property
    def reach(self) -> tuple[int | None, int | None]:
        """How many keys a query sees before and after the one that it stands at, None for all."""
        left, right = self.mask.window
        return left, 0 if self.mask.causal else right

    @functools.cached_property
    def visible(self) -> Visible:
        """All visible pairs."""
        left, right = self.reach
        begin, end = self.own(Side.QUERIES, Side.KEYS)
        first = begin if left is None else np.clip(self.stand - left, begin, end)
        last = end if right is None else np.clip(self.stand + right + 1, begin, end)
        queries, keys = self._documents
        moved = (queries[:-1] - keys[:-1] - self.shifts)[self.document(Side.KEYS)]
        stand = np.arange(self.tokens(Side.KEYS)) + moved  # the query that stands at each key
        begin, end = self.own(Side.KEYS, Side.QUERIES)
        earliest = begin if right is None else np.clip(stand - right, begin, end)
        latest = end if left is None else np.clip(stand + left + 1, begin, end)
        return Visible(Runs(begin=first, end=last), Runs(begin=earliest, end=latest))

    @functools.cached_property
    def unguarded(self) -> Visible:
        """The visible pairs outside guarded blocks: those of blocks of 32 queries by 32 keys all of whose pairs are
        visible. A key past the end counts as masked, a query past it does not count."""
        seen = self.visible.keys
        block = self.block(Side.QUERIES, GUARD)
        if not len(seen.begin):
            return self.visible
        # The queries of a block see runs that begin and end ever later: the last begins latest, the first ends first.
        latest, earliest = seen.begin[block.end - 1], seen.end[block.begin]
        start: Places | int = 0
        if self.grid is Grid.DOCUMENT:
            start = self.own(Side.QUERIES, Side.KEYS)[0]
        end = start + (earliest - start) // GUARD * GUARD
        begin = np.minimum(start - (start - latest) // GUARD * GUARD, end)
        key = np.arange(self.tokens(Side.KEYS))
        queries = Runs(
            begin=np.searchsorted(end, key, side="right"),
            end=np.searchsorted(begin, key, side="right"),
        )
        return Visible(Runs(begin=begin, end=end), queries)

    def block(self, side: Side, extent: Extent) -> Runs:
        """The block of each token; "all" is its document, or the pack where blocks are counted from there."""
        key = ("block", side, extent)
        if key not in self._made:
            self._made[key] = self._block(side, extent)
        return self._made[key]

    def previous(self, side: Side, extent: Extent) -> Runs:
        """The block before that of each token, none for the first."""
        key = ("previous", side, extent)
        if key not in self._made:
            block = self.block(side, extent)
            begin = block.begin
            if isinstance(extent, int):
                begin = np.maximum(begin - extent, self._starts(side)[0])
            self._made[key] = Runs(begin=begin, end=block.begin)
        return self._made[key]

    def tile(self, side: Side, extent: int) -> Runs:
        """The tile of each token: tiles are counted from the start of the document, wherever blocks are."""
        place = np.arange(self.tokens(side))
        start, stop = self.own(side, side)
        begin = place - (place - start) % extent
        return Runs(begin=begin, end=np.minimum(begin + extent, stop))

    def _block(self, side: Side, extent: Extent) -> Runs:
        place = np.arange(self.tokens(side))
        if extent == 1:
            return Runs(begin=place, end=place + 1, alone=True)
        start, stop = self._starts(side)
        if not isinstance(extent, int):
            return Runs(begin=start, end=stop)
        begin = place - (place - start) % extent
        return Runs(begin=begin, end=np.minimum(begin + extent, stop))

    def _starts(self, side: Side) -> tuple[Places, Places]:
        """Where the blocks of each token are counted from, and where the last of them ends."""
        if self.grid is Grid.DOCUMENT:
            return self.own(side, side)
        count = self.tokens(side)
        return np.zeros(count, dtype=np.int64), np.full(count, count)
