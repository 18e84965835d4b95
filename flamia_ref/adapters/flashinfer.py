"""FlashInfer's prefill in bfloat16, over packed documents, and its NVFP4 attention for compute capability 12.0."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from flamia_ref.adapters.adapter import Adapter
from flamia_ref.adapters.documents import Document, by_document, mask_of
from flamia_ref.adapters.refusal import Refused, cuda, library, plain
from flamia_ref.adapters.tensors import to_numpy, to_torch

Array = np.ndarray[Any, Any]
Window = tuple[int | None, int | None] | None

_HERE = "flamia_ref.adapters.flashinfer"
_INSTALL = "pip install flashinfer-python"
_WORKSPACE = 128 << 20  # bytes, what FlashInfer recommends
_SHARED: dict[str, Any] = {
    "backward": False,
    "gives": ("lse",),
    "package": "flashinfer-python",
    "checked": "0.7.4",
}

ADAPTERS = (
    Adapter(
        kernel=f"{_HERE}:bf16",
        runs="BatchPrefillWithRaggedKVCacheWrapper, backend auto",
        devices="compute capability 8.0 or more",
        recipes=("bf16-fa4",),
        limits="its kernels are compiled at the first call, which needs nvcc",
        **_SHARED,
    ),
    Adapter(
        kernel=f"{_HERE}:nvfp4",
        runs="nvfp4_attention_sm120_quantize_qkv and nvfp4_attention_sm120_fwd",
        devices="compute capability 12.0",
        recipes=(),
        limits="it subtracts means of Q and K and quantizes itself; one call a document",
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
) -> dict[str, Array]:
    """The forward in bfloat16. Shapes and errors as of the protocol."""
    kernel = f"{_HERE}:bf16"
    torch = library("torch", kernel=kernel, install=_INSTALL)
    device = cuda(torch, kernel=kernel, least=(8, 0))
    prefill = library("flashinfer.prefill", kernel=kernel, install=_INSTALL)
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)
    left, right = mask.window
    if right is not None and not (causal and right == 0):
        raise Refused(kernel, f"bounds a window at its left only, and the case has {mask.window}")
    if mask.bounded and mask.alignment == "top_left" and not mask.same_tokens:
        raise Refused(kernel, "aligns its mask at the bottom right, the case at the top left")
    space = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = prefill.BatchPrefillWithRaggedKVCacheWrapper(space, kv_layout="NHD", backend="auto")
    wrapper.plan(
        qo_indptr=torch.tensor(mask.queries.offsets, dtype=torch.int32, device=device),
        kv_indptr=torch.tensor(mask.keys.offsets, dtype=torch.int32, device=device),
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[2],
        causal=causal,
        sm_scale=softmax_scale,
        window_left=-1 if left is None else left,
        logits_soft_cap=softcap or 0.0,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    inputs = [to_torch(torch, x, device) for x in (q, k, v)]
    out, lse = wrapper.run(*inputs, return_lse=True, lse_base="ln", lse_layout="HN")
    return {"out": to_numpy(torch, out), "lse": to_numpy(torch, lse)}


def nvfp4(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens: Array,
    causal: bool,
    softmax_scale: float,
    cu_seqlens_k: Array | None = None,
    alignment: str = "bottom_right",
) -> dict[str, Array]:
    """The forward in NVFP4, after SageAttention3's recipe. Shapes and errors as of the protocol."""
    kernel = f"{_HERE}:nvfp4"
    torch = library("torch", kernel=kernel, install=_INSTALL)
    device = cuda(torch, kernel=kernel, least=(12, 0), most=(12, 1))
    module = library("flashinfer.nvfp4_attention_sm120", kernel=kernel, install=_INSTALL)
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, alignment=alignment)
    plain(mask, kernel=kernel)

    def of(document: Document) -> Mapping[str, Array]:
        inputs = [to_torch(torch, document[x], device).transpose(0, 1)[None] for x in "qkv"]
        packed = module.nvfp4_attention_sm120_quantize_qkv(*(x.contiguous() for x in inputs))
        out, lse = module.nvfp4_attention_sm120_fwd(
            *packed,
            sm_scale=softmax_scale,
            causal=causal,
            return_lse=True,
            unpadded_k_len=document.keys,
        )
        rows = document.queries  # filled up to 128
        return {
            "out": to_numpy(torch, out[0, :, :rows].transpose(0, 1)),
            "lse": to_numpy(torch, lse[0, :, :rows]),
        }

    return by_document(mask, {"q": q, "k": k, "v": v}, of, gives=("out", "lse"))
