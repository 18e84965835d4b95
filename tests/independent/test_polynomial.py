"""The emulated exp2: its published error, whole numbers, and what the bits give at the edges."""

import math

import numpy as np
import pytest

from tests.independent import float32, polynomial


def bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def test_whole_numbers_are_exact() -> None:
    for n in range(-126, 128):
        assert polynomial.exp2(bits(n)) == bits(2.0**n)


def test_largest_error() -> None:
    """8.769e-5 of 2**x at a fraction of 0.1008, as recorded of the kernels' constants."""
    fractions = np.arange(1 << 12) / (1 << 12)
    errors = []
    for f in fractions.tolist():
        got = float(float32.value(polynomial.exp2(bits(f - 3))))
        errors.append(got / 2.0 ** (f - 3) - 1)
    worst = int(np.argmax(np.abs(errors)))
    assert abs(errors[worst]) == pytest.approx(8.769e-5, abs=2e-8)
    assert fractions[worst] == pytest.approx(0.1008, abs=2e-3)


def test_one_argument_by_numpy() -> None:
    """x = -0.5: f = 1/2 exactly, so each fma is a product by a power of two and one addition."""
    c1, c2, c3 = np.array([0x3F31F519, 0x3E6906A4, 0x3D9DF09D], np.uint32).view(np.float32)
    half = np.float32(0.5)
    p = (c3 * half + c2) * half + c1
    wanted = (p * half + np.float32(1)) * half
    assert polynomial.exp2(bits(-0.5)) == bits(wanted)


@pytest.mark.parametrize(
    ("argument", "wanted"),
    [
        (-127.0, 0),
        (-1000.0, 0),
        (-math.inf, 0),
        (math.nan, 0),  # the maximum with -127 ignores it
        (128.0, float32.INFINITY),
        (129.0, 0x80000000),
        (130.0, 0x80800000),
        (math.inf, float32.NAN),
        (-0.0, float32.ONE),
    ],
)
def test_edges(argument: float, wanted: int) -> None:
    assert polynomial.exp2(bits(argument)) == wanted


def test_below_the_normal_range() -> None:
    """In [-127, -126) the significand lands in a subnormal pattern: (p - 1) * 2**-126."""
    got = float32.value(polynomial.exp2(bits(-126.5)))
    assert float(got / float32.power_of_two(-126)) == pytest.approx(math.sqrt(2) - 1, rel=4e-4)


def test_subnormal_arguments_are_flushed() -> None:
    """-2**-149 is a zero; -2**-126 is not, and its fraction rounds up to 1."""
    assert polynomial.exp2(0x80000001) == float32.ONE
    got = polynomial.exp2(0x80800000)
    assert 0.9998 < float(float32.value(got)) < 1.0002
    assert got != float32.ONE
