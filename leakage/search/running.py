"""The state of a running hunt: unchanged outcomes, the budget, and what has been seen so far."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import line
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.bases import Base
from flamia_ref.leakage.search.bench import Bench, Target, targets
from flamia_ref.leakage.search.budget import Budget
from flamia_ref.leakage.search.hunt_report import Failure
from flamia_ref.leakage.search.noise import QUIET, Noisy, unstable
from flamia_ref.leakage.search.observing import Observation, Task, observe, run_bases
from flamia_ref.leakage.search.outcomes import Outcome, differences
from flamia_ref.leakage.search.plan import Case
from flamia_ref.leakage.search.setting import Setting
from flamia_ref.leakage.search.shrinking import shrunk
from flamia_ref.leakage.search.subjects import RecipeSubject, Subject
from flamia_ref.leakage.search.witnesses import FoundWitness, Kind, witness_of

Progress = Callable[[int, int, str], None]

WAVE = 32  # cases between two decisions, whatever runs them
_CHUNK = 4  # cases that an executor is given together, at least

_KEPT_FAILURES = 8
_KEPT_WITNESSES = 16
_REPEATS = 4  # of a finding in a kernel, each without and with the edit


@dataclass(kw_only=True)
class Runner:
    """Runs cases of one subject, here or by an executor, and keeps what their unchanged inputs gave."""

    subject: Subject
    setting: Setting
    budget: Budget
    executor: Executor | None = None
    noisy: Noisy = QUIET
    primed: bool = False
    unchanged: dict[Base, Outcome] = field(default_factory=dict)

    @property
    def price(self) -> int:
        """Calls that one outcome takes."""
        return 2 if self.primed else 1

    def run(self, cases: Sequence[Case]) -> list[Observation]:
        """Observations of the first of some cases, as many as the budget allows."""
        paid = self._affordable(cases)
        cases = self._bases(paid)
        self.budget.give(self.price * (len(paid) - len(cases)))
        if not cases:
            return []
        if self.executor is None:
            chunks = [tuple(cases)]
            seen = [observe(self._task(chunk)) for chunk in chunks]
        else:
            size = max(_CHUNK, self.subject.together)
            chunks = [tuple(cases[i : i + size]) for i in range(0, len(cases), size)]
            seen = _by_executor(self.executor, [self._task(chunk) for chunk in chunks])
        found: list[Observation] = []
        for chunk, part in zip(chunks, seen, strict=True):
            found += part
            if len(part) < len(chunk):
                break  # what is after a gap would depend on who was quicker
        self.budget.give(self.price * (len(cases) - len(found)))
        return found

    def _affordable(self, cases: Sequence[Case]) -> list[Case]:
        """The first cases that the budget pays for, with the unchanged inputs that they need; they are paid."""
        new: set[Base] = set()
        taken: list[Case] = []
        for case in cases:
            cost = self.price * (1 + (case.base not in self.unchanged and case.base not in new))
            granted = self.budget.take(cost)
            if granted < cost:
                self.budget.give(granted)
                break
            new.add(case.base)
            taken.append(case)
        return taken

    def _bases(self, cases: Sequence[Case]) -> list[Case]:
        """Run the unchanged inputs that are not known yet; the first cases that have theirs."""
        new = list(dict.fromkeys(case.base for case in cases if case.base not in self.unchanged))
        size = max(1, self.subject.together)
        for start in range(0, len(new), size):
            part = new[start : start + size]
            if self.budget.seconds_left == 0:
                break
            outcomes = run_bases(self.subject, self.setting, part, primed=self.primed)
            self.unchanged |= dict(zip(part, outcomes, strict=True))
        self.budget.give(self.price * sum(base not in self.unchanged for base in new))
        return list(itertools.takewhile(lambda case: case.base in self.unchanged, cases))

    def _task(self, cases: tuple[Case, ...]) -> Task:
        return Task(
            subject=self.subject,
            setting=self.setting,
            cases=cases,
            unchanged={case.base: self.unchanged[case.base] for case in cases},
            noisy=self.noisy,
            primed=self.primed,
            seconds=self.budget.seconds_left,
        )

    def bench(self) -> Bench:
        """Where to try simpler cases."""
        return Bench(
            subject=self.subject,
            setting=self.setting,
            budget=self.budget,
            noisy=self.noisy,
            primed=self.primed,
        )


def _by_executor(executor: Executor, tasks: Sequence[Task]) -> list[list[Observation]]:
    """The observations of tasks, in their order. Raises ValueError where the executor cannot run them."""
    try:
        futures: list[Future[list[Observation]]] = [executor.submit(observe, x) for x in tasks]
        return [future.result() for future in futures]
    except (pickle.PicklingError, AttributeError, BrokenExecutor) as error:
        raise ValueError(
            f"the executor cannot run the kernel ({type(error).__name__}: {line(str(error))}); give a function of a"
            " module, or an executor of threads"
        ) from error


@dataclass(kw_only=True)
class Tally:
    """What a hunt has seen."""

    setting: Setting
    outputs: tuple[str, ...]
    operands: tuple[str, ...]
    witnesses: list[FoundWitness] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    failed: int = 0
    cases: int = 0
    failed_of: dict[str, int] = field(default_factory=dict)
    cases_of: dict[str, int] = field(default_factory=dict)
    alone: dict[tuple[str, int], set[tuple[str, str]]] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    unrepeated: int = 0
    first_found: tuple[int, float] | None = None
    alive: dict[str, dict[str, bool]] = field(default_factory=dict)
    moved: dict[tuple[str, str], NDArray[np.bool_]] = field(default_factory=dict)
    tried: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    _seen: set[tuple[str, Severity, bool]] = field(default_factory=set)

    def __post_init__(self) -> None:
        count = self.setting.tokens
        self.alive = {x: dict.fromkeys(self.outputs, False) for x in self.operands}
        self.tried = {x: np.zeros(count, dtype=np.bool_) for x in self.operands}
        if count <= MOST_MAPPED:
            self.moved = {
                (output, x): np.zeros((count, count), dtype=np.bool_)
                for output in self.outputs
                for x in self.operands
            }

    def add(self, seen: Observation) -> None:
        """Count one observation."""
        self.cases += 1
        self.touched |= set(seen.touched)
        edit = seen.case.edit
        self.cases_of[edit.operand] = self.cases_of.get(edit.operand, 0) + 1
        if seen.failure is not None:
            self.failed += 1
            self.failed_of[edit.operand] = self.failed_of.get(edit.operand, 0) + 1
            if len(self.failures) < _KEPT_FAILURES:
                name = f"{edit.operand}, {edit.action}, {seen.case.base.family}"
                self.failures.append(Failure(case=name, reason=seen.failure))
            return
        if not seen.moved:
            return
        for output, alive in seen.alive.items():
            self.alive[edit.operand][output] |= alive
        if len(edit.changed_tokens) != 1:
            return
        (token,) = edit.changed_tokens
        self.tried[edit.operand][token] = True
        kind = (seen.case.base.family, str(edit.action))
        self.alone.setdefault((edit.operand, token), set()).add(kind)
        for output, rows in seen.moved.items():
            if (output, edit.operand) in self.moved:
                self.moved[output, edit.operand][:, token] |= rows

    def new_targets(self, seen: Observation) -> list[Target]:
        """What an observation shows that no witness shows yet."""
        operand = seen.case.edit.operand
        found = []
        for target in targets(seen, self.setting):
            by_scale = target.stage is not None
            keys = {(operand, target.severity, by_scale), (operand, target.severity, False)}
            if not keys & self._seen:
                found.append(target)
        return found

    def keep(self, witness: FoundWitness, budget: Budget) -> None:
        """Keep a witness."""
        if self.first_found is None:
            self.first_found = (budget.used, budget.elapsed)
        self.witnesses.append(witness)
        self._seen.add((witness.operand, witness.severity, witness.kind is Kind.SCALE))

    @property
    def full(self) -> bool:
        """Whether there are as many witnesses as anyone reads."""
        return len(self.witnesses) >= _KEPT_WITNESSES


MOST_MAPPED = 512  # tokens of a heat map


def witness_from(
    seen: Observation, target: Target, runner: Runner, *, kind: Kind | None = None
) -> FoundWitness | None:
    """The smallest witness of a target; None where the finding does not come again with the same calls.

    The outputs that differ between equal calls are then noisy. To run a finding again it may take some calls beyond the
    budget.
    """
    if _repeated(seen.case, target, runner, suspects=seen.illegal) is None:
        return None
    case = shrunk(seen.case, target, runner.bench()) if kind is None else seen.case
    last = _repeated(case, target, runner) or _repeated(seen.case, target, runner)
    if last is None:
        return None
    return witness_of(*last, target, runner.setting, kind=kind)


def _repeated(
    case: Case, target: Target, runner: Runner, *, suspects: Iterable[str] = ()
) -> tuple[Observation, Outcome, Outcome] | None:
    """The outcomes of a case that is run again, without and with its edit by turns, if all calls of a side agree.

    None where the target is not seen in them. Outputs in which calls of a side differ become noisy, and of `suspects`,
    which moved before, those that no longer do.
    """
    pairs: list[tuple[Outcome, Outcome]] = []
    for _ in range(1 if isinstance(runner.subject, RecipeSubject) else _REPEATS):
        bench = runner.bench()
        bench.budget = Budget()
        pairs += bench.run([case])
        runner.budget.used += runner.price * bench.budget.used
    if any(one.failure is not None for pair in pairs for one in pair):
        return None
    noisy = unstable(
        [differences(pairs[0][side], pair[side]) for pair in pairs[1:] for side in (0, 1)]
    )
    seen = runner.bench().judge(case, *pairs[0])
    noisy |= {name for name in suspects if name not in seen.illegal}
    runner.noisy = runner.noisy.more(noisy, case.base.family)
    illegal = {name: rows for name, rows in seen.illegal.items() if name not in noisy}
    steady = replace(seen, illegal=illegal)
    return (steady, *pairs[0]) if target.hit(steady, runner.setting) else None
