"""The passes of a recipe with all their stages, and inputs with a gradient of out. Expected values are elsewhere."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES, Forward, Recipe, backward_stages, forward_stages
from tests.attention.samples import assert_same

# What they compute with, others do too: by day tests that say the same of every recipe leave them out. Their bits are
# held daily by test_independent, test_mutations and tests/golden.
LIKE_OTHERS = (
    "cudnn-mxfp8-pv-bf16",
    "cutlass-fp8",
    "flamia-mxfp8-unguarded",
    "flamia-nvfp4-fp8",
    "fp8-fa3",
)

WITH_BACKWARD = tuple(name for name, recipe in RECIPES.items() if recipe.has_backward)
"""Recipes of both passes."""


def _over(names: Iterable[str]) -> pytest.MarkDecorator:
    marked = [
        pytest.param(name, marks=[pytest.mark.nightly] * (name in LIKE_OTHERS)) for name in names
    ]
    return pytest.mark.parametrize("recipe", marked)


every_recipe = _over(RECIPES)
every_backward = _over(WITH_BACKWARD)

ROWS = ("lse", "row_max", "row_sum", "delta")  # [heads, tokens]


def with_dout(make, seed: int, *shape, **options):
    """q, k, v, dout, cu_seqlens; dout is drawn as q is."""
    q, k, v, cu_seqlens = make(seed, *shape, **options)
    return q, k, v, make(seed + 1000, *shape, **options)[0], cu_seqlens


def passes(
    q,
    k,
    v,
    dout,
    recipe: Recipe | str,
    *,
    stages: bool = True,
    given: Forward | None = None,
    **options,
) -> dict[str, Any]:
    """Every result of a recipe's passes by name, with every stage; a backward starts from `given`, if that is there."""
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    one = attention.forward(
        q, k, v, chosen, trace=forward_stages(chosen) if stages else (), **options
    )
    found = {**one.trace, "out": one.out, "lse": one.lse}
    if not chosen.has_backward:
        return found
    other = attention.backward(
        q, k, v, dout, given or one, trace=backward_stages(chosen) if stages else ()
    )
    return {
        **found,
        **other.trace,
        "dq": other.dq,
        "dk": other.dk,
        "dv": other.dv,
    }


def assert_all_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same names in the same order, and bit equality of each."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert_same(actual[name], value, name)


def of_document(results: dict[str, Any], index: int, cu_seqlens) -> dict[str, Any]:
    """What `passes` of one document alone should give, cut out of a packed result."""
    start, stop = (int(x) for x in cu_seqlens[index : index + 2])
    lengths = [int(b - a) for a, b in itertools.pairwise(cu_seqlens)]
    tokens = int(cu_seqlens[-1])
    cut: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, list):
            cut[name] = value[index : index + 1]
        elif name in ROWS:
            cut[name] = value[:, start:stop]
        elif name.endswith(".scales") and value.dtype == np.float32:  # one a document
            cut[name] = value[index : index + 1]
        elif name.endswith(".scales") and len(value) != tokens:
            counts = ([-(-length // size) for length in lengths] for size in (32, 16))
            blocks = next(count for count in counts if sum(count) == len(value))
            cut[name] = value[sum(blocks[:index]) : sum(blocks[: index + 1])]
        else:
            cut[name] = value[start:stop]
    return cut
