"""1 / x rounded correctly: exact rationals, numpy's division, every mode of JAX."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import special
from tests.arithmetic import rational
from tests.arithmetic.operands import SPECIAL, Words, differing, in_every_mode, run

ONE, INF = 0x3F800000, 0x7F800000


def reciprocal_bits(x: Any) -> Any:
    return special.reciprocal_bits(x, model="correct")


def inputs() -> Words:
    source = np.random.default_rng(42)
    fields = np.arange(0, 256, dtype=np.uint32) << np.uint32(23)
    edges = (fields.astype(np.int64)[:, None] + np.arange(-2, 3)).ravel().astype(np.uint32)
    # 2^-128 is where the result overflows, 2^126 where it becomes subnormal.
    limits = np.concatenate(
        [edge + np.arange(-40, 41) for edge in (0x00200000, 0x7E800000, 0x7F000000, 0x7F7FFFD6)]
    ).astype(np.uint32)
    # A divisor whose quotient is near a tie in its binade: 2^24 - k and 2^23 + k.
    near = np.concatenate([0x3F800000 + np.arange(300), 0x40000000 - np.arange(300)])
    drawn = source.integers(0, 1 << 32, 1500, dtype=np.uint32)
    positive = np.concatenate([edges, limits, near.astype(np.uint32)])
    return np.concatenate([SPECIAL, positive, positive ^ np.uint32(1 << 31), drawn])


def test_against_rationals() -> None:
    x = inputs()
    expected = np.array([rational.divide(ONE, bits) for bits in x.tolist()], dtype=np.uint32)
    for xp in (np, jnp):
        assert not differing(reciprocal_bits(xp.asarray(x)), expected, x)


SPECIAL_VALUES = {
    0x00000000: INF, 0x80000000: 0xFF800000, INF: 0, 0xFF800000: 0x80000000,
    0x7FC00000: 0x7FFFFFFF, 0xFF800001: 0x7FFFFFFF,
    0x00200000: INF, 0x00200001: 0x7F7FFFF8,    # 2^-128 overflows, the next does not
    0x7E800000: 0x00800000, 0x7E800001: 0x007FFFFF, 0x7E800002: 0x007FFFFE,
    0x7F000000: 0x00400000, 0xFF7FFFFF: 0x80200000,
}  # fmt: skip


def test_special_values() -> None:
    x = np.array(list(SPECIAL_VALUES), dtype=np.uint32)
    expected = np.array(list(SPECIAL_VALUES.values()), dtype=np.uint32)
    for xp in (np, jnp):
        assert not differing(reciprocal_bits(xp.asarray(x)), expected, x)


@in_every_mode
def test_same_bits_in_every_mode(mode: str, x64: bool) -> None:
    source = np.random.default_rng(43)
    x = np.concatenate([inputs(), source.integers(0, 1 << 32, 16_000, dtype=np.uint32)])[:16_000]
    assert not differing(run(mode, x64, reciprocal_bits, x), reciprocal_bits(x), x)


def equals_numpys_division(chunks: Iterator[Words]) -> None:
    for x in chunks:
        assert not differing(reciprocal_bits(jnp.asarray(x)), reciprocal_bits(x), x)


def test_against_division() -> None:
    everything = np.arange(0, 1 << 32, 4099, dtype=np.int64).astype(np.uint32)
    equals_numpys_division(iter([everything]))


@pytest.mark.nightly
def test_every_input_against_division() -> None:
    equals_numpys_division(
        np.arange(start, start + (1 << 23), dtype=np.int64).astype(np.uint32)
        for start in range(0, 1 << 32, 1 << 23)
    )
