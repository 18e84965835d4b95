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


def responsible(
    a: BlockFormat,
    b: BlockFormat,
    outcome: Callable[[BlockFormat], Hashable],
    *,
    made_nan: bool = False,
) -> tuple[Step, tuple[str, ...], tuple[Step, ...]]:
    """The step that makes an outcome of `a` that of `b`, its fields that differ, and other such steps.

    The data of one step after another is replaced in `a` by that of `b`; it is the last step that
    changes the outcome. So it is a cause and no guess: without it the outcome is another one. The
    other steps are those that make it too where they alone are replaced.

    Args:
        a, b: formats as they are for one input type, with elements in one format.
        outcome: what a format gives: a scale, or a code.
        made_nan: the code is that of a NaN that is none in x: the step is then the one that makes
            it, where its code is another one besides.
    """
    start = a
    if (plain := _as_quotient(a)) is not None and _as_quotient(b) is not None:
        start = plain if outcome(plain) == outcome(a) else a
    goal = _as_quotient(b) if start is not a or a.rule is ScaleRule.QUOTIENT else None
    goal = goal if goal is not None and outcome(goal) == outcome(b) else b
    groups = _groups(start, goal)
    current, changed, pending = start, list[Step](), dict[str, Any]()
    before = outcome(current)
    first: Step | None = None
    for step, fields in groups:
        changes = {f: getattr(goal, f) for f in fields if getattr(current, f) != getattr(goal, f)}
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
    found = changed[-1]
    if made_nan and found is Step.NAN_CODE and len(changed) > 1:
        found = changed[-2]
    every = dict(groups)[found]
    fields = tuple(f for f in every if getattr(a, f) != getattr(b, f))
    others = tuple(
        step
        for step, replaced in groups
        if step is not found and _suffices(start, goal, replaced, outcome)
    )
    return found, fields, others


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
        joined = (*_TENSOR, *_RULE, "scale_rounding", "scaled", "choice", "decoded")
        for step in (Step.SCALE_ROUNDING, Step.QUOTIENT, Step.CHOICE, Step.SCALED):
            del groups[step]
        groups[Step.TENSOR_SCALE] = joined
    elif a.rule is not ScaleRule.QUOTIENT or b.rule is not ScaleRule.QUOTIENT:
        joined = (*_RULE, "scale_rounding")
        del groups[Step.SCALE_ROUNDING]
        del groups[Step.QUOTIENT]
        groups[Step.SCALE_RULE] = joined
    if a.scale != b.scale:  # codes of two scale formats: all that names one goes together
        named = ("scale", "scale_range", "underflow_scale", "infinity_scale", "zero_scale")
        named += ("nan", "nan_scale", "scale_values", "scaled", "row_span", "even_overflow")
        for step in list(groups):
            if set(groups[step]) & {*named, *_RULE, "scale_rounding"} and step != Step.TENSOR_SCALE:
                named += tuple(f for f in groups[step] if f not in named)
                del groups[step]
        if Step.TENSOR_SCALE in groups:
            named += tuple(f for f in groups.pop(Step.TENSOR_SCALE) if f not in named)
        groups[Step.SCALE_RULE] = named
    order = list(Step)
    return sorted(groups.items(), key=lambda item: order.index(item[0]))


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
    return dataclasses.replace(
        block_format, rule=ScaleRule.QUOTIENT, exponent=None, **changes
    )
