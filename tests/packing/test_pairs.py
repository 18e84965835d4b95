"""Pairs of tiles: each once, in an order that sums can be taken in, and never two that add to one sum at a time."""

import functools
import itertools
from collections import defaultdict

import numpy as np
import pytest

from flamia_ref.packing import Mask, PairOrder, TileSize, passes, tile_pairs
from tests.attention.masks import MASKS, PLAIN, packed, visible

LENGTHS = [(40, 40), (130, 130), (20, 20)]
UNEQUAL = [(40, 130), (0, 7), (130, 40), (33, 33), (9, 0), (64, 96), (1, 200)]
SIZE = TileSize(32, 32)
HEADS = 4


def mask_of(lengths, mask) -> Mask:
    queries, keys = zip(*lengths, strict=True)
    return Mask.of(packed(queries), packed(keys), **mask)


def pairs(mask: Mask, order: PairOrder, *, size: TileSize = SIZE, unseen: bool = False):
    """One list a batch, of (document, head, query tile, key tile, seen, opens, closes)."""
    found = []
    for one in tile_pairs(mask, HEADS, 8, size, order, unseen=unseen):
        columns = (
            one.queries.document,
            one.queries.head,
            one.queries.first // one.queries.rows,
            one.key_first // one.queries.keys,
            one.seen,
            one.opens,
            one.closes,
        )
        assert len(one) <= 8
        assert {len(column) for column in columns} == {len(one)}
        found.append(list(zip(*(column.tolist() for column in columns), strict=True)))
    return found


def tiles_seen(queries: int, keys: int, rows: int, columns: int, mask) -> np.ndarray:
    """Which pairs of tiles hold a visible pair, [query tiles, key tiles], from the pairs."""
    seen = _visible(queries, keys, *mask.items())
    short = (0, -queries % rows), (0, -keys % columns)
    padded = np.pad(seen, short)
    return padded.reshape(-(-queries // rows), rows, -(-keys // columns), columns).any(axis=(1, 3))


@functools.cache
def _visible(queries: int, keys: int, *mask) -> np.ndarray:
    return visible(queries, keys, **dict(mask))


def turns(order: str, own: int, count: int, step: int) -> list[int]:
    """All of `count` tiles in an order: "shifted" goes from `own` on by `step` and round."""
    if order == "shifted":
        start = min(own, count - 1) if step < 0 else (own if own < count else 0)
        return [(start + step * turn) % count for turn in range(count)]
    return list(range(count))[:: -1 if order == "descending" else 1]


def check(lengths, mask, order: PairOrder, size: TileSize, *, unseen: bool) -> None:
    batches = pairs(mask_of(lengths, mask), order, size=size, unseen=unseen)
    every = [pair for batch in batches for pair in batch]
    together, sequence = order.keys_together, order.heads_in_sequence

    # Each pair of which a query sees a key, or all, once; tiles that are worked on together are seen together.
    wanted, counts = set(), {}
    for document, (queries, keys) in enumerate(lengths):
        if not (queries and keys):
            continue
        rows, columns = size.of(queries, keys)
        seen = tiles_seen(queries, keys, rows, columns, mask)
        counts[document] = seen.shape
        for head, query, key in itertools.product(range(HEADS), *map(range, seen.shape)):
            first = key // together * together
            visible_here = bool(seen[query, first : first + together].any())
            if visible_here or unseen:
                wanted.add((document, head, query, key, visible_here))
    assert len(every) == len(wanted)
    assert {pair[:5] for pair in every} == wanted

    # In a batch, no two add to the same dQ, or to the same dK and dV, where that pass adds to it.
    for batch in batches:
        for kept, column in (
            (order.keys, lambda p: p[:3]),
            (order.queries, lambda p: (p[0], p[1] // sequence, p[3])),
        ):
            taken = [column(pair) for pair in batch]
            assert kept is None or len(set(taken)) == len(taken)

    # dQ: the key tiles, or aligned groups of them, in their order, ascending inside a group.
    of_query = defaultdict(list)
    for document, head, query, key, _, opens, closes in every:
        of_query[document, head, query].append((key, opens, closes))
    for (document, _, query), found in of_query.items():
        keys = {key for key, _, _ in found}
        many = counts[document][1]
        if order.keys is not None:
            groups = turns(order.keys, query // together, -(-many // together), -1)
            expected = [
                key
                for group in groups
                for key in range(group * together, (group + 1) * together)
                if key in keys
            ]
            assert [key for key, _, _ in found] == expected
            for key, opens, closes in found:
                assert opens == (key % together == 0)
                assert closes == (key % together == together - 1 or key == many - 1)

    # dK and dV: head after head of a sequence, each with its query tiles in their order.
    of_key = defaultdict(list)
    for document, head, query, key, *_ in every:
        of_key[document, head // sequence, key].append((head, query))
    for (document, chain, key), found in of_key.items():
        if order.queries is not None:
            heads = list(range(chain * sequence, (chain + 1) * sequence))
            if order.heads_descending:
                heads.reverse()
            tiles = turns(order.queries, key, counts[document][0], 1)
            assert found == [
                (head, query) for head in heads for query in tiles if (head, query) in set(found)
            ]


DIRECTIONS = ("ascending", "descending", "shifted")
ORDERS = [
    PairOrder(keys, queries, together, sequence, descending)
    for keys, queries, together, (sequence, descending) in itertools.product(
        DIRECTIONS, DIRECTIONS, (1, 2), ((1, False), (2, False), (4, True))
    )
]


@pytest.mark.parametrize("unseen", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_pairs_of_tiles(order: PairOrder, unseen: bool) -> None:
    for causal in (True, False):
        mask = PLAIN | {"causal": causal}
        for one in passes(order, mask_of(LENGTHS, mask), SIZE):
            check(LENGTHS, mask, one, SIZE, unseen=unseen)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("size", [SIZE, TileSize(64, 32), TileSize(32, 96, True)], ids=str)
def test_pairs_of_tiles_of_every_mask(size: TileSize, name: str) -> None:
    for order in ORDERS[::5]:
        for one in passes(order, mask_of(UNEQUAL, MASKS[name]), size):
            check(UNEQUAL, MASKS[name], one, size, unseen=False)


def test_a_pass_that_adds_to_one_side_alone() -> None:
    """Any order of the other side will do, but the pairs are the same."""
    for keys, queries in ((None, "shifted"), ("shifted", None), ("ascending", None)):
        order = PairOrder(keys, queries, 1, 2)
        check(UNEQUAL, MASKS["full"], order, SIZE, unseen=False)


def test_one_pass_wherever_one_order_keeps_both() -> None:
    square, oblong = mask_of(LENGTHS, MASKS["full"]), mask_of([(64, 96)], MASKS["full"])
    shifted = PairOrder("shifted", "shifted")
    assert passes(shifted, square, SIZE) == (shifted,)
    assert passes(shifted, oblong, TileSize(64, 96)) == (shifted,)
    for order in ORDERS:
        if (order.keys, order.queries) != ("shifted", "shifted"):
            assert passes(order, oblong, SIZE) == (order,)


def test_two_passes_where_no_order_keeps_both() -> None:
    """Of 2 query tiles and 3 key tiles, say: dQ of the first takes key tiles 0, 2, 1, and so on, in a circle."""
    oblong = mask_of([(64, 64), (64, 96)], MASKS["full"])
    first, second = passes(PairOrder("shifted", "shifted", 1, 2), oblong, SIZE)
    assert first == PairOrder("shifted", None, 1, 2)
    assert second == PairOrder(None, "shifted", 1, 2)


def test_the_pairs_of_a_long_window_are_few() -> None:
    """As many as hold a visible pair, not the square of the tiles."""
    mask = PLAIN | {"window": (40, 0)}
    batches = pairs(mask_of([(320, 320)], mask), PairOrder())
    assert sum(map(len, batches)) == HEADS * (1 + 2 + 8 * 3)
    batches = pairs(mask_of([(320_000, 320)], mask), PairOrder())
    assert sum(map(len, batches)) == HEADS * (1 + 2 + 8 * 3)  # the rows before see nothing


def test_padding_is_of_an_empty_document() -> None:
    (one, *_) = tile_pairs(
        mask_of([(40, 70)], PLAIN), 1, 8, SIZE, PairOrder(queries="shifted"), unseen=False
    )
    assert len(one) < 8
    padded = one.padded(8)
    assert len(padded) == 8
    assert (padded.key_tokens()[len(one) :] == -1).all()
    assert (padded.queries.query_tokens()[len(one) :] == -1).all()
    assert not padded.seen[len(one) :].any()


def test_key_tokens_stop_at_the_document() -> None:
    mask = mask_of([(5, 3), (2, 40)], MASKS["full"])
    for one in tile_pairs(mask, 1, 8, SIZE, PairOrder(), unseen=False):
        for at, tokens in enumerate(one.key_tokens()):
            own = range(*mask.keys.offsets[one.queries.document[at] : one.queries.document[at] + 2])
            inside = tokens[tokens >= 0].tolist()
            assert inside == [*own[one.key_first[at] : one.key_first[at] + one.queries.keys]]
