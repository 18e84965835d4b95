"""What an element of a tensor was computed from: parents, the largest parts of a sum, the value before rounding."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flamia_ref.golden.bitwise import values
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.stage import View

Index = tuple[int, ...]
Parents = tuple[tuple[str, Index], ...]

LARGEST = 5
"""Parts of a sum that are named."""
_FRACTION = {View.BF16: 7, View.F32: 23}


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One part of a sum: which one, and what it adds."""

    which: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """Where an element comes from.

    `how` says it in the words of the recipe, `part` is the part of the recipe that decides it.
    `parents` are tensors and indices, the one that matters most first. `terms` are the largest parts
    of a sum of `count`, whose value in float64 is `total`. `before` is the value before it was rounded
    to the tensor's format, in units of its scale; None where it does not follow from one element of
    the pack.
    """

    how: str
    part: str = ""
    parents: tuple[tuple[str, Index], ...] = ()
    terms: tuple[Term, ...] = ()
    count: int = 0
    total: float | None = None
    before: float | None = None


def distance(before: float, view: View) -> float | None:
    """Return how far a value is from the next boundary of rounding, in steps of the format: 0 on it, 1/2 on a value.

    None beyond the largest value, and for a value that is no number.
    """
    if not np.isfinite(before):
        return None
    if view in _FRACTION:
        _, exponent = np.frexp(max(abs(before), 2.0**-126))
        step = 2.0 ** (int(exponent) - 1 - _FRACTION[view])
        return float(abs(abs(before) / step % 1 - 0.5))
    if view in (View.F8_E4M3, View.F4_E2M1):
        codes = np.arange(127 if view is View.F8_E4M3 else 8, dtype=np.uint8)
        table = values(codes, view)
        at = int(np.searchsorted(table, abs(before), side="right"))
        if at == len(table):
            return None
        low, high = table[at - 1], table[at]
        return float(abs((abs(before) - low) / (high - low) - 0.5))
    return None


def largest(parts: Tensor, which: Callable[[int], str]) -> tuple[tuple[Term, ...], float]:
    """The parts of a sum that are largest in magnitude, and the sum."""
    order = np.argsort(-np.nan_to_num(np.abs(parts), nan=np.inf), kind="stable")[:LARGEST]
    with np.errstate(all="ignore"):
        total = float(parts.sum())
    return tuple(Term(which=which(int(at)), value=float(parts[at])) for at in order), total
