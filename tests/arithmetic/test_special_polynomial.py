"""The polynomial that attention kernels take for 2^x: exact rationals, a device, its error."""

import hashlib
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import polynomial
from tests.arithmetic import rational
from tests.arithmetic.operands import KINDS, SPECIAL, Words, differing, in_every_mode, run

C0, C1, C2, C3 = 0x3F800000, 0x3F31F519, 0x3E6906A4, 0x3D9DF09D
LOWEST, SHIFTER = 0xC2FE0000, 0x4B400000  # -127, 1.5 2^23
TO_NEAREST = "nearest_even"

# sha256 of the results for the inputs 0, 1, ... 2^32 - 1 as little-endian uint32, every NaN as
# 0x7fffffff. Computed by an NVIDIA H200 (CUDA 13.0) with the instructions of the kernels' PTX:
# max.ftz, add.rm.ftz, sub.rn.ftz twice, fma.rn.ftz three times, shl.b32, add.s32.
ALL_RESULTS = "36b79415f934dcf77e637540496fabb49c4fdd262fd33d6075b143dcc5018d57"


def exactly(x: int, flush: Callable[[int], int] = rational.flush) -> int:
    """The steps one by one, each with its operands and its result flushed."""

    def fma(a: int, b: int, c: int) -> int:
        return flush(rational.fma(flush(a), flush(b), flush(c), TO_NEAREST))

    clamped = flush(rational.maximum_number(flush(x), LOWEST))
    t = flush(rational.add(flush(clamped), SHIFTER, "down"))
    n = flush(rational.subtract(flush(t), SHIFTER, TO_NEAREST))
    f = flush(rational.subtract(flush(clamped), flush(n), TO_NEAREST))
    p = fma(fma(fma(C3, f, C2), f, C1), f, C0)
    result = ((t << 23) + p) % (1 << 32)
    return rational.NAN if rational.is_nan(result) else result


def bits(values: Any) -> Words:
    return np.asarray(values, dtype=np.float32).view(np.uint32)


def near(centres: Words, reach: int) -> Words:
    offsets = np.arange(-reach, reach + 1)
    return (centres.astype(np.int64)[:, None] + offsets).ravel().astype(np.uint32)


def inputs() -> Words:
    source = np.random.default_rng(30)
    integers = near(bits([*range(-160, -1), -1, 0, 1, *range(2, 160)]), 1)
    limits = near(bits([-128, -127, -126, 126, 127, 128, 129, 2.0**22, 2.0**23, 2.0**24]), 12)
    binades = near(np.arange(0, 1 << 32, 1 << 23, dtype=np.int64), 1)
    hardest = near(bits(np.arange(-20, 20) + 0.1008), 3)
    scores = bits(source.uniform(-127, 0, 900))
    wide = bits(source.uniform(-140, 140, 600))
    drawn = [draw(source, 400) for draw in KINDS.values()]
    return np.concatenate([SPECIAL, integers, limits, binades, hardest, scores, wide, *drawn])


def test_against_rationals() -> None:
    x = inputs()
    expected = np.array([exactly(a) for a in x.tolist()], dtype=np.uint32)
    for xp in (np, jnp):
        assert not differing(polynomial.exp2_bits(xp.asarray(x)), expected, x)


@in_every_mode
def test_same_bits_in_every_mode(mode: str, x64: bool) -> None:
    source = np.random.default_rng(31)
    x = np.concatenate([inputs(), source.integers(0, 1 << 32, 16_000, dtype=np.uint32)])[:16_000]
    assert not differing(run(mode, x64, polynomial.exp2_bits, x), polynomial.exp2_bits(x), x)


SPECIAL_VALUES = {
    # zeros and subnormals, NaN and -infinity
    0x00000000: C0, 0x80000000: C0, 0x00000001: C0, 0x80000001: C0, 0x007FFFFF: C0, 0x807FFFFF: C0,
    0x7FC00000: 0, 0xFFC00001: 0, 0x7F800001: 0, 0xFF800000: 0,
    # inf - inf is NaN, whose bits are added to 0x7f800000 << 23 = 0
    0x7F800000: 0x7FFFFFFF,
    # -128, -127, -126; 127; 128 is infinity and 129 has the bits of -0.0
    0xC3000000: 0, 0xC2FE0000: 0, 0xC2FC0000: 0x00800000, 0x42FE0000: 0x7F000000,
    0x43000000: 0x7F800000, 0x43010000: 0x80000000,
    # 2^23: the shifted exponent bits are all gone
    0x4B000000: 0x3F800000,
}  # fmt: skip


def test_special_values() -> None:
    x = np.array(list(SPECIAL_VALUES), dtype=np.uint32)
    expected = np.array(list(SPECIAL_VALUES.values()), dtype=np.uint32)
    for xp in (np, jnp):
        assert not differing(polynomial.exp2_bits(xp.asarray(x)), expected, x)


def test_integers_are_exact() -> None:
    n = np.arange(-126, 128)
    expected = ((n + 127) << 23).astype(np.uint32)
    assert not differing(polynomial.exp2_bits(bits(n)), expected, bits(n))


def test_the_error_is_the_published_one() -> None:
    """8.77e-5 at a fraction of 0.1008, as exp2_emul_pair says; here over every fraction of 2^-23."""
    f = np.arange(0, 1 << 23, dtype=np.uint32)
    x = np.uint32(0x3F800000) | f  # 1 <= x < 2
    found = np.asarray(polynomial.exp2_bits(jnp.asarray(x))).view(np.float32).astype(np.float64)
    error = np.abs(found / np.exp2(x.view(np.float32).astype(np.float64)) - 1)
    worst = int(error.argmax())
    assert worst / (1 << 23) == pytest.approx(0.1008, abs=5e-5)
    # The largest again, without the platform's exp2.
    context = Context(prec=40)
    fraction = Fraction(worst, 1 << 23)
    power = context.power(2, context.divide(Decimal(fraction.numerator), fraction.denominator))
    exact = abs(Fraction(float(found[worst])) / (2 * Fraction(power)) - 1)
    assert float(exact) == pytest.approx(8.769e-5, abs=5e-9)


def test_the_error_holds_in_every_binade_of_the_result() -> None:
    x = bits(np.random.default_rng(32).uniform(-126, 128, 400_000))
    found = polynomial.exp2_bits(x).view(np.float32).astype(np.float64)
    error = np.abs(found / np.exp2(x.view(np.float32).astype(np.float64)) - 1)
    assert 8.7e-5 < error.max() < 8.77e-5


def test_only_negative_subnormals_need_the_flush() -> None:
    """Without .ftz an H200 gave 0x3f7ffa6b for the 2^23 - 1 of them, and equal bits elsewhere."""
    x = inputs()
    kept = np.array([exactly(a, flush=lambda bits: bits) for a in x.tolist()], dtype=np.uint32)
    subnormal = (x > 0x80000000) & (x < 0x80800000)
    assert subnormal.sum() > 20
    assert (kept[subnormal] == 0x3F7FFA6B).all()
    np.testing.assert_array_equal(kept[~subnormal], polynomial.exp2_bits(x[~subnormal]))


def numpy_equals_jax(step: int) -> None:
    for start in range(0, 1 << 32, step << 20):
        stop = min(start + (step << 20), 1 << 32)
        x = np.arange(start, stop, step, dtype=np.int64).astype(np.uint32)
        assert not differing(polynomial.exp2_bits(jnp.asarray(x)), polynomial.exp2_bits(x), x)


def test_numpy_equals_jax() -> None:
    numpy_equals_jax(step=8209)


@pytest.mark.nightly
def test_numpy_equals_jax_often() -> None:
    """All 2^32 were equal once, in 20 minutes."""
    numpy_equals_jax(step=17)


@pytest.mark.nightly
def test_every_input_equals_the_device() -> None:
    digest = hashlib.sha256()
    for start in range(0, 1 << 32, 1 << 22):
        x = np.arange(start, start + (1 << 22), dtype=np.int64).astype(np.uint32)
        digest.update(np.asarray(polynomial.exp2_bits(jnp.asarray(x))).astype("<u4").data)
    assert digest.hexdigest() == ALL_RESULTS
