"""A sink: a logit of each query head that takes part in the row sum and has no value."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.independent import factors, float32
from tests.independent.online import Online, whole
from tests.independent.scores import FUNCTIONS
from tests.independent.softmaxes import LN2, shift_by_difference

LOG2_E = factors.LOG2_E_FLOAT32
Matrix = list[list[int]]


def is_absent(sink: int | None) -> bool:
    """Whether there is no sink, or one that has no weight."""
    return sink is None or sink == float32.MINUS_INFINITY


@dataclass(frozen=True, kw_only=True)
class Sunk:
    """A row's base and row sum with the sink, and O's accumulator in their units."""

    m: int
    l: int  # noqa: E741 (the row sum's name in all descriptions)
    accumulator: list[int]


def split(sink: int, exp2: str) -> tuple[int, int, int]:
    """(u, n, E): the sink in log2 units, and 2**u as E * 2**n."""
    u = float32.multiply(sink, LOG2_E)
    n = float32.ceiling(u)
    n = 0 if float32.is_zero(n) else n
    return u, n, FUNCTIONS["exp2", exp2](float32.subtract(u, n))


def add_to_integer(row: Online, accumulator: Sequence[int], sink: int) -> Sunk:
    """With an integer base, which follows the sink where that is larger."""
    m, total, units = row.m, row.sum.total, row.units
    _, n, e = split(sink, row.softmax["exp2"])
    if m == float32.MINUS_INFINITY:
        return Sunk(m=n, l=float32.shift(e, units), accumulator=[0] * len(accumulator))
    # A NaN m stays.
    new = n if float32.exceeds(n, m) else m
    old_shift = shift_by_difference(m, new)
    own = shift_by_difference(n, new, units)(e)
    return Sunk(
        m=new,
        l=float32.add(old_shift(total), own),
        accumulator=[old_shift(x) for x in accumulator],
    )


def add_to_raw(row: Online, accumulator: Sequence[int], sink: int) -> Sunk:
    """FlashAttention-4: onto the row sum."""
    m, total, units = row.m, row.sum.total, row.units
    if m == float32.MINUS_INFINITY:
        base = float32.multiply(sink, float32.divide(LOG2_E, row.c))
        return Sunk(m=base, l=float32.shift(float32.ONE, units), accumulator=list(accumulator))
    x = float32.fused_multiply_add(sink, LOG2_E, float32.negate(float32.multiply(m, row.c)))
    if units:
        x = float32.add(x, whole(units))
    own = FUNCTIONS["exp2", row.softmax["exp2"]](x)
    return Sunk(m=m, l=float32.add(total, own), accumulator=list(accumulator))


@dataclass(frozen=True, kw_only=True)
class ScaledSink:
    """cuDNN: the row sum relative to the larger of base and sink, and what follows from it."""

    lse: int
    inverse: int


def add_to_scaled(row: Online, sink: int) -> ScaledSink:
    """The lse and the factor of O of a row that is not dead."""
    exp2 = FUNCTIONS["exp2", row.softmax["exp2"]]
    natural = float32.multiply(row.m, LN2)
    largest = float32.maxnum(natural, sink)

    def relative(x: int) -> int:
        return exp2(float32.multiply(float32.subtract(x, largest), LOG2_E))

    factor = relative(natural)
    own = float32.shift(relative(sink), row.units)
    total = float32.fused_multiply_add(row.sum.total, factor, own)
    log2 = FUNCTIONS["log2", row.softmax["log2"]](total)
    lse = float32.subtract(
        float32.fused_multiply_add(log2, LN2, largest),
        float32.multiply(whole(row.units), LN2),
    )
    return ScaledSink(lse=lse, inverse=float32.divide(factor, total))


def gradient(terms: Sequence[Sequence[Sequence[int]]]) -> int:
    """dsink of a head from the terms [document][query tile][row]: their sum, negated."""
    total = 0
    for document in terms:
        for tile in document:
            part = 0
            for x in tile:
                part = float32.add(part, x)
            total = float32.add(total, part)
    return float32.negate(total)
