"""Matrix products and special functions, beside MMA-Sim where it is installed, and beside float32.

Operands are normal with standard deviation 1, their scales near 1. A rate counts a product and its addition as one, or
elements.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks.measure import Result, compare
from flamia_ref.arithmetic import exp2, matmul, matmul_bits
from flamia_ref.formats import encode

MAC = "MAC"
SPECIAL = (("exp2", "mufu.sm90"), ("exp2", "polynomial3"))
ELEMENTS = 1 << 22


class Kind(NamedTuple):
    """An instruction, and MMA-Sim's class and name of it."""

    instruction: str
    element: str
    scale: str | None
    block: int
    simulator: str
    ptx: str


MX = Kind("sm100.tcgen05.mxf8f6f4", "e4m3", "e8m0", 32, "TCGen05MMABlockScale",
          "m128n{n}k32.kind::mxf8f6f4.block32.f32.e4m3.e4m3.ue8m0")  # fmt: skip
NVFP4 = Kind("sm100.tcgen05.mxf4nvf4", "e2m1", "ue4m3", 16, "TCGen05MMABlockScale",
             "m128n{n}k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.ue4m3")  # fmt: skip
FP8 = Kind("sm90.wgmma.fp8", "e4m3", None, 0, "WGMMA", "m64n{n}k32.f32.e4m3.e4m3")
F16 = Kind("sm90.wgmma.f16", "fp16", None, 0, "WGMMA", "m64n{n}k16.f32.f16.f16")
BF16 = Kind("sm90.wgmma.bf16", "bf16", None, 0, "WGMMA", "m64n{n}k16.f32.bf16.bf16")
KINDS = (MX, FP8, F16, BF16, NVFP4)
UNIT_CODES = {"e8m0": 127, "ue4m3": 56}
STEPS = {"e4m3": 32, "e2m1": 64, "fp16": 16, "bf16": 16}


def run(seconds: float) -> Iterator[Result]:
    """Every product in JAX and in numpy, then special functions in JAX."""
    for kind in KINDS:
        yield from _products(kind, seconds)
    if importlib.util.find_spec("jax"):
        for kind in KINDS:
            for batch, side in ((64, 128), (64, 32)):
                yield _batch(kind, batch, side, seconds)
        yield from _special(seconds)


def operands(kind: Kind, m: int, n: int, k: int) -> dict[str, Any]:
    """What `matmul` takes, as numpy arrays."""
    rng = np.random.default_rng(0)
    given: dict[str, Any] = {"a_format": kind.element, "b_format": kind.element}
    given["a"], given["b"] = (
        encode(rng.normal(size=shape).astype(np.float32), kind.element)
        for shape in ((m, k), (k, n))
    )
    if kind.scale is not None:
        blocks, unit = k // kind.block, UNIT_CODES[kind.scale]
        given["a_scales"] = (unit + rng.integers(-2, 3, (m, blocks))).astype(np.uint8)
        given["b_scales"] = (unit + rng.integers(-2, 3, (blocks, n))).astype(np.uint8)
        given["scale_format"] = kind.scale
    return given


def _products(kind: Kind, seconds: float) -> Iterator[Result]:
    sizes = {"jax": (128, 512), "numpy": (128,)}
    if not importlib.util.find_spec("jax"):
        del sizes["jax"]
    for library, sides in sizes.items():
        for side in sides:
            given = operands(kind, side, side, side)
            peers = {"float32 matmul": _float32_matmul(side)}
            if importlib.util.find_spec("mmasim"):
                peers["MMA-Sim, 2 threads"] = _simulator(kind, given)
            call = _call(kind, given, library)
            for peer, theirs in peers.items():
                what = f"{kind.instruction} {side}x{side}x{side}, {library}"
                yield compare(
                    "arithmetic", what, call, peer, theirs, seconds=seconds, work=float(side**3), unit=MAC
                )  # fmt: skip


def _call(kind: Kind, given: dict[str, Any], library: str) -> Callable[[], object]:
    if library == "numpy":
        return lambda: matmul(instruction=kind.instruction, **given)
    import jax.numpy as jnp

    arrays: dict[str, Any] = {
        name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()
    }
    return lambda: matmul(instruction=kind.instruction, **arrays).block_until_ready()


def _batch(kind: Kind, batch: int, side: int, seconds: float) -> Result:
    """A batch of products of K = 128, beside one of float32."""
    import jax
    import jax.numpy as jnp

    given = operands(kind, side, side, 128)
    arrays = {
        name: jnp.broadcast_to(jnp.asarray(x), (batch, *x.shape))
        for name, x in given.items()
        if isinstance(x, np.ndarray)
    }
    fixed = {name: x for name, x in given.items() if name not in arrays}
    one = functools.partial(matmul_bits, instruction=kind.instruction, **fixed)
    ours = jax.jit(jax.vmap(lambda arrays: one(**arrays)))
    x = jnp.ones((batch, side, 128), jnp.float32)
    theirs = jax.jit(lambda x: x @ x.swapaxes(1, 2))
    return compare(
        "arithmetic",
        f"{kind.instruction} {batch} of {side}x{side}x128, jax",
        lambda: ours(arrays).block_until_ready(),
        "jnp.matmul float32",
        lambda: theirs(x).block_until_ready(),
        seconds=seconds,
        work=float(batch * side * side * 128),
        unit=MAC,
    )


def _special(seconds: float) -> Iterator[Result]:
    import jax
    import jax.numpy as jnp

    x = jnp.asarray(np.random.default_rng(0).normal(size=ELEMENTS).astype(np.float32) * 8 - 8)
    theirs = jax.jit(jnp.exp2)
    for function, model in SPECIAL:
        yield compare(
            "arithmetic",
            f"{function} {model}, jax",
            functools.partial(_finished, exp2, x, model),
            "jnp.exp2",
            lambda: theirs(x).block_until_ready(),
            seconds=seconds,
            work=float(ELEMENTS),
            unit="element",
        )


def _finished(function: Callable[..., Any], *arguments: Any) -> None:
    function(*arguments).block_until_ready()


def _float32_matmul(side: int) -> Callable[[], object]:
    x, y = np.random.default_rng(0).normal(size=(2, side, side)).astype(np.float32)
    return lambda: np.matmul(x, y)


def _simulator(kind: Kind, given: dict[str, Any]) -> Callable[[], object]:
    """MMA-Sim on the same operands, instruction by instruction along K, checked equal to ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch: Any = importlib.import_module("torch")
        classes: Any = importlib.import_module("mmasim.nv_ptx")

    torch.set_num_threads(2)
    m, k = given["a"].shape
    n, step = given["b"].shape[1], STEPS[kind.element]
    arch = "Hopper" if kind.simulator == "WGMMA" else "Blackwell"
    operation = getattr(classes, kind.simulator)(arch, kind.ptx.format(n=min(n, 256)))
    dtypes = {"e4m3": torch.float8_e4m3fn, "fp16": torch.float16, "bf16": torch.bfloat16,
              "e2m1": torch.uint8, "e8m0": torch.float8_e8m0fnu, "ue4m3": torch.float8_e4m3fn}  # fmt: skip

    def tensor(codes: Any, name: str, axis: int, place: int, size: int) -> Any:
        part = np.take(codes, range(place * size, (place + 1) * size), axis=axis)
        if (
            name == "e2m1"
        ):  # two codes a byte along K; either may come first, as it does in both operands
            part = np.moveaxis(part, axis, 0)
            part = np.moveaxis(part[0::2] | part[1::2] << 4, 0, axis)
        part = np.ascontiguousarray(part)
        return torch.from_numpy(part.view(f"int{8 * part.itemsize}")).view(dtypes[name])

    steps = []
    for place in range(k // step):
        parts = [
            tensor(given["a"], kind.element, 1, place, step),
            tensor(given["b"], kind.element, 0, place, step),
        ]
        if kind.scale is not None:
            size = step // kind.block
            parts += [
                tensor(given["a_scales"], kind.scale, 1, place, size),
                tensor(given["b_scales"], kind.scale, 0, place, size),
            ]
        steps.append(parts)

    def call() -> Any:
        c = torch.zeros((m, n))
        for left, right, *scales in steps:
            c = operation(left, right, c, *scales)
        return c

    if not np.array_equal(call().numpy(), matmul(instruction=kind.instruction, **given)):
        raise ArithmeticError("MMA-Sim and flamia_ref differ: their times cannot be compared")
    return call
