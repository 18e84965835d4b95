"""Quantizing and dequantizing 4096x4096 beside JAX's own quantizer, torchao and copies of memory."""

import importlib.util
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.measure import Result, compare, copy_rate
from flamia_ref.formats import dequantize, layout, quantize

SHAPE = (4096, 4096)
WORK = float(SHAPE[0] * SHAPE[1])
MXFP8, MXFP4, NVFP4 = "te-mx-e4m3", "ocp-mx-floor-e2m1", "te-nvfp4"


def run(seconds: float) -> Iterator[Result]:
    """float32 and bfloat16 values in JAX and in numpy, each beside its peer."""
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    rate = copy_rate(x)
    if importlib.util.find_spec("jax"):
        yield from _in_jax(x, rate, seconds)
    yield from _in_numpy(x, rate, seconds)


def _bytes(read: float, scales: float) -> float:
    """Bytes that quantizing moves: what an element is read as, its code, and its share of a scale."""
    return WORK * (read + 1 + 1 / scales)


def _in_jax(x: np.ndarray[Any, Any], rate: float, seconds: float) -> Iterator[Result]:
    import jax
    import jax.numpy as jnp
    from jax._src.cudnn import scaled_matmul_stablehlo

    wide = jnp.asarray(x)
    narrow = wide.astype(jnp.bfloat16)
    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    theirs = jax.jit(lambda x: scaled_matmul_stablehlo.quantize(x, config))

    def compiled(function: Callable[..., Any], *given: Any) -> Callable[[], object]:
        call = jax.jit(function)  # as a user's program has it
        return lambda: jax.block_until_ready(call(*given))

    def ours(preset: str, given: Any, block: Any = None) -> Callable[[], object]:
        return compiled(lambda x: quantize(x, preset, block=block), given)

    def both_ways(x: Any) -> Any:
        tensor = quantize(x, MXFP8, block=(32, 32))
        rows = jnp.repeat(tensor.scales, 32, axis=-2)
        columns = jnp.repeat(tensor.scales, 32, axis=-1)
        tiled = layout.tile_scales_128x4(columns, orientation="column_wise")
        return tensor.codes, layout.tile_scales_128x4(rows), tiled

    def against(
        what: str, call: Callable[[], object], peer: str, other: Callable[[], object], moved: float
    ) -> Result:
        return _measured(f"{what}, jax", call, peer, other, moved, rate, seconds)

    mxfp8 = ours(MXFP8, wide)
    one = f"quantize {MXFP8}, float32"
    peer = "jax.nn.scaled_matmul's quantize"
    yield against(one, mxfp8, peer, lambda: jax.block_until_ready(theirs(wide)), _bytes(4, 32))
    if _has_torchao():
        yield against(one, mxfp8, *_torchao(x)[MXFP8], _bytes(4, 32))
    yield against(
        f"quantize {MXFP8}, bfloat16", ours(MXFP8, narrow), f"{one}, jax", mxfp8, _bytes(2, 32)
    )
    for preset, size in ((NVFP4, 16), (MXFP4, 32)):
        what = f"quantize {preset}, float32"
        yield against(what, ours(preset, wide), f"{one}, jax", mxfp8, _bytes(4, size))
    square = ours(MXFP8, wide, (32, 32))
    yield against(f"{one}, 32x32", square, f"{one}, jax", mxfp8, _bytes(4, 1024))
    tiled = compiled(both_ways, wide)
    what = f"{one}, 32x32, scales tiled both ways"
    yield against(what, tiled, f"{one}, jax", mxfp8, _bytes(4, 16))
    tensor = quantize(wide, MXFP8)
    copied = compiled(jnp.copy, wide)
    values = compiled(dequantize, tensor)
    yield against(f"dequantize {MXFP8}", values, "jnp.copy", copied, _bytes(4, 32))


def _in_numpy(x: np.ndarray[Any, Any], rate: float, seconds: float) -> Iterator[Result]:
    target = np.empty_like(x)
    peers: dict[str, tuple[str, Callable[[], object]]] = {}
    if _has_torchao():
        peers = _torchao(x)
    copy = ("np.copyto", lambda: np.copyto(target, x))
    for preset, size in ((MXFP8, 32), (NVFP4, 16)):
        peer, other = peers.get(preset, copy)
        what = f"quantize {preset}, float32, numpy"

        def call(preset: str = preset) -> object:
            return quantize(x, preset)

        found = _measured(what, call, peer, other, _bytes(4, size), rate, seconds)
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        yield replace(found, what=f"{what}, peak memory {peak / x.nbytes:.2f} times the input")
    narrow = x.astype(ml_dtypes.bfloat16)
    what = f"quantize {MXFP8}, bfloat16, numpy"
    yield _measured(what, lambda: quantize(narrow, MXFP8), *copy, _bytes(2, 32), rate, seconds)


def _has_torchao() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "torchao"))


def _torchao(x: np.ndarray[Any, Any]) -> dict[str, tuple[str, Callable[[], object]]]:
    """torchao's eager quantizers, by the preset that they stand beside."""
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    given = torch.from_numpy(x)
    mode = ScaleCalculationMode.RCEIL

    def nvfp4() -> object:
        return nvfp4_quantize(given, 16, per_tensor_amax_to_scale(given.abs().max()))

    return {
        MXFP8: ("torchao to_mx", lambda: to_mx(given, torch.float8_e4m3fn, 32, mode)),
        NVFP4: ("torchao nvfp4_quantize", nvfp4),
    }


def _measured(
    what: str,
    ours: Callable[[], object],
    peer: str,
    theirs: Callable[[], object],
    moved: float,
    rate: float,
    seconds: float,
) -> Result:
    found = compare(
        "formats",
        f"{what}, {SHAPE[0]}x{SHAPE[1]}",
        ours,
        peer,
        theirs,
        seconds=seconds,
        work=WORK,
        unit="elements",
    )
    return replace(found, bound=moved / rate)
