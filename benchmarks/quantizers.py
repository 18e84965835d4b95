"""Quantizing to MXFP8 beside copying the same array."""

import importlib.util
from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Result, compare
from flamia_ref.formats import quantize

PRESET = "te-mx-e4m3"
SHAPE = (2048, 1024)
WORK = float(SHAPE[0] * SHAPE[1])
UNIT = "elements"


def run(seconds: float) -> Iterator[Result]:
    """float32 values in numpy and in JAX."""
    x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    target = np.empty_like(x)
    what = f"quantize {PRESET}, float32 {SHAPE[0]}x{SHAPE[1]}"
    yield compare(
        "quantize",
        f"{what}, numpy",
        lambda: quantize(x, PRESET),
        "np.copyto",
        lambda: np.copyto(target, x),
        seconds=seconds,
        work=WORK,
        unit=UNIT,
    )
    if importlib.util.find_spec("jax"):
        import jax.numpy as jnp

        on_device = jnp.asarray(x)
        yield compare(
            "quantize",
            f"{what}, jax",
            lambda: quantize(on_device, PRESET).codes.block_until_ready(),
            "np.copyto",
            lambda: np.copyto(target, x),
            seconds=seconds,
            work=WORK,
            unit=UNIT,
        )
