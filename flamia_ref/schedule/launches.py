"""One attention, forward and backward, as the launches of a recipe on a GPU: when they run and what they take."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from flamia_ref.attention import Recipe
from flamia_ref.attention.inputs import chosen_recipe
from flamia_ref.attention.product import Scope, Use
from flamia_ref.schedule.cost import Constants, Floats, Terms, terms_of, tile_cycles
from flamia_ref.schedule.deterministic import DETERMINISTIC, Deterministic
from flamia_ref.schedule.fitting import Group, emulated
from flamia_ref.schedule.hardware import GPU, GPUS
from flamia_ref.schedule.kernel import Kernel, kernel_of
from flamia_ref.schedule.libraries import LIBRARIES
from flamia_ref.schedule.policies import POLICIES
from flamia_ref.schedule.quantization import Traffic, traffic
from flamia_ref.schedule.simulation import Timeline, run
from flamia_ref.schedule.turns import turns_of
from flamia_ref.schedule.work import Pass, Problem, Work, work_of

SAME_CYCLES = {"B200": "GB200", "B300": "GB300"}
"""GPUs of which nothing was fitted, and whose cycles are taken, which is assumed: the chip is the same, multiprocessors
and the highest clock are its own, but what power leaves of that clock is in the efficiency."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch.

    Attributes:
        work: its tiles.
        kernel: what each goes through.
        terms: cycles of the parts of a multiprocessor for one tile product.
        constants: what was fitted.
        fitted: the group that the constants are of, in words.
        policy: how tiles are handed out.
        timeline: when they run.
        clock: hertz.
    """

    work: Work
    kernel: Kernel
    terms: Terms
    constants: Constants
    fitted: str
    policy: str
    timeline: Timeline
    clock: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.timeline.makespan / self.clock

    @property
    def bound_seconds(self) -> float:
        """What no order of these tiles can beat."""
        return self.timeline.lower_bound / self.clock


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """The launches of one attention.

    Attributes:
        recipe, gpu, problem: of what.
        launches: forward and, where the recipe has one and it is asked for, backward.
        quantization: bytes before each of them.
        fused: whether what comes before attention quantizes for nothing.
    """

    recipe: Recipe
    gpu: GPU
    problem: Problem
    launches: tuple[Launch, ...]
    quantization: tuple[Traffic, ...]
    fused: bool

    @property
    def seconds(self) -> float:
        """All launches, one after another."""
        return sum(one.seconds for one in self.launches) + self.quantization_seconds

    @property
    def quantization_seconds(self) -> float:
        """Of that, quantization."""
        return 0.0 if self.fused else sum(one.seconds(self.gpu) for one in self.quantization)


def simulate(
    problem: Problem,
    recipe: Recipe | str,
    *,
    gpu: GPU | str = "B200",
    policy: str | None = None,
    library: str = "cudnn",
    backward: bool | None = None,
    fused: bool = False,
    deterministic: str | None = None,
    constants: dict[Pass, Constants] | None = None,
) -> Simulation:
    """Run a recipe's attention through the model.

    Args:
        problem: the documents, heads and channels.
        recipe: a `Recipe`, or a name in `RECIPES`.
        gpu: a `GPU`, or a name in `GPUS`.
        policy: a name in `POLICIES` for every launch; None for what the library does.
        library: a name in `LIBRARIES`: sizes of tiles, and whose constants.
        backward: whether the backward runs too; None where the recipe has one.
        fused: whether quantization costs nothing, since what comes before attention does it in passing.
        deterministic: a name in `DETERMINISTIC`: the order in which the backward adds to dQ, and waits for it, in
            place of the policy there; None where nothing waits.
        constants: in place of the fitted ones, by pass.

    Raises: ValueError or TypeError of one line for unknown names, a backward that there is none of, a policy that does
        not fit the documents, and formats that nothing was fitted for on this GPU.
    """
    chosen = chosen_recipe(recipe)
    chip = GPUS[gpu] if isinstance(gpu, str) else gpu
    if policy is not None:
        POLICIES[policy]
    LIBRARIES[library]
    if deterministic is not None:
        DETERMINISTIC[deterministic]
    both = chosen.has_backward if backward is None else backward
    passes = (Pass.FORWARD, Pass.BACKWARD) if both else (Pass.FORWARD,)
    kernels = [
        kernel_of(chosen, one, size=LIBRARIES[library].size(one), emulated=emulated(chip.name, one))
        for one in passes
    ]
    launches = tuple(
        _launch(problem, chosen, chip, kernel, policy, library, constants, deterministic)
        for kernel in kernels
    )
    return Simulation(
        recipe=chosen,
        gpu=chip,
        problem=problem,
        launches=launches,
        quantization=tuple(traffic(chosen, problem, one) for one in passes),
        fused=fused,
    )


def _launch(
    problem: Problem,
    recipe: Recipe,
    gpu: GPU,
    kernel: Kernel,
    policy: str | None,
    library: str,
    constants: dict[Pass, Constants] | None,
    deterministic: str | None,
) -> Launch:
    terms = terms_of(kernel, problem, gpu)
    if constants is not None:
        found, fitted = constants[kernel.launch], "given"
    else:
        found, fitted = constants_of(gpu.name, library, kernel.launch, format_of(recipe))
    name = policy or LIBRARIES[library].policy(problem, kernel.launch)
    work = work_of(problem, kernel.launch, kernel.size)
    cycles = tile_cycles(work, kernel, gpu, found)
    if deterministic is not None and kernel.launch.by_keys:
        name = deterministic
        timeline = _in_turns(work, cycles, found.overhead, gpu.sms.value, DETERMINISTIC[name])
    else:
        timeline = run(cycles, POLICIES[name].of(work, gpu, cycles), gpu.sms.value)
    return Launch(
        work=work,
        kernel=kernel,
        terms=terms,
        constants=found,
        fitted=fitted,
        policy=name,
        timeline=timeline,
        clock=gpu.clock.value,
    )


def _in_turns(
    work: Work, cycles: Floats, overhead: float, sms: int, order: Deterministic
) -> Timeline:
    """A backward that adds to dQ in a fixed order; its prologue and epilogue are before its products."""
    each = (cycles - overhead) / np.maximum(work.products, 1)
    turns = turns_of(work, each, keys=order.keys, queries=order.queries)
    return run(np.full(len(work), overhead), order.order(work), sms, turns)


def format_of(recipe: Recipe) -> str:
    """The measured format that a recipe's kernels are nearest to: "bf16", "fp8" with a scale a tensor or head, or
    "mxfp8" with scales of blocks, narrower formats too."""
    scopes = {recipe.operand(use).scope for use in (Use.S_Q, Use.S_K)}
    if recipe.operand(Use.S_Q).format == "bf16" or recipe.operand(Use.S_Q).dequantized:
        return "bf16"
    return "fp8" if scopes <= {Scope.HEAD, Scope.STATIC, Scope.UNIT} else "mxfp8"


def constants_of(gpu: str, library: str, launch: Pass, format: str) -> tuple[Constants, str]:
    """The fitted constants, and what they are of in words. Raises ValueError where nothing was fitted."""
    group, constants, _ = _fitted(gpu, library, launch, format)
    return constants, " ".join(f"{library} {group.version} {format} on {group.gpu}".split())


def spread_of(gpu: str, library: str, launch: Pass, format: str) -> float:
    """The spread of a fit: of log(measured / predicted) over cells that nothing was fitted on. Raises ValueError where
    nothing was fitted."""
    return _fitted(gpu, library, launch, format)[2]


def _fitted(gpu: str, library: str, launch: Pass, format: str) -> tuple[Group, Constants, float]:
    table = _constants()
    chip = SAME_CYCLES.get(gpu, gpu)
    for version in LIBRARIES[library].versions:
        group = Group(chip, library, version, launch, format)
        if group in table:
            return group, *table[group]
    have = sorted(
        {f"{one.library} {one.format} on {one.gpu}" for one in table if one.launch is launch}
    )
    raise ValueError(
        f"nothing was fitted for the {launch.value} of {library} in {format} on {gpu}; there are: {', '.join(have)}"
    )


@functools.cache
def _constants() -> dict[Group, tuple[Constants, float]]:
    """Constants and spread of each group."""
    folder = resources.files("flamia_ref.schedule") / "published"
    rows: list[dict[str, Any]] = json.loads((folder / "constants.json").read_text("utf-8"))
    return {
        Group(row["gpu"], row["library"], row["version"], Pass(row["pass"]), row["format"]): (
            Constants(efficiency=row["efficiency"], overhead=row["overhead"]),
            row["spread"],
        )
        for row in rows
    }
