"""Gathers and slices at computed places: moves where the places are known, else whatever may be meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.sets import EMPTY, Ids
from flamia_ref.leakage.flow.structural import sliced
from flamia_ref.leakage.flow.value import (
    KNOWN,
    Array,
    Bools,
    Flow,
    Shape,
    alike,
    empty,
    integer_info,
    is_bool,
    is_integer,
    is_opaque,
    made,
    unknown,
)

Places = NDArray[np.int64]

_MOST_STARTS = 128  # that are looked at one by one


def gather(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`gather`: each slice by itself, at its place where that is known, else at any."""
    x, indices = operands
    parameters, shape = equation.params, tuple(equation.outvars[0].aval.shape)
    rules, sizes = parameters["dimension_numbers"], tuple(parameters["slice_sizes"])
    if 0 in shape:
        return empty(shape, x.dtype)
    x = alike(x)
    batch = _batch_axes(shape, rules.offset_dims)
    sure: Bools = np.asarray(np.broadcast_to(indices.known, indices.shape).all(axis=-1))
    somewhere: Flow | None = None
    if not sure.all():
        somewhere = _gathered_somewhere(context, x, indices, rules, sizes, shape)
        if not sure.any() or 0 in x.shape:
            return somewhere
    starts = starts_of(
        indices.full_values(),
        rules.start_index_map,
        rules.operand_batching_dims,
        rules.start_indices_batching_dims,
        x.ndim,
    )
    limits = np.array(x.shape) - np.array(sizes)
    inside = np.ones(starts.shape[:-1], dtype=np.bool_)
    if "FILL" in str(parameters["mode"]):
        inside = ((starts >= 0) & (starts <= limits)).all(axis=-1)
    starts = np.clip(starts, 0, limits)
    offsets = _Offsets(x.shape, starts, inside, rules, sizes, shape)
    ids = offsets.take(x.ids, KNOWN)
    values = None
    if x.values is not None or not inside.all():
        values = None if is_opaque(x.dtype) else _filled(offsets, x, parameters)
        if values is None:
            ids = np.maximum(ids, EMPTY)
    if somewhere is not None:
        flags = sure.reshape(
            [sure.shape[batch.index(a)] if a in batch else 1 for a in range(len(shape))]
        )
        ids = np.where(flags, ids, somewhere.ids)
    return made(shape, x.dtype, ids, values)


def _filled(offsets: _Offsets, x: Flow, parameters: Mapping[str, Any]) -> Array:
    fill = parameters.get("fill_value")
    return offsets.take(x.compact_values(), _default(x.dtype) if fill is None else fill)


def _default(dtype: Any) -> Any:
    """What JAX gives for a place outside."""
    if is_integer(dtype):
        info = integer_info(dtype)
        return info.min if info.min else info.max
    return False if is_bool(dtype) else np.nan


def _batch_axes(shape: Shape, offset_dims: Sequence[int]) -> list[int]:
    return [axis for axis in range(len(shape)) if axis not in offset_dims]


def starts_of(
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


class _Offsets:
    """The slices that a gather takes, to be taken from compact arrays."""

    def __init__(
        self,
        full: Shape,
        starts: Places,
        inside: Bools,
        rules: Any,
        sizes: Sequence[int],
        shape: Shape,
    ) -> None:
        self.full, self.starts, self.inside = full, starts, inside
        self.sizes, self.shape, self.rules = sizes, shape, rules

    def take(self, part: Array, fill: Any) -> Array:
        """The slices of a compact array, compact along the axes that whole slices keep alike."""
        batch, rules = self.starts.shape[:-1], self.rules
        dropped = (*rules.collapsed_slice_dims, *rules.operand_batching_dims)
        window_axes = [axis for axis in range(len(self.full)) if axis not in dropped]
        windows = [1 if part.shape[axis] == 1 else self.sizes[axis] for axis in window_axes]
        offset = np.zeros((*batch, *(1,) * len(windows)), dtype=np.int64)
        stride = 1
        for axis in reversed(range(len(self.full))):
            if part.shape[axis] == 1:
                continue
            at = self.starts[..., axis].reshape(*batch, *(1,) * len(windows))
            if axis in window_axes:
                place = window_axes.index(axis)
                extents = [1] * (len(batch) + len(windows))
                extents[len(batch) + place] = windows[place]
                at = at + np.arange(windows[place]).reshape(extents)
            offset = offset + at * stride
            stride *= part.shape[axis]
        offset = np.broadcast_to(offset, (*batch, *windows))
        found: Array = part.reshape(-1)[offset]
        if not self.inside.all():
            flags = self.inside.reshape(*batch, *(1,) * len(windows))
            found = np.where(flags, found, np.asarray(fill).astype(part.dtype))
        return found.transpose(_order(self.shape, rules.offset_dims, len(batch)))


def _order(shape: Shape, offset_dims: Sequence[int], batch: int) -> list[int]:
    """For each axis of a gather's result its place among [...batch, ...windows]."""
    order, places = [], [0, batch]
    for axis in range(len(shape)):
        order.append(places[axis in offset_dims])
        places[axis in offset_dims] += 1
    return order


def _gathered_somewhere(
    context: Context, x: Flow, indices: Flow, rules: Any, sizes: Sequence[int], shape: Shape
) -> Flow:
    """A gather at places that are not known: all that they may mean, and what the places depend on."""
    # An axis is searched where the index moves along it; batching axes go along with those of the index.
    searched = [
        axis
        for axis in rules.start_index_map
        if sizes[axis] != x.shape[axis] or axis in rules.collapsed_slice_dims
    ]
    every = np.maximum(context.sets.union_over(x.sources, searched), EMPTY)
    windows = [
        axis
        for axis in range(x.ndim)
        if axis not in (*rules.collapsed_slice_dims, *rules.operand_batching_dims)
    ]
    of_index = context.sets.union_over(indices.sources, [indices.ndim - 1])[..., 0]
    batch = _batch_axes(shape, rules.offset_dims)
    extents = [1] * len(shape)
    order = []
    for place, axis in enumerate(rules.offset_dims):
        extents[axis] = every.shape[windows[place]]
        order.append((axis, windows[place]))
    pairs = zip(rules.operand_batching_dims, rules.start_indices_batching_dims, strict=True)
    for of_operand, place in pairs:
        axis = batch[place]
        extents[axis] = every.shape[of_operand]
        order.append((axis, of_operand))
    kept = [axis for _, axis in sorted(order)]
    others = [axis for axis in range(x.ndim) if axis not in kept]
    own = every.transpose([*kept, *others]).reshape(extents)
    index = of_index.reshape(
        [of_index.shape[batch.index(a)] if a in batch else 1 for a in range(len(shape))]
    )
    return unknown(shape, x.dtype, np.maximum(context.sets.union(own, index), EMPTY))


def dynamic_slice(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`dynamic_slice`: along an axis whose start is not known any element may be meant."""
    x, starts = operands[0], operands[1:]
    shape = tuple(equation.outvars[0].aval.shape)
    cuts, searched, seen = [], [], np.zeros((1,) * x.ndim, dtype=np.int32)
    for axis, (start, extent, size) in enumerate(zip(starts, x.shape, shape, strict=True)):
        cuts.append(slice(0, size))
        if size == extent:
            continue
        if start.all_known:
            first = int(np.clip(int(start.full_values()), 0, extent - size))
            cuts[-1] = slice(first, first + size)
        else:
            searched.append(axis)
            seen = context.sets.union(seen, start.sources.reshape((1,) * x.ndim))
    found = sliced(x, [slice(None) if a in searched else one for a, one in enumerate(cuts)])
    if not searched or 0 in shape:
        return sliced(found, [slice(0, n) for n in shape])
    ids = found.sources
    for axis in searched:
        ids = _anywhere(context, ids, axis, shape[axis], x.shape[axis])
    return unknown(shape, x.dtype, np.maximum(context.sets.union(ids, seen), EMPTY))


def _anywhere(context: Context, ids: Ids, axis: int, size: int, extent: int) -> Ids:
    """Of a run of `size` somewhere along an axis: its element r is one of r, ..., r + extent - size."""
    starts = extent - size + 1
    if ids.shape[axis] == 1 or starts > _MOST_STARTS:
        return context.sets.union_over(ids, [axis])
    whole = np.moveaxis(ids, axis, 0)
    found = whole[:size]
    for start in range(1, starts):
        found = context.sets.union(found, whole[start : start + size])
    return np.moveaxis(found, 0, axis)


def dynamic_update_slice(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`dynamic_update_slice`: along an axis whose start is not known any element may be written or stay."""
    x, update, *starts = operands
    if 0 in update.shape:
        return x
    here, searched, seen = [], [], np.zeros((1,) * x.ndim, dtype=np.int32)
    for axis, (start, extent, size) in enumerate(zip(starts, x.shape, update.shape, strict=True)):
        if size == extent:
            here.append(slice(None))
        elif start.all_known:
            first = int(np.clip(int(start.full_values()), 0, extent - size))
            here.append(slice(first, first + size))
        else:
            here.append(slice(None))
            searched.append(axis)
            seen = context.sets.union(seen, start.sources.reshape((1,) * x.ndim))
    ids = np.array(x.full_ids())
    if searched:
        new = context.sets.union(context.sets.union_over(update.sources, searched), seen)
        ids[tuple(here)] = np.maximum(context.sets.union(ids[tuple(here)], new), EMPTY)
        return made(x.shape, x.dtype, ids, x.values)
    ids[tuple(here)] = update.ids
    if x.values is None and update.values is None:
        return unknown(x.shape, x.dtype, ids)
    values = np.array(x.full_values())
    values[tuple(here)] = update.compact_values()
    return made(x.shape, x.dtype, ids, values)


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = {
    "gather": gather,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
}
