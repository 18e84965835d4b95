"""The simulator behind the kernel protocol, on JAX and on numpy.

``flamia-ref golden check PACK --kernel flamia_ref.golden.simulator:jax_kernel`` checks that the
compiled simulator gives the bits of the pack.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref import _backend

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

DEFAULT_RECIPE = "flamia-mxfp8-folded"


def numpy_kernel(q: Any, k: Any, v: Any, **keywords: Any) -> dict[str, Any]:
    """Run `flamia_ref.attention.forward` in numpy. Keywords: those of the kernel protocol."""
    return _run(q, k, v, **keywords)


def jax_kernel(q: Any, k: Any, v: Any, **keywords: Any) -> dict[str, Any]:
    """Run `flamia_ref.attention.forward` in JAX. Keywords: those of the kernel protocol.

    Raises ImportError where JAX is not installed.
    """
    try:
        import jax.numpy as jnp
    except ImportError as error:
        raise ImportError("this kernel needs JAX: pip install 'flamia-ref[jax]'") from error
    return _run(*(_backend.put(np.asarray(x), jnp) for x in (q, k, v)), **keywords)


def _run(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any,
    causal: bool,
    softmax_scale: float,
    recipe: str = DEFAULT_RECIPE,
    recipe_json: str | None = None,
    trace: Sequence[str] = (),
) -> dict[str, Any]:
    from flamia_ref.attention import forward

    result = forward(
        q,
        k,
        v,
        _recipe(recipe, recipe_json),
        cu_seqlens=np.asarray(cu_seqlens),
        causal=causal,
        softmax_scale=softmax_scale,
        trace=tuple(trace),
    )
    return {**result.trace, "out": result.out, "lse": result.lse}


def _recipe(name: str, text: str | None) -> "Recipe":
    from flamia_ref.attention import RECIPES, Recipe

    return RECIPES[name] if text is None else Recipe.from_json(text)
