"""The interpreter: a JAX program run on abstract values, equation by equation, into everything it calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flamia_ref.leakage.flow import (
    contraction,
    control,
    elementwise,
    indexing,
    kernels,
    manual,
    random_bits,
    reduction,
    scattering,
    structural,
    tensor_core,
    windows,
)
from flamia_ref.leakage.flow.context import Context, Refused
from flamia_ref.leakage.flow.evaluation import ELEMENTWISE
from flamia_ref.leakage.flow.value import Flow, is_opaque, known, unknown

Rule = Callable[[Context, Any, Sequence[Flow]], "Flow | list[Flow]"]
ProgramRule = Callable[["Interpreter", Any, list[Flow]], "list[Flow] | None"]

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise.elementwise),
    "select_n": elementwise.select,
    "special": elementwise.special,
    "shortcut": elementwise.shortcut,
    **structural.RULES,
    **reduction.RULES,
    **windows.RULES,
    **contraction.RULES,
    **indexing.RULES,
    **scattering.RULES,
    **random_bits.RULES,
    **tensor_core.RULES,
}
"""The rule of each primitive that does not hold programs."""

PROGRAMS: Mapping[str, ProgramRule] = {
    **control.RULES,
    **manual.RULES,
    "pallas_call": kernels.pallas_call,
}
"""The rule of each primitive that holds programs or depends on where it runs; None is what it cannot follow."""

_CALLS = frozenset(
    [
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "remat",
        "remat2",
        "checkpoint",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "custom_lin",
        "composite",
        "custom_vmap_call",
    ]
)
_PROGRAM = ("call_jaxpr", "jaxpr", "fun_jaxpr", "call")
_CALLBACKS = frozenset(["pure_callback", "io_callback", "debug_callback", "debug_print"])


class Interpreter:
    """Runs programs on abstract arrays within one `Context`.

    Attributes:
        context: the sets, the assumptions, and what was met.
        rules: the rule of each primitive.
        axes: for each axis of a mesh of devices the index of the device and how many there are.
    """

    def __init__(
        self,
        context: Context,
        rules: Mapping[str, Rule] = RULES,
        axes: Mapping[Any, tuple[int, int]] | None = None,
    ) -> None:
        self.context = context
        self.rules = rules
        self.axes = axes or {}
        # By identity, with what it is the identity of, so that it stays one.
        self._literals: dict[int, tuple[Any, Flow]] = {}
        self._programs: dict[int, tuple[Any, list[list[Any]]]] = {}

    def on_device(self, axes: Mapping[Any, tuple[int, int]]) -> Interpreter:
        """The same at another place of the mesh."""
        return Interpreter(self.context, self.rules, axes)

    def run(
        self, program: Any, operands: Sequence[Flow], constants: Sequence[Any] = ()
    ) -> list[Flow]:
        """The results of a jaxpr, closed or not.

        Raises:
            Refused: where the program calls back to Python or writes to arrays in place.
        """
        if hasattr(program, "jaxpr"):
            program, constants = program.jaxpr, program.consts
        values: dict[Any, Flow] = {}
        last = self._last_uses(program)
        for variable, constant in zip(program.constvars, constants, strict=True):
            values[variable] = _constant(constant)
        for variable, operand in zip(program.invars, operands, strict=True):
            values[variable] = operand
        for index, equation in enumerate(program.eqns):
            results = self._step(equation, [self._read(values, one) for one in equation.invars])
            for variable, result in zip(equation.outvars, results, strict=True):
                values[variable] = result
            for variable in last[index]:
                values.pop(variable, None)
        return [self._read(values, one) for one in program.outvars]

    def _read(self, values: Mapping[Any, Flow], variable: Any) -> Flow:
        if not hasattr(variable, "val"):
            return values[variable]
        found = self._literals.get(id(variable))
        if found is None:
            value = known(np.asarray(variable.val, dtype=variable.aval.dtype))
            found = self._literals[id(variable)] = variable, value
        return found[1]

    def _last_uses(self, program: Any) -> list[list[Any]]:
        found = self._programs.get(id(program))
        if found is None:
            found = self._programs[id(program)] = program, _last_uses(program)
        return found[1]

    def _step(self, equation: Any, operands: list[Flow]) -> list[Flow]:
        name = equation.primitive.name
        self.context.met[name] += 1
        rule = self.rules.get(name)
        if rule is not None:
            results = rule(self.context, equation, operands)
            return [results] if isinstance(results, Flow) else results
        _refuse(equation)
        if name in PROGRAMS:
            found = PROGRAMS[name](self, equation, operands)
            return self._everything(equation, operands) if found is None else found
        if name in _CALLS:
            for field in _PROGRAM:
                if hasattr(equation.params.get(field), "eqns"):
                    return self.run(equation.params[field], operands)
        return self._everything(equation, operands)

    def _everything(self, equation: Any, operands: Sequence[Flow]) -> list[Flow]:
        """A primitive without a rule: every result depends on every operand."""
        self.context.unknown[equation.primitive.name] += 1
        seen = control.all_seen(self.context, operands)
        return [
            unknown(
                tuple(variable.aval.shape),
                variable.aval.dtype,
                seen.reshape((1,) * len(variable.aval.shape)),
            )
            for variable in equation.outvars
        ]


def _refuse(equation: Any) -> None:
    """Raise for what no rule can make sound."""
    name = equation.primitive.name
    if name in _CALLBACKS:
        raise Refused(
            f"the program calls back to Python ({name}), where no analysis of it can follow; take the call out, or"
            " write it in JAX"
        )
    for variable in (*equation.invars, *equation.outvars):
        if hasattr(variable.aval, "inner_aval"):
            raise Refused(
                f"the program works on an array in place ({name}), which the analysis follows inside pallas_call only;"
                " write it without references"
            )


def _constant(x: Any) -> Flow:
    if isinstance(x, Flow):
        return x
    if is_opaque(getattr(x, "dtype", np.dtype(np.int32))):
        return unknown(tuple(x.shape), x.dtype, np.zeros((1,) * len(x.shape), dtype=np.int32))
    return known(np.asarray(x))


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
