"""Mistakes of padding: what lies behind a document's end in a block or a tile, and is taken in."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.masks import MASKED
from flamia_ref.golden.mistakes.mistake import Mistake, Name, Variant
from flamia_ref.golden.mistakes.scene import Scene, packed
from flamia_ref.golden.mistakes.simulated import Change, simulated
from flamia_ref.golden.stage import BLOCK, Place

_OVER_QUERIES = frozenset(
    {"dv", "dk"}
    | {f"{name}.{kind}" for name in ("p.dv", "ds.dk", "ds") for kind in ("scales", "codes")}
)
_TILES = (BLOCK, 64, 128)


def _stale(scene: Scene, place: Place) -> Iterator[Variant]:
    for kind, words in (("zero", "zeros"), ("next", "the next document's tokens")):
        for whole in (BLOCK, 128):

            def made(
                scene: Scene, place: Place, kind: str = kind, whole: int = whole
            ) -> Tensor | None:
                return _past_the_end(scene, place, kind, whole)

            yield Variant(
                sentence=(
                    f"Keys past a document's end are not masked: the padding to {whole} holds {words}."
                ),
                made=made,
            )


def _past_the_end(scene: Scene, place: Place, kind: str, whole: int) -> Tensor | None:
    """With the keys of documents filled up to whole blocks or tiles, and seen."""
    stage = place.stage
    if scene.mask.causal or stage.tiled or stage.of_keys:
        return None
    spec, made = scene.case.spec, {}
    lengths = tuple(-(-length // whole) * whole for length in scene.key_lengths)
    if lengths == scene.key_lengths:
        return None
    for name in ("k", "v"):
        every = np.take(scene.case.tensors[name], np.array(scene.kv_heads), axis=1)
        parts = []
        for document, length in zip(scene.documents, lengths, strict=True):
            start, own = spec.key_starts[document], spec.lengths_of_keys[document]
            part = np.zeros((length, *every.shape[1:]), every.dtype)
            if kind == "next":
                there = every[start : start + length]
                part[: len(there)] = there
            part[:own] = every[start : start + own]
            parts.append(part)
        made[name] = np.concatenate(parts)
    mask = replace(scene.mask, keys=packed(lengths), alignment="top_left")
    found = simulated(scene, place, Change(mask=mask, inputs=made))
    if found is None or place.document is None:
        return found
    shape = scene.expected(place.name).shape
    return found[tuple(slice(0, size) for size in shape)]


def _stale_queries(scene: Scene, place: Place) -> Iterator[Variant]:
    for kind, words in (
        ("next", "the next document's tokens"),
        ("before", "the rows of the tile before it"),
    ):
        for whole in _TILES:

            def made(
                scene: Scene, place: Place, kind: str = kind, whole: int = whole
            ) -> Tensor | None:
                return _past_the_last_query(scene, place, kind, whole)

            yield Variant(
                sentence=(
                    "Queries past a document's end are not masked in dK and dV: the padding of its last tile "
                    f"to {whole} holds {words}."
                ),
                made=made,
            )


def _past_the_last_query(scene: Scene, place: Place, kind: str, whole: int) -> Tensor | None:
    """With the queries of documents filled up to whole tiles by rows of the pack. None where no row is there."""
    spec, mask = scene.case.spec, scene.mask
    if mask.bounded and scene.lengths != scene.key_lengths and mask.alignment == "bottom_right":
        return None
    index, lengths = [], []
    for document in scene.documents:
        start, own = spec.starts[document], spec.lengths[document]
        rows = np.arange(start + own, start + -(-own // whole) * whole)
        rows = rows[rows < spec.tokens] if kind == "next" else rows[rows >= start + whole] - whole
        index += [np.arange(start, start + own), rows]
        lengths.append(own + len(rows))
    if tuple(lengths) == scene.lengths:
        return None
    chosen = np.concatenate(index).astype(np.int64)
    heads = np.array(scene.heads)
    every = {name: scene.case.tensors[name] for name in ("q", "dout", "out", "lse")}
    change = Change(
        mask=replace(mask, queries=packed(tuple(lengths)), alignment="top_left"),
        inputs={name: every[name][chosen][:, heads] for name in ("q", "dout")},
        backward={"out": every["out"][chosen][:, heads], "lse": every["lse"][heads][:, chosen]},
    )
    found = simulated(scene, place, change)
    if found is None or place.document is None:
        return found
    return found[tuple(slice(0, size) for size in scene.expected(place.name).shape)]


MISTAKES = (
    Mistake(name=Name.STALE_PADDING, shows=MASKED, variants=_stale),
    Mistake(name=Name.STALE_PADDING, shows=_OVER_QUERIES, variants=_stale_queries),
)
