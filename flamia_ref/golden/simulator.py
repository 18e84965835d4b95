"""The simulator behind the kernel protocol, on JAX and on numpy.

``flamia-ref golden check PACK --kernel flamia_ref.golden.simulator:jax_kernel`` checks that the
compiled simulator gives the bits of the pack.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref import _backend
from flamia_ref.golden.dataflow import dataflow

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

DEFAULT_RECIPE = "flamia-mxfp8-folded"


def numpy_kernel(q: Any, k: Any, v: Any, **keywords: Any) -> dict[str, Any]:
    """Run `flamia_ref.attention` in numpy, with `dout` both passes. Keywords: the kernel protocol's."""
    return _run(np, q, k, v, **keywords)


def jax_kernel(q: Any, k: Any, v: Any, **keywords: Any) -> dict[str, Any]:
    """Run `flamia_ref.attention` in JAX, with `dout` both passes. Keywords: the kernel protocol's.

    Raises ImportError where JAX is not installed.
    """
    try:
        import jax.numpy as jnp
    except ImportError as error:
        raise ImportError("this kernel needs JAX: pip install 'flamia-ref[jax]'") from error
    return _run(jnp, q, k, v, **keywords)


def _run(
    library: ModuleType,
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any,
    causal: bool,
    softmax_scale: float,
    cu_seqlens_k: Any = None,
    alignment: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sink: Any = None,
    dout: Any = None,
    recipe: str = DEFAULT_RECIPE,
    recipe_json: str | None = None,
    trace: Sequence[str] = (),
) -> dict[str, Any]:
    from flamia_ref.attention import backward, forward

    chosen = _recipe(recipe, recipe_json)
    later = set(dataflow(chosen).trace(backward=True))
    q, k, v = (_backend.put(np.asarray(x), library) for x in (q, k, v))
    if sink is not None:
        sink = _backend.put(np.asarray(sink, np.float32), library)
    ahead = forward(
        q,
        k,
        v,
        chosen,
        cu_seqlens=np.asarray(cu_seqlens),
        causal=causal,
        softmax_scale=softmax_scale,
        cu_seqlens_k=None if cu_seqlens_k is None else np.asarray(cu_seqlens_k),
        alignment=alignment,
        window=window,
        softcap=softcap,
        sink=sink,
        trace=[name for name in trace if name not in later],
    )
    results = {**ahead.trace, "out": ahead.out, "lse": ahead.lse}
    if dout is None or not chosen.has_backward:
        return results
    dout = _backend.put(np.asarray(dout), library)
    back = backward(q, k, v, dout, ahead, trace=[name for name in trace if name in later])
    results |= {**back.trace, "dq": back.dq, "dk": back.dk, "dv": back.dv}
    return results if back.dsink is None else results | {"dsink": back.dsink}


def _recipe(name: str, text: str | None) -> "Recipe":
    from flamia_ref.attention import RECIPES, Recipe

    return RECIPES[name] if text is None else Recipe.from_json(text)
