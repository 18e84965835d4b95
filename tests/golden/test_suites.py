"""What the smoke suite says of its cases is true of their data."""

import itertools
import math
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.attention import RECIPES, backward, forward
from flamia_ref.golden import SUITES
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.simulation import simulate
from tests.golden.packs import RECIPE

SMOKE = {case.name: case for case in SUITES["smoke"]}


@cache
def simulated(name: str, recipe: str = RECIPE) -> dict[str, np.ndarray]:
    return simulate(SMOKE[name], RECIPES[recipe])


def as_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def magnitudes(tensors: dict[str, np.ndarray], operand: str) -> np.ndarray:
    """The e4m3 codes of an operand without signs: 0 is zero, 1 to 7 are subnormal."""
    return tensors[f"{operand}.codes"] & 0x7F


def test_the_suite_is_small() -> None:
    assert sum(case.pairs for case in SMOKE.values()) <= 150_000


def facts(case: CaseSpec) -> set[str]:
    """The flags that follow from the shapes."""
    found = {
        "empty-document": 0 in case.lengths,
        "partial-block": any(length % 32 for length in case.lengths),
        "several-tiles": any(length > 128 for length in case.lengths),
        "grouped-heads": case.heads > case.kv_heads,
        "full": not case.causal,
    }
    return {flag for flag, holds in found.items() if holds}


@pytest.mark.parametrize("name", SMOKE)
def test_flags_follow_from_the_data(name: str) -> None:
    assert set(SMOKE[name].flags) - {"real", "nan"} == facts(SMOKE[name])


def test_smollm2_layer14() -> None:
    case = SMOKE["smollm2-layer14"]
    assert "boundaries at 11 and 11 modulo 32" in case.why
    assert [start % 32 for start in case.starts[1:-1]] == [11, 11]
    assert (len(case.lengths), case.heads, case.kv_heads) == (3, 3, 1)


def test_lengths_around_32() -> None:
    case, tensors = SMOKE["lengths-around-32"], simulated("lengths-around-32")
    assert "documents of 0, 1, 31, 32 and 33 tokens" in case.why
    assert sorted(case.lengths) == [0, 1, 31, 32, 33]
    longer = [start for start, n in zip(case.starts, case.lengths, strict=False) if n > 1]
    assert all(start % 32 for start in longer)
    assert "nine query heads over three" in case.why
    assert "maps heads by modulo gets only 0, 4 and 8 right" in case.why
    assert (case.heads, case.kv_heads) == (9, 3)
    q, k, v = (tensors[name].view(ml_dtypes.bfloat16) for name in "qkv")
    # Head h over key/value head h % 3: heads 0, 3, 6 first, then 1, 4, 7, then 2, 5, 8.
    order = [0, 3, 6, 1, 4, 7, 2, 5, 8]
    back = np.argsort(order)
    wrong = forward(
        q[:, order], k, v, RECIPE, cu_seqlens=case.cu_seqlens, softmax_scale=case.softmax_scale
    ).out[:, back]
    right = as_float(tensors["out"])
    assert [h for h in range(9) if np.array_equal(wrong[:, h], right[:, h])] == [0, 4, 8]


def test_one_head_200() -> None:
    case, tensors = SMOKE["one-head-200"], simulated("one-head-200")
    assert "peaked softmax" in case.why
    scores = tensors["s.0"][0].astype(np.float64) * case.softmax_scale
    scores[~np.tril(np.ones((200, 200), bool))] = -math.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    assert np.median(weights.max(-1) / weights.sum(-1)) > 0.9
    assert "in some rows the maximum rises in the second tile" in case.why
    exponents = np.ceil(scores * math.log2(math.e))
    rises = exponents[128:, 128:].max(-1) > exponents[128:, :128].max(-1)
    assert 0 < np.count_nonzero(rises) < len(rises)


@pytest.mark.parametrize("operand", ["q", "k", "v", "dout"])
def test_outliers_d128(operand: str) -> None:
    case, tensors = SMOKE["outliers-d128"], simulated("outliers-d128")
    assert "head dimension 128" in case.why
    assert case.head_dim == 128
    assert "one element in 256 is 65536 times larger" in case.why
    assert "most of whose other codes are subnormal and some zero" in case.why
    # Without the factor no element is larger than 1020 times 2^exponent.
    large = np.abs(as_float(tensors[operand])) > 1020 * 2.0**case.exponent
    assert 1 / 400 < large.mean() < 1 / 150
    with_one = large.any(-1, keepdims=True)
    of = "do" if operand == "dout" else operand
    others = magnitudes(tensors, of)[with_one & ~large]
    assert np.mean((others > 0) & (others < 8)) > 0.5
    assert 0.05 < np.mean(others == 0) < 0.5
    scales = tensors[f"{of}.scales"]
    assert scales[with_one].mean() > scales[~with_one].max() + 8


@pytest.mark.parametrize("operand", ["q", "k", "v", "do"])
def test_full_wide_exponents(operand: str) -> None:
    case, tensors = SMOKE["full-wide-exponents"], simulated("full-wide-exponents")
    assert "no mask" in case.why
    assert not case.causal
    assert "more than 12 scale bytes a tensor" in case.why
    assert len(np.unique(tensors[f"{operand}.scales"])) > 12
    codes = magnitudes(tensors, operand)
    assert "over two codes in five are zero and one in ten is subnormal" in case.why
    assert 0.4 < np.mean(codes == 0) < 0.47
    assert 0.1 < np.mean((codes > 0) & (codes < 8)) < 0.15


def test_poison_where_no_code_is_nan() -> None:
    """NVFP4 without a tensor scale makes numbers of NaN and infinity of q, k and v."""
    tensors = simulated("poison", "attn-qat-nvfp4")
    for name in ("out", "dq", "dk", "dv"):
        assert np.isfinite(as_float(tensors[name])).all(), name
    assert np.isfinite(tensors["lse"]).all()


def poisoned(recipe: str) -> tuple[dict[str, np.ndarray], list[slice]]:
    """The poison case by a recipe, and the rows of its four documents."""
    starts = SMOKE["poison"].starts
    return simulated("poison", recipe), [slice(*one) for one in itertools.pairwise(starts)]


def alone_in_its_row(tensors: dict[str, np.ndarray], row: slice) -> np.ndarray:
    """V of the last document, for each query head: what out is where its only score counts."""
    return np.repeat(as_float(tensors["v"])[row], 2, axis=1)


def test_poison_in_the_reference_of_nvidia() -> None:
    """P is 0 where it is NaN, in both passes: NaN of K is in lse, and by its own codes in dQ, and nowhere else."""
    tensors, (first, second, third, last) = poisoned("cudnn-mxfp8-reference")
    from_33 = np.arange(36) >= 33  # the rows that see the NaN
    assert (np.isnan(tensors["lse"][:, first]) == from_33).all()
    for name in ("out", "dv", "dk"):
        assert np.isfinite(as_float(tensors[name])[first]).all(), name
    assert not as_float(tensors["out"])[first][from_33].any()
    assert np.isnan(as_float(tensors["dq"])[first]).any()
    assert np.isinf(as_float(tensors["out"])[second]).any()
    for name in ("out", "dq", "dk", "dv"):
        assert np.isfinite(as_float(tensors[name])[third]).all(), name
        assert not as_float(tensors[name])[last].any(), name
    assert np.isneginf(tensors["lse"][:, last]).all()


def test_poison_where_codes_saturate_and_nothing_is_scaled() -> None:
    """Infinity and 2^100 become 448: the last row lives."""
    tensors, (first, second, third, last) = poisoned("cutlass-fp8")
    out = as_float(tensors["out"])
    from_33 = np.arange(36) >= 33
    assert (np.isnan(out[first]).all((1, 2)) == from_33).all()
    assert not np.isnan(out[first][~from_33]).any()
    for finite in (second, third, last):
        assert np.isfinite(out[finite]).all()
    # In row 37 the value at infinity alone counts, or a share of it.
    assert np.abs(out[second]).max() <= 448
    assert (np.abs(tensors["s.3"]) > 448 * 440).all()
    wanted = alone_in_its_row(tensors, last).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(out[last], wanted.astype(np.float32))


@pytest.mark.parametrize("recipe", ["fp8-fa3", "fp8-fa4"])
def test_poison_where_a_document_has_one_descale(recipe: str) -> None:
    """NaN reaches all rows of its document by the descale; a row sum that is NaN gives an lse of -infinity."""
    tensors, (first, second, third, last) = poisoned(recipe)
    out = as_float(tensors["out"])
    assert np.isnan(out[first]).all()
    assert np.isneginf(tensors["lse"][:, first]).all()
    assert np.isnan(tensors["k.scales"][:, 0]).tolist() == [True, False, False, False]
    assert np.isinf(tensors["v.scales"][:, 0]).tolist() == [False, True, False, False]
    assert np.isnan(out[second]).any()
    assert np.isfinite(tensors["lse"][:, second]).all()
    assert np.isfinite(out[third]).all()
    # The descales 2^100 / 448 of q and k have a product of infinity.
    assert np.isnan(out[last]).all()
    assert np.isneginf(tensors["lse"][:, last]).all()


def test_poison_where_keys_lose_their_mean() -> None:
    """The mean takes NaN to all keys of its document, whose rows are zeros; the only key of the last one is 0."""
    tensors, (first, second, third, last) = poisoned("sage3-nvfp4")
    out = as_float(tensors["out"])
    assert np.isnan(tensors["s.0"]).all()
    assert not out[first].any()
    assert np.isneginf(tensors["lse"][:, first]).all()
    for finite in (second, third, last):
        assert np.isfinite(out[finite]).all()
        assert np.isfinite(tensors["lse"][:, finite]).all()
    assert not tensors["s.3"].any()
    np.testing.assert_allclose(tensors["lse"][:, last], 0, atol=2**-20)
    # A code of e2m1 is half of the last step off at most, 1 of 6, and its scale a sixteenth.
    wanted = alone_in_its_row(tensors, last)
    assert np.abs(out[last] - wanted).max() <= np.abs(wanted).max() * (1 / 6 + 1 / 16)


ODD = (
    *("attn-qat-nvfp4", "cudnn-mxfp8-reference", "cutlass-fp8"),
    *("fp8-fa3", "fp8-fa4", "sage3-nvfp4"),
)
"""Recipes that treat NaN and infinity otherwise, each in a test above."""


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in ODD])
def test_poison(recipe: str) -> None:
    case = SMOKE["poison"]
    tensors = simulated(case.name, recipe)
    assert "NaN in K of the first document and infinity in V of the second stay" in case.why
    first, second, third, last = itertools.pairwise(case.starts)
    inputs = {name: as_float(tensors[name]) for name in ("q", "k", "v", "dout")}
    outputs = {name: as_float(tensors[name]) for name in ("out", "dq", "dk", "dv")}

    def of(values: np.ndarray, bounds: tuple[int, int]) -> np.ndarray:
        return values[slice(*bounds)]

    assert [np.isnan(of(inputs["k"], one)).any() for one in (first, second, third, last)] == [
        *(True, False, False, False),
    ]
    assert [np.isinf(of(inputs["v"], one)).any() for one in (first, second, third, last)] == [
        *(False, True, False, False),
    ]
    for name, values in outputs.items():
        assert np.isnan(of(values, first)).any(), name
        assert np.isfinite(of(values, third)).all(), name
    assert np.isinf(of(outputs["out"], second)).any() or np.isnan(of(outputs["out"], second)).any()

    assert "in the third -0, a zero token of V, and a token without gradient" in case.why
    assert (of(tensors["q"], third) == 0x8000).any()
    assert (of(inputs["v"], third) == 0).all((1, 2)).any()
    without = (of(inputs["dout"], third) == 0).all(2)
    assert without.sum() == 1
    assert not of(outputs["dq"], third)[without].any()

    assert "the last holds one token, whose only score is -infinity: a dead row" in case.why
    assert last[1] - last[0] == 1
    assert np.isneginf(tensors["s.3"]).all()
    assert np.isneginf(tensors["lse"][:, last[0]]).all()
    assert of(inputs["dout"], last).any()
    assert not of(tensors["out"], last).any()
    for name in ("dq", "dk", "dv"):
        assert not of(outputs[name], last).any(), name


def test_what_the_third_document_of_poison_gives_alone() -> None:
    case, tensors = SMOKE["poison"], simulated("poison")
    rows = slice(*case.starts[2:4])
    q, k, v, dout = (
        tensors[name][rows].view(ml_dtypes.bfloat16) for name in ("q", "k", "v", "dout")
    )
    alone = forward(q, k, v, RECIPE, softmax_scale=case.softmax_scale)
    gradient = backward(q, k, v, dout, alone)
    assert np.array_equal(as_float(tensors["out"])[rows], alone.out)
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(as_float(tensors[name])[rows], getattr(gradient, name))
