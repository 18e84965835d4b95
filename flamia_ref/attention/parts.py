"""Attention cut into parts for float64: some queries of one head with the keys that they may see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref.packing import Mask
from flamia_ref.packing.tiles import BLOCK

_ROWS = 256  # queries of a part: whole blocks of 32, so that no block of a document is cut
_SOME_ROWS = 64  # where a few rows may see very many keys

Values = npt.NDArray[np.float64]
Pairs = npt.NDArray[np.bool_]


class Part(NamedTuple):
    """Some queries of one head.

    Attributes:
        rows: their packed tokens.
        keys: the packed tokens of the keys of their document from the first to the last that any of them sees, made up
            to whole blocks of 32; none where no key is seen.
        head, kv_head: the query head, and the key/value head that it shares.
        seen: which key each row sees, [rows, keys].
        document: the index of the document.
        first_query, first_key: the places of the first row and of the first key there, multiples of 32.
    """

    rows: slice
    keys: slice
    head: int
    kv_head: int
    seen: Pairs
    document: int
    first_query: int
    first_key: int

    def guarded(self) -> Pairs:
        """Which pairs are in a guarded block: 32 queries by 32 keys with a visible pair and a masked one.

        A key past the document's end counts as masked, a query past it does not count.
        """
        rows, keys = self.seen.shape
        blocks = (-(-rows // BLOCK), BLOCK, -(-keys // BLOCK), BLOCK)
        seen = np.zeros((blocks[0] * BLOCK, blocks[2] * BLOCK), dtype=np.bool_)
        seen[:rows, :keys] = self.seen
        visible = seen.reshape(blocks).any(axis=(1, 3))
        seen[rows:] = True
        cut = visible & ~seen.reshape(blocks).all(axis=(1, 3))
        return np.repeat(np.repeat(cut, BLOCK, axis=0), BLOCK, axis=1)[:rows, :keys]


def parts(mask: Mask, heads: int, kv_heads: int, *, every_key: bool = False) -> Iterator[Part]:
    """Every query of every head once, the documents one after another. `every_key`: with all keys of the document."""
    for document, (queries, keys) in enumerate(mask):
        length = keys.stop - keys.start
        first, last = mask.document_bounds(document)
        for begin in range(0, queries.stop - queries.start, _ROWS):
            lowest, highest = first[begin : begin + _ROWS], last[begin : begin + _ROWS]
            start, stop = (0, length) if every_key else _range(lowest, highest, length)
            place = np.arange(start, stop, dtype=np.int32)
            seen = (place >= lowest[:, None]) & (place <= highest[:, None])
            rows = slice(queries.start + begin, queries.start + begin + len(seen))
            columns = slice(keys.start + start, keys.start + stop)
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                yield Part(rows, columns, head, kv_head, seen, document, begin, start)


def some_parts(
    mask: Mask, heads: int, kv_heads: int, queries: npt.NDArray[np.int64]
) -> Iterator[Part]:
    """Some packed queries, ascending, of every head once: rows that follow each other, a few at a time.

    Such a part may begin anywhere, so blocks mean nothing in it.
    """
    for document, (here, keys) in enumerate(mask):
        first, last = mask.document_bounds(document)
        mine = queries[(queries >= here.start) & (queries < here.stop)] - here.start
        for run in np.split(mine, np.flatnonzero(np.diff(mine) != 1) + 1):
            for at in range(0, len(run), _SOME_ROWS):
                begin, end = int(run[at]), int(run[at : at + _SOME_ROWS][-1]) + 1
                lowest, highest = first[begin:end], last[begin:end]
                start, stop = _range(lowest, highest, keys.stop - keys.start)
                place = np.arange(start, stop, dtype=np.int32)
                seen = (place >= lowest[:, None]) & (place <= highest[:, None])
                rows = slice(here.start + begin, here.start + end)
                columns = slice(keys.start + start, keys.start + stop)
                for head in range(heads):
                    kv_head = head // (heads // kv_heads)
                    yield Part(rows, columns, head, kv_head, seen, document, begin, start)


def _range(first: npt.NDArray[np.int32], last: npt.NDArray[np.int32], keys: int) -> tuple[int, int]:
    """The keys of the whole blocks that rows see something of, from one to before the other."""
    alive = last >= 0
    if not alive.any():
        return 0, 0
    start = int(first[alive].min()) // BLOCK * BLOCK
    return start, min(keys, -(-(int(last.max()) + 1) // BLOCK) * BLOCK)


def over_seen(weights: Values, values: Values, seen: Pairs) -> Values:
    """weights [n, m] times values [m, channels] over the pairs seen; the weights of the others are 0.

    The zeros must not meet a NaN or an infinity that they hide.
    """
    if np.isfinite(values).all() or not weights.size:
        return np.asarray(weights @ values)
    return np.stack([one[row] @ values[row] for one, row in zip(weights, seen, strict=True)])


def capped(s: Values, softcap: float | None) -> tuple[Values, Values]:
    """Scores under a soft cap, softcap tanh(s / softcap), and the derivative of that; without one `s` and 1."""
    if softcap is None:
        return s, np.ones((1, 1))
    t = np.tanh(s / softcap)
    return softcap * t, (1 - t) * (1 + t)
