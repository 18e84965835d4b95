"""What the model's attention can be replaced by, by name."""

from collections.abc import Sequence
from pathlib import Path

from flamia_ref._errors import unknown_name
from flamia_ref.attention import RECIPES, Recipe

FLOAT32 = "float32"
"""This example's own attention in float32, through the same adapter as recipes: the reference."""

OWN = ("transformers-eager", "transformers-sdpa")
"""transformers' own, in float32."""


def names() -> tuple[str, ...]:
    """All names, the reference first."""
    return (FLOAT32, *OWN, *RECIPES)


def chosen(given: Sequence[str]) -> dict[str, Recipe | str]:
    """What was asked for, by name: a name of `names()`, or a JSON file of a recipe. None given means all names.

    Raises: ValueError for another name, a file that is no recipe, and one that cannot be read.
    """
    found: dict[str, Recipe | str] = {}
    for name in given or names():
        if name.endswith(".json"):
            try:
                recipe = Recipe.from_json(Path(name).read_text(encoding="utf-8"))
            except OSError as error:
                raise ValueError(
                    f"cannot read recipe file {name}: {error.strerror or error}"
                ) from error
            except ValueError as error:
                raise ValueError(f"recipe file {name}: {error}") from error
            if recipe.name in names() and recipe != RECIPES.get(recipe.name):
                raise ValueError(
                    f"recipe file {name} has the name {recipe.name!r}, which is another's; give it its own"
                )
            found[recipe.name] = recipe
        elif name in RECIPES:
            found[name] = RECIPES[name]
        elif name in names():
            found[name] = name
        else:
            raise unknown_name("attention", name, names())
    return found
