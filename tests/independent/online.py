"""The base of a row and the exponentials relative to it, one key tile after another.

A column of a tile is the float32 bits of its score S', or None where it is selected out.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any

from tests.independent import float32
from tests.independent.row_sums import Factor, Rescaling, RowSum, Shift
from tests.independent.scores import FUNCTIONS
from tests.independent.softmaxes import shift_by_difference

LOWEST = 0xFF7FFFFF  # -3.4028235e38
Columns = Sequence[int | None]


def whole(x: int) -> int:
    """float32 bits of an integer."""
    return float32.nearest(Fraction(x))


@lru_cache(maxsize=1 << 14)
def rounded_up(score: int, c: int) -> int:
    """n = ceil(S' c): NaN for NaN and +inf, +0 for zero."""
    t = float32.multiply(score, c)
    if float32.is_nan(t) or t == float32.INFINITY:
        return float32.NAN
    return float32.ceiling(t)


def argument(score: int, c: int, offset: int, form: str) -> int:
    """S' c + offset, in one rounding, or in two where the form is "unfused"."""
    if form == "unfused":
        return float32.add(float32.multiply(score, c), offset)
    return float32.fused_multiply_add(score, c, offset)


class Online(ABC):
    """The state of a row: its base m, in the units of its kind, and its row sum."""

    start = float32.MINUS_INFINITY

    def __init__(self, softmax: dict[str, Any], c: int, natural: int = float32.ONE) -> None:
        """``softmax`` are a recipe's knobs; ``c`` is the float32 factor of the scores, ``natural`` without log2(e)."""
        self.softmax = softmax
        self.c = c
        self.natural = natural
        self.m = self.start
        self.units = int(softmax["p_offset"])
        self.threshold = int(softmax["rescale_threshold"])
        self.form = str(softmax["exp2_argument"])
        self.sum = RowSum(softmax["row_sum"])
        self.is_first = True

    @abstractmethod
    def move(self, columns: Columns) -> Rescaling:
        """Let the base follow the scores of a tile."""

    @abstractmethod
    def offset(self) -> int:
        """What is added to S' c in the exponent, where that is not split."""

    @property
    def saved_base(self) -> int:
        """The base that P of the last tile is relative to."""
        return self.m

    @property
    def base_in_log2(self) -> int:
        """The same in units of S' c."""
        return self.saved_base

    def powers(self, columns: Columns) -> list[int]:
        """P of the columns of a tile, relative to the base."""
        found = [
            0 if score is None else self._power(score, self._exp2(column))
            for column, score in enumerate(columns)
        ]
        if self.softmax["nan_p"] == "kept":
            return found
        return [0 if float32.is_nan(x) else x for x in found]

    def begin_with(self, sink: int) -> None:
        """Take a sink in before the first tile, in a base that does; it may come at the end instead."""
        del sink

    def _power(self, score: int, exp2: Any) -> int:
        return int(exp2(argument(score, self.c, self.offset(), self.form)))

    def _exp2(self, column: int) -> Any:
        emulated = self.softmax["emulated"]
        model = self.softmax["exp2"]
        if emulated is not None and emulated["first"] <= column < emulated["stop"]:
            period = emulated["period"]
            if column % period >= period - emulated["count"]:
                model = emulated["exp2"]
        return FUNCTIONS["exp2", model]


class IntegerBase(Online):
    """m is the largest n = ceil(S' c): rescaling is exact."""

    def move(self, columns: Columns) -> Rescaling:
        """NaN wins in the maximum, and zero is +0."""
        found = [rounded_up(score, self.c) for score in columns if score is not None]
        old = self.m
        self.m = self._new(old, found)
        self.is_first = False
        return Shift(old, self.m)

    def _new(self, old: int, found: Sequence[int]) -> int:
        if any(float32.is_nan(x) for x in (old, *found)):
            return float32.NAN
        finite = [float32.value(x) for x in found if x != float32.MINUS_INFINITY]
        if not finite:
            return old
        largest = max(finite)
        if old != float32.MINUS_INFINITY and largest - float32.value(old) <= self.threshold:
            return old
        if old != float32.MINUS_INFINITY:
            largest = max(largest, float32.value(old))
        return float32.nearest(largest)

    def offset(self) -> int:
        """-fl(m - p_offset)."""
        return float32.negate(float32.subtract(self.m, whole(self.units)))

    def _power(self, score: int, exp2: Any) -> int:
        n = rounded_up(score, self.c)
        if float32.is_nan(n) or float32.is_nan(self.m):
            return float32.NAN
        if n == float32.MINUS_INFINITY:
            return 0
        if self.form != "split":
            return super()._power(score, exp2)
        e = exp2(float32.fused_multiply_add(score, self.c, float32.negate(n)))
        return shift_by_difference(n, self.m, self.units)(e)


def _at_least(a: int, b: int) -> bool:
    """a >= b of float32; false where one is NaN."""
    return not (float32.is_nan(a) or float32.is_nan(b) or float32.exceeds(b, a))


class RawBase(Online):
    """FlashAttention-4: m is the largest S', kept while the new one is near."""

    @property
    def _safe(self) -> int:
        return 0 if self.m == float32.MINUS_INFINITY else self.m

    @property
    def saved_base(self) -> int:
        """0 where no score is above -inf."""
        return self._safe

    @property
    def base_in_log2(self) -> int:
        """fl(ms c)."""
        return float32.multiply(self._safe, self.c)

    def move(self, columns: Columns) -> Rescaling:
        """A NaN beside a number is ignored."""
        scores = [float32.MINUS_INFINITY if x is None else x for x in columns]
        largest = reduce(float32.maxnum, scores)
        old = self.m
        if self.is_first:
            self.is_first = False
            self.m = largest
            return Factor(float32.ONE)
        self.m = float32.maxnum(old, largest)
        exponent = float32.multiply(float32.subtract(old, self._safe), self.c)
        if _at_least(exponent, whole(-self.threshold)):
            self.m = old
            return Factor(float32.ONE)
        return Factor(FUNCTIONS["exp2", self.softmax["exp2"]](exponent))

    def offset(self) -> int:
        """fl(p_offset - fl(ms c)), or -fma(ms, c, -p_offset)."""
        if self.form == "fused_base":
            scaled = float32.fused_multiply_add(self._safe, self.c, whole(-self.units))
            return float32.negate(scaled)
        return float32.subtract(whole(self.units), self.base_in_log2)


class ScaledBase(Online):
    """cuDNN: m is the largest S' c from the lowest float32 on, kept while the new one is near."""

    start = LOWEST

    def move(self, columns: Columns) -> Rescaling:
        """A NaN beside a number is ignored, a subnormal counts as zero."""
        scores = [LOWEST if x is None else float32.flush(x) for x in columns]
        largest = reduce(float32.maxnum, scores)
        current = float32.maxnum(float32.multiply(largest, self.c), LOWEST)
        old = self.m
        self.is_first = False
        exp2 = FUNCTIONS["exp2", self.softmax["exp2"]]
        if old == LOWEST:
            self.m = current
            return Factor(exp2(LOWEST))
        if float32.exceeds(float32.subtract(current, old), whole(self.threshold)):
            self.m = current
        return Factor(exp2(float32.subtract(old, self.m)))

    def offset(self) -> int:
        """-fl(m - p_offset)."""
        return float32.negate(float32.subtract(self.m, whole(self.units)))


class NaturalBase(Online):
    """NVIDIA's reference: m is the largest S' in natural units, kept while the new one is near."""

    def begin_with(self, sink: int) -> None:
        """It is the base, and 1 the row sum."""
        self.m = sink
        self.sum.begin_with(float32.ONE)

    @property
    def _limit(self) -> int:
        """The threshold in natural units."""
        if self.softmax["threshold_unit"] == "natural":
            return whole(self.threshold)
        return float32.nearest(Fraction(self.threshold * math.log(2)))

    def move(self, columns: Columns) -> Rescaling:
        """A NaN wins."""
        scores = [x for x in columns if x is not None]
        largest = reduce(float32.maxnum, scores, float32.MINUS_INFINITY)
        if any(float32.is_nan(x) for x in scores):
            largest = float32.NAN
        old = self.m
        is_first = old == float32.MINUS_INFINITY
        if is_first or float32.exceeds(float32.subtract(largest, old), self._limit):
            self.m = largest
        distance = float32.subtract(old, self.m)
        if old == self.m or float32.is_nan(distance):
            return Factor(float32.ONE)
        return Factor(FUNCTIONS["exp", self.softmax["exp2"]](distance))

    def offset(self) -> int:
        """Nothing is added in log2 units."""
        raise NotImplementedError

    def _power(self, score: int, exp2: Any) -> int:
        return FUNCTIONS["exp", self.softmax["exp2"]](float32.subtract(score, self.m))


BASES: dict[str, type[Online]] = {
    "natural_max": NaturalBase,
    "integer_max": IntegerBase,
    "raw_max": RawBase,
    "scaled_max": ScaledBase,
}
"""The kinds of base by name."""
