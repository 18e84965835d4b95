"""A heat map of what moved: panels of cells with labels, as a PNG file."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from flamia_ref.report import font, png

Cells = NDArray[np.uint8]


class Cell(IntEnum):
    """What a cell says of one output."""

    STILL = 0
    """It may move, and did not."""
    MOVED = 1
    """It may move, and did."""
    FORBIDDEN_STILL = 2
    """It must not move, and did not."""
    FORBIDDEN_MOVED = 3
    """It must not move, and did."""


COLOURS = {
    Cell.STILL: (219, 231, 245),
    Cell.MOVED: (122, 163, 214),
    Cell.FORBIDDEN_STILL: (223, 227, 232),
    Cell.FORBIDDEN_MOVED: (200, 16, 46),
}
"""Red, green and blue of a cell."""

_PAPER, _INK = len(Cell), len(Cell) + 1
_PALETTE = (*(COLOURS[cell] for cell in Cell), (255, 255, 255), (36, 41, 47))

# Pixels.
_WIDE, _HIGH = 2, 1  # a cell
_STRIP = 6  # the height of a strip, whose cells are as wide as those above it
_TEXT = 2  # how many times the font is enlarged
_LINE = font.HEIGHT * _TEXT
_MARGIN, _GAP, _NARROW = 10, 16, 4
_SWATCH = 2 * font.ADVANCE * _TEXT


def cells(moved: NDArray[np.bool_], forbidden: NDArray[np.bool_]) -> Cells:
    """The cells of outputs of one shape, from whether each moved and whether it must not."""
    return (moved + 2 * forbidden.astype(np.uint8)).astype(np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Panel:
    """One picture in the grid.

    Attributes:
        cells: `Cell` values [rows, columns].
        strip: `Cell` values [columns] of other outputs, drawn below them.
        caption: a line below.
    """

    cells: Cells
    strip: Cells
    caption: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeatMap:
    """Panels in a grid, with everything that is written around them.

    Attributes:
        title: lines above all.
        columns: the lines above each column.
        rows: the label of each row, and its panels, one a column.
        legend: what each colour means, in the order to be shown.
        notes: lines below all.
    """

    title: Sequence[str]
    columns: Sequence[Sequence[str]]
    rows: Sequence[tuple[str, Sequence[Panel]]]
    legend: Sequence[tuple[Cell, str]]
    notes: Sequence[str]

    def to_png(self) -> bytes:
        """Return the picture as a PNG file. The pixels are the same everywhere; the file depends on zlib."""
        return png.encode(self.pixels(), _PALETTE)

    def pixels(self) -> NDArray[np.uint8]:
        """Return the picture [height, width] as colour indices: a `Cell`, then paper, then ink.

        A panel's cells are blocks of 2 x 1 pixels of their own value, and nothing is drawn over them.
        """
        grid = [_aligned([_block(panel) for panel in panels]) for _, panels in self.rows]
        headings = _aligned([_lines(lines) for lines in self.columns])
        columns = zip(headings, *grid, strict=True)
        widths = [max(part.shape[1] for part in column) for column in columns]
        parts = [_lines(self.title, bold=True), _space(_NARROW), _beside(headings, widths)]
        for (label, _), blocks in zip(self.rows, grid, strict=True):
            parts += [_space(_MARGIN), _lines([label], bold=True), _beside(blocks, widths)]
        parts += [_space(_MARGIN), *(_entry(cell, text) for cell, text in self.legend)]
        parts.append(_lines(self.notes))
        return np.pad(_stacked(parts), _MARGIN, constant_values=_PAPER)


def _space(height: int, width: int = 0) -> Cells:
    return np.full((height, width), _PAPER, dtype=np.uint8)


def _lines(texts: Sequence[str], *, bold: bool = False) -> Cells:
    """Lines of text, one below the other."""
    parts = []
    for text in texts:
        ink = font.bitmap(text).repeat(_TEXT, axis=0).repeat(_TEXT, axis=1)
        if bold:
            ink[:, 1:] |= ink[:, :-1].copy()
        parts += [np.where(ink, np.uint8(_INK), np.uint8(_PAPER)), _space(_NARROW)]
    return _stacked(parts)


def _block(panel: Panel) -> Cells:
    """A panel with its strip and its caption."""
    drawn = panel.cells.repeat(_HIGH, axis=0).repeat(_WIDE, axis=1)
    strip = panel.strip[None].repeat(_STRIP, axis=0).repeat(_WIDE, axis=1)
    return _stacked([drawn, _space(_NARROW // 2), strip, _space(_NARROW), _lines([panel.caption])])


def _entry(cell: Cell, text: str) -> Cells:
    """A line of the legend: a swatch and what it means."""
    words = _lines([text])
    swatch = np.full((_LINE, _SWATCH), cell, dtype=np.uint8)
    return _beside(
        _aligned([_stacked([swatch, _space(_NARROW)]), words]), [_SWATCH, words.shape[1]]
    )


def _stacked(parts: Sequence[Cells]) -> Cells:
    """Parts one below the other, from the left."""
    width = max((part.shape[1] for part in parts), default=0)
    return np.concatenate([_space(0, width), *(_widened(part, width) for part in parts)])


def _aligned(parts: Sequence[Cells]) -> list[Cells]:
    """Parts made equally high."""
    height = max((part.shape[0] for part in parts), default=0)
    return [np.concatenate([part, _space(height - part.shape[0], part.shape[1])]) for part in parts]


def _beside(parts: Sequence[Cells], widths: Sequence[int]) -> Cells:
    """Parts of one height side by side, each in its column."""
    height = max((part.shape[0] for part in parts), default=0)
    row = [_space(height, 0)]
    for part, width in zip(parts, widths, strict=True):
        row += [_widened(part, width), _space(height, _GAP)]
    return np.concatenate(row[:-1], axis=1)


def _widened(part: Cells, width: int) -> Cells:
    return np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=_PAPER)
