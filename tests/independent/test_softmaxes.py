"""The online softmaxes by hand: c = 1, scores that are small numbers."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tests.independent import float32, mufu
from tests.independent.softmaxes import FOUR, SENTINEL, IntegerSoftmax, LazySoftmax, ScaledSoftmax

INF, NAN = math.inf, math.nan


def bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


def values(patterns: Sequence[int]) -> list[float]:
    return np.array(patterns, np.uint32).view(np.float32).tolist()


def feed(softmax: object, scores: Sequence[float], seen: Sequence[bool] | None = None) -> tuple:
    """P, row maximum, row sum and what an accumulator of 1 becomes."""
    visible = [True] * len(scores) if seen is None else seen
    p, rescale = softmax.tile([bits(x) for x in scores], visible)
    return (
        values(p),
        *values([softmax.row_max, softmax.row_sum, rescale(float32.ONE)]),
    )


def test_integer_base() -> None:
    softmax = IntegerSoftmax(float32.ONE, units_exponent=8)
    # ceil(0.5) = 1 is the base of the tile; units of 2**-8.
    p, row_max, row_sum, factor = feed(softmax, [0.0, 0.5, 9.0], [True, True, False])
    assert (p[0], p[2], row_max, factor) == (128, 0, 1, 0)
    assert p[1] == pytest.approx(256 * 2**-0.5)
    assert row_sum == pytest.approx(sum(p))
    p, row_max, second, factor = feed(softmax, [3.0, -INF])
    assert (p, row_max, factor) == ([256, 0], 3, 0.25)
    assert second == pytest.approx(row_sum / 4 + 256)
    o, out, lse = softmax.finish([bits(second)])
    assert values(o) == [pytest.approx(1)]
    assert out == [0x3F80]
    exact = math.log(2**0 + 2**0.5 + 2**3)
    assert values([lse]) == [pytest.approx(exact, rel=1e-6)]


def test_integer_base_without_a_number() -> None:
    softmax = IntegerSoftmax(float32.ONE, units_exponent=8)
    assert feed(softmax, [-INF, 5.0], [True, False]) == ([0, 0], -INF, 0, 1)
    assert softmax.finish([float32.NAN]) == ([0], [0], float32.MINUS_INFINITY)
    p, row_max, *_ = feed(softmax, [1.0, NAN, INF])
    assert all(math.isnan(x) for x in (*p, row_max))
    o, out, lse = softmax.finish([0])
    assert (o, out, lse) == ([float32.NAN], [0x7FFF], float32.NAN)


def test_lazy_maximum() -> None:
    softmax = LazySoftmax(float32.ONE)
    assert feed(softmax, [0.0, -1.0]) == ([1, 0.5], 0, 1.5, 1)
    # 8 above: kept. P may reach 2**8.
    assert feed(softmax, [8.0]) == ([256], 0, 257.5, 1)
    # More than 8 above the kept one: 2**-9 for what there is.
    assert feed(softmax, [9.0]) == ([1], 9, 257.5 / 512 + 1, 2**-9)
    assert feed(softmax, [-5.0, 20.0], [True, False]) == (
        [2**-14, 0],
        9,
        257.5 / 512 + 1 + 2**-14,
        1,
    )
    o, out, lse = softmax.finish([softmax.row_sum])
    assert values(o) == [pytest.approx(1)]
    assert out == [0x3F80]
    exact = math.log(1.5 + 2**8 + 2**9 + 2**-5)
    assert values([lse]) == [pytest.approx(exact, rel=1e-6)]


def test_lazy_maximum_in_special_rows() -> None:
    softmax = LazySoftmax(float32.ONE)
    assert feed(softmax, [-INF]) == ([0], -INF, 0, 1)
    # m_old - ms is -inf: no threshold, a = 0.
    assert feed(softmax, [-2.0]) == ([1], -2, 1, 0)
    empty = LazySoftmax(float32.ONE)
    feed(empty, [-INF])
    feed(empty, [-INF])
    assert empty.finish([float32.ONE]) == ([float32.ONE], [0x3F80], float32.MINUS_INFINITY)


def test_lazy_maximum_ignores_nan() -> None:
    softmax = LazySoftmax(float32.ONE)
    p, row_max, row_sum, _ = feed(softmax, [1.0, NAN])
    assert (p[0], row_max) == (1, 1)
    assert math.isnan(p[1])
    assert math.isnan(row_sum)
    assert softmax.finish([0]) == ([0], [0], float32.MINUS_INFINITY)
    # An emulated column turns a NaN into 0.
    scores = [0.0] * 45
    scores[44] = NAN
    assert feed(LazySoftmax(float32.ONE), scores)[:3] == ([1.0] * 44 + [0], 0, 44)
    # All 128 columns visible and NaN.
    assert math.isnan(feed(LazySoftmax(float32.ONE), [NAN] * 128)[1])
    assert feed(LazySoftmax(float32.ONE), [NAN] * 127)[1] == -INF


def test_scaled_maximum() -> None:
    softmax = ScaledSoftmax(float32.ONE, units=FOUR)
    assert feed(softmax, [0.0, -1.0, 0.0]) == ([16, 8, 16], 0, 40, 1)
    # 4 above: kept; P' may reach 2**8.
    assert feed(softmax, [4.0]) == ([256], 0, 296, 1)
    assert feed(softmax, [5.0, 50.0], [True, False]) == ([16, 0], 5, 296 / 32 + 16, 2**-5)
    o, out, lse = softmax.finish([softmax.row_sum])
    assert values(o) == [pytest.approx(1)]
    assert out == [0x3F80]
    assert values([lse]) == [pytest.approx(math.log(2.5 + 2**4 + 2**5), rel=1e-6)]


def test_scaled_maximum_without_units() -> None:
    softmax = ScaledSoftmax(float32.ONE, units=0)
    assert feed(softmax, [3.0]) == ([1], 3, 1, 1)
    assert softmax.finish([float32.ONE]) == (
        [float32.ONE],
        [0x3F80],
        bits(3 * np.float32(math.log(2))),
    )


def test_scaled_maximum_in_special_rows() -> None:
    softmax = ScaledSoftmax(float32.ONE, units=FOUR)
    sentinel = values([SENTINEL])[0]
    assert feed(softmax, [-INF]) == ([0], sentinel, 0, 1)
    # Still the first update, but not the first tile: the accumulator is multiplied by 0.
    assert feed(softmax, [1.0]) == ([16], 1, 16, 0)
    dead = ScaledSoftmax(float32.ONE, units=FOUR)
    feed(dead, [-INF])
    assert dead.finish([float32.NAN]) == ([0], [0], float32.MINUS_INFINITY)
    # With c < 1 the sentinel of a masked column, scaled, is above the sentinel.
    scaled = ScaledSoftmax(bits(0.5), units=FOUR)
    assert feed(scaled, [-INF, 0.0], [True, False])[1] == sentinel / 2
    # All 128 columns visible and NaN: m stays at the sentinel.
    p, row_max, row_sum, _ = feed(ScaledSoftmax(float32.ONE, units=FOUR), [NAN] * 128)
    assert row_max == sentinel
    assert [math.isnan(x) for x in p] == [column % 16 < 12 for column in range(128)]
    assert math.isnan(row_sum)


@pytest.mark.parametrize(
    ("softmax", "emulated"),
    [
        (
            LazySoftmax(float32.ONE),
            [44, 45, 46, 47, 60, 61, 62, 63, 76, 77, 78, 79, 92, 93, 94, 95],
        ),
        (
            ScaledSoftmax(float32.ONE, units=0),
            [16 * block + column for block in range(8) for column in (12, 13, 14, 15)],
        ),
    ],
)
def test_emulated_columns(softmax: LazySoftmax | ScaledSoftmax, emulated: list[int]) -> None:
    p, _ = softmax.tile([0] + [bits(-0.9)] * 127, [True] * 128)
    other = [column for column in range(1, 128) if p[column] != mufu.exp2(bits(-0.9))]
    assert other == emulated
