"""Both passes against an implementation that shares no code with them: Python integers from the written steps."""

import functools
import math

import numpy as np
import pytest

from flamia_ref.attention import RECIPES, Forward
from flamia_ref.attention.inputs import score_factor
from flamia_ref.attention.stages import kept_for_backward
from tests.attention.passes import passes, with_dout
from tests.attention.samples import (
    BF16,
    any_bits,
    assert_same,
    bell,
    edges,
    tiny,
    wide,
    with_specials,
)
from tests.independent import attention as independent
from tests.independent import factors

NAMES = tuple(independent.RECIPES)
"""All recipes but those in FP4, which `tests/independent/engine.py` computes."""

# bfloat16 there, float32 of the same values here
RESULTS = ("out", "high_precision_out", "dq", "dk", "dv")


def compare(
    q, k, v, dout, cu_seqlens, recipe: str, *, out=None, lse=None, **options
) -> dict[str, np.ndarray]:
    """Every stage of both passes, bit for bit. `out` and `lse`: what the backward starts from, of a foreign kernel."""
    expected = independent.run(
        recipe,
        *(x.view(np.uint16) for x in (q, k, v, dout)),
        cu_seqlens,
        out_bits=None if out is None else out.view(np.uint16),
        lse_bits=None if lse is None else lse.view(np.uint32),
        **options,
    )
    given = None
    if out is not None:
        kept = kept_for_backward(RECIPES[recipe])  # by its own forward there too
        saved = {name: expected[name].view(BF16).astype(np.float32) for name in kept}
        given = Forward.from_kernel(out, lse, recipe, saved=saved, cu_seqlens=cu_seqlens, **options)
    found = passes(q, k, v, dout, recipe, given=given, cu_seqlens=cu_seqlens, **options)
    assert set(found) == set(expected)
    for name, value in found.items():
        assert_same(value, _like(value, expected[name], name), name)
    return found


def _like(value, expected, name: str):
    """The independent bits as the type of `value`."""
    if isinstance(value, list):
        return [_like(one, other, name) for one, other in zip(value, expected, strict=True)]
    if name in RESULTS:
        return expected.view(BF16).astype(np.float32)
    return expected.view(value.dtype)


DISTRIBUTIONS = {
    "bell": bell,
    "sharp": functools.partial(bell, spread=5.0),
    "wide": wide,
    "any bits": any_bits,
    "specials": with_specials,
    "tiny": tiny,
    "edges": edges,
}
FULL = ("bell", "wide", "specials")  # of those, without a mask
DAILY = {
    ("bell", True),
    ("wide", False),
    ("any bits", True),
    ("specials", True),
    ("tiny", True),
    ("edges", True),
}


@pytest.mark.parametrize(
    ("distribution", "causal"),
    [
        pytest.param(name, causal, marks=[pytest.mark.nightly] * ((name, causal) not in DAILY))
        for name, causal in (
            *((name, True) for name in DISTRIBUTIONS),
            *((name, False) for name in FULL),
        )
    ],
    ids=lambda x: {True: "causal", False: "full"}.get(x, x),
)
@pytest.mark.parametrize("recipe", NAMES)
def test_every_stage(recipe: str, distribution: str, causal: bool) -> None:
    """Two documents, of which one ends a token into its second block; two blocks of channels, one short."""
    seed = sorted(DISTRIBUTIONS).index(distribution)
    given = with_dout(DISTRIBUTIONS[distribution], seed, [33, 0, 2], 1, 1, 33)
    compare(*given, recipe, causal=causal)


@pytest.mark.parametrize(
    "recipe",
    [
        name
        if name in ("cudnn-mxfp8", "bf16-fa4")
        else pytest.param(name, marks=pytest.mark.nightly)
        for name in NAMES
    ],
)
def test_two_key_tiles(recipe: str) -> None:
    """A sharp row of scores whose maximum grows from tile to tile, so that sums are brought to a new base."""
    q, k, v, dout, cu_seqlens = with_dout(bell, 7, [130], 1, 1, 4, spread=3.0)
    k[128:] *= np.float32(8).astype(BF16)
    compare(q, k, v, dout, cu_seqlens, recipe)


@pytest.mark.nightly
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("distribution", ["bell", "wide", "any bits", "specials"])
@pytest.mark.parametrize("recipe", NAMES)
def test_three_key_tiles(recipe: str, distribution: str, causal: bool) -> None:
    compare(*with_dout(DISTRIBUTIONS[distribution], 9, [270], 1, 1, 4), recipe, causal=causal)


@pytest.mark.nightly
@pytest.mark.parametrize(("length", "causal"), [(257, True), (257, False), (400, True)])
def test_pairs_of_key_tiles_in_a_partial_sum(length: int, causal: bool) -> None:
    """head_dim 128, from which FlashAttention-4 adds up two key tiles in one chain of dQ."""
    compare(*with_dout(bell, 3, [length], 1, 1, 128), "bf16-fa4", causal=causal)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make", [bell, wide, any_bits, with_specials])
@pytest.mark.parametrize("recipe", NAMES)
def test_more_of_every_kind(recipe: str, make, seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads, kv_heads = [(1, 1), (2, 1), (3, 1), (4, 2), (2, 2), (6, 2)][seed]
    lengths = rng.integers(0, 70, 2).tolist()
    head_dim = int(rng.choice([24, 32, 48, 64, 96]))
    compare(
        *with_dout(make, 50 + seed, lengths, heads, kv_heads, head_dim), recipe, causal=seed < 4
    )


@pytest.mark.parametrize("head_dim", [1, 64, 96, 160])
@pytest.mark.parametrize("recipe", NAMES)
def test_head_dims(recipe: str, head_dim: int) -> None:
    """The order of delta, the blocks of channels and the steps of the instructions depend on it."""
    compare(*with_dout(bell, head_dim, [3, 1], 2, 1, head_dim), recipe)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (4, 2)])
@pytest.mark.parametrize("recipe", NAMES)
def test_groups_of_heads(recipe: str, heads: int, kv_heads: int) -> None:
    compare(*with_dout(bell, heads, [9, 4], heads, kv_heads, 16), recipe)


@pytest.mark.parametrize("scale", [1.0, 3.7e-5, 40.0, 1e30])
@pytest.mark.parametrize("recipe", NAMES)
def test_softmax_scale(recipe: str, scale: float) -> None:
    make = any_bits if scale > 1 else bell
    compare(*with_dout(make, 3, [17], 1, 1, 16), recipe, softmax_scale=scale)


@pytest.mark.parametrize("recipe", NAMES)
def test_the_backward_of_a_foreign_forward(recipe: str) -> None:
    """An out and an lse that no forward here gave: other values, dead rows, rows of NaN, zeros of both signs."""
    q, k, v, dout, cu_seqlens = with_dout(bell, 21, [20, 15], 2, 1, 32)
    own = passes(q, k, v, dout, recipe, stages=False, cu_seqlens=cu_seqlens)
    rng = np.random.default_rng(21)
    out = (own["out"] + rng.normal(0, 0.3, own["out"].shape)).astype(np.float32).astype(BF16)
    lse = (own["lse"] + rng.uniform(0, 3, own["lse"].shape)).astype(np.float32)
    lse[0, 4], out[4, 0] = -np.inf, 0
    lse[1, 25], out[25, 1] = -np.inf, -0.0
    lse[0, 30], out[30, 0, 3] = np.nan, np.nan
    out[12, 1, 5] = np.nan
    out[13, 1, 5] = np.inf
    compare(q, k, v, dout, cu_seqlens, recipe, out=out, lse=lse)


@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("score", [-1.5 * 2.0**31, 1.5 * 2.0**31])
def test_scores_beyond_the_split(recipe: str, score: float) -> None:
    """t is rounded to whole powers of two there: the only exponential is 0 or infinity, and the row is not dead."""
    q, v = np.zeros((1, 1, 32), BF16), np.ones((1, 1, 32), BF16)
    q[0, 0, 0] = score
    found = compare(q, v, v, v, [0, 1], recipe, softmax_scale=1.0)
    if recipe == "flamia-mxfp8-folded":
        assert np.isnan(found["out"]).all()


@pytest.mark.parametrize("distance", range(22, 32))
@pytest.mark.parametrize("recipe", [name for name in NAMES if name.startswith("flamia")])
def test_integer_bases_beyond_the_exact_integers(recipe: str, distance: int) -> None:
    """From 2^24 on not every integer is a float32; the units of P must not be rounded into the base."""
    q, k, v, dout, cu_seqlens = with_dout(bell, 5, [3], 1, 1, 32)
    q[0, 0, 0] = 2.0**distance
    compare(q, k, v, dout, cu_seqlens, recipe, softmax_scale=1.0)


def test_score_factors() -> None:
    rng = np.random.default_rng(0)
    scales = [1 / np.sqrt(d) for d in range(1, 257)]
    scales += [float(x) for x in np.exp2(rng.uniform(-120, 120, 200))]
    # Products that are so near the middle of two float32 that float64 cannot tell the side.
    middles = rng.integers(1 << 23, 1 << 24, 50) * 2 + 1
    scales += [float(middle) / math.log2(math.e) * 2.0**-30 for middle in middles]
    seen = {}
    for rounding in ("exact_product", "float64_product", "float32_product"):
        expected = [getattr(factors, rounding)(float(scale)) for scale in scales]
        assert [int(score_factor(float(scale), rounding)) for scale in scales] == expected
        seen[rounding] = tuple(expected)
    assert len(set(seen.values())) == 3  # or the knob would do nothing
