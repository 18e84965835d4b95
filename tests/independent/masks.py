"""Which keys the queries of one document see, its tiles, and its guarded blocks."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

BLOCK = 32


def spans(length: int, size: int) -> list[range]:
    """0..length in consecutive spans; the last may be shorter."""
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


@dataclass(frozen=True, kw_only=True)
class Mask:
    """The mask of a document with ``queries`` queries and ``keys`` keys, counted from its start.

    ``left`` and ``right`` are the sides of the window, None for unlimited.
    """

    queries: int
    keys: int
    causal: bool = True
    alignment: str = "bottom_right"
    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        if self.alignment not in ("bottom_right", "top_left"):
            raise ValueError(f"alignment {self.alignment!r}: pass bottom_right or top_left")
        if self.causal and self.right:
            raise ValueError(f"causal with {self.right} keys to the right: pass 0 or None")

    @property
    def is_local(self) -> bool:
        """Causal, or with a window."""
        return self.causal or self.left is not None or self.right is not None

    @property
    def shift(self) -> int:
        """The key beside which query 0 stands."""
        return self.keys - self.queries if self.alignment == "bottom_right" else 0

    def seen(self, query: int) -> range:
        """The keys that a query sees; an empty range for none."""
        return self._ranges[query]

    @cached_property
    def _ranges(self) -> list[range]:
        return [self._range(query) for query in range(self.queries)]

    def _range(self, query: int) -> range:
        own = query + self.shift
        first, last = 0, self.keys - 1
        if self.causal:
            last = min(last, own)
        if self.right is not None:
            last = min(last, own + self.right)
        if self.left is not None:
            first = max(first, own - self.left)
        return range(first, max(first, last + 1))

    def sees(self, query: int, key: int) -> bool:
        """Whether a pair is visible; a key past the document's end is not."""
        return key in self.seen(query)

    def is_dead(self, query: int) -> bool:
        """Whether a query sees no key."""
        return len(self.seen(query)) == 0

    @cached_property
    def guarded(self) -> frozenset[tuple[int, int]]:
        """The blocks (of queries, of keys) that hold a visible and a masked pair.

        A key past the document's end counts as masked, a query past it does not count.
        """
        found = set()
        for row, queries in enumerate(spans(self.queries, BLOCK)):
            for column in range(-(-self.keys // BLOCK)):
                keys = range(column * BLOCK, (column + 1) * BLOCK)
                if len({self.sees(i, j) for i in queries for j in keys}) == 2:
                    found.add((row, column))
        return frozenset(found)

    def is_guarded(self, query: int, key: int) -> bool:
        """Whether a pair lies in a guarded block."""
        return (query // BLOCK, key // BLOCK) in self.guarded


def window_sides(window: Any) -> tuple[int | None, int | None]:
    """(left, right) of a window as it is given: None, or a pair of None, -1 and numbers."""
    left, right = (None, None) if window is None else window
    if any(x is not None and x < -1 for x in (left, right)):
        raise ValueError(f"window {window!r}: pass numbers of keys, None or -1")
    return (None if left == -1 else left), (None if right == -1 else right)


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tiles of a document and which pairs of them are worked on.

    ``computed``: all of them. ``paired``: the backward works on key tiles 2p and 2p + 1 as one.
    """

    mask: Mask
    query_size: int
    key_size: int
    computed: bool
    paired: bool

    @cached_property
    def query_tiles(self) -> list[range]:
        """The tokens of each query tile."""
        return spans(self.mask.queries, self.query_size)

    @cached_property
    def key_tiles(self) -> list[range]:
        """The tokens of each key tile."""
        return spans(self.mask.keys, self.key_size)

    @cached_property
    def key_units(self) -> list[range]:
        """The tokens of the key tiles, or pairs of them, of the backward."""
        return spans(self.mask.keys, self.key_size * (2 if self.paired else 1))

    def worked_on(self, queries: range) -> list[int]:
        """The key tiles that the forward works on for a query tile, ascending."""
        return self._worked_on(queries, self.key_tiles)

    def units_worked_on(self, queries: range) -> list[int]:
        """The key units that the backward works on for a query tile, ascending."""
        return self._worked_on(queries, self.key_units)

    def queries_worked_on(self, unit: int) -> list[int]:
        """The query tiles that the backward works on for a key unit, ascending."""
        return [
            index
            for index, queries in enumerate(self.query_tiles)
            if unit in self.units_worked_on(queries)
        ]

    def _worked_on(self, queries: range, tiles: list[range]) -> list[int]:
        if self.computed:
            return list(range(len(tiles)))
        return [
            index
            for index, keys in enumerate(tiles)
            if any(
                self.mask.seen(i).start < keys.stop and keys.start < self.mask.seen(i).stop
                for i in queries
                if not self.mask.is_dead(i)
            )
        ]


def ordered(
    tiles: list[int], order: str, *, causal: bool, own: int = 0, along: str = ""
) -> list[int]:
    """Tiles, given ascending, in the order of a recipe.

    ``causal``: causal, or with a window.
    A shifted order starts at the tile ``own``: ``along`` "keys" it descends to 0 and goes on from the last,
    ``along`` "queries" it ascends to the last and goes on from 0.
    """
    if order == "descending_where_causal":
        order = "descending" if causal else "ascending"
    if order == "ascending":
        return tiles
    if order == "descending":
        return tiles[::-1]
    if order != "shifted":
        raise ValueError(f"tile order {order!r}: none is known by that name")
    if along == "keys":
        return [x for x in tiles[::-1] if x <= own] + [x for x in tiles[::-1] if x > own]
    return [x for x in tiles if x >= own] + [x for x in tiles if x < own]


def runs(tiles: list[int], count: int) -> list[list[int]]:
    """Ascending tiles cut into ``count`` runs of equally many, the last ones shorter or empty."""
    size = -(-len(tiles) // count)
    return [tiles[x * size : (x + 1) * size] for x in range(count)]
