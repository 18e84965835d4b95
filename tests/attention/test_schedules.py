"""The schedules of every recipe: each is another order of the same sums."""

import functools
import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES
from tests.attention.samples import bits
from tests.independent import engine

LENGTHS = (70, 1, 40)
SCHEDULES = [
    (name, schedule.name) for name, recipe in RECIPES.items() for schedule in recipe.schedules
]
DAILY = [("bf16-fa4", "dq ascending"), ("flamia-mxfp8-folded", "two splits")]


def inputs(heads: int = 2, kv_heads: int = 1, head_dim: int = 32) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    shapes = (heads, kv_heads, kv_heads, heads)
    tokens = sum(LENGTHS)
    return [
        (rng.standard_normal((tokens, count, head_dim)) * 2).astype(ml_dtypes.bfloat16)
        for count in shapes
    ]


def results(recipe: attention.Recipe) -> dict[str, np.ndarray]:
    q, k, v, dout = inputs()
    forward = attention.forward(q, k, v, recipe, cu_seqlens=np.cumsum((0, *LENGTHS)))
    if not recipe.has_backward:
        return {"out": forward.out, "lse": forward.lse}
    backward = attention.backward(q, k, v, dout, forward)
    return {
        "out": forward.out,
        "lse": forward.lse,
        "dq": backward.dq,
        "dk": backward.dk,
        "dv": backward.dv,
    }


def small(recipe: attention.Recipe) -> attention.Recipe:
    """With tiles that the documents have several of."""
    return replace(recipe, tiles=replace(recipe.tiles, query=32, key=32))


@functools.cache
def own_results(name: str) -> dict[str, np.ndarray]:
    """Of the recipe as it is."""
    return results(small(RECIPES[name]))


@pytest.mark.parametrize(
    ("name", "schedule"),
    [pytest.param(*one, marks=[] if one in DAILY else pytest.mark.nightly) for one in SCHEDULES],
)
def test_a_schedule_is_what_the_second_implementation_makes_of_its_data(name, schedule) -> None:
    recipe = small(RECIPES[name].scheduled(schedule))
    q, k, v, dout = (x.view(np.uint16) for x in inputs())
    expected = engine.run(json.loads(recipe.to_json()), q, k, v, dout, np.cumsum((0, *LENGTHS)))
    for result, values in results(recipe).items():
        wanted = expected[result]
        if wanted.dtype == np.uint16:
            wanted = wanted.astype(np.uint32) << 16
        assert (bits(values) == wanted).all(), result


@pytest.mark.parametrize(("name", "schedule"), SCHEDULES)
def test_a_schedule_changes_no_more_than_roundings(name, schedule) -> None:
    own, other = own_results(name), results(small(RECIPES[name]).scheduled(schedule))
    for result in own:
        distance = np.linalg.norm(own[result] - other[result]) / np.linalg.norm(own[result])
        assert distance < 0.02, result


def test_a_schedule_changes_the_data_that_it_names_and_nothing_else() -> None:
    """That each of these orders changes sums is held by the cancelling cases of tests/independent."""
    for name, schedule in SCHEDULES:
        recipe, found = RECIPES[name], RECIPES[name].scheduled(schedule)
        (data,) = (entry for entry in recipe.schedules if entry.name == schedule)
        expected = {"o": data.o_order or recipe.o.tile_order}
        if recipe.has_backward:
            expected |= {
                "dq": data.dq_order or recipe.dq.tile_order,
                "dk": data.key_order or recipe.dk.tile_order,
                "dv": data.key_order or recipe.dv.tile_order,
            }
        for product, order in expected.items():
            own = getattr(recipe, product)
            assert getattr(found, product) == replace(own, tile_order=order), (name, schedule)
        if recipe.has_backward:
            heads = data.heads_order or recipe.gradient.heads_order
            assert found.gradient == replace(recipe.gradient, heads_order=heads)
        assert found.tiles == replace(recipe.tiles, splits=data.splits or recipe.tiles.splits)
        assert (found.s, found.dp, found.softmax) == (recipe.s, recipe.dp, recipe.softmax)
        named = (data.o_order, data.dq_order, data.key_order, data.heads_order, data.splits)
        assert any(one is not None for one in named)


def test_schedules_are_found_by_name_and_are_whole_recipes() -> None:
    for name, schedule in SCHEDULES:
        found = RECIPES[name].scheduled(schedule)
        assert attention.Recipe.from_json(found.to_json()) == found
        assert found.schedules == ()
    with pytest.raises(ValueError, match="unknown schedule 'shifty'; did you mean 'shifted'"):
        RECIPES["flamia-mxfp8"].scheduled("shifty")
