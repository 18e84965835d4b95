"""Matrix instructions as data: what one fused sum of a tensor core takes in, keeps and returns.

An instruction multiplies pairs of operands, adds `terms` products and the accumulator in one fused sum, and chains such
sums along K. The rules that use this data are in `flamia_ref.arithmetic.fused_sum`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from flamia_ref._errors import Registry
from flamia_ref.evidence import Evidence


class Summation(StrEnum):
    """How an instruction adds the products of one step and the accumulator."""

    FUSED = "fused"
    """All terms cut toward zero to a common grid, added exactly, the sum cut to float32."""
    EXACT = "exact"
    """The exact sum of all K products and the accumulator, rounded once to nearest even. No machine does this."""
    FMA = "fma"
    """One IEEE float32 fused multiply-add a product, in ascending K."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One matrix instruction.

    Attributes:
        name: the registry name.
        summation: the kind of sum.
        terms: products in one fused sum (L); None where a sum has no fixed length.
        fraction_bits: bits kept below the exponent of the largest term (F); fused sums only.
        exponent_floor: the least exponent that terms are aligned to (E0); fused sums only.
        operand_formats: names of the element formats allowed for each operand.
        same_formats: whether both operands must have one format.
        scale_format: name of the block scales' format, or None for an instruction without scales.
        scale_block: elements along K that share a scale.
        evidence: what the rules rest on, by part.
        source: where the rules are written down.
    """

    name: str
    summation: Summation
    operand_formats: tuple[str, ...]
    source: str
    evidence: Mapping[str, Evidence] = field(hash=False)
    terms: int | None = None
    fraction_bits: int = 0
    exponent_floor: int = 0
    same_formats: bool = False
    scale_format: str | None = None
    scale_block: int = 32


_NARROW = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
_MMA_SIM = "MMA-Sim 2.1.1 (PyPI mmasim), arXiv:2511.10909; Khattak and Mikaitis, arXiv:2512.07004"

_ALL = (
    Instruction(
        name="sm100.tcgen05.mxf8f6f4",
        summation=Summation.FUSED,
        terms=32,
        fraction_bits=25,
        exponent_floor=-133,
        operand_formats=_NARROW,
        scale_format="e8m0",
        scale_block=32,
        evidence={
            "alignment": Evidence.SIMULATED,
            "exponent_floor": Evidence.ASSUMED,
            "special_values": Evidence.SIMULATED,
        },
        source=_MMA_SIM + "; the exponent floor by analogy with the kinds it was probed on",
    ),
    Instruction(
        name="sm100.tcgen05.f16",
        summation=Summation.FUSED,
        terms=16,
        fraction_bits=25,
        exponent_floor=-133,
        operand_formats=("bf16", "fp16"),
        same_formats=True,
        evidence={
            "alignment": Evidence.SIMULATED,
            "exponent_floor": Evidence.SIMULATED,
            "special_values": Evidence.SIMULATED,
        },
        source=_MMA_SIM + "; recorded B200 wmma outputs agree, tcgen05 outputs are not public",
    ),
    Instruction(
        name="exact",
        summation=Summation.EXACT,
        operand_formats=(*_NARROW, "bf16", "fp16", "tf32", "fp32"),
        scale_format="e8m0",
        scale_block=32,
        evidence={"sum": Evidence.SPECIFIED},
        source="IEEE 754-2019, one rounding of the exact result",
    ),
    Instruction(
        name="float32",
        summation=Summation.FMA,
        operand_formats=(*_NARROW, "bf16", "fp16", "tf32", "fp32"),
        evidence={"sum": Evidence.SPECIFIED},
        source="IEEE 754-2019, fusedMultiplyAdd",
    ),
)

INSTRUCTIONS: Mapping[str, Instruction] = Registry(
    "instruction", ((instruction.name, instruction) for instruction in _ALL)
)
"""Every instruction by name, read-only."""
