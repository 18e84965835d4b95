"""The interpreter of recipes: the six recipes by hand, outside values, worked examples."""

import json
from typing import Any

import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from tests.independent import attention, engine
from tests.independent.samples import Array, bell


def plain(recipe: str) -> dict[str, Any]:
    """A recipe as plain data: all that the interpreter gets."""
    found: dict[str, Any] = json.loads(RECIPES[recipe].to_json())
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same bits in every stage of both."""
    for name, wanted in expected.items():
        arrays = (
            zip(found[name], wanted, strict=True)
            if isinstance(wanted, list)
            else [(found[name], wanted)]
        )
        for array, other in arrays:
            assert array.dtype == other.dtype, name
            np.testing.assert_array_equal(array, other, err_msg=name)


def inputs(seed: int, tokens: int, heads: int, kv_heads: int, head_dim: int) -> list[Array]:
    """q, k, v, dout."""
    counts = (heads, kv_heads, kv_heads, heads)
    return [bell(seed + x, tokens, count, head_dim) for x, count in enumerate(counts)]


@pytest.mark.parametrize("name", attention.RECIPES)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "causal"),
    [([40], 1, 1, 32, True), ([0, 33, 1, 6], 2, 1, 34, False), ([0, 33, 1], 2, 2, 32, True)],
)
def test_the_recipes_by_hand(
    name: str, lengths: list[int], heads: int, kv_heads: int, head_dim: int, causal: bool
) -> None:
    arrays = inputs(1, sum(lengths), heads, kv_heads, head_dim)
    bounds = np.cumsum([0, *lengths])
    found = engine.run(plain(name), *arrays, bounds, causal=causal)
    expected = attention.run(name, *arrays, bounds, causal=causal)
    assert set(found) == {*expected, "saved.row_base"}
    same(found, expected)
