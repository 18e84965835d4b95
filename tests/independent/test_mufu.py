"""The special functions: tables against their recorded digests, results against the tables.

The digests are of what an NVIDIA H200 returned. The tables are computed with whole arrays, then
single results of this package must equal them.
"""

import hashlib
import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from tests.independent import float32, mufu

DIGESTS = {
    "ex2": "b2a42c4a626469c986e33e43f16f41bde9d84de94347cd9ceaa1bd68d36bcdf0",
    "rcp": "c408381446132e07fa5581e930dc33fb790bea7ec4276ef3621e322df2492a55",
    "lg2_above": "7fd9be9a924e40a0ee18ba20e7f5158135112947597c8dd86131d3d4d8f9dbfa",
    "lg2_below": "883e42d8f751983063b4c93a966fba006f08c1e111d90fe20e0fee3dd67ddd22",
    "tanh": "9d505a441e95426d30b9eb031ebc3999f1e72456dbaa154538dd9963610c3122",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_table_is_the_measured_one(name: str) -> None:
    assert hashlib.sha256(mufu.table(name).astype("<u4").tobytes()).hexdigest() == DIGESTS[name]


@pytest.mark.parametrize("name", [name for name in DIGESTS if name != "tanh"])
def test_entries_equal_the_table(name: str) -> None:
    """On random indices, both ends, and the ends of segments."""
    source = random.Random(name)
    ends = range(0, mufu.ENTRIES + 1, mufu.PLACES // 2)
    indices = {0, 1, 2, mufu.ENTRIES - 2, mufu.ENTRIES - 1}
    indices.update(end - 1 for end in ends if end)
    indices.update(end for end in ends if end < mufu.ENTRIES)
    indices.update(source.randrange(mufu.ENTRIES) for _ in range(500))
    for index in sorted(indices):
        assert mufu.entry(name, index) == mufu.table(name)[index], index


def test_truncated_square() -> None:
    source = random.Random(13)
    for x in [0, 1, 511, 723, 724, 1023, 1024, 131071, *source.sample(range(mufu.PLACES), 1000)]:
        assert mufu.truncated_square(x) == mufu.truncated_squares()[x], x
        assert 0 <= Fraction(x * x, 1 << 19) - mufu.truncated_square(x) < 9


def tanh_arguments() -> npt.NDArray[np.float64]:
    """The smallest magnitude of each place, in order."""
    places = np.arange(16 * mufu.PLACES) / mufu.PLACES
    parts = [
        (1 + places[: count * mufu.PLACES] / count) * 2.0**exponent
        for exponent, count in mufu.TANH_SEGMENTS.items()
    ]
    return np.concatenate(parts)


def test_tanh_equals_the_table() -> None:
    x, table = tanh_arguments(), mufu.table("tanh")
    assert x.shape == table.shape == (51 * mufu.PLACES,)
    source = random.Random(14)
    chosen = {k * mufu.PLACES + end for k in range(51) for end in (0, 1, mufu.PLACES - 1)}
    chosen.update(source.randrange(table.size) for _ in range(500))
    bits = x.astype(np.float32).view(np.uint32)
    for index in sorted(chosen):
        lowest = int(bits[index])
        following = int(bits[index + 1]) if index + 1 < bits.size else 0x41000000
        for pattern in {lowest, following - 1}:
            assert mufu.tanh(pattern) == table[index], hex(pattern)
            assert mufu.tanh(pattern | float32.SIGN) == table[index] | float32.SIGN


def test_tanh_is_near_the_hyperbolic_tangent() -> None:
    """Nearer than the 2^-11, relative, that the PTX ISA promises; it is not monotonic."""
    x, table = tanh_arguments(), mufu.table("tanh")
    result = table.astype(np.uint32).view(np.float32).astype(np.float64)
    assert np.abs(result / np.tanh(x) - 1).max() < 2.0**-16
    assert (np.diff(result) < 0).any()


def test_tanh_special_arguments() -> None:
    minus = float32.SIGN
    assert mufu.tanh(0x7F800001) == mufu.tanh(0xFFC00000) == float32.NAN
    assert mufu.tanh(float32.INFINITY) == mufu.tanh(0x41000000) == float32.ONE  # 8
    assert mufu.tanh(0xFF800000) == minus | float32.ONE
    for unchanged in (0, 1, 0x7FFFFF, 0x00800000, 0x3B7FFFFF, minus, minus | 1, 0xBB7FFFFF):
        assert mufu.tanh(unchanged) == unchanged
    assert mufu.tanh(0x40FFFFFF) == 0x3F7FFFFC
    # Read from an H200: the last of [4, 8), and the first of some binades.
    assert [mufu.tanh((127 + e) << 23) for e in (-4, -3, -2, -1, 0)] == [
        0x3D7FAAC0,
        0x3DFEACD0,
        0x3E7ACBC0,
        0x3EEC9A50,
        0x3F42F848,
    ]


def test_exp2_of_negative_arguments_has_the_recorded_errors() -> None:
    """Recorded separately on the device over (-1, 0]: +1 ulp in 75 cases, -2 ulp 1.0 %, never more.

    Counted with the rebuilt table; the scalar model must agree on those 75 and on a sample.
    """
    index = np.arange(mufu.ENTRIES)
    k = np.where(index == 0, 0, -index - 1)
    result = mufu.table("ex2")[k % mufu.ENTRIES] + (k // mufu.ENTRIES << 23)
    exact = np.exp2(-index / mufu.ENTRIES).astype(np.float32).view(np.uint32).astype(np.int64)
    errors = result - exact
    counts = Counter(errors.tolist())
    assert counts[1] == 75
    assert set(counts) == {-2, -1, 0, 1}
    assert [round(100 * counts[error] / mufu.ENTRIES, 1) for error in (-2, -1, 0)] == [
        1,
        59.1,
        39.9,
    ]
    chosen = np.flatnonzero(errors == 1).tolist() + list(range(0, mufu.ENTRIES, 40009))
    for i in chosen:
        bits = int(np.array(-i / mufu.ENTRIES, np.float32).view(np.uint32))
        assert mufu.exp2(bits) == result[i], i


def test_exp2_cuts_the_argument_to_the_grid_first() -> None:
    """Between grid points the argument is cut toward zero, then the one's complement is taken."""
    for i in (1, 2, 3, 12345, mufu.ENTRIES // 2 + 1):
        below = mufu.entry("ex2", mufu.ENTRIES - i - 1) - (1 << 23)
        for numerator in (2 * i, 2 * i + 1):
            argument = Fraction(-numerator, 2 * mufu.ENTRIES)
            if float32.value(float32.nearest(argument)) == argument:
                assert mufu.exp2(float32.nearest(argument)) == below
        above = float32.nearest(Fraction(i, mufu.ENTRIES) + Fraction(1, 3 * mufu.ENTRIES))
        if i < 2**20:
            assert mufu.exp2(above) == mufu.entry("ex2", i)


def test_exp2_is_exact_at_integers() -> None:
    for exponent in range(-126, 128):
        bits = mufu.exp2(float32.nearest(Fraction(exponent)))
        assert float32.value(bits) == float32.power_of_two(exponent)


def test_exp2_special_arguments() -> None:
    minus = float32.SIGN
    assert mufu.exp2(0x7FC00000) == mufu.exp2(0xFF800001) == float32.NAN
    assert mufu.exp2(float32.INFINITY) == mufu.exp2(0x43000000) == float32.INFINITY  # 128
    assert mufu.exp2(float32.MINUS_INFINITY) == mufu.exp2(0xC2FC0001) == 0  # below -126
    assert mufu.exp2(0xC2FC0000) == 0x00800000  # -126
    assert {mufu.exp2(bits) for bits in (0, minus, 1, minus | 0x7FFFFF)} == {float32.ONE}
    assert mufu.exp2(0xB3000000) == float32.ONE  # -2**-25: cut to a whole number, -0


def test_reciprocal_special_arguments() -> None:
    minus = float32.SIGN
    assert mufu.reciprocal(0x7FC00000) == float32.NAN
    assert mufu.reciprocal(float32.INFINITY) == 0
    assert mufu.reciprocal(float32.MINUS_INFINITY) == minus
    assert mufu.reciprocal(0x007FFFFF) == mufu.reciprocal(0) == float32.INFINITY
    assert mufu.reciprocal(minus | 1) == float32.MINUS_INFINITY
    assert mufu.reciprocal(0x7E800000) == 0x00800000  # 2**126
    assert mufu.reciprocal(0x7E800001) == 0  # a result below the smallest normal is flushed
    assert mufu.reciprocal(minus | 0x7F000000) == minus


def test_reciprocal_is_rounded_to_nearest_for_these() -> None:
    """Recorded separately on the device: the quantizers' divisors and every positive e4m3 value."""
    for x in (6, 448, 7.5, 28, 57344, 2688, *(2**-9 * m for m in range(1, 16)), 240, 1.125, 13):
        exact = Fraction(x)
        assert mufu.reciprocal(float32.nearest(exact)) == float32.nearest(1 / exact), x


def test_log2_special_arguments() -> None:
    assert mufu.log2(0x7FC00000) == mufu.log2(0xBF800000) == float32.NAN
    assert mufu.log2(float32.MINUS_INFINITY) == float32.NAN
    assert mufu.log2(0) == mufu.log2(float32.SIGN) == float32.MINUS_INFINITY
    assert mufu.log2(0x007FFFFF) == mufu.log2(0x80000001) == float32.MINUS_INFINITY
    assert mufu.log2(float32.INFINITY) == float32.INFINITY
    assert mufu.log2(float32.ONE) == 0
    assert mufu.log2(0x41000000) == 0x40400000  # log2(8) = 3


def test_log2_is_near_the_logarithm() -> None:
    source = random.Random(12)
    for _ in range(300):
        bits = source.randrange(0x00800000, float32.INFINITY)
        got = np.array(mufu.log2(bits), np.uint32).view(np.float32)
        exact = math.log2(float32.value(bits))
        assert abs(float(got) - exact) <= 2.0**-22 * max(1, abs(exact))
