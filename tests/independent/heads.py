"""One query head of one document: its numbers, its mask, its tiles and its guarded blocks."""

from dataclasses import dataclass
from functools import cache

from tests.independent.operands import Matrix

BLOCK = 32
TILE = 128


@dataclass(frozen=True, kw_only=True)
class Head:
    """bfloat16 bits [token][channel] of a query head and of the key/value head it uses.

    ``dout`` is None where there is no backward. ``group_q``: q of all query heads of that key/value head, where a scale
    is of all of them. Positions count from the document's start.
    """

    q: Matrix
    k: Matrix
    v: Matrix
    dout: Matrix | None
    head_dim: int
    causal: bool
    softmax_scale: float
    group_q: tuple[Matrix, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of the document."""
        return len(self.q)

    @property
    def required_dout(self) -> Matrix:
        """The gradient of out. Raises ValueError where none was given."""
        if self.dout is None:
            raise ValueError("dout is missing: pass dout_bits to run a backward")
        return self.dout

    def sees(self, query: int, key: int) -> bool:
        """Whether the pair is visible."""
        return visible(query, key, length=self.length, causal=self.causal)

    def tiles(self) -> list[range]:
        """All tiles of tokens."""
        return spans(self.length, TILE)

    def key_tiles(self, query: int) -> list[range]:
        """The key tiles that hold a visible pair with the query tile of this query."""
        queries = self.tiles()[query // TILE]
        return [keys for keys in self.tiles() if self.meet(queries, keys)]

    def query_tiles(self, key: int) -> list[range]:
        """The query tiles that hold a visible pair with the key tile of this key."""
        keys = self.tiles()[key // TILE]
        return [queries for queries in self.tiles() if self.meet(queries, keys)]

    def meet(self, queries: range, keys: range) -> bool:
        """Whether some query of a span sees some key of another."""
        return not self.causal or keys.start < queries.stop

    def guarded_blocks(self, query: int, keys: range) -> list[range]:
        """The key blocks inside ``keys`` that are guarded for this query's block."""
        return [
            range(start, min(start + BLOCK, keys.stop))
            for start in range(keys.start, keys.stop, BLOCK)
            if self.is_guarded(query, start)
        ]

    def is_guarded(self, query: int, key: int) -> bool:
        """Whether the pair lies in a guarded block."""
        return guarded(query // BLOCK, key // BLOCK, length=self.length, causal=self.causal)


def spans(length: int, size: int) -> list[range]:
    """0..length in consecutive spans; the last may be shorter."""
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def visible(query: int, key: int, *, length: int, causal: bool) -> bool:
    """Whether a query of the document sees a position; a position past the end is never seen."""
    return key < length and (key <= query or not causal)


@cache
def guarded(query_block: int, key_block: int, *, length: int, causal: bool) -> bool:
    """Whether a 32x32 block holds a visible and a masked pair.

    A key position past the document's end counts as masked, a query position past it not at all.
    """
    queries = range(query_block * BLOCK, min((query_block + 1) * BLOCK, length))
    keys = range(key_block * BLOCK, (key_block + 1) * BLOCK)
    pairs = {visible(i, j, length=length, causal=causal) for i in queries for j in keys}
    return len(pairs) == 2
