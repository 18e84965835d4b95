"""Pairs of tiles: each once, in an order that sums can be taken in, and never two that add to one sum at a time."""

import itertools
from collections import defaultdict

import numpy as np
import pytest

from flamia_ref.packing import Documents, tile_pairs

LENGTHS = [40, 0, 130, 300, 20]
TILE = 32


def pairs(lengths=LENGTHS, **options):
    """One list a batch, of (document, head, query tile, key tile, seen, opens, closes)."""
    settings = {
        "causal": True,
        "unseen": False,
        "descending": False,
        "keys_together": 1,
        "heads_in_sequence": 1,
        "heads": 4,
        "batch": 8,
        "tile": TILE,
        **options,
    }
    heads, batch, tile = (settings.pop(name) for name in ("heads", "batch", "tile"))
    packed = Documents(tuple(int(x) for x in np.cumsum([0, *lengths])))
    found = []
    for one in tile_pairs(packed, heads, batch, tile, **settings):
        rows = one.queries.rows
        columns = (
            one.queries.document,
            one.queries.head,
            one.queries.first // rows,
            one.key_first // rows,
            one.seen,
            one.opens,
            one.closes,
        )
        assert len(one) <= batch
        assert {len(column) for column in columns} == {len(one)}
        found.append(list(zip(*(column.tolist() for column in columns), strict=True)))
    return found


SETTINGS = [
    {"causal": causal, "unseen": unseen, "descending": descending, "keys_together": together,
     "heads_in_sequence": heads}
    for causal, unseen, descending, together, heads in itertools.product(
        (True, False), (True, False), (True, False), (1, 2), (1, 2)
    )
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_pairs_of_tiles(settings) -> None:
    batches = pairs(**settings)
    every = [pair for batch in batches for pair in batch]
    together, sequence = settings["keys_together"], settings["heads_in_sequence"]

    # Each pair that a query sees a key of, or all, once.
    wanted = set()
    for document, length in enumerate(LENGTHS):
        tiles = -(-length // TILE)
        for head, query, key in itertools.product(range(4), range(tiles), range(tiles)):
            seen = not settings["causal"] or key // together * together <= query
            if seen or settings["unseen"]:
                wanted.add((document, head, query, key, seen))
    assert len(every) == len(wanted)
    assert {pair[:5] for pair in every} == wanted

    # In a batch, no two add to the same dQ, or to the same dK and dV.
    for batch in batches:
        for column in (lambda p: p[:3], lambda p: (p[0], p[1] // sequence, p[3])):
            taken = [column(pair) for pair in batch]
            assert len(set(taken)) == len(taken)

    # dQ: key tiles ascending, or groups of them descending, each ascending inside.
    of_query = defaultdict(list)
    for document, head, query, key, _, opens, closes in every:
        of_query[document, head, query].append((key, opens, closes))
    for found in of_query.values():
        keys = sorted(key for key, _, _ in found)
        groups = [list(group) for _, group in itertools.groupby(keys, lambda key: key // together)]
        if settings["descending"]:
            groups.reverse()
        assert [key for key, _, _ in found] == [key for group in groups for key in group]
        assert [opens for _, opens, _ in found] == [
            key == group[0] for group in groups for key in group
        ]
        assert [closes for _, _, closes in found] == [
            key == group[-1] for group in groups for key in group
        ]

    # dK and dV: query tiles ascending, the heads of a sequence one after another.
    of_key = defaultdict(list)
    for document, head, query, key, *_ in every:
        of_key[document, head // sequence, key].append((head, query))
    for found in of_key.values():
        assert found == sorted(found)


def test_padding_is_of_an_empty_document() -> None:
    packed = Documents((0, 40))
    (one, *_) = tile_pairs(
        packed,
        1,
        8,
        TILE,
        causal=True,
        unseen=False,
        descending=False,
        keys_together=1,
        heads_in_sequence=1,
    )
    padded = one.padded(8)
    assert len(padded) == 8
    assert (padded.key_tokens()[len(one) :] == -1).all()
    assert (padded.queries.query_tokens()[len(one) :] == -1).all()
    assert not padded.seen[len(one) :].any()


def test_key_tokens_stop_at_the_document() -> None:
    packed = Documents((0, 3, 43))
    for one in tile_pairs(
        packed,
        1,
        8,
        TILE,
        causal=False,
        unseen=False,
        descending=False,
        keys_together=1,
        heads_in_sequence=1,
    ):
        for at, tokens in enumerate(one.key_tokens()):
            start, stop = packed.offsets[one.queries.document[at] : one.queries.document[at] + 2]
            inside = tokens[tokens >= 0]
            assert inside.tolist() == list(
                range(
                    start + one.key_first[at],
                    min(start + one.key_first[at] + one.queries.rows, stop),
                )
            )
