"""Primitives that move elements about: what an output element is, the operand's element is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flamia_ref.leakage.flow import bounds, fields
from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.evaluation import by_jax
from flamia_ref.leakage.flow.sets import EMPTY
from flamia_ref.leakage.flow.value import (
    KNOWN,
    Array,
    Bools,
    Field,
    Flow,
    Shape,
    contiguous,
    empty,
    expanded,
    is_integer,
    known,
    made,
)


def broadcast_in_dim(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`broadcast_in_dim`: axes that are new or longer stay 1, as their elements are alike."""
    shape, places = _out(equation), equation.params["broadcast_dimensions"]

    def move(part: Array) -> Array:
        extents = [1] * len(shape)
        for axis, place in enumerate(places):
            extents[place] = part.shape[axis]
        return part.reshape(extents)

    return operands[0].moved(shape, move)


def reshape(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`reshape`: axes that become one, or one that becomes several, keep length 1 if all are alike in them."""
    return reshaped(operands[0], _out(equation))


def reshaped(x: Flow, shape: Shape) -> Flow:
    """`x` in another shape of as many elements."""
    if 0 in shape:
        return empty(shape, x.dtype)
    groups = _groups(x.shape, shape)

    def move(part: Array) -> Array:
        grown, extents = [], []
        for old_axes, new_axes in groups:
            if all(part.shape[axis] == 1 for axis in old_axes):
                extents += [1] * len(new_axes)
            elif len(old_axes) == len(new_axes) == 1:
                extents += [part.shape[old_axes[0]]]
            else:
                grown += old_axes
                extents += [shape[axis] for axis in new_axes]
        return expanded(part, x.shape, grown).reshape(extents)

    return x.moved(shape, move)


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
    return operands[0].moved(_out(equation), lambda part: part.transpose(order))


def squeeze(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`squeeze`."""
    axes = tuple(int(axis) for axis in equation.params["dimensions"])
    return operands[0].moved(_out(equation), lambda part: part.squeeze(axes))


def expand_dims(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`expand_dims`."""
    axes = tuple(equation.params["dimensions"])
    return operands[0].moved(_out(equation), lambda part: np.expand_dims(part, axes))


def reverse(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`rev`."""
    axes = tuple(equation.params["dimensions"])
    return operands[0].moved(_out(equation), lambda part: np.flip(part, axes))


def cut(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`slice`."""
    parameters = equation.params
    starts, limits = parameters["start_indices"], parameters["limit_indices"]
    steps = parameters["strides"] or (1,) * len(starts)
    return sliced(operands[0], list(map(slice, starts, limits, steps)))


def sliced(x: Flow, places: Sequence[slice]) -> Flow:
    """The elements of `x` at a slice of each axis."""

    def move(part: Array) -> Array:
        return part[
            tuple(
                slice(None) if have == 1 and extent != 1 else one
                for have, extent, one in zip(part.shape, x.shape, places, strict=True)
            )
        ]

    shape = tuple(len(range(n)[one]) for n, one in zip(x.shape, places, strict=True))
    return x.moved(shape, move)


def concatenate(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`concatenate`."""
    return joined(operands, equation.params["dimension"], _out(equation))


def joined(parts: Sequence[Flow], axis: int, shape: Shape) -> Flow:
    """Arrays one after another along an axis."""
    parts = [x for x in parts if x.shape[axis]]
    if 0 in shape or not parts:
        return empty(shape, parts[0].dtype if parts else np.dtype(np.float32))
    first = parts[0]
    if len(parts) == 1:
        return first

    def along(arrays: Sequence[Array]) -> Array:
        arrays = [expanded(one, x.shape, [axis]) for one, x in zip(arrays, parts, strict=True)]
        other = [max(one.shape[place] for one in arrays) for place in range(len(shape))]
        return np.concatenate(
            [
                np.broadcast_to(one, [*other[:axis], one.shape[axis], *other[axis + 1 :]])
                for one in arrays
            ],
            axis,
        )

    ids = along([x.ids for x in parts])
    values = None
    if any(x.values is not None for x in parts):
        values = along([x.compact_values() for x in parts])
    ends = None
    if any(x.bounds is not None for x in parts):
        each = [bounds.limits(x) for x in parts]
        ends = along([low for low, _ in each]), along([high for _, high in each])
    masks = [tuple(f.mask for f in x.fields) if x.fields else None for x in parts]
    kept = None
    if masks[0] is not None and all(one == masks[0] for one in masks):
        words = [[field.word for field in x.fields or ()] for x in parts]
        kept = tuple(
            Field(mask, joined(list(of_mask), axis, shape))
            for mask, of_mask in zip(masks[0], zip(*words, strict=True), strict=True)
        )
    return Flow(shape, first.dtype, ids, values, ends, kept)


def split(context: Context, equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    """`split`."""
    axis, start, parts = equation.params["axis"], 0, []
    for size in equation.params["sizes"]:
        places = [slice(None)] * operands[0].ndim
        places[axis] = slice(start, start + size)
        parts.append(sliced(operands[0], places))
        start += size
    return parts


def unstack(context: Context, equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    """`unstack`."""
    x, axis = operands[0], equation.params["axis"]
    return [row_of(x, index, axis) for index in range(x.shape[axis])]


def row_of(x: Flow, index: int, axis: int = 0) -> Flow:
    """The elements at one place of an axis, which goes."""
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    return x.moved(shape, lambda part: part.take(0 if part.shape[axis] == 1 else index, axis))


def with_axis(x: Flow, axis: int = 0) -> Flow:
    """`x` with an axis of length 1 more."""
    shape = (*x.shape[:axis], 1, *x.shape[axis:])
    return x.moved(shape, lambda part: np.expand_dims(part, axis))


def stack(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`stack`."""
    axis = equation.params["axis"]
    return joined([with_axis(x, axis) for x in operands], axis, _out(equation))


def tile(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`tile`: an axis that is alike stays so."""
    x, reps = operands[0], equation.params["reps"]

    def move(part: Array) -> Array:
        return np.tile(
            part, [1 if have == 1 else r for have, r in zip(part.shape, reps, strict=True)]
        )

    return x.moved(_out(equation), move)


def pad(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`pad`: negative padding cuts."""
    x, filling = operands
    shape, rules = _out(equation), equation.params["padding_config"]
    places = []
    inside: Bools = np.ones((1,) * len(shape), dtype=np.bool_)
    for axis, (low, _, inner) in enumerate(rules):
        place = np.arange(shape[axis]) - low
        here = (place >= 0) & (place % (inner + 1) == 0) & (place // (inner + 1) < x.shape[axis])
        places.append(np.where(here, place // (inner + 1), 0))
        if not here.all():
            inside = inside & here.reshape([-1 if one == axis else 1 for one in range(len(shape))])
    if 0 in shape:
        return empty(shape, x.dtype)
    if 0 in x.shape:
        return filling.moved(shape, lambda part: part.reshape((1,) * len(shape)))

    def move(part: Array, fill: Array) -> Array:
        for axis, place in enumerate(places):
            if part.shape[axis] != 1:
                part = np.take(part, place, axis=axis)
        return np.where(inside, part, fill.reshape((1,) * len(shape)))

    values = ends = None
    if x.values is not None or filling.values is not None:
        values = move(x.compact_values(), filling.compact_values())
    if x.bounds is not None:
        low, high = bounds.limits(filling)
        ends = move(x.bounds[0], low), move(x.bounds[1], high)
    plain = made(shape, x.dtype, move(x.ids, filling.ids), values)
    return Flow(shape, x.dtype, plain.ids, plain.values, ends)


def bitcast(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`bitcast_convert_type`: of one width element by element; parts see their whole, and a whole all its parts."""
    x, shape = operands[0], _out(equation)
    dtype = np.dtype(equation.outvars[0].aval.dtype)
    if 0 in shape:
        return empty(shape, dtype)
    if len(shape) == x.ndim:
        values = None
        if x.values is not None:
            values = (
                contiguous(x.values).view(dtype)
                if np.dtype(x.dtype).itemsize == dtype.itemsize
                else by_jax(equation, [x.values], dtype)
            )
        result = Flow(shape, dtype, x.ids, values)
        if context.fine:
            result = bounds.refined(equation, operands, result)
        return fields.refined(context, equation, operands, result) if is_integer(dtype) else result
    values = None if x.values is None else _by_jax(equation, x.full_values(), dtype)
    if len(shape) > x.ndim:
        return made(shape, dtype, x.ids[..., None], values)
    sure: Bools = np.asarray(np.broadcast_to(x.known, x.shape).all(axis=-1))
    ids = np.maximum(context.sets.union_over(x.sources, [x.ndim - 1])[..., 0], EMPTY)
    return made(shape, dtype, np.where(sure, np.int32(KNOWN), ids), values)


def _by_jax(equation: Any, values: Array, dtype: Any) -> Array:
    import jax

    with jax.enable_x64(True):
        return np.asarray(
            equation.primitive.bind(jax.numpy.asarray(values), **equation.params)
        ).astype(dtype)


def iota(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`iota`."""
    shape, axis = tuple(equation.params["shape"]), equation.params["dimension"]
    dtype = np.dtype(equation.params["dtype"])
    if 0 in shape:
        return empty(shape, dtype)
    extents = [shape[axis] if one == axis else 1 for one in range(len(shape))]
    return known(np.arange(shape[axis]).astype(dtype).reshape(extents)).moved(shape, lambda x: x)


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
    "unstack": unstack,
    "tile": tile,
    "pad": pad,
    "bitcast_convert_type": bitcast,
    "iota": iota,
    **dict.fromkeys(
        ["optimization_barrier", "sharding_constraint", "layout_constraint", "reduced_vary_cast"],
        same,
    ),
}
