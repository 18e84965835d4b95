"""Families of rows that aim at one rule each of a sum whose terms are single products."""

import itertools
from collections.abc import Iterator

from tests.arithmetic.product_row_maker import Maker, Pair, Product
from tests.arithmetic.product_rows import Row
from tests.independent import codes, machine


class Products(Maker):
    """Rows for an instruction that cuts each product by itself."""

    def rows(self) -> Iterator[Row]:
        families = (
            self.alignment,
            self.guard_bits,
            self.cut_or_rounded,
            self.overflow,
            self.exponent_floor,
            self.subnormal,
            self.subnormal_operands,
            self.every_scale,
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

    def alignment(self) -> Iterator[Row | None]:
        """One product d binades above or below the accumulator."""
        low, high = self.product_range()
        low, high = max(low, -90), min(high, 90)
        for d in range(-32, 33):
            for mantissas in ((-1, -1), (self.fraction(), self.fraction())):
                e = self.between(max(-40, low - d), min(40, high - d))
                if e is not None:
                    products = [(e + d, self.sign(), *mantissas)]
                    yield self.row(f"product {d} binades from c", self.accumulator(e), products)
        kept = self.case.rules.fraction_bits
        for d, sign, c_sign in itertools.product(range(kept - 2, kept + 3), (1, -1), (1, -1)):
            e = self.between(low - d, high - d)
            if e is not None:  # whether c keeps one unit, or none, beside the largest mantissas
                product = (e + d, sign, -1, -1)
                yield self.row(f"c just below {d}", self.accumulator(e, c_sign), [product])
        for d in range(1, min(40, high - low + 1)):  # the same between two products
            e = self.integer(low + d, high)
            near, far = self.fraction(), self.fraction()
            signs = self.sign(), self.sign()
            products = [(e, signs[0], near, far), (e - d, signs[1], -1, -1)]
            yield self.row(f"products {d} binades apart", 0, products)

    def guard_bits(self) -> Iterator[Row | None]:
        """What is cut off each term would count if it were added first."""
        low, high = self.product_range()
        kept = self.case.rules.fraction_bits
        for below in (*range(kept - 3, kept + 6), 9, 10, 11, 12):
            for count in {1, 2, min(6, self.terms), self.terms}:
                for mantissa, sign in ((0, 1), (-1, 1), (0, -1), (-1, -1)):
                    e = self.between(max(-40, low + below), min(40, high + below))
                    if e is not None:
                        c = self.power(e) | self.integer(0, 1)
                        products = [(e - below, sign, mantissa, mantissa)] * count
                        yield self.row(f"{count} products 2^-{below} of c", c, products)

    def cut_or_rounded(self) -> Iterator[Row | None]:
        """A large product and its opposite leave what was kept of small ones."""
        low, high = self.product_range()
        kept = self.case.rules.fraction_bits
        for below in range(kept - 4, kept + 3):
            if high - below < low:
                continue
            for sign, mantissa in itertools.product((1, -1), (0, -1, 1)):
                e = self.integer(max(low + below, -60), max(low + below, min(high, 60)))
                x, y = self.fraction(), self.fraction()
                large = [(e, 1, x, y), (e, -1, x, y)]
                small = [(e - below, sign, mantissa, mantissa)] * min(2, self.terms - 2)
                yield self.row(f"2^-{below} below x - x", 0, [*large, *small])
                # The same with c, which has the largest exponent of all.
                c_exponent = self.between(low + below, high + 1)
                if c_exponent is not None:
                    large = [(c_exponent - 1, -1, 0, 0)] * 2
                    small = [(c_exponent - below, sign, mantissa, mantissa)] * 2
                    c = self.power(c_exponent)
                    yield self.row(f"2^-{below} below c - x", c, [*large, *small])

    def overflow(self) -> Iterator[Row | None]:
        """Around the largest result, in one step and in two."""
        top, precision = self.c_range[1], self.case.rules.output.precision
        infinity = self.case.rules.output.infinity
        for sign in (1, -1):
            largest = infinity - 1 | (self.stored.sign_bit if sign < 0 else 0)
            for e in range(top - precision - 3, top - precision + 4):
                yield self.row(f"largest + 2^{e}", largest, [(e, sign, 0, 0)])
                yield self.row(f"largest + 2 * 2^{e}", largest, [(e, sign, 0, 0)] * 2)
                both = [(top - precision + 1, sign, 0, 0), (e - 1, -sign, 0, 0)]
                yield self.row("largest + ulp - less", largest, both)
                yield self.row("largest + more", largest, [(e, sign, 1, 0), (e, sign, 0, 1)])
            for e in range(top - 2, top + 3):
                for mantissa in (0, -1):
                    for count in (1, 2, 4):
                        products = [(e, sign, mantissa, mantissa)] * count
                        yield self.row(f"{count} products at 2^{e}", 0, products)
            far = min(200, 2 * top - 2)
            beyond = [(far, sign, 0, 0), (far, -sign, 0, 0)]
            beyond += [(far - 2, sign, 0, 0), (far - 2, -sign, 0, 0)]
            yield self.row("beyond the largest and back", self.accumulator(top - 27), beyond)
            back = [*beyond, (far - 26, sign, 0, 0)]
            yield self.row("beyond the largest and back, exactly", 0, back)
            big = [(top, sign, 0, 0)] * 2
            yield self.row("overflow, then as much back", 0, big, [(top, -sign, 0, 0)] * 4)
            yield self.row("overflow, then zeros", 0, big, None)

    def exponent_floor(self) -> Iterator[Row | None]:
        """Sums that reach the smallest result, or half of it, by the last unit of the floor's grid."""
        rules = self.case.rules
        output = rules.output
        grid = rules.floor - rules.fraction_bits
        least = 1 - output.stored.bias - (output.precision - 1) - output.nearest
        for places, sign in itertools.product(range(-1, 3), (1, -1)):
            unit = grid - places  # 0: the floor's own grid
            pieces = list(self.pieces((1 << (least - unit)) - (not output.nearest)))
            for name, last in (("unit", [0]), ("two halves", [-1] * 2), ("quarters", [-2] * 4)):
                products = [(e + unit, sign, x, y) for e, x, y in pieces]
                products += [(unit + e, sign, 0, 0) for e in last]
                for c in (0, self.stored.sign_bit, 1):
                    yield self.row(f"floor: last {name} at {places}", c, products)
        if self.scaled:
            yield from self._floor_of_narrow_formats()
        if output.nearest and self.a is codes.FP16:
            # Only products of subnormal operands are small enough: half of 2^-24, and a little.
            half = (0x0400, 0x1000)  # 2^-14 2^-11
            for exponents, sign in itertools.product(
                ([-44], [-45], [-46], [-47], [-48], [-47] * 2, [-46] * 2, [-48] * 4, [-47] * 3),
                (0, self.a.sign_bit),
            ):
                little = [(1 << (e // 2 + 24) | sign, 1 << (e - e // 2 + 24)) for e in exponents]
                for c in (0, self.stored.sign_bit, 1):
                    pairs: list[Pair] = [(half[0] | sign, half[1]), *little]
                    yield self.direct(f"floor: half and {exponents}", c, *pairs)

    def _floor_of_narrow_formats(self) -> Iterator[Row | None]:
        """The same within four binades, all that e2m1 has: sums of exactly 2^-149.

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
            for sign, exponent in itertools.product((1, -1), (-159, -158, -157, -156, -155)):
                for c in (0, self.stored.sign_bit, 1):
                    moved = [(e + exponent, sign, x, y) for e, x, y in products]
                    yield self.row(f"floor: {name} 2^{exponent}", c, moved)

    def pieces(self, number: int) -> Iterator[tuple[int, int, int]]:
        """A whole number as products of a significand of `a` and 1: exponents and fractions."""
        width = self.a.fraction_bits + 1
        while number:
            shift = max(0, number.bit_length() - width)
            top = number >> shift
            number -= top << shift
            length = top.bit_length()
            yield length - 1 + shift, top << (width - length), 0

    def subnormal(self) -> Iterator[Row | None]:
        """Subnormal accumulators and results, and negative results that are cut to zero."""
        hidden = 1 << self.stored.fraction_bits
        low = 2 - self.stored.bias - self.stored.fraction_bits - 1
        accumulators = (0, 1, 2, hidden // 2 + 1, hidden - 1, hidden, hidden + 1, 2 * hidden + 1)
        for magnitude in accumulators:
            for c in (magnitude, magnitude | self.stored.sign_bit):
                yield self.row("zeros on a subnormal c", c, None)
                for _ in range(5):
                    e, count = self.integer(low - 23, low + 27), self.integer(1, 6)
                    sign, mantissa = self.sign(), self.integer(-1, 2)
                    products = [(e, sign, mantissa, mantissa)] * count
                    yield self.row(f"{count} products at 2^{e} on {c:#x}", c, products)
        for e in range(low - 31, low + 5, 3):
            for sign in (1, -1):
                yield self.row(f"{sign} * 2^{e} alone", 0, [(e, sign, 0, 0)])

    def subnormal_operands(self) -> Iterator[Row | None]:
        """A subnormal operand counts with the smallest normal exponent, whatever its leading bit."""
        rules = self.case.rules
        for trial in range(60):
            place = self.integer(0, self.a.fraction_bits - 1)
            b_exponent = self.integer(*self.range(self.b)) if trial % 2 else self.range(self.b)[1]
            sign = self.sign()
            operand = 1 << place | (self.a.sign_bit if sign < 0 else 0)
            subnormal = operand, self.plain(self.b, b_exponent, 0)
            e = 1 - self.a.bias + b_exponent
            leading = e - self.a.fraction_bits + place
            # Beside it: half of the result's last place, and what is below the last place kept.
            half = self.pair(leading - rules.output.precision, sign)
            for below in (1, 2):
                small = self.pair(e - rules.fraction_bits - below, sign)
                pairs = [subnormal, *[small] * (2 * below - rules.output.nearest)]
                yield self.direct("subnormal operand", 0, *pairs, *[half] * rules.output.nearest)
            c_exponent = self.between(e - 10, e + 3)
            if c_exponent is not None:
                yield self.direct("subnormal on c", self.accumulator(c_exponent), subnormal)
            any_b = self.integer(1, (1 << self.b.fraction_bits) - 1)
            yield self.direct("subnormals", 0, (operand, any_b), subnormal)

    def every_scale(self) -> Iterator[Row | None]:
        """Every code of a scale on both sides, NaN included."""
        if not self.scaled:
            return
        for code in (*range(256), *[0, 1, 254, 255] * 5):
            other = max(0, min(254 - code + self.integer(-20, 20), 254))
            pairs = [(self._finite_code(self.a), self._finite_code(self.b)) for _ in range(3)]
            for scales in ((code, other), (other, code)):
                yield self.direct(f"scales {scales}", 0, *pairs, scales=scales)

    def _finite_code(self, element: codes.Element) -> int:
        return self.integer(1, element.largest) | element.sign_bit * self.integer(0, 1)

    def zeros(self) -> Iterator[Row | None]:
        """Zero codes of all signs: the accumulator comes out as it was, -0 as +0."""
        some = [self.accumulator(e) for e in (0, -100, 120)]
        for c in (0, self.stored.sign_bit, *some):
            for _ in range(3):
                yield self.row("zeros", c, None)
        # Zero times something large does not take part in the alignment, nor -0.
        for _ in range(20):
            low, high = self.product_range()
            e = self.integer(max(low, -60), max(low, min(high, -20)))
            products: list[Product] = [(e, self.sign(), -1, -1), (e, self.sign(), 1, 0)]
            row = self.row("zero times the largest", self.stored.sign_bit, products)
            if row is not None:
                for place in range(self.k):
                    if machine.element_operand(row.a[place], self.a)[1] == 0:
                        row.b[place] = self.word(self.b, self.b.largest)
                yield row

    def cancellation(self) -> Iterator[Row | None]:
        """Sums that are zero or far smaller than their terms."""
        low, high = self.product_range()
        for _ in range(20):
            e = self.integer(max(-60, min(low + 20, high)), min(60, high))
            x, y = self.fraction(), self.fraction()
            pair = [(e, 1, x, y), (e, -1, x, y)]
            yield self.row("x - x", 0, pair)
            for gap in (3, 12, 24, 26):
                yield self.row(f"x - x + y, 2^-{gap}", 0, [*pair, (e - gap, self.sign(), y, x)])
            c = self.accumulator(e)
            sign = -1 if c < self.stored.sign_bit else 1
            yield self.row("c - x", c, [(e, sign, x, 0)])
            yield self.row("c - x - y", c, [(e, sign, x, 0), (e - 3, sign, 0, y)])

    def specials(self) -> Iterator[Row | None]:
        """NaN and infinity in elements, scales and accumulators, in every step."""
        infinities, not_numbers = self.special_accumulators()
        ordinary: list[Product] = [(0, 1, 0, 0)]
        top = self.c_range[1]
        for c in (*infinities, *not_numbers):
            yield self.row("NaN or infinite c, zeros", c, None)
            yield self.row("NaN or infinite c", c, ordinary)
            for sign in (1, -1):
                yield self.row("infinite c, opposite overflow", c, [(top, sign, 0, 0)] * 2)
        for step in range(-(-self.k // self.terms)):
            place = min(step * self.terms + self.integer(0, self.terms - 1), self.k - 1)
            if self.scaled:
                for side in ("a_scales", "b_scales"):
                    row = self.row("NaN scale over zeros", 0, None)
                    yield changed(row, side, step, codes.E8M0_NAN)
                    row = self.row("NaN scale", self.power(0), ordinary)
                    yield changed(row, side, step, codes.E8M0_NAN)
            for side, element in (("a", self.a), ("b", self.b)):
                yield from self._special_elements(side, element, place)
            if self.scaled and self.a.infinity is not None and step:
                # A finite overflow in the step before, then an infinity of one sign or the other.
                for sign in (1, -1):
                    products = [(top, sign, 0, 0)] * 2
                    row = self.row("overflow, then infinity", 0, products, at=step - 1)
                    row = changed(row, "a", place, self.a.infinity)
                    yield changed(row, "b", place, self.code(self.b, 0, 0, False))

    def _special_elements(
        self, side: str, element: codes.Element, place: int
    ) -> Iterator[Row | None]:
        other, partner_element = ("b", self.b) if side == "a" else ("a", self.a)
        infinities, _ = self.special_accumulators()
        one = self.power(0)
        for special in special_codes(element):
            plain = self.code(partner_element, 0, 0, False)
            negative = self.code(partner_element, 0, 0, True)
            word = self.word(element, special)
            for partner in (plain, negative, self.zero(partner_element)):
                for c in (infinities[self.integer(0, 1)], (0, one)[self.integer(0, 1)]):
                    row = self.row("NaN or infinity", c, [(0, 1, 0, 0)])
                    yield changed(changed(row, side, place, word), other, place, partner)
            for second in (special ^ element.sign_bit, special):
                row = self.row("two specials", 0, None)
                for at, code in ((place, special), ((place + 3) % self.k, second)):
                    row = changed(row, side, at, self.word(element, code))
                    row = changed(row, other, at, plain)
                yield row


def special_codes(element: codes.Element) -> list[int]:
    """NaN and infinity codes of both signs."""
    found = [] if element.nan <= element.largest else [element.nan]
    if element.infinity is not None:
        found += [element.infinity, element.infinity + 1]
    return [code | sign for code in found for sign in (0, element.sign_bit)]


def changed(row: Row | None, field: str, place: int, value: int) -> Row | None:
    """The row with one entry of one of its lists changed."""
    if row is None:
        return None
    parts = {name: list(getattr(row, name)) for name in ("a", "b", "a_scales", "b_scales")}
    parts[field][place] = value
    return Row(why=row.why, c=row.c, **parts)
