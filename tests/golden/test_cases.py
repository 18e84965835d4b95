"""The smoke suite holds what it is meant to hold; bad cases are refused."""

import hashlib
import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref.golden import SUITES
from flamia_ref.golden.cases import Plant
from tests.golden.packs import read_safetensors, spec

SMOKE = {case.name: case for case in SUITES["smoke"]}

# The first eight digits of the SHA-256 of the recording's bytes, cut to these tokens and heads,
# computed from the recording itself.
RECORDED = {"q": "09a2a274", "k": "904ce684", "v": "763b3606", "dout": "149f95e7"}
DATA = resources.files("flamia_ref.golden") / "data"


def test_the_smoke_suite_covers_what_it_should() -> None:
    assert sum(case.pairs for case in SMOKE.values()) <= 150_000
    assert {case.head_dim for case in SMOKE.values()} == {64, 128}  # what kernels have
    assert {case.causal for case in SMOKE.values()} == {True, False}
    grouped = SMOKE["lengths-around-32"]
    assert sorted(grouped.lengths) == [0, 1, 31, 32, 33]
    assert (grouped.heads, grouped.kv_heads) == (9, 3)
    assert (SMOKE["one-head-200"].lengths, SMOKE["one-head-200"].heads) == ((200,), 1)
    assert {"outliers", "wide", "bell", "recorded"} == {
        case.distribution for case in SMOKE.values()
    }
    assert all(case.why for case in SMOKE.values())
    assert len({case.seed for case in SMOKE.values()}) == len(SMOKE)


def test_pairs_count_masked_ones_too() -> None:
    assert spec(lengths=(2, 0, 35), heads=2).pairs == 2 * (4 + 35 * 35)


def test_the_real_case_is_the_recording() -> None:
    case = SMOKE["smollm2-layer14"]
    assert case.lengths == (75, 64, 12)
    assert case.softmax_scale == 0.125
    inputs = case.inputs()
    assert {name: bits.shape for name, bits in inputs.items()} == {
        "q": (151, 3, 64),
        "k": (151, 1, 64),
        "v": (151, 1, 64),
        "dout": (151, 3, 64),
    }
    for name, bits in inputs.items():
        digest = hashlib.sha256(bits.astype("<u2").tobytes()).hexdigest()
        assert digest.startswith(RECORDED[name])


def test_the_recording_says_where_it_comes_from() -> None:
    provenance = json.loads((DATA / "smollm2-layer14.json").read_text())
    assert provenance["licence"] == "Apache-2.0"
    path = Path(str(DATA / "smollm2-layer14.safetensors"))
    for name, bits in read_safetensors(path).items():
        digest = hashlib.sha256(bits.tobytes()).hexdigest()
        if name == "cu_seqlens":
            assert bits.tolist() == [0, 75, 139, 151]
        else:
            assert digest == provenance["sha256"][name]
            assert digest.startswith(RECORDED[name])


def test_the_inputs_are_a_copy() -> None:
    case = SMOKE["smollm2-layer14"]
    case.inputs()["q"][:] = 0
    assert case.inputs()["q"].any()


def test_plants_are_planted() -> None:
    plants = (
        Plant(tensor="k", token=3, head=0, channel=5, bits=0x7F80),
        Plant(tensor="q", token=0, head=1, channel=0, bits=0x8000),
        Plant(tensor="dout", token=5, head=1, channel=1, bits=0x7FC0),
    )
    plain, planted = spec().inputs(), spec(plants=plants).inputs()
    assert planted["k"][3, 0, 5] == 0x7F80
    assert planted["q"][0, 1, 0] == 0x8000
    assert np.count_nonzero(plain["k"] != planted["k"]) == 1
    assert np.count_nonzero(plain["q"] != planted["q"]) == 1
    assert planted["dout"][5, 1, 1] == 0x7FC0
    assert np.count_nonzero(plain["dout"] != planted["dout"]) == 1
    assert np.array_equal(plain["v"], planted["v"])


def test_only_the_poisoned_case_holds_nan_or_infinity() -> None:
    for case in SMOKE.values():
        special = any(np.any((bits & 0x7F80) == 0x7F80) for bits in case.inputs().values())
        assert special == ("nan" in case.flags), case.name


def test_the_default_scale_is_the_correctly_rounded_one() -> None:
    assert SMOKE["outliers-d128"].softmax_scale == 1 / math.sqrt(128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../up"}, "case name '../up' is not plain"),
        ({"name": "a/b"}, "is not plain"),
        ({"name": ""}, "is not plain"),
        ({"name": "."}, "is not plain"),
        ({"name": "Upper"}, "is not plain"),
        ({"name": "a\n"}, "is not plain"),
        ({"name": "a" * 81}, "is not plain"),
        ({"why": "\x1b[2J"}, "why is .*; it must be printable"),
        ({"heads": 0}, "heads is 0"),
        ({"heads": 3, "kv_heads": 2}, "3 heads do not divide over 2 kv_heads"),
        ({"head_dim": 33}, "head_dim 33 is no multiple of 32"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"lengths": (-1,)}, "every length"),
        ({"lengths": (1 << 25,)}, "every length"),
        ({"lengths": (1 << 24, 1)}, "tokens are more than"),
        ({"lengths": (0,) * 20_000}, "documents"),
        ({"softmax_scale": 0.0}, "softmax_scale is 0.0"),
        ({"softmax_scale": math.nan}, "softmax_scale is nan"),
        ({"softmax_scale": math.inf}, "softmax_scale is inf"),
        ({"seed": -1}, "seed or exponent"),
        ({"exponent": 65}, "seed or exponent"),
        ({"flags": ("shiny",)}, "unknown flag 'shiny'"),
        ({"plants": (Plant(tensor="o", token=0, head=0, channel=0, bits=0),)}, "outside"),
        ({"plants": (Plant(tensor="q", token=37, head=0, channel=0, bits=0),)}, "outside"),
        ({"plants": (Plant(tensor="k", token=0, head=1, channel=0, bits=0),)}, "outside"),
        ({"plants": (Plant(tensor="k", token=0, head=0, channel=32, bits=0),)}, "outside"),
        ({"plants": (Plant(tensor="k", token=0, head=0, channel=0, bits=1 << 16),)}, "outside"),
    ],
)
def test_impossible_cases_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**changes)


@pytest.mark.parametrize("name", ["standard", "exhaustive", "smok", ""])
def test_an_unknown_suite_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown suite .*smoke"):
        SUITES[name]
