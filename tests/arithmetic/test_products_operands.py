"""What matrix products take: BlockTensors, scales, formats, libraries, memory orders."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import INSTRUCTIONS, fused_dot, matmul_bits
from flamia_ref.formats import E4M3, FORMATS, BlockTensor, dequantize, quantize
from tests.independent import float32

MX = "sm100.tcgen05.mxf8f6f4"
E4M3_PAIR = {"a_format": "e4m3", "b_format": "e4m3"}
M, K, N = 40, 96, 45


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
    got = matmul_bits(a, b, "exact")
    explicit = {"a_scales": a.scales, "b_scales": b.scales}
    np.testing.assert_array_equal(
        got, matmul_bits(a.codes, b.codes, "exact", **E4M3_PAIR, **explicit)
    )


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
