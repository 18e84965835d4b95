"""Inputs at which an encoder could go wrong."""

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from tests.formats import exact

Bits = npt.NDArray[np.uint32]


def small_format_values(spec: exact.Spec) -> list[Fraction]:
    """Grid points, quarter points and midpoints between them, up to far beyond the largest."""
    grid = [exact.value(code, spec) for code in range(spec.last + 4)]
    between = [
        low + (high - low) * Fraction(part, 4) for low, high in pairwise(grid) for part in (1, 2, 3)
    ]
    smallest = grid[0] if not spec.zero else grid[1]
    ends = [smallest / 2**k for k in (1, 2, 3, 30)] + [grid[-1] * 2**k for k in (1, 2, 30)]
    return sorted({*grid, *between, *ends})


def around(values: Iterable[Fraction], kind: type[np.floating]) -> npt.NDArray[np.floating]:
    """The values that `kind` holds, with the next ones on both sides and both signs."""
    limit = Fraction(float(np.finfo(kind).max))
    held = np.array([float(v) for v in values if v <= limit], dtype=kind)
    all_values = np.concatenate(
        [np.nextafter(held, kind(0)), held, np.nextafter(held, kind(np.inf))]
    )
    unique = np.unique(np.concatenate([all_values, [kind(0)], np.array([np.inf, np.nan], kind)]))
    return np.concatenate([unique, -unique])


def float32_edges() -> Bits:
    """Ends of the float32 range, subnormals, powers of two and their neighbours, NaN payloads."""
    powers = np.arange(256, dtype=np.uint32) << np.uint32(23)
    near = (powers[:, None] + np.array([-1, 0, 1]).astype(np.uint32)).ravel()
    subnormal = np.uint32(1) << np.arange(23, dtype=np.uint32)
    extra = np.array([0x7F7FFFFF, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 3, 0x007FFFFF], np.uint32)
    magnitudes = np.concatenate([near & np.uint32(0x7FFFFFFF), subnormal, subnormal * 3, extra])
    return np.unique(np.concatenate([magnitudes, magnitudes | np.uint32(0x80000000)]))


def random_bits32(count: int, seed: int) -> Bits:
    """Any float32 bit patterns, specials among them."""
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def narrow_range(count: int, seed: int) -> Bits:
    """float32 bits around 1: where small formats have their codes."""
    rng = np.random.default_rng(seed)
    field = rng.integers(100, 146, count, dtype=np.uint32) << np.uint32(23)
    sign = rng.integers(0, 2, count, dtype=np.uint32) << np.uint32(31)
    return sign | field | rng.integers(0, 1 << 23, count, dtype=np.uint32)
