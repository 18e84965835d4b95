"""The forward on ranges: tile by tile as `flamia_ref.attention.forward_pass`, with what a kernel gave in its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _float32
from flamia_ref.arithmetic.instructions import Instruction
from flamia_ref.arithmetic.interval.operations import TANH_DIP
from flamia_ref.arithmetic.interval.tiles import Ends, Factor
from flamia_ref.attention import forward_tile, row_end, sides, softmax
from flamia_ref.attention.forward_pass import ForwardRun
from flamia_ref.attention.knobs import Softmax
from flamia_ref.attention.product import Accumulation, TileOrder, Use
from flamia_ref.attention.stages import pair_names
from flamia_ref.golden.envelope import coding, contraction
from flamia_ref.golden.envelope.ranges import (
    HIGHEST,
    LOWEST,
    Range,
    between,
    ends,
    exactly,
    floats,
    hull,
    least_and_greatest,
    of_ends,
    rising,
    stepped,
    where,
    zeroed,
)
from flamia_ref.golden.envelope.record import Record, taken
from flamia_ref.packing import QueryTiles, guarded_blocks, query_tiles

Flags = NDArray[np.bool_]
_MOST_WAYS = 24  # through decisions that may go either way, a batch of query tiles


class _State(NamedTuple):
    """What a row carries on: the maximum [tiles, rows], the sum, the accumulator [tiles, rows, channels], how many
    decisions it has made that could have gone either way, and whether there were too many to follow."""

    row_max: Range
    row_sum: Ends
    o: Ends
    decisions: NDArray[np.int32]
    lost: Flags


class _Keys(NamedTuple):
    """What is the same for all ways through a key tile."""

    key_start: Any
    skipped: Flags
    visible: Flags
    guarded: Any
    s: Range
    right: Factor
    v: sides.Rows


class ForwardEnvelope:
    """One forward. `run` has the inputs, or the copies that a kernel made of them. `machine`: the instruction that adds
    the products, None for those of the recipe."""

    def __init__(self, run: ForwardRun, record: Record, machine: Instruction | None) -> None:
        self.run, self.record, self.recipe, self.machine = run, record, run.recipe, machine
        self.names = pair_names(run.recipe)
        self.nan = run._nan_channels() if run.poisons else None
        self.factors = run.factors  # of the batch of query tiles

    def all_tiles(self) -> None:
        """Go through every query tile, and note what is permitted."""
        run = self.run
        for tiles in query_tiles(run.mask, run.heads, run.batch, run.size):
            self._tiles(tiles)

    def _tiles(self, tiles: QueryTiles) -> None:
        run = self.run
        self.factors = run.factors_of(tiles)
        bounds = tiles.bounds(run.mask)
        begin, end = tiles.key_tiles(bounds[1], bounds[0])
        if run.whole:
            begin, end = np.zeros_like(begin), -(-tiles.key_length // tiles.keys)
        self._unseen(tiles, begin, end)
        keys = [
            self._keys(tiles, bounds, begin, end, step)
            for step in range(int((end - begin).max(initial=0)))
        ]
        found: tuple[Range, Range, Range, Range] | None = None
        lost = np.zeros(bounds[0].shape, dtype=bool)
        # A way is the decisions that go up, by their number in the row, and the rows that have so many. Each leads to
        # those in which one later decision goes up too: so every sequence of decisions comes once.
        waiting: list[tuple[tuple[bool, ...], Flags | None]] = [((), None)]
        for way, rows in waiting:
            state = self._way(tiles, keys, way, rows)
            results = self._end(tiles, bounds, state)
            mine = np.ones_like(lost) if rows is None else rows
            lost |= mine & (state.lost | _without_inverse(state.row_sum))
            if found is None:
                found = results
            else:
                found = tuple(  # type: ignore[assignment]
                    where(_like(mine, x.low), hull(x, y), x)
                    for x, y in zip(found, results, strict=True)
                )
            decisions = np.where(mine & ~lost, state.decisions, 0)
            for at in range(len(way), int(decisions.max(initial=0))):
                if len(waiting) >= _MOST_WAYS:
                    lost |= decisions > at
                    break
                waiting.append(((*way, *[False] * (at - len(way)), True), decisions > at))
        if found is not None:
            self._note(tiles, bounds, found, lost)
        if lost.any():
            self._forget(tiles, keys, lost)

    def _forget(self, tiles: QueryTiles, keys: list[_Keys], rows: Flags) -> None:
        """Permit anything of the pairs of rows whose decisions were not all followed."""
        name, block = self.names[Use.O_P], self._block_step()
        for of in keys:
            for stage, step in (
                ("p", (1, 1)),
                (f"{name}.codes", (1, 1)),
                (f"{name}.scales", block),
            ):
                self.record.forget(stage, tiles, of.key_start, ~of.skipped, rows, tiles.keys, step)

    def _keys(self, tiles: QueryTiles, bounds: Any, begin: Any, end: Any, step: int) -> _Keys:
        run, recipe = self.run, self.recipe
        descending = recipe.o.tile_order.under(run.mask.bounded) is TileOrder.DESCENDING
        index = end - 1 - step if descending else begin + step
        skipped = begin + step >= end
        key_start = np.where(skipped, 0, index * tiles.keys).astype(np.int32)
        guarded = None
        if recipe.s.guarded or recipe.o.guarded:
            guarded = guarded_blocks(
                bounds[0], bounds[1], tiles.query_tokens() >= 0, key_start, tiles.keys
            )
        kv_head = tiles.head // run.group
        tokens = tiles.key_tokens(key_start)
        v = run.rows(Use.O_V, tokens, kv_head)
        s = self._scores(tiles, key_start, ~skipped, guarded if recipe.s.guarded else None)
        visible = forward_tile.pairs_visible(key_start, bounds[0], bounds[1], tiles.keys)
        given = self.record.tile("s", tiles, key_start, tiles.rows, tiles.keys)
        return _Keys(
            key_start,
            skipped,
            visible,
            guarded,
            taken(s, given, visible),
            contraction.right_over_rows(v, recipe.o.right, recipe.o.instruction, self.machine),
            v,
        )

    def _scores(self, tiles: QueryTiles, key_start: Any, worked: Flags, guarded: Any) -> Range:
        run = self.run
        queries = run.rows(Use.S_Q, tiles.query_tokens(), tiles.head)
        keys = run.rows(Use.S_K, tiles.key_tokens(key_start), tiles.head // run.group)
        s = contraction.over_channels(queries, keys, self.recipe.s, guarded, self.machine)
        self.record.put_tile("s", tiles, key_start, worked, s.low, s.high, s.nan)
        return s

    def _unseen(self, tiles: QueryTiles, begin: Any, end: Any) -> None:
        """S of pairs of tiles that nothing else is computed of, where it is asked for."""
        if not self.record.wants("s"):
            return
        for index in range(int((-(-tiles.key_length // tiles.keys)).max(initial=0))):
            start = np.full(len(tiles), index * tiles.keys, dtype=np.int32)
            missing = ((index < begin) | (index >= end)) & (start < tiles.key_length)
            if missing.any():
                self._scores(tiles, start, missing, None)

    def _way(
        self, tiles: QueryTiles, keys: list[_Keys], way: tuple[bool, ...], rows: Flags | None
    ) -> _State:
        """All key tiles. The decisions of a row that may go either way go as `way` says, those after it down."""
        run = self.run
        start = forward_tile.start(len(tiles), tiles.rows, run.value_dim, self.recipe)
        zero = np.zeros((len(tiles), tiles.rows))
        wide = np.zeros((len(tiles), tiles.rows, run.value_dim))
        state = _State(
            exactly(start.row_max),
            Ends(zero, zero, zero != 0),
            Ends(wide, wide, wide != 0),
            np.zeros(zero.shape, dtype=np.int32),
            np.zeros(zero.shape, dtype=bool),
        )
        for step, of in enumerate(keys):
            first = np.full(len(tiles), step == 0)
            state = self._step(tiles, state, of, first, way, rows)
        return state

    def _step(
        self,
        tiles: QueryTiles,
        state: _State,
        of: _Keys,
        first: Flags,
        way: tuple[bool, ...],
        rows: Flags | None,
    ) -> _State:
        recipe, knobs = self.recipe, self.recipe.softmax
        scores = scores_of(of.s, self.factors, self.recipe.softmax)
        whole = tiles.keys == recipe.tiles.key
        new, factor, open_, lost = self._advanced(scores, of.visible, state, first, whole, way)
        base = rising(lambda x: softmax.base_of(x, knobs), new)
        p = self._p(scores, of.visible, base)
        step = self._block_step()
        self._put("p", tiles, of, p, rows)
        p = taken(p, self.record.tile("p", tiles, of.key_start, tiles.rows, tiles.keys), of.visible)
        name = self.names[Use.O_P]
        guarded = of.guarded if recipe.o.guarded else None
        cut = p if guarded is None else zeroed(contraction.in_guarded(guarded, p.low.shape), p)
        fold = None if of.v.fold is None else of.v.fold[:, None, :]
        operand = recipe.o.left
        codes = self.record.tile(f"{name}.codes", tiles, of.key_start, tiles.rows, tiles.keys)
        scales = None
        if operand.block is not None:
            shape = (tiles.rows // step[0], tiles.keys // step[1])
            scales = self.record.tile(f"{name}.scales", tiles, of.key_start, *shape, step)
        coded = coding.coded(cut, operand, fold, codes, scales)
        worked = ~of.skipped
        self.record.put_tile(
            f"{name}.codes", tiles, of.key_start, worked, coded.low, coded.high, cut.nan, rows=rows
        )
        if coded.low_scales is not None and coded.high_scales is not None:
            self.record.put_tile(
                f"{name}.scales",
                tiles,
                of.key_start,
                worked,
                coded.low_scales,
                coded.high_scales,
                step=step,
                rows=rows,
            )
        row_sum = self._summed(state.row_sum, factor, p, coded, fold, guarded)
        begin = Ends(*_scaled(state.o, factor))
        partial = recipe.o.accumulation is Accumulation.FLOAT32_PARTIALS
        left = coding.factor(coded, operand, over_queries=False)
        zeros = np.zeros_like(begin.low)
        o = contraction.over_rows(
            left,
            of.right,
            Ends(zeros, zeros, zeros != 0) if partial else begin,
            recipe.o.instruction,
            self.machine,
        )
        if guarded is not None:
            high = coding.high_factor(zeroed(~contraction.in_guarded(guarded, p.low.shape), p))
            o = contraction.over_guarded_keys(high, of.v, o, recipe.o, guarded, self.machine)
        if partial:
            o = ends(rising(_float32.add, of_ends(begin), of_ends(o)))
        keep = of.skipped
        wide = keep[:, None, None]
        return _State(
            where(keep[:, None], state.row_max, new),
            Ends(
                *(
                    np.where(keep[:, None], x, y)
                    for x, y in zip(state.row_sum, row_sum, strict=True)
                )
            ),
            Ends(*(np.where(wide, x, y) for x, y in zip(state.o, o, strict=True))),
            state.decisions + np.where(keep[:, None], 0, open_).astype(np.int32),
            state.lost | (lost & ~keep[:, None]),
        )

    def _put(self, name: str, tiles: QueryTiles, of: _Keys, x: Range, rows: Flags | None) -> None:
        self.record.put_tile(
            name, tiles, of.key_start, ~of.skipped, x.low, x.high, x.nan, rows=rows
        )

    def _block_step(self) -> tuple[int, int]:
        block = self.recipe.o.left.block
        return (1, 1) if block is None else (int(block[0]), int(block[1]))

    def _advanced(
        self,
        s: Range,
        visible: Flags,
        state: _State,
        first: Flags,
        whole: bool,
        way: tuple[bool, ...],
    ) -> tuple[Range, Ends, Flags, Flags]:
        """The new maximum, what brings sums to it, which rows could have decided otherwise, and which are lost."""
        knobs, c = self.recipe.softmax, self.factors.c
        old, integer = state.row_max, knobs.base == "integer_max"
        always = replace(knobs, rescale_threshold=0)

        def advanced(scores: Any, row_max: Any, which: Any) -> Any:
            return softmax.advanced(scores, visible, row_max, first, whole, c, which)

        low, high = advanced(s.low, old.low, always), advanced(s.high, old.high, always)
        pick = np.array((*way, False))[np.minimum(state.decisions, len(way))]
        no = np.zeros(low.shape, dtype=bool)
        open_ = no
        if knobs.rescale_threshold:
            kept = advanced(s.low, old.high, knobs) == old.high
            other = advanced(s.high, old.low, knobs) == old.low
            open_ = kept != other
            keep = (kept & other) | (open_ & ~pick)
            low, high = np.where(keep, old.low, low), np.where(keep, old.high, high)
        lost = _float32.is_nan(low) != _float32.is_nan(high)
        lost |= (unknown(s) & visible).any(axis=2)
        if integer:
            apart = (low != high) & ~lost
            distance = _float32.to_int32(_float32.subtract(high, low))
            lost |= apart & (distance != 1)
            open_ = open_ | apart
            low = high = np.where(apart & pick, high, low)
        new = between(low, high)
        unchanged = advanced(s.high, old.low, always) == old.low
        unchanged &= old.low == old.high
        if knobs.rescale_threshold:
            unchanged |= keep
        least = softmax.rescale(old.low, new.high, first, c, knobs)
        most = (
            least
            if old.certain and new.certain
            else softmax.rescale(old.high, new.low, first, c, knobs)
        )
        if integer:
            factor = np.ldexp(1.0, np.clip(least, -2000, 1000))
            return new, Ends(factor, factor, no), open_, lost
        one = unchanged & ~first[:, None] & (old.low != softmax.start_max(knobs))
        least, most = (np.where(one, _float32.ONE, x) for x in (least, most))
        found = between(least, most)
        return new, Ends(floats(found.low), floats(found.high), found.nan), open_, lost

    def _p(self, s: Range, visible: Flags, base: Range) -> Range:
        knobs, c = self.recipe.softmax, self.factors.c

        def again(scores: Any, relative_to: Any) -> Any:
            return softmax.again(scores, visible, relative_to, c, knobs)

        low = again(s.low, base.high)
        if s.certain and base.certain:
            return exactly(low)
        p = stepped(between(low, again(s.high, base.low)), 2)
        floor = np.where(p.low.view(np.float32) < 0, np.uint32(0), p.low)
        # What is unknown in S is a number all the same where it is masked.
        nan = p.nan | ((s.nan | np.broadcast_to(base.nan[:, :, None], s.nan.shape)) & visible)
        return Range(floor, p.high, nan)

    def _summed(
        self,
        row_sum: Ends,
        factor: Ends,
        p: Range,
        coded: coding.Coded,
        fold: Any,
        guarded: Any,
    ) -> Ends:
        """The row sum after the columns of a key tile, added in any tree."""
        terms = p
        if self.recipe.softmax.row_sum_of == "codes":
            terms = coded.values
            if fold is not None:
                back = np.int32(127) - np.broadcast_to(fold, p.low.shape).astype(np.int32)
                terms = rising(lambda x: _float32.shift(x, back), terms)
            if guarded is not None:
                high = rising(sides.rounded_bfloat16, p)
                terms = where(contraction.in_guarded(guarded, p.low.shape), high, terms)
        begin = Ends(*_scaled(row_sum, factor))
        return any_tree(terms, begin)

    def _end(
        self, tiles: QueryTiles, bounds: Any, state: _State
    ) -> tuple[Range, Range, Range, Range]:
        """O, lse, the maximum and the sum of rows at their end."""
        run = self.run
        row_sum = of_ends(state.row_sum)
        o = of_ends(state.o)
        if self.nan is not None:
            kv_head = tiles.head // run.group
            bad = self.nan[tiles.document * run.kv_heads + kv_head][:, None, :]
            bad = np.broadcast_to(bad, o.low.shape)
            nan = exactly(np.full(o.low.shape, _float32.NAN))
            o = where(bad, nan, o)
        row_max = state.row_max

        def finished(o_bits: Any, max_bits: Any, sum_bits: Any) -> row_end.Row:
            return self._finished(tiles, bounds, o_bits, max_bits, sum_bits)

        found = [
            finished(x, m, s) for x in _both(o) for m in _both(row_max) for s in _both(row_sum)
        ]
        o, lse, most, total = (least_and_greatest([row[at] for row in found]) for at in range(4))
        return o, lse, most, total

    def _finished(
        self, tiles: QueryTiles, bounds: Any, o: Any, row_max: Any, row_sum: Any
    ) -> row_end.Row:
        """The simulator's own end of rows."""
        run, knobs = self.run, self.recipe.softmax
        sink = None if run.sink is None else run.sink[tiles.head]
        lanes = np.zeros((*row_sum.shape, softmax.lanes(knobs)), dtype=np.uint32)
        lanes[..., 0] = row_sum
        descale = run.descales(Use.O_V, tiles.document, tiles.head // run.group)
        return row_end.finished(
            o,
            row_max,
            lanes,
            sink,
            bounds[1] < 0,
            self.factors.c,
            knobs,
            descale,
            self.factors.natural,
        )

    def _pair(self, tiles: QueryTiles, bounds: Any, lse: Range) -> Range:
        """lse as the kernel's own maximum and sum give it, where both were given: they are judged by that, together."""
        tokens, heads, record = tiles.query_tokens(), tiles.head, self.record
        most, total = (
            record.rows(name, tokens, heads, heads_first=True) for name in ("row_max", "row_sum")
        )
        if most is None or total is None or self.run.sink is not None:
            return lse
        nothing = np.zeros((*most.shape, 1), dtype=np.uint32)
        own = self._finished(tiles, bounds, nothing, most, total).lse
        with np.errstate(invalid="ignore"):
            fits = (floats(own) >= floats(lse.low)) & (floats(own) <= floats(lse.high))
        fits |= _float32.is_nan(own) & lse.nan
        record.put_pair(tokens, heads, fits)
        return exactly(own)

    def _note(
        self, tiles: QueryTiles, bounds: Any, found: tuple[Range, Range, Range, Range], lost: Flags
    ) -> None:
        tokens, heads, record = tiles.query_tokens(), tiles.head, self.record
        o, lse, row_max, row_sum = (
            Range(
                np.where(_like(lost, x.low), LOWEST, x.low),
                np.where(_like(lost, x.low), HIGHEST, x.high),
                x.nan | _like(lost, x.low),
            )
            if lost.any()
            else x
            for x in found
        )
        record.put_rows("row_max", tokens, heads, row_max, heads_first=True)
        record.put_rows("row_sum", tokens, heads, row_sum, heads_first=True)
        lse = self._pair(tiles, bounds, lse)
        record.put_rows("lse", tokens, heads, lse, heads_first=True)
        record.put_rows("o", tokens, heads, o, heads_first=False)
        given = record.rows("o", tokens, heads, heads_first=False)
        if given is not None:
            o = exactly(given)
        out = rising(lambda x: forward_tile.output(x).astype(np.uint32) << np.uint32(16), o)
        record.put_rows("out", tokens, heads, out, heads_first=False)


def any_tree(terms: Range, begin: Ends) -> Ends:
    """begin + the sum of terms along the last axis, by float32 additions to nearest in any order and any tree."""
    both = ends(terms)
    bad = np.isnan(both.low)
    lost = (~bad & ~(np.isfinite(both.low) & np.isfinite(both.high))).any(axis=-1)
    lost |= (
        (both.nan & ~bad).any(axis=-1)
        | (begin.nan & ~np.isnan(begin.low))
        | np.isinf(begin.low)
        | np.isinf(begin.high)
    )
    low, high = (np.where(np.isfinite(end), end, 0.0) for end in (both.low, both.high))
    start_low, start_high = (
        np.where(np.isfinite(end), end, 0.0) for end in (begin.low, begin.high)
    )
    count = (high != low).sum(axis=-1) + ((high == low) & (high != 0.0)).sum(axis=-1)
    up = np.maximum(high, 0.0).sum(axis=-1) + np.maximum(start_high, 0.0)
    down = np.maximum(-low, 0.0).sum(axis=-1) + np.maximum(-start_low, 0.0)
    most = np.maximum(up, down)
    error = np.zeros(most.shape)
    for _ in range(2):
        unit = np.spacing(np.maximum(most + error, 2.0**-126).astype(np.float32)).astype(np.float64)
        error = (count + 1) * 0.5 * unit * (1 + 2.0**-20)
    grid = _grid_of(low, high, start_low, start_high)
    error = np.where(
        most < grid * 2.0**24, 0.0, error + (terms.low.shape[-1] + 2) * 2.0**-52 * (up + down)
    )
    total_low, total_high = (
        low.sum(axis=-1) + start_low - error,
        high.sum(axis=-1) + start_high + error,
    )
    only = bad.any(axis=-1) | np.isnan(begin.low)
    total_low, total_high = np.where(lost, -np.inf, total_low), np.where(lost, np.inf, total_high)
    total_low, total_high = _outward(total_low, total_high)
    return Ends(np.where(only, np.nan, total_low), np.where(only, np.nan, total_high), lost | only)


def scores_of(s: Range, factors: softmax.Factors, knobs: Softmax) -> Range:
    """The scores that c multiplies."""
    scores = rising(lambda x: softmax.scores(x, factors, knobs)[0], s)
    return stepped(scores, TANH_DIP) if factors.cap is not None else scores


def _grid_of(low: Any, high: Any, start_low: Any, start_high: Any) -> Any:
    from flamia_ref.arithmetic.interval.terms import place_of, power

    place = np.where(low == high, place_of(low), -1000)
    begin = np.where(start_low == start_high, place_of(start_low), -1000)
    return power(np.clip(np.minimum(place.min(axis=-1, initial=4000), begin), -1000, 900))


def _outward(low: Any, high: Any) -> tuple[Any, Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        down, up = low.astype(np.float32), high.astype(np.float32)
        down = np.where(down > low, np.nextafter(down, np.float32(-np.inf)), down)
        up = np.where(up < high, np.nextafter(up, np.float32(np.inf)), up)
    return down.astype(np.float64), up.astype(np.float64)


def _without_inverse(row_sum: Ends) -> Flags:
    """Sums of which the reciprocal says nothing at their ends: that may be zero, or infinite, and something else."""
    apart = row_sum.low != row_sum.high
    apart &= ~np.isnan(row_sum.low)
    infinite = np.isinf(row_sum.low) | np.isinf(row_sum.high)
    return np.asarray(apart & (infinite | (row_sum.low <= 0.0)))


def unknown(x: Range) -> Flags:
    """Where a value may be infinite or NaN and something else besides: nothing follows from its ends."""
    if x.certain:
        return np.zeros(x.low.shape, dtype=bool)
    infinite = ((x.low & _float32.MAGNITUDE) >= HIGHEST) | (
        (x.high & _float32.MAGNITUDE) >= HIGHEST
    )
    return np.asarray((x.low != x.high) & infinite)


def _scaled(x: Ends, factor: Ends) -> tuple[Any, Any, Any]:
    """Sums times a factor that is not negative, rounded to float32."""
    wide = [f.reshape(f.shape + (1,) * (x.low.ndim - f.ndim)) for f in factor]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        found = [
            np.where(f == 1.0, end, (end * f).astype(np.float32).astype(np.float64))
            for end in (x.low, x.high)
            for f in wide[:2]
        ]
        low, high = np.minimum.reduce(found), np.maximum.reduce(found)
    bad = np.isnan(low) | np.isnan(high)
    only = np.isnan(x.low) | np.isnan(wide[0])
    low = np.where(only, np.nan, np.where(bad, -np.inf, low))
    high = np.where(only, np.nan, np.where(bad, np.inf, high))
    return low, high, x.nan | np.broadcast_to(wide[2], x.nan.shape) | bad


def _both(x: Range) -> tuple[Any, ...]:
    return (x.low,) if x.certain else (x.low, x.high)


def _like(rows: Flags, x: Any) -> Flags:
    return rows.reshape(rows.shape + (1,) * (x.ndim - rows.ndim)) if x.ndim > rows.ndim else rows
