"""A few presets that have every policy between them, where a test of all would say the same many times."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from flamia_ref.formats import PRESETS, BlockFormat

# What says who is meant and what is claimed, and changes no bit.
_TEXTS = {"name", "source", "version", "evidence", "out_of_contract", "by_log2"}
_TEXTS |= {"nan_in_contract", "infinity_in_contract"}
ALWAYS = ("te-mx-e4m3", "ocp-mx-floor-e4m3")  # what most worked examples are for
FORMULAS = {"tensor_scale", "prepared", "quotient", "scaled", "decoded"}


@functools.cache
def features(preset: BlockFormat) -> frozenset[tuple[str, Any]]:
    """Each field and its value; of a formula what it is but for its numbers, of codes whether there are any."""
    found = set()
    for field in dataclasses.fields(preset):
        value = getattr(preset, field.name)
        if field.name in _TEXTS:
            continue
        if field.name in FORMULAS and value is not None:
            value = re.sub(r"\b[\d.e-]+\b", "1", value)
        elif field.name in {"nan_codes", "nan_block_code", "zero_below"}:
            value = value is not None and value != 0.0
        elif field.name == "infinity_scale" and value is not None:
            value = "nan" if value == preset.scale.nan_code else "number"
        elif field.name == "narrow":
            found |= {("narrow", name) for name, _ in value}
            continue
        elif field.name == "scale_values":
            found |= {("scale_values", code == 0, str(divisor)) for code, divisor in value}
            continue
        found.add((field.name, value))
    return frozenset(found)


def covering(presets: Mapping[str, BlockFormat] = PRESETS) -> tuple[str, ...]:
    """Names of few presets that have every feature of any, the richest of what is left first."""
    left = set().union(*(features(preset) for preset in presets.values()))
    names = [name for name in ALWAYS if name in presets]
    for name in names:
        left -= features(presets[name])
    while left:
        best = max(sorted(presets), key=lambda name: len(features(presets[name]) & left))
        names.append(best)
        left -= features(presets[best])
    return tuple(sorted(names))


REPRESENTATIVES = covering()


def daily_first(names: Iterable[str] = PRESETS) -> list[Any]:
    """Parameters of a test: the representatives daily, the others in the nightly run."""
    return [
        name if name in REPRESENTATIVES else pytest.param(name, marks=pytest.mark.nightly)
        for name in names
    ]
