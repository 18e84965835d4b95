"""The steps of a quantizer, and the one that makes two formats differ on a block."""

import dataclasses
from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import Any

from flamia_ref.formats.block import Arithmetic, BlockFormat, ScaleRule
from flamia_ref.formats.rounding import Rounding


class Step(StrEnum):
    """A step of a quantizer, in the order of the dataflow."""

    TRANSFORM = "Hadamard transform"
    SUBNORMALS = "subnormal operands and results"
    ARITHMETIC = "arithmetic of the formulas"
    ZERO_BELOW = "blocks taken for zeros"
    NAN_AMAX = "amax of a block with a NaN"
    SMALLEST = "smallest amax or quotient"
    TENSOR_SCALE = "tensor scale"
    SCALE_RULE = "scale rule"
    SCALE_ROUNDING = "scale rounding"
    QUOTIENT = "quotient"
    SCALE_RANGE = "range of the scale"
    UNDERFLOW = "scale that underflows"
    INFINITY = "scale of an infinite amax"
    ZERO_BLOCK = "scale of a block of zeros"
    ROW = "span of the scales of a row"
    CHOICE = "choice of two scales"
    SCALE_VALUE = "what x is divided by"
    SCALED = "scaled element"
    ELEMENT_STEP = "log2 of the element"
    ROUNDING = "element rounding"
    OVERFLOW = "element overflow"
    NAN_BLOCK = "elements of a NaN block"
    NAN_CODE = "code of a NaN"
    ZERO_SIGN = "sign of a zero code"


_RULE = ("rule", "quotient", "exponent", "even_bits", "log2", "by_log2")
_TENSOR = ("tensor_scale", "tensor_divides", "tensor_extent", "prepared")

#: What is data of each step: replacing these fields in turn makes one format of another.
_FIELDS: dict[Step, tuple[str, ...]] = {
    Step.TRANSFORM: ("signs",),
    Step.SUBNORMALS: ("subnormals",),
    Step.ARITHMETIC: ("arithmetic",),
    Step.ZERO_BELOW: ("zero_below",),
    Step.NAN_AMAX: ("nan", "nan_scale"),
    Step.SMALLEST: ("smallest_amax", "smallest_quotient"),
    Step.TENSOR_SCALE: _TENSOR,
    Step.SCALE_ROUNDING: ("scale_rounding",),
    Step.QUOTIENT: _RULE,
    Step.SCALE_RANGE: ("scale_range",),
    Step.UNDERFLOW: ("underflow_scale",),
    Step.INFINITY: ("infinity_scale", "even_overflow"),
    Step.ZERO_BLOCK: ("zero_scale",),
    Step.ROW: ("row_span",),
    Step.CHOICE: ("choice", "decoded"),
    Step.SCALE_VALUE: ("scale_values",),
    Step.SCALED: ("scaled",),
    Step.ELEMENT_STEP: ("element_log2",),
    Step.ROUNDING: ("rounding", "half_added"),
    Step.OVERFLOW: ("overflow",),
    Step.NAN_BLOCK: ("nan_block_code",),
    Step.NAN_CODE: ("nan_codes", "nan_element"),
    Step.ZERO_SIGN: ("zero_sign",),
}

#: All of these fields: what two formats may differ in and their elements are still comparable.
DATA = ("scale", *(field for fields in _FIELDS.values() for field in fields))


def responsible(
    a: BlockFormat,
    b: BlockFormat,
    outcome: Callable[[BlockFormat], Hashable],
    *,
    made_nan: bool = False,
) -> tuple[Step, tuple[str, ...], tuple[Step, ...]]:
    """The step that makes the outcomes of two formats differ, its fields that do, and what other steps have a part.

    The data of one step after another is replaced in `a` by that of `b`, and the other way around: it
    is the last step that changes the outcome both ways. So it is a cause and no guess. Where no step
    does both ways, several are needed together: it is then the last of them. The other steps are
    those needed together, and those that make the difference where they alone are replaced.

    Args:
        a, b: formats as they are for one input type, with elements in one format.
        outcome: what a format gives: a scale, or a code.
        made_nan: the code is that of a NaN that is none in x: the step is then the one that makes
            it, where its code is another one besides.

    Raises ValueError where the formats have no step with such an effect.
    """
    plain = (_as_quotient(a), _as_quotient(b))
    start, goal = a, b
    if plain[0] is not None and plain[1] is not None:
        start = plain[0] if outcome(plain[0]) == outcome(a) else a
        goal = plain[1] if outcome(plain[1]) == outcome(b) else b
    groups = _groups(start, goal)
    forth, back = _changes(start, goal, groups, outcome), _changes(goal, start, groups, outcome)
    both = [step for step in forth if step in back]
    if made_nan and len(both) > 1 and both[-1] is Step.NAN_CODE:
        both.pop()
    if not (forth and back):
        raise ValueError(f"no step accounts for the difference of {a.name} and {b.name}")
    order = list(Step)
    needed = {forth[-1], back[-1]}
    found = both[-1] if both else max(needed, key=order.index)
    alone = {
        step
        for step, fields in groups
        if _suffices(start, goal, fields, outcome) or _suffices(goal, start, fields, outcome)
    }
    fields = tuple(f for f in dict(groups)[found] if getattr(a, f) != getattr(b, f))
    others = (alone | needed) - {found} if not both else alone - {found}
    return found, fields, tuple(sorted(others, key=order.index))


def _changes(
    a: BlockFormat,
    b: BlockFormat,
    groups: list[tuple[Step, tuple[str, ...]]],
    outcome: Callable[[BlockFormat], Hashable],
) -> list[Step]:
    """The steps that change the outcome, as their data is replaced in `a` by that of `b`."""
    current, before = a, outcome(a)
    changed: list[Step] = []
    pending: dict[str, Any] = {}
    first: Step | None = None
    for step, fields in groups:
        changes = {f: getattr(b, f) for f in fields if getattr(current, f) != getattr(b, f)}
        if not changes and not pending:
            continue
        pending |= changes
        first = first or step
        try:
            current = dataclasses.replace(current, **pending)
        except ValueError:  # parts that need each other: with those of the next step
            continue
        after = outcome(current)
        if after != before:
            changed.append(first)
        before, pending, first = after, {}, None
    return changed


def _suffices(
    a: BlockFormat,
    b: BlockFormat,
    fields: tuple[str, ...],
    outcome: Callable[[BlockFormat], Hashable],
) -> bool:
    """Whether `a` with these fields of `b` gives what `b` gives."""
    changes = {f: getattr(b, f) for f in fields if getattr(a, f) != getattr(b, f)}
    try:
        return bool(changes) and outcome(dataclasses.replace(a, **changes)) == outcome(b)
    except ValueError:  # it needs others
        return False


def _groups(a: BlockFormat, b: BlockFormat) -> list[tuple[Step, tuple[str, ...]]]:
    """Fields by step, those together that mean nothing apart in these two formats."""
    groups = dict(_FIELDS)
    if a.has_tensor_scale != b.has_tensor_scale:
        _join(groups, Step.TENSOR_SCALE, _OF_SCALES)
    elif a.rule is not ScaleRule.QUOTIENT or b.rule is not ScaleRule.QUOTIENT:
        _join(groups, Step.SCALE_RULE, (Step.SCALE_ROUNDING, Step.QUOTIENT))
    if a.scale != b.scale:  # codes of two scale formats: all that names one goes together
        _join(groups, Step.SCALE_RULE, (*_OF_SCALES, *_OF_CODES), more=("scale",))
    order = list(Step)
    return sorted(groups.items(), key=lambda item: order.index(item[0]))


_OF_SCALES = (Step.TENSOR_SCALE, Step.SCALE_ROUNDING, Step.QUOTIENT, Step.CHOICE, Step.SCALED)
_OF_CODES = (
    *(Step.NAN_AMAX, Step.SCALE_RANGE, Step.UNDERFLOW, Step.INFINITY, Step.ZERO_BLOCK, Step.ROW),
    *(Step.SCALE_RULE, Step.SCALE_VALUE),
)


def _join(
    groups: dict[Step, tuple[str, ...]],
    step: Step,
    steps: tuple[Step, ...],
    *,
    more: tuple[str, ...] = (),
) -> None:
    """Make one of several steps."""
    fields = [*more]
    for one in steps:
        fields += groups.pop(one, ())
    groups[step] = tuple(fields)


def _as_quotient(block_format: BlockFormat) -> BlockFormat | None:
    """The format with its rule as a quotient and a rounding, None for rules that are no such thing."""
    element = block_format.element
    exponent = element.emax if block_format.exponent is None else block_format.exponent
    changes: dict[str, Any]
    match block_format.rule:
        case ScaleRule.QUOTIENT:
            return block_format
        case ScaleRule.RCEIL if block_format.arithmetic is Arithmetic.FLOAT32:
            changes = {"quotient": f"amax * (1 / {element.max:g})", "scale_rounding": Rounding.UP}
        case ScaleRule.EXACT_RCEIL:
            changes = {"quotient": f"amax / {element.max:g}", "scale_rounding": Rounding.UP}
        case ScaleRule.FLOOR | ScaleRule.CEIL if block_format.scales_are_powers:
            up = block_format.rule is ScaleRule.CEIL
            changes = {
                "quotient": f"amax / {2**exponent}",
                "scale_rounding": Rounding.UP if up else Rounding.TOWARD_ZERO,
            }
        case _:
            return None
    return dataclasses.replace(block_format, rule=ScaleRule.QUOTIENT, exponent=None, **changes)
