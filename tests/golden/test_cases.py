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
from flamia_ref.golden.case_fields import Fill, Plant, Rows, Twin
from flamia_ref.golden.inputs import Distribution
from tests.golden.packs import read_safetensors, spec

SMOKE = {case.name: case for case in SUITES["smoke"]}


def fill(**changes: Any) -> Fill:
    """A box of two tokens of K."""
    values: dict[str, Any] = {"tensor": "k", "tokens": (0, 2), "heads": (0, 1), "channels": (0, 4)}
    return Fill(**{**values, "bits": 0x3F80, **changes})


def with_twin(**changes: Any) -> Twin:
    """A twin that differs in a token of V, as a case may have it."""
    values: dict[str, Any] = {
        "case": "other",
        "changed": Rows(tensor="v", first=3, end=4),
        "equal": (Rows(tensor="out", first=0, end=2),),
    }
    return Twin(**values | changes)


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


def test_fills_are_filled_before_plants() -> None:
    fills = (
        fill(tensor="q", tokens=(1, 4), heads=(0, 2), channels=(0, 32), bits=0x3F80),
        # Twice as large with each token, and 3 bits more with each head.
        fill(tensor="q", tokens=(2, 4), heads=(0, 2), channels=(5, 6), steps=(0x80, 3, 0)),
    )
    plants = (Plant(tensor="q", token=3, head=1, channel=5, bits=0x0001),)
    plain, filled = spec().inputs(), spec(fills=fills, plants=plants).inputs()
    wanted = plain["q"].copy()
    wanted[1:4] = 0x3F80
    wanted[2, :, 5] = [0x3F80, 0x3F83]
    wanted[3, :, 5] = [0x4000, 0x0001]
    assert np.array_equal(filled["q"], wanted)
    for name in ("k", "v", "dout"):
        assert np.array_equal(filled[name], plain[name])


def test_fills_step_by_blocks_of_channels_and_wrap() -> None:
    steps = (0, 0, -0x80)
    case = spec(head_dim=96, fills=(fill(channels=(16, 96), bits=0x0080, steps=steps),))
    row = case.inputs()["k"][0, 0]
    # Blocks of 32 count from the first channel of the box.
    assert row[16:48].tolist() == [0x0080] * 32
    assert row[48:80].tolist() == [0x0000] * 32
    assert row[80:].tolist() == [0xFF80] * 16


def test_keys_of_their_own_have_shapes_of_their_own() -> None:
    case = spec(lengths=(2, 3), key_lengths=(5, 0))
    shapes = {name: bits.shape for name, bits in case.inputs().items()}
    assert shapes == {"q": (5, 2, 32), "dout": (5, 2, 32), "k": (5, 1, 32), "v": (5, 1, 32)}
    assert case.cu_seqlens_k is not None
    assert case.cu_seqlens_k.tolist() == [0, 5, 5]
    assert spec().cu_seqlens_k is None
    assert case.pairs == 2 * (2 * 5 + 3 * 0)


@pytest.mark.parametrize("first", [(0, 0), (3, 3), (4, 2), (-1, 2)])
def test_rows_that_are_none(first: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="are no rows"):
        with_twin(changed=Rows(tensor="v", first=first[0], end=first[1]))


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
        ({"key_lengths": (1, 2)}, "2 key_lengths, 3 lengths; give equally many"),
        ({"key_lengths": (1, 2, -1)}, "every length"),
        ({"key_lengths": (1 << 24, 1, 0)}, "tokens are more than"),
        ({"alignment": "left"}, "unknown alignment of case tiny 'left'"),
        ({"window": (1,)}, r"window is \(1,\); give two sides"),
        ({"window": (-1, 0)}, "give two sides, each None or 0 to"),
        ({"window": (1 << 25, 0)}, "give two sides"),
        ({"window": (3, 1)}, "the mask is causal; its right side must be 0 or None"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"softcap": math.nan}, "softcap is nan"),
        ({"softcap": math.inf}, "softcap is inf"),
        ({"sinks": (1.0,)}, "1 sinks for 2 heads; give one a head"),
        ({"sinks": (1.0, math.nan)}, "sink nan is no float32"),
        ({"sinks": (1.0, 0.1)}, "sink 0.1 is no float32"),
        ({"sinks": (1.0, 1e30)}, "sink 1e.30 is no float32"),
        ({"scale_padding": 256}, "scale_padding is 256; it must be a byte"),
        (
            {"distribution": Distribution.RECORDED, "seed": 2},
            "there is no recording 2; there are 2",
        ),
        ({"twin": with_twin(case="tiny")}, "twin 'tiny' is no name of another case"),
        ({"twin": with_twin(case="../a")}, "is no name of another case"),
        ({"twin": with_twin(changed=Rows(tensor="q", first=0, end=38))}, "are no rows of an input"),
        ({"twin": with_twin(changed=Rows(tensor="out", first=0, end=1))}, "no rows of an input"),
        (
            {"twin": with_twin(equal=(Rows(tensor="dk", first=0, end=38),))},
            "are no rows of a result",
        ),
        ({"twin": with_twin(equal=(Rows(tensor="s", first=0, end=1),))}, "are no rows of a result"),
        ({"fills": (fill(tensor="o"),)}, "outside"),
        ({"fills": (fill(tokens=(0, 38)),)}, "outside"),
        ({"fills": (fill(tokens=(3, 3)),)}, "outside"),
        ({"fills": (fill(heads=(0, 2)),)}, "outside"),
        ({"fills": (fill(channels=(31, 33)),)}, "outside"),
        ({"fills": (fill(bits=1 << 16),)}, "outside"),
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


@pytest.mark.parametrize("name", ["large", "smok", ""])
def test_an_unknown_suite_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown suite .*smoke"):
        SUITES[name]
