"""What must hold for every recipe, mask and shape: packing, windows, groups of heads, dead rows, prefixes, tiles.
Expected values are other runs', or follow from the mask pair by pair."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from flamia_ref import attention
from flamia_ref.attention import RECIPES, Forward
from flamia_ref.attention.product import Scope
from tests.attention.changes import changed
from tests.attention.masks import MASKS, visible
from tests.attention.passes import WITH_BACKWARD, every_backward, every_recipe
from tests.attention.samples import BF16, assert_same, bell, bits
from tests.attention.shapes import Shape, alone, document, of_shape, run, shapes, tiled

ONE_TOKEN = (
    "attn-qat-nvfp4",
    "bf16-fa4",
    "cudnn-mxfp8-pv-bf16",
    "cutlass-fp8",
    "flamia-mxfp8",
    "flamia-mxfp8-folded",
    "flamia-nvfp4-fp8",
    "flamia-nvfp4-fp8-ue4m3",
)
"""Recipes in which no token reaches what comes before it: no scale is of several tokens where one of them is hidden."""


def few(examples: int):
    """Hypothesis with a few examples: each is two passes, some of them interpreted."""
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


def assert_results_same(actual, expected, *, without=()) -> None:
    assert set(actual) - set(without) == set(expected) - set(without)
    for name, value in expected.items():
        if name not in without:
            assert_same(actual[name], value, name)


def seen(shape: Shape, index: int) -> np.ndarray:
    """Which key each query of a document sees."""
    return visible(*shape.lengths[index], **MASKS[shape.mask])


@every_recipe
@few(4)
@given(shape=shapes(most=3))
def test_packed_equals_each_document_alone(recipe: str, shape: Shape) -> None:
    packed, chosen = of_shape(shape, recipe), shape.recipe(recipe)
    for index in range(len(shape.lengths)):
        one = alone(shape, index, chosen)
        assert_results_same(document(packed, index, shape, chosen), one, without=("dsink",))


@every_recipe
@few(5)
@given(shape=shapes())
def test_dead_rows_are_zero(recipe: str, shape: Shape) -> None:
    found = of_shape(shape, recipe, stages=False)
    dead = [~seen(shape, index).any(axis=1) for index in range(len(shape.lengths))]
    hidden = [~seen(shape, index).any(axis=0) for index in range(len(shape.lengths))]
    rows, keys = np.concatenate(dead), np.concatenate(hidden)
    assert not bits(found["out"])[rows].any()
    if RECIPES[recipe].has_backward:
        assert not bits(found["dq"])[rows].any()
        assert not (bits(found["dk"])[keys] & 0x7FFFFFFF).any()
        assert not (bits(found["dv"])[keys] & 0x7FFFFFFF).any()
    lse = found["lse"][:, rows]
    if shape.sink is None:
        assert (lse == -np.inf).all()
    else:
        sink = np.repeat(np.array(shape.sink, np.float32)[:, None], rows.sum(), axis=1)
        # The sink alone: log(exp(sink)), in float32 by way of log2 units.
        np.testing.assert_allclose(lse, sink, rtol=2e-6, atol=2e-6)
    for name, value in found.items():
        assert not np.isnan(value).any(), name


@every_recipe
@few(3)
@given(shape=shapes(masks=("causal", "causal, top-left", "full")))
def test_a_window_as_wide_as_the_document_is_none(recipe: str, shape: Shape) -> None:
    queries, keys = shape.cu_seqlens
    options = shape.options | {"cu_seqlens": queries, "cu_seqlens_k": keys}
    plain = of_shape(shape, recipe)
    reach = max(max(pair) for pair in shape.lengths)
    for window in ((reach, 0 if options["causal"] else reach), (-1, None)):
        same = run(shape.arrays(), shape.recipe(recipe), **options | {"window": window})
        assert_results_same(same, plain)


@every_recipe
@few(2)
@given(shape=shapes(most=1))
def test_groups_of_heads_are_repeated_heads(recipe: str, shape: Shape) -> None:
    """Forward and dQ: query head h takes the key/value head h // group."""
    shape = dataclasses.replace(shape, heads=4, kv_heads=2, sink=(0.5, -1.0, 2.0, 0.25))
    if RECIPES[recipe].s.left.scope is Scope.HEAD:
        return  # a group has one descale of q: test_properties.py has what that does to its heads
    q, k, v, dout = shape.arrays()
    queries, keys = shape.cu_seqlens
    options = shape.options | {"cu_seqlens": queries, "cu_seqlens_k": keys, "stages": False}
    grouped = run((q, k, v, dout), shape.recipe(recipe), **options)
    repeated = [np.repeat(x, 2, axis=1) for x in (k, v)]
    single = run((q, *repeated, dout), shape.recipe(recipe), **options)
    for name in {"out", "lse", "dq", "dsink"} & set(single):
        assert_same(grouped[name], single[name], name)
    for name in {"dk", "dv"} & set(single):  # sums of heads, in float32 or in one chain
        tokens, _, channels = single[name].shape
        pairs = single[name].reshape(tokens, 2, 2, channels).sum(axis=2)
        size = np.abs(single[name]).max(initial=1e-30)
        np.testing.assert_allclose(grouped[name], pairs, rtol=0.02, atol=0.02 * size)


@every_recipe
@few(3)
@given(shape=shapes(most=1))
def test_the_query_tile_changes_nothing(recipe: str, shape: Shape) -> None:
    """A row's state is its own, every chain runs over tokens in order, and the rest of a tile is zeros."""
    # A tile that is masked for all of a row is there or not with the rest of its query tile. Where masked scores are
    # finite, P is something in it, of which nothing is left once the row sees a key: stages have it, results do not.
    stages = RECIPES[recipe].softmax.mask_value is None
    base = of_shape(dataclasses.replace(shape, tiles=(32, 32)), recipe, stages=stages)
    rows = 64 if shape.seed % 2 else 96
    other = of_shape(dataclasses.replace(shape, tiles=(rows, 32)), recipe, stages=stages)
    assert_results_same(other, base, without=("dsink",))  # which is added up by query tiles


@pytest.mark.parametrize("recipe", [name for name in WITH_BACKWARD if name != "bf16-fa4"])
@few(3)
@given(shape=shapes(most=1))
def test_the_key_tile_changes_no_gradient_of_one_forward(recipe: str, shape: Shape) -> None:
    """P of the backward comes from lse, and dQ is one chain; of `bf16-fa4` it is a sum of partial sums."""
    queries, keys = shape.cu_seqlens
    options = {"cu_seqlens": queries, "cu_seqlens_k": keys, **shape.options}
    q, k, v, dout = shape.arrays()
    one = attention.forward(q, k, v, tiled(RECIPES[recipe], 32, 32), **options)
    gradients = []
    for keys_of_tile in (32, 96):
        other = dataclasses.replace(one, recipe=tiled(RECIPES[recipe], 32, keys_of_tile))
        gradients.append(attention.backward(q, k, v, dout, other))
    for found in gradients[1:]:
        for name in ("dq", "dk", "dv"):
            assert_same(getattr(found, name), getattr(gradients[0], name), name)


@few(5)
@given(shape=shapes(most=1))
def test_the_key_tile_changes_nothing_where_nothing_depends_on_the_base(shape: Shape) -> None:
    """`flamia-mxfp8-folded`, its row sum ascending: rescales are exact, and P's scale is its own block's."""
    recipe = changed(RECIPES["flamia-mxfp8-folded"], "softmax.row_sum", "ascending")
    queries, keys = shape.cu_seqlens
    options = {"cu_seqlens": queries, "cu_seqlens_k": keys, **shape.options}
    base, *others = (
        run(shape.arrays(), tiled(recipe, 32, size), stages=False, **options) for size in (32, 96)
    )
    for other in others:
        assert_results_same(other, base)


CAUSAL = ("causal", "causal, top-left", "left window", "left window, top-left")


@pytest.mark.parametrize("recipe", ONE_TOKEN)
@few(4)
@given(shape=shapes(most=1, masks=CAUSAL))
def test_prefix_parity(recipe: str, shape: Shape) -> None:
    """The last query and the last key taken away, whatever they were, and each prefix that is left stays."""
    (lengths,) = shape.lengths
    q, k, v, dout = shape.arrays()
    whole = of_shape(shape, recipe, stages=False)
    top_left = MASKS[shape.mask]["alignment"] == "top_left"
    for less in (1, 7):
        queries, keys = (max(length - less, 0) for length in lengths)
        if not top_left and min(lengths) < less:
            continue  # the diagonal moves
        if top_left:
            keys = max(keys, min(lengths[1], queries))  # all that those queries see
        part = run(
            (q[:queries], k[:keys], v[:keys], dout[:queries]),
            shape.recipe(recipe),
            stages=False,
            cu_seqlens=[0, queries],
            cu_seqlens_k=[0, keys],
            **shape.options,
        )
        assert_same(part["out"], whole["out"][:queries], "out")
        assert_same(part["lse"], whole["lse"][:, :queries], "lse")
        if "dq" in whole:
            assert_same(part["dq"], whole["dq"][:queries], "dq")


@pytest.mark.parametrize("recipe", ONE_TOKEN)
@pytest.mark.parametrize(
    "value",
    [3e38, np.nan, *(pytest.param(x, marks=pytest.mark.nightly) for x in (2.0**-130, np.inf))],
    ids=str,
)
def test_masked_scores_reach_no_output(recipe: str, value: float) -> None:
    """A key that no query sees has any q k there is, and no out, no lse and no finite gradient moves. NaN and infinity
    go on through 0 x NaN in dQ, to rows whose key tiles hold them, and not to the other document."""
    shape = Shape(lengths=((33, 70), (9, 9)), mask="left window", sink=(0.5, 1.0))
    q, k, v, dout = shape.arrays()
    queries, keys = shape.cu_seqlens
    options = {"cu_seqlens": queries, "cu_seqlens_k": keys, **shape.options}
    (hidden,) = np.nonzero(~seen(shape, 0).any(axis=0))
    assert hidden.tolist() == list(
        range(28)
    )  # 33 queries stand at the keys 37 to 69, and see 9 before
    base = run((q, k, v, dout), shape.recipe(recipe), stages=False, **options)
    other = k.copy()
    other[hidden[::3]] = value
    found = run((q, other, v, dout), shape.recipe(recipe), stages=False, **options)
    for name in {"out", "lse", "dv", "dk", "dsink"} & set(base):
        assert_same(found[name], base[name], name)
    if "dq" not in base:
        return
    assert_same(found["dq"][33:], base["dq"][33:], "dq of the other document")
    if np.isfinite(value):
        assert_same(found["dq"], base["dq"], "dq")


WITHOUT_NAN = ("attn-qat-nvfp4", "sage3-nvfp4")
"""Recipes in which a NaN becomes the largest e2m1, whose format has none."""


@every_recipe
def test_a_nan_of_v_reaches_the_rows_whose_contraction_holds_it(recipe: str) -> None:
    """0 x NaN = NaN. A key that no query sees is in the chain of the queries whose key tiles hold it, of all of the
    document where every tile is computed, and in no other document."""
    shape = Shape(lengths=((70, 70), (33, 33)), mask="left window", head_dim=32, value_dim=32)
    chosen = shape.recipe(recipe)
    q, k, v, dout = shape.arrays()
    queries, keys = shape.cu_seqlens
    options = {"cu_seqlens": queries, "cu_seqlens_k": keys, **shape.options, "stages": False}
    base = run((q, k, v, dout), chosen, **options)
    other = v.copy()
    other[40, 0, 5] = np.nan
    found = run((q, k, other, dout), chosen, **options)
    assert_same(found["lse"], base["lse"], "lse")
    assert_same(found["out"][70:], base["out"][70:], "out of the other document")
    lost = np.isnan(found["out"][:70]).any(axis=(1, 2))
    if recipe in WITHOUT_NAN:
        assert not lost.any()
        return
    if chosen.o.right.scope is Scope.HEAD:  # the document's descale is NaN
        assert lost.all()
        return
    tiles = [
        seen(shape, 0)[first : first + 32, 32:64].any() or chosen.tiles.masked == "computed"
        for first in range(0, 70, 32)
    ]
    assert lost.tolist() == [tiles[row // 32] for row in range(70)]
    assert np.isnan(found["out"][:70][lost][..., 5]).all()


@every_recipe
def test_an_infinite_score_that_is_masked(recipe: str) -> None:
    """A later query's score of +inf, NaN and -inf with a key that it sees is no one else's."""
    shape = Shape(lengths=((40, 40),), head_dim=32)
    q, k, v, dout = shape.arrays()
    base = run((q, k, v, dout), shape.recipe(recipe), stages=False)
    for value in (np.nan, np.inf, -np.inf):
        other = q.copy()
        other[39] = value
        found = run((other, k, v, dout), shape.recipe(recipe), stages=False)
        out = found["out"]
        if RECIPES[recipe].s.left.scope is Scope.HEAD:  # all queries share its infinity or NaN
            assert np.isnan(out).any(axis=(1, 2)).all()
            continue
        if RECIPES[recipe].s.left.smoothing == "tile_mean":  # those of a tile share its mean
            assert (bits(out[32:39]) != bits(base["out"][32:39])).any()
            continue
        # Where 32 queries share a scale, they share its NaN.
        rows = 32 if recipe == "flamia-mxfp8-unguarded" else 39
        for name in {"out", "dq"} & set(base):
            assert_same(found[name][:rows], base[name][:rows], name)
        assert_same(found["lse"][:, :rows], base["lse"][:, :rows], "lse")
        # What saturates makes a number of infinity, and one without NaN of that too; or a P of NaN becomes 0.
        saturated = recipe in WITHOUT_NAN or (recipe == "cutlass-fp8" and np.isinf(value))
        saturated |= RECIPES[recipe].softmax.nan_p == "zero"
        assert np.isnan(out[39]).any() != saturated


@every_recipe
def test_no_tokens_and_empty_documents(recipe: str) -> None:
    """B35: cu_seqlens of queries and of keys with empty documents, on either side and on both."""
    q, k, v, _ = bell(3, [5], 2, 1, 32)
    dout = q[::-1].copy()
    one = run(
        (q[:3], k[2:], v[2:], dout[:3]),
        recipe,
        stages=False,
        cu_seqlens_k=[0, 3],
        cu_seqlens=[0, 3],
    )
    found = run(
        (q[:3], k, v, dout[:3]),
        recipe,
        stages=False,
        cu_seqlens=[0, 0, 3, 3],
        cu_seqlens_k=[0, 2, 5, 5],
    )
    for name in {"out", "lse", "dq"} & set(one):
        assert_same(found[name], one[name], name)
    for name in {"dk", "dv"} & set(one):
        assert not (bits(found[name][:2]) & 0x7FFFFFFF).any()
        assert_same(found[name][2:], one[name], name)
    found = run(
        (q, k[2:], v[2:], dout), recipe, stages=False, cu_seqlens=[0, 2, 5], cu_seqlens_k=[0, 0, 3]
    )
    for name in {"out", "dq"} & set(one):
        assert not bits(found[name][:2]).any()
    assert (found["lse"][:, :2] == -np.inf).all()
    empty = np.zeros((0, 2, 32), BF16)
    for bounds in ([0, 0], [0, 0, 0]):
        for sink in (None, np.zeros(2, np.float32)):
            nothing = run((empty,) * 4, recipe, cu_seqlens=bounds, cu_seqlens_k=bounds, sink=sink)
            for name in {"out", "dq", "dv"} & set(one):
                assert nothing[name].shape == (0, 2, 32)
            assert nothing["lse"].shape == (2, 0)
            assert sink is None or "dq" not in one or not nothing["dsink"].any()
    keys = run(
        (empty, k[:, [0, 0]], v[:, [0, 0]], empty), recipe, cu_seqlens=[0, 0], cu_seqlens_k=[0, 5]
    )
    assert keys["out"].shape == (0, 2, 32)
    if "dk" in one:
        assert keys["dk"].shape == (5, 2, 32)
        assert not keys["dk"].any()


@every_backward
def test_a_kernels_results_give_the_same_gradients(recipe: str) -> None:
    """`from_kernel` with every argument of the forward."""
    shape = Shape(
        lengths=((20, 33), (9, 4)), mask="window, bottom-right", softcap=3.0, sink=(0.5, -np.inf)
    )
    q, k, v, dout = shape.arrays()
    queries, keys = shape.cu_seqlens
    options = {"cu_seqlens": queries, "cu_seqlens_k": keys, **shape.options}
    expected = of_shape(shape, recipe, stages=False)
    saved = {
        name.removeprefix("saved."): value
        for name, value in expected.items()
        if name.startswith("saved.")
    }
    kernel = Forward.from_kernel(
        expected["out"], expected["lse"], shape.recipe(recipe), saved=saved, head_dim=33, **options
    )
    found = attention.backward(q, k, v, dout, kernel)
    for name in ("dq", "dk", "dv", "dsink"):
        assert_same(getattr(found, name), expected[name], name)
