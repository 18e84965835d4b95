"""`encode` against every conversion recorded on a device (tests/oracles/conversions)."""

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import FORMATS, encode, encode_bits
from tests.formats.stored import conversions

KINDS = ("e4m3_sat", "e5m2_sat", "e4m3_nosat", "e5m2_nosat", "e2m1", "e2m3", "e3m2") + tuple(
    f"e8m0_{direction}_{overflow}" for direction in ("rz", "rp") for overflow in ("sat", "nosat")
)
ELEMENTS = KINDS[:7]
NAMES = {
    "sat": {"overflow": "saturate"},
    "nosat": {"overflow": "native"},
    "rz": {"rounding": "toward_zero"},
    "rp": {"rounding": "up"},
}
_SLAB = 1 << 24


def call(kind: str) -> tuple[str, dict[str, str]]:
    """Format and keywords of the conversion that the recording calls `kind`."""
    name, *words = kind.split("_")
    settings: dict[str, str] = {}
    for word in words:
        settings |= NAMES[word]
    return name, settings


def recorded(kind: str, bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    stored = conversions()
    place = np.searchsorted(stored[f"f32_{kind}_bits"], bits, side="right") - 1
    return stored[f"f32_{kind}_code"][place]


@pytest.mark.parametrize("kind", KINDS)
def test_float32_boundaries(kind: str) -> None:
    """Where the result changes, and two steps on each side."""
    name, settings = call(kind)
    starts = conversions()[f"f32_{kind}_bits"]
    steps = np.arange(-2, 3).astype(np.uint32)
    bits = np.unique(starts[:, None] + steps)
    codes = encode(bits.view(np.float32), name, **settings)
    np.testing.assert_array_equal(codes, recorded(kind, bits))


@pytest.mark.parametrize("kind", KINDS)
def test_every_bfloat16(kind: str) -> None:
    name, settings = call(kind)
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(encode(values, name, **settings), conversions()[f"bf16_{kind}"])


@pytest.mark.parametrize("kind", ELEMENTS)
def test_every_float16(kind: str) -> None:
    name, settings = call(kind)
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    np.testing.assert_array_equal(encode(values, name, **settings), conversions()[f"f16_{kind}"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_all_float32(kind: str) -> None:
    name, settings = call(kind)
    bits = np.arange(0, 1 << 32, 65521, dtype=np.uint64).astype(np.uint32)
    codes = encode(bits.view(np.float32), name, **settings)
    np.testing.assert_array_equal(codes, recorded(kind, bits))


def sweep(kind: str, convert: Callable[[Any], Any]) -> int:
    """How many of all 2^32 float32 inputs give another code than the recorded one."""
    stored = conversions()
    starts, codes = stored[f"f32_{kind}_bits"].astype(np.int64), stored[f"f32_{kind}_code"]
    lengths = np.diff(np.append(starts, 1 << 32))
    wrong = 0
    for first in range(0, 1 << 32, _SLAB):
        overlap = np.minimum(starts + lengths, first + _SLAB) - np.maximum(starts, first)
        wanted = np.repeat(codes, np.maximum(overlap, 0))
        bits = np.arange(first, first + _SLAB, dtype=np.uint32)
        wrong += int((np.asarray(convert(bits)) != wanted).sum())
    return wrong


@pytest.mark.nightly
@pytest.mark.parametrize("library", ["numpy", "jax"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_float32(kind: str, library: str) -> None:
    name, settings = call(kind)
    if library == "numpy":
        assert sweep(kind, lambda bits: encode(bits.view(np.float32), name, **settings)) == 0
    else:
        jnp = pytest.importorskip("jax.numpy")
        convert = functools.partial(encode_bits, target=FORMATS[name], **settings)
        assert sweep(kind, lambda bits: convert(jnp.asarray(bits))) == 0
