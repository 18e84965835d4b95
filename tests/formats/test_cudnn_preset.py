"""`cudnn-mx-e4m3` against the steps of the kernel it is named after, and beside `te-mx-e4m3`.

The steps are those of cvt_amax_to_e8m0_rp and of its use for dS in nvidia-cudnn-frontend 1.32.0
(sdpa/bwd/kernels/sm100): amax by max.f32 from 0, which ignores NaN; a byte from its exponent and
mantissa; each element times a power of two, then cvt.rn.satfinite.e4m3x2.f32.
"""

import math
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import E4M3, PRESETS, quantize
from flamia_ref.formats.scales import scale_codes
from tests.formats import exact, points

CUDNN, TE = "cudnn-mx-e4m3", "te-mx-e4m3"
INFINITY = 0x7F800000
ODD = 0x04600001  # the one amax of which the two have different bytes
MANTISSAS = [0, 1, 2, 0x1FFFFF, 0x3FFFFF, 0x400000, 0x5FFFFE, 0x5FFFFF]
MANTISSAS += [0x600000, 0x600001, 0x600002, 0x600003, 0x7FFFFE, 0x7FFFFF]
Words = npt.NDArray[np.uint32]


def kernel_byte(amax: int) -> int:
    """cvt_amax_to_e8m0_rp, line by line."""
    exponent, mantissa = amax >> 23 & 0xFF, amax & 0x7FFFFF
    byte = exponent - 8
    if mantissa > 0x600000:
        byte += 1
    if exponent == 0xFF:
        byte = 254
    return min(max(byte, 0), 254)


def kernel_inverse(byte: int) -> np.float32:
    """What an element is multiplied by."""
    bits = {0: 0, 254: 1 << 22}.get(byte, (254 - byte) << 23)
    return np.uint32(bits).view(np.float32)


def kernel(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Codes and bytes of rows of 32, with numpy's float32 and ml_dtypes for the conversion."""
    with np.errstate(invalid="ignore", under="ignore"):
        amax = np.fmax.reduce(np.abs(x), axis=1, initial=np.float32(0))
        scales = np.array([kernel_byte(a) for a in amax.view(np.uint32).tolist()], dtype=np.uint8)
        scaled = x * np.array([kernel_inverse(byte) for byte in scales.tolist()])[:, None]
        limited = np.where(np.isnan(scaled), np.float32(np.nan), np.clip(scaled, -448, 448))
        codes = limited.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return np.where(np.isnan(scaled), np.uint8(0x7F), codes), scales


def alone(amaxes: Words) -> npt.NDArray[np.float32]:
    """A row of 32 for each amax, of alternating sign, the rest zeros."""
    x = np.zeros((amaxes.size, 32), np.uint32)
    x[np.arange(amaxes.size), np.arange(amaxes.size) % 32] = amaxes
    x[::2] ^= np.uint32(1 << 31)
    return x.view(np.float32)


def amaxes() -> Words:
    fields = np.arange(255, dtype=np.uint32) << np.uint32(23)
    random = np.random.default_rng(40).integers(0, 1 << 23, 30, dtype=np.uint32)
    mantissas = np.concatenate([np.array(MANTISSAS, np.uint32), random])
    return np.append((fields[:, None] | mantissas).ravel(), np.uint32(INFINITY))


def same(x: npt.NDArray[np.float32], name: str = CUDNN) -> None:
    """The preset's codes and scales of rows of 32 are the kernel's, in both libraries."""
    codes, scales = kernel(x)
    for given in (x, jnp.asarray(x)):
        tensor = quantize(given, name)
        np.testing.assert_array_equal(np.asarray(tensor.scales)[:, 0], scales)
        np.testing.assert_array_equal(np.asarray(tensor.codes), codes)


def test_scale_bytes_of_every_exponent() -> None:
    a = amaxes()
    expected = [kernel_byte(bits) for bits in a.tolist()]
    assert quantize(alone(a), CUDNN).scales.ravel().tolist() == expected
    assert quantize(
        np.ascontiguousarray(alone(a).T), CUDNN, block=(32, 1)
    ).scales.ravel().tolist() == (expected)
    exactly = [exact.exact_rceil_scale(Fraction(v), 448) for v in a[:-1].view(np.float32).tolist()]
    assert exactly == expected[:-1]


def test_scale_bytes_of_every_mantissa() -> None:
    a = np.uint32(120 << 23) | np.arange(1 << 23, dtype=np.uint32)
    expected = np.where(a & np.uint32(0x7FFFFF) > 0x600000, np.uint8(113), np.uint8(112))
    for convert in (np.asarray, jnp.asarray):
        found = scale_codes(convert(a), PRESETS[CUDNN])
        np.testing.assert_array_equal(np.asarray(found), expected)


def test_as_the_kernel() -> None:
    same(alone(amaxes()))
    rng = np.random.default_rng(41)
    wide = points.random_bits32(3000 * 32, 42).reshape(-1, 32)  # NaN and infinities among them
    same(wide.view(np.float32))
    for low, high in ((0, 12), (4, 14), (100, 140), (230, 255)):
        fields = rng.integers(low, high, (600, 32), dtype=np.uint32) << np.uint32(23)
        signs = rng.integers(0, 2, fields.shape, dtype=np.uint32) << np.uint32(31)
        x = fields | signs | rng.integers(0, 1 << 23, fields.shape, dtype=np.uint32)
        x[::50, 7] = 0x7FC00001
        same(x.view(np.float32))


def test_elements_exactly() -> None:
    """The kernel's product loses nothing: the codes are those of exact quotients."""
    x = points.random_bits32(200 * 32, 43).reshape(-1, 32) & np.uint32(0x8FFFFFFF)
    x = np.concatenate([x, points.narrow_range(50 * 32, 44).reshape(-1, 32)]).view(np.float32)
    tensor = quantize(x, CUDNN)
    for values, scale, codes in zip(
        x.tolist(), tensor.scales[:, 0].tolist(), tensor.codes.tolist(), strict=True
    ):
        wanted = exact.block_codes(values, scale, exact.SPECS["e4m3"])
        assert codes == (wanted if scale else [0x80 * (math.copysign(1, v) < 0) for v in values])


def row(*first: float) -> npt.NDArray[np.float32]:
    return np.array([[*first, *[0.0] * (32 - len(first))]], dtype=np.float32)


def codes_of(x: npt.NDArray[np.float32], count: int, name: str = CUDNN) -> tuple[int, list[int]]:
    tensor = quantize(x, name)
    assert not tensor.codes[0, count:].any()
    return int(tensor.scales.item()), tensor.codes[0, :count].tolist()


def test_byte_0_flushes_its_block() -> None:
    nan, largest = math.nan, 1.75 * 2.0**-119  # of byte 0
    x = row(largest, -largest, 0.0, -0.0, 2.0**-149, -(2.0**-149), nan, -nan)
    assert codes_of(x, 8) == (0, [0, 0x80, 0, 0x80, 0, 0x80, 0x7F, 0x7F])
    assert codes_of(x, 8, TE) == (0, [0x7E, 0xFE, 0, 0x80, 0, 0x80, 0x7F, 0x7F])
    assert codes_of(row(0.0, -0.0), 2) == (0, [0, 0x80])
    assert quantize(np.full((1, 32), nan, np.float32), CUDNN).codes.ravel().tolist() == [0x7F] * 32
    assert quantize(np.full((1, 32), nan, np.float32), CUDNN).scales.item() == 0
    # Only its own block: the next one keeps its numbers.
    two = np.concatenate([x, row(2.0**-118, -(2.0**-127))], axis=1)
    tensor = quantize(two, CUDNN)
    assert tensor.scales.tolist() == [[0, 1]]
    assert tensor.codes[0, 32:34].tolist() == [0x78, 0xB0]
    down = quantize(np.ascontiguousarray(two.T), CUDNN, block=(32, 1))
    np.testing.assert_array_equal(down.codes.T, tensor.codes)


def test_infinities_and_nan() -> None:
    inf, nan = math.inf, math.nan
    assert codes_of(row(inf, -inf, 1.0, -1.0, nan), 5) == (254, [0x7E, 0xFE, 0, 0x80, 0x7F])
    assert codes_of(row(inf, 2.0**127), 2) == (254, [0x7E, 0x38])
    assert codes_of(row(nan, 1.0, -1.0), 3) == (119, [0x7F, 0x78, 0xF8])


def test_beside_transformer_engine() -> None:
    """Equal bytes but for one amax; equal codes wherever the byte is the same and not 0."""
    a = np.unique(np.append(amaxes(), np.arange(ODD - 500, ODD + 500, dtype=np.uint32)))
    ours, theirs = quantize(alone(a), CUDNN), quantize(alone(a), TE)
    different = (ours.scales != theirs.scales)[:, 0]
    assert a[different].tolist() == [ODD]
    x = points.random_bits32(6000 * 32, 45).reshape(-1, 32)
    x[3000:] &= np.uint32(0x87FFFFFF)  # below 2^-111
    values = np.concatenate([x.view(np.float32), alone(a)])
    ours, theirs = quantize(values, CUDNN), quantize(values, TE)
    kept = (ours.scales == theirs.scales)[:, 0] & (ours.scales != 0)[:, 0]
    assert kept.sum() > 4000
    assert (ours.scales == 0).sum() > 500
    np.testing.assert_array_equal(ours.codes[kept], theirs.codes[kept])


def test_the_amax_where_they_differ() -> None:
    """fl(amax / 448) is a power of two there, the exact quotient a little more."""
    amax = float(np.uint32(ODD).view(np.float32))
    assert amax > 448 * 2.0**-127
    assert exact.float32(Fraction(amax) * exact.float32(Fraction(1, 448))) == Fraction(2) ** -127
    assert codes_of(row(amax, -1.0 * 2.0**-120), 2) == (1, [0x76, 0xE8])
    assert codes_of(row(amax, -1.0 * 2.0**-120), 2, TE) == (0, [0x7E, 0xF0])


def test_the_preset() -> None:
    preset = PRESETS[CUDNN]
    assert preset.element is E4M3
    assert preset.blocks == ((1, 32), (32, 1))
    assert preset.scale_values == ((0, math.inf),)
    assert (preset.nan, preset.nan_scale, preset.infinity_scale) == ("ignore", None, None)


@pytest.mark.parametrize("amax", [INFINITY + 1, 0x7FFFFFFF])
def test_a_nan_amax_is_a_nan_scale(amax: int) -> None:
    """As under every other rule; formats that ignore NaN never ask."""
    for convert in (np.asarray, jnp.asarray):
        found: Any = scale_codes(convert(np.array([amax], np.uint32)), PRESETS[CUDNN])
        assert np.asarray(found).tolist() == [255]
