"""The graph of stages is in the order of the dataflow and complete."""

import numpy as np
import pytest

from flamia_ref.attention import FORWARD_STAGES
from flamia_ref.golden.dataflow import OUTPUTS, STAGES, TRACE, places, suspects, visible_pairs
from tests.golden.packs import spec

ORDER = list(STAGES)


def test_every_stage_of_the_simulator_is_there() -> None:
    assert set(TRACE) == set(FORWARD_STAGES)
    assert OUTPUTS == ("out", "lse")


def test_parents_come_before_their_children() -> None:
    for stage in STAGES.values():
        for parent in stage.parents:
            assert ORDER.index(parent) < ORDER.index(stage.name)


def test_scales_come_before_their_codes() -> None:
    for stage in STAGES.values():
        if stage.scales is not None:
            assert ORDER.index(stage.scales) < ORDER.index(stage.name)


def test_shapes_are_those_of_the_documentation() -> None:
    shapes = {name: place.shape for name, place in places(spec(head_dim=160)).items()}
    assert shapes["cu_seqlens"] == (4,)
    assert shapes["q"] == shapes["q.codes"] == shapes["o"] == shapes["out"] == (37, 2, 160)
    assert shapes["q.scales"] == (37, 2, 1)
    assert shapes["k"] == shapes["v.codes"] == (37, 1, 160)
    assert shapes["v.scales"] == (37, 1, 1)
    assert shapes["row_max"] == shapes["row_sum"] == shapes["lse"] == (2, 37)
    assert [shapes[f"s.{d}"] for d in range(3)] == [(2, 2, 2), (2, 0, 0), (2, 35, 35)]
    assert [shapes[f"p.o.scales.{d}"] for d in range(3)] == [(2, 2, 1), (2, 0, 0), (2, 35, 2)]
    assert shapes["p.o.codes.2"] == shapes["p.2"] == (2, 35, 35)
    # 160 channels are 5 blocks, which is 2 tiles of 4.
    tiled = [shapes[f"q.scales.tiled.{d}"] for d in range(3)]
    assert tiled == [(2, 1, 2, 512), (2, 0, 2, 512), (2, 1, 2, 512)]


def test_a_stage_with_nothing_given_before_it_has_all_suspects() -> None:
    assert suspects("out", frozenset({"out", "lse"})) == (
        "q.scales",
        "q.codes",
        "k.scales",
        "k.codes",
        "v.scales",
        "v.codes",
        "s",
        "row_max",
        "p",
        "p.o.scales",
        "p.o.codes",
        "row_sum",
        "o",
    )


def test_a_given_stage_hides_what_is_behind_it() -> None:
    given = frozenset({"s", "v.scales", "v.codes", "out"})
    assert suspects("out", given) == ("row_max", "p", "p.o.scales", "p.o.codes", "row_sum", "o")
    assert suspects("lse", frozenset({"row_max", "row_sum"})) == ()


def test_a_fault_in_lse_alone_does_not_suspect_v() -> None:
    found = suspects("lse", frozenset({"out"}))
    assert "row_sum" in found
    assert not {"v.codes", "p.o.codes", "o"} & set(found)


@pytest.mark.parametrize("causal", [True, False])
def test_visible_pairs(causal: bool) -> None:
    case = spec(causal=causal)
    seen = visible_pairs(case, places(case)["s.2"])
    for query in range(35):
        for key in range(35):
            assert seen[query, key] == (not causal or key <= query)
    assert visible_pairs(case, places(case)["s.1"]).shape == (0, 0)
    assert seen.dtype == np.bool_
