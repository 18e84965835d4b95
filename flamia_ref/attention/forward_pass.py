"""The forward of a recipe over packed documents: layout around the tile numerics."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.attention import forward_tile, inputs, sides
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.inputs import Shape
from flamia_ref.attention.product import TileOrder, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.results import Forward
from flamia_ref.attention.run import Late, Run, Sizes
from flamia_ref.attention.sides import Rows
from flamia_ref.attention.softmax import Factors
from flamia_ref.attention.stages import forward_stages, kept_for_backward, pair_names
from flamia_ref.attention.traced import TracedTiles, Wanted, check_tiles, check_trace, tile_keys
from flamia_ref.packing import QueryTiles, guarded_blocks, query_tiles
from flamia_ref.packing.tiles import Indices


def forward(
    q: Any,
    k: Any,
    v: Any,
    recipe: Recipe | str,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
    trace: Iterable[Any] = (),
) -> Forward:
    """Attention over packed documents by a recipe, to the last bit.

    Shapes: `q` [tokens, heads, head_dim]; `k` [keys, kv_heads, head_dim], `v` [keys, kv_heads, value channels], heads a
    multiple of kv_heads; float32 or bfloat16, numpy or JAX. float32 values are rounded to the recipe's input format
    first, with an `InputRounded` warning where that changes one. `cu_seqlens` int32 [documents + 1] on the host, None
    for one document; `cu_seqlens_k` likewise of the keys, None where they are the same tokens as the queries.

    Query i of a document stands at key i plus the document's keys less its queries with the `alignment`
    "bottom_right", at key i with "top_left". `causal`: it sees no key after that one. `window` = (left, right): it sees
    that many keys before and after that one besides, None for all. `softmax_scale` defaults to 1 /
    math.sqrt(head_dim). `softcap`: scores become softcap tanh(score / softcap). `sink` [heads] float32: the logit of a
    key of value 0 for each head. `trace` names stages of `forward_stages(recipe)`, or has pairs of such a name and a
    tile (document, head, query tile, key tile), for the stages that are lists: those tiles alone.

    Returns: a `Forward`, arrays in the library of the inputs.
    Raises: ValueError or TypeError for bad shapes, dtypes, lengths, names, windows and scales, before any work. NaN and
    infinity are no error; the recipe says what they give.
    Source: the recipe's.
    """
    chosen = inputs.chosen_recipe(recipe)
    check_computed(chosen)
    wanted = check_trace(trace, forward_stages(chosen), chosen)
    given = inputs.check(
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        causal=causal,
        alignment=alignment,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sink=sink,
    )
    check_tiles(wanted, given.shape.mask, q.shape[1], chosen)
    sizes = Sizes(q.shape[1], v.shape[1], q.shape[2], v.shape[2])
    bits = inputs.sink_bits(sink)
    on_host = [
        isinstance(x, np.ndarray) for x in (given.q, given.k, given.v, bits) if x is not None
    ]
    run = ForwardRun(
        chosen,
        given.shape,
        sizes,
        np if all(on_host) else given.namespace,
        given.namespace,
        given.device,
        wanted,
        bits,
    )
    run.inputs.update(q=given.q, k=given.k, v=given.v)
    return run.forward()


class ForwardRun(Run):
    """One forward."""

    def __init__(
        self,
        recipe: Recipe,
        shape: Shape,
        sizes: Sizes,
        layout: ModuleType,
        compute: ModuleType,
        device: object | None,
        wanted: Wanted,
        sink: Array | None,
    ) -> None:
        super().__init__(recipe, shape.mask, sizes, layout, compute, device)
        self.shape, self.sink = shape, sink
        factors = inputs.factors(shape, recipe.softmax, recipe.softmax.score_factor)
        self.factors = Factors(*(None if x is None else self.to_compute(x) for x in factors))
        self.traced = TracedTiles(self, wanted)
        self.splits = recipe.tiles.splits
        # A tile without a visible pair adds zeros. Where it can show otherwise than by a NaN of V, it is computed.
        computed = recipe.tiles.masked == "computed"
        self.whole = computed and (self.splits > 1 or recipe.softmax.mask_value is not None)
        self.poisons = computed and not self.whole
        self.keeps = kept_for_backward(recipe)
        self.bases: dict[tuple[int, int, int, int], Array] = {}

    def forward(self) -> Forward:
        """The results."""
        v_nan = self._nan_channels() if self.poisons else None
        columns: list[list[Late]] = []
        place = np.zeros(self.tokens * self.heads, dtype=np.int32)
        filled = 0
        for tiles in query_tiles(self.mask, self.heads, self.batch, self.size):
            tokens = tiles.query_tokens()
            inside = tokens >= 0
            flat = (tokens * self.heads + tiles.head[:, None])[inside]
            place[flat] = filled + np.flatnonzero(inside)
            columns.append(self._tiles(tiles, v_nan))
            if len(columns) > 1:  # one batch runs ahead, no more: each has its own arrays
                for late in columns[-2]:
                    late.get()
            filled += inside.size
        return self._assembled([[late.get() for late in column] for column in columns], place)

    def _nan_channels(self) -> Array:
        """Whether a document has a code of V that is no number: bool [documents * kv_heads, value channels]."""
        bad = self.copy(Use.O_V).not_finite()
        rows = [bad[document].any(axis=0) for document in self.mask.keys]
        return self.layout.stack(rows).reshape(-1, self.value_dim)

    def factors_of(self, batch: QueryTiles) -> Factors:
        """The constants between S and the exponent of a batch of query tiles."""
        of_q, of_k = (
            self.descales(use, batch.document, batch.head // self.group)
            for use in (Use.S_Q, Use.S_K)
        )
        if of_q is None and of_k is None:
            return self.factors
        return forward_tile.descaled(self.factors, of_q, of_k)

    def _tiles(self, tiles: QueryTiles, v_nan: Array | None) -> list[Late]:
        """Everything for one batch of query tiles: output codes, o, lse, row maximum and row sum, rows first; the codes
        of O of high precision, where it is made."""
        count = len(tiles)
        batch = tiles.padded(self.filled(count))
        bounds = batch.bounds(self.mask)
        begin, end = batch.key_tiles(bounds[1], bounds[0])
        if self.whole:
            begin, end = np.zeros_like(begin), -(-batch.key_length // batch.keys)
        kv_head = batch.head // self.group
        queries = self.rows(Use.S_Q, batch.query_tokens(), batch.head)
        nan = sink = None
        factors = self.factors_of(batch)
        v_descale = self.descales(Use.O_V, batch.document, kv_head)
        if v_nan is not None:
            nan = self.to_compute(_backend.gather(v_nan, batch.document * self.kv_heads + kv_head))
        if self.sink is not None:
            sink = self.to_compute(_backend.gather(self.sink, batch.head))
        length = -(-(end - begin) // self.splits)
        inside = self.recipe.softmax.combine != "divide_last" or self.splits == 1
        runs = []
        for split in range(self.splits):
            first = np.minimum(begin + split * length, end)
            last = np.minimum(first + length, end)
            with_sink = sink if inside and split == 0 else None
            state = self._key_tiles(
                tiles, batch, bounds, first, last, queries, kv_head, with_sink, factors
            )
            # Rows that see a key of the document may see none of this run.
            unseen = (bounds[1] < first[:, None] * batch.keys) | (
                bounds[0] >= last[:, None] * batch.keys
            )
            unseen = self.to_compute(unseen | (bounds[1] < 0))
            runs.append(
                forward_tile.end(
                    state, with_sink, unseen, nan, factors, v_descale, recipe=self.recipe
                )
            )
        self._unseen_scores(tiles, batch, begin, end, queries, kv_head)
        o, lse, row_max, row_sum = runs[0]
        if self.splits > 1:
            xp = _backend.namespace(o)
            late = None if inside else sink
            stacked = [xp.stack(column) for column in zip(*runs, strict=True)]
            o, lse = forward_tile.combined(stacked[0], stacked[1], late, recipe=self.recipe)
            row_max, row_sum = (xp.moveaxis(x, 0, 2) for x in stacked[2:])
        more: tuple[Array, ...] = ()
        if forward_tile.has_high_precision(self.recipe):
            o, high = forward_tile.halves(o)
            more = (forward_tile.output(high),)
        results = (forward_tile.output(o), o, lse, row_max, row_sum, *more)
        return [Late(self, x, count) for x in results]

    def _key_tiles(
        self,
        tiles: QueryTiles,
        batch: QueryTiles,
        bounds: tuple[Indices, Indices],
        first: Indices,
        last: Indices,
        queries: Rows,
        kv_head: Indices,
        sink: Array | None,
        factors: Factors,
    ) -> forward_tile.State:
        """The state of a batch of query tiles after the key tiles `first` to `last` of each. `sink` [tiles]."""
        recipe, count = self.recipe, len(tiles)
        state = forward_tile.start(len(batch), batch.rows, self.value_dim, recipe)
        state = forward_tile.State(*(self.to_compute(self.layout.asarray(x)) for x in state))
        if sink is not None and recipe.softmax.base == "natural_max":
            state = forward_tile.with_sink(state, sink)
        descending = recipe.o.tile_order.under(self.mask.bounded) is TileOrder.DESCENDING
        names = ("s", "p", *(f"{pair_names(recipe)[Use.O_P]}.{x}" for x in ("codes", "scales")))
        least, most = (self.to_compute(x) for x in bounds)
        for step in range(int((last - first).max(initial=0))):
            index = last - 1 - step if descending else first + step
            skipped = first + step >= last
            key_start = np.where(skipped, 0, index * batch.keys).astype(np.int32)
            guarded = None
            if recipe.s.guarded or recipe.o.guarded:
                inside = batch.query_tokens() >= 0
                found = guarded_blocks(*bounds, inside, key_start, batch.keys)
                guarded = None if found is None else self.to_compute(found)
            work = forward_tile.Work(
                self.to_compute(key_start),
                least,
                most,
                self.to_compute(np.full(len(batch), step == 0)),
                self.to_compute(skipped),
                guarded,
            )
            tokens = batch.key_tokens(key_start)
            state, stages = forward_tile.key_tile_step(
                state,
                queries,
                self.rows(Use.S_K, tokens, kv_head),
                self.rows(Use.O_V, tokens, kv_head),
                work,
                factors,
                recipe=recipe,
            )
            keys = tile_keys(tiles.document, tiles.head, tiles.first, key_start[:count])
            worked = np.flatnonzero(~skipped[:count])
            self.traced.add(dict(zip(names, stages, strict=False)), keys, worked)
            if "row_base" in self.keeps:
                base = self.to_layout(stages.base)
                for at in worked:
                    self.bases[keys[at]] = base[at]
        return state

    def _unseen_scores(
        self,
        tiles: QueryTiles,
        batch: QueryTiles,
        begin: Indices,
        end: Indices,
        queries: Rows,
        kv_head: Indices,
    ) -> None:
        """S of the pairs of tiles that nothing else was computed of, where it is traced."""
        if "s" not in self.traced.wanted:
            return
        count = len(tiles)
        for index in range(int((-(-batch.key_length // batch.keys)).max(initial=0))):
            key_start = np.full(len(batch), index * batch.keys, dtype=np.int32)
            left_out = ((index < begin) | (index >= end)) & (key_start < batch.key_length)
            missing = np.flatnonzero(left_out[:count])
            if not len(missing):
                continue
            tokens = batch.key_tokens(key_start)
            keys = self.rows(Use.S_K, tokens, kv_head)
            s = sides.over_channels(queries, keys, self.recipe.s, None)
            places = tile_keys(tiles.document, tiles.head, tiles.first, key_start[:count])
            self.traced.add({"s": s}, places, missing)

    def _assembled(self, columns: list[list[Array]], place: np.ndarray[Any, Any]) -> Forward:
        """The packed results from the rows of all tiles."""
        xp, shape = self.layout, (self.tokens, self.heads)
        if not columns:
            runs = (self.splits,) if self.splits > 1 else ()
            empty = xp.zeros((0, *runs), dtype=np.uint32)
            wide = xp.zeros((0, self.value_dim), dtype=np.uint32)
            codes = wide.astype(np.uint16)
            columns = [[codes, wide, xp.zeros((0,), dtype=np.uint32), empty, empty, codes]]
        rows = (
            _backend.gather(xp.concatenate(list(column)), place)
            for column in zip(*columns, strict=True)
        )
        out, o, lse, row_max, row_sum, *high = (x.reshape(*shape, *x.shape[1:]) for x in rows)
        out = out.astype(np.uint32) << np.uint32(16)
        found = {"o": o, "row_max": row_max.T, "row_sum": row_sum.T}
        if "high_precision_out" in self.keeps:
            found["high_precision_out"] = high[0].astype(np.uint32) << np.uint32(16)
        saved = {}
        if "o" in self.keeps:
            saved["o"] = self.finished(o)
        if "high_precision_out" in self.keeps:
            saved["high_precision_out"] = self.finished(found["high_precision_out"])
        if "row_base" in self.keeps:
            saved["row_base"] = self.finished(self._row_bases())
        return Forward(
            out=self.finished(out),
            lse=self.finished(lse.T),
            saved=saved,
            trace=self.traced.trace(found),
            recipe=self.recipe,
            mask=self.mask,
            softmax_scale=self.shape.softmax_scale,
            softcap=self.shape.softcap,
            sink=None if self.sink is None else self.finished(self.sink),
        )

    def _row_bases(self) -> Array:
        """What the P of each row and key tile is relative to, [heads, tokens, key tiles], 0 where none was computed."""
        queries, keys = self.mask.queries, self.mask.keys
        tiles = max((-(-length // self.size.key) for length in keys.lengths), default=0)
        place = np.zeros((self.heads, self.tokens, tiles), dtype=np.int32)
        parts, filled = [self.layout.zeros((1,), dtype=np.uint32)], 1
        for (document, head, first, key_first), base in self.bases.items():
            begin = queries.offsets[document] + first
            end = min(begin + len(base), queries.offsets[document + 1])
            _, columns = self.size.of(queries.lengths[document], keys.lengths[document])
            place[head, begin:end, key_first // columns] = np.arange(filled, filled + end - begin)
            parts.append(base)
            filled += len(base)
        return _backend.gather(self.layout.concatenate(parts), place)
