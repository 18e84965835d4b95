"""The traffic of quantization: what a kernel before attention reads and writes to make the copies of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from flamia_ref.attention import Recipe
from flamia_ref.attention.copies import copy_names
from flamia_ref.attention.product import Operand, Scope
from flamia_ref.attention.stages import input_of
from flamia_ref.formats import FORMATS, PRESETS
from flamia_ref.schedule.hardware import GPU
from flamia_ref.schedule.work import Pass, Problem

MEMORY_EFFICIENCY = 0.8
"""The share of the memory's rate that a quantization kernel reaches: assumed."""

_INPUT_BYTES = 2  # bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that quantization moves before one pass.

    Attributes:
        read: of the inputs, each once.
        written: of payloads and scales, without padding.
    """

    read: float
    written: float

    def seconds(self, gpu: GPU) -> float:
        """How long that takes."""
        return (self.read + self.written) / (MEMORY_EFFICIENCY * gpu.memory.value)


def traffic(recipe: Recipe, problem: Problem, launch: Pass | str) -> Traffic:
    """What quantization moves for a pass: before the forward the copies of q, k and v that it or the backward takes,
    before the backward those of dO.

    A tensor of which the products take bfloat16 alone is neither read nor written.
    """
    backward = Pass(launch) is not Pass.FORWARD
    operands: dict[str, dict[str, Operand]] = {}
    for use, name in copy_names(recipe).items():
        tensor = input_of(use)
        if (tensor == "do") is backward:
            operands.setdefault(tensor, {})[name] = recipe.operand(use)
    read = written = 0.0
    for tensor, copies in operands.items():
        elements = _elements(problem, tensor)
        made = [operand for operand in copies.values() if operand.format != "bf16"]
        if made:
            read += elements * _INPUT_BYTES
        written += sum(elements * _bytes(operand, _channels(problem, tensor)) for operand in made)
    return Traffic(read=read, written=written)


def _elements(problem: Problem, tensor: str) -> int:
    mask = problem.mask
    tokens = (mask.queries if tensor in ("q", "do") else mask.keys).tokens
    heads = problem.heads if tensor in ("q", "do") else problem.kv_heads
    return tokens * heads * _channels(problem, tensor)


def _channels(problem: Problem, tensor: str) -> int:
    return problem.head_dim if tensor in ("q", "k") else problem.value_dim


def _bytes(operand: Operand, channels: int) -> float:
    """Bytes of an element with its share of a scale."""
    if operand.dequantized:
        return float(_INPUT_BYTES)
    if operand.format not in PRESETS:
        return FORMATS[operand.format].bits / 8
    preset = PRESETS[operand.format]
    size = preset.element.bits / 8
    if operand.scope not in (Scope.BLOCK, Scope.PREVIOUS_BLOCK, Scope.TOKEN):
        return size
    rows, columns = operand.block or preset.block
    if rows == "all":
        return size
    across = channels if columns == "all" else int(columns)
    scales = -(-preset.scale.bits // 8) / (int(rows) * across)  # UE4M3 has 7 bits in a byte
    return size + scales + operand.has_token_scales / channels
