"""Mistakes of the mask, and of which tokens belong together."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.mistake import Made, Mistake, Name, Needs, Variant
from flamia_ref.golden.mistakes.scene import Scene, packed
from flamia_ref.golden.mistakes.simulated import Change, simulated
from flamia_ref.golden.stage import Place
from flamia_ref.packing import Mask

MASKED = frozenset(
    {"s", "row_max", "p", "p.o.scales", "p.o.codes", "row_sum", "o"}
    | {"dp", "p.dv", "p.dv.scales", "p.dv.codes", "ds", "ds.scales", "ds.codes"}
    | {"ds.dq.scales", "ds.dq.codes", "ds.dk.scales", "ds.dk.codes"}
)
"""Where another mask shows. In S and dP by the guard alone."""


def with_mask(change: Callable[[Scene], Mask | None]) -> Made:
    """Return what comes of another mask; None from `change`: it would be no other."""

    def made(scene: Scene, place: Place) -> Tensor | None:
        mask = change(scene)
        if mask is None or mask == scene.mask:
            return None
        return simulated(scene, place, Change(mask=mask))

    return made


def _reach(scene: Scene) -> tuple[int | None, int | None]:
    """The window with a causal mask written as its right side, which may then be moved."""
    mask = scene.mask
    return mask.window[0], 0 if mask.causal else mask.window[1]


def _moved(left: int, right: int) -> Callable[[Scene], Mask | None]:
    def change(scene: Scene) -> Mask | None:
        sides = _reach(scene)
        moved = tuple(
            None if side is None else side + step
            for side, step in zip(sides, (left, right), strict=True)
        )
        if moved == sides:
            return None
        return replace(scene.mask, causal=False, window=(moved[0], moved[1]))

    return change


def _off_by_one(scene: Scene, place: Place) -> Iterator[Variant]:
    if not scene.mask.causal:
        return
    yield Variant(
        sentence="The causal mask lets every query see one key too many.",
        made=with_mask(_moved(0, 1)),
    )
    yield Variant(
        sentence="The causal mask hides one key too many, the query's own.",
        made=with_mask(_moved(0, -1)),
    )

    def first_key(scene: Scene) -> Mask | None:
        return _FirstKeyHidden(**{one: getattr(scene.mask, one) for one in _FIELDS})

    yield Variant(sentence="The mask hides each document's first key.", made=with_mask(first_key))


_FIELDS = ("queries", "keys", "causal", "window", "alignment")


class _FirstKeyHidden(Mask):
    """A mask that hides a document's first key from the queries that see another."""

    def bounds(self, document: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        first, last = super().bounds(document, place)
        return np.where((first == 0) & (last > 0), 1, first).astype(np.int32), last


def _window(scene: Scene, place: Place) -> Iterator[Variant]:
    left, right = scene.mask.window
    for side, words, step in (
        (left, "left", (1, 0)),
        (right, "right", (0, 1)),
    ):
        if side is None or (words == "right" and scene.mask.causal):
            continue
        for sign, many in ((1, "many"), (-1, "few")):
            yield Variant(
                sentence=f"The window reaches one key too {many} to the {words}.",
                made=with_mask(_moved(sign * step[0], sign * step[1])),
            )
    if left is not None and right is not None and not scene.mask.causal:
        for sign, many in ((1, "many"), (-1, "few")):
            yield Variant(
                sentence=f"The window reaches one key too {many} on both sides.",
                made=with_mask(_moved(sign, sign)),
            )


def _no_mask(scene: Scene, place: Place) -> Iterator[Variant]:
    if scene.mask.causal:
        yield Variant(
            sentence="No causal mask is applied.",
            made=with_mask(lambda one: replace(one.mask, causal=False)),
        )


def _causal(scene: Scene, place: Place) -> Iterator[Variant]:
    if not scene.mask.causal:
        yield Variant(
            sentence="A causal mask is applied to a case without one.",
            made=with_mask(lambda one: replace(one.mask, causal=True)),
        )


def _no_window(scene: Scene, place: Place) -> Iterator[Variant]:
    if scene.mask.window != (None, None):
        yield Variant(
            sentence="The window is not applied.",
            made=with_mask(lambda one: replace(one.mask, window=(None, None))),
        )
    if not scene.mask.causal and scene.mask.window[1] is None and scene.mask.window[0] is not None:
        yield Variant(
            sentence="The window is taken as that of a causal mask.",
            made=with_mask(lambda one: replace(one.mask, causal=True)),
        )


def _alignment(scene: Scene, place: Place) -> Iterator[Variant]:
    other = "top_left" if scene.mask.alignment == "bottom_right" else "bottom_right"
    yield Variant(
        sentence=f"The mask is aligned {other.replace('_', ' ')}.",
        made=with_mask(lambda one: replace(one.mask, alignment=other)),
    )


def _together(scene: Scene, place: Place, mask: Mask) -> Tensor | None:
    """A tensor of the scene's tokens in the documents of another mask; of pairs those of the case's documents."""
    stage = place.stage
    if stage.tiled or "token_blocks" in stage.axes or "key_token_blocks" in stage.axes:
        return None
    if place.document is None:
        return simulated(scene, place, Change(mask=mask))
    if not {"queries", "keys"} <= set(stage.axes) or len(mask.queries.offsets) != 2:
        return None
    found = simulated(scene, replace(place, document=scene.documents[0]), Change(mask=mask))
    at = scene.documents.index(place.document)
    rows, keys = scene.rows()[at], scene.rows(length_of_keys=True)[at]
    return None if found is None else found[:, rows, keys]


def _not_isolated(scene: Scene, place: Place) -> Iterator[Variant]:
    if len(scene.documents) < 2:
        return

    def made(scene: Scene, place: Place) -> Tensor | None:
        mask = scene.mask
        merged = replace(
            mask,
            queries=packed((mask.queries.tokens,)),
            keys=packed((mask.keys.tokens,)),
        )
        return _together(scene, place, merged)

    yield Variant(sentence="Documents are not isolated: all tokens are one document.", made=made)


def _wrong_document(scene: Scene, place: Place) -> Iterator[Variant]:
    for step, words in ((1, "the next one's"), (-1, "the one before it's")):

        def made(scene: Scene, place: Place, step: int = step) -> Tensor | None:
            count = len(scene.documents)
            if (
                count < 2
                or place.stage.tiled
                or {"token_blocks", "key_token_blocks"} & set(place.stage.axes)
            ):
                return None
            other = [min(max(at + step, 0), count - 1) for at in range(count)]
            rows = scene.rows(length_of_keys=True)
            index = np.concatenate([np.arange(rows[one].start, rows[one].stop) for one in other])
            lengths = tuple(scene.key_lengths[one] for one in other)
            inputs = {name: scene.expected(name)[index] for name in ("k", "v")}
            mask = replace(scene.mask, keys=packed(lengths))
            if place.stage.of_keys or (place.document is not None and "keys" in place.stage.axes):
                return None
            return simulated(scene, place, Change(mask=mask, inputs=inputs))

        yield Variant(
            sentence=f"cu_seqlens is off by one document: a document's queries meet {words} keys.",
            made=made,
        )
    for step, words in ((1, "late"), (-1, "early")):

        def shifted(scene: Scene, place: Place, step: int = step) -> Tensor | None:
            offsets = list(scene.mask.queries.offsets)
            if not scene.mask.same_tokens or len(offsets) < 3:
                return None
            inner = [min(max(one + step, 0), offsets[-1]) for one in offsets[1:-1]]
            lengths = tuple(int(x) for x in np.diff([0, *inner, offsets[-1]]))
            if min(lengths) < 0 or place.document is not None:
                return None
            moved = packed(lengths)
            return _together(scene, place, replace(scene.mask, queries=moved, keys=moved))

        yield Variant(sentence=f"Documents start one token too {words}.", made=shifted)


MISTAKES = (
    Mistake(name=Name.MASK_OFF_BY_ONE, shows=MASKED, variants=_off_by_one),
    Mistake(name=Name.NO_MASK, shows=MASKED, variants=_no_mask),
    Mistake(name=Name.CAUSAL_MASK, shows=MASKED, variants=_causal),
    Mistake(name=Name.ALIGNMENT, shows=MASKED, variants=_alignment),
    Mistake(name=Name.WINDOW, shows=MASKED, variants=_window),
    Mistake(name=Name.NO_WINDOW, shows=MASKED, variants=_no_window),
    Mistake(name=Name.NO_ISOLATION, shows=MASKED, variants=_not_isolated, needs=Needs.DOCUMENTS),
    Mistake(
        name=Name.WRONG_DOCUMENT, shows=MASKED, variants=_wrong_document, needs=Needs.DOCUMENTS
    ),
)
