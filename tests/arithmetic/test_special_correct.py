"""exp2 rounded correctly: an independent check by `decimal`, and the distance from every boundary.

The proof in `flamia_ref.arithmetic.correct` needs that no fraction brings 2^f within ERROR units of
a rounding boundary. All 427,819,007 of them are checked nightly, every 500th by default.
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
from flamia_ref.arithmetic import correct
from tests.arithmetic.operands import SPECIAL, Words, differing, in_every_mode, run
from tests.independent import float32 as independent

CONTEXT = Context(prec=60, Emin=-10_000, Emax=10_000)
TWO = Decimal(2)
CLOSE = Fraction(1, 10**50)  # relative; decimal's power is good to a unit of the 60th digit
BOUNDARY = 1 << 38
SCALE = 1 << 62

# Of all inputs the nearest to a rounding boundary: f 2^48, and the distance found, in 2^-62.
HARDEST = {
    281474795177568: 20, 273102848655360: 64, 835861282816: 446, 281446547640320: 735,
    280967807762432: 1016, 145515020288: 1292, 281473597057152: 1847, 281474831484192: 2109,
    2244769742848: 2152, 91829571682304: 2394, 1137605504: 3031, 94241021952: 3102,
    237724434956288: 3227, 467601850368: 4110, 24204406: 4522, 38494453891072: 4641,
}  # fmt: skip


def power(x: Fraction) -> Fraction:
    """2^x to 50 digits and more."""
    exponent = CONTEXT.divide(Decimal(x.numerator), Decimal(x.denominator))
    assert Fraction(exponent) == x
    return Fraction(CONTEXT.power(TWO, exponent))


def exactly(bits: int) -> int:
    """2^x of float32 bits, rounded to nearest even."""
    if independent.is_nan(bits):
        return independent.NAN
    if independent.is_infinite(bits):
        return 0 if bits >> 31 else independent.INFINITY
    x = independent.value(bits)
    if x.denominator == 1 and abs(x) < 300:
        return independent.nearest(independent.power_of_two(int(x)))
    if abs(x) >= 300:
        return 0 if x < 0 else independent.INFINITY
    if abs(x) < Fraction(1, 1 << 40):  # 1 + x ln 2 and a rest below x^2
        return independent.nearest(1 + x * Fraction(7, 10))
    near = power(x)
    low, high = (independent.nearest(near * (1 + sign * CLOSE)) for sign in (-1, 1))
    assert low == high, f"{bits:#x} needs more digits"
    return low


def bits_of(fraction: int) -> Iterator[int]:
    """The float32 inputs in (-3, 3) that have this fraction, in units of 2^-48."""
    for whole in range(-3, 3):
        x = Fraction(fraction, 1 << 48) + whole
        bits = independent.nearest(x)
        if independent.value(bits) == x:
            yield bits


def inputs() -> Words:
    source = np.random.default_rng(20)
    hard = [bits for fraction in HARDEST for bits in bits_of(fraction)]
    edges = [0xC3160000, 0xC3150000, 0xC2FC0000, 0x43000000, 0xC3000000, 0x33000000, 0xB3000000]
    near = [(edge + d) % (1 << 32) for edge in edges for d in range(-20, 21)]
    integers = np.arange(-160, 140, dtype=np.float32).view(np.uint32)
    normal = source.integers(100 << 23, 135 << 23, 1500, dtype=np.uint32)
    normal |= source.integers(0, 2, normal.size, dtype=np.uint32) << np.uint32(31)
    subnormal = source.uniform(-150.5, -125.5, 700).astype(np.float32).view(np.uint32)
    arbitrary = source.integers(0, 1 << 32, 500, dtype=np.uint32)
    listed = np.array([*hard, *near], dtype=np.uint32)
    return np.concatenate([SPECIAL, listed, integers, normal, subnormal, arbitrary])


def test_against_decimal() -> None:
    x = inputs()
    expected = np.array([exactly(bits) for bits in x.tolist()], dtype=np.uint32)
    for xp in (np, jnp):
        assert not differing(correct.exp2_bits(xp.asarray(x)), expected, x)


def test_hardest_inputs_exist() -> None:
    """Each of the named fractions is one of an input, and is as near to a boundary as it says."""
    for fraction, distance in HARDEST.items():
        assert list(bits_of(fraction))
        exact = power(Fraction(fraction, 1 << 48)) * SCALE
        rest = exact % BOUNDARY
        assert abs(min(rest, BOUNDARY - rest) - distance) < correct.ERROR


def test_constants() -> None:
    context = Context(prec=60)
    ln2 = Fraction(context.ln(TWO))
    assert int(ln2 * (1 << 64)) == correct._LN2
    for table, step in zip(correct.roots(), (8, 16), strict=True):
        assert table.dtype == np.uint64
        for k, entry in enumerate(table.tolist()):
            exact = power(Fraction(k, 1 << step)) * (1 << 63)
            assert abs(entry - exact) < Fraction(1, 2) + Fraction(1, 1 << 40)


def test_error_bound() -> None:
    source = np.random.default_rng(21)
    fractions = source.integers(0, 1 << 48, 2000, dtype=np.uint64)
    fractions[:3] = 0, 1, (1 << 48) - 1
    # The last product has the largest error where all its factors are large.
    fractions[3:500] |= np.uint64(0xFF_FF_FFFF_0000)
    fractions[500:900] |= np.uint64(0xFFFF_0000)
    found = powers(fractions)
    errors = []
    for fraction, actual in zip(fractions.tolist(), found.tolist(), strict=True):
        errors.append(actual - power(Fraction(fraction, 1 << 48)) * SCALE)
    assert errors[0] == 0
    assert min(errors) < -3
    assert all(-correct.ERROR < error < 1 for error in errors)


def powers(fractions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    position = (fractions >> np.uint64(32)).astype(np.int32)
    result: npt.NDArray[np.uint64] = correct.power_of_fraction(
        position, fractions & np.uint64(0xFFFFFFFF)
    )
    return result


@_backend.jit
def distances(fractions: Any) -> Any:
    """Of each fraction, how far its power is from a multiple of 2^-24."""
    position = (fractions >> np.uint64(32)).astype(np.int32)
    found = correct.power_of_fraction(position, fractions & np.uint64(0xFFFFFFFF))
    rest = found & np.uint64(BOUNDARY - 1)
    return _backend.namespace(fractions).minimum(rest, np.uint64(BOUNDARY) - rest)


def all_fractions(step: int, size: int) -> Iterator[npt.NDArray[np.uint64]]:
    """Every step-th of the fractions that a float32 of 2^-25 and more can have, none of them 0.

    From 1 on they are multiples of 2^-23. Below, x > 0 is its own fraction and x < 0 has 1 + x.
    """
    everything = range(1, 1 << 23, step * size)
    for start in everything:
        yield np.arange(
            start, min(start + step * size, 1 << 23), step, dtype=np.uint64
        ) << np.uint64(25)
    for exponent in range(-25, 0):
        for start in range(1 << 23, 1 << 24, step * size):
            stop = min(start + step * size, 1 << 24)
            x = np.arange(start, stop, step, dtype=np.uint64) << np.uint64(exponent + 25)
            yield x
            yield np.uint64(1 << 48) - x


def test_distance_from_boundaries() -> None:
    for fractions in all_fractions(step=500, size=1 << 15):
        found = np.asarray(distances(fractions))
        assert int(found.min()) > correct.ERROR
    named = np.array(list(HARDEST), dtype=np.uint64)
    assert np.asarray(distances(named)).tolist() == list(HARDEST.values())


@pytest.mark.nightly
def test_every_distance_from_boundaries() -> None:
    count, least = 0, BOUNDARY
    for fractions in all_fractions(step=1, size=1 << 21):
        with jax.enable_x64(True):
            found = np.asarray(distances(jnp.asarray(fractions)))
        least = min(least, int(found.min()))
        count += fractions.size
        near = fractions[found <= max(HARDEST.values())]
        assert set(near.tolist()) <= set(HARDEST)
    assert count == 427_819_007
    assert least == min(HARDEST.values()) > correct.ERROR


def check_against_float64(x: Words) -> int:
    """Compare with the platform's float64 exp2 where that is clear; return how often it is not."""
    values = x.view(np.float32).astype(np.float64)
    near = np.exp2(values)
    low, high = (
        (near * (1 + sign * 2.0**-46)).astype(np.float32).view(np.uint32) for sign in (-1, 1)
    )
    nan = np.isnan(values)
    low, high = (np.where(nan, np.uint32(0x7FFFFFFF), bound) for bound in (low, high))
    actual = np.asarray(correct.exp2_bits(jnp.asarray(x)))
    clear = low == high
    assert not differing(np.where(clear, actual, low), low, x)
    for bits, result in zip(x[~clear].tolist(), actual[~clear].tolist(), strict=True):
        assert result == exactly(bits), f"{bits:#x}"
    return int((~clear).sum())


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_against_float64() -> None:
    assert check_against_float64(np.arange(0, 1 << 32, 4099, dtype=np.int64).astype(np.uint32)) < 99


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_every_input_against_float64() -> None:
    for start in range(0, 1 << 32, 1 << 22):
        x = np.arange(start, start + (1 << 22), dtype=np.int64).astype(np.uint32)
        check_against_float64(x)


def test_never_decreases() -> None:
    x = np.arange(0, 0x7F800001, 1013, dtype=np.uint32)
    rising = correct.exp2_bits(x)
    falling = correct.exp2_bits(x | np.uint32(1 << 31))
    assert (rising[:-1] <= rising[1:]).all()
    assert (falling[:-1] >= falling[1:]).all()
    assert rising[0] == falling[0] == 0x3F800000


@in_every_mode
def test_same_bits_in_every_mode(mode: str, x64: bool) -> None:
    source = np.random.default_rng(22)
    x = np.concatenate([inputs(), source.integers(0, 1 << 32, 16_000, dtype=np.uint32)])[:16_000]
    assert not differing(run(mode, x64, correct.exp2_bits, x), correct.exp2_bits(x), x)
