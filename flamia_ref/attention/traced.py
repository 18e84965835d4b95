"""What a caller asked to see of a pass, whole stages and single tiles of them, collected as it is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import shown, unknown_name
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.run import Run
from flamia_ref.attention.stages import document_stages, pair_names
from flamia_ref.packing import Mask
from flamia_ref.packing.tiles import Indices

Key = tuple[int, int, int, int]  # document, head, first query, first key
Tile = tuple[int, int, int, int]  # document, head, query tile, key tile


class Wanted(NamedTuple):
    """Stages by name, and tiles of stages."""

    names: tuple[str, ...]
    tiles: tuple[tuple[str, Tile], ...] = ()


@dataclass(frozen=True, eq=False)
class Trace(Mapping[Any, Any]):
    """The stages that were asked for, by name, and tiles of stages, by the pair that asked for them. A pytree once JAX
    is in use.

    A tile is an array [queries, keys], or of as many blocks, cut to its document.
    """

    stages: Mapping[str, Any] = field(default_factory=dict)
    tiles: tuple[Array, ...] = ()
    tile_names: tuple[tuple[str, Tile], ...] = ()

    def __post_init__(self) -> None:
        _backend.register_value_type(Trace, data=("stages", "tiles"), meta=("tile_names",))

    def __getitem__(self, name: Any) -> Any:
        if isinstance(name, tuple) and name in self.tile_names:
            return self.tiles[self.tile_names.index(name)]
        return self.stages[name]

    def __iter__(self) -> Iterator[Any]:
        yield from self.stages
        yield from self.tile_names

    def __len__(self) -> int:
        return len(self.stages) + len(self.tile_names)


def check_trace(trace: Any, stages: tuple[str, ...], recipe: Recipe) -> Wanted:
    """What is asked for: names among `stages`, and pairs of the name of a stage of pairs and a tile.

    Raises TypeError or ValueError of one line for anything else.
    """
    if isinstance(trace, str):
        trace = (trace,)
    if not isinstance(trace, Iterable):
        raise TypeError(f"trace is {shown(trace)}; it must be names of stages, () for none")
    names: list[str] = []
    tiles: list[tuple[str, Tile]] = []
    for entry in trace:
        if isinstance(entry, tuple):
            tiles.append(_tile(entry, stages, recipe))
        elif entry in stages:
            names.append(entry)
        else:
            raise unknown_name("stage", entry, stages)
    return Wanted(tuple(names), tuple(tiles))


def check_tiles(wanted: Wanted, mask: Mask, heads: int, recipe: Recipe) -> None:
    """Refuse tiles that are not there."""
    for name, (document, head, query, key) in wanted.tiles:
        if document < len(mask.queries) and head < heads:
            most = (mask.queries.lengths[document], mask.keys.lengths[document])
            counts = (-(-most[0] // recipe.tiles.query), -(-most[1] // recipe.tiles.key))
            if query < counts[0] and key < counts[1]:
                continue
            there = f"document {document} has {counts[0]} query tiles and {counts[1]} key tiles"
        else:
            there = f"there are {len(mask.queries)} documents and {heads} heads"
        raise ValueError(
            f"trace has the tile {(document, head, query, key)} of {name!r}, as (document, head, query tile, key tile);"
            f" {there}"
        )


def _tile(entry: tuple[Any, ...], stages: tuple[str, ...], recipe: Recipe) -> tuple[str, Tile]:
    allowed = [name for name in document_stages(recipe) if name in stages]
    if len(entry) != 2 or entry[0] not in allowed:
        raise ValueError(
            f"trace has {shown(entry)}; a pair is the name of a stage of pairs ({', '.join(allowed)}) and a tile"
        )
    name, tile = entry
    numbers = isinstance(tile, (tuple, list)) and len(tile) == 4
    if not numbers or not all(
        isinstance(x, (int, np.integer)) and type(x) is not bool and x >= 0 for x in tile
    ):
        raise ValueError(
            f"trace has the tile {shown(tile)} of {name!r}; it must be (document, head, query tile, key tile)"
        )
    document, head, query, key = (int(x) for x in tile)
    return name, (document, head, query, key)


class TracedTiles:
    """Tiles of the stages that are lists, collected as they are computed."""

    def __init__(self, run: Run, wanted: Wanted) -> None:
        self.run = run
        self.blocks = document_stages(run.recipe)
        self.names = wanted.names
        self.singles = wanted.tiles
        self.whole = tuple(name for name in wanted.names if name in self.blocks)
        self.wanted = tuple(dict.fromkeys((*self.whole, *(name for name, _ in wanted.tiles))))
        size = run.recipe.tiles
        self._places = {
            (name, (document, head, query * size.query, key * size.key))
            for name, (document, head, query, key) in wanted.tiles
        }
        self._tiles: dict[str, dict[Key, Array]] = {name: {} for name in self.wanted}

    def add(self, stages: dict[str, Array | None], keys: list[Key], places: Iterable[int]) -> None:
        """Keep the wanted of `stages`, arrays with one entry for each of `keys` and possibly more, at some `places`."""
        for name in self.wanted:
            values = stages.get(name)
            if values is not None:
                here = [
                    at for at in places if name in self.whole or (name, keys[at]) in self._places
                ]
                if not here:
                    continue
                values = self.run.to_layout(values)
                for at in here:
                    self._tiles[name][keys[at]] = values[at]

    def trace(self, found: Mapping[str, Array]) -> Trace:
        """Everything that was asked for; `found` holds stages that are one array, float32 as bits."""
        stages: dict[str, Any] = {}
        for name in self.names:
            if name in self.whole:
                stages[name] = self._documents(name)
            elif name in found:
                stages[name] = self.run.finished(found[name])
            else:
                stages[name] = self.run.finished(self.run.copy_stage(name))
        tiles = tuple(self.run.finished(self._single(name, tile)) for name, tile in self.singles)
        return Trace(stages, tiles, self.singles)

    def _single(self, name: str, tile: Tile) -> Array:
        document, head, query, key = tile
        size, mask = self.run.recipe.tiles, self.run.mask
        first, key_first = query * size.query, key * size.key
        extents = []
        for start, most, length, block in zip(
            (first, key_first),
            (size.query, size.key),
            (mask.queries.lengths[document], mask.keys.lengths[document]),
            self.blocks[name],
            strict=True,
        ):
            extents.append(-(-min(most, length - start) // block))
        found = self._tiles[name].get((document, head, first, key_first))
        if found is None:
            return self.run.layout.zeros(tuple(extents), dtype=self._dtype(name))
        return found[: extents[0], : extents[1]]

    def _documents(self, name: str) -> list[Array]:
        """A stage as a list of [heads, queries, keys], zeros where no tile was computed."""
        mask = self.run.mask
        tiles: dict[int, dict[tuple[int, int, int], Array]] = {}
        for (document, *place), tile in self._tiles[name].items():
            head, first, key = place
            tiles.setdefault(document, {})[head, first, key] = tile
        return [
            self.run.finished(self._document(name, tiles.get(index, {}), *lengths))
            for index, lengths in enumerate(
                zip(mask.queries.lengths, mask.keys.lengths, strict=True)
            )
        ]

    def _document(
        self, name: str, mine: dict[tuple[int, int, int], Array], queries: int, keys: int
    ) -> Array:
        xp, heads = self.run.layout, self.run.heads
        row_block, column_block = self.blocks[name]
        shape = (-(-queries // row_block), -(-keys // column_block))
        if not mine:
            return xp.zeros((heads, *shape), dtype=self._dtype(name))
        some = next(iter(mine.values()))
        starts = range(0, queries, some.shape[0] * row_block)
        key_starts = range(0, keys, some.shape[1] * column_block)
        zeros = xp.zeros(some.shape, dtype=some.dtype)
        planes: list[Any] = []
        for head in range(heads):
            strips = [
                xp.concatenate([mine.get((head, first, key), zeros) for key in key_starts], axis=1)
                for first in starts
            ]
            planes.append(xp.concatenate(strips)[: shape[0], : shape[1]])
        return xp.stack(planes)

    def _dtype(self, name: str) -> Any:
        if name.endswith(".scales"):
            return np.uint8
        if not name.endswith(".codes"):
            return np.uint32
        return _code_type(self.run.recipe, name)


def _code_type(recipe: Recipe, stage: str) -> Any:
    """The type of the codes of a pair operand."""
    use = next(use for use, name in pair_names(recipe).items() if f"{name}.codes" == stage)
    return np.uint16 if recipe.operand(use).format == "bf16" else np.uint8


def tile_keys(document: Indices, head: Indices, first: Indices, key_first: Indices) -> list[Key]:
    """The keys under which tiles are kept."""
    columns = (document, head, first, key_first)
    return [
        (int(a), int(b), int(c), int(d))
        for a, b, c, d in zip(*(x.tolist() for x in columns), strict=True)
    ]
