"""The recipes by name, a file a family."""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.attention.recipes.registry import RECIPES as RECIPES
else:
    __getattr__, __dir__, __all__ = attach(__name__, {"registry": ["RECIPES"]})
