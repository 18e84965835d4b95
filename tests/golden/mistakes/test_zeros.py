"""Elements that a kernel gave as 0: no evidence for a mistake that loses numbers for another reason."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from flamia_ref.golden.mistakes import Name
from flamia_ref.golden.recipes import RecipeEntry
from flamia_ref.golden.simulation import simulate
from flamia_ref.golden.stage import Role
from flamia_ref.golden.suites import STANDARD
from tests.golden.mistakes.planting import InMemory, diagnosed

FOLDED = "flamia-mxfp8-folded"
LEAST = np.float32(2.0**-126)


@cache
def tokens_of_subnormals(recipe: str) -> InMemory:
    of = next(case for case in STANDARD if case.name == "subnormal-tokens")
    entry = RecipeEntry.of(RECIPES[recipe])
    return InMemory(of, entry, simulate(of, RECIPES[recipe]), entry.dataflow.places(of))


def copies(case: InMemory) -> dict[str, Any]:
    return {
        name: np.array(tensor, order="C")
        for name, tensor in case.tensors.items()
        if case.places[name].stage.role is not Role.INPUT
    }


@pytest.mark.parametrize("recipe", [FOLDED, pytest.param("bf16-fa4", marks=pytest.mark.nightly)])
def test_flushed_subnormals_are_named_and_nothing_else(recipe: str) -> None:
    case = tokens_of_subnormals(recipe)
    given = copies(case)
    s = given["s.0"]
    s[(np.abs(s) < LEAST) & (s != 0)] = 0
    first, found = diagnosed(case, given, final=False)
    assert first == "s.0"
    assert [one.mistake for one in found] == [Name.SUBNORMALS], found


def test_lost_numbers_are_explained_by_no_mistake_that_loses_them() -> None:
    """Tokens that are 0 in S though some of their scores are normal: K along tokens has 0 in most of them too."""
    case = tokens_of_subnormals(FOLDED)
    given = copies(case)
    s = given["s.0"]
    tiny = np.abs(s) < LEAST * 64
    s[tiny & (s != 0)] = 0
    first, found = diagnosed(case, given, final=False)
    assert first == "s.0"
    assert Name.WRONG_AXIS not in [one.mistake for one in found], found
