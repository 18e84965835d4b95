"""Bounds of numbers: what an element that is not known lies between, so that a clip or a comparison may decide it.

An integer whose bounds meet is known. Bounds of floats are kept while they are finite, and then no NaN is between them;
bounds 0 and 0 are a zero of either sign.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.flow.value import (
    KNOWN,
    Array,
    Bools,
    Bounds,
    Flow,
    integer_info,
    is_bool,
    is_float,
    is_integer,
    is_opaque,
)

_EXACT = 2.0**53  # integers up to here are exact in float64
_Rule = Callable[[Mapping[str, Any], Sequence[Flow], Sequence[Bounds]], "Bounds | None"]


def refined(equation: Any, operands: Sequence[Flow], result: Flow) -> Flow:
    """`result` of an elementwise equation with what the bounds of the operands tell of it."""
    rule = _RULES.get(equation.primitive.name)
    if rule is None or 0 in result.shape or not _has_bounds(result.dtype):
        return result
    if not all(_has_bounds(x.dtype) for x in operands):
        return result
    with np.errstate(all="ignore"):
        each = [limits(x) for x in operands]
        found = rule(equation.params, operands, each)
        if found is None:
            return result
        if equation.primitive.name in ("max", "min") and is_integer(result.dtype):
            result = _chosen(equation.primitive.name, operands, each, result)
        return _with(result, found)


def _chosen(name: str, operands: Sequence[Flow], each: Sequence[Bounds], result: Flow) -> Flow:
    """A maximum or minimum with the sources of one operand alone where the other cannot be it."""
    (a, b), (a_ends, b_ends) = operands, each
    if name == "min":
        a_ends, b_ends = (-a_ends[1], -a_ends[0]), (-b_ends[1], -b_ends[0])
    ids = np.where(~result.known & ~a.known & (a_ends[0] >= b_ends[1]), a.ids, result.ids)
    ids = np.where(~result.known & ~b.known & (b_ends[0] >= a_ends[1]), b.ids, ids)
    return Flow(result.shape, result.dtype, ids, result.values, result.bounds, result.fields)


def of_select(predicate: Flow, cases: Sequence[Flow], result: Flow) -> Flow:
    """`result` of `select_n` with the bounds of its cases."""
    if 0 in result.shape or not _has_bounds(result.dtype):
        return result
    each = [limits(x) for x in cases]
    low = functools.reduce(np.minimum, (low for low, _ in each))
    high = functools.reduce(np.maximum, (high for _, high in each))
    if predicate.values is not None:
        for index, one in enumerate(each):
            here = predicate.known & (predicate.values == index)
            low, high = np.where(here, one[0], low), np.where(here, one[1], high)
    return _with(result, (low, high))


def of_maximum(x: Flow, axes: tuple[int, ...], result: Flow) -> Flow:
    """`result` of a maximum over axes with the bounds of its elements."""
    if x.bounds is None or 0 in x.shape:
        return result
    low, high = limits(x)
    kept = [a for a in range(x.ndim) if a not in axes]
    shrunk = [one.max(axis=axes).reshape([one.shape[a] for a in kept]) for one in (low, high)]
    return _with(result, (shrunk[0], shrunk[1]))


def limits(x: Flow) -> Bounds:
    """What all elements lie between, those too that are known; infinities for floats of which nothing is known."""
    low, high = x.bounds if x.bounds is not None else _of_dtype(x.dtype, x.ndim)
    if x.values is None:
        return low, high
    values = x.values.astype(np.float64)
    if is_float(x.dtype):
        bad = ~np.isfinite(values)
        below, above = np.where(bad, -np.inf, values), np.where(bad, np.inf, values)
    else:
        below = above = values
    return np.where(x.known, below, low), np.where(x.known, above, high)


def _has_bounds(dtype: Any) -> bool:
    return not is_opaque(dtype) and np.dtype(dtype).kind != "c"


@functools.cache
def _ends(dtype: np.dtype[Any]) -> tuple[float, float]:
    if is_bool(dtype):
        return 0.0, 1.0
    if is_integer(dtype):
        info = integer_info(dtype)
        return float(info.min), float(info.max)
    return -np.inf, np.inf


def _of_dtype(dtype: Any, axes: int) -> Bounds:
    low, high = _ends(np.dtype(dtype))
    return np.full((1,) * axes, low), np.full((1,) * axes, high)


def _with(result: Flow, found: Bounds) -> Flow:
    """`result` within bounds too, made known where they meet."""
    low, high = found
    dtype = np.dtype(result.dtype)
    least, most = _ends(dtype)
    if is_float(dtype):
        # To nearest keeps the order. What may be infinite or NaN has no bounds.
        low, high = (x.astype(dtype).astype(np.float64) for x in (low, high))
        outside = ~(np.isfinite(low) & np.isfinite(high))
    else:
        outside = ~((low >= least) & (high <= most))
    low, high = np.where(outside, least, low), np.where(outside, most, high)
    if result.bounds is not None:
        low, high = np.maximum(low, result.bounds[0]), np.minimum(high, result.bounds[1])
    ids, values = result.ids, result.values
    if not is_float(dtype):
        sure = (low == high) & (abs(low) < _EXACT) & ~result.known
        if sure.any():
            ids = np.where(sure, np.int32(KNOWN), ids)
            own = np.where(sure, low, 0).astype(dtype)
            values = own if values is None else np.where(sure, own, values)
    told = bool(((low > least) | (high < most)).any())
    return Flow(
        result.shape, result.dtype, ids, values, (low, high) if told else None, result.fields
    )


# How each primitive moves bounds. A rule may return bounds outside the dtype: they are then none.


def _of_corners(function: Callable[..., Array]) -> _Rule:
    """A function that is monotonic in each of two operands: its extremes are at corners."""

    def rule(
        parameters: Mapping[str, Any], operands: Sequence[Flow], limits: Sequence[Bounds]
    ) -> Bounds:
        (a, b), (c, d) = limits
        corners = [function(x, y) for x in (a, b) for y in (c, d)]
        low, high = functools.reduce(np.minimum, corners), functools.reduce(np.maximum, corners)
        return _only_exact(operands[0].dtype, low, high)

    return rule


def _only_exact(dtype: Any, low: Array, high: Array) -> Bounds:
    """Integers too large for float64 to tell apart have no bounds."""
    if not is_integer(dtype):
        return low, high
    inexact = ~((low > -_EXACT) & (high < _EXACT))
    return np.where(inexact, -np.inf, low), np.where(inexact, np.inf, high)


def _monotonic(function: Callable[[Array], Array]) -> _Rule:
    def rule(
        parameters: Mapping[str, Any], operands: Sequence[Flow], limits: Sequence[Bounds]
    ) -> Bounds:
        return function(limits[0][0]), function(limits[0][1])

    return rule


def _negated(_: Any, operands: Sequence[Flow], limits: Sequence[Bounds]) -> Bounds:
    return -limits[0][1], -limits[0][0]


def _magnitude(_: Any, operands: Sequence[Flow], limits: Sequence[Bounds]) -> Bounds:
    low, high = limits[0]
    crosses = (low < 0) & (high > 0)
    ends = np.abs(low), np.abs(high)
    return np.where(crosses, 0.0, np.minimum(*ends)), np.maximum(*ends)


def _clamped(_: Any, operands: Sequence[Flow], limits: Sequence[Bounds]) -> Bounds:
    below, x, above = limits
    return (
        np.minimum(np.maximum(x[0], below[0]), above[0]),
        np.minimum(np.maximum(x[1], below[1]), above[1]),
    )


def _conjunction(_: Any, operands: Sequence[Flow], limits: Sequence[Bounds]) -> Bounds | None:
    (a, b), (c, d) = limits
    high = np.minimum(np.where(a >= 0, b, np.inf), np.where(c >= 0, d, np.inf))
    return np.where(np.isfinite(high), 0.0, -np.inf), high


def _disjunction(_: Any, operands: Sequence[Flow], limits: Sequence[Bounds]) -> Bounds:
    (a, b), (c, d) = limits
    top = np.exp2(np.ceil(np.log2(np.maximum(np.maximum(b, d), 0) + 1))) - 1
    return np.where((a >= 0) & (c >= 0), 0.0, -np.inf), top


def _left(_: Any, operands: Sequence[Flow], limits: Sequence[Bounds]) -> Bounds:
    (a, b), (least, most) = limits
    fits = (least >= 0) & (most < 64) & (abs(a) < _EXACT) & (abs(b) < _EXACT)
    few, many = np.exp2(least), np.exp2(most)
    low, high = np.where(a >= 0, a * few, a * many), np.where(b >= 0, b * many, b * few)
    return np.where(fits, low, -np.inf), np.where(fits, high, np.inf)


def _right(_: Any, operands: Sequence[Flow], limits: Sequence[Bounds]) -> Bounds:
    (a, b), (least, most) = limits
    fits = (least >= 0) & (most < 64) & (a >= 0) & (b < 2.0**63)
    low, high = np.floor(a / np.exp2(most)), np.floor(b / np.exp2(least))
    return np.where(fits, low, -np.inf), np.where(fits, high, np.inf)


def _right_with_sign(_: Any, operands: Sequence[Flow], limits: Sequence[Bounds]) -> Bounds:
    (a, b), (least, most) = limits
    fits = (least >= 0) & (least == most) & (most < 64) & (abs(a) < _EXACT) & (abs(b) < _EXACT)
    low, high = np.floor(a / np.exp2(least)), np.floor(b / np.exp2(least))
    return np.where(fits, low, -np.inf), np.where(fits, high, np.inf)


def _converted(
    parameters: Mapping[str, Any], operands: Sequence[Flow], limits: Sequence[Bounds]
) -> Bounds | None:
    (low, high), target = limits[0], np.dtype(parameters["new_dtype"])
    if is_bool(target):
        never, always = (low == 0) & (high == 0), (low > 0) | (high < 0)
        return np.where(always, 1.0, 0.0), np.where(never, 0.0, 1.0)
    if is_float(operands[0].dtype) and not is_float(target):
        low, high = np.trunc(low), np.trunc(high)
    return low, high


def _as_bits(
    parameters: Mapping[str, Any], operands: Sequence[Flow], limits: Sequence[Bounds]
) -> Bounds | None:
    (low, high), source = limits[0], np.dtype(operands[0].dtype)
    target = np.dtype(parameters["new_dtype"])
    if source.itemsize != target.itemsize or not is_integer(source):
        return None
    if is_integer(target):
        return np.where(low >= 0, low, -np.inf), np.where(low >= 0, high, np.inf)
    if target not in (np.dtype(np.float32), np.dtype(np.float64)):
        return None
    # Bits of floats that are not negative are in the order of the floats.
    unsigned = np.dtype(f"u{source.itemsize}")
    infinity = np.array(np.inf, target).view(unsigned)
    fits = (low >= 0) & (high < float(infinity))
    ends: list[NDArray[np.float64]] = []
    for x, outside in ((low, -np.inf), (high, np.inf)):
        value = np.where(fits, x, 0).astype(unsigned).view(target).astype(np.float64)
        ends.append(np.where(fits, value, outside))
    return ends[0], ends[1]


def _compared(
    holds: Callable[[Bounds, Bounds], Bools], fails: Callable[[Bounds, Bounds], Bools]
) -> _Rule:
    def rule(
        parameters: Mapping[str, Any], operands: Sequence[Flow], limits: Sequence[Bounds]
    ) -> Bounds | None:
        a, b = limits  # infinite ones, between which may be NaN, decide nothing
        return np.where(holds(a, b), 1.0, 0.0), np.where(fails(a, b), 0.0, 1.0)

    return rule


def _inverted(_: Any, operands: Sequence[Flow], limits: Sequence[Bounds]) -> Bounds | None:
    if not is_bool(operands[0].dtype):
        return None
    return 1 - limits[0][1], 1 - limits[0][0]


def _never(a: Bounds, b: Bounds) -> Bools:
    return (a[1] < b[0]) | (b[1] < a[0])


def _always(a: Bounds, b: Bounds) -> Bools:
    return np.asarray((a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0]) & (abs(a[0]) < _EXACT))


_RULES: Mapping[str, _Rule] = {
    "add": _of_corners(operator.add),
    "sub": _of_corners(operator.sub),
    "mul": _of_corners(operator.mul),
    "max": _of_corners(np.maximum),
    "min": _of_corners(np.minimum),
    "neg": _negated,
    "abs": _magnitude,
    "clamp": _clamped,
    "and": _conjunction,
    "or": _disjunction,
    "xor": _disjunction,
    "not": _inverted,
    "shift_left": _left,
    "shift_right_logical": _right,
    "shift_right_arithmetic": _right_with_sign,
    "convert_element_type": _converted,
    "bitcast_convert_type": _as_bits,
    "floor": _monotonic(np.floor),
    "ceil": _monotonic(np.ceil),
    "round": _monotonic(lambda x: x),
    "copy": _monotonic(lambda x: x),
    "eq": _compared(_always, _never),
    "ne": _compared(_never, _always),
    "lt": _compared(lambda a, b: a[1] < b[0], lambda a, b: a[0] >= b[1]),
    "le": _compared(lambda a, b: a[1] <= b[0], lambda a, b: a[0] > b[1]),
    "gt": _compared(lambda a, b: a[0] > b[1], lambda a, b: a[1] <= b[0]),
    "ge": _compared(lambda a, b: a[0] >= b[1], lambda a, b: a[1] < b[0]),
}
