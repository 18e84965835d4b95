"""A recipe in float64: its forward, the exact gradient of that, and what its own backward formulas give.

The forward is read from the recipe's data. Its quantizers are the real ones, on document-local blocks: those of q, k
and v in S and O, and that of P, which sees the float32 P relative to the running base of its key tile, with V's scale
where that is folded into it. Guarded blocks take the inputs, and P in bfloat16. Nothing else is rounded: 2^x, sums and
products are those of float64, and c = softmax_scale log2(e). So where the float32 forward meets a tie (the ceiling of a
score, a rescale, a code), this one may decide otherwise.

The gradient is that of sum(dout O), O before its output rounding, straight through the quantizers (each has the
derivative 1), the row's base constant. With w the weights before quantization and z those after it, both relative to
the row's last base, l = sum w and O = sum z V / l:

    dV_j = sum_i z_ij / l_i dO_i        dS_ij = softmax_scale w_ij / l_i (dO_i V_j - dO_i O_i)
    dQ_i = sum_j dS_ij K_j              dK_j = sum_i dS_ij Q_i

where Q, K and V are what S and O took, so in guarded blocks the inputs. A static scale of P is no quantizer: where it
is not 1, z and the first V of dS carry it. A row whose scores are all -inf is dead: out 0, lse -inf, gradients 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flamia_ref.attention.exact_forward import (
    LOG2_E,
    ExactForward,
    Exponents,
    Tensor,
    static_scale,
)
from flamia_ref.attention.parts import Part, Values, over_seen
from flamia_ref.attention.product import Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.packing import Documents


class Outputs(NamedTuple):
    """`out` [tokens, heads, head_dim] and `lse` [heads, tokens], natural log."""

    out: Values
    lse: Values


class Gradients(NamedTuple):
    """`dq` [tokens, heads, head_dim], `dk` and `dv` [tokens, kv_heads, head_dim]."""

    dq: Values
    dk: Values
    dv: Values


def forward(
    q: Values,
    k: Values,
    v: Values,
    recipe: Recipe,
    documents: Documents,
    *,
    causal: bool,
    softmax_scale: float,
    quantized: bool = True,
) -> Outputs:
    """The forward of a recipe in float64. `quantized` False: every quantizer is the identity."""
    run = ExactForward(q, k, v, recipe, documents, causal, softmax_scale, quantized)
    out, lse = np.zeros(q.shape), np.full(q.shape[1::-1], -np.inf)
    with np.errstate(all="ignore"):
        for part in run.parts():
            rows = run.rows(part)
            out[part.rows, part.head], lse[part.head, part.rows] = rows.out, rows.lse
    return Outputs(out, lse)


def gradient(
    q: Values,
    k: Values,
    v: Values,
    dout: Values,
    recipe: Recipe,
    documents: Documents,
    *,
    causal: bool,
    softmax_scale: float,
    quantized: bool = True,
) -> Gradients:
    """The gradient of sum(dout * out), out that of `forward`, straight through its quantizers."""
    run = ExactForward(q, k, v, recipe, documents, causal, softmax_scale, quantized)
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    with np.errstate(all="ignore"):
        for part in run.parts():
            rows = run.rows(part)
            row, key, seen = (part.rows, part.head), (part.keys, part.kv_head), part.seen
            do = dout[row]
            of_v = np.where(
                run.guarded(part, Use.O_V), do @ run.v.inputs[key].T, do @ run.v.values[key].T
            )
            delta = (do * rows.out).sum(axis=1, keepdims=True)
            ds = np.where(seen, rows.w / rows.total * (rows.gain * of_v - delta), 0)
            ds = softmax_scale * ds
            cut = run.guarded(part, Use.S_K)
            for some, x, y in (
                (~cut, run.q.values, run.k.values),
                (cut, run.q.inputs, run.k.inputs),
            ):
                if some.any():
                    weights, where = np.where(some, ds, 0), seen & some
                    dq[row] += over_seen(weights, y[key], where)
                    dk[key] += over_seen(weights.T, x[row], where.T)
            dv[key] += over_seen((rows.z / rows.total).T, do, seen.T)
    return Gradients(dq, dk, dv)


def backward(
    q: Values,
    k: Values,
    v: Values,
    dout: Values,
    recipe: Recipe,
    documents: Documents,
    *,
    causal: bool,
    softmax_scale: float,
) -> Gradients:
    """What the recipe's own backward gives in float64 from out and lse, every quantizer and rounding the identity.

    Scales stay: a static one, an offset of P, and one that an operand takes over from another. So this equals
    `gradient` with `quantized` False only if the backward's parts fit together, and fit the forward.
    """
    run = ExactForward(q, k, v, recipe, documents, causal, softmax_scale, quantized=False)
    out, lse = forward(
        q,
        k,
        v,
        recipe,
        documents,
        causal=causal,
        softmax_scale=softmax_scale,
        quantized=False,
    )
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    with np.errstate(all="ignore"):
        base = r = np.where(np.isneginf(lse), 0, lse * LOG2_E)
        if recipe.gradient.normalisation == "fold_into_dout":
            base = np.floor(r)
            dout = dout * np.exp2(base - r).T[:, :, None]
        tensors = {
            use: run.tensor(x, use)
            for use, x in (
                (Use.DP_DO, dout),
                (Use.DP_V, v),
                (Use.DV_DO, dout),
                (Use.DQ_K, k),
                (Use.DK_Q, q),
            )
        }
        for part in run.parts():
            row, key, seen = (part.rows, part.head), (part.keys, part.kv_head), part.seen
            delta = (dout[row] * out[row]).sum(axis=1, keepdims=True)
            p = np.where(seen, np.exp2(run.t(part) - base[part.head, part.rows, None]), 0)
            dp = tensors[Use.DP_DO].values[row] @ tensors[Use.DP_V].values[key].T
            ds = np.where(seen, p * (dp - delta), 0)
            p = np.ldexp(p, recipe.gradient.p_offset)

            def left(x: Values, use: Use, part: Part = part) -> Values:
                return static_scale(recipe.operand(use)) * np.ldexp(
                    x, _taken(recipe, tensors, part, use)
                )

            dq[row] = over_seen(left(ds, Use.DQ_DS), tensors[Use.DQ_K].elements[key], seen)
            dk[key] += over_seen(left(ds, Use.DK_DS).T, tensors[Use.DK_Q].elements[row], seen.T)
            dv[key] += over_seen(left(p, Use.DV_P).T, tensors[Use.DV_DO].elements[row], seen.T)
    return Gradients(softmax_scale * dq, softmax_scale * dk, dv)


def _taken(recipe: Recipe, tensors: Mapping[Use, Tensor], part: Part, use: Use) -> Exponents:
    """The exponents of the scales that P or dS takes over in one use, [rows, keys] or less, to be broadcast."""
    taken = np.zeros((1, 1), dtype=np.int32)
    for source, tensor in tensors.items():
        if recipe.operand(source).scale_folded_into is not use:
            continue
        if source in (Use.DP_V, Use.DQ_K):
            taken = taken + tensor.exponents[part.keys, part.kv_head][None, :]
        else:
            taken = taken + tensor.exponents[part.rows, part.head][:, None]
    return taken
