"""Masks, tiles and guarded blocks."""

import itertools

import pytest

from tests.independent import heads
from tests.independent.heads import Head

LENGTHS = [1, 31, 32, 33, 65]


def head(length: int, *, causal: bool) -> Head:
    tokens = [[0]] * length
    return Head(
        q=tokens, k=tokens, v=tokens, dout=None, head_dim=1, causal=causal, softmax_scale=1.0
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_causal_guards_the_diagonal_blocks(length: int) -> None:
    blocks = range(-(-length // 32))
    for i, j in itertools.product(blocks, blocks):
        assert heads.guarded(i, j, length=length, causal=True) == (i == j)


@pytest.mark.parametrize(
    ("length", "guarded_key_block"), [(1, 0), (31, 0), (32, None), (33, 1), (65, 2), (64, None)]
)
def test_full_guards_a_partial_last_key_block(length: int, guarded_key_block: int | None) -> None:
    blocks = range(-(-length // 32))
    for i, j in itertools.product(blocks, blocks):
        assert heads.guarded(i, j, length=length, causal=False) == (j == guarded_key_block)


def test_guarded_blocks_of_a_row() -> None:
    causal, full = head(65, causal=True), head(65, causal=False)
    everything = range(65)
    assert causal.guarded_blocks(0, everything) == [range(32)]
    assert causal.guarded_blocks(40, everything) == [range(32, 64)]
    assert causal.guarded_blocks(64, everything) == [range(64, 65)]
    for query in (0, 40, 64):
        assert full.guarded_blocks(query, everything) == [range(64, 65)]
    assert causal.is_guarded(0, 31)
    assert not causal.is_guarded(32, 31)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_tiles_that_meet_hold_a_visible_pair(length: int, causal: bool) -> None:
    one = head(length, causal=causal)
    for queries, keys in itertools.product(one.tiles(), one.tiles()):
        wanted = any(one.sees(i, j) for i in queries for j in keys)
        assert one.meet(queries, keys) == wanted
        assert (keys in one.key_tiles(queries.start)) == wanted
        assert (queries in one.query_tiles(keys[-1])) == wanted


def test_visible() -> None:
    assert heads.visible(3, 3, length=4, causal=True)
    assert not heads.visible(2, 3, length=4, causal=True)
    assert heads.visible(2, 3, length=4, causal=False)
    assert not heads.visible(2, 4, length=4, causal=False)
