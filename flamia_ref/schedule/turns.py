"""Turns: which tile product is added to which sum when, where a backward's dQ has a fixed order.

A tile of a backward is a block of keys and goes through query tiles. Each product adds to the dQ of its query tile. A
deterministic kernel keeps a semaphore a query tile: it adds when those before it, in a fixed order of key tiles, have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref._errors import unknown_name
from flamia_ref.schedule.work import Work

Floats = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]

ALONG = ("ascending", "descending", "shifted")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """The tile products of every tile in the order in which it goes through them.

    Attributes:
        first: where the products of each tile begin, and at the end their number [tiles + 1].
        row: the sum that each product adds to [products].
        turn: how many products are added to that sum before it [products].
        cycles: what each product takes [products].
        rows: how many sums there are.
        latency: cycles from one addition to a sum to the next one that may be made to it.
    """

    first: Counts
    row: Counts
    turn: Counts
    cycles: Floats
    rows: int
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency < np.inf:
            raise ValueError(f"latency is {self.latency}; it must be finite and not negative")


def turns_of(work: Work, cycles: Floats, *, keys: str, queries: str, latency: float = 0.0) -> Turns:
    """The turns of a backward whose tiles are blocks of keys.

    Args:
        work: its tiles.
        cycles: of a tile product of each tile [tiles].
        keys: the order in which key tiles are added to a query tile's dQ: "ascending", "descending", or "shifted": from
            the key tile of the query tile's index on, descending and round.
        queries: the order in which a tile goes through its query tiles: "ascending", "descending", or "shifted": from
            the one of its own index on, ascending and round.
        latency: cycles from one addition to a sum to the next.

    Raises: ValueError for unknown names, a launch by queries, and a negative latency.
    """
    for name, value in (("keys", keys), ("queries", queries)):
        if value not in ALONG:
            raise unknown_name(name, value, ALONG)
    if not work.launch.by_keys:
        raise ValueError(f"the launch is {work.launch.value}; turns are of tiles of keys")
    first = np.concatenate([[0], np.cumsum(work.products)]).astype(np.int64)
    tile = np.repeat(np.arange(len(work)), work.products)
    inside = np.arange(first[-1]) - first[tile]
    count, begin, key = work.products[tile], work.begin[tile], work.block[tile]
    match queries:
        case "descending":
            inside = count - 1 - inside
        case "shifted":
            inside = (np.clip(key - begin, 0, np.maximum(count - 1, 0)) + inside) % np.maximum(
                count, 1
            )
    query = begin + inside
    row, rows = _rows(work, tile, query)
    counts = -(-np.array(work.problem.mask.keys.lengths, dtype=np.int64) // work.size.keys)
    key_count = counts[work.document[tile]]
    match keys:
        case "ascending":
            along = key
        case "descending":
            along = -key
        case _:
            along = (np.minimum(query, key_count - 1) - key) % key_count
    sorted_products = np.lexsort((along, row))
    starts = np.flatnonzero(np.diff(row[sorted_products], prepend=-1))
    rank = np.arange(len(row)) - np.repeat(starts, np.diff([*starts, len(row)]))
    turn = np.empty(len(row), dtype=np.int64)
    turn[sorted_products] = rank
    return Turns(first=first, row=row, turn=turn, cycles=cycles[tile], rows=rows, latency=latency)


def _rows(work: Work, tile: Counts, query: Counts) -> tuple[Counts, int]:
    """An index for each query tile of a document and head that is added to."""
    most = int(query.max(initial=0)) + 1
    wide = (work.document[tile] * work.problem.heads + work.head[tile]) * most + query
    found, row = np.unique(wide, return_inverse=True)
    return row.astype(np.int64), len(found)
