"""`cudnn-mxfp8-reference`: NVIDIA's PyTorch reference, its tensors one number at a time.

Where the description is silent:

- A maximum with a NaN in it is NaN, and so stays the base; what is relative to a NaN is 0, as all that is NaN in P.
- A chain of a query or of a key goes through the tiles that are worked on; their masked pairs are zeros in it.
- A row with lse = -inf beside an out of zeros is dead in the backward, P and dS are +0, as in all recipes.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np

from tests.independent import codes, factors, float32, natural
from tests.independent.heads import BLOCK, Head
from tests.independent.operands import Blocks, Matrix, columns, quantize_blocks, widen
from tests.independent.passes import (
    Backward,
    Forward,
    Stages,
    attend,
    bits8,
    bits32,
    block_stages,
    dead_rows,
    zeros,
)
from tests.independent.quantized import scaled_value
from tests.independent.softmaxes import Finished, Rescale

FOUR = 0x40800000
LARGEST = 0x43E80000  # 464
FORWARD_SCALE, BACKWARD_SCALE = 123, 119  # E8M0 bytes of 1 / 16 and 1 / 256


class NaturalSoftmax:
    """The maximum in natural units, kept while the new one is at most 4 above it."""

    def __init__(self) -> None:
        """Begin a row."""
        self.row_max = float32.MINUS_INFINITY
        self.row_sum = 0

    def tile(self, scores: Sequence[int], visible: Sequence[bool]) -> tuple[list[int], Rescale]:
        """P of a tile, and by what sums so far are multiplied."""
        seen = [score for score, is_seen in zip(scores, visible, strict=True) if is_seen]
        current = maximum(seen)
        old = self.row_max
        if old == float32.MINUS_INFINITY or float32.exceeds(float32.subtract(current, old), FOUR):
            self.row_max = current
        distance = float32.subtract(old, self.row_max)
        factor = float32.ONE
        if self.row_max != old and not float32.is_nan(distance):
            factor = natural.exp(distance)
        p = [
            without_nan(natural.exp(float32.subtract(score, self.row_max))) if is_seen else 0
            for score, is_seen in zip(scores, visible, strict=True)
        ]
        self.row_sum = float32.add(float32.multiply(self.row_sum, factor), ascending(p))
        return p, lambda x: float32.multiply(x, factor)

    def finish(self, accumulator: Sequence[int]) -> Finished:
        """o, out, lse."""
        total = self.row_sum
        divisor = float32.ONE if float32.exceeds(float32.ONE, total) else total
        o = [float32.divide(x, divisor) for x in accumulator]
        lse = float32.add(self.row_max, natural.log(total))
        return o, [float32.to_bfloat16(x) for x in o], lse


def maximum(values: Sequence[int]) -> int:
    """The largest; -inf of none, NaN where there is one."""
    result = float32.MINUS_INFINITY
    for x in values:
        if float32.is_nan(x):
            return float32.NAN
        result = float32.maxnum(result, x)
    return result


def without_nan(x: int) -> int:
    """torch.nan_to_num of what is never infinite."""
    return 0 if float32.is_nan(x) else x


def ascending(values: Sequence[int]) -> int:
    """The sum from +0."""
    total = 0
    for x in values:
        total = float32.add(total, x)
    return total


def chain(a: Sequence[int], b: Sequence[int]) -> int:
    """The dot product by fused multiply-adds from +0."""
    total = 0
    for x, y in zip(a, b, strict=True):
        total = float32.fused_multiply_add(x, y, total)
    return total


def dequantized(blocks: Blocks) -> Matrix:
    """float32 bits of codes times scales."""
    return [
        [
            scaled_value(code, codes.E4M3, blocks.scales[i // blocks.rows][j // blocks.columns])
            for j, code in enumerate(row)
        ]
        for i, row in enumerate(blocks.codes)
    ]


def p_code(p: int) -> int:
    """e4m3 of 16 P, 0 from where torch's conversion gives NaN."""
    scaled = float32.shift(p, 4)
    return 0 if float32.exceeds(scaled, LARGEST) else codes.encode(scaled, codes.E4M3)


class Reference:
    """Both passes of one query head."""

    chained: ClassVar[bool] = False
    scale_in_ds: ClassVar[bool] = True

    def __init__(self, head: Head) -> None:
        """Quantize the operands of the forward."""
        self.head = head
        self.scale = factors.rounded(head.softmax_scale)
        self.q_s = quantize_blocks(widen(head.q), 1, BLOCK)
        self.k_s = quantize_blocks(widen(head.k), 1, BLOCK)
        self.v_o = quantize_blocks(widen(head.v), BLOCK, 1)

    @cached_property
    def products(self) -> Matrix:
        """S of all pairs."""
        queries, keys = dequantized(self.q_s), dequantized(self.k_s)
        return [[chain(query, key) for key in keys] for query in queries]

    @cached_property
    def scores(self) -> Matrix:
        """S' of all pairs."""
        return [[float32.multiply(x, self.scale) for x in row] for row in self.products]

    def forward(self) -> Forward:
        """Steps 1 to 6."""
        head = self.head
        p_codes = zeros(head.length, head.length)
        values = columns(dequantized(self.v_o), head.head_dim)

        def product(query: int, tile: range, p: list[int], accumulator: list[int]) -> list[int]:
            part = slice(tile.start, tile.stop)
            found = [p_code(x) for x in p]
            p_codes[query][part] = found
            weights = [scaled_value(x, codes.E4M3, FORWARD_SCALE) for x in found]
            return [
                float32.add(x, chain(weights, value[part]))
                for value, x in zip(values, accumulator, strict=True)
            ]

        result = attend(head, self.scores, head.key_tiles, NaturalSoftmax, product)
        result.stages["s"] = bits32(self.products, head.length)
        for name, operand in (("q.s", self.q_s), ("k.s", self.k_s), ("v.o", self.v_o)):
            result.stages.update(block_stages(name, operand, head.head_dim))
        result.stages["p.o.codes"] = bits8(p_codes, head.length)
        return result

    def backward(self, out: Matrix, lse: Sequence[int], dk: Matrix, dv: Matrix) -> Backward:
        """Steps 7 to 11; ``dk`` and ``dv`` are zeros."""
        head = self.head
        dout = widen(head.required_dout)
        delta = [chain(x, y) for x, y in zip(widen(out), dout, strict=True)]
        dead = dead_rows(out, lse)
        p = [self._probabilities(query, dead[query]) for query in range(head.length)]
        do_dp, v_dp = (quantize_blocks(x, 1, BLOCK) for x in (dout, widen(head.v)))
        values = dequantized(v_dp)
        dp = [[chain(row, value) for value in values] for row in dequantized(do_dp)]
        ds = [
            [
                self._gradient(p[i][j], dp[i][j], delta[i])
                if head.sees(i, j) and not dead[i]
                else 0
                for j in range(head.length)
            ]
            for i in range(head.length)
        ]
        stages: Stages = {
            "delta": np.array(delta, np.uint32),
            "dp": bits32(dp, head.length),
            "p.dv": bits32(p, head.length),
            "ds": bits32(ds, head.length),
        }
        do_dv, q_dk, k_dq = (
            quantize_blocks(x, BLOCK, 1) for x in (dout, widen(head.q), widen(head.k))
        )
        ds_dk, ds_dq = quantize_blocks(ds, BLOCK, 1), quantize_blocks(ds, 1, BLOCK)
        p_codes = [[codes.encode(float32.shift(x, 8), codes.E4M3) for x in row] for row in p]
        for name, operand in (
            ("do.dp", do_dp),
            ("v.dp", v_dp),
            ("do.dv", do_dv),
            ("q.dk", q_dk),
            ("k.dq", k_dq),
        ):
            stages.update(block_stages(name, operand, head.head_dim))
        for name, operand in (("ds.dk", ds_dk), ("ds.dq", ds_dq)):
            stages.update(block_stages(name, operand, head.length))
        stages["p.dv.codes"] = bits8(p_codes, head.length)
        weights = [[scaled_value(x, codes.E4M3, BACKWARD_SCALE) for x in row] for row in p_codes]
        by_key = [columns(x, head.length) for x in (dequantized(ds_dk), weights)]
        return Backward(
            dq=self._over_tokens(dequantized(ds_dq), k_dq, head.key_tiles),
            dk=self._over_tokens(by_key[0], q_dk, head.query_tiles),
            dv=self._over_tokens(by_key[1], do_dv, head.query_tiles),
            stages=stages,
        )

    def _probabilities(self, query: int, is_dead: bool) -> list[int]:
        """Step 8."""
        head, scores = self.head, self.scores[query]
        if is_dead:
            return [0] * head.length
        row_max = maximum([x for key, x in enumerate(scores) if head.sees(query, key)])
        powers = [
            natural.exp(float32.subtract(x, row_max)) if head.sees(query, key) else 0
            for key, x in enumerate(scores)
        ]
        total = ascending([ascending(powers[tile.start : tile.stop]) for tile in head.tiles()])
        return [
            without_nan(float32.divide(x, total)) if head.sees(query, key) else 0
            for key, x in enumerate(powers)
        ]

    def _gradient(self, p: int, dp: int, delta: int) -> int:
        """Step 9."""
        return float32.multiply(float32.multiply(p, float32.subtract(dp, delta)), self.scale)

    def _over_tokens(
        self, weights: Matrix, operand: Blocks, tiles: Callable[[int], list[range]]
    ) -> Matrix:
        """A chain for each row of weights over the tokens of its tiles."""
        lines = columns(dequantized(operand), self.head.head_dim)
        result = []
        for token, row in enumerate(weights):
            places = [place for tile in tiles(token) for place in tile]
            chosen = [row[place] for place in places]
            result.append([chain(chosen, [line[place] for place in places]) for line in lines])
        return result
