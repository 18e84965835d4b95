"""`fused_dot` against the slow machine of tests/independent, at the edges of every rule."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import fused_dot, matmul_bits
from tests.arithmetic.group_families import Groups
from tests.arithmetic.product_families import Products
from tests.arithmetic.product_rows import (
    CASES,
    DISTINCT,
    SOME,
    SOME_DISTINCT,
    Case,
    Row,
    adversarial,
    arguments,
    maker,
    random_rows,
    results,
)
from tests.independent import float32, machine

MX = Case(instruction="sm100.tcgen05.mxf8f6f4", a="e4m3", b="e4m3", scale_format="e8m0", block=32)
F16 = Case(instruction="sm100.tcgen05.f16", a="fp16", b="fp16")
NVFP4 = Case(
    instruction="sm100.tcgen05.mxf4nvf4", a="e2m1", b="e2m1", scale_format="ue4m3", block=16
)
# One of each way through the engine; the others are nightly.
IN_JAX = [
    Case(instruction="sm90.wgmma.fp8", a="e4m3", b="e5m2"),
    Case(instruction="sm90.wgmma.f16.f16out", a="fp16", b="fp16"),
    Case(instruction="sm100.tcgen05.mxf8f6f4", a="e5m2", b="e5m2", scale_format="e8m0"),
    NVFP4,
]
MANY = 100_000
"""Random and adversarial rows a night, for each set of rules and scales."""


def name(case: Case) -> str:
    return case.name


def check(rows: list[Row], got: Any, wanted: Any) -> None:
    for index in np.flatnonzero(np.asarray(got) != wanted).tolist():
        row = rows[index]
        raise AssertionError(
            f"row {index} ({row.why}): {int(got[index]):#010x}, not {int(wanted[index]):#010x}; {row}"
        )
    assert got.dtype == wanted.dtype


def in_jax(given: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


@pytest.mark.parametrize("case", SOME_DISTINCT, ids=name)
def test_numpy(case: Case) -> None:
    """Every instruction with the same rules, on one set of rows."""
    rows, wanted = adversarial(case)
    assert len(rows) > 500
    given = arguments(rows, case)
    for alike in SOME:
        if alike.like is case:
            check(rows, fused_dot(**given | {"instruction": alike.instruction}), wanted)


@pytest.mark.parametrize("case", IN_JAX, ids=name)
def test_jax(case: Case) -> None:
    rows, wanted = adversarial(case)
    check(rows, fused_dot(**in_jax(arguments(rows, case))), wanted)


@pytest.mark.parametrize(
    "case",
    [
        Case(instruction="sm100.tcgen05.f16", a="bf16", b="bf16"),
        Case(instruction="sm100.tcgen05.tf32", a="tf32", b="tf32"),
        IN_JAX[2],
    ],
    ids=name,
)
def test_rows_alone(case: Case) -> None:
    """What an engine does for all rows at once may depend on the most difficult one."""
    rows, wanted = adversarial(case)
    given = arguments(rows, case)
    sliced = [key for key, x in given.items() if isinstance(x, np.ndarray)]
    for index in range(0, len(rows), 4):
        part = {key: given[key][index : index + 1] for key in sliced}
        check(rows[index:], fused_dot(**given | part), wanted[index : index + 1])


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=name)
def test_everything_that_is_taken(case: Case) -> None:
    rows, wanted = adversarial(case)
    given = arguments(rows, case)
    check(rows, fused_dot(**given), wanted)
    check(rows, fused_dot(**in_jax(given)), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("case", DISTINCT, ids=name)
def test_many_rows(case: Case) -> None:
    """Every instruction with the same rules, on one set of rows."""
    pairs = [x for x in DISTINCT if (x.rules, x.scale_format) == (case.rules, case.scale_format)]
    rows = random_rows(case, MANY // len(pairs), seed=1)
    wanted = results(rows, case)
    for alike in CASES:
        if alike.like is case:
            given = arguments(rows, alike)
            check(rows, fused_dot(**given), wanted)
            check(rows, fused_dot(**in_jax(given)), wanted)


def test_the_rows_reach_every_kind_of_result() -> None:
    rows, wanted = adversarial(MX)
    by_value = dict(zip(wanted.tolist(), rows, strict=True))
    assert {0, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF} <= by_value.keys()
    assert {float32.INFINITY, float32.MINUS_INFINITY, float32.NAN} <= by_value.keys()
    assert float32.SIGN not in by_value  # a zero is +0
    for end, result in (
        ("largest + 2^104", float32.INFINITY),
        ("largest + 2^103", 0x7F7FFFFF),
        ("largest + 2 * 2^103", float32.INFINITY),
    ):
        found = {int(x) for row, x in zip(rows, wanted, strict=True) if row.why == end}
        assert found == {result, result | float32.SIGN}


def test_the_rows_of_a_float16_output_reach_every_kind_of_result() -> None:
    case = IN_JAX[1]
    rows, wanted = adversarial(case)
    found = set(wanted.tolist())
    assert {0, 1, 0x8001, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7FFF} <= found
    assert 0x8000 not in found
    for end, result in (("largest + 2^3", 0x7BFF), ("largest + 2^4", 0x7C00)):  # 65504 + 16
        values = {int(x) for row, x in zip(rows, wanted, strict=True) if row.why == end}
        assert values == {result, result | 0x8000}


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 9, 17])
@pytest.mark.parametrize("case", [MX, F16, NVFP4, IN_JAX[1]], ids=name)
def test_any_number_of_steps(case: Case, steps: int) -> None:
    source = maker(case, seed=steps, k=steps * case.rules.terms)
    rows = [*source.any_finite()][:: 1 + steps // 3] + [*source.any_bits()]
    given, wanted = arguments(rows, case), results(rows, case)
    assert given["a"].shape == (len(rows), steps * case.rules.terms)
    check(rows, fused_dot(**given), wanted)
    transposed = {name: given[name].T for name in ("b", "b_scales") if name in given}
    square = matmul_bits(
        **{name: x for name, x in (given | transposed).items() if name != "c_bits"},
        c=np.tile(given["c_bits"][:, None], len(rows)),
    )
    check(rows, square.diagonal(), wanted)


@pytest.mark.parametrize("steps", [0, 9])
def test_any_number_of_steps_in_jax(steps: int) -> None:
    rows = [*maker(MX, seed=steps, k=32 * steps).any_finite()]
    check(rows, fused_dot(**in_jax(arguments(rows, MX))), results(rows, MX))


@pytest.mark.parametrize("k", [1, 15, 17, 33, 70])
@pytest.mark.parametrize("case", [MX, F16, NVFP4, IN_JAX[1]], ids=name)
def test_a_part_of_a_step_is_refused_and_may_be_padded_with_zeros(case: Case, k: int) -> None:
    source = maker(case, seed=k, k=k)
    rows = [*source.any_finite(), *source.any_bits()]
    given, wanted = arguments(rows, case), results(rows, case)
    terms, whole = case.rules.terms, -(-k // case.rules.terms) * case.rules.terms
    with pytest.raises(ValueError, match=f"adds {terms} products a step: pad .* to {whole}"):
        fused_dot(**given)
    for side in "ab":
        given[side] = np.pad(given[side], ((0, 0), (0, whole - k)))
        if case.scale_format:
            blocks = whole // case.block - given[f"{side}_scales"].shape[1]
            given[f"{side}_scales"] = np.pad(given[f"{side}_scales"], ((0, 0), (0, blocks)))
    check(rows, fused_dot(**given), wanted)


@pytest.mark.parametrize(
    ("case", "xp", "shape"),
    [
        (case, xp, shape)
        for case in (MX, NVFP4, IN_JAX[1])
        for xp in (np, jnp)
        for shape in ((0, 64, 3), (3, 64, 0), (0, 0, 0), (2, 0, 3))
        if xp is np or (case is MX and shape[0] > 0)
    ],
)
def test_empty_products(case: Case, xp: Any, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    blocks = -(-k // case.block)
    operand = np.uint16 if case.a == "fp16" else np.uint8
    scales = {}
    if case.scale_format:
        scales = {
            "a_scales": xp.zeros((m, blocks), dtype=np.uint8),
            "b_scales": xp.zeros((blocks, n), dtype=np.uint8),
            "scale_format": case.scale_format,
        }
    got = matmul_bits(
        xp.zeros((m, k), dtype=operand),
        xp.zeros((k, n), dtype=operand),
        case.instruction,
        a_format=case.a,
        b_format=case.b,
        **scales,
    )
    assert got.shape == (m, n)
    assert got.dtype == (np.uint16 if case is IN_JAX[1] else np.uint32)
    assert not got.any()


@pytest.mark.parametrize(("case", "xp"), [(MX, np), (NVFP4, np), (MX, jnp)])
def test_zero_codes_leave_the_accumulator_as_it_is(case: Case, xp: Any) -> None:
    """What makes padded and masked lanes neutral: any c but -0 and NaN comes out bit for bit."""
    rng = np.random.default_rng(3)
    c = rng.integers(0, 1 << 32, 4000, dtype=np.uint32)
    c = np.concatenate([c, c & 0x807FFFFF, np.arange(200, dtype=np.uint32), [0x7F800000]])
    c = np.where(c == float32.SIGN, 0, np.where((c & 0x7FFFFFFF) > 0x7F800000, 0, c))
    c = c.astype(np.uint32)
    zeros = rng.integers(0, 2, (2, len(c), 64)).astype(np.uint8)
    zeros = zeros << (3 if case is NVFP4 else 7)
    scales = rng.integers(0, 0x7F if case is NVFP4 else 255, (2, len(c), 64 // case.block))
    got = fused_dot(
        *(xp.asarray(x) for x in (*zeros, c)),
        case.instruction,
        a_format=case.a,
        b_format=case.b,
        a_scales=xp.asarray(scales[0].astype(np.uint8)),
        b_scales=xp.asarray(scales[1].astype(np.uint8)),
        scale_format=case.scale_format,
    )
    np.testing.assert_array_equal(got, c)


def test_a_wgmma_of_zeros_cuts_its_accumulator() -> None:
    """What SageAttention's authors saw on Hopper: A = B = 0 clears the low ten bits of c."""
    c = np.random.default_rng(4).integers(0, 0x7F800000, 1000, dtype=np.uint32)
    zeros = np.zeros((1000, 32), dtype=np.uint8)
    got = fused_dot(zeros, zeros, c, "sm90.wgmma.fp8", a_format="e4m3", b_format="e4m3")
    np.testing.assert_array_equal(got, c & np.uint32(0xFFFFFC00))


def test_every_case_has_its_maker() -> None:
    for case in CASES:
        assert isinstance(maker(case), Groups if case.rules.group else Products)
        assert case.k % case.rules.terms == 0
        assert isinstance(case.rules, machine.Rules)
