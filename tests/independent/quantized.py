"""Quantized matrices: codes under scales, their rows and columns as sides of a product, their values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tests.independent import codes, float32, matrices, quantizer
from tests.independent.codes import Element
from tests.independent.matrices import Integers, Side
from tests.independent.operands import Matrix, quantize_blocks

UNIT_SCALE = 127
STEP = 32
RULES: dict[str, Callable[[Sequence[int]], tuple[list[int], int]]] = {
    "te-mx-e4m3": quantizer.quantize,
    "cudnn-mx-e4m3": quantizer.quantize_flushing,
}
"""Presets with e4m3 elements and E8M0 scales: what they do to one block."""


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A matrix of codes; ``scales`` [row block, column block] of blocks ``rows`` x ``columns``.

    Without ``scales``, every scale of an instruction that has them is ``constant``.
    """

    codes: Integers
    element: Element
    scales: Integers | None = None
    rows: int = 1
    columns: int = 1
    constant: int = UNIT_SCALE
    scale_format: str = "e8m0"
    tokens: Integers | None = None  # E8M0 bytes [token, 1] beside the scales, of FP4
    dequantized: bool = False  # products take the values in bfloat16

    def _taken(self) -> "Quantized":
        """What products take."""
        if not self.dequantized:
            return self
        return encoded(self.values(), codes.BF16, self.codes.shape[1])

    def row_side(self, size: int | None = None, *, unit: bool = False) -> Side:
        """The rows, along their columns, filled with zeros to ``size``; ``unit``: under scales of 1."""
        if self.dequantized:
            return self._taken().row_side(size, unit=unit)
        width = self.codes.shape[1]
        step = 16 if self.columns == 16 else STEP
        starts = range(0, width, step)
        if self.scales is None or unit:
            scales = matrices.integers(
                [[UNIT_SCALE if unit else self.constant] * len(starts)] * len(self.codes),
                len(starts),
            )
        else:
            scales = matrices.integers(
                [
                    [int(self.scales[i // self.rows, k // self.columns]) for k in starts]
                    for i in range(len(self.codes))
                ],
                len(starts),
            )
        side = Side(
            codes=self.codes,
            element=self.element,
            scales=scales,
            scale_format=self.scale_format,
            block=step,
        )
        return side.padded(size or step)

    def column_side(self, size: int | None = None, *, unit: bool = False) -> Side:
        """The columns, along their rows."""
        if self.dequantized:
            return self._taken().column_side(size, unit=unit)
        turned = Quantized(
            codes=self.codes.T,
            element=self.element,
            scales=None if self.scales is None else self.scales.T,
            rows=self.columns,
            columns=self.rows,
            constant=self.constant,
            scale_format=self.scale_format,
        )
        return turned.row_side(size, unit=unit)

    def part(self, rows: range, columns: range) -> "Quantized":
        """A part that starts at the starts of blocks."""
        scales = self.scales
        if scales is not None:
            scales = scales[
                rows.start // self.rows : -(-rows.stop // self.rows),
                columns.start // self.columns : -(-columns.stop // self.columns),
            ]
        return Quantized(
            codes=self.codes[rows.start : rows.stop, columns.start : columns.stop],
            element=self.element,
            scales=scales,
            rows=self.rows,
            columns=self.columns,
            constant=self.constant,
            scale_format=self.scale_format,
            dequantized=self.dequantized,
        )

    def scale(self, row: int, column: int) -> int:
        """The scale code of an element."""
        if self.scales is None:
            return self.constant
        return int(self.scales[row // self.rows, column // self.columns])

    def values(self) -> Matrix:
        """float32 bits of code times scale, rounded once."""
        return [
            [
                scaled_value(code, self.element, self.scale(i, j), self.scale_format)
                for j, code in enumerate(row)
            ]
            for i, row in enumerate(self.codes.tolist())
        ]


@lru_cache(maxsize=1 << 16)
def scaled_value(code: int, element: codes.Element, scale: int, scale_format: str = "e8m0") -> int:
    """float32 bits of a code times its scale."""
    if element is codes.BF16:
        value = float32.from_bfloat16(code)
        return float32.NAN if float32.is_nan(value) else float32.shift(value, scale - UNIT_SCALE)
    magnitude = code & (element.sign_bit - 1)
    if magnitude > element.largest or (scale_format == "e8m0" and scale == codes.E8M0_NAN):
        return float32.NAN
    sign = int(code >= element.sign_bit)
    if scale_format == "e8m0":
        factor = float32.power_of_two(scale - UNIT_SCALE)
    elif scale & 0x7F == 0x7F:
        return float32.NAN
    else:
        factor = codes.decode(scale & 0x7F, codes.E4M3)
    return float32.nearest(codes.decode(code, element) * factor, sign)


def encoded(
    values: Matrix, element: codes.Element, width: int, constant: int = UNIT_SCALE
) -> Quantized:
    """float32 bits to codes as they are; a scaled product takes them under ``constant``."""
    found = [[_code(x, element) for x in row] for row in values]
    return Quantized(codes=matrices.integers(found, width), element=element, constant=constant)


def _code(x: int, element: codes.Element) -> int:
    return float32.to_bfloat16(x) if element is codes.BF16 else codes.encode(x, element)


def under_static_scale(values: Matrix, element: codes.Element, width: int, scale: int) -> Quantized:
    """float32 bits over 2**(scale - 127), to codes, saturating."""
    moved = [[float32.shift(x, UNIT_SCALE - scale) for x in row] for row in values]
    return encoded(moved, element, width, scale)


def in_blocks(values: Matrix, width: int, block: tuple[Any, Any], preset: str) -> Quantized:
    """float32 bits by a preset in blocks; "all" is a whole extent."""
    rows, columns = _block(block, len(values), width)
    found = quantize_blocks(values, rows, columns, RULES[preset])
    return Quantized(
        codes=matrices.integers(found.codes, width),
        element=codes.E4M3,
        scales=matrices.integers(found.scales, -(-width // columns)),
        rows=rows,
        columns=columns,
    )


def by_previous_block(
    values: Matrix, width: int, block: tuple[Any, Any], preset: str, first: int
) -> Quantized:
    """Like ``in_blocks``, but each block of rows has the scales of the one before; the first has ``first``."""
    own = in_blocks(values, width, block, preset)
    assert own.scales is not None
    scales = own.scales.copy()
    scales[1:] = own.scales[:-1]
    scales[:1] = first
    found = [
        [
            codes.encode(
                float32.shift(x, UNIT_SCALE - int(scales[i // own.rows, j // own.columns])),
                own.element,
            )
            for j, x in enumerate(row)
        ]
        for i, row in enumerate(values)
    ]
    return Quantized(
        codes=matrices.integers(found, width),
        element=own.element,
        scales=scales,
        rows=own.rows,
        columns=own.columns,
    )


def _block(block: tuple[Any, Any], rows: int, columns: int) -> tuple[int, int]:
    height, width = block
    return (max(rows, 1) if height == "all" else height), (columns if width == "all" else width)
