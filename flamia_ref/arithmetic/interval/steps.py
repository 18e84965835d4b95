"""One instruction step on an accumulator known to an interval, and all orders of a few steps.

**A step.** Let c lie in [l, u], and let E be the exponent that terms are aligned to. E is the largest of the
floor, the exponents of the terms, and the exponent of c, so it lies between E- (c of least magnitude) and E+
(of greatest). Cutting toward zero at a coarser grid gives what is nearer to zero. So for every c and its E:

- the cut of a positive term lies between its cuts at E+ and at E-, that of a negative term between those at
  E- and E+;
- the cut of c is at least the cut of l, at E+ if l > 0 and at E- if not, and at most the cut of u, likewise;
- rounding the sum is monotone.

The sum of the least cuts, rounded, is a lower bound, that of the greatest an upper bound. Where E- = E+, and so where
l = u, both are what a machine computes with l and with u. Sums of terms are exact in float64: they are multiples of
2^(E - F) below 2^(E + F - F + 13), and F is 35 at most. The sum with c is rounded outward where it is not exact.

**All orders.** `any_order` takes the union, over the last step of every subset of steps, of that step on the
interval of the rest: 2^n subsets, no order left out. `any_tree` does the same for accumulators that are
joined by float32 additions, which are monotone in both operands.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np

from flamia_ref.arithmetic.instructions import Instruction, Result
from flamia_ref.arithmetic.interval.terms import (
    NOTHING,
    Floats,
    Integers,
    Terms,
    exponent_of,
    power,
)

Ends = tuple[Floats, Floats]
"""Lower and upper values, [lanes] each: float32 or float16 values and infinities as float64."""

_FLOAT32_OVERFLOW, _FLOAT16_OVERFLOW = 2.0**128, 2.0**16

FRACTION_BITS = {
    Result.FLOAT32: 23,
    Result.FLOAT32_13: 13,
    Result.FLOAT16: 10,
    Result.FLOAT32_NEAREST: 23,
}
"""Bits below the leading one that a result keeps."""


def least_exponent(result: Result) -> int:
    """Exponent of the smallest normal number of a result."""
    return -14 if result is Result.FLOAT16 else -126


def accumulator_exponent(x: Floats, result: Result) -> Integers:
    """The exponent that accumulators count with: a subnormal's is the least normal one, that of 0 is `NOTHING`."""
    exponent = np.maximum(exponent_of(x), np.int32(least_exponent(result)))
    return np.where(x == 0.0, NOTHING, exponent)


def rounded(x: Floats, result: Result) -> Floats:
    """Finite float64 sums as results: rounded, infinite where too large, zeros +0."""
    if result is Result.FLOAT32_NEAREST:
        with np.errstate(over="ignore"):
            return x.astype(np.float32).astype(np.float64)
    exponent = np.maximum(exponent_of(x), np.int32(least_exponent(result)))
    place = exponent - np.int32(FRACTION_BITS[result])
    cut = np.rint if result is Result.FLOAT16 else np.trunc
    kept = cut(x * power(-place)) * power(place) + 0.0
    beyond = _FLOAT16_OVERFLOW if result is Result.FLOAT16 else _FLOAT32_OVERFLOW
    return np.where(np.abs(kept) >= beyond, np.copysign(np.inf, kept), kept)


def add(a: Ends, b: Ends) -> Ends:
    """float32 additions of values in two intervals. Infinities of both signs give NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = (
            (x + y).astype(np.float32).astype(np.float64) for x, y in zip(a, b, strict=True)
        )
    return low, high


def hull(intervals: Iterable[Ends]) -> Ends:
    """The smallest interval that holds all of some."""
    first, *rest = intervals
    low, high = first
    for other_low, other_high in rest:
        low, high = np.minimum(low, other_low), np.maximum(high, other_high)
    return low, high


class Step:
    """One step of the terms of some lanes, applied to accumulators."""

    def __init__(self, terms: Terms, index: int, rules: Instruction) -> None:
        self._value = terms.value[index]
        self._total = self._value.sum(axis=0)
        self._largest = np.maximum(
            terms.exponent[index].max(axis=0, initial=NOTHING), np.int32(rules.exponent_floor)
        )
        self._finest = terms.place[index].min(axis=0)
        self._bits, self._result = np.int32(rules.fraction_bits), rules.result

    def __call__(self, c: Ends) -> Ends:
        """The ends of c + the terms. Infinite ends stay."""
        most = float(np.finfo(np.float32).max)
        low, high = np.clip(c[0], -most, most), np.clip(c[1], -most, most)
        least = accumulator_exponent(np.minimum(np.abs(low), np.abs(high)), self._result)
        least = np.maximum(self._largest, np.where((low < 0) != (high < 0), NOTHING, least))
        greatest = accumulator_exponent(np.maximum(np.abs(low), np.abs(high)), self._result)
        greatest = np.maximum(self._largest, greatest)
        down, up = self._sums(least, greatest)
        ends = []
        for end, total, outward, given in ((low, down, -np.inf, c[0]), (high, up, np.inf, c[1])):
            inner = (end > 0) if outward < 0 else (end < 0)
            place = np.where(inner, greatest, least) - self._bits
            cut = np.trunc(end * power(-place)) * power(place)
            total = outward_sum(total, cut, outward)
            ends.append(np.where(np.isinf(given), given, rounded(total, self._result)))
        return ends[0], ends[1]

    def _sums(self, least: Integers, greatest: Integers) -> Ends:
        """The least and the greatest sum of the cut terms over alignments from `least` to `greatest`."""
        down, up = self._total.copy(), self._total.copy()
        some = np.flatnonzero(greatest - self._bits > self._finest)
        if some.size:
            value = self._value[:, some]
            coarse = _cut_to(value, greatest[some] - self._bits)
            if np.array_equal(least[some], greatest[some]):
                down[some] = up[some] = coarse.sum(axis=0)
            else:
                fine = _cut_to(value, least[some] - self._bits)
                positive = value > 0
                down[some] = np.where(positive, coarse, fine).sum(axis=0)
                up[some] = np.where(positive, fine, coarse).sum(axis=0)
        return down, up


def _cut_to(x: Floats, place: Integers) -> Floats:
    return np.trunc(x * power(-place)) * power(place)


def outward_sum(a: Floats, b: Floats, outward: float) -> Floats:
    """a + b in float64, moved to the next number toward `outward` where that loses something on that side."""
    total = a + b
    from_b = total - a
    lost = (a - (total - from_b)) + (b - from_b)
    beyond = lost > 0 if outward > 0 else lost < 0
    return np.where(beyond, np.nextafter(total, outward), total)


def in_order(steps: list[Step], c: Ends) -> Ends:
    """The chain of the steps in the order given."""
    for step in steps:
        c = step(c)
    return c


def promoted(steps: list[Step], c: Ends, every: int) -> Ends:
    """Chains of `every` steps in the order given, each from zero, added to c by float32 additions."""
    zero = np.zeros_like(c[0])
    for first in range(0, len(steps), every):
        c = add(c, in_order(steps[first : first + every], (zero, zero)))
    return c


def any_order(steps: list[Step], c: Ends) -> Ends:
    """Every order of the steps in one chain."""
    return _chains(steps, c)[frozenset(range(len(steps)))]


def any_order_promoted(steps: list[Step], c: Ends, every: int) -> Ends:
    """Every order of steps in chains of `every` (the last may be shorter), each from zero, added to c one by one.

    The short chain, where there is one, may be any of them.
    """
    zero = np.zeros_like(c[0])
    chains = _chains(steps, (zero, zero), largest=every)
    whole = frozenset(range(len(steps)))
    short = len(steps) % every
    ends: dict[frozenset[int], Ends] = {frozenset(): c}
    for size in range(1, len(steps) + 1):
        for held in _subsets(whole, size):
            found = []
            for length in {every, short} - {0}:
                for last in _subsets(held, length):
                    # The short one comes once.
                    once = length == every or (size - length) % every == 0
                    if once and held - last in ends:
                        found.append(add(ends[held - last], chains[last]))
            if found:
                ends[held] = hull(found)
    return ends[whole]


def any_tree(steps: list[Step], c: Ends) -> Ends:
    """Every split of the steps into chains, in every order, joined by float32 additions in every tree.

    c starts one of the chains, or is itself added.
    """
    zero = np.zeros_like(c[0])
    whole = frozenset(range(len(steps)))
    plain, with_c = _chains(steps, (zero, zero)), _chains(steps, c)
    without: dict[frozenset[int], Ends] = {}
    joined: dict[frozenset[int], Ends] = {frozenset(): c}
    for size in range(1, len(steps) + 1):
        for held in _subsets(whole, size):
            least = min(held)
            found = [plain[held]]
            for part in range(1, size):
                for one in _subsets(held, part):
                    if least in one:  # the order of two operands does not matter
                        found.append(add(without[one], without[held - one]))
            without[held] = hull(found)
            found = [with_c[held], add(c, without[held])]
            for part in range(1, size):
                found += [add(joined[one], without[held - one]) for one in _subsets(held, part)]
            joined[held] = hull(found)
    return joined[whole]


def _chains(steps: list[Step], c: Ends, largest: int | None = None) -> dict[frozenset[int], Ends]:
    """For every subset of steps, its chains from c in every order."""
    whole = frozenset(range(len(steps)))
    ends: dict[frozenset[int], Ends] = {frozenset(): c}
    for size in range(1, (len(steps) if largest is None else min(largest, len(steps))) + 1):
        for held in _subsets(whole, size):
            ends[held] = hull(steps[last](ends[held - {last}]) for last in held)
    return ends


def _subsets(whole: frozenset[int], size: int) -> Iterable[frozenset[int]]:
    return map(frozenset, combinations(sorted(whole), size))
