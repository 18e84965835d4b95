"""What a hunt found, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.setting import Setting
from flamia_ref.leakage.search.witnesses import FoundWitness

SCHEMA = "flamia-ref leak hunt"
SCHEMA_VERSION = 1

Bools = NDArray[np.bool_]


class HuntVerdict(StrEnum):
    """What a hunt shows."""

    LEAK = "leak"
    """A witness was found of a severity that counts."""
    NONE_FOUND = "none_found"
    """None was, every planted control was found by the same search, and every operand moves what it may. There may be
    witnesses of severities that do not count."""
    INCONCLUSIVE = "inconclusive"
    """None was, but one of those fails: the hunt could not have shown a leak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlResult:
    """One negative control.

    Attributes:
        name: what was planted.
        found: whether the search found it.
        case: the number of the case that did, or None.
        calls: how many calls that took.
    """

    name: str
    found: bool
    case: int | None
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A perturbation at which the kernel failed, and how, in a line."""

    case: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moves:
    """Which tokens of an output moved for which single changed token of an operand.

    Attributes:
        output, operand: their names.
        moved, forbidden: [tokens of the output, changed tokens].
        tried: which tokens were changed alone.
    """

    output: str
    operand: str
    moved: Bools
    forbidden: Bools
    tried: Bools


@dataclass(frozen=True, kw_only=True, eq=False)
class HuntReport:
    """The result of a hunt. `str(report)` is its text.

    Attributes:
        subject: the recipe or the kernel.
        evidence: the recipe's weakest label, or None for a kernel.
        setting: shapes and mask.
        seed: of the cases.
        verdict: what it shows.
        counted: the severities that make a leak of it.
        witnesses: the leaks found, at most one of each operand, severity and kind.
        poison: outputs that move with NaN or infinity where they must not; no leaks of finite inputs.
        reasons: why it is inconclusive.
        notes: what else there is to say.
        controls: the planted leaks.
        operands, outputs: what was changed and what was compared.
        hunted: the severities that could be found, by operand, each with the sizes of blocks that a forbidden token and
            an observed one shared.
        alive: by operand and output, whether a change moved what it may.
        tests: by output, "bits", "exact arithmetic" or "permutation": how it was compared.
        failures: perturbations at which the kernel failed.
        moves: single tokens, for the heat map.
        cases, calls, seconds: how many perturbations, kernel calls and seconds it took.
        first_found: calls and seconds to the first leak, or None.
    """

    subject: str
    setting: Setting
    seed: int
    verdict: HuntVerdict
    counted: tuple[Severity, ...]
    evidence: str | None = None
    witnesses: tuple[FoundWitness, ...] = ()
    poison: tuple[FoundWitness, ...] = ()
    poison_tried: int = 0
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    controls: tuple[ControlResult, ...] = ()
    operands: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    hunted: Mapping[str, Mapping[Severity, tuple[int, ...]]] = field(default_factory=dict)
    alive: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    tests: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    moves: tuple[Moves, ...] = ()
    cases: int = 0
    calls: int = 0
    seconds: float = 0.0
    first_found: tuple[int, float] | None = None

    @property
    def leaks(self) -> bool:
        """Whether a leak was found."""
        return self.verdict is HuntVerdict.LEAK

    @property
    def exit_code(self) -> int:
        """Exit status of a command that reports this: 0 none found, 1 a leak, 2 inconclusive."""
        codes = {HuntVerdict.NONE_FOUND: 0, HuntVerdict.LEAK: 1, HuntVerdict.INCONCLUSIVE: 2}
        return codes[self.verdict]

    def to_text(self) -> str:
        """Return the report for people."""
        from flamia_ref.leakage.search.report_text import render

        return render(self)

    def to_json(self) -> str:
        """Return the report as JSON. Its "seconds" and "first_found" differ from run to run, the rest does not."""
        setting = self.setting
        document = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "subject": self.subject,
            "evidence": self.evidence,
            "verdict": str(self.verdict),
            "leaks": self.leaks,
            "counted": [str(one) for one in self.counted],
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "setting": setting.to_document() | {"softmax_scale": repr(setting.softmax_scale)},
            "seed": self.seed,
            "operands": list(self.operands),
            "outputs": list(self.outputs),
            "hunted": {
                name: {str(kind): list(sizes) for kind, sizes in found.items()}
                for name, found in self.hunted.items()
            },
            "alive": {name: dict(found) for name, found in self.alive.items()},
            "tests": dict(self.tests),
            "witnesses": [one.to_document() for one in self.witnesses],
            "poison": [one.to_document() for one in self.poison],
            "poison_tried": self.poison_tried,
            "controls": [
                {"name": one.name, "found": one.found, "case": one.case, "calls": one.calls}
                for one in self.controls
            ],
            "failures": [{"case": one.case, "reason": one.reason} for one in self.failures],
            "moves": [_moves(one) for one in self.moves],
            "cases": self.cases,
            "calls": self.calls,
            "seconds": round(self.seconds, 3),
            "first_found": None
            if self.first_found is None
            else {"calls": self.first_found[0], "seconds": round(self.first_found[1], 3)},
        }
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    def to_junit(self) -> str:
        """Return the report as JUnit XML: a test a severity and operand, the controls and poison."""
        from flamia_ref.leakage.search.report_junit import render

        return render(self)

    def to_html(self) -> str:
        """Return the report as one HTML page that needs nothing else, with the heat map."""
        from flamia_ref.leakage.search.report_page import render

        return render(self)

    def to_png(self) -> bytes:
        """Return the heat map of what moved as a PNG file."""
        from flamia_ref.leakage.search.report_picture import heat_map

        return heat_map(self).to_png()

    def __str__(self) -> str:
        return self.to_text()


def _moves(one: Moves) -> dict[str, Any]:
    """Pairs of an output's token and a changed token that moved and must not, and counts."""
    wrong = np.argwhere(one.moved & one.forbidden & one.tried)
    return {
        "output": one.output,
        "operand": one.operand,
        "tried": int(one.tried.sum()),
        "moved": int((one.moved & ~one.forbidden & one.tried).sum()),
        "forbidden": int((one.forbidden & one.tried).sum()),
        "forbidden_moved": len(wrong),
        "examples": wrong[:8].tolist(),
    }
