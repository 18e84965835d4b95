"""`attn-qat-nvfp4`: q, k, v and P are quantized to NVFP4, and all products take bfloat16 values of the codes.

Where the description is silent:

- The maximum of a tile runs over its 32 columns; a NaN beside a number does not count, a subnormal counts as zero.
- A masked P is what its score of -1e6 gives, in columns past the document's end too, where v is +0.
- A row that sees no key has the m and l that it began with. No l is negative.
- The backward takes the high_precision_out of the recipe's own forward, whatever out and lse it is given.
- In tiles that are skipped the traced codes and scales are 0, and so is dS of the backward.
- dS of a masked pair in a tile that is worked on is +0 times (dP - delta), which may be -0 or NaN.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property, reduce
from typing import ClassVar

import numpy as np

from tests.independent import deltas, factors, float32, mufu, nvfp4, sums
from tests.independent.heads import Head, spans
from tests.independent.operands import Matrix, columns, contract_bfloat16, narrow, widen
from tests.independent.passes import (
    Backward,
    Forward,
    Stages,
    bits8,
    bits16,
    bits32,
    block_stages,
    dead_rows,
    zeros,
)
from tests.independent.softmaxes import LN2

TILE = 32
LOWEST = 0xFF7FFFFF  # -3.4028235e38
MASKED = float32.nearest(Fraction(-1000000))


class Row:
    """One query of the forward: maximum, sum, and both accumulators."""

    def __init__(self, width: int) -> None:
        """``width`` channels of v."""
        self.m, self.l = LOWEST, 0
        self.o, self.high = [0] * width, [0] * width


class AttnQat:
    """Both passes of one query head."""

    chained: ClassVar[bool] = False

    def __init__(self, head: Head) -> None:
        """Step 1."""
        self.head = head
        self.c = factors.float32_product(head.softmax_scale)
        self.blocks = {
            name: nvfp4.rows(widen(x)) for name, x in (("q", head.q), ("k", head.k), ("v", head.v))
        }
        self.q, self.k, self.v = (nvfp4.values(x) for x in self.blocks.values())
        self.tiles = spans(head.length, TILE)
        self.high: Matrix = []

    def _worked(self, queries: range, keys: range) -> bool:
        """Whether a pair of tiles has a visible pair."""
        return self.head.meet(queries, keys)

    @cached_property
    def scores(self) -> Matrix:
        """Step 2: S of all pairs."""
        return [[contract_bfloat16(q, k) for k in self.k] for q in self.q]

    def forward(self) -> Forward:
        """Steps 2 to 8."""
        head = self.head
        values = columns(self.v, head.head_dim)
        p = zeros(head.length, head.length)
        p_codes = zeros(head.length, head.length)
        p_scales = zeros(head.length, -(-head.length // nvfp4.GROUP))
        rows: list[Row] = []
        out: Matrix = []
        o: Matrix = []
        lse: list[int] = []
        self.high = []
        for query in range(head.length):
            row = Row(head.head_dim)
            queries = self.tiles[query // TILE]
            for keys in (x for x in self.tiles if self._worked(queries, x)):
                self._take_in(row, query, keys, values, p[query], p_codes[query], p_scales[query])
            rows.append(row)
            if float32.is_zero(row.l):
                o.append([0] * head.head_dim)
                out.append([0] * head.head_dim)
                self.high.append([0] * head.head_dim)
                lse.append(float32.MINUS_INFINITY)
                continue
            o.append([float32.divide(x, row.l) for x in row.o])
            out.append([float32.to_bfloat16(x) for x in o[-1]])
            self.high.append([float32.to_bfloat16(float32.divide(x, row.l)) for x in row.high])
            base2 = float32.add(row.m, mufu.log2(row.l))
            lse.append(float32.multiply(base2, LN2))
        stages: Stages = {
            "s": bits32(self.scores, head.length),
            "p": bits32(p, head.length),
            "p.o.codes": bits8(p_codes, head.length),
            "p.o.scales": bits8(p_scales, -(-head.length // nvfp4.GROUP)),
            "row_max": np.array([row.m for row in rows], np.uint32),
            "row_sum": np.array([row.l for row in rows], np.uint32),
            "o": bits32(o, head.head_dim),
            "high_precision_out": bits16(self.high, head.head_dim),
        }
        for name, blocks in self.blocks.items():
            stages.update(block_stages(name, blocks, head.head_dim))
        return Forward(out=out, lse=lse, stages=stages)

    def _take_in(
        self,
        row: Row,
        query: int,
        keys: range,
        values: Matrix,
        p: list[int],
        p_codes: list[int],
        p_scales: list[int],
    ) -> None:
        """Steps 3 to 7 for a key tile; P, its codes and its scales go into their rows."""
        columns_ = range(keys.start, keys.start + TILE)
        scores = [
            self.scores[query][key] if self.head.sees(query, key) else MASKED for key in columns_
        ]
        largest = reduce(float32.maxnum, [float32.flush(x) for x in scores])
        largest = float32.maxnum(float32.multiply(largest, self.c), LOWEST)
        first, old = row.m == LOWEST, row.m
        if first or float32.exceeds(largest, old):
            row.m = largest
        a = mufu.exp2(LOWEST if first else float32.subtract(old, row.m))
        base = float32.negate(row.m)
        tile = [mufu.exp2(float32.fused_multiply_add(x, self.c, base)) for x in scores]
        row.l = float32.fused_multiply_add(row.l, a, sums.in_bfloat16(tile))
        blocks = nvfp4.rows([tile])
        quantized, rounded = nvfp4.values(blocks)[0], narrow([tile])[0]
        count = len(keys)
        for name, weights in (("o", quantized), ("high", rounded)):
            rescaled = [float32.multiply(x, a) for x in getattr(row, name)]
            taken = weights[:count]
            new = [
                contract_bfloat16(taken, value[keys.start : keys.stop], x)
                for value, x in zip(values, rescaled, strict=True)
            ]
            setattr(row, name, new)
        p[keys.start : keys.stop] = tile[:count]
        p_codes[keys.start : keys.stop] = blocks.codes[0][:count]
        group = keys.start // nvfp4.GROUP
        held = -(-count // nvfp4.GROUP)
        p_scales[group : group + held] = blocks.scales[0][:held]

    def backward(self, out: Matrix, lse: Sequence[int], dk: Matrix, dv: Matrix) -> Backward:
        """Steps 9 to 11."""
        head = self.head
        dout = head.required_dout
        delta = [deltas.flash_attention(x, y) for x, y in zip(dout, self.high, strict=True)]
        dead = dead_rows(out, lse)
        dp = [[contract_bfloat16(row, v) for v in self.v] for row in dout]
        p, ds = zeros(head.length, head.length), zeros(head.length, head.length)
        for query in range(head.length):
            base = float32.negate(float32.multiply(lse[query], factors.LOG2_E_FLOAT32))
            queries = self.tiles[query // TILE]
            for key in range(head.length):
                if head.sees(query, key) and not dead[query]:
                    score = self.scores[query][key]
                    p[query][key] = mufu.exp2(float32.fused_multiply_add(score, self.c, base))
                if self._worked(queries, self.tiles[key // TILE]):
                    difference = float32.subtract(dp[query][key], delta[query])
                    ds[query][key] = float32.multiply(p[query][key], difference)
        blocks = nvfp4.rows(p)
        self._blank(blocks.codes, blocks.scales)
        ds_codes = narrow(ds)
        stages = {
            "delta": np.array(delta, np.uint32),
            "dp": bits32(dp, head.length),
            "p.dv": bits32(p, head.length),
            "ds": bits32(ds, head.length),
            **block_stages("p.dv", blocks, head.length),
            "ds.dq.codes": bits16(ds_codes, head.length),
            "ds.dk.codes": bits16(ds_codes, head.length),
        }
        return Backward(
            dq=self._query_gradients(ds_codes),
            dk=self._over_queries(ds_codes, self.q, dk),
            dv=self._over_queries(nvfp4.values(blocks), dout, dv),
            stages=stages,
        )

    def _blank(self, codes: Matrix, scales: Matrix) -> None:
        """Zeros in tiles that are skipped."""
        for query in range(self.head.length):
            for keys in self.tiles:
                if not self._worked(self.tiles[query // TILE], keys):
                    codes[query][keys.start : keys.stop] = [0] * len(keys)
                    groups = range(keys.start // nvfp4.GROUP, -(-keys.stop // nvfp4.GROUP))
                    scales[query][groups.start : groups.stop] = [0] * len(groups)

    def _query_gradients(self, ds: Matrix) -> Matrix:
        """dQ: each row's chain over the key tiles that it is worked on with."""
        keys_of = columns(self.k, self.head.head_dim)
        result = zeros(self.head.length, self.head.head_dim)
        for query, weights in enumerate(ds):
            for keys in self.tiles:
                if self._worked(self.tiles[query // TILE], keys):
                    part = slice(keys.start, keys.stop)
                    result[query] = [
                        contract_bfloat16(weights[part], key[part], x)
                        for key, x in zip(keys_of, result[query], strict=True)
                    ]
        return result

    def _over_queries(self, weights: Matrix, operand: Matrix, start: Matrix) -> Matrix:
        """dK or dV: weights [query][key], each key's chain over the query tiles that it is worked on with."""
        lines = columns(operand, self.head.head_dim)
        result = [list(row) for row in start]
        for key, weight in enumerate(columns(weights, self.head.length)):
            for queries in self.tiles:
                if self._worked(queries, self.tiles[key // TILE]):
                    part = slice(queries.start, queries.stop)
                    result[key] = [
                        contract_bfloat16(weight[part], line[part], x)
                        for line, x in zip(lines, result[key], strict=True)
                    ]
        return result
