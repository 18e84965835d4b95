"""Transformer Engine's fused attention: bfloat16 over packed documents, and MXFP8 from the operand bytes of a pack.

Both are cuDNN's kernels, as Transformer Engine calls them; they are called by its own wrappers, so that the backend is
chosen by an argument and not by the environment, and the LSE is there.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from flamia_ref.adapters.adapter import Adapter
from flamia_ref.adapters.documents import Document, by_document, mask_of
from flamia_ref.adapters.operands import (
    Operands,
    Payload,
    backward_payloads,
    forward_payloads,
    rows_of,
)
from flamia_ref.adapters.refusal import Refused, cuda, library, plain
from flamia_ref.adapters.tensors import to_numpy, to_torch
from flamia_ref.kernels import Staged
from flamia_ref.packing import Mask

Array = np.ndarray[Any, Any]

_HERE = "flamia_ref.adapters.transformer_engine"
_INSTALL = "pip install --no-build-isolation transformer_engine[pytorch]"
_MODULE = "transformer_engine.pytorch.cpp_extensions.fused_attn"
_ROWS = 128
_SHARED: dict[str, Any] = {
    "backward": True,
    "gives": ("lse", "dq", "dk", "dv"),
    "package": "transformer_engine",
    "checked": "2.20.2",
}

ADAPTERS = (
    Adapter(
        kernel=f"{_HERE}:bf16",
        runs="fused_attn_fwd and fused_attn_bwd, thd, backend F16_arbitrary_seqlen",
        devices="compute capability 8.0 or more",
        recipes=("bf16-fa4",),
        limits="one call for all documents; empty ones need cuDNN 9.25 or more",
        **_SHARED,
    ),
    Adapter(
        kernel=f"{_HERE}:mxfp8",
        runs="the same, bshd, backend FP8, on MXFP8 tensors made of the pack's payloads and tiled scales",
        devices="compute capability 10.0 to 10.9, cuDNN 9.21 or more but 9.23.0 and 9.23.1",
        recipes=("cudnn-mxfp8",),
        limits="works in stages, one call a document; lengths are multiples of 128",
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
    dout: Array | None = None,
) -> dict[str, Array]:
    """Attention in bfloat16. Shapes and errors as of the protocol."""
    kernel = f"{_HERE}:bf16"
    torch = library("torch", kernel=kernel, install=_INSTALL)
    device = cuda(torch, kernel=kernel, least=(8, 0))
    fused = library(_MODULE, kernel=kernel, install=_INSTALL)
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, alignment=alignment)
    plain(mask, kernel=kernel)
    offsets = [
        torch.tensor(documents.offsets, dtype=torch.int32, device=device)
        for documents in (mask.queries, mask.keys)
    ]
    lengths = (max(mask.queries.lengths), max(mask.keys.lengths))
    bottom = mask.queries.lengths != mask.keys.lengths
    settings: dict[str, Any] = {
        "fused_attention_backend": fused.FusedAttnBackend["F16_arbitrary_seqlen"],
        "cu_seqlens_q_padded": offsets[0],
        "cu_seqlens_kv_padded": offsets[1],
        "attn_scale": softmax_scale,
        "qkv_layout": "thd_thd_thd",
        "o_format": "thd",
        "attn_mask_type": ("padding_causal_bottom_right" if bottom else "padding_causal")
        if causal
        else "padding",
        "window_size": (-1, 0) if causal else (-1, -1),
    }
    inputs = [to_torch(torch, x, device) for x in (q, k, v)]
    out, saved = fused.fused_attn_fwd(
        True, *lengths, *offsets, *inputs, torch.bfloat16, **settings
    )[:2]
    results = {"out": out, "lse": _packed(saved[0], mask, tokens=len(q))}
    if dout is not None:
        gradient = to_torch(torch, dout, device)
        found = fused.fused_attn_bwd(
            *lengths,
            *offsets,
            *inputs,
            out,
            gradient,
            torch.bfloat16,
            saved,
            do_format="thd",
            dqkv_layout="thd_thd_thd",
            deterministic=True,
            **settings,
        )
        results |= dict(zip(("dq", "dk", "dv"), found[:3], strict=True))
    return {name: to_numpy(torch, x) for name, x in results.items()}


def _packed(stats: Any, mask: Mask, *, tokens: int) -> Any:
    """The LSE [heads, tokens]: newer cuDNNs give [tokens, heads, 1], older ones [documents, heads, rows, 1]."""
    if stats.ndim == 3:
        return stats[:tokens, :, 0].T
    found = stats.new_empty((stats.shape[1], tokens))
    for document, rows in enumerate(mask.queries):
        found[:, rows] = stats[document, :, : rows.stop - rows.start, 0]
    return found


def _mxfp8_forward(
    operands: Mapping[str, Any],
    *,
    cu_seqlens: Array,
    causal: bool,
    softmax_scale: float,
    cu_seqlens_k: Array | None = None,
    alignment: str = "bottom_right",
) -> dict[str, Array]:
    """The forward from the operands of a pack."""
    one = _Mxfp8(f"{_HERE}:mxfp8")
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, alignment=alignment)
    one.check(mask)

    def of(document: Document) -> Mapping[str, Array]:
        given = Operands(given=operands, kernel=one.kernel)
        payloads = forward_payloads(given, mask, document)
        q, k = (one.tensor(row=payloads[name]) for name in "qk")
        v = one.tensor(column=payloads["v"])
        out, saved = one.fused.fused_attn_fwd(
            True,
            *one.lengths(document),
            q,
            k,
            v,
            one.torch.bfloat16,
            **one.settings(mask, softmax_scale),
        )[:2]
        return {
            "out": to_numpy(one.torch, out[0]),
            "lse": to_numpy(one.torch, saved[0][0, :, :, 0]),
        }

    return by_document(mask, _inputs(operands, one.kernel), of, gives=("out", "lse"))


def _mxfp8_backward(
    operands: Mapping[str, Any],
    *,
    cu_seqlens: Array,
    causal: bool,
    softmax_scale: float,
    out: Array,
    lse: Array,
    dout: Array,
    cu_seqlens_k: Array | None = None,
    alignment: str = "bottom_right",
) -> dict[str, Array]:
    """The backward from the operands, the out and the LSE of a pack."""
    one = _Mxfp8(f"{_HERE}:mxfp8")
    torch = one.torch
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, alignment=alignment)
    one.check(mask)

    def of(document: Document) -> Mapping[str, Array]:
        given = Operands(given=operands, kernel=one.kernel)
        payloads = backward_payloads(given, mask, document)
        q, k, gradient = (
            one.tensor(row=payloads[name], column=payloads[f"{name}_T"])
            for name in ("q", "k", "dO")
        )
        v = one.tensor(row=payloads["v"])
        rows = rows_of(mask.queries, document.index)
        half = [to_torch(torch, x[rows], one.device)[None] for x in (out, dout)]
        stats = to_torch(torch, lse[:, rows], one.device)[None, :, :, None]
        # Without dropout the state of the random numbers is not used; the wrapper wants one.
        random = torch.zeros(2, dtype=torch.int64, device=one.device)
        found = one.fused.fused_attn_bwd(
            *one.lengths(document),
            q,
            k,
            v,
            half[0],
            gradient,
            torch.bfloat16,
            [stats, random, half[1]],
            do_format="bshd",
            dqkv_layout="bshd_bshd_bshd",
            do_scale_inv_format="bhsd",
            **one.settings(mask, softmax_scale),
        )
        return {
            name: to_numpy(torch, x[0])
            for name, x in zip(("dq", "dk", "dv"), found[:3], strict=True)
        }

    return by_document(mask, _inputs(operands, one.kernel), of, gives=("dq", "dk", "dv"))


mxfp8 = Staged(forward=_mxfp8_forward, backward=_mxfp8_backward, name=f"{_HERE}:mxfp8")
"""MXFP8 from the operands of a pack, in stages."""


def _inputs(operands: Mapping[str, Any], kernel: str) -> dict[str, Array | None]:
    whole = Operands(given=operands, kernel=kernel)
    return {name: whole.plain(name, slice(None)) for name in "qkv"}


class _Mxfp8:
    """Transformer Engine and the device that it runs on."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.torch = library("torch", kernel=kernel, install=_INSTALL)
        self.device = cuda(self.torch, kernel=kernel, least=(10, 0), most=(10, 9))
        self.fused = library(_MODULE, kernel=kernel, install=_INSTALL)
        place = "transformer_engine.pytorch.tensor.mxfp8_tensor"
        self.tensors = library(place, kernel=kernel, install=_INSTALL)
        place = "transformer_engine.pytorch.constants"
        self.element = library(place, kernel=kernel, install=_INSTALL).DType.kFloat8E4M3

    def check(self, mask: Mask) -> None:
        """Refuse what Transformer Engine refuses: windows, and lengths that are no multiple of 128."""
        plain(mask, kernel=self.kernel)
        lengths = {*mask.queries.lengths, *mask.keys.lengths}
        if any(length % _ROWS for length in lengths):
            raise Refused(self.kernel, "takes documents whose lengths are multiples of 128 only")

    def tensor(self, *, row: Payload | None = None, column: Payload | None = None) -> Any:
        """A tensor [1, rows, heads, channels] of one payload or of both, with scales as tensor cores load them."""
        rows, heads, channels = (row or column).codes.shape  # type: ignore[union-attr]
        shape = (1, rows, heads, channels)
        across = -(-channels // 32)
        across = -(-across // 4) * 4
        planes = -(-channels // 128) * 128

        def put(payload: Payload | None, last: int) -> tuple[Any, Any]:
            if payload is None:
                return None, None
            codes = to_torch(self.torch, payload.codes, self.device).reshape(shape)
            return codes, to_torch(self.torch, payload.scales, self.device).reshape(-1, last)

        row_data, row_scales = put(row, across)
        column_data, column_scales = put(column, planes)
        quantizer = self.tensors.MXFP8Quantizer(
            self.element, rowwise=row is not None, columnwise=column is not None
        )
        return self.tensors.MXFP8Tensor(
            shape=shape,
            dtype=self.torch.bfloat16,
            rowwise_data=row_data,
            rowwise_scale_inv=row_scales,
            columnwise_data=column_data,
            columnwise_scale_inv=column_scales,
            fp8_dtype=self.element,
            quantizer=quantizer,
            with_gemm_swizzled_scales=True,
            requires_grad=False,
        )

    def lengths(self, document: Document) -> tuple[Any, ...]:
        """The longest lengths and the offsets of one document."""
        counts = (document.queries, document.keys)
        offsets = (
            self.torch.tensor([0, n], dtype=self.torch.int32, device=self.device) for n in counts
        )
        return (*counts, *offsets)

    def settings(self, mask: Mask, scale: float) -> dict[str, Any]:
        """What the forward and the backward are told alike."""
        bottom = mask.queries.lengths != mask.keys.lengths
        return {
            "fused_attention_backend": self.fused.FusedAttnBackend["FP8"],
            "attn_scale": scale,
            "qkv_layout": "bshd_bshd_bshd",
            "o_format": "bshd",
            "qkv_scale_inv_format": "bhsd",
            "attn_mask_type": ("causal_bottom_right" if bottom else "causal")
            if mask.causal
            else "no_mask",
            "window_size": (-1, 0) if mask.causal else (-1, -1),
        }
