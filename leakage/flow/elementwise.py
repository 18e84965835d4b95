"""Elementwise primitives: the union of the operands' sets, unless known operands decide the result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.flow import bounds, fields
from flamia_ref.leakage.flow.context import Assumption, Context
from flamia_ref.leakage.flow.deciding import decided
from flamia_ref.leakage.flow.evaluation import evaluate
from flamia_ref.leakage.flow.sets import EMPTY, Ids
from flamia_ref.leakage.flow.value import (
    KNOWN,
    Array,
    Bools,
    Flow,
    elements,
    empty,
    is_integer,
    known_ids,
    made,
    same_bits,
    unknown,
    with_axes,
)


def elementwise(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """The result of an equation whose primitive works element by element."""
    out = equation.outvars[0].aval
    shape, dtype = tuple(out.shape), out.dtype
    if 0 in shape:
        return empty(shape, dtype)
    operands = [with_axes(x, len(shape)) for x in operands]
    result = _plain(context, equation, operands, shape, dtype)
    if context.fine:
        result = bounds.refined(equation, operands, result)
    if is_integer(dtype):
        result = fields.refined(context, equation, operands, result)
    return result


def _plain(
    context: Context, equation: Any, operands: Sequence[Flow], shape: tuple[int, ...], dtype: Any
) -> Flow:
    if all(x.values is None for x in operands):
        return unknown(shape, dtype, union(context, operands))
    if all(x.all_known for x in operands):
        found, sure = evaluate(equation, [x.compact_values() for x in operands], dtype)
        if sure is None or sure.all():
            return Flow(shape, dtype, known_ids(len(shape)), found)
    known = all_of(x.known for x in operands)
    values: Array | None = None
    ids = np.maximum(union(context, operands), EMPTY)
    if known.any():
        values, sure = evaluate(equation, [x.compact_values() for x in operands], dtype)
        known = known if sure is None else known & sure
        ids = np.where(known, np.int32(KNOWN), ids)
    for alone, value in decided(context, equation.primitive.name, operands, dtype):
        ids = np.where(alone, np.int32(KNOWN), ids)
        base = np.zeros((1,) * len(shape), dtype=dtype) if values is None else values
        values = np.where(alone, np.asarray(value, dtype=dtype), base)
    return made(shape, dtype, ids, values)


def all_of(flags: Iterable[Bools]) -> Bools:
    """Where all flags are set."""
    result: Bools = np.ones((), dtype=np.bool_)
    for one in flags:
        result = result & one
    return result


def union(context: Context, operands: Sequence[Flow]) -> Ids:
    """The union of the sets of arrays, element by element."""
    ids = operands[0].ids
    for other in operands[1:]:
        ids = context.sets.union(ids, other.ids)
    return ids


def select(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`select_n`: where the predicate is known, the case that it names; else all cases, and what the predicate saw."""
    out = equation.outvars[0].aval
    shape, dtype = tuple(out.shape), out.dtype
    predicate, *cases = (with_axes(x, len(shape)) for x in operands)
    if 0 in shape:
        return made(shape, dtype, cases[0].ids, None)
    sure = predicate.known
    which = np.where(sure, predicate.compact_values(), 0).astype(np.intp)
    which = np.clip(which, 0, len(cases) - 1)  # as XLA does
    if predicate.all_known and which.size == 1:
        return cases[int(which.reshape(-1)[0])]
    ids, values = _chosen(which, cases)
    if not sure.all():
        ids = np.where(sure, ids, np.maximum(union(context, [predicate, *cases]), EMPTY))
        agreed = _agreed(cases)  # one known value, whatever the predicate
        if agreed is not None:
            ids = np.where(agreed & ~sure, np.int32(KNOWN), ids)
    result = made(shape, dtype, ids, values)
    return bounds.of_select(predicate, cases, result) if context.fine else result


def special(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`special`, flags that say where values are NaN, infinite or -0: none is, unless nothing is assumed."""
    x = operands[0]
    unsure = ~x.known
    if context.strict or not unsure.any():
        return x
    context.assumed[Assumption.NO_SPECIAL] += elements(unsure, x.shape)
    values = np.where(unsure, np.zeros((), dtype=x.dtype), x.compact_values())
    return Flow(x.shape, x.dtype, known_ids(x.ndim), values)


def shortcut(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`shortcut`, a flag of two ways to one result: the way that is right whatever the flag is taken."""
    return Flow((), np.dtype(np.bool_), known_ids(0), np.array(equation.params["general"]))


def _chosen(which: NDArray[np.intp], cases: Sequence[Flow]) -> tuple[Ids, Array | None]:
    """What `which` names; the first case where it names none, as where it is not known."""
    ids, values = cases[0].ids, cases[0].values
    if values is None and any(x.values is not None for x in cases):
        values = cases[0].compact_values()
    for index, case in enumerate(cases[1:], start=1):
        here = which == index
        ids = np.where(here, case.ids, ids)
        if values is not None:
            values = np.where(here, case.compact_values(), values)
    return ids, values


def _agreed(cases: Sequence[Flow]) -> Bools | None:
    if any(x.values is None for x in cases):
        return None
    agree = all_of(x.known for x in cases)
    for case in cases[1:]:
        agree = agree & same_bits(cases[0].compact_values(), case.compact_values())
    return agree
