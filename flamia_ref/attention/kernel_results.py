"""The boundary of the backward: dO, and the out and lse of a forward, checked and brought to bits."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import shown, unknown_name
from flamia_ref.attention import inputs
from flamia_ref.attention.product import Operand, Scope
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.stages import kept_for_backward
from flamia_ref.formats import PRESETS
from flamia_ref.packing import Mask

# Of lse, and of S relative to its terms: for what is no operand's rounding.
_SCORE_MARGIN = 0.05
# How far out may pass the largest value: a P of half its format's smallest number doubles, and V rounds.
_OUT_ERROR = 4.0
# From here on a float32 score is rounded so coarsely that P relative to a base may be anything.
_ROUNDED_LSE = 2.0**16
# Below this, relative to float32's range, a block may be flushed whole: the scale's code is 0.
_FLUSHED = 2.0**-117


class KernelResults(NamedTuple):
    """out and lse as float32 arrays, with what else was given."""

    out: Array
    lse: Array
    shape: inputs.Shape


class BackwardInputs(NamedTuple):
    """Checked inputs of a backward as float32 bits, numpy wherever their values are on the host; `namespace` and
    `device` are the caller's."""

    q: Array
    k: Array
    v: Array
    dout: Array
    out: Array
    lse: Array
    sink: Array | None
    saved: dict[str, Array]
    namespace: ModuleType
    device: object | None


def check_results(
    out: Any,
    lse: Any,
    sink: Any,
    saved: Any,
    recipe: Recipe,
    *,
    head_dim: int | None,
    cu_seqlens: Any,
    cu_seqlens_k: Any,
    causal: Any,
    alignment: Any,
    window: Any,
    softmax_scale: Any,
    softcap: Any,
) -> KernelResults:
    """Check a kernel's results. Raises ValueError or TypeError of one line."""
    inputs.check_values("out", out, inputs.DTYPES)
    _check_lse(lse, out)
    tokens, heads, channels = out.shape
    if 0 in (heads, channels):
        raise ValueError(f"out has shape {tuple(out.shape)}; heads and head_dim must be at least 1")
    inputs.check_sink(sink, heads)
    if saved is not None and not isinstance(saved, Mapping):
        raise TypeError(f"saved is {shown(saved)}; it must be a mapping of names to arrays")
    given = {"out": out, "lse": lse} | ({} if sink is None else {"sink": sink})
    for name, x in (saved or {}).items():
        given[f"saved[{name!r}]"] = inputs.checked_array(f"saved[{name!r}]", x)
    inputs.check_one_library(given)
    mask = inputs.checked_mask(
        tokens,
        None,
        cu_seqlens,
        cu_seqlens_k,
        causal=causal,
        window=window,
        alignment=alignment,
    )
    scale = inputs.checked_scale(softmax_scale, channels if head_dim is None else head_dim)
    shape = inputs.Shape(mask, scale, inputs.checked_softcap(softcap))
    _check_saved(saved or {}, recipe, out, mask)
    bits = inputs.rounded_bits({"out": out})["out"]
    if _backend.on_host(out, lse):
        _check_pair(bits, _backend.host(lse))
    values = _backend.from_bits(bits, np.float32)
    if _backend.on_host(out):
        values = _backend.put(values, _backend.namespace(out), _backend.device(out))
    return KernelResults(values, lse, shape)


def _check_saved(saved: Any, recipe: Recipe, out: Any, mask: Mask) -> None:
    """Refuse what is not what the recipe keeps for its backward."""
    kept = kept_for_backward(recipe)
    missing = [name for name in kept if name not in saved]
    if missing:
        raise ValueError(
            f"recipe {recipe.name!r} needs {', '.join(missing)} of the forward for its backward; give saved={{...}}, or"
            " take a recipe whose backward needs out and lse alone"
        )
    for name, x in saved.items():
        if name not in kept:
            raise unknown_name("saved array", name, kept)
        inputs.checked_array(f"saved[{name!r}]", x)
        if np.dtype(x.dtype).newbyteorder("=") != np.float32:
            raise TypeError(f"saved[{name!r}] holds {np.dtype(x.dtype).name}; it must be float32")
        tokens, heads, _ = out.shape
        tiles = max((-(-keys // recipe.tiles.key) for keys in mask.keys.lengths), default=0)
        wanted = tuple(out.shape) if name == "o" else (heads, tokens, tiles)
        if tuple(x.shape) != wanted:
            raise ValueError(
                f"saved[{name!r}] has shape {tuple(x.shape)}; for this out and these documents it must be {wanted}"
            )


def check_backward(q: Any, k: Any, v: Any, dout: Any, forward: Any) -> BackwardInputs:
    """Check the arguments of a backward against each other and the forward, and bring them to bits."""
    inputs.check_values("q", q, inputs.DTYPES)
    mask = forward.mask
    for name, x, documents in (("q", q, mask.queries), ("k", k, mask.keys)):
        inputs.check_values(name, x, inputs.DTYPES)
        if documents.tokens != len(x):
            raise ValueError(
                f"the forward ran on documents of {documents.tokens} tokens, but {name} has {len(x)}; pass the inputs"
                " of that forward"
            )
    inputs.check_shapes(
        q,
        k,
        v,
        cu_seqlens=mask.queries.offsets,
        cu_seqlens_k=mask.keys.offsets,
        causal=mask.causal,
        alignment=mask.alignment,
        window=mask.window,
        softmax_scale=forward.softmax_scale,
        softcap=forward.softcap,
        sink=forward.sink,
        dtypes=inputs.DTYPES,
    )
    inputs.check_dout(dout, q, v, inputs.DTYPES)
    wanted = (*q.shape[:2], v.shape[2])
    if tuple(forward.out.shape) != wanted:
        raise ValueError(
            f"the forward's out has shape {tuple(forward.out.shape)}, for these q and v it would be {wanted}; pass the"
            " inputs of that forward"
        )
    _check_saved(forward.saved, forward.recipe, forward.out, mask)
    arrays = {"q": q, "k": k, "v": v, "dout": dout}
    others = {"forward.out": forward.out, "forward.lse": forward.lse, **forward.saved}
    inputs.check_one_library(arrays | others)
    namespace, device = _backend.namespace(q), _backend.device(q)
    bits = inputs.rounded_bits(arrays)
    out, lse = forward.out, forward.lse
    saved = dict(forward.saved)
    if _backend.on_host(*arrays.values(), out, lse, *saved.values()):
        out, lse = (_backend.host(x) for x in (out, lse))
        saved = {name: _backend.host(x) for name, x in saved.items()}
        _check_belonging(bits, out, lse, forward)
    return BackwardInputs(
        **bits,
        out=inputs.float32_bits(inputs.no_gradient(out)),
        lse=inputs.float32_bits(inputs.no_gradient(lse)),
        sink=inputs.sink_bits(forward.sink),
        saved={name: inputs.float32_bits(inputs.no_gradient(x)) for name, x in saved.items()},
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
    """Refuse an lse below a query's score with the last key that it sees, and an out beyond every value.

    What quantization may take away is allowed for: a block keeps nothing far below its largest value, and a block
    reaches no further than its document. So nothing is refused that the recipe itself gives.
    """
    q, k, v = (_backend.from_bits(_backend.host(bits[name]), np.float32) for name in "qkv")
    group = q.shape[1] // k.shape[1]
    with np.errstate(all="ignore"):
        for index, (queries, keys) in enumerate(forward.mask):
            _, last = forward.mask.document_bounds(index)
            rows = np.flatnonzero(last >= 0)
            if not len(rows):
                continue
            repeated = np.repeat(k[keys], group, axis=1)
            score, error = _score(q[queries], repeated, rows, last[rows], forward)
            given = lse[:, queries].T[rows]
            low = np.isfinite(given) & (given < score - error) & (np.abs(score) < _ROUNDED_LSE)
            if low.any():
                row, head = (int(x[0]) for x in np.nonzero(low))
                raise ValueError(
                    f"lse of head {head}, token {queries.start + rows[row]} is {given[row, head]:.6g}, but the last key"
                    f" that the query sees alone gives {score[row, head]:.6g}; is it negated, or of other inputs?"
                )
            most = np.repeat(np.abs(v[keys]).max(axis=(0, 2)), group).astype(np.float64)
            largest = np.abs(out[queries][rows]).max(axis=2)
            far = np.isfinite(largest) & (largest > _OUT_ERROR * most)
            far &= np.abs(given) < _ROUNDED_LSE
            far &= _quantizes(forward.recipe.o.right)
            if far.any():
                row, head = (int(x[0]) for x in np.nonzero(far))
                raise ValueError(
                    f"out of token {queries.start + rows[row]}, head {head} reaches {largest[row, head]:.6g}, but v in"
                    f" its document {most[head]:.6g}; does it belong to these inputs?"
                )


def _score(q: Array, keys: Array, rows: Array, last: Array, forward: Any) -> tuple[Array, Array]:
    """The score of some `rows` with the key `last` of each [rows, heads], and how far S may be from it."""
    recipe = forward.recipe
    q_error, k_error = (
        np.broadcast_to(_operand_error(np.abs(x.astype(np.float64)), operand), x.shape)[at]
        for x, operand, at in ((q, recipe.s.left, rows), (keys, recipe.s.right, last))
    )
    q, keys = (x.astype(np.float64) for x in (q[rows], keys[last]))
    score = (q * keys).sum(axis=2)
    terms = np.abs(q * keys).sum(axis=2)
    error = (np.abs(q) * k_error + q_error * np.abs(keys) + q_error * k_error).sum(axis=2)
    error = (error + _SCORE_MARGIN * terms) * forward.softmax_scale + _SCORE_MARGIN
    score = score * forward.softmax_scale
    if forward.softcap is not None:  # its slope is 1 at most
        score = forward.softcap * np.tanh(score / forward.softcap)
    return score, error


def _quantizes(operand: Operand) -> bool:
    """Whether the scale of an operand follows from the values that it scales, so that none is cut off."""
    return operand.scope in (Scope.BLOCK, Scope.TOKEN, Scope.UNIT)


def _operand_error(magnitude: Array, operand: Operand) -> Array | float:
    """How far a code of an operand [tokens, heads, channels] of one document may be from its value."""
    if not _quantizes(operand):
        return np.inf
    if operand.format not in PRESETS:
        return 0.0
    element = PRESETS[operand.format].element
    saturated = 1 - element.max / 2.0 ** (element.emax + 1)
    relative = max(saturated, 2.0 ** -(element.mantissa_bits + 1))
    # A scale is at most twice the block's largest value over 2^emax.
    smallest = element.smallest * 2.0**-element.emax
    largest = magnitude.max(axis=(0, 2), keepdims=True)
    return relative * magnitude + smallest * largest + _FLUSHED
