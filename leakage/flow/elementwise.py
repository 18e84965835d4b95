"""Elementwise primitives: the union of the operands' sets, unless a known operand decides the result alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.flow.context import Assumption, Context
from flamia_ref.leakage.flow.evaluation import evaluate
from flamia_ref.leakage.flow.sets import EMPTY, Ids
from flamia_ref.leakage.flow.value import KNOWN, Array, Flow, Shape, made

Bools = NDArray[np.bool_]


def elementwise(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """The result of an equation whose primitive works element by element."""
    out = equation.outvars[0].aval
    shape, dtype = tuple(out.shape), out.dtype
    operands = [with_axes(x, len(shape)) for x in operands]
    if len(operands) == 1:
        (x,) = operands
        if x.values is None:
            return Flow(shape, dtype, x.ids, None)
        values, sure = evaluate(equation, [x.values], dtype)
        ids = x.ids if sure is None else np.where(x.known & ~sure, np.int32(EMPTY), x.ids)
        return made(shape, dtype, ids, values)
    if all(x.values is None for x in operands):
        return Flow(shape, dtype, _union(context, operands), None)
    known = _all(x.known for x in operands)
    decided = _DECIDED.get(equation.primitive.name)
    alone, value = (None, None) if decided is None else decided(context, operands, known, dtype)
    result: Array | None = None
    ids = _without_known(_union(context, operands))
    if known.any():
        result, sure = evaluate(equation, [_numbers(x) for x in operands], dtype)
        known = known if sure is None else known & sure
        ids = np.where(known, np.int32(KNOWN), ids)
    if alone is not None and alone.any():
        ids = np.where(alone, np.int32(KNOWN), ids)
        base = np.zeros((1,) * len(shape), dtype=dtype) if result is None else result
        result = np.where(alone, np.asarray(value, dtype=dtype), base)
    return made(shape, dtype, ids, result)


def with_axes(x: Flow, count: int) -> Flow:
    """A scalar as an array of `count` axes; jaxprs let scalars stand beside arrays."""
    if x.ndim == count:
        return x
    shape = (1,) * count
    values = None if x.values is None else x.values.reshape(shape)
    return Flow(shape, x.dtype, x.ids.reshape(shape), values)


def _numbers(x: Flow) -> Array:
    return np.zeros((1,) * x.ndim, dtype=x.dtype) if x.values is None else x.values


def _all(flags: Any) -> Bools:
    result = None
    for one in flags:
        result = one if result is None else result & one
    assert result is not None
    return result


def _without_known(ids: Ids) -> Ids:
    return np.maximum(ids, EMPTY) if (ids < 0).any() else ids


def _union(context: Context, operands: Sequence[Flow]) -> Ids:
    ids = operands[0].ids
    for other in operands[1:]:
        ids = context.sets.union(ids, other.ids)
    return ids


def select(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`select_n`: where the predicate is known, the case that it names; else all cases, and what the predicate saw."""
    out = equation.outvars[0].aval
    shape, dtype = tuple(out.shape), out.dtype
    predicate, *cases = (with_axes(x, len(shape)) for x in operands)
    if predicate.all_known:
        which = predicate.values
        assert which is not None
        if which.size == 1:
            return cases[int(which.reshape(-1)[0])]
        ids, values = _chosen(which.astype(np.intp), cases)
        return made(shape, dtype, ids, values)
    sure = predicate.known
    ids = _union(context, [predicate, *cases])
    ids = _without_known(ids)
    values: Array | None = None
    one = _agreed(cases)
    if one is not None:  # all cases are the same known value, whatever the predicate
        agree, values = one
        ids = np.where(agree & ~sure, np.int32(KNOWN), ids)
    if sure.any():
        which = np.where(sure, _numbers(predicate), 0).astype(np.intp)
        of_case, case_values = _chosen(which, cases)
        ids = np.where(sure, of_case, ids)
        if case_values is not None:
            values = case_values if values is None else np.where(sure, case_values, values)
    return made(shape, dtype, ids, values)


def special(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`special`, flags that say where values are NaN or infinite: none is, unless nothing is assumed."""
    x = operands[0]
    if context.strict or x.all_known:
        return x
    unsure = ~x.known
    context.assumed[Assumption.NO_SPECIAL] += elements(unsure, x.shape)
    values = np.where(unsure, np.zeros((), dtype=x.dtype), _numbers(x))
    return Flow(x.shape, x.dtype, np.full((1,) * x.ndim, KNOWN, dtype=np.int32), values)


def _chosen(which: NDArray[np.intp], cases: Sequence[Flow]) -> tuple[Ids, Array | None]:
    ids = cases[0].ids
    values = None if all(x.values is None for x in cases) else _numbers(cases[0])
    for index, case in enumerate(cases[1:], start=1):
        here = which == index
        ids = np.where(here, case.ids, ids)
        if values is not None:
            values = np.where(here, _numbers(case), values)
    return ids, values


def _agreed(cases: Sequence[Flow]) -> tuple[Bools, Array] | None:
    if any(x.values is None for x in cases):
        return None
    first = _numbers(cases[0])
    agree = _all(x.known for x in cases)
    for case in cases[1:]:
        agree = agree & _same_bits(first, _numbers(case))
    return (agree, first) if agree.any() else None


def _same_bits(a: Array, b: Array) -> Bools:
    same: Bools = a == b
    if a.dtype.kind not in "iub":
        with np.errstate(invalid="ignore"):
            same = same & (np.signbit(a) == np.signbit(b))
    return same


# What a known operand decides alone: where, and the value.

_Alone = tuple[Bools | None, Any]


def _is(x: Flow, value: Any) -> Bools | None:
    """Where an operand is known to be `value`, None for nowhere."""
    if x.values is None:
        return None
    found = x.known & (x.values == np.asarray(value).astype(x.dtype))
    return found if found.any() else None


def _either(a: Bools | None, b: Bools | None) -> Bools | None:
    return b if a is None else a if b is None else a | b


def _is_float(dtype: Any) -> bool:
    return np.dtype(dtype).kind not in "iub"


def _absorbing(
    context: Context, operands: Sequence[Flow], known: Bools, value: Any, assumption: Assumption | None
) -> _Alone:
    """Any operand that is `value` decides."""
    alone = None
    for x in operands:
        alone = _either(alone, _is(x, value))
    return _counted(context, operands, known, alone, value, assumption)


def _counted(
    context: Context,
    operands: Sequence[Flow],
    known: Bools,
    alone: Bools | None,
    value: Any,
    assumption: Assumption | None,
) -> _Alone:
    if alone is None:
        return None, None
    alone = alone & ~known
    if assumption is not None:
        if context.strict:
            return None, None
        shape: Shape = np.broadcast_shapes(*(x.shape for x in operands))
        context.assumed[assumption] += elements(alone, shape)
    return alone, value


def elements(flags: Bools, shape: Shape) -> int:
    """How many elements of an array of `shape` a compact array of flags marks."""
    found = int(flags.sum())
    return found * (int(np.prod(shape, dtype=np.int64)) // max(1, flags.size)) if found else 0


def _product(context: Context, operands: Sequence[Flow], known: Bools, dtype: Any) -> _Alone:
    assumption = Assumption.ZERO_TIMES_FINITE if _is_float(dtype) else None
    return _absorbing(context, operands, known, 0, assumption)


def _conjunction(context: Context, operands: Sequence[Flow], known: Bools, dtype: Any) -> _Alone:
    return _absorbing(context, operands, known, 0, None)


def _disjunction(context: Context, operands: Sequence[Flow], known: Bools, dtype: Any) -> _Alone:
    ones = True if np.dtype(dtype).kind == "b" else np.array(-1).astype(dtype)
    return _absorbing(context, operands, known, ones, None)


def _quotient(context: Context, operands: Sequence[Flow], known: Bools, dtype: Any) -> _Alone:
    zero = _is(operands[0], 0)
    return _counted(context, operands, known, zero, 0, Assumption.ZERO_OVER_NONZERO)


def _shifted(context: Context, operands: Sequence[Flow], known: Bools, dtype: Any) -> _Alone:
    return _counted(context, operands, known, _is(operands[0], 0), 0, None)


def _sum(context: Context, operands: Sequence[Flow], known: Bools, dtype: Any) -> _Alone:
    return _infinite(context, operands, known, dtype, 1)


def _difference(context: Context, operands: Sequence[Flow], known: Bools, dtype: Any) -> _Alone:
    return _infinite(context, operands, known, dtype, -1)


def _infinite(
    context: Context, operands: Sequence[Flow], known: Bools, dtype: Any, second: int
) -> _Alone:
    if not _is_float(dtype):
        return None, None
    result: Any = None
    alone = None
    for sign in (1, -1):
        found = _either(_is(operands[0], sign * np.inf), _is(operands[1], second * sign * np.inf))
        if found is not None:
            result = np.where(found, sign * np.inf, 0.0 if result is None else result)
            alone = _either(alone, found)
    return _counted(context, operands, known, alone, result, Assumption.INFINITY_PLUS_FINITE)


def _extreme(least: bool) -> Callable[..., _Alone]:
    def rule(context: Context, operands: Sequence[Flow], known: Bools, dtype: Any) -> _Alone:
        dtype = np.dtype(dtype)
        if dtype.kind not in "iu":
            return None, None
        end = np.iinfo(dtype).min if least else np.iinfo(dtype).max
        return _absorbing(context, operands, known, end, None)

    return rule


_DECIDED: Mapping[str, Callable[..., _Alone]] = {
    "mul": _product,
    "and": _conjunction,
    "or": _disjunction,
    "div": _quotient,
    "add": _sum,
    "sub": _difference,
    "min": _extreme(least=True),
    "max": _extreme(least=False),
    "shift_left": _shifted,
    "shift_right_logical": _shifted,
    "shift_right_arithmetic": _shifted,
}
