"""Strategies of recipes: the registered ones, and others that differ from them in what a recipe permits.

They are exported by `flamia_ref.properties.strategies`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe


def recipes(names: Sequence[str] | None = None) -> st.SearchStrategy[Recipe]:
    """Registered recipes, all or those named, in the registry's order. Raises UnknownName for an unknown one."""
    from flamia_ref.attention import RECIPES

    return st.sampled_from([RECIPES[name] for name in (RECIPES if names is None else names)])


def varied_recipes(
    names: Sequence[str] | None = None, *, most: int = 2
) -> st.SearchStrategy[Recipe]:
    """Recipes that are registered, or differ from one in up to `most` knobs, all of which the simulator computes.

    Shrinks to the first registered one. A variant keeps its evidence, and is called after its changes.
    """
    from flamia_ref.attention.variants import permitted_changes

    return recipes(names).flatmap(
        lambda recipe: st.lists(st.sampled_from(permitted_changes(recipe)), max_size=most).map(
            functools.partial(_with_all, recipe)
        )
    )


def _with_all(recipe: Recipe, changes: Sequence[tuple[str, Any]]) -> Recipe:
    """The recipe with changes, one after another; one that the earlier ones do not permit is left out."""
    from flamia_ref.attention.variants import with_change

    for path, value in changes:
        made = with_change(recipe, path, value)
        recipe = recipe if made is None else made
    return recipe
