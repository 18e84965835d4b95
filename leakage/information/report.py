"""How many bits get through, as one report: bounds, entropies, probes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from flamia_ref.evidence import Evidence
from flamia_ref.leakage.information.bounds import UseBound
from flamia_ref.leakage.information.drawing import EntropyFigure
from flamia_ref.leakage.information.probing import ProbeFigure
from flamia_ref.leakage.information.rows import SeverityBound
from flamia_ref.leakage.legal import Severity

_ROUNDING = 1e-9  # of logarithms

SCHEMA = "flamia-ref leak capacity"
SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the figures of a report are of.

    Attributes:
        lengths: tokens of the documents that were asked for; the bounds are of these and of those that are drawn.
        drawn: tokens of the documents that are drawn, for entropies and the probe.
        head_dim: channels of a head; all figures are of one head.
        length, cut: tokens of the document that is drawn, and where its suffix begins.
        samples, probe_samples: draws of each family, and sequences of the probe at most.
        seed: of all of them.
    """

    lengths: tuple[int, ...]
    drawn: tuple[int, ...]
    head_dim: int
    length: int
    cut: int
    samples: int
    probe_samples: int
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapacityReport:
    """How many bits get through to tokens that must not have them. `str(report)` is its text.

    Three kinds of figures, which answer different questions. A *bound* holds for every finite input, and is 0 only
    where that is proved. An *entropy* is a lower bound: of one prefix and one family of draws. A *gain* is an
    observation: what one small model got out of it.

    Attributes:
        recipe, evidence: the recipe's name and label.
        settings: what the figures are of.
        uses: the bound of each use that the recipe has.
        severities: the bound of each severity: bits of a row of one output.
        entropies: the entropy of outputs over draws of what they must not depend on.
        probes: what rows of a block say of the next token.
    """

    recipe: str
    evidence: Evidence
    settings: Settings
    uses: tuple[UseBound, ...]
    severities: tuple[SeverityBound, ...]
    entropies: tuple[EntropyFigure, ...]
    probes: tuple[ProbeFigure, ...]

    @property
    def proved(self) -> bool:
        """Whether all bounds are 0: nothing gets through, for finite inputs."""
        return all(one.row == 0 for one in self.severities)

    @property
    def leaks(self) -> bool:
        """Whether a leak was seen: bits that moved and must not, or a bound above 0 of a severity other than past."""
        return self.bounded_above_zero or self.observed

    @property
    def observed(self) -> bool:
        """Whether bits moved that must not, not counting the past of a document."""
        return any(
            one.leaks and set(one.severities) != {Severity.PAST} for one in self.entropies
        ) or any(one.differing for one in self.probes)

    @property
    def bounded_above_zero(self) -> bool:
        """Whether something can get through, not counting the past of a document."""
        return any(one.row != 0 and one.severity is not Severity.PAST for one in self.severities)

    @property
    def consistent(self) -> bool:
        """Whether nothing was observed that the bounds exclude: they are of the documents that were drawn, too."""
        # 2^bits outcomes and no more: of a draw, all severities together.
        entropies = all(
            math.log2(one.entropy.distinct) <= self._most(one.output, one.severities) + _ROUNDING
            for one in self.entropies
        )
        legal = self._most("out", (Severity.FORWARD,)) == 0
        return entropies and not (legal and any(one.differing for one in self.probes))

    def _most(self, output: str, severities: Iterable[Severity]) -> float:
        """Bits that rows of an output can have at most, of some severities."""
        rows = [
            row.bits
            for one in self.severities
            if one.severity in severities
            for row in one.rows
            if row.output == output
        ]
        return math.fsum(math.inf if bits is None else bits for bits in rows)

    @property
    def exit_code(self) -> int:
        """Exit status of a command that reports this: 0 no leak seen and all bounds 0, the past left aside; 1 else."""
        return int(self.leaks)

    def of(self, severity: Severity | str) -> tuple[EntropyFigure, ...]:
        """The entropies that show something of a severity."""
        return tuple(one for one in self.entropies if Severity(severity) in one.severities)

    def to_text(self) -> str:
        """Return the report for people."""
        from flamia_ref.leakage.information.text import describe

        return describe(self)

    def to_json(self) -> str:
        """Return the report as JSON."""
        from flamia_ref.leakage.information.document import render

        return render(self)

    def to_png(self) -> bytes:
        """Return a map of what moved and must not, a row of panels a family of draws, as a PNG file."""
        from flamia_ref.leakage.information.picture import heat_map

        return heat_map(self).to_png()

    def __str__(self) -> str:
        return self.to_text()
