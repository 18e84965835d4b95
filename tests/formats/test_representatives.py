"""The few presets that stand for all have every policy between them."""

import dataclasses
from typing import Any

from flamia_ref.formats import PRESETS, BlockFormat, NanPolicy, Rounding
from tests.formats.representatives import (
    ALWAYS,
    FORMULAS,
    REPRESENTATIVES,
    covering,
    daily_first,
)

CHOSEN = [PRESETS[name] for name in REPRESENTATIVES]


def values(presets: list[BlockFormat], field: str) -> set[Any]:
    return {getattr(preset, field) for preset in presets}


def test_every_value_of_every_policy_is_among_them() -> None:
    every = list(PRESETS.values())
    for field in (
        *("element", "scale", "rule", "block", "partial", "arithmetic", "subnormals", "log2"),
        *("tensor_divides", "tensor_extent", "scale_rounding", "even_bits", "even_overflow"),
        *("exponent", "smallest_quotient", "smallest_amax", "zero_scale", "underflow_scale"),
        *("nan", "nan_element", "nan_scale", "rounding", "stochastic", "half_added", "zero_sign"),
        *("element_log2", "choice", "signs", "row_span", "scale_range", "overflow", "blocks"),
    ):
        assert values(CHOSEN, field) == values(every, field), field
    for field in FORMULAS:
        assert (None in values(CHOSEN, field)) == (None in values(every, field))
        assert len(values(CHOSEN, field) - {None}) >= 1
    assert values(CHOSEN, "nan") == set(NanPolicy)
    assert Rounding.NEAREST_ZERO in values(CHOSEN, "rounding")


def test_they_are_few() -> None:
    assert set(ALWAYS) <= set(REPRESENTATIVES)
    assert len(set(REPRESENTATIVES)) == len(REPRESENTATIVES) < len(PRESETS) // 3


def test_a_new_policy_is_covered() -> None:
    preset = PRESETS["te-mx-e4m3"]
    new = dataclasses.replace(preset, name="new", rounding="nearest_zero", zero_scale=9)
    assert "new" in covering({**PRESETS, "new": new})
    same = dataclasses.replace(preset, name="same", version="another")
    assert "same" not in covering({**PRESETS, "same": same})


def test_the_others_are_nightly() -> None:
    parameters = daily_first()
    assert len(parameters) == len(PRESETS)
    assert sorted(one for one in parameters if isinstance(one, str)) == list(REPRESENTATIVES)
