"""Strategies of inputs of attention, and of whole examples of each property.

They are exported by `flamia_ref.properties.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from flamia_ref._errors import shown
from flamia_ref.properties.data import Inputs, inputs_of
from flamia_ref.properties.drawn import BLOCK, Edit, Example, Family, Poison, Space
from flamia_ref.properties.packed import cuts, documents, edits

_Drawn = Callable[[str, Space], st.SearchStrategy[Example]]

_SEEDS = st.integers(0, 255)
_MOST_EDITS = 4


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
