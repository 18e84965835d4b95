"""One illegal pair of a pack, of each kind, found without going through its tokens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.sharing import sampling
from flamia_ref.leakage.sharing.coupling import Coupling
from flamia_ref.leakage.sharing.dependence import Dependence
from flamia_ref.leakage.sharing.illegal import Findings, Illegal
from flamia_ref.leakage.sharing.placement import Grid, Placement, Side
from flamia_ref.leakage.sharing.runs import Flags, Sets
from flamia_ref.leakage.sharing.sampling import Kinds
from flamia_ref.leakage.sharing.scales import side_of
from flamia_ref.packing.documents import Documents
from flamia_ref.packing.mask import Mask

_ROWS = 256  # tokens of an output that are tried from each end of a document
_PERIODS = 9  # by which a longer document is longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """An illegal pair: packed tokens of an output and of an input."""

    output: str
    out_token: int
    input: str
    in_token: int
    severity: Severity


class _Document(NamedTuple):
    """Where a document is, in a sample or in the pack: the first token and the one after the last."""

    queries: tuple[int, int]
    keys: tuple[int, int]

    def tokens(self, side: Side) -> tuple[int, int]:
        """Those of a side."""
        return self.queries if side is Side.QUERIES else self.keys

    def anchors(self, side: Side) -> tuple[int, ...]:
        """Tokens from which documents of other lengths are alike: the first, the last, and where those begin or end
        that both sides have."""
        begin, end = self.tokens(side)
        (first, last) = self.keys if side is Side.QUERIES else self.queries
        more = max(0, end - begin - (last - first))
        return begin, end, begin + more, end - more


def first_examples(
    mask: Mask, kinds: Kinds, coupling: Coupling, findings: Findings, illegal: Iterable[Illegal]
) -> Iterator[Example]:
    """An example of each severity of each of `illegal`, the worst first, where one is found."""
    search = _Search(mask, kinds, coupling, findings)
    for one in illegal:
        for severity in one.counts:
            pair = search.pair(one.output, one.input, severity)
            if pair is not None:
                yield Example(
                    output=one.output,
                    out_token=pair[0],
                    input=one.input,
                    in_token=pair[1],
                    severity=severity,
                )


class _StandIn(NamedTuple):
    """A document that stands for others, and what is illegal where it is."""

    document: _Document
    findings: Findings


class _Search:
    def __init__(self, mask: Mask, kinds: Kinds, coupling: Coupling, findings: Findings) -> None:
        self.mask, self.coupling, self.findings = mask, coupling, findings
        self.least = sampling.steady_from(mask, coupling)
        order = np.argsort(kinds.first)
        ordered = (x[order].tolist() for x in (kinds.first, kinds.queries, kinds.keys))
        self.kinds = [
            (first, (queries, keys))
            for first, queries, keys in zip(*ordered, strict=True)
            if queries or keys
        ]
        self._known: dict[tuple[int, int], list[_StandIn]] = {}

    def pair(self, output: str, name: str, severity: Severity) -> tuple[int, int] | None:
        """Packed tokens of an illegal pair."""
        if self.findings.placement.grid is Grid.PACK:
            sets = self.findings.by_severity(output, name)[severity]
            count = self.findings.placement.tokens(side_of(output))
            return next(_candidates(sets, 0, count), None)
        across = severity is Severity.CROSS_DOCUMENT
        for document, kind in self.kinds:
            samples = self._documents(kind)
            if across:
                found = self._of_other_document(output, name, document, samples)
            else:
                found = self._of_document(output, name, severity, document, samples)
            if found is not None:
                return found
        return None

    def _documents(self, kind: tuple[int, int]) -> list[_StandIn]:
        """Documents that stand for those of so many queries and keys; a longer one among them."""
        if kind not in self._known:
            period = self.coupling.period
            stand_ins = [one for one, _ in sampling.stand_ins(*kind, self.least, period)]
            found = [self._of_sample(one) for one in stand_ins]
            if stand_ins != [kind]:
                found.append(self._longer(min(stand_ins), kind))
            self._known[kind] = found
        return self._known[kind]

    @functools.cached_property
    def _places(self) -> dict[tuple[int, int], tuple[tuple[int, int], tuple[int, int]]]:
        """Where the documents of the sample are, by their lengths."""
        mask = self.findings.sample.mask
        lengths = zip(mask.queries.lengths, mask.keys.lengths, strict=True)
        places = (itertools.pairwise(x.offsets) for x in (mask.queries, mask.keys))
        return dict(zip(lengths, zip(*places, strict=True), strict=True))

    def _of_sample(self, kind: tuple[int, int]) -> _StandIn:
        return _StandIn(_Document(*self._places[kind]), self.findings)

    def _longer(self, least: tuple[int, int], kind: tuple[int, int]) -> _StandIn:
        """One some periods longer than the shortest that stands for a kind: what holds there by chance shows."""
        period = self.coupling.period
        both = (min(kind) - min(least)) // period
        apart = (abs(kind[0] - kind[1]) - abs(least[0] - least[1])) // period
        both, apart = min(both, _PERIODS), min(apart, _PERIODS)
        queries, keys = (
            own + period * (both + apart * (own > other)) for own, other in (least, least[::-1])
        )
        mask = Mask(
            Documents((0, queries)),
            Documents((0, keys)),
            self.mask.causal,
            self.mask.window,
            self.mask.alignment,
        )
        placement = Placement(mask=mask, grid=Grid.DOCUMENT)
        dependence = Dependence(coupling=self.coupling, placement=placement)
        findings = Findings(dependence, sampling.of_pack(mask))
        return _StandIn(_Document((0, queries), (0, keys)), findings)

    def _of_document(
        self, output: str, name: str, severity: Severity, document: int, samples: list[_StandIn]
    ) -> tuple[int, int] | None:
        """A pair that is illegal in all documents that stand for one, and so in it, counted from an anchor of each."""
        mine, other = side_of(output), side_of(name)
        known = [
            (one.document, one.findings.by_severity(output, name)[severity]) for one in samples
        ]
        (first, sets), whole = known[0], self._whole(document)
        for row, column in _candidates(sets, *first.tokens(mine)):
            anchors = zip(first.anchors(mine), first.anchors(other), strict=True)
            for anchor, (start, begin) in enumerate(anchors):
                moved = [
                    (one.anchors(mine)[anchor] - start, one.anchors(other)[anchor] - begin)
                    for one, _ in known
                ]
                if all(
                    _holds(runs, row + by, column + across)
                    for (_, runs), (by, across) in zip(known, moved, strict=True)
                ):
                    return (
                        whole.anchors(mine)[anchor] + row - start,
                        whole.anchors(other)[anchor] + column - begin,
                    )
        return None

    def _whole(self, document: int) -> _Document:
        """A document of the pack."""
        queries, keys = (
            (x.offsets[document], x.offsets[document + 1])
            for x in (self.mask.queries, self.mask.keys)
        )
        return _Document(queries, keys)

    def _of_other_document(
        self, output: str, name: str, document: int, samples: list[_StandIn]
    ) -> tuple[int, int] | None:
        """A pair by a scale of all tokens."""
        mine, other = side_of(output), side_of(name)
        begin, end = self._whole(document).tokens(other)
        if (self.mask.queries if other is Side.QUERIES else self.mask.keys).tokens == end - begin:
            return None
        known = [(one.document, _by_all(one.findings, output, name)) for one in samples]
        first = samples[0].document
        for row in range(*first.tokens(mine)):
            for anchor, start in enumerate(first.anchors(mine)):
                at = [(some, one.anchors(mine)[anchor] + row - start) for one, some in known]
                if all(0 <= place < len(some) and some[place] for some, place in at):
                    own = self._whole(document).anchors(mine)[anchor] + row - start
                    return own, 0 if begin else end
        return None


def _by_all(findings: Findings, output: str, name: str) -> Flags:
    """Which tokens of an output take a scale of all tokens of an input."""
    some = np.zeros(findings.placement.tokens(side_of(output)), dtype=np.bool_)
    for run in findings.dependence.of(output).get(name, ()):
        if run.whole:
            some |= run.some
    return some


def _candidates(sets: Sets, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Illegal pairs of the tokens of an output from one to before another, the first and the last ones of them."""
    some = np.zeros(end - begin, dtype=np.bool_)
    for run in sets:
        some |= run.some[begin:end]
    rows = (np.flatnonzero(some) + begin).tolist()
    rows = rows if len(rows) <= 2 * _ROWS else rows[:_ROWS] + rows[-_ROWS:]
    for row in rows:
        for run in sets:
            if run.some[row]:
                yield row, int(run.begin[row])
                yield row, int(run.end[row]) - 1


def _holds(sets: Sets, row: int, column: int) -> bool:
    return any(
        0 <= row < len(run.begin) and run.begin[row] <= column < run.end[row] for run in sets
    )
