"""Attention and its gradient in float64, what recipes are measured against. numpy, no rounding but float64's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend
from flamia_ref.attention import exact, inputs
from flamia_ref.attention.parts import Part, Values, over_seen, parts
from flamia_ref.attention.recipe import Recipe
from flamia_ref.packing import Documents

_DTYPES = (*inputs.DTYPES, np.dtype(np.float64))


class Forward(NamedTuple):
    """`out` [tokens, heads, head_dim] and `lse` [heads, tokens], float64, natural log."""

    out: Values
    lse: Values


class Backward(NamedTuple):
    """`dq` [tokens, heads, head_dim], `dk` and `dv` [tokens, kv_heads, head_dim], float64."""

    dq: Values
    dk: Values
    dv: Values


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
    given = {"q": q, "k": k, "v": v}
    documents, scale = _checked(given, cu_seqlens, causal, softmax_scale)
    queries, keys, values = (_backend.host(x).astype(np.float64) for x in given.values())
    out = np.zeros(queries.shape)
    lse = np.full(queries.shape[1::-1], -np.inf)
    with np.errstate(all="ignore"):
        for part in parts(documents, queries.shape[1], keys.shape[1], causal):
            p, lse[part.head, part.rows] = _softmax(part, queries, keys, scale)
            out[part.rows, part.head] = over_seen(p, values[part.keys, part.kv_head], part.seen)
    return Forward(out, lse)


def backward(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: None = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: None = None,
    softmax_scale: float | None = None,
    softcap: None = None,
    sink: None = None,
) -> Backward:
    """The gradient of sum(dout * out) by q, k and v, where out is that of `forward` on the same arguments.

    `dout` has the shape of `q`. A key's gradient is the sum over the query heads that share it. What a row does not see
    has no part in its gradient, and no NaN of it either. Memory grows as in `forward`.
    """
    inputs.refuse_unsupported(
        "float64 attention", cu_seqlens_k=cu_seqlens_k, window=window, softcap=softcap, sink=sink
    )
    inputs.check_alignment(alignment)
    given = {"q": q, "k": k, "v": v, "dout": dout}
    documents, scale = _checked(given, cu_seqlens, causal, softmax_scale)
    queries, keys, values, douts = (_backend.host(x).astype(np.float64) for x in given.values())
    dq, dk, dv = (np.zeros(x.shape) for x in (queries, keys, values))
    with np.errstate(all="ignore"):
        for part in parts(documents, queries.shape[1], keys.shape[1], causal):
            row, key, seen = (part.rows, part.head), (part.keys, part.kv_head), part.seen
            p, _ = _softmax(part, queries, keys, scale)
            dp = np.where(seen, douts[row] @ values[key].T, 0)
            delta = (p * dp).sum(axis=1, keepdims=True)
            ds = np.where(seen, p * (dp - delta), 0)
            dq[row] = scale * over_seen(ds, keys[key], seen)
            dk[key] += scale * over_seen(ds.T, queries[row], seen.T)
            dv[key] += over_seen(p.T, douts[row], seen.T)
    return Backward(dq, dk, dv)


def gradient(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    recipe: Recipe | str,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: None = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: None = None,
    softmax_scale: float | None = None,
    softcap: None = None,
    sink: None = None,
) -> Backward:
    """The exact gradient of a recipe: of sum(dout * O), where O is its output before that is rounded.

    It is what automatic differentiation gives in float64 of the recipe's forward with its quantizers, through which the
    derivative goes straight, and the row's base as a constant; `flamia_ref.attention.exact` has the formulas. What the
    recipe's backward differs by is the error of that backward alone.

    q, k, v and dout are rounded to bfloat16 first, with an `InputRounded` warning where that changes one. Shapes,
    defaults and errors are those of `backward`, but float64 inputs are refused: no recipe takes them.
    """
    chosen = inputs.chosen_recipe(recipe)
    inputs.refuse_unsupported(
        "float64 attention", cu_seqlens_k=cu_seqlens_k, window=window, softcap=softcap, sink=sink
    )
    inputs.check_alignment(alignment)
    given = {"q": q, "k": k, "v": v, "dout": dout}
    documents, scale = _checked(given, cu_seqlens, causal, softmax_scale, inputs.DTYPES)
    queries, keys, values, douts = _rounded(given)
    found = exact.gradient(
        queries,
        keys,
        values,
        douts,
        chosen,
        documents,
        causal=bool(causal),
        softmax_scale=scale,
    )
    return Backward(*found)


def _checked(
    given: dict[str, Any],
    cu_seqlens: Any,
    causal: Any,
    softmax_scale: Any,
    dtypes: tuple[np.dtype[Any], ...] = _DTYPES,
) -> tuple[Documents, float]:
    for name, x in given.items():
        if _backend.is_traced(x):
            raise TypeError(
                f"{name} is traced; float64 attention runs in numpy, keep it out of jit"
            )
    q, k, v, *rest = given.values()
    checked = inputs.check_shapes(
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        causal=causal,
        softmax_scale=softmax_scale,
        dtypes=dtypes,
    )
    for dout in rest:
        inputs.check_dout(dout, q, dtypes)
    inputs.check_one_library(given)
    return checked


def _rounded(given: dict[str, Any]) -> list[Values]:
    bits = inputs.rounded_bits(given).values()
    return [_backend.host(x).view(np.float32).astype(np.float64) for x in bits]


def _softmax(part: Part, q: Values, k: Values, scale: float) -> tuple[Values, Values]:
    """The probabilities of a part [rows, keys], 0 where masked, and its log-sum-exp [rows]."""
    s = (scale * q[part.rows, part.head]) @ k[part.keys, part.kv_head].T
    s = np.where(part.seen, s, -np.inf)
    largest = s.max(axis=1, keepdims=True)
    p = np.exp(s - largest)
    total = p.sum(axis=1, keepdims=True)
    return np.where(part.seen, p / total, 0), (largest + np.log(total))[:, 0]
