"""From a result that differs to the smallest one found that still does, by asking the device again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from flamia_ref.device.tiles import Row

Differs = Callable[[Sequence[Row]], list[bool]]
"""Whether each of some rows, all of one shape, differs between device and model."""

_ROUNDS = 60  # times the device is asked at most


def shrink(row: Row, differs: Differs, *, neutral_scale: int = 127) -> Row | None:
    """A row with fewer products, a zero accumulator, fewer steps or scales of 1 that still differs, or None.

    None means that the row itself did not differ when it was run again. `neutral_scale` is the code of 1.
    """
    if not differs([row])[0]:
        return None
    left = _ROUNDS
    chunk = _present(row).size
    while chunk >= 1 and left:
        left -= 1
        smaller = _first(_without(row, chunk), differs)
        if smaller is None:
            chunk //= 2
        else:
            row = smaller
            chunk = min(chunk, _present(row).size)
    for candidates in (
        _fewer_steps,
        _plain_accumulators,
        lambda r: _plain_scales(r, neutral_scale),
    ):
        while left:
            left -= 1
            smaller = _first(candidates(row), differs)
            if smaller is None:
                break
            row = smaller
    return row


def products(row: Row) -> int:
    """Places where neither code is zero. Negative zeros count: they are part of the bits."""
    return int(_present(row).size)


def _present(row: Row) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    return np.flatnonzero((row.a != 0) | (row.b != 0))


def _first(candidates: Iterator[Row], differs: Differs) -> Row | None:
    found = list(candidates)
    if not found:
        return None
    for candidate, still in zip(found, differs(found), strict=True):
        if still:
            return candidate
    return None


def _without(row: Row, chunk: int) -> Iterator[Row]:
    """The row with `chunk` of its products made zeros, from each place on."""
    present = _present(row)
    for start in range(0, present.size, chunk):
        gone = present[start : start + chunk]
        a, b = row.a.copy(), row.b.copy()
        a.reshape(-1)[gone] = 0
        b.reshape(-1)[gone] = 0
        yield dataclasses.replace(row, a=a, b=b)


def _fewer_steps(row: Row) -> Iterator[Row]:
    """The row without one of its steps."""
    steps = len(row.a)
    for step in range(steps if steps > 1 else 0):
        kept = np.arange(steps) != step
        yield dataclasses.replace(
            row,
            a=row.a[kept],
            b=row.b[kept],
            a_scales=row.a_scales[kept],
            b_scales=row.b_scales[kept],
        )


def _plain_accumulators(row: Row) -> Iterator[Row]:
    if row.c:
        yield dataclasses.replace(row, c=0)


def _plain_scales(row: Row, neutral: int) -> Iterator[Row]:
    """The row with one scale made 1."""
    for name in ("a_scales", "b_scales"):
        scales = getattr(row, name)
        for at in np.flatnonzero(scales.reshape(-1) != neutral).tolist():
            plain = scales.copy()
            plain.reshape(-1)[at] = neutral
            yield dataclasses.replace(row, **{name: plain})
