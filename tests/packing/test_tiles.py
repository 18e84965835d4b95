"""Tiles of queries, what they see, and guarded blocks, against definitions written out pair by pair."""

import itertools

import numpy as np
import pytest

from flamia_ref.packing import Mask, TileSize, guarded_blocks, query_tiles
from flamia_ref.packing.tiles import tile_rows
from tests.attention.masks import MASKS, packed, sees

LENGTHS = [(0, 0), (1, 1), (31, 33), (33, 0), (0, 5), (64, 65), (65, 64), (129, 40), (40, 257)]
"""Queries and keys of each document."""

SIZES = [TileSize(32, 32), TileSize(128, 128), TileSize(64, 96), TileSize(256, 32)]

every_mask = pytest.mark.parametrize("name", MASKS)


def mask_of(lengths, name: str = "full") -> Mask:
    queries, keys = zip(*lengths, strict=True)
    return Mask.of(packed(queries), packed(keys), **MASKS[name])


@pytest.mark.parametrize("tile", [32, 64, 96, 128, 256])
def test_rows_of_a_tile(tile: int) -> None:
    for length in range(300):
        rows = tile_rows(length, tile)
        assert rows in (32, 64, 128, tile)
        assert rows <= tile
        assert rows == tile or length <= rows  # smaller only where one holds the document
        assert not any(length <= fewer < rows for fewer in (32, 64, 128))


def test_whole_tiles_are_never_smaller() -> None:
    for size in SIZES:
        whole = size._replace(whole=True)
        for queries, keys in itertools.product((0, 1, 33, 200), repeat=2):
            assert whole.of(queries, keys) == (size.query, size.key)
            assert size.of(queries, keys) == (
                tile_rows(queries, size.query),
                tile_rows(keys, size.key),
            )


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_token_of_every_head_is_a_row_once(size: TileSize, heads: int) -> None:
    mask = mask_of(LENGTHS)
    seen: list[tuple[int, int]] = []
    for tiles in query_tiles(mask, heads, 8, size):
        assert 0 < len(tiles) <= 8
        tokens = tiles.query_tokens()
        assert tokens.shape == (len(tiles), tiles.rows)
        for at in range(len(tiles)):
            document = int(tiles.document[at])
            assert (tiles.rows, tiles.keys) == size.of(*LENGTHS[document])
            own = range(*mask.queries.offsets[document : document + 2])
            keys = range(*mask.keys.offsets[document : document + 2])
            inside = tokens[at][tokens[at] >= 0]
            assert list(inside) == list(own[tiles.first[at] : tiles.first[at] + tiles.rows])
            assert tiles.first[at] % tiles.rows == 0  # tiles start at the document
            assert (tiles.start[at], tiles.length[at]) == (own.start, len(own))
            assert (tiles.key_start[at], tiles.key_length[at]) == (keys.start, len(keys))
            seen += [(int(token), int(tiles.head[at])) for token in inside]
    assert sorted(seen) == sorted(itertools.product(range(mask.queries.tokens), range(heads)))


def test_key_tokens_stop_at_the_document() -> None:
    mask = mask_of(LENGTHS)
    for tiles in query_tiles(mask, 1, 8, TileSize(32, 64)):
        for first in range(0, 320, tiles.keys):
            tokens = tiles.key_tokens(np.full(len(tiles), first, np.int32))
            assert tokens.shape == (len(tiles), tiles.keys)
            for at, row in enumerate(tokens):
                document = int(tiles.document[at])
                own = range(*mask.keys.offsets[document : document + 2])
                wanted = [*own[first : first + tiles.keys]]
                assert row.tolist() == wanted + [-1] * (tiles.keys - len(wanted))


@every_mask
def test_the_first_and_the_last_key_that_a_row_sees(name: str) -> None:
    mask = mask_of(LENGTHS, name)
    for tiles in query_tiles(mask, 1, 8, TileSize(64, 64)):
        first, last = tiles.bounds(mask)
        assert first.dtype == last.dtype == np.int32
        begin, end = tiles.key_tiles(last, first)
        for at in range(len(tiles)):
            queries, keys = LENGTHS[tiles.document[at]]
            rows = range(tiles.first[at], tiles.first[at] + tiles.rows)
            of_tile = set()
            for row, i in enumerate(rows):
                seen = [
                    j
                    for j in range(keys)
                    if i < queries and sees(i, j, queries, keys, **MASKS[name])
                ]
                assert (first[at, row], last[at, row]) == ((seen[0], seen[-1]) if seen else (0, -1))
                of_tile |= {j // tiles.keys for j in seen}
            assert set(range(begin[at], end[at])) == of_tile


def blocks_of(mask: Mask, key_first: int, tiles) -> np.ndarray | None:
    inside = tiles.query_tokens() >= 0
    first = np.full(len(tiles), key_first, np.int32)
    return guarded_blocks(*tiles.bounds(mask), inside, first, tiles.keys)


def test_padding_sees_nothing_and_is_no_token() -> None:
    for name in MASKS:
        mask = mask_of([(40, 70)], name)
        (tiles,) = query_tiles(mask, 2, 8, TileSize(128, 128))
        padded = tiles.padded(8)
        assert len(padded) == 8
        assert (padded.query_tokens()[2:] == -1).all()
        assert (padded.key_tokens(np.zeros(8, np.int32))[2:] == -1).all()
        first, last = padded.bounds(mask)
        assert not first[2:].any()
        assert (last[2:] == -1).all()
        begin, end = padded.key_tiles(last, first)
        assert (begin[2:] == end[2:]).all()
        found = blocks_of(mask, 0, padded)
        assert found is not None
        assert (found[2:] == -1).all()
        assert (found[:2] >= 0).any()


@every_mask
@pytest.mark.parametrize("size", [TileSize(32, 32), TileSize(64, 128), TileSize(128, 96)], ids=str)
def test_guarded_blocks_hold_a_visible_and_a_masked_pair(size: TileSize, name: str) -> None:
    """A key past the end counts as masked, a query past it does not count."""
    lengths = [(3, 3), (33, 33), (64, 97), (97, 64), (130, 40), (40, 130), (32, 32), (65, 0)]
    mask, met = mask_of(lengths, name), 0
    for tiles in query_tiles(mask, 1, 8, size):
        for key_first in range(0, 130, tiles.keys):
            found = blocks_of(mask, key_first, tiles)
            wanted = {}
            for at, group in np.ndindex(len(tiles), tiles.rows // 32):
                queries, keys = lengths[tiles.document[at]]
                begin = int(tiles.first[at]) + 32 * group
                rows = range(begin, min(begin + 32, queries))
                blocks = []
                for block in range(tiles.keys // 32):
                    columns = range(key_first + 32 * block, key_first + 32 * block + 32)
                    kinds = {
                        j < keys and sees(i, j, queries, keys, **MASKS[name])
                        for i in rows
                        for j in columns
                    }
                    if len(kinds) == 2:
                        blocks.append(block)
                wanted[at, group] = blocks
            if found is None:
                assert not any(wanted.values())
                continue
            assert found.shape[:2] == (len(tiles), tiles.rows // 32)
            for (at, group), blocks in wanted.items():
                slots = found[at, group].tolist()
                assert slots == blocks + [-1] * (len(slots) - len(blocks))
                met += len(blocks)
    assert met > 3
