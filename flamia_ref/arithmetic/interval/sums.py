"""float32 sums of terms whose order and tree are not known, as intervals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flamia_ref import _float32
from flamia_ref.arithmetic.interval.operations import Operand, as_interval
from flamia_ref.arithmetic.interval.terms import Floats, exponent_of, place_of, power
from flamia_ref.arithmetic.interval.value import Interval

_ITERATIONS = 60
_LEAST, _KEPT = np.int32(-126), np.int32(23)


def total(x: Operand, axis: int = -1) -> Interval:
    """The sum along an axis by float32 additions to nearest, in any order and any tree of the terms.

    The result is the exact sum plus the error of each addition, half a unit in the last place of its result at
    most. A node of the tree with j terms is at most the sum of the j greatest positive terms, and at least that of
    the j least negative ones. Of n - 1 nodes at least j - 1 have j terms or fewer, so they err at most as one chain
    does, whose nodes have 2 to n terms. Where the terms' grid makes additions exact, nothing is added. Anything is
    possible where a sum may overflow or a term is infinite.

    Raises TypeError or ValueError for an axis that x does not have.
    """
    x = as_interval(x)
    axis = _float32.axis_of(axis, "x", len(x.shape))
    low, high = (np.moveaxis(end, axis, 0) for end in (x.lower, x.upper))
    nan = np.moveaxis(x.nan, axis, 0)
    only, may = np.isnan(low).any(axis=0), nan.any(axis=0)
    infinite = np.isinf(low) | np.isinf(high)
    low, high = (np.where(infinite | np.isnan(end), 0.0, end) for end in (low, high))
    count = low.shape[0]
    if count == 0:
        zero = np.zeros(low.shape[1:])
        return Interval(zero, zero, np.zeros(zero.shape, dtype=bool))
    top = np.cumsum(np.sort(np.maximum(high, 0.0), axis=0)[::-1], axis=0)
    bottom = np.cumsum(np.sort(np.maximum(-low, 0.0), axis=0)[::-1], axis=0)
    most = np.maximum(top, bottom)
    grid = _grid(low, high)
    size = np.maximum(np.abs(low), np.abs(high)).sum(axis=0)
    slack = np.where(size < grid * 2.0**53, 0.0, count * 2.0**-51 * size)
    error, found = slack, np.full(slack.shape, np.inf)
    for _ in range(_ITERATIONS):
        unit = power(np.maximum(exponent_of(most[1:] + error), _LEAST) - _KEPT)
        new = slack + np.where(unit > grid, 0.5 * unit, 0.0).sum(axis=0)
        found = np.where(np.isinf(found) & (new <= error), new, found)
        if np.isfinite(found).all():
            break
        error = np.maximum(error, new * 1.0625)
    given_up = infinite.any(axis=0) | ~(size + found < 2.0**127)
    down, up = low.sum(axis=0) - found, high.sum(axis=0) + found
    down, up = (np.where(given_up, 0.0, end) for end in (down, up))
    down = np.where(given_up, -np.inf, _to_float32(down, np.ceil))
    up = np.where(given_up, np.inf, _to_float32(up, np.floor))
    return Interval(np.where(only, np.nan, down), np.where(only, np.nan, up), may | given_up)


def _grid(low: Floats, high: Floats) -> Floats:
    """A power of two that divides every term, [...]."""
    least = np.where((low < 0) != (high < 0), 0.0, np.minimum(np.abs(low), np.abs(high)))
    last = np.maximum(exponent_of(least), _LEAST) - _KEPT
    place = np.where(low == high, place_of(low), last)
    return power(np.clip(place.min(axis=0), -1000, 900))


def _to_float32(x: Floats, inward: Callable[[Floats], Floats]) -> Floats:
    """The nearest float32 in the direction `inward`: results are float32 themselves."""
    place = power(np.maximum(exponent_of(x), _LEAST) - _KEPT)
    return np.asarray(inward(x / place) * place + 0.0)
