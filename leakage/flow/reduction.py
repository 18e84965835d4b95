"""Reductions, running reductions and sorts: an output sees what is not known of all that comes together in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.sets import EMPTY
from flamia_ref.leakage.flow.value import KNOWN, Array, Flow, made

_REDUCTIONS: Mapping[str, Callable[..., Array]] = {
    "reduce_sum": np.sum,
    "reduce_prod": np.prod,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_and": np.bitwise_and.reduce,
    "reduce_or": np.bitwise_or.reduce,
    "reduce_xor": np.bitwise_xor.reduce,
}
_RUNNING: Mapping[str, Callable[..., Array]] = {
    "cumsum": np.cumsum,
    "cumprod": np.cumprod,
    "cummax": np.maximum.accumulate,
    "cummin": np.minimum.accumulate,
}


def reduce(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """Reductions along axes, of maximum, sum and the like, and argmax and argmin."""
    x, name = operands[0], equation.primitive.name
    axes = tuple(equation.params["axes"])
    out = equation.outvars[0].aval
    shape, dtype = tuple(out.shape), out.dtype
    ids = context.sets.union_over(x.ids, axes)
    squeezed = np.maximum(ids, EMPTY).reshape([s for a, s in enumerate(ids.shape) if a not in axes])
    if x.values is None:
        return Flow(shape, dtype, squeezed, None)
    known: NDArray[np.bool_] = x.known.all(axis=axes)
    decided = _deciding(name, x, axes)
    if decided is not None:
        known = known | decided
    if not known.any():
        return Flow(shape, dtype, squeezed, None)
    grown = np.broadcast_to(
        np.where(x.known, x.values, np.zeros((), dtype=x.dtype)) if decided is None else x.values,
        [x.shape[a] if a in axes else max(x.ids.shape[a], x.values.shape[a]) for a in range(x.ndim)],
    )
    values, sure = _reduced(name, grown, axes, dtype)
    known = known if sure is None else known & sure
    return made(shape, dtype, np.where(known, np.int32(KNOWN), squeezed), values)


def _deciding(name: str, x: Flow, axes: tuple[int, ...]) -> NDArray[np.bool_] | None:
    """Where one known element decides an "and" or an "or" of booleans."""
    if np.dtype(x.dtype).kind != "b" or name not in ("reduce_and", "reduce_or"):
        return None
    assert x.values is not None
    found: NDArray[np.bool_] = (x.known & (x.values == (name == "reduce_or"))).any(axis=axes)
    return found


def _reduced(
    name: str, values: Array, axes: tuple[int, ...], dtype: Any
) -> tuple[Array, NDArray[np.bool_] | None]:
    """The result, and which of its elements are the same in any order, None for all."""
    with np.errstate(all="ignore"):
        if name in ("argmax", "argmin"):
            found = (np.argmax if name == "argmax" else np.argmin)(values, axis=axes[0])
            return np.asarray(found).astype(dtype), None
        function = _REDUCTIONS[name]
        if name in ("reduce_and", "reduce_or", "reduce_xor"):
            for axis in sorted(axes, reverse=True):
                values = function(values, axis=axis)
            return np.asarray(values), None
        if name in ("reduce_max", "reduce_min"):
            return np.asarray(function(values, axis=axes)), None
        if np.dtype(dtype).kind in "iub":
            return np.asarray(function(values, axis=axes, dtype=dtype)), None
        wide = values.astype(np.float64)
        found = np.asarray(function(wide, axis=axes)).astype(dtype)
        neutral = 0 if name == "reduce_sum" else 1
        return found, (wide != neutral).sum(axis=axes) <= 1


def running(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """Running sums, maxima and the like along an axis."""
    x, name = operands[0], equation.primitive.name
    axis, reverse = equation.params["axis"], equation.params.get("reverse", False)
    grown = np.broadcast_to(
        x.ids, [x.shape[a] if a == axis else s for a, s in enumerate(x.ids.shape)]
    )
    ids = np.maximum(context.sets.running_union(grown, axis, reverse=reverse), EMPTY)
    if x.values is None or name not in _RUNNING:
        return Flow(x.shape, x.dtype, ids, None)
    flags, values = (grown < 0), np.broadcast_to(x.values, np.broadcast_shapes(x.values.shape, grown.shape))
    if reverse:
        flags, values = np.flip(flags, axis), np.flip(values, axis)
    flags = np.logical_and.accumulate(flags, axis=axis)
    wide = values.astype(np.float64) if np.dtype(x.dtype).kind not in "iub" else values
    with np.errstate(all="ignore"):
        if wide is not values and name in ("cumsum", "cumprod"):
            neutral = wide != (0 if name == "cumsum" else 1)
            flags = flags & (np.cumsum(neutral, axis=axis) <= 1)  # the same in any order
        values = _RUNNING[name](wide, axis=axis).astype(x.dtype)
    if reverse:
        flags, values = np.flip(flags, axis), np.flip(values, axis)
    return made(x.shape, x.dtype, np.where(flags, np.int32(KNOWN), ids), values)


def sort(context: Context, equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    """`sort`: each result sees all keys along the axis, and all that is sorted with them."""
    axis, keys = equation.params["dimension"], equation.params["num_keys"]
    if all(x.all_known for x in operands):
        order = _order([x.full_values() for x in operands[:keys]], axis)
        results = []
        for x in operands:
            values = np.take_along_axis(x.full_values(), order, axis)
            ids = np.full((1,) * x.ndim, KNOWN, dtype=np.int32)
            results.append(Flow(x.shape, x.dtype, ids, values))
        return results
    seen = context.sets.union_over(np.maximum(operands[0].ids, EMPTY), [axis])
    for x in operands[1:keys]:
        seen = context.sets.union(seen, context.sets.union_over(np.maximum(x.ids, EMPTY), [axis]))
    results = []
    for x in operands:
        own = context.sets.union_over(np.maximum(x.ids, EMPTY), [axis])
        results.append(Flow(x.shape, x.dtype, context.sets.union(seen, own), None))
    return results


def _order(keys: Sequence[Array], axis: int) -> NDArray[np.intp]:
    order = np.argsort(keys[-1], axis=axis, kind="stable")
    for key in reversed(keys[:-1]):
        moved = np.take_along_axis(key, order, axis)
        order = np.take_along_axis(order, np.argsort(moved, axis=axis, kind="stable"), axis)
    return order


def top_k(context: Context, equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    """`top_k`: values and places see all elements along the axis."""
    x = operands[0]
    axis = equation.params.get("axis", x.ndim - 1) % x.ndim
    seen = np.maximum(context.sets.union_over(np.maximum(x.ids, EMPTY), [axis]), EMPTY)
    return [Flow(tuple(v.aval.shape), v.aval.dtype, seen, None) for v in equation.outvars]


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = {
    **dict.fromkeys([*_REDUCTIONS, "argmax", "argmin"], reduce),
    **dict.fromkeys([*_RUNNING, "cumlogsumexp"], running),
    "sort": sort,
    "top_k": top_k,
}
