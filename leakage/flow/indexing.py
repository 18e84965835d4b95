"""Gathers, scatters and slices at computed places: moves where the places are known, else whatever may be meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.sets import EMPTY, Ids
from flamia_ref.leakage.flow.value import KNOWN, Array, Flow, Shape, alike, expanded, made

Places = NDArray[np.int64]


def gather(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`gather`."""
    x, indices = operands
    parameters, out = equation.params, equation.outvars[0].aval
    rules, shape = parameters["dimension_numbers"], tuple(out.shape)
    sizes = list(parameters["slice_sizes"])
    if 0 in shape:
        return Flow(shape, x.dtype, np.full(shape, KNOWN, dtype=np.int32), np.zeros(shape, x.dtype))
    x = alike(x)
    if not indices.all_known:
        return _gathered_somewhere(context, x, indices, rules, sizes, shape)
    starts = _starts(indices.full_values(), rules.start_index_map, rules.operand_batching_dims,
                     rules.start_indices_batching_dims, x.ndim)
    mode = str(parameters["mode"])
    inside = np.ones(starts.shape[:-1], dtype=np.bool_)
    limits = np.array(x.shape) - np.array(sizes)
    if "FILL" in mode:
        inside = ((starts >= 0) & (starts <= limits)).all(axis=-1)
    starts = np.clip(starts, 0, limits)

    def move(part: Array, fill: Any) -> Array:
        return _taken(part, x.shape, starts, inside, fill, rules, sizes, shape)

    ids = move(x.ids, KNOWN)
    if x.values is None and inside.all():
        return Flow(shape, x.dtype, ids, None)
    filling = _filling(parameters.get("fill_value"), x.dtype)
    values = np.zeros((1,) * x.ndim, dtype=x.dtype) if x.values is None else x.values
    return made(shape, x.dtype, ids, move(values, filling))


def _filling(given: Any, dtype: Any) -> Any:
    if given is not None:
        return given
    dtype = np.dtype(dtype)
    if dtype.kind == "u":
        return np.iinfo(dtype).max
    if dtype.kind == "i":
        return np.iinfo(dtype).min
    return False if dtype.kind == "b" else np.nan


def _starts(
    indices: Array,
    start_map: Sequence[int],
    operand_batching: Sequence[int],
    indices_batching: Sequence[int],
    count: int,
) -> Places:
    """Where each slice starts, [...batch, axes of the operand]."""
    batch = indices.shape[:-1]
    starts = np.zeros((*batch, count), dtype=np.int64)
    for place, axis in enumerate(start_map):
        starts[..., axis] = indices[..., place]
    for axis, place in zip(operand_batching, indices_batching, strict=True):
        extents = [batch[place] if one == place else 1 for one in range(len(batch))]
        starts[..., axis] = np.arange(batch[place]).reshape(extents)
    return starts


def _taken(
    part: Array,
    full: Shape,
    starts: Places,
    inside: NDArray[np.bool_],
    fill: Any,
    rules: Any,
    sizes: Sequence[int],
    shape: Shape,
) -> Array:
    """The slices of a compact array, compact along the axes that whole slices keep alike."""
    batch = starts.shape[:-1]
    dropped = (*rules.collapsed_slice_dims, *rules.operand_batching_dims)
    window_axes = [axis for axis in range(len(full)) if axis not in dropped]
    windows = [1 if part.shape[axis] == 1 else sizes[axis] for axis in window_axes]
    offset = np.zeros((*batch, *(1,) * len(windows)), dtype=np.int64)
    stride = 1
    for axis in reversed(range(len(full))):
        if part.shape[axis] == 1:
            continue
        at = starts[..., axis].reshape(*batch, *(1,) * len(windows))
        if axis in window_axes:
            place = window_axes.index(axis)
            extents = [1] * (len(batch) + len(windows))
            extents[len(batch) + place] = windows[place]
            at = at + np.arange(windows[place]).reshape(extents)
        offset = offset + at * stride
        stride *= part.shape[axis]
    offset = np.broadcast_to(offset, (*batch, *windows))
    found = part.reshape(-1)[offset]
    if not inside.all():
        found = np.where(inside.reshape(*batch, *(1,) * len(windows)), found, fill)
        found = found.astype(part.dtype)
    order = [0] * len(shape)
    batch_place = window_place = 0
    for axis in range(len(shape)):
        if axis in rules.offset_dims:
            order[axis] = len(batch) + window_place
            window_place += 1
        else:
            order[axis] = batch_place
            batch_place += 1
    return found.transpose(order)


def _gathered_somewhere(
    context: Context, x: Flow, indices: Flow, rules: Any, sizes: Sequence[int], shape: Shape
) -> Flow:
    """A gather at places that are not known: all that they may mean, and what the places depend on."""
    searched = [axis for axis in range(x.ndim) if sizes[axis] != x.shape[axis] or axis in rules.start_index_map]
    every = np.maximum(context.sets.union_over(np.maximum(x.ids, EMPTY), searched), EMPTY)
    if any(axis in rules.operand_batching_dims for axis in range(x.ndim)):
        every = context.sets.union_over(every, list(rules.operand_batching_dims))
    window = [
        axis for axis in range(x.ndim)
        if axis not in (*rules.collapsed_slice_dims, *rules.operand_batching_dims)
    ]
    of_operand = every.transpose(
        [*window, *(axis for axis in range(x.ndim) if axis not in window)]
    ).reshape([every.shape[axis] for axis in window])
    last = indices.ndim - 1
    of_places = context.sets.union_over(np.maximum(indices.ids, EMPTY), [last])[..., 0]
    extents_window, extents_batch = [], []
    window_place = batch_place = 0
    for axis in range(len(shape)):
        if axis in rules.offset_dims:
            extents_window.append(of_operand.shape[window_place])
            extents_batch.append(1)
            window_place += 1
        else:
            extents_window.append(1)
            extents_batch.append(of_places.shape[batch_place])
            batch_place += 1
    ids = context.sets.union(of_operand.reshape(extents_window), of_places.reshape(extents_batch))
    return Flow(shape, x.dtype, ids, None)


def dynamic_slice(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`dynamic_slice`."""
    x, places = operands[0], operands[1:]
    shape = tuple(equation.outvars[0].aval.shape)
    if not all(place.all_known for place in places):
        seen = _seen_by(context, places)
        moving = [axis for axis in range(x.ndim) if shape[axis] != x.shape[axis]]
        every = context.sets.union_over(np.maximum(x.ids, EMPTY), moving)
        ids = context.sets.union(every, seen.reshape((1,) * x.ndim))
        return Flow(shape, x.dtype, np.maximum(ids, EMPTY), None)
    cuts = []
    for place, extent, size in zip(places, x.shape, shape, strict=True):
        start = int(np.clip(int(place.full_values()), 0, extent - size))
        cuts.append(slice(start, start + size))

    def move(part: Array) -> Array:
        return part[
            tuple(
                slice(None) if have == 1 and extent != 1 else one
                for have, extent, one in zip(part.shape, x.shape, cuts, strict=True)
            )
        ]

    values = None if x.values is None else move(x.values)
    return made(shape, x.dtype, move(x.ids), values)


def _seen_by(context: Context, places: Sequence[Flow]) -> Ids:
    seen = np.zeros((1,), dtype=np.int32)
    for place in places:
        flat = np.maximum(place.ids, EMPTY).reshape(-1)
        seen = context.sets.union(seen, context.sets.union_over(flat, [0]))
    return seen


def dynamic_update_slice(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`dynamic_update_slice`."""
    x, update, *places = operands
    if 0 in update.shape:
        return x
    if not all(place.all_known for place in places):
        seen = _seen_by(context, places).reshape((1,) * x.ndim)
        moving = list(range(x.ndim))
        every = context.sets.union_over(np.maximum(update.ids, EMPTY), moving)
        ids = context.sets.union(context.sets.union(np.maximum(x.ids, EMPTY), every), seen)
        return Flow(x.shape, x.dtype, np.maximum(ids, EMPTY), None)
    here = []
    for place, extent, size in zip(places, x.shape, update.shape, strict=True):
        start = int(np.clip(int(place.full_values()), 0, extent - size))
        here.append(slice(start, start + size))
    everything = list(range(x.ndim))
    ids = expanded(x.ids, x.shape, everything).copy()
    ids[tuple(here)] = update.ids
    if x.values is None and update.values is None:
        return Flow(x.shape, x.dtype, ids, None)
    values = x.full_values().copy()
    values[tuple(here)] = update.full_values()
    return made(x.shape, x.dtype, ids, values)


def scatter(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`scatter` and its kin that add, multiply or compare: what is written sees the update, and what stays itself."""
    x, indices, updates = operands
    parameters, name = equation.params, equation.primitive.name
    rules = parameters["dimension_numbers"]
    own, new = np.maximum(x.ids, EMPTY), np.maximum(updates.ids, EMPTY)
    if not indices.all_known:
        seen = context.sets.union_over(
            np.maximum(indices.ids, EMPTY).reshape(-1), [0]
        ).reshape((1,) * x.ndim)
        every = context.sets.union_over(new.reshape(-1), [0]).reshape((1,) * x.ndim)
        ids = context.sets.union(context.sets.union(own, every), seen)
        return Flow(x.shape, x.dtype, np.maximum(ids, EMPTY), None)
    if 0 in updates.shape:
        return x
    targets, inside = _targets(indices.full_values(), rules, x.shape, updates.shape, parameters)
    flat, of_updates = targets[inside], np.broadcast_to(updates.ids, updates.shape)[inside]
    ids = np.broadcast_to(x.ids, x.shape).reshape(-1).copy()
    values = x.full_values().reshape(-1).copy()
    count = np.bincount(flat, minlength=ids.size)
    if name == "scatter" and (count <= 1).all():
        ids[flat] = of_updates
        values[flat] = updates.full_values()[inside]
        return made(x.shape, x.dtype, ids.reshape(x.shape), values.reshape(x.shape))
    written = count > 0
    bits = context.sets.bits(np.maximum(ids, EMPTY))
    if name == "scatter":
        bits[written] = 0
    np.bitwise_or.at(bits, flat, context.sets.bits(np.maximum(of_updates, EMPTY)))
    merged = context.sets.intern(bits)
    ids = np.where(written, merged, ids)
    return made(x.shape, x.dtype, ids.reshape(x.shape), values.reshape(x.shape))


def _targets(
    indices: Array, rules: Any, full: Shape, updates: Shape, parameters: Mapping[str, Any]
) -> tuple[Places, NDArray[np.bool_]]:
    """The flat place that each update is written to, and whether it is written at all."""
    window_dims = rules.update_window_dims
    batching = getattr(rules, "operand_batching_dims", ())
    dropped = (*rules.inserted_window_dims, *batching)
    axes = [axis for axis in range(len(full)) if axis not in dropped]
    starts = _starts(
        indices,
        rules.scatter_dims_to_operand_dims,
        batching,
        getattr(rules, "scatter_indices_batching_dims", ()),
        len(full),
    )
    sizes = np.ones(len(full), dtype=np.int64)
    for axis, place in zip(axes, window_dims, strict=True):
        sizes[axis] = updates[place]
    limits = np.array(full) - sizes
    if "CLIP" in str(parameters["mode"]):
        starts = np.clip(starts, 0, limits)
    inside = ((starts >= 0) & (starts <= limits)).all(axis=-1)
    others = [axis for axis in range(len(updates)) if axis not in window_dims]
    place_in_updates = np.indices(updates)
    at = tuple(place_in_updates[axis] for axis in others)
    flat = np.zeros(updates, dtype=np.int64)
    for axis, extent in enumerate(full):
        here = starts[(*at, axis)] if others else np.broadcast_to(starts[..., axis], updates)
        if axis in axes:
            here = here + place_in_updates[window_dims[axes.index(axis)]]
        flat = flat * extent + here
    valid = inside[at] if others else np.broadcast_to(inside, updates)
    return np.where(valid, flat, 0), np.broadcast_to(valid, updates)


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = {
    "gather": gather,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    **dict.fromkeys(
        ["scatter", "scatter_add", "scatter-add", "scatter_mul", "scatter-mul", "scatter_min", "scatter-min",
         "scatter_max", "scatter-max", "scatter_sub", "scatter-sub"],
        scatter,
    ),
}
