"""FP4 copies: worked examples and the values they stand for."""

from fractions import Fraction

import numpy as np
import pytest

from tests.independent import float32, fp4, nvfp4
from tests.independent.samples import as_float64


def row(*values: float) -> list[int]:
    return [float32.nearest(Fraction(x)) for x in values]


def test_power_of_two_scales_by_hand() -> None:
    """6 needs 2**0, 6.5 needs 2**1; a block 2**-14 and more below the token's largest is held there."""
    found = fp4.power_of_two_row(row(*[6.0] * 16, *[6.5] * 16, *[2.0**-20] * 16, *[0.0] * 4))
    assert found.token == 128
    assert found.scales == [127, 128, 114, 114]
    # 6 is code 7; 6.5 / 2 = 3.25 is nearest to 3 (code 5); 2**-20 / 2**-13 is nearest to 0.
    assert found.codes == [7] * 16 + [5] * 16 + [0] * 20


def test_ue4m3_scales_by_hand() -> None:
    """2688 is the largest amax of a token with byte 127; its block's scale is 448, of 6 it is 1."""
    found = fp4.ue4m3_row(row(*[2688.0] * 16, *[6.0, -3.0] * 8) + [float32.SIGN] * 16)
    assert found.token == 127
    assert found.scales == [0x7E, 0x38, 0]
    assert found.codes == [7] * 16 + [7, 13] * 8 + [8] * 16


@pytest.mark.parametrize("make", [fp4.power_of_two_row, fp4.ue4m3_row])
def test_nan_is_the_whole_token(make: object) -> None:
    assert callable(make)
    found = make([*row(1.0, 2.0), float32.NAN])
    assert found.token == 255
    assert found.codes == [7, 7, 7]
    assert found.scales in ([255], [0x7F])


@pytest.mark.parametrize("preset", fp4.PRESETS)
def test_promotion(preset: str) -> None:
    """The same values in e4m3: exact with powers of two, within 2**-4 with UE4M3 scales."""
    rng = np.random.default_rng(1)
    values = (rng.normal(size=(6, 40)) * np.exp2(rng.integers(-6, 6, (6, 1)))).astype(np.float32)
    copy = fp4.quantized(values.view(np.uint32).tolist(), 40, preset)
    assert copy.tokens is not None
    token = np.exp2(copy.tokens - 127.0) if preset == "flamia-fp4-ue4m3" else 1.0
    own = as_float64(np.array(copy.values(), np.uint32)) * token
    promoted = as_float64(np.array(fp4.promoted(copy, 40, "te-mx-e4m3").values(), np.uint32))
    # Half a step of e2m1 between 4 and 6 is 1 of 6; UE4M3 scales are off by another 1 / 16.
    largest = np.abs(values).reshape(6, -1).max(axis=1, keepdims=True)
    assert (np.abs(own - values) <= largest * 0.25).all()
    if preset == "flamia-fp4-e8m0":
        np.testing.assert_array_equal(promoted, own)
    else:
        assert (promoted != own).any()
        assert (np.abs(promoted - own) <= np.abs(own) * 2**-4 + largest * 2**-17).all()


@pytest.mark.parametrize(
    ("block", "scale", "codes"),
    [
        # 6 / 6 = 1; 5 is a tie between 4 and 6, to even (4, code 6), as 2.5 is to 2 (code 4) and 3.5 to 4.
        ([6.0, 5.0, -2.5, 3.5, 0.25, 0.26], 0x38, [7, 6, 12, 6, 0, 1]),
        # The largest scale is 448: 2688 is its largest value, beyond it all saturates.
        ([1e9, -2688.0, 448.0], 0x7E, [7, 15, 2]),
        # The least scale is 2^-9, whatever is below it; 2^-10 is half of it, 2^-11 a tie to zero.
        ([2.0**-10, 2.0**-11, -(2.0**-9)], 0x01, [1, 0, 10]),
        ([0.0], 0x01, [0]),
        # 2.8125 / 6 = 0.46875 is a scale; 0.5859375 over it is 1.25, a tie to 1. A reciprocal would round it up.
        ([2.8125, 0.5859375], 0x2F, [7, 2]),
    ],
)
def test_nvfp4_without_a_tensor_scale(block: list[float], scale: int, codes: list[int]) -> None:
    assert nvfp4.quantize(row(*block)) == (codes, scale)


def test_nvfp4_of_what_is_no_number() -> None:
    """A NaN does not count in amax and becomes the largest code; infinity has the largest scale."""
    assert nvfp4.quantize([float32.NAN, *row(3.0)]) == ([7, 7], 0x30)
    assert nvfp4.quantize([float32.NAN]) == ([7], 0x01)
    assert nvfp4.quantize([float32.SIGN, 0]) == ([8, 0], 0x01)
    assert nvfp4.quantize([float32.INFINITY, *row(-448.0, 1.0)]) == ([7, 10, 0], 0x7E)


def test_nvfp4_values_are_bfloat16() -> None:
    """All 8 codes of both signs under all 126 scales."""
    assert nvfp4.value(15, 0x7E) == float32.to_bfloat16(row(-2688.0)[0])
    assert nvfp4.value(8, 0x38) == 0x8000
    for scale in range(1, 0x7F):
        for code in range(16):
            nvfp4.value(code, scale)  # asserts that nothing is rounded
