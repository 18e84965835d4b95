"""Pairs of a query tile and a key tile, in an order that a backward can add them up in.

A pair adds to the dQ of its query tile and to the dK and dV of its key tile, each in a fixed order. Pairs that share
neither may be computed together, which is what a batch is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from flamia_ref.packing.blocks import Blocks, query_blocks
from flamia_ref.packing.mask import Mask
from flamia_ref.packing.tiles import Flags, Indices, QueryTiles, TileSize

Table = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TilePairs:
    """A batch of pairs, no two with the same query tile or the same key tile. Arrays have one entry a pair.

    Attributes:
        queries: the query tiles.
        key_first: first key of the key tile, counted from the document's start.
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
        """Packed token of each key [pairs, keys], -1 past the document's end."""
        return self.queries.key_tokens(self.key_first)

    def padded(self, count: int) -> TilePairs:
        """`count` pairs: these, then pairs of an empty document."""
        short = (0, count - len(self))
        names = ("key_first", "seen", "opens", "closes")
        return TilePairs(
            queries=self.queries.padded(count),
            **{name: np.pad(getattr(self, name), short) for name in names},
        )


class PairOrder(NamedTuple):
    """The orders of sums over pairs.

    `keys`: of a query tile's key tiles, `queries`: of a key tile's query tiles, each "ascending", "descending" or
    "shifted": from the tile of the same index on and round, descending along keys, ascending along queries; None where
    any will do. `keys_together`: aligned key tiles that are worked on together, ascending. `heads_in_sequence`: query
    heads that a key tile's sums take one after another, `heads_descending`: from the last on.
    """

    keys: str | None = "ascending"
    queries: str | None = "ascending"
    keys_together: int = 1
    heads_in_sequence: int = 1
    heads_descending: bool = False


def passes(order: PairOrder, mask: Mask, size: TileSize) -> tuple[PairOrder, ...]:
    """The orders to go through the pairs in: one, or one for dQ and one for dK and dV where no single one keeps both.

    That can be if both are shifted, and a document has other numbers of query tiles than of key tiles, or key tiles are
    worked on together.
    """
    if (order.keys, order.queries) == ("shifted", "shifted"):
        if order.keys_together > 1:
            return (order._replace(queries=None), order._replace(keys=None))
        for queries, keys in zip(mask.queries.lengths, mask.keys.lengths, strict=True):
            rows, columns = size.of(queries, keys)
            if not (queries and keys):
                continue
            if -(-queries // rows) != -(-keys // columns):
                return (order._replace(queries=None), order._replace(keys=None))
    return (order,)


def tile_pairs(
    mask: Mask, heads: int, batch: int, size: TileSize, order: PairOrder, *, unseen: bool
) -> Iterator[TilePairs]:
    """Every pair of a query tile and a key tile, in batches of at most `batch`. `unseen`: also pairs of which no query
    sees a key."""
    groups: dict[tuple[int, int], list[Table]] = {}
    blocks: dict[int, Blocks] = {}
    for index, (queries, keys) in enumerate(mask):
        length, key_length = queries.stop - queries.start, keys.stop - keys.start
        if not (length and key_length):
            continue
        rows, columns = size.of(length, key_length)
        if rows not in blocks:
            blocks[rows] = query_blocks(mask, rows)
        found = blocks[rows].of(index)
        pairs = _document_pairs(found, key_length, columns, order, unseen).astype(np.int32)
        query, key, seen, opens, closes, level = (np.tile(x, heads) for x in pairs)
        head = np.repeat(np.arange(heads, dtype=np.int32), pairs.shape[1])
        turn = head % order.heads_in_sequence
        if order.heads_descending:
            turn = order.heads_in_sequence - 1 - turn
        level = level + turn * (int(level.max(initial=0)) + 1)
        constants = (index, queries.start, length, keys.start, key_length)
        same = [np.full_like(head, constant) for constant in constants]
        groups.setdefault((rows, columns), []).append(
            np.stack((*same, head, query * rows, key * columns, seen, opens, closes, level))
        )
    for (rows, columns), parts in sorted(groups.items()):
        table = np.concatenate(parts, axis=1)
        order_of = np.argsort(table[-1], kind="stable")
        sorted_pairs: Indices = table[:, order_of].astype(np.int32)
        starts = np.flatnonzero(np.diff(sorted_pairs[-1], prepend=-1))
        for begin, end in zip(starts, [*starts[1:], sorted_pairs.shape[1]], strict=True):
            for first in range(begin, end, batch):
                yield _batch(rows, columns, sorted_pairs[:, first : min(first + batch, end)])


def _batch(rows: int, columns: int, table: Indices) -> TilePairs:
    document, start, length, key_start, key_length, head, first, key, seen, opens, closes, _ = table
    return TilePairs(
        queries=QueryTiles(
            rows=rows,
            keys=columns,
            document=document,
            head=head,
            first=first,
            start=start,
            length=length,
            key_start=key_start,
            key_length=key_length,
        ),
        key_first=key,
        seen=seen.astype(bool),
        opens=opens.astype(bool),
        closes=closes.astype(bool),
    )


def _document_pairs(
    blocks: Blocks, keys: int, columns: int, order: PairOrder, unseen: bool
) -> Table:
    """Query tile, key tile, seen, opens, closes and turn of each pair of one document of `keys` keys, [6, pairs]."""
    first, last = blocks.least, blocks.most
    count, key_count = len(first), -(-keys // columns)
    together = order.keys_together
    # What is worked on together is seen together.
    begin = first // columns // together * together
    end = np.minimum((last // columns // together + 1) * together, key_count)
    end = np.where(last < 0, begin, end)
    if unseen:
        query, key = (x.ravel() for x in np.indices((count, key_count)))
    else:
        counts = end - begin
        query = np.repeat(np.arange(count), counts)
        ahead = np.repeat(np.cumsum(counts) - counts - begin, counts)
        key = np.arange(len(query)) - ahead
    seen = (key >= begin[query]) & (key < end[query])
    group = key // together
    inside = key % together
    closes = (inside == together - 1) | (key == key_count - 1)
    groups = -(-key_count // together)
    along_keys = _turn(order.keys, np.minimum(query // together, groups - 1), group, groups, -1)
    along_keys = along_keys * together + inside
    along_queries = _turn(order.queries, np.where(key < count, key, 0), query, count, 1)
    if "shifted" in (order.keys, order.queries):
        level = _levels(query, key, along_keys, along_queries, order)
    else:
        level = along_keys * (order.keys is not None) + along_queries
        if order.queries is None:
            level = along_keys
    return np.stack((query, key, seen, inside == 0, closes, level)).astype(np.int64)


def _turn(order: str | None, start: Table, moving: Table, count: int, direction: int) -> Table:
    """When each tile `moving` comes in a sum over `count` tiles, which begins at `start` if it is shifted."""
    match order:
        case "descending":
            return count - 1 - moving
        case "shifted":
            return (direction * (moving - start)) % count
    return moving


def _levels(
    query: Table, key: Table, along_keys: Table, along_queries: Table, order: PairOrder
) -> Table:
    """The earliest turn of each pair that keeps both orders: the longest way to it."""
    waits = np.zeros(len(query), dtype=np.int64)
    following: list[list[int]] = [[] for _ in query]
    for one, turn, wanted in (
        (query, along_keys, order.keys),
        (key, along_queries, order.queries),
    ):
        if wanted is None:
            continue
        sorted_pairs = np.lexsort((turn, one))
        same = one[sorted_pairs][1:] == one[sorted_pairs][:-1]
        for before, after in zip(sorted_pairs[:-1][same], sorted_pairs[1:][same], strict=True):
            following[before].append(int(after))
            waits[after] += 1
    level = np.zeros(len(query), dtype=np.int64)
    ready = [int(pair) for pair in np.flatnonzero(waits == 0)]
    for pair in ready:
        for after in following[pair]:
            level[after] = max(level[after], level[pair] + 1)
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    if len(ready) < len(query):
        raise AssertionError("the orders of the sums contradict each other")
    return level
