"""The search for a planted leak, with the cases of the hunt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flamia_ref.leakage.search import repeats
from flamia_ref.leakage.search.controls import Control, Planted
from flamia_ref.leakage.search.observing import Observation
from flamia_ref.leakage.search.plan import Case
from flamia_ref.leakage.search.running import Runner
from flamia_ref.leakage.search.setting import Setting

_WAVE = 2  # cases between two looks, where cases run together


Memo = dict[Control, tuple[Runner, dict[Case, Observation]]]
"""By plant: what runs its cases, and what they showed."""

MOST_CASES = 120  # of an operand: a leak as plain as a control shows far sooner, or never


def found_by(
    runner: Runner,
    cases: Sequence[Case],
    control: Control,
    *,
    output: str | None = None,
    limit: int | None = None,
    memo: Memo | None = None,
) -> int | None:
    """The number of the first case that shows the control planted in front of the runner's subject, None if none.

    `output`: the one that must show it; None for any. `limit`: of all calls so far, where the search ends.
    `memo`: what earlier searches saw with the same plant and the same cases.
    """
    plain = replace(control, severity=None)
    planted, known = (memo if memo is not None else {}).setdefault(
        plain,
        (replace(runner, subject=Planted(subject=runner.subject, control=plain), unchanged={}), {}),
    )
    own = [case for case in cases if case.edit.operand == control.operand][:MOST_CASES]
    size = _WAVE if runner.subject.together > 1 else 1
    for start in range(0, len(own), size):
        wave = own[start : start + size]
        if all(case in known for case in wave):
            seen = [known[case] for case in wave]
        elif limit is not None and runner.budget.used >= limit:
            break
        else:
            seen = planted.run(wave)
            known.update((one.case, one) for one in seen)
        for one in seen:
            if shows(one, control, runner.setting, output):
                return one.case.index
        if len(seen) < len(wave):
            break
    return None


def found_in_means(runner: Runner, control: Control, seed: int, output: str | None) -> bool:
    """Whether permutation tests of repeated calls show the control, in one output or in any that is noisy."""
    planted = replace(
        runner, subject=Planted(subject=runner.subject, control=control), unchanged={}
    )
    names = runner.noisy.general if output is None else frozenset((output,))
    planted.noisy = replace(runner.noisy, general=names)
    found = repeats.permutations(planted, seed, (control.operand,))
    return any(control.wanted(one.severity) for one in found.witnesses)


def shows(seen: Observation, control: Control, setting: Setting, output: str | None = None) -> bool:
    """Whether an observation shows what was planted."""
    tokens = seen.case.edit.changed_tokens
    return any(
        control.wanted(severity)
        for name, rows in seen.illegal.items()
        if output is None or name == output
        for severity in setting.severities(name, np.flatnonzero(rows), control.operand, tokens)
    )
