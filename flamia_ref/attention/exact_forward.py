"""One recipe in float64 on one set of inputs: what its forward has at each part, with or without its quantizers.

What it computes is said in `exact`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref.attention.parts import Mask, Part, Values, over_seen, parts
from flamia_ref.attention.product import Guard, Operand, TileOrder, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.formats import FORMATS, PRESETS, Overflow, decode, dequantize, encode, quantize
from flamia_ref.packing import Documents

LOG2_E = math.log2(math.e)
_UNIT = 127  # e8m0 code of 2^0
_HIGH = "bf16"  # P in guarded blocks

Exponents = npt.NDArray[np.int32]


class Tensor(NamedTuple):
    """One use of q, k, v or dO: its values and the inputs that guarded blocks take [tokens, heads, head_dim], and the
    exponents of the scales that another use takes over, 0 where none does [tokens, heads]."""

    values: Values
    inputs: Values
    exponents: Exponents

    @property
    def elements(self) -> Values:
        """What the product sees: without the scale that another use takes over."""
        return np.ldexp(self.values, -self.exponents[:, :, None])


class Rows(NamedTuple):
    """The forward of one part. t = S c, -inf where masked; w and z as in `exact` [rows, keys]; the row sum [rows, 1]; O
    [rows, head_dim]; lse [rows]; gain: the factor of V in dO/dw, 1 unless P's scale is static and not 1."""

    t: Values
    w: Values
    z: Values
    total: Values
    out: Values
    lse: Values
    gain: Values


class ExactForward:
    """A recipe on q, k and v. `quantized` False: every quantizer is the identity."""

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
        self.quantized, self.score_factor = quantized, softmax_scale * LOG2_E
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

    def tensor(self, x: Values, use: Use) -> Tensor:
        """`x` [tokens, heads, head_dim] as one use takes it, quantized document by document."""
        operand = self.recipe.operand(use)
        values, exponents = x.copy(), np.zeros(x.shape[:2], dtype=np.int32)
        if not self.quantized and operand.scale_folded_into is None:
            return Tensor(values, x, exponents)
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
        return Tensor(values, x, exponents)

    def t(self, part: Part) -> Values:
        """The scores times c, -inf where masked."""
        row, key = (part.rows, part.head), (part.keys, part.kv_head)
        s = self.q.values[row] @ self.k.values[key].T
        cut = self.guarded(part, Use.S_K)
        if cut.any():
            s = np.where(cut, self.q.inputs[row] @ self.k.inputs[key].T, s)
        return np.where(part.seen, s * self.score_factor, -np.inf)

    def rows(self, part: Part) -> Rows:
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
        gain = np.broadcast_to(np.ldexp(static_scale(self.recipe.o.left), taken - scale), p.shape)
        if cut.any():
            z = np.where(cut, _encoded(p.astype(np.float32), _HIGH), z)
            gain = np.where(cut, 1, gain)
        moved = np.where(np.isneginf(bases) | dead, 0, np.exp2(bases - last))
        w, z = p * moved, z * moved
        total = np.where(dead, 1, w.sum(axis=1, keepdims=True))
        out = over_seen(np.where(cut, 0, z), self.v.values[key], part.seen & ~cut)
        if cut.any():
            out = out + over_seen(np.where(cut, z, 0), self.v.inputs[key], part.seen & cut)
        lse = np.where(dead, -np.inf, (last - knobs.p_offset + np.log2(total)) / LOG2_E)
        return Rows(t, w, z, total, out / total, lse[:, 0], gain)

    def _weights(self, p: Values) -> Values:
        """P, with the scales that it took over, as O takes it."""
        operand = self.recipe.o.left
        if not self.quantized:
            return static_scale(operand) * p
        narrow = p.astype(np.float32)
        if operand.format not in PRESETS:
            return static_scale(operand) * _encoded(narrow, operand.format)
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


def static_scale(operand: Operand) -> float:
    """The value of a static scale, 1 for other operands."""
    return 1.0 if operand.static_scale is None else 2.0 ** (operand.static_scale - _UNIT)


def _encoded(x: npt.NDArray[np.float32], name: str) -> Values:
    """`x` in a scalar format, as its values. What is too large is infinite where the format has infinity."""
    chosen = FORMATS[name]
    overflow = Overflow.SATURATE if chosen.infinity_code is None else Overflow.NATIVE
    return np.asarray(decode(encode(x, chosen, overflow=overflow), chosen, np.float64))
