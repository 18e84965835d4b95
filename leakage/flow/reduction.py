"""Reductions, running reductions and sorts: an output sees what is not known of all that comes together in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.flow import bounds
from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.sets import EMPTY, Ids
from flamia_ref.leakage.flow.value import (
    KNOWN,
    Array,
    Bools,
    Flow,
    integer_info,
    is_bool,
    is_float,
    is_narrow,
    known,
    made,
    same_bits,
    unknown,
)

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
    axes = tuple(int(axis) for axis in equation.params["axes"])
    out = equation.outvars[0].aval
    shape, dtype = tuple(out.shape), out.dtype
    ids = context.sets.union_over(x.ids, axes)
    squeezed = np.maximum(ids, EMPTY).reshape([s for a, s in enumerate(ids.shape) if a not in axes])
    result = _reduced(name, x, axes, squeezed, shape, dtype)
    if context.fine and name == "reduce_max":
        result = bounds.of_maximum(x, axes, result)
    return result


def _reduced(
    name: str, x: Flow, axes: tuple[int, ...], ids: Ids, shape: tuple[int, ...], dtype: Any
) -> Flow:
    if x.values is None or is_narrow(dtype) or 0 in shape:
        return made(shape, dtype, ids, None)
    if 0 in x.shape:
        return made(
            shape, dtype, np.broadcast_to(np.int32(KNOWN), shape), _of_nothing(name, shape, dtype)
        )
    sure: Bools = np.asarray(x.known.all(axis=axes))
    decided = _deciding(name, x, axes)
    if decided is not None:
        sure = sure | decided
    if not sure.any():
        return unknown(shape, dtype, ids)
    values = np.where(x.known, x.values, np.zeros((), dtype=x.dtype))
    grown = np.broadcast_to(
        values, [n if a in axes else values.shape[a] for a, n in enumerate(x.shape)]
    )
    found, alike = _values(name, grown, axes, dtype)
    sure = sure if alike is None else sure & alike
    return made(shape, dtype, np.where(sure, np.int32(KNOWN), ids), found)


def _of_nothing(name: str, shape: tuple[int, ...], dtype: Any) -> Array:
    """What a reduction of no element gives."""
    kind = name.removeprefix("reduce_")
    if kind in ("max", "min") and not is_bool(dtype):
        if is_float(dtype):
            value = -np.inf if kind == "max" else np.inf
        else:
            value = getattr(integer_info(dtype), "min" if kind == "max" else "max")
    else:
        value = {"prod": 1, "and": -1, "min": 1}.get(kind, 0)
    return np.full(shape, np.array(value).astype(dtype))


def _deciding(name: str, x: Flow, axes: tuple[int, ...]) -> Bools | None:
    """Where one known element decides an "and" or an "or" of booleans."""
    if not is_bool(x.dtype) or name not in ("reduce_and", "reduce_or", "reduce_max", "reduce_min"):
        return None
    return np.asarray(x.where_known(name in ("reduce_or", "reduce_max")).any(axis=axes))


def _values(
    name: str, values: Array, axes: tuple[int, ...], dtype: Any
) -> tuple[Array, Bools | None]:
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
            found = np.asarray(function(values, axis=axes))
            # Zeros of both signs are equal: either may be the result.
            return found, ~((found == 0) & _both_zeros(values, axes)) if is_float(dtype) else None
        if not is_float(dtype):
            return np.asarray(function(values, axis=axes, dtype=dtype)), None
        neutral = 0 if name == "reduce_sum" else 1
        count = np.asarray((values != neutral).sum(axis=axes))
        if np.dtype(dtype).kind == "c":
            return np.asarray(function(values, axis=axes)).astype(dtype), count <= 0
        found = np.asarray(function(values.astype(np.float64), axis=axes)).astype(dtype)
        return found, count <= 1


def _both_zeros(values: Array, axes: tuple[int, ...]) -> Bools:
    zero = values == 0
    minus = zero & ~same_bits(values, np.zeros((1,) * values.ndim, values.dtype))
    return np.asarray(minus.any(axis=axes) & (zero & ~minus).any(axis=axes))


def running(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """Running sums, maxima and the like along an axis."""
    x, name = operands[0], equation.primitive.name
    axis, reverse = equation.params["axis"], equation.params.get("reverse", False)
    if 0 in x.shape:
        return x
    grown = np.broadcast_to(
        x.ids,
        [n if a == axis else s for a, (n, s) in enumerate(zip(x.shape, x.ids.shape, strict=True))],
    )
    ids = np.maximum(context.sets.running_union(grown, axis, reverse=reverse), EMPTY)
    if x.values is None or name not in _RUNNING:
        return unknown(x.shape, x.dtype, ids)
    sure = grown < 0
    values = np.where(sure, x.values, np.zeros((), x.dtype))
    if reverse:
        sure, values = np.flip(sure, axis), np.flip(values, axis)
    sure = np.logical_and.accumulate(sure, axis=axis)
    with np.errstate(all="ignore"):
        if is_float(x.dtype) and name in ("cumsum", "cumprod"):
            other = values != (0 if name == "cumsum" else 1)
            sure = sure & (np.cumsum(other, axis=axis) <= 1)  # the same in any order
        values = _RUNNING[name](values, axis=axis).astype(x.dtype)
    if reverse:
        sure, values = np.flip(sure, axis), np.flip(values, axis)
    return made(x.shape, x.dtype, np.where(sure, np.int32(KNOWN), ids), values)


def sort(context: Context, equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    """`sort`: a key sees its elements along the axis and those of the keys before it; what is no key sees all keys.

    Where a key is of floats every result sees all keys: -0 and 0 are alike there, and the next key orders them.
    """
    axis, keys = equation.params["dimension"], equation.params["num_keys"]
    if all(x.all_known for x in operands):
        found = _evaluated(equation, operands)
        if equation.params["is_stable"] or keys == len(operands):
            return [known(x) for x in found]
    seen: Ids = np.zeros((1,) * operands[0].ndim, dtype=np.int32)
    if any(is_float(x.dtype) for x in operands[:keys]):
        for x in operands[:keys]:
            seen = context.sets.union(seen, context.sets.union_over(x.sources, [axis]))
    results = []
    for place, x in enumerate(operands):
        own = context.sets.union_over(x.sources, [axis])
        ids = context.sets.union(seen, own)
        seen = ids if place < keys else seen
        results.append(unknown(x.shape, x.dtype, np.maximum(ids, EMPTY)))
    return results


def top_k(context: Context, equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    """`top_k`: values and places see all elements along the axis."""
    x = operands[0]
    if x.all_known:
        return [known(one) for one in _evaluated(equation, operands)]
    axis = equation.params.get("axis", x.ndim - 1) % x.ndim
    seen = np.maximum(context.sets.union_over(x.sources, [axis]), EMPTY)
    return [unknown(tuple(v.aval.shape), v.aval.dtype, seen) for v in equation.outvars]


def _evaluated(equation: Any, operands: Sequence[Flow]) -> list[NDArray[Any]]:
    """The results of an equation that moves and compares alone, of known operands."""
    import jax

    with jax.enable_x64(True):
        given = [jax.numpy.asarray(x.full_values()) for x in operands]
        return [np.asarray(x) for x in equation.primitive.bind(*given, **equation.params)]


def general(context: Context, equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    """`reduce`, by a program's own function: results see all operands along the axes, and what these start with."""
    axes = tuple(int(axis) for axis in equation.params["dimensions"])
    count = len(operands) // 2
    ids: Ids = np.zeros((1,) * operands[0].ndim, dtype=np.int32)
    for x in operands[:count]:
        ids = context.sets.union(ids, context.sets.union_over(x.sources, axes))
    for x in operands[count:]:
        ids = context.sets.union(ids, x.sources.reshape((1,) * ids.ndim))
    kept = np.maximum(ids, EMPTY).reshape([s for a, s in enumerate(ids.shape) if a not in axes])
    return [unknown(tuple(v.aval.shape), v.aval.dtype, kept) for v in equation.outvars]


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = {
    **dict.fromkeys([*_REDUCTIONS, "argmax", "argmin"], reduce),
    **dict.fromkeys([*_RUNNING, "cumlogsumexp"], running),
    "sort": sort,
    "top_k": top_k,
    "reduce": general,
}
