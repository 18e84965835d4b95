"""The interpreter of recipes against the recipes written by hand, against float64 and against worked examples."""

import json
import math
from typing import Any

import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from tests.independent import attention, cases, engine, float64_attention
from tests.independent.cases import Case
from tests.independent.samples import Array, as_float64, bell, constant

# The interpreter is one of both passes; those of a forward alone are in `attention.FORWARD_ONLY`, written by hand.
AS_DATA: dict[str, dict[str, Any]] = {
    name: json.loads(recipe.to_json()) for name, recipe in RECIPES.items() if recipe.has_backward
}
BY_NAME = {case.name: case for case in cases.ALL}
RESULTS = ("out", "lse", "dq", "dk", "dv", "dsink")


def run(case: Case) -> dict[str, Any]:
    """A case by the interpreter."""
    queries, keys = case.bounds()
    sink = None if case.sink is None else np.array(case.sink, np.float32).view(np.uint32)
    q, k, v, dout = case.inputs()
    recipe = case.plain(AS_DATA)
    return engine.run(recipe, q, k, v, dout, queries, cu_seqlens_k=keys, sink=sink, **case.options)


def exact(case: Case) -> dict[str, Array]:
    """A case in float64."""
    q, k, v, dout = (as_float64(x) for x in case.inputs())
    options = dict(case.options)
    scale = options.pop("softmax_scale", 1 / math.sqrt(case.head_dim))
    softcap = options.pop("softcap", None)
    result = {
        name: np.zeros_like(x) for name, x in (("out", dout), ("dq", q), ("dk", k), ("dv", v))
    }
    result |= {"lse": np.zeros((case.heads, len(q))), "dsink": np.zeros(case.heads)}
    for queries, keys in case.documents():
        sizes = queries.stop - queries.start, keys.stop - keys.start
        mask = float64_attention.visible(*sizes, **options)
        for head in range(case.heads):
            own = head // (case.heads // case.kv_heads)
            found = float64_attention.document(
                q[queries, head],
                k[keys, own],
                v[keys, own],
                dout[queries, head],
                mask,
                softmax_scale=scale,
                softcap=softcap,
                sink=-math.inf if case.sink is None else case.sink[head],
            )
            result["out"][queries, head] = found["out"]
            result["dq"][queries, head] = found["dq"]
            result["lse"][head, queries] = found["lse"]
            result["dk"][keys, own] += found["dk"]
            result["dv"][keys, own] += found["dv"]
            result["dsink"][head] += found["dsink"]
    return result


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same bits in every stage of both."""
    for name, wanted in expected.items():
        is_list = isinstance(wanted, list)
        pairs = zip(found[name], wanted, strict=True) if is_list else [(found[name], wanted)]
        for array, other in pairs:
            assert array.dtype == other.dtype, name
            np.testing.assert_array_equal(array, other, err_msg=name)


@pytest.mark.parametrize("name", attention.RECIPES)
@pytest.mark.parametrize(
    ("lengths", "heads", "head_dim", "causal"),
    [
        ([33], 1, 16, True),
        ([0, 5, 1], 2, 34, False),
        pytest.param([0, 33, 1, 6], 2, 32, True, marks=pytest.mark.nightly),
        pytest.param([140], 1, 128, True, marks=pytest.mark.nightly),
    ],
)
def test_the_recipes_by_hand(
    name: str, lengths: list[int], heads: int, head_dim: int, causal: bool
) -> None:
    tokens = sum(lengths)
    q, k, v, dout = (
        bell(seed, tokens, count, head_dim) for seed, count in enumerate((heads, 1, 1, heads))
    )
    bounds = np.cumsum([0, *lengths])
    found = engine.run(AS_DATA[name], q, k, v, dout, bounds, causal=causal)
    expected = attention.run(name, q, k, v, dout, bounds, causal=causal)
    assert set(found) == {*expected, "saved.row_base"}
    same(found, expected)


# Relative to the norm of the exact result. bfloat16 has 2**-9, e4m3 2**-4, e2m1 2**-2 at most.
BOUNDS = {"bf16-fa4": 0.006, "flamia-nvfp4-fp8": 0.25, "flamia-nvfp4-fp8-ue4m3": 0.25}
NEAR = [
    "bf16-fa4 ragged bottom_right",
    "bf16-fa4 ragged alignment=top_left",
    "bf16-fa4 ragged window=(6, 2) causal=False",
    "window, more keys, top left",
    "flamia-mxfp8 window (None, 3)",
    "no keys",
    "grouped heads",
    "bf16-fa4 widths 48 and 20",
    "flamia-mxfp8-folded widths 16 and 40",
    "bf16-fa4 splits scales_first sink",
    "bf16-fa4 splits divide_last sink",
    "cudnn-mxfp8 splits divide_last sink",
    "flamia-mxfp8-folded splits scales_first sink",
    "bf16-fa4 softcap sink scale",
    "cudnn-mxfp8 softcap sink scale",
    "flamia-mxfp8-folded softcap sink scale",
    "flamia-mxfp8 sink",
    "bf16-fa4 gradient normalisation=fold_into_dout softcap sink",
    "cudnn-mxfp8 gradient p_for_dv=forward softcap sink",
    "flamia-mxfp8-folded fused lse p_for_dv=forward sink",
    "bf16-fa4 unfused fold_into_dout p_for_dv=forward sink",
    "flamia-mxfp8 gradient delta_source=quantized_dout",
    "bf16-fa4 gradient delta_source=p_dp softcap sink",
    "bf16-fa4 gradient softmax_scale=in_ds softcap sink",
    "previous block, 32 tokens",
    "static q and k",
    "flamia-nvfp4-fp8 window softcap sink",
    "flamia-nvfp4-fp8-ue4m3 window softcap sink",
]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if index % 2 else pytest.mark.nightly)
        for index, name in enumerate(NEAR)
    ],
)
def test_near_float64(name: str) -> None:
    """A mask, a weight or a factor that is wrong is off by more than the formats are."""
    case = BY_NAME[name]
    found, wanted = run(case), exact(case)
    bound = BOUNDS.get(case.recipe, 0.13)
    for stage in RESULTS if case.sink is not None else RESULTS[:-1]:
        value, other = as_float64(found[stage]), wanted[stage]
        np.testing.assert_array_equal(np.isneginf(value), np.isneginf(other), err_msg=stage)
        is_number = ~np.isneginf(other)
        error = np.linalg.norm(value[is_number] - other[is_number])
        # The sums of a few terms of both signs in dsink may cancel.
        limit = bound * (4 if stage == "dsink" else 1) * np.linalg.norm(other[is_number])
        assert error <= limit, (stage, error / np.linalg.norm(other[is_number]))


ORDERS = [
    # Tiles hold 2**30, -2**30 and 1: the sum is 1 where the first two come one after the other.
    ("v", "o.tile_order=ascending", "o", [1, 1]),
    ("v", "o.tile_order=descending", "o", [0, 0]),
    ("k", "dq.tile_order=shifted dq.accumulation=chained", "dq", [0, 1, 0]),  # 0 2 1, 1 0 2, 2 1 0
    ("k", "dq.tile_order=descending dq.accumulation=float32_partials", "dq", [0, 0, 0]),
    ("q", "dk.tile_order=shifted dv.tile_order=shifted", "dk", [1, 0, 0]),  # 0 1 2, 1 2 0, 2 0 1
    ("do", "dk.tile_order=ascending dv.tile_order=ascending", "dv", [1, 1, 1]),
    ("do", "dv.k_order=descending tiles.query=96 tiles.key=96", "dv", [0]),
    ("heads", "gradient.heads=one_chain gradient.heads_order=ascending", "dv", [1]),
    ("heads", "gradient.heads=float32_sum gradient.heads_order=descending", "dv", [0]),
]


@pytest.mark.parametrize(("kind", "changes", "stage", "wanted"), ORDERS)
def test_orders_by_hand(kind: str, changes: str, stage: str, wanted: list[int]) -> None:
    found = run(BY_NAME[f"bf16-fa4 cancelling {kind} {changes}"])[stage]
    tiles = [found[start : start + 32] for start in range(0, len(found), 32)]
    assert [int(as_float64(tile).any()) for tile in tiles] == wanted


def zeros(*shape: int) -> Array:
    return constant(0.0, *shape)


def column(*values: float) -> Array:
    """One channel of one head."""
    return np.concatenate([constant(x, 1, 1, 1) for x in values])


@pytest.mark.parametrize("name", ["bf16-fa4", "flamia-mxfp8"])
def test_alignment_where_lengths_differ(name: str) -> None:
    """Two queries over five keys with V = 1, 2, 4, 8, 16, all scores 0."""
    q, k, v = zeros(2, 1, 1), zeros(5, 1, 1), column(1, 2, 4, 8, 16)
    for alignment, outs, counts in (
        ("bottom_right", [3.75, 6.1875], [4, 5]),  # 6.2 in bfloat16
        ("top_left", [1, 1.5], [1, 2]),
    ):
        found = engine.run(
            AS_DATA[name], q, k, v, None, [0, 2], cu_seqlens_k=[0, 5], alignment=alignment
        )
        assert as_float64(found["out"]).ravel().tolist() == outs
        np.testing.assert_allclose(as_float64(found["lse"])[0], np.log(counts), atol=1e-7)


# e4m3(1 / 6) = 11 / 64, so that a P or a v of 1 is 66 / 64 in NVFP4, and a P of 1 / 2 half of that; a 3 is 3.
NVFP4_ONE = 66 / 64


def test_there_is_a_forward_by_hand_of_every_other_recipe() -> None:
    assert set(attention.FORWARD_ONLY) == set(RECIPES) - set(AS_DATA)


@pytest.mark.parametrize("name", list(AS_DATA))
def test_queries_without_keys(name: str) -> None:
    """Five queries over two keys with V = 1, 3: three see nothing."""
    arrays = zeros(5, 1, 1), zeros(2, 1, 1), column(1, 3), constant(1.0, 5, 1, 1)
    found = engine.run(AS_DATA[name], *arrays, np.array([0, 5]), cu_seqlens_k=[0, 2])
    fp4 = name == "attn-qat-nvfp4"
    # 1.0635 and 2.0786, in bfloat16.
    outs = [68 / 64, 133 / 64] if fp4 else [1, 2]
    assert as_float64(found["out"]).ravel().tolist() == [0, 0, 0, *outs]
    lse = as_float64(found["lse"])[0]
    assert lse.tolist() == [-math.inf] * 3 + [0, lse[4]]
    assert lse[4] == pytest.approx(math.log(2))
    assert not found["dq"][:3].any()
    # Row 3 gives its all to key 0, row 4 one half to each.
    one = NVFP4_ONE if fp4 else 1
    assert as_float64(found["dv"]).ravel().tolist() == [1.5 * one, 0.5 * one]
    assert np.isfinite(as_float64(found["dk"])).all()


def test_window_counts_the_own_key() -> None:
    q, v = zeros(5, 1, 1), column(1, 2, 4, 8, 16)
    recipe = AS_DATA["bf16-fa4"]
    found = engine.run(recipe, q, q, v, None, [0, 5], window=(2, 0))
    np.testing.assert_array_equal(as_float64(found["row_sum"])[0], [1, 2, 3, 3, 3])
    np.testing.assert_array_equal((found["p"][0][0] != 0).sum(axis=1), [1, 2, 3, 3, 3])
    plain = engine.run(recipe, q, q, v, None, [0, 5])
    for left in (4, 5):
        same(engine.run(recipe, q, q, v, None, [0, 5], window=(left, 0)), plain)


def test_heads_of_a_group() -> None:
    """Six query heads over two: the key/value head is that of the group."""
    v = np.concatenate([constant(1.0, 1, 1, 1), constant(2.0, 1, 1, 1)], axis=1)
    for name, recipe in AS_DATA.items():
        arrays = zeros(1, 6, 1), zeros(1, 2, 1), v, constant(1.0, 1, 6, 1)
        found = engine.run(recipe, *arrays, np.array([0, 1]))
        one, out = (NVFP4_ONE, 68 / 64) if name == "attn-qat-nvfp4" else (1, 1)
        assert as_float64(found["out"]).ravel().tolist() == [out] * 3 + [2 * out] * 3, name
        assert as_float64(found["dv"]).ravel().tolist() == [3 * one, 3 * one], name


def test_documents_of_length_zero() -> None:
    recipe = AS_DATA["flamia-mxfp8-folded"]
    q, k, v, dout = (bell(seed, size, 1, 32) for seed, size in enumerate((3, 5, 5, 3)))
    found = engine.run(recipe, q, k, v, dout, [0, 0, 3, 3], cu_seqlens_k=[0, 2, 5, 5])
    alone = engine.run(recipe, q, k[2:], v[2:], dout, [0, 3], cu_seqlens_k=[0, 3])
    for name in ("out", "lse", "dq"):
        np.testing.assert_array_equal(found[name], alone[name])
    for name in ("dk", "dv"):
        assert not found[name][:2].any()
        np.testing.assert_array_equal(found[name][2:], alone[name])
    q, k, v, dout = (bell(seed, size, 1, 32) for seed, size in enumerate((5, 3, 3, 5)))
    found = engine.run(recipe, q, k, v, dout, [0, 2, 5], cu_seqlens_k=[0, 0, 3])
    assert not found["out"][:2].any()
    assert not found["dq"][:2].any()
    assert (found["lse"][0, :2] == 0xFF800000).all()
    nothing = zeros(0, 1, 32)
    found = engine.run(recipe, nothing, nothing, nothing, nothing, [0, 0])
    assert found["out"].shape == (0, 1, 32)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"softmax.p_offset": 0}, 1 / (1 + 499 / 2048)),
        ({"softmax.p_offset": 4}, 1.0),
        ({"softmax.p_offset": 8}, 1.0),
        ({"softmax.p_offset": 0, "softmax.row_sum_of": "codes"}, 1.0),
    ],
)
def test_mass_that_the_codes_of_p_lose(changes: dict[str, Any], wanted: float) -> None:
    """One key at 0 and 499 at -11 in log2 units, V = 1: e4m3(2**-11) is 0."""
    case = Case(
        name="",
        recipe="cudnn-mxfp8",
        changes={
            **changes,
            "softmax.emulated": None,
            "softmax.rescale_threshold": 0,
            "tiles.key": 256,
        },
    )
    k = constant(-11.0, 500, 1, 1)
    k[0] = 0
    found = engine.run(
        case.plain(AS_DATA),
        constant(1.0, 1, 1, 1),
        k,
        constant(1.0, 500, 1, 1),
        None,
        [0, 1],
        cu_seqlens_k=[0, 500],
        causal=False,
        softmax_scale=math.log(2),
    )
    assert as_float64(found["o"]).item() == pytest.approx(wanted, rel=2e-6)


@pytest.mark.parametrize("name", ["bf16-fa4", "cudnn-mxfp8", "flamia-mxfp8", "flamia-mxfp8-folded"])
def test_a_sink_takes_its_share(name: str) -> None:
    """Three keys and a sink of one score: a quarter of the mass is the sink's, and so of the gradient."""
    arrays = zeros(1, 1, 1), zeros(3, 1, 1), constant(1.0, 3, 1, 1), constant(1.0, 1, 1, 1)
    sink = np.zeros(1, np.uint32)
    found = engine.run(AS_DATA[name], *arrays, np.array([0, 1]), cu_seqlens_k=[0, 3], sink=sink)
    assert as_float64(found["out"]).item() == 0.75
    assert as_float64(found["lse"]).item() == pytest.approx(math.log(4))
    # d out / d sink = -p(sink) out.
    assert as_float64(found["dsink"]).item() == pytest.approx(-0.25 * 0.75, rel=1e-5)
    # A sink of -inf is none.
    nothing = np.array([0xFF800000], np.uint32)
    with_none = engine.run(AS_DATA[name], *arrays, np.array([0, 1]), cu_seqlens_k=[0, 3])
    found = engine.run(AS_DATA[name], *arrays, np.array([0, 1]), cu_seqlens_k=[0, 3], sink=nothing)
    for stage in ("out", "dq", "dk", "dv"):
        np.testing.assert_array_equal(found[stage], with_none[stage])
    assert as_float64(found["dsink"]).item() == 0


def test_finite_mask_values_count() -> None:
    """A query that stands before all keys of the first tile gives its masked columns their weight."""
    case = Case(name="", recipe="bf16-fa4", changes={"softmax.mask_value": -1.0})
    q, v = zeros(2, 1, 1), column(1, 3)
    found = engine.run(case.plain(AS_DATA), q, q, v, None, [0, 2], softmax_scale=1.0)
    # Row 0: key 0 at score 0, the other 31 columns of the tile at -1, of which key 1 has the value 3.
    weight = math.exp(-1)
    sums = as_float64(found["row_sum"])[0]
    np.testing.assert_allclose(sums, [1 + 31 * weight, 2 + 30 * weight], rtol=1e-6)
    wanted = [(1 + 3 * weight) / (1 + 31 * weight), 4 / (2 + 30 * weight)]
    np.testing.assert_allclose(as_float64(found["out"]).ravel(), wanted, rtol=2**-8)
