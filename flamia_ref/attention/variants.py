"""Variants of a recipe: every change of one knob that gives another recipe which the simulator computes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from flamia_ref.attention.recipe import Recipe

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

_MORE: dict[str, tuple[Any, ...]] = {
    "rescale_threshold": (0, 1, 2, 4, 6, 8, 10, 16),
    "p_offset": (0, 2, 4, 6, 7, 8),
    "query": (32, 64, 96, 128, 192, 256),
    "key": (32, 64, 96, 128, 160, 176, 192, 256),
    "tanh": ("mufu.sm90", "correct"),
    "p_scale": (1, 256, 448),
    "static_scale": (118, 119, 120, 121, 123, 127, 128, 135),
}
"""More of them, for a search that has the time."""

_TOGETHER = (
    ("softmax.base", ("softmax.exp2_argument", "softmax.lse", "softmax.score")),
    ("dk.tile_order", ("dv.tile_order",)),
)
"""Knobs that permit few values of others: a change of the first may need one of the rest."""


def permitted_changes(
    recipe: Recipe, *, parts: tuple[str, ...] | None = None, more: bool = False
) -> tuple[tuple[str, Any], ...]:
    """Every change of one knob, by its dotted path, that gives a recipe which the simulator computes.

    `parts`: only those of these parts of the recipe, such as "softmax". `more`: with more numbers, the instructions,
    and the formats of the registered recipes.
    """
    return _permitted(recipe.to_json(), parts, more)


def with_change(recipe: Recipe, path: str, value: Any) -> Recipe | None:
    """The recipe with another value at a dotted path; None where that is no recipe, or is not computed."""
    return with_changes(recipe, {path: value})


def with_changes(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe | None:
    """The recipe with other values at dotted paths, all at once; None as in `with_change`."""
    from flamia_ref.attention.computed import check_computed

    parts: dict[str, Any] = {}
    try:
        for name in dict.fromkeys(path.partition(".")[0] for path in changes):
            inner = {
                path.partition(".")[2]: value
                for path, value in changes.items()
                if path.partition(".")[0] == name
            }
            parts[name] = inner[""] if "" in inner else _replaced(getattr(recipe, name), inner)
        words = "".join(f", {path} {value}" for path, value in changes.items())
        made = dataclasses.replace(
            recipe, **parts, name=f"{recipe.name}{words}"[:100].strip(), schedules=()
        )
        check_computed(made)
    except (ValueError, TypeError):
        return None
    return made


def joint_changes(recipe: Recipe) -> tuple[dict[str, Any], ...]:
    """Changes of a knob that is not permitted to change alone, with the fewest others that permit it.

    All that need equally few are there.
    """
    found: list[dict[str, Any]] = []
    for path, others in _TOGETHER:
        if getattr(recipe, path.split(".")[0]) is None:
            continue  # a backward that there is not
        for value in _values_at(recipe, path):
            if with_change(recipe, path, value) is None:
                found += _completed(recipe, {path: value}, others)
    return tuple(found)


def value_at(recipe: Recipe, path: str) -> Any:
    """The value at a dotted path."""
    return functools.reduce(getattr, path.split("."), recipe)


def _completed(
    recipe: Recipe, change: dict[str, Any], others: tuple[str, ...]
) -> list[dict[str, Any]]:
    for count in range(1, len(others) + 1):
        found = []
        for paths in itertools.combinations(others, count):
            for values in itertools.product(*(_values_at(recipe, path) for path in paths)):
                changes = change | dict(zip(paths, values, strict=True))
                if with_changes(recipe, changes) is not None:
                    found.append(changes)
        if found:
            return found
    return []


def _values_at(recipe: Recipe, path: str) -> tuple[Any, ...]:
    """The other values of a knob."""
    part, _, name = path.rpartition(".")
    owner = value_at(recipe, part)
    values = _values(name, typing.get_type_hints(type(owner))[name], more=True)
    return tuple(value for value in values if value != getattr(owner, name))


@functools.lru_cache(maxsize=256)
def _permitted(text: str, parts: tuple[str, ...] | None, more: bool) -> tuple[tuple[str, Any], ...]:
    recipe = Recipe.from_json(text)
    return tuple(
        (path, value)
        for path, value in _changes(recipe, more=more)
        if (parts is None or path.split(".")[0] in parts)
        and with_change(recipe, path, value) is not None
    )


def _changes(part: Any, path: str = "", *, more: bool) -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(type(part))
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        here = f"{path}.{field.name}".lstrip(".")
        if path == "" and field.name in _FLAT:
            continue
        if more and field.name == "emulated":
            yield from ((here, other) for other in _emulated() if other != value)
        if dataclasses.is_dataclass(value):
            yield from _changes(value, here, more=more)
            continue
        yield from (
            (here, other)
            for other in _values(field.name, hints[field.name], more=more)
            if other != value
        )


def _emulated() -> tuple[Any, ...]:
    """None, and the emulated columns of the registered recipes."""
    from flamia_ref.attention.recipes import RECIPES

    return tuple(dict.fromkeys([None, *(one.softmax.emulated for one in RECIPES.values())]))


def _values(name: str, kind: Any, *, more: bool) -> tuple[Any, ...]:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(kind)
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    if kind is bool:
        return (False, True)
    if more and name == "format":
        from flamia_ref.attention.recipes import RECIPES

        return tuple(sorted({one.format for x in RECIPES.values() for _, one in x.uses()}))
    if more and name == "instruction":
        from flamia_ref.arithmetic import INSTRUCTIONS

        return tuple(INSTRUCTIONS)
    if more and name in _MORE:
        return _MORE[name]
    return _NUMBERS.get(name, ())


def _replaced(part: Any, changes: Mapping[str, Any]) -> Any:
    """A part with other values at dotted paths inside it."""
    direct = {path: value for path, value in changes.items() if "." not in path}
    for name in dict.fromkeys(path.partition(".")[0] for path in changes if "." in path):
        inner = {
            path.partition(".")[2]: value
            for path, value in changes.items()
            if path.startswith(f"{name}.")
        }
        direct[name] = _replaced(direct.get(name, getattr(part, name)), inner)
    return dataclasses.replace(part, **direct)
