"""FlashAttention-4 (`flash_attn.cute`): bfloat16 forward and backward, FP8 forward with a scale a head and document.

One call for all packed documents.
"""

from typing import Any

import numpy as np

from flamia_ref.adapters.adapter import Adapter
from flamia_ref.adapters.documents import mask_of
from flamia_ref.adapters.refusal import Refused, cuda, library
from flamia_ref.adapters.tensors import to_numpy, to_torch
from flamia_ref.packing import Mask

Array = np.ndarray[Any, Any]
Window = tuple[int | None, int | None] | None

_HERE = "flamia_ref.adapters.flash_attention_4"
_INSTALL = "pip install --pre flash-attn-4"
_SHARED: dict[str, Any] = {"package": "flash-attn-4", "checked": "4.0.0b36"}

ADAPTERS = (
    Adapter(
        kernel=f"{_HERE}:bf16",
        runs="flash_attn_varlen_func; the backward by autograd, deterministic",
        devices="compute capability 9.0 or more",
        recipes=("bf16-fa4",),
        backward=True,
        gives=("lse", "dq", "dk", "dv"),
        limits="on a Hopper GPU the tiles are not those of the recipe",
        **_SHARED,
    ),
    Adapter(
        kernel=f"{_HERE}:fp8",
        runs="_flash_attn_fwd in e4m3 with descales [documents, kv_heads]",
        devices="compute capability 10.0 to 11.0",
        recipes=("fp8-fa4",),
        backward=False,
        gives=("lse",),
        limits="the adapter quantizes, as the recipe does: the largest magnitude of the head in the document over 448",
        **_SHARED,
    ),
)


def bf16(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens: Array,
    causal: bool,
    softmax_scale: float,
    cu_seqlens_k: Array | None = None,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    dout: Array | None = None,
) -> dict[str, Array]:
    """Attention in bfloat16. Shapes and errors as of the protocol."""
    kernel = f"{_HERE}:bf16"
    torch = library("torch", kernel=kernel, install=_INSTALL)
    device = cuda(torch, kernel=kernel, least=(9, 0))
    cute = library("flash_attn.cute", kernel=kernel, install=_INSTALL)
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)
    _check(mask, kernel=kernel)
    inputs = [to_torch(torch, x, device).requires_grad_(dout is not None) for x in (q, k, v)]
    out, lse = cute.flash_attn_varlen_func(
        *inputs,
        **_lengths(torch, mask, device),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=mask.window,
        softcap=softcap or 0.0,
        deterministic=True,
        return_lse=True,
    )
    results = {"out": out, "lse": lse}
    if dout is not None:
        found = torch.autograd.grad(out, inputs, to_torch(torch, dout, device))
        results |= dict(zip(("dq", "dk", "dv"), found, strict=True))
    return {name: to_numpy(torch, x) for name, x in results.items()}


def fp8(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens: Array,
    causal: bool,
    softmax_scale: float,
    cu_seqlens_k: Array | None = None,
    alignment: str = "bottom_right",
    window: Window = None,
) -> dict[str, Array]:
    """The forward in e4m3. Shapes and errors as of the protocol."""
    kernel = f"{_HERE}:fp8"
    torch = library("torch", kernel=kernel, install=_INSTALL)
    device = cuda(torch, kernel=kernel, least=(10, 0), most=(11, 0))
    interface = library("flash_attn.cute.interface", kernel=kernel, install=_INSTALL)
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)
    _check(mask, kernel=kernel)
    kv_heads = k.shape[1]
    payloads, descales = [], []
    for x, documents in ((q, mask.queries), (k, mask.keys), (v, mask.keys)):
        # A query head has the scale of its key/value head: there is one descale for the group.
        grouped = to_torch(torch, x, device).float().unflatten(1, (kv_heads, -1))
        scales = torch.ones(len(documents), kv_heads, device=device)
        for document, rows in enumerate(documents):
            if rows.stop > rows.start:
                largest = grouped[rows].abs().amax((0, 2, 3))
                scales[document] = torch.where(largest == 0, 1.0, largest / 448.0)
                grouped[rows] /= scales[document][None, :, None, None]
        payloads.append(grouped.flatten(1, 2).to(torch.float8_e4m3fn))
        descales.append(scales)
    results = interface._flash_attn_fwd(
        *payloads,
        **_lengths(torch, mask, device),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size_left=mask.window[0],
        window_size_right=mask.window[1],
        q_descale=descales[0],
        k_descale=descales[1],
        v_descale=descales[2],
        return_lse=True,
    )
    return {"out": to_numpy(torch, results[0]), "lse": to_numpy(torch, results[1])}


def _check(mask: Mask, *, kernel: str) -> None:
    if mask.alignment == "top_left" and mask.bounded and not mask.same_tokens:
        raise Refused(kernel, "aligns its mask at the bottom right, the case at the top left")


def _lengths(torch: Any, mask: Mask, device: Any) -> dict[str, Any]:
    return {
        "cu_seqlens_q": torch.tensor(mask.queries.offsets, dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor(mask.keys.offsets, dtype=torch.int32, device=device),
        "max_seqlen_q": max(mask.queries.lengths),
        "max_seqlen_k": max(mask.keys.lengths),
    }
