"""The forward of a recipe over packed documents: layout around the tile numerics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.attention import forward_tile, inputs
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.inputs import Inputs
from flamia_ref.attention.product import TileOrder, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.results import Forward
from flamia_ref.attention.run import TILES, Run, TracedTiles, tile_keys
from flamia_ref.attention.stages import forward_stages, pair_names
from flamia_ref.packing import QueryTiles, guarded_blocks, last_visible, query_tiles


def forward(
    q: Any,
    k: Any,
    v: Any,
    recipe: Recipe | str,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: None = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: None = None,
    softmax_scale: float | None = None,
    softcap: None = None,
    sink: None = None,
    trace: Iterable[str] = (),
) -> Forward:
    """Attention over packed documents by a recipe, to the last bit.

    Shapes: `q` [tokens, heads, head_dim]; `k`, `v` [tokens, kv_heads, head_dim], heads a multiple of kv_heads; float32
    or bfloat16, numpy or JAX. float32 values are rounded to the recipe's input format first, with an `InputRounded`
    warning where that changes one. `cu_seqlens` int32 [documents + 1] on the host, None for one document.
    `softmax_scale` defaults to 1 / math.sqrt(head_dim). `trace` names stages of `forward_stages(recipe)`.
    `cu_seqlens_k`, `window`, `softcap` and `sink` must be None: no recipe computes them yet.

    Returns: a `Forward`, arrays in the library of the inputs.
    Raises: ValueError or TypeError for bad shapes, dtypes, lengths, names and scales, before any work. NaN and infinity
    are no error; the recipe says what they give.
    Source: the recipe's.
    """
    chosen = inputs.chosen_recipe(recipe)
    check_computed(chosen)
    inputs.refuse_unsupported(
        chosen.name, cu_seqlens_k=cu_seqlens_k, window=window, softcap=softcap, sink=sink
    )
    inputs.check_alignment(alignment)
    stages = inputs.check_trace(trace, forward_stages(chosen))
    given = inputs.check(
        q, k, v, chosen, cu_seqlens=cu_seqlens, causal=causal, softmax_scale=softmax_scale
    )
    return _ForwardRun(given, chosen, bool(causal), stages).forward()


class _ForwardRun(Run):
    """One forward."""

    def __init__(
        self, given: Inputs, recipe: Recipe, causal: bool, stages: tuple[str, ...]
    ) -> None:
        tensors = {"q": given.q, "k": given.k, "v": given.v}
        super().__init__(tensors, recipe, given.documents, given.namespace, given.device)
        self.given, self.causal, self.stages = given, causal, stages
        factor = inputs.score_factor(given.softmax_scale, recipe.softmax.score_factor)
        self.score_factor = self.to_compute(factor)
        self.traced = TracedTiles(self, stages)
        self.skips = recipe.tiles.masked == "skipped"

    def forward(self) -> Forward:
        v_nan = None if self.skips else self._nan_channels()
        columns: list[list[Array]] = []
        place = np.zeros(self.tokens * self.heads, dtype=np.int32)
        filled = 0
        for tiles in query_tiles(self.documents, self.heads, TILES, self.recipe.tiles.query):
            tokens = tiles.query_tokens()
            inside = tokens >= 0
            flat = (tokens * self.heads + tiles.head[:, None])[inside]
            place[flat] = filled + np.flatnonzero(inside)
            columns.append(self._tiles(tiles, v_nan))
            filled += inside.size
        return self._assembled(columns, place)

    def _nan_channels(self) -> Array:
        """Whether a document has a code of V that is no number: bool [documents * kv_heads, head_dim]."""
        bad = self.copy(Use.O_V).not_finite()
        rows = [bad[document].any(axis=0) for document in self.documents]
        return self.layout.stack(rows).reshape(-1, self.head_dim)

    def _tiles(self, tiles: QueryTiles, v_nan: Array | None) -> list[Array]:
        """Everything for one batch of query tiles: out, o, lse, row maximum and row sum, rows first."""
        count = len(tiles)
        batch = tiles.padded(TILES) if self.fixed_shapes else tiles
        rows = batch.rows
        last = last_visible(batch, self.causal)
        kv_head = batch.head // self.group
        state = forward_tile.start(len(batch), rows, self.head_dim, self.recipe)
        state = forward_tile.State(*(self.to_compute(self.layout.asarray(x)) for x in state))
        queries = self.rows(Use.S_Q, batch.query_tokens(), batch.head)
        last_tile = last.max(axis=1) // rows  # -1 for padding
        descending = self.recipe.o.tile_order is TileOrder.DESCENDING
        seen = int(batch.length.max()) if "s" in self.stages else int(last.max()) + 1
        order = range(-(-seen // rows))
        pair = pair_names(self.recipe)[Use.O_P]
        for index in reversed(order) if descending else order:
            tokens = batch.key_tokens(index)
            key_start = np.full(len(batch), index * rows, dtype=np.int32)
            guarded = None
            if self.recipe.s.guarded or self.recipe.o.guarded:
                guarded = self.to_compute(guarded_blocks(last, key_start))
            first = last_tile == index if descending else np.full(len(batch), index == 0)
            work = forward_tile.Work(
                self.to_compute(key_start),
                self.to_compute(last),
                self.to_compute(first),
                self.to_compute(last_tile < index if self.skips else np.zeros(len(batch), bool)),
                guarded,
            )
            state, stages = forward_tile.key_tile_step(
                state,
                queries,
                self.rows(Use.S_K, tokens, kv_head),
                self.rows(Use.O_V, tokens, kv_head),
                work,
                self.score_factor,
                recipe=self.recipe,
            )
            names = ("s", "p", f"{pair}.codes", f"{pair}.scales")
            keys = tile_keys(tiles.document, tiles.head, tiles.first, key_start[:count])
            self.traced.add(dict(zip(names, stages, strict=True)), keys)
        nan = None
        if v_nan is not None:
            nan = self.to_compute(_backend.gather(v_nan, batch.document * self.kv_heads + kv_head))
        ends = forward_tile.end(state, nan, self.score_factor, recipe=self.recipe)
        results = (ends.out, ends.o, ends.lse, state.row_max, ends.row_sum)
        return [self.to_layout(x)[:count].reshape(count * rows, *x.shape[2:]) for x in results]

    def _assembled(self, columns: list[list[Array]], place: np.ndarray[Any, Any]) -> Forward:
        """The packed results from the rows of all tiles."""
        xp, shape = self.layout, (self.tokens, self.heads)
        if not columns:
            empty = xp.zeros((0,), dtype=np.uint32)
            wide = xp.zeros((0, self.head_dim), dtype=np.uint32)
            columns = [[wide.astype(np.uint16), wide, empty, empty, empty]]
        rows = (
            _backend.gather(xp.concatenate(list(column)), place)
            for column in zip(*columns, strict=True)
        )
        out, o, lse, row_max, row_sum = (x.reshape(*shape, *x.shape[1:]) for x in rows)
        out = out.astype(np.uint32) << np.uint32(16)
        found = {"o": o, "row_max": row_max.T, "row_sum": row_sum.T}
        trace: dict[str, Any] = {}
        for name in self.stages:
            if name in self.traced.wanted:
                trace[name] = self.traced.documents(name)
            elif name in found:
                trace[name] = self.finished(found[name])
            else:
                trace[name] = self.finished(self.copy_stage(name))
        return Forward(
            out=self.finished(out),
            lse=self.finished(lse.T),
            trace=trace,
            recipe=self.recipe,
            documents=self.documents,
            causal=self.causal,
            softmax_scale=self.given.softmax_scale,
        )
