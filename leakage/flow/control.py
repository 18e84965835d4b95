"""Loops and branches: unrolled and followed where what steers them is known, else joined with what it depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.sets import EMPTY, Ids
from flamia_ref.leakage.flow.structural import joined, row_of, with_axis
from flamia_ref.leakage.flow.value import KNOWN, Flow, empty, made, same_bits, unknown

if TYPE_CHECKING:
    from flamia_ref.leakage.flow.interpreter import Interpreter

_MOST_TURNS = 1 << 20  # of a loop whose condition stays known


def scan(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow]:
    """`scan`, unrolled: its length is known, and so is what the loop counts."""
    parameters = equation.params
    constants, carried = parameters["num_consts"], parameters["num_carry"]
    fixed, state = operands[:constants], operands[constants : constants + carried]
    rows = operands[constants + carried :]
    turns = range(parameters["length"])
    made_rows: list[list[Flow]] = []
    for turn in reversed(turns) if parameters["reverse"] else turns:
        given = [*fixed, *state, *(row_of(x, turn) for x in rows)]
        results = machine.run(parameters["jaxpr"], given)
        state = results[:carried]
        made_rows.append([with_axis(x) for x in results[carried:]])
    if parameters["reverse"]:
        made_rows.reverse()
    outputs = []
    for place, variable in enumerate(equation.outvars[carried:]):
        shape = tuple(variable.aval.shape)
        if 0 in shape:
            outputs.append(empty(shape, variable.aval.dtype))
        else:
            outputs.append(joined([row[place] for row in made_rows], 0, shape))
    return [*state, *outputs]


def loop(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow]:
    """`while`, unrolled as long as its condition is known; then until nothing more flows."""
    parameters, context = equation.params, machine.context
    of_condition, of_body = parameters["cond_nconsts"], parameters["body_nconsts"]
    condition, body = parameters["cond_jaxpr"], parameters["body_jaxpr"]
    first, second = operands[:of_condition], operands[of_condition : of_condition + of_body]
    state = operands[of_condition + of_body :]
    for _ in range(_MOST_TURNS):
        (test,) = machine.run(condition, [*first, *state])
        if not test.all_known:
            break
        if not test.full_values().any():
            return state
        state = machine.run(body, [*second, *state])
    # From here on a value is known only while every turn leaves it alone, and nothing else is known of it.
    state = [made(x.shape, x.dtype, x.ids, x.values) for x in state]
    while True:
        (test,) = machine.run(condition, [*first, *state])
        seen = all_seen(context, [test])
        after = machine.run(body, [*second, *state])
        new = [
            _with(context, _merged(context, x, y), seen) for x, y in zip(state, after, strict=True)
        ]
        if all(np.array_equal(x.full_ids(), y.full_ids()) for x, y in zip(new, state, strict=True)):
            return new
        state = new


def branch(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow]:
    """`cond`: the branch that a known index names; else all of them, and what the index saw."""
    index, *rest = operands
    branches = equation.params["branches"]
    if index.all_known or len(branches) == 1:
        which = int(np.clip(int(index.full_values()), 0, len(branches) - 1))
        return machine.run(branches[which], rest)
    results = [machine.run(one, rest) for one in branches]
    merged = results[0]
    for other in results[1:]:
        merged = [_merged(machine.context, x, y) for x, y in zip(merged, other, strict=True)]
    seen = all_seen(machine.context, [index])
    return [_with(machine.context, x, seen) for x in merged]


def all_seen(context: Context, arrays: Sequence[Flow]) -> Ids:
    """The union of all sets of all arrays, [1]."""
    seen: Ids = np.zeros(1, dtype=np.int32)
    for x in arrays:
        flat = x.sources.reshape(-1)
        seen = context.sets.union(seen, context.sets.union_over(flat, [0]) if flat.size else seen)
    return np.maximum(seen, EMPTY)


def _merged(context: Context, a: Flow, b: Flow) -> Flow:
    """What may be either of two arrays."""
    ids = np.maximum(context.sets.union(a.ids, b.ids), EMPTY)
    if a.values is None or b.values is None:
        return unknown(a.shape, a.dtype, ids)
    same = a.known & b.known & same_bits(a.values, b.values)
    return made(a.shape, a.dtype, np.where(same, np.int32(KNOWN), ids), a.values)


def _with(context: Context, x: Flow, seen: Ids) -> Flow:
    """An array whose unknown elements depend on `seen` too."""
    ids = np.maximum(context.sets.union(x.ids, seen.reshape((1,) * x.ndim)), EMPTY)
    return made(x.shape, x.dtype, np.where(x.known, np.int32(KNOWN), ids), x.values)


RULES: Mapping[str, Callable[[Interpreter, Any, list[Flow]], list[Flow]]] = {
    "scan": scan,
    "while": loop,
    "cond": branch,
}
