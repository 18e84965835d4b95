"""The boundary of the backward: dO, and the out and lse of a forward, checked and brought to bits."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.attention import inputs
from flamia_ref.attention.product import Operand
from flamia_ref.formats import PRESETS
from flamia_ref.packing import Documents

# Of lse, and of S relative to its terms: for what is no operand's rounding.
_SCORE_MARGIN = 0.05
# How far out may pass the largest value: a P of half its format's smallest number doubles, and V rounds.
_OUT_ERROR = 4.0
# From here on a float32 score is rounded so coarsely that P relative to a base may be anything.
_ROUNDED_LSE = 2.0**16
# Below this, relative to float32's range, a block may be flushed whole: the scale's code is 0.
_FLUSHED = 2.0**-117


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
    tokens, heads, head_dim = out.shape
    if 0 in (heads, head_dim):
        raise ValueError(f"out has shape {tuple(out.shape)}; heads and head_dim must be at least 1")
    documents = Documents.from_cu_seqlens(cu_seqlens, tokens)
    scale = inputs.checked_scale(softmax_scale, head_dim)
    bits = inputs.rounded_bits({"out": out})["out"]
    if _backend.on_host(out, lse):
        _check_pair(bits, _backend.host(lse))
    values = _backend.from_bits(bits, np.float32)
    if _backend.on_host(out):
        values = _backend.put(values, _backend.namespace(out), _backend.device(out))
    return KernelResults(values, lse, documents, scale)


def check_backward(q: Any, k: Any, v: Any, dout: Any, forward: Any) -> BackwardInputs:
    """Check the arguments of a backward against each other and the forward, and bring them to bits."""
    inputs.check_values("q", q, inputs.DTYPES)
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
        out=inputs.float32_bits(inputs.no_gradient(out)),
        lse=inputs.float32_bits(inputs.no_gradient(lse)),
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
        (
            (lse == np.inf) & ~out_nan & ~out_zero,
            "+inf, but its out is neither 0 nor NaN; a log-sum-exp is finite, or -inf for a row that sees no key",
        ),
        (
            (lse == -np.inf) & ~out_zero & ~out_nan,
            "-inf, a row that sees no key, but its out is not 0",
        ),
    ):
        if wrong.any():
            head, token = (int(x[0]) for x in np.nonzero(wrong))
            raise ValueError(f"lse of head {head}, token {token} is {what}")


def _check_belonging(bits: dict[str, Array], out: Array, lse: Array, forward: Any) -> None:
    """Refuse an lse below a query's score with its own key, which it always sees, and an out beyond every value.

    What quantization may take away is allowed for: a block keeps nothing far below its largest value, and a block
    reaches no further than its document. So nothing is refused that the recipe itself gives.
    """
    q, k, v = (_backend.from_bits(_backend.host(bits[name]), np.float32) for name in "qkv")
    group = q.shape[1] // k.shape[1]
    with np.errstate(all="ignore"):
        for document in forward.documents:
            if document.stop == document.start:
                continue
            own_keys = np.repeat(k[document], group, axis=1)
            score, error = _own_score(q[document], own_keys, forward)
            given = lse[:, document].T
            low = np.isfinite(given) & (given < score - error)
            if low.any():
                token, head = (int(x[0]) for x in np.nonzero(low))
                raise ValueError(
                    f"lse of head {head}, token {document.start + token} is {given[token, head]:.6g}, but the query's"
                    f" own key alone gives {score[token, head]:.6g}; is it negated, or of other inputs?"
                )
            most = np.repeat(np.abs(v[document]).max(axis=(0, 2)), group).astype(np.float64)
            largest = np.abs(out[document]).max(axis=2)
            far = np.isfinite(largest) & (largest > _OUT_ERROR * most)
            far &= np.abs(given) < _ROUNDED_LSE
            if far.any():
                token, head = (int(x[0]) for x in np.nonzero(far))
                raise ValueError(
                    f"out of token {document.start + token}, head {head} reaches {largest[token, head]:.6g}, but v in"
                    f" its document {most[head]:.6g}; does it belong to these inputs?"
                )


def _own_score(q: Array, own_keys: Array, forward: Any) -> tuple[Array, Array]:
    """softmax_scale times each query's product with its own key [tokens, heads], and how far S may be from it."""
    q, own_keys = (x.astype(np.float64) for x in (q, own_keys))
    score = (q * own_keys).sum(axis=2)
    terms = np.abs(q * own_keys).sum(axis=2)
    q_error, k_error = (
        _operand_error(np.abs(x), operand)
        for x, operand in ((q, forward.recipe.s.left), (own_keys, forward.recipe.s.right))
    )
    error = (np.abs(q) * k_error + q_error * np.abs(own_keys) + q_error * k_error).sum(axis=2)
    error = error + _SCORE_MARGIN * terms
    return score * forward.softmax_scale, error * forward.softmax_scale + _SCORE_MARGIN


def _operand_error(magnitude: Array, operand: Operand) -> Array | float:
    """How far a code of an operand [tokens, heads, channels] of one document may be from its value."""
    if operand.format not in PRESETS:
        return 0.0
    element = PRESETS[operand.format].element
    saturated = 1 - element.max / 2.0 ** (element.emax + 1)
    relative = max(saturated, 2.0 ** -(element.mantissa_bits + 1))
    # A scale is at most twice the block's largest value over 2^emax.
    smallest = element.smallest * 2.0**-element.emax
    largest = magnitude.max(axis=(0, 2), keepdims=True)
    return relative * magnitude + smallest * largest + _FLUSHED
