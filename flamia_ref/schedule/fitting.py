"""Fitting: two constants for each GPU, library, pass and format, from a few measured cells."""

from __future__ import annotations

import bisect
import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flamia_ref.attention import RECIPES
from flamia_ref.schedule.cost import Constants, terms_of
from flamia_ref.schedule.hardware import GPUS
from flamia_ref.schedule.kernel import Kernel, kernel_of
from flamia_ref.schedule.libraries import LIBRARIES
from flamia_ref.schedule.measured import Cell
from flamia_ref.schedule.policies import POLICIES
from flamia_ref.schedule.simulation import run
from flamia_ref.schedule.work import Pass, Problem, Size, work_of

LONG, SHORT = 32768, 2048
"""Lengths of the cells that the efficiency and the overhead are fitted on; the overhead on causal ones alone."""

FORMATS: Mapping[str, str] = {
    "bf16": "bf16-fa4",
    "fp8": "fp8-fa4",
    "mxfp8": "cudnn-mxfp8",
}
"""A recipe of each measured format, which says what a score goes through."""

_RATIOS = tuple(float(x) for x in np.round(np.geomspace(0.25, 16.0, 33), 3))  # overhead in products


class Group(NamedTuple):
    """What constants are of."""

    gpu: str
    library: str
    version: str
    launch: Pass
    format: str

    @classmethod
    def of(cls, cell: Cell) -> Group:
        """The group of a cell."""
        return cls(cell.gpu, cell.library, cell.version, cell.launch, cell.format)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The constants of a group and what they were fitted on.

    Attributes:
        group: what they are of.
        constants: efficiency and overhead.
        spread: the standard deviation of log(measured / predicted) over the cells that were not fitted, or of all
            where there are none.
        long, short: cells of the efficiency, and of the overhead.
    """

    group: Group
    constants: Constants
    spread: float
    long: int
    short: int


def fit(cells: Iterable[Cell]) -> dict[Group, Fit]:
    """The constants of every group that has a cell of 32768 tokens.

    The efficiency makes the geometric mean of measured over predicted time 1 on the cells of 32768 tokens; the
    overhead, of a few values between a quarter and 16 tile products, on causal cells of 2048 tokens. Deterministic
    cells are not fitted. A group without cells of 2048 tokens gets an overhead of 4 products.
    """
    by_group: dict[Group, list[Cell]] = defaultdict(list)
    for cell in cells:
        if not cell.deterministic:
            by_group[Group.of(cell)].append(cell)
    return {
        group: _fit(group, found)
        for group, found in by_group.items()
        if any(cell.length == LONG for cell in found)
    }


def _fit(group: Group, cells: list[Cell]) -> Fit:
    long = [cell for cell in cells if cell.length == LONG]
    short = [cell for cell in cells if cell.length == SHORT and cell.causal]

    def logs(some: list[Cell], ratio: float) -> np.ndarray:
        return np.array([np.log(cell.milliseconds / _slowest(cell, ratio)) for cell in some])

    def miss(ratio: float) -> float:
        return float(np.mean(logs(short, ratio)) - np.mean(logs(long, ratio)))

    ratio = _root(miss) if short else 4.0
    scale = float(np.mean(logs(long, ratio)))
    one = np.exp(-scale)
    # The overhead is the same in cycles for all shapes; in products of the group's first long cell.
    cycles = _terms(long[0]) * ratio / one
    rest = [cell for cell in cells if cell not in long and cell not in short] or cells
    return Fit(
        group=group,
        constants=Constants(efficiency=one, overhead=cycles),
        spread=float(np.std(logs(rest, ratio) - scale)),
        long=len(long),
        short=len(short),
    )


def _root(miss: Callable[[float], float]) -> float:
    """The ratio at which what is missed, which falls as ratios rise, is nearest to 0."""
    place = bisect.bisect_left(_RATIOS, 0.0, key=lambda ratio: -miss(ratio))
    near = _RATIOS[max(place - 1, 0) : place + 1]
    return min(near, key=lambda ratio: abs(miss(ratio)))


def predicted(cell: Cell, constants: Constants) -> float:
    """Milliseconds of a cell by the model."""
    one = _terms(cell) / constants.efficiency
    return _makespan(_shape(cell), round(constants.overhead / one, 4)) * one / _clock(cell) * 1e3


def _slowest(cell: Cell, ratio: float) -> float:
    """Milliseconds at efficiency 1 and an overhead of `ratio` products."""
    return _makespan(_shape(cell), ratio) * _terms(cell) / _clock(cell) * 1e3


def _clock(cell: Cell) -> float:
    return float(GPUS[cell.gpu].clock.value)


def _terms(cell: Cell) -> float:
    return terms_of(kernel_of_cell(cell), cell.problem, GPUS[cell.gpu]).slowest


def kernel_of_cell(cell: Cell) -> Kernel:
    """The kernel that a cell measured."""
    recipe = RECIPES[FORMATS[cell.format]]
    size = LIBRARIES[cell.library].size(cell.launch)
    if recipe.has_backward or cell.launch is Pass.FORWARD:
        return kernel_of(recipe, cell.launch, size=size, emulated=emulated(cell.gpu, cell.launch))
    return fp8_backward(cell.launch, size)


def fp8_backward(launch: Pass, size: Size) -> Kernel:
    """cuDNN's backward with a scale a tensor, which no recipe has: assumed to be that of MXFP8 without scales of
    blocks."""
    blocks = kernel_of(RECIPES["cudnn-mxfp8"], launch, size=size)
    plain = kernel_of(RECIPES["bf16-fa4"], launch, size=size)
    return replace(
        blocks, float32=plain.float32, conversions=plain.conversions, copies=plain.copies
    )


def emulated(gpu: str, launch: Pass) -> float:
    """The share of exp2 that forward kernels emulate where the GPU has 16 special functions a clock and a tensor core
    twice as fast as Hopper's. That they do was read (NVIDIA/cudnn-frontend 0341681, config_sm100.py, exp2_fma_split);
    that it is a quarter is assumed."""
    return 0.25 if launch is Pass.FORWARD and gpu in ("B200", "GB200") else 0.0


def _shape(cell: Cell) -> tuple[Problem, Pass, str, str]:
    return cell.problem, cell.launch, cell.library, cell.gpu


@functools.lru_cache(maxsize=4096)
def _makespan(shape: tuple[Problem, Pass, str, str], ratio: float) -> float:
    """In tile products, of an overhead of `ratio` products a tile."""
    problem, launch, name, gpu = shape
    library = LIBRARIES[name]
    work = work_of(problem, launch, library.size(launch))
    cycles = work.products.astype(np.float64) + ratio
    order = POLICIES[library.policy(problem, launch)].of(work, GPUS[gpu], cycles)
    return run(cycles, order, GPUS[gpu].sms.value).makespan
