"""The illegal pairs among the dependencies of a recipe: how many, how bad, where one is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from flamia_ref.leakage.legal import FORWARD_OUTPUTS, QUERY_SIDE, LegalPairs, Severity
from flamia_ref.leakage.sharing.dependence import Dependence
from flamia_ref.leakage.sharing.placement import Side
from flamia_ref.leakage.sharing.runs import Places, Runs, Sets, measure
from flamia_ref.leakage.sharing.sampling import Sample
from flamia_ref.leakage.sharing.scales import side_of

RETURNED = ("out", "lse", "dq", "dk", "dv")
"""What a kernel returns."""
OUTPUTS = ("out", "lse", "delta", "dq", "dk", "dv")
"""That, and delta, in the order of the dataflow."""
INPUTS = ("q", "k", "v", "dout")

_FAR = 1 << 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Illegal:
    """The illegal dependencies of one output on one input.

    Attributes:
        output, input: their names, as in `LEGAL`.
        counts: pairs of tokens by severity, only severities that occur.
        later: how many of them, in one document, are of a token of the input that is later than the output's.
        earlier: how many are of one that is not.
    """

    output: str
    input: str
    counts: Mapping[Severity, int]
    later: int
    earlier: int

    @property
    def pairs(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    @property
    def severity(self) -> Severity:
        """The worst."""
        return worst(self.counts)


_BY_SEVERITY = (Severity.FORWARD, Severity.CROSS_DOCUMENT, Severity.BACKWARD, Severity.PAST)


def worst(found: Mapping[Severity, int]) -> Severity:
    """The worst of some severities."""
    return min(found, key=_BY_SEVERITY.index)


class Findings:
    """The illegal pairs of one dependence over the documents of a sample."""

    def __init__(
        self, dependence: Dependence, sample: Sample, legal: LegalPairs | None = None
    ) -> None:
        self.dependence, self.sample = dependence, sample
        self.placement = dependence.placement
        self.legal = LegalPairs(sample.mask) if legal is None else legal

    def all(self, outputs: Iterable[str] = OUTPUTS) -> Iterator[Illegal]:
        """Every output and input with an illegal pair, outputs in the order of the dataflow."""
        for output in outputs:
            sources = self.dependence.of(output)
            for name in INPUTS:
                if sources.get(name):
                    found = self._of(output, name, sources[name])
                    if found is not None:
                        yield found

    def _of(self, output: str, name: str, sets: Sets) -> Illegal | None:
        if self._is_legal(output, name, sets):
            return None
        inside, whole, elsewhere = self._parts(output, name, sets)
        size = self.placement.tokens(side_of(output))
        lengths = np.diff(self.placement.offsets(side_of(name)))
        per_token = {
            "inside": measure(inside, size),
            "later": measure(_from(inside, self._stand(output, name) + 1), size),
            "elsewhere": measure(elsewhere, size),
        }
        if output in FORWARD_OUTPUTS:
            per_token["forward"] = measure(_from(inside, self._hidden_from(output, name)), size)
        sums = {key: self._summed(output, x) for key, x in per_token.items()}
        # A scale of all tokens: those of all other documents, of which a sample has some only.
        outside = self._summed(output, whole.astype(np.int64), of_others=lengths)
        counts = {Severity.CROSS_DOCUMENT: sums["elsewhere"] + outside}
        if output in FORWARD_OUTPUTS:
            counts[Severity.FORWARD] = sums["forward"]
            counts[Severity.PAST] = sums["inside"] - sums["forward"]
        else:
            counts[Severity.BACKWARD] = sums["inside"]
        found = {severity: counts[severity] for severity in _BY_SEVERITY if counts.get(severity)}
        if not found:
            return None
        return Illegal(
            output=output,
            input=name,
            counts=found,
            later=sums["later"],
            earlier=sums["inside"] - sums["later"],
        )

    def by_severity(self, output: str, name: str) -> dict[Severity, Sets]:
        """The illegal runs of each token of an output in its document, and in others the runs there that are known."""
        inside, _, elsewhere = self._parts(output, name, self.dependence.of(output).get(name, ()))
        found = {Severity.CROSS_DOCUMENT: elsewhere}
        if output not in FORWARD_OUTPUTS:
            return found | {Severity.BACKWARD: inside}
        hidden = self._hidden_from(output, name)
        past = tuple(run.within(np.zeros_like(hidden), hidden) for run in inside)
        return found | {Severity.FORWARD: _from(inside, hidden), Severity.PAST: past}

    def _is_legal(self, output: str, name: str, sets: Sets) -> bool:
        spans = self.legal.spans(output, name)
        return all(
            not run.whole
            and bool((~run.some | ((run.begin >= spans.begin) & (run.end <= spans.end))).all())
            for run in sets
        )

    def _parts(self, output: str, name: str, sets: Sets) -> tuple[Sets, np.ndarray, Sets]:
        """The illegal runs in the token's own document, whether it takes a scale of all tokens, and other runs in other
        documents."""
        begin, end = self.placement.own(side_of(output), side_of(name))
        whole = np.zeros(len(begin), dtype=np.bool_)
        inside: list[Runs] = []
        elsewhere: list[Runs] = []
        spans = self.legal.spans(output, name)
        for run in sets:
            if run.whole:
                whole |= run.some
                run = Runs(begin=begin, end=end).where(run.some)
            else:
                elsewhere += (_before(run, begin), *_from((run,), end))
            own = run.within(begin, end)
            inside += (_before(own, spans.begin), *_from((own,), spans.end))
        return _some(inside), whole, _some(elsewhere)

    def _stand(self, output: str, name: str) -> Places:
        """The token of the input, in its document, that stands where each of the output does."""
        mine, other = side_of(output), side_of(name)
        place = np.arange(self.placement.tokens(mine))
        if mine is other:
            return place
        if mine is Side.QUERIES:
            return self.placement.stand
        offsets = [self.placement.offsets(side)[:-1] for side in (other, mine)]
        moved = offsets[0] - offsets[1] - self.placement.shifts
        return np.asarray(place + moved[self.placement.document(mine)])

    def _hidden_from(self, output: str, name: str) -> Places:
        """The first token of an input that an output of the forward must not see since it is later."""
        stand, reach = self._stand(output, name), self.placement.reach[1]
        if reach is None:
            return np.full_like(stand, _FAR)
        return stand + 1 + (0 if name in QUERY_SIDE else reach)

    def _summed(self, output: str, x: Places, *, of_others: Places | None = None) -> int:
        """The sum over the pack of what each token of an output of the sample counts; `of_others`: times the tokens of
        all other documents, the lengths of those of the sample."""
        offsets = self.placement.offsets(side_of(output))
        sums = np.concatenate([[0], np.cumsum(x)])
        counts = (sums[offsets[1:]] - sums[offsets[:-1]]).tolist()
        weights = self.sample.weights
        if of_others is None:
            return sum(weight * count for weight, count in zip(weights, counts, strict=True))
        lengths = of_others.tolist()
        total = sum(weight * length for weight, length in zip(weights, lengths, strict=True))
        return sum(
            weight * count * (total - length)
            for weight, count, length in zip(weights, counts, lengths, strict=True)
        )


def _before(run: Runs, end: Places) -> Runs:
    return Runs(begin=run.begin, end=np.minimum(run.end, end))


def _from(sets: Sets, begin: Places) -> Sets:
    return tuple(Runs(begin=np.maximum(run.begin, begin), end=run.end) for run in sets)


def _some(runs: list[Runs]) -> Sets:
    return tuple(run for run in runs if not run.nowhere)
