"""`cudnn-mxfp8` and `cudnn-mxfp8-pv-bf16`: the open kernels of cuDNN's front end.

Where the description is silent:

- The maximum of a tile runs over its 128 columns, masked ones and those past the document's end at
  the sentinel. All 128 NaN: the maximum is NaN, and cur is the sentinel.
- m = sentinel counts as the first update wherever it occurs, with a = ex2(sentinel) = 0, which in
  every tile but the first multiplies the O accumulator.
- l <= 0 (-0 and negative too) makes o and out +0 and lse -inf. A NaN l: lse NaN, o = acc * 1e30.
- The lanes of the row sum start at their chunk's first column, the total at +0.
- The products of delta are rounded to bfloat16 once, from the exact product; an odd head_dim is
  filled with one zero product.
- A backward row with lse = -inf beside an out of zeros is dead, P and dS are +0, as in all recipes.
  Beside another out it is not special: L = +inf.
- The BF16 variant's dS has one rounding to bfloat16, traced as ds.dq.codes and ds.dk.codes.
- In tiles that are skipped the traced codes and scales are those of blocks of zeros: 0.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np

from tests.independent import codes, deltas, factors, float32, mufu
from tests.independent.flash_attention import contract_queries
from tests.independent.heads import BLOCK, Head
from tests.independent.operands import (
    Blocks,
    Line,
    Matrix,
    columns,
    contract,
    contract_bfloat16,
    narrow,
    quantize_blocks,
    unit_line,
    widen,
)
from tests.independent.passes import (
    Backward,
    Forward,
    Stages,
    attend,
    bits8,
    bits16,
    bits32,
    block_stages,
    dead_rows,
    score_gradients,
    zeros,
)
from tests.independent.quantizer import quantize_flushing
from tests.independent.softmaxes import FOUR, ScaledSoftmax

MINUS_LOG2_E = 0xBFB8AA3B
P_FACTOR = 0x43800000  # 256
P_SCALE = 119  # E8M0 byte of 1 / 256


class Cudnn(ABC):
    """Both passes of one query head up to what the contractions over tokens do."""

    chained: ClassVar[bool] = True
    units: ClassVar[int]  # float32 bits of log2 of what P is multiplied by in the forward

    def __init__(self, head: Head) -> None:
        """Quantize the operands of S."""
        self.head = head
        self.q_s = quantize_blocks(widen(head.q), 1, BLOCK)
        self.k_s = quantize_blocks(widen(head.k), 1, BLOCK)

    @abstractmethod
    def _round_p(self, x: int) -> int:
        """The code of P in O."""

    @abstractmethod
    def _add_values(self, p_codes: list[int], tile: range, accumulator: list[int]) -> list[int]:
        """Step 5: the accumulator with the products of a tile's P and V."""

    @abstractmethod
    def _value_stages(self, p_codes: Matrix) -> Stages:
        """The stages of O's operands."""

    @abstractmethod
    def _contract_tokens(
        self, p: Matrix, ds: Matrix, dk: Matrix, dv: Matrix
    ) -> tuple[Matrix, Matrix, Matrix, Stages]:
        """Steps B4 to B6: the accumulators of dq, dk, dv and the stages of their operands."""

    @cached_property
    def scores(self) -> Matrix:
        """S of all pairs."""
        tokens = range(self.head.length)
        keys = [self.k_s.row(key) for key in tokens]
        return [[contract(self.q_s.row(query), key) for key in keys] for query in tokens]

    def forward(self) -> Forward:
        """Steps 1 to 9."""
        head = self.head
        c = factors.float64_product(head.softmax_scale)
        p_codes = zeros(head.length, head.length)

        def product(query: int, tile: range, p: list[int], accumulator: list[int]) -> list[int]:
            tile_codes = [self._round_p(x) for x in p]
            p_codes[query][tile.start : tile.stop] = tile_codes
            return self._add_values(tile_codes, tile, accumulator)

        def softmax() -> ScaledSoftmax:
            return ScaledSoftmax(c, units=self.units)

        result = attend(head, self.scores, head.key_tiles, softmax, product)
        for name, operand in (("q.s", self.q_s), ("k.s", self.k_s)):
            result.stages.update(block_stages(name, operand, head.head_dim))
        result.stages.update(self._value_stages(p_codes))
        return result

    def backward(self, out: Matrix, lse: Sequence[int], dk: Matrix, dv: Matrix) -> Backward:
        """Steps B1 to B6."""
        head = self.head
        dout = head.required_dout
        delta = [deltas.cudnn(x, y) for x, y in zip(dout, out, strict=True)]
        do_dp = quantize_blocks(widen(dout), 1, BLOCK)
        v_dp = quantize_blocks(widen(head.v), 1, BLOCK)
        tokens = range(head.length)
        values = [v_dp.row(key) for key in tokens]
        dp = [[contract(do_dp.row(query), value) for value in values] for query in tokens]
        dead = dead_rows(out, lse)
        p = self._probabilities(lse, dead)
        ds = score_gradients(head, p, dp, delta, dead)
        dq, dk, dv, token_stages = self._contract_tokens(p, ds, dk, dv)
        stages = (
            block_stages("do.dp", do_dp, head.head_dim)
            | block_stages("v.dp", v_dp, head.head_dim)
            | {
                "delta": np.array(delta, np.uint32),
                "dp": bits32(dp, head.length),
                "p.dv": bits32(p, head.length),
                "ds": bits32(ds, head.length),
            }
            | token_stages
        )
        return Backward(dq=dq, dk=dk, dv=dv, stages=stages)

    def _probabilities(self, lse: Sequence[int], dead: Sequence[bool]) -> Matrix:
        """Step B2: P of all pairs."""
        head = self.head
        c = factors.float32_product(head.softmax_scale)
        p = zeros(head.length, head.length)
        for query in range(head.length):
            if dead[query]:
                continue
            base = float32.multiply(MINUS_LOG2_E, lse[query])
            for key in range(head.length):
                if head.sees(query, key):
                    x = float32.fused_multiply_add(self.scores[query][key], c, base)
                    p[query][key] = mufu.exp2(x)
        return p


class CudnnScaled(Cudnn):
    """`cudnn-mxfp8`: MXFP8 in the contractions over tokens."""

    units = FOUR

    def __init__(self, head: Head) -> None:
        """Quantize the operands of S and O."""
        super().__init__(head)
        self.v_o = quantize_blocks(widen(head.v), BLOCK, 1)
        self._values = [self.v_o.column(channel) for channel in range(head.head_dim)]

    def _round_p(self, x: int) -> int:
        return codes.encode(x, codes.E4M3)

    def _add_values(self, p_codes: list[int], tile: range, accumulator: list[int]) -> list[int]:
        line = unit_line(p_codes)
        return [
            contract(line, value.part(tile), x)
            for value, x in zip(self._values, accumulator, strict=True)
        ]

    def _value_stages(self, p_codes: Matrix) -> Stages:
        stages = block_stages("v.o", self.v_o, self.head.head_dim)
        return stages | {"p.o.codes": bits8(p_codes, self.head.length)}

    def _contract_tokens(
        self, p: Matrix, ds: Matrix, dk: Matrix, dv: Matrix
    ) -> tuple[Matrix, Matrix, Matrix, Stages]:
        head = self.head
        do_dv = quantize_blocks(widen(head.required_dout), BLOCK, 1)
        q_dk = quantize_blocks(widen(head.q), BLOCK, 1)
        k_dq = quantize_blocks(widen(head.k), BLOCK, 1)
        ds_dk = quantize_blocks(ds, BLOCK, 1, quantize_flushing)
        ds_dq = quantize_blocks(ds, 1, BLOCK, quantize_flushing)
        p_codes = [
            [codes.encode(float32.multiply(x, P_FACTOR), codes.E4M3) for x in row] for row in p
        ]
        p_columns = [
            Line(codes=column, scales=[P_SCALE] * -(-head.length // BLOCK))
            for column in columns(p_codes, head.length)
        ]
        stages = (
            block_stages("do.dv", do_dv, head.head_dim)
            | block_stages("q.dk", q_dk, head.head_dim)
            | block_stages("k.dq", k_dq, head.head_dim)
            | block_stages("ds.dk", ds_dk, head.length)
            | block_stages("ds.dq", ds_dq, head.length)
            | {"p.dv.codes": bits8(p_codes, head.length)}
        )
        tokens = range(head.length)
        dq = self._contract(
            [ds_dq.row(query) for query in tokens],
            k_dq,
            head.key_tiles,
            zeros(head.length, head.head_dim),
        )
        ds_columns = [ds_dk.column(key) for key in tokens]
        dk = self._contract(ds_columns, q_dk, head.query_tiles, dk)
        dv = self._contract(p_columns, do_dv, head.query_tiles, dv)
        return dq, dk, dv, stages

    def _contract(
        self,
        weights: Sequence[Line],
        operand: Blocks,
        tiles: Callable[[int], list[range]],
        start: Matrix,
    ) -> Matrix:
        """A chain a token over its tiles of the other tokens; weights and start are [token]."""
        lines = [operand.column(channel) for channel in range(self.head.head_dim)]
        result = [list(row) for row in start]
        for token, weight in enumerate(weights):
            for tile in tiles(token):
                result[token] = [
                    contract(weight.part(tile), line.part(tile), x)
                    for line, x in zip(lines, result[token], strict=True)
                ]
        return result


class CudnnBfloat16(Cudnn):
    """`cudnn-mxfp8-pv-bf16`: BF16 in the contractions over tokens."""

    units = 0

    def __init__(self, head: Head) -> None:
        """Quantize the operands of S."""
        super().__init__(head)
        self._values = columns(head.v, head.head_dim)

    def _round_p(self, x: int) -> int:
        return float32.to_bfloat16(x)

    def _add_values(self, p_codes: list[int], tile: range, accumulator: list[int]) -> list[int]:
        part = slice(tile.start, tile.stop)
        return [
            contract_bfloat16(p_codes, value[part], x)
            for value, x in zip(self._values, accumulator, strict=True)
        ]

    def _value_stages(self, p_codes: Matrix) -> Stages:
        return {"p.o.codes": bits16(p_codes, self.head.length)}

    def _contract_tokens(
        self, p: Matrix, ds: Matrix, dk: Matrix, dv: Matrix
    ) -> tuple[Matrix, Matrix, Matrix, Stages]:
        head = self.head
        p_codes, ds_codes = narrow(p), narrow(ds)
        keys = columns(head.k, head.head_dim)
        dq = zeros(head.length, head.head_dim)
        for query, weights in enumerate(ds_codes):
            for tile in head.key_tiles(query):
                part = slice(tile.start, tile.stop)
                dq[query] = [
                    contract_bfloat16(weights[part], key[part], x)
                    for key, x in zip(keys, dq[query], strict=True)
                ]
        stages = {
            "p.dv.codes": bits16(p_codes, head.length),
            "ds.dq.codes": bits16(ds_codes, head.length),
            "ds.dk.codes": bits16(ds_codes, head.length),
        }
        dk = contract_queries(head, ds_codes, head.q, dk)
        dv = contract_queries(head, p_codes, head.required_dout, dv)
        return dq, dk, dv, stages
