"""How far a product of an instruction can be from the exact one: a bound for each result, with its proof.

Let S_s be the exact sum of c and the products of the first s steps, K ascending, and D_s what the instruction
returns after them. Each step errs by e_s = D_s - (D_(s-1) + the step's products), so D_s - S_s = e_1 + ... +
e_s. The bound keeps an interval [lo, hi] for that sum: before step s the accumulator lies in [S_(s-1) + lo,
S_(s-1) + hi]. It uses the products' bits, and of accumulators after the first step only how large they are.
For a fused step:

1. **Alignment.** Emax is the largest of the floor, the exponents of the products, and that of the
   accumulator. The accumulator's is between those of the least and of the greatest magnitude in its interval,
   so Emax is in [E-, E+].
2. **Products.** A product is cut toward zero to a multiple of 2^(Emax - F), which takes |x| mod 2^(Emax - F)
   off it: nothing while Emax - E_i <= F - (fraction bits of the product). That grows with Emax, so the sum of
   these errors lies between its values with E+ for positive and E- for negative products, and the other way
   round.
3. **Accumulator.** The one given loses |c| mod 2^(Emax - F). Later ones are multiples of 2^q, q the greater
   of g (the lowest bit set in any input) and the exponent of the least magnitude less p, for p = 23, 13 or 10
   fraction bits of the result. They lose nothing if E+ - F <= q, and 2^(E+ - F) - 2^q or their own magnitude
   at most, toward zero.
4. **Rounding.** With 1 to 3 the sum V lies in an interval too. All its terms are multiples of 2^(Emax - F)
   and of 2^g, so V is one of 2^r, r the greater of g and E- - F. Cutting to p fraction bits takes ulp(V) -
   2^r at most off |V|, nothing if ulp(V) <= 2^r: downward if V can be positive, upward if V can be negative.
   Rounding to nearest moves V by ulp(V) / 2 at most.

The errors of 2 to 4 are added to lo and hi. The bound is the larger of |lo| and |hi| at the end. Float64 sums
are exact where the inputs' grid allows; else 2^-52 times the sum of all magnitudes is added for each term.
The bound of an `exact` instruction is step 4 alone on S, that of `float32` step 4 for each product.

A row that holds a NaN or an infinity, or where |V| can reach the least sum that becomes infinite, has no bound:
infinity. That sum is 2^128 where a result is cut, 2^128 - 2^103 or 65520 where it is rounded to nearest.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref._backend import Array
from flamia_ref.arithmetic import operands
from flamia_ref.arithmetic.instructions import Instruction, Result, Summation
from flamia_ref.arithmetic.interval.operands import (
    as_given,
    bits_accumulator,
    by_lanes,
    matrix_pair,
    row_pair,
    terms_of,
    zero_accumulator,
)
from flamia_ref.arithmetic.interval.steps import (
    FRACTION_BITS,
    Ends,
    accumulator_exponent,
    least_exponent,
)
from flamia_ref.arithmetic.interval.terms import (
    NOTHING,
    Floats,
    Integers,
    Terms,
    exponent_of,
    place_of,
    power,
)
from flamia_ref.arithmetic.interval.value import Interval
from flamia_ref.arithmetic.operands import Pair
from flamia_ref.formats import ScalarFormat

_NEAREST = (Result.FLOAT16, Result.FLOAT32_NEAREST)
_OVERFLOW = {
    Result.FLOAT32: 2.0**128,
    Result.FLOAT32_13: 2.0**128,
    Result.FLOAT32_NEAREST: 2.0**128 - 2.0**103,
    Result.FLOAT16: 65520.0,
}
"""The least sum that becomes infinite; to nearest, half a unit above the largest number."""
_FAR = np.int32(900)  # beyond every exponent here, within float64's


def error_bound(
    a: Any,
    b: Any,
    c_bits: Array,
    instruction: str | Instruction,
    *,
    a_format: str | ScalarFormat | None = None,
    b_format: str | ScalarFormat | None = None,
    a_scales: Array | None = None,
    b_scales: Array | None = None,
    scale_format: str | ScalarFormat | None = None,
) -> NDArray[np.float64]:
    """A bound on |result - exact| of `fused_dot` with the same arguments, row by row.

    Returns:
        float64 (n,), numpy. 0 where the result is exact by necessity; infinity for rows that hold a NaN or an infinity,
        or may overflow.

    Raises:
        TypeError, ValueError: as `fused_dot`, and TypeError for traced arrays.

    The proof is in the module's docstring; the evidence is that of the instruction.
    """
    rules = operands.registered(instruction)
    given = as_given(a_format, b_format, a_scales, b_scales, scale_format)
    both = row_pair(a, b, given, rules)
    return _bound(both, bits_accumulator("c_bits", c_bits, both, rules), rules)


def matmul_error_bound(
    a: Any,
    b: Any,
    instruction: str | Instruction,
    c: Array | None = None,
    *,
    a_format: str | ScalarFormat | None = None,
    b_format: str | ScalarFormat | None = None,
    a_scales: Array | None = None,
    b_scales: Array | None = None,
    scale_format: str | ScalarFormat | None = None,
) -> NDArray[np.float64]:
    """`error_bound` of each element of `matmul_bits` with the same arguments: float64 (m, n). `c` is bits, or None."""
    rules = operands.registered(instruction)
    given = as_given(a_format, b_format, a_scales, b_scales, scale_format)
    both = matrix_pair(a, b, given, rules)
    start = zero_accumulator(both) if c is None else bits_accumulator("c", c, both, rules)
    return _bound(both, start, rules)


def _bound(both: Pair, start: Interval, rules: Instruction) -> NDArray[np.float64]:
    if start.lower.size == 0:
        return np.zeros(start.shape)
    return by_lanes(both, start, both.a.shape[0], partial(_lanes, rules=rules))[0]


def _lanes(both: Pair, c: Interval, rules: Instruction) -> tuple[Floats]:
    start = np.where(np.isfinite(c.lower), c.lower, 0.0)
    bad = ~np.isfinite(c.lower)
    if both.a.shape[0] == 0:
        return (np.where(bad, np.inf, 0.0),)
    terms = terms_of(both, rules)
    bad |= terms.nan | (terms.infinite != 0)
    place = np.minimum(terms.place.min(axis=(0, 1)), place_of(start))
    magnitude = np.abs(terms.value).sum(axis=(0, 1)) + np.abs(start)
    if rules.summation is Summation.EXACT:
        terms = terms._replace(value=terms.value.sum(axis=0, keepdims=True))
    sums = start + np.cumsum(terms.value.sum(axis=1), axis=0)
    grid = power(np.clip(place, -_FAR, _FAR))
    count = both.a.shape[0] + 2
    slack = np.where(magnitude < grid * 2.0**53, 0.0, count * 2.0**-52 * magnitude)
    low = high = np.zeros_like(start)
    # The exact sum that the first step starts from is c itself.
    before = start
    overflow = np.zeros_like(bad)
    limit = _OVERFLOW[rules.result]
    for step, after in enumerate(sums):
        first = step == 0
        ends = (before, before) if first else (before + low - slack, before + high + slack)
        if rules.summation is Summation.FUSED:
            cut, fine = _cuts(terms, step, ends, grid, first, rules)
            low, high = low + cut[0], high + cut[1]
        else:
            fine = grid
        down, up = _rounding(after + low - slack, after + high + slack, fine, rules.result)
        reach = np.maximum(np.abs(after + low - slack), np.abs(after + high + slack))
        overflow |= ~(reach * (1 + 2.0**-40) < limit)
        low, high, before = low - down, high + up, after
    bound = (np.maximum(-low, high) + slack) * (1 + count * 2.0**-50)
    exact = (low == 0) & (high == 0) & (slack == 0)
    return (np.where(bad | overflow, np.inf, np.where(exact, 0.0, bound)),)


def _cuts(
    terms: Terms, step: int, c: Ends, grid: Floats, first: bool, rules: Instruction
) -> tuple[Ends, Floats]:
    """Errors of cutting the terms of one step and its accumulator; and a power of two that divides what is left."""
    value, bits = terms.value[step], np.int32(rules.fraction_bits)
    own = np.maximum(
        terms.exponent[step].max(axis=0, initial=NOTHING), np.int32(rules.exponent_floor)
    )
    smallest = np.where((c[0] < 0) != (c[1] < 0), 0.0, np.minimum(np.abs(c[0]), np.abs(c[1])))
    normal = np.int32(least_exponent(rules.result))
    least = accumulator_exponent(smallest, rules.result)
    greatest = accumulator_exponent(np.maximum(np.abs(c[0]), np.abs(c[1])), rules.result)
    fine, coarse = (np.minimum(np.maximum(own, e), _FAR) - bits for e in (least, greatest))
    at_fine, at_coarse = _lost(value, fine), _lost(value, coarse)
    down = np.minimum(at_fine, 0.0) + np.maximum(at_coarse, 0.0)
    up = np.minimum(at_coarse, 0.0) + np.maximum(at_fine, 0.0)
    low, high = -down.sum(axis=0), -up.sum(axis=0)
    if first:
        lost = _lost(c[0], coarse)
        low, high = low - lost, high - lost
    else:
        kept = np.int32(FRACTION_BITS[rules.result])
        last = np.maximum(power(np.maximum(least, normal) - kept), grid)
        most = np.maximum(power(coarse) - last, 0.0)
        low = low - np.where(c[1] > 0, np.minimum(most, np.maximum(c[1], 0.0)), 0.0)
        high = high + np.where(c[0] < 0, np.minimum(most, np.maximum(-c[0], 0.0)), 0.0)
    return (low, high), np.maximum(grid, power(fine))


def _lost(x: Floats, place: Integers) -> Floats:
    """What x has below 2^place, with its sign."""
    return x - np.trunc(x * power(-place)) * power(place)


def _rounding(low: Floats, high: Floats, fine: Floats, result: Result) -> Ends:
    """The most that rounding a sum between `low` and `high`, a multiple of `fine`, moves it down and up."""
    floor, kept = np.int32(least_exponent(result)), np.int32(FRACTION_BITS[result])

    def unit(x: Floats) -> Floats:
        exponent = np.minimum(np.maximum(exponent_of(x), floor), _FAR)
        return power(exponent - kept)

    if result in _NEAREST:
        unit_here = unit(np.maximum(np.abs(low), np.abs(high)))
        half = np.where(unit_here > fine, 0.5 * unit_here, 0.0)
        return half, half
    down = np.where(high > 0, np.maximum(unit(high) - fine, 0.0), 0.0)
    up = np.where(low < 0, np.maximum(unit(low) - fine, 0.0), 0.0)
    return down, up
