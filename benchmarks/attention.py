"""The attention passes beside float64 attention, fake quantization, and each other."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.measure import Result, compare
from flamia_ref import attention

RECIPE = "flamia-mxfp8-folded"
RECIPES = ("flamia-mxfp8-folded", "flamia-mxfp8", "cudnn-mxfp8", "flamia-nvfp4-fp8")
LENGTHS = (384, 256, 200, 128, 56)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
LONG_HEADS, LONG_TOKENS, LONG_HEAD_DIM = 8, 2048, 128
MANY_DOCUMENTS, LONGEST = 64, 2000
MEMORY_TOKENS = 32768
TILE = 128
PRODUCTS = {"forward": 2, "forward and backward": 7}  # S, O; S again, dP, dV, dQ, dK


def run(seconds: float) -> Iterator[Result]:
    """Causal attention: packed documents with grouped queries, then long documents, many documents, and memory.

    A pair is a query and a key it sees, of one head. The multiply-accumulates of a long document are those of the
    products of its pairs of tiles that hold a visible pair.
    """
    yield from _packed(seconds)
    if importlib.util.find_spec("jax"):
        yield _product(seconds)
        for recipe in RECIPES:
            for passes in PRODUCTS:
                yield _long(recipe, passes, seconds)
        yield _many(seconds)
        yield _memory()


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


def _tiles(length: int) -> int:
    """Pairs of tiles of a document, causal, that hold a visible pair."""
    count = -(-length // TILE)
    return count * (count + 1) // 2


def _on_jax(tokens: int, heads: int) -> list[Any]:
    import jax.numpy as jnp

    return [jnp.asarray(x) for x in _inputs(tokens, heads, heads, LONG_HEAD_DIM)]


def _call(recipe: str, passes: str, arrays: list[Any], cu_seqlens: Any) -> Callable[[], object]:
    import jax

    def call() -> object:
        forward = attention.forward(*arrays[:3], recipe, cu_seqlens=cu_seqlens)
        if passes == "forward":
            return jax.block_until_ready(forward.out)
        return jax.block_until_ready(attention.backward(*arrays, forward).dq)

    return call


def _product(seconds: float) -> Result:
    """The instruction alone in batches of tiles, which the passes are to be compared with."""
    import jax
    import jax.numpy as jnp

    from flamia_ref.attention import RECIPES as KNOWN
    from flamia_ref.attention import sides

    rng = np.random.default_rng(0)
    codes, others = (
        jnp.asarray(rng.integers(0, 0x7E, (8, TILE, LONG_HEAD_DIM), dtype=np.uint8)) for _ in "qk"
    )
    scales = jnp.full((8, TILE, LONG_HEAD_DIM // 32), 127, jnp.uint8)
    rows = [sides.Rows(x, scales) for x in (codes, others)]
    product = KNOWN[RECIPE].s
    floats = [jnp.ones((8, TILE, LONG_HEAD_DIM), jnp.float32) for _ in "qk"]
    return compare(
        "attention",
        f"{product.instruction} alone, 8 tiles of {TILE}x{TILE}x{LONG_HEAD_DIM}, jax",
        lambda: jax.block_until_ready(sides.over_channels(*rows, product, None)),
        "jnp.einsum",
        lambda: jax.block_until_ready(jnp.einsum("tqc,tkc->tqk", *floats)),
        seconds=seconds,
        work=8 * TILE * TILE * LONG_HEAD_DIM,
        unit="MAC",
    )


def _long(recipe: str, passes: str, seconds: float) -> Result:
    """One long document beside the same recipe in fake quantization."""
    arrays = _on_jax(LONG_TOKENS, LONG_HEADS)
    products = PRODUCTS[passes] * LONG_HEADS * _tiles(LONG_TOKENS)
    return compare(
        "attention",
        f"{passes} {recipe}, {LONG_TOKENS} tokens, {LONG_HEADS} heads, head_dim {LONG_HEAD_DIM}, "
        "causal, jax",
        _call(recipe, passes, arrays, None),
        "quantize, dequantize, float32 products",
        fake_quantized(recipe, passes, arrays),
        seconds=seconds,
        work=products * TILE * TILE * LONG_HEAD_DIM,
        unit="MAC",
    )


def fake_quantized(recipe: str, passes: str, arrays: list[Any]) -> Callable[[], object]:
    """Attention as recipes are explored today: operands quantized and dequantized in blocks of their own size, float32
    products of whole matrices, gradients straight through."""
    import jax
    import jax.numpy as jnp

    rows = {"cudnn-mxfp8": 32, "flamia-nvfp4-fp8": 16}.get(recipe, LONG_HEAD_DIM)
    fp4 = recipe.startswith("flamia-nvfp4")
    q, k, v, dout = (x.astype(jnp.float32) for x in arrays)

    def rounded(x: Any, width: int, *, to_fp4: bool = False) -> Any:
        kind, largest = (jnp.float4_e2m1fn, 6.0) if to_fp4 else (jnp.float8_e4m3fn, 448.0)
        blocks = x.reshape(*x.shape[:-1], -1, width)
        amax = jnp.maximum(jnp.abs(blocks).max(axis=-1, keepdims=True), 2.0**-100)
        scale = jnp.exp2(jnp.ceil(jnp.log2(amax / largest)))
        values = (blocks / scale).astype(kind).astype(jnp.float32) * scale
        return x + jax.lax.stop_gradient(values.reshape(x.shape) - x)

    def out(q: Any, k: Any, v: Any) -> Any:
        q, k = (rounded(x, rows, to_fp4=fp4) for x in (q, k))
        s = jnp.einsum("qhc,khc->hqk", q, k) / np.sqrt(q.shape[2])
        s = jnp.where(jnp.tri(s.shape[1], dtype=bool), s, -jnp.inf)
        p = rounded(jax.nn.softmax(s, axis=-1), 32)
        return jnp.einsum("hqk,khc->qhc", p, rounded(v, LONG_HEAD_DIM))

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        result, pull = jax.vjp(out, q, k, v)
        return result, pull(dout)

    compiled = jax.jit(out if passes == "forward" else both)
    given = (q, k, v) if passes == "forward" else (q, k, v, dout)
    return lambda: jax.block_until_ready(compiled(*given))


def _many(seconds: float) -> Result:
    """Many documents of all lengths beside one document of as many pairs of tiles."""
    lengths = np.linspace(1, LONGEST, MANY_DOCUMENTS).astype(int)
    wanted = int(sum(map(_tiles, lengths)))
    one = next(TILE * count for count in range(1, 4096) if _tiles(TILE * count) >= wanted)
    offsets = np.cumsum([0, *lengths], dtype=np.int32)
    per_pair = 2 * TILE * TILE * LONG_HEAD_DIM
    return compare(
        "attention",
        f"forward {RECIPE}, {MANY_DOCUMENTS} documents of 1 to {LONGEST} tokens, 1 head, jax",
        _call(RECIPE, "forward", _on_jax(int(offsets[-1]), 1), offsets),
        f"one document of {one} tokens",
        _call(RECIPE, "forward", _on_jax(one, 1), None),
        seconds=seconds,
        work=wanted * per_pair,
        peer_work=_tiles(one) * per_pair,
        unit="MAC",
    )


# Not getrusage, whose maximum a process inherits from the one that starts it.
_MEMORY = f"""
from pathlib import Path
from benchmarks import attention
call = attention._call("{RECIPE}", "forward", attention._on_jax({{tokens}}, 1), None)
call()
fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
print(int(fields["VmHWM"].split()[0]) / 2**20)
"""


def _memory() -> Result:
    """The most memory of a process that runs a forward over a long document, in GiB, beside a short one."""
    found = []
    for tokens in (MEMORY_TOKENS, TILE):
        done = subprocess.run(
            [sys.executable, "-c", _MEMORY.format(tokens=tokens)],
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(float(done.stdout))
    return Result(
        benchmark="attention",
        what=f"GiB at most, forward {RECIPE}, {MEMORY_TOKENS} tokens, 1 head, jax, as seconds",
        seconds=found[0],
        fastest=found[0],
        peer=f"{TILE} tokens",
        peer_seconds=found[1],
        ratio=found[1] / found[0],
        rounds=1,
    )
