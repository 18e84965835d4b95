"""`flamia-mxfp8-folded`: one scale a token, folded into P or dS before those are quantized.

The chains of a row run over all key tiles of the document, those of a key over all query tiles, so
that a NaN code of K, V, Q or dO' reaches every row or key of the document whose chain holds it, by
0 * NaN = NaN. See ``flamia`` for special values.
"""

from collections.abc import Sequence

from tests.independent import float32
from tests.independent.flamia import Flamia
from tests.independent.heads import BLOCK
from tests.independent.operands import (
    UNIT_SCALE,
    Blocks,
    Line,
    Matrix,
    columns,
    contract,
    quantize_blocks,
    unit_line,
)
from tests.independent.passes import Backward, Forward, attend, bits8, block_stages, zeros
from tests.independent.quantizer import quantize
from tests.independent.softmaxes import IntegerSoftmax


def unit_columns(operand: Blocks, width: int) -> list[Line]:
    """The codes of an operand along its tokens, one line a channel, with scales of 2**0."""
    return [unit_line(codes) for codes in columns(operand.codes, width)]


def token_scale(operand: Blocks, token: int) -> int:
    """The scale byte of a token of an operand that has one a token."""
    return operand.scales[token][0]


def fold_query_scales(values: Matrix, operand: Blocks) -> Blocks:
    """[query][key] times the scale of the query's token, quantized over 32 queries of a key."""
    folded = [
        [float32.shift(x, token_scale(operand, query) - UNIT_SCALE) for x in row]
        for query, row in enumerate(values)
    ]
    return quantize_blocks(folded, BLOCK, 1)


def fold_key_scales(row: Sequence[int], scales: Sequence[int]) -> list[int]:
    """The numbers of a row times the scales of the keys' tokens."""
    return [float32.shift(x, scale - UNIT_SCALE) for x, scale in zip(row, scales, strict=True)]


class Folded(Flamia):
    """Both passes of one query head."""

    def _quantize_rows(self, values: Matrix) -> Blocks:
        return quantize_blocks(values, 1, self.head.head_dim)

    _quantize_keys = _quantize_rows

    def _score(self, query: int, key: int) -> int:
        return contract(self.q.row(query), self.k.row(key))

    def _score_gradient(self, do: Blocks, weighted: Matrix, query: int, key: int) -> int:
        return contract(do.row(query), self.v.row(key))

    def forward(self) -> Forward:
        """Steps 1 to 7."""
        head = self.head
        values = unit_columns(self.v, head.head_dim)
        codes: Matrix = [[] for _ in range(head.length)]
        scales: Matrix = [[] for _ in range(head.length)]

        def product(query: int, tile: range, p: list[int], accumulator: list[int]) -> list[int]:
            folded = fold_key_scales(p, [token_scale(self.v, key) for key in tile])
            line = Line(codes=[], scales=[])
            for start in range(0, len(folded), BLOCK):
                block, scale = quantize(folded[start : start + BLOCK])
                line.codes.extend(block)
                line.scales.append(scale)
            codes[query] += line.codes
            scales[query] += line.scales
            return [
                contract(line, value.part(tile), x)
                for value, x in zip(values, accumulator, strict=True)
            ]

        def softmax() -> IntegerSoftmax:
            return IntegerSoftmax(self.c, units_exponent=0)

        result = attend(head, self.scores, lambda _: head.tiles(), softmax, product)
        for name, operand in (("q", self.q), ("k", self.k), ("v", self.v)):
            result.stages.update(block_stages(name, operand, head.head_dim))
        result.stages["p.o.codes"] = bits8(codes, head.length)
        result.stages["p.o.scales"] = bits8(scales, -(-head.length // BLOCK))
        return result

    def backward(self, out: Matrix, lse: Sequence[int], dk: Matrix, dv: Matrix) -> Backward:
        """Steps 8 to 12."""
        head = self.head
        rows = self._row_gradients(out, lse)
        key_scales = [token_scale(self.k, key) for key in range(head.length)]
        ds_dq = quantize_blocks([fold_key_scales(row, key_scales) for row in rows.ds], 1, BLOCK)
        keys = unit_columns(self.k, head.head_dim)
        dq = [
            [0 if row_base.is_dead else contract(ds_dq.row(query), key) for key in keys]
            for query, row_base in enumerate(rows.bases)
        ]
        ds_dk = fold_query_scales(rows.ds, self.q)
        p_dv = fold_query_scales(rows.p, rows.do)
        stages = (
            rows.stages
            | block_stages("do", rows.do, head.head_dim)
            | block_stages("ds.dq", ds_dq, head.length)
            | block_stages("ds.dk", ds_dk, head.length)
            | block_stages("p.dv", p_dv, head.length)
        )
        return Backward(
            dq=dq,
            dk=self._contract_queries(ds_dk, self.q, dk),
            dv=self._contract_queries(p_dv, rows.do, dv),
            stages=stages,
        )

    def _contract_queries(self, weights: Blocks, operand: Blocks, start: Matrix) -> Matrix:
        """dK or dV: each key's chain over all queries of the document."""
        lines = unit_columns(operand, self.head.head_dim)
        result = zeros(self.head.length, self.head.head_dim)
        for key in range(self.head.length):
            weight = weights.column(key)
            result[key] = [
                contract(weight, line, x) for line, x in zip(lines, start[key], strict=True)
            ]
        return result
