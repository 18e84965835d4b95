"""The boundary of the backward: dO, and the out and lse of a forward, checked and brought to bits."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.attention import inputs
from flamia_ref.packing import Documents

# How far S may be from the exact product of the inputs, of the sum of its terms' magnitudes: both operands lose up to
# an eighth to e4m3, where the largest of a block saturates.
_SCORE_ERROR = 0.3
_SCORE_MARGIN = 0.05
# How far out may pass the largest value: P and V round by a sixteenth each, and P's sum with them.
_OUT_ERROR = 1.5


class KernelResults(NamedTuple):
    """out and lse as float32 arrays, with the documents and the softmax scale."""

    out: Array
    lse: Array
    documents: Documents
    softmax_scale: float


class BackwardInputs(NamedTuple):
    """Checked inputs of a backward as float32 bits, numpy wherever their values are on the host; `namespace` and
    `device` are the caller's."""

    q: Array
    k: Array
    v: Array
    dout: Array
    out: Array
    lse: Array
    namespace: ModuleType
    device: object | None


def check_results(
    out: Any, lse: Any, *, cu_seqlens: Any, causal: Any, softmax_scale: Any
) -> KernelResults:
    """Check a kernel's out and lse. Raises ValueError or TypeError of one line."""
    inputs.check_values("out", out, inputs.DTYPES)
    inputs.check_causal(causal)
    _check_lse(lse, out)
    inputs.check_one_library({"out": out, "lse": lse})
    tokens, _, head_dim = out.shape
    documents = Documents.from_cu_seqlens(cu_seqlens, tokens)
    scale = inputs.checked_scale(softmax_scale, head_dim)
    bits = inputs.rounded_bits({"out": out})["out"]
    if _backend.on_host(out, lse):
        _check_pair(bits, _backend.host(lse))
    values = _backend.from_bits(bits, np.float32)
    values = _backend.put(values, _backend.namespace(out), _backend.device(out))
    return KernelResults(values, lse, documents, scale)


def check_backward(q: Any, k: Any, v: Any, dout: Any, forward: Any) -> BackwardInputs:
    """Check the arguments of a backward against each other and the forward, and bring them to bits."""
    documents, _ = inputs.check_shapes(
        q,
        k,
        v,
        cu_seqlens=forward.documents.offsets if forward.documents.tokens == len(q) else None,
        causal=forward.causal,
        softmax_scale=forward.softmax_scale,
        dtypes=inputs.DTYPES,
    )
    inputs.check_dout(dout, q, inputs.DTYPES)
    if documents.tokens != forward.documents.tokens:
        raise ValueError(
            f"the forward ran on documents of {forward.documents.tokens} tokens, but q has {documents.tokens}; pass the"
            " inputs of that forward"
        )
    if tuple(forward.out.shape) != tuple(q.shape):
        raise ValueError(
            f"the forward's out has shape {tuple(forward.out.shape)} and q {tuple(q.shape)}; pass the inputs of that"
            " forward"
        )
    arrays = {"q": q, "k": k, "v": v, "dout": dout}
    inputs.check_one_library(arrays | {"forward.out": forward.out, "forward.lse": forward.lse})
    namespace, device = _backend.namespace(q), _backend.device(q)
    bits = inputs.rounded_bits(arrays)
    out, lse = forward.out, forward.lse
    if _backend.on_host(*arrays.values(), out, lse):
        out, lse = (_backend.host(x) for x in (out, lse))
        _check_belonging(bits, out, lse, forward)
    return BackwardInputs(
        **bits,
        out=inputs.float32_bits(out),
        lse=inputs.float32_bits(lse),
        namespace=namespace,
        device=device,
    )


def _check_lse(lse: Any, out: Any) -> None:
    dtype = getattr(lse, "dtype", None)
    if dtype is None or not (isinstance(lse, np.ndarray) or _backend.is_jax(lse)):
        raise TypeError(f"lse is a {type(lse).__name__}; it must be a numpy or JAX array")
    _backend.plain("lse", lse)
    if np.dtype(dtype).newbyteorder("=") != np.float32:
        raise TypeError(f"lse holds {np.dtype(dtype).name}; it must be float32")
    tokens, heads, _ = out.shape
    if tuple(lse.shape) != (heads, tokens):
        raise ValueError(
            f"lse has shape {tuple(lse.shape)}; for out of {tuple(out.shape)} it must be (heads, tokens) ="
            f" {(heads, tokens)}"
        )


def _check_pair(out_bits: Array, lse: Array) -> None:
    """Refuse rows whose out and lse cannot come from one forward."""
    out = _backend.from_bits(_backend.host(out_bits), np.float32)
    out_nan = np.isnan(out).any(axis=2).T
    out_zero = (out == 0).all(axis=2).T
    for wrong, what in (
        (np.isnan(lse) & ~out_nan, "NaN, but its out has none"),
        (lse == np.inf, "+inf; a log-sum-exp is finite, or -inf for a row that sees no key"),
        (
            (lse == -np.inf) & ~out_zero & ~out_nan,
            "-inf, a row that sees no key, but its out is not 0",
        ),
    ):
        if wrong.any():
            head, token = (int(x[0]) for x in np.nonzero(wrong))
            raise ValueError(f"lse of head {head}, token {token} is {what}")


def _check_belonging(bits: dict[str, Array], out: Array, lse: Array, forward: Any) -> None:
    """Refuse an lse below a query's score with its own key, which it always sees, and an out beyond every value."""
    q, k, v = (_backend.from_bits(_backend.host(bits[name]), np.float32) for name in "qkv")
    with np.errstate(all="ignore"):
        group = q.shape[1] // k.shape[1]
        own_keys = np.repeat(k, group, axis=1).astype(np.float64)
        terms = q.astype(np.float64) * own_keys * forward.softmax_scale
        margin = _SCORE_ERROR * np.abs(terms).sum(axis=2) + _SCORE_MARGIN
        least = (terms.sum(axis=2) - margin).T
        low = np.isfinite(lse) & (lse < least)
        if low.any():
            head, token = (int(x[0]) for x in np.nonzero(low))
            raise ValueError(
                f"lse of head {head}, token {token} is {lse[head, token]:.6g}, but the query's own key alone gives"
                f" {terms.sum(axis=2)[token, head]:.6g}; is it negated, or of other inputs?"
            )
        for index, document in enumerate(forward.documents):
            if document.stop == document.start:
                continue
            most = np.repeat(np.abs(v[document]).max(axis=(0, 2)), group)
            far = np.abs(out[document]).max(axis=2) > _OUT_ERROR * most
            if far.any():
                token, head = (int(x[0]) for x in np.nonzero(far))
                reach = np.abs(out[document][token, head]).max()
                raise ValueError(
                    f"out of document {index}, token {token}, head {head} reaches {reach:.6g}, but v there"
                    f" {most[head]:.6g}; does it belong to these inputs?"
                )
