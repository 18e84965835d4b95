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
DIFFERENT = 3
"""How many different numbers, other than 0, a mistake must explain: elements that are all 0 agree with any that loses
them."""
_QUARTER = 0.25
_FRACTION = {View.F32: 23, View.BF16: 7}


class Counts(NamedTuple):
    """Elements that fail, those of them that a mistake explains, and passing ones that it would change.

    `values`: different numbers other than 0 that the explained elements hold, some of them; `vanished`: that were
    expected where they hold 0.
    """

    failing: int
    explained: int
    contradicted: int
    values: frozenset[float] = frozenset()
    vanished: frozenset[float] = frozenset()

    def __add__(self, other: object) -> "Counts":
        if not isinstance(other, Counts):
            return NotImplemented
        return Counts(
            self.failing + other.failing,
            self.explained + other.explained,
            self.contradicted + other.contradicted,
            self.values | other.values,
            self.vanished | other.vanished,
        )

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
    want, have, other = (values(one, view) for one in (expected, given, mistaken))
    if view not in (View.F32, View.BF16):
        explained, contradicted = same & failing, passing & ~same
        if view in (View.F8_E8M0, View.F8_UE4M3):
            # A power of two says as much as another: what counts is how many scales are explained.
            places = frozenset(float(at) for at in np.flatnonzero(explained)[:DIFFERENT])
            return Counts(int(failing.sum()), int(explained.sum()), int(contradicted.sum()), places)
    else:
        same |= np.isnan(have) & np.isnan(other)
        with np.errstate(invalid="ignore"):
            distance = np.abs(have - other)
            near = distance <= UNITS * units(np.abs(other), view)
            nearer = near & (distance < _QUARTER * np.abs(have - want))
        explained, contradicted = (same | nearer) & failing, passing & ~(same | near)
    return Counts(
        int(failing.sum()),
        int(explained.sum()),
        int(contradicted.sum()),
        _some(have[explained]),
        _some(want[explained & (have == 0)]),
    )


def _some(numbers: Doubles) -> frozenset[float]:
    """Up to `DIFFERENT` of the numbers that are not 0 or NaN."""
    found = np.unique(numbers[(numbers != 0) & ~np.isnan(numbers)])
    return frozenset(float(one) for one in found[:DIFFERENT])
