"""Bounds on a product over so many orders that they cannot be tried: from the magnitudes partial sums can have.

**What is bounded.** Whatever the order, the result is the exact sum plus the errors of all steps, because the errors
telescope: a step returns the accumulator plus its terms plus an error of its own. A step errs in three ways:

1. A term is cut toward zero, by what it has below 2^(E - F). E is at most E+, the largest exponent that any
   term, the floor or any accumulator can have, and each term is cut once. So positive terms lose, together,
   at most sum(x mod 2^(E+ - F)) over x > 0, and negative ones gain as much. Where steps stay what they are, E
   is at least the largest exponent of a step's own terms, which gives what is lost at least. These sums are
   computed.
2. The accumulator is cut. It has p bits below its leading one (23, 13 or 10) and lies on the grid of all
   inputs, 2^g. Where its own exponent is the largest it loses nothing (F >= p), so something is lost only
   below t = 2^(Ep - F + p), Ep being the largest exponent of a term or the floor: at most 2^(Ep - F) - 2^g,
   toward zero. The accumulator that was given may have more bits than a step returns; it is cut once, by c
   mod 2^(E1 - F) at most with E1 = max(Ep, exponent of c).
3. The sum V is rounded. Toward zero: by at most ulp(V) - 2^g, down where V > 0, up where V < 0. To nearest:
   by half of ulp(V), either way. Not at all where ulp(V) <= 2^g.

**How large V is.** Sort the sums of the units that stay together (steps, blocks or elements). After j steps
of a chain from c, the exact partial sum is c plus that of some subset with j steps' units, so it lies between
c plus the least of them and c plus the greatest: L_j and U_j. V_j lies between L_j - d and U_j + u, where d
and u are the errors toward below and above of all steps. If 3 and 2 meet in one step, c < t there, so V is at
most t + the greatest sum of one step + u.

d and u are bounded by themselves: suppose they are at most d0 and u0; if all errors then add up to d <= d0
and u <= u0, no first step can break the supposition, and d and u hold. They are sought by iteration, and
infinity is returned if none is found.

**Splits.** A chain from zero has, after j steps, a partial sum of at most P_j, the sum of the j steps'
greatest positive units, which grows with j. Of q chains with n steps in all, at least q steps are first ones,
and the r-th shortest prefix has at most max(1, r - q + 1) steps: so all n steps err at most as q first steps
and steps 2 to n - q + 1 of one long chain. The q - 1 additions that join them (q with c) round to nearest a
sum of magnitude at most max(P_n, -N_n) + errors. The maximum over q is taken.

**Promotion** after every m steps: of the q chains, the k-th largest prefix of i steps is at most P_(ki) / k, as the k
largest are sums of disjoint units. The additions to c have partial sums of im steps.

Float64 sums here are exact where the grid allows; otherwise everything is widened by their error.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref.arithmetic.instructions import Instruction, Result, Summation
from flamia_ref.arithmetic.interval.steps import (
    FRACTION_BITS,
    Ends,
    accumulator_exponent,
    least_exponent,
    outward_sum,
)
from flamia_ref.arithmetic.interval.terms import (
    NOTHING,
    Floats,
    Terms,
    exponent_of,
    place_of,
    power,
)

_ITERATIONS = 60
_MARGIN = 1.0625


class Freedom(NamedTuple):
    """What is free: units go to any step; there are several chains, or chains end after some steps."""

    units: NDArray[np.float64]
    """[units, lanes]: exact sums of what stays together."""
    per_step: int
    """Units that a step takes."""
    mixed: bool
    """Whether a step may take other units than it has in ascending order."""
    chains: int
    """The most chains."""
    promotion: int | None
    """Steps of a chain, each added to c."""
    joined: bool
    """Whether chains, and c, may be joined by additions."""

    @property
    def single(self) -> bool:
        """Whether there is one chain, from c."""
        return not self.joined and self.promotion is None


class _Data(NamedTuple):
    """All that does not depend on the supposed errors; [lanes] or [steps, lanes]."""

    positive: Floats  # terms' values
    top: Floats  # U_j or c + P_j, j = 0..n
    bottom: Floats  # L_j or c + N_j
    top_plain: Floats  # P_j, without c
    bottom_plain: Floats
    grid: Floats  # 2^g
    largest: NDArray[np.int32]  # Ep
    exact: Floats
    slack: Floats


def bounds(terms: Terms, c: Ends, freedom: Freedom, rules: Instruction) -> Ends:
    """Lower and upper values of finite lanes; infinite where no bound was found or a sum may overflow."""
    steps = terms.value.shape[0]
    values = terms.value.reshape(-1, terms.value.shape[2])
    magnitude = np.abs(values).sum(axis=0) + np.maximum(np.abs(c[0]), np.abs(c[1]))
    place = np.minimum(terms.place.min(axis=(0, 1)), _c_place(c, rules.result))
    grid = power(np.maximum(place, np.int32(-1000)))
    count = values.shape[0] + 2
    slack = np.where(magnitude < grid * 2.0**53, 0.0, count * 2.0**-52 * magnitude)
    tops, bottoms, plain_top, plain_bottom = _partial_sums(freedom, c, steps)
    total = freedom.units.sum(axis=0)
    lower, upper = outward_sum(c[0], total, -np.inf), outward_sum(c[1], total, np.inf)
    largest = np.maximum(
        terms.exponent.max(axis=(0, 1), initial=NOTHING),
        np.int32(rules.exponent_floor if rules.summation is Summation.FUSED else -2000),
    )
    data = _Data(values, tops, bottoms, plain_top, plain_bottom, grid, largest, total, slack)
    down = up = slack
    done = np.zeros(total.shape, dtype=bool)
    found_down, found_up = np.full_like(total, np.inf), np.full_like(total, np.inf)
    for _ in range(_ITERATIONS):
        new_down, new_up = _errors(data, c, freedom, rules, down, up)
        now = ~done & (new_down <= down) & (new_up <= up)
        found_down, found_up = np.where(now, new_down, found_down), np.where(now, new_up, found_up)
        done |= now
        if done.all():
            break
        down, up = np.maximum(down, new_down * _MARGIN), np.maximum(up, new_up * _MARGIN)
    sure_down, sure_up = _sure_cuts(terms, freedom, rules)
    low = outward_sum(lower, sure_up - found_down, -np.inf)
    high = outward_sum(upper, found_up - sure_down, np.inf)
    return _representable(low, high, rules.result, freedom)


def _c_place(c: Ends, result: Result) -> NDArray[np.int32]:
    """A place that divides every accumulator between the ends: that of the number, or of the last bit of the least."""
    least = np.where((c[0] < 0) != (c[1] < 0), 0.0, np.minimum(np.abs(c[0]), np.abs(c[1])))
    bits = 10 if result is Result.FLOAT16 else 23
    floor = np.int32(least_exponent(result))
    last = np.maximum(exponent_of(least), floor) - np.int32(bits)
    return np.where(c[0] == c[1], place_of(c[0]), last)


def _partial_sums(freedom: Freedom, c: Ends, steps: int) -> tuple[Floats, Floats, Floats, Floats]:
    """The greatest and least partial sums after 0 to n steps, with c and without, [n + 1, lanes]."""
    ordered = np.sort(freedom.units, axis=0)

    def at_steps(sums: Floats) -> Floats:
        start = np.zeros((1, sums.shape[1]))
        return np.concatenate(
            [start, np.cumsum(sums, axis=0)[freedom.per_step - 1 :: freedom.per_step]]
        )

    top, bottom = at_steps(np.maximum(ordered[::-1], 0.0)), at_steps(np.minimum(ordered, 0.0))
    if freedom.single:
        return c[1] + at_steps(ordered[::-1]), c[0] + at_steps(ordered), top, bottom
    return np.maximum(c[1], 0.0) + top, np.minimum(c[0], 0.0) + bottom, top, bottom


def _last_place(x: Floats, result: Result) -> Floats:
    """Weight of the last bit that a result of magnitude x keeps."""
    exponent = np.maximum(exponent_of(x), np.int32(least_exponent(result)))
    return power(np.minimum(exponent, np.int32(1000)) - np.int32(FRACTION_BITS[result]))


def _rounding(x: Floats, grid: Floats, result: Result) -> Floats:
    """The most that rounding takes off a sum on the grid between 0 and x; 0 where x <= 0."""
    place = _last_place(x, result)
    nearest = result in (Result.FLOAT16, Result.FLOAT32_NEAREST)
    most = place * 0.5 if nearest else place - grid
    return np.where((x > 0) & (place > grid), most, 0.0)


def _errors(
    data: _Data, c: Ends, freedom: Freedom, rules: Instruction, down: Floats, up: Floats
) -> tuple[Floats, Floats]:
    """The sums of all errors toward below and above, if they are at most `down` and `up`."""
    top, bottom = data.top + up, data.bottom - down
    most = np.maximum(np.abs(top), np.abs(bottom)).max(axis=0)
    if not freedom.single:
        # Promoted, c is in no step, and a chain has few of them.
        longest = min(freedom.promotion or len(top), len(top) - 1)
        chain = np.maximum(data.top_plain[longest] + up, down - data.bottom_plain[longest])
        most = chain if freedom.promotion is not None else np.maximum(most, chain)
    zero = np.zeros_like(down)
    given = c if freedom.promotion is None else (zero, zero)  # promoted: no step sees c
    lost_down, lost_up, small, cut = _cuts(data, given, rules, most)
    one_up, one_down = (
        data.top_plain[min(1, len(top) - 1)] + up,
        down - data.bottom_plain[min(1, len(top) - 1)],
    )
    nearest = rules.result in (Result.FLOAT16, Result.FLOAT32_NEAREST)

    def per_step(high: Floats, low: Floats, step: Floats, single: bool) -> Floats:
        """The most that steps 1..n take away from sums up to `high` [n + 1, lanes], and at least `low`."""
        v = np.maximum(high, -low) if nearest else high
        plain = _rounding(v[1:], data.grid, rules.result)
        both = cut + _rounding(np.minimum(v[1:], small + step), data.grid, rules.result)
        before, least = high[:-1], low[:-1]
        possible = (before > 0) & ((least < small) if single else True)
        possible[:1] = False  # the given accumulator is cut in `_cuts`
        return np.where(possible, np.maximum(plain, both), plain)

    single = freedom.single
    if freedom.promotion is not None:
        each_down = _promoted_steps(
            data.top_plain, up, freedom.promotion, data, rules, cut, down - data.bottom_plain
        )
        each_up = _promoted_steps(
            -data.bottom_plain, down, freedom.promotion, data, rules, cut, data.top_plain + up
        )
        joins = _promotion_joins(top, bottom, c, freedom.promotion, data.grid)
        return each_down + lost_down + joins + data.slack, each_up + lost_up + joins + data.slack
    step_down = per_step(top, bottom, np.maximum(one_up, one_down) if nearest else one_up, single)
    step_up = per_step(-bottom, -top, np.maximum(one_up, one_down) if nearest else one_down, single)
    if single:
        return (
            step_down.sum(axis=0) + lost_down + data.slack,
            step_up.sum(axis=0) + lost_up + data.slack,
        )
    joining = 0.5 * _last_place(most, Result.FLOAT32)
    joining = np.where(2 * joining > data.grid, joining, 0.0)
    with_c = ((c[0] != 0) | (c[1] != 0)).astype(np.float64)
    first_down = _rounding(
        np.maximum(one_up, one_down) if nearest else one_up, data.grid, rules.result
    )
    first_up = _rounding(
        np.maximum(one_up, one_down) if nearest else one_down, data.grid, rules.result
    )
    results = []
    for steps, first, lost in ((step_down, first_down, lost_down), (step_up, first_up, lost_up)):
        sums = np.cumsum(steps, axis=0)
        worst = np.zeros_like(down)
        for q in range(1, min(freedom.chains, len(steps)) + 1):
            worst = np.maximum(
                worst, sums[len(steps) - q] + (q - 1) * first + (q - 1 + with_c) * joining
            )
        results.append(worst + lost + data.slack)
    return results[0], results[1]


def _cuts(
    data: _Data, c: Ends, rules: Instruction, most: Floats
) -> tuple[Floats, Floats, Floats, Floats]:
    """What cutting terms and c takes off below and above, the t of the text, and the most that an accumulator loses."""
    zero = np.zeros_like(most)
    if rules.summation is not Summation.FUSED:
        return zero, zero, zero, zero
    bits = np.int32(rules.fraction_bits)
    limit = np.int32(900)
    exponent = np.maximum(data.largest, accumulator_exponent(most, rules.result))
    exponent = np.minimum(exponent, limit)
    rest = _below(data.positive, exponent - bits)
    lost_down, lost_up = np.maximum(rest, 0.0).sum(axis=0), np.maximum(-rest, 0.0).sum(axis=0)
    start = accumulator_exponent(np.maximum(np.abs(c[0]), np.abs(c[1])), rules.result)
    first = np.minimum(np.maximum(data.largest, start), limit)
    given = _below(c[0], first - bits)
    unit = np.maximum(power(first - bits) - data.grid, 0.0)
    point = c[0] == c[1]
    lost_down = lost_down + np.where(point, np.maximum(given, 0.0), np.where(c[1] > 0, unit, 0.0))
    lost_up = lost_up + np.where(point, np.maximum(-given, 0.0), np.where(c[0] < 0, unit, 0.0))
    kept = np.int32(FRACTION_BITS[rules.result])
    least = least_exponent(rules.result) - kept
    # No accumulator has bits below the least place of its format.
    cut = np.where(data.largest - bits > least, power(np.minimum(data.largest, limit) - bits), 0.0)
    cut = np.maximum(cut - data.grid, 0.0)
    small = power(np.minimum(data.largest, limit) - bits + kept)
    return lost_down, lost_up, small, cut


def _sure_cuts(terms: Terms, freedom: Freedom, rules: Instruction) -> tuple[Floats, Floats]:
    """What cutting terms takes off below and above in any case: a step is aligned to its own terms at least."""
    zero = np.zeros(terms.value.shape[2])
    if rules.summation is not Summation.FUSED or freedom.mixed:
        return zero, zero
    least = np.maximum(terms.exponent.max(axis=1, initial=NOTHING), np.int32(rules.exponent_floor))
    rest = _below(terms.value, least[:, None] - np.int32(rules.fraction_bits))
    return np.maximum(rest, 0.0).sum(axis=(0, 1)), np.maximum(-rest, 0.0).sum(axis=(0, 1))


def _below(x: Floats, place: NDArray[np.int32]) -> Floats:
    """What x has below 2^place, with its sign."""
    return x - np.trunc(x * power(-place)) * power(place)


def _promoted_steps(
    top: Floats,
    errors: Floats,
    every: int,
    data: _Data,
    rules: Instruction,
    cut: Floats,
    other: Floats,
) -> Floats:
    """The most that the steps of all chains of `every` steps take off."""
    steps = len(top) - 1
    total = np.zeros_like(errors)
    nearest = rules.result in (Result.FLOAT16, Result.FLOAT32_NEAREST)
    for i in range(1, min(every, steps) + 1):
        for k in range(1, -(-steps // every) + 1):
            high = top[min(k * i, steps)] / k * (1 + 2.0**-50) + errors
            if nearest:
                high = np.maximum(high, other[min(i, steps)])
            total = total + _rounding(high, data.grid, rules.result) + (cut if i > 1 else 0.0)
    return total


def _promotion_joins(top: Floats, bottom: Floats, c: Ends, every: int, grid: Floats) -> Floats:
    """The most that the float32 additions of chains to c err."""
    steps = len(top) - 1
    exact_first = (c[0] == 0) & (c[1] == 0)
    total = np.zeros_like(grid)
    for i in range(1, -(-steps // every) + 1):
        j = min(i * every, steps)
        half = 0.5 * _last_place(np.maximum(top[j], -bottom[j]), Result.FLOAT32)
        half = np.where(2 * half > grid, half, 0.0)
        total = total + (np.where(exact_first, 0.0, half) if i == 1 else half)
    return total


def _representable(low: Floats, high: Floats, result: Result, freedom: Freedom) -> Ends:
    """The ends moved inward to numbers that the result can be: results are on the result's own grid."""
    kind = result if freedom.single else Result.FLOAT32
    ends = []
    for end, inward in ((low, np.ceil), (high, np.floor)):
        finite = np.where(np.isfinite(end), end, 0.0)
        place = _last_place(finite, kind)
        moved = inward(finite / place) * place + 0.0
        ends.append(np.where(np.isfinite(end), moved, end))
    return ends[0], ends[1]
