"""Masks, tiles and orders: against another formula, and by hand."""

import itertools

import numpy as np
import pytest

from tests.independent import float64_attention
from tests.independent.masks import Mask, Tiling, ordered, runs, window_sides


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("causal", [True, False])
def test_visible_pairs(alignment: str, causal: bool) -> None:
    sizes = [(0, 3), (3, 0), (1, 1), (5, 9), (9, 5)]
    windows = itertools.product((None, 0, 2, 40), (None, 0) if causal else (None, 0, 3))
    for (queries, keys), (left, right) in itertools.product(sizes, windows):
        mask = Mask(
            queries=queries, keys=keys, causal=causal, alignment=alignment, left=left, right=right
        )
        found = [[mask.sees(i, j) for j in range(keys)] for i in range(queries)]
        wanted = float64_attention.visible(
            queries, keys, causal=causal, alignment=alignment, window=(left, right)
        )
        assert np.array_equal(np.array(found, np.bool_).reshape(wanted.shape), wanted)
        assert [mask.is_dead(i) for i in range(queries)] == (~wanted.any(axis=1)).tolist()


def test_guarded_blocks_by_hand() -> None:
    """Causal: the diagonal. A window of 40 adds the blocks that its left end cuts. A short end is guarded."""
    assert Mask(queries=96, keys=96).guarded == {(0, 0), (1, 1), (2, 2)}
    assert Mask(queries=96, keys=96, left=40).guarded == {
        (0, 0),
        (1, 1),
        (2, 2),
        (1, 0),
        (2, 0),
        (2, 1),
    }
    assert Mask(queries=40, keys=64, causal=False).guarded == set()
    assert Mask(queries=40, keys=50, causal=False).guarded == {(0, 1), (1, 1)}


def test_worked_on_by_hand() -> None:
    mask = Mask(queries=96, keys=96, left=10)
    tiling = Tiling(mask=mask, query_size=32, key_size=32, computed=False, paired=True)
    tiles = [tiling.worked_on(queries) for queries in tiling.query_tiles]
    assert tiles == [[0], [0, 1], [1, 2]]
    # Pairs of tiles: 0 and 1, then 2 alone.
    assert [tiling.units_worked_on(queries) for queries in tiling.query_tiles] == [[0], [0], [0, 1]]
    assert [tiling.queries_worked_on(unit) for unit in (0, 1)] == [[0, 1, 2], [2]]


def test_orders_by_hand() -> None:
    tiles = [0, 1, 2, 3]
    assert ordered(tiles, "descending", causal=True) == [3, 2, 1, 0]
    assert ordered(tiles, "descending_where_causal", causal=False) == tiles
    assert ordered(tiles, "shifted", causal=True, own=1, along="keys") == [1, 0, 3, 2]
    assert ordered(tiles, "shifted", causal=True, own=9, along="keys") == [3, 2, 1, 0]
    assert ordered([1, 2, 3], "shifted", causal=True, own=2, along="queries") == [2, 3, 1]
    assert ordered(tiles, "shifted", causal=True, own=4, along="queries") == tiles
    assert runs([2, 3, 4, 5, 6], 3) == [[2, 3], [4, 5], [6]]
    assert runs([0, 1, 2], 4) == [[0], [1], [2], []]
    assert runs([], 2) == [[], []]


def test_windows() -> None:
    assert window_sides(None) == (None, None)
    assert window_sides((-1, 3)) == (None, 3)
    with pytest.raises(ValueError, match="window"):
        window_sides((-2, 0))
    with pytest.raises(ValueError, match="right"):
        Mask(queries=1, keys=1, causal=True, right=1)
