"""Hypothesis strategies: what kernels and formats are tested on, drawn as small integers and made from them.

Every strategy draws a few integers and names, from the simplest to the most complex, and makes arrays from them by
integers alone: an example is the same on every machine, is small in a report, and shrinks to the plainest case. Arrays
of floats are never drawn element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from flamia_ref._errors import shown
from flamia_ref.packing import Documents, Mask
from flamia_ref.properties.data import Inputs, inputs_of
from flamia_ref.properties.drawn import (
    BLOCK,
    LENGTHS,
    OPERANDS,
    Edit,
    Example,
    Family,
    Poison,
    Space,
)
from flamia_ref.properties.numbers import (
    bfloat16_bits,
    block_data,
    code_arrays,
    codes,
    float32_bits,
    ties,
)
from flamia_ref.properties.variants import recipes, varied_recipes

__all__ = [
    "attention_inputs",
    "bfloat16_bits",
    "block_data",
    "code_arrays",
    "codes",
    "cu_seqlens",
    "cuts",
    "documents",
    "edits",
    "examples",
    "float32_bits",
    "masks",
    "recipes",
    "ties",
    "varied_recipes",
]

EXPONENTS = (1, 4, 8, 15, 20, 30, 40, -1, -8, -20, -40, 0)
"""Of edits: within a block's reach in e4m3, at its end, and far past it, up and down; 0 for a change of sign alone."""

_Drawn = Callable[[str, Space], st.SearchStrategy[Example]]

_SEEDS = st.integers(0, 255)
_MOST_EDITS = 4


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


def attention_inputs(space: Space = Space()) -> st.SearchStrategy[Inputs]:  # noqa: B008  frozen
    """q, k, v and dout as bfloat16 bits, with their documents: base data of a family and a seed, unedited."""
    return st.builds(
        _example,
        property=st.just("determinism"),
        space=st.just(space),
        lengths=documents(space.lengths, most=space.documents),
        family=st.sampled_from(Family),
        seed=_SEEDS,
    ).map(inputs_of)


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


def examples(property: str, space: Space = Space()) -> st.SearchStrategy[Example]:  # noqa: B008
    """Examples of one property that can show its absence: for `flamia_ref.properties.check`.

    Raises ValueError where the space has none, saying which length or shape it lacks, and UnknownName for an unknown
    property.
    """
    from flamia_ref.properties.catalogue import PROPERTIES

    PROPERTIES[property]  # raises for an unknown one
    return _DRAWN.get(property, _plain)(property, space)


def _example(
    *,
    property: str,
    space: Space,
    lengths: tuple[int, ...],
    family: Family,
    seed: int,
    document: int = 0,
) -> Example:
    return Example(
        property=property,
        lengths=lengths,
        family=str(family),
        seed=seed,
        document=document,
        **space.shape,
    )


def _plain(property: str, space: Space) -> st.SearchStrategy[Example]:
    return _one_of_many(property, space, least=1, others=0)


def _one_of_many(
    property: str, space: Space, *, least: int, others: int, alone: bool = False
) -> st.SearchStrategy[Example]:
    """Documents among which one has at least `least` tokens, and `others` further ones at least 1: `document` is it."""
    return _placed(space, least=least, others=others, alone=alone).flatmap(
        lambda drawn: st.builds(
            _example,
            property=st.just(property),
            space=st.just(space),
            lengths=st.just(drawn[0]),
            document=st.just(drawn[1]),
            family=st.sampled_from(Family),
            seed=_SEEDS,
        )
    )


def _placed(
    space: Space, *, least: int, others: int, alone: bool
) -> st.SearchStrategy[tuple[tuple[int, ...], int]]:
    long = _needed(space, least)
    if others >= space.documents:
        raise ValueError(f"documents is {space.documents}; it takes at least {others + 1}")
    rest = 0 if alone else space.documents - 1 - others
    return st.tuples(
        st.lists(st.sampled_from(_needed(space, 1)), min_size=others, max_size=others),
        st.lists(st.sampled_from(space.lengths), max_size=rest),
        st.sampled_from(long),
        st.integers(0, 255),
    ).map(_insert)


def _insert(drawn: tuple[list[int], list[int], int, int]) -> tuple[tuple[int, ...], int]:
    sure, free, length, place = drawn
    lengths = [*sure, *free]
    place %= len(lengths) + 1
    return (*lengths[:place], length, *lengths[place:]), place


def _needed(space: Space, least: int) -> tuple[int, ...]:
    found = space.at_least(least)
    if not found:
        raise ValueError(
            f"no length of {shown(space.lengths)} is {least} or more, so nothing could be found; add one"
        )
    return found


def _with_edits(
    example: Example, operands: Sequence[str], tokens: range, poisons: bool = False
) -> st.SearchStrategy[Example]:
    """One operand is edited at a time: the guilty one is then known."""

    def of(operand: str) -> st.SearchStrategy[Edit]:
        if poisons:
            return st.builds(
                Edit,
                operand=st.just(operand),
                token=st.sampled_from(tokens),
                channel=st.integers(0, example.head_dim - 1) | st.none(),
                poison=st.sampled_from([str(one) for one in Poison]),
            )
        return edits(tokens, operands=(operand,), head_dim=example.head_dim)

    return (
        st.sampled_from(tuple(operands))
        .flatmap(lambda one: st.lists(of(one), min_size=1, max_size=_MOST_EDITS))
        .map(lambda drawn: replace(example, edits=tuple(drawn)))
    )


def _causality(property: str, space: Space) -> st.SearchStrategy[Example]:
    """Edits from a cut inside a block to that block's end: rows before it share the block, and may not see them."""

    def cut(example: Example, at: int) -> st.SearchStrategy[Example]:
        later = example.tokens()[at : (at // BLOCK + 1) * BLOCK]
        return _with_edits(example, ("v", "k", "q"), later)

    return _one_of_many(property, space, least=2, others=0).flatmap(
        lambda example: cuts(example.lengths[example.document]).flatmap(lambda at: cut(example, at))
    )


def _anywhere(*operands: str, least: int, poisons: bool = False) -> _Drawn:
    """Edits of any tokens of one document."""

    def of(property: str, space: Space) -> st.SearchStrategy[Example]:
        return _one_of_many(property, space, least=least, others=0).flatmap(
            lambda one: _with_edits(one, operands, one.tokens(), poisons)
        )

    return of


def _locality(property: str, space: Space) -> st.SearchStrategy[Example]:
    operands = ("q", "v") if space.window is None else ("q", "v", "k")
    return _anywhere(*operands, least=2)(property, space)


def _isolation(property: str, space: Space) -> st.SearchStrategy[Example]:
    """Edits of one document; another one has tokens."""
    return _one_of_many(property, space, least=1, others=1).flatmap(
        lambda one: _with_edits(one, ("v", "k", "q", "dout"), one.tokens())
    )


def _garbage(property: str, space: Space) -> st.SearchStrategy[Example]:
    drawn = _one_of_many(property, space, least=1, others=1)
    return st.builds(
        lambda one, garbage: replace(one, garbage=str(garbage)), drawn, st.sampled_from(Poison)
    )


def _company(property: str, space: Space) -> st.SearchStrategy[Example]:
    return _one_of_many(property, space, least=1, others=1)


def _prefix(property: str, space: Space) -> st.SearchStrategy[Example]:
    """Cuts anywhere in one document, so often inside blocks."""
    return _one_of_many(property, space, least=2, others=0, alone=True).flatmap(
        lambda one: st.integers(1, one.lengths[0] - 1).map(lambda cut: replace(one, cut=cut))
    )


def _scaling_examples(property: str, space: Space) -> st.SearchStrategy[Example]:
    return st.builds(
        lambda one, operand, exponent: replace(one, operand=operand, exponent=exponent),
        _plain(property, space),
        st.sampled_from(("v", "q", "k")),
        st.sampled_from((1, -1, 3, -3, 8, -8)),
    )


def _empties(property: str, space: Space) -> st.SearchStrategy[Example]:
    """Documents with tokens, and empty ones before, between and after them."""
    if 0 not in space.lengths:
        raise ValueError(f"0 is not among the lengths {shown(space.lengths)}; add it")
    filled = _needed(space, 1)

    def insert(example: Example, lengths: list[int], places: list[int]) -> Example:
        mixed = list(lengths)
        for place in places:
            mixed.insert(place % (len(mixed) + 1), 0)
        return replace(example, lengths=tuple(mixed), document=0)

    return st.builds(
        insert,
        _plain(property, space),
        st.lists(st.sampled_from(filled), min_size=1, max_size=space.documents),
        st.lists(st.integers(0, 7), min_size=1, max_size=3),
    )


def _groups(property: str, space: Space) -> st.SearchStrategy[Example]:
    if space.heads == space.kv_heads:
        raise ValueError(
            f"there are as many kv_heads as heads, {space.heads}, so none are shared; give fewer"
        )
    return _plain(property, space)


_DRAWN: dict[str, _Drawn] = {
    "causality": _causality,
    "locality": _locality,
    "prefix_parity": _prefix,
    "document_isolation": _isolation,
    "packing_invariance": _company,
    "backward_legality": _anywhere("dout", "q", "k", "v", least=2),
    "nan_poison": _anywhere("v", "k", "q", "dout", least=2, poisons=True),
    "padding_garbage": _garbage,
    "scale_invariance": _scaling_examples,
    "zero_length_documents": _empties,
    "grouped_heads": _groups,
}
