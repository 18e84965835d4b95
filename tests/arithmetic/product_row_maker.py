"""How the rows of `product_rows` are built: codes, exponents and scales for what a family asks.

The entries of a row that its family leaves alone are zeros of random sign under random scales,
which must change nothing.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.arithmetic.product_rows import Case, Row
from tests.independent import codes

Product = tuple[int, int, int, int]  # exponent, sign, fractions of a and b; see `Maker.code`
Pair = tuple[int, int]  # codes of a and b


class Maker:
    """Makes rows for one case."""

    def __init__(self, case: Case, *, seed: int = 0, k: int | None = None) -> None:
        self.case = case
        self.k = case.k if k is None else k
        self.a, self.b = case.elements
        self.scaled = case.rules.scaled
        self.terms = case.rules.terms
        self.stored = case.rules.output.stored
        # Exponents of normal accumulators.
        self.c_range = (1 - self.stored.bias, self.stored.bias)
        self.rng = np.random.default_rng([seed, *case.name.encode()])
        self.random = random.Random(f"{seed} {case.name}")  # faster for single numbers

    # Numbers.

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return self.random.randint(low, high)

    def sign(self) -> int:
        return 1 - 2 * self.integer(0, 1)

    def fraction(self) -> int:
        """Any fraction of an operand; `plain` takes as many of its bits as there are."""
        return self.integer(0, (1 << 20) - 1)

    def accumulator(self, exponent: int, sign: int = 0) -> int:
        """An accumulator in the binade of `exponent`, its last bit set."""
        low, high = self.c_range
        exponent = max(low, min(exponent, high))
        bits = self.stored.fraction_bits
        pattern = (exponent + self.stored.bias) << bits | self.integer(0, (1 << bits) - 1) | 1
        return pattern | (self.stored.sign_bit if (sign or self.sign()) < 0 else 0)

    def power(self, exponent: int, sign: int = 1) -> int:
        """The accumulator sign * 2^exponent, of a normal exponent."""
        pattern = (exponent + self.stored.bias) << self.stored.fraction_bits
        return pattern | (self.stored.sign_bit if sign < 0 else 0)

    def special_accumulators(self) -> tuple[list[int], list[int]]:
        """Infinite accumulators, and NaN ones."""
        infinity, sign = self.case.rules.output.infinity, self.stored.sign_bit
        quiet = infinity | 1 << (self.stored.fraction_bits - 1)
        return [infinity, infinity | sign], [infinity | 1, quiet, infinity | 1 | sign, 2 * sign - 1]

    def zero(self, element: codes.Element) -> int:
        return self.word(element, element.sign_bit * self.integer(0, 1))

    def word(self, element: codes.Element, code: int) -> int:
        """A code as it is stored: bits of a tf32 word that do not count may be anything.

        Where they alone tell NaN from infinity they are zeros.
        """
        if element.name != "tf32":
            return code
        infinite = code & (element.sign_bit - 1) == element.infinity
        return code << codes.TF32_PADDING | (0 if infinite else self.integer(0, 0x1FFF))

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

    def between(self, low: int, high: int) -> int | None:
        """An exponent from `low` to `high` that is an accumulator's; None where there is none."""
        low, high = max(low, self.c_range[0]), min(high, self.c_range[1])
        return self.integer(low, high) if low <= high else None

    def code(self, element: codes.Element, exponent: int, fraction: int, negative: bool) -> int:
        """A normal number as it is stored."""
        code = self.plain(element, exponent, fraction)
        return self.word(element, code | (element.sign_bit if negative else 0))

    def plain(self, element: codes.Element, exponent: int, fraction: int) -> int:
        """A positive normal code. The fraction is taken modulo its bits: -1 is all ones."""
        field = exponent + element.bias
        return field << element.fraction_bits | fraction % (1 << element.fraction_bits)

    def pair(self, exponent: int, sign: int = 1) -> Pair | None:
        """Codes whose product is sign * 2^exponent, normal ones; None where there are none."""
        low, high = (sum(ends) for ends in zip(self.range(self.a), self.range(self.b), strict=True))
        if not low <= exponent <= high:
            return None
        first, second = self._split(exponent)
        negative = self.a.sign_bit if sign < 0 else 0
        return self.plain(self.a, first, 0) | negative, self.plain(self.b, second, 0)

    # Rows.

    def blank(self, c: int) -> Row:
        """Zeros of any sign under any scales."""
        signs = self.rng.integers(0, 2, (2, self.k))
        a, b = (
            self.words(element, element.sign_bit * some).tolist()
            for element, some in zip((self.a, self.b), signs, strict=True)
        )
        scales: list[list[int]] = [[], []]
        if self.scaled:
            count = -(-self.k // self.terms)
            anywhere = self.rng.integers(0, 255, (2, count))
            extremes = np.array([0, 1, 127, 253, 254])[self.rng.integers(0, 5, (2, count))]
            scales = np.where(self.rng.integers(0, 6, (2, count)), extremes, anywhere).tolist()
        return Row(why="zeros", a=a, b=b, a_scales=scales[0], b_scales=scales[1], c=c)

    def direct(
        self, why: str, c: int, *pairs: Pair | None, scales: Pair | None = None
    ) -> Row | None:
        """A row with these pairs of codes in a step, under scales of 1 or those given.

        Returns None where a pair is None, or a step has no room for them.
        """
        if len(pairs) > self.terms or None in pairs:
            return None
        row = self.blank(c)
        step = self.integer(0, -(-self.k // self.terms) - 1)
        self._scale(row, step, 0)
        if scales:
            row.a_scales[step], row.b_scales[step] = scales
        for place, pair in zip(self._places(step, len(pairs)), pairs, strict=True):
            if pair:
                row.a[place], row.b[place] = self.word(self.a, pair[0]), self.word(self.b, pair[1])
        return Row(**vars(row) | {"why": why})

    def row(
        self, why: str, c: int, *steps: list[Product] | None, at: int | None = None
    ) -> Row | None:
        """A row that has products in its step number `at` and the ones after it.

        A step of None holds only zeros; `at` of None is any step. Returns None where the formats
        cannot hold the products, or a step so many.
        """
        if any(len(products or ()) > self.terms for products in steps):
            return None
        row = self.blank(c)
        room = self.k % self.terms or self.terms
        latest = -(-self.k // self.terms) - len(steps) - (len(steps[-1] or ()) > room)
        first = self.integer(0, latest) if at is None else at
        for step, products in enumerate(steps, start=first):
            if not products:
                continue
            shift = self._shift([product[0] for product in products])
            if shift is None:
                return None
            self._scale(row, step, shift)
            for place, (exponent, sign, a_fraction, b_fraction) in zip(
                self._places(step, len(products)), products, strict=True
            ):
                a_exponent, b_exponent = self._split(exponent - shift)
                flip = self.sign()
                row.a[place] = self.code(self.a, a_exponent, a_fraction, sign * flip < 0)
                row.b[place] = self.code(self.b, b_exponent, b_fraction, flip < 0)
        return Row(**vars(row) | {"why": why})

    def _places(self, step: int, count: int) -> list[int]:
        room = min(self.terms, self.k - step * self.terms)
        return [step * self.terms + place for place in self.random.sample(range(room), count)]

    def _scale(self, row: Row, step: int, shift: int) -> None:
        """Scales of a step whose exponents add up to `shift`: bytes of 0 to 254 each."""
        if self.scaled:
            wanted = 127 + shift // 2 + self.integer(-5, 5)
            byte = max(0, shift, min(wanted, 254, shift + 254))
            row.a_scales[step], row.b_scales[step] = byte, shift + 254 - byte

    def _shift(self, exponents: list[int]) -> int | None:
        """An exponent for the scales that brings all products into the range of the elements."""
        low, high = (x + y for x, y in zip(self.range(self.a), self.range(self.b), strict=True))
        least, most = max(exponents) - high, min(exponents) - low
        if not self.scaled:
            return 0 if least <= 0 <= most else None
        least, most = max(least, -254), min(most, 254)
        return self.integer(least, most) if least <= most else None

    def _split(self, exponent: int) -> tuple[int, int]:
        (a_low, a_high), (b_low, b_high) = self.range(self.a), self.range(self.b)
        a = self.integer(max(a_low, exponent - b_high), min(a_high, exponent - b_low))
        return a, exponent - a

    # Random rows.

    def random_rows(self) -> Iterator[Row]:
        yield from self.any_bits()
        yield from self.any_finite()

    def any_bits(self) -> Iterator[Row]:
        """Any codes, scales and accumulators."""
        for _ in range(20):
            a, b = (
                self.words(element, self.rng.integers(0, 2 * element.sign_bit, self.k))
                for element in (self.a, self.b)
            )
            scales = self.rng.integers(0, 256, (2, -(-self.k // self.terms)))
            c = int(self.rng.integers(0, 2 * self.stored.sign_bit))
            yield self.randomly("any bits", a, b, scales, c)

    def any_finite(self) -> Iterator[Row]:
        """Finite codes, dense and sparse, with scales near each other or anywhere."""
        for spread, density in ((0, 1.0), (3, 1.0), (12, 0.6), (127, 1.0), (127, 0.1)):
            for _ in range(20):
                a, b = (self.finite(element, density, spread) for element in (self.a, self.b))
                scales = 127 + self.rng.integers(-spread, spread + 1, (2, -(-self.k // self.terms)))
                c = self.accumulator(self.integer(-20, 20)) if self.integer(0, 2) else 0
                yield self.randomly("finite", a, b, np.clip(scales, 0, 254), c)

    def finite(self, element: codes.Element, density: float, spread: int) -> Any:
        magnitude = self.rng.integers(0, element.largest + 1, self.k)
        if element.exponent_bits >= 5 and spread < element.bias:
            field = element.bias + self.rng.integers(-spread, spread + 1, self.k)
            magnitude %= 1 << element.fraction_bits
            magnitude |= field << element.fraction_bits
        magnitude = np.where(self.rng.random(self.k) < density, magnitude, 0)
        return self.words(element, magnitude | element.sign_bit * self.rng.integers(0, 2, self.k))

    def words(self, element: codes.Element, code: npt.NDArray[np.int64]) -> Any:
        """`word` of an array."""
        if element.name != "tf32":
            return code
        infinite = code & (element.sign_bit - 1) == element.infinity
        below = np.where(infinite, 0, self.rng.integers(0, 0x2000, code.shape))
        return code << codes.TF32_PADDING | below

    def randomly(self, why: str, a: Any, b: Any, scales: Any, c: int) -> Row:
        first, second = scales.tolist() if self.scaled else ([], [])
        return Row(why=why, a=a.tolist(), b=b.tolist(), a_scales=first, b_scales=second, c=c)
