"""Kernels to check, to start from: ``flamia-ref golden check PACK --kernel examples.kernels:NAME``.

A kernel is a function of the arguments below that returns a dict (see `flamia_ref.kernels`). Yours
would copy the arrays to a GPU, launch, and copy the results back.
"""

import dataclasses

import numpy as np

from flamia_ref import attention
from flamia_ref.golden.simulator import jax_kernel, numpy_kernel


def simulator(q, k, v, *, cu_seqlens, causal, softmax_scale, dout=None, **extra):
    """The simulator on JAX: passes every stage of both passes."""
    settings = {"cu_seqlens": cu_seqlens, "causal": causal, "softmax_scale": softmax_scale}
    return jax_kernel(q, k, v, dout=dout, **settings, **extra)


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


def scales_rounded_down(q, k, v, *, recipe_json, **arguments):
    """The simulator, on numpy, with one mistake that people make: scales of blocks are rounded down.

    That is the rule of the OCP specification. The quantizers of NVIDIA's libraries round up, so that
    the largest value of a block does not saturate.
    """
    rule = recipe_json.replace('"te-mx-e4m3"', '"ocp-mx-floor-e4m3"')
    return numpy_kernel(q, k, v, recipe_json=rule, **arguments)


def delta_of_truncated_o(q, k, v, *, dout, recipe_json, trace=(), **settings):
    """The simulator, on numpy, with one fault in the backward: delta takes another O than was returned.

    O is cut to bfloat16 there, and rounded where it is returned. So the forward is right, and the
    backward is until delta.
    """
    recipe = attention.Recipe.from_json(recipe_json)
    settings = {name: settings[name] for name in ("cu_seqlens", "causal", "softmax_scale")}
    later = [name for name in trace if name in attention.backward_stages(recipe)]
    earlier = [name for name in trace if name not in later]
    forward = attention.forward(q, k, v, recipe, trace={"o", *earlier}, **settings)
    cut = forward.trace["o"].view(np.uint32) & np.uint32(0xFFFF0000)
    other = dataclasses.replace(forward, out=cut.view(np.float32))
    backward = attention.backward(q, k, v, dout, other, trace=later)
    outputs = {"out": forward.out, "lse": forward.lse}
    gradients = {"dq": backward.dq, "dk": backward.dk, "dv": backward.dv}
    return {**forward.trace, **outputs, **backward.trace, **gradients}
