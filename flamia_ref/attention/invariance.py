"""What must not change a bit: the company that a document is packed in, and the tokens that come later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend
from flamia_ref.attention.backward_pass import backward
from flamia_ref.attention.forward_pass import forward
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.results import Forward
from flamia_ref.attention.samples import Sample

Results = dict[str, npt.NDArray[np.float32]]


class Change(NamedTuple):
    """A result that changed: `changed` of `elements`, the first at `place` (token, head, channel; no channel in lse).

    There it is `alone` on its own, and `together` in company or with later tokens.
    """

    result: str
    changed: int
    elements: int
    place: tuple[int, ...]
    alone: float
    together: float

    def __str__(self) -> str:
        names = ("token", "head", "channel")
        where = ", ".join(f"{name} {at}" for name, at in zip(names, self.place, strict=False))
        return (
            f"{self.result} changes in {self.changed} of {self.elements} elements, first at {where}:"
            f" {self.alone:g} alone, {self.together:g} here"
        )


def packing(
    recipe: Recipe, sample: Sample, *, other: Sample | None = None, **attended: Any
) -> list[Change]:
    """Results of packed documents that are not, bit for bit, those of each document alone, in two orders of packing.

    `other`: the sample that k and v are taken from, with as many documents; None for `sample` itself. `attended`:
    keywords of `forward`, which say how. The gradient of a sink is one of all documents, and not compared.
    """
    keys, count = other or sample, len(sample.documents)

    def both(order: tuple[int, ...]) -> Results:
        return _both(recipe, sample.taken(order), keys.taken(order), attended)

    alone = [both((index,)) for index in range(count)]
    changes: list[Change] = []
    for order in (tuple(range(count)), tuple(reversed(range(count)))):
        together = both(order)
        start = {"queries": 0, "keys": 0}
        for index in order:
            for name, expected in alone[index].items():
                side = "keys" if name in ("dk", "dv") else "queries"
                found = together[name][start[side] : start[side] + len(expected)]
                changes += _change(name, expected, found)
            start["queries"] += sample.documents.lengths[index]
            start["keys"] += keys.documents.lengths[index]
    return changes


def prefix(recipe: Recipe, sample: Sample, lengths: tuple[int, ...]) -> dict[int, list[Change]]:
    """Where out, lse and dq of a document's first tokens are not the first rows of the whole, by their number."""
    whole = _rows(recipe, sample, len(sample.q))
    found = {}
    for length in lengths:
        first = _rows(recipe, sample, length)
        found[length] = [
            change
            for name, expected in first.items()
            for change in _change(name, expected, whole[name][:length])
        ]
    return found


def _rows(recipe: Recipe, sample: Sample, tokens: int) -> Results:
    """What the first `tokens` alone give, of what has a row for each query."""
    q, k, v, dout = (x[:tokens] for x in (sample.q, sample.k, sample.v, sample.dout))
    result = forward(q, k, v, recipe)
    found = _outputs(result)
    if recipe.has_backward:
        found["dq"] = np.asarray(backward(q, k, v, dout, result).dq)
    return found


def _outputs(result: Forward) -> Results:
    return {"out": np.asarray(result.out), "lse": np.asarray(result.lse).T}


def _both(recipe: Recipe, sample: Sample, keys: Sample, attended: Mapping[str, Any]) -> Results:
    """All results of a forward and, where there is one, a backward, tokens first."""
    first = forward(
        sample.q,
        keys.k,
        keys.v,
        recipe,
        cu_seqlens=np.array(sample.documents.offsets, dtype=np.int32),
        cu_seqlens_k=np.array(keys.documents.offsets, dtype=np.int32),
        **attended,
    )
    if not recipe.has_backward:
        return _outputs(first)
    second = backward(sample.q, keys.k, keys.v, sample.dout, first)
    return {
        **_outputs(first),
        "dq": np.asarray(second.dq),
        "dk": np.asarray(second.dk),
        "dv": np.asarray(second.dv),
    }


def _change(
    name: str, alone: npt.NDArray[np.float32], together: npt.NDArray[np.float32]
) -> Iterator[Change]:
    """The change of one result, if there is one."""
    different = _backend.bits(np.ascontiguousarray(alone)) != _backend.bits(
        np.ascontiguousarray(together)
    )
    if different.any():
        place = tuple(int(at) for at in np.argwhere(different)[0])
        yield Change(
            name,
            int(different.sum()),
            different.size,
            place,
            float(alone[place]),
            float(together[place]),
        )
