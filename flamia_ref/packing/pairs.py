"""Pairs of a query tile and a key tile, in an order that a backward can add them up in.

A pair adds to the dQ of its query tile and to the dK and dV of its key tile, each in a fixed order. Pairs that share
neither may be computed together, which is what a batch is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flamia_ref.packing.documents import Documents
from flamia_ref.packing.tiles import Flags, Indices, QueryTiles, tile_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class TilePairs:
    """A batch of pairs, no two with the same query tile or the same key tile. Arrays have one entry a pair.

    Attributes:
        queries: the query tiles.
        key_first: first token of the key tile, counted from the document's start.
        seen: whether a query of the pair sees a key of it, or of a key tile that is worked on together with it.
        opens, closes: whether the pair is the first, or the last, of those that one partial sum of dQ takes in.
    """

    queries: QueryTiles
    key_first: Indices
    seen: Flags
    opens: Flags
    closes: Flags

    def __len__(self) -> int:
        return len(self.key_first)

    def key_tokens(self) -> Indices:
        """Packed token of each key [pairs, rows], -1 past the document's end."""
        return self.queries.tokens_from(self.key_first)

    def padded(self, count: int) -> TilePairs:
        """`count` pairs: these, then pairs of an empty document."""
        short = (0, count - len(self))
        names = ("key_first", "seen", "opens", "closes")
        return TilePairs(
            queries=self.queries.padded(count),
            **{name: np.pad(getattr(self, name), short) for name in names},
        )


def tile_pairs(
    documents: Documents,
    heads: int,
    batch: int,
    tile: int,
    *,
    causal: bool,
    unseen: bool,
    descending: bool,
    keys_together: int,
    heads_in_sequence: int,
) -> Iterator[TilePairs]:
    """Every pair of a query tile and a key tile, in batches of at most `batch`.

    The key tiles of a query tile come ascending, or `descending` in groups of `keys_together` that ascend inside; the
    query tiles of a key tile come ascending, those of `heads_in_sequence` query heads one after another. `unseen`: also
    pairs of which no query sees a key.
    """
    groups: dict[int, list[np.ndarray]] = {}
    for index, (start, length) in enumerate(
        zip(documents.offsets, documents.lengths, strict=False)
    ):
        if length == 0:
            continue
        rows = tile_rows(length, tile)
        count = -(-length // rows)
        query, key = (x.ravel() for x in np.indices((count, count), dtype=np.int32))
        # What is worked on together is seen together.
        seen = (key - key % keys_together <= query) | (not causal)
        kept = seen | unseen
        query, key, seen = query[kept], key[kept], seen[kept]
        group, inside = key // keys_together, key % keys_together
        turn = -(-count // keys_together) - 1 - group if descending else group
        closes = (inside == keys_together - 1) | (key == count - 1)
        level = query + turn * keys_together + inside
        for head in range(heads):
            waits = (head % heads_in_sequence) * (3 * count)
            columns = (
                np.full_like(query, index),
                np.full_like(query, head),
                query * np.int32(rows),
                np.full_like(query, start),
                np.full_like(query, length),
                key * np.int32(rows),
                seen.astype(np.int32),
                (inside == 0).astype(np.int32),
                closes.astype(np.int32),
                level + np.int32(waits),
            )
            groups.setdefault(rows, []).append(np.stack(columns))
    for rows, parts in sorted(groups.items()):
        table = np.concatenate(parts, axis=1)
        table = table[:, np.argsort(table[-1], kind="stable")]
        starts = np.flatnonzero(np.diff(table[-1], prepend=-1))
        for begin, end in zip(starts, [*starts[1:], table.shape[1]], strict=True):
            for first in range(begin, end, batch):
                document, head, place, start, length, key, seen, opens, closes, _ = table[
                    :, first : min(first + batch, end)
                ]
                yield TilePairs(
                    queries=QueryTiles(
                        rows=rows,
                        document=document,
                        head=head,
                        first=place,
                        start=start,
                        length=length,
                    ),
                    key_first=key,
                    seen=seen.astype(bool),
                    opens=opens.astype(bool),
                    closes=closes.astype(bool),
                )
