"""`error_bound` against exact rationals: never exceeded, 0 where nothing can be lost, and not far above."""

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.arithmetic import INSTRUCTIONS, error_bound, fused_dot, interval, matmul_error_bound
from flamia_ref.formats import FORMATS, decode, encode
from tests.arithmetic.product_rows import SOME, Case, adversarial, arguments

DISTINCT = [case for case in SOME if case.like is case]
ONES = list({(case.rules, case.scale_format): case for case in DISTINCT}.values())

# Mean bound over mean error, K = 256, of gaussian operands: as measured, and a little more.
TIGHT = {
    "sm90.wgmma.fp8": 1.9,
    "sm90.wgmma.f16": 2.4,
    "sm90.wgmma.tf32": 2.6,
    "sm100.tcgen05.f16": 4.0,
}


def name(case: Case) -> str:
    return case.name


def accumulators(bits: Any) -> npt.NDArray[np.float64]:
    kind = np.float16 if bits.dtype == np.uint16 else np.float32
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.asarray(bits.view(kind), dtype=np.float64)


def exact(given: dict[str, Any], row: int) -> Fraction:
    """c plus all products of one row."""
    total = Fraction(float(accumulators(given["c_bits"])[row]))
    numbers = [decode(given[x][row], given[f"{x}_format"], dtype=np.float64) for x in ("a", "b")]
    factors = [Fraction(1)] * len(numbers[0])
    if given.get("a_scales") is not None:
        form = given.get("scale_format") or "e8m0"
        scales = [decode(given[f"{x}_scales"][row], form, dtype=np.float64) for x in ("a", "b")]
        block = -(-len(factors) // len(scales[0]))
        factors = [
            Fraction(float(scales[0][k // block])) * Fraction(float(scales[1][k // block]))
            for k in range(len(factors))
        ]
    for x, y, factor in zip(*numbers, factors, strict=True):
        if x and y:
            total += Fraction(float(x)) * Fraction(float(y)) * factor
    return total


def _check(given: dict[str, Any], results: Any) -> int:
    """The number of rows with a bound; each bound is checked."""
    bound = error_bound(**given)
    assert bound.dtype == np.float64
    values, bounded = accumulators(results), np.flatnonzero(np.isfinite(bound))
    assert np.isfinite(values[bounded]).all()
    for row in bounded.tolist():
        error = abs(Fraction(float(values[row])) - exact(given, row))
        assert error <= Fraction(float(bound[row])), (row, float(error), bound[row])
    return len(bounded)


@pytest.mark.parametrize("case", ONES, ids=name)
def test_at_the_edges_of_every_rule(case: Case) -> None:
    rows, wanted = adversarial(case)
    assert _check(arguments(rows[::12], case), wanted[::12]) > len(rows) // 12 * 0.4


@pytest.mark.nightly
@pytest.mark.parametrize("case", DISTINCT, ids=name)
def test_all_rows_at_the_edges_of_every_rule(case: Case) -> None:
    rows, wanted = adversarial(case)
    _check(arguments(rows, case), wanted)


def gaussian(instruction: str, rows: int, k: int, spread: int, seed: int) -> dict[str, Any]:
    random = np.random.default_rng([seed, *instruction.encode()])
    element = FORMATS[INSTRUCTIONS[instruction].operand_formats[-1]]
    a, b = (
        random.standard_normal((rows, k))
        * np.exp2(random.integers(-spread, spread + 1, (rows, k)).astype(np.float64))
        for _ in range(2)
    )
    half = instruction.endswith(".f16out")
    c = random.standard_normal(rows).astype(np.float16 if half else np.float32)
    return {
        "a": encode(a, element),
        "b": encode(b, element),
        "c_bits": c.view(np.uint16 if half else np.uint32),
        "instruction": instruction,
        "a_format": element.name,
        "b_format": element.name,
    }


PLAIN = [x for x, rules in INSTRUCTIONS.items() if not (rules.scalings and rules.terms)]


@pytest.mark.parametrize("instruction", PLAIN)
@pytest.mark.parametrize("spread", [0, 5])
def test_chains(instruction: str, spread: int) -> None:
    length = INSTRUCTIONS[instruction].terms or 8
    given = gaussian(instruction, 3, 5 * length, spread, seed=1)
    assert _check(given, fused_dot(**given)) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("instruction", PLAIN)
@pytest.mark.parametrize("spread", [0, 2, 5, 9])
def test_chains_thousands(instruction: str, spread: int) -> None:
    length = INSTRUCTIONS[instruction].terms or 8
    given = gaussian(instruction, 500, 5 * length, spread, seed=2)
    _check(given, fused_dot(**given))


@pytest.mark.parametrize("instruction", TIGHT)
def test_it_is_tight(instruction: str) -> None:
    given = gaussian(instruction, 40, 256, 0, seed=3)
    if instruction == "sm100.tcgen05.f16":  # bfloat16, the wider range
        given = gaussian("sm90.wgmma.bf16", 40, 256, 0, seed=3) | {"instruction": instruction}
    results = accumulators(fused_dot(**given))
    errors = [float(abs(Fraction(float(x)) - exact(given, i))) for i, x in enumerate(results)]
    assert error_bound(**given).mean() < TIGHT[instruction] * np.mean(errors)


@pytest.mark.parametrize("instruction", PLAIN)
def test_nothing_is_lost_of_small_integers(instruction: str) -> None:
    random = np.random.default_rng(4)
    given = gaussian(instruction, 6, 4 * (INSTRUCTIONS[instruction].terms or 8), 0, seed=4)
    for side in ("a", "b"):
        x = random.integers(-1, 2, given[side].shape).astype(np.float64)
        given[side] = encode(x, given[f"{side}_format"])
    half = instruction.endswith(".f16out")
    c = random.integers(-9, 10, 6).astype(np.float16 if half else np.float32)
    given["c_bits"] = c.view(np.uint16 if half else np.uint32)
    assert (error_bound(**given) == 0).all()


def test_rows_without_a_bound() -> None:
    given = gaussian("sm100.tcgen05.f16", 5, 16, 0, seed=5)
    given |= {"a_format": "bf16", "b_format": "bf16"}
    for side in ("a", "b"):
        given[side] = encode(np.ones((5, 16)), "bf16")
    given["a"][0, 3], given["a"][1, 3] = 0x7FC0, 0x7F80  # NaN, infinity
    given["a"][2], given["b"][2] = 0x7F00, 0x4000  # 16 times 2^127 times 2
    given["c_bits"] = np.array([0, 0, 0, 0x7F800000, 0x3F800000], dtype=np.uint32)
    np.testing.assert_array_equal(error_bound(**given), [np.inf, np.inf, np.inf, np.inf, 0.0])


@pytest.mark.parametrize("instruction", ["sm90.wgmma.fp8", "sm100.tcgen05.mxf4nvf4"])
def test_a_matrix_product_has_the_bounds_of_its_dot_products(instruction: str) -> None:
    random = np.random.default_rng(6)
    scaled = instruction.endswith("nvf4")
    a, b = (random.integers(0, 16 if scaled else 0x70, (4, 128)).astype(np.uint8) for _ in "ab")
    forms = (
        {"a_format": "e2m1", "b_format": "e2m1"}
        if scaled
        else {
            "a_format": "e4m3",
            "b_format": "e4m3",
        }
    )
    scales = (
        [random.integers(0, 0x7F, (4, 8)).astype(np.uint8) for _ in "ab"] if scaled else [None] * 2
    )
    form = "ue4m3" if scaled else None
    c = random.standard_normal((4, 4)).astype(np.float32).view(np.uint32)
    whole = matmul_error_bound(
        a,
        b.T,
        instruction,
        c,
        a_scales=scales[0],
        b_scales=None if scales[1] is None else scales[1].T,
        scale_format=form,
        **forms,
    )
    for shift in range(4):
        place = (np.arange(4) + shift) % 4
        rows = error_bound(
            a,
            b[place],
            c[np.arange(4), place],
            instruction,
            a_scales=scales[0],
            b_scales=None if scales[1] is None else scales[1][place],
            scale_format=form,
            **forms,
        )
        np.testing.assert_array_equal(whole[np.arange(4), place], rows)
    none = matmul_error_bound(
        a,
        b.T,
        instruction,
        a_scales=scales[0],
        b_scales=None if scales[1] is None else scales[1].T,
        scale_format=form,
        **forms,
    )
    assert none.shape == (4, 4)


@pytest.mark.parametrize("instruction", ["exact", "float32"])
def test_nearest_becomes_infinite_from_half_a_unit_above_the_largest(instruction: str) -> None:
    """2^128 - 2^104 + 2^103 is halfway to 2^128 and goes there; with less it stays."""
    a, b = (np.array([[x]] * 2, np.float32).view(np.uint32) for x in (2.0**100, 8.0))
    a[1] -= np.uint32(1 << 12)  # one 2048th
    c = np.full(2, 0x7F7FFFFF, np.uint32)
    for sign in (np.uint32(0), np.uint32(1 << 31)):
        given: dict[str, Any] = {"instruction": instruction, "a_format": "fp32", "b_format": "fp32"}
        given |= {"a": a ^ sign, "b": b, "c_bits": c ^ sign}
        assert fused_dot(**given).tolist() == [0x7F800000 | int(sign), 0x7F7FFFFF | int(sign)]
        bound = error_bound(**given)
        assert bound[0] == np.inf
        assert 2.0**103 <= bound[1] <= 2.0**103 * (1 + 2.0**-20)
        given["c"] = np.diag(given.pop("c_bits"))
        np.testing.assert_array_equal(np.diag(matmul_error_bound(**(given | {"b": b.T}))), bound)


HALVES = ["sm90.wgmma.f16.f16out", "sm80.mma.f16.f16out"]


@pytest.mark.parametrize("instruction", HALVES)
def test_float16_becomes_infinite_from_65520(instruction: str) -> None:
    length = INSTRUCTIONS[instruction].terms or 8
    a, b = (encode(np.zeros((3, length)), "fp16") for _ in range(2))
    a[:, 0], b[:, 0] = encode(np.array([16.0, 8.0, 0.0]), "fp16"), encode(np.ones(3), "fp16")
    c = np.full(3, 65504.0, np.float16).view(np.uint16)
    bound = error_bound(a, b, c, instruction, a_format="fp16", b_format="fp16")
    np.testing.assert_array_equal(np.isfinite(bound), [False, True, True])
    results = accumulators(fused_dot(a, b, c, instruction, a_format="fp16", b_format="fp16"))
    np.testing.assert_array_equal(results, [np.inf, 65504.0, 65504.0])
    assert 8.0 <= bound[1] <= 16.001


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_nothing_to_bound(instruction: str) -> None:
    rules = INSTRUCTIONS[instruction]
    element = FORMATS[rules.operand_formats[0]]
    forms: dict[str, Any] = {"a_format": element.name, "b_format": element.name}
    k = 2 * (rules.terms or 64)
    for m, n in ((0, 4), (4, 0), (0, 0)):
        given = dict(forms)
        if rules.scalings:
            scaling = rules.scalings[-1]
            blocks = k // scaling.block
            given |= {"scale_format": scaling.format}
            given |= {"a_scales": np.zeros((m, blocks), np.uint8)}
            given |= {"b_scales": np.zeros((blocks, n), np.uint8)}
        a, b = np.zeros((m, k), element.code_dtype), np.zeros((k, n), element.code_dtype)
        found = matmul_error_bound(a, b, instruction, **given)
        assert found.shape == (m, n)
        assert found.dtype == np.float64
    kind = np.uint16 if instruction.endswith(".f16out") else np.uint32
    if rules.scalings:
        given |= {"b_scales": given["a_scales"]}
    assert error_bound(a, a, np.zeros(0, kind), instruction, **given).shape == (0,)


def test_no_products() -> None:
    empty = np.zeros((2, 0), dtype=np.uint8)
    c = np.array([0x3F800001, 0x7FC00000], dtype=np.uint32)
    forms = {"a_format": "e4m3", "b_format": "e4m3"}
    found = error_bound(empty, empty, c, "sm90.wgmma.fp8", **forms)
    np.testing.assert_array_equal(found, [0.0, np.inf])


def test_refusals() -> None:
    codes, c = np.zeros((2, 32), dtype=np.uint8), np.zeros(2, dtype=np.uint32)
    forms: dict[str, Any] = {"a_format": "e4m3", "b_format": "e4m3"}
    with pytest.raises(ValueError, match="both must be the same"):
        error_bound(codes, codes[:1], c, "sm90.wgmma.fp8", **forms)
    with pytest.raises(TypeError, match="c_bits holds"):
        error_bound(codes, codes, c.astype(np.float32), "sm90.wgmma.fp8", **forms)
    for wrong in (None, interval.exactly(np.zeros(2))):
        with pytest.raises(TypeError, match=r"c_bits is a .*; it must be a numpy or JAX array"):
            error_bound(codes, codes, wrong, "sm90.wgmma.fp8", **forms)
    with pytest.raises(ValueError, match="they must be"):
        matmul_error_bound(codes, np.zeros((64, 2), np.uint8), "sm90.wgmma.fp8", **forms)
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda a: error_bound(a, codes, c, "sm90.wgmma.fp8", **forms))(jnp.asarray(codes))
    on_device = error_bound(jnp.asarray(codes), codes, c, "sm90.wgmma.fp8", **forms)
    assert isinstance(on_device, np.ndarray)
