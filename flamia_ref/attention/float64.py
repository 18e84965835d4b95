"""Attention in float64: what recipes are measured against. numpy only, no rounding but float64's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend
from flamia_ref.attention import inputs

_ROWS = 256  # query rows whose scores are held at once
Values = npt.NDArray[np.float64]


class Forward(NamedTuple):
    """`out` [tokens, heads, head_dim] and `lse` [heads, tokens], float64, natural log."""

    out: npt.NDArray[np.float64]
    lse: npt.NDArray[np.float64]


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: None = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: None = None,
    softmax_scale: float | None = None,
    softcap: None = None,
    sink: None = None,
) -> Forward:
    """softmax(softmax_scale q k^T) v over packed documents, inputs taken as they are.

    Shapes, defaults and errors are those of `flamia_ref.attention.forward`; float64 inputs are taken too. Memory grows
    with tokens times a block of rows, not with tokens squared. NaN and infinity spread as float64 arithmetic has it.
    """
    inputs.refuse_unsupported(
        "float64 attention", cu_seqlens_k=cu_seqlens_k, window=window, softcap=softcap, sink=sink
    )
    inputs.check_alignment(alignment)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if _backend.is_traced(x):
            raise TypeError(
                f"{name} is traced; float64 attention runs in numpy, keep it out of jit"
            )
    documents, scale = inputs.check_shapes(
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        causal=causal,
        softmax_scale=softmax_scale,
        dtypes=(*inputs.DTYPES, np.dtype(np.float64)),
    )
    queries, keys, values = (_backend.host(x).astype(np.float64) for x in (q, k, v))
    tokens, heads, _ = queries.shape
    group = heads // keys.shape[1]
    out = np.zeros(queries.shape)
    lse = np.full((heads, tokens), -np.inf)
    with np.errstate(all="ignore"):
        for document in documents:
            for first in range(document.start, document.stop, _ROWS):
                rows = slice(first, min(first + _ROWS, document.stop))
                seen = slice(document.start, rows.stop if causal else document.stop)
                for head in range(heads):
                    kv = head // group
                    out[rows, head], lse[head, rows] = _rows(
                        scale * queries[rows, head],
                        keys[seen, kv],
                        values[seen, kv],
                        rows.start - seen.start if causal else None,
                    )
    return Forward(out, lse)


def _rows(q: Values, k: Values, v: Values, first: int | None) -> tuple[Values, Values]:
    """Output and log-sum-exp of some rows; row i sees keys up to `first` + i, or all for None."""
    s = q @ k.T
    if first is not None:
        s = np.where(np.arange(len(k)) > first + np.arange(len(q))[:, None], -np.inf, s)
    largest = s.max(axis=1, keepdims=True)
    p = np.exp(s - largest)
    total = p.sum(axis=1, keepdims=True)
    p = p / total
    if first is None or np.isfinite(v).all():
        out = p @ v
    else:  # the zeros of hidden keys must not meet what they hide
        out = np.stack([p[i, : first + i + 1] @ v[: first + i + 1] for i in range(len(q))])
    return out, (largest + np.log(total))[:, 0]
