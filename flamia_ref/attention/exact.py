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

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref.attention.parts import Mask, Part, Values, over_seen, parts
from flamia_ref.attention.recipe import Guard, Operand, Recipe, TileOrder, Use
from flamia_ref.formats import FORMATS, PRESETS, Overflow, decode, dequantize, encode, quantize
from flamia_ref.packing import Documents

_LOG2_E = math.log2(math.e)
_UNIT = 127  # e8m0 code of 2^0
_HIGH = "bf16"  # P in guarded blocks
Exponents = npt.NDArray[np.int32]


class Outputs(NamedTuple):
    """`out` [tokens, heads, head_dim] and `lse` [heads, tokens], natural log."""

    out: Values
    lse: Values


class Gradients(NamedTuple):
    """`dq` [tokens, heads, head_dim], `dk` and `dv` [tokens, kv_heads, head_dim]."""

    dq: Values
    dk: Values
    dv: Values


class _Tensor(NamedTuple):
    """One use of q, k, v or dO: its values and the inputs that guarded blocks take [tokens, heads, head_dim], and the
    exponents of the scales that another use takes over, 0 where none does [tokens, heads]."""

    values: Values
    inputs: Values
    exponents: Exponents

    @property
    def elements(self) -> Values:
        """What the product sees: without the scale that another use takes over."""
        return np.ldexp(self.values, -self.exponents[:, :, None])


class _Rows(NamedTuple):
    """The forward of one part. t = S c, -inf where masked; w and z as above [rows, keys]; the row sum [rows, 1]; O
    [rows, head_dim]; lse [rows]; gain: the factor of V in dO/dw, 1 unless P's scale is static and not 1."""

    t: Values
    w: Values
    z: Values
    total: Values
    out: Values
    lse: Values
    gain: Values


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
    run = _Run(q, k, v, recipe, documents, causal, softmax_scale, quantized)
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
    run = _Run(q, k, v, recipe, documents, causal, softmax_scale, quantized)
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
    run = _Run(q, k, v, recipe, documents, causal, softmax_scale, quantized=False)
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
        base = r = np.where(np.isneginf(lse), 0, lse * _LOG2_E)
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
                return _static(recipe.operand(use)) * np.ldexp(
                    x, _taken(recipe, tensors, part, use)
                )

            dq[row] = over_seen(left(ds, Use.DQ_DS), tensors[Use.DQ_K].elements[key], seen)
            dk[key] += over_seen(left(ds, Use.DK_DS).T, tensors[Use.DK_Q].elements[row], seen.T)
            dv[key] += over_seen(left(p, Use.DV_P).T, tensors[Use.DV_DO].elements[row], seen.T)
    return Gradients(softmax_scale * dq, softmax_scale * dk, dv)


class _Run:
    """One recipe on one set of inputs."""

    def __init__(
        self,
        q: Values,
        k: Values,
        v: Values,
        recipe: Recipe,
        documents: Documents,
        causal: bool,
        softmax_scale: float,
        quantized: bool,
    ) -> None:
        self.recipe, self.documents, self.causal = recipe, documents, causal
        self.quantized, self.score_factor = quantized, softmax_scale * _LOG2_E
        self.heads = (q.shape[1], k.shape[1])
        with np.errstate(all="ignore"):
            self.q, self.k = self.tensor(q, Use.S_Q), self.tensor(k, Use.S_K)
            self.v = self.tensor(v, Use.O_V)

    def parts(self) -> Iterator[Part]:
        """Every query once."""
        return parts(self.documents, *self.heads, self.causal)

    def guarded(self, part: Part, use: Use) -> Mask:
        """The pairs at which a use takes the inputs."""
        if self.quantized and self.recipe.operand(use).guard is Guard.HIGH_PRECISION_WHERE_CUT:
            return part.guarded()
        return np.zeros_like(part.seen)

    def tensor(self, x: Values, use: Use) -> _Tensor:
        """`x` [tokens, heads, head_dim] as one use takes it, quantized document by document."""
        operand = self.recipe.operand(use)
        values, exponents = x.copy(), np.zeros(x.shape[:2], dtype=np.int32)
        narrow = x.astype(np.float32)
        for document in self.documents:
            rows = np.moveaxis(narrow[document], 1, 0)
            if operand.format not in PRESETS:
                stored = _encoded(narrow[document], operand.format)
            elif rows.size:
                block = quantize(rows, operand.format, block=operand.block)
                stored = np.moveaxis(np.asarray(dequantize(block, np.float64)), 0, 1)
                if operand.scale_folded_into is not None:
                    exponents[document] = block.scales[:, :, 0].T.astype(np.int32) - _UNIT
            else:
                continue
            if self.quantized:
                values[document] = stored
        return _Tensor(values, x, exponents)

    def t(self, part: Part) -> Values:
        """The scores times c, -inf where masked."""
        row, key = (part.rows, part.head), (part.keys, part.kv_head)
        s = self.q.values[row] @ self.k.values[key].T
        cut = self.guarded(part, Use.S_K)
        if cut.any():
            s = np.where(cut, self.q.inputs[row] @ self.k.inputs[key].T, s)
        return np.where(part.seen, s * self.score_factor, -np.inf)

    def rows(self, part: Part) -> _Rows:
        """The forward of one part."""
        key, knobs = (part.keys, part.kv_head), self.recipe.softmax
        t = self.t(part)
        bases = _bases(t, self.recipe, self.causal)
        last = bases.max(axis=1, keepdims=True)  # a base never falls
        dead = np.isneginf(last)
        p = np.where(np.isneginf(t), 0, np.exp2(t - bases + knobs.p_offset))
        scale = self.v.exponents[key]
        taken = scale if self.recipe.o.right.scale_folded_into is Use.O_P else np.zeros_like(scale)
        cut = self.guarded(part, Use.O_V)
        z = np.ldexp(self._weights(np.ldexp(p, taken)), -scale)
        gain = np.broadcast_to(np.ldexp(_static(self.recipe.o.left), taken - scale), p.shape)
        if cut.any():
            z = np.where(cut, _encoded(p.astype(np.float32), _HIGH), z)
            gain = np.where(cut, 1, gain)
        moved = np.where(np.isneginf(bases) | dead, 0, np.exp2(bases - last))
        w, z = p * moved, z * moved
        total = np.where(dead, 1, w.sum(axis=1, keepdims=True))
        out = over_seen(np.where(cut, 0, z), self.v.values[key], part.seen & ~cut)
        if cut.any():
            out = out + over_seen(np.where(cut, z, 0), self.v.inputs[key], part.seen & cut)
        lse = np.where(dead, -np.inf, (last - knobs.p_offset + np.log2(total)) / _LOG2_E)
        return _Rows(t, w, z, total, out / total, lse[:, 0], gain)

    def _weights(self, p: Values) -> Values:
        """P, with the scales that it took over, as O takes it."""
        operand = self.recipe.o.left
        if not self.quantized:
            return _static(operand) * p
        narrow = p.astype(np.float32)
        if operand.format not in PRESETS:
            return _static(operand) * _encoded(narrow, operand.format)
        block = quantize(narrow, operand.format, block=operand.block)
        return np.asarray(dequantize(block, np.float64))


def _bases(t: Values, recipe: Recipe, causal: bool) -> Values:
    """The base of each pair, in units of t: that of its row once its key tile is in. -inf before the first score."""
    knobs, size = recipe.softmax, recipe.tiles.key
    scores = np.ceil(t) if knobs.base == "integer_max" else t
    order = list(range(0, t.shape[1], size))
    if recipe.o.tile_order is TileOrder.DESCENDING or (
        recipe.o.tile_order is TileOrder.DESCENDING_WHERE_CAUSAL and causal
    ):
        order.reverse()
    base = np.full(len(t), -np.inf)
    bases = np.empty_like(t)
    for first in order:
        largest = scores[:, first : first + size].max(axis=1)
        follows = np.isneginf(base) | ~(largest - base <= knobs.rescale_threshold)
        base = np.where(follows, np.maximum(base, largest), base)
        bases[:, first : first + size] = base[:, None]
    return bases


def _static(operand: Operand) -> float:
    """The value of a static scale, 1 for other operands."""
    return 1.0 if operand.static_scale is None else 2.0 ** (operand.static_scale - _UNIT)


def _taken(recipe: Recipe, tensors: Mapping[Use, _Tensor], part: Part, use: Use) -> Exponents:
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


def _encoded(x: npt.NDArray[np.float32], name: str) -> Values:
    """`x` in a scalar format, as its values. What is too large is infinite where the format has infinity."""
    chosen = FORMATS[name]
    overflow = Overflow.SATURATE if chosen.infinity_code is None else Overflow.NATIVE
    return np.asarray(decode(encode(x, chosen, overflow=overflow), chosen, np.float64))
