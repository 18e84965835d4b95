"""The forward of a recipe over packed documents: layout around the tile numerics.

Inputs on the host are laid out there into tiles of a few fixed shapes; only tiles enter compiled code, and results are
put back there, so new document lengths compile nothing. Traced inputs, and arrays on an accelerator, are laid out by
gathers with the same index arrays inside the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic import mufu
from flamia_ref.attention import inputs, tile
from flamia_ref.attention.inputs import Inputs
from flamia_ref.attention.recipe import Operand, Recipe
from flamia_ref.attention.stages import DOCUMENT_STAGES, FORWARD_STAGES
from flamia_ref.formats import PRESETS, decode_bits
from flamia_ref.packing import Documents, QueryTiles, last_visible, query_tiles
from flamia_ref.packing.tiles import Indices

_TILES = 8  # query tiles that are computed together
_ROWS = 1024  # rows of codes that are quantized together


@dataclass(frozen=True, kw_only=True, slots=True)
class Forward:
    """The results of a forward, with what the backward needs to know of it. A pytree once JAX is in use.

    Attributes:
        out: [tokens, heads, head_dim] float32 values in the recipe's output format.
        lse: [heads, tokens] float32, natural log; -inf for rows that see no key.
        saved: what the recipe keeps for the backward besides out and lse, by name.
        trace: the stages asked for, by name.
        recipe, documents, causal, softmax_scale: what was computed.
    """

    out: Array
    lse: Array
    saved: Mapping[str, Array] = field(default_factory=dict)
    trace: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe
    documents: Documents
    causal: bool
    softmax_scale: float

    def __post_init__(self) -> None:
        _backend.register_value_type(
            Forward,
            data=("out", "lse", "saved", "trace"),
            meta=("recipe", "documents", "causal", "softmax_scale"),
        )


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
    `softmax_scale` defaults to 1 / math.sqrt(head_dim). `trace` names stages of `FORWARD_STAGES`.
    `cu_seqlens_k`, `window`, `softcap` and `sink` must be None: no recipe computes them yet.

    Returns: a `Forward`, arrays in the library of the inputs.
    Raises: ValueError or TypeError for bad shapes, dtypes, lengths, names and scales, before any work. NaN and infinity
    are no error; the recipe says what they give.
    Source: the recipe's.
    """
    chosen = inputs.chosen_recipe(recipe)
    inputs.check_computed(chosen)
    inputs.refuse_unsupported(
        chosen.name, cu_seqlens_k=cu_seqlens_k, window=window, softcap=softcap, sink=sink
    )
    inputs.check_alignment(alignment)
    stages = inputs.check_trace(trace, FORWARD_STAGES)
    given = inputs.check(
        q, k, v, chosen, cu_seqlens=cu_seqlens, causal=causal, softmax_scale=softmax_scale
    )
    return _Run(given, chosen, bool(causal), stages).forward()


class _Rows(NamedTuple):
    """One operand, quantized with one scale a row: codes [tokens * heads + 1, head_dim] and scales, the last row 0 with
    scale 2^0 for places past a document's end."""

    codes: Array
    scales: Array
    heads: int

    def gathered(
        self, tokens: Indices, heads: Indices, convert: Callable[[Array], Array]
    ) -> tile.Rows:
        """Rows [tiles, rows] of packed `tokens` (-1 for none), of one of `heads` for each tile."""
        index = np.where(tokens < 0, self.codes.shape[0] - 1, tokens * self.heads + heads[:, None])
        return tile.Rows(*(convert(_backend.gather(x, index)) for x in (self.codes, self.scales)))


class _Run:
    """One forward: its inputs, and where its arrays are.

    `compute` is the library of the tile numerics; `layout` that of everything around them, numpy wherever the values
    are on the host.
    """

    def __init__(
        self, given: Inputs, recipe: Recipe, causal: bool, stages: tuple[str, ...]
    ) -> None:
        self.given, self.recipe, self.causal, self.stages = given, recipe, causal, stages
        self.compute = given.namespace
        self.layout = _backend.namespace(given.q)
        self.fixed_shapes = self.layout is not self.compute
        self.tokens, self.heads, self.head_dim = given.q.shape
        self.group = self.heads // given.k.shape[1]
        self.score_factor = inputs.score_factor(given.softmax_scale)
        self.tables = mufu.tables(self.compute)

    def forward(self) -> Forward:
        q = self._quantized(self.given.q, self.recipe.s.left)
        k = self._quantized(self.given.k, self.recipe.s.right)
        v = self._quantized(self.given.v, self.recipe.o.right)
        v_nan = self._nan_channels(v)
        blocks: dict[str, dict[tuple[int, int, int, int], Array]] = {
            name: {} for name in DOCUMENT_STAGES
        }
        columns: list[list[Array]] = []
        place = np.zeros(self.tokens * self.heads, dtype=np.int32)
        filled = 0
        for tiles in query_tiles(self.given.documents, self.heads, _TILES, self.recipe.tiles.query):
            tokens = tiles.query_tokens()
            inside = tokens >= 0
            flat = (tokens * self.heads + tiles.head[:, None])[inside]
            place[flat] = filled + np.flatnonzero(inside)
            columns.append(self._tiles(tiles, q, k, v, v_nan, blocks))
            filled += inside.size
        return self._assembled(columns, place, (q, k, v), blocks)

    def _to_compute(self, x: Array) -> Array:
        return _backend.put(x, self.compute, self.given.device) if self.fixed_shapes else x

    def _to_layout(self, x: Array) -> Array:
        return _backend.host(x) if self.fixed_shapes else x

    def _quantized(self, x: Array, operand: Operand) -> _Rows:
        """Step 1, in batches of rows of a fixed shape where arrays are compiled on the host."""
        tokens, heads, channels = x.shape
        rows = x.reshape(tokens * heads, channels)
        step = _ROWS if self.fixed_shapes else max(len(rows), 1)
        codes: list[Array] = []
        scales: list[Array] = []
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            short = step - len(part)
            if short:
                part = self.layout.concatenate(
                    [part, self.layout.zeros((short, channels), dtype=np.uint32)]
                )
            pair = tile.quantize_rows(self._to_compute(part), preset=operand.format)
            for kept, new in zip((codes, scales), pair, strict=True):
                kept.append(self._to_layout(new)[: step - short])
        codes.append(self.layout.zeros((1, channels), dtype=np.uint8))
        scales.append(self.layout.full((1,), 127, dtype=np.uint8))
        return _Rows(self.layout.concatenate(codes), self.layout.concatenate(scales), heads)

    def _nan_channels(self, v: _Rows) -> Array:
        """Whether a document has a NaN code of V: bool [documents, kv_heads, head_dim]."""
        element = PRESETS[self.recipe.o.right.format].element
        nan = _float32.is_nan(decode_bits(v.codes[:-1], element))
        nan = nan.reshape(self.tokens, v.heads, self.head_dim)
        return self.layout.stack([nan[document].any(axis=0) for document in self.given.documents])

    def _tiles(
        self,
        tiles: QueryTiles,
        q: _Rows,
        k: _Rows,
        v: _Rows,
        v_nan: Array,
        blocks: dict[str, dict[tuple[int, int, int, int], Array]],
    ) -> list[Array]:
        """Everything for one batch of query tiles: out, o, lse, row maximum and row sum, rows first."""
        count = len(tiles)
        batch = tiles.padded(_TILES) if self.fixed_shapes else tiles
        last = last_visible(batch, self.causal)
        kv_head = batch.head // self.group
        state = tile.start(len(batch), batch.rows, self.head_dim)
        state = tile.State(*(self._to_compute(self.layout.asarray(x)) for x in state))
        visible = self._to_compute(last)
        score_factor = self._to_compute(self.score_factor)
        queries = q.gathered(batch.query_tokens(), batch.head, self._to_compute)
        seen = int(batch.length.max()) if "s" in self.stages else int(last.max()) + 1
        for index in range(-(-seen // batch.rows)):
            tokens = batch.key_tokens(index)
            state, stages = tile.key_tile_step(
                state,
                queries,
                k.gathered(tokens, kv_head, self._to_compute),
                v.gathered(tokens, kv_head, self._to_compute),
                self._to_compute(np.full(len(batch), index * batch.rows, dtype=np.int32)),
                visible,
                score_factor,
                self.tables,
                recipe=self.recipe,
            )
            for name, values in zip(DOCUMENT_STAGES, stages, strict=True):
                if name in self.stages:
                    values = self._to_layout(values)
                    for at in range(count):
                        document, head, first = (
                            int(x[at]) for x in (tiles.document, tiles.head, tiles.first)
                        )
                        blocks[name][document, head, first, index * batch.rows] = values[at]
        nan = _backend.gather(v_nan.reshape(-1, self.head_dim), batch.document * v.heads + kv_head)
        ends = tile.end(state, self._to_compute(nan), self.tables, recipe=self.recipe)
        results = (ends.out, ends.o, ends.lse, state.row_max, state.row_sum)
        return [
            self._to_layout(x)[:count].reshape(count * batch.rows, *x.shape[2:]) for x in results
        ]

    def _assembled(
        self,
        columns: list[list[Array]],
        place: Indices,
        operands: tuple[_Rows, _Rows, _Rows],
        blocks: dict[str, dict[tuple[int, int, int, int], Array]],
    ) -> Forward:
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
        for name, operand in zip("qkv", operands, strict=True):
            extents = (self.tokens, operand.heads)
            found[f"{name}.codes"] = operand.codes[:-1].reshape(*extents, self.head_dim)
            found[f"{name}.scales"] = operand.scales[:-1].reshape(*extents, 1)
        trace: dict[str, Any] = {}
        for name in self.stages:
            if name in DOCUMENT_STAGES:
                trace[name] = [
                    self._finished(self._document(blocks[name], name, index))
                    for index in range(len(self.given.documents))
                ]
            else:
                trace[name] = self._finished(found[name])
        return Forward(
            out=self._finished(out),
            lse=self._finished(lse.T),
            trace=trace,
            recipe=self.recipe,
            documents=self.given.documents,
            causal=self.causal,
            softmax_scale=self.given.softmax_scale,
        )

    def _document(
        self, blocks: dict[tuple[int, int, int, int], Array], name: str, document: int
    ) -> Array:
        """One document's array [heads, queries, keys] of a stage; zeros where no tile was computed."""
        xp, length = self.layout, self.given.documents.lengths[document]
        block = 32 if name == "p.o.scales" else 1
        dtype = np.uint8 if name.startswith("p.o") else np.uint32
        keys = -(-length // block)
        if length == 0:
            return xp.zeros((self.heads, 0, 0), dtype=dtype)
        mine = {key[1:]: value for key, value in blocks.items() if key[0] == document}
        rows = next(iter(mine.values())).shape[0]
        starts = range(0, length, rows)
        zeros = xp.zeros((rows, rows // block), dtype=dtype)
        heads = [
            xp.concatenate(
                [
                    xp.concatenate([mine.get((head, first, key), zeros) for key in starts], axis=1)
                    for first in starts
                ]
            )[:length, :keys]
            for head in range(self.heads)
        ]
        return xp.stack(heads)

    def _finished(self, x: Array) -> Array:
        """A result as callers get it: uint32 bits as float32, codes as they are, in the library of the inputs."""
        if x.dtype == np.uint32:
            x = _backend.from_bits(x, np.float32)
        return self._to_compute(x)
