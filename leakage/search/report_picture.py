"""The heat map of a hunt: which output tokens moved for which changed tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.search.hunt_report import HuntReport, Moves
from flamia_ref.leakage.search.report_text import shape
from flamia_ref.report.heat_map import Cell, HeatMap, Panel, cells

_LEGEND = (
    (Cell.MOVED, "moved, as it may"),
    (Cell.STILL, "may move and did not, or was not tried"),
    (Cell.FORBIDDEN_STILL, "must not move and did not, or was not tried"),
    (Cell.FORBIDDEN_MOVED, "must not move and did: a leak"),
)


def heat_map(report: HuntReport) -> HeatMap:
    """The picture: a row of panels an output, a column an operand; in each, output tokens down, changed ones across.

    Raises ValueError where the report has none: nothing was run, or there were too many tokens.
    """
    if not report.moves:
        raise ValueError(
            "the report has no map of moves: nothing was run, or there are too many tokens"
        )
    rows = []
    for output in report.outputs:
        panels = [_panel(one) for one in report.moves if one.output == output]
        if panels:
            rows.append((output, panels))
    return HeatMap(
        title=[f"leak hunt in {report.subject}", shape(report.setting)],
        columns=[[operand, "changed"] for operand in report.operands],
        rows=rows,
        legend=_LEGEND,
        notes=["down: tokens of the output; across: the one token that was changed"],
    )


def _panel(one: Moves) -> Panel:
    wrong = int((one.moved & one.forbidden).sum())
    tried = np.asarray(one.tried.any(axis=0))
    return Panel(
        cells=cells(one.moved, one.forbidden).repeat(2, axis=0),
        strip=_strip(tried),
        caption=f"{wrong} wrong, {int(tried.sum())} tried",
    )


def _strip(tried: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Which tokens were changed alone."""
    return np.where(tried, np.uint8(Cell.MOVED), np.uint8(Cell.FORBIDDEN_STILL))
