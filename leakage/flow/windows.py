"""Windows that slide over an array: convolutions, reductions over windows, and the derivatives of these."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.contraction import Factor, sum_of_products
from flamia_ref.leakage.flow.sets import EMPTY, Ids
from flamia_ref.leakage.flow.value import KNOWN, Array, Flow, empty, made, unknown

_Places = tuple[tuple[Array, ...], Array]


def _windows(
    extents: Sequence[int], results: Sequence[int], parameters: Mapping[str, Any]
) -> Iterator[_Places]:
    """For each place in a window, the index along each axis that every result takes there, and whether it is inside.

    Indices are clipped into the array; flags are of the shape of the results.
    """
    axes = []
    for axis, (extent, count) in enumerate(zip(extents, results, strict=True)):
        base = (parameters.get("base_dilation") or [1] * len(extents))[axis]
        step = (parameters.get("window_dilation") or [1] * len(extents))[axis]
        start = (
            np.arange(count) * parameters["window_strides"][axis] - parameters["padding"][axis][0]
        )
        found = []
        for offset in range(parameters["window_dimensions"][axis]):
            place = start + offset * step
            here = (place >= 0) & (place % base == 0) & (place // base < extent)
            found.append((np.where(here, place // base, 0), here))
        axes.append(found)
    for window in itertools.product(*axes):
        flags = np.ones(tuple(results), dtype=np.bool_)
        for axis, (_, here) in enumerate(window):
            flags = flags & here.reshape([-1 if a == axis else 1 for a in range(len(results))])
        yield tuple(place for place, _ in window), flags


def _parameters(equation: Any) -> Mapping[str, Any]:
    return dict(equation.params)


def reduce_window(context: Context, equation: Any, operands: Sequence[Flow]) -> Any:
    """`reduce_window` and its kin: a result sees all operands in its window, and what they start with."""
    general = equation.primitive.name == "reduce_window"
    count = len(operands) // 2 if general else len(operands)
    ids = _seen_in_windows(context, equation, operands[:count])
    for x in operands[count:]:
        ids = context.sets.union(ids, x.sources.reshape((1,) * ids.ndim))
    ids = np.maximum(ids, EMPTY)
    results = [unknown(tuple(v.aval.shape), v.aval.dtype, ids) for v in equation.outvars]
    return results if general or len(results) > 1 else results[0]


def _seen_in_windows(context: Context, equation: Any, operands: Sequence[Flow]) -> Ids:
    shape = tuple(equation.outvars[0].aval.shape)
    sources = [np.broadcast_to(x.sources, x.shape) for x in operands]
    ids: Ids = np.zeros(shape, dtype=np.int32)
    if 0 in shape or any(0 in x.shape for x in operands):
        return ids
    for places, inside in _windows(operands[0].shape, shape, _parameters(equation)):
        for one in sources:
            ids = context.sets.union(ids, np.where(inside, one[np.ix_(*places)], np.int32(EMPTY)))
    return ids


def gathered(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`select_and_gather_add`: a result sees both operands in its window."""
    ids = _seen_in_windows(context, equation, operands)
    return unknown(tuple(ids.shape), equation.outvars[0].aval.dtype, np.maximum(ids, EMPTY))


def scattered(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`select_and_scatter_add`: an element sees the sources of the windows it is in, and all that is in these."""
    source, x = operands
    if 0 in x.shape or 0 in source.shape:
        return made(
            x.shape,
            x.dtype,
            np.full((1,) * x.ndim, KNOWN, np.int32),
            np.zeros((1,) * x.ndim, x.dtype),
        )
    own = np.broadcast_to(x.sources, x.shape)
    windows = list(_windows(x.shape, source.shape, _parameters(equation)))
    of_window: Ids = np.broadcast_to(source.sources, source.shape)
    for places, inside in windows:
        here = np.where(inside, own[np.ix_(*places)], np.int32(EMPTY))
        of_window = context.sets.union(of_window, here)
    ids: Ids = np.full(x.shape, KNOWN, dtype=np.int32)
    bits = context.sets.bits(ids)
    touched = np.zeros(x.shape, dtype=np.bool_)
    seen = context.sets.bits(np.broadcast_to(of_window, source.shape))
    for places, inside in windows:
        at = tuple(np.broadcast_arrays(*np.ix_(*places)))
        at = tuple(one[inside] for one in at)
        np.bitwise_or.at(bits, at, seen[inside])
        touched[at] = True
    ids = np.where(touched, context.sets.intern(bits), np.int32(KNOWN))
    return made(x.shape, x.dtype, ids, np.zeros((1,) * x.ndim, dtype=x.dtype))


def convolution(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`conv_general_dilated`: a sum of products of a window with a kernel."""
    parameters, out = equation.params, equation.outvars[0].aval
    numbers, shape = parameters["dimension_numbers"], tuple(out.shape)
    x, kernel = operands
    if 0 in shape:
        return empty(shape, out.dtype)
    order, kernel_order = numbers.lhs_spec, numbers.rhs_spec
    extents = [x.shape[axis] for axis in order]
    of_kernel = [kernel.shape[axis] for axis in kernel_order]
    results = [shape[axis] for axis in numbers.out_spec]
    places = _windows(
        extents[2:],
        results[2:],
        {
            "window_dimensions": of_kernel[2:],
            "window_strides": parameters["window_strides"],
            "padding": parameters["padding"],
            "base_dilation": parameters["lhs_dilation"],
            "window_dilation": parameters["rhs_dilation"],
        },
    )
    features, inputs = of_kernel[:2]
    feature = np.arange(features)
    group = feature // (features // parameters["feature_group_count"])
    batch_groups = parameters["batch_group_count"]
    batch = np.arange(results[0])[:, None] + results[0] * (feature // (features // batch_groups))
    a = [one.transpose(order) for one in Factor.of(x).full(x.shape)]
    b = [one.transpose(kernel_order) for one in Factor.of(kernel).full(kernel.shape)]
    left: list[list[Array]] = [[] for _ in a]
    right: list[list[Array]] = [[] for _ in b]
    ones = (1,) * len(results[2:])
    for (place, inside), offset in zip(places, np.ndindex(*of_kernel[2:]), strict=True):
        for channel in range(inputs):
            at = np.ix_(*place)
            lanes = (*batch.shape, *ones)
            first = batch.reshape(lanes), (group * inputs + channel).reshape(1, -1, *ones)
            for target, one, outside in zip(left, a, (EMPTY, True, True, True), strict=True):
                target.append(np.where(inside, one[(*first, *at)], outside))
            for target, one in zip(right, b, strict=True):
                target.append(one[(slice(None), channel, *offset)].reshape(1, features, *ones))
    lanes_shape = tuple(results)
    if not left[0]:
        zero = np.zeros((1,) * len(shape), dtype=out.dtype)
        return made(shape, out.dtype, np.full((1,) * len(shape), KNOWN, np.int32), zero)
    first_side, second_side = (Factor.of_parts([np.stack(x) for x in y]) for y in (left, right))
    found = sum_of_products(context, first_side, second_side, len(left[0]), lanes_shape, out.dtype)
    back = [list(numbers.out_spec).index(axis) for axis in range(len(shape))]
    return found.moved(shape, lambda part: part.transpose(back))


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = {
    **dict.fromkeys(
        [
            "reduce_window",
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "reduce_window_prod",
        ],
        reduce_window,
    ),
    "select_and_gather_add": gathered,
    "select_and_scatter_add": scattered,
    "conv_general_dilated": convolution,
}
