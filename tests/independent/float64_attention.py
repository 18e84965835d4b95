"""Attention and its gradients of one document in float64, for the tests: masks, soft cap and sink, no rounding."""

from typing import Any

import numpy as np

from tests.independent.samples import Array


def visible(
    queries: int,
    keys: int,
    *,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: Any = None,
) -> Array:
    """Which keys each query sees [query, key]."""
    shift = keys - queries if alignment == "bottom_right" else 0
    distance = np.arange(keys)[None, :] - (np.arange(queries)[:, None] + shift)
    left, right = (None if x in (None, -1) else x for x in window or (None, None))
    seen = np.ones((queries, keys), np.bool_)
    if causal:
        seen &= distance <= 0
    if right is not None:
        seen &= distance <= right
    if left is not None:
        seen &= distance >= -left
    return seen


def document(
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    mask: Array,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    sink: float = -np.inf,
) -> dict[str, Array]:
    """One head of one document: out, lse, dq, dk, dv, dsink; a row that sees no key has no gradient."""
    score = (q @ k.T) * softmax_scale
    slope = np.ones_like(score)
    if softcap is not None:
        t = np.tanh(score / softcap)
        score, slope = softcap * t, 1 - t * t
    weight = np.where(mask, np.exp(score), 0.0)
    total = weight.sum(axis=1) + np.exp(sink)
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    inverse = np.divide(1, total, out=np.zeros_like(total), where=total > 0)
    p = weight * inverse[:, None]
    out = p @ v
    dp = dout @ v.T
    delta = (dout * out).sum(axis=1)
    ds = p * (dp - delta[:, None]) * slope * softmax_scale
    return {
        "out": out,
        "lse": lse,
        "dq": ds @ k,
        "dk": ds.T @ q,
        "dv": p.T @ dout,
        "dsink": np.asarray(-(np.exp(sink) * inverse * delta).sum()),
    }
