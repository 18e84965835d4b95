"""Fresh random input, made where quantizers differ: near the boundaries of their rules.

Everything is made as bit patterns, so that every exponent, subnormals, both zeros and NaN of any
payload come up in float32 and in bfloat16 alike.
"""

import os
import zlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

SEED = int(os.environ.get("FLAMIA_LIVE_SEED") or int.from_bytes(os.urandom(4), "little"))
REPEAT = f"repeat with FLAMIA_LIVE_SEED={SEED}"
ROWS, COLUMNS = 4, 64  # of a tensor for NVFP4

Words = npt.NDArray[np.int64]
Values = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class FloatType:
    """A floating-point type as bit patterns: sign, `exponent` bits, `mantissa` bits."""

    dtype: Any
    exponent: int
    mantissa: int

    @property
    def infinity(self) -> int:
        """Its pattern, and the mask of an exponent field of ones."""
        return (2**self.exponent - 1) << self.mantissa

    def values(self, patterns: Words) -> Values:
        """Patterns as values of the type."""
        width = 1 + self.exponent + self.mantissa
        return patterns.astype(f"uint{width}").view(self.dtype)


FLOATS = {
    "f32": FloatType(dtype=np.float32, exponent=8, mantissa=23),
    "bf16": FloatType(dtype=ml_dtypes.bfloat16, exponent=8, mantissa=7),
    "f16": FloatType(dtype=np.float16, exponent=5, mantissa=10),
}


def generator(*names: str) -> np.random.Generator:
    """Random numbers of this run, other ones for each name."""
    return np.random.default_rng([SEED, zlib.crc32("/".join(names).encode())])


def numbers(rng: np.random.Generator, kind: FloatType, count: int) -> Values:
    """For casts [2 count]: any pattern, and few bits of mantissa or a step beside, where ties are."""
    any_pattern = _any(rng, kind, (count,))
    fields = rng.integers(0, 2**kind.exponent - 1, count)
    return kind.values(np.append(any_pattern, _signed(rng, kind, _few_bits(rng, kind, fields))))


def blocks(rng: np.random.Generator, kind: FloatType, count: int) -> Values:
    """Blocks of 32 [at least count, 32]."""
    made, shape = [], (max(count // 8, 1), 32)
    top = _tops(rng, kind, shape[0])
    made.append(_any(rng, kind, shape))
    made.append(_signed(rng, kind, _random(rng, kind, _below(rng, top, 32))))
    ties = _signed(rng, kind, _few_bits(rng, kind, _below(rng, top, 32)))
    made.append(ties)
    for offset in (2, 70):  # steps from the boundary; log2 misleads up to some 60 of float32
        made.append(_with_amax(rng, kind, top, offset))
    low = rng.integers(0, 14, (shape[0], 1))  # subnormal scales and elements
    made.append(_signed(rng, kind, _few_bits(rng, kind, _below(rng, low, 32))))
    zeros = np.where(rng.random(shape) < rng.choice([0.8, 1.0], (shape[0], 1)), 0, ties)
    made.append(_signed(rng, kind, zeros & ~_sign(kind)))
    made.append(_specials(rng, kind, _signed(rng, kind, _random(rng, kind, _below(rng, top, 32)))))
    return kind.values(np.concatenate(made))


def tensors(rng: np.random.Generator, kind: FloatType, count: int) -> Values:
    """Tensors for NVFP4 [at least count, 4, 64], each with an amax of its own."""
    part = max(count // 11, 1)
    shape = (part, ROWS, COLUMNS)
    made = [_any(rng, kind, shape)]
    for low, high in ((0, 255), (90, 160), (0, 30)):
        top = rng.integers(low, high, (part, 1, 1))
        of_block = np.repeat(top - rng.integers(0, 24, (part, ROWS, COLUMNS // 16)), 16, axis=2)
        fields = np.clip(of_block - rng.integers(0, 5, shape), 0, 254)
        for pattern in (_random(rng, kind, fields), _few_bits(rng, kind, fields)):
            made.append(_signed(rng, kind, pattern))
    amax = kind.values(_random(rng, kind, rng.integers(60, 200, (part, 1, 1))))
    made.append(_beside_scales(rng, kind, amax.astype(np.float64)))
    made.append(_beside_scales(rng, kind, np.full((part, 1, 1), 2688.0)))  # a tensor scale of 1
    zeros = np.where(rng.random(shape) < rng.choice([0.9, 1.0], (part, 1, 1)), 0, made[3])
    made.append(zeros | (rng.integers(0, 2, shape) * _sign(kind)))
    made.append(_specials(rng, kind, made[3]))
    return kind.values(np.concatenate(made))


def joined(small: Values) -> Values:
    """Every 16 tensors as one of 64 rows, of one kind, with one amax."""
    return small[: len(small) // 16 * 16].reshape(-1, 16 * ROWS, COLUMNS)


def _sign(kind: FloatType) -> int:
    return 1 << (kind.exponent + kind.mantissa)


def _signed(rng: np.random.Generator, kind: FloatType, magnitude: Words) -> Words:
    return magnitude | (rng.integers(0, 2, magnitude.shape) * _sign(kind))


def _any(rng: np.random.Generator, kind: FloatType, shape: tuple[int, ...]) -> Words:
    return rng.integers(0, 2 * _sign(kind), shape)


def _tops(rng: np.random.Generator, kind: FloatType, count: int) -> Words:
    """The largest exponent field of each block: any, the ordinary ones more often."""
    return np.where(
        rng.random((count, 1)) < 0.5,
        rng.integers(0, 2**kind.exponent - 1, (count, 1)),
        rng.integers(110, 145, (count, 1)),
    )


def _below(rng: np.random.Generator, top: Words, width: int) -> Words:
    """Exponent fields up to `top`, of few binades in one block and of many in another."""
    span = rng.choice([1, 4, 12, 24], top.shape)
    return np.maximum(top - rng.integers(0, span, (len(top), width)), 0)


def _random(rng: np.random.Generator, kind: FloatType, fields: Words) -> Words:
    return (fields << kind.mantissa) | rng.integers(0, 1 << kind.mantissa, fields.shape)


def _few_bits(rng: np.random.Generator, kind: FloatType, fields: Words, offset: int = 1) -> Words:
    """Mantissas of up to 6 bits, and up to `offset` steps beside them: grid points and midpoints."""
    kept = rng.integers(0, 7, fields.shape)
    whole = _random(rng, kind, fields) & ~((1 << (kind.mantissa - kept)) - 1)
    moved = whole + rng.integers(-offset, offset + 1, fields.shape)
    return np.clip(moved, 0, kind.infinity - 1)


def _with_amax(rng: np.random.Generator, kind: FloatType, top: Words, offset: int) -> Words:
    """Blocks whose amax has few bits, or lies a few steps beside such a number."""
    amax = _few_bits(rng, kind, top, offset)
    rest = _random(rng, kind, np.maximum(_below(rng, top, 32) - 1, 0))
    rest = np.where(rng.random(rest.shape) < 0.5, rest, 0)
    rest[np.arange(len(rest)), rng.integers(0, 32, len(rest))] = amax[:, 0]
    return _signed(rng, kind, rest)


def _specials(rng: np.random.Generator, kind: FloatType, patterns: Words) -> Words:
    """A few infinities and NaN of any payload among finite numbers."""
    nan = kind.infinity | rng.integers(1, 1 << kind.mantissa, patterns.shape)
    special = _signed(rng, kind, np.where(rng.random(patterns.shape) < 0.5, kind.infinity, nan))
    return np.where(rng.random(patterns.shape) < 0.03, special, patterns)


def _beside_scales(rng: np.random.Generator, kind: FloatType, whole: Values) -> Words:
    """Block amax and elements beside midpoints of the E4M3 scale and of the E2M1 grid.

    `whole` [tensors, 1, 1] are the amax of the tensors.
    """
    exponents, mantissas = np.divmod(np.arange(127), 8)
    normal = (8 + mantissas) * 2.0 ** (exponents - 10)
    grid = np.where(exponents == 0, mantissas * 2.0**-9, normal)
    halves = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    code = rng.integers(0, 126, (len(whole), ROWS, COLUMNS // 16))
    middle = (grid[code] + grid[code + rng.integers(0, 2, code.shape)]) / 2
    amax = np.repeat(middle / 448 * whole, 16, axis=2)
    scale = grid[np.repeat(code, 16, axis=2) + rng.integers(0, 2, amax.shape)]
    elements = rng.choice(halves, amax.shape) * scale * whole / 2688
    x = np.minimum(elements, amax)
    x[..., ::16] = amax[..., ::16]
    x[:, 0, 0] = whole[:, 0, 0]
    width = 1 + kind.exponent + kind.mantissa
    patterns = x.astype(kind.dtype).view(f"uint{width}").astype(np.int64)
    moved = patterns + rng.integers(-2, 3, patterns.shape)
    moved[:, 0, 0] = patterns[:, 0, 0]
    return _signed(rng, kind, np.maximum(moved, 0))
