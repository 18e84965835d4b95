"""tanh rounded correctly: an independent check by `decimal`, and the distance from every boundary.

The proof in `flamia_ref.arithmetic.correct_tanh` needs that no |x| brings tanh |x| within ERROR units
(below 2^-8: ERROR_BELOW) of a rounding boundary. All 126,910,464 from 2^-12 to 9.03125 are checked
nightly, every 199th by default.
"""

from collections.abc import Iterator
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref import _backend
from flamia_ref.arithmetic import correct_tanh
from tests.arithmetic.operands import SPECIAL, Words, differing, in_every_mode, run
from tests.independent import float32 as independent

CONTEXT = Context(prec=80, Emin=-10_000, Emax=10_000)
CLOSE = Fraction(1, 10**50)  # relative
NAN, INF, ONE, SIGN = 0x7FFFFFFF, 0x7F800000, 0x3F800000, 1 << 31
SCALE, SCALE_BELOW = 1 << 64, 1 << 72
LEAST, STEP, LIMIT = 0x39800000, 0x3B800000, 0x41108000  # 2^-12, 2^-8, 9.03125

# Of all inputs those whose results come nearest to a rounding boundary: below 2^-8 with the
# distance in 2^-72, from there on with that in 2^-64.
HARDEST_BELOW = {
    0x3A7A8D33: 1712, 0x3AC37DE2: 5156, 0x39E89769: 6980, 0x39B89BA2: 8237, 0x39B89BA3: 8803,
    0x3A389BA3: 11378, 0x3A68976A: 12553, 0x3AFA8D39: 13717, 0x39E89768: 20069,
}  # fmt: skip
HARDEST = {
    0x3BC8B605: 430, 0x3CB7D5F3: 446, 0x3CD41B91: 806, 0x3BFBDA0B: 932, 0x3BC11B0B: 945,
    0x3D11300F: 990, 0x3BE46E2B: 1033, 0x3C96AE2E: 1187, 0x3BDD782D: 1242, 0x3BC37E1B: 1374,
    0x3C4E34B0: 1667, 0x3B80D407: 1818, 0x3BAB6E65: 1931, 0x3BB5ECFF: 1993, 0x3CA1BC81: 1994,
}  # fmt: skip


def tangent(x: Fraction) -> Fraction:
    """tanh x for 2^-13 < x < 60, to 50 digits and more."""
    doubled = CONTEXT.divide(Decimal(2 * x.numerator), Decimal(x.denominator))
    assert Fraction(doubled) == 2 * x
    power = CONTEXT.exp(doubled)
    return Fraction(CONTEXT.divide(power - 1, CONTEXT.add(power, Decimal(1))))


def exactly(bits: int) -> int:
    """tanh of float32 bits, rounded to nearest even."""
    if independent.is_nan(bits):
        return NAN
    sign, magnitude = bits & SIGN, bits & ~SIGN
    if magnitude == 0:
        return bits
    if magnitude == INF:
        return sign | ONE
    x = independent.value(magnitude)
    if x > 50:
        low, high = 1 - Fraction(1, 1 << 100), Fraction(1)
    elif x < Fraction(1, 1 << 12):
        low, high = x - x**3 / 3, x
    else:
        near = tangent(x)
        low, high = near * (1 - CLOSE), near * (1 + CLOSE)
    assert independent.nearest(low) == independent.nearest(high), f"{bits:#x} needs more digits"
    return sign | independent.nearest(low)


def around(centres: Any, reach: int) -> Words:
    offsets = np.arange(-reach, reach + 1)
    words = (np.asarray(centres, dtype=np.int64)[:, None] + offsets).ravel()
    return words[words >= 0].astype(np.uint32)


def bits(values: Any) -> Words:
    return np.asarray(values, dtype=np.float32).view(np.uint32)


def inputs() -> Words:
    source = np.random.default_rng(60)
    hard = around([*HARDEST, *HARDEST_BELOW], 1)
    # Where the path changes, where the result becomes 1, where infinity is.
    edges = around([LEAST, STEP, LIMIT, 0x41800000, 0x42000000, bits(13 * np.log(2.0))], 30)
    binades = around(np.arange(255) << 23, 1)
    # Where the result passes 2^-k, and where a step of the table begins.
    passes = around(bits(np.arctanh(2.0 ** -np.arange(1, 14))), 3)
    steps = around(bits(np.concatenate([np.arange(1, 40), source.integers(40, 2400, 80)]) / 256), 1)
    fields = np.arange(255, dtype=np.uint32)[:, None] << np.uint32(23)
    strata = (fields | source.integers(0, 1 << 23, (255, 4), dtype=np.uint32)).ravel()
    small = source.integers(LEAST, STEP, 500, dtype=np.uint32)
    middle = source.integers(STEP, LIMIT, 1200, dtype=np.uint32)
    uniform = bits(source.uniform(0, 10, 500))
    positive = np.concatenate([hard, edges, passes, steps, strata, small, middle, uniform, binades])
    sign = source.integers(0, 2, positive.size, dtype=np.uint32) << np.uint32(31)
    arbitrary = source.integers(0, 1 << 32, 300, dtype=np.uint32)
    return np.concatenate([SPECIAL, hard ^ np.uint32(SIGN), hard, positive ^ sign, arbitrary])


def test_against_decimal() -> None:
    x = inputs()
    expected = np.array([exactly(word) for word in x.tolist()], dtype=np.uint32)
    for xp in (np, jnp):
        assert not differing(correct_tanh.tanh_bits(xp.asarray(x)), expected, x)


SPECIAL_VALUES = {
    0x00000000: 0, 0x80000000: SIGN, INF: ONE, 0xFF800000: SIGN | ONE, 0x7FC00000: NAN,
    0xFFC00001: NAN, 0x7F800001: NAN, 0x00000001: 1, 0x807FFFFF: 0x807FFFFF,
    0x7F7FFFFF: ONE, 0xC1200000: SIGN | ONE, LEAST: LEAST,
}  # fmt: skip


def test_special_values() -> None:
    x = np.array(list(SPECIAL_VALUES), dtype=np.uint32)
    expected = np.array(list(SPECIAL_VALUES.values()), dtype=np.uint32)
    for xp in (np, jnp):
        assert not differing(correct_tanh.tanh_bits(xp.asarray(x)), expected, x)


def test_thresholds() -> None:
    """The first input whose result is not itself, and the first whose result is 1."""
    first = next(word for word in range(0x39B89B00, 0x39B89C00) if exactly(word) != word)
    assert exactly(first) == first - 1
    # ln(2^26 - 1) / 2 is where tanh passes the middle between 1 and the number below it.
    middle = CONTEXT.divide(CONTEXT.ln(Decimal((1 << 26) - 1)), Decimal(2))
    one = next(w for w in range(0x41102C00, 0x41102E00) if independent.value(w) > Fraction(middle))
    x = np.array([first - 1, first, one - 1, one], dtype=np.uint32)
    expected = np.array([first - 1, first - 1, ONE - 1, ONE], dtype=np.uint32)
    assert not differing(correct_tanh.tanh_bits(x), expected, x)


def test_table() -> None:
    table = correct_tanh._table()
    assert table.shape == (correct_tanh.STEPS,)
    assert table[0] == 0
    for i, entry in enumerate(table.tolist()[1:], start=1):
        exact = tangent(Fraction(i, 256)) * SCALE
        assert abs(entry - exact) < Fraction(1, 2) + Fraction(1, 1 << 40)


def places(words: Words) -> npt.NDArray[np.uint64]:
    """|x| in units of 2^-35."""
    return (words.view(np.float32).astype(np.float64) * 2.0**35).astype(np.uint64)


def test_error_bound() -> None:
    source = np.random.default_rng(61)
    below = source.integers(LEAST, STEP, 1500, dtype=np.uint32)
    above = source.integers(STEP, LIMIT, 3000, dtype=np.uint32)
    # The terms are largest at the end of a step.
    ends = bits(np.arange(2, 2313) / 256) - np.uint32(1)
    for words, scale, bound, reached in (
        (np.append(below, STEP - 1).astype(np.uint32), SCALE_BELOW, correct_tanh.ERROR_BELOW, 1),
        (np.concatenate([above, ends]), SCALE, correct_tanh.ERROR, 1),
    ):
        found = correct_tanh.scaled_tanh(places(words)).tolist()
        errors = [
            one - tangent(independent.value(word)) * scale
            for word, one in zip(words.tolist(), found, strict=True)
        ]
        assert max(abs(error) for error in errors) < bound
        assert min(errors) < -reached


def inside(words: Any) -> Any:
    """Of each input from 2^-12 on, how far N is from a boundary, inside a compiled program."""
    xp = _backend.namespace(words)
    significand = ((words & np.uint32(0x7FFFFF)) | np.uint32(0x800000)).astype(np.uint64)
    shift = (words >> np.uint32(23)).astype(np.uint64) - np.uint64(LEAST >> 23)
    number = correct_tanh.scaled_tanh(significand << shift)
    length = _backend.bit_length((number >> np.uint64(32)).astype(np.uint32)) + 32
    unit = np.uint64(1) << (length - 25).astype(np.uint64)
    rest = number & (unit - np.uint64(1))
    return xp.minimum(rest, unit - rest)


distances = _backend.jit(inside)


def ranges(size: int, step: int) -> Iterator[tuple[Words, dict[int, int]]]:
    """Every step-th input in chunks, with the named ones that such a chunk may hold."""
    for start, stop, named in ((LEAST, STEP, HARDEST_BELOW), (STEP, LIMIT, HARDEST)):
        for first in range(start, stop, size * step):
            chunk = np.arange(first, min(first + size * step, stop), step, dtype=np.uint32)
            yield chunk, named


def check_distances(size: int, step: int) -> tuple[int, list[int]]:
    """How many inputs there were, and the least distance on either side of 2^-8."""
    count, least = 0, [SCALE, SCALE]
    for chunk, named in ranges(size, step):
        count += chunk.size
        with jax.enable_x64(True):
            found = np.asarray(distances(jnp.asarray(chunk)))
        assert found.dtype == np.uint64
        assert set(chunk[found <= max(named.values())].tolist()) <= set(named)
        side = int(named is HARDEST)
        least[side] = min(least[side], int(found.min()))
    return count, least


def test_distance_from_boundaries() -> None:
    below, above = check_distances(size=1 << 18, step=199)[1]
    assert below > correct_tanh.ERROR_BELOW
    assert above > correct_tanh.ERROR


@pytest.mark.nightly
def test_every_distance_from_boundaries() -> None:
    count, least = check_distances(size=1 << 21, step=1)
    assert count == 126_910_464
    assert least == [min(HARDEST_BELOW.values()), min(HARDEST.values())]
    assert least[0] > correct_tanh.ERROR_BELOW
    assert least[1] > correct_tanh.ERROR


def test_hardest_inputs() -> None:
    """Each is as near to a boundary as it says, by numpy and by decimals."""
    for named, scale, error in (
        (HARDEST_BELOW, SCALE_BELOW, correct_tanh.ERROR_BELOW),
        (HARDEST, SCALE, correct_tanh.ERROR),
    ):
        assert distances(np.array(list(named), dtype=np.uint32)).tolist() == list(named.values())
        for word, claimed in named.items():
            exact = tangent(independent.value(word))
            unit = independent.power_of_two(independent.floor_log2(exact) - 24)
            rest = exact % unit
            assert abs(min(rest, unit - rest) * scale - claimed) < error


def check_against_float64(x: Words) -> int:
    """Compare with the platform's float64 tanh where that is clear; return how often it is not."""
    near = np.tanh(x.view(np.float32).astype(np.float64))
    low, high = (
        (near * (1 + sign * 2.0**-46)).astype(np.float32).view(np.uint32) for sign in (-1, 1)
    )
    nan = np.isnan(near)
    low, high = (np.where(nan, np.uint32(NAN), bound) for bound in (low, high))
    actual = np.asarray(correct_tanh.tanh_bits(jnp.asarray(x)))
    clear = low == high
    assert not differing(np.where(clear, actual, low), low, x)
    for word, result in zip(x[~clear].tolist(), actual[~clear].tolist(), strict=True):
        assert result == exactly(word), f"{word:#x}"
    return int((~clear).sum())


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_against_float64() -> None:
    x = np.arange(0, 1 << 32, 4099, dtype=np.int64).astype(np.uint32)
    assert check_against_float64(x) < 99


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_every_input_against_float64() -> None:
    for start in range(0, 1 << 32, 1 << 22):
        x = np.arange(start, start + (1 << 22), dtype=np.int64).astype(np.uint32)
        check_against_float64(x)


def test_odd_and_rising() -> None:
    x = np.arange(0, INF + 1, 1013, dtype=np.uint32)
    result = correct_tanh.tanh_bits(x)
    assert (result[:-1] <= result[1:]).all()
    assert (result <= x).all()
    assert not differing(correct_tanh.tanh_bits(x ^ np.uint32(SIGN)), result ^ np.uint32(SIGN), x)


@in_every_mode
def test_same_bits_in_every_mode(mode: str, x64: bool) -> None:
    source = np.random.default_rng(62)
    x = np.concatenate([inputs(), source.integers(0, 1 << 32, 16_000, dtype=np.uint32)])[:16_000]
    assert not differing(run(mode, x64, correct_tanh.tanh_bits, x), correct_tanh.tanh_bits(x), x)
