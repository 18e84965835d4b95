"""The hunt: a search for inputs whose change moves an output that may not depend on it.

The verdict is "leak" where a witness of a severity that counts was found and came again when it was run once more. It
is "none_found" only where the same search finds a leak of the same kind that is planted in front of the kernel, for
each operand, with no more cases than the kernel itself was given, and where each operand moves what it may. All else
is "inconclusive", with the reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from flamia_ref._errors import shown
from flamia_ref.attention import RECIPES, Recipe
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.budget import Budget
from flamia_ref.leakage.search.hunt_report import HuntReport
from flamia_ref.leakage.search.running import Progress
from flamia_ref.leakage.search.setting import Setting, wanted_severities, whole
from flamia_ref.leakage.search.steps import Steps
from flamia_ref.leakage.search.subjects import (
    subject_of,
)

_FAILING = (Severity.FORWARD, Severity.CROSS_DOCUMENT, Severity.BACKWARD)
"""The severities that make a leak unless the caller names others: a dependency on the past does not."""


def hunt(
    recipe_or_kernel: Any,
    *,
    lengths: Sequence[int],
    head_dim: int,
    heads: int = 1,
    kv_heads: int = 1,
    causal: bool = True,
    seed: int = 0,
    calls: int | None = None,
    seconds: float | None = None,
    backward: bool = True,
    window: Any = None,
    alignment: str = "bottom_right",
    softmax_scale: float | None = None,
    severities: Iterable[Severity | str] | None = None,
    enough: int | None = None,
    trace: Sequence[str] = (),
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> HuntReport:
    """Search for leaks in a recipe or in a kernel: change one operand, compare bits.

    Each case changes some tokens of one operand. Every token of an output with no legal source among them must keep its
    bits; a NaN is as good as another, -0 is not +0. Where stages of scales are returned, so must the bytes that such
    tokens take. What is found is run once more and made smaller.

    Args:
        recipe_or_kernel: a `Recipe`, a name in `RECIPES`, or a kernel as `flamia_ref.kernels` says.
        lengths: tokens of each document, packed one after another.
        head_dim, heads, kv_heads: the shape of q, k, v, in bfloat16.
        causal, window, alignment, softmax_scale: as of `forward`; the kernel is told, and must obey.
        seed: of the cases and inputs. With equal arguments and no limit of seconds, equal results.
        calls: how many calls of the kernel it may take, and takes, all in all; a finding that is run once more may take
            a few above. None: as many as the plan has, unless `seconds` says more.
        seconds: how long it may take, and takes, looked at between calls.
        backward: whether dout is given too and dq, dk, dv are compared; of a recipe that has a backward.
        severities: those that make a leak; None for all but "past". All that are found are reported.
        enough: stop after this many witnesses of severities that make a leak; None for never.
        trace: names of stages that the kernel is asked for, such as "v.scales".
        executor: any `concurrent.futures.Executor`; the subject must be picklable for one of processes.
        progress: called with the cases done, the cases in all, and what is done now.

    Returns: a `HuntReport`.

    Raises: ValueError or TypeError of one line for arguments that are not as above, and where the kernel fails on the
        first inputs, or what it gives is not as the protocol says.
    """
    setting = Setting.of(
        lengths=lengths,
        head_dim=head_dim,
        heads=heads,
        kv_heads=kv_heads,
        causal=causal,
        window=window,
        alignment=alignment,
        softmax_scale=softmax_scale,
        backward=backward if _has_backward(recipe_or_kernel) else False,
    )
    counted = _FAILING if severities is None else wanted_severities(severities)
    limits = _limits(seed, calls, seconds, enough)
    subject = subject_of(recipe_or_kernel, setting=setting, trace=trace)
    if executor is not None and not isinstance(executor, Executor):
        raise TypeError(
            f"executor is {shown(executor)}; it must be a concurrent.futures.Executor, or None"
        )
    return Steps(
        subject=subject,
        setting=setting,
        counted=counted,
        seed=limits[0],
        enough=limits[3],
        budget=Budget(calls=limits[1], seconds=limits[2]),
        executor=executor,
        progress=progress,
    ).report()


def _has_backward(subject: Any) -> bool:
    """False for a recipe that has none; True for all else, which says so itself."""
    if isinstance(subject, str):
        subject = RECIPES.get(subject)
    return not isinstance(subject, Recipe) or subject.has_backward


def _limits(
    seed: Any, calls: Any, seconds: Any, enough: Any
) -> tuple[int, int | None, float | None, int | None]:
    seed = whole("seed", seed, least=0)
    calls = None if calls is None else whole("calls", calls, least=1)
    enough = None if enough is None else whole("enough", enough, least=1)
    if seconds is not None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float, np.number)):
            raise TypeError(f"seconds is {shown(seconds)}; it must be a number, or None")
        if not float(seconds) > 0:
            raise ValueError(f"seconds is {shown(seconds)}; it must be above 0")
        seconds = float(seconds)
    return seed, calls, seconds, enough
