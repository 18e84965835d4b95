"""The gradient test: what a recipe's backward gives in float64, beside the gradient of its forward, mask by mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from flamia_ref.attention import exact
from flamia_ref.attention.exact import Gradients
from flamia_ref.attention.parts import Values
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.samples import Sample
from flamia_ref.packing import Documents, Mask

_FULL = {"causal": False, "window": None, "alignment": "bottom_right"}
_CAUSAL = _FULL | {"causal": True}
_LEFT, BOTH = (40, 0), (30, 20)  # windows that end inside blocks and inside tiles
_TOP_LEFT = {"alignment": "top_left"}
SOFTCAP, SINK = 5.0, (1.5, -0.25)  # scores have a standard deviation of about 2.7


class Case(NamedTuple):
    """Inputs in float64, and what they are attended with.

    Attributes:
        name: the case in words.
        q, k, v, dout: [tokens, heads, head_dim], k and v with their own tokens and heads.
        mask: which keys each query sees.
        softcap, sink: as of `flamia_ref.attention.float64`; sink in float64.
    """

    name: str
    q: Values
    k: Values
    v: Values
    dout: Values
    mask: Mask
    softcap: float | None = None
    sink: Values | None = None

    def gradient(self, recipe: Recipe, softmax_scale: float, *, quantized: bool) -> Gradients:
        """The exact gradient of the recipe's forward, with its quantizers or without."""
        return exact.gradient(
            *self[1:5],
            recipe,
            self.mask,
            softmax_scale=softmax_scale,
            softcap=self.softcap,
            sink=self.sink,
            quantized=quantized,
        )

    def backward(self, recipe: Recipe, softmax_scale: float) -> Gradients:
        """What the recipe's own backward gives without quantizers and roundings."""
        return exact.backward(
            *self[1:5],
            recipe,
            self.mask,
            softmax_scale=softmax_scale,
            softcap=self.softcap,
            sink=self.sink,
        )


def cases(sample: Sample, other: Sample) -> Iterator[Case]:
    """Masks, soft caps and sinks on the inputs of a sample.

    Where the keys are other tokens than the queries, they are those of `other`, which has as many documents. The first
    case is the causal one.
    """
    same = (sample.documents, sample.documents)
    rest = (sample.documents, other.documents)
    sink = np.resize(SINK, sample.q.shape[1])
    yield _case("causal", sample, sample, same, _CAUSAL)
    yield _case("full", sample, sample, same, _FULL)
    yield _case("window to the left", sample, sample, same, _CAUSAL | {"window": _LEFT})
    yield _case("window to both sides", sample, sample, same, _FULL | {"window": BOTH})
    yield _case("other keys, bottom right", sample, other, rest, _CAUSAL)
    yield _case("other keys, top left", sample, other, rest, _CAUSAL | _TOP_LEFT)
    yield _case("soft cap", sample, sample, same, _CAUSAL)._replace(softcap=SOFTCAP)
    yield _case("sink", sample, sample, same, _CAUSAL)._replace(sink=sink)
    together = _FULL | _TOP_LEFT | {"window": BOTH}
    yield _case("other keys, window, soft cap and sink", sample, other, rest, together)._replace(
        softcap=SOFTCAP, sink=sink
    )


def deviations(recipe: Recipe, case: Case, softmax_scale: float) -> dict[str, float]:
    """How far the backward is from the gradient, of the largest element of each result; dsink only with a sink."""
    found = case.backward(recipe, softmax_scale)._asdict()
    expected = case.gradient(recipe, softmax_scale, quantized=False)._asdict()
    return {
        name: float(np.abs(found[name] - x).max() / np.abs(x).max())
        for name, x in expected.items()
        if x is not None
    }


def _case(
    name: str,
    queries: Sample,
    keys: Sample,
    documents: tuple[Documents, Documents],
    mask: dict[str, Any],
) -> Case:
    q, k, v, dout = (x.astype(np.float64) for x in (queries.q, keys.k, keys.v, queries.dout))
    return Case(name, q, k, v, dout, Mask.of(*documents, **mask))
