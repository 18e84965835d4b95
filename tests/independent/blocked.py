"""`flamia-mxfp8` with its guarded blocks, and `flamia-mxfp8-unguarded` without.

K and V have a scale for 32 tokens x 32 channels. In guarded blocks the uses of K and V run in
BF16 from the bfloat16 inputs.

Where the description is silent (see ``flamia`` too):

- P is in units of 2**-8 everywhere in the forward, in guarded blocks too; row_sum with it.
- Tiles of 128x128 without a visible pair are no part of any chain; in a computed tile every token
  of the document takes part, masked ones with weight +0, so that its NaN codes poison, and so do
  NaN and infinities of k and v in the BF16 products of a guarded block.
- In tiles that are skipped the traced codes and scales are those of blocks of zeros: 0.
- In guarded blocks, dS enters the scaled chain of dQ as +0 with byte 0, P as code 0.
- In the unguarded recipe a 32x32 block of dS or P' takes masked pairs as +0.
"""

from collections.abc import Sequence

from tests.independent import codes, float32
from tests.independent.flamia import Flamia, RowGradients
from tests.independent.folded import fold_query_scales, unit_columns
from tests.independent.heads import BLOCK, Head
from tests.independent.operands import (
    Blocks,
    Line,
    Matrix,
    columns,
    contract,
    contract_bfloat16,
    quantize_blocks,
    unit_line,
)
from tests.independent.passes import Backward, Forward, Stages, attend, bits8, block_stages, zeros
from tests.independent.softmaxes import IntegerSoftmax

UNITS_EXPONENT = 8


class Blocked(Flamia):
    """Both passes of one query head up to what the guard changes."""

    def _quantize_keys(self, values: Matrix) -> Blocks:
        return quantize_blocks(values, BLOCK, BLOCK)

    def _score(self, query: int, key: int) -> int:
        return contract(self.q.row(query), self.k.row(key))

    def _score_gradient(self, do: Blocks, weighted: Matrix, query: int, key: int) -> int:
        return contract(do.row(query), self.v.row(key))

    def _is_guarded(self, query: int, key: int) -> bool:
        """Whether a pair is left to BF16."""
        return False

    def _guarded_blocks(self, query: int, tile: range) -> list[range]:
        """The key blocks of a tile that are left to BF16 for a query."""
        return []

    def forward(self) -> Forward:
        """Steps 1 to 7."""
        head = self.head
        scaled_values = [self.v.column(channel) for channel in range(head.head_dim)]
        values = columns(head.v, head.head_dim)
        p_codes = zeros(head.length, head.length)

        def product(query: int, tile: range, p: list[int], accumulator: list[int]) -> list[int]:
            tile_codes = [
                0 if self._is_guarded(query, key) else codes.encode(x, codes.E4M3)
                for key, x in zip(tile, p, strict=True)
            ]
            p_codes[query][tile.start : tile.stop] = tile_codes
            line = unit_line(tile_codes)
            accumulator = [
                contract(line, value.part(tile), x)
                for value, x in zip(scaled_values, accumulator, strict=True)
            ]
            return self._add_guarded(query, tile, p, values, accumulator)

        def softmax() -> IntegerSoftmax:
            return IntegerSoftmax(self.c, units_exponent=UNITS_EXPONENT)

        result = attend(head, self.scores, head.key_tiles, softmax, product)
        for name, operand in (("q", self.q), ("k", self.k), ("v", self.v)):
            result.stages.update(block_stages(name, operand, head.head_dim))
        result.stages["p.o.codes"] = bits8(p_codes, head.length)
        return result

    def _add_guarded(
        self,
        query: int,
        tile: range,
        weights: Sequence[int],
        operand: Matrix,
        accumulator: list[int],
    ) -> list[int]:
        """Add the BF16 products of the guarded blocks of a tile.

        The weights are float32 [key of the tile], the operand is bfloat16 [channel][key].
        """
        guarded = [key for block in self._guarded_blocks(query, tile) for key in block]
        chosen = [float32.to_bfloat16(weights[key - tile.start]) for key in guarded]
        return [
            contract_bfloat16(chosen, [line[key] for key in guarded], x)
            for line, x in zip(operand, accumulator, strict=True)
        ]

    def _query_gradients(self, rows: RowGradients, ds_dq: Blocks) -> Matrix:
        """Step 11: dQ."""
        head = self.head
        scaled_keys = [self.k.column(channel) for channel in range(head.head_dim)]
        keys = columns(head.k, head.head_dim)
        dq = zeros(head.length, head.head_dim)
        for query in range(head.length):
            if rows.bases[query].is_dead:
                continue
            weight = ds_dq.row(query)
            for tile in head.key_tiles(query):
                dq[query] = [
                    contract(weight.part(tile), key.part(tile), x)
                    for key, x in zip(scaled_keys, dq[query], strict=True)
                ]
                weights = rows.ds[query][tile.start : tile.stop]
                dq[query] = self._add_guarded(query, tile, weights, keys, dq[query])
        return dq

    def _contract_queries(self, weights: Blocks, lines: Sequence[Line], start: Matrix) -> Matrix:
        """dK or dV: each key's chain over the query tiles with a visible pair."""
        head = self.head
        result = [list(row) for row in start]
        for key in range(head.length):
            weight = weights.column(key)
            for tile in head.query_tiles(key):
                result[key] = [
                    contract(weight.part(tile), line.part(tile), x)
                    for line, x in zip(lines, result[key], strict=True)
                ]
        return result


class Guarded(Blocked):
    """`flamia-mxfp8`."""

    def __init__(self, head: Head) -> None:
        """Quantize the operands of the head."""
        super().__init__(head)
        self._weighted_bfloat16: Matrix = []

    def _quantize_rows(self, values: Matrix) -> Blocks:
        return quantize_blocks(values, 1, self.head.head_dim)

    def _is_guarded(self, query: int, key: int) -> bool:
        return self.head.is_guarded(query, key)

    def _guarded_blocks(self, query: int, tile: range) -> list[range]:
        return self.head.guarded_blocks(query, tile)

    def _score(self, query: int, key: int) -> int:
        if self._is_guarded(query, key):
            return contract_bfloat16(self.head.q[query], self.head.k[key])
        return super()._score(query, key)

    def _score_gradient(self, do: Blocks, weighted: Matrix, query: int, key: int) -> int:
        if self._is_guarded(query, key):
            row = [float32.to_bfloat16(x) for x in weighted[query]]
            return contract_bfloat16(row, self.head.v[key])
        return super()._score_gradient(do, weighted, query, key)

    def backward(self, out: Matrix, lse: Sequence[int], dk: Matrix, dv: Matrix) -> Backward:
        """Steps 8 to 12."""
        head = self.head
        rows = self._row_gradients(out, lse)
        scaled = [
            [0 if self._is_guarded(query, key) else x for key, x in enumerate(row)]
            for query, row in enumerate(rows.ds)
        ]
        ds_dq = quantize_blocks(scaled, 1, BLOCK)
        ds_dk = fold_query_scales(rows.ds, self.q)
        p_dv = fold_query_scales(rows.p, rows.do)
        stages: Stages = (
            rows.stages
            | block_stages("do", rows.do, head.head_dim)
            | block_stages("ds.dq", ds_dq, head.length)
            | block_stages("ds.dk", ds_dk, head.length)
            | block_stages("p.dv", p_dv, head.length)
        )
        return Backward(
            dq=self._query_gradients(rows, ds_dq),
            dk=self._contract_queries(ds_dk, unit_columns(self.q, head.head_dim), dk),
            dv=self._contract_queries(p_dv, unit_columns(rows.do, head.head_dim), dv),
            stages=stages,
        )


class Unguarded(Blocked):
    """`flamia-mxfp8-unguarded`: blocks of 32x32 in every operand, one copy, nothing folded."""

    def _quantize_rows(self, values: Matrix) -> Blocks:
        return quantize_blocks(values, BLOCK, BLOCK)

    def backward(self, out: Matrix, lse: Sequence[int], dk: Matrix, dv: Matrix) -> Backward:
        """Steps 8 to 12."""
        head = self.head
        rows = self._row_gradients(out, lse)
        ds = quantize_blocks(rows.ds, BLOCK, BLOCK)
        p_dv = quantize_blocks(rows.p, BLOCK, BLOCK)
        channels = range(head.head_dim)
        stages: Stages = (
            rows.stages
            | block_stages("do", rows.do, head.head_dim)
            | block_stages("ds", ds, head.length)
            | block_stages("p.dv", p_dv, head.length)
        )
        return Backward(
            dq=self._query_gradients(rows, ds),
            dk=self._contract_queries(ds, [self.q.column(x) for x in channels], dk),
            dv=self._contract_queries(p_dv, [rows.do.column(x) for x in channels], dv),
            stages=stages,
        )
