"""Kernels to check, to start from: ``flamia-ref golden check PACK --kernel examples.kernels:NAME``.

A kernel is a function of the arguments below that returns a dict (see `flamia_ref.kernels`). Yours
would copy the arrays to a GPU, launch, and copy the results back.
"""

import numpy as np

from flamia_ref.golden.simulator import jax_kernel, numpy_kernel


def simulator(q, k, v, *, cu_seqlens, causal, softmax_scale, **extra):
    """The simulator on JAX: passes every stage."""
    settings = {"cu_seqlens": cu_seqlens, "causal": causal, "softmax_scale": softmax_scale}
    return jax_kernel(q, k, v, **settings, **extra)


def v_scale_off_by_one(q, k, v, **arguments):
    """The simulator, on numpy, with one fault: one scale byte of V is too large by one.

    A power of two on a token of V moves its scale and nothing else: the codes stay, and the byte
    goes up by one. So this kernel, which doubles one token of V before it starts, computes to the
    last bit what a kernel computes whose quantizer wrote that byte one too large.
    """
    wrong = np.array(v)
    token = len(wrong) // 2
    wrong[token, 0] *= 2
    return numpy_kernel(q, k, wrong, **arguments)
