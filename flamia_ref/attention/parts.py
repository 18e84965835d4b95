"""Attention cut into parts for float64: some queries of one head with the keys that they may see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref.packing import Documents

_ROWS = 256  # queries of a part: whole blocks of 32, so that no block of a document is cut
_BLOCK = 32

Values = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Part(NamedTuple):
    """Some queries of one head.

    Attributes:
        rows: their packed tokens.
        keys: the packed tokens of their document from its start to the last one that any of them sees.
        head, kv_head: the query head, and the key/value head that it shares.
        seen: which key each row sees, [rows, keys].
    """

    rows: slice
    keys: slice
    head: int
    kv_head: int
    seen: Mask

    def guarded(self) -> Mask:
        """Which pairs are in a guarded block: 32 queries by 32 keys with a visible pair and a masked one.

        A key past the document's end counts as masked, a query past it does not count.
        """
        rows, keys = self.seen.shape
        blocks = (-(-rows // _BLOCK), _BLOCK, -(-keys // _BLOCK), _BLOCK)
        seen = np.zeros((blocks[0] * _BLOCK, blocks[2] * _BLOCK), dtype=np.bool_)
        seen[:rows, :keys] = self.seen
        visible = seen.reshape(blocks).any(axis=(1, 3))
        seen[rows:] = True
        cut = visible & ~seen.reshape(blocks).all(axis=(1, 3))
        return np.repeat(np.repeat(cut, _BLOCK, axis=0), _BLOCK, axis=1)[:rows, :keys]


def parts(documents: Documents, heads: int, kv_heads: int, causal: bool) -> Iterator[Part]:
    """Every query of every head once, the documents one after another."""
    for document in documents:
        for first in range(document.start, document.stop, _ROWS):
            rows = slice(first, min(first + _ROWS, document.stop))
            keys = slice(document.start, rows.stop if causal else document.stop)
            seen = np.ones((rows.stop - rows.start, keys.stop - keys.start), dtype=np.bool_)
            if causal:
                seen = np.tril(seen, k=rows.start - keys.start)
            for head in range(heads):
                yield Part(rows, keys, head, head // (heads // kv_heads), seen)


def over_seen(weights: Values, values: Values, seen: Mask) -> Values:
    """weights [n, m] times values [m, channels] over the pairs seen; the weights of the others are 0.

    The zeros must not meet a NaN or an infinity that they hide.
    """
    if np.isfinite(values).all():
        return weights @ values
    return np.stack([one[row] @ values[row] for one, row in zip(weights, seen, strict=True)])
