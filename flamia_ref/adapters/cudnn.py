"""cuDNN's attention through its front end: bfloat16, FP8 with a scale a tensor, and MXFP8; forward and backward.

One graph a document. `mxfp8` works in stages and takes the operand bytes of the pack, payloads and tiled scales, as
they are; nothing is quantized again. cuDNN chooses the kernel: one of its own, or, with
CUDNN_FRONTEND_ENABLE_FROST_ENGINES=1 in the environment, one of the open ones that the front end carries.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from flamia_ref.adapters.adapter import Adapter, Run
from flamia_ref.adapters.cudnn_graphs import Number, Problem, backward, forward
from flamia_ref.adapters.cudnn_session import Session
from flamia_ref.adapters.documents import Document, by_document, mask_of
from flamia_ref.adapters.operands import Operands, backward_payloads, forward_payloads, rows_of
from flamia_ref.adapters.refusal import cuda, library
from flamia_ref.adapters.whole import quantizing
from flamia_ref.kernels import Staged
from flamia_ref.packing import Mask

Array = np.ndarray[Any, Any]
Window = tuple[int | None, int | None] | None

_HERE = "flamia_ref.adapters.cudnn"
_INSTALL = "pip install nvidia-cudnn-frontend nvidia-cudnn-cu13 torch"
_E4M3_LARGEST = 448.0
_SHARED: dict[str, Any] = {
    "backward": True,
    "package": "nvidia-cudnn-frontend",
    "checked": "1.32.0",
}

ADAPTERS = (
    Adapter(
        kernel=f"{_HERE}:bf16",
        runs="graph.sdpa and sdpa_backward",
        devices="compute capability 8.0 or more",
        recipes=("bf16-fa4",),
        gives=("lse", "dq", "dk", "dv", "dsink"),
        limits="one graph a document",
        ran=(
            Run(
                device="NVIDIA H200",
                date="2026-11-30",
                versions="front end 1.32.0, cuDNN of torch 2.11.0",
                seen="by `bf16-fa4`, another kernel's steps: 1 of 6 smoke cases inside, 3 outside, 2 refused "
                "(documents of one token)",
            ),
        ),
        **_SHARED,
    ),
    Adapter(
        kernel=f"{_HERE}:fp8",
        runs="graph.sdpa_fp8 and sdpa_fp8_backward",
        devices="compute capability 9.0 or more",
        recipes=(),
        gives=("lse", "dq", "dk", "dv"),
        limits="the adapter quantizes, 448 over the largest magnitude of the tensor; dP is scaled by a first run",
        ran=(
            Run(
                device="NVIDIA H200",
                date="2026-11-30",
                versions="front end 1.32.0, cuDNN of torch 2.11.0",
                seen="refused by cuDNN in all cases: FP8 here is for Blackwell",
            ),
        ),
        **_SHARED,
    ),
    Adapter(
        kernel=f"{_HERE}:mxfp8",
        runs="graph.sdpa_mxfp8 and sdpa_mxfp8_backward, on the pack's payloads and tiled scales",
        devices="compute capability 10.0 to 10.9, cuDNN 9.21 or more but 9.23.0 and 9.23.1",
        recipes=("cudnn-mxfp8",),
        gives=("lse", "dq", "dk", "dv", "dsink"),
        limits="works in stages; cuDNN may refuse lengths that are no multiple of 128",
        **_SHARED,
    ),
    Adapter(
        kernel=f"{_HERE}:mxfp8_whole",
        runs="the same from bfloat16: this package quantizes first, for suites that have no pack",
        devices="as mxfp8",
        recipes=("cudnn-mxfp8",),
        gives=("lse", "dq", "dk", "dv"),
        limits="as mxfp8",
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
    sink: Array | None = None,
    dout: Array | None = None,
) -> dict[str, Array]:
    """Attention in bfloat16. Shapes and errors as of the protocol."""
    session = _session(f"{_HERE}:bf16", least=(8, 0))
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)

    def of(document: Document) -> Mapping[str, Array]:
        problem = _problem(mask, document, softmax_scale, sink=sink is not None)
        given = {name: session.put(document[name]) for name in "qkv"} | session.sink(sink)
        results = session.run(forward, Number.BF16, problem, given)
        if dout is not None:
            given |= {"dO": session.put(document["dout"]), "o": results["o"]}
            given["stats"] = results["stats"]
            results |= session.run(backward, Number.BF16, problem, given)
        return session.named(results)

    tensors = {"q": q, "k": k, "v": v, "dout": dout}
    gives = _gives(gradients=dout is not None, sink=sink is not None)
    return by_document(mask, tensors, of, gives=gives)


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
    dout: Array | None = None,
) -> dict[str, Array]:
    """Attention in FP8 with a scale a tensor, which the adapter chooses from the tensor itself."""
    session = _session(f"{_HERE}:fp8", least=(9, 0))
    torch = session.torch
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)
    tensors = {"q": q, "k": k, "v": v, "dout": dout}
    # One scale for all documents, as libraries have it: this is what couples them.
    scales = {name: _scale(x) for name, x in tensors.items() if x is not None}

    def of(document: Document) -> Mapping[str, Array]:
        problem = _problem(mask, document, softmax_scale)
        inputs = [name for name, x in tensors.items() if x is not None]
        codes = {
            name: (session.put(document[name]).float() * scales[name]).to(torch.float8_e4m3fn)
            for name in inputs
        }
        given = {name: codes[name] for name in "qkv"}
        given |= {f"descale_{name}": session.number(1.0 / scales[name]) for name in "qkv"}
        # P is at most 1, so 448 is its scale; O and the gradients stay in bfloat16, unscaled.
        given |= {"scale_s": session.number(_E4M3_LARGEST), "scale_o": session.number(1.0)}
        given["descale_s"] = session.number(1.0 / _E4M3_LARGEST)
        results = session.run(forward, Number.FP8, problem, given)
        if dout is not None:
            given |= {"dO": codes["dout"], "o": results["o"], "stats": results["stats"]}
            given |= {"descale_dO": session.number(1.0 / scales["dout"])}
            names = ("descale_o", "scale_dQ", "scale_dK", "scale_dV", "scale_dP", "descale_dP")
            given |= {name: session.number(1.0) for name in names}
            first = session.run(backward, Number.FP8, problem, given)
            largest = float(first["amax_dp"].item())
            scale = _E4M3_LARGEST / largest if largest > 0 else 1.0
            given |= {"scale_dP": session.number(scale), "descale_dP": session.number(1.0 / scale)}
            results |= session.run(backward, Number.FP8, problem, given)
        return session.named(results)

    return by_document(mask, tensors, of, gives=_gives(gradients=dout is not None, sink=False))


def _mxfp8_forward(
    operands: Mapping[str, Any],
    *,
    cu_seqlens: Array,
    causal: bool,
    softmax_scale: float,
    cu_seqlens_k: Array | None = None,
    alignment: str = "bottom_right",
    window: Window = None,
    sink: Array | None = None,
) -> dict[str, Array]:
    """The forward from the operands of a pack."""
    kernel = f"{_HERE}:mxfp8"
    session = _session(kernel, least=(10, 0), most=(10, 9))
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)

    def of(document: Document) -> Mapping[str, Array]:
        problem = _problem(mask, document, softmax_scale, sink=sink is not None)
        payloads = forward_payloads(Operands(given=operands, kernel=kernel), mask, document)
        given = session.payloads(payloads) | session.sink(sink)
        return session.named(session.run(forward, Number.MXFP8, problem, given))

    gives = ("out", "lse")
    return by_document(mask, _inputs(operands, kernel), of, gives=gives)


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
    window: Window = None,
    sink: Array | None = None,
) -> dict[str, Array]:
    """The backward from the operands, the out and the LSE of a pack."""
    kernel = f"{_HERE}:mxfp8"
    session = _session(kernel, least=(10, 0), most=(10, 9))
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)

    def of(document: Document) -> Mapping[str, Array]:
        problem = _problem(mask, document, softmax_scale, sink=sink is not None)
        payloads = backward_payloads(Operands(given=operands, kernel=kernel), mask, document)
        rows = rows_of(mask.queries, document.index)
        given = session.payloads(payloads) | session.sink(sink)
        given |= {"o_f16": session.put(out[rows]), "dO_f16": session.put(dout[rows])}
        given["stats"] = session.put(lse[:, rows])[None, :, :, None]
        return session.named(session.run(backward, Number.MXFP8, problem, given))

    gives = ("dq", "dk", "dv") if sink is None else ("dq", "dk", "dv", "dsink")
    return by_document(mask, _inputs(operands, kernel), of, gives=gives)


mxfp8 = Staged(forward=_mxfp8_forward, backward=_mxfp8_backward, name=f"{_HERE}:mxfp8")
"""MXFP8 from the operands of a pack, in stages."""

mxfp8_whole = quantizing(mxfp8, "cudnn-mxfp8", name=f"{_HERE}:mxfp8_whole")
"""MXFP8 from bfloat16: this package quantizes, cuDNN does the rest."""


def _inputs(operands: Mapping[str, Any], kernel: str) -> dict[str, Array | None]:
    """Arrays with the shapes of q, k and v, for the documents."""
    whole = Operands(given=operands, kernel=kernel)
    return {name: whole.plain(name, slice(None)) for name in "qkv"}


def _gives(*, gradients: bool, sink: bool) -> tuple[str, ...]:
    names = ("out", "lse", "dq", "dk", "dv") if gradients else ("out", "lse")
    return (*names, "dsink") if gradients and sink else names


def _problem(mask: Mask, document: Document, scale: float, *, sink: bool = False) -> Problem:
    heads, channels = document["q"].shape[1:]
    counts = (heads, document["k"].shape[1])
    return Problem.of(mask, document.index, heads=counts, channels=channels, scale=scale, sink=sink)


def _scale(x: Array) -> float:
    finite = np.abs(x.astype(np.float32))
    largest = float(finite.max(initial=0.0))
    return _E4M3_LARGEST / largest if 0 < largest < np.inf else 1.0


@cache
def _session(kernel: str, *, least: tuple[int, int], most: tuple[int, int] = (99, 9)) -> Session:
    torch = library("torch", kernel=kernel, install=_INSTALL)
    device = cuda(torch, kernel=kernel, least=least, most=most)
    # After torch, whose cuDNN the front end then finds.
    return Session(kernel, torch, library("cudnn", kernel=kernel, install=_INSTALL), device)
