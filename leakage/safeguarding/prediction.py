"""Which combinations are worth measuring: squared errors of operands add up, about, and that predicts the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref.attention.recipe import Recipe
from flamia_ref.leakage.safeguarding.measuring import Errors

Numbers = npt.NDArray[np.float64]

_BEFORE = {
    "out": ("s", "o"),
    "dq": ("s", "o", "dp", "dq"),
    "dk": ("s", "o", "dp", "dk"),
    "dv": ("s", "dv"),
}
"""The products that each result comes of."""

_RIDGE = 1e-3  # of a squared error's size: holds down what no measurement separates


def predicted(recipes: Sequence[Recipe], errors: Sequence[Errors | None]) -> Numbers:
    """The root mean square of the results' errors of each recipe, from those that are measured.

    For each result the squared error is taken as a sum over the operands of the products that it comes of, fitted to
    what is measured. It is used to choose what to measure next, and for nothing else.
    """
    names = list(next(one for one in errors if one is not None))
    total = np.zeros(len(recipes))
    known = [place for place, one in enumerate(errors) if one is not None]
    for name in names:
        rows = _features(recipes, _BEFORE[name])
        squares = np.array([(errors[place] or {})[name] ** 2 for place in known])
        size = float(squares.mean()) or 1.0
        given = rows[known]
        left = given.T @ given + _RIDGE * np.eye(rows.shape[1])
        fitted = np.linalg.solve(left, given.T @ (squares / size))
        total += np.maximum(rows @ fitted, 1e-4) * size
    return np.sqrt(total / len(names))


def _features(recipes: Sequence[Recipe], products: Sequence[str]) -> Numbers:
    """A row a recipe, a column an operand of some recipe: 1 where the recipe has it."""
    columns: dict[Any, int] = {}
    found: list[list[int]] = []
    for recipe in recipes:
        row = []
        for name in products:
            product = recipe.product(name)
            for side in ("left", "right"):
                operand = replace(getattr(product, side), same_codes_as=None)
                key = (name, side, operand, product.guarded)
                row.append(columns.setdefault(key, len(columns)))
        found.append(row)
    rows = np.zeros((len(recipes), len(columns) + 1))
    for place, row in enumerate(found):
        rows[place, row] = 1
    rows[:, -1] = 1
    return rows


def worth_measuring(
    expected: Numbers, measured: npt.NDArray[np.bool_], costs: Numbers, slack: float
) -> list[int]:
    """The places of points that are not measured and may be on the front, the most promising first.

    `expected` [points]: errors, predicted where not measured. `costs` [points, kinds]. A point is out if another costs
    no more of anything and its error is less by more than the factor 1 - slack.
    """
    ratio = np.ones(len(expected))
    for place in np.flatnonzero(~measured):
        no_more = (costs <= costs[place]).all(axis=1)
        no_more[place] = False
        least = expected[no_more].min(initial=np.inf)
        ratio[place] = least / expected[place]
    found = np.flatnonzero(~measured & (ratio > 1 - slack))
    return [int(place) for place in found[np.argsort(-ratio[found], kind="stable")]]
