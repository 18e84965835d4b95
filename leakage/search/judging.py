"""What a hunt may conclude: reasons that make it inconclusive, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.budget import Budget
from flamia_ref.leakage.search.hunt_report import Moves
from flamia_ref.leakage.search.noise import Noisy
from flamia_ref.leakage.search.running import Tally
from flamia_ref.leakage.search.setting import Reach, Setting

COVERED = 3  # kinds of change of a token alone that the plan has for each
_MOST_FAILED = 0.5  # of the perturbations


def nothing_to_find(setting: Setting, found: Mapping[str, Reach]) -> list[str]:
    """Why a hunt with these shapes could find nothing."""
    if not setting.tokens:
        return ["there are no tokens"]
    kinds = {kind for one in found.values() for kind in one.severities}
    apart = {kind for one in found.values() for kind in one.apart}
    if not kinds | apart:
        return [
            "no two different tokens are forbidden to each other: the documents are too short, or see everything"
        ]
    if not kinds:
        return [
            f"no token shares a block of 128 or less with one that it must not reach ({words(apart)} only)"
        ]
    if setting.mask.bounded and not kinds - {Severity.CROSS_DOCUMENT}:
        return [
            "no document has two tokens that share a block, so nothing could be found inside one: give longer documents"
        ]
    return []


def controls_missed(hits: Mapping[str, int | None], done: int, budget: Budget) -> list[str]:
    """The planted leaks that the search did not find, with the cases that the subject itself was given."""
    reasons = []
    for name, hit in hits.items():
        if hit is None and budget.spent:
            reasons.append(f"the budget ended before the planted leak was found ({name})")
        elif hit is None:
            reasons.append(f"the planted leak was not found ({name})")
        elif hit >= done:
            reasons.append(
                f"the budget ended after {done} cases, before case {hit + 1}, which finds the planted leak ({name})"
            )
    return reasons


def doubts(tally: Tally, done: int, *, complete: bool) -> list[str]:
    """Why the cases that were run could not have shown a leak."""
    if not done:
        return ["the budget allowed no case"]
    reasons = []
    if tally.failed > _MOST_FAILED * tally.cases:
        reasons.append(f"the kernel failed at {tally.failed} of {tally.cases} perturbations")
    else:
        reasons += [
            f"the kernel failed at {tally.failed_of[x]} of {tally.cases_of[x]} changes of {x}, so little is seen of {x}"
            for x in tally.operands
            if tally.failed_of.get(x, 0) > _MOST_FAILED * tally.cases_of.get(x, 0)
        ]
    if complete:
        reasons += [
            f"no change of {operand} moved an output that may depend on it, so it shows nothing"
            for operand, alive in tally.alive.items()
            if not any(alive.values())
        ]
        reasons += [
            f"no change moved {output} where it may, so it shows nothing"
            for output in tally.outputs
            if not any(alive[output] for alive in tally.alive.values())
        ]
    return reasons


def notes(tally: Tally, found: Mapping[str, Reach]) -> list[str]:
    """What else there is to say of a search."""
    lines = []
    if tally.unrepeated:
        lines.append(
            f"{tally.unrepeated} findings did not come again when they were run once more, and are left out"
        )
    if tally.touched:
        lines.append(f"the kernel changes its inputs: {', '.join(sorted(tally.touched))}")
    if tally.failed:
        lines.append(f"the kernel failed at {tally.failed} of {tally.cases} perturbations")
    lines += [
        f"{operand}: no two tokens of {words(one.apart)} share a block of 128 or less, so only a scale of more tokens"
        " can show"
        for operand, one in found.items()
        if one.apart
    ]
    return lines


def coverage(tally: Tally) -> str:
    """How many tokens of each operand were changed alone, and in how many ways each of them at least."""
    parts = []
    for operand in tally.operands:
        ways = [len(tally.alone.get((operand, token), ())) for token in range(tally.setting.tokens)]
        many = sum(count >= COVERED for count in ways)
        parts.append(
            f"{operand} {sum(map(bool, ways))} of {len(ways)}, {many} of them in {COVERED} ways or more"
        )
    return f"tokens changed alone: {'; '.join(parts)}"


def words(kinds: Iterable[Severity]) -> str:
    """Severities as people write them, the worst first."""
    chosen = set(kinds)
    return ", ".join(str(kind).replace("_", " ") for kind in Severity if kind in chosen)


def moves(tally: Tally, noisy: Noisy) -> tuple[Moves, ...]:
    """The map of single tokens, of outputs that do not move on their own."""
    setting = tally.setting
    found = []
    for (output, operand), moved in tally.moved.items():
        if output in noisy.general:
            continue
        legal = setting.legal.dense(output, operand)
        found.append(
            Moves(
                output=output,
                operand=operand,
                moved=moved,
                forbidden=~legal,
                tried=np.broadcast_to(tally.tried[operand][None, :], moved.shape),
            )
        )
    return tuple(found)
