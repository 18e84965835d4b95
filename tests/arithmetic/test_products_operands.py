"""What matrix products take and refuse: BlockTensors, scales, formats, libraries."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import INSTRUCTIONS, fused_dot, matmul, matmul_bits
from flamia_ref.formats import E4M3, FORMATS, PRESETS, BlockTensor, dequantize, quantize
from tests.independent import float32

MX = "sm100.tcgen05.mxf8f6f4"
F16 = "sm100.tcgen05.f16"
E4M3_PAIR = {"a_format": "e4m3", "b_format": "e4m3"}
M, K, N = 40, 70, 45


def codes(*shape: int, seed: int = 0, below: int = 0x7F, dtype: Any = np.uint8) -> Any:
    return np.random.default_rng(seed).integers(0, below, shape).astype(dtype)


def scales(*shape: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(120, 134, shape, dtype=np.uint8)


def block_tensor(rows: int, columns: int, block: Any, seed: int) -> BlockTensor:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)) * 2.0 ** rng.integers(-9, 9, (rows, columns))
    return quantize(x.astype(np.float32), "te-mx-e4m3", block=block)


# BlockTensors.


def a_scales_of(tensor: BlockTensor) -> Any:
    """(m, ceil(K / 32)), by looking up the scale of each row's first element of each block of 32."""
    (rows, columns), (r, c) = tensor.codes.shape, tensor.block
    blocks = -(-columns // 32)
    return np.array(
        [[tensor.scales[i // r, 32 * j // c] for j in range(blocks)] for i in range(rows)]
    )


def transposed(tensor: BlockTensor) -> BlockTensor:
    return dataclasses.replace(
        tensor, codes=tensor.codes.T, scales=tensor.scales.T, block=tensor.block[::-1]
    )


A_BLOCKS = [(1, 32), (32, 32), (1, "all")]
B_BLOCKS = [(32, 1), (32, 32), ("all", 1)]


@pytest.mark.parametrize("b_block", B_BLOCKS, ids=str)
@pytest.mark.parametrize("a_block", A_BLOCKS, ids=str)
@pytest.mark.parametrize("instruction", [MX, "exact"])
def test_block_tensors_are_codes_and_scales(instruction: str, a_block: Any, b_block: Any) -> None:
    a, b = block_tensor(M, K, a_block, 1), block_tensor(K, N, b_block, 2)
    got = matmul_bits(a, b, instruction)
    explicit = {"a_scales": a_scales_of(a), "b_scales": a_scales_of(transposed(b)).T}
    assert explicit["a_scales"].shape == (M, 3)
    assert explicit["b_scales"].shape == (3, N)
    np.testing.assert_array_equal(
        got, matmul_bits(a.codes, b.codes, instruction, **E4M3_PAIR, **explicit)
    )
    mixed = matmul_bits(a.codes, b, instruction, a_format="e4m3", a_scales=explicit["a_scales"])
    np.testing.assert_array_equal(got, mixed)


@pytest.mark.parametrize("block", A_BLOCKS, ids=str)
def test_block_tensors_in_fused_dot(block: Any) -> None:
    a, b = block_tensor(M, K, block, 3), block_tensor(M, K, (1, 32), 4)
    c = codes(M, below=1 << 30, dtype=np.uint32)
    got = fused_dot(a, b, c, MX)
    explicit = {"a_scales": a_scales_of(a), "b_scales": a_scales_of(b)}
    np.testing.assert_array_equal(got, fused_dot(a.codes, b.codes, c, MX, **E4M3_PAIR, **explicit))
    traced = jax.jit(lambda a, b, c: fused_dot(a, b, c, MX))
    tensors = (jax.tree.map(jnp.asarray, tensor) for tensor in (a, b))
    np.testing.assert_array_equal(got, traced(*tensors, jnp.asarray(c)))


@pytest.mark.parametrize("block", A_BLOCKS, ids=str)
def test_exact_on_block_tensors_is_the_sum_of_their_values(block: Any) -> None:
    """`dequantize` looks scales up by itself: each one reaches the elements that it belongs to."""
    a, b = block_tensor(33, 40, block, 5), transposed(block_tensor(9, 40, block, 6))
    values_a, values_b = dequantize(a, np.float64), dequantize(b, np.float64)
    got = matmul_bits(a, b, "exact").tolist()
    for i in range(0, 33, 8):
        for j in range(9):
            terms = zip(values_a[i].tolist(), values_b[:, j].tolist(), strict=True)
            total = sum(float32.Fraction(x) * float32.Fraction(y) for x, y in terms)
            assert got[i][j] == float32.nearest(total)


def test_a_whole_extent_smaller_than_a_block() -> None:
    a, b = block_tensor(3, 20, (1, "all"), 7), block_tensor(20, 2, ("all", 1), 8)
    assert a.block == (1, 20)
    got = matmul_bits(a, b, MX)
    explicit = {"a_scales": a.scales, "b_scales": b.scales}
    np.testing.assert_array_equal(got, matmul_bits(a.codes, b.codes, MX, **E4M3_PAIR, **explicit))


# Scales that may be left out.


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_no_scales_and_scales_of_no_blocks_are_the_same(xp: Any) -> None:
    a, b = (xp.asarray(codes(5, 33, seed=seed)) for seed in (0, 1))
    c = xp.asarray(codes(5, below=1 << 30, dtype=np.uint32))
    empty = xp.zeros((5, 0), dtype=np.uint8)
    wanted = fused_dot(a, b, c, "float32", **E4M3_PAIR)
    for given in ({"a_scales": empty}, {"b_scales": empty}, {"a_scales": empty, "b_scales": empty}):
        np.testing.assert_array_equal(fused_dot(a, b, c, "float32", **E4M3_PAIR, **given), wanted)
    got = matmul_bits(
        a, b.T, "float32", **E4M3_PAIR, a_scales=empty, b_scales=xp.zeros((0, 5), dtype=np.uint8)
    )
    assert got.shape == (5, 5)


def test_no_scales_are_scales_of_one() -> None:
    a, b, c = codes(5, 33), codes(5, 33, seed=1), codes(5, below=1 << 30, dtype=np.uint32)
    unit, empty = np.full((5, 2), 127, dtype=np.uint8), np.zeros((5, 0), dtype=np.uint8)
    wanted = fused_dot(a, b, c, "exact", **E4M3_PAIR)
    for given in (unit, empty):
        got = fused_dot(a, b, c, "exact", **E4M3_PAIR, a_scales=given, b_scales=given)
        np.testing.assert_array_equal(got, wanted)


def test_formats_and_instructions_are_names_or_values() -> None:
    a, b, c = codes(3, 32), codes(3, 32, seed=2), np.zeros(3, dtype=np.uint32)
    given = {"a_scales": scales(3, 1), "b_scales": scales(3, 1)}
    wanted = fused_dot(a, b, c, MX, **E4M3_PAIR, **given)
    values = {"a_format": E4M3, "b_format": FORMATS["e4m3"], "scale_format": FORMATS["e8m0"]}
    np.testing.assert_array_equal(fused_dot(a, b, c, INSTRUCTIONS[MX], **values, **given), wanted)
    named = fused_dot(a, b, c, MX, **E4M3_PAIR, **given, scale_format="e8m0")
    np.testing.assert_array_equal(named, wanted)


# Libraries.


def test_numpy_among_jax_operands_is_a_constant() -> None:
    a, b, c = codes(3, 32), codes(32, 4, seed=2), codes(3, 4, below=1 << 30, dtype=np.uint32)
    given = {"a_scales": scales(3, 1), "b_scales": scales(1, 4), **E4M3_PAIR}
    wanted = matmul_bits(a, b, MX, c, **given)
    assert isinstance(wanted, np.ndarray)
    got = matmul_bits(jnp.asarray(a), b, MX, c, **given)
    assert isinstance(got, jax.Array)
    np.testing.assert_array_equal(got, wanted)
    got = jax.jit(lambda scales: matmul_bits(a, b, MX, c, **given | {"a_scales": scales}))(
        given["a_scales"]
    )
    np.testing.assert_array_equal(got, wanted)


def test_inputs_stay_as_they_were() -> None:
    given = [codes(3, 32), codes(32, 4), scales(3, 1), scales(1, 4)]
    before = [x.copy() for x in given]
    for x in given:
        x.flags.writeable = False
    c = np.zeros((3, 4), dtype=np.uint32)
    matmul_bits(*given[:2], MX, c, **E4M3_PAIR, a_scales=given[2], b_scales=given[3])
    assert all(np.array_equal(x, y) for x, y in zip(given, before, strict=True))
    assert not c.any()


@pytest.mark.parametrize("name", ["exact", "float32", MX])
def test_arrays_of_any_memory_order(name: str) -> None:
    a, b, c = codes(6, 64), codes(64, 4, seed=2), codes(6, 4, below=1 << 30, dtype=np.uint32)
    given = {} if name == "float32" else {"a_scales": scales(6, 2), "b_scales": scales(2, 4)}
    wanted = matmul_bits(a, b, name, c, **E4M3_PAIR, **given)
    odd = {key: np.repeat(x, 2, axis=1)[:, ::2] for key, x in given.items()}
    got = matmul_bits(
        np.asfortranarray(a), np.repeat(b, 2, axis=0)[::2], name, c.T.copy().T, **E4M3_PAIR, **odd
    )
    np.testing.assert_array_equal(got, wanted)


# Bad input. Each case changes the arguments of a call that is right.


def dot_arguments() -> dict[str, Any]:
    return {
        "a": codes(4, 40),
        "b": codes(4, 40, seed=2),
        "c_bits": np.zeros(4, dtype=np.uint32),
        "instruction": MX,
        "a_scales": scales(4, 2),
        "b_scales": scales(4, 2),
        **E4M3_PAIR,
    }


def matmul_arguments() -> dict[str, Any]:
    return {
        "a": codes(4, 40),
        "b": codes(40, 3, seed=2),
        "c": np.zeros((4, 3), dtype=np.uint32),
        "instruction": MX,
        "a_scales": scales(4, 2),
        "b_scales": scales(2, 3),
        **E4M3_PAIR,
    }


def bf16(*shape: int) -> Any:
    return codes(*shape, dtype=np.uint16)


def with_tensor_scale(tensor: BlockTensor) -> BlockTensor:
    return dataclasses.replace(tensor, tensor_scale=np.float32(2))


NONE = {"a_scales": None, "b_scales": None}
UNSCALED = {"instruction": F16, "a": bf16(4, 40), "b": bf16(4, 40), **NONE}
BLOCKS = {"a_format": None, "a_scales": None}
OTHER_E4M3 = dataclasses.replace(E4M3, bias=8)
FLAT = block_tensor(4, 40, (1, 32), 9)

DOT = {
    "a of one axis": ({"a": codes(40)}, ValueError, "a has shape (40,); it must be (n, K)"),
    "a of three axes": ({"a": codes(2, 2, 40)}, ValueError, "a has shape (2, 2, 40); it must be"),
    "b of another K": ({"b": codes(4, 41), "b_scales": scales(4, 2)}, ValueError, "b (4, 41)"),
    "b of other rows": ({"b": codes(5, 40), "b_scales": scales(5, 2)}, ValueError, "b (5, 40)"),
    "c_bits of other rows": (
        {"c_bits": np.zeros(5, dtype=np.uint32)},
        ValueError,
        "c_bits has shape (5,); it must be (4,)",
    ),
    "c_bits of two axes": (
        {"c_bits": np.zeros((4, 1), dtype=np.uint32)},
        ValueError,
        "c_bits has shape (4, 1); it must be (4,)",
    ),
    "c_bits of values": (
        {"c_bits": np.zeros(4, dtype=np.float32)},
        TypeError,
        "c_bits holds float32; it must hold uint32",
    ),
    "c_bits missing": ({"c_bits": None}, TypeError, "c_bits is a NoneType"),
    "values for codes": (
        {"a": np.zeros((4, 40), dtype=np.float32)},
        TypeError,
        "a holds float32; it must hold uint8, codes of e4m3",
    ),
    "signed codes": ({"b": codes(4, 40, dtype=np.int8)}, TypeError, "b holds int8; it must hold"),
    "wide codes": ({"b": codes(4, 40, dtype=np.uint32)}, TypeError, "b holds uint32; it must hold"),
    "a list": ({"a": [[1] * 40] * 4}, TypeError, "a is a list; it must be a numpy or JAX array"),
    "a number": ({"b": 3}, TypeError, "b is a int; it must be a numpy or JAX array"),
    "a code of 8 bits in a format of 4": (
        {"a": codes(4, 40) | 16, "a_format": "e2m1"},
        ValueError,
        "codes of e2m1 are below 16",
    ),
    "a code of 8 bits in a format of 6": (
        {"b": codes(4, 40) | 64, "b_format": "e3m2"},
        ValueError,
        "codes of e3m2 are below 64",
    ),
    "an unknown instruction": (
        {"instruction": "sm100.tcgen05.mxf8f6f5"},
        ValueError,
        "did you mean 'sm100.tcgen05.mxf8f6f4'",
    ),
    "no instruction": ({"instruction": None}, TypeError, "instruction is a name in INSTRUCTIONS"),
    "a changed instruction": (
        {"instruction": dataclasses.replace(INSTRUCTIONS[MX], fraction_bits=24)},
        ValueError,
        f"instruction {MX} differs from the one in INSTRUCTIONS",
    ),
    "an unknown format": (
        {"a_format": "e4m2"},
        ValueError,
        "unknown a_format 'e4m2'; did you mean",
    ),
    "a format of no operand": ({"a_format": "e8m0"}, ValueError, f"a is e8m0; {MX} takes e4m3, "),
    "a format of another instruction": (
        {"b_format": "bf16"},
        ValueError,
        f"b is bf16; {MX} takes e4m3, ",
    ),
    "a changed format": ({"a_format": OTHER_E4M3}, ValueError, "a_format e4m3 is not in FORMATS"),
    "a type for a format": ({"a_format": np.uint8}, TypeError, "a_format is a name in FORMATS"),
    "a_format missing": ({"a_format": None}, ValueError, f"a_format is missing; {MX} takes e4m3, "),
    "b_format missing": ({"b_format": None}, ValueError, f"b_format is missing; {MX} takes e4m3, "),
    "scales missing": (NONE, ValueError, "a_scales and b_scales missing"),
    "a_scales missing": ({"a_scales": None}, ValueError, "a_scales missing"),
    "b_scales of no blocks": (
        {"b_scales": scales(4, 0)},
        ValueError,
        "b_scales has shape (4, 0); it must be (4, 2)",
    ),
    "one side's scales for exact": (
        {"instruction": "exact", "b_scales": None},
        ValueError,
        "b_scales missing; exact takes scales of both operands, or none",
    ),
    "scales of other rows": ({"a_scales": scales(5, 2)}, ValueError, "it must be (4, 2)"),
    "scales of too few blocks": ({"a_scales": scales(4, 1)}, ValueError, "it must be (4, 2)"),
    "scales of one axis": ({"a_scales": scales(4)}, ValueError, "a_scales has shape (4,)"),
    "scales of values": (
        {"a_scales": np.ones((4, 2), dtype=np.float32)},
        TypeError,
        "a_scales holds float32; it must hold uint8",
    ),
    "a list of scales": ({"b_scales": [[127, 127]] * 4}, TypeError, "b_scales is a list"),
    "another scale format": ({"scale_format": "ue4m3"}, ValueError, f"{MX} takes e8m0"),
    "an unknown scale format": (
        {"scale_format": "e8m1"},
        ValueError,
        "unknown scale_format 'e8m1'; did you mean 'e8m0'",
    ),
    "scales for an instruction without": (
        UNSCALED | {"a_format": "bf16", "b_format": "bf16", "a_scales": scales(4, 2)},
        ValueError,
        f"a has scales and {F16} takes none",
    ),
    "a scale format for an instruction without": (
        UNSCALED | {"a_format": "bf16", "b_format": "bf16", "scale_format": "e8m0"},
        ValueError,
        f"scale_format is e8m0; {F16} takes no scales",
    ),
    "two formats where one is allowed": (
        UNSCALED | {"a_format": "bf16", "b_format": "fp16"},
        ValueError,
        f"a is bf16 and b fp16; {F16} takes two operands of one format",
    ),
    "a BlockTensor and a format": (
        {"a": FLAT, "a_scales": None},
        ValueError,
        "a is a BlockTensor and brings its format and scales",
    ),
    "a BlockTensor and scales": (
        {"b": FLAT, "b_format": None},
        ValueError,
        "leave out b_format and b_scales",
    ),
    "a BlockTensor with a tensor scale": (
        BLOCKS | {"a": with_tensor_scale(FLAT)},
        ValueError,
        "a has a tensor scale",
    ),
    "a BlockTensor for an instruction without scales": (
        BLOCKS | {"a": FLAT, "instruction": "float32", "b_scales": None},
        ValueError,
        "a has scales and float32 takes none",
    ),
    "a BlockTensor of columns": (
        BLOCKS | {"a": block_tensor(4, 40, (32, 1), 9)},
        ValueError,
        f"a has blocks of 1 along K; {MX} takes multiples of 32",
    ),
    "a BlockTensor of three axes": (
        BLOCKS | {"a": quantize(np.ones((2, 4, 40), np.float32), "te-mx-e4m3")},
        ValueError,
        "a has shape (2, 4, 40)",
    ),
    "a BlockTensor with a scale missing": (
        BLOCKS | {"a": dataclasses.replace(FLAT, scales=FLAT.scales[:, :1])},
        ValueError,
        "a.scales has shape (4, 1); it must be (4, 2)",
    ),
    "a BlockTensor of no blocks": (
        BLOCKS | {"a": dataclasses.replace(FLAT, block=(1, -32))},
        ValueError,
        "a has blocks of (1, -32)",
    ),
    "a BlockTensor whose element is no operand": (
        BLOCKS
        | {
            "a": dataclasses.replace(
                FLAT, format=dataclasses.replace(PRESETS["te-mx-e4m3"], element=OTHER_E4M3)
            )
        },
        ValueError,
        "a_format e4m3 is not in FORMATS",
    ),
}

MATMUL = {
    "a of one axis": ({"a": codes(40)}, ValueError, "a has shape (40,); it must be (m, K)"),
    "b of three axes": ({"b": codes(40, 3, 1)}, ValueError, "b has shape (40, 3, 1); it must be"),
    "b as rows": (
        {"b": codes(3, 40), "b_scales": scales(1, 40)},
        ValueError,
        "a has shape (4, 40) and b (3, 40); they must be (m, K) and (K, n)",
    ),
    "scales of b as rows": (
        {"b_scales": scales(3, 2)},
        ValueError,
        "b_scales has shape (3, 2); it must be (2, 3)",
    ),
    "c of another shape": (
        {"c": np.zeros((3, 4), dtype=np.uint32)},
        ValueError,
        "c has shape (3, 4); it must be (4, 3)",
    ),
    "c of a row": ({"c": np.zeros(3, dtype=np.uint32)}, ValueError, "c has shape (3,)"),
    "c of values": (
        {"c": np.zeros((4, 3), dtype=np.float32)},
        TypeError,
        "c holds float32; it must hold uint32",
    ),
    "a BlockTensor of rows as b": (
        {"b": block_tensor(40, 3, (1, 32), 9), "b_format": None, "b_scales": None},
        ValueError,
        f"b has blocks of 1 along K; {MX} takes multiples of 32",
    ),
}


def check_refused(call: Any, given: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error) as raised:
        call(**given)
    text = str(raised.value)
    assert message in text, text
    assert "\n" not in text


def in_jax(given: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


@pytest.mark.parametrize("name", DOT)
def test_fused_dot_refuses(name: str) -> None:
    change, error, message = DOT[name]
    given = dot_arguments() | change
    check_refused(fused_dot, given, error, message)
    check_refused(fused_dot, in_jax(given), error, message)


@pytest.mark.parametrize("name", MATMUL)
def test_matmul_refuses(name: str) -> None:
    change, error, message = MATMUL[name]
    given = matmul_arguments() | change
    check_refused(matmul_bits, given, error, message)
    check_refused(matmul_bits, in_jax(given), error, message)


def test_what_the_cases_change_was_right() -> None:
    assert fused_dot(**dot_arguments()).shape == (4,)
    assert matmul_bits(**matmul_arguments()).shape == (4, 3)


@pytest.mark.parametrize("c", [np.zeros((4, 3), np.uint32), np.zeros((4, 3)), [[0.0] * 3] * 4])
def test_matmul_takes_c_as_float32(c: Any) -> None:
    given = matmul_arguments() | {"c": c}
    check_refused(matmul, given, TypeError, "c ")


def test_refused_under_a_trace() -> None:
    """What is known without the values is still checked."""
    given = dot_arguments()
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    rest = {name: x for name, x in given.items() if name not in arrays}

    def run(arrays: dict[str, Any]) -> Any:
        return jax.jit(lambda arrays: fused_dot(**arrays, **rest))(arrays)

    for change, error, message in (
        ({"a": codes(40)}, ValueError, "a has shape (40,)"),
        ({"a": np.zeros((4, 40), np.float32)}, TypeError, "a holds float32"),
        ({"a_scales": scales(4, 3)}, ValueError, "a_scales has shape (4, 3)"),
    ):
        check_refused(run, {"arrays": arrays | change}, error, message)
