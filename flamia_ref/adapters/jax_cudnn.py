"""`jax.nn.dot_product_attention` in bfloat16: by cuDNN on a GPU, by XLA anywhere. One call a document.

The LSE is the residual that JAX returns on request; the gradients are those of `jax.vjp`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from flamia_ref._errors import line
from flamia_ref.adapters.adapter import Adapter, Run
from flamia_ref.adapters.documents import Document, by_document, mask_of
from flamia_ref.adapters.refusal import Refused, library

Array = np.ndarray[Any, Any]

_HERE = "flamia_ref.adapters.jax_cudnn"
_SHARED: dict[str, Any] = {
    "recipes": ("bf16-fa4",),
    "backward": True,
    "gives": ("lse", "dq", "dk", "dv"),
    "package": "jax",
    "checked": "0.10.2",
}

ADAPTERS = (
    Adapter(
        kernel=f"{_HERE}:bf16",
        runs='jax.nn.dot_product_attention, implementation="cudnn"',
        devices="compute capability 8.0 or more",
        limits="windows and masks that are not square are given as a mask",
        ran=(
            Run(
                device="NVIDIA H200",
                date="2026-11-30",
                versions="jax 0.11.2",
                seen="JAX hands no odd length to cuDNN: the first smoke case, of 75 tokens, failed; such are "
                "refused since, and nothing ran",
            ),
        ),
        **_SHARED,
    ),
    Adapter(
        kernel=f"{_HERE}:bf16_xla",
        runs='jax.nn.dot_product_attention, implementation="xla"',
        devices="any that JAX has",
        limits="the LSE is rounded to bfloat16; rows that see no key give the mean of V",
        ran=(
            Run(
                device="CPU, x86-64",
                date="2026-11-30",
                versions="jax 0.10.2",
                seen="near float64, but for the LSE",
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
    """cuDNN's attention through JAX. Shapes and errors as of the protocol."""
    jax = library("jax", kernel=f"{_HERE}:bf16", install="pip install jax[cuda13]")
    if jax.default_backend() != "gpu":
        raise Refused(f"{_HERE}:bf16", f"needs a GPU, and JAX runs on {jax.default_backend()}")
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)
    try:
        return _run(jax, "cudnn", mask, q, k, v, dout, softmax_scale)
    except (
        NotImplementedError
    ) as error:  # lengths, such as odd ones, that JAX does not hand to cuDNN
        raise Refused(
            f"{_HERE}:bf16", f"is not supported by JAX here: {line(str(error))}"
        ) from error


def bf16_xla(
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
    """What XLA makes of attention, on the CPU too. Shapes and errors as of the protocol."""
    jax = library("jax", kernel=f"{_HERE}:bf16_xla", install="pip install jax")
    mask = mask_of(cu_seqlens, cu_seqlens_k, causal=causal, window=window, alignment=alignment)
    return _run(jax, "xla", mask, q, k, v, dout, softmax_scale)


def _run(
    jax: Any,
    implementation: str,
    mask: Any,
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None,
    scale: float,
) -> dict[str, Array]:
    jnp = jax.numpy
    gives = ("out", "lse") if dout is None else ("out", "lse", "dq", "dk", "dv")

    def of(document: Document) -> Mapping[str, Array]:
        square = document.queries == document.keys and mask.window == (None, None)
        by_flag = square or not mask.bounded
        visible = None if by_flag else jnp.asarray(mask.visible(document.index))[None, None]

        def attention(*inputs: Any) -> Any:
            return jax.nn.dot_product_attention(
                *inputs,
                mask=visible,
                scale=scale,
                is_causal=mask.causal and by_flag,
                implementation=implementation,
            )

        inputs = [jnp.asarray(document[name])[None] for name in "qkv"]
        _, lse = jax.nn.dot_product_attention(
            *inputs,
            mask=visible,
            scale=scale,
            is_causal=mask.causal and by_flag,
            implementation=implementation,
            return_residual=True,
        )
        if dout is None:
            out, gradients = attention(*inputs), ()
        else:
            out, backward = jax.vjp(attention, *inputs)
            gradients = backward(jnp.asarray(document["dout"])[None])
        results = {"out": out, **dict(zip(("dq", "dk", "dv"), gradients, strict=False))}
        found = {name: np.asarray(x)[0] for name, x in results.items()}
        return {**found, "lse": np.asarray(lse, np.float32)[0].T}

    # JAX's function mixes types itself, and fails where a program has asked for none of that.
    with jax.numpy_dtype_promotion("standard"):
        return by_document(mask, {"q": q, "k": k, "v": v, "dout": dout}, of, gives=gives)
