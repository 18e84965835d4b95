"""The backward of a recipe over packed documents, from out and lse alone: layout around the tile numerics."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.attention import backward_tile, inputs, row_softmax, softmax
from flamia_ref.attention.backward_tile import Accumulators
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.kernel_results import check_backward
from flamia_ref.attention.product import Accumulation, Use
from flamia_ref.attention.results import Backward, Forward
from flamia_ref.attention.run import Late, Run, Sizes
from flamia_ref.attention.softmax import Factors
from flamia_ref.attention.stages import backward_stages, pair_names
from flamia_ref.attention.traced import (
    Key,
    TracedTiles,
    Wanted,
    check_tiles,
    check_trace,
    tile_keys,
)
from flamia_ref.packing import (
    Documents,
    PairOrder,
    TilePairs,
    guarded_blocks,
    passes,
    tile_pairs,
)
from flamia_ref.packing.tiles import Indices

Place = tuple[int, int, int]  # document, head, first token of a tile
Kept = tuple[Late, int]  # the sums of a batch of pairs, and which of them
Sums = dict[str, dict[Place, Kept]]

_ROWS = 1024  # rows before and after the tiles that are computed together
_PAIRED_FROM = 128  # head_dim from which a partial sum of dQ takes in two key tiles


def backward(
    q: Any, k: Any, v: Any, dout: Any, forward: Forward, *, trace: Iterable[Any] = ()
) -> Backward:
    """The gradients of a recipe, from its inputs, dO, and the out and lse of a forward.

    Shapes: those of `forward`, `dout` as out: [tokens, heads, value channels]; float32 or bfloat16, all of one library,
    float32 rounded as in `forward`. `forward`: from `attention.forward`, or `Forward.from_kernel`; it brings recipe,
    mask, softmax scale, soft cap and sink. `trace` is as in `forward`, of `backward_stages(recipe)`.

    Returns: a `Backward`, arrays in the library of the inputs.
    Raises: ValueError or TypeError before any work for bad shapes, dtypes and names, inputs of another number of tokens
    or heads than the forward's, and an lse or an out that these q, k and v cannot have given: lse less than a query's
    score with the last key it sees (negated, say), out larger than every value of its document. An lse in base 2, or of
    another softmax scale, cannot be seen unless it breaks that, nor another number of kv_heads. NaN and infinity in the
    inputs are no error.
    Source: the recipe's.
    """
    if not isinstance(forward, Forward):
        raise TypeError(
            f"forward is a {type(forward).__name__}; pass the result of attention.forward, or Forward.from_kernel"
        )
    check_computed(forward.recipe)
    wanted = check_trace(trace, backward_stages(forward.recipe), forward.recipe)
    given = check_backward(q, k, v, dout, forward)
    check_tiles(wanted, forward.mask, q.shape[1], forward.recipe)
    sizes = Sizes(q.shape[1], v.shape[1], q.shape[2], v.shape[2])
    arrays = (given.q, given.k, given.v, given.dout, given.out, given.lse, *given.saved.values())
    arrays = arrays if given.sink is None else (*arrays, given.sink)
    run = BackwardRun(
        forward,
        sizes,
        np if all(isinstance(x, np.ndarray) for x in arrays) else given.namespace,
        given.namespace,
        given.device,
        wanted,
        given.sink,
        given.saved,
    )
    run.inputs.update(q=given.q, k=given.k, v=given.v)
    return run.backward(run.rows_before(given.dout, given.out, given.lse))


class RowsBefore(NamedTuple):
    """What the backward's rows bring along, with rows of [tokens, heads] first: the `Prologue`, and delta, None where
    it takes a pass over the pairs."""

    prologue: backward_tile.Prologue
    delta: Array | None


class BackwardRun(Run):
    """One backward."""

    def __init__(
        self,
        forward: Forward,
        sizes: Sizes,
        layout: ModuleType,
        compute: ModuleType,
        device: object | None,
        wanted: Wanted,
        sink: Array | None,
        saved: dict[str, Array],
    ) -> None:
        super().__init__(forward.recipe, forward.mask, sizes, layout, compute, device)
        self.sink, self.saved = sink, saved
        gradient = self.recipe.backward.gradient
        shape = inputs.Shape(forward.mask, forward.softmax_scale, forward.softcap)
        factors = inputs.factors(shape, self.recipe.softmax, gradient.score_factor)
        self.factors = Factors(*(None if x is None else self.to_compute(x) for x in factors))
        self.scale = self.to_compute(np.uint32(np.float32(forward.softmax_scale).view(np.uint32)))
        self.traced = TracedTiles(self, wanted)
        self.skips = self.recipe.tiles.masked == "skipped"
        self.partials = self.recipe.backward.dq.accumulation is Accumulation.FLOAT32_PARTIALS
        self.in_sequence = self.group if gradient.heads == "one_chain" else 1
        self.chains = self.group // self.in_sequence
        self.descending_heads = gradient.heads_order == "descending"
        self.widths = {
            "dq": self.head_dim,
            "dq_partial": self.head_dim,
            "dk": self.head_dim,
            "dv": self.value_dim,
        }

    def rows_before(self, dout: Array, out: Array, lse: Array) -> RowsBefore:
        """What the rows bring along, from float32 bits of dO and out [tokens, heads, value channels] and lse [heads,
        tokens]. dO is an input from here on."""
        prologue = self._prologue(dout, out, lse)
        self.inputs["do"] = prologue.dout
        source = self.recipe.backward.gradient.delta_source
        return RowsBefore(prologue, None if source == "p_dp" else self._delta(prologue, out))

    def backward(self, rows: RowsBefore) -> Backward:
        """The gradients."""
        prologue, delta = rows
        if self.recipe.backward.gradient.normalisation == "row_softmax":
            prologue = row_softmax.completed(self, prologue)
        if delta is None:
            delta = self._delta_of_pairs(prologue)
        base, own_delta, dead = (
            self._with_last(x, last)
            for x, last in ((prologue.base, 0), (delta, 0), (prologue.dead, True))
        )
        values = backward_tile.Values(base, own_delta, dead, total=self._totals(prologue))
        sums: Sums = {name: {} for name in self.widths}
        order = self._order(2 if self.partials and self.head_dim >= _PAIRED_FROM else 1)
        unseen = bool({"s", "dp"} & set(self.traced.wanted))
        for one in passes(order, self.mask, self.size):
            kept = {name for name in sums if name[1] != "q" or one.keys is not None}
            if one.queries is None:
                kept -= {"dk", "dv"}
            for pairs in tile_pairs(
                self.mask, self.heads, self.batch, self.size, one, unseen=unseen
            ):
                self._pairs(pairs, values, sums, kept)
        return self._assembled(prologue, delta, sums)

    def _order(self, together: int) -> PairOrder:
        """The orders of the sums over pairs of tiles."""
        bounded = self.mask.bounded
        return PairOrder(
            keys=self.recipe.backward.dq.tile_order.under(bounded).value,
            queries=self.recipe.backward.dk.tile_order.under(bounded).value,
            keys_together=together,
            heads_in_sequence=self.in_sequence,
            heads_descending=self.descending_heads,
        )

    def _prologue(self, dout: Array, out: Array, lse: Array) -> backward_tile.Prologue:
        rows = self.tokens * self.heads
        dout, out = (x.reshape(rows, self.value_dim) for x in (dout, out))
        lse = lse.T.reshape(rows)
        unseen = self.layout.asarray(np.repeat(self.mask.dead(), self.heads))
        parts = self._in_batches(
            (dout, out, lse, unseen),
            lambda *part: tuple(backward_tile.prologue(*part, recipe=self.recipe)[:4]),
        )
        dout, *others = parts
        return backward_tile.Prologue(
            dout.reshape(self.tokens, self.heads, self.value_dim), *others
        )

    def _delta(self, prologue: backward_tile.Prologue, out: Array) -> Array:
        """delta, rows of [tokens, heads]."""
        source = self.recipe.backward.gradient.delta_source
        rows = self.tokens * self.heads
        kept = {"unrounded_out": "o", "high_precision_out": "high_precision_out"}
        if source in kept:
            out = self.saved[kept[source]]
        dout = prologue.dout
        if source == "quantized_dout":
            dout = self.makers["do"].values(self.copy(Use.DP_DO))
        (delta,) = self._in_batches(
            (dout.reshape(rows, self.value_dim), out.reshape(rows, self.value_dim), prologue.dead),
            lambda *part: (backward_tile.row_delta(*part, recipe=self.recipe),),
        )
        return delta

    def _delta_of_pairs(self, prologue: backward_tile.Prologue) -> Array:
        """delta from a pass over the pairs, key tiles ascending."""
        zero = self.layout.zeros(prologue.base.shape, dtype=np.uint32)
        values = backward_tile.Values(
            self._with_last(prologue.base, 0),
            self._with_last(zero, 0),
            self._with_last(prologue.dead, True),
            total=self._totals(prologue),
        )
        sums: Sums = {"delta": {}}
        lanes = softmax.lanes(self.recipe.softmax)
        for pairs in tile_pairs(
            self.mask, self.heads, self.batch, self.size, PairOrder(queries=None), unseen=False
        ):
            batch, work, row_values, keys = self._work(pairs, values)
            tiles = batch.queries
            kv_head = tiles.head // self.group
            query_tokens, key_tokens = tiles.query_tokens(), batch.key_tokens()
            places = {"delta": [key[:3] for key in keys]}
            state = self._gathered("delta", sums, places, tiles.rows, len(batch), lanes)
            new = backward_tile.delta_step(
                state,
                self.rows(Use.S_Q, query_tokens, tiles.head),
                self.rows(Use.S_K, key_tokens, kv_head),
                self.rows(Use.DP_DO, query_tokens, tiles.head),
                self.rows(Use.DP_V, key_tokens, kv_head),
                row_values,
                work,
                self.factors,
                recipe=self.recipe,
            )
            self._keep(sums["delta"], places["delta"], new)
        rows = self.tokens * self.heads
        packed = self._packed(sums["delta"], self.heads, self.mask.queries, lanes)
        (delta,) = self._in_batches(
            (packed.reshape(rows, lanes), prologue.rest, prologue.dead),
            lambda *part: (backward_tile.whole_delta(*part, recipe=self.recipe),),
        )
        return delta

    def _in_batches(self, arrays: tuple[Array, ...], function: Any) -> list[Array]:
        """`function` of arrays with equally many rows, in batches of a fixed number where they are compiled on the
        host."""
        count = len(arrays[0])
        step = _ROWS if self.fixed_shapes else max(count, 1)
        parts = []
        for first in range(0, max(count, 1), step):
            part = [x[first : first + step] for x in arrays]
            short = step - len(part[0])
            if short:
                part = [
                    self.layout.concatenate(
                        [x, self.layout.zeros((short, *x.shape[1:]), dtype=x.dtype)]
                    )
                    for x in part
                ]
            results = function(*(self.to_compute(x) for x in part))
            parts.append([self.to_layout(x)[: step - short] for x in results])
        return [self.layout.concatenate(column) for column in zip(*parts, strict=True)]

    def _with_last(self, x: Array, last: Any) -> Array:
        """`x` with one more row, for places past a document's end."""
        return self.layout.concatenate([x, self.layout.full((1,), last, dtype=x.dtype)])

    def _totals(self, prologue: backward_tile.Prologue) -> Array | None:
        return None if prologue.total is None else self._with_last(prologue.total, 0)

    def _work(
        self, pairs: TilePairs, values: backward_tile.Values
    ) -> tuple[TilePairs, backward_tile.Work, backward_tile.Values, list[Key]]:
        """A batch of pairs filled up, what is computed of it, the values of its rows, and the keys of its pairs."""
        batch = pairs.padded(self.filled(len(pairs)))
        tiles = batch.queries
        bounds = tiles.bounds(self.mask)
        query_tokens = tiles.query_tokens()
        guarded = None
        if any(getattr(self.recipe, product).guarded for product in ("s", "dp", "dq")):
            found = guarded_blocks(*bounds, query_tokens >= 0, batch.key_first, tiles.keys)
            guarded = None if found is None else self.to_compute(found)
        work = backward_tile.Work(
            self.to_compute(batch.key_first),
            self.to_compute(bounds[0]),
            self.to_compute(bounds[1]),
            self.to_compute(~batch.seen),
            self.to_compute(batch.opens),
            self.to_compute(batch.closes),
            guarded,
        )
        index = np.where(query_tokens < 0, -1, query_tokens * self.heads + tiles.head[:, None])
        index = np.where(index < 0, self.tokens * self.heads, index)
        row_values = backward_tile.Values(
            self.to_compute(_backend.gather(values.base, index)),
            self.to_compute(_backend.gather(values.delta, index)),
            self.to_compute(_backend.gather(values.dead, index)),
            self._row_base(batch, index),
            None if values.total is None else self.to_compute(_backend.gather(values.total, index)),
        )
        queries = pairs.queries
        keys = tile_keys(queries.document, queries.head, queries.first, pairs.key_first)
        return batch, work, row_values, keys

    def _row_base(self, batch: TilePairs, index: Indices) -> Array | None:
        """What the forward's P of each pair is relative to, [pairs, rows]."""
        if self.recipe.backward.gradient.p_for_dv != "forward":
            return None
        bases = self.saved["row_base"]
        bases = self.layout.moveaxis(bases, 0, 1).reshape(self.tokens * self.heads, -1)
        count = bases.shape[1]
        padded = self.layout.concatenate(
            [bases, self.layout.zeros((1, count), dtype=np.uint32)]
        ).reshape(-1)
        tile = batch.key_first // batch.queries.keys
        return self.to_compute(_backend.gather(padded, index * count + tile[:, None]))

    def _pairs(
        self, pairs: TilePairs, values: backward_tile.Values, sums: Sums, kept: set[str]
    ) -> None:
        """One batch of pairs of tiles: their sums move on."""
        batch, work, row_values, keys = self._work(pairs, values)
        tiles = batch.queries
        kv_head = tiles.head // self.group
        query_tokens, key_tokens = tiles.query_tokens(), batch.key_tokens()
        x = backward_tile.Inputs(
            self.rows(Use.S_Q, query_tokens, tiles.head),
            self.rows(Use.S_K, key_tokens, kv_head),
            self.rows(Use.DP_DO, query_tokens, tiles.head),
            self.rows(Use.DP_V, key_tokens, kv_head),
            self.rows(Use.DV_DO, query_tokens, tiles.head),
            self.rows(Use.DQ_K, key_tokens, kv_head),
            self.rows(Use.DK_Q, query_tokens, tiles.head),
        )
        o_fold = None
        if row_values.row_base is not None:
            o_fold = self.rows(Use.O_V, key_tokens, kv_head).fold
        places = self._places(keys)
        state = Accumulators(
            *(
                self._gathered(
                    name,
                    sums,
                    places,
                    tiles.keys if name in ("dk", "dv") else tiles.rows,
                    len(batch),
                    width,
                )
                for name, width in self.widths.items()
            )
        )
        state, stages = backward_tile.pair_step(
            state,
            x,
            row_values,
            work,
            self.factors,
            self.scale,
            o_fold,
            recipe=self.recipe,
        )
        for name, new in zip(self.widths, state, strict=True):
            if new is not None and name in kept:
                self._keep(sums[name], places[name], new)
        named, seen = self._named(stages), np.flatnonzero(pairs.seen)
        scores = {name: named.pop(name) for name in ("s", "dp")}
        self.traced.add(named, keys, seen)
        self.traced.add(scores, keys, range(len(pairs)))

    def _keep(self, sums: dict[Place, Kept], places: list[Place], new: Array) -> None:
        """Sums after a batch of pairs, an entry of `new` each."""
        late = Late(self, new)
        for at, place in enumerate(places):
            sums[place] = (late, at)

    def _places(self, keys: list[Key]) -> dict[str, list[Place]]:
        """Where the sums of each pair are kept."""
        queries = [(document, head, first) for document, head, first, _ in keys]
        chain = self.in_sequence
        by_key = [(document, head // chain, key) for document, head, _, key in keys]
        return {"dq": queries, "dq_partial": queries, "dk": by_key, "dv": by_key}

    def _gathered(
        self,
        name: str,
        sums: Sums,
        places: dict[str, list[Place]],
        rows: int,
        count: int,
        width: int,
    ) -> Array | None:
        if name == "dq_partial" and not self.partials:
            return None
        kept = [sums[name].get(place) for place in places[name]]
        parts: list[Array] = []
        first: dict[Late, int] = {}
        filled = 0
        for late in dict.fromkeys(one[0] for one in kept if one is not None):
            first[late] = filled
            parts.append(late.get())
            filled += len(parts[-1])
        index = np.full(count, filled, dtype=np.int32)
        index[: len(kept)] = [filled if one is None else first[one[0]] + one[1] for one in kept]
        if filled in index:
            parts.append(self.layout.zeros((1, rows, width), dtype=np.uint32))
        found = parts[0] if len(parts) == 1 else self.layout.concatenate(parts)
        return self.to_compute(_backend.gather(found, index))

    def _named(self, stages: backward_tile.Stages) -> dict[str, Array | None]:
        names = pair_names(self.recipe)
        found = {"s": stages.s, "dp": stages.dp, "p.dv": stages.p, "ds": stages.ds}
        for use, codes, scales in (
            (Use.DV_P, stages.dv_codes, stages.dv_scales),
            (Use.DQ_DS, stages.dq_codes, stages.dq_scales),
            (Use.DK_DS, stages.dk_codes, stages.dk_scales),
        ):
            found[f"{names[use]}.codes"], found[f"{names[use]}.scales"] = codes, scales
        return found

    def _assembled(self, prologue: backward_tile.Prologue, delta: Array, sums: Sums) -> Backward:
        """The packed gradients from the sums of all tiles."""
        chains, heads = self.chains, self.kv_heads * self.chains
        keys = self.mask.keys
        dq = self._packed(sums["dq"], self.heads, self.mask.queries, self.head_dim)[:, :, None]
        dk = self._packed(sums["dk"], heads, keys, self.head_dim)
        dv = self._packed(sums["dv"], heads, keys, self.value_dim)
        dk, dv = (
            x.reshape(keys.tokens, self.kv_heads, chains, width)
            for x, width in ((dk, self.head_dim), (dv, self.value_dim))
        )
        if not self.skips:
            dq = self._poisoned(dq, Use.DQ_K, 1)
            dk, dv = self._poisoned(dk, Use.DK_Q, chains), self._poisoned(dv, Use.DV_DO, chains)
        if not self.skips or self.recipe.backward.gradient.normalisation == "fold_into_dout":
            dead = prologue.dead.reshape(self.tokens, self.heads, 1, 1)
            dq = self.layout.where(dead, np.uint32(0), dq)
        found: dict[str, Array] = {"delta": delta.reshape(self.tokens, self.heads).T}
        scaled = self.recipe.backward.gradient.softmax_scale == "epilogue"
        return Backward(
            dq=self._gradient(dq, scaled=scaled),
            dk=self._gradient(dk, scaled=scaled),
            dv=self._gradient(dv, scaled=False),
            dsink=None if self.sink is None else self._dsink(prologue, delta),
            trace=self.traced.trace(found),
        )

    def _dsink(self, prologue: backward_tile.Prologue, delta: Array) -> Array:
        """The gradient of the sink [heads]: by query tiles, rows ascending, then the tiles, ascending."""
        xp, rows = self.layout, self.recipe.tiles.query
        tiles = [
            np.arange(first, first + rows)
            for document in self.mask.queries
            for first in range(document.start, document.stop, rows)
        ]
        if not tiles:
            return self.finished(xp.full((self.heads,), _float32.SIGN, dtype=np.uint32))
        stops = np.repeat(
            [document.stop for document in self.mask.queries],
            [-(-(document.stop - document.start) // rows) for document in self.mask.queries],
        )
        tokens = np.stack(tiles)
        tokens = np.where(tokens < stops[:, None], tokens, -1)
        head = np.arange(self.heads)
        index = np.where(
            tokens[:, None, :] < 0,
            self.tokens * self.heads,
            tokens[:, None, :] * self.heads + head[:, None],
        ).reshape(-1, rows)
        values = [
            _backend.gather(self._with_last(x, last), index)
            for x, last in ((prologue.base, 0), (delta, 0), (prologue.dead, True))
        ]
        if prologue.total is not None:
            values.append(_backend.gather(self._with_last(prologue.total, 0), index))
        sink = _backend.gather(self.sink, np.tile(head, len(tiles)))
        (partial,) = self._in_batches(
            (sink, *values),
            lambda *part: (backward_tile.sink_sums(*part, recipe=self.recipe),),
        )
        return self.finished(backward_tile.negated_sum(partial.reshape(-1, self.heads)))

    def _packed(
        self, tiles: dict[Place, Kept], heads: int, documents: Documents, width: int
    ) -> Array:
        """Sums [tokens, heads, width] from tiles by document, head and first token."""
        xp, tokens = self.layout, documents.tokens
        place = np.zeros((tokens, heads), dtype=np.int32)
        parts, filled = [xp.zeros((1, width), dtype=np.uint32)], 1
        by_late: dict[Late, dict[Place, int]] = {}
        for key, (late, at) in tiles.items():
            by_late.setdefault(late, {})[key] = at
        for late, kept in by_late.items():
            wanted = _backend.gather(late.get(), np.fromiter(kept.values(), np.int32))
            rows = wanted.shape[1]
            for document, head, first in kept:
                begin = documents.offsets[document] + first
                end = min(begin + rows, documents.offsets[document + 1])
                place[begin:end, head] = np.arange(filled, filled + end - begin)
                filled += rows
            parts.append(wanted.reshape(-1, width))
        return _backend.gather(xp.concatenate(parts), place)

    def _poisoned(self, sums: Array, use: Use, chains: int) -> Array:
        """`sums` [tokens, heads, chains, channels] with NaN where a document has a code that is no number:
        it is in the chain of every row, whether or not its tile was computed."""
        bad = self.copy(use).not_finite()
        rows = []
        over = self.mask if use is Use.DQ_K else [(keys, queries) for queries, keys in self.mask]
        for mine, others in over:
            flags = bad[others].any(axis=0)
            if use is Use.DQ_K:  # a key/value head is in the chains of its query heads
                flags = self.layout.repeat(flags, self.group, axis=0)
            flags = flags.reshape(1, -1, chains, sums.shape[3])
            rows.append(self.layout.where(flags, _float32.NAN, sums[mine]))
        return self.layout.concatenate(rows)

    def _gradient(self, sums: Array, *, scaled: bool) -> Array:
        """Values [tokens, heads, channels] in the output format from sums [tokens, heads, chains, channels]."""
        tokens, heads, chains, channels = sums.shape
        (codes,) = self._in_batches(
            (sums.reshape(tokens * heads, chains, channels),),
            lambda part: (
                backward_tile.finished(
                    part, self.scale, scaled=scaled, descending=self.descending_heads
                ),
            ),
        )
        values = codes.astype(np.uint32) << np.uint32(16)
        return self.finished(values.reshape(tokens, heads, channels))
