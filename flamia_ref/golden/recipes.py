"""The recipe of a pack, as the data that its manifest holds."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flamia_ref._errors import Registry, line, shown
from flamia_ref.evidence import Evidence
from flamia_ref.golden.canonical import Reader
from flamia_ref.golden.cases import PLAIN_NAME
from flamia_ref.golden.dataflow import Dataflow, dataflow

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

NUMERICS_VERSION = 1  # raised whenever an emitted bit changes


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeEntry:
    """A recipe in full, as JSON data; `flamia_ref.attention.Recipe.from_json` reads it.

    `dataflow` says which tensors its cases have. `evidence` is the weakest label of its steps.
    `query_tile` and `key_tile` are the rows and the columns of a unit of work; both start at the
    document. `lse_of_smoothed_scores`: lse is an output that kernels need not give, see `Recipe`.
    """

    recipe: Mapping[str, Any] = field(hash=False)
    dataflow: Dataflow = field(hash=False)
    evidence: Evidence
    query_tile: int
    key_tile: int
    lse_of_smoothed_scores: bool = False

    @classmethod
    def of(cls, recipe: "Recipe") -> "RecipeEntry":
        """Return the entry of a recipe."""
        return cls.read(Reader(data=json.loads(recipe.to_json()), path=f"recipe {recipe.name}"))

    @classmethod
    def read(cls, reader: Reader) -> "RecipeEntry":
        """Return the entry of a recipe in JSON data.

        Raises ValueError where it is no recipe that this version knows, or one that packs cannot
        hold.
        """
        from flamia_ref.attention import Recipe

        name = reader["name"].text()
        if not PLAIN_NAME.match(name):
            raise ValueError(f"{reader.path}: recipe name {shown(name)} is not plain")
        data = Registry("field of the recipe", ((key, one.data) for key, one in reader.items()))
        try:
            recipe = Recipe.from_json(data)
            flow = dataflow(recipe)
        except ValueError as error:
            raise ValueError(f"{reader.path}: {line(str(error))}") from error
        return cls(
            recipe=data,
            dataflow=flow,
            evidence=recipe.label,
            query_tile=recipe.tiles.query,
            key_tile=recipe.tiles.key,
            lse_of_smoothed_scores=recipe.lse_of_smoothed_scores,
        )


def provenance(numerics_version: int, recipes: Mapping[str, RecipeEntry]) -> Iterator[str]:
    """Yield what a reader must know of a pack that another version, or another author, may have made.

    A recipe whose data lack fields that came later, and have their defaults, is the same recipe.
    """
    from flamia_ref.attention import RECIPES, Recipe

    if numerics_version != NUMERICS_VERSION:
        yield (
            f"the pack has numerics version {numerics_version}, this version has "
            f"{NUMERICS_VERSION}: expected bits may have changed between them"
        )
    for name, entry in recipes.items():
        if name not in RECIPES:
            yield f"recipe {name} is none of this version's; its evidence is what its author claims"
        elif Recipe.from_json(entry.recipe) != RECIPES[name]:
            yield f"recipe {name} of the pack is not this version's of that name"
