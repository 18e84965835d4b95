"""All recipes by name."""

from collections.abc import Mapping

from flamia_ref._errors import Registry
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.recipes.flamia_mxfp8 import FLAMIA_MXFP8_FOLDED

_ALL = (FLAMIA_MXFP8_FOLDED,)

RECIPES: Mapping[str, Recipe] = Registry("recipe", ((recipe.name, recipe) for recipe in _ALL))
"""Every recipe by name, read-only."""
