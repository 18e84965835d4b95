"""Running cases: what moved, and which of it must not have."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.search.bases import Base, Inputs
from flamia_ref.leakage.search.noise import QUIET, Noisy
from flamia_ref.leakage.search.outcomes import Outcome, differences, rows_of
from flamia_ref.leakage.search.plan import Case
from flamia_ref.leakage.search.scale_bytes import ScaleChange, changes
from flamia_ref.leakage.search.setting import Bools, Setting
from flamia_ref.leakage.search.subjects import Subject


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Observation:
    """What one case showed.

    Attributes:
        case: the case.
        moved: which tokens of each output moved.
        illegal: which of them may depend on nothing that was changed; outputs without one are left out.
        scales: scale bytes that changed under an output that must not see it.
        failure: what the kernel raised, or None.
        outcome: the results, where they are kept.
    """

    case: Case
    moved: Mapping[str, Bools] = field(default_factory=dict)
    illegal: Mapping[str, Bools] = field(default_factory=dict)
    scales: tuple[ScaleChange, ...] = ()
    failure: str | None = None
    touched: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether it shows a leak."""
        return bool(self.illegal or self.scales)

    @property
    def alive(self) -> dict[str, bool]:
        """Of each output, whether a token moved that may."""
        return {
            name: bool((rows & ~self.illegal[name]).any() if name in self.illegal else rows.any())
            for name, rows in self.moved.items()
        }


@dataclass(frozen=True, kw_only=True)
class Task:
    """Cases to run with what their unchanged inputs gave. It can be sent to another process.

    Attributes:
        subject, setting: what runs, and on what.
        cases: in order.
        unchanged: the outcome of each base.
        noisy: outputs whose bits differ between equal calls.
        primed: whether each call follows one with the unchanged inputs, as a kernel that keeps state needs it.
        seconds: how long it may take, checked between calls; None for no limit.
    """

    subject: Subject
    setting: Setting
    cases: tuple[Case, ...]
    unchanged: Mapping[Base, Outcome]
    noisy: Noisy = QUIET
    primed: bool = False
    seconds: float | None = None


def run_bases(
    subject: Subject, setting: Setting, bases: Sequence[Base], *, primed: bool = False
) -> list[Outcome]:
    """The outcomes of unchanged inputs."""
    made = [base.inputs(setting) for base in bases]
    return run_primed(subject, setting, list(zip(made, made, strict=True)), primed=primed)


def run_primed(
    subject: Subject, setting: Setting, pairs: Sequence[tuple[Inputs, Inputs]], *, primed: bool
) -> list[Outcome]:
    """The outcomes of the second inputs of each pair, each after a call with the first if `primed`."""
    if not primed:
        return subject.run(setting, [after for _, after in pairs])
    found = []
    for before, after in pairs:
        found.append(subject.run(setting, [before, after])[1])
    return found


def observe(task: Task) -> list[Observation]:
    """The observations of a task's cases in order, fewer where the time is up."""
    end = None if task.seconds is None else time.monotonic() + task.seconds
    size = max(1, task.subject.together)
    found: list[Observation] = []
    for start in range(0, len(task.cases), size):
        if end is not None and time.monotonic() > end:
            break
        found += _batch(task, task.cases[start : start + size])
    return found


def _batch(task: Task, cases: Sequence[Case]) -> list[Observation]:
    setting = task.setting
    inputs = {case.base: case.base.inputs(setting) for case in cases}
    edited = [case.edit.applied(inputs[case.base]) for case in cases]
    real = [
        index
        for index, case in enumerate(cases)
        if task.unchanged[case.base].failure is None
        and _differs(inputs[case.base], edited[index], case.edit.operand)
    ]
    pairs = [(inputs[cases[index].base], edited[index]) for index in real]
    outcomes = dict(
        zip(real, run_primed(task.subject, setting, pairs, primed=task.primed), strict=True)
    )
    return [
        judged(
            case,
            task.unchanged[case.base],
            outcomes[index],
            setting,
            uses=task.subject.uses,
            noisy=task.noisy,
        )
        if index in outcomes
        else Observation(case=case, failure=task.unchanged[case.base].failure)
        for index, case in enumerate(cases)
    ]


def _differs(before: Inputs, after: Inputs, operand: str) -> bool:
    return not np.array_equal(before[operand].view(np.uint16), after[operand].view(np.uint16))


def judged(
    case: Case,
    before: Outcome,
    after: Outcome,
    setting: Setting,
    *,
    uses: Any = None,
    noisy: Noisy = QUIET,
) -> Observation:
    """What a change of inputs showed, from the results without and with it."""
    failure = before.failure or after.failure or _changed_types(before, after)
    if failure is not None:
        return Observation(case=case, failure=failure, touched=after.touched)
    operand, tokens = case.edit.operand, _tokens(case)
    left_out = noisy.of(case.base.family)
    moved = {
        name: rows_of(elements)
        for name, elements in differences(before, after).items()
        if name not in left_out
    }
    illegal = {}
    for name, rows in moved.items():
        wrong = rows & setting.forbidden(name, operand, tokens)
        if wrong.any():
            illegal[name] = wrong
    scales = changes(
        before.scales, after.scales, setting, operand=operand, tokens=tokens, uses=uses
    )
    return Observation(
        case=case, moved=moved, illegal=illegal, scales=tuple(scales), touched=after.touched
    )


def _changed_types(before: Outcome, after: Outcome) -> str | None:
    for name, x in before.outputs.items():
        y = after.outputs.get(name)
        if y is None or x.dtype != y.dtype:
            now = "nothing" if y is None else str(y.dtype)
            return f"{name} was {x.dtype} and is {now} in a later call"
    return None


def _tokens(case: Case) -> NDArray[np.int64]:
    return np.array(case.edit.changed_tokens, dtype=np.int64)
