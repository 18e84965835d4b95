"""Operands of matrix products: blocks of codes under one scale byte, and their rows and columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.independent import float32, machine
from tests.independent.quantizer import quantize

STEP = machine.SCALED_TERMS
UNIT_SCALE = 127  # E8M0 byte of 2**0

Matrix = list[list[int]]
Rule = Callable[[Sequence[int]], tuple[list[int], int]]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One row or column along the contraction: e4m3 codes and a scale byte per step of 32."""

    codes: list[int]
    scales: list[int]

    def part(self, span: range) -> "Line":
        """The codes of a span that starts at a multiple of 32."""
        first, last = span.start // STEP, -(-span.stop // STEP)
        return Line(codes=self.codes[span.start : span.stop], scales=self.scales[first:last])


def unit_line(codes: list[int]) -> Line:
    """A line whose scales are all 2**0."""
    return Line(codes=codes, scales=[UNIT_SCALE] * -(-len(codes) // STEP))


def contract(a: Line, b: Line, c_bits: int = 0) -> int:
    """c plus the scaled products of two lines, in ascending steps of 32; c where there are none."""
    chain = machine.scaled_chain(a.codes, b.codes, a.scales, b.scales, c_bits=c_bits)
    return chain[-1] if chain else c_bits


def contract_bfloat16(a: Sequence[int], b: Sequence[int], c_bits: int = 0) -> int:
    """c plus the products of bfloat16, in ascending steps of 16; c where there are none."""
    chain = machine.bfloat16_chain(a, b, c_bits=c_bits)
    return chain[-1] if chain else c_bits


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A quantized matrix: codes [row][column], scales [row block][column block]."""

    codes: Matrix
    scales: Matrix
    rows: int  # of a block
    columns: int

    def row(self, index: int) -> Line:
        """A row, to be contracted along its columns."""
        scales = self.scales[index // self.rows]
        starts = range(0, len(self.codes[index]), STEP)
        return Line(codes=self.codes[index], scales=[scales[k // self.columns] for k in starts])

    def column(self, index: int) -> Line:
        """A column, to be contracted along its rows."""
        starts = range(0, len(self.codes), STEP)
        scales = [self.scales[k // self.rows][index // self.columns] for k in starts]
        return Line(codes=[row[index] for row in self.codes], scales=scales)


def quantize_blocks(values: Matrix, rows: int, columns: int, rule: Rule = quantize) -> Blocks:
    """Quantize float32 bits [row][column] in blocks of rows x columns.

    A block at the end covers what is there.
    """
    codes = [[0] * len(row) for row in values]
    scales: Matrix = []
    for top in range(0, len(values), rows):
        band = range(top, min(top + rows, len(values)))
        scales.append([])
        for left in range(0, len(values[top]), columns):
            span = range(left, min(left + columns, len(values[top])))
            places = [(i, j) for i in band for j in span]
            block, byte = rule([values[i][j] for i, j in places])
            for (i, j), code in zip(places, block, strict=True):
                codes[i][j] = code
            scales[-1].append(byte)
    return Blocks(codes=codes, scales=scales, rows=rows, columns=columns)


def widen(matrix: Matrix) -> Matrix:
    """bfloat16 bits to float32 bits."""
    return [[float32.from_bfloat16(x) for x in row] for row in matrix]


def narrow(matrix: Matrix) -> Matrix:
    """float32 bits to bfloat16 bits."""
    return [[float32.to_bfloat16(x) for x in row] for row in matrix]


def columns(matrix: Matrix, width: int) -> Matrix:
    """The transposed matrix, [column][row]; ``width`` columns even where there are no rows."""
    return [[row[index] for row in matrix] for index in range(width)]
