"""Tiles of queries, what they see, and guarded blocks, against definitions written out pair by pair."""

import itertools

import numpy as np
import pytest

from flamia_ref.packing import Documents, guarded_blocks, last_visible, query_tiles
from flamia_ref.packing.tiles import tile_rows

LENGTHS = [0, 1, 31, 32, 33, 64, 65, 127, 128, 129, 257]


def documents(lengths) -> Documents:
    return Documents(tuple(int(x) for x in np.cumsum([0, *lengths])))


def sees(query: int, key: int, length: int, causal: bool) -> bool:
    return key < length and query < length and (key <= query or not causal)


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_rows_of_a_tile(tile: int) -> None:
    for length in range(1, 300):
        rows = tile_rows(length, tile)
        assert rows in (32, 64, 128)
        assert rows <= tile
        assert rows == tile or length <= rows  # smaller only where one holds the document
        assert not any(length <= fewer < rows for fewer in (32, 64))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tile", [32, 128])
def test_every_token_of_every_head_is_a_row_once(tile: int, heads: int) -> None:
    packed = documents(LENGTHS)
    seen: list[tuple[int, int]] = []
    for tiles in query_tiles(packed, heads, 8, tile):
        assert 0 < len(tiles) <= 8
        tokens = tiles.query_tokens()
        assert tokens.shape == (len(tiles), tiles.rows)
        for at in range(len(tiles)):
            inside = tokens[at][tokens[at] >= 0]
            own = range(*packed.offsets[tiles.document[at] : tiles.document[at] + 2])
            assert list(inside) == list(range(inside[0], inside[-1] + 1))
            assert inside[0] in own
            assert inside[-1] in own
            assert (inside[0] - own.start) % tiles.rows == 0  # tiles start at the document
            assert tiles.first[at] == inside[0] - own.start
            assert (tiles.start[at], tiles.length[at]) == (own.start, len(own))
            seen += [(int(token), int(tiles.head[at])) for token in inside]
    assert sorted(seen) == sorted(itertools.product(range(packed.tokens), range(heads)))


@pytest.mark.parametrize("causal", [True, False])
def test_the_last_key_that_a_row_sees(causal: bool) -> None:
    packed = documents(LENGTHS)
    for tiles in query_tiles(packed, 1, 8, 128):
        last = last_visible(tiles, causal)
        assert last.dtype == np.int32
        for at, row in np.ndindex(last.shape):
            query, length = int(tiles.first[at]) + row, int(tiles.length[at])
            visible = [key for key in range(length) if sees(query, key, length, causal)]
            assert last[at, row] == max(visible, default=-1)


def test_padding_sees_nothing_and_is_no_token() -> None:
    (tiles,) = query_tiles(documents([40]), 2, 8, 128)
    padded = tiles.padded(8)
    assert len(padded) == 8
    assert (padded.query_tokens()[2:] == -1).all()
    assert (padded.key_tokens(0)[2:] == -1).all()
    for causal in (True, False):
        assert (last_visible(padded, causal)[2:] == -1).all()
        guarded = guarded_blocks(last_visible(padded, causal), np.zeros(8, np.int32))
        assert (guarded[2:] == -1).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [n for n in LENGTHS if n])
def test_guarded_blocks_hold_a_visible_and_a_masked_pair(length: int, causal: bool) -> None:
    """A key past the end counts as masked, a query past it does not count."""
    for tiles in query_tiles(documents([3, length]), 1, 8, 128):
        for key_first in range(0, length, tiles.rows):
            first = np.full(len(tiles), key_first, np.int32)
            found = guarded_blocks(last_visible(tiles, causal), first)
            for at, block in np.ndindex(found.shape):
                own = int(tiles.length[at])
                queries = [int(tiles.first[at]) + 32 * block + row for row in range(32)]
                wanted = []
                for key_block in range(tiles.rows // 32):
                    keys = range(key_first + 32 * key_block, key_first + 32 * key_block + 32)
                    kinds = {sees(i, j, own, causal) for i in queries if i < own for j in keys}
                    if len(kinds) == 2:
                        wanted.append(key_block)
                assert [int(found[at, block])] == (wanted or [-1])
