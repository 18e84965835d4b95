"""What must hold between runs: packing, offsets, prefixes, perturbations, tiles. Expected values are other runs'."""

import functools

import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES, Forward
from flamia_ref.attention.product import Scope
from flamia_ref.packing import tiles
from tests.attention.changes import with_tiles
from tests.attention.passes import (
    assert_all_same,
    every_backward,
    every_recipe,
    of_document,
    passes,
    with_dout,
)
from tests.attention.samples import BF16, assert_same, bell, bits, wide, with_specials

LEGAL = (
    "attn-qat-nvfp4",
    "bf16-fa4",
    "cudnn-mxfp8-pv-bf16",
    "cutlass-fp8",
    "flamia-mxfp8",
    "flamia-mxfp8-folded",
    "flamia-nvfp4-fp8",
    "flamia-nvfp4-fp8-ue4m3",
)
"""Recipes in which no token reaches what comes before it."""

DOCUMENT_WIDE = ("fp8-fa3", "fp8-fa4", "sage3-nvfp4")
"""Recipes in which all tokens of a document share a scale, or the mean of k."""

DAILY = ("bf16-fa4", "cudnn-mxfp8", "flamia-mxfp8", "flamia-nvfp4-fp8-ue4m3")
"""Of each kind of operands one, where a test takes seconds."""


def alone(arrays, cu_seqlens, index: int, recipe: str, **options):
    start, stop = cu_seqlens[index : index + 2]
    return passes(*(x[start:stop] for x in arrays), recipe, **options)


@every_recipe
def test_packed_equals_each_document_alone(recipe: str) -> None:
    *arrays, cu_seqlens = with_dout(wide, 7, [33, 0, 70, 1], 2, 1, 40)
    packed = passes(*arrays, recipe, cu_seqlens=cu_seqlens, causal=False)
    for index in range(len(cu_seqlens) - 1):
        one = alone(arrays, cu_seqlens, index, recipe, causal=False)
        assert_all_same(of_document(packed, index, cu_seqlens), one)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in DAILY)) for name in RECIPES],
)
def test_documents_of_every_length_around_a_block_and_a_tile(recipe: str) -> None:
    lengths = [0, 1, 31, 32, 33, 64, 65, 127, 128, 129, 257]
    *arrays, cu_seqlens = with_dout(bell, 1, lengths, 1, 1, 8)
    packed = passes(*arrays, recipe, cu_seqlens=cu_seqlens)
    for index in range(len(lengths)):
        one = alone(arrays, cu_seqlens, index, recipe)
        assert_all_same(of_document(packed, index, cu_seqlens), one)


@every_recipe
def test_permuting_documents_permutes_results(recipe: str) -> None:
    *arrays, cu_seqlens = with_dout(wide, 2, [5, 70, 0, 33], 2, 1, 16)
    packed = passes(*arrays, recipe, cu_seqlens=cu_seqlens)
    order = [3, 1, 2, 0]
    spans = [slice(*cu_seqlens[index : index + 2]) for index in order]
    moved = [np.concatenate([x[span] for span in spans]) for x in arrays]
    new = np.cumsum([0, *(span.stop - span.start for span in spans)])
    other = passes(*moved, recipe, cu_seqlens=new)
    for place, index in enumerate(order):
        assert_all_same(of_document(other, place, new), of_document(packed, index, cu_seqlens))


@pytest.mark.parametrize("offset", [1, 32, 100])
@every_recipe
def test_a_document_does_not_know_where_it_starts(recipe: str, offset: int) -> None:
    *arrays, cu_seqlens = with_dout(with_specials, 3, [offset, 40], 1, 1, 16)
    one = alone(arrays, cu_seqlens, 1, recipe)
    packed = passes(*arrays, recipe, cu_seqlens=cu_seqlens)
    assert_all_same(of_document(packed, 1, cu_seqlens), one)


@pytest.mark.parametrize(
    ("recipe", "causal"), [*((name, True) for name in RECIPES), ("flamia-mxfp8", False)]
)
def test_short_documents_in_small_tiles_give_the_bits_of_whole_tiles(
    recipe: str, causal: bool, monkeypatch
) -> None:
    given = [with_dout(make, 4, [20, 40], 1, 1, 32) for make in (bell, with_specials)]

    def all_results():
        return [
            passes(*arrays, recipe, cu_seqlens=cu_seqlens, causal=causal)
            for *arrays, cu_seqlens in given
        ]

    small = all_results()
    asked = []

    def whole(length: int, tile: int) -> int:
        asked.append(length)
        return tile

    monkeypatch.setattr(tiles, "tile_rows", whole)
    for one, other in zip(small, all_results(), strict=True):
        assert_all_same(one, other)
    assert (
        asked or RECIPES[recipe].tiles.key == 32
    )  # the smallest there are, or nothing was replaced


def uneven(seed: int, length: int):
    """q, k, v, dout whose tokens differ by factors of up to 2^16."""
    *arrays, _ = with_dout(bell, seed, [length], 1, 1, 32)
    rng = np.random.default_rng(seed)
    powers = np.exp2(rng.integers(-8, 9, (4, length, 1, 1))).astype(np.float32)
    powers[0] = np.minimum(powers[0], 1)  # or one key takes it all
    return [(x * power).astype(BF16) for x, power in zip(arrays, powers, strict=True)]


@functools.cache
def of_the_whole(recipe: str):
    q, k, v, dout = uneven(11, 200)
    forward = attention.forward(q, k, v, recipe, trace=("o",))
    if not RECIPES[recipe].has_backward:
        return forward, None
    return forward, attention.backward(q, k, v, dout, forward)


@pytest.mark.parametrize(
    ("recipe", "length"),
    [
        (recipe, length)
        for recipe in RECIPES
        for length in (1, 31, 32, 33, 127, 128, 129, 199)
        if recipe in LEGAL or (length % 32 == 0 and recipe not in DOCUMENT_WIDE)
    ],
)
def test_prefix_parity(recipe: str, length: int) -> None:
    """The first rows are those of the first tokens; where tokens share a scale, at the ends of its blocks."""
    q, k, v, dout = uneven(11, 200)
    whole, gradients = of_the_whole(recipe)
    part = attention.forward(q[:length], k[:length], v[:length], recipe, trace=("o",))
    assert_same(part.out, whole.out[:length], "out")
    assert_same(part.lse, whole.lse[:, :length], "lse")
    assert_same(part.trace["o"], whole.trace["o"][:length], "o")
    if length % 32 == 1 and gradients is not None:  # dQ belongs to its row as out does
        of_part = attention.backward(q[:length], k[:length], v[:length], dout[:length], part)
        assert_same(of_part.dq, gradients.dq[:length], "dq")


def test_prefix_parity_does_not_hold_where_a_block_of_tokens_shares_a_scale() -> None:
    q, k, v, _, _ = with_dout(bell, 11, [70], 1, 1, 32)
    v[60] *= np.float32(2.0**20).astype(BF16)
    for recipe in set(RECIPES) - set(LEGAL):
        whole = attention.forward(q, k, v, recipe)
        part = attention.forward(q[:33], k[:33], v[:33], recipe)
        assert (bits(part.out[32]) != bits(whole.out[32])).any(), recipe


def test_prefix_parity_does_not_hold_where_a_document_shares_a_scale_or_a_mean() -> None:
    """At the end of a block of tokens neither."""
    q, k, v, _, _ = with_dout(bell, 11, [70], 1, 1, 32)
    v[66] *= np.float32(2.0**20).astype(BF16)
    for recipe in DOCUMENT_WIDE:
        whole = attention.forward(q, k, v, recipe)
        part = attention.forward(q[:64], k[:64], v[:64], recipe)
        assert (bits(part.out) != bits(whole.out[:64])).any(), recipe


@pytest.mark.parametrize(
    ("cut", "factor"), [(0, 2.0**15), (31, 2.0**-60), (40, 2.0**15), (127, 2.0**15)]
)
@pytest.mark.parametrize("recipe", LEGAL)
def test_later_tokens_change_nothing_earlier(recipe: str, cut: int, factor: float) -> None:
    *arrays, _ = with_dout(bell, 5, [140 if cut > 70 else 70], 1, 1, 32)
    base = passes(*arrays, recipe, stages=False)
    changed = []
    for x in arrays:
        x = x.astype(np.float32)
        x[cut + 1 :] *= np.float32(factor)
        changed.append(x.astype(BF16))
    other = passes(*changed, recipe, stages=False)
    for name in {"out", "dq"} & set(base):
        assert_same(other[name][: cut + 1], base[name][: cut + 1], name)
    assert_same(other["lse"][:, : cut + 1], base["lse"][:, : cut + 1], "lse")
    for name in {"out", "dq", "dk", "dv"} & set(base):
        assert (bits(other[name][cut + 1 :]) != bits(base[name][cut + 1 :])).any(), name


@pytest.mark.parametrize(
    ("cut", "factor"), [(0, 2.0**15), (31, 2.0**-60), (40, 2.0**15), (127, 2.0**15)]
)
@pytest.mark.parametrize("recipe", LEGAL)
def test_earlier_queries_change_no_later_gradient(recipe: str, cut: int, factor: float) -> None:
    """dK and dV of a key are sums over the queries that see it, which come later."""
    q, k, v, dout, _ = with_dout(bell, 5, [140 if cut > 70 else 70], 1, 1, 32)
    base = passes(q, k, v, dout, recipe, stages=False)
    changed = []
    for x in (q, dout):
        x = x.astype(np.float32)
        x[: cut + 1] *= np.float32(factor)
        changed.append(x.astype(BF16))
    other = passes(changed[0], k, v, changed[1], recipe, stages=False)
    for name in {"out", "dq", "dk", "dv"} & set(base):
        assert_same(other[name][cut + 1 :], base[name][cut + 1 :], name)
    for name in (
        {"dk", "dv"} & set(base) if cut else {"dv"} & set(base)
    ):  # dS of the first token is 0: its P is 1
        assert (bits(other[name][: cut + 1]) != bits(base[name][: cut + 1])).any(), name


@pytest.mark.parametrize("value", [1e30, np.nan, np.inf])
@every_recipe
def test_other_documents_change_nothing(recipe: str, value: float) -> None:
    *arrays, cu_seqlens = with_dout(bell, 6, [45, 40, 20], 1, 1, 16)
    base = passes(*arrays, recipe, cu_seqlens=cu_seqlens)
    changed = [x.copy() for x in arrays]
    for x in changed:
        x[cu_seqlens[1] : cu_seqlens[2]] = value
    other = passes(*changed, recipe, cu_seqlens=cu_seqlens)
    for index in (0, 2):
        assert_all_same(of_document(other, index, cu_seqlens), of_document(base, index, cu_seqlens))


@every_recipe
def test_heads_take_the_key_value_head_of_their_group(recipe: str) -> None:
    """Six heads over two: 0 to 2 and 3 to 5, not the even and the odd ones."""
    q = np.zeros((1, 6, 32), BF16)
    k = np.zeros((1, 2, 32), BF16)
    v = np.ones((1, 2, 32), BF16)
    v[:, 1] = 2
    found = passes(q, k, v, np.ones_like(q), recipe, stages=False)
    # e4m3(1 / 6) = 11 / 64, so that 1 becomes 66 / 64 in NVFP4; its square in bfloat16 is 68 / 64.
    of_p, of_both = {
        "attn-qat-nvfp4": (66 / 64, 68 / 64),
        "sage3-nvfp4": (1, 66 / 64),
    }.get(recipe, (1, 1))
    assert (found["out"][0, :, 0] == of_both * np.array([1, 1, 1, 2, 2, 2])).all()
    assert (found["out"] == found["out"][..., :1]).all()
    if not RECIPES[recipe].has_backward:
        return
    assert (found["dv"] == 3 * of_p).all()  # of three heads, each with P = 1
    assert (found["dq"] == 0).all()
    assert (found["dk"] == 0).all()


@every_recipe
def test_a_head_is_that_head_alone(recipe: str) -> None:
    q, k, v, dout, cu_seqlens = with_dout(bell, 8, [9, 5], 4, 2, 32)
    grouped = passes(q, k, v, dout, recipe, stages=False, cu_seqlens=cu_seqlens)
    # The query heads of a key/value head have one descale together.
    together = 2 if RECIPES[recipe].s.left.scope is Scope.HEAD else 1
    for head in range(0, 4, together):
        one, kv = slice(head, head + together), slice(head // 2, head // 2 + 1)
        single = passes(
            q[:, one],
            k[:, kv],
            v[:, kv],
            dout[:, one],
            recipe,
            stages=False,
            cu_seqlens=cu_seqlens,
        )
        assert_same(grouped["out"][:, one], single["out"], "out")
        assert_same(grouped["lse"][one], single["lse"], "lse")
        if "dq" in grouped:
            assert_same(grouped["dq"][:, one], single["dq"], "dq")


def test_a_head_is_not_that_head_alone_where_a_group_shares_a_descale() -> None:
    q, k, v, _, cu_seqlens = with_dout(bell, 8, [9, 5], 4, 2, 32)
    grouped = attention.forward(q, k, v, "fp8-fa4", cu_seqlens=cu_seqlens)
    for head in range(4):
        kv = slice(head // 2, head // 2 + 1)
        single = attention.forward(
            q[:, head : head + 1], k[:, kv], v[:, kv], "fp8-fa4", cu_seqlens=cu_seqlens
        )
        moved = (bits(grouped.lse[head]) != bits(single.lse[0])).any()
        largest = np.abs(q[:, 2 * (head // 2) : 2 * (head // 2) + 2].astype(np.float32))
        tops = [largest[start:stop].max(axis=(0, 2)) for start, stop in ((0, 9), (9, 14))]
        assert moved == any(top[head % 2] < top.max() for top in tops)


@every_recipe
def test_tracing_changes_nothing(recipe: str) -> None:
    *arrays, cu_seqlens = with_dout(wide, 9, [140, 20], 1, 1, 16)
    traced = passes(*arrays, recipe, cu_seqlens=cu_seqlens)
    plain = passes(*arrays, recipe, stages=False, cu_seqlens=cu_seqlens)
    gradients = ["dq", "dk", "dv"] if RECIPES[recipe].has_backward else []
    assert list(plain) == ["out", "lse", *gradients]
    for name, value in plain.items():
        assert_same(value, traced[name], name)


@pytest.mark.parametrize("recipe", ["cudnn-mxfp8", "flamia-mxfp8"])
def test_one_stage_at_a_time(recipe: str) -> None:
    """A stage asked for alone, such as one of pairs that are not seen, is the stage asked for with all others."""
    q, k, v, dout, cu_seqlens = with_dout(bell, 10, [40, 5], 1, 1, 16)
    chosen = with_tiles(RECIPES[recipe], 32)
    everything = passes(q, k, v, dout, chosen, cu_seqlens=cu_seqlens)
    forward = attention.forward(q, k, v, chosen, cu_seqlens=cu_seqlens)
    for stage in attention.forward_stages(chosen):
        one = attention.forward(q, k, v, chosen, cu_seqlens=cu_seqlens, trace=stage)
        assert list(one.trace) == [stage]
        assert_same(one.trace[stage], everything[stage], stage)
    for stage in attention.backward_stages(chosen):
        other = attention.backward(q, k, v, dout, forward, trace=(stage,))
        assert list(other.trace) == [stage]
        assert_same(other.trace[stage], everything[stage], stage)


@every_recipe
def test_scores_of_pairs_that_are_not_computed(recipe: str) -> None:
    """`s` and `dp` hold every pair: those of a causal mask are those of a full one, in skipped tiles too."""
    q, k, v, dout, _ = with_dout(bell, 12, [150], 1, 1, 8)
    full = attention.forward(q, k, v, recipe, causal=False, trace=("s",))
    masked = attention.forward(q, k, v, recipe, trace=("s",))
    same = np.ones((150, 150), bool)
    if RECIPES[recipe].s.guarded:  # blocks that one of the masks cuts are computed otherwise
        for first in range(0, 150, 32):
            same[first : first + 32, first : first + 32] = False
        same[:, 128:] = False
    assert same[:, 32:128].any(axis=0).all()
    assert_same(masked.trace["s"][0][0][same], full.trace["s"][0][0][same], "s")
    if not RECIPES[recipe].has_backward:
        return
    kernel = Forward.from_kernel(full.out, full.lse, recipe, saved=full.saved)  # causal
    one = attention.backward(q, k, v, dout, kernel, trace=("dp",)).trace["dp"][0][0]
    other = attention.backward(q, k, v, dout, full, trace=("dp",)).trace["dp"][0][0]
    assert_same(one[same], other[same], "dp")


@every_backward
def test_dead_rows_have_no_gradient(recipe: str) -> None:
    """lse = -inf and out = 0: the kernel saw no key."""
    q, k, v, dout, _ = with_dout(bell, 13, [40], 1, 1, 32)
    one = attention.forward(q, k, v, recipe)
    out, lse = one.out.copy(), one.lse.copy()
    dead = np.zeros(40, bool)
    dead[[0, 7, 33]] = True
    out[dead], lse[:, dead] = 0, -np.inf
    kernel = Forward.from_kernel(out, lse, recipe, saved=one.saved)
    found = attention.backward(q, k, v, dout, kernel)
    assert not bits(found.dq[dead]).any()
    without = dout.copy()
    without[dead] = 0
    other = attention.backward(q, k, v, without, kernel)
    for name in ("dk", "dv"):
        assert np.isfinite(getattr(found, name)).all()
        assert_same(getattr(found, name), getattr(other, name), name)
    assert (found.dq[~dead] != 0).all(axis=(1, 2)).sum() > 30


@every_recipe
def test_the_same_again(recipe: str) -> None:
    *arrays, cu_seqlens = with_dout(bell, 14, [40, 3], 1, 1, 16)
    first, second = (passes(*arrays, recipe, stages=False, cu_seqlens=cu_seqlens) for _ in range(2))
    assert_all_same(second, first)


def test_lengths_in_cu_seqlens_are_all_that_counts() -> None:
    """Two documents of the same tokens give the same twice."""
    *arrays, _ = with_dout(bell, 15, [40], 1, 1, 32)
    twice = [np.concatenate([x, x]) for x in arrays]
    for recipe in RECIPES:
        found = passes(*twice, recipe, cu_seqlens=[0, 40, 80])
        one, other = (of_document(found, index, [0, 40, 80]) for index in (0, 1))
        assert_all_same(one, other)
