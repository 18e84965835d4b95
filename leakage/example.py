"""One illegal pair of a pack, of each kind, found without going through its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flamia_ref.leakage import sampling
from flamia_ref.leakage.coupling import Coupling
from flamia_ref.leakage.illegal import Findings, Illegal
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.placement import Grid, Side
from flamia_ref.leakage.runs import Sets
from flamia_ref.leakage.sampling import Kinds
from flamia_ref.leakage.shared_scales import side_of
from flamia_ref.packing.mask import Mask

_ROWS = 256  # tokens of an output that are tried from each end of a document


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """An illegal pair: packed tokens of an output and of an input."""

    output: str
    out_token: int
    input: str
    in_token: int
    severity: Severity


class _Document(NamedTuple):
    """A document of a sample: where its tokens are, by side."""

    begin: dict[Side, int]
    end: dict[Side, int]


def first_examples(
    mask: Mask, kinds: Kinds, coupling: Coupling, findings: Findings, illegal: Iterable[Illegal]
) -> Iterator[Example]:
    """An example of each severity of each of `illegal`, the worst first, where one is found."""
    search = _Search(mask, kinds, coupling, findings)
    for one in illegal:
        runs = findings.by_severity(one.output, one.input)
        for severity in one.counts:
            pair = search.pair(one.output, one.input, severity, runs.get(severity, ()))
            if pair is not None:
                yield Example(
                    output=one.output,
                    out_token=pair[0],
                    input=one.input,
                    in_token=pair[1],
                    severity=severity,
                )


class _Search:
    def __init__(self, mask: Mask, kinds: Kinds, coupling: Coupling, findings: Findings) -> None:
        self.mask, self.findings = mask, findings
        self.period = coupling.period
        self.least = sampling.steady_from(mask, coupling)
        sample = findings.sample.mask
        lengths = zip(sample.queries.lengths, sample.keys.lengths, strict=True)
        self.at = {kind: index for index, kind in enumerate(lengths)}
        self.offsets = {
            side: findings.placement.offsets(side).tolist() for side in (Side.QUERIES, Side.KEYS)
        }
        order = np.argsort(kinds.first)
        ordered = (x[order].tolist() for x in (kinds.first, kinds.queries, kinds.keys))
        self.kinds = [
            (first, (queries, keys))
            for first, queries, keys in zip(*ordered, strict=True)
            if queries or keys
        ]

    def pair(
        self, output: str, name: str, severity: Severity, sets: Sets
    ) -> tuple[int, int] | None:
        """Packed tokens of an illegal pair."""
        if self.findings.placement.grid is Grid.PACK:
            return next(
                self._candidates(sets, 0, self.findings.placement.tokens(side_of(output))), None
            )
        for document, kind in self.kinds:
            least = min(kind)
            spared = [n for n, _ in sampling.nodes((least - self.least) // self.period)]
            samples = [
                self._document(self.at[kind[0] - n * self.period, kind[1] - n * self.period])
                for n in spared
            ]
            if severity is Severity.CROSS_DOCUMENT:
                found = self._of_other_document(output, name, document, samples)
            else:
                found = self._of_document(output, name, sets, samples, document)
            if found is not None:
                return found
        return None

    def _document(self, index: int) -> _Document:
        return _Document(
            {side: offsets[index] for side, offsets in self.offsets.items()},
            {side: offsets[index + 1] for side, offsets in self.offsets.items()},
        )

    def _of_document(
        self, output: str, name: str, sets: Sets, samples: list[_Document], document: int
    ) -> tuple[int, int] | None:
        """A pair that is illegal in all documents that stand for one, and so in it: counted from the start or from the
        end of each."""
        mine, other = side_of(output), side_of(name)
        first = samples[0]
        ends = {
            side: (documents.offsets[document], documents.offsets[document + 1])
            for side, documents in ((Side.QUERIES, self.mask.queries), (Side.KEYS, self.mask.keys))
        }
        for row, column in self._candidates(sets, first.begin[mine], first.end[mine]):
            for part, place in (("begin", 0), ("end", 1)):
                mine_at, other_at = (
                    token - getattr(first, part)[side]
                    for token, side in ((row, mine), (column, other))
                )
                if all(
                    _holds(
                        sets,
                        getattr(one, part)[mine] + mine_at,
                        getattr(one, part)[other] + other_at,
                    )
                    for one in samples[1:]
                ):
                    return ends[mine][place] + mine_at, ends[other][place] + other_at
        return None

    def _candidates(self, sets: Sets, begin: int, end: int) -> Iterator[tuple[int, int]]:
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

    def _of_other_document(
        self, output: str, name: str, document: int, samples: list[_Document]
    ) -> tuple[int, int] | None:
        """A pair by a scale of all tokens."""
        mine, other = side_of(output), side_of(name)
        runs = self.findings.dependence.of(output).get(name, ())
        mine_of, others = (
            self.mask.queries if side is Side.QUERIES else self.mask.keys for side in (mine, other)
        )
        begin, end = others.offsets[document], others.offsets[document + 1]
        if others.tokens == end - begin:
            return None
        column = 0 if begin else end
        whole = np.zeros(self.findings.placement.tokens(mine), dtype=np.bool_)
        for run in runs:
            if run.whole:
                whole |= run.some
        first, place = samples[0], mine_of.offsets[document : document + 2]
        for row in (np.flatnonzero(whole[first.begin[mine] : first.end[mine]])).tolist():
            for part, at in (("begin", row), ("end", row + first.begin[mine] - first.end[mine])):
                if all(whole[getattr(one, part)[mine] + at] for one in samples):
                    return place[part == "end"] + at, column
        return None


def _holds(sets: Sets, row: int, column: int) -> bool:
    return any(
        0 <= row < len(run.begin) and run.begin[row] <= column < run.end[row] for run in sets
    )
