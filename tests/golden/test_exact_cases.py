"""In cases with the flag "exact" every sum is exact in float32, in any order: shown by integers.

Each operand is m * 2^e with an odd integer m. The products of a sum are multiples of its smallest
2^(e + e'), and so is every partial sum. Where the magnitudes of all products add up to less than 2^24
such units, no partial sum has more than 24 bits, whatever the order or the tree: nothing is rounded.
"""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from flamia_ref.golden import SUITES
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.copies import Copy, copies
from flamia_ref.golden.dataflow import dataflow
from flamia_ref.golden.simulation import simulate
from flamia_ref.golden.stage import View

EXACT = {case.name: case for case in SUITES["standard"] if "exact" in case.flags}
# One that takes no scales, one with a scale a block, one with folded scales, one in both.
SHOWN = ("bf16-fa4", "cudnn-mxfp8", "flamia-mxfp8-folded", "cudnn-mxfp8-pv-bf16")

_BITS = {View.F8_E4M3: ml_dtypes.float8_e4m3fn, View.BF16: ml_dtypes.bfloat16}

Values = np.ndarray[Any, np.dtype[Any]]


def lowest(x: Values) -> Values:
    """The exponent of the lowest bit of each number; far above all others for 0."""
    mantissa, exponent = np.frexp(x)
    digits = np.abs(mantissa * 2.0**53).astype(np.int64)
    zeros = np.log2(np.maximum(digits & -digits, 1).astype(np.float64))
    return np.where(digits, exponent - 53 + zeros, 10_000).astype(np.int64)


def worst(a: Values, b: Values) -> float:
    """The largest sum of magnitudes of a product [i, k] [k, j], in units of its lowest bit."""
    sums = np.abs(a) @ np.abs(b)
    units = np.full(sums.shape, 10_000, np.int64)
    low_a, low_b = lowest(a), lowest(b)
    for k in range(a.shape[1]):
        units = np.minimum(units, low_a[:, k, None] + low_b[None, k])
    return float((sums * 2.0 ** -np.where(sums > 0, units, 0).astype(np.float64)).max())


def as_value(bits: Values, view: View) -> Values:
    return np.asarray(bits.view(_BITS[view]), np.float64)


class Stages:
    """The stages of one head and one document as numbers."""

    def __init__(self, case: CaseSpec, recipe: str, document: int) -> None:
        self.tensors = simulate(case, RECIPES[recipe])
        self.stages = dataflow(RECIPES[recipe]).stages
        self.copies = copies(RECIPES[recipe])
        self.case, self.document = case, document
        self.rows = slice(*case.starts[document : document + 2])

    def blocks(self) -> slice:
        before = sum(-(-length // 32) for length in self.case.lengths[: self.document])
        return slice(before, before - (-self.case.lengths[self.document] // 32))

    def named(self, name: str) -> Values:
        stage = self.stages[name]
        if stage.per_document:
            return np.asarray(self.tensors[f"{name}.{self.document}"][0])
        if stage.axes[0] == "heads":
            return np.asarray(self.tensors[name][0, self.rows])
        rows = self.blocks() if stage.axes[0].endswith("_blocks") else self.rows
        return np.asarray(self.tensors[name][rows, 0])

    def operand(self, product: str, tensor: str) -> Values:
        """An operand [token, channel] or [query, key] as a product multiplies it."""
        copy = next(x for x in self.copies if x.tensor == tensor and product in x.products)
        if not copy.coded:
            return as_value(self.named({"do": "dout"}.get(tensor, tensor)), View.BF16)
        values = as_value(self.named(copy.codes), self.stages[copy.codes].view)
        return values * self.scales(copy, values.shape) if self.scaled(copy, product) else values

    @staticmethod
    def scaled(copy: Copy, product: str) -> bool:
        return copy.scaled and product not in copy.folded

    def scales(self, copy: Copy, shape: tuple[int, ...]) -> Values:
        scales = 2.0 ** (self.named(copy.scales).astype(np.float64) - 127)
        for axis, size in enumerate(shape):
            if scales.shape[axis] != size:
                scales = np.repeat(scales, 32 if scales.shape[axis] > 1 else size, axis)
            scales = scales.take(range(size), axis)
        return scales


@cache
def sums(name: str, recipe: str) -> dict[str, float]:
    """The worst sum of each kind in a case, in units of its lowest bit."""
    case = EXACT[name]
    found: dict[str, float] = {}
    for document in range(len(case.lengths)):
        x = Stages(case, recipe, document)
        pairs = {
            "s": (x.operand("s", "q"), x.operand("s", "k").T),
            "o": (x.operand("o", "p"), x.operand("o", "v")),
            "dp": (x.operand("dp", "do"), x.operand("dp", "v").T),
            "dv": (x.operand("dv", "p").T, x.operand("dv", "do")),
            "dq": (x.operand("dq", "ds"), x.operand("dq", "k")),
            "dk": (x.operand("dk", "ds").T, x.operand("dk", "q")),
            "row_sum": (x.named("p").astype(np.float64), np.ones((case.lengths[document], 1))),
        }
        for key, (a, b) in pairs.items():
            found[key] = max(found.get(key, 0.0), worst(a, b))
        dout, out = (as_value(x.named(one), View.BF16) for one in ("dout", "out"))
        of_rows = [worst(dout[i : i + 1], out[i : i + 1].T) for i in range(len(dout))]
        found["delta"] = max(found.get("delta", 0.0), *of_rows)
    return found


def test_the_measure_is_right() -> None:
    assert lowest(np.array([1.0, 0.75, 6.0, 0.0, -5.0])).tolist() == [0, -2, 1, 10_000, 0]
    # 3 * 0.5 + 1 * 0.25 = 7 quarters.
    assert worst(np.array([[3.0, 1.0]]), np.array([[0.5], [0.25]])) == 7


@pytest.mark.parametrize("recipe", SHOWN)
@pytest.mark.parametrize("name", EXACT)
def test_every_sum_is_exact(name: str, recipe: str) -> None:
    found = sums(name, recipe)
    assert {key: value for key, value in found.items() if not value < 2**24} == {}
    assert found["s"] > 0 or name != "exact-scores"
    assert min(found["o"], found["row_sum"]) > 1


def test_other_cases_are_not_exact() -> None:
    EXACT["odd-scale"] = next(case for case in SUITES["standard"] if case.name == "odd-scale")
    assert sums("odd-scale", "bf16-fa4")["row_sum"] > 2**24
