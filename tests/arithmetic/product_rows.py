"""Rows at which a fused sum could go wrong, and what the slow machine of tests/independent makes of them.

A row is one dot product along K, of two or three steps of its instruction. `product_families` and
`group_families` make them.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.independent import codes, machine, tensor_cores

WIDE = {"bf16": np.uint16, "fp16": np.uint16, "tf32": np.uint32, "fp32": np.uint32}
Words = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An instruction with one choice of what it takes."""

    instruction: str
    a: str
    b: str
    scale_format: str | None = None
    block: int = 32

    @property
    def rules(self) -> machine.Rules:
        return tensor_cores.INSTRUCTIONS[self.instruction].rules

    @property
    def elements(self) -> tuple[codes.Element, codes.Element]:
        return codes.ELEMENTS[self.a], codes.ELEMENTS[self.b]

    @property
    def k(self) -> int:
        """Two steps, three where they are short."""
        return self.rules.terms * (2 if self.rules.terms >= 32 else 3)

    @property
    def name(self) -> str:
        scales = f"-{self.scale_format}-{self.block}" if self.scale_format else ""
        return f"{self.instruction}-{self.a}-{self.b}{scales}"

    @property
    def like(self) -> "Case":
        """The first case in the table with the same rows and results."""
        return _FIRST[self._key]

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.rules, self.a, self.b, self.scale_format, self.block


def _cases() -> list[Case]:
    found = []
    for name, instruction in tensor_cores.INSTRUCTIONS.items():
        for a, b in instruction.pairs():
            for scale_format, block in instruction.scales or ((None, 32),):
                found.append(
                    Case(instruction=name, a=a, b=b, scale_format=scale_format, block=block)
                )
    return found


CASES = _cases()
"""Every instruction with everything that it takes."""
_FIRST: dict[Any, Case] = {}
for _case in CASES:
    _FIRST.setdefault(_case._key, _case)

# Of an instruction that takes any two of several formats: each format, and infinities on one side,
# the other, both and none. The tests take all pairs at night.
_PAIRS = {
    "fp8": {("e4m3", "e5m2")},
    "f8f6f4": {("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e3m2", "e2m3")},
    "mxf8f6f4": {
        ("e4m3", "e4m3"),
        ("e5m2", "e5m2"),
        ("e2m3", "e5m2"),
        ("e3m2", "e2m3"),
        ("e2m1", "e4m3"),
    },
}


def _is_one_of_some(case: Case) -> bool:
    pairs = _PAIRS.get(case.instruction.split(".")[2])
    return pairs is None or (case.a, case.b) in pairs


SOME = [case for case in CASES if _is_one_of_some(case)]
DISTINCT = [case for case in CASES if case.like is case]
"""One of all cases with the same rows and results."""
SOME_DISTINCT = list(dict.fromkeys(case.like for case in SOME))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One dot product and its accumulator."""

    why: str
    a: list[int]
    b: list[int]
    a_scales: list[int]
    b_scales: list[int]
    c: int


def result(row: Row, case: Case, rules: machine.Rules | None = None) -> int:
    """The accumulator after all steps, by the slow machine; by other rules if they are given."""
    rules = rules or case.rules
    if not row.a:
        stored = rules.output.stored
        kind, _, _ = machine.element_operand(row.c, stored)
        return stored.nan if kind == machine.NOT_A_NUMBER else row.c
    return machine.chain(
        row.a,
        row.b,
        row.c,
        rules,
        elements=case.elements,
        a_scales=row.a_scales,
        b_scales=row.b_scales,
        scale_format=case.scale_format or "e8m0",
        block=case.block,
    )[-1]


def results(rows: Iterable[Row], case: Case, rules: machine.Rules | None = None) -> Words:
    """`result` of every row, in the accumulator's type."""
    wide = WIDE[(rules or case.rules).output.stored.name]
    return np.array([result(row, case, rules) for row in rows], dtype=wide)


def arguments(rows: Sequence[Row], case: Case) -> dict[str, Any]:
    """What `fused_dot` takes, for rows of one K."""
    given: dict[str, Any] = {
        "a": np.array([row.a for row in rows], dtype=WIDE.get(case.a, np.uint8)),
        "b": np.array([row.b for row in rows], dtype=WIDE.get(case.b, np.uint8)),
        "c_bits": np.array([row.c for row in rows], dtype=WIDE[case.rules.output.stored.name]),
        "instruction": case.instruction,
        "a_format": case.a,
        "b_format": case.b,
    }
    if case.scale_format:
        given["a_scales"] = np.array([row.a_scales for row in rows], dtype=np.uint8)
        given["b_scales"] = np.array([row.b_scales for row in rows], dtype=np.uint8)
        given["scale_format"] = case.scale_format
    return given


def adversarial(case: Case) -> tuple[list[Row], Words]:
    """All rows of a case, and their results; computed once for all cases that are alike."""
    return _adversarial(case.like)


@functools.cache
def _adversarial(case: Case) -> tuple[list[Row], Words]:
    rows = list(maker(case).rows())
    return rows, results(rows, case)


def random_rows(case: Case, count: int, seed: int) -> list[Row]:
    """At least `count` rows of any bits, of finite ones and of the other families, none twice."""
    rows: list[Row] = []
    while len(rows) < count:
        source = maker(case, seed=seed)
        rows += source.rows()
        rows += [row for _ in range(5) for row in source.random_rows()]
        seed += 1_000_003
    return rows


def maker(case: Case, *, seed: int = 0, k: int | None = None) -> Any:
    """What makes the rows of a case."""
    from tests.arithmetic.group_families import Groups
    from tests.arithmetic.product_families import Products

    return (Groups if case.rules.group else Products)(case, seed=seed, k=k)
