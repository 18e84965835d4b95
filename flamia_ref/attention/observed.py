"""The real simulator, watched while it runs: what P loses and what the rows of dS sum to, without keeping pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend
from flamia_ref.attention import inputs, sides, softmax
from flamia_ref.attention.backward_pass import BackwardRun
from flamia_ref.attention.forward_pass import ForwardRun
from flamia_ref.attention.kernel_results import check_backward
from flamia_ref.attention.parts import Values
from flamia_ref.attention.product import Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.results import Backward, Forward
from flamia_ref.attention.run import Run, Sizes
from flamia_ref.attention.stages import kept_for_backward, pair_names
from flamia_ref.attention.traced import Key, Trace, Wanted
from flamia_ref.packing import QueryTiles, query_tiles
from flamia_ref.packing.tiles import Indices, guarded_blocks

_LOG2_E = float(np.log2(np.e))

Places = np.ndarray[Any, np.dtype[np.int64]]


class Rows(NamedTuple):
    """Rows of a forward: out [rows, heads, channels], lse [rows, heads], and the sum of P as O takes it, of what l
    is 1 of [rows, heads]."""

    out: Values
    lse: Values
    mass: Values


class RowSums(NamedTuple):
    """The sums of each row of dS and of its magnitudes, before dS is quantized [tokens, heads]."""

    sums: Values
    magnitudes: Values


class _Sums:
    """In place of a trace: adds up rows of tiles as they are computed."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.wanted: tuple[str, ...] = ()
        self.singles: tuple[Any, ...] = ()

    def trace(self, found: Mapping[str, Any]) -> Trace:
        return Trace()

    def tokens(self, key: Key, rows: int) -> slice:
        """The packed tokens of a tile's rows."""
        documents = self.run.mask.queries
        start = documents.offsets[key[0]] + key[2]
        return slice(start, min(start + rows, documents.offsets[key[0] + 1]))


class _Mass(_Sums):
    """The sums of P as O takes it, tile by tile, relative to the base of the tile."""

    def __init__(self, run: ForwardRun) -> None:
        super().__init__(run)
        self.tiles: dict[Key, Values] = {}

    def add(self, stages: Mapping[str, Any], keys: list[Key], places: Iterable[int]) -> None:
        here = list(places)
        if not here:
            return
        run, mine = self.run, [keys[at] for at in here]
        name = pair_names(run.recipe)[Use.O_P]
        p, codes = (_backend.host(stages[one])[here] for one in ("p", f"{name}.codes"))
        scales = stages.get(f"{name}.scales")
        scales = None if scales is None else _backend.host(scales)[here]
        tiles, key_first = _tiles_of(run, mine, *p.shape[1:])
        tokens = tiles.key_tokens(key_first)
        fold = run.rows(Use.O_V, tokens, tiles.head // run.group).fold
        fold = None if fold is None else fold[:, None, :]
        values = sides.pair_values(sides.Pairs(codes, scales), run.recipe.o.left, fold)
        if run.recipe.o.guarded:
            inside = tiles.query_tokens() >= 0
            guarded = guarded_blocks(*tiles.bounds(run.mask), inside, key_first, tiles.keys)
            if guarded is not None:
                values = sides.where_guarded(guarded, sides.rounded_bfloat16(p), values)
        for key, one in zip(mine, _values_of(values), strict=True):
            self.tiles[key] = one.sum(axis=1)


def _tiles_of(run: Run, keys: list[Key], rows: int, columns: int) -> tuple[QueryTiles, Indices]:
    """The query tiles of some pairs of tiles, and the first keys of their key tiles."""
    document, head, first, key_first = np.array(keys, dtype=np.int32).T
    of_q, of_k = run.mask.queries, run.mask.keys
    tiles = QueryTiles(
        rows=rows,
        keys=columns,
        document=document,
        head=head,
        first=first,
        start=np.array(of_q.offsets, dtype=np.int32)[document],
        length=np.array(of_q.lengths, dtype=np.int32)[document],
        key_start=np.array(of_k.offsets, dtype=np.int32)[document],
        key_length=np.array(of_k.lengths, dtype=np.int32)[document],
    )
    return tiles, key_first


class _SumsOfDs(_Sums):
    """The sums of the rows of dS and of their magnitudes."""

    def __init__(self, run: BackwardRun) -> None:
        super().__init__(run)
        shape = (run.tokens, run.heads)
        self.found = RowSums(np.zeros(shape), np.zeros(shape))

    def add(self, stages: Mapping[str, Any], keys: list[Key], places: Iterable[int]) -> None:
        if "ds" not in stages:
            return
        ds = _backend.host(stages["ds"]).view(np.float32).astype(np.float64)
        for at in places:
            rows = self.tokens(keys[at], ds.shape[1])
            count = rows.stop - rows.start
            self.found.sums[rows, keys[at][1]] += ds[at, :count].sum(axis=1)
            self.found.magnitudes[rows, keys[at][1]] += np.abs(ds[at, :count]).sum(axis=1)


class _WatchedForward(ForwardRun):
    """A forward that keeps the sums of P."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.mass = _Mass(self)
        self.traced: Any = self.mass
        self.keeps = (*self.keeps, "row_base")

    def some(self, chosen: Places) -> Rows:
        """The rows of some packed tokens, of the whole tiles that they are in."""
        v_nan = self._nan_channels() if self.poisons else None
        wanted = np.zeros(
            self.tokens + 1, dtype=np.bool_
        )  # the last for rows past a document's end
        wanted[chosen] = True
        out = np.zeros((self.tokens, self.heads, self.value_dim))
        lse = np.full((self.tokens, self.heads), -np.inf)
        for batch in query_tiles(self.mask, self.heads, self.batch, self.size):
            tiles = _taken(batch, np.flatnonzero(wanted[batch.query_tokens()].any(axis=1)))
            if not len(tiles):
                continue
            codes, _, of_tiles, *_ = (late.get() for late in self._tiles(tiles, v_nan))
            tokens = tiles.query_tokens()
            tile, at = np.nonzero(tokens >= 0)
            places = tokens[tile, at], tiles.head[tile]
            found = _values_of(codes.astype(np.uint32) << np.uint32(16))
            out[places] = found.reshape(*tokens.shape, -1)[tile, at]
            lse[places] = _values_of(of_tiles).reshape(tokens.shape)[tile, at]
        return Rows(out[chosen], lse[chosen], self.kept(lse)[chosen])

    def kept(self, lse: Values) -> Values:
        """The sums of P as O takes it, of what l is 1 of, from lse [tokens, heads]."""
        knobs, found = self.recipe.softmax, np.zeros(lse.shape)
        for key, sums in self.mass.tiles.items():
            rows = self.mass.tokens(key, len(sums))
            base = self._in_log2_units(key)
            base, sums = (x[: rows.stop - rows.start] for x in (base, sums))
            with np.errstate(all="ignore"):
                moved = sums * np.exp2(base - knobs.p_log2 - lse[rows, key[1]] * _LOG2_E)
            found[rows, key[1]] += np.where(sums == 0, 0.0, moved)
        return found

    def _in_log2_units(self, key: Key) -> Values:
        """The base of the rows of a pair of tiles."""
        knobs, base = self.recipe.softmax, _backend.host(self.bases[key])[None]
        if knobs.base == "natural_max":
            return _values_of(base[0]) * _LOG2_E
        tiles, _ = _tiles_of(self, [key], base.shape[1], self.size.key)
        c = _backend.host(self.factors_of(tiles).c)
        return _values_of(softmax.in_log2_units(base, c, knobs)[0])


def _values_of(bits: Any) -> Values:
    return np.asarray(_backend.host(bits).view(np.float32), dtype=np.float64)


def _taken(tiles: QueryTiles, places: Any) -> QueryTiles:
    names = ("document", "head", "first", "start", "length", "key_start", "key_length")
    some = {name: getattr(tiles, name)[places] for name in names}
    return QueryTiles(rows=tiles.rows, keys=tiles.keys, **some)


def rows(given: inputs.Inputs, recipe: Recipe, chosen: Places, sink: Any) -> Rows:
    """The forward of a recipe on checked inputs in numpy, some packed queries alone."""
    return _watched(given, recipe, sink).some(chosen)


def forward(given: inputs.Inputs, recipe: Recipe, sink: Any) -> tuple[Forward, Values]:
    """`attention.forward` on checked inputs in numpy, and the sums of P as O takes it, of what l is 1 of [tokens,
    heads]."""
    run = _watched(given, recipe, sink)
    found = run.forward()
    mass = run.kept(np.asarray(found.lse, dtype=np.float64).T)
    names = kept_for_backward(recipe) if recipe.has_backward else ()
    return replace(found, saved={name: found.saved[name] for name in names}), mass


def _watched(given: inputs.Inputs, recipe: Recipe, sink: Any) -> _WatchedForward:
    arrays = {name: _backend.host(getattr(given, name)) for name in ("q", "k", "v")}
    q, _, v = arrays.values()
    sizes = Sizes(q.shape[1], v.shape[1], q.shape[2], v.shape[2])
    wanted, bits = Wanted(()), inputs.sink_bits(sink)
    run = _WatchedForward(recipe, given.shape, sizes, np, np, None, wanted, bits)
    run.inputs.update(arrays)
    return run


def backward(q: Any, k: Any, v: Any, dout: Any, ahead: Forward) -> tuple[Backward, RowSums]:
    """`attention.backward` in numpy, and what the rows of dS sum to."""
    given = check_backward(q, k, v, dout, ahead)
    sizes = Sizes(q.shape[1], v.shape[1], q.shape[2], v.shape[2])
    run = BackwardRun(ahead, sizes, np, np, None, Wanted(()), given.sink, given.saved)
    watch = _SumsOfDs(run)
    run.traced = watch  # type: ignore[assignment]
    run.inputs.update(q=given.q, k=given.k, v=given.v)
    found = run.backward(run.rows_before(given.dout, given.out, given.lse))
    return found, watch.found
