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
from flamia_ref.attention.belonging import check_bases, check_belonging, check_pair
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.stages import kept_for_backward
from flamia_ref.packing import Mask


class KernelResults(NamedTuple):
    """out, lse, the sink and what else was saved as float32 arrays in this machine's byte order."""

    out: Array
    lse: Array
    sink: Array | None
    saved: dict[str, Array]
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
    lse = _checked_lse("lse", lse, out)
    tokens, heads, channels = out.shape
    if 0 in (heads, channels):
        raise ValueError(f"out has shape {tuple(out.shape)}; heads and head_dim must be at least 1")
    inputs.check_sink(sink, heads)
    inputs.check_sink_range(sink)
    saved = _mapping(saved)
    mask = inputs.checked_mask(
        tokens,
        None,
        cu_seqlens,
        cu_seqlens_k,
        causal=causal,
        window=window,
        alignment=alignment,
    )
    head_dim = channels if head_dim is None else inputs.checked_size("head_dim", head_dim)
    scale = inputs.checked_scale(softmax_scale, head_dim)
    shape = inputs.Shape(mask, scale, inputs.checked_softcap(softcap))
    inputs.check_range(shape)
    saved = _checked_saved(saved, recipe, out, mask)
    given = {"out": out, "lse": lse} | ({} if sink is None else {"sink": sink})
    inputs.check_one_library(given | {f"saved[{name!r}]": x for name, x in saved.items()})
    if _backend.on_host(lse, *saved.values()):
        check_bases(saved, _backend.host(lse), recipe)
    bits = inputs.rounded_bits({"out": out})["out"]
    if _backend.on_host(out, lse):
        check_pair(bits, _backend.host(lse))
    values = _backend.from_bits(bits, np.float32)
    if _backend.on_host(out):
        values = _backend.put(values, _backend.namespace(out), _backend.device(out))
    return KernelResults(values, lse, None if sink is None else inputs.native(sink), saved, shape)


def _mapping(saved: Any) -> Mapping[str, Any]:
    if saved is not None and not isinstance(saved, Mapping):
        raise TypeError(f"saved is {shown(saved)}; it must be a mapping of names to arrays")
    return saved or {}


def _checked_saved(
    saved: Mapping[str, Any], recipe: Recipe, out: Any, mask: Mask
) -> dict[str, Array]:
    """What the recipe keeps for its backward; anything else is refused."""
    kept = kept_for_backward(recipe)
    missing = [name for name in kept if name not in saved]
    if missing:
        raise ValueError(
            f"recipe {recipe.name!r} needs {', '.join(missing)} of the forward for its backward; give saved={{...}}, or"
            " take a recipe whose backward needs out and lse alone"
        )
    tokens, heads, _ = out.shape
    tiles = max((-(-keys // recipe.tiles.key) for keys in mask.keys.lengths), default=0)
    shapes = dict.fromkeys(("o", "high_precision_out"), tuple(out.shape))
    shapes["row_base"] = (heads, tokens, tiles)
    found = {}
    for name, x in saved.items():
        if name not in kept:
            raise unknown_name("saved array", name, kept)
        wanted = "for this out and these documents it must be"
        found[name] = inputs.array_of(f"saved[{name!r}]", x, np.float32, shapes[name], wanted)
    return found


def _checked_lse(name: str, lse: Any, out: Any) -> Array:
    tokens, heads, _ = out.shape
    wanted = f"for out of {tuple(out.shape)} it must be (heads, tokens) ="
    return inputs.array_of(name, lse, np.float32, (heads, tokens), wanted)


def check_forward(forward: Any) -> KernelResults:
    """Check the fields of a `Forward`, which anyone may have made or changed. Raises ValueError or TypeError of one
    line."""
    check_computed(forward.recipe)
    mask = forward.mask
    if not isinstance(mask, Mask):
        raise TypeError(
            f"forward.mask is a {type(mask).__name__}; it must be a Mask, as a forward or Forward.from_kernel makes it"
        )
    out = inputs.array_of("forward.out", forward.out, np.float32)
    if out.ndim != 3 or 0 in out.shape[1:]:
        raise ValueError(
            f"forward.out has shape {tuple(out.shape)}; it must be (tokens, heads, value channels), the last two at"
            " least 1"
        )
    if len(out) != mask.queries.tokens:
        raise ValueError(
            f"forward.out has {len(out)} tokens and the documents of forward.mask {mask.queries.tokens}; they must be"
            " equal"
        )
    lse = _checked_lse("forward.lse", forward.lse, out)
    inputs.check_sink(forward.sink, out.shape[1])
    inputs.check_sink_range(forward.sink)
    if forward.softmax_scale is None:
        raise TypeError("forward.softmax_scale is None; it must be a float")
    scale = inputs.checked_scale(forward.softmax_scale, 1)
    shape = inputs.Shape(mask, scale, inputs.checked_softcap(forward.softcap))
    inputs.check_range(shape)
    saved = _checked_saved(_mapping(forward.saved), forward.recipe, out, mask)
    sink = None if forward.sink is None else inputs.native(forward.sink)
    return KernelResults(out, lse, sink, saved, shape)


def check_backward(q: Any, k: Any, v: Any, dout: Any, forward: Any) -> BackwardInputs:
    """Check the arguments of a backward against each other and the forward, and bring them to bits."""
    found = check_forward(forward)
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
    if tuple(found.out.shape) != wanted:
        raise ValueError(
            f"the forward's out has shape {tuple(found.out.shape)}, for these q and v it would be {wanted}; pass the"
            " inputs of that forward"
        )
    arrays = {"q": q, "k": k, "v": v, "dout": dout}
    inputs.check_one_library(arrays | of_forward(found))
    namespace, device = _backend.namespace(q), _backend.device(q)
    bits = inputs.rounded_bits(arrays)
    out, lse, saved = found.out, found.lse, found.saved
    if _backend.on_host(*arrays.values(), out, lse, *saved.values()):
        out, lse = (_backend.host(x) for x in (out, lse))
        saved = {name: _backend.host(x) for name, x in saved.items()}
        check_bases(saved, lse, forward.recipe)
        check_belonging(bits, out, lse, forward)
    return BackwardInputs(
        **bits,
        out=inputs.float32_bits(inputs.no_gradient(out)),
        lse=inputs.float32_bits(inputs.no_gradient(lse)),
        sink=inputs.sink_bits(found.sink),
        saved={name: inputs.float32_bits(inputs.no_gradient(x)) for name, x in saved.items()},
        namespace=namespace,
        device=device,
    )


def of_forward(found: KernelResults) -> dict[str, Array]:
    """The arrays of a forward by the names that messages have."""
    arrays = {"forward.out": found.out, "forward.lse": found.lse}
    arrays |= {f"forward.saved[{name!r}]": x for name, x in found.saved.items()}
    return arrays if found.sink is None else arrays | {"forward.sink": found.sink}
