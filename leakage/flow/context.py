"""What an analysis carries: the sets of sources, what it assumed and how often, which primitives it met."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from flamia_ref.leakage.flow.sets import Sets


class Assumption(StrEnum):
    """What an analysis takes for granted where it is not strict."""

    ZERO_TIMES_FINITE = "zero_times_finite"
    """A known 0 times x is 0: x is neither infinite nor NaN, and the sign of that zero is not looked at."""
    ZERO_OVER_NONZERO = "zero_over_nonzero"
    """A known 0 over x is 0: x is neither 0 nor NaN."""
    INFINITY_PLUS_FINITE = "infinity_plus_finite"
    """A known infinity plus or minus x is that infinity: x is neither NaN nor the other infinity."""
    HUGE_PLUS_MODERATE = "huge_plus_moderate"
    """A known number of at least half the largest finite one, plus or minus x, is that number: x is below half of its
    last place, 2^102 in float32. So jax.nn masks scores; numbers like -1e30 are not taken so."""
    INFINITY_AGAINST_FINITE = "infinity_against_finite"
    """A known infinity compared with x: x is neither NaN nor infinite."""
    NO_SPECIAL = "no_special"
    """A value that a test for NaN, infinity or negative zero is made of is none of these."""


class Refused(ValueError):
    """A program does what no analysis of it can follow, such as calling back to Python."""


@dataclass(slots=True, eq=False)
class Context:
    """The state of one analysis.

    Attributes:
        sets: the sets of sources.
        strict: whether nothing is assumed of values.
        fine: whether bounds of numbers are followed too, which costs time and is needed for integer arithmetic that
            aligns and clips.
        assumed: how often each assumption was used, counted in elements.
        met: how many equations of each primitive were met.
        unknown: how many of those have no rule: all their results depend on all their operands.
    """

    sets: Sets
    strict: bool = False
    fine: bool = False
    assumed: Counter[Assumption] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)
