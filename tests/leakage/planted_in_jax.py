"""Attention in plain JAX, forward and backward, each operand quantized on its own, to plant leaks one by one.

It shares nothing with the package. A scale is a power of two from the bits of the largest magnitude of its block.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 32
LOG2_E = 1.4426950408889634

# By use: which block shares a scale, of the operand as it stands in this module: "tok" 1 x 32 along channels, or along
# keys for pairs [queries, keys]; "col" 32 x 1 along tokens, or along queries for pairs; "tile" 32 x 32.
BLOCKS = {"tok": (1, BLOCK), "col": (BLOCK, 1), "tile": (BLOCK, BLOCK)}


def quantized(x: Any, block: tuple[int, int]) -> Any:
    """x [rows, columns], a whole number of blocks, by E4M3 with one power of two a block."""
    rows, columns = x.shape
    r, c = block
    parts = x.reshape(rows // r, r, columns // c, c)
    amax = jnp.max(jnp.abs(parts), axis=(1, 3), keepdims=True)
    field = (jax.lax.bitcast_convert_type(amax, jnp.int32) >> 23) & 0xFF
    scale = jax.lax.bitcast_convert_type(jnp.maximum(field - 8, 1) << 23, jnp.float32)
    codes = jnp.clip(parts / scale, -448, 448).astype(jnp.float8_e4m3fn)
    return (codes.astype(jnp.float32) * scale).reshape(rows, columns)


def attention(
    uses: Mapping[str, str], visible: np.ndarray[Any, Any]
) -> Callable[..., dict[str, Any]]:
    """Attention of one head with the blocks of `uses`, by use ("s.q", "o.p", ...); other operands are not quantized."""

    def taken(use: str, x: Any) -> Any:
        return quantized(x, BLOCKS[uses[use]]) if use in uses else x

    def run(q: Any, k: Any, v: Any, *, dout: Any) -> dict[str, Any]:
        q, k, v, do = (x[:, 0].astype(jnp.float32) for x in (q, k, v, dout))
        mask = jnp.asarray(visible)
        scale = q.shape[1] ** -0.5
        s = taken("s.q", q) @ taken("s.k", k).T * (scale * LOG2_E)
        s = jnp.where(mask, s, -jnp.inf)
        m = jnp.ceil(s.max(-1, keepdims=True))
        p = jnp.where(mask, jnp.exp2(s - m), 0)
        total = p.sum(-1, keepdims=True)
        out = taken("o.p", p) @ taken("o.v", v) / total
        probability = p / total
        delta = (do * out).sum(-1, keepdims=True)
        dp = taken("dp.do", do) @ taken("dp.v", v).T
        ds = jnp.where(mask, probability * (dp - delta), 0)
        dq = taken("dq.ds", ds) @ taken("dq.k", k) * scale
        dk = taken("dk.ds", ds).T @ taken("dk.q", q) * scale
        dv = taken("dv.p", probability).T @ taken("dv.do", do)
        return {
            "out": out[:, None],
            "lse": ((m + jnp.log2(total)) / LOG2_E).T,
            "delta": delta.T,
            **{name: x[:, None] for name, x in (("dq", dq), ("dk", dk), ("dv", dv))},
        }

    return run
