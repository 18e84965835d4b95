"""K that is no whole number of steps: refused, and the padding that the message asks for changes no bit.

The slow machine of tests/independent takes the short last step as it is.
"""

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import Order, fused_dot, matmul_bits
from flamia_ref.formats import BlockTensor, quantize
from tests.arithmetic.product_rows import Case, Row, Words, arguments, maker, results
from tests.independent import tensor_cores

CASES = [
    Case(instruction="sm100.tcgen05.mxf8f6f4", a="e4m3", b="e5m2", scale_format="e8m0"),
    Case(instruction="sm100.tcgen05.mxf4", a="e2m1", b="e2m1", scale_format="e8m0"),
    Case(instruction="sm100.tcgen05.mxf4nvf4", a="e2m1", b="e2m1", scale_format="ue4m3", block=16),
    Case(instruction="sm120.mma.mxf4nvf4", a="e2m1", b="e2m1", scale_format="e8m0", block=16),
    Case(instruction="sm90.wgmma.fp8", a="e4m3", b="e5m2"),
    Case(instruction="sm100.tcgen05.f16", a="bf16", b="bf16"),
    Case(instruction="sm80.mma.tf32", a="tf32", b="tf32"),
    Case(instruction="sm90.wgmma.f16.f16out", a="fp16", b="fp16"),
]
MX = CASES[0]
MESSAGE = re.compile(
    r"(?P<side>[ab]) has K of (?P<k>\d+); (?P<name>\S+) adds (?P<terms>\d+) products a step: "
    r"pad both operands along K with code (?P<code>\d+) to (?P<whole>\d+)"
    r"(, and their scales with code (?P<scale>\d+))?"
)


def name(x: Any) -> str:
    return x.name if isinstance(x, Case) else str(x)


def lengths(case: Case) -> list[int]:
    """K around a step and in the middle of one, of a block and of a group."""
    terms = case.rules.terms
    return sorted({1, terms // 2, terms - 1, terms + 1, 2 * terms + terms // 2 + 1} - {terms})


@functools.cache
def rows_of(case: Case, k: int) -> tuple[list[Row], Words]:
    source = maker(case, seed=k, k=k)
    rows = [*itertools.islice(source.any_finite(), 30), *itertools.islice(source.any_bits(), 30)]
    return rows, results(rows, case)


def padding(call: Any, given: dict[str, Any], case: Case, k: int) -> dict[str, int]:
    """What the refusal asks for, all parts of it checked."""
    with pytest.raises(ValueError, match="products a step") as raised:
        call(**given)
    found = MESSAGE.fullmatch(str(raised.value))
    assert found, str(raised.value)
    assert found["name"] == case.instruction
    assert found["side"] == "a"
    terms, whole = int(found["terms"]), int(found["whole"])
    assert (int(found["k"]), terms) == (k, case.rules.terms)
    assert whole % terms == 0
    assert 0 < whole - k < terms
    assert (found["scale"] is not None) == (case.scale_format is not None)
    return {"whole": whole, "code": int(found["code"]), "scale": int(found["scale"] or 0)}


def padded(given: dict[str, Any], told: dict[str, int], case: Case) -> dict[str, Any]:
    """Row-wise arguments with K and the blocks of scales filled up as told."""
    result = dict(given)
    blocks = -(-told["whole"] // case.block)
    for array, size, value in (
        *((side, told["whole"], told["code"]) for side in "ab"),
        *((f"{side}_scales", blocks, told["scale"]) for side in "ab"),
    ):
        if array in given:
            x = given[array]
            filled = np.full((len(x), size), value, dtype=x.dtype)
            filled[:, : x.shape[1]] = x
            result[array] = filled
    return result


@pytest.mark.parametrize(
    ("case", "k"), [(case, k) for case in CASES for k in lengths(case)], ids=name
)
def test_rows(case: Case, k: int) -> None:
    rows, wanted = rows_of(case, k)
    given = arguments(rows, case)
    told = padding(fused_dot, given, case, k)
    given = padded(given, told, case)
    got = fused_dot(**given)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)
    steps = told["whole"] // case.rules.terms
    np.testing.assert_array_equal(fused_dot(**given, order=Order.ascending(steps)), wanted)


@pytest.mark.parametrize("case", [MX, CASES[2], CASES[7]], ids=name)
def test_matrices(case: Case) -> None:
    """Element (i, i) is the sum of row i, and b is given as a transposed view."""
    k = 2 * case.rules.terms + 5
    rows, wanted = rows_of(case, k)

    def product(**given: Any) -> Any:
        columns = {array: given[array].T for array in ("b", "b_scales") if array in given}
        c = given.pop("c_bits")
        return matmul_bits(**given | columns, c=np.tile(c[:, None], len(c)))

    given = arguments(rows, case)
    told = padding(product, dict(given), case, k)
    got = product(**padded(given, told, case))
    np.testing.assert_array_equal(got.diagonal(), wanted)


def test_jax() -> None:
    k = 70
    rows, wanted = rows_of(MX, k)
    given = arguments(rows, MX)

    def run(**given: Any) -> Any:
        arrays = {x: jnp.asarray(y) for x, y in given.items() if isinstance(y, np.ndarray)}
        rest = {x: y for x, y in given.items() if x not in arrays}
        return jax.jit(lambda arrays: fused_dot(**arrays, **rest))(arrays)

    told = padding(run, given, MX, k)
    np.testing.assert_array_equal(run(**padded(given, told, MX)), wanted)


def test_more_padding_than_asked_for() -> None:
    """Whole steps of zeros leave the accumulator as it is, where it holds all bits of c."""
    rows, wanted = rows_of(MX, 33)
    given = padded(arguments(rows, MX), {"whole": 160, "code": 0, "scale": 0}, MX)
    np.testing.assert_array_equal(fused_dot(**given), wanted)


@pytest.mark.parametrize("scale", [0, 1, 127, 254])
def test_any_scale_of_zeros_will_do_but_nan(scale: int) -> None:
    rows, wanted = rows_of(MX, 33)
    given = padded(arguments(rows, MX), {"whole": 96, "code": 0, "scale": scale}, MX)
    np.testing.assert_array_equal(fused_dot(**given), wanted)


@pytest.mark.parametrize("step", [0, 1])
def test_block_tensors(step: int) -> None:
    """Both sides say how they are to be padded; codes and scales then are."""
    rng = np.random.default_rng(step)
    k = 40 + 32 * step
    a, b = (quantize(rng.normal(size=(3, k)).astype(np.float32), "te-mx-e4m3") for _ in "ab")
    case = dataclasses.replace(MX, b="e4m3")
    c = np.zeros(3, np.uint32)
    told = padding(lambda: fused_dot(a, b, c, case.instruction), {}, case, k)
    rows = [
        Row(
            why="tensor",
            a=a.codes[i].tolist(),
            b=b.codes[i].tolist(),
            a_scales=a.scales[i].tolist(),
            b_scales=b.scales[i].tolist(),
            c=0,
        )
        for i in range(3)
    ]
    given = padded(arguments(rows, case), told, case)
    whole = [
        BlockTensor(codes=given[x], scales=given[f"{x}_scales"], format=a.format, block=(1, 32))
        for x in "ab"
    ]
    got = fused_dot(*whole, c, case.instruction)
    assert got.tolist() == results(rows, case).tolist()
    # The values padded with zeros before they are quantized: other scales, the same bits.
    x, y = (np.zeros((3, told["whole"]), np.float32) for _ in "ab")
    rng = np.random.default_rng(step)
    x[:, :k], y[:, :k] = (rng.normal(size=(3, k)).astype(np.float32) for _ in "ab")
    early = [quantize(values, "te-mx-e4m3") for values in (x, y)]
    assert fused_dot(*early, c, case.instruction).tolist() == got.tolist()
    product = matmul_bits(early[0], early[1].T, case.instruction)
    assert product.diagonal().tolist() == got.tolist()


@pytest.mark.parametrize("instruction", tensor_cores.INSTRUCTIONS)
def test_every_instruction_refuses_a_part_of_a_step(instruction: str) -> None:
    one = tensor_cores.INSTRUCTIONS[instruction]
    a, b = one.pairs()[0]
    scale_format, block = (*one.scales, (None, 32))[0]
    case = Case(instruction=instruction, a=a, b=b, scale_format=scale_format, block=block)
    k = case.rules.terms + 1
    row = Row(
        why="zeros",
        a=[0] * k,
        b=[0] * k,
        a_scales=[127] * -(-k // block),
        b_scales=[127] * -(-k // block),
        c=0,
    )
    padding(fused_dot, arguments([row], case), case, k)


@pytest.mark.parametrize("instruction", ["exact", "float32"])
def test_ideal_instructions_take_any_k(instruction: str) -> None:
    x = np.full((1, 7), 0x38, np.uint8)  # ones
    got = fused_dot(x, x, np.zeros(1, np.uint32), instruction, a_format="e4m3", b_format="e4m3")
    assert got.view(np.float32).tolist() == [7.0]
