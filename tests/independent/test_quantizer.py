"""The scale rule against torchao where the two agree, and against worked examples elsewhere."""

from fractions import Fraction

import pytest

from tests.formats import stored
from tests.independent import float32
from tests.independent.quantizer import quantize

MINUS = float32.SIGN


def test_torchao_rceil() -> None:
    """bfloat16 blocks with a finite amax of at least 7 * 2**-120: the libraries agree there."""
    blocks = stored.inputs()["mx_bf16_bits"].tolist()
    oracle = stored.oracle("mx-torchao-0.18.0-e4m3-rceil")
    elements = oracle["element_codes_bf16"].tolist()
    scales = oracle["scale_codes_bf16"].tolist()
    smallest = 7 * float32.power_of_two(-120)
    compared = 0
    for row in range(len(blocks)):
        block = [float32.from_bfloat16(x) for x in blocks[row]]
        if any(float32.is_nan(x) or float32.is_infinite(x) for x in block):
            continue
        if max(abs(float32.value(x)) for x in block) < smallest:
            continue
        assert quantize(block) == (elements[row], scales[row]), f"block {row}"
        compared += 1
    assert compared > 1500


def test_amax_one_step_above_the_largest_code() -> None:
    """448 * 2**k fits with byte 127 + k; one float32 step more needs the next byte."""
    for k in (-100, -1, 0, 4, 100):
        amax = float32.nearest(448 * float32.power_of_two(k))
        assert quantize([amax]) == ([0x7E], 127 + k)
        assert quantize([amax + 1]) == ([0x76], 128 + k)


@pytest.mark.parametrize(
    ("block", "codes", "byte"),
    [
        ([449, 1], [0x76, 0x30], 128),
        ([448, 17], [0x7E, 0x58], 127),
        ([Fraction(1, 2**126)], [0x40], 0),
        # amax / 448 is just above 2**-127, a subnormal that must be kept: byte 1, not 0.
        ([Fraction(449, 2**127), Fraction(1, 2**126)], [0x76, 0x38], 1),
        ([Fraction(448, 2**127), Fraction(1, 2**126)], [0x7E, 0x40], 0),
    ],
)
def test_worked_examples(block: list[int | Fraction], codes: list[int], byte: int) -> None:
    assert quantize([float32.nearest(Fraction(x)) for x in block]) == (codes, byte)


def test_zeros_keep_their_signs() -> None:
    assert quantize([0, MINUS, 0]) == ([0x00, 0x80, 0x00], 0)


def test_nan_is_ignored_by_amax() -> None:
    nan, one = 0xFFC00000, float32.ONE
    assert quantize([nan, one, one | MINUS]) == ([0x7F, 0x78, 0xF8], 119)
    assert quantize([nan, nan]) == ([0x7F, 0x7F], 0)


def test_infinity_takes_the_largest_finite_scale() -> None:
    block = [float32.INFINITY, float32.ONE, float32.ONE | MINUS, float32.MINUS_INFINITY]
    assert quantize(block) == ([0x7E, 0x00, 0x80, 0xFE], 254)
