"""Twins differ where they say, what must be equal follows from the mask, and leaks are found."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from flamia_ref.golden import SUITES
from flamia_ref.golden.case_fields import Rows
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.inputs import TENSORS
from flamia_ref.golden.simulation import simulate
from flamia_ref.golden.twins import leaks, twin
from tests.golden.packs import spec

CASES = {case.name: case for case in SUITES["standard"]}
TWINS = [case for case in CASES.values() if case.twin is not None]
Pair = tuple[CaseSpec, dict[str, Any], dict[str, Any]]
RESULTS = ("out", "lse", "dq", "dk", "dv")


def reached(case: CaseSpec, changed: Rows) -> set[tuple[str, int]]:
    """Rows of results that depend on rows of an input, from the formulas of attention, pair by pair."""
    found = set()
    first_query = first_key = 0
    for queries, keys in zip(case.lengths, case.lengths_of_keys, strict=True):
        shift = keys - queries if case.alignment == "bottom_right" else 0
        for i in range(queries):
            left, right = case.window or (None, None)
            seen = [
                j
                for j in range(keys)
                if (not case.causal or j <= i + shift)
                and (left is None or j >= i + shift - left)
                and (right is None or j <= i + shift + right)
            ]
            # What goes into row i: its own q and dout, and k and v of what it sees.
            into = {("q", first_query + i), ("dout", first_query + i)} if seen else set()
            into |= {(tensor, first_key + j) for j in seen for tensor in "kv"}
            hit = {
                tensor
                for tensor, row in into
                if tensor == changed.tensor and changed.first <= row < changed.end
            }
            for name in hit:
                row = first_query + i
                found |= {("dq", row)}
                found |= {("out", row)} if name != "dout" else set()
                found |= {("lse", row)} if name in "qk" else set()
                found |= {("dk", first_key + j) for j in seen}
                found |= {("dv", first_key + j) for j in seen} if name != "v" else set()
        first_query += queries
        first_key += keys
    return found


@pytest.mark.parametrize("case", TWINS, ids=lambda case: case.name)
def test_twins_differ_in_the_changed_rows_alone(case: CaseSpec) -> None:
    assert case.twin is not None
    other = CASES[case.twin.case]
    assert other.twin is None
    assert (case.lengths, case.mask, case.seed) == (other.lengths, other.mask, other.seed)
    changed = case.twin.changed
    for tensor in TENSORS:
        differs = (case.inputs()[tensor] != other.inputs()[tensor]).any((1, 2))
        wanted = np.zeros_like(differs)
        if tensor == changed.tensor:
            wanted[changed.first : changed.end] = True
        np.testing.assert_array_equal(differs, wanted)


MASKS = {
    "causal": spec(),
    "full": spec(causal=False),
    "window": spec(window=(3, 0), lengths=(12, 5)),
    "both sides": spec(window=(2, 1), causal=False, lengths=(12, 5)),
    "longer keys": spec(lengths=(3, 4), key_lengths=(5, 2)),
    "top left": spec(lengths=(3, 4), key_lengths=(5, 2), alignment="top_left"),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("tensor", TENSORS)
def test_what_must_be_equal_follows_from_the_formulas(mask: str, tensor: str) -> None:
    case = MASKS[mask]
    sizes = {"out": 0, "lse": 0, "dq": 0, "dk": 1, "dv": 1}
    for first in (0, 2, 4):
        changed = Rows(tensor=tensor, first=first, end=first + 1)
        equal = twin(case, "other", changed).equal
        listed = {(rows.tensor, row) for rows in equal for row in range(rows.first, rows.end)}
        everything = {
            (name, row)
            for name in RESULTS
            for row in range((case.tokens, case.key_tokens)[sizes[name]])
        }
        assert listed == everything - reached(case, changed), (mask, tensor, first)


@pytest.mark.parametrize("case", TWINS, ids=lambda case: case.name)
def test_the_suite_lists_what_must_be_equal(case: CaseSpec) -> None:
    assert case.twin is not None
    listed = {(one.tensor, row) for one in case.twin.equal for row in range(one.first, one.end)}
    assert listed
    assert not listed & reached(case, case.twin.changed)


def found(case: CaseSpec, recipe: str) -> dict[str, tuple[int, ...]]:
    assert case.twin is not None
    one, other = (simulate(x, RECIPES[recipe]) for x in (case, CASES[case.twin.case]))
    return {leak.tensor: leak.rows for leak in leaks(one, other, case)}


@pytest.mark.parametrize("case", TWINS, ids=lambda case: case.name)
def test_a_recipe_that_does_not_leak_gives_equal_rows(case: CaseSpec) -> None:
    assert found(case, "flamia-mxfp8-folded") == {}


# Tokens 0 to 31 of a document share a scale in the recipe: V and dO in the forward and in dV, K and Q in
# dQ and dK. Token 20 changes, or the last or the first one; rows beyond the block stay.
@pytest.mark.parametrize(
    ("name", "tensor", "first", "last"),
    [
        ("leak-future-value-twin", "out", 0, 30),
        ("leak-past-gradient-twin", "dv", 1, 31),
        ("leak-v-twin", "out", 0, 19),
        ("leak-k-twin", "dq", 0, 19),
        ("leak-q-twin", "dk", 21, 31),
        ("leak-dout-twin", "dv", 21, 31),
    ],
)
def test_a_recipe_that_leaks_is_found(name: str, tensor: str, first: int, last: int) -> None:
    rows = found(CASES[name], "cudnn-mxfp8")[tensor]
    assert set(rows) <= set(range(first, last + 1))
    assert len(rows) > (last - first) * 0.8
    assert first in rows


def test_the_control_passes_with_a_recipe_that_leaks() -> None:
    assert found(CASES["leak-control-twin"], "cudnn-mxfp8") == {}


@pytest.fixture
def pair() -> Pair:
    """A case whose rows 0 to 1 of out must equal its twin's, and equal results."""
    plain = spec(lengths=(4,), heads=1)
    case = replace(plain, twin=twin(plain, "other", Rows(tensor="v", first=2, end=3)))
    results: dict[str, Any] = {
        "out": np.zeros((4, 1, 32), np.uint16),
        "lse": np.zeros((1, 4), np.float32),
    }
    return case, results, {name: x.copy() for name, x in results.items()}


def test_one_bit_is_a_leak(pair: Pair) -> None:
    case, first, second = pair
    assert leaks(first, second, case) == ()
    second["out"][1, 0, 31] = 1
    (leak,) = leaks(first, second, case)
    assert (leak.tensor, leak.rows) == ("out", (1,))
    assert str(leak) == (
        "1 rows of out, the first of them 1, change with v of tokens 2 to 2, which they may not depend on"
    )


def test_rows_that_may_differ_are_no_leak(pair: Pair) -> None:
    case, first, second = pair
    second["out"][2:] = 1
    assert leaks(first, second, case) == ()


def test_lse_sees_no_value(pair: Pair) -> None:
    case, first, second = pair
    second["lse"][0, 3] = 1.0
    (leak,) = leaks(first, second, case)
    assert (leak.tensor, leak.rows) == ("lse", (3,))


def test_nan_equals_nan_and_zeros_differ(pair: Pair) -> None:
    case, first, second = pair
    first["out"][0], second["out"][0] = 0x7FC0, 0xFFFF
    assert leaks(first, second, case) == ()
    second["out"][0] = 0x7F80
    assert [leak.rows for leak in leaks(first, second, case)] == [(0,)]
    second["out"][0] = first["out"][0]
    second["out"][1, 0, 3] = 0x8000
    assert [leak.rows for leak in leaks(first, second, case)] == [(1,)]


def test_results_that_are_not_alike(pair: Pair) -> None:
    case, first, second = pair
    second["out"] = second["out"][:3]
    with pytest.raises(ValueError, match=r"out is uint16 \[4, 1, 32\] in one of the twins"):
        leaks(first, second, case)
    with pytest.raises(ValueError, match="case tiny has no twin"):
        leaks(first, first, spec())
    second["out"] = first["out"].astype(np.float64)
    with pytest.raises(ValueError, match="must be alike"):
        leaks(first, second, case)
