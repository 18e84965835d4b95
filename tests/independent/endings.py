"""The end of a row: normalised output and lse from the accumulator, the base, the row sum and the sink."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tests.independent import factors, float32, sinks
from tests.independent.online import Online, whole
from tests.independent.scores import FUNCTIONS
from tests.independent.softmaxes import LN2

SMALLEST_SUM = float32.nearest(Fraction(1, 10**30))
LOG2_E = factors.LOG2_E_FLOAT32


@dataclass(frozen=True, kw_only=True)
class End:
    """o before output rounding, lse, and the m and l that are traced; float32 bits."""

    o: list[int]
    lse: int
    m: int
    l: int  # noqa: E741 (the row sum's name in all descriptions)


def finish(row: Online, accumulator: Sequence[int], *, sink: int | None, is_dead: bool) -> End:
    """The end of a row; ``is_dead``: it sees no key."""
    if row.softmax["base"] == "scaled_max":
        return _finish_scaled(row, accumulator, sink, is_dead)
    m, total = row.m, row.sum.total
    if row.softmax["base"] == "natural_max":
        o = [0] * len(accumulator) if is_dead else normalised(row, accumulator, total)
        return End(o=o, lse=natural_lse(row, m, total), m=m, l=total)
    is_integer = row.softmax["base"] == "integer_max"
    nothing = [0] * len(accumulator)
    if sink is not None and not sinks.is_absent(sink):
        add = sinks.add_to_integer if is_integer else sinks.add_to_raw
        sunk = add(row, accumulator, sink)
        m, total, accumulator = sunk.m, sunk.l, sunk.accumulator
    elif is_dead or (is_integer and m == float32.MINUS_INFINITY):
        return End(o=nothing, lse=float32.MINUS_INFINITY, m=m, l=total)
    lost = float32.is_nan(total) or float32.is_zero(total)
    if not is_integer and lost and row.softmax["lse"] != "scale_fma":
        lse = float32.MINUS_INFINITY
    else:
        lse = natural_lse(row, m, total)
    o = nothing if is_dead else normalised(row, accumulator, total)
    return End(o=o, lse=lse, m=m, l=total)


def _finish_scaled(row: Online, accumulator: Sequence[int], sink: int | None, is_dead: bool) -> End:
    m, total = row.m, row.sum.total
    negative = bool(total & float32.SIGN) and not float32.is_nan(total)
    if is_dead or float32.is_zero(total) or negative:
        lse = float32.MINUS_INFINITY if sink is None else sink
        return End(o=[0] * len(accumulator), lse=lse, m=m, l=total)
    if sink is None:
        lse, o = natural_lse(row, m, total), normalised(row, accumulator, total)
    else:
        sunk = sinks.add_to_scaled(row, sink)
        lse, o = sunk.lse, [float32.multiply(x, sunk.inverse) for x in accumulator]
    return End(o=o, lse=lse, m=m, l=total)


def normalised(row: Online, accumulator: Sequence[int], total: int) -> list[int]:
    """O over the row sum."""
    kind = row.softmax["normalisation"]
    reciprocal = FUNCTIONS["reciprocal", row.softmax["reciprocal"]]
    if kind == "quotient":
        return [float32.divide(x, total) for x in accumulator]
    if kind == "clamped_quotient":
        divisor = float32.ONE if float32.exceeds(float32.ONE, total) else total
        return [float32.divide(x, divisor) for x in accumulator]
    if kind == "division":
        inverse = float32.divide(float32.ONE, float32.maxnum(total, SMALLEST_SUM))
    elif kind == "zero_safe_reciprocal":
        safe = float32.is_nan(total) or float32.is_zero(total)
        inverse = reciprocal(float32.ONE if safe else total)
    elif kind == "zeroing_reciprocal":
        lost = float32.is_nan(total) or float32.is_zero(total)
        inverse = 0 if lost else reciprocal(total)
    elif kind == "reciprocal":
        inverse = reciprocal(total)
    else:
        raise ValueError(f"normalisation {kind!r}: none is known by that name")
    return [float32.multiply(x, inverse) for x in accumulator]


def natural_lse(row: Online, m: int, total: int) -> int:
    """lse in one of its forms."""
    if row.softmax["lse"] == "natural_sum":
        return float32.add(m, FUNCTIONS["log", row.softmax["log2"]](total))
    form = row.softmax["lse"]
    if form in ("factor_fma", "scale_fma"):
        scaled = float32.multiply(total, float32.nearest(Fraction(1, 2**row.units)))
        log = float32.multiply(FUNCTIONS["log2", row.softmax["log2"]](scaled), LN2)
        factor = row.natural if form == "scale_fma" else float32.multiply(row.c, LN2)
        return float32.fused_multiply_add(m, factor, log)
    log2 = FUNCTIONS["log2", row.softmax["log2"]](total)
    units = whole(row.units)
    if form == "log2_sum":
        base = float32.subtract(m, units) if row.units else m
        return float32.multiply(float32.add(base, log2), LN2)
    if form == "log2_fma":
        log2 = float32.subtract(log2, units) if row.units else log2
        return float32.multiply(float32.fused_multiply_add(m, row.c, log2), LN2)
    if form != "natural_fma":
        raise ValueError(f"lse {form!r}: none is known by that name")
    lse = float32.fused_multiply_add(m, LN2, float32.multiply(log2, LN2))
    return float32.subtract(lse, float32.multiply(units, LN2))


def combine(
    parts: Sequence[End], kind: str, row: Online, sink: int | None
) -> tuple[list[int], int]:
    """(o, lse) of a row from those of its splits, ascending by key.

    ``row`` says which special functions; ``sink`` counts with "divide_last" only.
    """
    if kind == "divide_last":
        return _divide_last(parts, row, sink)
    if kind not in ("every_split", "scales_first"):
        raise ValueError(f"combine {kind!r}: none is known by that name")
    if all(part.lse == float32.MINUS_INFINITY for part in parts):
        return [0] * len(parts[0].o), float32.MINUS_INFINITY
    largest = _largest([part.lse for part in parts])
    base = float32.negate(float32.multiply(_safe(largest), LOG2_E))
    exp2 = FUNCTIONS["exp2", row.softmax["exp2"]]
    weights = [exp2(float32.fused_multiply_add(part.lse, LOG2_E, base)) for part in parts]
    total = _ascending(weights)
    log2 = FUNCTIONS["log2", row.softmax["log2"]](total)
    lse = float32.add(float32.multiply(log2, LN2), largest)
    if kind == "every_split":
        inverse = float32.divide(float32.ONE, total)
        shares = [float32.multiply(x, inverse) for x in weights]
        return _added(parts, shares), lse
    inverse = 0
    if not (float32.is_zero(total) or float32.is_nan(total)):
        inverse = float32.divide(float32.ONE, total)
    return _weighted(parts, [float32.multiply(x, inverse) for x in weights]), lse


def _divide_last(parts: Sequence[End], row: Online, sink: int | None) -> tuple[list[int], int]:
    values = [part.lse for part in parts] + ([] if sink is None else [sink])
    largest = float32.maxnum(_largest(values), float32.MINUS_INFINITY)
    if largest == float32.MINUS_INFINITY:
        return [0] * len(parts[0].o), largest
    exp2 = FUNCTIONS["exp2", row.softmax["exp2"]]

    def weight(lse: int) -> int:
        if float32.is_nan(lse):
            return 0
        x = float32.multiply(float32.subtract(lse, largest), LOG2_E)
        return 0 if float32.is_nan(x) else exp2(x)

    weights = [weight(part.lse) for part in parts]
    total = _ascending([*([] if sink is None else [weight(sink)]), *weights])
    inverse = float32.divide(float32.ONE, float32.maxnum(total, SMALLEST_SUM))
    sums = _weighted(parts, weights)
    log2 = FUNCTIONS["log2", row.softmax["log2"]](total)
    lse = float32.add(largest, float32.multiply(log2, LN2))
    return [float32.multiply(x, inverse) for x in sums], lse


def _largest(values: Sequence[int]) -> int:
    """The largest, a NaN ignored beside a number; of NaN alone NaN."""
    result = values[0]
    for x in values[1:]:
        result = float32.maxnum(result, x)
    return result


def _ascending(values: Sequence[int]) -> int:
    total = 0
    for x in values:
        total = float32.add(total, x)
    return total


def _safe(largest: int) -> int:
    """0 for -inf, which is no base to subtract."""
    return 0 if largest == float32.MINUS_INFINITY else largest


def _added(parts: Sequence[End], weights: Sequence[int]) -> list[int]:
    """The sum of the parts' o by fused multiply-adds."""
    result = [0] * len(parts[0].o)
    for part, weight in zip(parts, weights, strict=True):
        result = [
            float32.fused_multiply_add(weight, x, y) for x, y in zip(part.o, result, strict=True)
        ]
    return result


def _weighted(parts: Sequence[End], weights: Sequence[int]) -> list[int]:
    """The sum of the parts' o by fused multiply-adds, those with a weight above 0."""
    result = [0] * len(parts[0].o)
    for part, weight in zip(parts, weights, strict=True):
        if float32.exceeds(weight, 0):
            result = [
                float32.fused_multiply_add(weight, x, total)
                for x, total in zip(part.o, result, strict=True)
            ]
    return result
