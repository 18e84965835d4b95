"""numpy, eager JAX, compiled JAX and batched JAX give the same bits, wherever they run."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flamia_ref.formats import (
    FORMATS,
    PRESETS,
    BlockFormat,
    Overflow,
    Rounding,
    decode,
    dequantize,
    encode,
    encode_bits,
    layout,
    quantize,
    quantize_bits,
)
from flamia_ref.formats.rounding import RANDOM
from tests.formats import points

BITS = np.concatenate(
    [points.float32_edges(), points.random_bits32(1024, 1), points.narrow_range(1300, 2)]
)
BITS = BITS[: BITS.size // 64 * 64].reshape(-1, 64)


def same(ours: Any, theirs: Any) -> None:
    """Equal bits, types and shapes; ours is numpy, theirs JAX."""
    assert isinstance(ours, np.ndarray)
    assert isinstance(theirs, jax.Array)
    assert theirs.dtype == ours.dtype
    kind = f"uint{8 * ours.dtype.itemsize}"
    np.testing.assert_array_equal(np.asarray(theirs).view(kind), ours.view(kind))


def four_ways(function: Callable[[Any], Any], x: Any, *, with_x64: bool = False) -> None:
    """numpy == eager == the user's jit == vmap in the user's jit, with x64 off or on too."""
    ours = function(x)
    traced = jax.jit(function)
    batched = jax.jit(jax.vmap(function))
    for x64 in (False, True)[: 1 + with_x64]:
        with jax.enable_x64(x64):
            given = jnp.asarray(x)
            one_of_two = jax.tree.map(lambda y: y[1], batched(jnp.stack([given, given])))
            for theirs in (function(given), traced(given), one_of_two):
                jax.tree.map(same, ours, theirs)


def test_jax_settings() -> None:
    assert jax.config.jax_numpy_dtype_promotion == "strict"
    assert not jax.config.jax_enable_x64


DETERMINISTIC = [rounding for rounding in Rounding if rounding not in RANDOM]


def nightly_but(daily: Iterable[Any], cases: Iterable[Any] = PRESETS) -> list[Any]:
    """Compiling takes seconds: a few cases of each kind daily."""
    kept = set(daily)
    return [
        case
        if case in kept
        else pytest.param(*((case,) if isinstance(case, str) else case), marks=pytest.mark.nightly)
        for case in cases
    ]


def with_every(*names: str) -> list[tuple[str, bool]]:
    return [(name, every) for every in (False, True) for name in names]


@pytest.mark.parametrize(
    ("name", "every"),
    nightly_but([*((name, False) for name in FORMATS), ("e4m3", True)], with_every(*FORMATS)),
)
def test_encode_float32(name: str, every: bool) -> None:
    """In one way, or in every rounding with every overflow."""
    x = jnp.asarray(BITS)
    for rounding in DETERMINISTIC if every else (Rounding.NEAREST_EVEN,):
        for overflow in Overflow if every else (Overflow.NATIVE,):
            ours = encode_bits(BITS, FORMATS[name], rounding=rounding, overflow=overflow)
            same(ours, encode_bits(x, FORMATS[name], rounding=rounding, overflow=overflow))
            values = encode(BITS.view(np.float32), name, rounding=rounding, overflow=overflow)
            np.testing.assert_array_equal(values, ours)


@pytest.mark.parametrize(
    "name", nightly_but({"e4m3", "e8m0"}, ["e4m3", "e2m1", "e8m0", "tf32", "fp32"])
)
def test_encode_four_ways(name: str) -> None:
    four_ways(lambda x: encode(x, name), BITS.view(np.float32), with_x64=name == "e4m3")
    four_ways(lambda x: encode_bits(x, FORMATS[name], overflow="native"), BITS)


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, pytest.param(np.float16, marks=pytest.mark.nightly)]
)
def test_encode_narrow_inputs(dtype: type) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    four_ways(lambda x: encode(x, "e4m3"), x)
    for name in ("e8m0", "fp32"):
        same(encode(x, name), encode(jnp.asarray(x), name))


@pytest.mark.parametrize("name", nightly_but({"e4m3", "e8m0", "fp32"}, FORMATS))
def test_encode_float64(name: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(500) * 2.0 ** rng.integers(-30, 30, 500)
    x = np.concatenate([x, rng.integers(0, 1 << 64, 500, dtype=np.uint64).view(np.float64)])
    with jax.enable_x64(True):
        given = jnp.asarray(x)
        assert given.dtype == np.float64
        for rounding in ("nearest_even", "up"):
            same(encode(x, name, rounding=rounding), encode(given, name, rounding=rounding))


@pytest.mark.parametrize(
    ("width", "name"),
    nightly_but(
        {(8, "e4m3"), (16, "e8m0"), (32, "e2m1"), (32, "fp32")},
        itertools.product((8, 16, 32), ("e4m3", "e2m1", "e8m0", "fp32")),
    ),
)
def test_encode_stochastic(width: int, name: str) -> None:
    draws = np.random.default_rng(2).integers(0, 1 << width, BITS.shape, np.dtype(f"uint{width}"))
    x = BITS.view(np.float32)
    ours = encode(x, name, rounding="stochastic", random_bits=draws)
    given = (jnp.asarray(x), name)
    same(ours, encode(*given, rounding="stochastic", random_bits=jnp.asarray(draws)))


@pytest.mark.parametrize(
    "name", nightly_but({"e4m3", "e8m0"}, ["e4m3", "e2m1", "e8m0", "fp16", "fp32"])
)
def test_exponent_offsets(name: str) -> None:
    shifts = np.random.default_rng(3).integers(-200, 201, BITS.shape, np.int32)

    def shifted(both: Any) -> Any:
        return encode_bits(both[0], FORMATS[name], exponent=both[1].astype(np.int32))

    four_ways(shifted, np.stack([BITS, shifts.view(np.uint32)]))


@pytest.mark.parametrize("name", nightly_but({"e4m3", "e5m2", "e8m0", "fp16"}, FORMATS))
def test_decode(name: str) -> None:
    f = FORMATS[name]
    every = np.arange(1 << min(f.bits, 16), dtype=f.code_dtype)
    codes = every if f.bits <= 16 else BITS.ravel()
    four_ways(lambda codes: decode(codes, name), codes)
    wide = decode(jnp.asarray(codes), name, np.float64)
    assert isinstance(wide, np.ndarray)
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, decode(codes, name).astype(np.float64))


def finite_and_odd(preset: BlockFormat, block: Any) -> tuple[Any, Any]:
    """Wide exponents in blocks that run over the end where there are such; subnormals, NaN and infinities."""
    whole = preset.partial == "refuse"
    rows, columns = (64, 64) if whole else (70, 45)
    finite = points.narrow_range(rows * columns, 4).reshape(rows, columns)
    odd = BITS[: BITS.shape[0] // 16 * 16 if whole else None, :columns]
    return finite.view(np.float32), np.concatenate([finite, odd]).view(np.float32)


WITH_TENSOR_SCALE = [name for name in PRESETS if PRESETS[name].has_tensor_scale]
FEW = {"te-mx-e4m3", "te-nvfp4-rowscaled"}
# An E8M0 rule, a floor on amax, a Hadamard transform; test_quantize has square blocks and tensor scales.
COMPILED = {"cudnn-mx-e4m3", "deepgemm-mx-e2m1", "te-nvfp4-rht"}


def numbers(preset: BlockFormat, block: Any = None) -> Any:
    """Of a format with a tensor scale a NaN anywhere is one everywhere."""
    odd = finite_and_odd(preset, block)[1]
    return np.where(np.isnan(odd), np.float32(3), odd) if preset.has_tensor_scale else odd


@pytest.mark.parametrize("name", nightly_but(COMPILED))
def test_quantize_compiled(name: str) -> None:
    x = numbers(PRESETS[name])
    jax.tree.map(same, quantize(x, name), jax.jit(lambda x: quantize(x, name))(jnp.asarray(x)))


BLOCKS = [
    (name, block, with_x64)
    for name, preset in PRESETS.items()
    for block in preset.blocks
    for with_x64 in ((False, True) if name in FEW and block == preset.block else (False,))
]
DAILY_BLOCKS = [
    ("te-mx-e4m3", (1, 32), True),
    ("te-mx-e4m3", (32, 32), False),
    ("te-nvfp4-rowscaled", (1, 16), False),
]


@pytest.mark.parametrize(("name", "block", "with_x64"), nightly_but(DAILY_BLOCKS, BLOCKS), ids=str)
def test_quantize(name: str, block: Any, with_x64: bool) -> None:
    preset = PRESETS[name]
    x = numbers(preset, block)
    four_ways(lambda x: quantize(x, name, block=block), x, with_x64=with_x64)
    tensor = quantize(finite_and_odd(preset, block)[0], name, block=block)
    same(dequantize(tensor), dequantize(jax.tree.map(jnp.asarray, tensor)))


NARROW = [name for name in PRESETS if PRESETS[name].narrow]


@pytest.mark.parametrize(
    "name", nightly_but({"compressedtensors-nvfp4", "quark-mx-ceil-e2m3"}, NARROW)
)
def test_quantize_bfloat16(name: str) -> None:
    """Presets that do something else there."""
    with np.errstate(all="ignore"):
        x = finite_and_odd(PRESETS[name], None)[1].astype(ml_dtypes.bfloat16)
    jax.tree.map(same, quantize(x, name), quantize(jnp.asarray(x), name))


def test_quantize_bits() -> None:
    def ours(x: Any) -> Any:
        return quantize_bits(x, PRESETS["te-mx-e4m3"], (32, 1))

    x = BITS[:, :45]
    jax.tree.map(same, ours(x), jax.jit(ours)(jnp.asarray(x)))


@pytest.mark.parametrize("name", nightly_but({"te-nvfp4-rowscaled"}, WITH_TENSOR_SCALE))
def test_a_tensor_amax_given(name: str) -> None:
    """Traced like x; rows have one each where the format scales each."""
    x = finite_and_odd(PRESETS[name], None)[0]
    by_row = PRESETS[name].tensor_extent == "row"
    amax = np.abs(x).max(axis=-1, keepdims=True) if by_row else np.abs(x).max()
    ours = quantize(x, name, tensor_amax=amax)
    given = jnp.asarray(x), jnp.asarray(amax)
    theirs = jax.jit(lambda x, amax: quantize(x, name, tensor_amax=amax))(*given)
    jax.tree.map(same, ours, theirs)


@pytest.mark.parametrize("name", nightly_but({"te-mx-e4m3"}))
def test_a_block_tensor_passes_through_jax(name: str) -> None:
    x = jnp.asarray(points.narrow_range(48 * 64, 5).reshape(48, 64).view(np.float32))
    ours = quantize(np.asarray(x), name)
    theirs = jax.jit(lambda x: quantize(x, name))(x)
    assert theirs.format == ours.format
    assert theirs.block == ours.block == PRESETS[name].block
    same(ours.codes, theirs.codes)
    same(ours.scales, theirs.scales)
    same(dequantize(ours), jax.jit(dequantize)(theirs))
    many = jax.vmap(lambda x: quantize(x, name))(jnp.stack([x, -x]))
    assert many.codes.shape == (2, 48, 64)
    wide = dequantize(theirs, np.float64)
    np.testing.assert_array_equal(wide, dequantize(ours, np.float64))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_quantize_narrow_inputs(dtype: type) -> None:
    bits = points.random_bits32(64 * 32, 6).astype(np.uint16).reshape(64, 32)
    x = bits.view(dtype)
    same(quantize(x, "te-mx-e4m3").codes, quantize(jnp.asarray(x), "te-mx-e4m3").codes)


@pytest.mark.nightly  # daily in test_layout_arrays
def test_layouts() -> None:
    scales = points.random_bits32(2 * 130 * 9, 7).astype(np.uint8).reshape(2, 130, 9)
    four_ways(layout.tile_scales_128x4, scales)
    tiled = layout.tile_scales_128x4(scales)
    untiled = layout.untile_scales_128x4(jnp.asarray(tiled), scales.shape)
    same(scales, untiled)
    nibbles = scales[..., :8] & 15
    four_ways(layout.pack_fp4, nibbles)
    four_ways(layout.unpack_fp4, scales)


def test_subnormal_scales_are_not_flushed() -> None:
    """Scale code 0 is 2^-127, which JAX on CPU flushes in float32 arithmetic."""
    x = jnp.full((1, 32), 2.0**-119, jnp.float32)
    tensor = quantize(x, "te-mx-e4m3")
    assert np.asarray(tensor.scales).tolist() == [[0]]
    assert set(np.asarray(tensor.codes).ravel().tolist()) == {0x78}
    values = np.asarray(dequantize(tensor)).view(np.uint32)
    assert set(values.ravel().tolist()) == {0x04000000}
    zeros = quantize(jnp.zeros((1, 32), jnp.float32), "te-mx-e4m3")
    assert not np.asarray(zeros.codes).any()


def test_traced_float64() -> None:
    with jax.enable_x64(True):
        x = jnp.ones((1, 32), jnp.float64)
        with pytest.raises(TypeError, match="not float64"):
            jax.jit(lambda x: quantize(x, "te-mx-e4m3"))(x)
        assert np.asarray(quantize(x, "te-mx-e4m3").scales).tolist() == [[119]]
    for ask in (
        lambda codes: decode(codes, "e4m3", np.float64),
        lambda codes: dequantize(quantize(codes.astype(np.float32), "te-mx-e4m3"), np.float64),
    ):
        with pytest.raises(TypeError, match="ask for float32"):
            jax.jit(ask)(jnp.zeros((1, 32), jnp.uint8))


def test_types_that_are_not_floats() -> None:
    for wrong in (jnp.zeros(3, jnp.int32), jnp.zeros(3, bool), jnp.zeros(3, jnp.float8_e4m3fn)):
        with pytest.raises(TypeError, match="encode takes"):
            encode(wrong, "e4m3")
    with pytest.raises(TypeError, match="codes are integers"):
        decode(jnp.zeros(3, jnp.float32), "e4m3")
    with pytest.raises(ValueError, match="e2m1 has no code 16"):
        decode(jnp.asarray([1, 16]), "e2m1")
