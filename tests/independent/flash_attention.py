"""`bf16-fa4`: FlashAttention-4's BF16 path, every product on BF16 operands.

Where the description is silent:

- The maximum of a tile runs over its 128 columns, masked ones and those past the document's end at
  -inf. So a tile whose 128 columns are all visible and all NaN has the maximum NaN; with a masked
  column it is -inf.
- There is no dead row but what the formulas give: l = 0 or NaN has lse = -inf and o = acc * rcp(1).
- l = -0 counts as 0.
- Backward, lse = -inf beside an out of zeros: a dead row, P and dS are +0, as in all recipes; delta is
  what the formula gives. Beside another out, a row whose sum was NaN: L = +0.
- A pair of key tiles (head_dim >= 128) is worked on as one, since one instruction takes in both: its
  chain of dQ runs over all its tokens, and the chains of dK and dV of both over every query tile
  that sees a key of either. So the NaN and infinities of a tile that is not seen reach them.
- The head's dS has one rounding to bfloat16, traced as ds.dq.codes and ds.dk.codes.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np

from tests.independent import deltas, factors, float32, mufu
from tests.independent.heads import TILE, Head, spans
from tests.independent.operands import Matrix, columns, contract_bfloat16, narrow
from tests.independent.passes import (
    Backward,
    Forward,
    attend,
    bits16,
    bits32,
    dead_rows,
    score_gradients,
    zeros,
)
from tests.independent.softmaxes import LazySoftmax

PAIRED_HEAD_DIM = 128


class FlashAttention:
    """Both passes of one query head."""

    chained: ClassVar[bool] = False

    def __init__(self, head: Head) -> None:
        """Take the head as it is."""
        self.head = head
        self.c = factors.float32_product(head.softmax_scale)

    @cached_property
    def scores(self) -> Matrix:
        """S of all pairs."""
        return [[contract_bfloat16(q, k) for k in self.head.k] for q in self.head.q]

    def forward(self) -> Forward:
        """Steps 1 to 12."""
        head = self.head
        values = columns(head.v, head.head_dim)
        p_codes = zeros(head.length, head.length)

        def product(query: int, tile: range, p: list[int], accumulator: list[int]) -> list[int]:
            part = slice(tile.start, tile.stop)
            p_codes[query][part] = [float32.to_bfloat16(x) for x in p]
            return [
                contract_bfloat16(p_codes[query][part], value[part], x)
                for value, x in zip(values, accumulator, strict=True)
            ]

        def descending(query: int) -> list[range]:
            return head.key_tiles(query)[::-1]

        result = attend(head, self.scores, descending, lambda: LazySoftmax(self.c), product)
        result.stages["p.o.codes"] = bits16(p_codes, head.length)
        return result

    def backward(self, out: Matrix, lse: Sequence[int], dk: Matrix, dv: Matrix) -> Backward:
        """Steps B1 to B6."""
        head = self.head
        dout = head.required_dout
        delta = [deltas.flash_attention(x, y) for x, y in zip(dout, out, strict=True)]
        dead = dead_rows(out, lse)
        p = self._probabilities(lse, dead)
        dp = [[contract_bfloat16(row, v) for v in head.v] for row in dout]
        ds = score_gradients(head, p, dp, delta, dead)
        p_codes, ds_codes = narrow(p), narrow(ds)
        stages = {
            "delta": np.array(delta, np.uint32),
            "dp": bits32(dp, head.length),
            "p.dv": bits32(p, head.length),
            "ds": bits32(ds, head.length),
            "p.dv.codes": bits16(p_codes, head.length),
            "ds.dq.codes": bits16(ds_codes, head.length),
            "ds.dk.codes": bits16(ds_codes, head.length),
        }
        return Backward(
            dq=[self._query_gradient(ds_codes[query], query) for query in range(head.length)],
            dk=contract_queries(head, ds_codes, head.q, dk, self.span),
            dv=contract_queries(head, p_codes, dout, dv, self.span),
            stages=stages,
        )

    def _probabilities(self, lse: Sequence[int], dead: Sequence[bool]) -> Matrix:
        """Step B2: P of all pairs."""
        head = self.head
        p = zeros(head.length, head.length)
        for query in range(head.length):
            if dead[query]:
                continue
            base = 0
            if lse[query] != float32.MINUS_INFINITY:
                base = float32.multiply(lse[query], factors.LOG2_E_FLOAT32)
            for key in range(head.length):
                if head.sees(query, key):
                    score = self.scores[query][key]
                    x = float32.fused_multiply_add(score, self.c, float32.negate(base))
                    p[query][key] = mufu.exp2(x)
        return p

    @property
    def span(self) -> int:
        """Keys that are worked on together in the backward."""
        return 2 * TILE if self.head.head_dim >= PAIRED_HEAD_DIM else TILE

    def _query_gradient(self, ds: Sequence[int], query: int) -> list[int]:
        """Step B5: dQ of a row, partial chains added in float32."""
        head = self.head
        queries = head.tiles()[query // TILE]
        parts = [keys for keys in spans(head.length, self.span) if head.meet(queries, keys)]
        keys = columns(head.k, head.head_dim)
        total = [0] * head.head_dim
        for part in parts[::-1] if head.causal else parts:
            weights = ds[part.start : part.stop]
            total = [
                float32.add(x, contract_bfloat16(weights, key[part.start : part.stop]))
                for key, x in zip(keys, total, strict=True)
            ]
        return total


def contract_queries(
    head: Head, weights: Matrix, operand: Matrix, start: Matrix, span: int = TILE
) -> Matrix:
    """dK or dV in BF16: weights [query][key], each key's chain over the query tiles of its span."""
    lines = columns(operand, head.head_dim)
    result = [list(row) for row in start]
    for key, weight in enumerate(columns(weights, head.length)):
        keys = spans(head.length, span)[key // span]
        for tile in (queries for queries in head.tiles() if head.meet(queries, keys)):
            part = slice(tile.start, tile.stop)
            result[key] = [
                contract_bfloat16(weight[part], line[part], x)
                for line, x in zip(lines, result[key], strict=True)
            ]
    return result
