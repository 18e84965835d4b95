"""Families of operands: each aims at one rule of the fused sum. What they share, and the plain instructions' ones.

A family gives the rows of A of a tile, made for the columns of B, which have the same exponents and places in a step.
So every result of the tile is a case of the family. `Drawn` holds products as exponents, fractions and signs;
`operands` makes codes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref.arithmetic.instructions import Instruction, Result
from flamia_ref.device.elements import Integers
from flamia_ref.formats import ScalarFormat


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What operands are made for: the element formats, the rules they aim at, and the sizes of the tiles."""

    a: ScalarFormat
    b: ScalarFormat
    rules: Instruction
    half: bool
    scaled: bool
    tiles: int
    steps: int
    m: int
    n: int
    k: int
    rng: np.random.Generator

    @property
    def rows(self) -> tuple[int, int, int, int]:
        """Shape of A."""
        return self.tiles, self.steps, self.m, self.k

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """Shape of B, column by column."""
        return self.tiles, self.steps, self.n, self.k

    @property
    def each_row(self) -> tuple[int, int, int, int]:
        """One number a row of A."""
        return self.tiles, self.steps, self.m, 1

    @property
    def each_place(self) -> tuple[int, int, int, int]:
        """One number a place along K."""
        return self.tiles, self.steps, 1, self.k

    @property
    def each_step(self) -> tuple[int, int, int, int]:
        """One number a tile and step."""
        return self.tiles, self.steps, 1, 1

    @property
    def reach(self) -> tuple[int, int]:
        """Exponents that a product of normal elements can have."""
        return self.a.emin + self.b.emin, self.a.emax + self.b.emax

    @property
    def unit(self) -> int:
        """How far below the largest exponent the last place is that a term keeps."""
        return self.rules.fraction_bits

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Integers:
        """From low to high, both included."""
        return self.rng.integers(low, max(low, high) + 1, shape)

    def chance(self, probability: float, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """True with a probability."""
        return self.rng.random(shape) < probability

    def places(self) -> Integers:
        """A random order of the places along K of each step: 0 to k - 1."""
        return np.argsort(self.rng.random(self.each_place), axis=-1)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Products of the rows of A with a column of B.

    Attributes:
        exponents: exponent of each product [tiles, steps, m, k], or what broadcasts to it.
        a_fractions: fractions of A's elements, modulo their bits, as `exponents`.
        b_fractions: fractions of B's elements [tiles, steps, n, k], or what broadcasts to it.
        negative: whether a product is negative, as `exponents`.
        present: whether there is one, as `exponents`; else one of its elements is zero.
        base: an exponent a tile and step [tiles, steps, 1, 1] that scales bring into reach.
    """

    exponents: Any
    a_fractions: Any
    b_fractions: Any
    negative: Any
    present: Any
    base: Integers


def _base(setting: Setting, low: int, high: int) -> Integers:
    """An exponent a tile and step, those of one tile within 8 of each other in most tiles."""
    each_tile = (setting.tiles, 1, 1, 1)
    first = setting.integers(low, high, each_tile)
    near = first + setting.integers(-8, 8, setting.each_step)
    far = setting.integers(low, high, setting.each_step)
    found = np.where(setting.chance(0.8, each_tile), near, far)
    return np.clip(found, low, high)


def around(setting: Setting) -> Integers:
    """Places below the last one that is kept, most of them 0 or 1; one number a row."""
    near = np.array([0, 0, 1, 1, 0, 1, -1, 2, -2, 3])
    return near[setting.integers(0, len(near) - 1, setting.each_row)]


def _anywhere(setting: Setting) -> Integers:
    low, high = setting.reach
    if setting.scaled:
        return _base(setting, max(low - 250, -140), min(high + 250, 125))
    return _base(setting, low + (high - low) // 3, high)


def _fractions(setting: Setting, shape: tuple[int, ...]) -> Integers:
    return setting.integers(0, (1 << 10) - 1, shape)


def alignment(setting: Setting) -> Drawn:
    """One large product with no low bits, and products of the other sign near the last place that is kept."""
    places, base = setting.places(), _anywhere(setting)
    large, row = places == 0, setting.each_row
    depth = setting.unit + around(setting)
    sign = setting.chance(0.5, row)
    fractions = np.where(setting.chance(0.7, row), 0, -1)
    return Drawn(
        exponents=np.where(large, base, base - depth),
        a_fractions=np.where(large, 0, fractions),
        b_fractions=0,
        negative=np.where(large, sign, sign ^ setting.chance(0.75, row)),
        present=(places <= setting.integers(1, 3, row)) & (~large | setting.chance(0.8, row)),
        base=base,
    )


def guard_bits(setting: Setting) -> Drawn:
    """Many products that are each cut to nothing, or nearly, and would count if they were added first."""
    places, base = setting.places(), _anywhere(setting)
    large, row = places == 0, setting.each_row
    below = setting.unit + setting.integers(-1, 4, row)
    return Drawn(
        exponents=np.where(large, base, base - below),
        a_fractions=np.where(large, 0, -1),
        b_fractions=np.where(large, 0, -1),
        negative=np.where(large, False, setting.chance(0.3, row)),
        present=True,
        base=base,
    )


def cancellation(setting: Setting) -> Drawn:
    """Products that cancel in pairs, and a few that are left over far below."""
    places, base = setting.places(), _anywhere(setting)
    pair = places // 2
    pairs = setting.k // 2 + 1

    def shared(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        shape = (*values.shape[:3], setting.k)
        return np.take_along_axis(values, np.broadcast_to(pair, shape), axis=-1)

    paired = pair < setting.integers(1, max(1, setting.k // 3), setting.each_step)
    of_rows, of_columns = (
        (setting.tiles, setting.steps, count, pairs) for count in (setting.m, setting.n)
    )
    away = np.where(
        paired, shared(setting.integers(0, 6, of_rows)), setting.integers(0, 34, setting.rows)
    )
    signs = shared(setting.chance(0.5, of_rows)) ^ (places % 2 == 1)
    return Drawn(
        exponents=base - away,
        a_fractions=np.where(paired, shared(_fractions(setting, of_rows)), 0),
        b_fractions=np.where(
            paired, shared(_fractions(setting, of_columns)), setting.integers(0, 9, setting.columns)
        ),
        negative=np.where(paired, signs, setting.chance(0.5, setting.rows)),
        present=paired | setting.chance(0.15, setting.rows),
        base=base,
    )


def spread(setting: Setting) -> Drawn:
    """Exponents over a window of some width."""
    base = _anywhere(setting)
    widths = np.array([0, 2, 5, 10, 20, 40])
    window = widths[setting.integers(0, len(widths) - 1, (setting.tiles, 1, 1, 1))]
    return Drawn(
        exponents=base - np.floor(setting.rng.random(setting.rows) * (window + 1)).astype(int),
        a_fractions=_fractions(setting, setting.rows),
        b_fractions=_fractions(setting, setting.columns),
        negative=setting.chance(0.5, setting.rows),
        present=setting.chance(0.9, setting.rows),
        base=base,
    )


def exponent_floor(setting: Setting) -> Drawn:
    """A product on the grid of the smallest results, and products of the other sign at the floor's last place."""
    places, row = setting.places(), setting.each_row
    large = places == 0
    # In float16 what shows is a tie, an odd multiple of 2^-25; in float32 a unit of 2^-149 or more.
    grid = -25 if setting.half else -149
    lifted = setting.integers(0, 1 if setting.half else 12, row)
    one_and_a_half = (1 << setting.a.mantissa_bits) >> 1
    sign = setting.chance(0.5, row)
    smallest = setting.rules.exponent_floor - setting.unit - around(setting)
    return Drawn(
        exponents=np.where(large, grid + lifted, smallest),
        a_fractions=np.where(large & setting.half & (lifted == 1), one_and_a_half, 0),
        b_fractions=0,
        negative=np.where(large, sign, sign ^ setting.chance(0.6, row)),
        present=places <= setting.integers(1, 2, row),
        base=np.full(setting.each_step, grid),
    )


def floor_sums(setting: Setting) -> Drawn:
    """Many products of one sign around the floor's last place: what is cut off them decides a unit of the result.

    Formats whose products are all within a few binades show the floor in no other way. In half of the tiles of long
    steps 14 products of 36 are 8 short of 512, which is 2^-149, and 16 to 18 of a half or 8 to 10 of 1 make up for it.
    """
    smallest = setting.rules.exponent_floor - setting.unit
    places, row, tile = setting.places(), setting.each_row, (setting.tiles, 1, 1, 1)
    counted = setting.chance(0.5 if setting.k >= 32 else 0.0, tile)
    heavy, halves = places < 14, setting.chance(0.5, row)
    count = 14 + np.where(halves, 16, 8) + setting.integers(0, 2, row)
    one_and_a_half = [(1 << element.mantissa_bits) >> 1 for element in (setting.a, setting.b)]
    exponents = np.where(heavy, 4, np.where(halves, -1, 0))
    return Drawn(
        exponents=smallest + np.where(counted, exponents, setting.integers(0, 5, setting.rows)),
        a_fractions=np.where(counted, heavy * one_and_a_half[0], _fractions(setting, setting.rows)),
        b_fractions=np.where(
            counted, heavy * one_and_a_half[1], _fractions(setting, setting.columns)
        ),
        negative=setting.chance(0.5, setting.each_step),
        present=np.where(counted, places < count, setting.chance(0.9, setting.rows)),
        base=smallest + setting.integers(3, 4, setting.each_step),
    )


def ties(setting: Setting) -> Drawn:
    """A product and half a unit of its result's last place, with something far below or nothing."""
    places, base = setting.places(), _anywhere(setting)
    row = setting.each_row
    digits = {Result.FLOAT16: 11, Result.FLOAT32_13: 14}.get(setting.rules.result, 24)
    far = np.where(setting.chance(0.5, row), setting.unit + around(setting), digits + 3)
    depth = np.where(places == 1, digits, far)
    return Drawn(
        exponents=np.where(places == 0, base, base - depth),
        a_fractions=np.where(places == 0, _fractions(setting, row), 0),
        b_fractions=0,
        negative=np.where(places == 2, setting.chance(0.5, row), setting.chance(0.5, row)),
        present=places <= setting.integers(1, 2, row),
        base=base,
    )


def overflow(setting: Setting) -> Drawn:
    """Around the largest result."""
    top = 16 if setting.half else 128
    base = _base(setting, top - 6, top + 1)
    if not setting.scaled:
        base = np.clip(base, *setting.reach)
    ones = setting.chance(0.5, setting.rows)
    return Drawn(
        exponents=base - setting.integers(0, 5, setting.rows),
        a_fractions=np.where(ones, -1, _fractions(setting, setting.rows)),
        b_fractions=_fractions(setting, setting.columns),
        negative=setting.chance(0.25, setting.rows),
        present=setting.chance(0.4, setting.rows),
        base=base,
    )


DRAWN: Mapping[str, Callable[[Setting], Drawn]] = {
    "alignment": alignment,
    "guard bits": guard_bits,
    "cancellation": cancellation,
    "spread": spread,
    "exponent floor": exponent_floor,
    "floor sums": floor_sums,
    "ties": ties,
    "overflow": overflow,
}
"""The families that are drawn as products, by name."""
