"""Stochastic rounding: the sum in float32 of Transformer Engine's fallback, and blocks with random bits."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import PRESETS, encode, quantize

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TE = PRESETS["te-nvfp4"]


def fallback(
    x: npt.NDArray[np.float32], draws: npt.NDArray[Any], bits: int
) -> npt.NDArray[np.uint8]:
    """E2M1 codes: the step of |x|, times the draw, added in one rounding; the grid value below."""
    magnitude = np.abs(x.astype(np.float64))
    step = np.where(magnitude < 2, 0.5, np.where(magnitude < 4, 1.0, 2.0))
    # Exact in float64 for the magnitudes here, so that the conversion is the only rounding.
    total = (magnitude + step * draws / 2.0**bits).astype(np.float32)
    code = np.clip(np.searchsorted(GRID, total, side="right") - 1, 0, 7)
    sign = np.where(np.signbit(x), 8, 0)
    return np.where(np.isnan(x), 7, code | sign).astype(np.uint8)


def values() -> npt.NDArray[np.float32]:
    at = np.array([0, 0.25, 0.5, 1.75, 2, 2.5, 3, 4, 5, 6, 7], np.float32)
    near = np.concatenate([np.nextafter(at, np.float32(0)), at, np.nextafter(at, np.float32(8))])
    special = np.array([np.nan, np.inf, 1e30, 2.0**-9, 2.0**-10], np.float32)
    # One step of the draw below a grid value, less a little: where the sum rounds up onto it.
    below = np.nextafter((GRID[1:] - 0.5 * 255 / 256).astype(np.float32)[:4], np.float32(0))
    every = np.concatenate([near, special, below])
    return np.concatenate([every, -every])


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_every_draw_of_a_byte(kind: Any) -> None:
    x = values()
    draws = np.arange(256, dtype=kind)[:, None] * kind(1 if kind is np.uint8 else 257)
    draws = np.broadcast_to(draws, (256, x.size)).copy()
    x = np.broadcast_to(x, draws.shape).copy()
    theirs = fallback(x, draws, 8 * draws.dtype.itemsize)
    ours = encode(x, "e2m1", rounding="stochastic_sum", random_bits=draws)
    np.testing.assert_array_equal(ours, theirs)
    on_jax = encode(
        jnp.asarray(x), "e2m1", rounding="stochastic_sum", random_bits=jnp.asarray(draws)
    )
    np.testing.assert_array_equal(np.asarray(on_jax), theirs)


def test_the_sum_that_rounds_up() -> None:
    """0.001953125 less one unit in the last place, and 255 of 256: the sum is 1/2 in float32 only."""
    x = np.nextafter(np.float32([0.001953125]), np.float32(0))
    draw = np.array([255], np.uint8)
    assert encode(x, "e2m1", rounding="stochastic_sum", random_bits=draw).tolist() == [1]
    assert encode(x, "e2m1", rounding="stochastic", random_bits=draw).tolist() == [0]


def test_what_the_sum_does_not_take() -> None:
    x = np.ones(2, np.float32)
    with pytest.raises(ValueError, match="'stochastic_sum' needs random_bits"):
        encode(x, "e2m1", rounding="stochastic_sum")
    with pytest.raises(ValueError, match="uint8 or uint16"):
        encode(x, "e2m1", rounding="stochastic_sum", random_bits=np.zeros(2, np.uint32))
    for target, given in (("e8m0", x), ("e2m1", x.astype(np.float64))):
        with pytest.raises(ValueError, match="float32 values to a format with a zero"):
            encode(given, target, rounding="stochastic_sum", random_bits=np.zeros(2, np.uint8))


@pytest.mark.parametrize("how", ["stochastic", "stochastic_sum"])
def test_blocks(how: str) -> None:
    """The scales are those without random bits; elements are the scaled values, rounded by them."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(8, 64)).astype(np.float32)
    draws = rng.integers(0, 256, x.shape, np.uint8)
    preset = dataclasses.replace(TE, stochastic=how)
    tensor, plain = quantize(x, preset, random_bits=draws), quantize(x, preset)
    np.testing.assert_array_equal(tensor.scales, plain.scales)
    encode_scale = np.float32(2688) / np.abs(x).max()
    scale = plain.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * (
        np.float32(1) / encode_scale
    )
    scaled = x * np.repeat(np.float32(1) / scale, 16, axis=1)
    expected = encode(scaled, "e2m1", rounding=how, random_bits=draws)
    np.testing.assert_array_equal(tensor.codes, expected)
    assert 0.1 < np.mean(tensor.codes != plain.codes) < 0.4
    on_jax = quantize(jnp.asarray(x), preset, random_bits=jnp.asarray(draws))
    np.testing.assert_array_equal(np.asarray(on_jax.codes), tensor.codes)


def test_powers_of_two_take_random_bits_too() -> None:
    """Averaged over all draws of a byte, elements are x within what a byte resolves."""
    x = np.array([[1.0] + [0.3] * 31], np.float32)
    many = np.repeat(x, 256, axis=0)
    draws = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 32, axis=1)
    tensor = quantize(many, "te-mx-e4m3", random_bits=draws)
    assert set(tensor.scales.ravel().tolist()) == {119}
    mean = np.mean(tensor.codes[:, 1].view(ml_dtypes.float8_e4m3fn).astype(np.float64)) * 2.0**-8
    assert abs(mean - 0.3) < 2.0**-8 * 8 / 256


def test_random_bits_are_checked() -> None:
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match=r"random_bits have shape \(32,\)"):
        quantize(x, "te-mx-e4m3", random_bits=np.zeros(32, np.uint8))
    with pytest.raises(TypeError, match="uint8, uint16 or uint32"):
        quantize(x, "te-mx-e4m3", random_bits=np.zeros((2, 32), np.int64))
    with pytest.raises(ValueError, match="stochastic_sum goes with a formula"):
        dataclasses.replace(PRESETS["te-mx-e4m3"], stochastic="stochastic_sum")
    with pytest.raises(ValueError, match="`stochastic` is the one"):
        dataclasses.replace(TE, rounding="stochastic")
