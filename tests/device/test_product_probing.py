"""Probes of matrix instructions against devices that are none."""

import dataclasses

import numpy as np
import pytest

from flamia_ref.device import shrinking
from flamia_ref.device.architectures import ARCHITECTURES
from flamia_ref.device.outcomes import Status
from flamia_ref.device.probes import ProductProbe, probes
from flamia_ref.device.product_probing import described, probe_product
from flamia_ref.device.tiles import Row, expected_of, tiles_of
from tests.device import machines, programs
from tests.device.test_operands import PRODUCTS

TF32 = next(one for one in probes(ARCHITECTURES["sm_90a"]) if one.name == "mma.k4.tf32.tf32.f32")
assert isinstance(TF32, ProductProbe)


def test_a_right_device_is_confirmed() -> None:
    outcome = probe_product(TF32, programs.runner("mma", "sm_90a"), rows=1, seed=0)
    assert outcome.status is Status.CONFIRMED
    # A tile of each of 14 families, of one step and of four.
    assert outcome.results == 14 * 2 * 16 * 8 == sum(seen for seen, _ in outcome.families.values())
    assert outcome.mismatches == 0
    assert outcome.counterexample is None
    assert outcome.model == "sm90.mma.tf32.k4"
    assert outcome.evidence in ("simulated", "measured")


@pytest.mark.parametrize("fault", ["one fraction bit fewer", "floor one lower"])
def test_a_wrong_device_is_refuted_with_a_small_counterexample(fault: str) -> None:
    outcome = probe_product(TF32, programs.runner("mma", "sm_90a", fault), rows=1500, seed=0)
    assert outcome.status is Status.REFUTED
    assert 0 < outcome.mismatches < outcome.results / 4
    found = outcome.counterexample
    assert found is not None
    assert found["seen_again"]
    assert found["steps"] == 1
    assert found["expected"] != found["got"]
    # A large term and a small one are enough: two products, or one and the accumulator.
    assert len(found["products"]) + (int(found["c"], 16) != 0) <= 2


def test_scales_of_a_counterexample_are_plain_where_they_can_be() -> None:
    probe = PRODUCTS["mma.mxf4nvf4.e2m1.e2m1.f32.block16.ue4m3"]
    run = programs.runner("mma", "sm_120a", "the other rounding")
    outcome = probe_product(probe, run, rows=1, seed=0)
    assert outcome.status is Status.REFUTED
    found = outcome.counterexample
    assert found is not None
    assert sum(scale != "0x38" for scale in found["a_scales"][0]) <= 2
    assert len(found["a_scales"][0]) == 4


def row(seed: int = 0) -> Row:
    rng = np.random.default_rng(seed)
    probe = PRODUCTS["wgmma.k16.bf16.bf16.f32"]
    a, b = (rng.integers(0x3F80, 0x4100, (4, probe.k)).astype(np.uint16) for _ in range(2))
    none = np.zeros((4, 0), dtype=np.uint8)
    return Row(a=a, b=b, a_scales=none, b_scales=none, c=0x3F800000)


def test_shrinking_leaves_what_matters_alone() -> None:
    """The planted reason: places 3 and 40 are both there."""
    given = row()
    wanted = {3: int(given.a.ravel()[3]), 40: int(given.a.ravel()[40])}

    def differs(rows: list[Row]) -> list[bool]:
        return [all(code in one.a for code in wanted.values()) for one in rows]

    found = shrinking.shrink(given, differs)
    assert found is not None
    assert sorted(found.a[found.a != 0].tolist()) == sorted(wanted.values())
    assert shrinking.products(found) == 2
    assert len(found.a) == 2  # the steps without them are gone
    assert found.c == 0


def test_shrinking_asks_for_one_shape_at_a_time() -> None:
    def differs(rows: list[Row]) -> list[bool]:
        assert len({one.a.shape for one in rows}) == 1
        return [True for _ in rows]

    found = shrinking.shrink(row(), differs)
    assert found is not None
    assert found.a.shape == (1, 16)
    assert not found.a.any()


def test_what_does_not_differ_again_is_said_so() -> None:
    assert shrinking.shrink(row(), lambda rows: [False for _ in rows]) is None

    calls = []

    def flickers(files: list[bytes]) -> list[bytes]:
        calls.append(len(files))
        right = programs.runner("mma", "sm_90a")(files)
        if len(calls) > 1:
            return right
        words = np.frombuffer(right[0], dtype="<u4").copy()
        words[5] ^= 1
        return [words.tobytes(), *right[1:]]

    outcome = probe_product(TF32, flickers, rows=1, seed=0)
    assert outcome.status is Status.REFUTED
    assert outcome.mismatches == 1
    assert outcome.counterexample is not None
    assert not outcome.counterexample["seen_again"]


def test_a_counterexample_is_written_in_hexadecimal() -> None:
    probe = TF32
    a = np.array([[0x3F800000, 0, 0, 0]], dtype=np.uint32)
    b = np.array([[0x40000000, 0, 0, 0]], dtype=np.uint32)
    none = np.zeros((1, 0), dtype=np.uint8)
    one = Row(a=a, b=b, a_scales=none, b_scales=none, c=0x3F800000)
    assert expected_of(probe, one) == 0x40400000  # 1 * 2 + 1
    assert described(probe, "spread", one, 7) == {
        "family": "spread",
        "steps": 1,
        "products": [["step 0", "k 0", "0x3f800000", "0x40000000"]],
        "c": "0x3f800000",
        "expected": "0x40400000",
        "got": "0x00000007",
    }


def test_a_row_is_placed_in_a_tile() -> None:
    given = row()
    tiles = tiles_of(PRODUCTS["wgmma.k16.bf16.bf16.f32"], [given, dataclasses.replace(given, c=5)])
    assert tiles.a.shape == (2, 4, 64, 16)
    assert np.array_equal(tiles.a[1, :, 0], given.a)
    assert np.array_equal(tiles.b[0, :, 0], given.b)
    assert not tiles.a[:, :, 1:].any()
    assert tiles.c[:, 0, 0].tolist() == [0x3F800000, 5]


def test_every_fault_has_a_name_and_changes_the_rules() -> None:
    rules = machines.INSTRUCTIONS["sm100.tcgen05.mxf4"].rules
    for name, fault in machines.FAULTS.items():
        assert fault(rules) != rules, name
