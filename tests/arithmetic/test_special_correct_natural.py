"""exp and log rounded correctly: an independent check by `decimal`, and the distance from every boundary.

The proof in `flamia_ref.arithmetic.correct_natural` needs that no float32 brings e^x or ln x within the error bounds
of a rounding boundary. Part of them are checked always, all of them by night.
"""

from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref import _backend
from flamia_ref.arithmetic import correct_natural
from tests.arithmetic.operands import SPECIAL, Words, differing
from tests.independent import float32 as independent
from tests.independent import natural

CONTEXT = Context(prec=90, Emin=-10_000, Emax=10_000)
NAN, INF, MINUS_INF = 0x7FFFFFFF, 0x7F800000, 0xFF800000

# The float32 whose e^x are nearest to a rounding boundary, with the distance in 2^-62.
HARDEST_EXP = {
    0xC16912CD: 1292, 0xBBF0EDF1: 2477, 0x377EFF81: 2793, 0xBAE0E25C: 3690, 0xB3000000: 4093,
    0x39C6BE5B: 4196, 0x38E69CC1: 4436, 0x383A3EF1: 4666,
}  # fmt: skip
# By the exponent of the unit (e, m 2^23) of the x = m 2^e whose ln x are nearest, with the distance in that unit.
HARDEST_LOG = {
    -56: {(3, 9932779): 6, (25, 14509477): 10, (76, 14192851): 14, (27, 14700222): 19},
    -64: {(-1, 16692207): 7518, (0, 13853911): 11178, (0, 12931961): 11769},
    -76: {(-1, 16777214): 42, (-1, 16777204): 9216, (0, 8388614): 9216},
}


def bits_of(exponent: int, significand: int) -> int:
    return (exponent + 127) << 23 | significand & 0x7FFFFF


def arguments() -> Words:
    source = np.random.default_rng(60)
    edges = [0x42B17217, 0x42B17218, 0xC2AEAC50, 0xC2CFF1B5, 0xC2CE8ED0, 0x33000000, 0xB3000000]
    near = [(edge + d) % (1 << 32) for edge in edges for d in range(-20, 21)]
    small = source.integers(95 << 23, 127 << 23, 1500, dtype=np.uint32)
    small |= source.integers(0, 2, small.size, dtype=np.uint32) << np.uint32(31)
    spread = source.uniform(-106, 90, 1500).astype(np.float32).view(np.uint32)
    listed = np.array([*HARDEST_EXP, *near], dtype=np.uint32)
    arbitrary = source.integers(0, 1 << 32, 400, dtype=np.uint32)
    return np.concatenate([SPECIAL, listed, small, spread, arbitrary])


def numbers() -> Words:
    source = np.random.default_rng(61)
    hard = [bits_of(*at) for named in HARDEST_LOG.values() for at in named]
    around = np.arange(0x3F800000 - 300, 0x3F800000 + 300, dtype=np.uint32)
    ends = np.array([0x3F800000 - 4096, 0x3F800000 + 2048], dtype=np.uint32)[:, None]
    ends = (ends + np.arange(-3, 4, dtype=np.int64)).ravel().astype(np.uint32)
    strata = np.arange(255, dtype=np.uint32)[:, None] << np.uint32(23)
    strata = (strata | source.integers(0, 1 << 23, (255, 5), dtype=np.uint32)).ravel()
    near = source.uniform(0.5, 2, 800).astype(np.float32).view(np.uint32)
    arbitrary = source.integers(0, 1 << 32, 300, dtype=np.uint32)
    return np.concatenate(
        [SPECIAL, np.array(hard, np.uint32), around, ends, strata, near, arbitrary]
    )


@pytest.mark.parametrize("xp", [np, jnp])
def test_against_decimal(xp: Any) -> None:
    for x, ours, theirs in (
        (arguments(), correct_natural.exp_bits, natural.exp),
        (numbers(), correct_natural.log_bits, natural.log),
    ):
        expected = np.array([theirs(bits) for bits in x.tolist()], dtype=np.uint32)
        assert not differing(ours(xp.asarray(x)), expected, x)


def test_special_values() -> None:
    """By hand: the ends of the ranges, and what is exact."""
    for function, values in (
        (
            correct_natural.exp_bits,
            {
                0: 0x3F800000, 0x80000000: 0x3F800000, INF: INF, MINUS_INF: 0, 0x7FC00001: NAN,
                0x3F800000: 0x402DF854, 0xBF800000: 0x3EBC5AB2, 0x42B20000: INF, 0xC2D00000: 0,
                0xC2CE8ED0: 0x00000001, 0x00000001: 0x3F800000,
            },
        ),
        (
            correct_natural.log_bits,
            {
                0: MINUS_INF, 0x80000000: MINUS_INF, INF: INF, MINUS_INF: NAN, 0xBF800000: NAN,
                0x3F800000: 0, 0x40000000: 0x3F317218, 0x402DF854: 0x3F7FFFFF,
                0x00000001: 0xC2CE8ED0, 0x7F7FFFFF: 0x42B17218, 0x7FC00001: NAN,
            },
        ),
    ):  # fmt: skip
        x, expected = (np.array(list(y), dtype=np.uint32) for y in (values, values.values()))
        assert not differing(function(x), expected, x)


def test_constants() -> None:
    ln2 = CONTEXT.ln(Decimal(2))
    assert int(Fraction(ln2) * (1 << 64)) == int(correct_natural._LN2)
    top, middle, bottom = (int(limb) for limb in correct_natural._LOG2E)
    assert int(Fraction(CONTEXT.divide(1, ln2)) * (1 << 95)) == top << 64 | middle << 32 | bottom


@_backend.jit
def exp_parts(bits: Any) -> Any:
    exponent = ((bits >> np.uint32(23)) & np.uint32(255)).astype(np.int32)
    significand = ((bits & np.uint32(0x7FFFFF)) | np.uint32(0x800000)).astype(np.uint64)
    return correct_natural.scaled_exp(significand, exponent, (bits >> np.uint32(31)) != 0)


@_backend.jit
def exp_distances(bits: Any) -> Any:
    """Of each x, how far its M is from a rounding boundary; a large number where the result is 0."""
    xp = _backend.namespace(bits)
    whole, power = exp_parts(bits)
    dropped = xp.clip(39 - 126 - whole, 39, 63).astype(np.uint64)
    half = np.uint64(1) << (dropped - np.uint64(1))
    rest = power & (half + half - np.uint64(1))
    found = xp.where(rest < half, half - rest, rest - half)
    return xp.where(whole < -150, np.uint64(1 << 63), found)


@_backend.jit
def log_distances(significand: Any, exponent: Any) -> Any:
    """Of each x, how far its number is from a rounding boundary, and the exponent of its unit."""
    xp = _backend.namespace(significand)
    number, unit = correct_natural.scaled_log(significand, exponent)
    length = _backend.bit_length((number >> np.uint64(32)).astype(np.uint32)) + 32
    half = np.uint64(1) << (length - 25).astype(np.uint64)
    rest = number & (half + half - np.uint64(1))
    return xp.where(rest < half, half - rest, rest - half), unit


def test_error_bounds() -> None:
    source = np.random.default_rng(62)
    x = source.integers(102 << 23, 134 << 23, 1500, dtype=np.uint32)
    x |= source.integers(0, 2, x.size, dtype=np.uint32) << np.uint32(31)
    whole, power = (np.asarray(part).tolist() for part in exp_parts(x))
    errors = []
    for bits, n, found in zip(x.tolist(), whole, power, strict=True):
        value = independent.value(bits)
        exact = CONTEXT.exp(CONTEXT.divide(Decimal(value.numerator), Decimal(value.denominator)))
        errors.append(float(found - Fraction(exact) / Fraction(2) ** n * (1 << 62)))
    assert min(errors) < -2
    assert max(map(abs, errors)) < correct_natural.EXP_ERROR
    largest = dict.fromkeys(correct_natural.LOG_ERRORS, 0.0)
    near = np.concatenate([(1 << 23) + np.arange(1, 2048, 5), (1 << 24) - np.arange(1, 4096, 5)])
    exponents = np.concatenate([np.zeros(410), np.full(820, -1)])[: len(near)]
    others = source.integers(1 << 23, 1 << 24, 1500)
    significand = np.concatenate([near, others]).astype(np.uint32)
    exponent = np.concatenate([exponents, source.integers(-149, 128, 1500)]).astype(np.int32)
    number, unit = (
        np.asarray(x).tolist() for x in correct_natural.scaled_log(significand, exponent)
    )
    for m, e, found, place in zip(
        significand.tolist(), exponent.tolist(), number, unit, strict=True
    ):
        x = Fraction(m, 1 << 23) * Fraction(2) ** e
        exact = CONTEXT.ln(CONTEXT.divide(Decimal(x.numerator), Decimal(x.denominator)))
        error = abs(float(found - abs(Fraction(exact)) / Fraction(2) ** place))
        largest[place] = max(largest[place], error)
    assert all(0.5 < largest[at] < bound for at, bound in correct_natural.LOG_ERRORS.items())


def test_hardest_inputs() -> None:
    """Each is as near to a boundary as it says."""
    found = exp_distances(np.array(list(HARDEST_EXP), dtype=np.uint32))
    assert found.tolist() == list(HARDEST_EXP.values())
    for place, named in HARDEST_LOG.items():
        exponent, significand = (np.array(x) for x in zip(*named, strict=True))
        found, unit = log_distances(significand.astype(np.uint32), exponent.astype(np.int32))
        assert set(unit.tolist()) == {place}
        assert found.tolist() == list(named.values())


def check_exp(exponents: range, step: int) -> int:
    least = 1 << 63
    for exponent in exponents:
        for sign in (0, 1 << 31):
            bits = np.arange(0, 1 << 23, step, dtype=np.uint32) | np.uint32(exponent << 23 | sign)
            least = min(least, int(np.asarray(exp_distances(jnp.asarray(bits))).min()))
    return least


def check_log(exponents: range, step: int) -> dict[int, int]:
    least = dict.fromkeys(correct_natural.LOG_ERRORS, 1 << 63)
    significand = np.arange(1 << 23, 1 << 24, step, dtype=np.uint32)
    for exponent in exponents:
        chosen = significand[1:] if exponent == 0 else significand
        with jax.enable_x64(True):
            pair = log_distances(jnp.asarray(chosen), np.int32(exponent))
        found, unit = (np.asarray(x) for x in pair)
        for place in least:
            some = found[unit == place]
            least[place] = min(least[place], int(some.min(initial=1 << 63)))
    return least


def test_distance_from_boundaries() -> None:
    assert check_exp(range(102, 134), step=2017) > correct_natural.EXP_ERROR
    found = check_log(range(-126, 128), step=20011)
    assert all(found[at] > bound for at, bound in correct_natural.LOG_ERRORS.items())
    found = check_log(range(-1, 1), step=1)
    assert (found[-64], found[-76]) == (7518, 42)


@pytest.mark.nightly
@pytest.mark.parametrize("exponent", range(102, 134, 4))
def test_every_distance_of_exp(exponent: int) -> None:
    named = [
        distance
        for bits, distance in HARDEST_EXP.items()
        if exponent <= (bits >> 23 & 255) < exponent + 4
    ]
    found = check_exp(range(exponent, exponent + 4), step=1)
    assert found > correct_natural.EXP_ERROR
    if named:
        assert found == min(named)


@pytest.mark.nightly
@pytest.mark.parametrize("exponent", range(-126, 128, 16))
def test_every_distance_of_log(exponent: int) -> None:
    """Significands of subnormal numbers are some of those of normal ones; their exponents are checked apart."""
    exponents = range(exponent, min(exponent + 16, 128))
    found = check_log(exponents, step=1)
    assert all(found[at] > bound for at, bound in correct_natural.LOG_ERRORS.items())
    named = [d for (e, _), d in HARDEST_LOG[-56].items() if e in exponents]
    if named:
        assert found[-56] == min(named)


@pytest.mark.nightly
def test_every_distance_of_log_of_subnormals() -> None:
    for exponent in range(-149, -126):
        step = 1 << (-126 - exponent)
        found = check_log(range(exponent, exponent + 1), step)
        assert found[-56] > correct_natural.LOG_ERRORS[-56]
