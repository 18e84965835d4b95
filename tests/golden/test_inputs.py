"""The counter hash and what is made of it, against Python integers and fractions."""

from fractions import Fraction

import numpy as np
import pytest

from flamia_ref.golden.inputs import Distribution, bfloat16_bits, hashed, splitmix64

MASK = (1 << 64) - 1

# The published outputs of splitmix64.c for seed 1234567.
PUBLISHED = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def sequence(seed: int, count: int) -> list[int]:
    """splitmix64.c, line by line."""
    outputs = []
    state = seed
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def bfloat16(value: Fraction) -> int:
    """Round to bfloat16 by exact arithmetic: the nearest of the neighbours, the even one of two."""
    if value == 0:
        return 0
    magnitude = abs(value)
    exponent = 0
    while magnitude >= 2 ** Fraction(exponent + 1):
        exponent += 1
    while magnitude < 2 ** Fraction(exponent):
        exponent -= 1
    units = magnitude / Fraction(2) ** (exponent - 7)  # in [128, 256)
    low = units.numerator // units.denominator
    rest = units - low
    low += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1)
    # 256 units are 128 of the next binade, whose bits follow.
    bits = ((127 + exponent) << 7) + (low - 128)
    return bits | (0x8000 if value < 0 else 0)


def test_the_hash_gives_the_published_values() -> None:
    assert splitmix64(1234567, np.arange(5, dtype=np.uint64)).tolist() == PUBLISHED
    assert sequence(1234567, 5) == PUBLISHED


@pytest.mark.parametrize("seed", [0, 1, 0x9E3779B97F4A7C15, MASK])
def test_the_hash_wraps_as_the_published_code_does(seed: int) -> None:
    assert splitmix64(seed, np.arange(1000, dtype=np.uint64)).tolist() == sequence(seed, 1000)


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_outside_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="seed is"):
        splitmix64(seed, np.arange(1, dtype=np.uint64))


@pytest.mark.parametrize("exponent", [-64, -8, 0, 64])
def test_rounding_to_bfloat16_is_exact(exponent: int) -> None:
    numbers = np.arange(-1030, 1031)
    bits = bfloat16_bits(numbers, np.full(numbers.shape, exponent))
    assert bits.tolist() == [bfloat16(n * Fraction(2) ** exponent) for n in numbers.tolist()]


def test_a_carry_reaches_the_next_binade() -> None:
    # 511 is 1.11111111 (nine ones) in binary: it rounds to 512.
    assert bfloat16_bits(np.array([511, -511, 512]), np.zeros(3, np.int64)).tolist() == [
        0x4400,
        0xC400,
        0x4400,
    ]


@pytest.mark.parametrize("exponent", [-130, 125])
def test_values_outside_the_normal_range_are_refused(exponent: int) -> None:
    with pytest.raises(ValueError, match="leaves bfloat16"):
        bfloat16_bits(np.array([1020]), np.array([exponent * 1]) - 10 * (exponent < 0))


@pytest.mark.parametrize("distribution", sorted(set(Distribution) - {Distribution.RECORDED}))
@pytest.mark.parametrize(("tensor", "number"), [("q", 0), ("k", 1), ("v", 2), ("dout", 3)])
def test_tensors_follow_the_documented_formula(
    distribution: Distribution, tensor: str, number: int
) -> None:
    shape = (7, 3, 32)
    bits = hashed(tensor, shape, seed=99, distribution=distribution, exponent=-8)
    streams = sequence(99, 8)
    first = sequence(streams[2 * number], 7 * 3 * 32)
    second = sequence(streams[2 * number + 1], 7 * 3 * 32)
    expected = []
    for i, (h1, h2) in enumerate(zip(first, second, strict=True)):
        row = second[i - i % 32]
        token, head, channel = i // 96, i // 32 % 3, i % 32
        n = sum(h1.to_bytes(8, "little")) - 1020
        if distribution is Distribution.INTEGERS:
            n = h1 % 7 - 3
        exponent = {
            Distribution.BELL: -8,
            Distribution.OUTLIERS: -8 + (16 if h2 % 256 == 0 else 0),
            Distribution.WIDE: -8 + h2 % 32 - 28 + row // 256 % 16 - 12,
            Distribution.INTEGERS: -8,
            Distribution.LADDER: -8 + (5 * token + 19 * head + 7 * (channel // 16)) % 31 - 15,
        }[distribution]
        expected.append(bfloat16(n * Fraction(2) ** exponent))
    assert bits.shape == shape
    assert bits.dtype == np.uint16
    assert bits.ravel().tolist() == expected


def test_the_bell_has_the_documented_moments() -> None:
    bits = hashed("q", (2000, 1, 32), seed=5, distribution=Distribution.BELL, exponent=0)
    values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert abs(values.mean()) < 3
    assert abs(values.std() - 209) < 3


def test_tensors_of_a_case_differ() -> None:
    made = {
        hashed(name, (4, 1, 32), seed=1, distribution=Distribution.BELL, exponent=-8).tobytes()
        for name in ("q", "k", "v", "dout")
    }
    assert len(made) == 4


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown input tensor 'vv'; did you mean 'v'"):
        hashed("vv", (1, 1, 32), seed=1, distribution=Distribution.BELL, exponent=0)
    with pytest.raises(ValueError, match="exponent is 65"):
        hashed("q", (1, 1, 32), seed=1, distribution=Distribution.BELL, exponent=65)
    with pytest.raises(ValueError, match="no formula"):
        hashed("q", (1, 1, 32), seed=1, distribution=Distribution.RECORDED, exponent=0)
