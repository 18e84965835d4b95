"""Recipes in words: one in a line, and where two differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from flamia_ref.attention.copies import INPUT_USES, OVER_CHANNELS, uses_of
from flamia_ref.attention.data import plain
from flamia_ref.attention.product import Guard, Operand, Scope
from flamia_ref.attention.recipe import Recipe, Step

_SHOWN = {"q": "q", "k": "k", "v": "v", "do": "dO"}


def form(operand: Operand) -> str:
    """The format of an operand and its block."""
    if operand.block is None:
        return f"{operand.format} per head" if operand.scope is Scope.HEAD else operand.format
    return f"{operand.format} {operand.block[0]}x{operand.block[1]}"


def summary(recipe: Recipe) -> str:
    """How a recipe stores q, k, v and dO, in a line: for products over channels, and over tokens where that differs."""
    alike: dict[str, list[str]] = {}
    for tensor in INPUT_USES:
        ordered = sorted(uses_of(recipe, tensor), key=lambda use: use not in OVER_CHANNELS)
        if not ordered:
            continue
        operands = [recipe.operand(use) for use in ordered]
        text = " and ".join(dict.fromkeys(map(form, operands)))
        if any(operand.promoted_from for operand in operands):
            text += ", promoted"
        if any(operand.scale_folded_into for operand in operands):
            text += ", folded"
        if any(operand.guard is not Guard.NONE for operand in operands):
            text += ", guarded"
        alike.setdefault(text, []).append(_SHOWN[tensor])
    return "; ".join(f"{' '.join(tensors)}: {text}" for text, tensors in alike.items())


class Difference(NamedTuple):
    """A part of two recipes that differs: its dotted path and both values, as JSON has them."""

    path: str
    one: Any
    other: Any


def data_differences(one: Recipe, other: Recipe) -> list[Difference]:
    """Where the data of two recipes differ, name and evidence aside. Recipes without any give equal bits."""
    both = (plain(one), plain(other))
    for data in both:
        del data["name"], data["steps"]
    return list(_differences("", *both))


def evidence_differences(one: Recipe, other: Recipe) -> list[Difference]:
    """Where the evidence of two recipes differs, by the parts that either names; None where it says nothing of a part
    as a whole."""
    paths = [*one.steps, *(path for path in other.steps if path not in one.steps)]
    found = ((path, _step(one, path), _step(other, path)) for path in paths)
    return [Difference(path, plain(a), plain(b)) for path, a, b in found if a != b]


def _differences(path: str, one: Any, other: Any) -> Iterator[Difference]:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        if one != other:
            yield Difference(path, one, other)
        return
    for name in one:  # both have the fields of one class
        yield from _differences(f"{path}.{name}".lstrip("."), one[name], other[name])


def _step(recipe: Recipe, path: str) -> Step | None:
    try:
        return recipe.evidence(path)
    except ValueError:
        return None
