"""Arrays that are no plain ones, codes of signed types, what is refused by hand, and derivatives."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.formats import (
    BlockTensor,
    decode,
    decode_bits,
    dequantize,
    encode,
    encode_bits,
    layout,
    quantize,
    quantize_bits,
)
from flamia_ref.formats.scalar import BF16, E4M3

X = np.array([[1.0, -2.0], [0.5, 448.0]], np.float32)
CODES = np.array([[0x38, 0xC0], [0x30, 0x7E]], np.uint8)
TENSOR = quantize(X, "te-mx-e4m3")
TILED = layout.tile_scales_128x4(CODES)


def masked(x: Any) -> Any:
    return np.ma.array(x, mask=np.arange(x.size).reshape(x.shape) == 0)


def matrix(x: Any) -> Any:
    return x.view(np.matrix)  # the constructor warns


def with_draws(draws: Any) -> Any:
    return encode(X, "e4m3", rounding="stochastic", random_bits=draws)


BOUNDARIES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "encode": (lambda x: encode(x, "e4m3"), X),
    "encode draws": (with_draws, np.zeros((2, 2), np.uint8)),
    "decode": (lambda x: decode(x, "e4m3"), CODES),
    "quantize": (lambda x: quantize(x, "te-mx-e4m3"), X),
    "dequantize codes": (
        lambda x: dequantize(dataclasses.replace(TENSOR, codes=x)),
        TENSOR.codes,
    ),
    "dequantize scales": (
        lambda x: dequantize(dataclasses.replace(TENSOR, scales=x)),
        TENSOR.scales,
    ),
    "pack": (layout.pack_fp4, CODES & 15),
    "unpack": (layout.unpack_fp4, CODES),
    "tile": (layout.tile_scales_128x4, CODES),
    "untile": (lambda x: layout.untile_scales_128x4(x, (2, 2)), TILED),
    "encode_bits": (lambda x: encode_bits(x, E4M3), X.view(np.uint32)),
    "decode_bits": (lambda x: decode_bits(x, E4M3), CODES),
    "quantize_bits": (
        lambda x: quantize_bits(x, TENSOR.format),
        X.view(np.uint32),
    ),
}


def leaves(result: Any) -> list[Any]:
    if isinstance(result, BlockTensor):
        return [result.codes, result.scales]
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("name", BOUNDARIES)
@pytest.mark.parametrize("unusual", [masked, matrix])
def test_masked_arrays_and_matrices_are_refused(name: str, unusual: Callable[[Any], Any]) -> None:
    call, x = BOUNDARIES[name]
    with pytest.raises(TypeError, match=r" is a (MaskedArray|matrix); pass a plain array") as error:
        call(unusual(x))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_mapped_files_are_arrays(name: str, tmp_path: Path) -> None:
    call, x = BOUNDARIES[name]
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for result, expected in zip(leaves(call(mapped)), leaves(call(x)), strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(np.int8, "e4m3"), (np.int8, "bf16"), (np.int8, "fp32"), (np.int16, "fp16")]
    + [(np.int16, "fp32"), (np.int32, "fp32"), (np.int64, "fp32"), (np.int8, "e2m1")]
    + [(np.int8, "e8m0"), (np.int16, "tf32")],
)
def test_negative_codes_are_refused_whatever_their_type(dtype: Any, name: str) -> None:
    codes = np.array([1, -1], dtype)
    with pytest.raises(ValueError, match=f"{name} has no code -1; codes are 0 to"):
        decode(codes, name)
    assert decode(codes[:1], name).tolist() == decode([1], name).tolist()
    if dtype is not np.int64:
        with pytest.raises(ValueError, match=f"{name} has no code -1; codes are 0 to"):
            decode(jnp.asarray(codes), name)


@pytest.mark.parametrize("call", [
    layout.tile_scales_128x4, layout.unpack_fp4, layout.pack_fp4,
    lambda x: layout.untile_scales_128x4(x, (128, 4)),
])  # fmt: skip
def test_negative_bytes_are_refused(call: Callable[[Any], Any]) -> None:
    for convert in (np.asarray, jnp.asarray):
        with pytest.raises(ValueError, match="has no code -1"):
            call(convert(np.full((4, 4), -1, np.int8)))


WORDS = X.view(np.uint32)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("bits", lambda x: encode_bits(x, E4M3)),
        ("bits", lambda x: quantize_bits(x, TENSOR.format)),
        ("exponent", lambda x: encode_bits(WORDS, E4M3, exponent=x)),
        ("random_bits", lambda x: encode_bits(WORDS, E4M3, rounding="stochastic", random_bits=x)),
        ("codes", lambda x: decode_bits(x, BF16)),
    ],
)
def test_only_exact_types_reach_the_integers(name: str, call: Any, convert: Any) -> None:
    allowed = {"bits": ["uint32", "uint64"], "exponent": ["int32"], "codes": ["uint16"]}
    allowed["random_bits"] = ["uint8", "uint16", "uint32"]
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "float32", "bool"):
        if dtype not in allowed[name]:
            with pytest.raises(TypeError, match=f"{name} must be an array of .*, not {dtype}"):
                call(convert(np.ones((2, 2), dtype)))


def test_bits_of_floats_of_64_bits_are_for_encode_only() -> None:
    with pytest.raises(TypeError, match="bits must be an array of uint32, not uint64"):
        quantize_bits(np.zeros((2, 2), np.uint64), TENSOR.format)
    with pytest.raises(ValueError, match=r"quantize_bits takes \[..., rows, columns\]"):
        quantize_bits(np.zeros(2, np.uint32), TENSOR.format)


def test_messages_name_the_byte_order() -> None:
    message = r"uint16 in the other byte order \(>u2\)"
    with pytest.raises(TypeError, match=message):
        with_draws(np.zeros((2, 2), ">u2"))
    with pytest.raises(TypeError, match=message):
        decode_bits(np.zeros(2, ">u2"), BF16)


@pytest.mark.parametrize("shape", [5, (2.7, 3), (2, "3"), None, "12", (2, None)])
def test_a_shape_is_integers(shape: Any) -> None:
    with pytest.raises(ValueError, match=r"shape is .* not ") as error:
        layout.untile_scales_128x4(TILED, shape)
    assert "\n" not in str(error.value)


def test_block_tensors_made_by_hand() -> None:
    with pytest.raises(TypeError, match="dequantize takes a BlockTensor, not a ndarray"):
        dequantize(X)
    for block in ((1, "all"), 32, (1,), (1.0, 32), None):
        with pytest.raises(ValueError, match="in numbers, not") as error:
            dataclasses.replace(TENSOR, block=block)
        assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="format is a BlockFormat, not 'te-mx-e4m3'"):
        dataclasses.replace(TENSOR, format="te-mx-e4m3")
    with pytest.raises(
        ValueError, match="te-mx-e4m3 has no tensor scale; the block tensor has one"
    ):
        dequantize(dataclasses.replace(TENSOR, tensor_scale=np.float32(2)))
    whole = dataclasses.replace(TENSOR, block=(np.int64(1), np.int64(32)))
    np.testing.assert_array_equal(dequantize(whole), X)


def through_codes(x: Any) -> Any:
    return decode(encode(x, "e4m3"), "e4m3").sum()


def through_blocks(x: Any) -> Any:
    return dequantize(quantize(x, "te-mx-e4m3")).sum()


@pytest.mark.parametrize("call", [through_codes, through_blocks])
def test_the_derivative_is_zero_and_straight_through_estimators_work(call: Any) -> None:
    x = jnp.asarray(X)

    def straight_through(x: Any) -> Any:
        return x.sum() + jax.lax.stop_gradient(call(x) - x.sum())

    for change in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(jax.grad(change(call))(x), np.zeros_like(X))
        np.testing.assert_array_equal(jax.grad(change(straight_through))(x), np.ones_like(X))
    expected = [call(row[None]) for row in X]
    np.testing.assert_array_equal(jax.vmap(lambda row: call(row[None]))(x), expected)
    assert jax.jit(call)(x) == call(X)
