"""Makes the rows of `product_rows`: families that aim at one rule of the fused sum each.

The entries of a row that its family leaves alone are zeros of random sign under random scales,
which must change nothing.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.arithmetic.product_rows import ELEMENTS, K, Row, instruction, results, terms
from tests.independent import codes, float32

Product = tuple[int, int, int, int]  # exponent, sign, fractions of a and b; see `Maker.code`


@functools.cache
def adversarial(pair: tuple[str, str]) -> tuple[list[Row], npt.NDArray[np.uint32]]:
    """All rows of a pair of formats, and their results."""
    rows = list(Maker(pair).rows())
    return rows, results(rows, pair)


class Maker:
    """Makes rows for one pair of formats."""

    def __init__(self, pair: tuple[str, str], *, seed: int = 0, k: int = K) -> None:
        self.k = k
        self.a, self.b = (ELEMENTS[name] for name in pair)
        self.scaled = instruction(pair) == "sm100.tcgen05.mxf8f6f4"
        self.terms = terms(pair)
        self.rng = np.random.default_rng([seed, *(ord(letter) for letter in "".join(pair))])

    def rows(self) -> Iterator[Row]:
        families = (
            self.alignment,
            self.guard_bits,
            self.overflow,
            self.exponent_floor,
            self.subnormal,
            self.zeros,
            self.cancellation,
            self.specials,
            self.any_bits,
            self.any_finite,
        )
        for family in families:
            for row in family():
                if row is not None:
                    yield row

    # How rows are built.

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def sign(self) -> int:
        return 1 - 2 * self.integer(0, 1)

    def float32(self, exponent: int, sign: int = 0) -> int:
        """A float32 in the binade of `exponent`, its last bit set."""
        pattern = (exponent + 127) << 23 | self.integer(0, (1 << 23) - 1) | 1
        return pattern | (float32.SIGN if (sign or self.sign()) < 0 else 0)

    def zero(self, element: codes.Element) -> int:
        return element.sign_bit * self.integer(0, 1)

    def range(self, element: codes.Element) -> tuple[int, int]:
        """Exponents of normal numbers that have every mantissa."""
        partial = element.largest & ((1 << element.fraction_bits) - 1) != (
            (1 << element.fraction_bits) - 1
        )
        top = (element.largest >> element.fraction_bits) - element.bias
        return 1 - element.bias, top - partial

    def product_range(self) -> tuple[int, int]:
        """Exponents E that a product can have, with scales where there are some."""
        lows, highs = zip(self.range(self.a), self.range(self.b), strict=True)
        reach = 250 if self.scaled else 0
        return sum(lows) - reach, sum(highs) + reach

    def code(self, element: codes.Element, exponent: int, fraction: int, negative: bool) -> int:
        """A normal number. The fraction is taken modulo its bits: -1 is all ones."""
        field = exponent + element.bias
        code = field << element.fraction_bits | fraction % (1 << element.fraction_bits)
        return code | (element.sign_bit if negative else 0)

    def row(
        self,
        why: str,
        c: int,
        *steps: list[Product] | None,
        at: int | None = None,
    ) -> Row | None:
        """A row that has `products` in its step number `at` and the ones after it.

        A step of None holds only zeros; `at` of None is any step. Returns None where the formats
        cannot hold the products.
        """
        count = -(-self.k // self.terms)
        last_is_short = len(steps[-1] or ()) <= self.k % self.terms
        latest = count - len(steps) - (not last_is_short)
        first = self.integer(0, latest) if at is None else at
        a, b = ((x.sign_bit * self.rng.integers(0, 2, self.k)).tolist() for x in (self.a, self.b))
        anywhere = self.rng.integers(0, 255, (2, count))
        extremes = np.array([0, 1, 127, 253, 254])[self.rng.integers(0, 5, (2, count))]
        scales = np.where(self.rng.integers(0, 6, (2, count)), extremes, anywhere).tolist()
        for step, products in enumerate(steps, start=first):
            if not products:
                continue
            shift = self.shift([product[0] for product in products])
            if shift is None:
                return None
            if self.scaled:
                # The bytes of both scales: they add up to shift + 2 * 127 and are 0 to 254 each.
                wanted = 127 + shift // 2 + self.integer(-5, 5)
                byte = max(0, shift, min(wanted, 254, shift + 254))
                scales[0][step], scales[1][step] = byte, shift + 254 - byte
            room = min(self.terms, self.k - step * self.terms)
            places = step * self.terms + self.rng.permutation(room)[: len(products)]
            for place, (exponent, sign, a_fraction, b_fraction) in zip(
                places.tolist(), products, strict=True
            ):
                a_exponent, b_exponent = self.split(exponent - shift)
                flip = self.sign()
                a[place] = self.code(self.a, a_exponent, a_fraction, sign * flip < 0)
                b[place] = self.code(self.b, b_exponent, b_fraction, flip < 0)
        return Row(why=why, a=a, b=b, a_scales=scales[0], b_scales=scales[1], c=c)

    def shift(self, exponents: list[int]) -> int | None:
        """An exponent for the scales that brings all products into the range of the elements."""
        low, high = (x + y for x, y in zip(self.range(self.a), self.range(self.b), strict=True))
        least, most = max(exponents) - high, min(exponents) - low
        if not self.scaled:
            return 0 if least <= 0 <= most else None
        least, most = max(least, -254), min(most, 254)
        return self.integer(least, most) if least <= most else None

    def split(self, exponent: int) -> tuple[int, int]:
        (a_low, a_high), (b_low, b_high) = self.range(self.a), self.range(self.b)
        a = self.integer(max(a_low, exponent - b_high), min(a_high, exponent - b_low))
        return a, exponent - a

    # The families.

    def alignment(self) -> Iterator[Row | None]:
        """One product d binades above or below the accumulator."""
        low, high = self.product_range()
        low, high = max(low, -90), min(high, 90)
        for d in range(-32, 33):
            for mantissas in ((-1, -1), (self.integer(0, 99), self.integer(0, 99))):
                e = self.integer(max(-40, low - d), min(40, high - d))
                yield self.row(
                    f"product {d} binades from c",
                    self.float32(e),
                    [(e + d, self.sign(), *mantissas)],
                )
        for d in range(1, 40):  # the same between two products
            e = self.integer(low + d, high)
            near, far = self.integer(0, 99), self.integer(0, 99)
            signs = self.sign(), self.sign()
            yield self.row(
                f"products {d} binades apart",
                0,
                [(e, signs[0], near, far), (e - d, signs[1], -1, -1)],
            )

    def guard_bits(self) -> Iterator[Row | None]:
        """What is cut off each term would count if it were added first."""
        low, high = self.product_range()
        for below in range(22, 31):
            e = self.integer(max(-40, low + below), min(40, high + below))
            for count in (1, 2, 6, self.terms):
                for mantissa, sign in ((0, 1), (-1, 1), (0, -1), (-1, -1)):
                    c = (e + 127) << 23 | self.integer(0, 1)
                    products = [(e - below, sign, mantissa, mantissa)] * count
                    yield self.row(f"{count} products 2^-{below} of c", c, products)

    def overflow(self) -> Iterator[Row | None]:
        """Around 2^128, in one step and in two."""
        largest = 0x7F7FFFFF
        for sign in (1, -1):
            flip = float32.SIGN if sign < 0 else 0
            for e in range(100, 106):
                yield self.row(f"largest + 2^{e}", largest | flip, [(e, sign, 0, 0)])
                yield self.row(f"largest + 2 * 2^{e}", largest | flip, [(e, sign, 0, 0)] * 2)
                both = [(104, sign, 0, 0), (e - 1, -sign, 0, 0)]
                yield self.row(f"largest + 2^104 - 2^{e - 1}", largest | flip, both)
            for e in range(125, 130):
                for mantissa in (0, -1):
                    for count in (1, 2, 4):
                        products = [(e, sign, mantissa, mantissa)] * count
                        yield self.row(f"{count} products at 2^{e}", 0, products)
            beyond = [(200, sign, 0, 0), (200, -sign, 0, 0), (198, sign, 0, 0), (198, -sign, 0, 0)]
            yield self.row("beyond 2^128 and back", self.float32(100), beyond)
            yield self.row("beyond 2^128 and back, exactly", 0, [*beyond, (174, sign, 0, 0)])
            big, back = [(127, sign, 0, 0)] * 2, [(127, -sign, 0, 0)] * 4
            yield self.row("overflow, then as much back", 0, big, back)
            yield self.row("overflow, then zeros", 0, big, None)

    def exponent_floor(self) -> Iterator[Row | None]:
        """Sums of exactly 2^-149 that fall short of it if the terms are cut to another grid.

        In units of 2^-157: four products of 1.5 * 1.5 or 1.5 * 1 and whole numbers up to 256.
        """
        a_half, b_half = (1 << (x.fraction_bits - 1) for x in (self.a, self.b))
        six_by_six = (4, a_half, b_half)
        quarter = [(0, a_half, b_half)] * 4  # 2.25 each
        whole = {24: (4, a_half, 0), 6: (2, a_half, 0), 4: (2, 0, 0), 1: (0, 0, 0)}
        over = [*quarter, *[six_by_six] * 6, whole[24], whole[6], whole[1]]
        single = [(0, a_half, 0)] * 4  # 1.5 each
        under = [*single, *[six_by_six] * 6, whole[24], whole[6], whole[4]]
        for name, products in (("2.25", over), ("1.5", under)):
            for sign in (1, -1):
                for exponent in (-159, -158, -157, -156, -155):
                    for c in (0, float32.SIGN, 1):
                        moved = [(e + exponent, sign, *rest) for e, *rest in products]
                        yield self.row(f"{name} 2^{exponent} at the floor", c, moved)

    def subnormal(self) -> Iterator[Row | None]:
        """Subnormal accumulators and results, and negative results that are cut to zero."""
        accumulators = (0, 1, 2, 0x400001, 0x7FFFFF, 0x800000, 0x800001, 0x1000001)
        for magnitude in accumulators:
            for c in (magnitude, magnitude | float32.SIGN):
                yield self.row("zeros on a subnormal c", c, None)
                for _ in range(6):
                    e, count = self.integer(-172, -122), self.integer(1, 6)
                    sign, mantissa = self.sign(), self.integer(-1, 2)
                    products = [(e, sign, mantissa, mantissa)] * count
                    yield self.row(f"{count} products at 2^{e} on {c:#010x}", c, products)
        for e in range(-180, -144, 3):
            for sign in (1, -1):
                yield self.row(f"{sign} * 2^{e} alone", 0, [(e, sign, 0, 0)])

    def zeros(self) -> Iterator[Row | None]:
        """Zero codes of all signs: the accumulator comes out as it was, -0 as +0."""
        for c in (0, float32.SIGN, self.float32(0), self.float32(-100), self.float32(120)):
            for _ in range(3):
                yield self.row("zeros", c, None)

    def cancellation(self) -> Iterator[Row | None]:
        """Sums that are zero or far smaller than their terms."""
        low, high = self.product_range()
        for _ in range(30):
            e = self.integer(max(-60, low + 20), min(60, high))
            x, y = self.integer(0, 99), self.integer(0, 99)
            pair = [(e, 1, x, y), (e, -1, x, y)]
            yield self.row("x - x", 0, pair)
            for gap in (3, 12, 24, 26):
                yield self.row(f"x - x + y, 2^-{gap}", 0, [*pair, (e - gap, self.sign(), y, x)])
            c = self.float32(e)
            sign = -1 if c < float32.SIGN else 1
            yield self.row("c - x", c, [(e, sign, x, 0)])
            yield self.row("c - x - y", c, [(e, sign, x, 0), (e - 3, sign, 0, y)])

    def specials(self) -> Iterator[Row | None]:
        """NaN and infinity in elements, scales and accumulators, in every step."""
        steps = -(-self.k // self.terms)
        infinities = (float32.INFINITY, float32.MINUS_INFINITY)
        for c in (*infinities, 0x7F800001, 0x7FC00000, 0xFF800001, 0xFFFFFFFF):
            yield self.row("NaN or infinite c, zeros", c, None)
            yield self.row("NaN or infinite c", c, [(0, 1, 0, 0)])
            for sign in (1, -1):
                big = [(127, sign, 0, 0)] * 2
                yield self.row("infinite c, opposite overflow", c, big)
        for step in range(steps):
            place = min(step * self.terms + self.integer(0, self.terms - 1), self.k - 1)
            ordinary = [(0, 1, 0, 0)]
            if self.scaled:
                for side in ("a_scales", "b_scales"):
                    row = self.row("NaN scale over zeros", 0, None)
                    yield _with(row, side, step, codes.E8M0_NAN)
                    row = self.row("NaN scale", 0x3F800000, ordinary)
                    yield _with(row, side, step, codes.E8M0_NAN)
            for side, element in (("a", self.a), ("b", self.b)):
                other = "b" if side == "a" else "a"
                for special in _special_codes(element):
                    plain = self.code(ELEMENTS[getattr(self, other).name], 0, 0, False)
                    negative = plain | getattr(self, other).sign_bit
                    for partner in (plain, negative, self.zero(getattr(self, other))):
                        for c in (0, 0x3F800000, *infinities):
                            row = self.row("NaN or infinity", c, ordinary)
                            row = _with(_with(row, side, place, special), other, place, partner)
                            yield row
                    opposite = special ^ element.sign_bit
                    for second in (opposite, special):
                        row = self.row("two specials", 0, None)
                        for at, code in ((place, special), ((place + 7) % self.k, second)):
                            row = _with(_with(row, side, at, code), other, at, plain)
                        yield row
            if self.scaled and self.a.infinity is not None and step:
                # A finite overflow in the step before, then an infinity of one sign or the other.
                for sign in (1, -1):
                    row = self.row(
                        "overflow, then infinity", 0, [(127, sign, 0, 0)] * 2, at=step - 1
                    )
                    row = _with(row, "a", place, self.a.infinity)
                    yield _with(row, "b", place, self.code(self.b, 0, 0, False))

    def any_bits(self) -> Iterator[Row]:
        """Any codes, scales and accumulators."""
        for _ in range(20):
            yield self.random(
                "any bits",
                self.rng.integers(0, 2 * self.a.sign_bit, self.k),
                self.rng.integers(0, 2 * self.b.sign_bit, self.k),
                self.rng.integers(0, 256, (2, -(-self.k // self.terms))),
                int(self.rng.integers(0, 1 << 32)),
            )

    def any_finite(self) -> Iterator[Row]:
        """Finite codes, dense and sparse, with scales near each other or anywhere."""
        for spread, density in ((0, 1.0), (3, 1.0), (12, 0.6), (127, 1.0), (127, 0.1)):
            for _ in range(20):
                a, b = (self.finite(element, density) for element in (self.a, self.b))
                scales = 127 + self.rng.integers(-spread, spread + 1, (2, -(-self.k // self.terms)))
                c = self.float32(self.integer(-20, 20)) if self.integer(0, 2) else 0
                yield self.random("finite", a, b, np.clip(scales, 0, 254), c)

    def finite(self, element: codes.Element, density: float) -> npt.NDArray[np.int64]:
        magnitude = self.rng.integers(0, element.largest + 1, self.k)
        magnitude = np.where(self.rng.random(self.k) < density, magnitude, 0)
        return magnitude | element.sign_bit * self.rng.integers(0, 2, self.k)

    def random(self, why: str, a: Any, b: Any, scales: Any, c: int) -> Row:
        first, second = scales.tolist()
        return Row(why=why, a=a.tolist(), b=b.tolist(), a_scales=first, b_scales=second, c=c)


def _special_codes(element: codes.Element) -> list[int]:
    """NaN and infinity codes of both signs."""
    found = [] if element.nan <= element.largest else [element.nan]
    if element.infinity is not None:
        found += [element.infinity, element.infinity + 1]
    return [code | sign for code in found for sign in (0, element.sign_bit)]


def _with(row: Row | None, field: str, place: int, value: int) -> Row | None:
    """The row with one entry of one of its lists changed."""
    if row is None:
        return None
    parts = {name: list(getattr(row, name)) for name in ("a", "b", "a_scales", "b_scales")}
    parts[field][place] = value
    return Row(why=row.why, c=row.c, **parts)
