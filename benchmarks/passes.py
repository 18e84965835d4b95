"""The attention forward beside float64 attention on the same packed documents."""

import importlib.util
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from benchmarks.measure import Result, compare
from flamia_ref import attention

RECIPE = "flamia-mxfp8-folded"
LENGTHS = (384, 256, 200, 128, 56)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
UNIT = "pairs"


def run(seconds: float) -> Iterator[Result]:
    """Causal attention with grouped queries; a pair is a query and a key it sees, of one head."""
    rng = np.random.default_rng(0)
    tokens = sum(LENGTHS)
    q, k, v = (
        rng.normal(size=(tokens, heads, HEAD_DIM)).astype(ml_dtypes.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    cu_seqlens = np.cumsum([0, *LENGTHS], dtype=np.int32)
    calls = {"numpy": lambda: attention.forward(q, k, v, RECIPE, cu_seqlens=cu_seqlens)}
    if importlib.util.find_spec("jax"):
        import jax
        import jax.numpy as jnp

        arrays = [jnp.asarray(x) for x in (q, k, v)]
        calls["jax"] = lambda: jax.block_until_ready(
            attention.forward(*arrays, RECIPE, cu_seqlens=cu_seqlens).out
        )
    for library, call in calls.items():
        yield compare(
            "attention",
            f"forward {RECIPE}, {tokens} tokens in {len(LENGTHS)} documents, "
            f"{HEADS} heads over {KV_HEADS}, head_dim {HEAD_DIM}, {library}",
            call,
            "attention.float64.forward",
            lambda: attention.float64.forward(q, k, v, cu_seqlens=cu_seqlens),
            seconds=seconds,
            work=HEADS * sum(length * (length + 1) / 2 for length in LENGTHS),
            unit=UNIT,
        )
