"""Row sums that go on from tile to tile, and how what belongs to an old base comes to a new one."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Protocol

from tests.independent import float32, sums
from tests.independent.softmaxes import shift_by_difference

CHUNK = 64
LANES: dict[str, Callable[[int], int]] = {
    "octets": lambda column: column % 32 // 8,
    "quads": lambda column: column % 8 // 2,
}
"""Sums in four lanes: which one takes a column."""


class Rescaling(Protocol):
    """What brings a number from the old base to the new one."""

    def apply(self, x: int) -> int:
        """The number in units of the new base."""

    def apply_and_add(self, x: int, y: int) -> int:
        """The same plus another number."""

    def halved(self) -> "Rescaling":
        """What brings half of it."""


class Shift:
    """Between integer bases: by the exact difference of their exponents."""

    def __init__(self, old: int, new: int) -> None:
        """Bases as float32 bits."""
        self._shift = shift_by_difference(old, new)

    def apply(self, x: int) -> int:
        """See Rescaling."""
        return self._shift(x)

    def apply_and_add(self, x: int, y: int) -> int:
        """Two operations."""
        return float32.add(self._shift(x), y)

    def halved(self) -> "Rescaling":
        """No recipe has that."""
        raise NotImplementedError


class Factor:
    """Times a float32."""

    def __init__(self, factor: int) -> None:
        """``factor`` is float32 bits."""
        self.factor = factor

    def apply(self, x: int) -> int:
        """See Rescaling."""
        return float32.multiply(x, self.factor)

    def apply_and_add(self, x: int, y: int) -> int:
        """One operation."""
        return float32.fused_multiply_add(x, self.factor, y)

    def halved(self) -> "Rescaling":
        """By half of the factor."""
        return Factor(float32.multiply(self.factor, 0x3F000000))


class RowSum:
    """A sum over the columns of key tiles in one of the orders of a recipe; float32 bits."""

    def __init__(self, order: str) -> None:
        """``order`` is the name that recipes have for it."""
        orders = ("eight_lanes", "two_lanes", "ascending", "by_tiles", "bfloat16_butterfly", *LANES)
        orders += ("halved_lanes",)
        if order not in orders:
            raise ValueError(f"row sum {order!r}: none is known by that name")
        self.order = order
        self._lanes = [0] * (4 if order in LANES else 2 if order == "two_lanes" else 1)

    def add(self, terms: Sequence[int], rescaling: Rescaling) -> None:
        """Add all columns of a tile; the sum so far is rescaled first."""
        if self.order == "two_lanes":
            self._lanes = [
                rescaling.apply_and_add(lane, _lane(terms, parity))
                for parity, lane in enumerate(self._lanes)
            ]
            return
        if self.order in LANES:
            mine = [
                [x for at, x in enumerate(terms) if LANES[self.order](at) == r] for r in range(4)
            ]
            self._lanes = [
                reduce(float32.add, rest, rescaling.apply_and_add(held, first))
                for held, (first, *rest) in zip(self._lanes, mine, strict=True)
            ]
            return
        if self.order == "halved_lanes":
            half = rescaling.halved().apply(self._lanes[0])
            lanes = [half, half, *[0] * 6]
            for column, x in enumerate(terms):
                lanes[column % 8] = float32.add(lanes[column % 8], x)
            even, odd = (
                float32.add(float32.add(a, b), float32.add(c, d))
                for a, b, c, d in (lanes[::2], lanes[1::2])
            )
            self._lanes = [float32.add(even, odd)]
            return
        if self.order == "bfloat16_butterfly":
            self._lanes = [rescaling.apply_and_add(self._lanes[0], sums.in_bfloat16(terms))]
            return
        start = rescaling.apply(self._lanes[0])
        if self.order == "eight_lanes":
            self._lanes = [sums.eight_lanes(start, terms)]
            return
        if self.order == "by_tiles":
            self._lanes = [float32.add(start, ascending(terms))]
            return
        for x in terms:
            start = float32.add(start, x)
        self._lanes = [start]

    def begin_with(self, x: int) -> None:
        """Start from a number instead of +0."""
        self._lanes[0] = x

    @property
    def total(self) -> int:
        """The sum."""
        if len(self._lanes) == 1:
            return self._lanes[0]
        if len(self._lanes) == 4:
            a, b, c, d = self._lanes
            pairs = ((a, c), (b, d)) if self.order == "quads" else ((a, b), (c, d))
            return float32.add(*(float32.add(*pair) for pair in pairs))
        even, odd = self._lanes
        return float32.add(even, odd)


def ascending(terms: Sequence[int]) -> int:
    """The sum from +0."""
    total = 0
    for x in terms:
        total = float32.add(total, x)
    return total


def _lane(terms: Sequence[int], parity: int) -> int:
    """The even or odd columns of a tile: chunks of 64, each ascending, one after another."""
    total: int | None = None
    for start in range(0, len(terms), CHUNK):
        chunk = list(terms[start : start + CHUNK])[parity::2]
        part = chunk[0]
        for x in chunk[1:]:
            part = float32.add(part, x)
        total = part if total is None else float32.add(total, part)
    assert total is not None, "a tile has columns"
    return total
