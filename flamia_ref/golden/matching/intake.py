"""What is asked of results before any recipe runs: names that recipes have, and outputs of the right shape and type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flamia_ref._errors import line, shown, unknown_name
from flamia_ref.golden.bitwise import ACCEPTED
from flamia_ref.golden.dataflow import dataflow
from flamia_ref.golden.files import Stored
from flamia_ref.golden.matching.samples import Places, Sample
from flamia_ref.golden.stage import Place, Role, View

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

_LISTED = 12  # names in a note


def admitted(
    samples: Sequence[Sample], candidates: Mapping[str, Recipe], *, all_asked: bool
) -> tuple[dict[str, Recipe], tuple[str, ...]]:
    """The recipes that have something of what was given, and notes on what will not be compared.

    `all_asked`: whether the candidates are all recipes that are registered.

    Raises ValueError where no recipe has anything of it, it has no elements, an output has another shape or type than
    every recipe gives, or a stage that is a list of a document each is named as one.
    """
    places = {
        name: [_places(sample, recipe) for sample in samples] for name, recipe in candidates.items()
    }
    if all(one is None for found in places.values() for one in found):
        return dict(candidates), ()  # none can be run, and the run says why
    names = list(dict.fromkeys(name for sample in samples for name in sample.given))
    for at, sample in enumerate(samples):
        known = _merged(found[at] for found in places.values())
        _check_documents(sample, known, candidates.values())
        for name, given in sample.given.items():
            if name in known and known[name].stage.role is Role.OUTPUT:
                _check_output(sample.name, known[name], given)
    kept = {
        name: candidates[name]
        for name, found in places.items()
        if any(
            one is None or any(x in one for x in sample.given)
            for one, sample in zip(found, samples, strict=True)
        )
    }
    known = _merged(one for found in places.values() for one in found)
    if not kept or not any(name in known for name in names):
        raise _nothing(names, known, candidates, all_asked=all_asked)
    compared = [name for name in names if name in known]
    if not any(
        x.array.size for sample in samples for name, x in sample.given.items() if name in known
    ):
        raise ValueError(
            f"there is nothing to compare: {_listed(compared)} {'has' if len(compared) == 1 else 'have'} no elements;"
            " give at least one token"
        )
    return kept, tuple(_notes(samples, names, known, kept, candidates, all_asked=all_asked))


def _notes(
    samples: Sequence[Sample],
    names: Sequence[str],
    known: Mapping[str, Place],
    kept: Mapping[str, Recipe],
    candidates: Mapping[str, Recipe],
    *,
    all_asked: bool,
) -> list[str]:
    notes = []
    strange = [name for name in names if name not in known]
    if strange:
        which = "the recipes" if all_asked else "the recipes asked for"
        notes.append(f"in none of {which}: {_listed(strange, quoted=True)}")
    out = [name for name in candidates if name not in kept]
    if out:
        given = _listed([name for name in names if name in known])
        notes.append(
            f"left out, as they have nothing of what was given ({given}): {', '.join(out)}"
        )
    wide = [
        name
        for name in names
        if name in known
        and known[name].stage.view is View.BF16
        and any(name in sample.given and _unrounded(sample.given[name]) for sample in samples)
    ]
    if wide:
        notes.append(
            f"{_listed(wide)} {'is' if len(wide) == 1 else 'are'} float32 with values that are no bfloat16, so few bits"
            " can be equal: round to bfloat16 first, to the nearest and ties to even, as the recipes do"
        )
    return notes


def _places(sample: Sample, recipe: Recipe) -> Places | None:
    """None where the recipe cannot be run on these shapes."""
    try:
        return sample.places(recipe)
    except ValueError:
        return None


def _merged(found: Iterable[Places | None]) -> dict[str, Place]:
    """The place of each name, of the first recipe that has it; outputs are alike in all."""
    merged: dict[str, Place] = {}
    for one in found:
        for name, place in (one or {}).items():
            merged.setdefault(name, place)
    return merged


def _check_documents(
    sample: Sample, known: Mapping[str, Place], candidates: Iterable[Recipe]
) -> None:
    documents = len(sample.spec.lengths)
    lists = {
        stage.name
        for recipe in candidates
        for stage in dataflow(recipe).stages.values()
        if stage.per_document
    }
    for name in sample.given:
        stem, _, last = name.rpartition(".")
        stem = stem if last.isdecimal() and stem else name
        if name not in known and stem in lists:
            allowed = f"{stem}.0 to {stem}.{documents - 1}" if documents > 1 else f"{stem}.0"
            raise ValueError(
                f"{sample.name}: {shown(name)} is of no document; {stem} is an array a document, give {allowed}"
            )


def _check_output(source: str, place: Place, given: Stored) -> None:
    """Refuse an output that no recipe could give."""
    accepted = ACCEPTED[place.stage.view]
    axes = ", ".join(place.stage.axes)
    name = place.stage.name
    if given.dtype not in accepted:
        raise ValueError(
            f"{source}: {name} is {line(given.dtype)}; it must be {' or '.join(accepted)}, [{axes}]"
        )
    shape, wanted = tuple(given.array.shape), place.shape
    if shape == wanted:
        return
    hint = "; move the axes" if sorted(shape) == sorted(wanted) else ""
    raise ValueError(
        f"{source}: {name} is {list(shape)}; it must be [{axes}], here {list(wanted)}{hint}"
    )


def _unrounded(given: Stored) -> bool:
    """Whether float32 has values that are no bfloat16."""
    if given.dtype != "F32":
        return False
    numbers = np.ascontiguousarray(given.array)
    bits = numbers.view(np.uint32)
    return bool(np.any((bits & np.uint32(0xFFFF) != 0) & ~np.isnan(numbers)))


def _nothing(
    names: Sequence[str],
    known: Mapping[str, Place],
    candidates: Mapping[str, Recipe],
    *,
    all_asked: bool,
) -> ValueError:
    """Why no recipe has anything of these names."""
    allowed = sorted(
        dict.fromkeys(place.stage.name for place in known.values()),
        key=lambda name: (
            next(x for x in known.values() if x.stage.name == name).stage.role is not Role.OUTPUT
        ),
    )
    if all_asked or not any(name in _registered() for name in names):
        return unknown_name("result", next(iter(names), None), allowed)
    asked = _listed(list(candidates))
    return ValueError(
        f"{asked} {'has' if len(candidates) == 1 else 'have'} nothing of what was given, {_listed(names)}; allowed:"
        f" {_listed(allowed)}; or match it with other recipes"
    )


def _registered() -> frozenset[str]:
    """The stages of all registered recipes."""
    from flamia_ref.attention import RECIPES

    return frozenset(name for recipe in RECIPES.values() for name in dataflow(recipe).stages)


def _listed(names: Sequence[str], *, quoted: bool = False) -> str:
    some = [shown(name) if quoted else line(name) for name in names[:_LISTED]]
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(some) + more
