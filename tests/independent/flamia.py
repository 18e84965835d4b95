"""What the three flamia recipes have in common: the softmax of integer base and its backward.

The backward's base of a row is b = floor(lse * log2(e)); dout is multiplied by the remaining
factor g = 2**(b - lse * log2(e)) before it is quantized, and P' = 2**(t - b).

Where the description is silent:

- t = +inf counts as NaN; a NaN t of a visible pair makes m NaN from its key tile on, and with it P
  of every visible pair of the row from there, l, O, out and lse. NaN wins in m.
- A visible t = -inf has P = 0 and n = -inf; -inf - (-inf) is 0, -inf - (a number) shifts to 0.
- A row with m = -inf (no visible key, or only t = -inf) is dead: out = o = +0, lse = -inf.
- A row maximum of zero is +0.
- Backward: a row is dead by lse = -inf beside an out of zeros. Its dO' is +0 in every channel whatever
  dout holds, delta' is +0, P' and dS are +0; dq is +0 by select, even where a
  NaN code of K would make the chain NaN. Its zeros do enter the chains of dK and dV, where a NaN
  code of the row's q still poisons (0 * NaN).
- Backward, a row whose lse log2(e) is neither finite nor that of a dead row is lost: b is NaN, so P'
  and dS are NaN at its visible pairs, and dO' is +0 in every channel, so that nothing of it reaches
  the dV of keys that it does not see. Such rows come from finite inputs: scores beyond float32.
- P' = shift(E, n - b): a NaN n or b comes first; then n = -inf gives 0.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from tests.independent import deltas, factors, float32, mufu
from tests.independent.heads import Head
from tests.independent.operands import Blocks, Matrix, widen
from tests.independent.passes import Stages, bits32, dead_rows, score_gradients, zeros
from tests.independent.softmaxes import shift_by_difference, split_exponential


@dataclass(frozen=True, kw_only=True)
class Base:
    """The base of a row of the backward."""

    b: int  # float32, an integer
    factor: int  # g
    is_dead: bool
    is_lost: bool


def base(lse: int, *, dead: bool) -> Base:
    """Step 8: the base that follows from a row's lse (float32 bits)."""
    r = float32.multiply(lse, factors.LOG2_E_FLOAT32)
    lost = not dead and (float32.is_nan(r) or float32.is_infinite(r))
    b = float32.NAN if lost else float32.floor(r)
    factor = mufu.exp2(float32.subtract(b, r))
    return Base(b=b, factor=factor, is_dead=dead, is_lost=lost)


@dataclass(frozen=True, kw_only=True)
class RowGradients:
    """The stages of the backward up to dS, float32 bits [query][...] unless they say otherwise."""

    weighted: Matrix  # dO' before quantization
    do: Blocks
    bases: list[Base]
    p: Matrix
    ds: Matrix
    stages: Stages


class Flamia(ABC):
    """Both passes up to what the recipes do differently."""

    chained: ClassVar[bool] = False

    def __init__(self, head: Head) -> None:
        """Quantize the operands of the head."""
        self.head = head
        self.c = factors.exact_product(head.softmax_scale)
        self.q = self._quantize_rows(widen(head.q))
        self.k = self._quantize_keys(widen(head.k))
        self.v = self._quantize_keys(widen(head.v))

    @abstractmethod
    def _quantize_rows(self, values: Matrix) -> Blocks:
        """q or dO'."""

    @abstractmethod
    def _quantize_keys(self, values: Matrix) -> Blocks:
        """k or v."""

    @abstractmethod
    def _score(self, query: int, key: int) -> int:
        """S of one pair."""

    @abstractmethod
    def _score_gradient(self, do: Blocks, weighted: Matrix, query: int, key: int) -> int:
        """dP' of one pair."""

    @cached_property
    def scores(self) -> Matrix:
        """S of all pairs."""
        tokens = range(self.head.length)
        return [[self._score(query, key) for key in tokens] for query in tokens]

    def _row_gradients(self, out: Matrix, lse: Sequence[int]) -> RowGradients:
        """Steps 8 to 10."""
        head = self.head
        dead = dead_rows(out, lse)
        bases = [base(x, dead=is_dead) for x, is_dead in zip(lse, dead, strict=True)]
        weighted = [
            [
                0
                if row_base.is_dead or row_base.is_lost
                else float32.multiply(float32.from_bfloat16(x), row_base.factor)
                for x in row
            ]
            for row, row_base in zip(head.required_dout, bases, strict=True)
        ]
        delta = [
            0 if row_base.is_dead else deltas.ascending(x, y)
            for x, y, row_base in zip(weighted, out, bases, strict=True)
        ]
        do = self._quantize_rows(weighted)
        tokens = range(head.length)
        dp = [[self._score_gradient(do, weighted, i, j) for j in tokens] for i in tokens]
        p = self._probabilities(bases)
        ds = score_gradients(head, p, dp, delta, dead)
        stages = {
            "delta": np.array(delta, np.uint32),
            "dp": bits32(dp, head.length),
            "p.dv": bits32(p, head.length),
            "ds": bits32(ds, head.length),
        }
        return RowGradients(weighted=weighted, do=do, bases=bases, p=p, ds=ds, stages=stages)

    def _probabilities(self, bases: Sequence[Base]) -> Matrix:
        """P' of all pairs."""
        p = zeros(self.head.length, self.head.length)
        for query, row_base in enumerate(bases):
            if row_base.is_dead:
                continue
            for key in range(self.head.length):
                if self.head.sees(query, key):
                    e, n = split_exponential(self.scores[query][key], self.c)
                    p[query][key] = shift_by_difference(n, row_base.b)(e)
        return p
