"""numpy, JAX on host values and JAX in a user's program give the same bits in every stage. Expected values come from
numpy, which `test_independent.py` holds to the recipes' steps."""

import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from tests.attention.changes import changed
from tests.attention.passes import assert_all_same, every_recipe, passes, with_dout
from tests.attention.samples import any_bits, bell, wide, with_specials
from tests.attention.shapes import Shape, run

# Documents of more than 64 tokens take tiles of 128: one program a pass and a recipe.
LENGTHS = [130, 0, 70]


def on_jax(*arrays):
    import jax

    return [jax.device_put(x) for x in arrays]


@pytest.mark.parametrize(
    ("make", "causal"),
    [(bell, True), (with_specials, True), (wide, False)],
    ids=["bell causal", "specials causal", "wide full"],
)
@every_recipe
def test_numpy_equals_jax_in_every_stage(recipe: str, make, causal: bool) -> None:
    *arrays, cu_seqlens = with_dout(make, 8, LENGTHS, 1, 1, 32)
    plain = passes(*arrays, recipe, cu_seqlens=cu_seqlens, causal=causal)
    compiled = passes(*on_jax(*arrays), recipe, cu_seqlens=cu_seqlens, causal=causal)
    assert_all_same(compiled, plain)


_SPLITS = {"tiles.splits": 3, "softmax.combine": "divide_last", "gradient.p_for_dv": "forward"}
_MASKS = [
    ("flamia-mxfp8-folded", {"mask": "left window", "sink": (0.5, 4.0)}, _SPLITS),
]
_MORE_MASKS = [
    ("bf16-fa4", {"mask": "left window", "sink": (0.5, 4.0)}, {"tiles.splits": 2}),
    ("flamia-mxfp8-folded", {"mask": "full", "sink": (0.5, 4.0)}, _SPLITS),
    ("flamia-mxfp8", {"mask": "window, bottom-right", "sink": (0.5, -np.inf), "softcap": 3.0}, {}),
    ("cudnn-mxfp8", {"mask": "left window, top-left", "sink": (0.5, 4.0)}, {}),
    (
        "flamia-mxfp8-folded",
        {"mask": "right window", "softcap": 2.0},
        {"gradient.delta_source": "p_dp", "dq.tile_order": "shifted"},
    ),
    ("flamia-nvfp4-fp8-ue4m3", {"mask": "causal, top-left", "softcap": 0.5}, {}),
]


@pytest.mark.parametrize(
    ("recipe", "fields", "changes"),
    [*_MASKS, *(pytest.param(*case, marks=pytest.mark.nightly) for case in _MORE_MASKS)],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_numpy_equals_jax_for_masks_sinks_and_splits(recipe: str, fields, changes) -> None:
    shape = Shape(lengths=((140, 200), (0, 9), (200, 70)), head_dim=32, value_dim=48, **fields)
    chosen = RECIPES[recipe]
    for path, value in changes.items():
        chosen = changed(chosen, path, value)
    queries, keys = shape.cu_seqlens
    options = {"cu_seqlens": queries, "cu_seqlens_k": keys, **shape.options}
    plain = run(shape.arrays(), chosen, **options)
    if options["sink"] is not None:
        (options["sink"],) = on_jax(options["sink"])
    compiled = run(on_jax(*shape.arrays()), chosen, **options)
    assert_all_same(compiled, plain)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "causal"),
    [(bell, False), (with_specials, True), (any_bits, True)],
    ids=["bell full", "specials causal", "any bits causal"],
)
@pytest.mark.parametrize("head_dim", [40, 128])
@pytest.mark.parametrize("recipe", RECIPES)
def test_numpy_equals_jax_at_other_sizes(recipe: str, head_dim: int, make, causal: bool) -> None:
    """All tile sizes, and from head_dim 128 on two key tiles in a partial sum of `bf16-fa4`."""
    *arrays, cu_seqlens = with_dout(make, 9, [3, 140, 0, 33], 2, 1, head_dim)
    plain = passes(*arrays, recipe, cu_seqlens=cu_seqlens, causal=causal)
    compiled = passes(*on_jax(*arrays), recipe, cu_seqlens=cu_seqlens, causal=causal)
    assert_all_same(compiled, plain)


def default_or_nightly(*default: str):
    """All recipes, those not in `default` in the nightly run: a user's program takes long to compile."""
    return [
        name if name in default else pytest.param(name, marks=pytest.mark.nightly)
        for name in RECIPES
    ]


@pytest.mark.parametrize(
    "wide_types", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["x32", "x64"]
)
@pytest.mark.parametrize("recipe", default_or_nightly("bf16-fa4"))
def test_numpy_equals_a_users_jit_of_vmap_in_every_stage(recipe: str, wide_types: bool) -> None:
    import jax
    import jax.numpy as jnp

    batches = [with_dout(wide, seed, [9, 0, 24], 2, 1, 32)[:4] for seed in (1, 2)]
    cu_seqlens = np.array([0, 9, 9, 33], np.int64)

    def both(*arrays):
        return passes(*arrays, recipe, cu_seqlens=cu_seqlens)

    with jax.enable_x64(wide_types):
        stacked = [jnp.stack([jnp.asarray(x) for x in xs]) for xs in zip(*batches, strict=True)]
        mapped = jax.jit(jax.vmap(both))(*stacked)
    for index, batch in enumerate(batches):
        one = jax.tree.map(lambda x, at=index: x[at], mapped)
        expected = both(*batch)
        results = {one[name].dtype for name in ("out", "lse", "dq") if name in expected}
        assert results == {jnp.dtype("float32")}
        assert_all_same({name: one[name] for name in expected}, expected)


@pytest.mark.parametrize("recipe", ["cudnn-mxfp8"])
def test_numpy_equals_jax_under_64_bit_types(recipe: str) -> None:
    import jax

    *arrays, cu_seqlens = with_dout(bell, 8, LENGTHS, 2, 1, 32)
    expected = passes(*arrays, recipe, stages=False, cu_seqlens=cu_seqlens)
    with jax.enable_x64(True):
        found = passes(*on_jax(*arrays), recipe, stages=False, cu_seqlens=cu_seqlens)
    assert {str(x.dtype) for x in found.values()} == {"float32"}
    assert_all_same(found, expected)
