"""How well a mistaken tensor agrees with a given one: what it explains, and what passes and would change."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref.golden.bitwise import values
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.stage import View

Bools = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]

UNITS = 2.0
"""Units in the last place that a float may be away from the mistaken value."""
_QUARTER = 0.25
_FRACTION = {View.F32: 23, View.BF16: 7}


class Counts(NamedTuple):
    """Elements that fail, those of them that a mistake explains, and passing ones that it would change."""

    failing: int
    explained: int
    contradicted: int

    def __add__(self, other: object) -> "Counts":
        if not isinstance(other, Counts):
            return NotImplemented
        return Counts(*(one + two for one, two in zip(self, other, strict=True)))

    @property
    def score(self) -> float:
        """What is explained of the failing elements, less what is contradicted: at most 1."""
        return (self.explained - self.contradicted) / self.failing if self.failing else 0.0


def units(magnitudes: Doubles, view: View) -> Doubles:
    """Return a unit in the last place of each number, of no smaller one than the root mean square of all.

    The sums that floats come from are rounded relative to the sum of magnitudes, not to what is left of them.
    """
    finite = magnitudes[np.isfinite(magnitudes)]
    with np.errstate(over="ignore"):
        typical = float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0
    floor = typical if np.isfinite(typical) else 0.0
    with np.errstate(invalid="ignore"):
        _, exponent = np.frexp(np.maximum(magnitudes, max(floor, 2.0**-126)))
    found: Doubles = np.ldexp(1.0, exponent - 1 - _FRACTION[view])
    return found


def far(expected: Tensor, given: Tensor, view: View) -> Bools:
    """Return which floats are so far from the expected ones that no order of additions is the reason."""
    want, have = values(expected, view), values(given, view)
    with np.errstate(invalid="ignore"):
        apart = np.abs(have - want) > 2 * UNITS * units(np.abs(want), view)
    found: Bools = apart | (np.isnan(have) != np.isnan(want))
    found |= np.isinf(want) & (have != want)
    return found


def agreement(
    expected: Tensor, given: Tensor, mistaken: Tensor, failing: Bools, considered: Bools, view: View
) -> Counts:
    """Count, in bits of one view and one shape. `considered`: the elements that count at all."""
    same = given == mistaken
    passing = considered & ~failing
    if view not in (View.F32, View.BF16):
        return Counts(int(failing.sum()), int((same & failing).sum()), int((passing & ~same).sum()))
    want, have, other = (values(one, view) for one in (expected, given, mistaken))
    same |= np.isnan(have) & np.isnan(other)
    with np.errstate(invalid="ignore"):
        distance = np.abs(have - other)
        near = distance <= UNITS * units(np.abs(other), view)
        nearer = near & (distance < _QUARTER * np.abs(have - want))
    return Counts(
        int(failing.sum()),
        int(((same | nearer) & failing).sum()),
        int((passing & ~(same | near)).sum()),
    )
