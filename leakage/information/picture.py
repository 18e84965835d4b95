"""The picture of a report on capacity: a row a family of draws, a column an output, tokens to the right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flamia_ref.leakage.information.text import DRAWN, number
from flamia_ref.leakage.sharing.text import NAMES
from flamia_ref.report.heat_map import Cell, HeatMap, Panel, cells

if TYPE_CHECKING:
    from flamia_ref.leakage.information.drawing import EntropyFigure
    from flamia_ref.leakage.information.report import CapacityReport

_LEGEND = (
    (Cell.FORBIDDEN_MOVED, "moved in a draw, and must not"),
    (Cell.FORBIDDEN_STILL, "never moved, and must not"),
    (Cell.MOVED, "moved in a draw, and may"),
    (Cell.STILL, "never moved, and may"),
)
_WIDE = 4  # cells of a token


def heat_map(report: CapacityReport) -> HeatMap:
    """The picture: of each output which elements had other bits in some draw, and which of those must not."""
    outputs = list(dict.fromkeys(one.output for one in report.entropies))
    kinds = dict.fromkeys((one.drawn, one.family) for one in report.entropies)
    by = {(one.drawn, one.family, one.output): one for one in report.entropies}
    rows = [
        (
            f"{DRAWN[drawn]}, {family}",
            [_panel(by.get((drawn, family, output))) for output in outputs],
        )
        for drawn, family in kinds
    ]
    seen = {cell for _, panels in rows for one in panels for cell in np.unique(one.cells)}
    s = report.settings
    return HeatMap(
        title=(
            f"{report.recipe}: which bits move with what they must not depend on",
            f"{s.samples} draws, cut at token {s.cut} of {s.length}",
        ),
        columns=[(NAMES[output],) for output in outputs],
        rows=rows,
        legend=[(cell, text) for cell, text in _LEGEND if cell in seen],
        notes=(
            "panel: tokens to the right, channels down; bits: entropy of all that must not move",
        ),
    )


def _panel(one: EntropyFigure | None) -> Panel:
    none = np.zeros(0, dtype=np.uint8)
    if one is None:
        return Panel(cells=np.zeros((1, 1), dtype=np.uint8), strip=none, caption="all may move")
    found = cells(one.moved, np.broadcast_to(one.observed[:, None], one.moved.shape)).T
    if len(found) == 1:
        found = found.repeat(8, axis=0)
    caption = f"{number(one.entropy.corrected)} bits" if one.leaks else "0 bits"
    return Panel(
        cells=np.ascontiguousarray(found.repeat(_WIDE, axis=1).repeat(2, axis=0)),
        strip=none,
        caption=caption,
    )
