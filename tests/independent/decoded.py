"""Traced stages of one document as float64, so that each can be checked from the one before.

``Decoded`` knows, for each recipe, what its operands, weights and bases stand for; the formulas are
those of the descriptions, without a rounding.
"""

import math
from functools import cached_property
from typing import Any

import numpy as np

from tests.independent.heads import guarded, visible
from tests.independent.samples import E4M3_VALUES, Array, as_bfloat16, as_float64, scale_values

UNITS_EXPONENT = {  # of P in the forward
    "flamia-mxfp8-folded": 0,
    "flamia-mxfp8": 8,
    "flamia-mxfp8-unguarded": 8,
    "bf16-fa4": 0,
    "cudnn-mxfp8": 4,
    "cudnn-mxfp8-pv-bf16": 0,
}
EMULATING = ("bf16-fa4", "cudnn-mxfp8", "cudnn-mxfp8-pv-bf16")
HALF_STEP = 2.0**-4  # of an e4m3 number, relative


def spread(scales: Array, shape: tuple[int, ...]) -> Array:
    """Scale bytes repeated to the elements of two axes; blocks are 1, 32 or the whole axis."""
    values = scale_values(scales)
    for axis in range(len(shape)):
        if values.shape[axis] == shape[axis]:
            continue
        size = shape[axis] if values.shape[axis] == 1 else 32
        values = np.repeat(values, size, axis=axis).take(range(shape[axis]), axis=axis)
    return values


class Decoded:
    """The stages of one query head of a result that has one document."""

    def __init__(
        self,
        recipe: str,
        inputs: dict[str, Array],
        stages: dict[str, Any],
        *,
        head: int,
        causal: bool,
    ) -> None:
        """``inputs`` are bfloat16 bits q, k, v, do; ``stages`` what ``run`` returned."""
        self.recipe, self.inputs, self.stages, self.head = recipe, inputs, stages, head
        self.length, self.heads, self.head_dim = inputs["q"].shape
        self.kv_head = head // (self.heads // inputs["k"].shape[1])
        pairs = [[(i, j) for j in range(self.length)] for i in range(self.length)]
        geometry = {"length": self.length, "causal": causal}
        self.mask = np.array([[visible(i, j, **geometry) for i, j in row] for row in pairs])
        self.guard = np.array(
            [[guarded(i // 32, j // 32, **geometry) for i, j in row] for row in pairs]
        )
        self.guard &= recipe == "flamia-mxfp8"
        self.scale = 1 / math.sqrt(self.head_dim)
        self.is_flamia = recipe.startswith("flamia")
        self.has_bfloat16_tokens = recipe in ("bf16-fa4", "cudnn-mxfp8-pv-bf16")

    def exact(self, name: str) -> Array:
        """An input [token, channel] as it was given."""
        head = self.kv_head if name in ("k", "v") else self.head
        return as_float64(self.inputs[name][:, head])

    def operand(self, name: str, use: str) -> Array:
        """An operand [token, channel] as a product sees it."""
        for stem in (f"{name}.{use}", name):
            if f"{stem}.codes" in self.stages:
                head = self.kv_head if name in ("k", "v") else self.head
                codes: Array = E4M3_VALUES[self.stages[f"{stem}.codes"][:, head]]
                return np.asarray(
                    codes * spread(self.stages[f"{stem}.scales"][:, head], codes.shape)
                )
        return self.exact(name)

    def unscaled(self, name: str) -> Array:
        """The codes of an operand whose scales are folded elsewhere."""
        head = self.kv_head if name in ("k", "v") else self.head
        return np.asarray(E4M3_VALUES[self.stages[f"{name}.codes"][:, head]])

    def pairs(self, name: str) -> Array:
        """A float32 stage [query, key]."""
        return as_float64(self.stages[name][0][self.head])

    def row(self, name: str) -> Array:
        """A float32 stage [query]."""
        return as_float64(self.stages[name][self.head])

    def weights(self, name: str, use: str) -> Array:
        """P or dS [query, key] as a product sees it, without a constant factor of its scale."""
        stem = f"{name}.{use}" if f"{name}.{use}.codes" in self.stages else name
        codes = self.stages[f"{stem}.codes"][0][self.head]
        if codes.dtype == np.uint16:
            return as_float64(codes)
        values = E4M3_VALUES[codes]
        if f"{stem}.scales" in self.stages:
            values = values * spread(self.stages[f"{stem}.scales"][0][self.head], codes.shape)
        return np.asarray(values)

    def folded_scale(self, name: str) -> Array:
        """The token scales of an operand that are folded into P or dS: [token]."""
        head = self.kv_head if name in ("k", "v") else self.head
        return scale_values(self.stages[f"{name}.scales"][:, head, 0])

    @cached_property
    def base2_lse(self) -> Array:
        """lse in log2 units."""
        return self.row("lse") * math.log2(math.e)

    @cached_property
    def base(self) -> Array:
        """What P of the backward is relative to, in log2 units: floor(lse) for flamia, or lse."""
        return np.asarray(np.floor(self.base2_lse) if self.is_flamia else self.base2_lse)

    @cached_property
    def do(self) -> Array:
        """dO, for flamia times the rest of 2**-lse."""
        return np.asarray(self.exact("do") * np.exp2(self.base - self.base2_lse)[:, None])

    def products(self, a: Array, b: Array, guarded_a: Array, guarded_b: Array) -> Array:
        """S or dP: a b^T, in guarded blocks from the other two."""
        return np.where(self.guard, guarded_a @ guarded_b.T, a @ b.T)

    def scores(self) -> Array:
        """S from the operands."""
        inputs = self.exact("q"), self.exact("k")
        return self.products(self.operand("q", "s"), self.operand("k", "s"), *inputs)

    def score_gradients(self) -> Array:
        """dP from the operands."""
        inputs = as_bfloat16(self.do), self.exact("v")
        return self.products(self.operand("do", "dp"), self.operand("v", "dp"), *inputs)

    def output(self) -> Array:
        """The O accumulator before normalisation."""
        p, v = self.weights("p", "o"), self.operand("v", "o")
        if self.recipe == "flamia-mxfp8-folded":
            v = self.unscaled("v")
        guarded_p = np.where(self.guard, as_bfloat16(self.pairs("p")), 0)
        return np.asarray(p @ v + guarded_p @ self.exact("v"))

    def dq(self) -> Array:
        """dQ from its operands."""
        ds, k = self.weights("ds", "dq"), self.operand("k", "dq")
        if self.recipe == "flamia-mxfp8-folded":
            k = self.unscaled("k")
        guarded_ds = np.where(self.guard, as_bfloat16(self.pairs("ds")), 0)
        return np.asarray((ds @ k + guarded_ds @ self.exact("k")) * self.scale)

    def dk(self) -> Array:
        """This query head's part of dK."""
        ds, q = self.weights("ds", "dk"), self.operand("q", "dk")
        if self.recipe in ("flamia-mxfp8-folded", "flamia-mxfp8"):
            q = self.unscaled("q")
        return np.asarray(ds.T @ q * self.scale)

    def dv(self) -> Array:
        """This query head's part of dV."""
        p, do = self.weights("p", "dv"), self.operand("do", "dv")
        if self.recipe in ("flamia-mxfp8-folded", "flamia-mxfp8"):
            do = self.unscaled("do")
        # cuDNN's codes are of 256 P under the byte of 1 / 256.
        return np.asarray(p.T @ do * (1 / 256 if self.recipe == "cudnn-mxfp8" else 1))
