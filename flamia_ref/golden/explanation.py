"""One element of a tensor, walked back to the inputs that it comes from: `explain`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from flamia_ref._errors import shown, unknown_name
from flamia_ref.golden.bitwise import Aligned, as_text
from flamia_ref.golden.diagnosis import coordinates
from flamia_ref.golden.elements import Elements, recipe_in
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.lineage import Lineage, Term, distance
from flamia_ref.golden.operand_lineage import code, scale, tiled
from flamia_ref.golden.pack import Case
from flamia_ref.golden.product_lineage import channels, over_tokens
from flamia_ref.golden.softmax_lineage import BETWEEN
from flamia_ref.golden.stage import Place, Role
from flamia_ref.report.model import Bits, Pair

SCHEMA = "flamia-ref explanation"
SCHEMA_VERSION = 1
_LINES = 40
_STEPS = 12
Index = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """One element: its tensor, index, and bits. `actual` is None where nothing was given."""

    tensor: str
    index: Index
    bits: Pair

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        given = "" if self.bits.actual is None else f", actual {self.bits.actual}"
        return f"{self.tensor}[{at}] = {self.bits.expected}{given}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """How one element was computed.

    `where` is its place in words, `how` what the recipe says, `evidence` what that rests on.
    `parents` are the elements that it was computed from, the one that matters most first. `terms` are
    the largest parts of a sum of `count`, whose value in float64 is `total`. `before` is the value
    before rounding, in units of its scale, and `boundary` how far that is from where it would round
    to another: 0 at the boundary, 0.5 steps on a value. None where the pack does not tell.
    """

    element: Element
    where: Mapping[str, int | str]
    how: str
    evidence: str
    parents: tuple[Element, ...]
    terms: tuple[Term, ...]
    count: int
    total: float | None
    before: float | None
    boundary: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """An element and what it comes from: a step for it, for what it depends on most, and so on down to an input."""

    case: str
    steps: tuple[Step, ...]

    def to_text(self) -> str:
        """Return at most 40 lines."""
        lines = [self.case]
        for number, step in enumerate(self.steps):
            lines += _lines(step, whole=number == 0)
        if len(lines) > _LINES:
            lines = [
                *lines[: _LINES - 1],
                f"... and {len(lines) - _LINES + 1} lines more; --json has all",
            ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the same as JSON that ends with a newline. Numbers that JSON has not are strings."""
        document = {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "case": self.case,
            "steps": [_plain(asdict(step) | {"where": dict(step.where)}) for step in self.steps],
        }
        return json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False) + "\n"

    def __str__(self) -> str:
        return self.to_text()


def explain(
    case: Case,
    tensor: str,
    index: Index,
    actual: Mapping[str, Aligned | Tensor] | None = None,
) -> Explanation:
    """Return how an element of a case was computed, back to the inputs.

    `tensor` is a name in `case.tensors`, `index` has a number an axis, each from 0. `actual` holds by
    name what a kernel gave, aligned or in the types of the pack, to be shown beside what was expected.

    Raises ValueError for a tensor that the case has not, and an index that is outside it.
    """
    if tensor not in case.places:
        raise unknown_name("tensor", tensor, case.places)
    place = case.places[tensor]
    index = tuple(int(one) for one in index)
    if len(index) != len(place.shape) or any(
        not 0 <= one < size for one, size in zip(index, place.shape, strict=True)
    ):
        axes = ", ".join(
            f"{axis} 0 to {size - 1}" if size else f"{axis} none"
            for axis, size in zip(place.stage.axes, place.shape, strict=True)
        )
        raise ValueError(
            f"index is {shown(index)}, and {tensor} has {axes}; give a number for each axis"
        )
    given = {} if actual is None else actual
    steps: list[Step] = []
    at: tuple[str, Index] | None = (tensor, index)
    with np.errstate(all="ignore"):
        while at is not None and len(steps) < _STEPS:
            step = _step(case, at[0], at[1], given)
            steps.append(step)
            at = next(
                (
                    (one.tensor, one.index)
                    for one in step.parents
                    if one.tensor not in {done.element.tensor for done in steps}
                ),
                None,
            )
    return Explanation(case=case.name, steps=tuple(steps))


def _step(case: Case, name: str, index: Index, given: Mapping[str, Aligned | Tensor]) -> Step:
    place = case.places[name]
    found = lineage(case, name, index)
    return Step(
        element=_element(case, name, index, given),
        where=coordinates(case, place, index),
        how=found.how,
        evidence=_evidence(case, found),
        parents=tuple(
            _element(case, *parent, given) for parent in found.parents if parent[0] in case.places
        ),
        terms=found.terms,
        count=found.count,
        total=found.total,
        before=found.before,
        boundary=None if found.before is None else distance(found.before, place.stage.view),
    )


def lineage(case: Case, name: str, index: Index) -> Lineage:
    """Return where an element of a tensor comes from."""
    of, place = Elements(case), case.places[name]
    stage = place.stage
    if stage.role is Role.INPUT:
        return Lineage(how="an input")
    copy = next((one for one in of.copies if stage.name.startswith(f"{one.name}.")), None)
    if copy is not None and stage.name != "p.dv":
        if stage.tiled:
            return tiled(of, place, index)
        return (code if stage.name == copy.codes else scale)(of, copy, place, index)
    if stage.name in ("s", "dp"):
        return channels(of, place, index)
    if stage.name in ("o", "dq", "dk", "dv"):
        return over_tokens(of, place, index)
    return BETWEEN[stage.name](of, place, index)


def _evidence(case: Case, found: Lineage) -> str:
    if not found.part:
        return ""
    steps = recipe_in(case).steps
    path = found.part
    while path and path not in steps:
        path = path.rpartition(".")[0]
    return f"{steps[path].evidence}: {steps[path].source}" if path else ""


def _element(case: Case, name: str, index: Index, given: Mapping[str, Aligned | Tensor]) -> Element:
    place = case.places[name]
    expected = _bits(np.asarray(case.tensors[name][index]), place)
    actual = None
    if name in given:
        one = given[name]
        array = one.actual if isinstance(one, Aligned) else np.asarray(one)
        wide = isinstance(one, Aligned) and one.view != place.stage.view
        element = np.asarray(array[index])
        actual = _bits(element, place, aligned=one if wide and isinstance(one, Aligned) else None)
    return Element(tensor=name, index=index, bits=Pair(expected=expected, actual=actual))


def _bits(element: Tensor, place: Place, aligned: Aligned | None = None) -> Bits:
    if element.dtype == np.float32:
        element = element.view(np.uint32)
    bits, value = as_text(element, place.stage.view if aligned is None else aligned.view)
    return Bits(bits=bits, value=value)


def _lines(step: Step, *, whole: bool) -> list[str]:
    place = ", ".join(f"{name} {value}" for name, value in step.where.items())
    lines = [str(step.element), *([f"  at {place}"] if whole else [])]
    evidence = f" ({step.evidence.partition(':')[0]})" if step.evidence else ""
    lines.append(f"  {step.how}{evidence}")
    if step.before is not None:
        near = (
            "" if step.boundary is None else f", {step.boundary:.3g} steps from the next boundary"
        )
        lines.append(f"  before rounding {step.before:.9g}{near}")
    if step.total is not None:
        lines.append(f"  {step.count} parts, in float64 {step.total:.9g}; the largest:")
        shown_terms = step.terms if whole else step.terms[:1]
        lines += [f"    {term.which} = {term.value:.9g}" for term in shown_terms]
    if whole and step.parents:
        lines.append("  from")
        lines += [f"    {parent}" for parent in step.parents]
    elif len(step.parents) > 1:
        lines.append(f"  with {'; '.join(map(str, step.parents[1:]))}")
    return lines


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return repr(value)
    return value
