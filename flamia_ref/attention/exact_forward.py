"""One recipe in float64 on one set of inputs: what its forward has at each part, with or without its quantizers.

What it computes is said in `exact`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref.attention.exact_tensor import HIGH, UNIT, Tensor, encoded, pairs, tensor
from flamia_ref.attention.forward_tile import LARGEST_ROUNDED
from flamia_ref.attention.parts import Pairs, Part, Values, capped, over_seen, parts
from flamia_ref.attention.product import Guard, Operand, Scope, TileOrder, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.packing import Mask
from flamia_ref.packing.tiles import BLOCK

LOG2_E = math.log2(math.e)
_LARGEST = float(np.finfo(np.float32).max)
_KEYS = (Use.S_K, Use.O_V, Use.DP_V, Use.DQ_K)

Places = npt.NDArray[np.int64]


class Rows(NamedTuple):
    """The forward of one part.

    Attributes:
        w, z: as in `exact`, [rows, keys], relative to the base.
        p: P as O's product takes it, without a scale that it took over, [rows, keys], relative to the base.
        counted: the pairs that have a weight, [rows, keys].
        base: [rows, 1], in units of t: the row's last, or the sink where that is above it.
        total: the row sum with the sink [rows, 1], 1 in dead rows.
        sink: the sink's probability [rows, 1], 0 in dead rows.
        out, lse: O [rows, v's head_dim], lse [rows].
        gain, sum_gain: the factors of V in dO/dw and of O there, 1 unless P's scale is static and not 1.
        slope: the derivative of the soft cap, 1 without one.
    """

    w: Values
    z: Values
    p: Values
    counted: Pairs
    base: Values
    total: Values
    sink: Values
    out: Values
    lse: Values
    gain: Values
    sum_gain: Values
    slope: Values


class ExactForward:
    """A recipe on q, k and v. `quantized`: the uses whose quantizers are on, True for all; the others are the
    identity."""

    def __init__(
        self,
        q: Values,
        k: Values,
        v: Values,
        recipe: Recipe,
        mask: Mask,
        *,
        softmax_scale: float,
        quantized: bool | frozenset[Use],
        softcap: float | None = None,
        sink: Values | None = None,
    ) -> None:
        self.recipe, self.mask = recipe, mask
        self.quantized = frozenset(Use if quantized is True else quantized or ())
        self.softmax_scale, self.softcap = softmax_scale, softcap
        self.sink = np.full(q.shape[1], -np.inf) if sink is None else sink * LOG2_E
        self.heads = (q.shape[1], k.shape[1])
        self._worked: dict[int, tuple[Places, Places]] = {}
        with np.errstate(all="ignore"):
            self.q, self.k = self.tensor(q, Use.S_Q), self.tensor(k, Use.S_K)
            self.v = self.tensor(v, Use.O_V)

    def parts(self) -> Iterator[Part]:
        """Every query once."""
        every = self.recipe.softmax.mask_value is not None
        return parts(self.mask, *self.heads, every_key=every)

    def guarded(self, part: Part, use: Use) -> Pairs:
        """The pairs at which a use takes what is for guarded blocks; none where nothing in its product is quantized."""
        product = use.split(".")[0]
        on = any(one.split(".")[0] == product for one in self.quantized)
        if on and self.recipe.operand(use).guard is Guard.HIGH_PRECISION_WHERE_CUT:
            return part.guarded()
        return np.zeros_like(part.seen)

    def tensor(self, x: Values, use: Use) -> Tensor:
        """`x` [tokens, heads, channels] as one use takes it."""
        documents = self.mask.keys if use in _KEYS else self.mask.queries
        return tensor(
            x,
            self.recipe,
            use,
            documents,
            quantized=use in self.quantized,
            kv_heads=self.heads[1],
        )

    def scores(self, part: Part) -> tuple[Values, Values]:
        """t = S' c of a part, the scores in log2 units, -inf where masked; and the derivative of the soft cap."""
        row, key = (part.rows, part.head), (part.keys, part.kv_head)
        s = self.q.values[row] @ self.k.values[key].T
        cut = self.guarded(part, Use.S_K)
        if cut.any():
            s = np.where(cut, self.q.guarded[row] @ self.k.guarded[key].T, s)
        if self.recipe.s.corrected and Use.S_Q in self.quantized:
            s = s + self.q.guarded[row] @ self.k.guarded[key].T
        s, slope = capped(s * self.softmax_scale, self.softcap)
        return np.where(part.seen, s * LOG2_E, -np.inf), slope

    def rows(self, part: Part) -> Rows:
        """The forward of one part."""
        key, offset = (part.keys, part.kv_head), self.recipe.softmax.p_log2
        keys, (t, slope) = part.seen.shape[1], self.scores(part)
        t = self._with_masked(part, t)
        cut = _widened(self.guarded(part, Use.O_V), t.shape[1])
        bases = self._bases(part, t)
        last = bases.max(axis=1, keepdims=True, initial=-np.inf)  # a base never falls
        dead = np.isneginf(last) | ~part.seen.any(axis=1, keepdims=True)
        sink = self.sink[part.head]
        last = np.maximum(last, sink)
        counted = ~np.isneginf(t) & ~dead

        w = np.where(np.isneginf(t), 0, np.exp2(t - bases + offset))
        exponents = np.pad(self.v.exponents[key], (0, t.shape[1] - keys))
        taken = exponents if self.recipe.o.right.scale_folded_into is Use.O_P else 0 * exponents
        p = np.ldexp(self._weights(np.ldexp(w, taken)), -taken)
        # A scale that P is divided by before it is encoded is no factor.
        divided = self.recipe.softmax.p_scaling == "static_scale"
        static = np.full_like(p, 1.0 if divided else static_scale(self.recipe.o.left))
        if cut.any():
            high = encoded(w.astype(np.float32), HIGH) if Use.O_P in self.quantized else w
            p = np.where(cut, high, p)
            static, taken = np.where(cut, 1, static), np.where(cut, exponents, taken)
        moved = np.exp2(bases - last)
        w, p = (np.where(counted, x * moved, 0) for x in (w, p))

        of_codes = self.recipe.softmax.row_sum_of == "codes"
        of_sink = np.where(dead, 0, np.exp2(sink - last + offset))
        total = (p if of_codes else w).sum(axis=1, keepdims=True) + of_sink
        total = np.where(dead, 1, total)
        lse = np.where(dead, sink, last - offset + np.log2(total)) / LOG2_E
        of_p = static if of_codes else np.ones_like(static)
        w, p, static, of_p = (x[:, :keys] for x in (w, p, static, of_p))
        cut, counted = cut[:, :keys], counted[:, :keys]
        moves = np.broadcast_to(taken - exponents, t.shape)[:, :keys]
        z = np.ldexp(p, moves)
        out = over_seen(np.where(cut, 0, z), self.v.values[key], counted & ~cut)
        if cut.any():
            out = out + over_seen(np.where(cut, z, 0), self.v.guarded[key], counted & cut)
        return Rows(
            w=w,
            z=z,
            p=p,
            counted=counted,
            base=last,
            total=total,
            sink=of_sink / total,
            out=out / total,
            lse=lse[:, 0],
            gain=np.ldexp(static, moves),
            sum_gain=of_p,
            slope=slope,
        )

    def _with_masked(self, part: Part, t: Values) -> Values:
        """`t` with the score of masked pairs, where they have one: in every pair of tiles that is worked on, and in its
        columns past the document's end too, which have no V."""
        value = self.recipe.softmax.mask_value
        if value is None:
            return t
        scale = 1.0 if self.softcap or self.recipe.softmax.score == "scaled" else self.softmax_scale
        masked = float(np.float32(value)) * scale * LOG2_E
        masked = masked if masked >= -_LARGEST else -np.inf  # as float32 has it
        size = self.recipe.tiles.key
        first, count = self._tiles(part)
        tile = np.arange(-(-t.shape[1] // size) * size) // size
        worked = (tile >= first[:, None]) & (tile < (first + count)[:, None])
        wide = np.where(worked, masked, -np.inf)
        wide[:, : t.shape[1]] = np.where(part.seen, t, wide[:, : t.shape[1]])
        return wide

    def _tiles(self, part: Part) -> tuple[Places, Places]:
        """For each row the first of the key tiles that its query tile is worked on with, and how many they are."""
        if part.document not in self._worked:
            self._worked[part.document] = self._worked_on(part.document)
        rows = part.first_query + np.arange(len(part.seen))
        first, count = self._worked[part.document]
        tile = rows // self.recipe.tiles.query
        return first[tile], count[tile]

    def _worked_on(self, document: int) -> tuple[Places, Places]:
        """The first of the key tiles of each query tile, and how many they are."""
        tiles = self.recipe.tiles
        first, last = self.mask.document_bounds(document)
        starts = range(0, len(first), tiles.query)
        if tiles.masked == "computed":
            count = -(-self.mask.keys.lengths[document] // tiles.key)
            return np.zeros(len(starts), dtype=np.int64), np.full(len(starts), count)
        found = []
        for start in starts:
            rows = slice(start, start + tiles.query)
            alive = last[rows] >= 0
            if alive.any():
                begin, end = first[rows][alive].min() // tiles.key, last[rows].max() // tiles.key
                found.append((int(begin), int(end - begin + 1)))
            else:
                found.append((0, 0))
        table = np.array(found, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def _bases(self, part: Part, t: Values) -> Values:
        """The base of each pair, in units of t: that of its row once its key tile is in. -inf before the first score.

        Each split of the keys has bases of its own.
        """
        knobs, size, splits = self.recipe.softmax, self.recipe.tiles.key, self.recipe.tiles.splits
        scores = np.ceil(t) if knobs.base == "integer_max" else t
        stop = part.first_key + t.shape[1]
        order = list(range(part.first_key // size, -(-stop // size)))
        if self.recipe.o.tile_order.under(self.mask.bounded) is TileOrder.DESCENDING:
            order.reverse()
        if splits > 1:
            first, count = self._tiles(part)
            length = np.maximum(-(-count // splits), 1)
        start = -np.inf
        if knobs.base == "natural_max" and (splits == 1 or knobs.combine != "divide_last"):
            start = self.sink[part.head]  # of the first split
        threshold: float = knobs.rescale_threshold
        if knobs.threshold_unit == "natural":
            threshold *= LOG2_E
        base = np.full(len(t), start)
        bases = np.full_like(t, -np.inf)
        run = np.full(len(t), -1)
        for tile in order:
            columns = slice(
                max(tile * size - part.first_key, 0), (tile + 1) * size - part.first_key
            )
            if splits > 1:
                now = (tile - first) // length
                begun = np.where(now == 0, start, -np.inf)
                base, run = np.where(now == run, base, begun), now
            largest = scores[:, columns].max(axis=1)
            follows = np.isneginf(base) | ~(largest - base <= threshold)
            base = np.where(follows, np.maximum(base, largest), base)
            bases[:, columns] = base[:, None]
        return bases

    def _weights(self, p: Values) -> Values:
        """P, with the scales that it took over, as O takes it."""
        operand, knobs = self.recipe.o.left, self.recipe.softmax
        if knobs.p_scaling == "static_scale":
            p = p / static_scale(operand)
        if Use.O_P in self.quantized and p.size:
            if knobs.p_overflow == "zero":
                p = np.where(p.astype(np.float32) > LARGEST_ROUNDED[operand.format], 0, p)
            p = pairs(p, operand)
        return static_scale(operand) * p


def static_scale(operand: Operand) -> float:
    """The value of the static scale of P or dS, 1 for another scope."""
    if operand.scope is not Scope.STATIC or operand.static_scale is None:
        return 1.0
    return float(2.0 ** (operand.static_scale - UNIT))


def _widened(cut: Pairs, columns: int) -> Pairs:
    """Guarded pairs with as many columns; those of the last block past the document's end are as the rest of it."""
    keys = cut.shape[1]
    wide = np.zeros((len(cut), columns), dtype=np.bool_)
    wide[:, :keys] = cut
    if keys:
        wide[:, keys : -(-keys // BLOCK) * BLOCK] = cut[:, -1:]
    return wide
