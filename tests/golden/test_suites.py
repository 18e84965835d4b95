"""What the smoke suite says of its cases is true of their data."""

import math
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.attention import RECIPES, forward
from flamia_ref.golden import SUITES
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.simulation import simulate
from tests.golden.packs import RECIPE

SMOKE = {case.name: case for case in SUITES["smoke"]}


@cache
def simulated(name: str) -> dict[str, np.ndarray]:
    return simulate(SMOKE[name], RECIPES[RECIPE])


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
    case = SMOKE["lengths-around-32"]
    assert "documents of 0, 1, 31, 32 and 33 tokens" in case.why
    assert sorted(case.lengths) == [0, 1, 31, 32, 33]
    longer = [start for start, n in zip(case.starts, case.lengths, strict=False) if n > 1]
    assert all(start % 32 for start in longer)


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


def test_full_140_d128() -> None:
    case = SMOKE["full-140-d128"]
    assert "a second tile of 12 keys that every query sees" in case.why
    assert (case.lengths, case.head_dim, case.causal) == ((128 + 12,), 128, False)
    assert np.all(simulated(case.name)["p.0"][:, :, 128:] > 0)


def test_two_documents_d128() -> None:
    case, tensors = SMOKE["two-documents-d128"], simulated("two-documents-d128")
    assert "maps heads by modulo gets wrong in heads 1 and 2" in case.why
    assert (case.heads, case.kv_heads) == (4, 2)
    q, k, v = (tensors[name].view(ml_dtypes.bfloat16) for name in "qkv")
    # Heads 0 and 2 over key/value head 0, 1 and 3 over 1.
    order = [0, 2, 1, 3]
    wrong = forward(
        q[:, order], k, v, RECIPE, cu_seqlens=case.cu_seqlens, softmax_scale=case.softmax_scale
    ).out[:, order]
    right = as_float(tensors["out"])
    assert [h for h in range(4) if not np.array_equal(wrong[:, h], right[:, h])] == [1, 2]


@pytest.mark.parametrize("operand", "qkv")
def test_outliers(operand: str) -> None:
    case, tensors = SMOKE["outliers"], simulated("outliers")
    assert "one element in 256 is 65536 times larger" in case.why
    assert "most of whose other codes are subnormal and some zero" in case.why
    # Without the factor no element is larger than 1020 times 2^exponent.
    large = np.abs(as_float(tensors[operand])) > 1020 * 2.0**case.exponent
    assert 1 / 400 < large.mean() < 1 / 150
    with_one = large.any(-1, keepdims=True)
    others = magnitudes(tensors, operand)[with_one & ~large]
    assert np.mean((others > 0) & (others < 8)) > 0.5
    assert 0.05 < np.mean(others == 0) < 0.5
    scales = tensors[f"{operand}.scales"]
    assert scales[with_one].mean() > scales[~with_one].max() + 8


@pytest.mark.parametrize("operand", "qkv")
def test_wide_exponents(operand: str) -> None:
    case, tensors = SMOKE["wide-exponents"], simulated("wide-exponents")
    assert "more than 16 scale bytes a tensor" in case.why
    assert len(np.unique(tensors[f"{operand}.scales"])) > 16
    codes = magnitudes(tensors, operand)
    assert "over two codes in five are zero and one in ten is subnormal" in case.why
    assert 0.4 < np.mean(codes == 0) < 0.45
    assert 0.1 < np.mean((codes > 0) & (codes < 8)) < 0.15


def test_poison() -> None:
    case, tensors = SMOKE["poison"], simulated("poison")
    assert "what is poisoned stays inside its document" in case.why
    bounds = list(zip(case.starts, case.starts[1:], strict=False))
    (k_first, k_last), (v_first, v_last), (first, last) = bounds
    inputs = {name: as_float(tensors[name]) for name in "qkv"}
    assert np.isnan(inputs["k"][k_first:k_last]).any()
    assert np.isposinf(inputs["v"][v_first:v_last]).any()
    negative_zero = (tensors["q"][first:last] == 0x8000).any()
    assert negative_zero
    assert (inputs["v"][first:last] == 0).all((1, 2)).any()
    out = as_float(tensors["out"])
    assert np.isnan(out[k_first:k_last]).any()
    assert np.isposinf(out[v_first:v_last]).any()
    assert np.isfinite(out[first:last]).all()
    alone: Any = forward(
        *(tensors[name][first:last].view(ml_dtypes.bfloat16) for name in "qkv"),
        RECIPE,
        softmax_scale=case.softmax_scale,
    )
    assert np.array_equal(out[first:last], alone.out)
