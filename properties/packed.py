"""Strategies of packed documents: lengths, cuts inside blocks, edits of tokens, masks.

They are exported by `flamia_ref.properties.strategies`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from flamia_ref.packing import Documents, Mask
from flamia_ref.properties.drawn import BLOCK, LENGTHS, OPERANDS, Edit

EXPONENTS = (1, 4, 8, 15, 20, 30, 40, -1, -8, -20, -40, 0)
"""Of edits: within a block's reach in e4m3, at its end, and far past it, up and down; 0 for a change of sign alone."""


def documents(
    lengths: Sequence[int] = LENGTHS, *, least: int = 1, most: int = 3
) -> st.SearchStrategy[tuple[int, ...]]:
    """Lengths of packed documents, `least` to `most` of them, each one of `lengths`.

    Those that are no multiple of 32 make the next document straddle a block of the packed tokens. Shrinks to few
    documents of the smallest length.
    """
    if not lengths:
        raise ValueError("lengths is empty; give at least one")
    one = st.sampled_from(sorted(set(lengths)))
    return st.lists(one, min_size=least, max_size=most).map(tuple)


def cu_seqlens(
    lengths: Sequence[int] = LENGTHS, *, least: int = 1, most: int = 3
) -> st.SearchStrategy[npt.NDArray[np.int32]]:
    """The same as int32 [documents + 1]: where each starts, and the end."""
    return documents(lengths, least=least, most=most).map(
        lambda drawn: np.cumsum([0, *drawn]).astype(np.int32)
    )


def cuts(length: int, *, block: int = BLOCK) -> st.SearchStrategy[int]:
    """Where to cut a document of `length` tokens strictly inside a block: tokens on either side share a scale.

    A cut c leaves tokens 0 to c - 1 before it; c is no multiple of `block`. Shrinks to 1.

    Raises ValueError where there is no such cut: for a document of one token, or blocks of one.
    """
    # The whole multiples of the block are left out by numbering the others.
    inside = (length - 1) - (length - 1) // block
    if inside < 1:
        raise ValueError(
            f"a document of {length} tokens has no cut inside a block of {block}; give at least 2 of both"
        )
    return st.integers(0, inside - 1).map(lambda n: n // (block - 1) * block + n % (block - 1) + 1)


def edits(
    tokens: range, *, operands: Sequence[str] = OPERANDS, head_dim: int = 64
) -> st.SearchStrategy[Edit]:
    """One change of a token: one channel or all, times a power of two, with or without its sign.

    Shrinks to the first operand, the first of `tokens`, channel 0, times 2. Raises ValueError for no tokens.
    """
    if not tokens:
        raise ValueError("tokens is empty; give a range of at least one")
    return st.builds(
        _scaling,
        operand=st.sampled_from(tuple(operands)),
        token=st.sampled_from(tokens),
        channel=st.integers(0, head_dim - 1) | st.none(),
        exponent=st.sampled_from(EXPONENTS),
        sign=st.sampled_from((1, -1)),
    )


def _scaling(*, operand: str, token: int, channel: int | None, exponent: int, sign: int) -> Edit:
    """An edit that changes something: the exponent 0 changes the sign."""
    sign = sign if exponent else -1
    return Edit(operand=operand, token=token, channel=channel, exponent=exponent, sign=sign)


def masks(lengths: Sequence[int] = LENGTHS, *, most: int = 3) -> st.SearchStrategy[Mask]:
    """Masks: causal or full, with or without a window, keys of the queries' lengths or of others, both alignments."""

    def made(
        queries: tuple[int, ...],
        keys: tuple[int, ...] | None,
        causal: bool,
        left: int | None,
        right: int | None,
        alignment: str,
    ) -> Mask:
        # As many documents of keys as of queries: the drawn lengths, over and over.
        keys = queries if keys is None else tuple(keys[i % len(keys)] for i in range(len(queries)))
        of_queries, of_keys = (
            Documents((0, *map(int, np.cumsum(side)))) for side in (queries, keys)
        )
        return Mask(
            of_queries, of_keys, causal, (left, 0 if causal and right else right), alignment
        )

    sides = st.none() | st.sampled_from((0, 1, 31, 32, 33, 128))
    return st.builds(
        made,
        queries=documents(lengths, most=most),
        keys=st.none() | documents(lengths, most=most),
        causal=st.sampled_from((True, False)),
        left=sides,
        right=sides,
        alignment=st.sampled_from(("bottom_right", "top_left")),
    )
