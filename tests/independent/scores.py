"""What happens to S before the exponent: its factor, softmax_scale where it is no part of it, the soft cap."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from tests.independent import factors, float32, mufu, natural, polynomial
from tests.independent.operands import Matrix

Function = Callable[[int], int]

FUNCTIONS: dict[tuple[str, str], Function] = {
    ("exp2", "mufu.sm90"): mufu.exp2,
    ("log2", "mufu.sm90"): mufu.log2,
    ("reciprocal", "mufu.sm90"): mufu.reciprocal,
    ("tanh", "mufu.sm90"): cache(mufu.tanh),
    ("exp2", "polynomial3"): polynomial.exp2,
    ("exp2", "correct"): natural.exp2,
    ("log2", "correct"): natural.log2,
    ("exp", "correct"): natural.exp,
    ("log", "correct"): natural.log,
    ("tanh", "correct"): natural.tanh,
    ("reciprocal", "correct"): lambda x: float32.divide(float32.ONE, x),
}
"""The special functions by name and model."""

FACTORS: dict[str, Callable[[float], int]] = {
    "exact_product": factors.exact_product,
    "float64_product": factors.float64_product,
    "float32_product": factors.float32_product,
    "float32_scale": factors.float32_scale,
}


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The score stage of a recipe: S' and the soft cap's T from S; float32 bits."""

    softmax: dict[str, Any]
    softmax_scale: float
    softcap: float | None

    def factor(self, rounding: str) -> int:
        """c, with which S' becomes log2 units, by a ``score_factor``."""
        if self.softcap is not None and self.is_folded:
            return FACTORS[rounding](self.softcap)
        if self.softcap is not None or self.softmax["score"] == "scaled":
            return factors.LOG2_E_FLOAT32
        return FACTORS[rounding](self.softmax_scale)

    @property
    def is_folded(self) -> bool:
        """Whether a soft cap is in c, and not in S'."""
        return bool(self.softmax["softcap"] == "folded")

    @property
    def natural(self) -> int:
        """What S' is multiplied by to be in natural units, where no soft cap is in c."""
        if self.softcap is not None or self.softmax["score"] == "scaled":
            return float32.ONE
        return factors.rounded(self.softmax_scale)

    def capped(self, s: int) -> int:
        """T = tanh(S (softmax_scale / softcap))."""
        if self.softcap is None:
            raise ValueError("no soft cap: T exists only with one")
        if self.is_folded:
            scale, cap = (factors.rounded(x) for x in (self.softmax_scale, self.softcap))
            quotient = float32.divide(scale, cap)
        else:
            quotient = float32.nearest(Fraction(self.softmax_scale / self.softcap))
        return FUNCTIONS["tanh", self.softmax["tanh"]](float32.multiply(s, quotient))

    def score(self, s: int) -> int:
        """S'."""
        if self.softcap is not None and self.is_folded:
            return self.capped(s)
        if self.softcap is not None:
            return float32.multiply(float32.nearest(Fraction(self.softcap)), self.capped(s))
        if self.softmax["score"] == "scaled":
            return float32.multiply(s, factors.rounded(self.softmax_scale))
        return s

    def gradient_factor(self, s: int) -> int:
        """What dS is multiplied by: 1 - T * T, in one rounding."""
        t = self.capped(s)
        return float32.fused_multiply_add(float32.negate(t), t, float32.ONE)

    def score_matrix(self, s: Matrix) -> Matrix:
        """S' of all pairs."""
        return [[self.score(x) for x in row] for row in s]
