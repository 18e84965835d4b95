"""The interpreter: a JAX program run on abstract values, equation by equation, into everything it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flamia_ref.leakage.flow import (
    contraction,
    elementwise,
    indexing,
    reduction,
    structural,
    tensor_core,
)
from flamia_ref.leakage.flow.context import Context
from flamia_ref.leakage.flow.evaluation import ELEMENTWISE
from flamia_ref.leakage.flow.sets import EMPTY, Ids
from flamia_ref.leakage.flow.value import KNOWN, Array, Flow, known, made

Rule = Callable[[Context, Any, Sequence[Flow]], "Flow | list[Flow]"]

_MOST_TURNS = 1 << 20  # of a loop whose condition stays known

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise.elementwise),
    "select_n": elementwise.select,
    "special": elementwise.special,
    **structural.RULES,
    **reduction.RULES,
    **contraction.RULES,
    **indexing.RULES,
    **tensor_core.RULES,
}
"""The rule of each primitive that does not hold programs."""


class Interpreter:
    """Runs programs on abstract arrays within one `Context`.

    Attributes:
        context: the sets, the assumptions, and what was met.
        rules: the rule of each primitive.
    """

    def __init__(self, context: Context, rules: Mapping[str, Rule] = RULES) -> None:
        self.context = context
        self.rules = rules

    def run(self, program: Any, operands: Sequence[Flow], constants: Sequence[Any] = ()) -> list[Flow]:
        """The results of a jaxpr, closed or not."""
        if hasattr(program, "jaxpr"):
            program, constants = program.jaxpr, program.consts
        values: dict[Any, Flow] = {}
        last = _last_uses(program)
        for variable, constant in zip(program.constvars, constants, strict=True):
            values[variable] = constant if isinstance(constant, Flow) else known(np.asarray(constant))
        for variable, operand in zip(program.invars, operands, strict=True):
            values[variable] = operand
        for index, equation in enumerate(program.eqns):
            results = self._step(equation, [_read(values, one) for one in equation.invars])
            for variable, result in zip(equation.outvars, results, strict=True):
                values[variable] = result
            for variable in last[index]:
                values.pop(variable, None)
        return [_read(values, one) for one in program.outvars]

    def _step(self, equation: Any, operands: list[Flow]) -> list[Flow]:
        name = equation.primitive.name
        self.context.met[name] += 1
        rule = self.rules.get(name)
        if rule is not None:
            results = rule(self.context, equation, operands)
            return [results] if isinstance(results, Flow) else results
        if name in _CONTROL:
            return _CONTROL[name](self, equation, operands)
        for field in ("call_jaxpr", "jaxpr", "fun_jaxpr"):
            if name in _CALLS and field in equation.params:
                return self.run(equation.params[field], operands)
        return self._everything(equation, operands)

    def _everything(self, equation: Any, operands: Sequence[Flow]) -> list[Flow]:
        """A primitive without a rule: every result depends on every operand."""
        self.context.unknown[equation.primitive.name] += 1
        sets = self.context.sets
        seen: Ids = np.zeros(1, dtype=np.int32)
        for x in operands:
            seen = sets.union(seen, sets.union_over(np.maximum(x.ids, EMPTY).reshape(-1), [0]))
        seen = np.maximum(seen, EMPTY)
        return [
            Flow(
                tuple(variable.aval.shape),
                variable.aval.dtype,
                np.broadcast_to(seen.reshape((1,) * len(variable.aval.shape)), (1,) * len(variable.aval.shape)),
                None,
            )
            for variable in equation.outvars
        ]


def _read(values: Mapping[Any, Flow], variable: Any) -> Flow:
    if hasattr(variable, "val"):  # a literal
        return known(np.asarray(variable.val, dtype=variable.aval.dtype))
    return values[variable]


def _last_uses(program: Any) -> list[list[Any]]:
    """For each equation the variables that nothing needs after it."""
    kept = {id(one) for one in program.outvars}
    seen: set[int] = set()
    last: list[list[Any]] = []
    for equation in reversed(program.eqns):
        free = []
        for variable in (*equation.invars, *equation.outvars):
            if not hasattr(variable, "val") and id(variable) not in seen:
                seen.add(id(variable))
                if id(variable) not in kept:
                    free.append(variable)
        last.append(free)
    return last[::-1]


def _scan(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow]:
    """`scan`, unrolled: its length is known, and so is what the loop counts."""
    parameters = equation.params
    constants, carried = parameters["num_consts"], parameters["num_carry"]
    length, program = parameters["length"], parameters["jaxpr"]
    fixed, state, rows = operands[:constants], operands[constants : constants + carried], operands[constants + carried :]
    turns = range(length)[::-1] if parameters["reverse"] else range(length)
    made_rows: list[list[Flow]] = []
    for turn in turns:
        results = machine.run(program, [*fixed, *state, *(_row(x, turn) for x in rows)])
        state, row = results[:carried], results[carried:]
        made_rows.append(row)
    if parameters["reverse"]:
        made_rows.reverse()
    outputs = []
    for place, variable in enumerate(equation.outvars[carried:]):
        parts = [_with_row_axis(row[place]) for row in made_rows]
        shape = tuple(variable.aval.shape)
        outputs.append(structural.joined(parts, 0, shape, variable.aval.dtype))
    return [*state, *outputs]


def _row(x: Flow, index: int) -> Flow:
    def of(part: Array) -> Array:
        return part[0 if len(part) == 1 else index]

    values = None if x.values is None else of(x.values)
    return made(x.shape[1:], x.dtype, of(x.ids), values)


def _with_row_axis(x: Flow) -> Flow:
    values = None if x.values is None else x.values[None]
    return Flow((1, *x.shape), x.dtype, x.ids[None], values)


def _while(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow]:
    """`while`, unrolled as long as its condition is known; then until nothing more flows."""
    parameters = equation.params
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
    while True:
        (test,) = machine.run(condition, [*first, *state])
        seen = _all_seen(machine.context, [test])
        after = machine.run(body, [*second, *state])
        new = [_with(machine.context, _merged(machine.context, x, y), seen) for x, y in zip(state, after, strict=True)]
        if all(_same(x, y) for x, y in zip(new, state, strict=True)):
            return new
        state = new


def _cond(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow]:
    """`cond`: the branch that a known index names; else all of them, and what the index saw."""
    index, *rest = operands
    branches = equation.params["branches"]
    if index.all_known:
        which = int(np.clip(int(index.full_values()), 0, len(branches) - 1))
        return machine.run(branches[which], rest)
    results = [machine.run(branch, rest) for branch in branches]
    merged = results[0]
    for other in results[1:]:
        merged = [_merged(machine.context, x, y) for x, y in zip(merged, other, strict=True)]
    seen = _all_seen(machine.context, [index])
    return [_with(machine.context, x, seen) for x in merged]


def _merged(context: Context, a: Flow, b: Flow) -> Flow:
    """What may be either of two arrays."""
    ids = np.maximum(context.sets.union(a.ids, b.ids), EMPTY)
    if a.values is None or b.values is None:
        return Flow(a.shape, a.dtype, ids, None)
    same = a.known & b.known & _equal(a.values, b.values)
    return made(a.shape, a.dtype, np.where(same, np.int32(KNOWN), ids), a.values)


def _equal(a: Array, b: Array) -> Any:
    with np.errstate(invalid="ignore"):
        same = a == b
        if a.dtype.kind not in "iub":
            same = (same & (np.signbit(a) == np.signbit(b))) | ((a != a) & (b != b))
    return same


def _with(context: Context, x: Flow, seen: Ids) -> Flow:
    """An array whose unknown elements depend on `seen` too."""
    ids = context.sets.union(x.ids, seen.reshape((1,) * x.ndim))
    ids = np.where(x.known, np.int32(KNOWN), np.maximum(ids, EMPTY))
    return made(x.shape, x.dtype, ids, x.values)


def _all_seen(context: Context, arrays: Sequence[Flow]) -> Ids:
    seen: Ids = np.zeros(1, dtype=np.int32)
    for x in arrays:
        flat = np.maximum(x.ids, EMPTY).reshape(-1)
        seen = context.sets.union(seen, context.sets.union_over(flat, [0]))
    return np.maximum(seen, EMPTY)


def _same(a: Flow, b: Flow) -> bool:
    return bool(np.array_equal(np.broadcast_to(a.ids, a.shape), np.broadcast_to(b.ids, b.shape)))


_CONTROL: Mapping[str, Callable[[Interpreter, Any, list[Flow]], list[Flow]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}

_CALLS = frozenset(
    "jit pjit closed_call core_call remat remat2 checkpoint custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"
    " custom_lin run_state".split()
)
