"""numpy, JAX on host values and JAX in a user's program give the same bits in every stage. Expected values come from
numpy, which `test_independent.py` holds to the recipes' steps."""

import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES
from tests.attention.passes import assert_all_same, passes, with_dout
from tests.attention.samples import assert_same, bell, wide, with_specials

# Documents of more than 64 tokens take tiles of 128: one program a pass and a recipe.
LENGTHS = [130, 0, 70]


def on_jax(*arrays):
    import jax

    return [jax.device_put(x) for x in arrays]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("make", [bell, wide, with_specials])
@pytest.mark.parametrize("recipe", RECIPES)
def test_numpy_equals_jax_in_every_stage(recipe: str, make, causal: bool) -> None:
    *arrays, cu_seqlens = with_dout(make, 8, LENGTHS, 4, 2, 32)
    plain = passes(*arrays, recipe, cu_seqlens=cu_seqlens, causal=causal)
    compiled = passes(*on_jax(*arrays), recipe, cu_seqlens=cu_seqlens, causal=causal)
    assert_all_same(compiled, plain)
