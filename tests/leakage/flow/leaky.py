"""Attention with one fault each, and blocks that share a scale as the formats of shared scales have it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Function = Callable[..., Any]


def shared_scale(x: Any, rows: int, columns: int) -> Any:
    """An MX quantizer on float32: power-of-two scales of blocks [rows, columns], by exponent bits, 8-bit codes."""
    m, n = x.shape
    blocks = x.reshape(m // rows, rows, n // columns, columns)
    amax = jnp.max(jnp.abs(blocks), axis=(1, 3), keepdims=True)
    bits = lax.bitcast_convert_type(amax, np.uint32) >> np.uint32(23)
    exponent = jnp.where(bits > 8, bits - np.uint32(8), np.uint32(1))
    scale = lax.bitcast_convert_type(exponent << np.uint32(23), np.float32)
    inverse = lax.bitcast_convert_type((np.uint32(254) - exponent) << np.uint32(23), np.float32)
    codes = jnp.round(blocks * inverse).astype(np.int8)
    return (codes.astype(np.float32) * scale).reshape(m, n)


def quantized(seen: Any, **blocks: tuple[int, int]) -> Function:
    """Attention with some of q, k, v and p quantized."""

    def q_of(name: str, x: Any) -> Any:
        return shared_scale(x, *blocks[name]) if name in blocks else x

    def forward(q: Any, k: Any, v: Any) -> Any:
        s = jnp.where(seen, q_of("q", q) @ q_of("k", k).T, -jnp.inf)
        p = jnp.exp(s - s.max(axis=-1, keepdims=True))
        total = p.sum(axis=-1, keepdims=True)
        return (q_of("p", p) @ q_of("v", v)) / total

    return forward


def unmasked_maximum(seen: Any) -> Function:
    def forward(q: Any, k: Any, v: Any) -> Any:
        s = q @ k.T
        p = jnp.where(seen, jnp.exp(s - s.max(axis=-1, keepdims=True)), jnp.float32(0))
        return (p @ v) / p.sum(axis=-1, keepdims=True)

    return forward


def smoothed_keys(seen: Any) -> Function:
    def forward(q: Any, k: Any, v: Any) -> Any:
        s = jnp.where(seen, q @ (k - k.mean(axis=0)).T, -jnp.inf)
        return jax.nn.softmax(s, axis=-1) @ v

    return forward


def tensor_scale(seen: Any) -> Function:
    def forward(q: Any, k: Any, v: Any) -> Any:
        scale = jnp.max(jnp.abs(v)) / np.float32(448)
        codes = (v / scale).astype(jnp.float8_e4m3fn)
        s = jnp.where(seen, q @ k.T, -jnp.inf)
        return jax.nn.softmax(s, axis=-1) @ (codes.astype(np.float32) * scale)

    return forward


def tile_decides(seen: Any, tile: int) -> Function:
    """Rows are rescaled by a power of two when any row of their tile asks for it."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        s = jnp.where(seen, q @ k.T, -jnp.inf)
        m = s.max(axis=-1, keepdims=True)
        asks = (m > 8).reshape(-1, tile).any(axis=1)
        shift = jnp.repeat(asks, tile)[:, None]
        base = jnp.where(shift, m, jnp.float32(0))
        p = jnp.exp(s - base)
        return (p @ v) / p.sum(axis=-1, keepdims=True)

    return forward
