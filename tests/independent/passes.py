"""What the two passes of one query head have in common: their results and the forward's loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from tests.independent import float32
from tests.independent.heads import Head
from tests.independent.operands import Blocks, Matrix
from tests.independent.softmaxes import Softmax

Array = npt.NDArray[Any]
Stages = dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class Forward:
    """out (bfloat16 bits [query][channel]), lse (float32 bits [query]) and the traced stages."""

    out: Matrix
    lse: list[int]
    stages: Stages


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Float32 accumulators [token][channel] before softmax_scale and rounding, and the stages."""

    dq: Matrix
    dk: Matrix
    dv: Matrix
    stages: Stages


class Passes(Protocol):
    """Both passes of a recipe over one query head."""

    # Whether dk and dv of a group of query heads are one chain; else the heads' sums are added.
    chained: ClassVar[bool]

    @property
    def head(self) -> Head:
        """The query head."""

    def forward(self) -> Forward:
        """Run the forward pass."""

    def backward(self, out: Matrix, lse: Sequence[int], dk: Matrix, dv: Matrix) -> Backward:
        """Run the backward pass from some out and lse; dk and dv start at the accumulators given."""


def bits8(matrix: Matrix, width: int) -> Array:
    """A matrix of codes or scale bytes."""
    return np.array(matrix, np.uint8).reshape(len(matrix), width)


def bits16(matrix: Matrix, width: int) -> Array:
    """A matrix of bfloat16 bits."""
    return np.array(matrix, np.uint16).reshape(len(matrix), width)


def bits32(matrix: Matrix, width: int) -> Array:
    """A matrix of float32 bits."""
    return np.array(matrix, np.uint32).reshape(len(matrix), width)


def block_stages(name: str, blocks: Blocks, width: int) -> Stages:
    """Codes and scales of a quantized operand."""
    return {
        f"{name}.codes": bits8(blocks.codes, width),
        f"{name}.scales": bits8(blocks.scales, -(-width // blocks.columns)),
    }


def zeros(rows: int, width: int) -> Matrix:
    """Zeros."""
    return [[0] * width for _ in range(rows)]


def attend(
    head: Head,
    scores: Matrix,
    tiles: Callable[[int], Sequence[range]],
    new_softmax: Callable[[], Softmax],
    product: Callable[[int, range, list[int], list[int]], list[int]],
) -> Forward:
    """The forward pass over given scores.

    ``tiles(query)`` are the key tiles in the recipe's order. ``product(query, tile, p, accumulator)``
    adds a tile's products of P and V.
    """
    p = zeros(head.length, head.length)
    out, o, lse, row_max, row_sum = [], [], [], [], []
    for query in range(head.length):
        softmax = new_softmax()
        accumulator = [0] * head.head_dim
        for tile in tiles(query):
            part = slice(tile.start, tile.stop)
            visible = [head.sees(query, key) for key in tile]
            p[query][part], rescale = softmax.tile(scores[query][part], visible)
            accumulator = [rescale(x) for x in accumulator]
            accumulator = product(query, tile, p[query][part], accumulator)
        row = softmax.finish(accumulator)
        o.append(row[0])
        out.append(row[1])
        lse.append(row[2])
        row_max.append(softmax.row_max)
        row_sum.append(softmax.row_sum)
    stages = {
        "s": bits32(scores, head.length),
        "p": bits32(p, head.length),
        "row_max": np.array(row_max, np.uint32),
        "row_sum": np.array(row_sum, np.uint32),
        "o": bits32(o, head.head_dim),
    }
    return Forward(out=out, lse=lse, stages=stages)


def dead_rows(out: Matrix, lse: Sequence[int]) -> list[bool]:
    """Which rows of a backward have no gradient: lse = -inf beside an out of zeros (bfloat16 bits)."""
    return [
        x == float32.MINUS_INFINITY and not any(bits & 0x7FFF for bits in row)
        for x, row in zip(lse, out, strict=True)
    ]


def score_gradients(
    head: Head, p: Matrix, dp: Matrix, delta: Sequence[int], dead: Sequence[bool]
) -> Matrix:
    """dS = fl(P * fl(dP - delta)), +0 where masked and in dead rows."""
    return [
        [
            float32.multiply(p[i][j], float32.subtract(dp[i][j], delta[i]))
            if head.sees(i, j) and not dead[i]
            else 0
            for j in range(head.length)
        ]
        for i in range(head.length)
    ]
