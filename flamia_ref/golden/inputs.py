"""Inputs from a counter hash, by integers alone, so that C++ and CUDA make the same ones.

All arithmetic is modulo 2^64. Output number i (from 0) of splitmix64 with a given seed::

    z = seed + (i + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    hash(seed, i) = z ^ (z >> 31)

A case has a seed. Tensor number t (q 0, k 1, v 2, dout 3) has two streams with the seeds
``hash(case seed, 2 t)`` and ``hash(case seed, 2 t + 1)``. Element i, counted row-major over
[tokens, heads, head_dim], is ``n * 2^e`` rounded once to bfloat16, to nearest even, where h1 and h2
are outputs number i of the two streams, r is output number i - (i mod head_dim) of the second (that
of the row's first element), the element lies at (t, h, c), and::

    n = (sum of the eight bytes of h1) - 1020                        an integer in [-1020, 1020]
    n = (h1 mod 7) - 3                                               integers
    e = exponent                                                     bell, integers
    e = exponent + 16 if (h2 mod 256) == 0 else exponent             outliers
    e = exponent + (h2 mod 32) - 28 + ((r div 256) mod 16) - 12      wide
    e = exponent + ((5 t + 19 h + 7 (c div 16)) mod 31) - 15         ladder

``exponent`` belongs to the case. n has mean 0 and standard deviation 209, so exponent -8 gives about
0.8. A zero is +0. No value is subnormal or overflows: the exponent of a case is in [-64, 64].

Then the boxes of a case are filled and its elements planted (`flamia_ref.golden.case_fields`), by
integers too. Whoever makes the inputs in another language needs unsigned integers of 64 bits and
nothing else: n and e are small, and the rounding is that of `bfloat16_bits`.

Source: G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014; the constants are those of S. Vigna's public-domain splitmix64.c.
"""

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from flamia_ref._errors import unknown_name

U64 = npt.NDArray[np.uint64]
U16 = npt.NDArray[np.uint16]

TENSORS = ("q", "k", "v", "dout")

MAX_EXPONENT = 64

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class Distribution(StrEnum):
    """How the inputs of a case are made. The formulas are those of the module."""

    BELL = "bell"  # n * 2^exponent
    OUTLIERS = "outliers"  # the same, one element in 256 times 2^16
    WIDE = "wide"  # the same, each element times 2^-28 to 2^3, each row times 2^-12 to 2^3
    LADDER = "ladder"  # the same, each token, head and 16 channels times a power of their own
    INTEGERS = "integers"  # integers of -3 to 3 times 2^exponent
    RECORDED = "recorded"  # stored bits of a real model; no hash


def splitmix64(seed: int, index: U64) -> U64:
    """Return outputs number `index` of the splitmix64 sequence with a seed in [0, 2^64)."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; it must be in [0, 2^64)")
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + (np.asarray(index, np.uint64) + np.uint64(1)) * _GAMMA
        z = (z ^ (z >> np.uint64(30))) * _MULTIPLIERS[0]
        z = (z ^ (z >> np.uint64(27))) * _MULTIPLIERS[1]
        return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)


def bfloat16_bits(n: npt.NDArray[np.int64], exponent: npt.NDArray[np.int64]) -> U16:
    """Round ``n * 2^exponent`` to bfloat16, to nearest even, and return the bits.

    Both arrays have one shape; ``|n| < 2^16``. The results are normal or +0.

    Raises ValueError where a result would be subnormal or overflow.
    """
    magnitude = np.abs(n)
    length = np.zeros_like(magnitude)  # bits of the magnitude
    for bit in range(16):
        length += (magnitude >> bit) > 0
    # Eight significant bits: widen short ones, round long ones.
    excess = np.maximum(length - 8, 0)
    half = (np.int64(1) << excess) >> 1
    odd = (magnitude >> excess) & 1
    tie_down = np.where(excess > 0, 1 - odd, 0)
    rounded = (magnitude + half - tie_down) >> excess
    rounded <<= np.maximum(8 - length, 0)
    # A carry to 256 leaves the fraction 0 and moves the exponent up by one: the sum below does both.
    biased = 127 + (length - 1) + exponent
    nonzero = magnitude > 0
    if np.any(nonzero & ((biased < 1) | (biased > 253))):
        raise ValueError(f"an exponent in {exponent.min()}..{exponent.max()} leaves bfloat16")
    bits = ((n < 0).astype(np.int64) << 15) + (biased << 7) + (rounded - 128)
    return np.where(nonzero, bits, 0).astype(np.uint16)


def hashed(
    tensor: str, shape: tuple[int, ...], *, seed: int, distribution: Distribution, exponent: int
) -> U16:
    """Return the bfloat16 bits of an input tensor of a synthetic case.

    `tensor` is q, k, v or dout, `shape` is (tokens, heads, head_dim), `seed` that of the case.

    Raises ValueError for another tensor, for RECORDED, and for an exponent outside [-64, 64].
    """
    if tensor not in TENSORS:
        raise unknown_name("input tensor", tensor, TENSORS)
    if abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"exponent is {exponent}; it must be in [-{MAX_EXPONENT}, {MAX_EXPONENT}]")
    streams = splitmix64(seed, np.arange(2, dtype=np.uint64) + np.uint64(2 * TENSORS.index(tensor)))
    index = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64)
    first, second = (splitmix64(int(stream), index) for stream in streams)
    if distribution is Distribution.INTEGERS:
        n = (first % np.uint64(7)).astype(np.int64) - 3
    else:
        n = np.full(index.shape, -1020, np.int64)
        for byte in range(8):
            n += ((first >> np.uint64(8 * byte)) & np.uint64(255)).astype(np.int64)
    exponents = _exponents(second.reshape(shape), distribution, exponent)
    return bfloat16_bits(n.reshape(shape), exponents)


def _exponents(h: U64, distribution: Distribution, exponent: int) -> npt.NDArray[np.int64]:
    base = np.full(h.shape, exponent, np.int64)
    match distribution:
        case Distribution.BELL | Distribution.INTEGERS:
            return base
        case Distribution.LADDER:
            t, head, c = np.ogrid[tuple(slice(size) for size in h.shape)]
            base += (5 * t + 19 * head + 7 * (c // 16)) % 31 - 15
            return base
        case Distribution.OUTLIERS:
            return base + np.where(h & np.uint64(255), 0, 16)
        case Distribution.WIDE:
            row = h[..., :1] >> np.uint64(8)
            base += (h & np.uint64(31)).astype(np.int64) - 28
            return base + (row & np.uint64(15)).astype(np.int64) - 12
        case Distribution.RECORDED:
            raise ValueError("recorded inputs are stored, they have no formula")
