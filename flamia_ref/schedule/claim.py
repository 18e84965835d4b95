"""The claim: a microscaled attention against the fastest baseline, forward, backward and quantization together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flamia_ref.attention import RECIPES
from flamia_ref.schedule.cost import tile_cycles
from flamia_ref.schedule.fitting import fp8_backward
from flamia_ref.schedule.hardware import GPUS
from flamia_ref.schedule.launches import (
    SAME_CYCLES,
    constants_of,
    format_of,
    simulate,
    spread_of,
)
from flamia_ref.schedule.libraries import LIBRARIES
from flamia_ref.schedule.policies import POLICIES
from flamia_ref.schedule.quantization import Traffic
from flamia_ref.schedule.simulation import run
from flamia_ref.schedule.work import Pass, Problem, work_of
from flamia_ref.schedule.workloads import cu_seqlens_of

BASELINES = (
    ("bf16-fa4", "cudnn"),
    ("bf16-fa4", "fa4"),
    ("cudnn-mxfp8", "cudnn"),
    ("cudnn-mxfp8-pv-bf16", "cudnn"),
    ("fp8-fa4", "cudnn"),
)
"""Recipe and library of each baseline; fp8-fa4 with the backward that cuDNN has for a scale a tensor."""

CANDIDATES = ("flamia-mxfp8", "flamia-mxfp8-folded", "flamia-nvfp4-fp8")
CLAIMED = {"B200": (1.10, 1.40), "B300": (1.06, 1.42)}
"""Ranges of the abstract of arXiv:2611.03344, of its MXFP8 path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Time:
    """What one kernel takes for a workload.

    Attributes:
        recipe, library: what runs.
        policy: a policy's name, or "library" for what the library does.
        forward, backward, quantization: seconds.
        spread: the standard deviation of the logarithm of forward and backward together.
    """

    recipe: str
    library: str
    policy: str
    forward: float
    backward: float
    quantization: float
    spread: float

    def seconds(self, *, fused: bool = False) -> float:
        """All of it; `fused`: quantization costs nothing."""
        return self.forward + self.backward + (0.0 if fused else self.quantization)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One workload on one GPU.

    Attributes:
        gpu, workload, heads, kv_heads: of what.
        baselines, candidates: times; a candidate has one a policy.
    """

    gpu: str
    workload: str
    heads: int
    kv_heads: int
    baselines: tuple[Time, ...]
    candidates: tuple[Time, ...]

    @property
    def fastest(self) -> Time:
        """The baseline of the least time, its quantization included."""
        return min(self.baselines, key=lambda one: one.seconds())

    def speedup(
        self, candidate: Time, *, fused: bool = False, baseline: Time | None = None
    ) -> float:
        """How many times as fast a candidate is as the fastest baseline, or as `baseline`. `fused` says that the
        candidate's quantization costs nothing; the baseline pays its own."""
        return (baseline or self.fastest).seconds() / candidate.seconds(fused=fused)

    def spread(self, candidate: Time) -> float:
        """The standard deviation of the speed-up's logarithm: both sides', as if they were independent."""
        return math.hypot(self.fastest.spread, candidate.spread)


def combined(forward: float, backward: float, spreads: tuple[float, float]) -> float:
    """The log-spread of a sum of a forward and a backward: each weighted by its share of the time, in quadrature."""
    total = forward + backward
    return math.hypot(forward / total * spreads[0], backward / total * spreads[1])


def study(
    cases: Iterable[tuple[str, str, int, int]] | None = None,
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[Result, ...]:
    """Predict every case.

    Args:
        cases: GPU, workload as `cu_seqlens_of` reads it, heads, kv_heads; None for `default_cases`.
        progress: is called with the number done, that of all, and the workload.

    Raises: ValueError of one line for unknown GPUs and workloads, and GPUs that nothing was fitted for.
    """
    given = default_cases() if cases is None else tuple(cases)
    found = []
    for done, (gpu, workload, heads, kv_heads) in enumerate(given, start=1):
        found.append(_result(gpu, workload, heads, kv_heads))
        if progress is not None:
            progress(done, len(given), workload)
    return tuple(found)


def default_cases() -> tuple[tuple[str, str, int, int], ...]:
    """B200 and B300: each workload with 16384, 65536 and, with 8 heads, 131072 tokens; GB200 and GB300: with 32/8 heads
    and 65536 tokens."""
    names = ("uniform", "lognormal", "zipf", "one-long", "equal", "corpus")
    cases = []
    for gpu in ("B200", "B300", "GB200", "GB300"):
        for name in names:
            for tokens in (16384, 65536, 131072):
                for heads, kv_heads in ((8, 8), (32, 8), (64, 8)):
                    few = tokens < 131072 or heads == 8
                    if few if gpu in SAME_CYCLES else (tokens, heads) == (65536, 32):
                        cases.append((gpu, _workload(name, tokens), heads, kv_heads))
    return tuple(cases)


def _workload(name: str, tokens: int) -> str:
    more = f",long={tokens // 2}" if name == "one-long" else ""
    return f"{name}:tokens={tokens}{more}"


def _result(gpu: str, workload: str, heads: int, kv_heads: int) -> Result:
    GPUS[gpu]
    problem = Problem.of(cu_seqlens_of(workload), heads=heads, kv_heads=kv_heads)
    return Result(
        gpu=gpu,
        workload=workload,
        heads=heads,
        kv_heads=kv_heads,
        baselines=tuple(time_of(problem, *one, gpu=gpu) for one in BASELINES),
        candidates=tuple(
            time_of(problem, name, "cudnn", gpu=gpu, policy=policy)
            for name in CANDIDATES
            for policy in (None, "lpt")
        ),
    )


def time_of(
    problem: Problem, recipe: str, library: str, *, gpu: str, policy: str | None = None
) -> Time:
    """Forward, backward and quantization of one kernel. Raises ValueError as `launches.simulate` does."""
    found = simulate(problem, recipe, gpu=gpu, library=library, policy=policy)
    forward, quantization = found.launches[0].seconds, found.quantization_seconds
    if RECIPES[recipe].has_backward:
        backward = found.launches[1].seconds
    else:
        backward = _fp8_backward(problem, library, gpu, policy)
        elements = problem.mask.queries.tokens * problem.heads * problem.value_dim
        quantization += Traffic(read=2.0 * elements, written=1.0 * elements).seconds(GPUS[gpu])
    spreads = (
        spread_of(gpu, library, Pass.FORWARD, format_of(RECIPES[recipe])),
        spread_of(gpu, library, Pass.BACKWARD, format_of(RECIPES[recipe])),
    )
    return Time(
        recipe=recipe,
        library=library,
        policy=policy or "library",
        forward=forward,
        backward=backward,
        quantization=quantization,
        spread=combined(forward, backward, spreads),
    )


def _fp8_backward(problem: Problem, library: str, gpu: str, policy: str | None) -> float:
    """Seconds of cuDNN's backward with a scale a tensor."""
    chip, size = GPUS[gpu], LIBRARIES[library].size(Pass.BACKWARD)
    kernel = fp8_backward(Pass.BACKWARD, size)
    constants, _ = constants_of(gpu, library, Pass.BACKWARD, "fp8")
    work = work_of(problem, Pass.BACKWARD, size)
    cycles = tile_cycles(work, kernel, chip, constants)
    name = policy or LIBRARIES[library].policy(problem, Pass.BACKWARD)
    return (
        run(cycles, POLICIES[name].of(work, chip, cycles), chip.sms.value).makespan
        / chip.clock.value
    )
