"""Where cases are tried one after another while a finding is made smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.bases import Base
from flamia_ref.leakage.search.budget import Budget
from flamia_ref.leakage.search.noise import QUIET, Noisy
from flamia_ref.leakage.search.observing import Observation, judged, run_bases, run_primed
from flamia_ref.leakage.search.outcomes import Outcome
from flamia_ref.leakage.search.plan import Case
from flamia_ref.leakage.search.setting import Setting
from flamia_ref.leakage.search.subjects import Subject

_CALLS = 120  # that one finding may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What must still be seen while a case is made simpler.

    Attributes:
        severity: of the illegal dependency.
        stage: the stage of the scale byte that changes, or None where an output moves.
    """

    severity: Severity
    stage: str | None = None

    def hit(self, seen: Observation, setting: Setting) -> bool:
        """Whether an observation shows it."""
        edit = seen.case.edit
        if self.stage is not None:
            return any(
                one.stage == self.stage
                and self.severity
                in setting.severities(one.output, [one.token], edit.operand, edit.changed_tokens)
                for one in seen.scales
            )
        return any(
            self.severity
            in setting.severities(name, np.flatnonzero(rows), edit.operand, edit.changed_tokens)
            for name, rows in seen.illegal.items()
        )


def targets(seen: Observation, setting: Setting) -> list[Target]:
    """All that an observation shows."""
    edit = seen.case.edit
    found = []
    for name, rows in seen.illegal.items():
        for severity in setting.severities(
            name, np.flatnonzero(rows), edit.operand, edit.changed_tokens
        ):
            found.append(Target(severity=severity))
    for one in seen.scales:
        for severity in setting.severities(
            one.output, [one.token], edit.operand, edit.changed_tokens
        ):
            found.append(Target(severity=severity, stage=one.stage))
    order = list(Severity)
    unique = dict.fromkeys(found)
    return sorted(unique, key=lambda one: (one.stage is not None, order.index(one.severity)))


@dataclass(kw_only=True)
class Bench:
    """Where cases are tried one after another.

    Attributes:
        subject, setting, noisy, primed: as of a `Task`.
        budget: what all calls are taken from.
        limit: calls that this bench may still make.
    """

    subject: Subject
    setting: Setting
    budget: Budget
    noisy: Noisy = QUIET
    primed: bool = False
    limit: int = _CALLS
    _unchanged: dict[Base, Outcome] = field(default_factory=dict)

    def run(self, cases: Sequence[Case]) -> list[tuple[Outcome, Outcome]]:
        """The outcomes of cases without and with their edits, fewer where the budget ends."""
        found: list[tuple[Outcome, Outcome]] = []
        for case in cases:
            cost = 1 + (case.base not in self._unchanged)
            if self.limit < cost or self.budget.take(cost) < cost:
                break
            self.limit -= cost
            if case.base not in self._unchanged:
                (self._unchanged[case.base],) = run_bases(
                    self.subject, self.setting, [case.base], primed=self.primed
                )
            inputs = case.base.inputs(self.setting)
            pair = (inputs, case.edit.applied(inputs))
            (after,) = run_primed(self.subject, self.setting, [pair], primed=self.primed)
            found.append((self._unchanged[case.base], after))
        return found

    def observe(self, case: Case) -> Observation | None:
        """What a case shows, None where the budget ends."""
        found = self.run([case])
        return self.judge(case, *found[0]) if found else None

    def first(self, cases: Sequence[Case], target: Target) -> Case | None:
        """The first of some cases that shows the target."""
        cases = [case for case in cases if self._real(case)]
        size = self.subject.together
        for start in range(0, len(cases), size):
            if size == 1:
                seen = self.observe(cases[start])
                if seen is None:
                    return None
                if target.hit(seen, self.setting):
                    return cases[start]
                continue
            batch = self._together(cases[start : start + size])
            for seen in batch:
                if target.hit(seen, self.setting):
                    return seen.case
        return None

    def _together(self, cases: Sequence[Case]) -> list[Observation]:
        bases = [
            base for base in dict.fromkeys(c.base for c in cases) if base not in self._unchanged
        ]
        cost = len(bases) + len(cases)
        if self.limit < cost or self.budget.take(cost) < cost:
            return []
        self.limit -= cost
        made = {case.base: case.base.inputs(self.setting) for case in cases}
        inputs = [
            *(made[base] for base in bases),
            *(case.edit.applied(made[case.base]) for case in cases),
        ]
        outcomes = self.subject.run(self.setting, inputs)
        self._unchanged |= dict(zip(bases, outcomes, strict=False))
        return [
            self.judge(case, self._unchanged[case.base], after)
            for case, after in zip(cases, outcomes[len(bases) :], strict=True)
        ]

    def _real(self, case: Case) -> bool:
        """Whether the edit changes anything."""
        inputs, name = case.base.inputs(self.setting), case.edit.operand
        edited = case.edit.applied(inputs)[name]
        return not np.array_equal(inputs[name].view(np.uint16), edited.view(np.uint16))

    def judge(self, case: Case, before: Outcome, after: Outcome) -> Observation:
        """What the outcomes of a case show."""
        return judged(case, before, after, self.setting, uses=self.subject.uses, noisy=self.noisy)
