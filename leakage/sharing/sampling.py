"""A few short documents that stand for a pack of many long ones.

Beyond a length, a document that is longer by a period, of which all blocks are a part, has the same pairs once more in
its middle: what is counted over its tokens, or over pairs of them, is a polynomial of degree 2 in the number of
periods. Three lengths give it, and the polynomials of all documents of a pack add up to weights of those three. The
same holds of the keys that a document has more than queries, or the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flamia_ref.leakage.sharing.coupling import Coupling
from flamia_ref.leakage.sharing.runs import Places
from flamia_ref.packing.documents import Documents
from flamia_ref.packing.mask import Mask

_STEADY, _LOOKING_BACK = 2, 6  # periods, more than it takes


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Documents and how often each counts.

    Attributes:
        mask: the documents, one of each length of queries and keys, under the mask of the pack.
        weights: what a count over one of them is multiplied by in the count over the pack; it may be negative.
    """

    mask: Mask
    weights: tuple[int, ...]


def of_pack(mask: Mask) -> Sample:
    """The pack itself."""
    return Sample(mask=mask, weights=(1,) * len(mask.queries))


class Kinds(NamedTuple):
    """The different documents of a pack: their queries, their keys, how many there are of each, and the first."""

    queries: Places
    keys: Places
    many: Places
    first: Places


def kinds(mask: Mask) -> Kinds:
    """Those of a pack."""
    queries = np.diff(np.array(mask.queries.offsets))
    keys = queries
    if mask.keys is not mask.queries:
        keys = np.diff(np.array(mask.keys.offsets))
    span = 1 << 32
    kind, first, count = np.unique(queries * span + keys, return_index=True, return_counts=True)
    return Kinds(kind // span, kind % span, count, first)


def steady_from(mask: Mask, coupling: Coupling) -> int:
    """The queries and keys from which on another period changes nothing but the counts."""
    periods = _STEADY + _LOOKING_BACK * coupling.looks_back
    return coupling.period * periods + 2 * sum(side or 0 for side in mask.window)


def sampled(mask: Mask, coupling: Coupling, of: Kinds) -> Sample:
    """The sample of a pack whose blocks are counted from the start of each document."""
    least, period = steady_from(mask, coupling), coupling.period
    weights: dict[tuple[int, int], int] = {}
    for queries, keys, count in zip(*(x.tolist() for x in of[:3]), strict=True):
        if not queries and not keys:
            continue
        for kind, weight in stand_ins(queries, keys, least, period):
            weights[kind] = weights.get(kind, 0) + count * weight
    lengths = sorted(weights)
    offsets = np.cumsum([(0, 0), *lengths], axis=0)
    queries, keys = (Documents(tuple(x.tolist())) for x in offsets.T)
    mask = Mask(queries, keys, mask.causal, mask.window, mask.alignment)
    return Sample(mask=mask, weights=tuple(weights[kind] for kind in lengths))


def stand_ins(
    queries: int, keys: int, least: int, period: int
) -> Iterator[tuple[tuple[int, int], int]]:
    """The queries and keys of the documents that stand for one, and their weights: with fewer of both, and with fewer
    of what it has more of."""
    for both, weight in nodes((min(queries, keys) - least) // period):
        for more, factor in nodes((abs(queries - keys) - least) // period):
            fewer_queries = both + more * (queries > keys)
            fewer_keys = both + more * (keys > queries)
            kind = (queries - fewer_queries * period, keys - fewer_keys * period)
            yield kind, weight * factor


def nodes(periods: int) -> tuple[tuple[int, int], ...]:
    """How many periods shorter the documents are that stand for one of so many periods beyond the steady length, and
    the weight of each: Lagrange's, for 0, 1 and 2 periods beyond."""
    if periods <= 2:
        return ((0, 1),)
    return (
        (periods, (periods - 1) * (periods - 2) // 2),
        (periods - 1, -periods * (periods - 2)),
        (periods - 2, periods * (periods - 1) // 2),
    )
