"""Matrix instructions as data: what one fused sum of a tensor core takes in, keeps and returns.

An instruction multiplies pairs of operands, adds `terms` products and the accumulator in one fused sum, and chains such
sums along K. The rules that use this data are in `flamia_ref.arithmetic.fused_sum`; the instructions themselves, one
table a family of devices, in `flamia_ref.arithmetic.catalogue`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from flamia_ref.evidence import Evidence


class Summation(StrEnum):
    """How an instruction adds the products of one step and the accumulator."""

    FUSED = "fused"
    """All terms cut toward zero to a common grid, added exactly, the sum rounded to the result."""
    EXACT = "exact"
    """The exact sum of all K products and the accumulator, rounded once to nearest even. No machine does this."""
    FMA = "fma"
    """One IEEE float32 fused multiply-add a product, in ascending K."""


class Result(StrEnum):
    """What a sum is rounded to, and so what the accumulator holds. Infinity from 2^128 (65520 for float16) on."""

    FLOAT32 = "float32 toward zero"
    FLOAT32_13 = "float32 toward zero with 13 fraction bits"
    FLOAT16 = "float16 to nearest even"
    FLOAT32_NEAREST = "float32 to nearest even"

    @property
    def accumulator_format(self) -> str:
        """Name of the format of the accumulator's bits."""
        return "fp16" if self is Result.FLOAT16 else "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Block scales that an instruction takes: their format, and how many elements along K share one."""

    format: str
    block: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One matrix instruction.

    Attributes:
        name: the registry name.
        summation: the kind of sum.
        terms: products in one fused sum (L); None where a sum has no fixed length.
        group: products that are added exactly before their sum is cut; 1 where each product is cut by itself.
            Groups are aligned by the exponents of their scales alone.
        fraction_bits: bits kept below the exponent of the largest term (F); fused sums only.
        exponent_floor: the least exponent that terms are aligned to (E0); fused sums only.
        result: what a sum is rounded to.
        operand_formats: names of the element formats allowed for each operand.
        same_formats: whether both operands must have one format.
        scalings: the block scales allowed, of which a call uses one; empty for an instruction without scales.
        evidence: what the rules rest on, by part.
        source: where the rules are written down.
    """

    name: str
    summation: Summation
    operand_formats: tuple[str, ...]
    source: str
    evidence: Mapping[str, Evidence] = field(compare=False)
    terms: int | None = None
    group: int = 1
    fraction_bits: int = 0
    exponent_floor: int = 0
    result: Result = Result.FLOAT32
    same_formats: bool = False
    scalings: tuple[Scaling, ...] = ()

    @property
    def scale_formats(self) -> tuple[str, ...]:
        """Names of the scale formats allowed."""
        return tuple(dict.fromkeys(scaling.format for scaling in self.scalings))
