"""Matrix products of tiles as intervals: steps in any order and any tree, operands that may be uncertain, by BLAS.

`dot` and `matmul` beside this module try orders, or bound them by all the terms, which takes some hundred times as
long as the product. Here all sums over K are float64 matrix products, so that a whole attention can be bounded.

**What is free.** The products of one instruction step stay together. Steps come in any order, in any number of
chains, each from zero or from the accumulator, that float32 additions to nearest join in any tree.

**The bound.** With T the exact sum, every way returns T plus the errors of its steps and joins:

1. A step rounds its sum V: by less than ulp(V) toward zero, or by half of it to nearest. After j steps of a chain V
   is at most M_j, the sum of the j greatest positive step sums or of the j least negative ones, with the accumulator.
   Of q chains with n steps in all at least q steps are first ones, and the rest err at most as steps 2 to n - q + 1 of
   one chain; the q - 1 joins, q with an accumulator that is joined too, err by half of ulp(M_n). That is convex in q,
   so the greater of q = 1 and q = n bounds it. Steps of zeros change nothing and are not counted.
2. A term is cut toward zero below 2^(E - F), where E is at most E+, the greatest exponent of a term, the floor or
   M_n. A term whose lowest bit is at least that loses nothing; the others lose less than it each. With pa and pb the
   lowest bits of the factors over the least of their rows, {k: pa + pb < d} is in {pa < s} or {pb < d - s} for every
   s, which bounds their number by two counts; the least over some s is taken.
3. The accumulator is cut likewise, by less than 2^(Ep - F) a step, Ep being the greatest exponent of a term; and the
   one that was given, which may have more bits than steps return, once by less than 2^(max(Ep, its exponent) - F).

All of it is 0 where M_n is below 2^24 units of the grid that all terms lie on: then every way is exact. The errors
enter M_j themselves: an estimate of them is added there, and raised until what follows is no larger.

Values are float64 with float32 ends; everything is numpy, on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref.arithmetic.instructions import Instruction, Result, Scaling, Summation
from flamia_ref.arithmetic.interval.terms import NOTHING, exponent_of, operand, place_of, power
from flamia_ref.formats import FORMATS, ScalarFormat

Floats = NDArray[np.float64]
Integers = NDArray[np.int32]
Booleans = NDArray[np.bool_]

_FAR = np.int32(1 << 20)  # the place of a zero: above every place of a number
_DEPTHS = 64  # places above the least that are told apart
_TRIES = 8
_SHARES = 8


class Factor(NamedTuple):
    """One side of a product, K last.

    Attributes:
        lower, upper: [tiles, rows, K] float64, finite; equal where certain.
        exponent: [tiles, rows], the greatest that alignment may see of a row; `NOTHING` for rows of zeros.
        place: [tiles, rows, K], of the lowest bit that may be set; large for zeros.
        nan: [tiles, rows, K], elements that are NaN, and count as 0 in the rest.
        infinite: [tiles, rows, K], the sign of infinities, which count as 0 in the rest; None without any.
        anything: [tiles, rows], rows of which nothing is known.
    """

    lower: Floats
    upper: Floats
    exponent: Integers
    place: Integers
    nan: Booleans
    infinite: Floats | None = None
    anything: Booleans | None = None

    @property
    def certain(self) -> bool:
        """Whether all elements are known."""
        return self.lower is self.upper


class Ends(NamedTuple):
    """Least and greatest values [...] as float64, float32 values or infinities; NaN in both where only NaN is
    permitted; and where NaN is permitted."""

    low: Floats
    high: Floats
    nan: Booleans


def exact_factor(
    codes: NDArray[np.integer],
    element: ScalarFormat,
    scales: NDArray[np.uint8] | None,
    scaling: Scaling | None,
    rules: Instruction,
) -> Factor:
    """A factor from codes [K, tiles, rows] and their scales [K / block, tiles, rows], as instructions take them."""
    if scales is not None and scaling is not None:
        scales = np.broadcast_to(scales, (scales.shape[0], *codes.shape[1:]))
    found = operand(codes, element, scales, scaling, rules)
    value, exponent, place = found.value, found.exponent, found.place
    if rules.group > 1:
        # Groups are aligned by the exponents of their scales alone.
        each = np.repeat(np.arange(found.scale.shape[0]), scaling.block)[: len(codes)]  # type: ignore[union-attr]
        some = value != 0.0
        value = value * found.scale[each]
        exponent = np.where(some, found.scale_exponent[each], NOTHING)
        place = np.where(some, place + found.scale_place[each], _FAR)
    wide = _decoded_nan(codes, element, scales, scaling)
    infinite = np.moveaxis(found.infinite, 0, 2) if (found.infinite != 0).any() else None
    value = np.ascontiguousarray(np.moveaxis(value, 0, 2))
    return Factor(
        value,
        value,
        exponent.max(axis=0, initial=NOTHING),
        np.ascontiguousarray(np.moveaxis(np.where(exponent <= NOTHING // 2, _FAR, place), 0, 2)),
        np.moveaxis(wide, 0, 2),
        infinite,
    )


def uncertain_factor(
    lower: Floats,
    upper: Floats,
    least: Integers,
    element: ScalarFormat,
    most: Integers | None = None,
) -> Factor:
    """A factor of values between two ends [tiles, rows, K], each a code of `element` times a power of two.

    NaN in both ends is NaN, infinite ends in one or both are unknown. `least` broadcasts: the exponent of the powers
    of two, the least one where several are possible; `most`: the greatest, None where there is one.
    """
    nan = np.isnan(lower) & np.isnan(upper)
    lost = (~nan & ~(np.isfinite(lower) & np.isfinite(upper))).any(axis=2)
    low = np.where(np.isfinite(lower), lower, 0.0)
    high = np.where(np.isfinite(upper), upper, 0.0)
    same = low == high
    floor = least + np.int32(element.emin)
    size = np.maximum(np.abs(low), np.abs(high))
    # Alignment sees the exponent of the code, which for a subnormal one is that of the least normal number.
    seen = (least if most is None else most) + np.int32(element.emin)
    exponent = np.where(size == 0.0, NOTHING, np.maximum(exponent_of(size), seen))
    inner = np.where((low < 0) != (high < 0), 0.0, np.minimum(np.abs(low), np.abs(high)))
    coarse = np.maximum(exponent_of(inner), floor) - np.int32(element.mantissa_bits)
    place = np.where(same, np.where(low == 0.0, _FAR, place_of(low)), coarse)
    if same.all():
        high = low
    return Factor(
        low,
        high,
        exponent.max(axis=2, initial=NOTHING).astype(np.int32),
        place.astype(np.int32),
        nan,
        None,
        np.asarray(lost) if lost.any() else None,
    )


def product(left: Factor, right: Factor, start: Ends | None, rules: Instruction) -> Ends:
    """start + left @ right^T [tiles, left rows, right rows], by an instruction with a float32 result."""
    if rules.result is Result.FLOAT16:
        raise ValueError(f"{rules.name} has a float16 result; tiles are bounded in float32")
    low, high, steps, counts = _step_sums(left, right, rules)
    both = np.abs(np.maximum(np.abs(left.lower), np.abs(left.upper)))
    other = np.abs(np.maximum(np.abs(right.lower), np.abs(right.upper)))
    size = both @ other.swapaxes(1, 2)
    begin_low, begin_high = (0.0, 0.0) if start is None else _finite(start)
    size = size + np.maximum(np.abs(begin_low), np.abs(begin_high))
    grid = power(np.clip(_grid(left, right, start), -1000, 900))
    exact = size < grid * 2.0**53
    slack = np.where(exact, 0.0, (left.lower.shape[2] + 4) * 2.0**-52 * size)
    total_low, total_high = low.sum(axis=0) + begin_low, high.sum(axis=0) + begin_high
    if rules.summation is Summation.EXACT:
        error = slack
        return _finished(total_low - error, total_high + error, start, left, right, outward=False)
    error = _errors(left, right, low, high, counts, begin_low, begin_high, grid, size, rules, steps)
    error = error + slack
    with np.errstate(over="ignore", invalid="ignore"):
        wide = ~(size + error < 2.0**127)
        down, up = total_low - error, total_high + error
        # Beyond float32 with next to nothing of the other sign, every order ends at infinity.
        above = wide & (down >= 2.0**128) & (size - down < 2.0**126)
        below = wide & (up <= -(2.0**128)) & (size + up < 2.0**126)
        down = np.where(wide, np.where(above, np.inf, -np.inf), down)
        up = np.where(wide, np.where(below, -np.inf, np.inf), up)
    return _finished(down, up, start, left, right, outward=True)


def _step_sums(
    left: Factor, right: Factor, rules: Instruction
) -> tuple[Floats, Floats, int, Integers]:
    """The least and the greatest sum of each step [steps, tiles, rows, columns], their number, and how many of them
    have terms [tiles, rows]; one unit for all where each product is a step."""
    extent = left.lower.shape[2]
    terms = rules.terms if rules.summation is Summation.FUSED and rules.terms else extent
    steps = max(1, -(-extent // max(terms, 1)))
    short = steps * terms - extent

    def split(x: Floats) -> Floats:
        if short:
            x = np.pad(x, ((0, 0), (0, 0), (0, short)))
        return np.ascontiguousarray(np.moveaxis(x.reshape(*x.shape[:2], steps, terms), 2, 0))

    low_a, low_b = split(left.lower), split(right.lower)
    some = (low_a != 0.0).any(axis=3)
    if left.certain and right.certain:
        low = high = low_a @ low_b.swapaxes(2, 3)
    else:
        high_a = low_a if left.certain else split(left.upper)
        high_b = low_b if right.certain else split(right.upper)
        some = some | (high_a != 0.0).any(axis=3)
        middle_a, middle_b = 0.5 * (low_a + high_a), 0.5 * (low_b + high_b)
        middle = middle_a @ middle_b.swapaxes(2, 3)
        radius = np.zeros_like(middle)
        if not left.certain:
            radius += (0.5 * (high_a - low_a)) @ np.maximum(np.abs(low_b), np.abs(high_b)).swapaxes(
                2, 3
            )
        if not right.certain:
            radius += np.abs(middle_a) @ (0.5 * (high_b - low_b)).swapaxes(2, 3)
        # What rounding in float64 does to the two is within `slack` of the caller, whose sizes are greater.
        low, high = middle - radius, middle + radius
    if rules.summation is not Summation.FUSED:
        terms_of_row = ((left.lower != 0.0) | (left.upper != 0.0)).sum(axis=2)
        return low, high, extent, np.maximum(1, terms_of_row).astype(np.int32)
    return low, high, steps, some.sum(axis=0).astype(np.int32)


def _grid(left: Factor, right: Factor, start: Ends | None) -> Integers:
    """The exponent of a power of two that divides every term and the accumulator."""
    least = (
        left.place.min(axis=2, initial=_FAR)[:, :, None]
        + right.place.min(axis=2, initial=_FAR)[:, None, :]
    )
    if start is None:
        return np.asarray(least)
    low, high = _finite(start)
    same = low == high
    inner = np.where((low < 0) != (high < 0), 0.0, np.minimum(np.abs(low), np.abs(high)))
    coarse = np.maximum(exponent_of(inner), np.int32(-126)) - np.int32(23)
    place = np.where(same, np.where(low == 0.0, _FAR, place_of(low)), coarse)
    return np.asarray(np.minimum(least, place))


def _errors(
    left: Factor,
    right: Factor,
    low: Floats,
    high: Floats,
    counts: Integers,
    begin_low: Floats | float,
    begin_high: Floats | float,
    grid: Floats,
    size: Floats,
    rules: Instruction,
    steps: int,
) -> Floats:
    """How far any way may be from the exact sum."""
    fused = rules.summation is Summation.FUSED
    nearest = not fused or rules.result is Result.FLOAT32_NEAREST
    bits = np.int32(13 if rules.result is Result.FLOAT32_13 else 23)
    top, bottom = np.maximum(high, 0.0), np.maximum(-low, 0.0)
    if len(low) > 1:
        top = np.cumsum(np.sort(top, axis=0)[::-1], axis=0)
        bottom = np.cumsum(np.sort(bottom, axis=0)[::-1], axis=0)
    most = np.maximum(
        top + np.maximum(begin_high, 0.0), bottom + np.maximum(-np.asarray(begin_low), 0.0)
    )
    if not fused:  # each product is a step, and partial sums may be as great as all of one sign
        most = size[None]
    count = counts[:, :, None].astype(np.float64)
    terms = left.exponent[:, :, None] + right.exponent[:, None, :]
    terms = np.maximum(terms, np.int32(rules.exponent_floor if fused else -2000))
    least, depths = (
        left.place.min(axis=2, initial=_FAR)[:, :, None]
        + right.place.min(axis=2, initial=_FAR)[:, None, :],
        (_depths(left), _depths(right)),
    )
    reach = np.maximum(np.abs(begin_low), np.abs(begin_high))
    start_is_zero = not np.any(reach)
    start_exponent = np.broadcast_to(exponent_of(np.asarray(reach)), size.shape)
    start_place = np.where(start_exponent <= NOTHING, _FAR, np.maximum(start_exponent, -126) - 23)
    error = (count + 1) * 2.0**-22 * size
    for _ in range(_TRIES):
        exponent = np.maximum(exponent_of(most + error), np.int32(-126))
        unit = power(np.clip(exponent - bits, -1000, 900))
        unit = np.where(unit > grid, unit if not nearest else 0.5 * unit, 0.0)
        last, first = unit[-1], unit[0]
        if fused:
            turn = np.arange(len(unit)).reshape(-1, 1, 1, 1)
            chain = np.where(turn < counts[None, :, :, None], unit, 0.0).sum(axis=0)
        else:
            chain = count * last
            first = last
        half = last if nearest else 0.5 * last
        # With an accumulator there is a join more: it may be added to the one chain, or to the last of many.
        joined = 0.0 if start_is_zero else half
        found = np.maximum(chain + joined, count * first + count * half)
        if fused:
            greatest = np.maximum(terms, exponent[-1])
            cut = greatest - np.int32(rules.fraction_bits)
            loss = _cut(cut, least, depths, left.lower.shape[2], rules.group)
            lost = power(np.clip(terms - np.int32(rules.fraction_bits), -1000, 900))
            found = found + loss + np.where(lost > grid, count * lost, 0.0)
            # What was given to start from may have more bits than a step returns. It is cut once.
            given = np.maximum(terms, start_exponent) - np.int32(rules.fraction_bits)
            found = found + np.where(start_place < given, power(np.clip(given, -1000, 900)), 0.0)
        if (found <= error).all():
            return np.asarray(found)
        error = np.maximum(error, 1.5 * found)
    return np.where(found <= error, found, np.inf)


def _depths(factor: Factor) -> Integers:
    """How many elements of a row lie less than d places above its least, [depths + 1, tiles, rows]."""
    least = factor.place.min(axis=2, initial=_FAR)
    above = np.clip(factor.place - least[:, :, None], 0, _DEPTHS)
    some = factor.place < _FAR // 2
    tiles, rows, _ = factor.place.shape
    index = (np.arange(tiles)[:, None, None] * rows + np.arange(rows)[None, :, None]) * (
        _DEPTHS + 1
    )
    flat = np.bincount((index + above)[some], minlength=tiles * rows * (_DEPTHS + 1))
    counts = np.cumsum(flat.reshape(tiles, rows, _DEPTHS + 1), axis=2)
    shifted = np.concatenate([np.zeros((tiles, rows, 1), dtype=counts.dtype), counts], axis=2)
    # Beyond the depths that are told apart every element may be one.
    shifted[:, :, _DEPTHS:] = counts[:, :, -1:]
    return shifted[:, :, : _DEPTHS + 1].astype(np.int32)


def _cut(
    place: Integers, least: Integers, depths: tuple[Integers, Integers], extent: int, group: int
) -> Floats:
    """What cutting terms below a place takes away at most [tiles, rows, columns]."""
    deep = place - least
    found = np.zeros(deep.shape)
    tile, row, column = np.nonzero(deep > 0)
    if not tile.size:
        return found
    below = deep[tile, row, column]
    a, b = depths[0][tile, row], depths[1][tile, column]
    count = np.full(tile.size, extent, dtype=np.int32)
    lanes = np.arange(tile.size)
    for share in range(_SHARES + 1):  # any split of the places bounds the count; a few are tried
        mine = below * share // _SHARES
        other = np.minimum(below - mine, _DEPTHS)
        count = np.minimum(count, a[lanes, np.minimum(mine, _DEPTHS)] + b[lanes, other])
    count = np.minimum(count, -(-extent // group))
    found[tile, row, column] = count * power(np.clip(place[tile, row, column], -1000, 900))
    return found


def _finished(
    down: Floats, up: Floats, start: Ends | None, left: Factor, right: Factor, *, outward: bool
) -> Ends:
    """Ends as float32, with what NaN and infinities do."""
    low, high = _float32_inside(down, up) if outward else _float32_nearest(down, up)
    nan = np.zeros(low.shape, dtype=bool)
    only = np.zeros(low.shape, dtype=bool)
    anything = np.zeros(low.shape, dtype=bool)
    if left.nan.any() or right.nan.any():
        rows, columns = np.asarray(left.nan.any(axis=2)), np.asarray(right.nan.any(axis=2))
        only |= rows[:, :, None] | columns[:, None, :]
    above = below = np.zeros(low.shape, dtype=bool)
    if left.infinite is not None or right.infinite is not None:
        above, below, bad = _infinities(left, right)
        only |= bad | (above & below)
        if not (
            left.certain and right.certain
        ):  # infinity times what may be zero, or of either sign
            reached = [
                np.zeros(side.lower.shape[:2], dtype=bool)
                if side.infinite is None
                else np.asarray((side.infinite != 0).any(axis=2))
                for side in (left, right)
            ]
            anything |= reached[0][:, :, None] | reached[1][:, None, :]
        low, high = np.where(above, np.inf, low), np.where(above, np.inf, high)
        low, high = np.where(below, -np.inf, low), np.where(below, -np.inf, high)
    if start is not None:
        lost = np.isinf(start.low) | np.isinf(start.high)
        point = lost & (start.low == start.high)
        only |= point & np.where(start.low > 0, below, above)
        low = np.where(lost, np.where(point, start.low, -np.inf), low)
        high = np.where(lost, np.where(point, start.high, np.inf), high)
        nan |= start.nan
        only |= np.isnan(start.low)
    # An overflow on the way may meet the other infinity.
    nan |= np.isinf(low) & np.isinf(high) & (low != high)
    for side, axis in ((left.anything, 2), (right.anything, 1)):
        if side is not None:
            anything |= np.asarray(np.expand_dims(side, axis))
    low, high = np.where(anything, -np.inf, low), np.where(anything, np.inf, high)
    nan, only = nan | anything, only & ~anything
    low, high = np.where(only, np.nan, low), np.where(only, np.nan, high)
    return Ends(low, high, nan | only)


def _infinities(left: Factor, right: Factor) -> tuple[Booleans, Booleans, Booleans]:
    """Where terms are +inf, -inf, and infinity times zero."""

    def parts(side: Factor) -> tuple[Floats, Floats, Floats, Floats]:
        sign = np.sign(side.lower)
        infinite = np.zeros_like(sign) if side.infinite is None else np.sign(side.infinite)
        whole = np.where(infinite != 0.0, infinite, sign)
        zero = (whole == 0.0) & ~side.nan
        return (
            np.maximum(whole, 0.0),
            np.maximum(-whole, 0.0),
            np.abs(infinite),
            zero.astype(np.float64),
        )

    up_a, down_a, inf_a, zero_a = parts(left)
    up_b, down_b, inf_b, zero_b = parts(right)

    def met(x: Floats, y: Floats) -> Booleans:
        return np.asarray((x @ y.swapaxes(1, 2)) > 0.0)

    up = (
        met(up_a * inf_a, up_b)
        | met(down_a * inf_a, down_b)
        | met(up_a, up_b * inf_b)
        | met(down_a, down_b * inf_b)
    )
    down = (
        met(up_a * inf_a, down_b)
        | met(down_a * inf_a, up_b)
        | met(up_a, down_b * inf_b)
        | met(down_a, up_b * inf_b)
    )
    return up, down, met(inf_a, zero_b) | met(zero_a, inf_b)


def _finite(start: Ends) -> tuple[Floats, Floats]:
    return (
        np.where(np.isfinite(start.low), start.low, 0.0),
        np.where(np.isfinite(start.high), start.high, 0.0),
    )


def _float32_inside(down: Floats, up: Floats) -> tuple[Floats, Floats]:
    """The float32 numbers that are nearest to the ends from inside, since results are float32 themselves."""
    with np.errstate(over="ignore", invalid="ignore"):
        near_low, near_high = down.astype(np.float32), up.astype(np.float32)
        near_low = np.where(near_low < down, np.nextafter(near_low, np.float32(np.inf)), near_low)
        near_high = np.where(
            near_high > up, np.nextafter(near_high, np.float32(-np.inf)), near_high
        )
    low, high = near_low.astype(np.float64) + 0.0, near_high.astype(np.float64) + 0.0
    # No float32 lies between two ends that rounding in float64 brought too near to each other.
    return np.minimum(low, high), np.maximum(low, high)


def _float32_nearest(down: Floats, up: Floats) -> tuple[Floats, Floats]:
    with np.errstate(over="ignore", invalid="ignore"):
        return down.astype(np.float32).astype(np.float64), up.astype(np.float32).astype(np.float64)


def _decoded_nan(
    codes: NDArray[np.integer],
    element: ScalarFormat,
    scales: NDArray[np.uint8] | None,
    scaling: Scaling | None,
) -> Booleans:
    """Which elements are NaN by their code or by their scale."""
    from flamia_ref.formats import decode

    bad = np.isnan(decode(codes, element, dtype=np.float64))
    if scales is None or scaling is None:
        return np.asarray(bad)
    lost = np.isnan(decode(scales, FORMATS[scaling.format], dtype=np.float64))
    return np.asarray(bad | np.repeat(lost, scaling.block, axis=0)[: len(codes)])
