"""The search for the recipe that fits: `match`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flamia_ref import kernels
from flamia_ref._errors import shown
from flamia_ref.golden.actual import Results, cases_of, from_arrays, from_kernel, from_path
from flamia_ref.golden.expectations import chosen
from flamia_ref.golden.manifest import FILE_NAME
from flamia_ref.golden.matching import outputs
from flamia_ref.golden.matching.fits import Fit, Key, fit, together
from flamia_ref.golden.matching.intake import admitted
from flamia_ref.golden.matching.matches import Entry, Match
from flamia_ref.golden.matching.samples import Sample, of_case, own_results
from flamia_ref.golden.matching.turning import MOST_CHANGES, Progress, Turn, turned
from flamia_ref.golden.pack import Case, Pack, load
from flamia_ref.golden.shards import SHARD_FILE_NAME

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

Actual = str | os.PathLike[str] | Callable[..., Any] | Mapping[str, Mapping[str, Any]] | None

_MOST_PARTS = 4  # that every recipe is compared with
_ROWS = 33  # queries that a part has, where there is one: more than a block
_LARGEST = 1 << 23  # pairs times channels of the largest part
_TURNED = 3  # recipes whose knobs are tried
_FURTHER = 3  # recipes whose backward is run though the forward departs


def match(
    pack_or_inputs: Pack | Case | str | os.PathLike[str] | Mapping[str, Any],
    actual: Actual = None,
    *,
    recipes: Sequence[str | Recipe] | None = None,
    cases: Sequence[str] | None = None,
    knobs: bool = True,
    progress: Progress | None = None,
    **settings: Any,
) -> Match:
    """Say which recipe a kernel's outputs fit best, stage by stage, and the knob that would bring it closer.

    `pack_or_inputs` and `actual`: a pack, one of its cases or its folder, and what `golden.check` takes beside it: a
    kernel, a folder of ``CASE.safetensors``, one such file, or dicts of arrays by case; without it, the pack's own
    results are matched. Or, alone: a ``.safetensors`` file, a folder of them, or a dict of arrays, with the inputs
    q [tokens, heads, head_dim], k, v [key_tokens, kv_heads, head_dim], dout like q where there is something of a
    backward, cu_seqlens int32 [documents + 1] for more than one document, cu_seqlens_k, sink; and beside them the
    results by the names of a pack. `settings` are then those of `attention.forward`: `causal`, which has no default,
    `softmax_scale` (1 / sqrt(head_dim)), `window`, `softcap`, `alignment`.

    `recipes`: names or recipes, all that are registered by default. `cases`: names or patterns. `knobs`: whether
    changes of the best few are tried where no recipe gives every bit.

    Every recipe is compared with up to four parts, a document and a key/value head of different cases each, and the
    ones that give all of these bits with everything. Recipes are ranked by `Fit.key`: first the forward, then the
    backward, and in each by bits of stages, in the order of the dataflow, before any distance. Those of the same bits
    are one entry. The backward is run where something of it was given and the forward does not depart, and for the best
    few in any case.

    Raises ValueError or TypeError for what cannot be read or is no such input, for outputs of another shape or type,
    and where nothing can be compared; KernelError for a kernel that fails.
    """
    samples, subject, notes = _samples(pack_or_inputs, actual, cases, settings)
    candidates, more = admitted(samples, _recipes(recipes), all_asked=recipes is None)
    notes = (*notes, *more)
    parts = _parts(samples)
    report = _counted(progress)
    ranked = _screened(candidates, parts, report)
    entries = _entries(candidates, ranked, samples, parts, report)
    turns: tuple[Turn, ...] = ()
    fitting: Recipe | None = None
    best = entries[0]
    _require_compared(entries)
    if best.whole and best.fit.exact:
        fitting = candidates[best.recipes[0]]
    elif knobs and (knobs := _measured(best.fit)):
        near = [one for one in entries[:_TURNED] if one.fit.key[:2] == best.fit.key[:2]]
        bases = [candidates[one.recipes[0]] for one in near or entries[:1]]
        held = _once([*parts, *_departing(bases[0], samples)]) if best.whole else parts
        turns, fitting = _turned(bases, held, samples, progress)
    return Match(
        subject=subject,
        cases=tuple(sample.name for sample in samples),
        parts=tuple(part.name for part in parts),
        entries=entries,
        turns=turns,
        fitting=fitting,
        asked=knobs,
        notes=notes,
    )


def _samples(
    given: Any, actual: Actual, cases: Sequence[str] | None, settings: Mapping[str, Any]
) -> tuple[list[Sample], str, tuple[str, ...]]:
    pack = _pack(given)
    if pack is None:
        if actual is not None:
            raise ValueError(
                f"{shown(str(given))} is no pack; results beside it go with a pack, or put them in the file with the"
                " inputs"
            )
        if cases is not None:
            raise ValueError("cases are those of a pack; give the files that you mean")
        return outputs.read(given, **settings)
    if settings:
        raise ValueError(f"a pack says its settings itself; leave out {', '.join(settings)}")
    known = cases_of(pack)
    if cases is not None:
        known = {case.name: case for case in chosen(known.values(), cases)}
    several = sorted({case.entry.recipe for case in known.values()})
    if len(several) > 1:
        raise ValueError(
            f"the cases are of {len(several)} recipes, {', '.join(several)}, and no recipe gives them all; choose those"
            f" of one, such as '*.{several[0]}'"
        )
    if actual is None:
        found = [of_case(case, own_results(case)) for case in known.values()]
        return found, f"the pack {pack.folder}", ()
    results = _results(known, actual)
    found, skipped = [], []
    for case in results.cases:
        try:
            tensors = results.source(case)
        except kernels.Unsupported as error:
            skipped.append(f"not compared: {error}")
            continue
        if tensors is not None:
            sample = of_case(case, tensors)
            if sample.given:
                found.append(sample)
    if not found:
        raise ValueError(f"{results.subject} gives nothing for these cases")
    return found, results.subject, (*results.notes, *skipped)


def _pack(given: Any) -> Pack | Case | None:
    if isinstance(given, Pack | Case):
        return given
    if isinstance(given, str | os.PathLike):
        path = Path(given)
        if path.is_dir() and any((path / name).exists() for name in (FILE_NAME, SHARD_FILE_NAME)):
            return load(path)
    return None


def _results(cases: Mapping[str, Case], actual: Any) -> Results:
    if isinstance(actual, Mapping):
        return from_arrays(cases, actual)
    if isinstance(actual, str | os.PathLike):
        return from_path(cases, Path(actual))
    return from_kernel(cases, actual)


def _recipes(given: Sequence[str | Recipe] | None) -> dict[str, Recipe]:
    from flamia_ref.attention import RECIPES
    from flamia_ref.attention.computed import computed_recipe

    found: dict[str, Recipe] = {}
    for one in RECIPES if given is None else given:
        recipe = computed_recipe(one)
        if recipe.name in found:
            raise ValueError(f"recipe {recipe.name!r} is given twice; give each a name of its own")
        found[recipe.name] = recipe
    if not found:
        raise ValueError("there are no recipes to match; give at least one")
    return found


def _parts(samples: Sequence[Sample]) -> list[Sample]:
    """Of each of four cases one part: the cheapest with more than a block of queries, else the largest.

    The cases are those whose parts are cheapest, and the one whose part is largest, unless it takes long.
    """
    found = []
    for sample in samples:
        parts = list(sample.parts())
        long = [part for part in parts if part.spec.tokens >= _ROWS]
        if parts:
            found.append(long[0] if long else parts[-1])
    if not found:
        return list(samples)[:1]
    found.sort(key=lambda part: part.cost)
    if len(found) > _MOST_PARTS:
        # What runs over several tiles shows what the others do not.
        last = [part for part in found if part.cost <= _LARGEST][-1:]
        found = [*found[: _MOST_PARTS - len(last)], *last]
    return found[:_MOST_PARTS]


def _turned(
    bases: Sequence[Recipe],
    held: Sequence[Sample],
    samples: Sequence[Sample],
    progress: Progress | None,
) -> tuple[tuple[Turn, ...], Recipe | None]:
    """What brings recipes closer, and what then gives every bit.

    Where that gives every bit of the parts and not of the rest, parts of the rest are taken too.
    """
    turns: tuple[Turn, ...] = ()
    for _ in range(MOST_CHANGES):
        turns = turned(bases, held, begun=turns, progress=progress)
        if not turns or not turns[0].after.exact:
            break
        more = _departing(turns[0].recipe, samples)
        if not more:
            return turns, turns[0].recipe
        held = _once([*held, *more])
    return turns, None


def _departing(recipe: Recipe, samples: Sequence[Sample]) -> list[Sample]:
    """Of up to two cases in which a recipe departs, a part that shows it, or the whole where none does."""
    found: list[Sample] = []
    for sample in sorted(samples, key=lambda one: one.cost):
        if fit(recipe, sample).exact:
            continue
        apart = [part for part in sample.parts() if not fit(recipe, part).exact]
        found.append(apart[0] if apart else sample)
        if len(found) == 2:
            break
    return found


def _once(samples: Sequence[Sample]) -> list[Sample]:
    """Each part once: the same one takes twice the time and says nothing more."""
    return list({sample.name: sample for sample in samples}.values())


def _require_compared(entries: Sequence[Entry]) -> None:
    """Raise ValueError where nothing was compared with any recipe: that is no verdict."""
    if any(one.fit.elements for one in entries):
        return
    fits = [one.fit for one in entries]
    if all(one.failed for one in fits):
        raise ValueError(f"no recipe can be run on this: {fits[0].failed}")
    stages = [stage for one in fits for stage in one.stages if stage.note]
    why = f"{stages[0].name} was {stages[0].note}" if stages else "only what no part of a case has"
    raise ValueError(f"nothing could be compared with any recipe: {why}")


def _measured(best: Fit) -> bool:
    """Whether something that departs has a number beside the recipe's: else no change could be seen to help."""
    return any(
        not stage.exact and (stage.note or stage.lost < stage.elements) for stage in best.stages
    )


def _counted(progress: Progress | None) -> Callable[[int, int, str], None]:
    return progress if progress is not None else lambda _done, _total, _name: None


def _screened(
    candidates: Mapping[str, Recipe], parts: Sequence[Sample], report: Progress
) -> dict[str, Fit]:
    """How every recipe compares with the parts, the best first."""
    found: dict[str, Fit] = {}
    for done, (name, recipe) in enumerate(candidates.items()):
        report(done, len(candidates), name)
        found[name] = together(fit(recipe, part, backward=False) for part in parts)
    nothing = not any(one.stages for one in found.values())  # of the forward
    order = sorted(found, key=lambda name: found[name].key, reverse=True)
    for place, name in enumerate(order):
        one = found[name]
        if one.not_run and (nothing or place < _FURTHER or one.equal_so_far):
            report(place, len(order), f"{name}, backward")
            found[name] = together(fit(candidates[name], part) for part in parts)
    return {name: found[name] for name in sorted(found, key=lambda name: _order(found[name]))}


def _order(one: Fit) -> Key:
    return (*(-number for number in (float(one.exact), *one.key)),)


def _entries(
    candidates: Mapping[str, Recipe],
    screened: Mapping[str, Fit],
    samples: Sequence[Sample],
    parts: Sequence[Sample],
    report: Progress,
) -> tuple[Entry, ...]:
    """The recipes in order, those of the same bits together; what may give every bit is compared with everything."""
    hopeful = [name for name, one in screened.items() if one.exact]
    covered = len(parts) == len(samples) and all(part.whole for part in parts)
    fits = dict(screened)
    if not covered:
        for done, name in enumerate(hopeful):
            report(done, len(hopeful), f"{name}, all of it")
            fits[name] = together(fit(candidates[name], sample) for sample in samples)
    whole = set(fits) if covered else set(hopeful)
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, one in fits.items():
        mark = (one.digest, one.absent, one.failed, one.not_run, name in whole)
        groups.setdefault(mark if one.stages else (name,), []).append(name)
    entries = [
        Entry(recipes=tuple(names), fit=fits[names[0]], whole=names[0] in whole)
        for names in groups.values()
    ]
    return tuple(
        sorted(entries, key=lambda one: (not one.whole if not covered else False, _order(one.fit)))
    )
