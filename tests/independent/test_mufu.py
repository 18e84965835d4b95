"""The special functions: tables against their recorded digests, entries against the tables.

The digests are of what an NVIDIA H200 returned. The tables are rebuilt with float64 (a second way
to round the functions), then single entries of this package must equal them.
"""

import hashlib
import math
import random
from collections import Counter
from fractions import Fraction
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from tests.independent import float32, mufu

DIGESTS = {
    "ex2": "b2a42c4a626469c986e33e43f16f41bde9d84de94347cd9ceaa1bd68d36bcdf0",
    "rcp": "c408381446132e07fa5581e930dc33fb790bea7ec4276ef3621e322df2492a55",
    "lg2_above": "7fd9be9a924e40a0ee18ba20e7f5158135112947597c8dd86131d3d4d8f9dbfa",
    "lg2_below": "883e42d8f751983063b4c93a966fba006f08c1e111d90fe20e0fee3dd67ddd22",
}


def float64_reference(name: str) -> npt.NDArray[np.float64]:
    """The function at all arguments of a table, in float64."""
    fraction = np.arange(mufu.ENTRIES) / mufu.ENTRIES
    if name == "ex2":
        return np.exp2(fraction)
    if name == "rcp":
        return 1 / (1 + fraction)
    return np.log2(1 + fraction if name == "lg2_above" else (1 + fraction) / 2)


@cache
def table(name: str) -> npt.NDArray[np.int64]:
    """A whole table rebuilt in float64."""
    rounded = float64_reference(name).astype(np.float32).view(np.uint32).astype(np.int64)
    rounded += np.frombuffer(mufu.differences(name), np.int8)
    for index, bits in mufu.exceptions(name).items():
        rounded[index] = bits
    return rounded


@pytest.mark.parametrize("name", DIGESTS)
def test_table_is_the_measured_one(name: str) -> None:
    assert hashlib.sha256(table(name).astype("<u4").tobytes()).hexdigest() == DIGESTS[name]


@pytest.mark.parametrize("name", DIGESTS)
def test_entries_equal_the_table(name: str) -> None:
    """On random indices, both ends, exceptions, and wherever float64 might round differently."""
    source = random.Random(name)
    indices = {0, 1, 2, mufu.ENTRIES - 2, mufu.ENTRIES - 1}
    indices.update(source.randrange(mufu.ENTRIES) for _ in range(500))
    exceptions = sorted(mufu.exceptions(name))
    indices.update(source.sample(exceptions, min(50, len(exceptions))))
    # The 29 bits that float64 has beyond float32, as a distance from the rounding boundary.
    dropped = float64_reference(name).view(np.uint64) & np.uint64((1 << 29) - 1)
    distance = np.abs(dropped.astype(np.int64) - (1 << 28))
    indices.update(np.flatnonzero(distance < 4096).tolist())
    assert len(indices) > 600
    for index in sorted(indices):
        assert mufu.entry(name, index) == table(name)[index], index


def test_exp2_of_negative_arguments_has_the_recorded_errors() -> None:
    """Recorded separately on the device over (-1, 0]: +1 ulp in 75 cases, -2 ulp 1.0 %, never more.

    Counted with the rebuilt table; the scalar model must agree on those 75 and on a sample.
    """
    index = np.arange(mufu.ENTRIES)
    k = np.where(index == 0, 0, -index - 1)
    result = table("ex2")[k % mufu.ENTRIES] + (k // mufu.ENTRIES << 23)
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
