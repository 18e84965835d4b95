"""The steps of a hunt: first calls, equal calls, cases, planted leaks, noise, poison, and the report."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flamia_ref.kernels import KernelError
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search import judging, noise, plan, repeats
from flamia_ref.leakage.search.bases import Base
from flamia_ref.leakage.search.budget import Budget
from flamia_ref.leakage.search.control_search import Memo, found_by, found_in_means
from flamia_ref.leakage.search.controls import controls_for
from flamia_ref.leakage.search.hunt_report import ControlResult, HuntReport, HuntVerdict
from flamia_ref.leakage.search.outcomes import Outcome
from flamia_ref.leakage.search.plan import Case
from flamia_ref.leakage.search.running import WAVE, Progress, Runner, Tally, witness_from
from flamia_ref.leakage.search.scale_bytes import unread
from flamia_ref.leakage.search.setting import Reach, Setting, reach
from flamia_ref.leakage.search.subjects import (
    KernelSubject,
    RecipeSubject,
    Subject,
    fitted,
)
from flamia_ref.leakage.search.witnesses import FoundWitness, Kind


@dataclass(kw_only=True)
class Steps:
    """The steps of one hunt, in order, on what `hunt` was given."""

    subject: Subject
    setting: Setting
    counted: tuple[Severity, ...]
    seed: int
    enough: int | None
    budget: Budget
    executor: Executor | None
    progress: Progress | None
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    controls: list[ControlResult] = field(default_factory=list)
    poison: list[FoundWitness] = field(default_factory=list)
    poison_tried: int = 0
    _planned_cases: int = 0

    def report(self) -> HuntReport:
        """Hunt."""
        every = {x: reach(self.setting, x, self.setting.outputs) for x in self.setting.operands}
        self.reasons += judging.nothing_to_find(self.setting, every)
        if self.reasons:
            return self._finished(None, every)
        self.subject = fitted(self.subject, self.setting, self._planned(self.setting.operands))
        runner = Runner(
            subject=self.subject, setting=self.setting, budget=self.budget, executor=self.executor
        )
        first = self._first(runner)
        outputs = tuple(first.outputs)
        self._missing(outputs)
        operands = tuple(
            x
            for x in self.setting.operands
            if x != "dout" or any(name not in ("out", "lse") for name in outputs)
        )
        found = {x: reach(self.setting, x, outputs) for x in operands}
        tally = Tally(setting=self.setting, outputs=outputs, operands=operands)
        self._repeat(runner, tally, first)
        cases = plan.cases(self.setting, operands, seed=self.seed)
        self._planned_cases = len(cases)
        # One round first: it has the strongest case of each operand.
        done = self._search(runner, tally, cases, 0, len(operands))
        if not self._stopped(tally):
            hits = self._controls(runner, cases, found)
            done = self._search(runner, tally, cases, done, len(cases))
            self.reasons += judging.controls_missed(hits, done, self.budget)
            self._noisy(runner, tally, found)
            if not self._stopped(tally):
                self._poisons(runner, operands)
                self._rest(runner, tally, len(cases))
        if done < len(cases) and not self._stopped(tally):
            self.notes.append(
                f"the budget ended after {done} of {len(cases)} cases; the rest of the plan was not run"
            )
        self.notes.append(judging.coverage(tally))
        self.reasons += judging.doubts(tally, done, complete=not self._stopped(tally))
        self.notes += judging.notes(tally, found)
        return self._finished(tally, found, runner)

    def _planned(self, operands: Sequence[str]) -> int:
        """About how many calls there will be."""
        if self.enough is not None:
            return 0
        rounds = min(plan.MOST_ROUNDS, max(4 * self.setting.tokens, plan.FEWEST_ROUNDS))
        return len(operands) * rounds if self.budget.calls is None else self.budget.calls

    # What there is.

    def _first(self, runner: Runner) -> Outcome:
        """The outcome of the first inputs. Raises KernelError where there is none."""
        base = Base(family="bell", seed=self.seed)
        self.budget.take(1)
        (first,) = self.subject.run(self.setting, [base.inputs(self.setting)])
        if first.failure is not None:
            raise KernelError(first.failure)
        bad = [
            name
            for name, x in first.outputs.items()
            if name != "lse" and not np.isfinite(x.astype(np.float64)).all()
        ]
        if bad:
            self.notes.append(f"{', '.join(bad)} has NaN or infinities for finite inputs")
        ignored = unread(first.scales, self.setting)
        if ignored and isinstance(self.subject, KernelSubject):
            self.notes.append(
                f"not compared: {', '.join(ignored)}, of which it is not known which tokens share a byte"
            )
        return first

    def _missing(self, outputs: tuple[str, ...]) -> None:
        missing = [name for name in self.setting.outputs if name not in outputs]
        if missing:
            self.notes.append(f"not given by the kernel, and not hunted: {', '.join(missing)}")

    def _repeat(self, runner: Runner, tally: Tally, first: Outcome) -> None:
        """Equal calls once more, and after a call with other inputs."""
        if isinstance(self.subject, RecipeSubject):
            return
        seen = repeats.look(self.subject, self.setting, self.budget, self.seed, first)
        runner.noisy = seen.noisy
        if seen.first_differs:
            self.notes.append("the first call of all gives other bits than equal calls after it")
        if seen.state is not None:
            runner.primed = True
            self.notes.append(
                "the kernel keeps state between calls; each call of the search follows one with the unchanged inputs"
            )
            tally.keep(seen.state, self.budget)

    # The search.

    def _search(
        self, runner: Runner, tally: Tally, cases: Sequence[Case], start: int, stop: int
    ) -> int:
        """Run cases from `start` to before `stop`, wave by wave; where it ended."""
        done = start
        while done < stop and not self._stopped(tally):
            wave = cases[done : min(done + WAVE, stop)]
            seen = runner.run(wave)
            for one in seen:
                tally.add(one)
                if one.found and not tally.full:
                    self._keep(runner, tally, one)
                if self._stopped(tally):
                    break
            done += len(seen)
            if self.progress is not None:
                total = max(self._planned_cases, tally.cases)
                self.progress(tally.cases, total, f"{len(tally.witnesses)} leaks found")
            if len(seen) < len(wave):
                break
        return done

    def _rest(self, runner: Runner, tally: Tally, done: int) -> None:
        """What is left of a budget, for more cases of the same kinds."""
        if self.budget.calls is None and self.budget.seconds is None:
            return
        noisy = runner.noisy
        further = plan.rounds(self.setting, tally.operands, seed=self.seed)
        count = len(tally.operands)
        for _ in range(done // count):
            next(further)
        size = max(1, WAVE // count)
        while not self._stopped(tally) and not self.budget.spent:
            wave = [case for found in itertools.islice(further, size) for case in found]
            if self._search(runner, tally, wave, 0, len(wave)) < len(wave):
                break
        if runner.noisy != noisy:
            names = ", ".join(sorted(runner.noisy.general))
            self.reasons.append(
                f"equal calls give other bits of {names}, which showed when the tests for that were over"
            )

    def _keep(self, runner: Runner, tally: Tally, seen: Any) -> None:
        for target in tally.new_targets(seen):
            if target not in tally.new_targets(seen):
                continue  # the witness of the one before showed it
            witness = witness_from(seen, target, runner)
            if witness is None:
                tally.unrepeated += 1
                continue
            tally.keep(witness, self.budget)
            if self._stopped(tally):
                return

    def _stopped(self, tally: Tally) -> bool:
        counted = sum(one.severity in self.counted for one in tally.witnesses)
        return self.enough is not None and counted >= self.enough

    def _controls(
        self, runner: Runner, cases: Sequence[Case], found: dict[str, Reach]
    ) -> dict[str, int | None]:
        """Search for each planted leak with the same cases; the number of the case that found it."""
        hits: dict[str, int | None] = {}
        # The kernel itself must keep half of what there is.
        limit = None if self.budget.calls is None else (self.budget.used + self.budget.calls) // 2
        # Of noisy outputs bits say something in exact inputs alone, so those come first.
        exact = (
            plan.cases(self.setting, tuple(found), seed=self.seed, exact=True)
            if runner.noisy
            else []
        )
        memo: Memo = {}
        for operand, one in found.items():
            for control in controls_for(operand, one):
                before = self.budget.used
                hit = found_by(runner, exact, control, limit=limit, memo=memo) if exact else None
                in_exact = hit is not None
                if hit is None:
                    hit = found_by(runner, cases, control, limit=limit, memo=memo)
                means = False
                if hit is None and runner.noisy and not self.budget.spent:
                    means = found_in_means(runner, control, self.seed, None)
                # What the exact inputs or the means found, `_noisy` gives the kernel whole, or it says that it did not.
                hits[control.name] = 0 if in_exact or means else hit
                self.controls.append(
                    ControlResult(
                        name=control.name,
                        found=means or hit is not None,
                        case=hit,
                        calls=self.budget.used - before,
                    )
                )
        return hits

    def _shown_in(
        self, runner: Runner, exact: Sequence[Case], found: dict[str, Reach], output: str
    ) -> bool:
        """Whether a planted leak of some operand is found in a noisy output."""
        controls = [
            control
            for operand, one in found.items()
            if self.setting.legal.dense(output, operand).any()
            for control in controls_for(operand, one)
        ]
        memo: Memo = {}
        return any(
            found_by(runner, exact, control, output=output, memo=memo) is not None
            for control in controls
        ) or any(found_in_means(runner, control, self.seed, output) for control in controls)

    def _noisy(self, runner: Runner, tally: Tally, found: dict[str, Reach]) -> None:
        """Outputs whose bits differ between equal calls: inputs whose sums are exact, then a permutation test."""
        if not runner.noisy or self._stopped(tally):
            return
        names = ", ".join(sorted(runner.noisy.general))
        self.notes.append(f"equal calls give other bits of {names}")
        exact = plan.cases(self.setting, tally.operands, seed=self.seed, exact=True)
        done = self._search(runner, tally, exact, 0, len(exact))
        self.notes.append(f"{names}: {done} perturbations of inputs whose every sum is exact")
        if self._stopped(tally):
            return
        result = repeats.permutations(runner, self.seed, tally.operands)
        for operand, output in result.alive:
            tally.alive[operand][output] = True
        for witness in result.witnesses:
            if not any(
                (one.operand, one.severity) == (witness.operand, witness.severity)
                for one in tally.witnesses
            ):
                tally.keep(witness, self.budget)
        self.notes.append(
            f"{names}: permutation test, {result.tests} tests of {noise.REPEATS} calls a side, smallest p ="
            f" {result.smallest:.2g} after Holm's correction; a leak is below {noise.ALPHA}"
        )
        if done < len(exact) or not result.complete:
            self.reasons.append(f"the budget ended before {names} was tested")
            return
        for output in sorted(runner.noisy.general):
            if not self._shown_in(runner, exact, found, output):
                self.reasons.append(
                    f"no planted leak was found in {output}, whose bits differ between equal calls"
                )

    def _poisons(self, runner: Runner, operands: Sequence[str]) -> None:
        """NaN and infinity, a property of its own."""
        seen = runner.run(plan.poisons(self.setting, operands, seed=self.seed))
        self.poison_tried = sum(one.failure is None for one in seen)
        shown_already: set[tuple[str, Any]] = set()
        for one in seen:
            key = (one.case.edit.operand, one.case.edit.action)
            if not one.illegal or key in shown_already or self.budget.spent:
                continue
            shown_already.add(key)
            wanted = Tally(setting=self.setting, outputs=(), operands=())
            for target in wanted.new_targets(one)[:1]:
                witness = witness_from(one, target, runner, kind=Kind.POISON)
                if witness is not None:
                    self.poison.append(witness)

    # The verdict.

    def _finished(
        self, tally: Tally | None, found: dict[str, Reach], runner: Runner | None = None
    ) -> HuntReport:
        witnesses = () if tally is None else tuple(tally.witnesses)
        leaks = any(one.severity in self.counted for one in witnesses)
        if witnesses and not leaks:
            self.notes.append(
                f"found, but of no severity that counts: {judging.words({one.severity for one in witnesses})}"
            )
        verdict = HuntVerdict.INCONCLUSIVE if self.reasons else HuntVerdict.NONE_FOUND
        noisy = noise.QUIET if runner is None else runner.noisy
        subject = self.subject
        return HuntReport(
            subject=subject.name,
            evidence=str(subject.recipe.label) if isinstance(subject, RecipeSubject) else None,
            setting=self.setting,
            seed=self.seed,
            verdict=HuntVerdict.LEAK if leaks else verdict,
            counted=self.counted,
            witnesses=witnesses,
            poison=tuple(self.poison),
            poison_tried=self.poison_tried,
            reasons=tuple(self.reasons),
            notes=tuple(self.notes),
            controls=tuple(self.controls),
            operands=() if tally is None else tally.operands,
            outputs=() if tally is None else tally.outputs,
            hunted={x: one.severities for x, one in found.items()},
            alive={} if tally is None else tally.alive,
            tests={}
            if tally is None
            else {
                name: "exact arithmetic, then permutation" if name in noisy.general else "bits"
                for name in tally.outputs
            },
            failures=() if tally is None else tuple(tally.failures),
            moves=() if tally is None else judging.moves(tally, noisy),
            cases=0 if tally is None else tally.cases,
            calls=self.budget.used,
            seconds=self.budget.elapsed,
            first_found=None if tally is None else tally.first_found,
        )
