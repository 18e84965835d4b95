"""Matrix products as intervals: what any permitted instruction, order, split and tree of additions returns."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from flamia_ref._backend import Array
from flamia_ref._errors import shown, unknown_name
from flamia_ref.arithmetic import operands
from flamia_ref.arithmetic.instructions import Instruction, Result, Summation
from flamia_ref.arithmetic.interval import magnitudes
from flamia_ref.arithmetic.interval import steps as step_sums
from flamia_ref.arithmetic.interval.magnitudes import Freedom
from flamia_ref.arithmetic.interval.operands import (
    Given,
    accumulator,
    as_given,
    by_lanes,
    matrix_pair,
    row_pair,
    terms_of,
    zero_accumulator,
)
from flamia_ref.arithmetic.interval.operands import ascending as ascending_result
from flamia_ref.arithmetic.interval.steps import Ends, Step
from flamia_ref.arithmetic.interval.terms import Booleans, Floats, Terms
from flamia_ref.arithmetic.interval.value import Interval, hull
from flamia_ref.arithmetic.operands import Pair
from flamia_ref.formats import ScalarFormat

TRIED_STEPS = 8
"""Up to this many steps all orders are tried; beyond, magnitudes are bounded."""


class Orders(StrEnum):
    """In which order products are added. Each includes the ones before it."""

    ASCENDING = "ascending"
    """K ascending, in instruction steps."""
    STEPS = "steps"
    """Instruction steps of consecutive K, in any order."""
    ELEMENTS = "elements"
    """Any products in any step. Elements that share a scale stay together, and so does each group of an FP4 kind.

    So within a block of 32 of an FP4 kind no element changes from one group of 16 to the other, which are cut apart.
    """


class _Variants(NamedTuple):
    orders: Orders
    splits: int
    promotion: int | None


def dot(
    a: Any,
    b: Any,
    c: Any,
    instructions: str | Instruction | Sequence[str | Instruction],
    *,
    orders: Orders | str = Orders.STEPS,
    splits: int | None = 1,
    promotion: int | None = None,
    a_format: str | ScalarFormat | None = None,
    b_format: str | ScalarFormat | None = None,
    a_scales: Array | None = None,
    b_scales: Array | None = None,
    scale_format: str | ScalarFormat | None = None,
) -> Interval:
    """What c[i] + sum over k of a[i, k] b[i, k] may be, row by row, over all permitted ways to compute it.

    Args:
        a: element codes (n, K), or a BlockTensor, as in `fused_dot`.
        b: the same.
        c: accumulator bits (n,) as in `fused_dot`, or an Interval (n,).
        instructions: one instruction or several, each an `Instruction` of `INSTRUCTIONS` or its name; one is used
            throughout a sum.
        orders: as in `Orders`.
        splits: at most how many accumulators share K; they start at zero (one may start at c) and are joined, with
            c, by float32 additions to nearest in any tree. None is any number. The number of steps stays the same.
        promotion: after how many steps an accumulator, started at zero, is added to c in float32, one after the
            other. Not with `splits`.
        a_format: as in `fused_dot`, and so are the rest.
        b_format: the same.
        a_scales: the same.
        b_scales: the same.
        scale_format: the same.

    Returns:
        An Interval (n,). One number where all ways agree by necessity: in ascending order (that of `fused_dot`),
        and in any order where all partial sums are exact. NaN in an operand or a scale is NaN in every order; `nan`
        is also set where partial sums may overflow and meet the other infinity.

    Raises:
        TypeError, ValueError: as `fused_dot`; for unknown orders, `splits` or `promotion` below 1 or both, several
            accumulators with a float16 result, or `splits` in ascending order.

    Evidence: each instruction's own. That no permitted way leaves the interval is derived, in the modules
    `steps` and `magnitudes` beside this one.
    """
    given = as_given(a_format, b_format, a_scales, b_scales, scale_format)
    return _all(_rows, a, b, c, given, instructions, orders, splits, promotion)


def matmul(
    a: Any,
    b: Any,
    instructions: str | Instruction | Sequence[str | Instruction],
    c: Any = None,
    *,
    orders: Orders | str = Orders.STEPS,
    splits: int | None = 1,
    promotion: int | None = None,
    a_format: str | ScalarFormat | None = None,
    b_format: str | ScalarFormat | None = None,
    a_scales: Array | None = None,
    b_scales: Array | None = None,
    scale_format: str | ScalarFormat | None = None,
) -> Interval:
    """What a @ b + c may be: `dot` of each row of `a` (m, K) and each column of `b` (K, n), an Interval (m, n).

    `c` is bits (m, n), an Interval (m, n), or None for +0; scales are shaped as in `matmul_bits`. The rest, and what is
    raised, is as in `dot`.
    """
    given = as_given(a_format, b_format, a_scales, b_scales, scale_format)
    return _all(_matrices, a, b, c, given, instructions, orders, splits, promotion)


def _rows(a: Any, b: Any, c: Any, given: Given, rules: Instruction) -> tuple[Pair, Interval]:
    both = row_pair(a, b, given, rules)
    return both, accumulator("c", c, both, rules)


def _matrices(a: Any, b: Any, c: Any, given: Given, rules: Instruction) -> tuple[Pair, Interval]:
    both = matrix_pair(a, b, given, rules)
    return both, zero_accumulator(both) if c is None else accumulator("c", c, both, rules)


def _all(
    checked: Callable[[Any, Any, Any, Given, Instruction], tuple[Pair, Interval]],
    a: Any,
    b: Any,
    c: Any,
    given: Given,
    instructions: Any,
    orders: Any,
    splits: Any,
    promotion: Any,
) -> Interval:
    """The hull over several instructions."""
    variants = _variants(orders, splits, promotion)
    several = _several(instructions)
    if len({rules.result.accumulator_format for rules in several}) > 1:
        raise ValueError("instructions have float16 and float32 results; give those of one kind")
    for rules in several:
        _check_joins(rules, variants)
    found = []
    for rules in several:
        both, start = checked(a, b, c, given, rules)
        if start.lower.size == 0:
            found.append(start)
            continue
        held = both.a.shape[0]
        steps = held // (rules.terms or 1)
        if variants.orders is not Orders.ASCENDING and steps <= TRIED_STEPS:
            held = max(held, 2 << steps)
        work = partial(_lanes, rules=rules, variants=variants)
        found.append(Interval(*by_lanes(both, start, held, work)))
    return hull(*found)


def _variants(orders: Orders | str, splits: int | None, promotion: int | None) -> _Variants:
    if not isinstance(orders, str) or orders not in list(Orders):
        raise unknown_name("orders", orders, Orders)
    splits, promotion = _count("splits", splits), _count("promotion", promotion)
    chosen = Orders(orders)
    if promotion is not None and splits != 1:
        raise ValueError(
            "splits and promotion are both given; promotion has splits of its own, leave splits at 1"
        )
    if chosen is Orders.ASCENDING and splits != 1:
        raise ValueError(
            "splits are given in ascending order; use orders 'steps', which includes it"
        )
    return _Variants(chosen, 1 << 30 if splits is None else splits, promotion)


def _count(name: str, given: Any) -> int | None:
    """An integer from 1 up, of any integer type, or None."""
    if given is None:
        return None
    try:
        count = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"{name} is {shown(given)}; it is an integer from 1 up, or None")
    return count


def _several(given: str | Instruction | Sequence[str | Instruction]) -> list[Instruction]:
    if not isinstance(given, str | Instruction) and not isinstance(given, Iterable):
        raise TypeError(
            f"instructions is {shown(given)}; give a name in INSTRUCTIONS, one of its values, or a list of them"
        )
    names = [given] if isinstance(given, str | Instruction) else list(given)
    if not names:
        raise ValueError("instructions is empty; name one at least")
    return [operands.registered(name) for name in names]


def _check_joins(rules: Instruction, variants: _Variants) -> None:
    if rules.result is Result.FLOAT16 and (variants.splits > 1 or variants.promotion is not None):
        raise ValueError(
            f"{rules.name} has a float16 result, which is not joined in float32; leave splits at 1 and promotion out"
        )
    if rules.summation is Summation.EXACT and (
        variants.splits > 1 or variants.promotion is not None
    ):
        raise ValueError(f"{rules.name} is one sum of all K; leave splits at 1 and promotion out")


def _lanes(
    both: Pair, c: Interval, rules: Instruction, variants: _Variants
) -> tuple[Floats, Floats, Booleans]:
    """The interval of lanes along one axis."""
    if both.a.shape[0] == 0:
        return c.lower, c.upper, c.nan
    nan = c.nan & np.isnan(c.lower)
    start = (np.where(nan, 0.0, c.lower), np.where(nan, 0.0, c.upper))
    terms = terms_of(both, rules)
    ascending = variants.orders is Orders.ASCENDING and variants.promotion is None
    single = variants.splits == 1 and variants.promotion is None
    limit = 2.0**15 if rules.result is Result.FLOAT16 else 2.0**127
    largest_c = np.maximum(np.abs(start[0]), np.abs(start[1]))
    magnitude = np.abs(terms.value).sum(axis=(0, 1)) + np.where(np.isinf(largest_c), 0.0, largest_c)
    overflow = (magnitude >= limit) | (np.isinf(largest_c) & (start[0] != start[1]))
    with np.errstate(invalid="ignore"):
        if rules.summation is Summation.EXACT or (ascending and rules.summation is Summation.FMA):
            low, high = (ascending_result(both, end, rules) for end in start)
        else:
            low, high = _finite(terms, start, both, rules, variants, overflow)
    # NaN by arithmetic: of infinities that meet, or of what an ideal sum was given.
    met = np.isnan(low) | np.isnan(high)
    sign = terms.infinite.astype(np.float64)
    some = sign != 0.0
    against = [np.isinf(end) & some & (np.sign(end) != sign) for end in start]
    only = nan | terms.nan | (against[0] & against[1])
    may = c.nan | met | against[0] | against[1] | (overflow & (some | ~np.bool_(single)))
    low, high = np.where(met, -np.inf, low), np.where(met, np.inf, high)
    infinite = np.copysign(np.inf, sign)
    low, high = np.where(some, infinite, low), np.where(some, infinite, high)
    low, high = np.where(only, np.nan, low), np.where(only, np.nan, high)
    # One order and one accumulator: where infinities make it hard to say, the machine says it.
    fixed = ascending or rules.summation is Summation.EXACT
    unsure = may & ~only & ~c.nan & (c.lower == c.upper)
    asked = np.flatnonzero(unsure & np.bool_(fixed))
    if asked.size:
        low[asked] = high[asked] = ascending_result(both, start[0], rules)[asked]
        may[asked] = np.isnan(low[asked])
    return low, high, may | only


def _finite(
    terms: Terms, c: Ends, both: Pair, rules: Instruction, variants: _Variants, overflow: Booleans
) -> Ends:
    """The ends for lanes whose operands are finite."""
    count = terms.value.shape[0]
    fused = rules.summation is Summation.FUSED
    if fused and (variants.orders is Orders.ASCENDING or count == 1):
        steps = [Step(terms, index, rules) for index in range(count)]
        if variants.promotion is not None:
            return step_sums.promoted(steps, c, variants.promotion)
        if variants.splits == 1:
            return step_sums.in_order(steps, c)
    # Where the elements that share a scale fill whole steps, no order mixes steps.
    block = both.scaling.block if both.scaling is not None else 1
    per_step = max(1, (rules.terms or 1) // block) if variants.orders is Orders.ELEMENTS else 1
    if fused and per_step == 1 and count <= TRIED_STEPS:
        steps = [Step(terms, index, rules) for index in range(count)]
        if variants.promotion is not None:
            return step_sums.any_order_promoted(steps, c, variants.promotion)
        if variants.splits > 1:
            return step_sums.any_tree(steps, c)
        return step_sums.any_order(steps, c)
    units = terms.value.reshape(count * per_step, -1, terms.value.shape[2]).sum(axis=1)
    chains = min(variants.splits, count)
    mixed = variants.orders is Orders.ELEMENTS and per_step > 1
    freedom = Freedom(units, per_step, mixed, chains, variants.promotion, variants.splits > 1)
    infinite = np.isinf(c[0]) | np.isinf(c[1])
    finite = tuple(np.where(infinite, 0.0, end) for end in c)
    low, high = magnitudes.bounds(terms, (finite[0], finite[1]), freedom, rules)
    low, high = np.where(overflow, -np.inf, low), np.where(overflow, np.inf, high)
    point = infinite & (c[0] == c[1])
    return np.where(point, c[0], low), np.where(point, c[1], high)
