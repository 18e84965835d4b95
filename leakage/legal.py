"""What attention may depend on: its legal dependencies as data, and the tokens they name under a mask."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import unknown_name
from flamia_ref.packing.mask import Mask

Bools = NDArray[np.bool_]
Places = NDArray[np.int64]


class Legal(StrEnum):
    """Which tokens of an input a token of an output may depend on.

    Queries that see no key have constant outputs and constant gradients: they depend on nothing, and nothing on them.
    """

    NONE = "none"
    """None."""
    SAME = "same"
    """The query itself."""
    KEYS_SEEN = "keys_seen"
    """The keys that the query sees."""
    QUERIES_SEEING = "queries_seeing"
    """The queries that see the key."""
    KEYS_SEEN_TOGETHER = "keys_seen_together"
    """The keys that a query sees which sees the key, itself among them."""


_FORWARD = {"q": Legal.SAME, "k": Legal.KEYS_SEEN, "v": Legal.KEYS_SEEN, "dout": Legal.NONE}
_OF_KEYS = {
    "q": Legal.QUERIES_SEEING,
    "k": Legal.KEYS_SEEN_TOGETHER,
    "v": Legal.KEYS_SEEN_TOGETHER,
    "dout": Legal.QUERIES_SEEING,
}

LEGAL: Mapping[str, Mapping[str, Legal]] = MappingProxyType(
    {
        output: MappingProxyType(of)
        for output, of in {
            "out": _FORWARD,
            "lse": _FORWARD | {"v": Legal.NONE},
            "delta": _FORWARD | {"dout": Legal.SAME},
            "dq": _FORWARD | {"dout": Legal.SAME},
            "dk": _OF_KEYS,
            "dv": _OF_KEYS | {"v": Legal.NONE},
        }.items()
    }
)
"""For each output, which tokens of each input its tokens may depend on.

They are those of exact attention, under any mask: heads, grouped queries and sinks do not change them. P of a pair
depends on its row's query and on all keys that the row sees; delta of a row on the row's output too. Source: derived,
and found again, none missing and none more, in the programs of exact attention by `prove`.
"""

FORWARD_OUTPUTS = ("out", "lse")
QUERY_SIDE = frozenset({"q", "dout", "out", "lse", "delta", "dq"})
"""Inputs and outputs with a row a query; the others have one a key."""


class Severity(StrEnum):
    """How bad an illegal dependency is."""

    FORWARD = "forward"
    """An output of the forward sees a later token of its document: training then differs from decoding, and the
    optimizer can use it."""
    CROSS_DOCUMENT = "cross_document"
    """An output or a gradient sees another document: packing changes results."""
    PAST = "past"
    """An output of the forward sees a token of its document that it should not, but none that is later: decoding has
    to carry the same state."""
    BACKWARD = "backward"
    """A gradient sees a token of its document that the exact gradient does not: it is that of another function, and
    rounding errors of tokens hang together."""


_ORDER = tuple(Severity)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spans:
    """For each token of an output a run of tokens of an input: from `begin` to before `end`, empty if they are equal.

    Attributes:
        begin, end: int64 [tokens of the output].
        tokens: how many the input has.
    """

    begin: Places
    end: Places
    tokens: int

    @property
    def count(self) -> int:
        """How many pairs there are."""
        return int((self.end - self.begin).sum())

    def dense(self) -> Bools:
        """The pairs [tokens of the output, tokens of the input]; for short inputs."""
        place = np.arange(self.tokens)
        return (place >= self.begin[:, None]) & (place < self.end[:, None])


class LegalPairs:
    """The legal pairs of one mask, by output and input."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask

    def spans(self, output: str, input: str) -> Spans:
        """The tokens of `input` that each token of `output` may depend on."""
        legal = relation(output, input)
        if legal is not Legal.NONE:
            return self._spans[legal]
        rows, columns = (
            (self.mask.queries if name in QUERY_SIDE else self.mask.keys).tokens
            for name in (output, input)
        )
        none = np.zeros(rows, dtype=np.int64)
        return Spans(begin=none, end=none, tokens=columns)

    def dense(self, output: str, input: str) -> Bools:
        """The same [tokens of the output, tokens of the input]."""
        return self.spans(output, input).dense()

    def severity(self, output: str, out_token: Any, input: str, in_token: Any) -> Any:
        """The severity of illegal dependencies of tokens of `output` on tokens of `input`; arrays broadcast.

        Returns an object array of `Severity` of the broadcast shape.
        """
        of_out, of_in = self._side(output), self._side(input)
        out_document, out_place = (x[np.asarray(out_token)] for x in of_out)
        in_document, in_place = (x[np.asarray(in_token)] for x in of_in)
        if output not in FORWARD_OUTPUTS:
            inside: Any = _ORDER.index(Severity.BACKWARD)
        else:
            # Where a query stands among the keys, and the last of them that it sees by its place.
            reach = 0 if self.mask.causal else self.mask.window[1]
            shift = self._shifts[out_document] if input not in QUERY_SIDE else 0
            own = out_place + shift + (0 if reach is None or input in QUERY_SIDE else reach)
            later = (in_place > own) & (reach is not None)
            inside = np.where(later, _ORDER.index(Severity.FORWARD), _ORDER.index(Severity.PAST))
        other = _ORDER.index(Severity.CROSS_DOCUMENT)
        # By number: numpy makes plain strings of the members.
        number = np.where(out_document == in_document, inside, other)
        return np.asarray(np.array(_ORDER, dtype=object)[number], dtype=object)

    def _side(self, name: str) -> tuple[Places, Places]:
        return self._queries if name in QUERY_SIDE else self._keys

    @functools.cached_property
    def _queries(self) -> tuple[Places, Places]:
        return _places(self.mask.queries.offsets)

    @functools.cached_property
    def _keys(self) -> tuple[Places, Places]:
        return _places(self.mask.keys.offsets)

    @functools.cached_property
    def _shifts(self) -> Places:
        return np.array([self.mask.shift(d) for d in range(len(self.mask.queries))], dtype=np.int64)

    @functools.cached_property
    def _spans(self) -> dict[Legal, Spans]:
        mask = self.mask
        queries, keys = mask.queries.tokens, mask.keys.tokens
        document, place = self._queries
        first, last = (x.astype(np.int64) for x in mask.bounds(_narrow(document), _narrow(place)))
        starts = np.array(mask.keys.offsets, dtype=np.int64)[document]
        alive = last >= first
        first, end = np.where(alive, starts + first, 0), np.where(alive, starts + last + 1, 0)
        own = np.arange(queries)
        # Both ends never go back from one live query to the next, so those that see a key are a run.
        rows = np.flatnonzero(alive)
        key = np.arange(keys)
        begin_row = np.searchsorted(end[rows], key, side="right")
        end_row = np.searchsorted(first[rows], key, side="right")
        seen = begin_row < end_row
        earliest, latest = rows[begin_row[seen]], rows[end_row[seen] - 1]

        def of_keys(begin: Places, end: Places, tokens: int) -> Spans:
            spans = np.zeros((2, keys), dtype=np.int64)
            spans[:, seen] = begin, end
            return Spans(begin=spans[0], end=spans[1], tokens=tokens)

        return {
            Legal.SAME: Spans(
                begin=np.where(alive, own, 0), end=np.where(alive, own + 1, 0), tokens=queries
            ),
            Legal.KEYS_SEEN: Spans(begin=first, end=end, tokens=keys),
            Legal.QUERIES_SEEING: of_keys(earliest, latest + 1, queries),
            Legal.KEYS_SEEN_TOGETHER: of_keys(first[earliest], end[latest], keys),
        }


def relation(output: str, input: str) -> Legal:
    """The entry of `LEGAL`. Raises UnknownName for another output or input."""
    if output not in LEGAL:
        raise unknown_name("output", output, LEGAL)
    if input not in LEGAL[output]:
        raise unknown_name("input", input, LEGAL[output])
    return LEGAL[output][input]


def _places(offsets: tuple[int, ...]) -> tuple[Places, Places]:
    """The document of each token and its place in it."""
    starts = np.array(offsets, dtype=np.int64)
    lengths = starts[1:] - starts[:-1]
    document = np.repeat(np.arange(len(lengths)), lengths)
    return document, np.arange(offsets[-1]) - starts[document]


def _narrow(places: Places) -> NDArray[np.int32]:
    return places.astype(np.int32)
