"""SageAttention3: the NVFP4 forward of `sageattn3`, compute capability 12.0, one call a document.

It subtracts means, of K over the document and of Q over 128 tokens, and quantizes itself. It takes no softmax scale: it
uses 1 / sqrt(head_dim). It gives no LSE, and packs of `sage3-nvfp4` ask for none. That recipe's mask is the exact one;
the kernel's causal mask is not (https://github.com/thu-ml/SageAttention/issues/340), nor are its keys past the end of a
document whose length is no multiple of 32 masked in their places: such cases are meant to fail.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flamia_ref.adapters.adapter import Adapter
from flamia_ref.adapters.documents import Document, by_document, mask_of
from flamia_ref.adapters.refusal import Refused, cuda, library, plain
from flamia_ref.adapters.tensors import to_numpy, to_torch

Array = np.ndarray[Any, Any]

_HERE = "flamia_ref.adapters.sage_attention_3"
_INSTALL = "pip install ./sageattention3_blackwell from https://github.com/thu-ml/SageAttention"

ADAPTERS = (
    Adapter(
        kernel=f"{_HERE}:nvfp4",
        runs="sageattn3_blackwell",
        devices="compute capability 12.0",
        recipes=("sage3-nvfp4",),
        backward=False,
        gives=(),
        package="https://github.com/thu-ml/SageAttention, sageattention3_blackwell",
        checked="",
        limits="head_dim below 256, softmax_scale 1 / sqrt(head_dim) only; its signature was read in the repository at "
        "27b740f, there is no wheel",
    ),
)


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
    """The forward. Shapes and errors as of the protocol."""
    kernel = f"{_HERE}:nvfp4"
    torch = library("torch", kernel=kernel, install=_INSTALL)
    device = cuda(torch, kernel=kernel, least=(12, 0), most=(12, 1))
    module = library("sageattn3", kernel=kernel, install=_INSTALL)
    channels = q.shape[2]
    if channels >= 256:
        # There it would fall back to PyTorch's attention, which is not what is asked for.
        raise Refused(kernel, f"takes a head_dim below 256, and the case has {channels}")
    if softmax_scale != 1 / math.sqrt(channels):
        raise Refused(kernel, f"takes no softmax_scale but 1 / sqrt({channels})")
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, alignment=alignment)
    plain(mask, kernel=kernel)
    group = q.shape[1] // k.shape[1]

    def of(document: Document) -> Mapping[str, Array]:
        inputs = [to_torch(torch, document[x], device).transpose(0, 1)[None] for x in "qkv"]
        inputs[1:] = [x.repeat_interleave(group, 1) for x in inputs[1:]]
        # The library changes k in place.
        out = module.sageattn3_blackwell(*(x.contiguous() for x in inputs), is_causal=causal)
        return {"out": to_numpy(torch, out[0].transpose(0, 1))}

    return by_document(mask, {"q": q, "k": k, "v": v}, of, gives=("out",))
