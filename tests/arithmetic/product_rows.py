"""Rows at which a fused sum could go wrong, and what the slow machine of tests/independent makes of them.

A row is one dot product along K = 70, so two steps of 32 and a short one of 6, or four of 16 and a
short one. `product_row_maker` makes them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.independent import codes, float32, machine

K = 70
NARROW = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
ELEMENTS = {
    element.name: element
    for element in (
        codes.E4M3,
        codes.E5M2,
        codes.E2M3,
        codes.E3M2,
        codes.E2M1,
        codes.Element(
            name="bf16",
            exponent_bits=8,
            fraction_bits=7,
            bias=127,
            largest=0x7F7F,
            infinity=0x7F80,
            nan=0x7FFF,
        ),
        codes.Element(
            name="fp16",
            exponent_bits=5,
            fraction_bits=10,
            bias=15,
            largest=0x7BFF,
            infinity=0x7C00,
            nan=0x7FFF,
        ),
    )
}
PAIRS = [*((a, b) for a in NARROW for b in NARROW), ("bf16", "bf16"), ("fp16", "fp16")]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One dot product and its accumulator."""

    why: str
    a: list[int]
    b: list[int]
    a_scales: list[int]
    b_scales: list[int]
    c: int


def instruction(pair: tuple[str, str]) -> str:
    """The instruction that takes the pair of formats."""
    return "sm100.tcgen05.f16" if pair[0] in ("bf16", "fp16") else "sm100.tcgen05.mxf8f6f4"


def terms(pair: tuple[str, str]) -> int:
    """Products in one step."""
    return machine.BFLOAT16_TERMS if pair[0] in ("bf16", "fp16") else machine.SCALED_TERMS


def result(row: Row, pair: tuple[str, str]) -> int:
    """The accumulator after all steps, by the slow machine."""
    if not row.a:
        return float32.NAN if float32.is_nan(row.c) else row.c
    a_element, b_element = (ELEMENTS[name] for name in pair)
    if pair[0] == "bf16":
        return machine.bfloat16_chain(row.a, row.b, c_bits=row.c)[-1]
    if pair[0] != "fp16":
        return machine.scaled_chain(
            row.a,
            row.b,
            row.a_scales,
            row.b_scales,
            c_bits=row.c,
            a_element=a_element,
            b_element=b_element,
        )[-1]
    table, c = machine.element_operands(a_element), row.c
    for start in range(0, len(row.a), machine.BFLOAT16_TERMS):
        part = slice(start, start + machine.BFLOAT16_TERMS)
        operands = [(table[x], table[y]) for x, y in zip(row.a[part], row.b[part], strict=True)]
        c = machine.fused_sum(operands, c, scale_exponent=0, product_bits=20)
    return c


def results(rows: Iterable[Row], pair: tuple[str, str]) -> npt.NDArray[np.uint32]:
    """`result` of every row."""
    return np.array([result(row, pair) for row in rows], dtype=np.uint32)


def arguments(rows: Sequence[Row], pair: tuple[str, str]) -> dict[str, Any]:
    """What `fused_dot` takes, for rows of one K."""
    wide = np.uint16 if pair[0] in ("bf16", "fp16") else np.uint8
    given: dict[str, Any] = {
        "a": np.array([row.a for row in rows], dtype=wide),
        "b": np.array([row.b for row in rows], dtype=wide),
        "c_bits": np.array([row.c for row in rows], dtype=np.uint32),
        "instruction": instruction(pair),
        "a_format": pair[0],
        "b_format": pair[1],
    }
    if wide is np.uint8:
        given["a_scales"] = np.array([row.a_scales for row in rows], dtype=np.uint8)
        given["b_scales"] = np.array([row.b_scales for row in rows], dtype=np.uint8)
    return given
