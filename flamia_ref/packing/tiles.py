"""Work tiles: packed documents laid out as batches of tiles of a few fixed shapes.

Only tiles enter compiled code, so a new set of document lengths compiles nothing. A tile is the queries of one head of
one document, as many as its rows; the last tile of a document is filled up with rows that see no key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref.packing.documents import Documents

Indices = np.ndarray[Any, np.dtype[np.int32]]

Flags = np.ndarray[Any, np.dtype[np.bool_]]

BLOCK = 32
"""Tokens that share a scale in a block."""

_ROWS = (32, 64, 128)


def tile_rows(length: int, tile: int) -> int:
    """Rows of the tiles of a document: `tile`, or fewer if one tile of fewer holds it all, which changes no bit."""
    return next((rows for rows in _ROWS if length <= rows <= tile), tile)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryTiles:
    """A batch of query tiles of one shape. Arrays have one entry a tile.

    Attributes:
        rows: queries a tile has room for, and keys that a key tile for it has room for.
        document: index of the document.
        head: query head.
        first: first token of the tile, counted from the document's start.
        start: first token of the document in the packed arrays.
        length: tokens of the document.
    """

    rows: int
    document: Indices
    head: Indices
    first: Indices
    start: Indices
    length: Indices

    def __len__(self) -> int:
        return len(self.document)

    def query_tokens(self) -> Indices:
        """Packed token of each row [tiles, rows], -1 for rows past the document's end."""
        return self.tokens_from(self.first)

    def key_tokens(self, key_tile: int) -> Indices:
        """Packed token of each key of the documents' `key_tile`-th tile [tiles, rows], -1 past the end."""
        return self.tokens_from(np.full_like(self.first, key_tile * self.rows))

    def padded(self, count: int) -> QueryTiles:
        """`count` tiles: these, then tiles of an empty document, which see no key."""
        short = (0, count - len(self))
        names = ("document", "head", "first", "start", "length")
        return QueryTiles(
            rows=self.rows, **{name: np.pad(getattr(self, name), short) for name in names}
        )

    def tokens_from(self, first: Indices) -> Indices:
        """Packed token of each row [tiles, rows] of tiles that start at `first`, -1 past the documents' ends."""
        place = first[:, None] + np.arange(self.rows, dtype=np.int32)
        return np.where(place < self.length[:, None], self.start[:, None] + place, np.int32(-1))


def query_tiles(documents: Documents, heads: int, batch: int, tile: int) -> Iterator[QueryTiles]:
    """Every query tile of every head, in batches of at most `batch` tiles of one shape.

    `tile` is the recipe's tile (128). A document shorter than half of it gets smaller tiles, which changes no bit:
    masked rows and columns are neutral. Tiles with equally many key tiles before them come together.
    """
    groups: dict[int, list[tuple[int, int, int, int]]] = {}
    for index, (start, length) in enumerate(
        zip(documents.offsets, documents.lengths, strict=False)
    ):
        rows = tile_rows(length, tile)
        for first in range(0, length, rows):
            groups.setdefault(rows, []).append((first, index, start, length))
    for rows, tiles in sorted(groups.items()):
        items = [(*entry, head) for entry in sorted(tiles) for head in range(heads)]
        for begin in range(0, len(items), batch):
            first, document, start, length, head = np.array(
                items[begin : begin + batch], dtype=np.int32
            ).T
            yield QueryTiles(
                rows=rows, document=document, head=head, first=first, start=start, length=length
            )


def last_visible(tiles: QueryTiles, causal: bool) -> Indices:
    """The last key that each row sees [tiles, rows], counted from its document's start; -1 for rows that see none."""
    place = tiles.first[:, None] + np.arange(tiles.rows, dtype=np.int32)
    inside = place < tiles.length[:, None]
    last = place if causal else np.broadcast_to(tiles.length[:, None] - 1, place.shape)
    return np.where(inside, last, np.int32(-1)).astype(np.int32)


def guarded_blocks(last: Indices, key_first: Indices) -> Indices:
    """The key block that is guarded for each 32 queries [tiles, rows / 32], -1 for none.

    A guarded block is 32 queries by 32 keys with a visible and a masked pair. A key past the document's end counts as
    masked, a query past it does not count. A causal or full mask leaves at most one in a tile for 32 queries.
    `last` [tiles, rows] as from `last_visible`; `key_first` [tiles]: the first key of a tile of as many keys.
    """
    tiles, rows = last.shape
    blocks = last.reshape(tiles, rows // BLOCK, BLOCK)
    most = blocks.max(axis=2)
    least = np.where(blocks < 0, np.iinfo(np.int32).max, blocks).min(axis=2)
    first = key_first[:, None] + BLOCK * np.arange(rows // BLOCK, dtype=np.int32)
    visible = most[:, :, None] >= first[:, None, :]
    masked = least[:, :, None] < first[:, None, :] + (BLOCK - 1)
    guarded = visible & masked
    return np.where(guarded.any(axis=2), guarded.argmax(axis=2), -1).astype(np.int32)
