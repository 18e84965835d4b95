"""Kernels to hunt in: those of libraries, and two of our own, one leaky and one repaired. By name in `KERNELS`.

    flamia-ref leak hunt --kernel examples.leakage.kernels:torch_sdpa

All are functions of the kernel protocol (`flamia_ref/kernels.py`). torch, Triton and JAX are imported by the kernels
that need them; one that cannot run here raises RuntimeError and says what is missing.
"""

import importlib.util
import os
from dataclasses import dataclass

from examples.leakage.flash_fp8 import flash_fp8_leaky, flash_fp8_leaky_128, flash_fp8_repaired
from examples.leakage.jax_kernels import jax_sdpa
from examples.leakage.mxfp8_reference import cudnn_mxfp8_reference
from examples.leakage.packed import needed
from examples.leakage.torch_kernels import (
    on_device,
    to_host,
    torch_sdpa,
    torch_sdpa_cudnn,
    torch_sdpa_efficient,
    torch_sdpa_flash,
    torch_sdpa_masked,
    torch_sdpa_math,
    torch_varlen,
)


def triton_flash_fp8_leaky(q, k, v, *, cu_seqlens, causal, softmax_scale):
    """FP8 flash attention in Triton, V with one scale for 64 keys."""
    return _triton(q, k, v, cu_seqlens, causal, softmax_scale, keys=64, folded=False)


def triton_flash_fp8_leaky_128(q, k, v, *, cu_seqlens, causal, softmax_scale):
    """The same, V with one scale for 128 keys."""
    return _triton(q, k, v, cu_seqlens, causal, softmax_scale, keys=128, folded=False)


def triton_flash_fp8_repaired(q, k, v, *, cu_seqlens, causal, softmax_scale):
    """The same, V with one scale a key, folded into P before P is rounded."""
    return _triton(q, k, v, cu_seqlens, causal, softmax_scale, keys=64, folded=True)


def _triton(q, k, v, cu_seqlens, causal, softmax_scale, *, keys, folded):
    needed("torch")
    needed("triton")
    from examples.leakage.triton_flash_fp8 import attend

    out, lse = attend(
        *(on_device(x) for x in (q, k, v)),
        cu_seqlens=cu_seqlens,
        causal=causal,
        softmax_scale=softmax_scale,
        keys=keys,
        folded=folded,
    )
    return {"out": to_host(out), "lse": to_host(lse)}


@dataclass(frozen=True, kw_only=True)
class Example:
    """A kernel, and what it takes.

    Attributes:
        kernel: the function.
        packages: that it imports.
        gpu: whether it needs one, or Triton's interpreter.
        backward: whether it gives gradients.
        on_gpu: whether it runs on the GPU where there is one.
        proof: whether it is JAX throughout, or numpy that is JAX for JAX arrays, so that it can be proved.
        long: whether it is hunted in with long documents too, on a GPU: several tiles, whose sums atomics may reorder.
    """

    kernel: object
    packages: tuple = ()
    gpu: bool = False
    backward: bool = True
    on_gpu: bool = False
    proof: bool = False
    long: bool = False


def _torch(kernel, **changes):
    return Example(kernel=kernel, **{"packages": ("torch",), "on_gpu": True, **changes})


def _in_triton(kernel):
    return _torch(kernel, packages=("torch", "triton"), gpu=True, backward=False)


_EXAMPLES = (
    _torch(torch_sdpa),
    _torch(torch_sdpa_math),
    _torch(torch_sdpa_masked),
    _torch(torch_sdpa_flash, long=True),
    _torch(torch_sdpa_efficient, gpu=True, long=True),
    _torch(torch_sdpa_cudnn, gpu=True, long=True),
    _torch(torch_varlen, gpu=True, long=True),
    _in_triton(triton_flash_fp8_leaky),
    _in_triton(triton_flash_fp8_leaky_128),
    _in_triton(triton_flash_fp8_repaired),
    Example(kernel=jax_sdpa, packages=("jax",), on_gpu=True, proof=True),
    Example(kernel=cudnn_mxfp8_reference, proof=True),
    Example(kernel=flash_fp8_leaky, backward=False, proof=True),
    Example(kernel=flash_fp8_leaky_128, backward=False, proof=True),
    Example(kernel=flash_fp8_repaired, backward=False, proof=True),
)
KERNELS = {example.kernel.__name__: example for example in _EXAMPLES}
"""The kernels by name."""


def missing(example):
    """What this machine lacks for a kernel, in words; empty if nothing."""
    lacking = [name for name in example.packages if importlib.util.find_spec(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed"
    interpreted = "triton" in example.packages and os.environ.get("TRITON_INTERPRET") == "1"
    if example.gpu and not interpreted and not needed("torch").cuda.is_available():
        return "no GPU"
    return ""
