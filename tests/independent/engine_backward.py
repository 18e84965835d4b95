"""The backward pass of the query heads of one key/value head of one document, for any recipe.

Where the description is silent:

- A dead row's dq is +0 by select with "fold_into_dout", where its dO' is 0 too; with "lse" it is what its zeros of dS
  give, NaN beside a NaN of k.
- The stage "p.dv" is the recomputed P, which dS takes, also where dV's codes are made of the forward's.
- delta of "p_dp" with "fold_into_dout" is the sum times dO's factor: P and dP are off by inverse factors, so that their
  sum is delta, not delta'.
- A shifted order of pairs of key tiles starts at the pair that holds the query tile's own key tile; dK and dV of a key
  tile of a pair start at its own query tile.
- lse = -inf beside an out that is not zero: L = 0 with the base "raw_max", as FlashAttention-4 has it, else -inf.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.independent import chains, copies, deltas, factors, float32, matrices, sinks
from tests.independent.copies import Copies
from tests.independent.engine_forward import Forward, Head
from tests.independent.masks import ordered
from tests.independent.matrices import Integers
from tests.independent.online import argument, rounded_up, whole
from tests.independent.operands import Matrix, narrow, widen
from tests.independent.passes import dead_rows, zeros
from tests.independent.quantized import UNIT_SCALE, Quantized
from tests.independent.row_sums import Factor, RowSum
from tests.independent.scores import FUNCTIONS
from tests.independent.softmaxes import shift_by_difference


@dataclass(frozen=True, kw_only=True)
class Row:
    """What P of a row is relative to in the backward; float32 bits."""

    base: int  # b, or L
    factor: int  # what dO is multiplied by; 1 with "lse"
    is_dead: bool
    is_lost: bool  # b is NaN in a row that is not dead


class HeadBackward:
    """The backward of one query head up to its products over tokens."""

    def __init__(self, head: Head, forward: Forward, out: Matrix, lse: Sequence[int]) -> None:
        """``out`` and ``lse`` are what the backward starts from."""
        self.head, self.forward, self.out = head, forward, out
        self.softmax, self.gradient = head.recipe["softmax"], head.recipe["gradient"]
        self.is_folded = self.gradient["normalisation"] == "fold_into_dout"
        self.exp2 = FUNCTIONS["exp2", self.softmax["exp2"]]
        self.c = head.scores.factor(self.gradient["score_factor"])
        self.scale = factors.rounded(head.scores.softmax_scale)
        self.is_scaled_in_ds = self.gradient["softmax_scale"] == "in_ds"
        self.is_natural = self.softmax["base"] == "natural_max"
        dead = dead_rows(out, lse)
        self.rows = [
            self._row(x, is_dead=dead[i] or head.mask.is_dead(i)) for i, x in enumerate(lse)
        ]
        assert head.dout is not None
        self.width = head.v.shape[1]
        self.dout = [self._weighted(row, i) for i, row in enumerate(widen(head.dout.tolist()))]
        self.do_copies: Copies = copies.copies("do", self.dout, self.width, head.recipe)
        self.totals: list[int | None] = [None] * head.mask.queries
        if self.gradient["normalisation"] == "row_softmax":
            self._make_row_softmaxes()
        self.p = [[self._p(i, j) for j in range(head.mask.keys)] for i in range(head.mask.queries)]
        self.dp = self._dp()
        self.delta = [self._delta(i) for i in range(head.mask.queries)]
        self.worked = self._worked()
        self.ds = [
            [self._ds(i, j) for j in range(head.mask.keys)] for i in range(head.mask.queries)
        ]
        self.p_dv = self._p_of_dv()
        self._encode()

    def _row(self, lse: int, *, is_dead: bool) -> Row:
        r = float32.multiply(lse, factors.LOG2_E_FLOAT32)
        if self.is_natural:
            return Row(base=lse, factor=float32.ONE, is_dead=is_dead, is_lost=False)
        if not self.is_folded:
            if lse == float32.MINUS_INFINITY and self.softmax["base"] == "raw_max":
                r = 0
            return Row(base=r, factor=float32.ONE, is_dead=is_dead, is_lost=False)
        is_lost = not is_dead and (float32.is_nan(r) or float32.is_infinite(r))
        b = float32.NAN if is_lost else float32.floor(r)
        factor = self.exp2(float32.subtract(b, r))
        return Row(base=b, factor=factor, is_dead=is_dead, is_lost=is_lost)

    def _weighted(self, dout: Sequence[int], query: int) -> list[int]:
        """dO' of a row."""
        row = self.rows[query]
        if not self.is_folded:
            return list(dout)
        if row.is_dead or row.is_lost:
            return [0] * len(dout)
        return [float32.multiply(x, row.factor) for x in dout]

    def _alive(self, query: int, key: int) -> bool:
        return self.head.mask.sees(query, key) and not self.rows[query].is_dead

    def _make_row_softmaxes(self) -> None:
        """The maximum and the sum of every row, over all its key tiles; a sink counts first."""
        size, sink = self.head.tiling.key_size, self.head.sink
        for query, row in enumerate(self.rows):
            keys = [j for j in range(self.head.mask.keys) if self._alive(query, j)]
            scores = [self.head.score[query][j] for j in keys] + ([] if sink is None else [sink])
            largest = float32.MINUS_INFINITY
            for x in scores:
                largest = float32.maxnum(largest, x)
            if any(float32.is_nan(x) for x in scores):
                largest = float32.NAN
            self.rows[query] = replace(row, base=largest)
            total = RowSum(self.softmax["row_sum"])
            if sink is not None:
                total.begin_with(self._natural(sink, largest, None))
            for tile in self.head.tiling.key_tiles:
                terms = [
                    self._natural(self.head.score[query][j], largest, None) if j in keys else 0
                    for j in tile
                ]
                total.add(terms + [0] * (size - len(terms)), Factor(float32.ONE))
            self.totals[query] = total.total

    def _natural(self, score: int, base: int, total: int | None) -> int:
        """e**(S' - base), over a total where there is one."""
        p: int = FUNCTIONS["exp", self.softmax["exp2"]](float32.subtract(score, base))
        return p if total is None else float32.divide(p, total)

    def _p(self, query: int, key: int) -> int:
        """The recomputed P of a pair."""
        if not self._alive(query, key):
            return 0
        p = self._recomputed(query, key)
        return 0 if self.softmax["nan_p"] == "zero" and float32.is_nan(p) else p

    def _recomputed(self, query: int, key: int) -> int:
        if self.is_natural:
            base, total = self.rows[query].base, self.totals[query]
            return self._natural(self.head.score[query][key], base, total)
        score, base = self.head.score[query][key], self.rows[query].base
        form = self.softmax["exp2_argument"]
        if not (self.is_folded and form == "split"):
            return self.exp2(argument(score, self.c, float32.negate(base), form))
        n = rounded_up(score, self.c)
        if float32.is_nan(n) or float32.is_nan(base):
            return float32.NAN
        if n == float32.MINUS_INFINITY:
            return 0
        e = self.exp2(float32.fused_multiply_add(score, self.c, float32.negate(n)))
        return shift_by_difference(n, base)(e)

    def _dp(self) -> Matrix:
        head = self.head
        do, v = self.do_copies.by_use["dp.do"], head.v_copies.by_use["dp.v"]
        inputs = matrices.integers(narrow(self.dout), self.width)
        halves = head.half(inputs, do), head.half(head.v, v)
        return chains.over_channels(head.recipe["dp"], do, v, halves, head.mask)

    def _delta(self, query: int) -> int:
        source = self.gradient["delta_source"]
        if self.is_folded and self.rows[query].is_dead:
            return 0
        if source == "p_dp":
            return float32.multiply(self._sum_of_products(query), self.rows[query].factor)
        dout = self.dout[query]
        if source == "quantized_dout":
            dout = self.do_copies.by_use["dp.do"].values()[query]
        out = widen([self.out[query]])[0]
        if source == "unrounded_out":
            out = self.forward.o[query]
        if source == "high_precision_out":
            out = widen([self.forward.high[query]])[0]
        return deltas.total(self.gradient["delta"], dout, out)

    def _sum_of_products(self, query: int) -> int:
        """P dP over the key tiles, ascending, in the order of the softmax's row sum."""
        total = RowSum(self.softmax["row_sum"])
        for keys in self.head.tiling.key_tiles:
            terms = [
                float32.multiply(self.p[query][j], self.dp[query][j])
                if self._alive(query, j)
                else 0
                for j in keys
            ]
            terms += [0] * (self.head.tiling.key_size - len(keys))
            total.add(terms, Factor(float32.ONE))
        return total.total

    def _worked(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The pairs in tiles that are worked on."""
        tiling = self.head.tiling
        found = np.zeros((self.head.mask.queries, self.head.mask.keys), np.bool_)
        for queries in tiling.query_tiles:
            for unit in tiling.units_worked_on(queries):
                keys = tiling.key_units[unit]
                found[queries.start : queries.stop, keys.start : keys.stop] = True
        return found

    def _ds(self, query: int, key: int) -> int:
        is_selected = self.gradient["masked_ds"] == "select" or not self.worked[query, key]
        if is_selected and not self._alive(query, key):
            return 0
        dp, delta = self.dp[query][key], self.delta[query]
        if self.is_scaled_in_ds:
            own = float32.negate(float32.multiply(delta, self.scale))
            difference = float32.fused_multiply_add(dp, self.scale, own)
        else:
            difference = float32.subtract(dp, delta)
        ds = float32.multiply(self.p[query][key], difference)
        if self.head.scores.softcap is not None:
            factor = self.head.scores.gradient_factor(self.head.s[query][key])
            ds = float32.multiply(ds, factor)
        if self.gradient["softmax_scale"] == "times_ds":
            ds = float32.multiply(ds, self.scale)
        return ds

    def _p_of_dv(self) -> Matrix:
        if self.gradient["p_for_dv"] == "recomputed":
            return self.p
        keys, size = range(self.head.mask.keys), self.head.tiling.key_size
        return [
            [
                self._brought(i, j // size, self.forward.z[i][j]) if self._alive(i, j) else 0
                for j in keys
            ]
            for i in range(self.head.mask.queries)
        ]

    def _brought(self, query: int, tile: int, z: int) -> int:
        """The forward's P of a key tile, brought to the backward's base."""
        units = int(self.softmax["p_offset"])
        base = self.rows[query].base
        if self.is_folded and self.softmax["base"] == "integer_max":
            return shift_by_difference(self.forward.bases[query][tile], base, -units)(z)
        own = self.forward.bases_in_log2[query][tile]
        own = float32.subtract(own, whole(units))
        return float32.multiply(z, self.exp2(float32.subtract(own, base)))

    def _encode(self) -> None:
        """The operands of dV, dQ and dK."""
        head, recipe = self.head, self.head.recipe
        queries, keys = range(head.mask.queries), range(head.mask.keys)
        units = int(self.gradient["p_offset"])
        p = [[float32.shift(x, units) for x in row] for row in self.p_dv]
        self.p_codes = copies.pair_operand(
            self._times_query_scales(p, "dv", self.do_copies.by_use["dv.do"]),
            len(keys),
            recipe["dv"]["left"],
            is_p=True,
        )
        dq, dk = recipe["dq"], recipe["dk"]
        cut = [
            [chains.is_guarded(dq) and head.mask.is_guarded(i, j) for j in keys] for i in queries
        ]
        k_copy = head.k_copies.by_use["dq.k"]
        folded = [
            [
                0
                if is_cut
                else float32.shift(x, k_copy.scale(j, 0) - UNIT_SCALE if chains.folds(dq) else 0)
                for j, (x, is_cut) in enumerate(zip(row, row_cut, strict=True))
            ]
            for row, row_cut in zip(self.ds, cut, strict=True)
        ]
        is_one = dk["left"]["same_codes_as"] is not None
        self.ds_dq = copies.pair_operand(folded, len(keys), dq["left"], is_p=False)
        self.ds_dk = self.ds_dq
        if not is_one:
            ds = self._times_query_scales(self.ds, "dk", head.q_copies.by_use["dk.q"])
            self.ds_dk = copies.pair_operand(ds, len(keys), dk["left"], is_p=False)
        self.ds_names = ("ds", "ds") if is_one else ("ds.dq", "ds.dk")

    def _times_query_scales(self, values: Matrix, product: str, copy: Quantized) -> Matrix:
        """Values [query][key] times the scales of the queries' tokens, where the product folds them."""
        if not chains.folds(self.head.recipe[product]):
            return values
        return [
            [float32.shift(x, copy.scale(i, 0) - UNIT_SCALE) for x in row]
            for i, row in enumerate(values)
        ]

    def dq(self) -> Matrix:
        """dQ's accumulators."""
        head, product = self.head, self.head.recipe["dq"]
        copy, width = head.k_copies.by_use["dq.k"], head.k.shape[1]
        half = head.half(head.k, copy)
        together = 2 if head.tiling.paired else 1
        size = head.tiling.key_size * together
        is_partial = product["accumulation"] == "float32_partials"
        result: Matrix = []
        for index, queries in enumerate(head.tiling.query_tiles):
            total = matrices.zeros(len(queries), width)
            units = head.tiling.units_worked_on(queries)
            order = product["tile_order"]
            own = index // together
            for unit in ordered(units, order, causal=head.mask.is_local, own=own, along="keys"):
                keys = head.tiling.key_units[unit]
                start = matrices.zeros(*total.shape) if is_partial else total
                left = self.ds_dq.part(queries, keys).row_side(size)
                right = copy.part(keys, range(width)).column_side(size, unit=chains.folds(product))
                part = chains.over_tokens(product, left, right, start)
                weights = [self.ds[i][keys.start : keys.stop] for i in queries]
                part = chains.add_guarded(product, weights, half, part, (queries, keys), head.mask)
                total = chains.add(total, part) if is_partial else part
            result += total.tolist()
        if self.is_folded:
            for row, line in zip(self.rows, result, strict=True):
                if row.is_dead:
                    line[:] = [0] * width
        return result

    def over_queries(self, name: str, start: Integers) -> Integers:
        """dK's or dV's accumulators [key, channel], going on from ``start``."""
        head, product, tiling = self.head, self.head.recipe[name], self.head.tiling
        pairs = self.ds_dk if name == "dk" else self.p_codes
        copy = head.q_copies.by_use["dk.q"] if name == "dk" else self.do_copies.by_use["dv.do"]
        width = start.shape[1]
        is_partial = product["accumulation"] == "float32_partials"
        result = start.copy()
        for index, keys in enumerate(tiling.key_tiles):
            part = result[keys.start : keys.stop]
            tiles = tiling.queries_worked_on(index // 2 if tiling.paired else index)
            for tile in ordered(
                tiles, product["tile_order"], causal=head.mask.is_local, own=index, along="queries"
            ):
                queries = tiling.query_tiles[tile]
                left = pairs.part(queries, keys).column_side(tiling.query_size)
                right = copy.part(queries, range(width)).column_side(
                    tiling.query_size, unit=chains.folds(product)
                )
                own = matrices.zeros(*part.shape) if is_partial else part
                new = chains.over_tokens(product, left, right, own)
                part = chains.add(part, new) if is_partial else new
            result[keys.start : keys.stop] = part
        return result

    def sink_terms(self) -> list[list[int]]:
        """The terms of dsink [query tile][row]."""
        assert self.head.sink is not None
        return [[self._sink_term(i) for i in queries] for queries in self.head.tiling.query_tiles]

    def _sink_term(self, query: int) -> int:
        row, sink = self.rows[query], self.head.sink
        if row.is_dead or sink is None:
            return 0
        p = 0
        if self.is_natural and sink != float32.MINUS_INFINITY:
            p = self._natural(sink, row.base, self.totals[query])
        elif sink != float32.MINUS_INFINITY:
            u, n, e = sinks.split(sink, self.softmax["exp2"])
            if self.is_folded and self.softmax["exp2_argument"] == "split":
                p = shift_by_difference(n, row.base)(e)
            else:
                p = self.exp2(float32.subtract(u, row.base))
        return float32.multiply(p, self.delta[query])

    def stages(self) -> dict[str, Any]:
        """All stages of the backward of this head."""
        keys = self.head.mask.keys
        ds_dq, ds_dk = self.ds_names
        return {
            **self.do_copies.stages(("dp.do", "dv.do")),
            "delta": np.array(self.delta, np.uint32),
            **{
                name: matrices.integers(found, keys).astype(np.uint32)
                for name, found in (("dp", self.dp), ("p.dv", self.p), ("ds", self.ds))
            },
            **copies.quantized_stages("p.dv", self._where_worked(self.p_codes)),
            **copies.quantized_stages(ds_dq, self._where_worked(self.ds_dq)),
            **copies.quantized_stages(ds_dk, self._where_worked(self.ds_dk)),
        }

    def _where_worked(self, pairs: Quantized) -> Quantized:
        """Codes of pairs with scales of 0 in tiles that are skipped, where a block of zeros has another."""
        if pairs.scales is None:
            return pairs
        scales = pairs.scales.copy()
        for (row, column), _ in np.ndenumerate(scales):
            block = self.worked[
                row * pairs.rows : (row + 1) * pairs.rows,
                column * pairs.columns : (column + 1) * pairs.columns,
            ]
            scales[row, column] *= block.any()
        return replace(pairs, scales=scales)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """bfloat16 bits [token][channel] of the heads of a group: dq a head, dk and dv of them all."""

    dq: list[Matrix]
    dk: Matrix
    dv: Matrix


def gradients(group: Sequence[HeadBackward]) -> Gradients:
    """The gradients of a key/value head's query heads, given ascending."""
    head, knobs = group[0].head, group[0].gradient
    heads = list(group) if knobs["heads_order"] == "ascending" else list(group)[::-1]
    sums = {}
    for name, width in (("dk", head.k.shape[1]), ("dv", head.v.shape[1])):
        start = matrices.integers(zeros(head.mask.keys, width), width)
        total: Integers | None = None
        for one in heads:
            if knobs["heads"] == "one_chain":
                total = one.over_queries(name, start if total is None else total)
            else:
                own = one.over_queries(name, start)
                total = own if total is None else chains.add(total, own)
        assert total is not None
        sums[name] = total.tolist()
    return Gradients(
        dq=[_scaled(one.dq(), one) for one in group],
        dk=_scaled(sums["dk"], group[0]),
        dv=narrow(sums["dv"]),
    )


def _scaled(accumulators: Matrix, one: HeadBackward) -> Matrix:
    if one.gradient["softmax_scale"] != "epilogue":
        return narrow(accumulators)
    return narrow([[float32.multiply(x, one.scale) for x in row] for row in accumulators])
