"""The FP4 presets against exact rationals: block by block, and at what is special about them."""

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import PRESETS, dequantize, encode_blocks, least_power, quantize
from tests.formats import exact, points

E8M0, UE4M3 = "flamia-fp4-e8m0", "flamia-fp4-ue4m3"
E2M1_SPEC, UE4M3_SPEC = exact.SPECS["e2m1"], exact.SPECS["ue4m3"]
NAN, INF = math.nan, math.inf


def quotient(x: Fraction, y: Fraction) -> Fraction:
    """|x| / y in float32."""
    return exact.float32(abs(x) / y)


def ue4m3_block(values: list[float]) -> tuple[int, list[int]]:
    amax = max((abs(Fraction(v)) for v in values), default=Fraction(0))
    scale = exact.encode(quotient(amax, Fraction(6)), UE4M3_SPEC)
    step = exact.value(scale, UE4M3_SPEC)
    codes = []
    for v in values:
        magnitude = exact.encode(quotient(Fraction(v), step), E2M1_SPEC) if scale else 0
        codes.append(magnitude | (8 if math.copysign(1.0, v) < 0 else 0))
    return scale, codes


def rows(count: int, width: int, seed: int) -> npt.NDArray[np.float32]:
    """Values of up to 20 binades in a row, blocks of smaller ones and of zeros among them, of both signs."""
    rng = np.random.default_rng(seed)
    x = points.narrow_range(count * width, seed).reshape(count, width)
    field = rng.integers(110, 140, (count, 1)) - rng.integers(0, 20, (count, width))
    x = (x & np.uint32(0x807FFFFF)) | (field.astype(np.uint32) << np.uint32(23))
    zero = rng.random((count, -(-width // 16))) < 0.2
    x = np.where(np.repeat(zero, 16, axis=1)[:, :width], x & np.uint32(0x80000000), x)
    return x.view(np.float32)


@pytest.mark.parametrize("width", [1, 15, 16, 40, 64])
def test_one_level_scales_exactly(width: int) -> None:
    x = rows(30, width, width)
    tensor = quantize(x, UE4M3)
    assert tensor.scales.shape == (30, -(-width // 16))
    for row, values in enumerate(x.tolist()):
        for block in range(-(-width // 16)):
            cut = slice(16 * block, 16 * block + 16)
            scale, codes = ue4m3_block(values[cut])
            assert tensor.scales[row, block] == scale
            assert tensor.codes[row, cut].tolist() == codes
    decoded = dequantize(tensor)
    spread = np.repeat(tensor.scales, 16, axis=1)[:, :width]
    for index in np.ndindex(x.shape):
        code, scale = int(tensor.codes[index]), int(spread[index])
        value = exact.value(code & 7, E2M1_SPEC) * exact.value(scale, UE4M3_SPEC)
        assert Fraction(float(decoded[index])) == (-value if code & 8 else value)


@pytest.mark.parametrize("width", [1, 15, 16, 40, 64])
def test_scales_within_the_span_of_their_row_exactly(width: int) -> None:
    x = rows(30, width, width)
    tensor = quantize(x, E8M0)
    raised = 0
    for row, values in enumerate(x.tolist()):
        own = [
            exact.exact_rceil_scale(max(abs(Fraction(v)) for v in values[at : at + 16]), 6)
            for at in range(0, width, 16)
        ]
        scales = [max(scale, max(own) - 14) for scale in own]
        raised += scales != own
        assert tensor.scales[row].tolist() == scales
        codes = [
            exact.block_codes(values[16 * b : 16 * b + 16], s, E2M1_SPEC)
            for b, s in enumerate(scales)
        ]
        assert tensor.codes[row].tolist() == [code for block in codes for code in block]
    assert (raised > 0) == (width > 16)


def test_the_round_up_of_te_is_the_smallest_power_for_every_bfloat16() -> None:
    """What the recipe's docstring says in other words. Comparisons with 6 2^k in float64 are exact."""
    codes = np.arange(0x7F80, dtype=np.uint32) << np.uint32(16)
    x = codes.view(np.float32)
    scales = quantize(x[:, None], E8M0).scales[:, 0].astype(np.int64)
    wide = x.astype(np.float64)
    assert (wide <= 6 * np.exp2(scales - 127.0)).all()
    assert (wide[scales > 0] > 6 * np.exp2(scales[scales > 0] - 128.0)).all()
    np.testing.assert_array_equal(least_power(codes, 6.0), scales)


def test_least_power_exactly() -> None:
    bits = np.concatenate([points.float32_edges(), points.random_bits32(20000, 3)])
    bits = bits & np.uint32(0x7FFFFFFF)
    with np.errstate(invalid="ignore"):
        x = bits.view(np.float32).astype(np.float64)
    for largest in (6.0, 448.0, 2688.0):
        scales = least_power(bits, largest).astype(np.int64)
        finite = np.isfinite(x)
        assert (scales[np.isinf(x)] == 254).all()
        assert (scales[np.isnan(x)] == 255).all()
        inside, code = x[finite], scales[finite]
        assert ((inside <= largest * np.exp2(code - 127.0)) | (code == 254)).all()
        assert (inside[code > 0] > largest * np.exp2(code[code > 0] - 128.0)).all()


def test_special_rows() -> None:
    x = np.zeros((6, 32), np.float32)
    x[0, 3] = NAN
    x[0, 20] = 5.0
    x[1, 3], x[1, 20] = -INF, 6.0
    x[2, 3], x[2, 20] = -0.0, 6 * 2.0**-140  # subnormal
    x[3, 0], x[3, 1], x[3, 20] = 6 * 2.0**-4, 0.25 * 2.0**-4, 6 * 2.0**20
    x[4, 0], x[4, 20] = -(2.0**-14), 1.0  # amax / 6 is below half of 2^-9
    x[5, 0], x[5, 1], x[5, 20] = 6 * 448.0, 1e30, 6.0

    powers = quantize(x, E8M0)
    assert powers.scales.tolist() == [
        [255, 255],  # a NaN anywhere in the row
        [254, 240],
        [0, 0],
        [133, 147],
        [111, 125],
        [225, 211],
    ]
    assert powers.codes[0].tolist() == [7] * 32
    assert powers.codes[1, [3, 20]].tolist() == [15, 0]
    assert powers.codes[2, [3, 20]].tolist() == [8, 0]
    assert powers.codes[3, [0, 1, 20]].tolist() == [0, 0, 7]  # 6 2^-4 / 2^6 is less than 1/4

    quotients = quantize(x, UE4M3)
    assert quotients.scales[0].tolist() == [0x7F, 0x35]  # 5 / 6 is 13 / 16, this block alone
    assert quotients.codes[0, :16].tolist() == [7] * 16
    assert quotients.scales[1].tolist() == [0x7E, 0x38]
    assert quotients.codes[1, [3, 20]].tolist() == [15, 7]
    assert quotients.codes[2, [3, 20]].tolist() == [8, 0]
    assert quotients.scales[4].tolist()[0] == 0
    assert quotients.codes[4, [0, 1]].tolist() == [8, 0]  # -0 of a block of scale 0
    assert quotients.scales[5].tolist() == [0x7E, 0x38]
    assert quotients.codes[5, [0, 1]].tolist() == [7, 7]


@pytest.mark.parametrize("name", [E8M0, UE4M3])
@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (2, 3, 17)])
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    tensor = quantize(np.ones(shape, np.float32), name)
    assert tensor.codes.shape == shape
    assert tensor.scales.shape == (*shape[:-1], -(-shape[-1] // 16))


def test_given_scales_are_taken() -> None:
    x = rows(20, 40, 9)
    for name in (E8M0, UE4M3, "te-mx-e4m3", "cudnn-mx-e4m3"):
        tensor = quantize(x, name)
        bits = x.view(np.uint32)
        same = encode_blocks(bits, tensor.scales, PRESETS[name])
        np.testing.assert_array_equal(same, tensor.codes)
    given = np.full((20, 2), 125, np.uint8)
    codes = encode_blocks(x.view(np.uint32), given, PRESETS["te-mx-e4m3"])
    wanted = [exact.block_codes(values, 125, exact.SPECS["e4m3"]) for values in x.tolist()]
    assert codes.tolist() == wanted
