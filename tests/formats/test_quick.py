"""The fast ways of quantizing and dequantizing give the bits of the general ones."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import PRESETS, BlockFormat, BlockTensor, blocks, dequantize, quantizer
from flamia_ref.formats import quantize as quantize_it
from tests.formats import points

QUICK = [name for name, preset in PRESETS.items() if blocks.quick(preset)]
KINDS = ("cudnn-mx-e4m3", "flamia-fp4-e8m0", "ocp-mx-floor-e2m3", "te-mx-e5m2", "te-nvfp4")


def daily(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """XLA compiles for seconds: one case of each kind daily."""
    return [
        case
        if case in kept
        else pytest.param(*((case,) if isinstance(case, str) else case), marks=pytest.mark.nightly)
        for case in cases
    ]


@contextmanager
def the_general_way(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is quick, in numpy, where no compiled program remembers another answer."""
    with monkeypatch.context() as patched:
        for module in (blocks, quantizer):
            patched.setattr(module, "quick", lambda _: False)
        yield


def values(preset: BlockFormat) -> npt.NDArray[np.uint32]:
    """float32 bits [rows, 96]: every exponent, boundaries of the scale, zeros, and a NaN here and there."""
    rng = np.random.default_rng(7)
    wild = points.random_bits32(64 * 96, 8).reshape(64, 96)
    nan = (wild & np.uint32(0x7FFFFFFF)) > 0x7F800000
    wild = np.where(nan & (rng.random(wild.shape) > 0.02), np.uint32(0x80000000), wild)
    near = rng.normal(size=(256, 96)) * 2.0 ** rng.integers(-6, 3, (256, 96))
    ordinary = (near * 2.0 ** np.arange(-140, 116)[:, None]).astype(np.float32)
    # The amax of a row of blocks at max 2^k and one unit beside it, for every k.
    largest = np.float32(preset.element.max).view(np.uint32) & np.uint32(0x7FFFFF)
    fields = np.arange(255, dtype=np.uint32)[:, None] << np.uint32(23)
    limits = (fields | largest).repeat(96, axis=1)
    limits[:, 1:] = limits[:, 1:] // 2 + np.arange(95, dtype=np.uint32) * np.uint32(12345)
    limits[:, ::32] = (fields | largest) + np.array([-1, 0, 1]).astype(np.uint32)
    limits &= np.uint32(0x7FFFFFFF)
    odd = np.zeros((6, 96), np.uint32)
    odd[1] = 0x80000000
    odd[2, 5], odd[3, 40], odd[4, 77] = 0x7F800000, 0xFF800000, 0xFFC00001
    odd[5] = 1
    rows = np.concatenate([wild, ordinary.view(np.uint32), limits, odd])
    return rows[: len(rows) // 32 * 32]


def same(ours: BlockTensor, theirs: BlockTensor) -> None:
    for one, other in (
        (ours.codes, theirs.codes),
        (ours.scales, theirs.scales),
        (ours.tensor_scale, theirs.tensor_scale),
    ):
        if one is None:
            assert other is None
            continue
        mine, others = np.asarray(one), np.asarray(other)
        assert mine.dtype == others.dtype
        np.testing.assert_array_equal(
            mine.view(f"u{mine.itemsize}"), others.view(f"u{mine.itemsize}")
        )


def test_which_are_quick() -> None:
    assert {"te-mx-e4m3", "te-nvfp4", "te-nvfp4-2d", "ocp-mx-floor-e2m1", "sage3-nvfp4"} <= set(
        QUICK
    )
    assert not {"torchao018-mx-rceil-e2m1", "te-nvfp4-rowscaled", "te-nvfp4-4over6-mae"} & set(
        QUICK
    )
    assert set(KINDS) <= set(QUICK)


@pytest.mark.parametrize(
    ("name", "dtype"),
    daily(
        itertools.product(QUICK, ("float32", "bfloat16")),
        *(("te-nvfp4", "float32"), ("ocp-mx-floor-e2m3", "float32"), ("te-mx-e5m2", "bfloat16")),
    ),
)
def test_quantize(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = PRESETS[name]
    bits = values(preset)
    if preset.has_tensor_scale:  # of one with a NaN or an infinity nothing else would be left
        finite = (bits & np.uint32(0x7F800000)) != 0x7F800000
        bits = np.where(finite, bits, np.uint32(0x3F800000))
    x: Any = bits.view(np.float32)
    if dtype == "bfloat16":
        with np.errstate(all="ignore"):
            x = x.astype(ml_dtypes.bfloat16)
    given = jnp.asarray(x)
    chosen = [block for block in preset.blocks if "all" not in block]
    for block in chosen if dtype == "float32" else chosen[:1]:
        first = block == chosen[0]
        for amax in (None, np.float32(3.0)) if preset.has_tensor_scale and first else (None,):

            def ours(x: Any, block: Any = block, amax: Any = amax) -> BlockTensor:
                return quantize_it(x, name, block=block, tensor_amax=amax)

            with the_general_way(monkeypatch):
                general = ours(x)
            same(ours(x), general)
            same(ours(given), general)
            if first and amax is None:
                same(jax.jit(ours)(given), general)


ONE_LEVEL = [
    name
    for name, preset in PRESETS.items()
    if preset.scaled is not None and not preset.has_tensor_scale and preset.quotient == "amax / 6"
]


@pytest.mark.parametrize("name", daily(ONE_LEVEL, "sage3-nvfp4"))
def test_every_tie_under_every_ue4m3_scale(name: str) -> None:
    """Where a quotient that is rounded twice shows: under XLA, division by a broadcast value is."""
    preset = PRESETS[name]
    scales = np.array([preset.scale.value(code) for code in range(8, preset.scale.max_code + 1)])
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    at = (scales[:, None] * ties).astype(np.float32)
    x = np.zeros((3, len(scales), 16), np.float32)
    x[:, :, 0] = 6 * scales
    for place, values in enumerate(
        (np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(9e9)))
    ):
        x[place, :, 1:8], x[place, :, 8:15] = values, -values
    ours = quantize_it(x, name)
    assert set(ours.scales[1].ravel().tolist()) == set(range(8, preset.scale.max_code + 1))
    same(quantize_it(jnp.asarray(x), name), ours)
    same(jax.jit(lambda x: quantize_it(x, name))(jnp.asarray(x)), ours)


@pytest.mark.parametrize("name", daily(KINDS, "te-mx-e5m2", "te-nvfp4"))
def test_ragged_and_empty(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = PRESETS[name]
    sizes = [(0, 32), (33, 32), (2, 3, 64), (1, 2048)]
    if preset.partial == "cover":
        sizes += [(5, 45), (70, 33), (3, 1)]
    for size in sizes:
        x = np.random.default_rng(3).normal(size=size).astype(np.float32)
        with the_general_way(monkeypatch):
            general = quantize_it(x, name)
        same(quantize_it(x, name), general)
        same(quantize_it(jnp.asarray(x), name), general)
        if x.ndim == 2 and x.size:
            same(quantize_it(np.asfortranarray(x), name), general)
            same(quantize_it(np.repeat(x, 2, axis=0)[::2], name), general)


@pytest.mark.parametrize(
    ("name", "shape", "by"),
    [
        ("te-nvfp4-rowscaled", (2, 129, 1024), "row"),
        ("te-nvfp4-rowscaled", (2, (1 << 17) + 16), "row"),
        ("te-nvfp4", (2, 129, 1024), "matrix"),
        ("torchao-nvfp4", (2, 129, 1024), "matrix"),
    ],
)
def test_large_arrays_keep_every_tensor_scale(name: str, shape: Any, by: str) -> None:
    """An array of more than 2^18 elements is quantized half by half."""
    x = np.ones(shape, np.float32)
    x[1] = 64
    given = {} if by == "row" else {"tensor_amax": np.array([[[1]], [[64]]], np.float32)}
    tensor = quantize_it(x, name, **given)
    expected = (*shape[:-1], 1) if by == "row" else (2, 1, 1)
    assert np.asarray(tensor.tensor_scale).shape == expected
    np.testing.assert_allclose(np.asarray(dequantize(tensor)), x, rtol=1e-6)


def test_a_negative_zero_amax_is_zero() -> None:
    x = np.zeros((1, 16), np.float32)
    x[0, 0] = 1
    for name in ("torchao-nvfp4", "te-nvfp4", "vllm-nvfp4-reference"):
        same(quantize_it(x, name, tensor_amax=-0.0), quantize_it(x, name, tensor_amax=0.0))


def test_large_arrays_are_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(4).normal(size=(1024, 1056)).astype(np.float32)
    for name in ("te-mx-e4m3", "te-nvfp4"):
        monkeypatch.setattr(quantizer, "_LARGE", 1 << 40)
        alone = quantize_it(x, name)
        monkeypatch.setattr(quantizer, "_LARGE", 1)
        monkeypatch.setattr(quantizer._backend, "cores", lambda: 5)
        same(quantize_it(x, name), alone)


@pytest.mark.parametrize(
    "name", ["te-mx-e4m3", "te-mx-e5m2", "ocp-mx-floor-e3m2", "ocp-mx-floor-e2m1"]
)
def test_every_code_and_scale_through_dequantize(name: str) -> None:
    """JAX's way beside the exact one, in float64."""
    preset = PRESETS[name]
    codes = np.tile(np.arange(1 << preset.element.bits, dtype=np.uint8), (256, 1))
    if codes.shape[1] < 32:
        codes = np.tile(codes, (1, 2))
    across = -(-codes.shape[1] // 32)
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], across, axis=1)
    tensor = BlockTensor(codes=codes, scales=scales, format=preset, block=(1, 32))
    with np.errstate(over="ignore"):
        exact = dequantize(tensor, np.float64).astype(np.float32)
    exact = np.where(np.isnan(exact), np.uint32(0x7FFFFFFF).view(np.float32), exact)
    on_jax = jax.tree.map(jnp.asarray, tensor)
    for found in (dequantize(tensor), dequantize(on_jax), jax.jit(dequantize)(on_jax)):
        np.testing.assert_array_equal(np.asarray(found).view(np.uint32), exact.view(np.uint32))
