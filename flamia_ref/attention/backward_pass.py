"""The backward of a recipe over packed documents, from out and lse alone: layout around the tile numerics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.attention import backward_tile, inputs
from flamia_ref.attention.backward_tile import Accumulators
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.kernel_results import BackwardInputs, check_backward
from flamia_ref.attention.product import Accumulation, TileOrder, Use
from flamia_ref.attention.results import Backward, Forward
from flamia_ref.attention.run import TILES, Run, TracedTiles, tile_keys
from flamia_ref.attention.stages import backward_stages, pair_names
from flamia_ref.packing import TilePairs, guarded_blocks, last_visible, tile_pairs

_ROWS = 1024  # rows before and after the tiles that are computed together
_PAIRED_FROM = 128  # head_dim from which a partial sum of dQ takes in two key tiles


def backward(
    q: Any, k: Any, v: Any, dout: Any, forward: Forward, *, trace: Iterable[str] = ()
) -> Backward:
    """The gradients of a recipe, from its inputs, dO, and the out and lse of a forward.

    Shapes: `q`, `dout` [tokens, heads, head_dim]; `k`, `v` [tokens, kv_heads, head_dim]; float32 or bfloat16, all of
    one library, float32 rounded as in `forward`. `forward`: from `attention.forward`, or `Forward.from_kernel`; it
    brings recipe, documents, mask and softmax scale. `trace` names stages of `backward_stages(recipe)`.

    Returns: a `Backward`, arrays in the library of the inputs.
    Raises: ValueError or TypeError before any work for bad shapes, dtypes and names, inputs of another number of tokens
    or heads than the forward's, and an lse or an out that these q, k and v cannot have given: lse less than a query's
    score with its own key (negated, say), out larger than every value of its document. An lse in base 2, or of another
    softmax scale, cannot be seen unless it breaks that. NaN and infinity in the inputs are no error.
    Source: the recipe's.
    """
    if not isinstance(forward, Forward):
        raise TypeError(
            f"forward is a {type(forward).__name__}; pass the result of attention.forward, or Forward.from_kernel"
        )
    check_computed(forward.recipe)
    stages = inputs.check_trace(trace, backward_stages(forward.recipe))
    given = check_backward(q, k, v, dout, forward)
    return _BackwardRun(given, forward, stages).backward()


class _BackwardRun(Run):
    """One backward."""

    def __init__(self, given: BackwardInputs, forward: Forward, stages: tuple[str, ...]) -> None:
        tensors = {"q": given.q, "k": given.k, "v": given.v}
        super().__init__(tensors, forward.recipe, forward.documents, given.namespace, given.device)
        self.given, self.causal, self.stages = given, forward.causal, stages
        factor = inputs.score_factor(forward.softmax_scale, self.recipe.gradient.score_factor)
        self.score_factor = self.to_compute(factor)
        self.scale = self.to_compute(np.uint32(np.float32(forward.softmax_scale).view(np.uint32)))
        self.traced = TracedTiles(self, stages)
        self.skips = self.recipe.tiles.masked == "skipped"
        self.partials = self.recipe.dq.accumulation is Accumulation.FLOAT32_PARTIALS
        self.in_sequence = self.group if self.recipe.gradient.heads == "one_chain" else 1

    def backward(self) -> Backward:
        prologue = self._prologue()
        self.inputs["do"] = prologue.dout
        rows = backward_tile.Values(
            *(self._with_last(x, last) for x, last in zip(prologue[1:], (0, 0, True), strict=True))
        )
        sums: dict[str, dict[tuple[int, int, int], Array]] = {
            name: {} for name in ("dq", "dq_partial", "dk", "dv")
        }
        order = self.recipe.dq.tile_order
        together = 2 if self.partials and self.head_dim >= _PAIRED_FROM else 1
        for pairs in tile_pairs(
            self.documents,
            self.heads,
            TILES,
            self.recipe.tiles.query,
            causal=self.causal,
            unseen=bool({"s", "dp"} & set(self.stages)),
            descending=order is TileOrder.DESCENDING
            or (order is TileOrder.DESCENDING_WHERE_CAUSAL and self.causal),
            keys_together=together,
            heads_in_sequence=self.in_sequence,
        ):
            self._pairs(pairs, rows, sums)
        return self._assembled(prologue, sums)

    def _prologue(self) -> backward_tile.Prologue:
        """What the rows bring along, rows of [tokens, heads] first."""
        rows = self.tokens * self.heads
        dout = self.given.dout.reshape(rows, self.head_dim)
        out = self.given.out.reshape(rows, self.head_dim)
        lse = self.given.lse.T.reshape(rows)
        parts = self._in_batches(
            (dout, out, lse),
            lambda dout, out, lse: tuple(
                backward_tile.prologue(dout, out, lse, recipe=self.recipe)
            ),
        )
        dout, base, delta, dead = parts
        return backward_tile.Prologue(
            dout.reshape(self.tokens, self.heads, self.head_dim), base, delta, dead
        )

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

    def _pairs(
        self,
        pairs: TilePairs,
        values: backward_tile.Values,
        sums: dict[str, dict[tuple[int, int, int], Array]],
    ) -> None:
        """One batch of pairs of tiles: their sums move on."""
        batch = pairs.padded(TILES) if self.fixed_shapes else pairs
        tiles, rows = batch.queries, batch.queries.rows
        last = last_visible(tiles, self.causal)
        kv_head = tiles.head // self.group
        query_tokens, key_tokens = tiles.query_tokens(), batch.key_tokens()
        guarded = None
        if any(getattr(self.recipe, product).guarded for product in ("s", "dp", "dq")):
            guarded = self.to_compute(guarded_blocks(last, batch.key_first))
        unseen = ~batch.seen if self.skips else np.zeros(len(batch), bool)
        work = backward_tile.Work(
            self.to_compute(batch.key_first),
            self.to_compute(last),
            self.to_compute(unseen),
            self.to_compute(batch.opens),
            self.to_compute(batch.closes),
            guarded,
        )
        x = backward_tile.Inputs(
            self.rows(Use.S_Q, query_tokens, tiles.head),
            self.rows(Use.S_K, key_tokens, kv_head),
            self.rows(Use.DP_DO, query_tokens, tiles.head),
            self.rows(Use.DP_V, key_tokens, kv_head),
            self.rows(Use.DV_DO, query_tokens, tiles.head),
            self.rows(Use.DQ_K, key_tokens, kv_head),
            self.rows(Use.DK_Q, query_tokens, tiles.head),
        )
        index = np.where(query_tokens < 0, -1, query_tokens * self.heads + tiles.head[:, None])
        index = np.where(index < 0, self.tokens * self.heads, index)
        row_values = backward_tile.Values(
            *(self.to_compute(_backend.gather(part, index)) for part in values)
        )
        keys = tile_keys(
            pairs.queries.document, pairs.queries.head, pairs.queries.first, pairs.key_first
        )
        places = self._places(keys)
        state = Accumulators(
            *(self._gathered(name, sums, places, rows, len(batch)) for name in sums)
        )
        state, stages = backward_tile.pair_step(
            state, x, row_values, work, self.score_factor, recipe=self.recipe
        )
        for name, new in zip(sums, state, strict=True):
            if new is not None:
                new = self.to_layout(new)
                for at, place in enumerate(places[name]):
                    sums[name][place] = new[at]
        self.traced.add(self._named(stages), keys)

    def _places(self, keys: list[Any]) -> dict[str, list[tuple[int, int, int]]]:
        """Where the sums of each pair are kept."""
        queries = [(document, head, first) for document, head, first, _ in keys]
        chain = self.in_sequence
        by_key = [(document, head // chain, key) for document, head, _, key in keys]
        return {"dq": queries, "dq_partial": queries, "dk": by_key, "dv": by_key}

    def _gathered(
        self,
        name: str,
        sums: dict[str, dict[tuple[int, int, int], Array]],
        places: dict[str, list[tuple[int, int, int]]],
        rows: int,
        count: int,
    ) -> Array | None:
        if name == "dq_partial" and not self.partials:
            return None
        xp = self.layout
        zeros = xp.zeros((rows, self.head_dim), dtype=np.uint32)
        found = [sums[name].get(place, zeros) for place in places[name]]
        found += [zeros] * (count - len(found))
        return self.to_compute(xp.stack(found))

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

    def _assembled(
        self,
        prologue: backward_tile.Prologue,
        sums: dict[str, dict[tuple[int, int, int], Array]],
    ) -> Backward:
        """The packed gradients from the sums of all tiles."""
        chains = 1 if self.recipe.gradient.heads == "one_chain" else self.group
        dq = self._packed(sums["dq"], self.heads)[:, :, None]
        dk = self._packed(sums["dk"], self.kv_heads * chains)
        dv = self._packed(sums["dv"], self.kv_heads * chains)
        dk, dv = (x.reshape(self.tokens, self.kv_heads, chains, self.head_dim) for x in (dk, dv))
        if not self.skips:
            dq = self._poisoned(dq, Use.DQ_K, 1)
            dead = prologue.dead.reshape(self.tokens, self.heads, 1, 1)
            dq = self.layout.where(dead, np.uint32(0), dq)
            dk, dv = self._poisoned(dk, Use.DK_Q, chains), self._poisoned(dv, Use.DV_DO, chains)
        found: dict[str, Array] = {"delta": prologue.delta.reshape(self.tokens, self.heads).T}
        trace: dict[str, Any] = {}
        for name in self.stages:
            if name in self.traced.wanted:
                trace[name] = self.traced.documents(name)
            elif name in found:
                trace[name] = self.finished(found[name])
            else:
                trace[name] = self.finished(self.copy_stage(name))
        return Backward(
            dq=self._gradient(dq, scaled=True),
            dk=self._gradient(dk, scaled=True),
            dv=self._gradient(dv, scaled=False),
            trace=trace,
        )

    def _packed(self, tiles: dict[tuple[int, int, int], Array], heads: int) -> Array:
        """Sums [tokens, heads, channels] from tiles by document, head and first token."""
        xp = self.layout
        if not tiles:
            return xp.zeros((self.tokens, heads, self.head_dim), dtype=np.uint32)
        place = np.zeros((self.tokens, heads), dtype=np.int32)
        filled = 0
        for (document, head, first), tile in tiles.items():
            begin = self.documents.offsets[document] + first
            end = min(begin + tile.shape[0], self.documents.offsets[document + 1])
            place[begin:end, head] = np.arange(filled, filled + end - begin)
            filled += tile.shape[0]
        return _backend.gather(xp.concatenate(list(tiles.values())), place)

    def _poisoned(self, sums: Array, use: Use, chains: int) -> Array:
        """`sums` [tokens, heads, chains, channels] with NaN where a document has a code that is no number:
        it is in the chain of every row, whether or not its tile was computed."""
        bad = self.copy(use).not_finite()
        rows = []
        for document in self.documents:
            flags = bad[document].any(axis=0)
            if use is Use.DQ_K:  # a key/value head is in the chains of its query heads
                flags = self.layout.repeat(flags, self.group, axis=0)
            flags = flags.reshape(1, -1, chains, self.head_dim)
            rows.append(self.layout.where(flags, _float32.NAN, sums[document]))
        return self.layout.concatenate(rows)

    def _gradient(self, sums: Array, *, scaled: bool) -> Array:
        """Values [tokens, heads, channels] in the output format from sums [tokens, heads, chains, channels]."""
        tokens, heads, chains, channels = sums.shape
        (codes,) = self._in_batches(
            (sums.reshape(tokens * heads, chains, channels),),
            lambda part: (backward_tile.finished(part, self.scale, scaled=scaled),),
        )
        values = codes.astype(np.uint32) << np.uint32(16)
        return self.finished(values.reshape(tokens, heads, channels))
