"""The online softmaxes of one query row, fed a key tile at a time.

Each holds the running ``row_max`` and ``row_sum`` in its own units. ``tile`` takes the scores of a
tile and which of them are visible, and returns P (0 where masked) with the function that the O
accumulator must go through before the tile's products are added. ``finish`` turns the accumulator
into (o, out, lse).
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from typing import Protocol

from tests.independent import float32, mufu, polynomial, sums
from tests.independent.heads import TILE

LN2 = 0x3F317218
FOUR = 0x40800000
MINUS_EIGHT = 0xC1000000
SENTINEL = 0xFF7FFFFF  # -3.4028235e38
SMALLEST_SUM = float32.nearest(Fraction(1, 10**30))

Rescale = Callable[[int], int]
Finished = tuple[list[int], list[int], int]


class Softmax(Protocol):
    """What the forward pass asks of a softmax."""

    @property
    def row_max(self) -> int:
        """The running maximum, float32 bits."""

    @property
    def row_sum(self) -> int:
        """The running sum, float32 bits."""

    def tile(self, scores: Sequence[int], visible: Sequence[bool]) -> tuple[list[int], Rescale]:
        """P of the next tile and what happens to the accumulator before it."""

    def finish(self, accumulator: Sequence[int]) -> Finished:
        """o (float32 bits), out (bfloat16 bits) and lse of the row."""


def _unchanged(x: int) -> int:
    return x


def _normalised(accumulator: Sequence[int], factor: int, lse: int) -> Finished:
    o = [float32.multiply(x, factor) for x in accumulator]
    return o, [float32.to_bfloat16(x) for x in o], lse


def _dead(accumulator: Sequence[int]) -> Finished:
    return [0] * len(accumulator), [0] * len(accumulator), float32.MINUS_INFINITY


class IntegerSoftmax:
    """flamia: the base is an integer, the largest rounded-up score in log2 units.

    P and the row sum are in units of 2**-``units_exponent``.
    """

    def __init__(self, c: int, *, units_exponent: int) -> None:
        """``c`` is the float32 factor of the scores."""
        self.c = c
        self.units_exponent = units_exponent
        self.row_max = float32.MINUS_INFINITY
        self.row_sum = 0

    def tile(self, scores: Sequence[int], visible: Sequence[bool]) -> tuple[list[int], Rescale]:
        """See the module."""
        exponentials = [
            split_exponential(score, self.c) if seen else None
            for score, seen in zip(scores, visible, strict=True)
        ]
        old_max = self.row_max
        self.row_max = _maximum([old_max, *(pair[1] for pair in exponentials if pair)])
        rescale = shift_by_difference(old_max, self.row_max)
        p = [
            shift_by_difference(pair[1], self.row_max, self.units_exponent)(pair[0]) if pair else 0
            for pair in exponentials
        ]
        self.row_sum = sums.eight_lanes(rescale(self.row_sum), p)
        return p, rescale

    def finish(self, accumulator: Sequence[int]) -> Finished:
        """See the module."""
        if self.row_max == float32.MINUS_INFINITY:
            return _dead(accumulator)
        units = float32.nearest(Fraction(self.units_exponent))
        base = float32.subtract(self.row_max, units) if self.units_exponent else self.row_max
        lse = float32.multiply(float32.add(base, mufu.log2(self.row_sum)), LN2)
        return _normalised(accumulator, mufu.reciprocal(self.row_sum), lse)


def split_exponential(score: int, c: int) -> tuple[int, int]:
    """(E, n) with 2**(score * c) about E * 2**n; float32 bits, n integer-valued."""
    t = float32.multiply(score, c)
    if float32.is_nan(t) or t == float32.INFINITY:
        return float32.NAN, float32.NAN
    if t == float32.MINUS_INFINITY:
        return 0, float32.MINUS_INFINITY
    n = float32.ceiling(t)
    return mufu.exp2(float32.fused_multiply_add(score, c, float32.negate(n))), n


def _maximum(values: Sequence[int]) -> int:
    """The largest of some float32 that are integers or -inf; NaN if there is one, zero is +0."""
    if any(float32.is_nan(x) for x in values):
        return float32.NAN
    finite = [float32.value(x) for x in values if not float32.is_infinite(x)]
    return float32.nearest(max(finite)) if finite else float32.MINUS_INFINITY


def shift_by_difference(n: int, m: int, units_exponent: int = 0) -> Rescale:
    """The function that shifts a float32 by the exact n - m + units_exponent.

    NaN where n or m is; else every number becomes 0 where n is -inf or m is +inf, except that
    -inf - (-inf) counts as 0. Otherwise both are integers.
    """
    if float32.is_nan(n) or float32.is_nan(m):
        return lambda _: float32.NAN
    exponent: int | float
    if n == m == float32.MINUS_INFINITY:
        exponent = units_exponent
    elif n == float32.MINUS_INFINITY or m == float32.INFINITY:
        exponent = -math.inf
    else:
        exponent = int(float32.value(n) - float32.value(m)) + units_exponent
    return lambda x: float32.shift(x, exponent)


class LazySoftmax:
    """FlashAttention-4: raw maximum, kept while the new one is at most 2**8 above it."""

    def __init__(self, c: int) -> None:
        """``c`` is the float32 factor of the scores."""
        self.c = c
        self.first = True
        self.row_max = float32.MINUS_INFINITY
        self.row_sum = 0

    @staticmethod
    def is_emulated(column: int) -> bool:
        """Whether a column of the tile takes the polynomial."""
        return 32 <= column < 96 and column % 16 >= 12

    def tile(self, scores: Sequence[int], visible: Sequence[bool]) -> tuple[list[int], Rescale]:
        """See the module."""
        masked = _select(scores, visible, float32.MINUS_INFINITY)
        tile_max = reduce(float32.maxnum, masked)
        rescale: Rescale = _unchanged
        start = 0
        new_max = tile_max if self.first else float32.maxnum(self.row_max, tile_max)
        safe_max = 0 if new_max == float32.MINUS_INFINITY else new_max
        if not self.first:
            exponent = float32.multiply(float32.subtract(self.row_max, safe_max), self.c)
            factor = mufu.exp2(exponent)
            if float32.exceeds(exponent, MINUS_EIGHT) or exponent == MINUS_EIGHT:
                new_max = safe_max = self.row_max
                factor = float32.ONE
            start = float32.multiply(self.row_sum, factor)
            rescale = _multiplication(factor)
        self.first = False
        self.row_max = new_max
        offset = float32.negate(float32.multiply(safe_max, self.c))
        p = _powers(scores, visible, self.c, offset, self.is_emulated)
        self.row_sum = sums.eight_lanes(start, p)
        return p[: len(scores)], rescale

    def finish(self, accumulator: Sequence[int]) -> Finished:
        """See the module."""
        if float32.is_nan(self.row_sum) or float32.is_zero(self.row_sum):
            return _normalised(accumulator, mufu.reciprocal(float32.ONE), float32.MINUS_INFINITY)
        base2 = float32.fused_multiply_add(self.row_max, self.c, mufu.log2(self.row_sum))
        lse = float32.multiply(base2, LN2)
        return _normalised(accumulator, mufu.reciprocal(self.row_sum), lse)


class ScaledSoftmax:
    """cuDNN: maximum in log2 units, kept while the new one is at most 4 above it.

    P is in units of 2**-``units`` (float32 bits of 4 or 0), the row sum in two lanes until its end.
    """

    def __init__(self, c: int, *, units: int) -> None:
        """``c`` is the float32 factor of the scores."""
        self.c = c
        self.units = units
        self.first_tile = True
        self.row_max = SENTINEL
        self.lanes = (0, 0)

    @property
    def row_sum(self) -> int:
        """The sum so far."""
        return float32.add(*self.lanes)

    @staticmethod
    def is_emulated(column: int) -> bool:
        """Whether a column of the tile takes the polynomial."""
        return column % 16 >= 12

    def tile(self, scores: Sequence[int], visible: Sequence[bool]) -> tuple[list[int], Rescale]:
        """See the module."""
        candidates = _select(scores, visible, SENTINEL)
        largest = reduce(float32.maxnum, [float32.flush(x) for x in candidates])
        current = float32.maxnum(float32.multiply(largest, self.c), SENTINEL)
        first = self.row_max == SENTINEL
        difference = SENTINEL
        new_max = current
        if not first:
            if not float32.exceeds(float32.subtract(current, self.row_max), FOUR):
                new_max = self.row_max
            difference = float32.subtract(self.row_max, new_max)
        factor = mufu.exp2(difference)
        self.row_max = new_max
        offset = float32.negate(float32.subtract(new_max, self.units))
        p = _powers(scores, visible, self.c, offset, self.is_emulated)
        even, odd = (
            float32.fused_multiply_add(total, factor, new)
            for total, new in zip(self.lanes, sums.two_lanes(p), strict=True)
        )
        self.lanes = even, odd
        rescale = _unchanged if self.first_tile else _multiplication(factor)
        self.first_tile = False
        return p[: len(scores)], rescale

    def finish(self, accumulator: Sequence[int]) -> Finished:
        """See the module."""
        row_sum = self.row_sum
        negative = bool(row_sum & float32.SIGN) and not float32.is_nan(row_sum)
        if float32.is_zero(row_sum) or negative:
            return _dead(accumulator)
        logarithm = float32.multiply(mufu.log2(row_sum), LN2)
        lse = float32.subtract(
            float32.fused_multiply_add(self.row_max, LN2, logarithm),
            float32.multiply(self.units, LN2),
        )
        inverse = float32.divide(float32.ONE, float32.maxnum(row_sum, SMALLEST_SUM))
        return _normalised(accumulator, inverse, lse)


def _select(scores: Sequence[int], visible: Sequence[bool], mask: int) -> list[int]:
    """The 128 columns of a tile; ``mask`` where masked or past the document's end."""
    columns = [score if seen else mask for score, seen in zip(scores, visible, strict=True)]
    return columns + [mask] * (TILE - len(columns))


def _multiplication(factor: int) -> Rescale:
    return lambda x: float32.multiply(x, factor)


def _powers(
    scores: Sequence[int],
    visible: Sequence[bool],
    c: int,
    offset: int,
    is_emulated: Callable[[int], bool],
) -> list[int]:
    """P = 2**(score * c + offset) of the 128 columns of a tile, 0 where there is no visible key."""
    p = [0] * TILE
    for column, (score, seen) in enumerate(zip(scores, visible, strict=True)):
        if seen:
            x = float32.fused_multiply_add(score, c, offset)
            p[column] = polynomial.exp2(x) if is_emulated(column) else mufu.exp2(x)
    return p
