"""The verdict on each tensor of a case: bit for bit, or by the envelope of what it was computed from."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref._errors import line
from flamia_ref.golden.bitwise import Aligned, Bools, values
from flamia_ref.golden.copies import HEADS
from flamia_ref.golden.dataflow import visible_pairs
from flamia_ref.golden.pack import Case
from flamia_ref.golden.simulation import tiled_scales
from flamia_ref.golden.stage import Place, Role, View
from flamia_ref.report.model import Width

if TYPE_CHECKING:
    from flamia_ref.attention.knobs import Schedule
    from flamia_ref.golden.envelope.record import Permitted

_FLOATS = (View.F32, View.BF16)
_ROW_STAGES = ("row_max", "row_sum")
_GRADIENTS = frozenset({"dq", "dk", "dv"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Which elements of a tensor fail, which differ and are permitted all the same, and how wide the envelope is.

    `judged`: by an envelope; None of `width`: nothing had to be judged. `note` says why there is none.
    """

    failing: Bools
    inside: Bools
    judged: bool = False
    width: Width | None = None
    note: str = ""


def judge(
    case: Case,
    aligned: Mapping[str, Aligned],
    handed: frozenset[str] = frozenset(),
    *,
    instruction: str | None = None,
) -> dict[str, Verdict]:
    """Return the verdict on every tensor that was given and could be compared.

    What has the bits of the pack passes. What differs is judged by the stages that lead to it: the kernel's own where
    it gave them, except for those in `handed`, whose bits in the pack it was given, and otherwise what the recipe
    permits of them. Operands of q, k and v, whose steps leave nothing open, are compared bit for bit. `instruction`: as
    in `flamia_ref.golden.check`.
    """
    differs = {name: _differs(case, name, one) for name, one in aligned.items()}
    found = {
        name: Verdict(failing=where, inside=np.zeros_like(where)) for name, where in differs.items()
    }
    wanted = [
        name for name, where in differs.items() if where.any() and not _exact(case.places[name])
    ]
    if not wanted:
        return found
    from flamia_ref.attention import Recipe

    recipe = Recipe.from_json(dict(case.recipe.recipe))
    given = {
        name: _bits(case.tensors[name])
        if case.places[name].stage.name in handed
        else _stored(one, case.places[name])
        for name, one in aligned.items()
        if case.places[name].stage.role is not Role.INPUT
    }
    try:
        ways = [_permitted(case, recipe, given, wanted, instruction)]
        failing = [
            name
            for name in wanted
            if _judged(case, name, aligned[name], ways, differs[name]).failing.any()
        ]
        stages = {case.places[name].stage.name for name in failing}
        ways += [
            _permitted(case, recipe.scheduled(one.name), given, failing, instruction)
            for one in recipe.schedules
            if one.splits in (None, 1) and _concerns(one, stages)
        ]
    except ValueError as error:
        note = f"no envelope: {line(str(error))}"
        return found | {
            name: Verdict(failing=differs[name], inside=np.zeros_like(differs[name]), note=note)
            for name in wanted
        }
    for name in wanted:
        found[name] = _judged(case, name, aligned[name], ways, differs[name])
    return found


def consistent(
    case: Case, aligned: Mapping[str, Aligned], *, instruction: str | None = None
) -> bool | None:
    """Return whether the outputs that were given are what some permitted way from the inputs gives.

    The gradients are judged by the out and the lse that were given beside them. None: the recipe has no envelope.
    """
    outputs = {
        name: one for name, one in aligned.items() if case.places[name].stage.role is Role.OUTPUT
    }
    # The forward first: where it fails the backward, which costs more, need not be asked.
    for backward in (False, True):
        part = {
            name: one
            for name, one in outputs.items()
            if backward or not case.places[name].stage.backward
        }
        found = judge(case, part, instruction=instruction).values()
        if any(verdict.note for verdict in found):
            return None
        if any(verdict.failing.any() for verdict in found):
            return False
        if len(part) == len(outputs):
            break
    return True


def _concerns(schedule: "Schedule", stages: Set[str]) -> bool:
    """Whether a schedule can change any of some stages. That of the backward has a part in its last sums alone."""
    return bool(stages) and (schedule.o_order is not None or not _GRADIENTS.isdisjoint(stages))


def _permitted(
    case: Case,
    recipe: Any,
    given: Mapping[str, Any],
    wanted: Iterable[str],
    instruction: str | None,
) -> "dict[str, Permitted]":
    from flamia_ref.golden.envelope.judging import permitted

    found = permitted(
        case.spec,
        recipe,
        case.tensors,
        given,
        (*wanted, *_sources(case, wanted)),
        instruction=instruction,
    )
    for name in wanted:
        place = case.places[name]
        source = place.stage.parents[0] if place.stage.tiled else None
        if source is not None and source in found:
            of = case.recipe.dataflow.stages[source]
            low = tiled_scales(found[source].low, of, place.stage, case.spec)[place.document or 0]
            known = np.ones(low.shape, dtype=bool)
            found[name] = type(found[source])(low, low, ~known, known)
    return found


def _sources(case: Case, wanted: Iterable[str]) -> list[str]:
    """The scales that tiled ones are made from."""
    return [case.places[name].stage.parents[0] for name in wanted if case.places[name].stage.tiled]


def _judged(
    case: Case, name: str, one: Aligned, ways: "list[dict[str, Permitted]]", differs: Bools
) -> Verdict:
    place = case.places[name]
    optional = place.stage.masked_optional
    skipped = np.zeros(differs.shape, dtype=bool)
    if optional:
        skipped = ~visible_pairs(case.spec, place) & one.skipped()
    permitted = None
    for way in ways:
        if name not in way:
            continue
        mine = _inside(way[name], one, place) | skipped
        if place.stage.name in _ROW_STAGES:
            mine |= _as_a_pair(way, mine.shape)
        if permitted is None:
            permitted = mine
        elif (
            len(place.shape) == 3 and place.stage.axes[-1] == "head_dim"
        ):  # a row is of one schedule
            whole = mine.all(axis=-1, keepdims=True)
            permitted = np.where(
                permitted.all(axis=-1, keepdims=True), permitted, np.where(whole, mine, permitted)
            )
        else:
            permitted = permitted | mine
    if permitted is None:
        return Verdict(failing=differs, inside=np.zeros_like(differs))
    known = ways[0][name].known if name in ways[0] else np.zeros(differs.shape, dtype=bool)
    failing = differs & np.where(known, ~permitted, True)
    return Verdict(
        failing=failing,
        inside=differs & ~failing,
        judged=True,
        width=_width(ways[0][name], one, place) if name in ways[0] else None,
    )


def _as_a_pair(way: "dict[str, Permitted]", shape: tuple[int, ...]) -> Bools:
    """Where the kernel's own maximum and sum give an lse that is permitted: they are never judged alone."""
    from flamia_ref.golden.envelope.record import PAIR

    return way[PAIR].known if PAIR in way else np.zeros(shape, dtype=bool)


def _inside(of: "Permitted", one: Aligned, place: Place) -> Bools:
    """Which given elements lie between the permitted ends by value, or are a permitted NaN."""
    view = place.stage.view
    given = values(_stored(one, place), view)
    low, high = values(of.low, view), values(of.high, view)
    only = np.isnan(low) & np.isnan(high)
    with np.errstate(invalid="ignore"):
        between = (given >= low) & (given <= high)
    inside = between | (np.isnan(given) & (of.nan | only))
    if (
        view is View.BF16 and one.view is View.F32
    ):  # what is no bfloat16 cannot be one of its values
        inside &= ((one.actual & np.uint32(0xFFFF)) == 0) | np.isnan(values(one.actual, one.view))
    return np.asarray(inside)


def _width(of: "Permitted", one: Aligned, place: Place) -> Width:
    view = place.stage.view
    low, high = values(of.low, view), values(of.high, view)
    expected = values(_narrow(one.expected, one, place), view)
    with np.errstate(invalid="ignore", over="ignore"):
        wide = np.where(of.known, high - low, 0.0)
        fine = np.isfinite(expected) & np.isfinite(wide)
    rms = float(np.sqrt(np.mean(np.square(expected[fine])))) if fine.any() else 0.0
    return Width(
        relative=float(np.mean(wide[fine])) / rms if rms else 0.0,
        ambiguous=int(np.count_nonzero(of.known & (low < high))),
        unbounded=int(np.count_nonzero(of.known & np.isneginf(low) & np.isposinf(high))),
    )


def _differs(case: Case, name: str, one: Aligned) -> Bools:
    differs = one.differs()
    place = case.places[name]
    if place.stage.masked_optional:
        differs &= visible_pairs(case.spec, place) | ~one.skipped()
    return differs


def _exact(place: Place) -> bool:
    """Whether nothing is open in how a tensor is computed: inputs, and what is made of q, k and v."""
    name = place.stage.name
    return place.stage.role is Role.INPUT or name.split(".")[0] in {*HEADS} - {"do"}


def _stored(one: Aligned, place: Place) -> Any:
    """Given bits in the type of the pack; float32 that is no bfloat16 stays what it is, and so outside."""
    return _narrow(one.actual, one, place)


def _narrow(bits: Any, one: Aligned, place: Place) -> Any:
    if place.stage.view is View.BF16 and one.view is View.F32:
        exact = (bits & np.uint32(0xFFFF)) == 0
        narrow = (bits >> np.uint32(16)).astype(np.uint16)
        return np.where(exact, narrow, np.uint16(0x7FFF))
    return bits


def _bits(tensor: Any) -> Any:
    return tensor.view(np.uint32) if tensor.dtype == np.float32 else tensor
