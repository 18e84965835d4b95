"""The work of one kernel launch: its tiles, what each goes through and moves, one entry of an array a tile."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from flamia_ref._errors import shown
from flamia_ref.packing import Blocks, Documents, Mask, key_blocks, query_blocks
from flamia_ref.packing.tiles import BLOCK

Counts = np.ndarray[Any, np.dtype[np.int64]]

_MOST_TILES = 2**26


class Pass(StrEnum):
    """What a launch computes.

    Attributes:
        FORWARD: O and lse; a tile is a block of queries and goes through the key tiles it sees.
        BACKWARD: dK, dV and, added up in memory, dQ; a tile is a block of keys and goes through the query tiles that
            see it.
        BACKWARD_DQ: dQ alone, a tile as in FORWARD; where dK and dV have a kernel of their own, which is
            BACKWARD_DKDV.
        BACKWARD_DKDV: dK and dV alone, a tile as in BACKWARD.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_DQ = "backward_dq"
    BACKWARD_DKDV = "backward_dkdv"

    @property
    def by_keys(self) -> bool:
        """Whether a tile is a block of keys."""
        return self in (Pass.BACKWARD, Pass.BACKWARD_DKDV)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Attention of packed documents: who sees what, and how wide it is.

    Attributes:
        mask: the documents and what each query sees.
        heads, kv_heads: of queries, and of keys and values.
        head_dim, value_dim: channels of q and k, and of v and out.
    """

    mask: Mask
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim", "value_dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {shown(value)}; it must be a positive integer")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads} and kv_heads {self.kv_heads}; heads must be a multiple of kv_heads"
            )

    @classmethod
    def of(
        cls,
        cu_seqlens: Any,
        *,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int = 128,
        value_dim: int | None = None,
        causal: bool = True,
        window: Any = None,
    ) -> Problem:
        """Packed documents whose queries are also the keys.

        Args:
            cu_seqlens: cumulative lengths [documents + 1], integers.
            heads, kv_heads: `kv_heads` None: as many as heads.
            head_dim, value_dim: `value_dim` None: as head_dim.
            causal, window: as in `attention.forward`.

        Raises: TypeError or ValueError of one line for what these may not be.
        """
        documents = Documents.from_cu_seqlens(cu_seqlens, None)
        mask = Mask.of(documents, documents, causal=causal, window=window, alignment="bottom_right")
        return cls(
            mask=mask,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim,
        )

    @property
    def group(self) -> int:
        """Query heads a key/value head."""
        return self.heads // self.kv_heads

    def visible_pairs(self) -> int:
        """How many pairs of a query and a key, of one head, are not masked."""
        blocks = query_blocks(self.mask, 1)
        return int((blocks.most - blocks.least + 1).sum())


class Size(NamedTuple):
    """Queries and keys of a tile product, and how many of them, side by side, one tile of a launch goes through at a
    time: a kernel that holds two query tiles has 2 `stages`."""

    queries: int
    keys: int
    stages: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The tiles of a launch in natural order: documents, then heads, then blocks, each ascending.

    Counts are of tile products: one query tile against one key tile, once computed however much of it is masked.

    Attributes:
        launch: what is computed.
        problem, size: of what, in tiles of which size.
        document, head, block: the coordinates of each tile; a block counts from its document's start.
        begin: the first tile of the other side that it goes through.
        products: how many it goes through.
        masked: those of them with a masked pair, or a place past the document's end.
        guarded: blocks of 32 queries by 32 keys with a visible and a masked pair: what a guarded recipe computes in
            bfloat16.
        split: which part of the keys, where they are split; else 0.
    """

    launch: Pass
    problem: Problem
    size: Size
    document: Counts
    head: Counts
    block: Counts
    begin: Counts
    products: Counts
    masked: Counts
    guarded: Counts
    split: Counts

    def __len__(self) -> int:
        return len(self.document)

    def take(self, places: Counts) -> Work:
        """The tiles at `places`."""
        arrays = {
            one.name: getattr(self, one.name)[places]
            for one in fields(self)
            if isinstance(getattr(self, one.name), np.ndarray)
        }
        return replace(self, **arrays)


def work_of(problem: Problem, launch: Pass | str, size: Size, *, splits: int = 1) -> Work:
    """Every tile of a launch.

    Args:
        problem: the attention.
        launch: the pass.
        size: the size of a tile product, multiples of 32, and the stages.
        splits: parts that the keys of each query tile are cut into, of whole key tiles; FORWARD only.

    Raises: ValueError for a size that is no multiple of 32, for splits of another pass than FORWARD, and for more
        than 2^26 tiles.
    """
    launch = Pass(launch)
    _check(size, splits, launch)
    own, other = (size.keys, size.queries) if launch.by_keys else (size.queries, size.keys)
    make = key_blocks if launch.by_keys else query_blocks
    _check_count(problem, launch, own * size.stages, splits)
    found = make(problem.mask, own)
    rows = _split(_rows(found, own, other, size.stages), splits, found, other)
    small = query_blocks(problem.mask, BLOCK)
    if launch.by_keys:
        guarded = _guarded_of_keys(small, rows, problem.mask.keys, own * size.stages)
    else:
        guarded = _guarded(small, rows, own * size.stages, other, splits)
    place, head = _by_head(rows.document, problem.heads)
    products = (rows.end - rows.begin) * size.stages
    return Work(
        launch=launch,
        problem=problem,
        size=size,
        head=head,
        document=rows.document[place],
        block=rows.block[place],
        begin=rows.begin[place],
        products=products[place],
        masked=(products - rows.whole)[place],
        guarded=guarded[place],
        split=rows.split[place],
    )


class _Rows(NamedTuple):
    """The tiles of one head: what of the other side each goes through, in its tiles, and products without a mask."""

    document: Counts
    block: Counts
    begin: Counts
    end: Counts
    whole: Counts
    split: Counts


def _check(size: Size, splits: int, launch: Pass) -> None:
    for name, value in (("queries", size.queries), ("keys", size.keys)):
        if value < BLOCK or value % BLOCK:
            raise ValueError(
                f"a tile has {value} {name}; it must be a positive multiple of {BLOCK}"
            )
    if size.stages < 1:
        raise ValueError(f"stages is {size.stages}; it must be at least 1")
    if splits < 1 or (splits > 1 and (launch is not Pass.FORWARD or size.stages > 1)):
        raise ValueError(
            f"splits is {splits} of a {launch.value} with {size.stages} stages; only a forward of 1 stage is split"
        )


def _check_count(problem: Problem, launch: Pass, rows: int, splits: int) -> None:
    documents = problem.mask.keys if launch.by_keys else problem.mask.queries
    lengths = np.array(documents.lengths, dtype=np.int64)
    tiles = int((-(-lengths // rows)).sum()) * problem.heads * splits
    if tiles > _MOST_TILES:
        raise ValueError(
            f"{tiles} tiles; at most {_MOST_TILES} are held at once, so give fewer tokens or heads, or larger tiles"
        )


def _rows(found: Blocks, own: int, other: int, stages: int) -> _Rows:
    """Tiles of `stages` neighbouring blocks each. They go through the same tiles of the other side, from the first that
    one of them meets to the last."""
    begin, end = found.tiles(other)
    whole_begin, whole_end = found.whole_tiles(other)
    whole = whole_end - whole_begin
    block = found.first // own
    zero = np.zeros_like(block)
    if stages == 1 or not len(block):
        return _Rows(found.document, block, begin, end, whole, zero)
    starts = np.flatnonzero(block % stages == 0)
    met = end > begin
    first = np.minimum.reduceat(np.where(met, begin, np.iinfo(np.int64).max), starts)
    last = np.maximum.reduceat(np.where(met, end, 0), starts)
    return _Rows(
        found.document[starts],
        block[starts] // stages,
        np.minimum(first, last),
        last,
        np.add.reduceat(whole, starts),
        zero[starts],
    )


def _split(rows: _Rows, splits: int, found: Blocks, other: int) -> _Rows:
    """Each tile cut into `splits` runs of its tiles of the other side, of equal length but for the last ones."""
    if splits == 1:
        return rows
    whole_begin, whole_end = (np.repeat(x, splits) for x in found.whole_tiles(other))
    split = np.tile(np.arange(splits), len(rows.document))
    begin, end = np.repeat(rows.begin, splits), np.repeat(rows.end, splits)
    each = -(-(end - begin) // splits)
    first = np.minimum(begin + split * each, end)
    last = np.minimum(first + each, end)
    return _Rows(
        np.repeat(rows.document, splits),
        np.repeat(rows.block, splits),
        first,
        last,
        _overlap(first, last, whole_begin, whole_end),
        split,
    )


def _overlap(begin: Counts, end: Counts, other_begin: Counts, other_end: Counts) -> Counts:
    found: Counts = np.maximum(np.minimum(end, other_end) - np.maximum(begin, other_begin), 0)
    return found


def _guarded(small: Blocks, rows: _Rows, own: int, other: int, splits: int) -> Counts:
    """Guarded blocks of tiles of queries, from the blocks of 32 queries."""
    begin, end = small.tiles(BLOCK)
    whole_begin, whole_end = small.whole_tiles(BLOCK)
    place = _starts(rows.document, small.document) + small.first // own * splits
    found = np.zeros(len(rows.document), dtype=np.int64)
    for split in range(splits):
        at = place + split
        first, last = (x[at] * (other // BLOCK) for x in (rows.begin, rows.end))
        guarded = _overlap(first, last, begin, end) - _overlap(first, last, whole_begin, whole_end)
        found += np.bincount(at, weights=guarded, minlength=len(found)).astype(np.int64)
    return found


def _guarded_of_keys(small: Blocks, rows: _Rows, keys: Documents, own: int) -> Counts:
    """Guarded blocks of tiles of keys, from the blocks of 32 queries: a block of keys has those that reach it but not
    as a whole."""
    begin, end = small.tiles(BLOCK)
    whole_begin, whole_end = small.whole_tiles(BLOCK)
    none = whole_begin == whole_end
    whole_begin, whole_end = np.where(none, begin, whole_begin), np.where(none, begin, whole_end)
    counts = -(-np.array(keys.lengths, dtype=np.int64) // BLOCK)
    document = np.repeat(np.arange(len(counts)), counts)
    offset = np.cumsum(counts) - counts
    steps = np.zeros(len(document) + 1, dtype=np.int64)
    for edge, step in ((begin, 1), (whole_begin, -1), (whole_end, 1), (end, -1)):
        np.add.at(steps, offset[small.document] + edge, step)
    guarded = np.cumsum(steps)[:-1]
    inside = np.arange(len(document)) - offset[document]
    place = _starts(rows.document, document) + inside * BLOCK // own
    found: Counts = np.bincount(place, weights=guarded, minlength=len(rows.document)).astype(
        np.int64
    )
    return found


def _starts(document: Counts, of: Counts) -> Counts:
    """Where the entries of each document `of` begin in `document`, which ascends."""
    return np.searchsorted(document, of)


def _by_head(document: Counts, heads: int) -> tuple[Counts, Counts]:
    """Places of the tiles of every head, documents, then heads, then blocks; and the heads."""
    counts = np.bincount(document) if len(document) else np.zeros(0, dtype=np.int64)
    starts = np.cumsum(counts) - counts
    many, begin = np.repeat(counts, heads), np.repeat(starts, heads)
    place = np.arange(int(many.sum())) - np.repeat(np.cumsum(many) - many - begin, many)
    return place, np.repeat(np.tile(np.arange(heads), len(counts)), many)
