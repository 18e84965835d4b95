"""Programs over a mesh of devices: each device's by itself, on its shards. Devices that exchange data are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref.leakage.flow.structural import joined, reshaped, sliced, with_axis
from flamia_ref.leakage.flow.value import Flow, known, unknown

if TYPE_CHECKING:
    from flamia_ref.leakage.flow.interpreter import Interpreter


class Exchange(Exception):
    """A primitive whose result depends on other devices; `args[0]` is its name."""


def shard_map(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow] | None:
    """`shard_map`: the program of each device on its shards. None where devices exchange data."""
    parameters = equation.params
    axes = {name: parameters["mesh"].shape[name] for name in parameters["newly_manual_axes"]}
    shards: list[list[tuple[tuple[slice, ...], Flow]]] = [[] for _ in equation.outvars]
    for place in itertools.product(*(range(size) for size in axes.values())):
        at = dict(zip(axes, place, strict=True))
        inside = machine.on_device({**machine.axes, **{n: (at[n], axes[n]) for n in axes}})
        given = [
            sliced(x, _shard(x.shape, spec, at, axes))
            for x, spec in zip(operands, parameters["in_specs"], strict=True)
        ]
        try:
            results = inside.run(parameters["jaxpr"], given)
        except Exchange as error:
            machine.context.unknown[str(error)] += 1
            return None
        for found, x, variable, spec in zip(
            shards, results, equation.outvars, parameters["out_specs"], strict=True
        ):
            where = tuple(_shard(tuple(variable.aval.shape), spec, at, axes))
            if all(where != other for other, _ in found):
                found.append((where, x))
    return [
        _assembled(found, tuple(variable.aval.shape))
        for found, variable in zip(shards, equation.outvars, strict=True)
    ]


def _shard(
    shape: Sequence[int], spec: Any, at: Mapping[str, int], axes: Mapping[str, int]
) -> list[slice]:
    """The part of an array that a device has."""
    places = []
    for axis, extent in enumerate(shape):
        names = spec[axis] if axis < len(spec) else None
        index, count = 0, 1
        for name in () if names is None else names if isinstance(names, tuple) else (names,):
            if name in axes:
                index, count = index * axes[name] + at[name], count * axes[name]
        size = extent // count
        places.append(slice(index * size, (index + 1) * size))
    return places


def _assembled(shards: Sequence[tuple[tuple[slice, ...], Flow]], shape: tuple[int, ...]) -> Flow:
    """The array of shards at places that make a grid."""

    def part(within: Sequence[tuple[tuple[slice, ...], Flow]], axis: int) -> Flow:
        if axis == len(shape):
            return within[0][1]
        groups: dict[int, list[tuple[tuple[slice, ...], Flow]]] = {}
        for one in within:
            groups.setdefault(one[0][axis].start, []).append(one)
        parts = [part(groups[start], axis + 1) for start in sorted(groups)]
        extent = sum(x.shape[axis] for x in parts)
        whole = (*parts[0].shape[:axis], extent, *parts[0].shape[axis + 1 :])
        return joined(parts, axis, whole)

    return part(shards, 0)


def axis_index(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow]:
    """`axis_index`: known, as each device's program is followed by itself."""
    name = equation.params["axis_name"]
    names = name if isinstance(name, tuple) else (name,)
    index = 0
    for one in names:
        if one not in machine.axes:
            raise Exchange("axis_index")
        index = index * machine.axes[one][1] + machine.axes[one][0]
    return [known(np.array(index, dtype=equation.outvars[0].aval.dtype))]


def _alone(rule: Callable[[Any, Sequence[Flow]], list[Flow]]) -> Callable[..., list[Flow]]:
    """A collective over axes of one device, which `rule` says the result of."""

    def on_one(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow]:
        parameters = equation.params
        names = parameters.get("axes", parameters.get("axis_name"))
        names = names if isinstance(names, (tuple, frozenset)) else (names,)
        if names and all(isinstance(name, int) for name in names):
            return _over_axes(machine, sorted(names), operands)
        for name in names:
            if not isinstance(name, str) or machine.axes.get(name, (0, 2))[1] != 1:
                raise Exchange(equation.primitive.name)
        return rule(equation, operands)

    return on_one


def _over_axes(machine: Interpreter, axes: Sequence[int], operands: Sequence[Flow]) -> list[Flow]:
    """A collective over axes of arrays, which `vmap` makes of named ones: all along them together, and they go."""
    results = []
    for x in operands:
        ids = machine.context.sets.union_over(x.sources, axes)
        kept = [axis for axis in range(x.ndim) if axis not in axes]
        shape = tuple(x.shape[axis] for axis in kept)
        results.append(unknown(shape, x.dtype, ids.reshape([ids.shape[axis] for axis in kept])))
    return results


def _same(equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    return list(operands)


def _gathered(equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    (x,) = operands
    return [
        x if equation.params["tiled"] else with_axis(x, equation.params["all_gather_dimension"])
    ]


def _reshaped(equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    return [reshaped(operands[0], tuple(equation.outvars[0].aval.shape))]


def _permuted(equation: Any, operands: Sequence[Flow]) -> list[Flow]:
    if tuple(map(tuple, equation.params["perm"])) != ((0, 0),):
        raise Exchange(equation.primitive.name)
    return list(operands)


def varied(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow]:
    """`pvary`, `pcast` and their kin: the same values, typed otherwise."""
    return operands


def exchanged(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow]:
    """Collectives that have no rule, of one device neither."""
    raise Exchange(equation.primitive.name)


RULES: Mapping[str, Callable[[Interpreter, Any, list[Flow]], list[Flow] | None]] = {
    "shard_map": shard_map,
    "axis_index": axis_index,
    **dict.fromkeys(["psum", "pmax", "pmin", "psum_invariant"], _alone(_same)),
    **dict.fromkeys(["all_gather", "all_gather_invariant"], _alone(_gathered)),
    # Of one device: an axis of length 1 that comes, goes or moves.
    **dict.fromkeys(["reduce_scatter", "all_to_all"], _alone(_reshaped)),
    "ppermute": _alone(_permuted),
    **dict.fromkeys(["pvary", "vary_unreduced_cast", "pcast"], varied),
    **dict.fromkeys(["pbroadcast", "ragged_all_to_all", "psend", "precv"], exchanged),
}
