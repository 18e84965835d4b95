"""Formulas of block formats: what a kernel computes from an amax, operation by operation.

A formula is an expression of variables, numbers, `*`, `/` and functions. Each operation rounds once
to the arithmetic of the format; so does each number. Parentheses are what they are in a kernel:
`amax * (s * (1 / 6))` and `s * (amax / 6)` differ in their last bits. The functions:

    min(a, b), max(a, b)    NaN where one is
    rcp(a)                  rcp.approx.ftz.f32 of the PTX ISA, as measured on sm_90
    input(a)                a rounded to the type of x
    bf16(a)                 a rounded to bfloat16
    finite(a, b)            a, or b where a is infinite or NaN
    nonzero(a, b)           a, or b where a is a zero
    if_zero(a, b, c)        b where a is a zero, else c
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flamia_ref import _backend, _float32, _mufu
from flamia_ref._backend import Array
from flamia_ref.formats.bits import decode_bits, encode_bits
from flamia_ref.formats.rounding import Overflow
from flamia_ref.formats.scalar import BF16, FP32, ScalarFormat

CONSTANTS = {"largest": float(np.finfo(np.float32).max), "tiny": float(np.finfo(np.float32).tiny)}
_FUNCTIONS = {
    "min": 2,
    "max": 2,
    "rcp": 1,
    "input": 1,
    "bf16": 1,
    "finite": 2,
    "nonzero": 2,
    "if_zero": 3,
}


Step = tuple[str, Array]  # the text of an operation, and its result as float32 bits


@dataclass(frozen=True, slots=True)
class Machine:
    """How the operations of a formula round.

    Attributes:
        arithmetic: what each rounds to.
        input: the type of x.
        ftz: subnormals, of operands and results, become zeros.
    """

    arithmetic: ScalarFormat = FP32
    input: ScalarFormat = FP32
    ftz: bool = False


@dataclass(frozen=True, slots=True)
class Formula:
    """A parsed formula.

    Attributes:
        text: as it was written.
        tree: the expression.
    """

    text: str
    tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Formula:
        """The formula of that text. Raises ValueError for anything beyond the grammar."""
        return _parsed(text)

    @property
    def variables(self) -> set[str]:
        """The names it uses, without those of constants and functions."""
        names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        return names - set(CONSTANTS) - set(_FUNCTIONS)

    def factor(self, name: str) -> tuple[Formula, bool] | None:
        """What the variable of that name is multiplied by, or divided by if True, where all that the formula does with
        it is one such operation; else None.
        """
        match self.tree:
            case ast.BinOp(left=ast.Name(id=left), op=op, right=right) if left == name:
                other = Formula(ast.unparse(right), right)
                return None if name in other.variables else (other, isinstance(op, ast.Div))
        return None

    def evaluate(
        self, values: Mapping[str, Array], machine: Machine, steps: list[Step] | None = None
    ) -> Array:
        """The result as float32 bits.

        Args:
            values: float32 bits of each variable; they broadcast.
            machine: how its operations round.
            steps: where every operation is added in the order of evaluation, its text and its
                result.
        """
        return _value(self.tree, values, machine, steps)


@functools.cache
def _parsed(text: str) -> Formula:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ValueError(f"formula {text!r} cannot be read") from None
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(op=ast.Mult() | ast.Div()) | ast.Name() | ast.Constant():
                pass
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if _FUNCTIONS.get(
                name
            ) == len(arguments):
                pass
            case ast.Mult() | ast.Div() | ast.Load():
                pass
            case _:
                raise ValueError(
                    f"formula {text!r} may hold names, numbers, *, /, min, max and rcp; it has"
                    f" {type(node).__name__}"
                )
    return Formula(text, tree)


def _value(
    node: ast.expr, values: Mapping[str, Array], machine: Machine, steps: list[Step] | None
) -> Array:
    def operand(part: ast.expr) -> Array:
        return _value(part, values, machine, steps)

    match node:
        case ast.Constant(value=int() | float() as number):
            return _rounded(np.asarray(np.float32(number).view(np.uint32)), machine.arithmetic)
        case ast.Name(id=name):
            if name in CONSTANTS:
                return np.asarray(np.float32(CONSTANTS[name]).view(np.uint32))
            return values[name]
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            result = _float32.multiply(operand(left), operand(right), ftz=machine.ftz)
        case ast.BinOp(left=left, right=right):
            result = _float32.divide(operand(left), operand(right), ftz=machine.ftz)
        case ast.Call(func=ast.Name(id=name), args=arguments):
            result = _call(name, [operand(argument) for argument in arguments], machine)
        case _:
            raise AssertionError(f"{ast.dump(node)} passed the grammar")
    result = _rounded(result, machine.arithmetic)
    if steps is not None:
        steps.append((ast.unparse(node), result))
    return result


def _call(name: str, arguments: list[Array], machine: Machine) -> Array:
    match name, arguments:
        case "min", [a, b]:
            return _float32.minimum(a, b, ftz=machine.ftz)
        case "max", [a, b]:
            return _float32.maximum(a, b, ftz=machine.ftz)
        case "rcp", [a]:
            return _mufu.reciprocal_bits(a)
        case "input", [a]:
            return _rounded(a, machine.input)
        case "bf16", [a]:
            return _rounded(a, BF16)
        case "finite", [a, b]:
            return _backend.namespace(a, b).where(
                (a & _float32.MAGNITUDE) < _float32.INFINITY, a, b
            )
        case "nonzero", [a, b]:
            return _backend.namespace(a, b).where(_is_zero(a, machine), b, a)
        case "if_zero", [a, b, c]:
            return _backend.namespace(a, b, c).where(_is_zero(a, machine), b, c)
    raise AssertionError(f"{name} passed the grammar")


def _is_zero(a: Array, machine: Machine) -> Array:
    return _float32.is_zero(_float32.flush(a) if machine.ftz else a)


def _rounded(bits: Array, arithmetic: ScalarFormat) -> Array:
    """float32 bits rounded to a narrower format: as if once, since float32 has 2 p + 2 bits."""
    if arithmetic is FP32:
        return bits
    return decode_bits(encode_bits(bits, arithmetic, overflow=Overflow.NATIVE), arithmetic)
