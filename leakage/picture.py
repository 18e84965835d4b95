"""The heat map of the demonstration: a row a recipe, a column a witness, time to the right."""

import numpy as np

from flamia_ref.leakage.demo import Demo, Trial, Verdict
from flamia_ref.leakage.description import change, tokens
from flamia_ref.report.heat_map import Cell, HeatMap, Panel, cells

_LEGEND = (
    (Cell.FORBIDDEN_MOVED, "moved, and must not: a leak"),
    (Cell.FORBIDDEN_STILL, "did not move, and must not"),
    (Cell.MOVED, "moved, and may: it sees the changed token"),
    (Cell.STILL, "did not move, and may"),
)


def heat_map(demo: Demo) -> HeatMap:
    """The picture of a demonstration: which outputs moved, and which of them must not."""
    rows = [
        (recipe, [_panel(trial) for trial in demo.trials if trial.recipe == recipe])
        for recipe in demo.evidence
    ]
    seen = {
        cell for _, panels in rows for one in panels for cell in np.union1d(one.cells, one.strip)
    }
    return HeatMap(
        title=("One later token of V is changed: which outputs move?",),
        columns=[(change(one), one.name.replace("-", " ")) for one in demo.witnesses],
        rows=rows,
        legend=[(cell, text) for cell, text in _LEGEND if cell in seen],
        notes=("panel: out, token to the right, channel down; strip: lse",),
    )


def _panel(trial: Trial) -> Panel:
    out, lse = (cells(*pair) for pair in zip(trial.moved, trial.forbidden, strict=True))
    return Panel(cells=np.ascontiguousarray(out.T), strip=lse, caption=_caption(trial))


def _caption(trial: Trial) -> str:
    if trial.verdict is Verdict.INCONCLUSIVE:
        return "inconclusive"
    out, lse = trial.leaked
    leaked = np.flatnonzero(out.any(axis=1) | lse).tolist()
    return f"LEAK: {tokens(leaked)}" if leaked else "no leak"
