"""q and k of the FP4 recipes have one value in both their products, or not (C2): by the formats' own tables."""

import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.attention.copies import Copy, Maker
from flamia_ref.attention.recipes import RECIPES
from flamia_ref.packing import Documents
from tests.attention import samples
from tests.formats import exact

E8M0, UE4M3 = RECIPES["flamia-nvfp4-fp8"], RECIPES["flamia-nvfp4-fp8-ue4m3"]
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # e2m1, by code
Values = npt.NDArray[np.float64]


def table(name: str) -> Values:
    """Every code's value; all of at most 8 bits are exact in float64."""
    spec = exact.SPECS[name]
    half = spec.sign if spec.signed else 1 << 8
    magnitudes = [
        np.nan if code > spec.last else float(exact.value(code, spec)) for code in range(half)
    ]
    return np.array(magnitudes + [-x for x in magnitudes] * spec.signed)


def made(recipe, x: npt.NDArray[np.float32]) -> tuple[Copy, Copy]:
    """The copies of q [tokens, channels] for S and for dK."""
    documents = Documents((0, len(x)))
    maker = Maker(documents, np, lambda y: y, lambda y: y, False)
    bits = x.view(np.uint32)[:, None, :]
    assert not (bits & 0xFFFF).any(), "bfloat16"
    fp4 = maker.copy(bits, recipe.s.left)
    return fp4, maker.promoted(fp4, recipe.dk.right)


def values(copy: Copy, element: str, scale: str) -> Values:
    codes, scales = (x[:, 0] for x in copy.trace())
    width = codes.shape[1]
    spread = np.repeat(scales, 16 if element == "e2m1" else width, axis=1)[:, :width]
    result = table(element)[codes] * table(scale)[spread]
    if copy.token_scales is not None:
        result = result * table("e8m0")[copy.token_scales[:, 0]]
    return result


def every_code_and_distance() -> npt.NDArray[np.float32]:
    """Tokens of 32 channels. The first 16 have the largest value of the token, the others all e2m1 values of both
    signs, 0 to 20 powers of two below it; the token's byte runs from 0 to 252."""
    block = np.array(MAGNITUDES + [-x for x in MAGNITUDES])
    tokens = []
    for top in range(253):
        for down in range(21):
            large = np.zeros(16)
            large[3] = 6 * 2.0 ** (top - 127)
            # Below 2^-127 there are no block scales, and below 2^-133 no bfloat16 values.
            small = block * 2.0 ** (max(top - down, 0) - 127)
            tokens.append(np.concatenate([large, small]))
    return np.array(tokens).astype(np.float32)


def test_the_promoted_value_is_the_fp4_value_for_every_code_scale_and_distance() -> None:
    x = every_code_and_distance()
    fp4, promoted = made(E8M0, x)
    scales = fp4.trace()[1][:, 0].reshape(253, 21, 2)
    top, down = np.arange(253)[:, None], np.arange(21)
    np.testing.assert_array_equal(scales[:, :, 0], np.broadcast_to(top, (253, 21)))
    np.testing.assert_array_equal(scales[:, :, 1], np.maximum(top - np.minimum(down, 14), 0))
    codes = fp4.trace()[0][:, 0].reshape(253, 21, 32)
    every = np.broadcast_to(np.arange(16), (253, 15, 16))
    np.testing.assert_array_equal(codes[:, :15, 16:], every)
    # Up to 14 powers below, FP4 is exact itself.
    in_s = values(fp4, "e2m1", "e8m0")
    reached = (np.arange(len(x)) % 21) <= 14
    np.testing.assert_array_equal(in_s[reached], x[reached].astype(np.float64))
    in_dk = values(promoted, "e4m3", "e8m0")
    np.testing.assert_array_equal(in_dk, in_s)
    np.testing.assert_array_equal(np.signbit(in_dk), np.signbit(in_s))
    token = promoted.trace()[1][:, 0, 0].reshape(253, 21)
    np.testing.assert_array_equal(token, np.broadcast_to(np.maximum(top - 6, 0), (253, 21)))


@pytest.mark.parametrize("sample", [samples.bell, samples.wide, samples.any_bits, samples.tiny])
@pytest.mark.parametrize("channels", [1, 16, 40, 64, 192])
def test_on_any_inputs(sample, channels: int) -> None:
    x = sample(5, (200,), 1, 1, channels)[0][:, 0].astype(np.float32)
    fp4, promoted = made(E8M0, x)
    in_s, in_dk = values(fp4, "e2m1", "e8m0"), values(promoted, "e4m3", "e8m0")
    np.testing.assert_array_equal(in_dk, in_s)
    np.testing.assert_array_equal(np.signbit(in_dk), np.signbit(in_s))
    # The scales follow the docstring: the token's own is the largest, no other more than 14 below.
    scales = fp4.trace()[1][:, 0].astype(int)
    assert (scales >= scales.max(axis=1, keepdims=True) - 14).all()


def test_special_tokens() -> None:
    x = np.zeros((6, 40), np.float32)
    x[1, 5] = np.nan
    x[1, 20] = 1.0
    x[2, 5], x[2, 20] = -np.inf, 2.0**127
    x[3, 5] = -0.0
    x[4, 5] = 2.0**-133
    x[5, 5], x[5, 39] = 0xFF * 2.0**120, 2.0**-133
    fp4, promoted = made(E8M0, x)
    codes, scales = (part[:, 0] for part in fp4.trace())
    assert scales.tolist() == [
        [0, 0, 0],
        [255, 255, 255],
        [254, 252, 240],
        [0, 0, 0],
        [0, 0, 0],
        [253, 239, 239],
    ]
    assert codes[1].tolist() == [7] * 40
    assert codes[2, [5, 20]].tolist() == [15, 6]
    assert codes[3].tolist() == [0] * 5 + [8] + [0] * 34
    assert codes[5, 5] == 6
    high, token = (part[:, 0] for part in promoted.trace())
    assert token[:, 0].tolist() == [0, 255, 248, 0, 0, 247]
    assert high[1].tolist() == [0x7F] * 40
    assert high[3].tolist() == [0] * 5 + [0x80] + [0] * 34
    rest = [0, 2, 3, 4, 5]
    in_s, in_dk = values(fp4, "e2m1", "e8m0"), values(promoted, "e4m3", "e8m0")
    np.testing.assert_array_equal(in_dk[rest], in_s[rest])


def test_scales_with_a_mantissa_break_it() -> None:
    """3 times the block scale 1.125 is 3.375, of five significant bits; e4m3 has four."""
    x = np.zeros((1, 32), np.float32)
    x[0, 0], x[0, 16], x[0, 17] = 2688.0, 6.75, 3.375
    fp4, promoted = made(UE4M3, x)
    assert fp4.token_scales.tolist() == [[[127]]]
    assert fp4.trace()[1].tolist() == [[[0x7E, 0x39]]]
    in_s, in_dk = values(fp4, "e2m1", "ue4m3"), values(promoted, "e4m3", "e8m0")
    assert in_s[0, [0, 16, 17]].tolist() == [2688.0, 6.75, 3.375]
    assert in_dk[0, [0, 16, 17]].tolist() == [2560.0, 7.0, 3.5]  # scale 2^3: 320, 0.875, 0.4375
    x = samples.bell(3, (300,), 1, 1, 64)[0][:, 0].astype(np.float32)
    fp4, promoted = made(UE4M3, x)
    differs = values(fp4, "e2m1", "ue4m3") != values(promoted, "e4m3", "e8m0")
    assert 0.2 < differs.mean() < 0.8


def slow_ue4m3(token: Values) -> tuple[int, list[int], list[int]]:
    """One token by the recipe's docstring, with rationals: its power, scales and codes. Finite values."""
    amax = np.abs(token).max()
    power = next(t for t in range(255) if amax <= 2688 * 2.0 ** (t - 127))
    relative = [exact.Fraction(float(x)) / exact.TWO ** (power - 127) for x in token]
    scales, codes = [], []
    for first in range(0, len(token), 16):
        block = relative[first : first + 16]
        largest = exact.float32(max(abs(x) for x in block) / 6)
        scale = exact.encode(largest, exact.SPECS["ue4m3"])
        step = exact.value(scale, exact.SPECS["ue4m3"])
        scales.append(scale)
        for x, original in zip(block, token[first : first + 16], strict=True):
            quotient = exact.float32(abs(x) / step) if scale else exact.Fraction(0)
            code = exact.encode(quotient, exact.SPECS["e2m1"])
            codes.append(code | (8 if np.signbit(original) else 0))
    return power, scales, codes


@pytest.mark.parametrize("sample", [samples.bell, samples.wide])
def test_the_power_and_the_scales_of_a_token(sample) -> None:
    x = sample(7, (25,), 1, 1, 40)[0][:, 0].astype(np.float32)
    x[3] = 0
    fp4, promoted = made(UE4M3, x)
    codes, scales = (part[:, 0] for part in fp4.trace())
    for token, row in enumerate(x.astype(np.float64)):
        power, wanted_scales, wanted_codes = slow_ue4m3(row)
        assert fp4.token_scales[token, 0, 0] == power
        assert scales[token].tolist() == wanted_scales
        assert codes[token].tolist() == wanted_codes
    # The promoted copy is te-mx-e4m3 of the FP4 values, over the token.
    te = exact.SPECS["e4m3"]
    high, bytes_ = (part[:, 0] for part in promoted.trace())
    for token, row in enumerate(values(fp4, "e2m1", "ue4m3")):
        amax = exact.Fraction(float(np.abs(row).max()))
        scale = exact.rceil_scale(amax, 448)
        assert bytes_[token, 0] == scale
        assert high[token].tolist() == exact.block_codes(row.tolist(), scale, te)


def test_special_tokens_with_a_power() -> None:
    x = np.zeros((3, 32), np.float32)
    x[0, 3], x[0, 20] = np.nan, 1.0
    x[1, 3], x[1, 20] = np.inf, 2.0**127
    x[2, 3] = -0.0
    fp4, promoted = made(UE4M3, x)
    codes, scales = (part[:, 0] for part in fp4.trace())
    assert fp4.token_scales[:, 0, 0].tolist() == [255, 254, 0]
    assert scales.tolist() == [[0x7F, 0x7F], [0x7E, 0x23], [0, 0]]  # 2^127 is taken as 1
    assert codes[0].tolist() == [7] * 32
    assert codes[1, [3, 20]].tolist() == [7, 7]
    assert codes[2].tolist() == [0] * 3 + [8] + [0] * 28
    high, _ = promoted.trace()
    assert high[0, 0].tolist() == [0x7F] * 32
    assert high[2, 0].tolist() == [0] * 3 + [0x80] + [0] * 28
