"""Rows for the instructions that add groups of 16 e2m1 products before they align them.

A group is given by its sum in quarters, a whole number, and by the exponent of its two scales.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tests.arithmetic.product_row_maker import Maker
from tests.arithmetic.product_rows import Row

GROUP, GROUPS = 16, 4
HALVES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 6: 5, 8: 6, 12: 7}  # twice a magnitude: its code
QUARTERS = sorted({x * y for x in HALVES for y in HALVES if x and y}, reverse=True)
FACTORS = {x * y: (x, y) for x in HALVES for y in HALVES}


class Group(NamedTuple):
    """What a group holds: quarters, and an exponent for its scales or the codes of both."""

    quarters: int
    exponent: int = 0
    scales: tuple[int, int] | None = None
    cancelled: int = 0  # twice as much of this, of both signs, beside it


class Groups(Maker):
    """Rows for kind::mxf4 and kind::mxf4nvf4."""

    @property
    def simple(self) -> bool:
        """Whether scales are powers of two."""
        return self.case.scale_format == "e8m0"

    @property
    def blocks(self) -> int:
        """Scales of a row."""
        return -(-self.k // self.case.block)

    def rows(self) -> Iterator[Row]:
        families = (
            self.every_scale,
            self.alignment,
            self.groups_apart,
            self.guard_bits,
            self.halves_of_a_group,
            self.zero_groups,
            self.zero_sums,
            self.overflow,
            self.exponent_floor,
            self.subnormal,
            self.cancellation,
            self.specials,
            self.any_bits,
            self.any_finite,
        )
        for family in families:
            yield from family()

    # Building.

    def scales_of(self, exponent: int) -> tuple[int, int]:
        """Codes of two scales whose exponents add up; of ue4m3 with any significands, any bit 7."""
        if self.simple:
            shift = max(-254, min(exponent, 254))
            byte = max(0, shift, min(127 + shift // 2 + self.integer(-5, 5), 254, shift + 254))
            return byte, shift + 254 - byte
        exponent = max(-12, min(exponent, 14))
        first = self.integer(max(-6, exponent - 7), min(7, exponent + 6))
        return self.ue4m3(first), self.ue4m3(exponent - first)

    def ue4m3(self, exponent: int) -> int:
        """A scale of this exponent; of the smallest one, a subnormal at times."""
        field = exponent + 7
        if field == 1 and self.integer(0, 1):
            return self.integer(1, 7) | 0x80 * self.integer(0, 1)
        return field << 3 | self.integer(0, 7) | 0x80 * self.integer(0, 1)

    def fill(self, quarters: int) -> list[tuple[int, int]]:
        """Pairs of codes whose products add up to a number of quarters; the fewest, greedily."""
        rest, pairs = abs(quarters), []
        while rest:
            most = next(x for x in QUARTERS if x <= rest)
            rest -= most
            x, y = FACTORS[most]
            flip = self.integer(0, 1)
            a_sign = 8 * flip
            b_sign = 8 * (flip ^ (quarters < 0))
            pairs.append((HALVES[x] | a_sign, HALVES[y] | b_sign))
        return pairs

    def groups(self, why: str, c: int, *groups: Group, step: int | None = None) -> Row:
        """A row with these groups in one step; groups of zeros under any scales elsewhere."""
        row = self.random_zeros(c)
        at = self.integer(0, self.k // 64 - 1) if step is None else step
        for index, group in enumerate(groups):
            pairs = self.fill(group.quarters)
            if group.cancelled:
                pairs += self.fill(group.cancelled) + self.fill(-group.cancelled)
            assert len(pairs) <= GROUP, (why, group)
            first = 64 * at + GROUP * index
            for place, (x, y) in zip(
                (first + self.rng.permutation(GROUP)).tolist(), pairs, strict=False
            ):
                row.a[place], row.b[place] = x, y
            block = first // self.case.block
            scales = group.scales or self.scales_of(group.exponent)
            row.a_scales[block], row.b_scales[block] = scales
        return Row(**vars(row) | {"why": why})

    def random_zeros(self, c: int) -> Row:
        """Zeros of any sign, or times anything, under any scales that are numbers."""
        a, b = (8 * self.rng.integers(0, 2, (2, self.k))).tolist()
        if self.integer(0, 1):
            b = self.rng.integers(0, 16, self.k).tolist()
        count = self.blocks
        top = 255 if self.simple else 0x7F
        scales = self.rng.integers(0, top, (2, count))
        if not self.simple:
            scales |= 0x80 * self.rng.integers(0, 2, scales.shape)
        return Row(
            why="zeros", a=a, b=b, a_scales=scales[0].tolist(), b_scales=scales[1].tolist(), c=c
        )

    def one(self, group: Group) -> list[Group]:
        """The group and, where two groups share a scale, nothing in the other."""
        return [group] if self.case.block == GROUP else [group, Group(0, scales=group.scales)]

    def several(self, *groups: Group) -> tuple[Group, ...]:
        """As many as there are scales in a step, each with its own."""
        if self.case.block == GROUP:
            return groups
        placed: list[Group] = []
        for group in groups[:2]:
            group = group._replace(scales=group.scales or self.scales_of(group.exponent))
            placed += [group, Group(0, scales=group.scales)]
        return tuple(placed)

    # The families.

    def every_scale(self) -> Iterator[Row]:
        """Every code of a scale on both sides."""
        for code in (*range(256), *[0, 1, 0x7F, 254, 255] * 5):
            other = self.integer(0x20, 0x50)
            if self.simple:
                other = max(0, min(254 - code + self.integer(-20, 20), 254))
            for scales in ((code, other), (other, code)):
                quarters = self.integer(-700, 700)
                c = self.accumulator(self.integer(-20, 20)) if self.integer(0, 1) else 0
                yield self.groups("a scale", c, *self.one(Group(quarters, scales=scales)))

    def alignment(self) -> Iterator[Row]:
        """A group d binades above or below the accumulator."""
        for d in range(-46, 47):
            for quarters in (1, 3, self.integer(1, 1800)):
                quarters *= self.sign()
                e = self.integer(-30, 30) if self.simple else self.integer(-8, 10)
                c = self.accumulator(e + d)
                yield self.groups(f"group {d} binades from c", c, *self.one(Group(quarters, e)))

    def groups_apart(self) -> Iterator[Row]:
        """Groups d binades apart, the larger ones at times nothing but their scales."""
        for d in range(20, 45):
            for first in (0, self.integer(-700, 700), 1):
                e = self.integer(-30, 30) if self.simple else 14 - self.integer(0, 1)
                large = Group(first, e, cancelled=self.integer(1, 12))
                small = [Group(self.integer(-700, 700), e - d) for _ in range(3)]
                yield self.groups(f"groups {d} binades apart", 0, *self.several(large, *small))

    def guard_bits(self) -> Iterator[Row]:
        """What is cut off each group would count if groups were added first."""
        kept = self.case.rules.fraction_bits
        for below in range(kept - 3, kept + 6):
            for quarters, sign in itertools.product((2, 3, 4, 6, 7), (1, -1)):
                e = self.integer(10, 30)
                c = self.power(e) | self.integer(0, 1)
                scales = (self.exactly(e - below), None)[below % 2 and self.simple]
                group = Group(sign * quarters, e - below, scales=scales)
                yield self.groups(f"groups 2^-{below} of c", c, *[group] * GROUPS)
                # c and its opposite: what is left is what was kept of the groups.
                large = Group(4, e, cancelled=4)
                opposite = self.power(e, -1)
                small = group._replace(exponent=e - below)
                if self.simple:
                    three = self.several(large, small, small, small)
                    yield self.groups(f"groups 2^-{below} of 1", opposite, *three)

    def exactly(self, exponent: int) -> tuple[int, int]:
        """Scales of 2^exponent with significands of 1."""
        if self.simple:
            return self.scales_of(exponent)
        exponent = max(-12, min(exponent, 14))
        first = max(-6, min(7, exponent // 2))
        return (first + 7) << 3, (exponent - first + 7) << 3

    def halves_of_a_group(self) -> Iterator[Row]:
        """Halves of a unit that add up within a group of 16, and not within one of 8 or of 32."""
        e = 22
        scales = self.exactly(e - self.case.rules.fraction_bits + 1)  # a quarter of it: half a unit
        for trial in range(60):
            # c and the first group cancel.
            rest = [Group(0, scales=scales)] * (GROUPS - 1)
            if self.case.block != GROUP:
                rest[0] = Group(0, scales=self.exactly(e - 8))
            large = Group(-1024, scales=self.exactly(e - 8))
            row = self.groups("halves of a unit", self.power(e), large, *rest, step=0)
            for index in range(1 if self.case.block == GROUP else 2, GROUPS):
                for place in (GROUP * index + self.halves(trial, trial % 4 + 1)).tolist():
                    row.a[place], row.b[place] = 1 | 8 * (trial & 1), 1
            yield row

    def halves(self, trial: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """`count` places in each of the two halves of a group, or 2 * count - 1 in all of it."""
        if trial % 3:
            halves = [8 * half + self.rng.permutation(8)[:count] for half in (0, 1)]
            return np.concatenate(halves)
        return self.rng.permutation(GROUP)[: 2 * count - 1]

    def zero_groups(self) -> Iterator[Row]:
        """Groups of zero products, and groups under a zero scale, under large scales: no effect."""
        large = (254, 254) if self.simple else (0x7E, 0xFE)
        for _ in range(30):
            e = self.integer(-30, 10) if self.simple else self.integer(-12, -4)
            c = self.accumulator(self.integer(-60, -20)) if self.integer(0, 1) else 0
            small = Group(self.integer(-700, 700), e)
            zero = Group(0, scales=large)
            yield self.groups("zero group", c, *self.several(zero, small, small, small))
            yield self.groups("zeros", c, *self.several(zero, zero, zero, zero))
            if not self.simple:
                for scales in ((0x00, 0x7E), (0x7E, 0x80)):
                    nothing = Group(self.integer(1, 700), scales=scales)
                    yield self.groups("zero scale", c, *self.several(nothing, small, small, small))

    def zero_sums(self) -> Iterator[Row]:
        """A group whose products cancel raises the alignment all the same."""
        for _ in range(60):
            high = self.integer(-10, 40) if self.simple else 14
            cancelled = Group(0, high, cancelled=self.integer(1, 12))
            e = high - self.integer(25, 45)
            c = self.accumulator(e + self.integer(-8, 8)) if self.integer(0, 2) else 0
            small = Group(self.integer(-700, 700), e)
            yield self.groups("zero sum", c, *self.several(cancelled, small))
            if not self.simple:  # scales that are subnormal count with the smallest normal exponent
                scales = (self.integer(1, 7), self.ue4m3(self.integer(-6, 7)))
                exponent = (max(scales[1] >> 3 & 15, 1) - 7) - 6
                c = self.accumulator(exponent - self.integer(20, 37))
                cancelled = Group(0, scales=scales, cancelled=self.integer(1, 12))
                yield self.groups("zero sum, subnormal scale", c, cancelled)

    def overflow(self) -> Iterator[Row]:
        """Around 2^128."""
        if not self.simple:
            for sign in (1, -1):
                c = 0x7F7FFFFF | (self.stored.sign_bit if sign < 0 else 0)
                yield self.groups("largest", c, Group(sign * 1800, 14))
            return
        for sign, e in itertools.product((1, -1), range(100, 107)):
            c = 0x7F7FFFFF | (self.stored.sign_bit if sign < 0 else 0)
            yield self.groups("largest + 2^e", c, *self.several(Group(4 * sign, e)))
            for less in (e - 1, e - 20, e - 40):
                both = self.several(Group(4 * sign, e), Group(-4 * sign, less))
                yield self.groups("largest + 2^e - less", c, *both)
        for sign, e, quarters in itertools.product((1, -1), range(118, 129), (3, 4, 511, 1799)):
            yield self.groups("groups near 2^128", 0, *self.several(Group(quarters * sign, e)))
        for _ in range(10):
            far, x = self.integer(128, 200), self.integer(1, 700)
            pair = self.several(Group(x, far), Group(-x, far))
            yield self.groups("beyond 2^128 and back", self.accumulator(100), *pair)

    def exponent_floor(self) -> Iterator[Row]:
        """Sums that reach 2^-149 by the last unit of the floor's grid, or by two halves of it."""
        if not self.simple or self.case.block != GROUP:
            return
        rules = self.case.rules
        for places, sign in itertools.product(range(-1, 3), (1, -1)):
            unit = rules.floor - rules.fraction_bits - places
            number = (1 << (-149 - unit)) - 1
            groups: list[Group] = []
            low = 0
            for width in (9, 9, -149 - unit - 18):
                low = -149 - unit - width if not groups else low - width
                part = (number >> low) & ((1 << width) - 1)
                groups.append(Group(sign * part, unit + low + 2))
            for c in (0, self.stored.sign_bit, 1):
                for name, last in (
                    ("unit", Group(sign, unit + 2)),
                    ("half", Group(sign, unit + 1)),
                    ("two halves", Group(2 * sign, unit + 1)),
                ):
                    yield self.groups(f"floor: last {name} at {places}", c, *groups, last)
            # The last whole unit is short of a half, which is in another group.
            *rest, third = groups
            halves = Group(2 * third.quarters + sign, third.exponent - 1), Group(sign, unit + 1)
            yield self.groups(f"floor: halves apart at {places}", 0, *rest, *halves)

    def subnormal(self) -> Iterator[Row]:
        """Subnormal accumulators and results, and negative results that are cut to zero."""
        for magnitude in (0, 1, 2, 0x400001, 0x7FFFFF, 0x800000, 0x800001):
            for c in (magnitude, magnitude | self.stored.sign_bit):
                yield Row(**vars(self.random_zeros(c)) | {"why": "zeros on a small c"})
                for _ in range(5):
                    group = Group(self.sign() * self.integer(1, 40), self.integer(-175, -120))
                    yield self.groups(f"group on {c:#010x}", c, *self.one(group))

    def cancellation(self) -> Iterator[Row]:
        """Sums that are zero or far smaller than their terms."""
        for _ in range(40):
            e = self.integer(-30, 30) if self.simple else self.integer(-8, 10)
            scales = self.scales_of(e)
            x = self.integer(1, 1800)
            pair = Group(x, scales=scales), Group(-x, scales=scales)
            far = self.scales_of(e - self.integer(0, 40))
            small = Group(self.integer(-700, 700), scales=far)
            yield self.groups("x - x", 0, *pair)
            yield self.groups("x - x + y", 0, *pair, small, Group(0, scales=far))
            c = self.accumulator(e + 9)
            sign = -1 if c < self.stored.sign_bit else 1
            yield self.groups("c - x", c, *self.one(Group(sign * x, scales=scales)))

    def specials(self) -> Iterator[Row]:
        """NaN in scales over numbers and over zeros, and special accumulators."""
        infinities, not_numbers = self.special_accumulators()
        nans = [255] if self.simple else [0x7F, 0xFF]
        for c in (*infinities, *not_numbers, 0, 0x3F800000):
            for quarters in (0, 5, -5):
                yield self.groups("special c", c, *self.one(Group(quarters, 0)))
            for nan, index in itertools.product(nans, range(self.blocks)):
                for side in ("a_scales", "b_scales"):
                    row = self.random_zeros(c)
                    if self.integer(0, 1):
                        row = self.groups("numbers", c, *self.one(Group(5, 0)))
                    getattr(row, side)[index] = nan
                    yield Row(**vars(row) | {"why": "NaN scale"})

    def any_bits(self) -> Iterator[Row]:
        """Any codes, scales and accumulators."""
        for _ in range(20):
            a, b = self.rng.integers(0, 16, (2, self.k))
            scales = self.rng.integers(0, 256, (2, self.blocks))
            c = int(self.rng.integers(0, 1 << 32))
            yield self.filled("any bits", a, b, scales, c)

    def any_finite(self) -> Iterator[Row]:
        """Codes dense and sparse, with scales near each other or anywhere."""
        middle, top = (127, 254) if self.simple else (0x38, 0x7E)
        for spread, density in ((0, 1.0), (3, 1.0), (12, 0.6), (40, 1.0), (top, 1.0), (top, 0.1)):
            for _ in range(25):
                a, b = self.rng.integers(0, 16, (2, self.k))
                a = np.where(self.rng.random(self.k) < density, a, 8 * (a >> 3))
                scales = self.rng.integers(-spread, spread + 1, (2, self.blocks))
                scales = np.clip(middle + scales, 0, top)
                if not self.simple:
                    scales |= 0x80 * self.rng.integers(0, 2, scales.shape)
                c = self.accumulator(self.integer(-20, 40)) if self.integer(0, 2) else 0
                yield self.filled("finite", a, b, scales, c)

    def filled(
        self,
        why: str,
        a: Sequence[int],
        b: Sequence[int],
        scales: np.ndarray[tuple[int, int], np.dtype[np.int64]],
        c: int,
    ) -> Row:
        first, second = scales.tolist()
        return Row(
            why=why, a=list(map(int, a)), b=list(map(int, b)), a_scales=first, b_scales=second, c=c
        )
