"""Matrix products of operands without any extreme, whole, against the slow machine.

Where all lanes of a product are harmless an engine may take a shorter way; among the rows of
product_rows there is always one that is not.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import matmul_bits
from tests.arithmetic.product_rows import Case, Row, arguments, results
from tests.independent import machine

MX = Case(instruction="sm100.tcgen05.mxf8f6f4", a="e4m3", b="e4m3", scale_format="e8m0")
NVFP4 = Case(
    instruction="sm100.tcgen05.mxf4nvf4", a="e2m1", b="e2m1", scale_format="ue4m3", block=16
)
QUIET = [
    MX,
    NVFP4,
    Case(instruction="sm100.tcgen05.f16", a="fp16", b="fp16"),
    Case(instruction="sm90.wgmma.fp8", a="e4m3", b="e5m2"),
    Case(instruction="sm90.wgmma.f16.f16out", a="fp16", b="fp16"),
    Case(instruction="sm80.mma.bf16", a="bf16", b="bf16"),
    Case(instruction="sm100.tcgen05.tf32", a="tf32", b="tf32"),
    Case(instruction="sm100.tcgen05.f8f6f4", a="e4m3", b="e4m3"),
    Case(instruction="sm100.tcgen05.mxf8f6f4", a="e2m3", b="e2m1", scale_format="e8m0"),
    Case(instruction="sm100.tcgen05.mxf4", a="e2m1", b="e2m1", scale_format="e8m0"),
    Case(instruction="sm120.mma.mxf4nvf4", a="e2m1", b="e2m1", scale_format="e8m0", block=16),
]


def in_jax(given: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


def quiet(case: Case, spread: int, m: int, n: int, steps: int) -> tuple[dict[str, Any], Any]:
    """Arguments of a matmul of finite operands, normal and within `spread` binades, and its result.

    A spread of 0 is elements of one binade, 12 what activations have.
    """
    rng = np.random.default_rng([spread, *case.name.encode()])
    k = steps * case.rules.terms
    sides = []
    for element, rows in zip(case.elements, (m, n), strict=True):
        half = min(spread, element.bias - 1) // 2
        field = element.bias + rng.integers(-half, half + 1, (rows, k))
        codes_ = field << element.fraction_bits | rng.integers(
            0, 1 << element.fraction_bits, (rows, k)
        )
        codes_ = np.minimum(codes_, element.largest) | element.sign_bit * rng.integers(
            0, 2, (rows, k)
        )
        shift = 13 if element.name == "tf32" else 0
        middle = {"e8m0": 127, "ue4m3": 0x38, None: 0}[case.scale_format]
        scales = middle + rng.integers(-(spread // 4), spread // 4 + 1, (rows, k // case.block))
        sides.append((codes_ << shift, scales))
    sizes = rng.normal(size=(m, n)).astype(np.float32) * (spread > 0)
    half_output = case.rules.output is machine.FLOAT16
    c = sizes.astype(np.float16).view(np.uint16) if half_output else sizes.view(np.uint32)
    (a, a_scales), (b, b_scales) = sides
    rows = [
        Row(
            why="quiet",
            a=a[i].tolist(),
            b=b[j].tolist(),
            a_scales=a_scales[i].tolist(),
            b_scales=b_scales[j].tolist(),
            c=int(c[i, j]),
        )
        for i in range(m)
        for j in range(n)
    ]
    given = arguments(rows[:1], case)
    operand = {
        "a": a.astype(given["a"].dtype),
        "b": b.T.astype(given["b"].dtype),
        "c": c,
        "instruction": case.instruction,
        "a_format": case.a,
        "b_format": case.b,
    }
    if case.scale_format:
        operand["a_scales"] = a_scales.astype(np.uint8)
        operand["b_scales"] = b_scales.T.astype(np.uint8)
        operand["scale_format"] = case.scale_format
    return operand, results(rows, case).reshape(m, n)


@pytest.mark.parametrize("spread", [0, 4, 12, 24])
@pytest.mark.parametrize("case", QUIET, ids=lambda case: case.name)
def test_quiet_operands(case: Case, spread: int) -> None:
    given, wanted = quiet(case, spread, 9, 13, 4)
    np.testing.assert_array_equal(matmul_bits(**given), wanted)


@pytest.mark.parametrize("spread", [0, 12])
@pytest.mark.parametrize("case", [MX, NVFP4], ids=lambda case: case.name)
def test_quiet_operands_in_jax(case: Case, spread: int) -> None:
    given, wanted = quiet(case, spread, 32, 32, 4)
    np.testing.assert_array_equal(np.asarray(matmul_bits(**in_jax(given))), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("spread", [0, 1, 2, 3, 4, 6, 8, 12, 16, 24])
@pytest.mark.parametrize("case", QUIET, ids=lambda case: case.name)
def test_many_quiet_operands(case: Case, spread: int) -> None:
    given, wanted = quiet(case, spread, 64, 48, 8)
    np.testing.assert_array_equal(matmul_bits(**given), wanted)
    np.testing.assert_array_equal(np.asarray(matmul_bits(**in_jax(given))), wanted)
