"""What blocks of consecutive queries see, and blocks of consecutive keys are seen by, without an array of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flamia_ref.packing.mask import Mask

Table = np.ndarray[Any, np.dtype[np.int64]]


class Blocks(NamedTuple):
    """Blocks of `size` consecutive tokens of one side of a mask, documents one after another; an entry a block.

    The blocks start at the document's start; the last may be short. The other side of queries are the keys they see,
    that of keys the queries that see them; both count from their document's start.

    Attributes:
        document: index of the document.
        first: first token of the block, counted from the document's start.
        length: its tokens.
        least, most: the first and the last of the other side that any token of the block is paired with; (0, -1) for
            none.
        shared_least, shared_most: likewise what all of them are paired with; (0, -1) for none.
    """

    document: Table
    first: Table
    length: Table
    least: Table
    most: Table
    shared_least: Table
    shared_most: Table

    def of(self, document: int) -> Blocks:
        """The blocks of one document."""
        begin, end = np.searchsorted(self.document, (document, document + 1))
        return Blocks(*(column[begin:end] for column in self))

    def tiles(self, size: int) -> tuple[Table, Table]:
        """The first tile of `size` of the other side that a block meets, and the one after the last."""
        begin = self.least // size
        return begin, np.where(self.most < 0, begin, self.most // size + 1)

    def whole_tiles(self, size: int) -> tuple[Table, Table]:
        """The first of these tiles without a masked pair with the block and without a place past the document's end,
        and the one after the last."""
        begin = -(-self.shared_least // size)
        end = np.where(self.shared_most < 0, begin, (self.shared_most + 1) // size)
        return begin, np.maximum(begin, end)


def query_blocks(mask: Mask, size: int) -> Blocks:
    """The blocks of `size` queries of every document and the keys they see."""
    left, right = mask.window
    return _blocks(
        mask.queries.lengths, mask.keys.lengths, mask, size, left, 0 if mask.causal else right
    )


def key_blocks(mask: Mask, size: int) -> Blocks:
    """The blocks of `size` keys of every document and the queries that see them."""
    left, right = mask.window
    return _blocks(
        mask.keys.lengths, mask.queries.lengths, mask, size, 0 if mask.causal else right, left, -1
    )


def _blocks(
    lengths: tuple[int, ...],
    others: tuple[int, ...],
    mask: Mask,
    size: int,
    before: int | None,
    after: int | None,
    sign: int = 1,
) -> Blocks:
    """Token i is paired with those from i + sign shift - `before` to i + sign shift + `after`, None for no limit."""
    own, other = np.array(lengths, dtype=np.int64), np.array(others, dtype=np.int64)
    shifts = sign * np.array([mask.shift(at) for at in range(len(own))], dtype=np.int64)
    counts = -(-own // size)
    document = np.repeat(np.arange(len(own)), counts)
    first = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
    end = np.minimum(first + size, own[document])
    other, shift = other[document], shifts[document]
    # Tokens that are paired with any are consecutive: those whose run does not end before 0 or begin past the end.
    paired = first if after is None else np.maximum(first, -shift - after)
    stop = end if before is None else np.minimum(end, other - shift + before)
    none = (paired >= stop) | (other == 0)

    def least(token: Table) -> Table:
        return np.zeros_like(token) if before is None else np.maximum(token + shift - before, 0)

    def most(token: Table) -> Table:
        return other - 1 if after is None else np.minimum(token + shift + after, other - 1)

    shared = (least(end - 1), most(first))
    apart = none | (paired > first) | (stop < end) | (shared[0] > shared[1])
    return Blocks(
        document,
        first,
        end - first,
        np.where(none, 0, least(paired)),
        np.where(none, -1, most(stop - 1)),
        np.where(apart, 0, shared[0]),
        np.where(apart, -1, shared[1]),
    )
