"""All recipes on inputs whose results are known: grouped heads, leaks, documents, orders."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.independent import factors, float32, mufu
from tests.independent.attention import RECIPES, run
from tests.independent.flash_attention import FlashAttention
from tests.independent.heads import Head
from tests.independent.operands import contract_bfloat16
from tests.independent.samples import Array, as_float64, bell, constant
from tests.independent.softmaxes import split_exponential
from tests.independent.test_factors import at_a_boundary

ONE = 0x3F80
FLAMIA = ("flamia-mxfp8-folded", "flamia-mxfp8", "flamia-mxfp8-unguarded")
LEGAL = ("flamia-mxfp8-folded", "flamia-mxfp8", "bf16-fa4", "cudnn-mxfp8-pv-bf16")
LEAKING = ("flamia-mxfp8-unguarded", "cudnn-mxfp8", "cudnn-mxfp8-reference")
CHAINED_HEADS = ("cudnn-mxfp8", "cudnn-mxfp8-pv-bf16")
QAT = "attn-qat-nvfp4"  # legal while scores are above -1e6; it holds neither 1 nor 2 exactly

every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_other_recipe = pytest.mark.parametrize("recipe", [name for name in RECIPES if name != QAT])


def small_inputs(tokens: int, heads: int = 2, head_dim: int = 8) -> list[Array]:
    counts = (heads, 1, 1, heads)
    return [bell(seed, tokens, count, head_dim) for seed, count in enumerate(counts)]


def same(a: dict[str, Any], b: dict[str, Any], names: tuple[str, ...] = ()) -> None:
    for name in names or a:
        for x, y in zip(a[name], b[name], strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)


@every_other_recipe
def test_heads_of_a_group(recipe: str) -> None:
    """Six query heads over two: each third uses its own, and gradients add up over three."""
    q = k = np.zeros((1, 6, 32), np.uint16)
    v = constant(1.0, 1, 2, 32)
    v[:, 1] = constant(2.0, 32)
    result = run(recipe, q, k[:, :2], v, constant(1.0, 1, 6, 32), [0, 1])
    assert as_float64(result["out"])[0, :, 5].tolist() == [1, 1, 1, 2, 2, 2]
    assert as_float64(result["dv"])[0, :, 5].tolist() == [3, 3]
    assert not result["lse"].any()
    assert not result["dq"].any()
    assert not result["dk"].any()


@every_recipe
def test_a_group_alone(recipe: str) -> None:
    """Two query heads with their key/value head give what they give beside another group."""
    q, do = bell(5, 5, 4, 8), bell(6, 5, 4, 8)
    k, v = bell(7, 5, 2, 8), bell(8, 5, 2, 8)
    grouped = run(recipe, q, k, v, do, [0, 5])
    for kv_head in range(2):
        part, one = slice(2 * kv_head, 2 * kv_head + 2), slice(kv_head, kv_head + 1)
        alone = run(recipe, q[:, part], k[:, one], v[:, one], do[:, part], [0, 5])
        for name in ("out", "dq", "delta"):
            axis = 0 if name == "delta" else 1
            wanted = grouped[name].take(range(2 * kv_head, 2 * kv_head + 2), axis=axis)
            np.testing.assert_array_equal(alone[name], wanted)
        for name in ("dk", "dv"):
            np.testing.assert_array_equal(alone[name][:, 0], grouped[name][:, kv_head])


@every_other_recipe
def test_heads_are_added_or_chained(recipe: str) -> None:
    """1 + 2**-8 + 1.5 * 2**-24: a chain cuts the last away, which leaves a tie that rounds to even."""
    q = np.zeros((1, 3, 8), np.uint16)
    do = np.stack([constant(x, 1, 8) for x in (1, 2.0**-8, 1.5 * 2.0**-24)], axis=1)
    dv = run(recipe, q, q[:, :1], q[:, :1], do, [0, 1])["dv"]
    assert dv[0, 0].tolist() == [ONE if recipe in CHAINED_HEADS else ONE + 1] * 8


@every_other_recipe
def test_factor_of_the_scores(recipe: str) -> None:
    """S = 1, where the three roundings of c differ, or S = 4 for the ceilings: P to the bit."""
    scales = [*at_a_boundary(), *(1 / math.sqrt(x) for x in range(2, 30))]
    differ = [0, 0]
    for scale in scales:
        one = constant(1.0, 1, 1, 1)
        result = run(recipe, one, one, one, one, [0, 1], softmax_scale=scale)
        exact, float64, float32_ = (
            factor(scale)
            for factor in (
                factors.exact_product,
                factors.float64_product,
                factors.float32_product,
            )
        )
        c = exact if recipe in FLAMIA else float64 if recipe.startswith("cudnn") else float32_
        differ[0] += exact != float64
        differ[1] += float64 != float32_
        score = result["s"][0].item()
        assert score == float32.ONE
        lse = int(result["lse"][0, 0])
        if recipe == "cudnn-mxfp8-reference":
            # No factor: the scaled score is the base, and P of one key is 1.
            assert result["row_max"].item() == lse == factors.rounded(scale)
            assert result["p"][0].item() == result["p.dv"][0].item() == float32.ONE
            continue
        if recipe in FLAMIA:
            # P of the forward with its units divided out; row_max is ceil(c).
            e, n = split_exponential(score, c)
            units = 0 if recipe == "flamia-mxfp8-folded" else 8
            assert result["p"][0].item() == float32.shift(e, units)
            b = float32.floor(float32.multiply(lse, factors.LOG2_E_FLOAT32))
            wanted = float32.shift(e, int(float32.value(n) - float32.value(b)))
        elif recipe == "bf16-fa4":
            assert result["row_max"].item() == float32.ONE
            x = float32.fused_multiply_add(score, c, c ^ float32.SIGN)
            assert result["p"][0].item() == mufu.exp2(x)
            base = float32.multiply(lse, factors.LOG2_E_FLOAT32)
            wanted = mufu.exp2(float32.fused_multiply_add(score, c, float32.negate(base)))
        else:
            assert result["row_max"].item() == c
            base = float32.multiply(lse, 0xBFB8AA3B)
            wanted = mufu.exp2(float32.fused_multiply_add(score, float32_, base))
        assert result["p.dv"][0].item() == wanted
    assert min(differ) > 5


@pytest.mark.parametrize(
    ("recipe", "threshold", "kept"),
    [("bf16-fa4", 8, 2), ("cudnn-mxfp8", 4, 1), ("cudnn-mxfp8-pv-bf16", 4, 1)],
)
def test_order_of_tiles(recipe: str, threshold: int, kept: int) -> None:
    """The tile that comes first keeps its maximum while another is at most the threshold above."""
    first = {1: range(128), 2: range(128, 130)}[kept]
    tokens = [[ONE]] * 130
    head = Head(
        q=tokens,
        k=tokens,
        v=tokens,
        dout=None,
        head_dim=1,
        causal=True,
        softmax_scale=1.0,
    )
    for difference, wanted in ((threshold - 1, 0), (threshold + 1, threshold + 1)):
        passes = RECIPES[recipe](head)
        # c is log2(e): scores in natural units.
        top = int(np.float32(difference * math.log(2)).view(np.uint32))
        scores = [[0 if key in first else top for key in range(130)] for _ in range(130)]
        passes.__dict__["scores"] = scores
        row_max = as_float64(passes.forward().stages["row_max"])[129]
        if recipe == "bf16-fa4":
            row_max *= math.log2(math.e)
        assert row_max == pytest.approx(wanted, rel=1e-6)


def test_tiny_gradients_are_flushed_by_cudnn_alone() -> None:
    """dS about 2**-130: its blocks have byte 0."""
    q, k, v, do = small_inputs(4, heads=1)
    do = (do & 0x807F | 1 << 7).astype(np.uint16)  # 2**-126 and a little
    v = (v & 0x807F | 122 << 7).astype(np.uint16)  # 2**-5
    cudnn = run("cudnn-mxfp8", q, k, v, do, [0, 4])
    other = run("flamia-mxfp8-unguarded", q, k, v, do, [0, 4])
    visible = np.tril(np.ones((4, 4), bool))
    visible[0, 0] = False  # dP = delta there
    for use in ("dq", "dk"):
        assert not cudnn[f"ds.{use}.scales"][0].any()
        codes = cudnn[f"ds.{use}.codes"][0][0]
        np.testing.assert_array_equal(codes, cudnn["ds"][0][0] >> 31 << 7)
    assert (other["ds.codes"][0][0][visible] & 0x7F).any()
    assert (cudnn["ds"][0][0][visible] & 0x7FFFFFFF).all()


@every_recipe
def test_documents_may_be_packed_and_permuted(recipe: str) -> None:
    lengths = [5, 0, 33, 1]
    inputs = small_inputs(sum(lengths), heads=1)
    bounds = [0, *np.cumsum(lengths).tolist()]
    packed = run(recipe, *inputs, bounds)
    order = [2, 3, 0, 1]
    documents = [slice(start, end) for start, end in itertools.pairwise(bounds)]
    parts = [documents[index] for index in order]
    shuffled_bounds = [0, *np.cumsum([lengths[index] for index in order]).tolist()]
    shuffled_inputs = [np.concatenate([x[part] for part in parts]) for x in inputs]
    shuffled = run(recipe, *shuffled_inputs, shuffled_bounds)
    for place, index in enumerate(order):
        part = slice(shuffled_bounds[place], shuffled_bounds[place + 1])
        for name, value in packed.items():
            if isinstance(value, list):
                np.testing.assert_array_equal(value[index], shuffled[name][place], err_msg=name)
            elif name in ("lse", "row_max", "row_sum", "delta"):
                np.testing.assert_array_equal(value[:, documents[index]], shuffled[name][:, part])
            elif len(value) == sum(lengths):
                np.testing.assert_array_equal(value[documents[index]], shuffled[name][part])
    # Block rows: those of document 2 are 1 and 2 of the packed, 0 and 1 of the shuffled.
    for name, value in packed.items():
        if name.endswith(".scales") and not isinstance(value, list) and len(value) == 4:
            np.testing.assert_array_equal(value[1:3], shuffled[name][:2])


@every_recipe
def test_no_tokens(recipe: str) -> None:
    inputs = small_inputs(0)
    for bounds, documents in (([0, 0], 1), ([0], 0), ([0, 0, 0], 2)):
        result = run(recipe, *inputs, bounds)
        assert result["dk"].shape == (0, 1, 8)
        assert result["lse"].shape == (2, 0)
        assert [x.shape for x in result["s"]] == [(2, 0, 0)] * documents


@every_recipe
def test_a_scale_of_v_over_tokens_leaks(recipe: str) -> None:
    """v[31] = 1e6 against 0.3: what the first row, which sees only key 0, makes of 0.3."""
    rows = []
    for last in (0.3, 1e6):
        q = k = np.zeros((32, 1, 32), np.uint16)
        v = np.zeros((32, 1, 32), np.uint16)
        v[0, 0, 0], v[31, 0, 0] = constant(0.3), constant(last)
        rows.append(as_float64(run(recipe, q, k, v, None, [0, 32])["out"])[0, 0, 0])
    if recipe in LEAKING:
        assert rows == [0.3125, 0]
    else:
        # NVFP4: 0.30078125 over 6 has the scale 0.05078125, and 6 times that is 0.3046875; P, which is 1, becomes
        # 1.03125. Their product is 0.31420898..., in bfloat16:
        wanted = {"flamia-mxfp8-folded": 0.3125, QAT: 0.314453125}.get(recipe, 0.30078125)
        assert rows == [wanted, wanted]


@every_recipe
def test_a_scale_of_dout_over_tokens_leaks(recipe: str) -> None:
    """dout[0] = 1e6 against 0.3: what it does to dv[31], which only query 31 reaches."""
    q = k = np.zeros((32, 1, 32), np.uint16)
    results = []
    for first in (0.3, 1e6):
        do = np.zeros((32, 1, 32), np.uint16)
        do[0, 0, 0], do[31, 0, 0] = constant(first), constant(0.3)
        results.append(run(recipe, q, k, np.zeros_like(q), do, [0, 32]))
    moved = results[0]["dv"][31, 0, 0] != results[1]["dv"][31, 0, 0]
    assert moved == (recipe in LEAKING)
    if recipe == "cudnn-mxfp8":
        assert [x["do.dv.scales"][0, 0, 0] for x in results] == [117, 139]
        # 0.3125 / 32: P is 1 / 32 in the last row.
        assert as_float64(results[0]["dv"])[31, 0, 0] == 0.3125 / 32
        assert results[1]["dv"][31, 0, 0] == 0


@pytest.mark.parametrize("recipe", [*LEGAL, QAT, *LEAKING])
def test_causality_of_every_output(recipe: str) -> None:
    """Token 17 of 33 times 2**40 moves only what depends on it; it moves more where scales leak."""
    tokens, changed = 33, 17
    inputs = small_inputs(tokens, heads=1)
    before = run(recipe, *inputs, [0, tokens])
    illegal = False
    for operand in range(4):
        other = [x.copy() for x in inputs]
        other[operand][changed] = (other[operand][changed] & 0x807F) | (127 + 20) << 7
        after = run(recipe, *other, [0, tokens])
        for name in ("out", "dq", "dk", "dv"):
            moved = (before[name] != after[name]).any(axis=(1, 2)).nonzero()[0].tolist()
            if name in ("out", "dq"):
                # Row i sees q[i], do[i] and keys up to i.
                legal = [changed] if operand in (0, 3) else range(changed, tokens)
            elif operand in (0, 3):
                legal = range(changed + 1)  # keys that the changed query sees
            else:
                legal = range(tokens)  # by the softmax of the rows that see the changed key
            illegal |= not set(moved) <= set(legal)
    assert illegal == (recipe in LEAKING)


@pytest.mark.parametrize("causal", [True, False])
def test_guarded_blocks_take_bfloat16_products(causal: bool) -> None:
    inputs = small_inputs(34, heads=1)
    guarded, unguarded, reference = (
        run(name, *inputs, [0, 34], causal=causal)
        for name in ("flamia-mxfp8", "flamia-mxfp8-unguarded", "bf16-fa4")
    )
    block = np.arange(34) // 32
    inside = block[:, None] == block if causal else np.broadcast_to(block == 1, (34, 34))
    equal = guarded["s"][0][0] == reference["s"][0][0]
    assert equal[inside].all()
    assert equal[~inside].mean() < 0.1
    assert not guarded["p.o.codes"][0][0][inside].any()
    assert not guarded["ds.dq.codes"][0][0][inside].any()
    visible = np.tril(np.ones((34, 34), bool)) if causal else np.ones((34, 34), bool)
    assert guarded["ds.dk.codes"][0][0][visible & inside].any()
    assert guarded["p.o.codes"][0][0][visible & ~inside].all()
    # k and v have the same blocks in both; q has not.
    for name in ("k.codes", "k.scales", "v.codes", "v.scales"):
        np.testing.assert_array_equal(guarded[name], unguarded[name])


def test_a_full_document_of_whole_blocks_has_no_guarded_block() -> None:
    inputs = small_inputs(32, heads=1)
    result = run("flamia-mxfp8", *inputs, [0, 32], causal=False)
    assert result["p.o.codes"][0].all()
    assert result["ds.dq.codes"][0].any(axis=-1).all()


def test_partial_sums_of_dq() -> None:
    """FlashAttention-4: a chain a tile, or from head_dim 128 on a chain a pair of tiles."""
    source = np.random.default_rng(1)
    length = 300
    for head_dim, causal in ((2, True), (2, False), (128, True), (128, False)):
        k = source.integers(0x3F00, 0x4000, (length, head_dim)).tolist()
        head = Head(
            q=k, k=k, v=k, dout=k, head_dim=head_dim, causal=causal, softmax_scale=1.0
        )  # fmt: skip
        ds = source.integers(0x3F00, 0x4000, length).tolist()
        got = FlashAttention(head)._query_gradient(ds, 290)
        size = 256 if head_dim == 128 else 128
        parts = [slice(start, start + size) for start in range(0, length, size)]
        for channel in (0, head_dim - 1):
            sums = [contract_bfloat16(ds[x], [row[channel] for row in k[x]]) for x in parts]
            total = 0
            for x in sums[::-1] if causal else sums:
                total = float32.add(total, x)
            assert got[channel] == total
        # A query of the second tile does not see the third.
        seen = range(2 * 128)
        got = FlashAttention(head)._query_gradient(
            [ds[key] if key in seen else 0 for key in range(length)], 130
        )
        if causal and head_dim == 128:
            assert got[0] == contract_bfloat16(ds[:256], [row[0] for row in k[:256]])


def test_arguments() -> None:
    q, k, v, do = small_inputs(4)
    lse = np.zeros((2, 4), np.uint32)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"recipe_name": "cudnn"}, "recipe"),
        ({"dout_bits": do[:3]}, "dout"),
        ({"lse_bits": lse.T}, "lse"),
        ({"lse_bits": lse.astype(np.float32)}, "lse"),
        ({"cu_seqlens": [0, 3]}, "cu_seqlens"),
        ({"q_bits": q[:, :1], "k_bits": q, "v_bits": q, "dout_bits": None}, "heads"),
        ({"softmax_scale": -1.0}, "softmax_scale"),
    ]  # fmt: skip
    arguments = {"recipe_name": "bf16-fa4", "q_bits": q, "k_bits": k, "v_bits": v}
    arguments |= {"dout_bits": do, "cu_seqlens": [0, 4]}
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            run(**(arguments | change))
