"""The model against published measurements: every cell, measured, predicted, and by how much they differ."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref.schedule.fitting import LONG, SHORT, Fit, Group, fit, predicted
from flamia_ref.schedule.measured import Cell, published

UNSEEN = (
    "clocks: one clock a GPU stands for all; what runs for long at full power is slower, so fitted on cells of"
    " 32768 tokens shorter ones come out too slow by what power takes",
    "memory: tiles are not slowed down by the L2 cache or device memory, and sections of heads change nothing here",
    "clusters of two multiprocessors, and how tiles overlap on one: prologue and epilogue are one constant",
    "what a kernel does besides: masked tiles cost as others do; delta and the conversion of dQ are in the overhead",
    "orders of dQ: deterministic cells are predicted as the others, without waiting",
)
"""What the model cannot see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One cell against the model.

    Attributes:
        cell: what was measured.
        predicted: milliseconds by the model.
        role: "efficiency" or "overhead" where the constants were fitted on it, else "checked".
    """

    cell: Cell
    predicted: float
    role: str

    @property
    def error(self) -> float:
        """Predicted over measured time, less 1."""
        return self.predicted / self.cell.milliseconds - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Every cell that the model has constants for.

    Attributes:
        rows: in the order of the tables.
        fits: the constants of each group.
        left: cells without constants.
    """

    rows: tuple[Row, ...]
    fits: tuple[Fit, ...]
    left: int

    @property
    def checked(self) -> tuple[Row, ...]:
        """Rows that nothing was fitted on, deterministic ones apart."""
        return tuple(x for x in self.rows if x.role == "checked" and not x.cell.deterministic)

    def of(self, group: Group) -> tuple[Row, ...]:
        """The rows of one group."""
        return tuple(row for row in self.rows if Group.of(row.cell) == group)

    def to_text(self, *, cells: bool = True) -> str:
        """The table; `cells` False: the groups alone."""
        return "\n".join(_lines(self, cells))

    def to_json(self) -> str:
        """The same as JSON."""
        return json.dumps(_document(self), indent=1, allow_nan=False)


def validate(
    cells: Iterable[Cell] | None = None, *, progress: Callable[[int, int, str], None] | None = None
) -> Validation:
    """Fit the model and predict every cell.

    Args:
        cells: measurements; None for the published ones that come with the package.
        progress: is called with the number of cells done, that of all, and the table.
    """
    given = tuple(published() if cells is None else cells)
    fits = fit(given)
    rows = []
    for done, cell in enumerate(given, start=1):
        found = fits.get(Group.of(cell))
        if found is not None:
            rows.append(
                Row(cell=cell, predicted=predicted(cell, found.constants), role=_role(cell))
            )
        if progress is not None:
            progress(done, len(given), cell.table)
    return Validation(
        rows=tuple(rows),
        fits=tuple(fits[group] for group in sorted(fits)),
        left=len(given) - len(rows),
    )


def _role(cell: Cell) -> str:
    if cell.deterministic:
        return "checked"
    if cell.length == LONG:
        return "efficiency"
    return "overhead" if cell.length == SHORT and cell.causal else "checked"


def summary(rows: Sequence[Row]) -> tuple[float, float] | None:
    """The median of the errors' magnitudes and the error of the greatest one; None without rows."""
    if not rows:
        return None
    errors = np.array([row.error for row in rows])
    return float(np.median(np.abs(errors))), float(errors[np.argmax(np.abs(errors))])


def _lines(found: Validation, cells: bool) -> Iterator[str]:
    yield (
        f"{'gpu':6} {'library':10} {'version':8} {'pass':9} {'format':6} {'efficiency':>10} {'overhead':>9}"
        f" {'checked':>8} {'median':>7} {'worst':>7}"
    )
    for one in found.fits:
        rows = [row for row in found.checked if Group.of(row.cell) == one.group]
        yield (
            f"{one.group.gpu:6} {one.group.library:10} {_version(one.group):8} {one.group.launch.value:9}"
            f" {one.group.format:6} {one.constants.efficiency:10.3f} {one.constants.overhead:9.0f} {len(rows):8}"
            f" {_percent(summary(rows))}"
        )
    yield f"all cells that nothing was fitted on: {len(found.checked)}, {_in_words(summary(found.checked))}"
    if cells:
        yield ""
        yield (
            f"{'gpu':6} {'library':10} {'pass':9} {'format':6} {'model':10} {'mask':6} {'length':>6} {'det':4}"
            f" {'measured ms':>11} {'predicted':>10} {'error':>7} role"
        )
        for row in found.rows:
            cell = row.cell
            yield (
                f"{cell.gpu:6} {cell.library:10} {cell.launch.value:9} {cell.format:6} {cell.model[:10]:10}"
                f" {'causal' if cell.causal else 'none':6} {cell.length:6} {'yes' if cell.deterministic else '':4}"
                f" {cell.milliseconds:11.3f} {row.predicted:10.3f} {100 * row.error:+6.1f}% {row.role}"
            )
    yield ""
    yield "What the model cannot see:"
    yield from (f"- {one}" for one in UNSEEN)


def _version(group: Group) -> str:
    """The version of the library itself, the last word of what measurements say of it."""
    return group.version.split()[-1] if group.version else "-"


def _percent(found: tuple[float, float] | None) -> str:
    if found is None:
        return f"{'-':>7} {'-':>7}"
    return f"{100 * found[0]:6.1f}% {100 * found[1]:+6.1f}%"


def _in_words(found: tuple[float, float] | None) -> str:
    if found is None:
        return "none"
    return f"median error {100 * found[0]:.1f}%, worst {100 * found[1]:+.1f}%"


def _document(found: Validation) -> dict[str, Any]:
    overall = summary(found.checked)
    return {
        "schema": "flamia-ref schedule validation",
        "version": 1,
        "checked": len(found.checked),
        "median": None if overall is None else overall[0],
        "worst": None if overall is None else overall[1],
        "left": found.left,
        "unseen": list(UNSEEN),
        "groups": [
            {
                "gpu": one.group.gpu,
                "library": one.group.library,
                "version": one.group.version,
                "pass": one.group.launch.value,
                "format": one.group.format,
                "efficiency": one.constants.efficiency,
                "overhead": one.constants.overhead,
                "spread": one.spread,
            }
            for one in found.fits
        ],
        "cells": [
            {
                "table": row.cell.table,
                "gpu": row.cell.gpu,
                "library": row.cell.library,
                "version": row.cell.version,
                "model": row.cell.model,
                "pass": row.cell.launch.value,
                "format": row.cell.format,
                "causal": row.cell.causal,
                "length": row.cell.length,
                "deterministic": row.cell.deterministic,
                "measured_ms": row.cell.milliseconds,
                "predicted_ms": row.predicted,
                "error": row.error,
                "role": row.role,
            }
            for row in found.rows
        ],
    }
