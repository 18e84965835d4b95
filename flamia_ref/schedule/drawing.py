"""Timelines drawn: multiprocessors downwards, time to the right, tiles coloured by the length of their document."""

from __future__ import annotations

from typing import Any

import numpy as np

from flamia_ref.report import font, png
from flamia_ref.schedule.launches import Launch, Simulation

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

_WIDTH, _MOST_ROWS, _MARGIN = 1200, 160, 8
_PAPER, _INK, _WAITING, _FIRST = 0, 1, 2, 3
_PALETTE = (
    (255, 255, 255),
    (20, 20, 20),
    (214, 60, 50),
    # from short to long, two shades each, so that neighbouring tiles can be told apart
    (199, 225, 245),
    (173, 210, 238),
    (133, 184, 224),
    (104, 164, 212),
    (66, 133, 190),
    (48, 112, 170),
    (22, 76, 130),
    (12, 56, 104),
)
_CLASSES = (len(_PALETTE) - _FIRST) // 2


def timeline_png(simulation: Simulation) -> bytes:
    """The picture of every launch as a PNG file."""
    longest = max((one.timeline.makespan / one.clock for one in simulation.launches), default=0.0)
    documents = np.array(simulation.problem.mask.queries.lengths, dtype=np.int64)
    edges: Any = (
        np.quantile(documents, np.linspace(0, 1, _CLASSES + 1)[1:-1]) if len(documents) else []
    )
    parts = [
        _line(
            f"{simulation.recipe.name} on {simulation.gpu.name}: {len(documents)} documents,"
            f" {int(documents.sum())} tokens, {simulation.problem.heads} heads"
        )
    ]
    for one in simulation.launches:
        timeline = one.timeline
        parts += [
            _space(_MARGIN),
            _line(
                f"{one.work.launch.value}, {one.policy}: {one.seconds * 1e3:.3f} ms, at best"
                f" {one.bound_seconds * 1e3:.3f}, {100 * timeline.utilisation:.1f}% of the time of"
                f" {timeline.sms} multiprocessors"
            ),
            _space(3),
            _panel(one, documents, edges, longest),
        ]
    parts += [_space(_MARGIN), *_legend(documents)]
    width = max(part.shape[1] for part in parts)
    padded = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts]
    return png.encode(np.pad(np.concatenate(padded), _MARGIN), _PALETTE)


def _panel(one: Launch, documents: Any, edges: Any, longest: float) -> Pixels:
    """One launch [rows, time]: what each multiprocessor does at the middle of each pixel."""
    timeline = one.timeline
    shown = min(timeline.sms, _MOST_ROWS)
    times = (np.arange(_WIDTH) + 0.5) / _WIDTH * longest * one.clock
    pixels = np.full((shown, _WIDTH), _PAPER, dtype=np.uint8)
    shade = np.searchsorted(edges, documents, side="left") if len(documents) else documents
    by_sm = np.lexsort((timeline.start, timeline.sm))
    bounds = np.searchsorted(timeline.sm[by_sm], np.arange(timeline.sms + 1))
    for row, sm in enumerate(np.linspace(0, timeline.sms - 1, shown).astype(int)):
        own = by_sm[bounds[sm] : bounds[sm + 1]]
        if not len(own):
            continue
        place = np.searchsorted(timeline.start[own], times, side="right") - 1
        tile = own[np.maximum(place, 0)]
        busy = (place >= 0) & (times < timeline.end[tile])
        colour = _FIRST + 2 * shade[one.work.document[tile]] + np.maximum(place, 0) % 2
        waits = times >= timeline.end[tile] - timeline.waited[tile]
        pixels[row] = np.where(busy, np.where(waits & busy, _WAITING, colour), _PAPER)
    scale = max(1, 320 // shown)
    framed = np.repeat(pixels, scale, axis=0)
    return np.pad(framed, 1, constant_values=_INK)


def _legend(documents: Any) -> list[Pixels]:
    if not len(documents):
        return []
    limits = np.quantile(documents, np.linspace(0, 1, _CLASSES + 1)).astype(int)
    lines = []
    for place in range(_CLASSES):
        swatch = np.full((font.HEIGHT, 24), _FIRST + 2 * place, dtype=np.uint8)
        swatch[:, 12:] += 1
        text = _line(f" documents of {limits[place]} to {limits[place + 1]} tokens")
        lines.append(np.concatenate([swatch, text], axis=1))
    swatch = np.full((font.HEIGHT, 24), _WAITING, dtype=np.uint8)
    lines.append(np.concatenate([swatch, _line(" waiting for its turn to add to dQ")], axis=1))
    return lines


def _line(text: str) -> Pixels:
    return font.bitmap(text).astype(np.uint8) * np.uint8(_INK)


def _space(height: int) -> Pixels:
    return np.full((height, 1), _PAPER, dtype=np.uint8)
