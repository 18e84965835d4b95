"""The search for known mistakes that explain where a kernel first departs: `diagnose`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from flamia_ref._errors import unknown_name
from flamia_ref.golden.bitwise import Aligned
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.agreement import DIFFERENT, Counts, agreement, far
from flamia_ref.golden.mistakes.catalogue import GROUPS, MISTAKES
from flamia_ref.golden.mistakes.mistake import Mistake, Needs, Variant, kinds
from flamia_ref.golden.mistakes.scene import Scene, wide
from flamia_ref.golden.pack import Case
from flamia_ref.golden.stage import Place, View
from flamia_ref.report.model import Diagnosis

Bools = npt.NDArray[np.bool_]

ENOUGH = 0.9
"""Of the failing elements, what a mistake must explain."""
MARGIN = 0.02
"""How much worse than the best a mistake may be that is listed beside it."""
MOST = 3
_FEWEST = 3  # failing elements: fewer say nothing
_WANTED = 64  # failing elements of the part that is tried first
_PART = 40_000_000  # multiply-adds of a part that every mistake is tried on
_MORE = 120_000_000  # of the parts that a mistake which explains the first is held to
_FLOATS = (View.F32, View.BF16)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    """A tensor of the stage that departs, in bits of one view, with what fails in it and what counts."""

    place: Place
    view: View
    expected: Tensor
    given: Tensor
    failing: Bools
    considered: Bools

    def counts(self, scene: Scene, mistaken: Tensor) -> Counts:
        """How a mistake agrees with the part of the tensor in a scene."""
        parts = (
            scene.cut(self.place, one)
            for one in (self.expected, self.given, self.failing, self.considered)
        )
        expected, given, failing, considered = parts
        if self.view is not self.place.stage.view:
            mistaken = wide(mistaken)
        if mistaken.shape != expected.shape:
            return Counts(int(failing.sum()), 0, 0)
        return agreement(expected, given, mistaken, failing, considered, self.view)


def diagnose(
    case: Case, given: Mapping[str, Aligned], first: str, *, failing: Bools | None = None
) -> tuple[Diagnosis, ...]:
    """Return the known mistakes that explain where a kernel departs from a case, the best one first.

    `given` holds by name what was given and could be compared, `first` names the first tensor that
    fails. `failing`, of its shape, says which elements do; without it, all that differ. What fails
    is looked at in parts, a document and a key/value head each, the small ones first, and no more of
    them than takes a few seconds; the counts are those of these parts. A mistake is listed where it
    explains nine in ten of their failing elements, among them three different numbers other than 0,
    and changes no more than one passing element for ten of those. Mistakes that explain as much as
    the best are all listed, nearly as good ones up to three in all, each name once. An empty result
    means that no known mistake explains the data.

    Raises ValueError for a name that was not given.
    """
    if first not in given:
        raise unknown_name("given tensor", first, given)
    with np.errstate(all="ignore"):
        for loose in (False, True):
            tensors = _tensors(case, given, first, failing, loose=loose)
            found = _search(case, given, first, tensors) if tensors else ()
            if found:
                return found
    return ()


def _tensors(
    case: Case, given: Mapping[str, Aligned], first: str, failing: Bools | None, *, loose: bool
) -> list[_Tensor]:
    """The tensors of the stage, the first one first. `loose`: floats that are near count as passing."""
    stage = case.places[first].stage.name
    names = [first, *(name for name in given if name != first and name in case.places)]
    found = []
    for name in names:
        place, one = case.places[name], given[name]
        if place.stage.name != stage:
            continue
        if loose and (one.view not in _FLOATS or failing is not None):
            return []
        differs = one.differs()
        considered = np.ones(differs.shape, np.bool_)
        if place.stage.masked_optional:
            considered &= case.spec.visible(place.document or 0) | ~one.skipped()
        fails = differs & considered
        if name == first and failing is not None:
            fails = failing & considered
        elif loose or (failing is not None and one.view in _FLOATS):
            fails &= far(one.expected, one.actual, one.view)
        found.append(
            _Tensor(
                place=place,
                view=one.view,
                expected=one.expected,
                given=one.actual,
                failing=fails,
                considered=considered,
            )
        )
    enough = sum(int(one.failing.sum()) for one in found) >= _FEWEST
    return found if enough and found[0].failing.any() else []


def _search(
    case: Case, given: Mapping[str, Aligned], first: str, tensors: list[_Tensor]
) -> tuple[Diagnosis, ...]:
    parts = _parts(case, given, tensors)
    if not parts:
        return ()
    whole = frozenset(case.places[name].stage.name for name in given if name in case.places)
    stage = case.places[first].stage
    origins = kinds(stage.name).union(
        *(kinds(name) for name in case.recipe.dataflow.suspects(stage.name, whole))
    )
    found: list[tuple[float, Counts, Mistake, Variant]] = []
    for group in GROUPS:
        for mistake in group:
            if not mistake.shows & origins:
                continue
            best = _best(mistake, parts, tensors)
            if best is not None:
                found.append((best[0].score, best[0], mistake, best[1]))
        if any(score == 1 and counts.explained >= _WANTED for score, counts, _, _ in found):
            break  # nothing can explain more, and the later groups cost more
    if not found:
        return ()
    found.sort(key=lambda one: -one[0])
    found = list({one[2].name: one for one in reversed(found)}.values())[::-1]  # each name once
    found.sort(key=lambda one: -one[0])
    top = found[0][0]
    equal = [one for one in found if one[0] >= top]
    near = [one for one in found if top > one[0] >= top - MARGIN]
    return tuple(
        Diagnosis(
            mistake=str(mistake.name),
            sentence=variant.sentence,
            name=first,
            explained=counts.explained,
            failing=counts.failing,
        )
        for _, counts, mistake, variant in [*equal, *near[: max(0, MOST - len(equal))]]
    )


def _parts(case: Case, given: Mapping[str, Aligned], tensors: list[_Tensor]) -> list[Scene]:
    """The parts of a case in the order in which they are looked at: first one that fails in enough places."""
    spec = case.spec
    failing: list[tuple[Scene, int]] = []
    passing: list[Scene] = []
    for document in range(len(spec.lengths)):
        for head in range(spec.kv_heads):
            scene = Scene(case=case, documents=(document,), kv_heads=(head,), actual=given)
            if not scene.cost or scene.cost > _PART:
                continue
            count = sum(int(scene.cut(one.place, one.failing).sum()) for one in tensors)
            if count:
                failing.append((scene, count))
            else:
                passing.append(scene)
    if not failing:
        return []
    failing.sort(key=lambda one: one[0].cost)
    most = max(count for _, count in failing)
    start = next(at for at, (_, count) in enumerate(failing) if count >= min(_WANTED, most))
    order = [failing[start], *failing[:start], *failing[start + 1 :]]
    return [*(scene for scene, _ in order), *sorted(passing, key=lambda one: one.cost)]


def _best(
    mistake: Mistake, parts: list[Scene], tensors: list[_Tensor]
) -> tuple[Counts, Variant] | None:
    """The way to make a mistake that explains most, and the first of equals; None where none explains enough."""
    scenes = _widened(mistake.needs, parts)
    best: tuple[Counts, Variant] | None = None
    for variant in mistake.variants(scenes[0], tensors[0].place):
        counts = _counts(variant, scenes[0], tensors)
        if counts is None or not _explains(counts):
            continue
        counts = _held_to_more(variant, counts, scenes, tensors)
        different = counts.vanished if mistake.zeros else counts.values
        if (
            _explains(counts)
            and len(different) >= DIFFERENT
            and (best is None or counts.score > best[0].score)
        ):
            best = (counts, variant)
    return best


def _widened(needs: Needs, parts: list[Scene]) -> list[Scene]:
    """The parts as large as a mistake needs them, each once."""
    if needs is Needs.PART:
        return parts
    spec = parts[0].case.spec
    every = {Needs.HEADS: "kv_heads", Needs.DOCUMENTS: "documents"}[needs]
    count = spec.kv_heads if needs is Needs.HEADS else len(spec.lengths)
    return list(dict.fromkeys(replace(one, **{every: tuple(range(count))}) for one in parts))  # type: ignore[arg-type]


def _held_to_more(
    variant: Variant, counts: Counts, scenes: list[Scene], tensors: list[_Tensor]
) -> Counts:
    spent = scenes[0].cost
    for scene in scenes[1:]:
        spent += scene.cost
        if spent > _MORE:
            break
        more = _counts(variant, scene, tensors)
        if more is None:
            more = Counts(_failing(scene, tensors), 0, 0)
        counts = counts + more
        if not _explains(counts) and counts.failing > 4 * _WANTED:
            break
    return counts


def _failing(scene: Scene, tensors: list[_Tensor]) -> int:
    return sum(int(scene.cut(one.place, one.failing).sum()) for one in tensors)


def _counts(variant: Variant, scene: Scene, tensors: list[_Tensor]) -> Counts | None:
    """How a mistake agrees in a scene, over all tensors of the stage; None where it cannot be made there."""
    total, made = Counts(0, 0, 0), False
    for one in tensors:
        if one.place.document is not None and one.place.document not in scene.documents:
            continue
        mistaken = variant.made(scene, one.place)
        if mistaken is None:
            total += Counts(int(scene.cut(one.place, one.failing).sum()), 0, 0)
            continue
        made = True
        total += one.counts(scene, mistaken)
    return total if made else None


def _explains(counts: Counts) -> bool:
    allowed = (1 - ENOUGH) * counts.failing
    return (
        counts.failing > 0
        and counts.explained >= ENOUGH * counts.failing
        and counts.contradicted <= allowed
    )


def tried(case: Case, first: str) -> Iterator[str]:
    """Yield the names of the mistakes that can show at a tensor."""
    for mistake in MISTAKES:
        if mistake.shows & kinds(case.places[first].stage.name):
            yield str(mistake.name)
