"""The attention passes beside float64 attention on the same packed documents."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.measure import Result, compare
from flamia_ref import attention

RECIPE = "flamia-mxfp8-folded"
LENGTHS = (384, 256, 200, 128, 56)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
LONG_HEADS, LONG_TOKENS, LONG_HEAD_DIM = 8, 2048, 128
TILE = 128
PRODUCTS = 7  # S, O; S again, dP, dV, dQ, dK


def run(seconds: float) -> Iterator[Result]:
    """Causal attention: packed documents with grouped queries, then one long document.

    A pair is a query and a key it sees, of one head. The multiply-accumulates of the long document are those of the
    seven products of its pairs of tiles that hold a visible pair.
    """
    yield from _packed(seconds)
    if importlib.util.find_spec("jax"):
        yield _long(seconds)


def _inputs(tokens: int, heads: int, kv_heads: int, head_dim: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(tokens, count, head_dim)).astype(ml_dtypes.bfloat16)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


def _both(q: Any, k: Any, v: Any, dout: Any, cu_seqlens: Any) -> attention.Backward:
    forward = attention.forward(q, k, v, RECIPE, cu_seqlens=cu_seqlens)
    return attention.backward(q, k, v, dout, forward)


def _packed(seconds: float) -> Iterator[Result]:
    tokens = sum(LENGTHS)
    arrays = _inputs(tokens, HEADS, KV_HEADS, HEAD_DIM)
    q, k, v, dout = arrays
    cu_seqlens = np.cumsum([0, *LENGTHS], dtype=np.int32)
    calls: dict[tuple[str, str], Callable[[], object]] = {
        ("forward", "numpy"): lambda: attention.forward(q, k, v, RECIPE, cu_seqlens=cu_seqlens),
        ("forward and backward", "numpy"): lambda: _both(*arrays, cu_seqlens),
    }
    if importlib.util.find_spec("jax"):
        import jax
        import jax.numpy as jnp

        on_jax = [jnp.asarray(x) for x in arrays]
        calls["forward", "jax"] = lambda: jax.block_until_ready(
            attention.forward(*on_jax[:3], RECIPE, cu_seqlens=cu_seqlens).out
        )
        calls["forward and backward", "jax"] = lambda: jax.block_until_ready(
            _both(*on_jax, cu_seqlens).dq
        )
    peers: dict[str, tuple[str, Callable[[], object]]] = {
        "forward": (
            "attention.float64.forward",
            lambda: attention.float64.forward(q, k, v, cu_seqlens=cu_seqlens),
        ),
        "forward and backward": (
            "attention.float64.backward",
            lambda: attention.float64.backward(q, k, v, dout, cu_seqlens=cu_seqlens),
        ),
    }
    for (passes, library), call in calls.items():
        peer_name, peer = peers[passes]
        yield compare(
            "attention",
            f"{passes} {RECIPE}, {tokens} tokens in {len(LENGTHS)} documents, "
            f"{HEADS} heads over {KV_HEADS}, head_dim {HEAD_DIM}, {library}",
            call,
            peer_name,
            peer,
            seconds=seconds,
            work=HEADS * sum(length * (length + 1) / 2 for length in LENGTHS),
            unit="pairs",
        )


def _long(seconds: float) -> Result:
    import jax
    import jax.numpy as jnp

    arrays = _inputs(LONG_TOKENS, LONG_HEADS, LONG_HEADS, LONG_HEAD_DIM)
    on_jax = [jnp.asarray(x) for x in arrays]
    tiles = LONG_TOKENS // TILE
    products = PRODUCTS * LONG_HEADS * tiles * (tiles + 1) // 2
    return compare(
        "attention",
        f"forward and backward {RECIPE}, {LONG_TOKENS} tokens, {LONG_HEADS} heads, "
        f"head_dim {LONG_HEAD_DIM}, causal, jax",
        lambda: jax.block_until_ready(_both(*on_jax, None).dq),
        "attention.float64.backward",
        lambda: attention.float64.backward(*arrays),
        seconds=seconds,
        work=products * TILE * TILE * LONG_HEAD_DIM,
        unit="MAC",
    )
