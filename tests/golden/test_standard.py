"""What the standard suite says of its cases is true of their data, and of what the simulator gives."""

import itertools
import math
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from flamia_ref.golden import SUITES
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.flags import FLAGS
from flamia_ref.golden.inputs import TENSORS
from flamia_ref.golden.simulation import simulate

FOLDED, BF16 = "flamia-mxfp8-folded", "bf16-fa4"
STANDARD = {case.name: case for case in SUITES["standard"]}


@cache
def simulated(name: str, recipe: str = FOLDED) -> dict[str, np.ndarray]:
    return simulate(STANDARD[name], RECIPES[recipe])


def as_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def inputs(name: str) -> dict[str, np.ndarray]:
    return {tensor: as_float(bits) for tensor, bits in STANDARD[name].inputs().items()}


def says(name: str, *words: str) -> CaseSpec:
    """The case, which says these words."""
    for one in words:
        assert one in STANDARD[name].why
    return STANDARD[name]


# The suite.


def test_it_holds_the_smoke_suite_and_names_no_case_twice() -> None:
    assert SUITES["standard"][: len(SUITES["smoke"])] == SUITES["smoke"]
    for suite in SUITES.values():
        assert len({case.name for case in suite}) == len(suite)


def test_it_is_some_tens_of_megabytes() -> None:
    # About 35 bytes a pair: s, p, dp, p.dv and ds in float32, their codes, and the rest.
    assert sum(case.pairs for case in STANDARD.values()) < 1_100_000


def test_every_flag_is_used_and_every_why_ends_plainly() -> None:
    assert {flag for case in STANDARD.values() for flag in case.flags} == set(FLAGS)
    for case in STANDARD.values():
        assert not case.why.endswith("."), case.name


def facts(case: CaseSpec) -> set[str]:
    """The flags that follow from shapes and mask, by the words of the flags."""
    both = [*case.lengths, *(case.key_lengths or ())]
    dead = any(
        not case.visible(document).any(1).all()
        for document, length in enumerate(case.lengths)
        if length
    )
    found = {
        "empty-document": 0 in both,
        "partial-block": any(length % 32 for length in both),
        "several-tiles": any(length > 128 for length in both),
        "grouped-heads": case.heads > case.kv_heads,
        "full": not case.causal,
        "different-lengths": case.key_lengths not in (None, case.lengths),
        "dead-rows": dead,
        "window": case.window is not None,
        "softcap": case.softcap is not None,
        "sink": len(case.sinks) > 0,
        "scale-padding": case.scale_padding > 0,
        "head-dim-192": case.head_dim == 192,
    }
    return {flag for flag, holds in found.items() if holds}


BY_DATA = {
    "real",
    "nan",
    "scale-edges",
    "subnormal",
    "zero-blocks",
    "scale-ladder",
    "masked-poison",
}
BY_DATA |= {"exact", "ones", "leak-witness", "leak-control"}


@pytest.mark.parametrize("suite", ["standard", "exhaustive"])
def test_flags_follow_from_the_shapes(suite: str) -> None:
    for case in SUITES[suite]:
        assert set(case.flags) - BY_DATA == facts(case), case.name


def test_nan_and_infinity_are_where_the_flag_says() -> None:
    for name, case in STANDARD.items():
        special = any(not np.isfinite(x).all() for x in inputs(name).values())
        assert special <= ("nan" in case.flags), name
    assert [name for name in STANDARD if "nan" in STANDARD[name].flags] == [
        *("poison", "largest-values", "nan-next-document", "infinity-previous-document"),
        *("nan-in-future-key", "infinity-in-future-value", "nan-outside-window"),
        *("nan-unseen-keys", "nan-gradient"),
    ]


# Quantizers.


def neighbours(value: float) -> list[float]:
    """The bfloat16 numbers before, at and after a positive one."""
    bits = int(np.array(value, ml_dtypes.bfloat16).view(np.uint16))
    return [float(as_float(np.array([bits + step], np.uint16))[0]) for step in (0, -1, 1)]


@pytest.mark.parametrize("tensor", TENSORS)
def test_scale_edges_of_rows(tensor: str) -> None:
    says("scale-edges-rows", "448 times a power of two", "6 times a power of two", "negative")
    x = inputs("scale-edges-rows")[tensor][:, 0].reshape(60, 4, 16)
    wanted = [
        [edge * 2.0**step for step in range(10)]
        for number in (448 * 2.0**-13, 6 * 2.0**-7)
        for edge in neighbours(number)
    ]
    for block in range(4):
        amax = np.abs(x[:, block]).max(1)
        assert amax.tolist() == list(itertools.chain(*wanted))
        assert (x[:, block].max(1) == amax).all() == (block < 2)


@pytest.mark.parametrize("tensor", TENSORS)
def test_scale_edges_of_columns(tensor: str) -> None:
    says("scale-edges-columns", "in every channel")
    amax = np.abs(inputs("scale-edges-columns")[tensor][:, 0]).reshape(3, 32, 64).max(1)
    edge = 448 * 2.0**-13
    for block, value in enumerate(neighbours(edge)):
        assert amax[block].tolist() == [value] * 32 + [value * 8] * 32


def test_subnormal_tokens() -> None:
    says("subnormal-tokens", "from 2^-133 to 2^-118", "scale byte 0, both sides of where it ends")
    for tensor in TENSORS:
        x = inputs("subnormal-tokens")[tensor][:9, 0]
        assert (np.count_nonzero(x, axis=1) == 1).all()
        assert (x.max(1)[[0, -1]] == [2.0**-133, 2.0**-118]).all()
    # 448 * 2^-127 still fits byte 0, by the definition of a scale that is rounded up.
    for operand in "qkv":
        scales = simulated("subnormal-tokens")[f"{operand}.scales"][:9, 0, 0]
        assert scales.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_zero_blocks() -> None:
    says("zero-blocks", "V is zero in the first 32 tokens", "-0 in five later ones")
    x = inputs("zero-blocks")
    assert not x["v"][:32].any()
    assert np.signbit(x["v"][40:45]).all()
    assert not x["v"][40:45].any()
    assert not x["k"][..., 32:].any()
    assert not x["q"][40].any()
    assert not x["dout"][33:64].any()


def test_channel_outliers_set_the_scales() -> None:
    case, x = (
        says("channel-outliers", "they set the scales of their blocks"),
        inputs("channel-outliers"),
    )
    for tensor, channel, value in (("k", 7, 16.0), ("v", 9, -128.0)):
        assert (x[tensor][..., channel] == value).all()
        others = np.delete(x[tensor], channel, axis=-1)
        assert np.abs(others).max() < abs(value)
    assert case.head_dim == 64


def test_largest_values() -> None:
    says("largest-values", "out is finite", "dP beyond float32")
    tensors = simulated("largest-values")
    assert np.isfinite(as_float(tensors["out"])).all()
    assert (as_float(tensors["out"]) > 1e38).any()
    assert not np.isfinite(as_float(tensors["dq"])).all()


def test_both_orientations() -> None:
    """0.49 alone is coded by 448 steps of 2^-10 less rounding; beside 1 by steps that are twice as wide."""
    says("both-orientations", "0.49 stands alone in its token, and beside 1 in its channel")
    for x in inputs("both-orientations").values():
        assert np.flatnonzero(x[0, 0]).tolist() == [0, 40]
        assert x[0, 0, 0] == np.float32(ml_dtypes.bfloat16(0.49))
        assert np.abs(x[1:, 0, 0]).max() >= 1
    tensors = simulated("both-orientations", "cudnn-mxfp8")
    by_channels = tensors["v.dp.scales"][0, 0, 0]
    by_tokens = tensors["v.o.scales"][0, 0, 0]
    assert by_tokens > by_channels


# Layouts.


def test_scales_of_neighbours_differ_along_every_axis() -> None:
    says("ladder-d128", "differ between nearly all neighbours")
    for name in ("ladder-d128", "ladder-d192", "ladder-padding"):
        assert "scale-ladder" in STANDARD[name].flags
        tensors = simulated(name, "cudnn-mxfp8")
        for operand in ("q.s", "k.s", "v.dp", "do.dp"):
            scales = tensors[f"{operand}.scales"].astype(int)
            for axis in (axis for axis in range(3) if scales.shape[axis] > 1):
                differing = np.mean(np.diff(scales, axis=axis) != 0)
                assert differing > 0.95, (name, operand, axis)


def test_the_tiles_of_ladders() -> None:
    says("ladder-d128", "140 tokens are two tiles of rows", "five blocks are two tiles of columns")
    tensors = simulated("ladder-d128", "cudnn-mxfp8")
    assert tensors["q.s.scales.tiled.0"].shape == (2, 2, 1, 512)
    assert tensors["v.o.scales.tiled_transposed.0"].shape == (1, 1, 2, 512)
    says("ladder-d192", "two tiles of columns the second of which is half padding")
    tensors = simulated("ladder-d192", "cudnn-mxfp8")
    assert tensors["q.s.scales.tiled.1"].shape == (1, 1, 2, 512)
    assert tensors["v.o.scales.tiled_transposed.1"].shape == (1, 2, 1, 512)


def test_the_padding_of_scales_is_nan() -> None:
    says("ladder-padding", "the padding of tiled scales is the byte of NaN")
    tensors = simulated("ladder-padding", "cudnn-mxfp8")
    tiled, scales = tensors["q.s.scales.tiled.0"], tensors["q.s.scales"]
    # 33 rows of two blocks of channels; the offset of row r, column c is from the published layout.
    for head, tile in enumerate(tiled[:, 0, 0]):
        inside = {
            (r % 32) * 16 + r // 32 * 4 + c: scales[r, head, c] for r in range(33) for c in range(2)
        }
        for at, byte in enumerate(tile):
            assert byte == inside.get(at, 0xFF)


def test_tails() -> None:
    says("tails", "a document of ones before one of 1024")
    x = inputs("tails")["v"]
    assert (x[:48] == 1).all()
    assert (x[48:] == 1024).all()
    assert np.array_equal(np.unique(simulated("tails")["out"][:48]), [0x3F80])


# Documents.


def test_lengths_around_128() -> None:
    case = says("lengths-around-128", "documents of 127, 128 and 129 tokens")
    assert sorted(case.lengths) == [127, 128, 129]
    assert case.starts[1] % 32


def test_straddling() -> None:
    case = says(
        "straddling", "no document but the first starts at a multiple of 32", "two run over"
    )
    assert all(start % 32 for start in case.starts[1:-1])
    runs = [first // 128 < (end - 1) // 128 for first, end in itertools.pairwise(case.starts)]
    assert sum(runs) == 2


def test_short_documents() -> None:
    case = says("short-documents", "sixty documents of 0 to 3 tokens")
    assert (len(case.lengths), set(case.lengths)) == (60, {0, 1, 2, 3})
    assert case.lengths[:2] == (0, 0)
    assert case.lengths[-1] == 0


@pytest.mark.parametrize("recipe", [FOLDED, "cudnn-mxfp8"])
def test_no_tokens(recipe: str) -> None:
    says("no-tokens", "results of shape (0, heads, head_dim)")
    tensors = simulated("no-tokens", recipe)
    assert tensors["out"].shape == tensors["dk"].shape == (0, 1, 64)
    assert tensors["lse"].shape == (1, 0)
    assert tensors["cu_seqlens"].tolist() == [0, 0, 0, 0]


def test_one_token() -> None:
    says("one-token", "out is V, lse its score, dV the sum of dO over heads")
    tensors = simulated("one-token", BF16)
    assert np.array_equal(tensors["out"][0], tensors["v"][0].repeat(2, axis=0))
    scores = tensors["s.0"][:, 0, 0] * 0.125
    np.testing.assert_allclose(tensors["lse"][:, 0], scores, rtol=1e-6)
    both = as_float(tensors["dout"])[0].sum(0)
    np.testing.assert_allclose(as_float(tensors["dv"])[0, 0], both, rtol=2.0**-7)


# Masks.


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("aligned-bottom-right", [15 / 4, 31 / 5, 0, 0, 0, 1, 2]),
        ("aligned-top-left", [1, 3 / 2, 1, 2, 2, 2, 2]),
    ],
)
def test_alignments(name: str, wanted: list[float]) -> None:
    """The means of the values that a row sees, by hand; V is 1, 2, 4, 8, 16 and 1, 3."""
    tensors = simulated(name, BF16)
    rounded = np.array(wanted, ml_dtypes.bfloat16).view(np.uint16)
    assert (tensors["out"][:7, 0] == rounded[:, None]).all()
    if name == "aligned-bottom-right":
        says(name, "O 3.75 and 6.2", "three see none")
        assert np.isneginf(tensors["lse"][0, 2:5]).all()
        assert not as_float(tensors["dq"])[2:5].any()
        assert np.exp(tensors["lse"][0, :2]).round(5).tolist() == [4, 5]
    # Keys of a document without queries have no gradient; queries without keys have nothing.
    keys = slice(*STANDARD[name].key_starts[3:5])
    assert keys == slice(77, 80)
    assert not tensors["dk"][keys].any()
    assert not tensors["dv"][keys].any()
    rows = slice(*STANDARD[name].starts[4:6])
    assert not as_float(tensors["out"])[rows].any()
    assert np.isneginf(tensors["lse"][:, rows]).all()


def test_windows_that_hide_nothing_are_no_windows() -> None:
    plain = simulated("window-none")
    for name in ("window-s-1", "window-s", "window-larger"):
        says(name, "hide nothing" if name != "window-larger" else "nor do many more")
        found = simulated(name)
        assert set(found) == set(plain)
        for key, tensor in plain.items():
            assert found[key].tobytes() == tensor.tobytes(), (name, key)
    assert simulated("window-2")["out"].tobytes() != plain["out"].tobytes()


def test_narrow_windows() -> None:
    case = says("window-2", "one to three a row")
    assert case.visible(0).sum(1).tolist() == [1, 2, 3, 3, 3]
    says("window-0", "the own key alone: out is V")
    tensors = simulated("window-0", BF16)
    assert np.array_equal(tensors["out"], tensors["v"].repeat(2, axis=1))
    case = says("window-both-sides", "three keys before and two after")
    assert case.visible(0).sum(1).tolist() == [3, 4, 5, 5, 4]


def test_a_window_cuts_a_tile() -> None:
    case = says("window-tiles", "some rows see two tiles, the last see one")
    tiles = [{int(key) // 128 for key in np.flatnonzero(row)} for row in case.visible(0)]
    assert [len(one) for one in (tiles[127], tiles[128], tiles[227], tiles[228])] == [1, 2, 2, 1]


def test_rows_that_see_none_in_a_window() -> None:
    case = says("window-different-lengths", "rows that see none")
    assert not case.visible(1)[:20].any()
    assert case.visible(1)[20:].any(1).all()


def test_heads_by_value() -> None:
    says("heads-by-value", "out says which one a head took", "dV of one token is 3")
    tensors = simulated("heads-by-value", BF16)
    assert as_float(tensors["out"])[0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert (as_float(tensors["dv"])[0] == 3).all()


# The softmax.


def test_soft_caps() -> None:
    case = says("softcap-15", "scores up to 40 through a cap of 15")
    tensors = simulated("softcap-15")
    scores = tensors["s.0"] * case.softmax_scale
    assert 38 < np.abs(scores).max() < 42
    # No row's sum of exponentials is above that of 70 keys at the cap.
    assert tensors["lse"].max() < 15 + math.log(70)
    case = says("softcap-50", "leaves scores below 8 nearly as they are")
    assert np.abs(simulated("softcap-50")["s.0"]).max() * case.softmax_scale < 8


def test_sinks() -> None:
    case = says("sink", "queries that see no key have it alone")
    tensors = simulated("sink")
    dead = np.flatnonzero(case.mask.dead())
    assert dead.tolist() == [33, 34, 35]
    for row in dead:
        assert tensors["lse"][:, row].tolist() == list(case.sinks)
    assert tensors["sink"].tolist() == list(case.sinks)
    assert (np.abs(tensors["dsink"]) > 0).all()
    assert not as_float(tensors["out"])[dead].any()


def test_a_small_scale_makes_weights_equal() -> None:
    says("small-scale", "all weights of a row nearly equal")
    lse = simulated("small-scale")["lse"][0]
    np.testing.assert_allclose(np.exp(lse), np.arange(1, 41), rtol=1e-4)


@pytest.mark.parametrize("recipe", [FOLDED, "cudnn-mxfp8", BF16])
def test_ones(recipe: str) -> None:
    says("ones", "out is one to a rounding")
    out = as_float(simulated("ones", recipe)["out"])
    # Codes of P have four bits: 2^-4 at most on each weight.
    assert np.abs(out - 1).max() < 2.0**-4
    assert (recipe != BF16) or (out == 1).all()


def test_lost_mass() -> None:
    case = says("lost-mass", "a score of 11 in units of log2 and 511 scores of 0", "out 0.8")
    tensors = simulated("lost-mass")
    assert tensors["s.0"][0, 0].tolist() == [11.0] + [0.0] * 511
    assert case.softmax_scale == math.log(2)
    lost = 1 / (1 + 511 / 2048)
    assert round(lost, 1) == 0.8
    # The recipes of today keep it, by a scale of P or by bfloat16.
    for recipe in (FOLDED, "cudnn-mxfp8", BF16):
        assert (as_float(simulated("lost-mass", recipe)["out"]) == 1).all()


# NaN and infinity.


def not_finite(name: str, tensor: str, recipe: str = FOLDED) -> list[int]:
    """The rows of a result that hold NaN or infinity."""
    x = simulated(name, recipe)[tensor]
    values = x.T[:, :, None] if tensor == "lse" else as_float(x)
    return [int(row) for row in np.flatnonzero(~np.isfinite(values).all((1, 2)))]


def test_documents_keep_their_nan_to_themselves() -> None:
    for recipe in (FOLDED, BF16):
        for tensor in ("out", "lse", "dq", "dk", "dv"):
            assert set(not_finite("nan-next-document", tensor, recipe)) <= set(range(33, 64))
            assert set(not_finite("infinity-previous-document", tensor, recipe)) <= set(range(31))
    says("nan-next-document", "all results of the first are finite")
    says("infinity-previous-document", "the document before")


def test_the_future_keeps_its_nan() -> None:
    says("nan-in-future-key", "out and lse of the rows before are finite")
    for tensor in ("out", "lse"):
        assert not_finite("nan-in-future-key", tensor) == [39]
    says("infinity-in-future-value", "out, lse and dQ of the rows before are finite")
    assert not_finite("infinity-in-future-value", "out") == [39]
    assert not_finite("infinity-in-future-value", "lse") == []
    assert not_finite("infinity-in-future-value", "dq") == [39]


def test_nan_where_masked_pairs_are_multiplied() -> None:
    case = says("nan-outside-window", "hides from all rows but four", "zero times NaN")
    assert np.flatnonzero(case.visible(0)[:, 0]).tolist() == [0, 1, 2, 3]
    assert set(range(4)) <= set(not_finite("nan-outside-window", "out"))
    case = says("nan-unseen-keys", "in the same tile")
    assert not case.visible(0)[:, 5:].any()
    x = inputs("nan-unseen-keys")
    assert np.isnan(x["v"][5:]).all()
    assert not np.isnan(x["v"][:5]).any()


def test_nan_in_the_gradient() -> None:
    says("nan-gradient", "out and lse are finite, and so is dQ of the other tokens")
    assert not_finite("nan-gradient", "out") == []
    assert not_finite("nan-gradient", "dq") == [20]


# Leaks.


def test_the_witness_of_a_scale_that_is_rounded_down() -> None:
    """0.49 under the scale of 0.49 is 2^-2 / 2^8, whose largest number is 0.4375; under that of 0.9 it is not."""
    says("leak-future-value-floor", "0.49 in token 0, 0.45 in token 31, 0.9 there in the twin")
    for name, last in (("leak-future-value-floor", 0.45), ("leak-future-value-floor-twin", 0.9)):
        x = inputs(name)["v"][:, 0, 0]
        assert (x[[0, 31]] == np.array([0.49, last], ml_dtypes.bfloat16)).all()
        scale = 2.0 ** (math.floor(math.log2(np.abs(x).max())) - 8)
        assert (448 * scale < 0.49) == (last == 0.45)


def test_what_the_witnesses_hold() -> None:
    says("leak-future-value", "0.3 in tokens 0 and 31")
    x = inputs("leak-future-value")
    assert not x["q"].any()
    assert not x["k"].any()
    assert np.argwhere(x["v"]).tolist() == [[0, 0, 0], [31, 0, 0]]
    assert inputs("leak-future-value-twin")["v"][31, 0, 0] == np.float32(ml_dtypes.bfloat16(1e6))
    says("leak-whole-tensor", "V is 1/64 in token 0 and 1 in token 1, 1.5 in the twin")
    values = inputs("leak-whole-tensor-twin")["v"]
    assert [np.unique(token).tolist() for token in values] == [[1 / 64], [1.5]]


def test_the_late_layer_is_the_recording() -> None:
    case = STANDARD["smollm2-layer28"]
    assert (case.lengths, case.heads, case.kv_heads, case.seed) == ((64, 12), 3, 1, 1)
    assert np.abs(inputs(case.name)["k"]).max() == 17.375
