"""The search for a planted leak, with the cases of the hunt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flamia_ref.leakage.search.controls import Control, Planted
from flamia_ref.leakage.search.observing import Observation
from flamia_ref.leakage.search.plan import Case
from flamia_ref.leakage.search.running import Runner
from flamia_ref.leakage.search.setting import Setting

_WAVE = 4  # cases between two looks


def found_by(runner: Runner, cases: Sequence[Case], control: Control) -> int | None:
    """The number of the first case that shows the control planted in front of the runner's subject, None if none."""
    planted = replace(
        runner, subject=Planted(subject=runner.subject, control=control), unchanged={}
    )
    own = [case for case in cases if case.edit.operand == control.operand]
    for start in range(0, len(own), _WAVE):
        wave = own[start : start + _WAVE]
        seen = planted.run(wave)
        for one in seen:
            if shows(one, control, runner.setting):
                return one.case.index
        if len(seen) < len(wave):
            break
    return None


def shows(seen: Observation, control: Control, setting: Setting) -> bool:
    """Whether an observation shows what was planted."""
    tokens = seen.case.edit.changed_tokens
    return any(
        control.wanted(severity)
        for name, rows in seen.illegal.items()
        for severity in setting.severities(name, np.flatnonzero(rows), control.operand, tokens)
    )
