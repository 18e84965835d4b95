"""Work tiles: packed documents laid out as batches of tiles of a few fixed shapes.

Only tiles enter compiled code, so a new set of document lengths compiles nothing. A tile is the queries of one head of
one document, as many as its rows; the last tile of a document is filled up with rows that see no key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flamia_ref.packing.blocks import Blocks, query_blocks
from flamia_ref.packing.mask import Mask

Indices = np.ndarray[Any, np.dtype[np.int32]]

Flags = np.ndarray[Any, np.dtype[np.bool_]]

BLOCK = 32
"""Tokens that share a scale in a block."""

_ROWS = (32, 64, 128)
_SLOTS = (1, 2, 4, 8)  # guarded key blocks of a query block that are computed together


class TileSize(NamedTuple):
    """Rows of a query tile and columns of a key tile. `whole`: a document gets no smaller tiles, however short."""

    query: int
    key: int
    whole: bool = False

    def of(self, queries: int, keys: int) -> tuple[int, int]:
        """Rows and columns of the tiles of a document."""
        if self.whole:
            return self.query, self.key
        return tile_rows(queries, self.query), tile_rows(keys, self.key)


def tile_rows(length: int, tile: int) -> int:
    """Rows of the tiles of a document: `tile`, or fewer if one tile of fewer holds it all, which changes no bit."""
    return next((rows for rows in _ROWS if length <= rows <= tile), tile)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryTiles:
    """A batch of query tiles of one shape. Arrays have one entry a tile.

    Attributes:
        rows: queries a tile has room for.
        keys: keys that a key tile for it has room for.
        document: index of the document.
        head: query head.
        first: first query of the tile, counted from the document's start.
        start, length: first packed query of the document, and how many it has.
        key_start, key_length: likewise of its keys.
    """

    rows: int
    keys: int
    document: Indices
    head: Indices
    first: Indices
    start: Indices
    length: Indices
    key_start: Indices
    key_length: Indices

    def __len__(self) -> int:
        return len(self.document)

    def query_tokens(self) -> Indices:
        """Packed token of each row [tiles, rows], -1 for rows past the document's end."""
        return _tokens(self.first, self.rows, self.start, self.length)

    def key_tokens(self, key_first: Indices) -> Indices:
        """Packed token of each key of the key tiles that start at `key_first` [tiles, keys], -1 past the end."""
        return _tokens(key_first, self.keys, self.key_start, self.key_length)

    def padded(self, count: int) -> QueryTiles:
        """`count` tiles: these, then tiles of an empty document, which see no key."""
        short = (0, count - len(self))
        names = ("document", "head", "first", "start", "length", "key_start", "key_length")
        return QueryTiles(
            rows=self.rows,
            keys=self.keys,
            **{name: np.pad(getattr(self, name), short) for name in names},
        )

    def bounds(self, mask: Mask) -> tuple[Indices, Indices]:
        """The first and the last key that each row sees [tiles, rows]; (0, -1) for rows that see none."""
        place = self.first[:, None] + np.arange(self.rows, dtype=np.int32)
        inside = place < self.length[:, None]
        return mask.bounds(self.document[:, None], np.where(inside, place, np.int32(-1)))

    def key_tiles(self, last: Indices, first: Indices) -> tuple[Indices, Indices]:
        """The first key tile that a row of each tile sees and the one after the last [tiles], from `bounds`."""
        seen = last >= 0
        least = np.where(seen, first, np.iinfo(np.int32).max).min(axis=1)
        begin = np.where(seen.any(axis=1), least // self.keys, 0)
        return begin.astype(np.int32), (last.max(axis=1) // self.keys + 1).astype(np.int32)


def _tokens(first: Indices, rows: int, start: Indices, length: Indices) -> Indices:
    place = first[:, None] + np.arange(rows, dtype=np.int32)
    return np.where(place < length[:, None], start[:, None] + place, np.int32(-1))


def query_tiles(mask: Mask, heads: int, batch: int, size: TileSize) -> Iterator[QueryTiles]:
    """Every query tile of every head, in batches of at most `batch` tiles of one shape.

    A document shorter than half of the tile gets smaller tiles, which changes no bit: masked rows and columns are
    neutral. Tiles with about equally many key tiles come together.
    """
    groups: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    blocks: dict[int, Blocks] = {}
    for index, (queries, keys) in enumerate(mask):
        length, key_length = queries.stop - queries.start, keys.stop - keys.start
        rows, columns = size.of(length, key_length)
        if not length:
            continue
        if rows not in blocks:
            blocks[rows] = query_blocks(mask, rows)
        found = blocks[rows].of(index)
        seen = (found.most // columns) - (found.least // columns)
        groups.setdefault((rows, columns), []).extend(
            (int(many), int(place), index, queries.start, length, keys.start, key_length)
            for many, place in zip(seen, found.first, strict=True)
        )
    for (rows, columns), tiles in sorted(groups.items()):
        items = [(*entry[1:], head) for entry in sorted(tiles) for head in range(heads)]
        for begin in range(0, len(items), batch):
            first, document, start, length, key_start, key_length, head = np.array(
                items[begin : begin + batch], dtype=np.int32
            ).T
            yield QueryTiles(
                rows=rows,
                keys=columns,
                document=document,
                head=head,
                first=first,
                start=start,
                length=length,
                key_start=key_start,
                key_length=key_length,
            )


def guarded_blocks(
    first: Indices, last: Indices, inside: Flags, key_first: Indices, keys: int
) -> Indices | None:
    """The key blocks of a tile that are guarded for each 32 queries [tiles, rows / 32, slots], ascending, then -1; None
    if there is none at all.

    A guarded block is 32 queries by 32 keys with a visible and a masked pair. A key past the document's end counts as
    masked, a query past it does not count. `first`, `last` [tiles, rows] as from `QueryTiles.bounds`; `inside`: the
    rows in the document; `key_first` [tiles]: the first of a tile of `keys` keys.
    """
    tiles, rows = last.shape
    place = key_first[:, None] + BLOCK * np.arange(keys // BLOCK, dtype=np.int32)
    place = place[:, None, None, :]

    def grouped(x: Any) -> Any:
        return x.reshape(tiles, rows // BLOCK, BLOCK)[..., None]

    low, high = grouped(first), grouped(last)
    visible = ((low < place + BLOCK) & (high >= place)).any(axis=2)
    whole = (low <= place) & (high >= place + (BLOCK - 1))
    guarded = visible & (grouped(inside) & ~whole).any(axis=2)
    most = int(guarded.sum(axis=2).max(initial=0))
    if not most:
        return None
    slots = min(next(count for count in _SLOTS if count >= most), keys // BLOCK)
    block = np.where(guarded, np.arange(keys // BLOCK), keys // BLOCK)
    block = np.sort(block, axis=2)[..., :slots]
    return np.where(block < keys // BLOCK, block, -1).astype(np.int32)
