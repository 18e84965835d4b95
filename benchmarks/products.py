"""The fused sum: matmul of 128 x 128 x 128 in mxf8f6f4 beside float32 and, if installed, MMA-Sim."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.measure import Result, compare
from flamia_ref.arithmetic import matmul
from flamia_ref.formats import BlockTensor, quantize

INSTRUCTION = "sm100.tcgen05.mxf8f6f4"
SIZE = 128
WORK = float(SIZE**3)
UNIT = "MAC"


def run(seconds: float) -> Iterator[Result]:
    """Ours in numpy and in JAX, each beside the peers."""
    x, y = np.random.default_rng(0).normal(size=(2, SIZE, SIZE)).astype(np.float32)
    a, b = operands(x, y)
    ours = {"numpy": lambda: matmul(a, b, INSTRUCTION)}
    peers: dict[str, dict[str, Callable[[], object]]] = {
        "numpy": {"np.matmul float32": lambda: np.matmul(x, y)},
    }
    if importlib.util.find_spec("jax"):
        ours["jax"], peers["jax"] = in_jax(x, y)
    simulator = mma_sim(a, b) if importlib.util.find_spec("mmasim") else {}
    for library, call in ours.items():
        for peer, theirs in (peers[library] | simulator).items():
            yield compare(
                "matmul",
                f"{INSTRUCTION} {SIZE}x{SIZE}x{SIZE}, {library}",
                call,
                peer,
                theirs,
                seconds=seconds,
                work=WORK,
                unit=UNIT,
            )


def operands(x: Any, y: Any) -> tuple[BlockTensor, BlockTensor]:
    """Both in MXFP8, in blocks of 32 along K."""
    return quantize(x, "te-mx-e4m3"), quantize(y, "te-mx-e4m3", block=(32, 1))


def in_jax(x: Any, y: Any) -> tuple[Callable[[], object], dict[str, Callable[[], object]]]:
    """Both calls on device arrays, each waiting for its result."""
    import jax
    import jax.numpy as jnp

    x, y = jnp.asarray(x), jnp.asarray(y)
    a, b = operands(x, y)
    product = jax.jit(jnp.matmul)
    return (
        lambda: matmul(a, b, INSTRUCTION).block_until_ready(),
        {"jnp.matmul float32": lambda: product(x, y).block_until_ready()},
    )


def mma_sim(a: Any, b: Any) -> dict[str, Callable[[], object]]:
    """MMA-Sim on the same operands, instruction by instruction along K, checked equal to ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from mmasim.nv_ptx import TCGen05MMABlockScale

    torch.set_num_threads(1)  # with two, a shared machine makes it several times slower
    kind = "kind::mxf8f6f4.block32.f32.e4m3.e4m3.ue8m0"
    operation = TCGen05MMABlockScale("Blackwell", f"m{SIZE}n{SIZE}k32.{kind}")

    def tensor(codes: Any, dtype: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(codes)).view(dtype)

    steps = [
        (
            tensor(a.codes[:, 32 * step : 32 * step + 32], torch.float8_e4m3fn),
            tensor(b.codes[32 * step : 32 * step + 32], torch.float8_e4m3fn),
            tensor(a.scales[:, step : step + 1], torch.float8_e8m0fnu),
            tensor(b.scales[step : step + 1], torch.float8_e8m0fnu),
        )
        for step in range(SIZE // 32)
    ]

    def call() -> Any:
        c = torch.zeros((SIZE, SIZE))
        for left, right, left_scales, right_scales in steps:
            c = operation(left, right, c, left_scales, right_scales)
        return c

    if not np.array_equal(call().numpy(), matmul(a, b, INSTRUCTION)):
        raise ArithmeticError("MMA-Sim and flamia_ref differ: their times cannot be compared")
    return {"MMA-Sim, 1 thread": call}
