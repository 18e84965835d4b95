"""Strategies of recipes: the registered ones, and others that differ from them in what a recipe permits.

They are exported by `flamia_ref.properties.strategies`.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

_FLAT = ("name", "steps", "schedules")
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "rescale_threshold": (0, 1, 4, 8),
    "p_offset": (0, 4, 8),
    "query": (32, 64, 128),
    "key": (32, 64, 128),
    "splits": (1, 2, 3),
    "mask_value": (None, -(2.0**100)),
    "exp2": ("mufu.sm90", "polynomial3", "correct"),
    "log2": ("mufu.sm90", "correct"),
    "reciprocal": ("mufu.sm90", "correct"),
    "instruction": ("sm100.tcgen05.mxf8f6f4", "sm100.tcgen05.f16", "exact", "float32"),
    "block": ((1, "all"), (1, 32), (32, 1), (32, 32)),
}
"""Values to try of what has no list of its own."""


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
    return recipes(names).flatmap(
        lambda recipe: st.lists(st.sampled_from(permitted_changes(recipe)), max_size=most).map(
            functools.partial(_with_all, recipe)
        )
    )


def permitted_changes(recipe: Recipe) -> tuple[tuple[str, Any], ...]:
    """Every change of one knob, by its dotted path, that gives a recipe which the simulator computes."""
    return _permitted(recipe.to_json())


def with_change(recipe: Recipe, path: str, value: Any) -> Recipe | None:
    """The recipe with another value at a dotted path; None where that is no recipe, or is not computed."""
    from flamia_ref.attention.computed import check_computed

    name, _, rest = path.partition(".")
    try:
        part = _replaced(getattr(recipe, name), rest, value) if rest else value
        changes = {name: part, "name": f"{recipe.name}, {path} {value}"[:100], "schedules": ()}
        made = dataclasses.replace(recipe, **changes)
        check_computed(made)
    except (ValueError, TypeError):
        return None
    return made


def _with_all(recipe: Recipe, changes: Sequence[tuple[str, Any]]) -> Recipe:
    """The recipe with changes, one after another; one that the earlier ones do not permit is left out."""
    for path, value in changes:
        made = with_change(recipe, path, value)
        recipe = recipe if made is None else made
    return recipe


@functools.lru_cache(maxsize=256)
def _permitted(text: str) -> tuple[tuple[str, Any], ...]:
    from flamia_ref.attention import Recipe

    recipe = Recipe.from_json(text)
    return tuple(change for change in _changes(recipe) if with_change(recipe, *change) is not None)


def _changes(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(type(part))
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        here = f"{path}.{field.name}".lstrip(".")
        if path == "" and field.name in _FLAT:
            continue
        if dataclasses.is_dataclass(value):
            yield from _changes(value, here)
            continue
        yield from (
            (here, other) for other in _values(field.name, hints[field.name]) if other != value
        )


def _values(name: str, kind: Any) -> tuple[Any, ...]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(kind)
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    if kind is bool:
        return (False, True)
    return _NUMBERS.get(name, ())


def _replaced(part: Any, path: str, value: Any) -> Any:
    name, _, rest = path.partition(".")
    inner = _replaced(getattr(part, name), rest, value) if rest else value
    return dataclasses.replace(part, **{name: inner})
