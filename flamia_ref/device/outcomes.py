"""What probes found, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA, SCHEMA_VERSION = "flamia-ref device probe", 1


class Status(StrEnum):
    """How a probe ended."""

    CONFIRMED = "confirmed"
    """Every result of the device was the model's."""
    REFUTED = "refuted"
    """Some result was not; the smallest counterexample found is given."""
    COMPILED = "compiled"
    """Its program compiled, which is all that was asked for."""
    NOT_RUN = "not run"
    """It could not be run here; the reason says why."""
    FAILED = "failed"
    """Its program did not compile or stopped with an error."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one probe found.

    Attributes:
        probe: its name.
        status: how it ended.
        model: what it was compared with.
        evidence: the weakest label of that model before this run.
        results: results of the device that were compared.
        mismatches: how many of those differ from the model.
        families: of a matrix instruction, results and mismatches by family of operands.
        counterexample: the smallest one found.
        reason: why it was not run, or failed; what to know about its result.
    """

    probe: str
    status: Status
    model: str = ""
    evidence: str = ""
    results: int = 0
    mismatches: int = 0
    families: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    counterexample: Mapping[str, Any] | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """All outcomes of a run, and where they were obtained.

    Attributes:
        device: the GPU's name, or "" where none was needed.
        architecture: what was probed: "sm_90a".
        outcomes: one a probe.
        date: the day, UTC, as 2026-11-30.
        nvcc: the compiler's CUDA release.
        driver_cuda: the CUDA release of the driver.
        capability: the GPU's compute capability.
        settings: the options that decide what was run.
        others: of every other architecture, why its probes were not run.
        version: the version of this package.
    """

    device: str
    architecture: str
    outcomes: tuple[Outcome, ...]
    date: str
    nvcc: str
    driver_cuda: str = ""
    capability: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    version: str = ""

    @property
    def exit_code(self) -> int:
        """1 if a model was refuted; else 2 if a probe failed or none ran; else 0."""
        found = {outcome.status for outcome in self.outcomes}
        if Status.REFUTED in found:
            return 1
        if Status.FAILED in found or not found & {Status.CONFIRMED, Status.COMPILED}:
            return 2
        return 0

    def to_json(self) -> str:
        """The report as indented JSON that ends with a newline."""
        document = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "exit_code": self.exit_code,
            "totals": self._totals(),
            **dataclasses.asdict(self),
        }
        return json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    def _totals(self) -> dict[str, int]:
        counts = Counter(str(outcome.status) for outcome in self.outcomes)
        results = sum(outcome.results for outcome in self.outcomes)
        mismatches = sum(outcome.mismatches for outcome in self.outcomes)
        return {**counts, "results": results, "mismatches": mismatches}

    def to_text(self) -> str:
        """The report as lines of text, one a probe, counterexamples below theirs."""
        where = (
            f"{self.device} (compute capability {self.capability})" if self.device else "no device"
        )
        lines = [f"{self.architecture} on {where}, nvcc {self.nvcc}, {self.date}"]
        width = max((len(outcome.probe) for outcome in self.outcomes), default=0)
        for outcome in self.outcomes:
            lines += _lines(outcome, width)
        lines += [f"{name}: not run: {reason}" for name, reason in self.others.items()]
        totals = self._totals()
        results, mismatches = totals.pop("results"), totals.pop("mismatches")
        said = ", ".join(f"{count} {status}" for status, count in totals.items())
        lines.append(f"{said}; {results} results compared, {mismatches} mismatches")
        return "\n".join(lines)


def _lines(outcome: Outcome, width: int) -> list[str]:
    first = f"{outcome.probe:<{width}}  {outcome.status}"
    if outcome.results:
        first += f"  {outcome.results} results"
    if outcome.mismatches:
        first += f", {outcome.mismatches} mismatches"
    if outcome.model and outcome.status is not Status.COMPILED:
        first += (
            f"  {outcome.model} ({outcome.evidence})" if outcome.evidence else f"  {outcome.model}"
        )
    if outcome.reason and outcome.status is Status.COMPILED:
        first += f", {outcome.reason}"
    lines = [first]
    if outcome.reason and outcome.status is not Status.COMPILED:
        lines.append(f"    {outcome.reason}")
    if outcome.counterexample is not None:
        lines += [f"    {key}: {_words(value)}" for key, value in outcome.counterexample.items()]
    return lines


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(f"({_words(one)})" if isinstance(one, list) else str(one) for one in value)
    return str(value)
