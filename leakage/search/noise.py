"""Kernels whose equal calls differ: a permutation test in place of bit identity."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.search.bases import EXACT_FAMILIES

REPEATS = 8  # of each of the two inputs: 6435 ways to split them, so p is 1.6e-4 at least
ALPHA = 0.01  # after Holm's correction

_MOST_ELEMENTS = 128  # that a test looks at, chosen without knowing which call is which

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Noisy:
    """The outputs whose bits differ between equal calls: those are not compared.

    Attributes:
        general: for any inputs.
        exact: for inputs whose every sum is exact, where the order of addition decides nothing.
    """

    general: frozenset[str] = frozenset()
    exact: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.general)

    def of(self, family: str) -> frozenset[str]:
        """The outputs that are not compared for inputs of a family."""
        return self.exact if family in EXACT_FAMILIES else self.general

    def more(self, names: Iterable[str], family: str) -> Noisy:
        """The same and other outputs, which were seen to differ for inputs of a family."""
        found = frozenset(names)
        exact = self.exact | found if family in EXACT_FAMILIES else self.exact
        return Noisy(general=self.general | found, exact=exact)


QUIET = Noisy()
"""Equal calls give equal bits."""


def p_value(one: Values, other: Values) -> float:
    """The share of all splits of the calls into two halves that are as far apart as the true one.

    `one`, `other`: float64 [repeats, elements], equally many repeats. How far apart two halves are is the largest
    t statistic of an element. The calls of equal inputs may come in any order; that is all that is assumed.
    """
    repeats = len(one)
    x = _chosen(np.concatenate([one, other]))
    if not x.shape[1]:
        return 1.0
    halves = _splits(2 * repeats)
    sums = halves @ x
    total, squares = x.sum(axis=0), (x * x).sum(axis=0)
    apart = (2 * sums - total) / repeats
    within = squares - (sums**2 + (total - sums) ** 2) / repeats
    # Less than this of the whole is rounding: the halves are constant.
    within = np.where(within <= 1e-13 * squares, 0, within)
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = np.where(apart == 0, 0, np.abs(apart) / np.sqrt(within)).max(axis=1)
    return float(np.mean(statistic >= statistic[0]))


def _chosen(x: Values) -> Values:
    """Elements that differ between calls, those that differ most for their size, centred."""
    x = np.nan_to_num(x, nan=3e38, posinf=3e38, neginf=-3e38)
    spread = x.max(axis=0) - x.min(axis=0)
    size = np.abs(x).max(axis=0)
    relative = np.where(size > 0, spread / np.where(size > 0, size, 1), 0)
    order = np.argsort(-relative, kind="stable")[:_MOST_ELEMENTS]
    order = order[relative[order] > 0]
    chosen = x[:, order] / size[order]
    return np.asarray(chosen - chosen.mean(axis=0))


def _splits(count: int) -> Values:
    """Every half of `count` calls that holds the first, as rows of 0 and 1; the true one comes first."""
    halves = np.array(
        [(0, *rest) for rest in itertools.combinations(range(1, count), count // 2 - 1)]
    )
    rows = np.zeros((len(halves), count))
    np.put_along_axis(rows, halves, 1.0, axis=1)
    return rows


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values of a family of tests, corrected for their number.

    Source: S. Holm, A simple sequentially rejective multiple test procedure, 1979.
    """
    order = np.argsort(p_values, kind="stable")
    corrected = np.ones(len(p_values))
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * float(p_values[index])))
        corrected[index] = largest
    return [float(p) for p in corrected]


def schedule(repeats: int, raw: NDArray[np.uint64]) -> list[bool]:
    """Which of 2 x `repeats` calls are with the change, in an order that random bits mix."""
    order = np.argsort(raw, kind="stable")
    return [bool(index >= repeats) for index in order]


def unstable(outcomes: Sequence[Mapping[str, NDArray[np.bool_]]]) -> frozenset[str]:
    """The outputs that moved between equal calls."""
    return frozenset(
        name for moved in outcomes for name, elements in moved.items() if elements.any()
    )
