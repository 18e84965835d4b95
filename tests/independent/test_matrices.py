"""Matrices of fused sums: each result is the one of ``machine``, which recorded data hold."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.independent import codes, machine, matrices
from tests.independent.tensor_cores import INSTRUCTIONS

CASES = [
    ("sm100.tcgen05.mxf8f6f4", "e4m3", "e4m3", "e8m0", 32),
    ("sm100.tcgen05.mxf8f6f4", "e5m2", "e2m1", "e8m0", 32),
    ("sm100.tcgen05.mxf4nvf4", "e2m1", "e2m1", "e8m0", 16),
    ("sm100.tcgen05.mxf4nvf4", "e2m1", "e2m1", "ue4m3", 16),
    ("sm100.tcgen05.mxf4", "e2m1", "e2m1", "e8m0", 32),
    ("sm100.tcgen05.f16", "bf16", "bf16", "", 0),
    ("sm90.wgmma.fp8", "e4m3", "e4m3", "", 0),
]


def sides(case: tuple[str, str, str, str, int], seed: int, *, any_code: bool) -> list[Any]:
    _, *elements, scale_format, block = case
    rng = np.random.default_rng(seed)
    result = []
    for name, lines in zip(elements, (5, 6), strict=True):
        element = codes.ELEMENTS[name]
        limit = 2 * element.sign_bit
        numbers = rng.integers(0, limit, (lines, 144))
        if name == "bf16" and not any_code:
            numbers = numbers & 0x807F | rng.integers(100, 150, (lines, 144)) << 7
        elif not any_code:
            numbers = np.where(numbers % element.sign_bit > element.largest, 0, numbers)
        scales = None
        if scale_format:
            low, high = (100, 150) if scale_format == "e8m0" else (0, 0x7F)
            if any_code:
                low, high = 0, 256
            scales = rng.integers(low, high, (lines, 144 // block))
        result.append(
            matrices.Side(
                codes=numbers,
                element=element,
                scales=scales,
                scale_format=scale_format or "e8m0",
                block=block or 32,
            )
        )
    return result


@pytest.mark.parametrize("any_code", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_each_result_is_that_of_the_machine(
    case: tuple[str, str, str, str, int], any_code: bool
) -> None:
    rules = INSTRUCTIONS[case[0]].rules
    for seed in range(3):
        a, b = sides(case, seed, any_code=any_code)
        c = np.random.default_rng(seed).integers(0, 1 << 32, (5, 6))
        if not any_code:
            c = c & 0x807FFFFF | 127 << 23
        size = 144 if a.scales is None else 128
        a, b = (
            dataclasses.replace(
                x,
                codes=x.codes[:, :size],
                scales=None if x.scales is None else x.scales[:, : size // x.block],
            )
            for x in (a, b)
        )
        result = matrices.contract(a, b, c, rules)
        for i, j in np.ndindex(5, 6):
            wanted = machine.chain(
                a.codes[i].tolist(),
                b.codes[j].tolist(),
                int(c[i, j]),
                rules,
                elements=(a.element, b.element),
                a_scales=() if a.scales is None else a.scales[i].tolist(),
                b_scales=() if b.scales is None else b.scales[j].tolist(),
                scale_format=a.scale_format,
                block=a.block,
            )[-1]
            assert result[i, j] == wanted, (i, j)


def test_descending_steps() -> None:
    """A term that the largest one pushes out is kept when it comes after something cancelled it."""
    rules = INSTRUCTIONS["sm100.tcgen05.f16"].rules
    a = np.zeros((1, 48), np.int64)
    a[0, [0, 16, 32]] = 0x4F80, 0xCF80, 0x3F80  # 2**32, -2**32, 1
    ones = matrices.Side(codes=np.full((1, 48), 0x3F80), element=codes.BF16)
    side = matrices.Side(codes=a, element=codes.BF16)
    start = matrices.zeros(1, 1)
    assert matrices.contract(side, ones, start, rules)[0, 0] == 0x3F800000
    assert matrices.contract(side, ones, start, rules, descending=True)[0, 0] == 0
