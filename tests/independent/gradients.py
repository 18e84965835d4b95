"""Gradients from accumulators: the sum over a group's query heads, softmax_scale, rounding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.independent import factors, float32
from tests.independent.operands import Matrix, narrow
from tests.independent.passes import Backward, Passes, zeros


@dataclass(frozen=True, kw_only=True)
class Group:
    """The query heads of one key/value head: bfloat16 bits [token][channel], dq a head."""

    heads: list[Backward]
    dq: list[Matrix]
    dk: Matrix
    dv: Matrix


def group_gradients(
    passes: Sequence[Passes], out: Sequence[Matrix], lse: Sequence[Sequence[int]]
) -> Group:
    """The backward of the query heads that share a key/value head, in ascending order.

    ``out`` and ``lse`` hold a matrix and a vector a head. A recipe whose chain runs through all of
    them starts each head where the one before ended; else the heads' accumulators are added in
    float32.
    """
    head = passes[0].head
    start = zeros(head.length, head.head_dim)
    heads: list[Backward] = []
    dk, dv = start, start
    for one, one_out, one_lse in zip(passes, out, lse, strict=True):
        if one.chained:
            result = one.backward(one_out, one_lse, dk, dv)
            dk, dv = result.dk, result.dv
        else:
            result = one.backward(one_out, one_lse, start, start)
            dk = _elementwise(float32.add, dk, result.dk) if heads else result.dk
            dv = _elementwise(float32.add, dv, result.dv) if heads else result.dv
        heads.append(result)
    # A recipe that has softmax_scale in dS has it nowhere else.
    in_ds = getattr(passes[0], "scale_in_ds", False)
    scale = float32.ONE if in_ds else factors.rounded(head.softmax_scale)
    return Group(
        heads=heads,
        dq=[_scaled(result.dq, scale) for result in heads],
        dk=_scaled(dk, scale),
        dv=narrow(dv),
    )


def _scaled(accumulators: Matrix, scale: int) -> Matrix:
    return narrow([[float32.multiply(x, scale) for x in row] for row in accumulators])


def _elementwise(operation: Callable[[int, int], int], a: Matrix, b: Matrix) -> Matrix:
    return [
        [operation(x, y) for x, y in zip(a_row, b_row, strict=True)]
        for a_row, b_row in zip(a, b, strict=True)
    ]
