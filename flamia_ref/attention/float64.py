"""Attention and its gradient in float64, what recipes are measured against. numpy, no rounding but float64's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend
from flamia_ref.attention import exact, inputs
from flamia_ref.attention.parts import Part, Values, capped, over_seen, parts, some_parts
from flamia_ref.attention.recipe import Recipe
from flamia_ref.packing.mask import Window

_DTYPES = (*inputs.DTYPES, np.dtype(np.float64))


class Forward(NamedTuple):
    """`out` [tokens, heads, v's head_dim] and `lse` [heads, tokens], float64, natural log."""

    out: Values
    lse: Values


class Backward(NamedTuple):
    """`dq`, `dk` and `dv` in the shapes of q, k and v, and `dsink` [heads], None without a sink; float64."""

    dq: Values
    dk: Values
    dv: Values
    dsink: Values | None = None


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: Window | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
) -> Forward:
    """softmax(softmax_scale q k^T) v over packed documents, inputs taken as they are.

    With a soft cap the scores are softcap tanh(softmax_scale q k^T / softcap). A sink is a score of each head besides
    those of its keys, with a value of 0. A query that sees no key has out 0 and the sink for its lse, -inf without one.

    Shapes, defaults and errors are those of `flamia_ref.attention.forward`; float64 inputs are taken too. Memory grows
    with tokens times a block of rows, not with tokens squared. NaN and infinity spread as float64 arithmetic has it.
    """
    given = _Given(
        {"q": q, "k": k, "v": v},
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        causal=causal,
        alignment=alignment,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
    )
    return _forward(given, given.parts())


def forward_rows(
    q: Any, k: Any, v: Any, queries: npt.NDArray[np.int64], **attended: Any
) -> Forward:
    """`forward` of some packed queries alone, ascending: their rows of out and lse. `attended`: all keywords of it."""
    given = _Given({"q": q, "k": k, "v": v}, **attended)
    heads, kv_heads = given.values[0].shape[1], given.values[1].shape[1]
    found = _forward(given, some_parts(given.mask, heads, kv_heads, queries))
    return Forward(found.out[queries], found.lse[:, queries])


def _forward(given: _Given, some: Iterable[Part]) -> Forward:
    queries, _, values = given.values
    out = np.zeros((*queries.shape[:2], values.shape[2]))
    lse = np.empty(queries.shape[1::-1])
    with np.errstate(all="ignore"):
        for part in some:
            row = _row(part, given)
            lse[part.head, part.rows] = row.lse
            out[part.rows, part.head] = over_seen(row.p, values[part.keys, part.kv_head], part.seen)
    return Forward(out, lse)


def backward(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: Window | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
) -> Backward:
    """The gradient of sum(dout * out) by q, k, v and the sink, where out is that of `forward` on the same arguments.

    `dout` has the shape of out. A key's gradient is the sum over the query heads that share it. What a row does not see
    has no part in its gradient, and no NaN of it either. Memory grows as in `forward`.
    """
    given = _Given(
        {"q": q, "k": k, "v": v, "dout": dout},
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        causal=causal,
        alignment=alignment,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
    )
    queries, keys, values, douts = given.values
    dq, dk, dv = (np.zeros(x.shape) for x in (queries, keys, values))
    dsink = None if given.sink is None else np.zeros(given.sink.shape)
    with np.errstate(all="ignore"):
        for part in given.parts():
            row, key, seen = (part.rows, part.head), (part.keys, part.kv_head), part.seen
            p, slope, of_sink, _ = _row(part, given)
            dp = np.where(seen, douts[row] @ values[key].T, 0)
            delta = (p * dp).sum(axis=1, keepdims=True)
            ds = np.where(seen, p * (dp - delta) * slope, 0) * given.softmax_scale
            dq[row] = over_seen(ds, keys[key], seen)
            dk[key] += over_seen(ds.T, queries[row], seen.T)
            dv[key] += over_seen(p.T, douts[row], seen.T)
            if dsink is not None:
                dsink[part.head] -= (of_sink * delta)[seen.any(axis=1)].sum()
    return Backward(dq, dk, dv, dsink)


def gradient(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    recipe: Recipe | str,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: Window | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
) -> Backward:
    """The exact gradient of a recipe: of sum(dout * O), where O is its output before that is rounded.

    It is what automatic differentiation gives in float64 of the recipe's forward with its quantizers, through which the
    derivative goes straight, and the row's base as a constant; `flamia_ref.attention.exact` has the formulas. What the
    recipe's backward differs by is the error of that backward alone.

    q, k, v and dout are rounded to bfloat16 first, with an `InputRounded` warning where that changes one. Shapes,
    defaults and errors are those of `backward`, but float64 inputs are refused: no recipe takes them.
    """
    chosen = inputs.chosen_recipe(recipe)
    given = _Given(
        {"q": q, "k": k, "v": v, "dout": dout},
        inputs.DTYPES,
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        causal=causal,
        alignment=alignment,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
    )
    bits = inputs.rounded_bits(given.arrays).values()
    queries, keys, values, douts = (
        _backend.host(x).view(np.float32).astype(np.float64) for x in bits
    )
    found = exact.gradient(
        queries,
        keys,
        values,
        douts,
        chosen,
        given.mask,
        softmax_scale=given.softmax_scale,
        softcap=given.softcap,
        sink=given.sink,
    )
    return Backward(*found)


class _Given:
    """Checked arguments: q, k, v and perhaps dout, in float64 too, and what they are attended with."""

    def __init__(
        self,
        arrays: dict[str, Any],
        dtypes: tuple[np.dtype[Any], ...] = _DTYPES,
        **arguments: Any,
    ) -> None:
        for name, x in {**arrays, "sink": arguments["sink"]}.items():
            if _backend.is_traced(x):
                raise TypeError(
                    f"{name} is traced; float64 attention runs in numpy, keep it out of jit"
                )
        self.arrays = arrays
        q, k, v, *rest = arrays.values()
        shape = inputs.check_shapes(q, k, v, dtypes=dtypes, **arguments)
        self.mask, self.softmax_scale, self.softcap = shape
        for dout in rest:
            inputs.check_dout(dout, q, v, dtypes)
        inputs.check_one_library(arrays)
        sink = arguments["sink"]
        self.sink = None if sink is None else _backend.host(sink).astype(np.float64)
        self.values = [_backend.host(x).astype(np.float64) for x in arrays.values()]

    def parts(self) -> Iterator[Part]:
        """Every query of every head once."""
        q, k, *_ = self.values
        return parts(self.mask, q.shape[1], k.shape[1])


class _Rows(NamedTuple):
    """The softmax of a part: P [rows, keys], 0 where masked; the derivative of the soft cap [rows, keys], 1 without
    one; the sink's probability [rows, 1]; lse [rows]."""

    p: Values
    slope: Values
    sink: Values
    lse: Values


def _row(part: Part, given: _Given) -> _Rows:
    q, k, *_ = given.values
    s = (given.softmax_scale * q[part.rows, part.head]) @ k[part.keys, part.kv_head].T
    s, slope = capped(s, given.softcap)
    s = np.where(part.seen, s, -np.inf)
    sink = -np.inf if given.sink is None else given.sink[part.head]
    largest = s.max(axis=1, keepdims=True, initial=sink)
    dead = ~part.seen.any(axis=1, keepdims=True)
    e, of_sink = np.exp(s - largest), np.exp(sink - largest)
    total = e.sum(axis=1, keepdims=True) + of_sink
    lse = np.where(dead, sink, largest + np.log(total))
    return _Rows(np.where(part.seen, e / total, 0), slope, of_sink / total, lse[:, 0])
