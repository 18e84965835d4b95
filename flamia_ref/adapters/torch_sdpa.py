"""PyTorch's scaled_dot_product_attention in bfloat16, by the operators behind it, which give the LSE too.

`bf16` is flash attention, on CUDA or on the CPU; `bf16_efficient` and `bf16_cudnn` are the two others, on CUDA. One
call a document; the backward is autograd's, on the operator's own out and LSE.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from flamia_ref.adapters.adapter import Adapter, Run
from flamia_ref.adapters.documents import Document, by_document, mask_of
from flamia_ref.adapters.refusal import Refused, cuda, library
from flamia_ref.adapters.tensors import to_numpy, to_torch
from flamia_ref.packing import Mask

Array = np.ndarray[Any, Any]
Operator = Callable[..., tuple[Any, Any]]

_HERE = "flamia_ref.adapters.torch_sdpa"
_SHARED: dict[str, Any] = {
    "recipes": ("bf16-fa4",),
    "backward": True,
    "gives": ("lse", "dq", "dk", "dv"),
    "package": "torch",
}

ADAPTERS = (
    Adapter(
        kernel=f"{_HERE}:bf16",
        runs="aten::_scaled_dot_product_flash_attention, on a CPU its twin for CPUs",
        devices="compute capability 8.0 or more; CPU",
        checked="2.13.0",
        limits="on CUDA a causal mask needs as many keys as queries, and there is no window; on a CPU the LSE of "
        "rows that see no key is 0",
        ran=(
            Run(
                device="CPU, x86-64",
                date="2026-11-30",
                versions="torch 2.13.0",
                seen="near float64; outside the envelopes of `bf16-fa4` in 6 of 6 smoke cases, the LSE off by up to "
                "6e-5 where values are about 1",
            ),
            Run(
                device="NVIDIA H200",
                date="2026-11-30",
                versions="torch 2.11.0, CUDA 13.0",
                seen="by `examples/recipes/flash-attention-2-bf16.json`, products judged as `sm90.wgmma.bf16`: in 56 "
                "of the 61 standard cases that it takes out has every bit of the pack (642,930 of 647,040 "
                "elements), in 2 others it is inside; 3 cases with head_dim 128 or 192, whose tiles are others, "
                "or outlying heads are outside. lse is another formula there, 150 of 8,913 elements outside by a "
                "step or two; dk and dv of grouped heads are added in bfloat16 and outside. 22 cases pass whole",
            ),
        ),
        **_SHARED,
    ),
    Adapter(
        kernel=f"{_HERE}:bf16_efficient",
        runs="aten::_scaled_dot_product_efficient_attention",
        devices="compute capability 8.0 or more",
        checked="2.13.0",
        limits="heads of k and v are repeated before the call, and their gradients added up in bfloat16 after it",
        ran=(
            Run(
                device="NVIDIA H200",
                date="2026-11-30",
                versions="torch 2.11.0, CUDA 13.0",
                seen="by `examples/recipes/flash-attention-2-bf16.json`, whose steps are another kernel's: outside in "
                "6 of 6 smoke cases",
            ),
        ),
        **_SHARED,
    ),
    Adapter(
        kernel=f"{_HERE}:bf16_cudnn",
        runs="aten::_scaled_dot_product_cudnn_attention: the cuDNN that PyTorch carries",
        devices="compute capability 8.0 or more",
        checked="2.13.0",
        limits="a causal mask needs as many keys as queries; no window; no document of one token",
        ran=(
            Run(
                device="NVIDIA H200",
                date="2026-11-30",
                versions="torch 2.11.0, CUDA 13.0",
                seen="failed, and once ended the process, on documents of one token, which are refused since; not run "
                "again",
            ),
        ),
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
    window: tuple[int | None, int | None] | None = None,
    dout: Array | None = None,
) -> dict[str, Array]:
    """Flash attention, on CUDA where there is a device, else on the CPU. Shapes and errors as of the protocol."""
    torch = library("torch", kernel=f"{_HERE}:bf16", install="pip install torch")
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)
    if torch.cuda.is_available():
        device = cuda(torch, kernel=f"{_HERE}:bf16", least=(8, 0))
        _by_flag(mask, kernel=f"{_HERE}:bf16")
        operator = partial(_flash, torch)
    else:
        device, operator = torch.device("cpu"), partial(_cpu, torch)
    return _run(torch, device, operator, mask, q, k, v, dout, softmax_scale)


def bf16_efficient(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens: Array,
    causal: bool,
    softmax_scale: float,
    cu_seqlens_k: Array | None = None,
    alignment: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    dout: Array | None = None,
) -> dict[str, Array]:
    """Memory-efficient attention on CUDA. Shapes and errors as of the protocol."""
    kernel = f"{_HERE}:bf16_efficient"
    torch = library("torch", kernel=kernel, install="pip install torch")
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)
    device = cuda(torch, kernel=kernel, least=(8, 0))
    return _run(torch, device, partial(_efficient, torch), mask, q, k, v, dout, softmax_scale)


def bf16_cudnn(
    q: Array,
    k: Array,
    v: Array,
    *,
    cu_seqlens: Array,
    causal: bool,
    softmax_scale: float,
    cu_seqlens_k: Array | None = None,
    alignment: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    dout: Array | None = None,
) -> dict[str, Array]:
    """PyTorch's cuDNN attention on CUDA. Shapes and errors as of the protocol."""
    kernel = f"{_HERE}:bf16_cudnn"
    torch = library("torch", kernel=kernel, install="pip install torch")
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)
    device = cuda(torch, kernel=kernel, least=(8, 0))
    _by_flag(mask, kernel=kernel)
    if 1 in (*mask.queries.lengths, *mask.keys.lengths):
        # One such call raised, and one ended the process.
        raise Refused(kernel, "takes no document of one token")
    return _run(torch, device, partial(_cudnn, torch), mask, q, k, v, dout, softmax_scale)


def _by_flag(mask: Mask, *, kernel: str) -> None:
    """Refuse a mask that `is_causal` cannot say: PyTorch allows it for square problems only."""
    if mask.window != (None, None):
        raise Refused(kernel, f"takes no window, and the case has {mask.window}")
    if mask.causal and mask.queries.lengths != mask.keys.lengths:
        raise Refused(kernel, "takes a causal mask only for as many keys as queries")


def _flash(torch: ModuleType, q: Any, k: Any, v: Any, mask: Mask, _: int, scale: float) -> Any:
    results = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, mask.causal, False, scale=scale
    )
    return results[0], results[1]


def _cudnn(torch: ModuleType, q: Any, k: Any, v: Any, mask: Mask, _: int, scale: float) -> Any:
    results = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, mask.causal, False, scale=scale
    )
    return results[0], results[1].squeeze(-1)


def _cpu(torch: ModuleType, q: Any, k: Any, v: Any, mask: Mask, index: int, scale: float) -> Any:
    square = q.shape[2] == k.shape[2] and mask.window == (None, None)
    by_flag = square or not mask.bounded
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q,
        k,
        v,
        0.0,
        mask.causal and by_flag,
        attn_mask=None if by_flag else _additive(torch, mask, index, q),
        scale=scale,
    )
    return out, lse


def _efficient(
    torch: ModuleType, q: Any, k: Any, v: Any, mask: Mask, index: int, scale: float
) -> Any:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    square = q.shape[2] == k.shape[2] and mask.window == (None, None)
    by_flag = square or not mask.bounded
    bias = None if by_flag else _aligned(torch, _additive(torch, mask, index, q), q.shape[1])
    results = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, mask.causal and by_flag, scale=scale
    )
    return results[0], results[1][:, :, : q.shape[2]]  # the LSE is filled up to 32 rows


def _additive(torch: ModuleType, mask: Mask, index: int, q: Any) -> Any:
    """0 where a pair is visible, else -infinity, [queries, keys] in bfloat16."""
    visible = torch.from_numpy(mask.visible(index)).to(q.device)
    return torch.where(visible, 0.0, -torch.inf).to(q.dtype)


def _aligned(torch: ModuleType, bias: Any, heads: int) -> Any:
    """A bias [1, heads, queries, keys] whose rows start at multiples of 16 bytes, as the kernel wants them."""
    queries, keys = bias.shape
    filled = torch.zeros((queries, -(-keys // 8) * 8), dtype=bias.dtype, device=bias.device)
    filled[:, :keys] = bias
    return filled[:, :keys].expand(1, heads, queries, keys)


def _run(
    torch: ModuleType,
    device: Any,
    operator: Operator,
    mask: Mask,
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None,
    scale: float,
) -> dict[str, Array]:
    gives = ("out", "lse") if dout is None else ("out", "lse", "dq", "dk", "dv")

    def of(document: Document) -> Mapping[str, Array]:
        inputs = [to_torch(torch, document[name], device).requires_grad_() for name in "qkv"]
        batch = [x.transpose(0, 1)[None] for x in inputs]  # [1, heads, rows, head_dim]
        out, lse = operator(*batch, mask, document.index, scale)
        results = {"out": out[0].transpose(0, 1), "lse": lse[0]}
        if dout is not None:
            gradient = to_torch(torch, document["dout"], device)
            found = torch.autograd.grad(results["out"], inputs, gradient)
            results |= dict(zip(("dq", "dk", "dv"), found, strict=True))
        return {name: to_numpy(torch, x) for name, x in results.items()}

    return by_document(mask, {"q": q, "k": k, "v": v, "dout": dout}, of, gives=gives)
