"""Making packs: the simulator's results on a suite, written whole or not at all."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flamia_ref._errors import Registry, shown
from flamia_ref.golden.canonical import sha256
from flamia_ref.golden.cases import PLAIN_NAME, CaseSpec
from flamia_ref.golden.dataflow import dataflow
from flamia_ref.golden.files import little_endian, tensors_to_bytes
from flamia_ref.golden.manifest import (
    FILE_NAME,
    CaseEntry,
    Manifest,
    TensorEntry,
    case_name,
)
from flamia_ref.golden.recipes import RecipeEntry
from flamia_ref.golden.replacing import replacing, require_free, write_whole
from flamia_ref.golden.simulation import simulate
from flamia_ref.golden.suites import SUITES

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

DEFAULT_RECIPES = ("flamia-mxfp8-folded",)

Progress = Callable[[int, int, str], None]  # cases done, cases in all, the name of the next one


def make(
    folder: str | os.PathLike[str],
    recipes: "Sequence[str | Recipe]" = DEFAULT_RECIPES,
    suite: str = "smoke",
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Run the simulator, in numpy, on every case of a suite with every recipe, and write a pack.

    The folder appears when it is complete; a run that is stopped leaves nothing behind. With
    `force` an existing pack, or an empty folder, is replaced, and kept until then.

    Raises ValueError for an unknown recipe or suite, a folder that exists (without `force`, or that
    is not a pack), and where the disk refuses.
    """
    cases = SUITES[suite]
    chosen = _chosen(recipes)
    target = Path(os.path.abspath(folder))
    work = [(spec, recipe) for recipe in chosen.values() for spec in cases]
    try:
        require_free(target, force=force)
        with replacing(target, force=force) as scratch:
            entries = []
            for done, (spec, recipe) in enumerate(work):
                if progress is not None:
                    progress(done, len(work), case_name(spec.name, recipe.name))
                entries.append(_write_case(scratch, spec, recipe))
            manifest = Manifest(
                suite=suite,
                recipes=Registry(
                    "recipe", [(name, RecipeEntry.of(given)) for name, given in chosen.items()]
                ),
                cases=tuple(entries),
            )
            write_whole(scratch / FILE_NAME, manifest.to_json().encode("ascii"))
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write {target}: {reason}; nothing was left behind") from error
    return manifest


def _chosen(recipes: "Sequence[str | Recipe]") -> "dict[str, Recipe]":
    from flamia_ref.attention import RECIPES, Recipe

    if isinstance(recipes, str):
        raise TypeError(f"recipes is the string {shown(recipes)}; give a sequence of recipes")
    chosen: dict[str, Recipe] = {}
    for given in recipes:
        recipe = RECIPES[given] if isinstance(given, str) else given
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipe {shown(recipe)} is neither a name nor a Recipe")
        if not PLAIN_NAME.match(recipe.name):
            raise ValueError(
                f"recipe name {shown(recipe.name)} is not plain; use at most 80 of a-z 0-9 . _ -"
            )
        if recipe.name in chosen:
            raise ValueError(f"recipe {recipe.name} is given twice; name each one differently")
        if recipe.name in RECIPES and recipe != RECIPES[recipe.name]:
            raise ValueError(
                f"recipe {recipe.name} differs from the registered one of that name; rename it"
            )
        dataflow(recipe)  # raises for one that packs cannot hold
        chosen[recipe.name] = recipe
    if not chosen:
        raise ValueError("no recipe is given; name at least one")
    return chosen


def _write_case(folder: Path, spec: CaseSpec, recipe: "Recipe") -> CaseEntry:
    name = case_name(spec.name, recipe.name)
    tensors = simulate(spec, recipe)
    data = tensors_to_bytes(tensors)
    write_whole(folder / f"{name}.safetensors", data)
    known = dataflow(recipe).places(spec)
    entries = {
        key: TensorEntry.of(known[key], little_endian(tensor)) for key, tensor in tensors.items()
    }
    return CaseEntry(
        name=name,
        recipe=recipe.name,
        spec=spec,
        file=f"{name}.safetensors",
        size=len(data),
        sha256=sha256(data),
        tensors=Registry("tensor", entries.items()),
    )
