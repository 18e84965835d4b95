"""A recipe in float64: its forward, the exact gradient of that, and what its own backward formulas give.

The forward is read from the recipe's data. Its quantizers are the real ones, on document-local blocks: those of q, k
and v in S and O, and that of P, which sees the float32 P relative to the running base of its key tile and split, with
V's scale where that is folded into it. Guarded blocks take the inputs, or the values of the codes in bfloat16, and P in
bfloat16. Nothing else is rounded: 2^x, sums and products are those of float64, and c = softmax_scale log2(e). So where
the float32 forward meets a tie (the ceiling of a score, a rescale, a code), this one may decide otherwise. How the
exponent is made, the order of sums, and splits otherwise than by their bases, make no difference here.

The gradient is that of sum(dout O), O before its output rounding, straight through the quantizers (each has the
derivative 1), the row's base constant. With w the weights before quantization and z those after it, both relative to
the row's last base, l = sum w and O = sum z V / l:

    dV_j = sum_i z_ij / l_i dO_i        dS_ij = softmax_scale f_ij w_ij / l_i (dO_i V_j - dO_i O_i)
    dQ_i = sum_j dS_ij K_j              dK_j = sum_i dS_ij Q_i

where Q, K and V are what S and O took, so in guarded blocks the inputs, and f is 1, or 1 - tanh^2 of a soft cap. A sink
is one more weight of its head in l, with the gradient dsink = -sum_i e_i / l_i dO_i O_i, e that weight. Where masked
pairs have a score, their weights are in l and O, and so in dV. A static scale of P is no quantizer: where it is not 1,
z and the first V of dS carry it; and where l is the sum of the codes, so do l and the O of dS. A row that sees no key,
or whose scores are all -inf, is dead: out 0, lse that of the sink or -inf, gradients 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from flamia_ref.attention.exact_forward import LOG2_E, ExactForward, Rows, static_scale
from flamia_ref.attention.exact_tensor import HIGH, Exponents, Tensor, encoded, pairs
from flamia_ref.attention.parts import Pairs, Part, Values, over_seen
from flamia_ref.attention.product import Operand, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.packing import Mask


class Outputs(NamedTuple):
    """`out` [tokens, heads, v's head_dim] and `lse` [heads, tokens], natural log."""

    out: Values
    lse: Values


class Gradients(NamedTuple):
    """`dq`, `dk` and `dv` in the shapes of q, k and v, and `dsink` [heads], None without a sink."""

    dq: Values
    dk: Values
    dv: Values
    dsink: Values | None = None


def forward(
    q: Values,
    k: Values,
    v: Values,
    recipe: Recipe,
    mask: Mask,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    sink: Values | None = None,
    quantized: bool | frozenset[Use] = True,
) -> Outputs:
    """The forward of a recipe in float64. `quantized`: the uses whose quantizers are on, the others are the identity;
    True for all, False for none."""
    run = ExactForward(
        q,
        k,
        v,
        recipe,
        mask,
        softmax_scale=softmax_scale,
        quantized=quantized,
        softcap=softcap,
        sink=sink,
    )
    return _outputs(run, q, v)


def gradient(
    q: Values,
    k: Values,
    v: Values,
    dout: Values,
    recipe: Recipe,
    mask: Mask,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    sink: Values | None = None,
    quantized: bool | frozenset[Use] = True,
) -> Gradients:
    """The gradient of sum(dout * out), out that of `forward`, straight through its quantizers."""
    run = ExactForward(
        q,
        k,
        v,
        recipe,
        mask,
        softmax_scale=softmax_scale,
        quantized=quantized,
        softcap=softcap,
        sink=sink,
    )
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dsink = None if sink is None else np.zeros(sink.shape)
    with np.errstate(all="ignore"):
        for part in run.parts():
            rows = run.rows(part)
            row, key, seen = (part.rows, part.head), (part.keys, part.kv_head), part.seen
            do = dout[row]
            of_v = np.where(
                run.guarded(part, Use.O_V), do @ run.v.guarded[key].T, do @ run.v.values[key].T
            )
            delta = (do * rows.out).sum(axis=1, keepdims=True)
            ds = rows.w / rows.total * (rows.gain * of_v - rows.sum_gain * delta)
            ds = np.where(seen & rows.counted, softmax_scale * ds * rows.slope, 0)
            cut = run.guarded(part, Use.S_K)
            for some, x, y in (
                (~cut, run.q.values, run.k.values),
                (cut, run.q.guarded, run.k.guarded),
            ):
                if some.any():
                    weights, where = np.where(some, ds, 0), seen & some
                    dq[row] += over_seen(weights, y[key], where)
                    dk[key] += over_seen(weights.T, x[row], where.T)
            weights = np.where(rows.counted, rows.z / rows.total, 0)
            dv[key] += over_seen(weights.T, do, rows.counted.T)
            if dsink is not None:
                dsink[part.head] -= (rows.sink * delta).sum()
    return Gradients(dq, dk, dv, dsink)


def backward(
    q: Values,
    k: Values,
    v: Values,
    dout: Values,
    recipe: Recipe,
    mask: Mask,
    *,
    softmax_scale: float,
    softcap: float | None = None,
    sink: Values | None = None,
    quantized: bool | frozenset[Use] = False,
) -> Gradients:
    """What the recipe's own backward gives in float64 from out and lse, the quantizers as in `forward`, which makes
    them; no other rounding.

    Without its quantizers the scales stay: a static one, an offset of P, and one that an operand takes over from
    another. So this equals `gradient` with `quantized` False only if the backward's parts fit together, and fit the
    forward.
    """
    run = ExactForward(
        q,
        k,
        v,
        recipe,
        mask,
        softmax_scale=softmax_scale,
        quantized=quantized,
        softcap=softcap,
        sink=sink,
    )
    out, lse = _outputs(run, q, v)
    knobs = recipe.backward.gradient
    of_delta = out
    if knobs.delta_source == "high_precision_out":
        high = replace(recipe, o=replace(recipe.o, left=Operand(format=HIGH, scope=Scope.UNIT)))
        other = ExactForward(
            q,
            k,
            v,
            high,
            mask,
            softmax_scale=softmax_scale,
            quantized=quantized,
            softcap=softcap,
            sink=sink,
        )
        of_delta, _ = _outputs(other, q, v)
    inside, outside = softmax_scale, 1.0
    if knobs.softmax_scale == "epilogue":
        inside, outside = outside, inside
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    dsink = None if sink is None else np.zeros(sink.shape)
    with np.errstate(all="ignore"):
        base = r = np.where(np.isneginf(lse), 0, lse * LOG2_E)
        if knobs.normalisation == "fold_into_dout":
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
            below = base[part.head, part.rows, None]
            t, slope = run.scores(part)
            p = np.where(seen, np.exp2(t - below), 0)
            do_row, v_key = tensors[Use.DP_DO], tensors[Use.DP_V]
            dp = do_row.values[row] @ v_key.values[key].T
            cut = run.guarded(part, Use.DP_V)
            if cut.any():
                dp = np.where(cut, do_row.guarded[row] @ v_key.guarded[key].T, dp)
            of_dout = tensors[Use.DP_DO].values if knobs.delta_source == "quantized_dout" else dout
            terms = of_dout[row] * of_delta[row]
            if knobs.delta_source == "p_dp":  # P and dP have inverse factors of dO's
                terms = np.where(seen, p * dp, 0) * np.exp2(below - r[part.head, part.rows, None])
            delta = terms.sum(axis=1, keepdims=True)
            ds = np.where(seen, p * (dp - delta) * inside * slope, 0)
            if knobs.p_for_dv == "forward":
                p = _of_forward(run.rows(part), run, below, seen)
            p = np.ldexp(p, knobs.p_offset)

            def left(x: Values, use: Use, part: Part = part) -> Values:
                operand = recipe.operand(use)
                x, scale = np.ldexp(x, _taken(recipe, tensors, part, use)), static_scale(operand)
                if use is not Use.DV_P:  # P takes its own by its offset
                    x = x / scale
                if use in run.quantized and x.size:
                    x = pairs(x, operand)
                return x * scale

            cut = run.guarded(part, Use.DQ_K)
            outer = np.where(cut, 0, ds)
            dq[row] = over_seen(left(outer, Use.DQ_DS), tensors[Use.DQ_K].elements[key], seen)
            if cut.any():
                inner = np.where(cut, ds, 0)
                if Use.DQ_DS in run.quantized:
                    inner = encoded(inner.astype(np.float32), HIGH)
                dq[row] += over_seen(inner, tensors[Use.DQ_K].guarded[key], seen & cut)
            dk[key] += over_seen(left(ds, Use.DK_DS).T, tensors[Use.DK_Q].elements[row], seen.T)
            dv[key] += over_seen(left(p, Use.DV_P).T, tensors[Use.DV_DO].elements[row], seen.T)
            if dsink is not None:
                of_sink = np.exp2(run.sink[part.head] - below)
                dsink[part.head] -= (of_sink * delta)[seen.any(axis=1)].sum()
    return Gradients(outside * dq, outside * dk, dv, dsink)


def _outputs(run: ExactForward, q: Values, v: Values) -> Outputs:
    out, lse = np.zeros((*q.shape[:2], v.shape[2])), np.full(q.shape[1::-1], -np.inf)
    with np.errstate(all="ignore"):
        for part in run.parts():
            rows = run.rows(part)
            out[part.rows, part.head], lse[part.head, part.rows] = rows.out, rows.lse
    return Outputs(out, lse)


def _of_forward(rows: Rows, run: ExactForward, below: Values, seen: Pairs) -> Values:
    """The forward's P, brought from its base to the backward's."""
    offset = run.recipe.softmax.p_log2
    return np.where(seen, rows.p * np.exp2(rows.base - offset - below), 0)


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
