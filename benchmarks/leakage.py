"""The leak tools: the hunt's first witness and its perturbations, structure and proof."""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.measure import Result, compare
from flamia_ref import attention, leakage

LEAKY, SAFE = "cudnn-mxfp8", "flamia-mxfp8-folded"
TOKENS, HEAD_DIM = 64, 64
CALLS = 200
MANY_TOKENS = 10**6
PROVED = (64, 256)


def run(seconds: float) -> Iterator[Result]:
    """The hunt beside the calls of the simulator that it makes; structure and proof beside one call."""
    yield _first_witness(seconds)
    yield _perturbations("numpy", "forward", seconds)
    if importlib.util.find_spec("jax"):
        yield _perturbations("jax", "forward and backward", seconds)
    yield _structure(seconds)
    if importlib.util.find_spec("jax"):
        for tokens in PROVED:
            yield _prove(tokens, seconds)


def _inputs(tokens: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    shape = (tokens, 1, HEAD_DIM)
    return [rng.normal(size=shape).astype(ml_dtypes.bfloat16) for _ in range(4)]


def _call(recipe: str, tokens: int, passes: str, library: str = "numpy") -> Callable[[], object]:
    """One call of the simulator, one head."""
    q, k, v, dout = _inputs(tokens)
    if library == "jax":
        import jax.numpy as jnp

        q, k, v, dout = (jnp.asarray(x) for x in (q, k, v, dout))

    def call() -> object:
        forward = attention.forward(q, k, v, recipe)
        if passes == "forward":
            return np.asarray(forward.out)
        return np.asarray(attention.backward(q, k, v, dout, forward).dq)

    return call


def _first_witness(seconds: float) -> Result:
    settings: dict[str, Any] = {"lengths": (TOKENS,), "head_dim": HEAD_DIM, "backward": False}
    return compare(
        "leakage",
        f"hunt {LEAKY}, forward, {TOKENS} tokens, to the first witness, shrunk, numpy",
        lambda: leakage.hunt(LEAKY, enough=1, **settings),
        "one forward",
        _call(LEAKY, TOKENS, "forward"),
        seconds=seconds,
    )


def _perturbations(library: str, passes: str, seconds: float) -> Result:
    """A hunt with so many calls as a budget, all counted; under JAX the programs are there already."""
    from flamia_ref.leakage.search import subjects

    chosen = subjects._WORTH_COMPILING
    settings: dict[str, Any] = {"lengths": (TOKENS,), "head_dim": HEAD_DIM}

    def ours() -> object:
        subjects._WORTH_COMPILING = 0 if library == "jax" else 1 << 62
        try:
            return leakage.hunt(SAFE, calls=CALLS, backward=passes != "forward", **settings)
        finally:
            subjects._WORTH_COMPILING = chosen

    return compare(
        "leakage",
        f"hunt {SAFE}, {passes}, {TOKENS} tokens, {CALLS} calls, {library}",
        ours,
        "one call alone",
        _call(SAFE, TOKENS, passes, library),
        seconds=seconds,
        work=CALLS,
        unit="calls",
        peer_work=1,
    )


def _structure(seconds: float) -> Result:
    shorter = itertools.count()  # another length each time, in case lengths are kept
    return compare(
        "leakage",
        f"structure {SAFE}, {MANY_TOKENS} tokens",
        lambda: leakage.structure(SAFE, lengths=(MANY_TOKENS - next(shorter),)),
        f"np.arange({MANY_TOKENS})",
        lambda: np.arange(MANY_TOKENS),
        seconds=seconds,
    )


def _prove(tokens: int, seconds: float) -> Result:
    return compare(
        "leakage",
        f"prove {SAFE}, forward and backward, {tokens} tokens",
        lambda: leakage.prove(SAFE, lengths=(tokens,), head_dim=HEAD_DIM),
        "one forward and backward, numpy",
        _call(SAFE, tokens, "forward and backward"),
        seconds=seconds,
    )
