"""The backward on ranges, from the out and the lse that a kernel returned: pair by pair of tiles as `BackwardRun`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _float32
from flamia_ref.arithmetic.instructions import Instruction
from flamia_ref.arithmetic.interval.operations import TANH_DIP
from flamia_ref.arithmetic.interval.tiles import Ends
from flamia_ref.attention import backward_tile, forward_tile, row_end, sides, softmax
from flamia_ref.attention.backward_pass import BackwardRun
from flamia_ref.attention.backward_tile import Prologue
from flamia_ref.attention.copies import copy_names
from flamia_ref.attention.knobs import DeltaSum
from flamia_ref.attention.product import Operand, Use
from flamia_ref.attention.stages import pair_names
from flamia_ref.golden.envelope import coding, contraction
from flamia_ref.golden.envelope.forward import any_tree, scores_of, unknown
from flamia_ref.golden.envelope.ranges import (
    HIGHEST,
    LOWEST,
    Range,
    corners,
    ends,
    exactly,
    floats,
    hull,
    of_ends,
    rising,
    stepped,
    where,
    zeroed,
)
from flamia_ref.golden.envelope.record import Record, taken
from flamia_ref.packing import PairOrder, TilePairs, guarded_blocks, passes, tile_pairs

Place = tuple[int, int, int]
Sums = dict[str, dict[Place, Ends]]


class _Rows(NamedTuple):
    """What rows of [tokens, heads] bring along, with a last one for places past a document's end."""

    base: NDArray[np.uint32]
    delta: Range
    dead: NDArray[np.bool_]


class BackwardEnvelope:
    """One backward. `run` has q, k, v, or the copies that a kernel made of them. `o`: O before its output rounding,
    where delta is of that; `machine` as in `ForwardEnvelope`."""

    def __init__(
        self, run: BackwardRun, record: Record, o: Range | None, machine: Instruction | None
    ) -> None:
        self.run, self.record, self.recipe, self.o = run, record, run.recipe, o
        self.machine = machine
        self.names = pair_names(run.recipe)

    def gradients(self, dout: Any, out: Any, lse: Any) -> None:
        """Go through every pair of tiles, and note what is permitted. dO and out [tokens, heads, channels] and lse
        [heads, tokens] are float32 bits."""
        run = self.run
        prologue = run._prologue(dout, out, lse)
        run.inputs["do"] = prologue.dout
        self._copies_of_dout()
        rows = run.tokens * run.heads
        late = self.recipe.backward.gradient.delta_source == "p_dp"
        delta = exactly(np.zeros(rows, dtype=np.uint32)) if late else self._delta(prologue, out)
        if late:
            delta = self._delta_of_pairs(prologue)
        shape = (run.tokens, run.heads)
        by_head = delta.mapped(lambda x: x.reshape(shape).T)
        self.record.put("delta", by_head)
        given = self.record.given.get("delta")
        if given is not None:
            delta = exactly(np.ascontiguousarray(given.T).reshape(-1))
        self._dsink(prologue, delta)
        self._pairs_of(prologue, delta)

    def _copies_of_dout(self) -> None:
        """The copies of dO are exact; where a kernel gave its own, those are used."""
        run = self.run
        for name in dict.fromkeys(copy_names(self.recipe)[use] for use in (Use.DP_DO, Use.DV_DO)):
            use = next(use for use, found in run.names.items() if found == name)
            copy = run.copy(use)
            codes, scales = copy.trace()
            for part, bits in (
                ("codes", codes),
                ("scales", scales),
                ("token_scales", copy.token_scales),
            ):
                if bits is not None:
                    self._put_codes(f"{name}.{part}", bits)
            taken_copy(run, self.record, name)

    def _put_codes(self, name: str, bits: Any) -> None:
        if name in self.record.wanted:
            of = self.record._of(name)
            of.low[...], of.high[...], of.known[...] = bits, bits, True

    def _delta(self, prologue: Prologue, out: Any) -> Range:
        """delta of rows, products as the recipe rounds them, added in any tree."""
        run, gradient = self.run, self.recipe.backward.gradient
        rows = run.tokens * run.heads
        dout = prologue.dout
        if gradient.delta_source == "quantized_dout":
            dout = run.makers["do"].values(run.copy(Use.DP_DO))
        of = exactly(out.reshape(rows, run.value_dim))
        if gradient.delta_source == "unrounded_out":
            if self.o is None:
                raise ValueError("the forward's O is needed for delta")
            of = self.o.mapped(lambda x: x.reshape(rows, run.value_dim))
        left = dout.reshape(rows, run.value_dim)
        rounded = corners(lambda x: _float32.multiply(left, x), of)
        if gradient.delta is DeltaSum.HALF_PRODUCTS:
            rounded = rising(sides.rounded_bfloat16, rounded)
        elif (
            gradient.delta is DeltaSum.FMA_ASCENDING
        ):  # a product may be added before it is rounded, or after
            rounded = _unrounded(left, of, rounded)
        zero = np.zeros(rows)
        delta = of_ends(any_tree(rounded, Ends(zero, zero, zero != 0)))
        if gradient.normalisation == "fold_into_dout":
            delta = zeroed(prologue.dead, delta)
        return delta

    def _delta_of_pairs(self, prologue: Prologue) -> Range:
        run = self.run
        rows = run.tokens * run.heads
        zero = np.zeros(rows, dtype=np.uint32)
        values = _with_last(prologue, exactly(zero))
        total = np.zeros(rows)
        sums = Ends(total.copy(), total.copy(), total != 0)
        order = PairOrder(queries=None)
        for pairs in tile_pairs(run.mask, run.heads, run.batch, run.size, order, unseen=False):
            index, inside = self._index(pairs)
            s, dp, visible, _ = self._scores(pairs, values, note=False)
            p = self._p(s, visible, values.base[index])
            terms = zeroed(~visible, corners(_float32.multiply, p, dp))
            at = np.where(inside, index, 0)
            new = any_tree(terms, Ends(sums.low[at], sums.high[at], sums.nan[at]))
            keep = inside & pairs.seen[:, None]
            for old, fresh in zip(sums, new, strict=True):
                old[index[keep]] = fresh[keep]
        rest = exactly(prologue.rest)
        return zeroed(prologue.dead, corners(_float32.multiply, of_ends(sums), rest))

    def _index(self, pairs: TilePairs) -> tuple[Any, Any]:
        run, tiles = self.run, pairs.queries
        tokens = tiles.query_tokens()
        inside = tokens >= 0
        index = np.where(inside, tokens * run.heads + tiles.head[:, None], run.tokens * run.heads)
        return index, inside

    def _pairs_of(self, prologue: Prologue, delta: Range) -> None:
        run = self.run
        values = _with_last(prologue, delta)
        sums: Sums = {name: {} for name in ("dq", "dq_partial", "dk", "dv")}
        order = run._order(2 if run.partials and run.head_dim >= 128 else 1)
        unseen = self.record.wants("s") or self.record.wants("dp")
        for turn, one in enumerate(passes(order, run.mask, run.size)):
            kept = {name for name in sums if name[1] != "q" or one.keys is not None}
            if one.queries is None:
                kept -= {"dk", "dv"}
            for pairs in tile_pairs(run.mask, run.heads, run.batch, run.size, one, unseen=unseen):
                self._pair(pairs, values, sums, kept, note=turn == 0)
        self._finish(prologue, sums)

    def _scores(
        self, pairs: TilePairs, values: _Rows, *, note: bool
    ) -> tuple[Range, Range, Any, Any]:
        """S and dP of a batch of pairs, which pairs count, and the guarded blocks."""
        run, recipe, tiles = self.run, self.recipe, pairs.queries
        kv_head = tiles.head // run.group
        query_tokens, key_tokens = tiles.query_tokens(), pairs.key_tokens()
        bounds = tiles.bounds(run.mask)
        guarded = None
        if any(getattr(recipe, product).guarded for product in ("s", "dp", "dq")):
            guarded = guarded_blocks(*bounds, query_tokens >= 0, pairs.key_first, tiles.keys)

        def rows(use: Use, tokens: Any, heads: Any) -> sides.Rows:
            return run.rows(use, tokens, heads)

        s = contraction.over_channels(
            rows(Use.S_Q, query_tokens, tiles.head),
            rows(Use.S_K, key_tokens, kv_head),
            recipe.s,
            guarded if recipe.s.guarded else None,
            self.machine,
        )
        dp = contraction.over_channels(
            rows(Use.DP_DO, query_tokens, tiles.head),
            rows(Use.DP_V, key_tokens, kv_head),
            recipe.backward.dp,
            guarded if recipe.backward.dp.guarded else None,
            self.machine,
        )
        index, _ = self._index(pairs)
        visible = forward_tile.pairs_visible(pairs.key_first, *bounds, tiles.keys)
        visible = visible & ~values.dead[index][:, :, None]
        if note:
            everything = np.ones(len(pairs), dtype=bool)
            self.record.put_tile("dp", tiles, pairs.key_first, everything, dp.low, dp.high, dp.nan)
        given_s = self.record.tile("s", tiles, pairs.key_first, tiles.rows, tiles.keys)
        if given_s is not None:  # its backward may have added in another order than its forward
            s = hull(s, taken(s, given_s, visible))
        dp = taken(
            dp, self.record.tile("dp", tiles, pairs.key_first, tiles.rows, tiles.keys), visible
        )
        return s, dp, visible, guarded

    def _p(self, s: Range, visible: Any, base: Any) -> Range:
        run, recipe = self.run, self.recipe
        scores = scores_of(s, self.run.factors, self.recipe.softmax)

        def at(x: Any) -> Any:
            return backward_tile.pair_probabilities(x, visible, base, run.factors.c, recipe)

        p = rising(at, scores)
        if p.certain:
            return p
        p = stepped(p, 2)
        low, high = np.where(p.low.view(np.float32) < 0, np.uint32(0), p.low), p.high
        lost = unknown(s) & visible
        if lost.any():
            low, high = np.where(lost, LOWEST, low), np.where(lost, HIGHEST, high)
        return Range(low, high, (p.nan | lost) & visible)

    def _pair(
        self, pairs: TilePairs, values: _Rows, sums: Sums, kept: set[str], *, note: bool
    ) -> None:
        run, recipe, tiles = self.run, self.recipe, pairs.queries
        gradient = recipe.backward.gradient
        s, dp, visible, guarded = self._scores(pairs, values, note=note)
        if not pairs.seen.any():
            return
        index, _ = self._index(pairs)
        p = self._p(s, visible, values.base[index])
        self._put("p.dv", pairs, p, note)
        p = self._taken("p.dv", pairs, p, visible)
        delta = values.delta.mapped(lambda x: x[index][:, :, None])
        if gradient.softmax_scale == "in_ds":
            scale = run.scale

            def distance(x: Any, y: Any) -> Any:
                return _float32.fma(x, scale, _float32.negate(_float32.multiply(y, scale)))

            apart = corners(distance, dp, _spread(delta, dp))
        else:
            apart = corners(_float32.subtract, dp, _spread(delta, dp))
        ds = corners(_float32.multiply, p, apart)
        if run.factors.cap is not None:
            ds = self._with_tanh(s, ds)
        if gradient.softmax_scale == "times_ds":
            ds = corners(lambda x: _float32.multiply(x, run.scale), ds)
        if gradient.masked_ds == "select":
            ds = zeroed(~visible, ds)
        self._put("ds", pairs, ds, note)
        ds = self._taken("ds", pairs, ds, visible)

        kv_head = tiles.head // run.group
        query_tokens, key_tokens = tiles.query_tokens(), pairs.key_tokens()
        dv_do = run.rows(Use.DV_DO, query_tokens, tiles.head)
        dq_k = run.rows(Use.DQ_K, key_tokens, kv_head)
        dk_q = run.rows(Use.DK_Q, query_tokens, tiles.head)
        weights = p
        if gradient.p_offset:
            k = np.full(p.low.shape, gradient.p_offset, dtype=np.int32)
            weights = rising(lambda x: _float32.shift(x, k), p)
        dv = self._coded(
            Use.DV_P, pairs, weights, recipe.backward.dv.left, _by_query(dv_do.fold), note
        )
        cut = ds
        if recipe.backward.dq.guarded and guarded is not None:
            cut = zeroed(contraction.in_guarded(guarded, ds.low.shape), ds)
        fold = None if dq_k.fold is None else dq_k.fold[:, None, :]
        dq = self._coded(
            Use.DQ_DS,
            pairs,
            _in_units(cut, recipe.backward.dq.left),
            recipe.backward.dq.left,
            fold,
            note,
        )
        dk = dq
        if recipe.backward.dk.left.same_codes_as is None:
            units = _in_units(ds, recipe.backward.dk.left)
            dk = self._coded(
                Use.DK_DS, pairs, units, recipe.backward.dk.left, _by_query(dk_q.fold), note
            )

        places = self._places(pairs)

        def gathered(name: str, rows: int, width: int) -> Ends:
            blank = Ends(
                np.zeros((rows, width)),
                np.zeros((rows, width)),
                np.zeros((rows, width), dtype=bool),
            )
            found = [sums[name].get(place, blank) for place in places[name]]
            return Ends(*(np.stack(column) for column in zip(*found, strict=True)))

        keys, rows = tiles.keys, tiles.rows
        new: dict[str, Ends] = {}
        if "dv" in kept:
            new["dv"] = contraction.over_rows(
                coding.factor(dv, recipe.backward.dv.left, over_queries=True),
                contraction.right_over_rows(
                    dv_do, recipe.backward.dv.right, recipe.backward.dv.instruction, self.machine
                ),
                gathered("dv", keys, run.value_dim),
                recipe.backward.dv.instruction,
                self.machine,
            )
            new["dk"] = contraction.over_rows(
                coding.factor(dk, recipe.backward.dk.left, over_queries=True),
                contraction.right_over_rows(
                    dk_q, recipe.backward.dk.right, recipe.backward.dk.instruction, self.machine
                ),
                gathered("dk", keys, run.head_dim),
                recipe.backward.dk.instruction,
                self.machine,
            )
        if "dq" in kept:
            begin = gathered("dq", rows, run.head_dim)
            chain = begin
            if run.partials:
                opened = gathered("dq_partial", rows, run.head_dim)
                opens = pairs.opens[:, None, None]
                chain = Ends(*(np.where(opens, np.zeros_like(x), x) for x in opened))
            end = contraction.over_rows(
                coding.factor(dq, recipe.backward.dq.left, over_queries=False),
                contraction.right_over_rows(
                    dq_k, recipe.backward.dq.right, recipe.backward.dq.instruction, self.machine
                ),
                chain,
                recipe.backward.dq.instruction,
                self.machine,
            )
            if recipe.backward.dq.guarded and guarded is not None:
                inside = contraction.in_guarded(guarded, ds.low.shape)
                high = coding.high_factor(zeroed(~inside, ds))
                end = contraction.over_guarded_keys(
                    high, dq_k, end, recipe.backward.dq, guarded, self.machine
                )
            if run.partials:
                new["dq_partial"] = end
                closed = ends(rising(_float32.add, of_ends(begin), of_ends(end)))
                closes = pairs.closes[:, None, None]
                end = Ends(*(np.where(closes, x, y) for x, y in zip(closed, begin, strict=True)))
            new["dq"] = end
        for name, value in new.items():
            for at in np.flatnonzero(pairs.seen):
                sums[name][places[name][at]] = Ends(*(x[at] for x in value))

    def _with_tanh(self, s: Range, ds: Range) -> Range:
        """dS times 1 - tanh^2."""
        run = self.run

        def tanh(x: Any) -> Any:
            return softmax.scores(x, run.factors, self.recipe.softmax)[1]

        t = stepped(rising(tanh, s), TANH_DIP)

        def factor(x: Any) -> Any:
            return _float32.fma(_float32.negate(x), x, _float32.ONE)

        found = corners(factor, t)
        across = ((t.low ^ t.high) & _float32.SIGN) != 0
        found = Range(found.low, np.where(across, _float32.ONE, found.high), found.nan)
        return corners(_float32.multiply, ds, found)

    def _coded(
        self, use: Use, pairs: TilePairs, x: Range, operand: Operand, fold: Any, note: bool
    ) -> coding.Coded:
        record, tiles, name = self.record, pairs.queries, self.names[use]
        codes = record.tile(f"{name}.codes", tiles, pairs.key_first, tiles.rows, tiles.keys)
        scales, step = None, (1, 1)
        if operand.block is not None:
            step = (int(operand.block[0]), int(operand.block[1]))
            shape = (tiles.rows // step[0], tiles.keys // step[1])
            scales = record.tile(f"{name}.scales", tiles, pairs.key_first, *shape, step)
        found = coding.coded(x, operand, fold, codes, scales)
        if note:
            record.put_tile(
                f"{name}.codes", tiles, pairs.key_first, pairs.seen, found.low, found.high, x.nan
            )
            if found.low_scales is not None and found.high_scales is not None:
                record.put_tile(
                    f"{name}.scales",
                    tiles,
                    pairs.key_first,
                    pairs.seen,
                    found.low_scales,
                    found.high_scales,
                    step=step,
                )
        return found

    def _put(self, name: str, pairs: TilePairs, x: Range, note: bool) -> None:
        if note:
            self.record.put_tile(
                name, pairs.queries, pairs.key_first, pairs.seen, x.low, x.high, x.nan
            )

    def _taken(self, name: str, pairs: TilePairs, x: Range, visible: Any) -> Range:
        tiles = pairs.queries
        return taken(
            x, self.record.tile(name, tiles, pairs.key_first, tiles.rows, tiles.keys), visible
        )

    def _places(self, pairs: TilePairs) -> dict[str, list[Place]]:
        tiles, run = pairs.queries, self.run
        keys = list(
            zip(
                tiles.document.tolist(),
                tiles.head.tolist(),
                tiles.first.tolist(),
                pairs.key_first.tolist(),
                strict=True,
            )
        )
        return run._places(keys)

    def _finish(self, prologue: Prologue, sums: Sums) -> None:
        """The gradients from the sums of all tiles."""
        run, gradient = self.run, self.recipe.backward.gradient
        chains = run.chains
        scaled = gradient.softmax_scale == "epilogue"
        dq = self._packed(sums["dq"], run.heads, run.mask.queries, run.head_dim)
        dq = dq.mapped(lambda x: x[:, :, None])
        found = {"dq": (dq, Use.DQ_K, 1, scaled)}
        for name, use, width in (("dk", Use.DK_Q, run.head_dim), ("dv", Use.DV_DO, run.value_dim)):
            x = self._packed(sums[name], run.kv_heads * chains, run.mask.keys, width)
            shape = (run.mask.keys.tokens, run.kv_heads, chains, width)
            found[name] = (
                _shaped(x, shape),
                use,
                chains,
                scaled and name == "dk",
            )
        for name, (x, use, count, by_scale) in found.items():
            if not run.skips:
                nan = (
                    run._poisoned(np.zeros(x.low.shape, dtype=np.uint32), use, count)
                    == _float32.NAN
                )
                x = where(nan, exactly(np.full(x.low.shape, _float32.NAN)), x)
            if name == "dq" and (not run.skips or gradient.normalisation == "fold_into_dout"):
                dead = prologue.dead.reshape(run.tokens, run.heads, 1, 1)
                x = zeroed(np.broadcast_to(dead, x.low.shape), x)
            self.record.put(name, self._gradient(x, scaled=by_scale))

    def _dsink(self, prologue: Prologue, delta: Range) -> None:
        """The gradient of the sink, the rows of a head added in any tree."""
        run = self.run
        if run.sink is None or not self.record.wants("dsink"):
            return
        shape = (run.tokens, run.heads)
        parts = row_end.sink_parts(run.sink[None, :], self.recipe.softmax)
        p = backward_tile.sink_probabilities(
            parts, prologue.base.reshape(shape), run.sink[None, :], self.recipe
        )
        terms = corners(lambda x: _float32.multiply(p, x), _shaped(delta, shape))
        terms = zeroed(prologue.dead.reshape(shape), terms)
        zero = np.zeros(run.heads)
        total = of_ends(any_tree(terms.mapped(np.transpose), Ends(zero, zero, zero != 0)))
        flipped = Range(_float32.negate(total.high), _float32.negate(total.low), total.nan)
        self.record.put("dsink", flipped)

    def _gradient(self, x: Range, *, scaled: bool) -> Range:
        """bfloat16 values of the heads' sums [tokens, heads, chains, channels], added in any tree."""
        if x.low.shape[2] == 1:
            total = x.mapped(lambda y: y[:, :, 0])
        else:
            moved = x.mapped(lambda y: np.moveaxis(y, 2, 3))
            zero = np.zeros(moved.low.shape[:3])
            total = of_ends(any_tree(moved, Ends(zero, zero, zero != 0)))
        if scaled:
            total = corners(lambda y: _float32.multiply(y, self.run.scale), total)
        return rising(sides.rounded_bfloat16, total)

    def _packed(self, tiles: dict[Place, Ends], heads: int, documents: Any, width: int) -> Range:
        shape = (documents.tokens, heads, width)
        low, high, nan = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=bool)
        for (document, head, first), x in tiles.items():
            begin = documents.offsets[document] + first
            end = min(begin + len(x.low), documents.offsets[document + 1])
            for whole, part in zip((low, high, nan), x, strict=True):
                whole[begin:end, head] = part[: end - begin]
        return of_ends(Ends(low, high, nan))


def taken_copy(run: Any, record: Record, name: str) -> None:
    """Use the codes and scales that a kernel gave of a copy of an input."""
    parts = {
        part: record.given.get(f"{name}.{part}") for part in ("codes", "scales", "token_scales")
    }
    if all(bits is None for bits in parts.values()):
        return
    use = next(use for use, found in run.names.items() if found == name)
    copy = run.copy(use)
    codes, scales = copy.trace()
    own = {"codes": codes, "scales": scales, "token_scales": copy.token_scales}
    chosen = {part: own[part] if bits is None else bits for part, bits in parts.items()}
    maker = run.makers[name.split(".")[0]]
    run._copies[name] = maker.given(
        chosen["codes"], chosen["scales"], chosen["token_scales"], copy.operand
    )


def _with_last(prologue: Prologue, delta: Range) -> _Rows:
    def last(x: Any, value: Any) -> Any:
        return np.concatenate([x, np.full((1,), value, dtype=x.dtype)])

    low = last(delta.low, 0)
    high = low if delta.certain else last(delta.high, 0)
    return _Rows(
        last(prologue.base, 0), Range(low, high, last(delta.nan, False)), last(prologue.dead, True)
    )


def _shaped(x: Range, shape: tuple[int, ...]) -> Range:
    return x.mapped(lambda y: y.reshape(shape))


def _spread(x: Range, like: Range) -> Range:
    """`x` in the shape of another range."""
    return x.mapped(lambda y: np.broadcast_to(y, like.low.shape))


def _unrounded(left: Any, of: Range, rounded: Range) -> Range:
    """Products that may be rounded before they are added, or with the sum: a float32 further out where they do not fit
    one."""
    wide = floats(left)
    exact = [wide * floats(end) for end in ((of.low,) if of.certain else (of.low, of.high))]
    with np.errstate(invalid="ignore", over="ignore"):
        fits = np.logical_and.reduce([x.astype(np.float32).astype(np.float64) == x for x in exact])
        fits |= np.logical_or.reduce([~np.isfinite(x) for x in exact])
        low = np.nextafter(rounded.low.view(np.float32), np.float32(-np.inf)).view(np.uint32)
        high = np.nextafter(rounded.high.view(np.float32), np.float32(np.inf)).view(np.uint32)
    if fits.all():
        return rounded
    return Range(np.where(fits, rounded.low, low), np.where(fits, rounded.high, high), rounded.nan)


def _in_units(x: Range, operand: Operand) -> Range:
    return rising(lambda y: sides.in_static_units(y, operand), x)


def _by_query(fold: Any) -> Any:
    return None if fold is None else fold[:, :, None]
