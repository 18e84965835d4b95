"""Attention by a recipe as a function that JAX differentiates with the recipe's own backward."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.attention.backward_pass import backward
from flamia_ref.attention.forward_pass import forward
from flamia_ref.attention.inputs import chosen_recipe
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.results import Forward


def attention(
    q: Any,
    k: Any,
    v: Any,
    recipe: Recipe | str,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
) -> Array:
    """out of `attention.forward`, in the dtype of `q`, differentiable in q, k, v and the sink.

    Under JAX the gradient is `attention.backward` of the same recipe, in the dtypes of q, k and v; a float32 cotangent
    is rounded to the recipe's input format as any input. Arguments and errors are those of `forward`. numpy arrays give
    a numpy array. Only first derivatives exist.

    Under a caller's own `jax.jit` each pair of tiles becomes a part of the program: compiling takes about a minute for
    500 tokens of a head and two for 1000. Longer inputs are for `jax.grad` without `jit`, which compiles nothing new.
    """

    def run(q: Array, k: Array, v: Array, sink: Array | None) -> Forward:
        return forward(
            q,
            k,
            v,
            recipe,
            cu_seqlens=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            causal=causal,
            alignment=alignment,
            window=window,
            softmax_scale=softmax_scale,
            softcap=softcap,
            sink=sink,
        )

    if not _backend.uses_jax(q, k, v):
        return _cast(run(q, k, v, sink).out, q.dtype)
    import jax

    @jax.custom_vjp
    def out(q: Array, k: Array, v: Array, sink: Array | None) -> Array:
        return _cast(run(q, k, v, sink).out, q.dtype)

    def out_forward(q: Array, k: Array, v: Array, sink: Array | None) -> tuple[Array, Any]:
        _ = chosen_recipe(
            recipe
        ).backward  # one without a backward is refused before its forward is computed
        result = run(q, k, v, sink)
        return _cast(result.out, q.dtype), (q, k, v, result)

    def out_backward(residuals: Any, dout: Array) -> tuple[Array, Array, Array, Array | None]:
        q, k, v, result = residuals
        gradients = backward(q, k, v, dout, result)
        return (
            _cast(gradients.dq, q.dtype),
            _cast(gradients.dk, k.dtype),
            _cast(gradients.dv, v.dtype),
            gradients.dsink,
        )

    out.defvjp(out_forward, out_backward)
    return out(q, k, v, sink)


def _cast(x: Array, dtype: Any) -> Array:
    """float32 values of the output format in `dtype`, subnormals too."""
    if np.dtype(dtype) == np.float32:
        return x
    return _to_bfloat16(x)


@_backend.jit
def _to_bfloat16(x: Array) -> Array:
    codes = (_backend.bits(x) >> np.uint32(16)).astype(np.uint16)
    return _backend.from_bits(codes, ml_dtypes.bfloat16)
