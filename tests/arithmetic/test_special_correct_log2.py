"""log2 rounded correctly: an independent check by `decimal`, and the distance from every boundary.

The proof in `flamia_ref.arithmetic.correct_log2` needs that no significand brings log2 m within ERROR
units of a rounding boundary, for any exponent. All 8,388,607 of them are checked.
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
from flamia_ref.arithmetic import correct_log2
from tests.arithmetic.operands import SPECIAL, Words, differing, in_every_mode, run
from tests.independent import float32 as independent

CONTEXT = Context(prec=90, Emin=-10_000, Emax=10_000)
LN2 = CONTEXT.ln(Decimal(2))
CLOSE = Fraction(1, 10**60)
SCALE = 1 << 64
NAN, INF, MINUS_INF = 0x7FFFFFFF, 0x7F800000, 0xFF800000

# Of all significands those that come nearest to a rounding boundary, with the distance in 2^-64:
# of results from 1 on, of those below 1 for e = 0, and of those for e = -1.
HARDEST = {
    "outside": {10517177: 11031, 15758482: 176435, 9266398: 201133, 10921126: 221079},
    "above": {
        10517177: 11031, 8388609: 15674, 8390555: 17914, 8388864: 23700, 8398273: 23701,
        9222713: 24344, 8437754: 27061, 8477910: 30852, 8388750: 38151,
    },
    "below": {
        16659060: 1569, 16777215: 2917, 16777159: 5338, 16777113: 5825, 16777210: 6076,
        16776788: 8638, 10517177: 11031, 16776250: 16838, 16724838: 21299,
    },
}  # fmt: skip


def logarithm(significand: int) -> Fraction:
    """log2 of significand 2^-23, off by less than CLOSE."""
    quotient = CONTEXT.divide(CONTEXT.ln(Decimal(significand)), LN2)
    return Fraction(quotient) - 23


def exactly(bits: int) -> int:
    """log2 of float32 bits, rounded to nearest even."""
    if independent.is_nan(bits):
        return NAN
    if independent.is_zero(bits):
        return MINUS_INF
    if bits >> 31:
        return NAN
    if bits == INF:
        return INF
    significand, exponent = independent.split(bits)
    if significand & (significand - 1) == 0:
        return independent.nearest(Fraction(significand.bit_length() - 1 + exponent))
    near = logarithm(significand) + 23 + exponent
    low, high = (independent.nearest(near + sign * CLOSE) for sign in (-1, 1))
    assert low == high, f"{bits:#x} needs more digits"
    return low


def around(centres: npt.NDArray[np.uint32], reach: int) -> Words:
    offsets = np.arange(-reach, reach + 1)
    return (centres.astype(np.int64)[:, None] + offsets).ravel().astype(np.uint32)


def inputs() -> Words:
    source = np.random.default_rng(50)
    powers = np.concatenate([1 << np.arange(23), np.arange(1, 255) << 23]).astype(np.uint32)
    # Where the result passes 2^-k or -2^-k, and where it passes a power of two from 1 on.
    steps = np.float64(2.0) ** np.arange(-24, 7)
    passes = np.concatenate([np.exp2(steps), np.exp2(-steps)]).astype(np.float32).view(np.uint32)
    hard = np.array(sorted({m for case in HARDEST.values() for m in case}), dtype=np.uint32)
    fields = np.array([0, 1, 2, 63, 64, 123, 124, 125, 126, 127, 128, 129, 130, 190, 191, 254])
    hard = (hard[:, None] - (1 << 23) + (np.maximum(fields, 1) << 23)).ravel().astype(np.uint32)
    fields = np.arange(255, dtype=np.uint32)[:, None] << np.uint32(23)
    strata = (fields | source.integers(0, 1 << 23, (255, 5), dtype=np.uint32)).ravel()
    subnormal = source.integers(1, 1 << 23, 200) >> source.integers(0, 23, 200)
    near_one = source.uniform(0.5, 2, 400).astype(np.float32).view(np.uint32)
    cells = 0x3F800000 + (source.integers(0, 4096, 150, dtype=np.uint32) << np.uint32(11))
    arbitrary = source.integers(0, 1 << 32, 300, dtype=np.uint32)
    return np.concatenate([
        SPECIAL, around(powers, 1), around(passes, 2), around(hard, 1), strata,
        subnormal.astype(np.uint32), near_one, around(cells, 1), arbitrary,
    ])  # fmt: skip


def test_against_decimal() -> None:
    x = inputs()
    expected = np.array([exactly(bits) for bits in x.tolist()], dtype=np.uint32)
    for xp in (np, jnp):
        assert not differing(correct_log2.log2_bits(xp.asarray(x)), expected, x)


def test_powers_of_two_are_exact() -> None:
    exponent = np.arange(-149, 128)
    x = np.ldexp(1.0, exponent).astype(np.float32).view(np.uint32)
    assert x[0] == 1
    expected = exponent.astype(np.float32).view(np.uint32)
    for xp in (np, jnp):
        assert not differing(correct_log2.log2_bits(xp.asarray(x)), expected, x)


SPECIAL_VALUES = {
    0x00000000: MINUS_INF, 0x80000000: MINUS_INF, INF: INF, 0xFF800000: NAN, 0x80000001: NAN,
    0xBF800000: NAN, 0x7FC00000: NAN, 0xFFC00001: NAN, 0x7F800001: NAN,
    0x3F800000: 0x00000000, 0x00000001: 0xC3150000, 0x7F7FFFFF: 0x43000000,
}  # fmt: skip


def test_special_values() -> None:
    x = np.array(list(SPECIAL_VALUES), dtype=np.uint32)
    expected = np.array(list(SPECIAL_VALUES.values()), dtype=np.uint32)
    for xp in (np, jnp):
        assert not differing(correct_log2.log2_bits(xp.asarray(x)), expected, x)


def test_table() -> None:
    reciprocals, logarithms = correct_log2._table()
    assert reciprocals.shape == logarithms.shape == (4096,)
    for j, (n, entry) in enumerate(zip(reciprocals.tolist(), logarithms.tolist(), strict=True)):
        assert (n - 1) * (4096 + j) < 1 << 28 <= n * (4096 + j)
        exact = CONTEXT.multiply(CONTEXT.ln(CONTEXT.divide(Decimal(1 << 16), n)), SCALE)
        assert abs(Fraction(CONTEXT.divide(exact, LN2)) - entry) < Fraction(1, 2) + CLOSE
    constant = Fraction(CONTEXT.divide(Decimal(1), LN2)) - 1
    assert int(constant * SCALE) == int(correct_log2._LOG2E_FRACTION)


def test_error_bound() -> None:
    source = np.random.default_rng(51)
    significands = source.integers(1 << 23, 1 << 24, 3000, dtype=np.uint32)
    significands[:2] = 1 << 23, (1 << 24) - 1
    # The terms are largest at the end of a cell.
    significands[2:2500] |= np.uint32(0x7FF)
    errors = [
        found - logarithm(significand) * SCALE
        for significand, found in zip(
            significands.tolist(),
            correct_log2.log2_of_significand(significands).tolist(),
            strict=True,
        )
    ]
    assert errors[0] == 0
    assert min(errors) < -5
    assert all(-correct_log2.ERROR < error < 4 for error in errors)


def distance(number: Any, bits: Any) -> Any:
    """How far each of `number` is from a multiple of 2^bits."""
    unit = np.uint64(1) << bits.astype(np.uint64)
    rest = number & (unit - np.uint64(1))
    return _backend.namespace(number).minimum(rest, unit - rest)


@_backend.jit
def distances(significand: Any) -> Any:
    """Of each significand, how far F is from a boundary: outside (-1, 1), for e = 0 and e = -1."""
    above = correct_log2.log2_of_significand(significand)
    below = ~above + np.uint64(1)
    lengths = (
        _backend.bit_length((x >> np.uint64(32)).astype(np.uint32)) + 32 for x in (above, below)
    )
    outside = distance(above, np.int32(40))
    return outside, *(
        distance(x, length - 25) for x, length in zip((above, below), lengths, strict=True)
    )


def significands(size: int) -> Iterator[Words]:
    for start in range((1 << 23) + 1, 1 << 24, size):
        yield np.arange(start, min(start + size, 1 << 24), dtype=np.uint32)


def test_every_distance_from_boundaries() -> None:
    count = 0
    least = dict.fromkeys(HARDEST, SCALE)
    for chunk in significands(1 << 20):
        count += chunk.size
        with jax.enable_x64(True):
            found = distances(jnp.asarray(chunk))
        for case, one in zip(HARDEST, found, strict=True):
            measured = np.asarray(one)
            assert measured.dtype == np.uint64
            least[case] = min(least[case], int(measured.min()))
            near = chunk[measured <= max(HARDEST[case].values())]
            assert set(near.tolist()) <= set(HARDEST[case])
    assert count == (1 << 23) - 1
    assert least == {case: min(named.values()) for case, named in HARDEST.items()}
    assert min(least.values()) > correct_log2.ERROR


def test_hardest_significands() -> None:
    """Each is as near to a boundary as it says, by numpy and by decimals."""
    for case, named in HARDEST.items():
        found = distances(np.array(list(named), dtype=np.uint32))[list(HARDEST).index(case)]
        assert found.tolist() == list(named.values())
        for significand, claimed in named.items():
            exact = logarithm(significand)
            exact = 1 - exact if case == "below" else exact
            binade = 0 if case == "outside" else independent.floor_log2(exact)
            unit = independent.power_of_two(binade - 24)
            rest = exact % unit
            assert abs(min(rest, unit - rest) * SCALE - claimed) < correct_log2.ERROR


def check_against_float64(x: Words) -> int:
    """Compare with the platform's float64 log2 where that is clear; return how often it is not."""
    near = np.log2(x.view(np.float32).astype(np.float64))
    low, high = (
        (near * (1 + sign * 2.0**-46)).astype(np.float32).view(np.uint32) for sign in (-1, 1)
    )
    nan = np.isnan(near)
    low, high = (np.where(nan, np.uint32(NAN), bound) for bound in (low, high))
    actual = np.asarray(correct_log2.log2_bits(jnp.asarray(x)))
    clear = low == high
    assert not differing(np.where(clear, actual, low), low, x)
    for bits, result in zip(x[~clear].tolist(), actual[~clear].tolist(), strict=True):
        assert result == exactly(bits), f"{bits:#x}"
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


def test_never_decreases() -> None:
    x = np.arange(1, INF + 1, 1013, dtype=np.uint32)
    result = correct_log2.log2_bits(x).view(np.float32)
    assert (result[:-1] <= result[1:]).all()


@in_every_mode
def test_same_bits_in_every_mode(mode: str, x64: bool) -> None:
    source = np.random.default_rng(52)
    x = np.concatenate([inputs(), source.integers(0, 1 << 32, 16_000, dtype=np.uint32)])[:16_000]
    assert not differing(run(mode, x64, correct_log2.log2_bits, x), correct_log2.log2_bits(x), x)
