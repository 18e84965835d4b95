"""Primitives that move elements about: what an output element is, the operand's element is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.sets import Ids
from flamia_ref.leakage.flow.value import KNOWN, Array, Flow, Shape, expanded, made


def _both(x: Flow, shape: Shape, move: Callable[[Array], Array]) -> Flow:
    """The operand with `move` made to its sets and to its values."""
    values = None if x.values is None else move(x.values)
    return Flow(shape, x.dtype, move(x.ids), values)


def broadcast_in_dim(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`broadcast_in_dim`: axes that are new or longer stay 1, as their elements are alike."""
    x = operands[0]
    shape = tuple(equation.outvars[0].aval.shape)
    places = equation.params["broadcast_dimensions"]

    def move(part: Array) -> Array:
        extents = [1] * len(shape)
        for axis, place in enumerate(places):
            extents[place] = part.shape[axis]
        return part.reshape(extents)

    return _sized(_both(x, shape, move))


def _sized(x: Flow) -> Flow:
    """An array without elements has no elements alike."""
    if 0 not in x.shape:
        return x
    values = None if x.values is None else np.zeros(x.shape, dtype=x.dtype)
    return Flow(x.shape, x.dtype, np.full(x.shape, KNOWN, dtype=np.int32), values)


def reshape(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`reshape`: a group of axes that become one, or one that becomes several, keeps length 1 if all are alike in it."""
    x = operands[0]
    new = tuple(equation.outvars[0].aval.shape)
    if 0 in new:
        return _sized(Flow(new, x.dtype, x.ids, x.values))
    groups = _groups(x.shape, new)

    def move(part: Array) -> Array:
        grown, extents = [], []
        for old_axes, new_axes in groups:
            if all(part.shape[axis] == 1 for axis in old_axes):
                extents += [1] * len(new_axes)
            elif len(old_axes) == len(new_axes) == 1:
                extents += [part.shape[old_axes[0]]]
            else:
                grown += old_axes
                extents += [new[axis] for axis in new_axes]
        return expanded(part, x.shape, grown).reshape(extents)

    return _both(x, new, move)


def _groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """The axes of both shapes in the shortest runs that hold equally many elements."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [], []
        a = b = 1
        if i < len(old):
            left, a, i = [i], old[i], i + 1
        if j < len(new) and (a != 1 or not left):
            right, b, j = [j], new[j], j + 1
        while a != b:
            if a < b:
                left.append(i)
                a, i = a * old[i], i + 1
            else:
                right.append(j)
                b, j = b * new[j], j + 1
        groups.append((left, right))
    return groups


def transpose(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`transpose`."""
    order = equation.params["permutation"]
    return _both(operands[0], _out(equation), lambda part: part.transpose(order))


def squeeze(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`squeeze`."""
    axes = tuple(equation.params["dimensions"])
    return _both(operands[0], _out(equation), lambda part: part.squeeze(axes))


def expand_dims(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`expand_dims`."""
    axes = tuple(equation.params["dimensions"])
    return _both(operands[0], _out(equation), lambda part: np.expand_dims(part, axes))


def reverse(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`rev`."""
    axes = tuple(equation.params["dimensions"])
    return _both(operands[0], _out(equation), lambda part: np.flip(part, axes))


def cut(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`slice`."""
    parameters = equation.params
    starts, limits = parameters["start_indices"], parameters["limit_indices"]
    steps = parameters["strides"] or (1,) * len(starts)
    x = operands[0]

    def move(part: Array) -> Array:
        return part[
            tuple(
                slice(None) if extent == 1 and size != 1 else slice(start, limit, step)
                for extent, size, start, limit, step in zip(
                    part.shape, x.shape, starts, limits, steps, strict=True
                )
            )
        ]

    return _sized(_both(x, _out(equation), move))


def concatenate(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`concatenate`."""
    axis, shape = equation.params["dimension"], _out(equation)
    return joined([x for x in operands if x.shape[axis]], axis, shape, equation.outvars[0].aval.dtype)


def joined(parts: Sequence[Flow], axis: int, shape: Shape, dtype: Any) -> Flow:
    """Arrays one after another along an axis."""
    if 0 in shape:
        return _sized(Flow(shape, dtype, np.zeros(shape, dtype=np.int32), None))
    if len(parts) == 1:
        return Flow(shape, dtype, parts[0].ids, parts[0].values)

    def along(arrays: Sequence[Array]) -> Array:
        arrays = [
            expanded(one, x.shape, [axis]) for one, x in zip(arrays, parts, strict=True)
        ]
        other = [
            max(one.shape[place] for one in arrays) for place in range(len(shape))
        ]
        return np.concatenate(
            [
                np.broadcast_to(one, [*other[:axis], one.shape[axis], *other[axis + 1 :]])
                for one in arrays
            ],
            axis,
        )

    ids = along([x.ids for x in parts])
    if all(x.values is None for x in parts):
        return Flow(shape, dtype, ids, None)
    empty = np.zeros((1,) * len(shape), dtype=dtype)
    values = along([empty if x.values is None else x.values for x in parts])
    return made(shape, dtype, ids, values)


def stack(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`stack`."""
    shape = _out(equation)
    axis = equation.params.get("axis", equation.params.get("dimension", 0))
    parts = []
    for x in operands:
        one = tuple(1 if place == axis else extent for place, extent in enumerate(shape))
        parts.append(_both(x, one, lambda part: np.expand_dims(part, axis)))
    return joined(parts, axis, shape, equation.outvars[0].aval.dtype)


def split(context: Context, equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    """`split`."""
    axis, x = equation.params["axis"], operands[0]
    results, start = [], 0
    for size in equation.params["sizes"]:
        here = slice(start, start + size)
        shape = tuple(size if place == axis else extent for place, extent in enumerate(x.shape))

        def move(part: Array, here: slice = here) -> Array:
            whole = part.shape[axis] == 1 and x.shape[axis] != 1
            return part if whole else part[(slice(None),) * axis + (here,)]

        results.append(_sized(_both(x, shape, move)))
        start += size
    return results


def pad(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`pad`: negative padding cuts."""
    x, filling = operands
    shape, rules = _out(equation), equation.params["padding_config"]
    places = []
    for size, extent, (low, high, inner) in zip(shape, x.shape, rules, strict=True):
        place = np.arange(size) - low
        inside = (place >= 0) & (place < extent * (inner + 1) - inner) & (place % (inner + 1) == 0)
        places.append((np.where(inside, place // (inner + 1), 0), inside))
    if 0 in shape:
        return _sized(Flow(shape, x.dtype, x.ids, x.values))
    inside = np.ones((1,) * len(shape), dtype=np.bool_)
    for axis, (_, flags) in enumerate(places):
        if not flags.all():
            inside = inside & flags.reshape([-1 if one == axis else 1 for one in range(len(shape))])

    def move(part: Array, fill: Array) -> Array:
        for axis, (place, flags) in enumerate(places):
            if part.shape[axis] != 1 and 0 not in part.shape:
                part = np.take(part, place, axis=axis)
        if 0 in part.shape:
            part = np.zeros((1,) * len(shape), dtype=part.dtype)
        return np.where(inside, part, fill.reshape((1,) * len(shape)))

    ids = move(x.ids, filling.ids)
    if x.values is None and filling.values is None:
        return Flow(shape, x.dtype, ids, None)
    empty = np.zeros((), dtype=x.dtype)
    values = move(
        empty.reshape((1,) * len(shape)) if x.values is None else x.values,
        empty if filling.values is None else filling.values,
    )
    return made(shape, x.dtype, ids, values)


def bitcast(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`bitcast_convert_type`: of one width element by element; parts see their whole, and a whole all its parts."""
    x, out = operands[0], equation.outvars[0].aval
    shape, dtype = tuple(out.shape), np.dtype(out.dtype)
    if len(shape) == x.ndim:
        values = None if x.values is None else np.ascontiguousarray(x.values).view(dtype)
        return Flow(shape, dtype, x.ids, values)
    full = x.full_values()
    if len(shape) > x.ndim:
        ids = x.ids[..., None]
        if x.values is None:
            return Flow(shape, dtype, ids, None)
        return made(shape, dtype, ids, np.ascontiguousarray(full)[..., None].view(dtype))
    known = np.broadcast_to(x.known, x.shape).all(axis=-1)
    ids = context.sets.union_over(x.ids, [x.ndim - 1])[..., 0]
    if not known.any():
        return Flow(shape, dtype, np.maximum(ids, 0), None)
    values = np.ascontiguousarray(full).view(dtype)[..., 0]
    return made(shape, dtype, np.where(known, np.int32(KNOWN), np.maximum(ids, 0)), values)


def iota(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`iota`."""
    shape, axis = tuple(equation.params["shape"]), equation.params["dimension"]
    extents = [shape[axis] if one == axis else 1 for one in range(len(shape))]
    if 0 in shape:
        extents = list(shape)
    values = np.zeros(extents, dtype=equation.params["dtype"])
    if values.size:
        values = np.arange(shape[axis]).astype(values.dtype).reshape(extents)
    ids: Ids = np.full(extents if 0 in shape else (1,) * len(shape), KNOWN, dtype=np.int32)
    return Flow(shape, values.dtype, ids, values)


def same(context: Context, equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    """Primitives that give their operands back."""
    return list(operands)


def _out(equation: Any) -> Shape:
    return tuple(equation.outvars[0].aval.shape)


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = {
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "expand_dims": expand_dims,
    "rev": reverse,
    "slice": cut,
    "concatenate": concatenate,
    "stack": stack,
    "split": split,
    "pad": pad,
    "bitcast_convert_type": bitcast,
    "iota": iota,
    "optimization_barrier": same,
    "sharding_constraint": same,
    "pvary": same,
    "pbroadcast": same,
}
