"""Equal calls again: whether their bits differ, whether a kernel keeps state, and tests of those whose bits differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.kernels import KernelError
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search import noise, plan
from flamia_ref.leakage.search.bases import Base, Draws
from flamia_ref.leakage.search.budget import Budget
from flamia_ref.leakage.search.edits import Action, Edit
from flamia_ref.leakage.search.noise import QUIET, Noisy, unstable
from flamia_ref.leakage.search.outcomes import Outcome, differences, number
from flamia_ref.leakage.search.plan import Case
from flamia_ref.leakage.search.running import Runner
from flamia_ref.leakage.search.setting import Setting
from flamia_ref.leakage.search.subjects import Subject
from flamia_ref.leakage.search.witnesses import FoundWitness, Kind

_AGAIN = 4  # equal calls in a row
_CASES = 3  # of each operand, in permutation tests
_TURNED = 4  # more of an operand, of cut blocks
_MOST_TESTS = 60  # in which the smallest p of 1 / 6435 is still below 0.01 after Holm's correction


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """What equal calls showed.

    Attributes:
        noisy: outputs whose bits differ between them.
        first_differs: whether the first of all calls gave other bits than those after it, which agree.
        state: the witness of state that is kept between calls, or None.
    """

    noisy: Noisy
    first_differs: bool = False
    state: FoundWitness | None = None


def look(subject: Subject, setting: Setting, budget: Budget, seed: int, first: Outcome) -> Repeated:
    """Run the first inputs again, inputs with wide exponents too, and the first ones after others."""
    family = "bell"
    inputs = Base(family=family, seed=seed).inputs(setting)
    again = _equal(subject, setting, inputs, budget)
    if not again:
        return Repeated(noisy=QUIET)
    noisy = unstable([differences(again[0], one) for one in again[1:]])
    # Wide exponents show an order of addition better; a kernel may fail on them.
    spread = Base(family="element_wide", seed=seed).inputs(setting)
    wide = [x for x in _equal(subject, setting, spread, budget, strict=False) if not x.failure]
    noisy |= unstable([differences(wide[0], one) for one in wide[1:]])
    if noisy:
        return Repeated(noisy=QUIET.more(noisy, family))
    after_wide = _equal(subject, setting, inputs, budget)
    first_differs = any(x.any() for x in differences(first, again[0]).values())
    edits = [
        # Large values everywhere, so that what is left of them shows wherever it is used.
        Edit(
            operand=name,
            tokens=tuple(range(setting.tokens)),
            action=Action.RESAMPLE,
            amount=12,
            seed=seed,
        )
        for name in setting.operands
    ]
    for edit in edits:
        witness = _state(subject, setting, budget, seed, inputs, edit, after_wide)
        if witness is not None:
            return Repeated(noisy=QUIET, first_differs=first_differs, state=witness)
    return Repeated(noisy=QUIET, first_differs=first_differs)


def _state(
    subject: Subject,
    setting: Setting,
    budget: Budget,
    seed: int,
    inputs: dict[str, NDArray[Any]],
    edit: Edit,
    settled: list[Outcome],
) -> FoundWitness | None:
    """The witness that a call leaves something for the next: the same inputs after others, and after themselves."""
    if budget.take(2) < 2 or not settled:
        return None
    subject.run(setting, [edit.applied(inputs)])
    after = _alive(subject, setting, inputs)
    if not any(x.any() for x in differences(settled[-1], after).values()):
        return None
    # Once more, both ways: a kernel may differ by chance.
    budget.used += 4
    before = [_alive(subject, setting, inputs) for _ in range(2)][1]
    subject.run(setting, [edit.applied(inputs)])
    later = _alive(subject, setting, inputs)
    for name, elements in differences(before, later).items():
        steady = elements & ~differences(after, later)[name]
        for place in np.argwhere(steady):
            token, head, channel = (int(i) for i in place)
            return FoundWitness(
                kind=Kind.STATE,
                severity=Severity.CROSS_DOCUMENT,
                setting=setting,
                base=Base(family="bell", seed=seed),
                edit=edit,
                output=name,
                place=(token, head, channel),
                before=number(before.outputs[name][token, head, channel]),
                after=number(later.outputs[name][token, head, channel]),
            )
    return None


def _equal(
    subject: Subject,
    setting: Setting,
    inputs: dict[str, NDArray[Any]],
    budget: Budget,
    *,
    strict: bool = True,
) -> list[Outcome]:
    """The outcomes of equal calls, the first left out: what was called before may have left something for it.

    Raises KernelError where one fails, if `strict`.
    """
    found = []
    for _ in range(_AGAIN):
        if budget.take(1) < 1:
            break
        one = _alive(subject, setting, inputs) if strict else subject.run(setting, [inputs])[0]
        found.append(one)
    return found[1:]


def _alive(subject: Subject, setting: Setting, inputs: dict[str, NDArray[Any]]) -> Outcome:
    (found,) = subject.run(setting, [inputs])
    if found.failure is not None:
        raise KernelError(f"{found.failure}; with equal inputs it had not failed before")
    return found


@dataclass(frozen=True, kw_only=True)
class Permuted:
    """The permutation tests of a hunt.

    Attributes:
        witnesses: the leaks found.
        alive: pairs of operand and output that legal changes moved.
        tests: how many tests of forbidden outputs there were.
        smallest: their smallest p value, corrected.
        complete: whether the budget paid for all.
    """

    witnesses: tuple[FoundWitness, ...]
    alive: frozenset[tuple[str, str]]
    tests: int
    smallest: float
    complete: bool


def permutations(runner: Runner, seed: int, operands: tuple[str, ...]) -> Permuted:
    """Repeat cases without and with their change, mixed, and test every noisy output: forbidden tokens, then legal."""
    setting = runner.setting
    found: list[tuple[float, Case, str, list[Outcome], list[Outcome]]] = []
    alive: set[tuple[str, str]] = set()
    complete = True
    for case in _strongest(setting, operands, seed, len(runner.noisy.general)):
        sides = _sides(runner, case)
        if sides is None:
            complete = False
            break
        tokens = np.array(case.edit.changed_tokens)
        for output in sorted(runner.noisy.general):
            forbidden = setting.forbidden(output, case.edit.operand, tokens)
            if forbidden.any():
                p = _p(sides, output, forbidden)
                found.append((p, case, output, *sides))
            if not forbidden.all() and _p(sides, output, ~forbidden) <= noise.ALPHA:
                alive.add((case.edit.operand, output))
    corrected = noise.holm([p for p, *_ in found])
    witnesses: dict[tuple[str, Severity], FoundWitness] = {}
    for p, (_, case, output, before, after) in zip(corrected, found, strict=True):
        if p < noise.ALPHA:
            witness = _witness(setting, case, output, before, after, p)
            witnesses.setdefault((witness.operand, witness.severity), witness)
    return Permuted(
        witnesses=tuple(witnesses.values()),
        alive=frozenset(alive),
        tests=len(found),
        smallest=min(corrected, default=1.0),
        complete=complete,
    )


def _strongest(setting: Setting, operands: tuple[str, ...], seed: int, noisy: int) -> list[Case]:
    """The strongest cases of each operand, whose inputs are not those that make every sum exact.

    Then, where the correction for the number of tests leaves room, tokens of cut blocks alone.
    """
    cases = plan.cases(setting, operands, seed=seed)
    tail = set(plan.tail_tokens(setting))
    room = _MOST_TESTS // max(1, noisy * len(operands)) - _CASES
    chosen = []
    for name in operands:
        own = [case for case in cases if case.edit.operand == name]
        # Rows that turn round show scales of P; products show those of what is added up.
        kind = ("far_32", Action.NEGATE) if name in ("q", "dout") else ("bell", Action.TIMES)
        turned = [
            case
            for case in own[_CASES:]
            if (case.base.family, case.edit.action) == kind
            and len(case.edit.tokens) == 1
            and case.edit.tokens[0] in tail
        ]
        chosen += own[:_CASES] + turned[: max(0, min(_TURNED, room))]
    return chosen


def _sides(runner: Runner, case: Case) -> tuple[list[Outcome], list[Outcome]] | None:
    """The outcomes of a case without and with its change, called in a mixed order; None where the budget ends."""
    count = 2 * noise.REPEATS
    granted = runner.budget.take(count)
    if granted < count:
        runner.budget.give(granted)
        return None
    inputs = case.base.inputs(runner.setting)
    edited = case.edit.applied(inputs)
    order = noise.schedule(noise.REPEATS, Draws(case.edit.seed, case.index).raw((count,)))
    sides: tuple[list[Outcome], list[Outcome]] = ([], [])
    for changed in order:
        (one,) = runner.subject.run(runner.setting, [edited if changed else inputs])
        if one.failure is not None:
            return None
        sides[changed].append(one)
    return sides


def _p(sides: tuple[list[Outcome], list[Outcome]], output: str, rows: NDArray[np.bool_]) -> float:
    one, other = (
        np.stack([x.outputs[output][rows].astype(np.float64).ravel() for x in side])
        for side in sides
    )
    return noise.p_value(one, other)


def _witness(
    setting: Setting,
    case: Case,
    output: str,
    before: list[Outcome],
    after: list[Outcome],
    p: float,
) -> FoundWitness:
    """The witness of a test: the element whose means are furthest apart, for what calls of one side differ."""
    tokens = np.array(case.edit.changed_tokens)
    rows = setting.forbidden(output, case.edit.operand, tokens)
    one, other = (
        np.stack([x.outputs[output].astype(np.float64) for x in side]) for side in (before, after)
    )
    with np.errstate(all="ignore"):
        spread = one.std(axis=0) + other.std(axis=0)
        apart = np.abs(one.mean(axis=0) - other.mean(axis=0))
        score = np.where(apart == 0, 0, apart / spread)
    score = np.where(rows[:, None, None], np.nan_to_num(score, nan=0, posinf=np.inf), -1)
    token, head, channel = (int(i) for i in np.unravel_index(int(score.argmax()), score.shape))
    place = (token, head, channel)
    found = setting.severities(output, [token], case.edit.operand, tokens)
    severity = next(kind for kind in Severity if kind in found)
    return FoundWitness(
        kind=Kind.PAYLOAD,
        severity=severity,
        setting=setting,
        base=case.base,
        edit=case.edit,
        output=output,
        place=place,
        before=number(before[0].outputs[output][place]),
        after=number(after[0].outputs[output][place]),
        test="permutation",
        p_value=p,
    )
