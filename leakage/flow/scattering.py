"""Scatters: what is written sees the updates written there, and what stays sees itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.indexing import Places, starts_of
from flamia_ref.leakage.flow.sets import EMPTY
from flamia_ref.leakage.flow.value import (
    KNOWN,
    Array,
    Bools,
    Flow,
    Shape,
    is_float,
    is_narrow,
    is_opaque,
    made,
    unknown,
)

_COMBINED: Mapping[str, Any] = {
    "scatter-add": np.add,
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter-sub": np.subtract,
    "scatter_mul": np.multiply,
    "scatter-mul": np.multiply,
    "scatter_min": np.minimum,
    "scatter-min": np.minimum,
    "scatter_max": np.maximum,
    "scatter-max": np.maximum,
}


def scatter(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`scatter` and its kin that add, multiply or compare."""
    x, indices, updates = operands
    name, sets = _name(equation), context.sets
    if 0 in updates.shape or 0 in x.shape:
        return x
    if not indices.all_known:
        one = (1,) * x.ndim
        seen = sets.union_over(indices.sources.reshape(-1), [0]).reshape(one)
        every = sets.union_over(updates.sources.reshape(-1), [0]).reshape(one)
        ids = sets.union(sets.union(x.sources, every), seen)
        return unknown(x.shape, x.dtype, np.maximum(ids, EMPTY))
    targets, inside = _targets(
        indices.full_values(),
        equation.params["dimension_numbers"],
        x.shape,
        updates.shape,
        str(equation.params["mode"]),
    )
    flat, of_updates = targets[inside], updates.full_ids()[inside]
    ids = np.array(x.full_ids()).reshape(-1)
    count = np.bincount(flat, minlength=ids.size)
    values: Array | None = None
    if not is_opaque(x.dtype) and (x.values is not None or updates.values is not None):
        values = np.array(x.full_values()).reshape(-1)
    if name == "scatter" and (count <= 1).all():
        ids[flat] = of_updates
        if values is not None:
            values[flat] = updates.full_values()[inside]
        return _shaped(x, ids, values)
    written = count > 0
    bits = sets.bits(ids)
    unsure = ids >= 0
    if name == "scatter":  # in no order: any of the updates may stay
        bits[written] = 0
        unsure[written] = True
    np.bitwise_or.at(bits, flat, sets.bits(of_updates))
    np.logical_or.at(unsure, flat, of_updates >= 0)
    if name in _COMBINED and values is not None and not is_narrow(x.dtype):
        with np.errstate(all="ignore"):
            _COMBINED[name].at(values, flat, updates.full_values()[inside])
        if is_float(x.dtype):  # more than one rounding depends on the order
            unsure |= count > 1
    else:
        unsure |= written
    ids = np.where(written, np.where(unsure, sets.intern(bits), np.int32(KNOWN)), ids)
    return _shaped(x, ids, values)


def _name(equation: Any) -> str:
    """The primitive's name; another for a `scatter` that writes something else than its updates."""
    name: str = equation.primitive.name
    update = equation.params.get("update_jaxpr")
    if name != "scatter" or update is None:
        return name
    update = getattr(update, "jaxpr", update)
    plain = len(update.invars) == 2 and update.outvars[0] is update.invars[1]
    return name if plain else "scatter of a function"


def _shaped(x: Flow, ids: Array, values: Array | None) -> Flow:
    full = None if values is None else values.reshape(x.shape)
    return made(x.shape, x.dtype, ids.reshape(x.shape), full)


def _targets(
    indices: Array, rules: Any, full: Shape, updates: Shape, mode: str
) -> tuple[Places, Bools]:
    """The flat place that each update is written to, and whether it is written at all."""
    window_dims = rules.update_window_dims
    dropped = (*rules.inserted_window_dims, *rules.operand_batching_dims)
    axes = [axis for axis in range(len(full)) if axis not in dropped]
    starts = starts_of(
        indices,
        rules.scatter_dims_to_operand_dims,
        rules.operand_batching_dims,
        rules.scatter_indices_batching_dims,
        len(full),
    )
    sizes = np.ones(len(full), dtype=np.int64)
    for axis, place in zip(axes, window_dims, strict=True):
        sizes[axis] = updates[place]
    limits = np.array(full) - sizes
    if "CLIP" in mode:
        starts = np.clip(starts, 0, limits)
    inside: Bools = np.asarray(((starts >= 0) & (starts <= limits)).all(axis=-1))
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


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = dict.fromkeys(
    ["scatter", *_COMBINED], scatter
)
