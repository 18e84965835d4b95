"""The simulator on many inputs at once, which are heads of one pass, and what it returns as bits."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _backend
from flamia_ref.attention import Recipe, backward, forward
from flamia_ref.leakage.search.outcomes import bits
from flamia_ref.leakage.search.setting import Setting

Array = NDArray[Any]

TOGETHER = 256
"""Inputs in a pass."""

_WORTH_COMPILING = (
    16384  # inputs from which JAX, where it is there, is quicker with its compilation
)


def simulate(
    recipe: Recipe, setting: Setting, inputs: Mapping[str, Array], *, together: int = TOGETHER
) -> dict[str, Array]:
    """The outputs of each input, as unsigned integers [samples, tokens, heads, channels].

    Args:
        recipe: the recipe, one that is computed here.
        setting: shapes and mask.
        inputs: bfloat16 [tokens, samples, heads, channels] by operand.
        together: samples in one pass, as its heads: heads do not know of each other, unless a scale spans them.
    """
    samples = inputs["q"].shape[1]
    library = "numpy"
    if samples >= _WORTH_COMPILING and importlib.util.find_spec("jax") is not None:
        library = "jax"
    parts = [
        _pass(recipe, setting, {k: x[:, at : at + together] for k, x in inputs.items()}, library)
        for at in range(0, samples, together)
    ]
    return {name: np.concatenate([one[name] for one in parts]) for name in parts[0]}


def spans_heads(recipe: Recipe, setting: Setting, inputs: Mapping[str, Array]) -> bool:
    """Whether heads of one pass change each other's bits: whether the first of some inputs gives others alone."""
    few = {name: x[:, :4] for name, x in inputs.items()}
    beside, alone = simulate(recipe, setting, few), simulate(recipe, setting, few, together=1)
    return any(not np.array_equal(beside[name], alone[name]) for name in alone)


def _pass(
    recipe: Recipe, setting: Setting, inputs: Mapping[str, Array], library: str
) -> dict[str, Array]:
    samples = inputs["q"].shape[1]
    arrays = {
        name: _put(np.ascontiguousarray(x.reshape(len(x), -1, x.shape[-1])), library)
        for name, x in inputs.items()
    }
    mask = setting.mask
    # The values are extreme in part; numpy need not say so.
    with np.errstate(all="ignore"):
        ahead = forward(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            recipe,
            cu_seqlens=setting.cu_seqlens,
            causal=mask.causal,
            window=None if mask.window == (None, None) else mask.window,
            softmax_scale=setting.softmax_scale,
        )
        found: dict[str, Any] = {"out": ahead.out, "lse": ahead.lse}
        if setting.backward:
            back = backward(arrays["q"], arrays["k"], arrays["v"], arrays["dout"], ahead)
            found |= {"dq": back.dq, "dk": back.dk, "dv": back.dv}
    return {name: _split(name, np.asarray(x), samples) for name, x in found.items()}


def _split(name: str, x: Array, samples: int) -> Array:
    """Bits [samples, tokens, heads, channels] of an output of a pass."""
    if name == "lse":
        x = x.T[..., None]
    tokens, heads, channels = x.shape
    unsigned = bits(np.ascontiguousarray(x))
    return np.moveaxis(unsigned.reshape(tokens, samples, heads // samples, channels), 1, 0)


def _put(x: Array, library: str) -> Any:
    if library == "numpy":
        return x
    import jax.numpy

    return _backend.put(x, jax.numpy)
