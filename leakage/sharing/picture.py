"""The map of a structure: for each output and input which tokens can reach which, and which of that is illegal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.legal import Bools, LegalPairs
from flamia_ref.leakage.sharing.illegal import INPUTS, RETURNED
from flamia_ref.leakage.sharing.text import NAMES, documents_of
from flamia_ref.report.heat_map import Cell, HeatMap, Panel, cells

if TYPE_CHECKING:
    from flamia_ref.leakage.sharing.structures import Structure

MOST_TOKENS = 4096
"""Queries or keys of a pack that is drawn."""

_CELLS = 192  # of a panel, on each side
_LEGEND = (
    (Cell.FORBIDDEN_MOVED, "can depend, and must not"),
    (Cell.FORBIDDEN_STILL, "cannot depend, and must not"),
    (Cell.MOVED, "can depend, and may"),
    (Cell.STILL, "cannot depend, and may"),
)


def heat_map(structure: Structure) -> HeatMap:
    """The picture: a row of panels an output, a column an input; in a panel the output's tokens downwards.

    Raises ValueError for a pack of more than `MOST_TOKENS` queries or keys.
    """
    mask = structure.mask
    most = max(mask.queries.tokens, mask.keys.tokens)
    if not mask.queries.tokens or not mask.keys.tokens:
        raise ValueError("there are no queries or no keys; give documents with tokens to draw")
    if most > MOST_TOKENS:
        raise ValueError(
            f"the pack has {most} tokens; a picture shows every pair of up to {MOST_TOKENS}, give fewer"
        )
    legal = LegalPairs(mask)
    rows = [
        (NAMES[output], [_panel(structure, legal, output, name) for name in INPUTS])
        for output in RETURNED
    ]
    seen = {cell for _, panels in rows for one in panels for cell in np.unique(one.cells)}
    return HeatMap(
        title=(f"{structure.recipe.name}: which tokens can reach which", documents_of(structure)),
        columns=[(NAMES.get(name, name),) for name in INPUTS],
        rows=rows,
        legend=[(cell, text) for cell, text in _LEGEND if cell in seen],
        notes=("panel: tokens of the output downwards, of the input to the right",),
    )


def _panel(structure: Structure, legal: LegalPairs, output: str, name: str) -> Panel:
    pairs, allowed = structure.pairs(output, name), legal.dense(output, name)
    found = cells(_coarse(pairs & ~allowed) | _coarse(pairs), ~_coarse(allowed))
    found[_coarse(pairs & ~allowed)] = Cell.FORBIDDEN_MOVED
    count = int((pairs & ~allowed).sum())
    return Panel(
        cells=np.ascontiguousarray(found.repeat(2, axis=0)),  # a cell is twice as wide as high
        strip=np.zeros(0, dtype=np.uint8),
        caption=f"{count} illegal" if count else "legal",
    )


def _coarse(pairs: Bools) -> NDArray[np.bool_]:
    """Whether there is one in each cell: a cell is as many tokens by as many as make the panel small enough."""
    step = -(-max(pairs.shape) // _CELLS)
    padded = np.pad(pairs, [(0, -size % step) for size in pairs.shape])
    rows, columns = (size // step for size in padded.shape)
    return np.asarray(padded.reshape(rows, step, columns, step).any(axis=(1, 3)))
