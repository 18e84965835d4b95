"""Turning the knobs of recipes: which changes bring one closer to what a kernel gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flamia_ref.attention.data import plain
from flamia_ref.attention.variants import (
    joint_changes,
    permitted_changes,
    value_at,
    with_changes,
)
from flamia_ref.golden.matching.fits import Fit, Key, StageFit, fit, together
from flamia_ref.golden.matching.samples import Sample

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

Progress = Callable[[int, int, str], None]

MOST_CHANGES = 3
"""How many changes are tried one after another."""
_AGAIN = 8  # changed recipes that are held to more samples
_BEAM = 2  # how many recipes are changed further
_HELD = 8  # how many changes of one recipe are held to all parts
_ENOUGH = 16  # elements that differ in a part that changes are tried on
_FORWARD = ("s", "o", "softmax", "tiles", "guard_operands")
_BACKWARD = ("dp", "dv", "dq", "dk", "gradient")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A recipe with knobs turned, and how it then compares.

    Attributes:
        base: the recipe that was changed.
        recipe: the changed one.
        changes: dotted paths, with the value of the base and the new one.
        before, after: how they compare with the same samples; what an exact `after` saw is all that was given.
        same: other changes that give the same bits here.
    """

    base: Recipe
    recipe: Recipe
    changes: Mapping[str, tuple[Any, Any]]
    before: Fit
    after: Fit
    same: tuple[Mapping[str, tuple[Any, Any]], ...] = ()

    @property
    def words(self) -> str:
        """The changes: "softmax.rescale_threshold 4 -> 8"."""
        return words(self.changes)

    @property
    def effect(self) -> str:
        """What they do: "out equal in 99.2% instead of 71.0%"."""
        stage, now = _shown_stage(self.before, self.after)
        if stage is None:
            return "it can be run"
        if now is None:
            return f"{stage.name} is no stage of it"
        if stage.note or stage.share == now.share:
            return (
                f"{stage.name} has relative L2 {distance(now, 3)} instead of {distance(stage, 3)}"
            )
        return f"{stage.name} equal in {percent(now)} instead of {percent(stage)}"

    def to_data(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "base": self.base.name,
            "changes": {
                path: {"from": plain(a), "to": plain(b)} for path, (a, b) in self.changes.items()
            },
            "effect": self.effect,
            "same_bits": [words(one) for one in self.same],
            "before": self.before.to_data(),
            "after": self.after.to_data(),
        }


def words(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """Changes in words."""
    return ", ".join(f"{path} {_value(a)} -> {_value(b)}" for path, (a, b) in changes.items())


def percent(stage: StageFit) -> str:
    """The share of equal elements; what is not quite all or nothing does not read as if it were."""
    if stage.exact:
        return "100%"
    share = 100 * stage.share
    if stage.equal < stage.elements and share > 99.95:
        return f"all but {stage.elements - stage.equal} elements"
    if stage.equal and share < 0.05:
        return f"{stage.equal} elements"
    return f"{share:.1f}%"


def distance(stage: StageFit, digits: int = 2) -> str:
    """The relative L2 distance; "-" where it is none."""
    return "-" if stage.note or stage.lost else f"{stage.relative_l2:.{digits}g}"


def _value(value: Any) -> str:
    data = plain(value)
    if isinstance(data, dict):
        return "(" + ", ".join(f"{name} {entry}" for name, entry in data.items()) + ")"
    if isinstance(data, list):
        return "x".join(map(str, data))
    return "none" if data is None else str(data)


def _shown_stage(before: Fit, after: Fit) -> tuple[StageFit | None, StageFit | None]:
    """The stage that says most of a change: where the base departs if that got better, else the first that did."""
    now = {stage.name: stage for stage in after.stages}
    ordered = [stage for stage in before.stages if not stage.exact]
    for stage in ordered:
        if stage.name in now and now[stage.name].share > stage.share:
            return stage, now[stage.name]
    first = ordered[0] if ordered else None
    return first, None if first is None else now.get(first.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    base: Recipe
    recipe: Recipe
    changes: Mapping[str, tuple[Any, Any]]
    fits: tuple[Fit, ...]  # of each part
    same: tuple[Mapping[str, tuple[Any, Any]], ...] = ()  # other changes of the same bits
    handed: tuple[
        Mapping[str, tuple[Any, Any]], ...
    ] = ()  # those of what it was made of, with its last change

    @property
    def digest(self) -> str:
        return together(self.fits).digest

    @property
    def key(self) -> Key:
        return together(self.fits).key


def turned(
    bases: Sequence[Recipe],
    samples: Sequence[Sample],
    *,
    begun: Sequence[Turn] = (),
    progress: Progress | None = None,
) -> tuple[Turn, ...]:
    """The changes of recipes that bring them closer, the best first; at most `MOST_CHANGES` in each.

    Every change of one knob that the simulator computes is tried on the smallest of the samples that shows enough of
    where the recipe departs, what helps on all of them; the best are changed further while that helps, until a recipe
    gives every bit. `begun`: what an earlier call found with fewer samples; it goes on from the best of that.
    """
    states = [
        _State(
            base=recipe,
            recipe=recipe,
            changes={},
            fits=_fits(recipe, samples),
        )
        for recipe in bases
    ]
    further = [
        _State(
            base=turn.base,
            recipe=turn.recipe,
            changes=turn.changes,
            fits=_fits(turn.recipe, samples),
            same=turn.same,
        )
        for turn in begun[:_AGAIN]
    ]
    before = {state.base.name: together(state.fits) for state in states}
    found: list[_State] = sorted(further, key=lambda one: one.key, reverse=True)
    if found:
        states = found[:_BEAM]
    first = max((len(one.changes) for one in states), default=0)
    for depth in range(first, MOST_CHANGES):
        closer: list[_State] = []
        for state in states:
            closer += _closer(state, samples, depth, progress)
            if any(together(one.fits).exact for one in closer):
                break
        closer.sort(key=lambda one: one.key, reverse=True)
        closer = _merged(closer)
        found = _merged(sorted([*found, *closer], key=lambda one: one.key, reverse=True))
        if not closer or together(found[0].fits).exact:
            break
        states = closer[:_BEAM]
    found = [
        _with_handed(state, samples) if together(state.fits).exact else state for state in found
    ]
    return tuple(
        Turn(
            base=state.base,
            recipe=state.recipe,
            changes=state.changes,
            before=before[state.base.name],
            after=together(state.fits),
            same=state.same,
        )
        for state in found
    )


def _fits(recipe: Recipe, samples: Sequence[Sample]) -> tuple[Fit, ...]:
    """How a recipe compares with each sample; its backward is run where its forward departs in none."""
    ahead = tuple(fit(recipe, sample, backward=False) for sample in samples)
    if not any(one.not_run for one in ahead):
        return ahead
    if any(one.failed or not all(stage.exact for stage in one.stages) for one in ahead):
        return ahead
    return tuple(fit(recipe, sample) for sample in samples)


def _closer(
    state: _State, samples: Sequence[Sample], depth: int, progress: Progress | None
) -> list[_State]:
    """The recipes one change further that are closer, on all samples."""
    total = together(state.fits)
    if total.exact or total.failed or total.departs is None:
        return []
    ahead = not total.not_run
    ahead = ahead and all(stage.exact for stage in total.stages if not stage.backward)
    order = [_BACKWARD, _FORWARD] if ahead else [_FORWARD]
    equal = {stage.name for stage in total.stages if stage.exact and stage.elements}
    if total.departs.split(".")[0] in ("q", "k", "v", "do"):
        equal = set()  # the copies that a product takes are among its knobs
    for names in order:
        parts = tuple(name for name in names if name not in equal)  # a product that is equal
        found = _tried(state, samples, parts, depth, backward=ahead, progress=progress)
        if found:
            return found
    return []


def _tried(
    state: _State,
    samples: Sequence[Sample],
    parts: tuple[str, ...],
    depth: int,
    *,
    backward: bool,
    progress: Progress | None,
) -> list[_State]:
    at = _telling(state.fits, samples)
    before = state.fits[at]
    candidates = [
        {path: value} for path, value in permitted_changes(state.recipe, parts=parts, more=True)
    ]
    candidates += [
        one for one in joint_changes(state.recipe) if next(iter(one)).split(".")[0] in parts
    ]
    tried: list[tuple[Fit, Recipe, dict[str, Any]]] = []
    for done, change in enumerate(candidates):
        if progress is not None:
            name = f"{state.base.name}, {' and '.join(change)}"
            progress(
                done, len(candidates), f"{name} (change {depth + 1} of at most {MOST_CHANGES})"
            )
        if any(path in state.changes for path in change):
            continue
        variant = with_changes(state.recipe, change)
        if variant is None:
            continue
        one = fit(variant, samples[at], backward=backward)
        if not one.failed and one.digest != before.digest and one.key > before.key:
            tried.append((one, variant, change))
    tried.sort(key=lambda one: one[0].key, reverse=True)
    base = state.key
    kept = []
    for found, variant, change in tried[:_HELD]:
        # What was tried on the only sample need not be run again.
        alone = len(samples) == 1 and (backward or not found.not_run)
        fits = (found,) if alone else _fits(variant, samples)
        turns = {path: (value_at(state.recipe, path), value) for path, value in change.items()}
        made = _State(
            base=state.base,
            recipe=variant,
            changes={**state.changes, **turns},
            fits=fits,
            handed=tuple({**one, **turns} for one in state.same),
        )
        if made.key > base:
            kept.append(made)
    return kept


def _telling(fits: Sequence[Fit], samples: Sequence[Sample]) -> int:
    """The cheapest sample that shows enough of where a recipe departs, or else the one that shows most."""
    departs = together(fits).departs

    def count(one: Fit) -> int:
        return sum(x.elements - x.equal for x in one.stages if x.name == departs)

    order = sorted(range(len(samples)), key=lambda at: samples[at].cost)
    enough = next((at for at in order if count(fits[at]) >= _ENOUGH), None)
    return max(order, key=lambda at: count(fits[at])) if enough is None else enough


def _with_handed(state: _State, samples: Sequence[Sample]) -> _State:
    """With the other ways to make the first of its changes, where they still give the same bits."""
    same = list(state.same)
    for changes in state.handed[:_HELD]:
        variant = with_changes(state.base, {path: to for path, (_, to) in changes.items()})
        if variant is not None and changes not in same:
            fits = _fits(variant, samples)
            if together(fits).digest == state.digest:
                same.append(changes)
    return dataclasses.replace(state, same=tuple(same), handed=())


def _merged(states: list[_State]) -> list[_State]:
    """Each result once: the fewest changes first, with what else gives the same bits."""
    found: dict[tuple[str, str], _State] = {}
    for state in states:
        mark = (state.base.name, together(state.fits).digest)
        if mark not in found:
            found[mark] = state
            continue
        first = found[mark]
        if len(state.changes) < len(first.changes):
            first, state = state, first
        known = (first.changes, *first.same)
        if len(state.changes) == len(first.changes) and state.changes not in known:
            first = dataclasses.replace(first, same=(*first.same, state.changes))
        found[mark] = first
    return list(found.values())
