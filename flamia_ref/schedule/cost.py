"""What a tile costs: cycles of each part of a multiprocessor, and the slowest of them over a fitted efficiency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref._errors import shown
from flamia_ref.packing.tiles import BLOCK
from flamia_ref.schedule.hardware import GPU
from flamia_ref.schedule.kernel import BYTES, Kernel
from flamia_ref.schedule.work import Pass, Problem, Work

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Cycles that each part of a multiprocessor needs for one tile product, were it alone.

    Attributes:
        tensor: the tensor core.
        special: the unit of special functions, which converts to 8 and 16 bits too.
        float32: the float32 lanes.
        shared: shared memory.
    """

    tensor: float
    special: float
    float32: float
    shared: float

    @property
    def slowest(self) -> float:
        """The most of them."""
        return max(self.tensor, self.special, self.float32, self.shared)

    @property
    def bound_by(self) -> str:
        """Which part that is."""
        return max(("tensor", "special", "float32", "shared"), key=lambda name: getattr(self, name))


@dataclass(frozen=True, slots=True)
class Constants:
    """What is fitted for one GPU, pass and format.

    Attributes:
        efficiency: the slowest part's cycles over those that a tile product takes: clocks below the highest, waiting
            of the parts for each other, everything that is not modelled.
        overhead: cycles of a tile besides its products: prologue and epilogue.
    """

    efficiency: float
    overhead: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.efficiency) and self.efficiency > 0):
            raise ValueError(f"efficiency is {shown(self.efficiency)}; it must be positive")
        if not (np.isfinite(self.overhead) and self.overhead >= 0):
            raise ValueError(f"overhead is {shown(self.overhead)}; it must not be negative")


def terms_of(kernel: Kernel, problem: Problem, gpu: GPU) -> Terms:
    """The cycles of one tile product. Raises ValueError for a rate that the GPU does not have."""
    rows, columns = kernel.size.queries, kernel.size.keys
    scores = rows * columns
    tensor = sum(
        2 * scores * _depth(name, problem) / _rate(gpu, rate) for name, rate in kernel.rates.items()
    )
    special = scores * (kernel.exp2 / gpu.exp2.value + kernel.conversions / gpu.conversions.value)
    return Terms(
        tensor=tensor,
        special=special,
        float32=scores * kernel.float32 / gpu.float32.value,
        shared=_shared(kernel, problem) / gpu.shared_bytes.value,
    )


def guarded_cycles(kernel: Kernel, problem: Problem, gpu: GPU) -> float:
    """Cycles of the tensor core for one guarded block of 32 by 32 in bfloat16, besides the low-precision products: of
    the products that are guarded; 0 where none is."""
    return sum(
        2 * BLOCK * BLOCK * _depth(name, problem) / _rate(gpu, "bf16")
        for name, rate in kernel.rates.items()
        if rate != "bf16" and name in kernel.guarded
    )


def tile_cycles(work: Work, kernel: Kernel, gpu: GPU, constants: Constants) -> Floats:
    """Cycles of every tile of a launch [tiles], with what its guarded blocks take in bfloat16."""
    one = terms_of(kernel, work.problem, gpu).slowest / constants.efficiency
    cycles = constants.overhead + work.products * one
    extra = guarded_cycles(kernel, work.problem, gpu) / constants.efficiency
    if extra:
        cycles = cycles + work.guarded * extra
    return np.asarray(cycles, dtype=np.float64)


def _depth(product: str, problem: Problem) -> int:
    """Multiplications for each score: head_dim where q or k is an operand, else that of v."""
    return problem.value_dim if product in ("o", "dp", "dv") else problem.head_dim


def _rate(gpu: GPU, rate: str) -> int:
    found = {"bf16": gpu.tensor_bf16, "fp8": gpu.tensor_fp8, "fp4": gpu.tensor_fp4}[rate]
    if found is None:
        raise ValueError(
            f"{gpu.name} has no {rate} tensor cores; take a recipe without {rate} products"
        )
    return found.value


def _shared(kernel: Kernel, problem: Problem) -> float:
    """Bytes of shared memory that one tile product reads and writes.

    A product reads its operands from there, but P comes from tensor memory. dS is written there once a copy; a dQ that
    is added up in memory goes there in float32 and is read once more.
    """
    rows, columns = kernel.size.queries, kernel.size.keys
    total = 0.0
    for name, rate in kernel.rates.items():
        width, depth = BYTES[rate], _depth(name, problem)
        operands = {
            "s": (rows + columns) * depth,
            "dp": (rows + columns) * depth,
            "o": columns * depth,
            "dv": rows * depth,
            "dk": rows * depth + rows * columns,
            "dq": columns * depth + rows * columns,
        }
        total += width * operands[name]
    written = [BYTES[rate] for name, rate in kernel.rates.items() if name in ("dq", "dk")]
    if written:
        total += rows * columns * (max(written) if kernel.copies == 1 else sum(written))  # dS
    if kernel.launch is Pass.BACKWARD:
        total += 2 * 4 * rows * problem.head_dim
    return total
