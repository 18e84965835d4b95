"""`pallas_call`: its kernel as the plain program that Pallas's interpreter makes of it, block by block of the grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flamia_ref.leakage.flow.value import Flow

if TYPE_CHECKING:
    from flamia_ref.leakage.flow.interpreter import Interpreter

_REFUSALS = (
    AssertionError,
    AttributeError,
    ImportError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def pallas_call(machine: Interpreter, equation: Any, operands: list[Flow]) -> list[Flow] | None:
    """The results of a kernel; None where its program cannot be made: copies in the background, semaphores.

    Blocks are worked on one after another in the order of the grid, a block is read before it is written, and memory
    that nothing was written to is NaN, which no source has a part in.
    """
    program = _program(equation)
    return None if program is None else machine.run(program, operands)


def _program(equation: Any) -> Any:
    import jax

    try:
        from jax._src.pallas.hlo_interpreter import pallas_call_hlo_interpret

        parameters = {key: value for key, value in equation.params.items() if key != "interpret"}
        shaped: Any = jax.ShapeDtypeStruct
        avals = [shaped(variable.aval.shape, variable.aval.dtype) for variable in equation.invars]
        return jax.make_jaxpr(lambda *xs: pallas_call_hlo_interpret(*xs, **parameters))(*avals)
    except _REFUSALS:
        return None
