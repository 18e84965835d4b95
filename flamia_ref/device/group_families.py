"""Families for the FP4 kinds, whose terms are groups of 16 products aligned by the exponents of their scales alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref.device.elements import Codes, Integers, codes_of, with_sign
from flamia_ref.device.families import Setting, around
from flamia_ref.formats import ScalarFormat

_ONE, _HALF, _SIX = 2, 1, 7  # E2M1 codes
_NEGATIVE = 8


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Elements a [tiles, steps, m, k] and b [tiles, steps, n, k], and the exponents that both scales of a block add up
    to [tiles, steps, m, scales].
    """

    a: Codes
    b: Codes
    exponents: Integers


def _reach(scale: ScalarFormat) -> tuple[int, int]:
    """Exponents that a pair of scales reaches."""
    return 2 * scale.emin, 2 * scale.emax


def _elements(setting: Setting, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Values of each block [..., scales], or of each group [..., 4], for each element [..., k]."""
    return np.repeat(values, setting.k // values.shape[-1], axis=-1)


def alignment(setting: Setting, scale: ScalarFormat, scales: int) -> Grouped:
    """A group of one product, and others of the other sign near the last place that is kept below it."""
    low, high = _reach(scale)
    base = np.minimum(setting.integers(max(low + 50, -90), min(high, 90), setting.each_step), high)
    return _one_and_tiny(setting, scale, scales, large_at=base, lowest=base - setting.unit)


def exponent_floor(setting: Setting, scale: ScalarFormat, scales: int) -> Grouped:
    """A group on the grid of the smallest results, others of the other sign at the floor's last place."""
    lifted = setting.integers(0, 9, setting.each_row)
    lowest = np.array(setting.rules.exponent_floor - setting.unit)
    return _one_and_tiny(setting, scale, scales, large_at=-149 + lifted, lowest=lowest)


def _one_and_tiny(
    setting: Setting, scale: ScalarFormat, scales: int, *, large_at: Integers, lowest: Integers
) -> Grouped:
    """One group of value 1 under 2^large_at, others with their last bit around the place `lowest`."""
    each_block = (setting.tiles, setting.steps, 1, scales)
    large = np.argsort(setting.rng.random(each_block), axis=-1) == 0
    kind = setting.integers(0, 2, each_block)
    # The last bit of the products 1 * 1, 0.5 * 0.5 and 6 * 6.
    last_bit = np.array([0, -2, 2])[kind]
    exponents = np.where(large, large_at, lowest - around(setting) - last_bit)
    is_large = _elements(setting, large)
    magnitude = np.where(is_large, _ONE, np.array([_ONE, _HALF, _SIX])[_elements(setting, kind)])
    place, group = np.arange(setting.k) % 16, np.arange(setting.k) // 16
    first = setting.integers(0, 15, setting.each_step)
    # A second product in the other half of a small group: cut one by one the two would be less.
    doubled = setting.chance(0.5, setting.each_step) & ~is_large
    chosen = (place == first) | (doubled & (place == (first + 8) % 16))
    # A block of 32 is two groups under one scale: only one of them is filled when it is the large one.
    chosen &= ~is_large | (group % (4 // scales) == 0)
    magnitude = np.where(chosen, magnitude, 0)
    sign = setting.chance(0.5, setting.each_row)
    negative = np.where(is_large, sign, sign ^ setting.chance(0.75, setting.each_row))
    a = magnitude | np.where(negative, _NEGATIVE, 0)
    b = np.broadcast_to(magnitude, setting.columns)
    return Grouped(a=a.astype(np.uint8), b=b.astype(np.uint8), exponents=_kept(scale, exponents))


def _kept(scale: ScalarFormat, exponents: Integers) -> Integers:
    low, high = _reach(scale)
    return np.clip(exponents, low, high)


def empty_groups(setting: Setting, scale: ScalarFormat, scales: int) -> Grouped:
    """Groups of zeros, or whose products cancel, some under the largest scale, beside ordinary ones."""
    found = finite(setting, scale, scales)
    groups = (setting.tiles, setting.steps, 1, 4)
    emptied = _elements(setting, setting.chance(0.4, groups))
    cancels = _elements(setting, setting.chance(0.5, groups))
    first = np.arange(setting.k) // 2 * 2  # of each pair of neighbours
    flipped = found.a[..., first] ^ np.where(np.arange(setting.k) % 2, _NEGATIVE, 0)
    a = np.where(emptied, np.where(cancels, flipped, found.a & _NEGATIVE), found.a)
    b = np.where(emptied & cancels, found.b[..., first], found.b)
    low, high = _reach(scale)
    base = setting.integers(max(low, -60), min(high, 60), setting.each_step)
    blocks = (setting.tiles, setting.steps, 1, scales)
    raised = np.where(setting.chance(0.5, blocks), setting.integers(0, 40, blocks), 0)
    exponents = _kept(scale, base + raised + setting.integers(-1, 1, setting.each_row))
    return Grouped(a=a.astype(np.uint8), b=b.astype(np.uint8), exponents=exponents)


def finite(setting: Setting, scale: ScalarFormat, scales: int) -> Grouped:
    """Any elements, with scales near each other or anywhere."""
    low, high = _reach(scale)
    each_tile = (setting.tiles, 1, 1, 1)
    dense = setting.chance(0.5, each_tile)
    a, b = (
        np.where(setting.chance(0.9, shape) | dense, setting.integers(0, 15, shape), 0)
        for shape in (setting.rows, setting.columns)
    )
    width = np.array([0, 3, 12, 40, 120])[setting.integers(0, 4, each_tile)]
    base = setting.integers(max(low, -100), min(high, 100), setting.each_step)
    blocks = (setting.tiles, setting.steps, setting.m, scales)
    away = np.floor(setting.rng.random(blocks) * (width + 1)).astype(int)
    exponents = _kept(scale, base - away)
    return Grouped(a=a.astype(np.uint8), b=b.astype(np.uint8), exponents=exponents)


def overflow(setting: Setting, scale: ScalarFormat, scales: int) -> Grouped:
    """Around the largest result, as far as the scales reach."""
    found = finite(setting, scale, scales)
    exponents = setting.integers(112, 128, found.exponents.shape)
    return Grouped(a=found.a, b=found.b, exponents=_kept(scale, exponents))


def small(setting: Setting, scale: ScalarFormat, scales: int) -> Grouped:
    """Results below the normal range, as far as the scales reach."""
    found = finite(setting, scale, scales)
    exponents = setting.integers(-190, -120, found.exponents.shape)
    return Grouped(a=found.a, b=found.b, exponents=_kept(scale, exponents))


GROUPED: Mapping[str, Callable[[Setting, ScalarFormat, int], Grouped]] = {
    "alignment": alignment,
    "exponent floor": exponent_floor,
    "empty groups": empty_groups,
    "finite": finite,
    "overflow": overflow,
    "subnormal": small,
}
"""The families of pairs of rows by name."""


def scale_codes(
    scale: ScalarFormat, exponents: Integers, columns: int, rng: np.random.Generator
) -> tuple[Codes, Codes]:
    """Scales of the rows of A and of the columns of B whose exponents add up to `exponents`.

    exponents: [tiles, steps, rows or 1, scales]. The columns of a tile have one exponent a block. Significands, where
    the format has them, are 1 half of the time.
    """
    low, high = scale.emin, scale.emax
    centre = exponents[:, :, :1]
    moved = centre // 2 + rng.integers(-6, 7, (*exponents.shape[:2], 1, 1))
    of_b = np.clip(moved, np.maximum(low, centre - high), np.minimum(high, centre - low))
    of_a = np.clip(exponents - of_b, low, high)
    shape = (*exponents.shape[:2], columns, exponents.shape[3])
    return _scale_codes(scale, of_a, rng), _scale_codes(scale, np.broadcast_to(of_b, shape), rng)


def _scale_codes(scale: ScalarFormat, exponents: Integers, rng: np.random.Generator) -> Codes:
    if scale.mantissa_bits == 0:
        return with_sign(scale, exponents - scale.emin, False)
    shape, count = exponents.shape, 1 << scale.mantissa_bits
    fractions = rng.integers(0, count, shape) * (rng.random(shape) < 0.5)
    subnormal = (exponents <= scale.emin) & (rng.random(shape) < 0.5)
    normal = codes_of(scale, exponents, fractions, False)
    return np.where(subnormal, rng.integers(0, count, shape), normal).astype(scale.code_dtype)
