"""Instructions as data: against a table by another hand, and what rows say of a wrong number."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref.arithmetic import INSTRUCTIONS, operands, products
from flamia_ref.arithmetic.instructions import Instruction, Result, Summation
from flamia_ref.evidence import Evidence
from flamia_ref.formats import FORMATS
from tests.arithmetic.product_rows import Case, adversarial, arguments, results
from tests.arithmetic.test_products_oracles import ALL, Recorded, formats, rows
from tests.independent import machine, tensor_cores

ROOT = Path(__file__).parents[2]

RESULTS = {
    Result.FLOAT32: machine.FLOAT32,
    Result.FLOAT32_13: machine.FLOAT32_OF_14_BITS,
    Result.FLOAT16: machine.FLOAT16,
}
FUSED = {name: x for name, x in INSTRUCTIONS.items() if x.summation is Summation.FUSED}


def test_every_instruction_is_there() -> None:
    assert set(FUSED) == set(tensor_cores.INSTRUCTIONS)
    assert set(INSTRUCTIONS) - set(FUSED) == {"exact", "float32"}


@pytest.mark.parametrize("name", FUSED)
def test_the_numbers_are_those_of_the_source(name: str) -> None:
    ours, theirs = FUSED[name], tensor_cores.INSTRUCTIONS[name]
    rules = machine.Rules(
        terms=ours.terms or 0,
        fraction_bits=ours.fraction_bits,
        floor=ours.exponent_floor,
        output=RESULTS[ours.result],
        scaled=bool(ours.scalings) and ours.group == 1,
        group=0 if ours.group == 1 else ours.group,
    )
    assert rules == theirs.rules
    assert set(ours.operand_formats) == set(theirs.formats)
    assert len(theirs.formats) == 1 or ours.same_formats == theirs.same_formats
    assert {(x.format, x.block) for x in ours.scalings} == set(theirs.scales)


@pytest.mark.parametrize("rules", INSTRUCTIONS.values(), ids=list(INSTRUCTIONS))
def test_an_instruction_is_complete(rules: Instruction) -> None:
    assert INSTRUCTIONS[rules.name] is rules
    assert set(rules.operand_formats) <= set(FORMATS)
    assert set(rules.scale_formats) <= {"e8m0", "ue4m3"}
    assert rules.source
    assert rules.evidence
    assert set(rules.evidence.values()) <= set(Evidence)
    assert (rules.terms is not None) == (rules.summation is Summation.FUSED)
    assert (rules.result is Result.FLOAT16) == rules.name.endswith(".f16out")
    if rules.terms:
        assert rules.terms % rules.group == 0
        assert all(rules.terms % scaling.block == 0 for scaling in rules.scalings)
        assert all(scaling.block % rules.group == 0 for scaling in rules.scalings)
    hash(rules)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rules.terms = 1


@pytest.mark.parametrize("name", FUSED)
def test_nothing_simulated_is_called_measured(name: str) -> None:
    """Measured: wgmma and mma.sync on an H200 (the committed report), finite data of wmma on a B200 into float32."""
    evidence = FUSED[name].evidence
    if name.startswith(("sm90.wgmma.", "sm90.mma.")):
        assert set(evidence.values()) <= {Evidence.MEASURED, Evidence.DERIVED}
    elif name in ("sm100.mma.f16", "sm100.mma.bf16"):
        assert evidence["special_values"] is Evidence.SIMULATED
        assert evidence["exponent_floor"] is not Evidence.MEASURED
    else:
        assert Evidence.MEASURED not in evidence.values()
    if "mxf" in name:
        assert evidence["exponent_floor"] is Evidence.ASSUMED


def test_what_is_called_measured_on_sm90_is_in_the_report() -> None:
    """Each of these instructions has a probe in the report from the device, confirmed."""
    text = (ROOT / "docs" / "evidence" / "probe-sm90-h200.json").read_text(encoding="utf-8")
    confirmed = {
        outcome["model"]
        for report in json.loads(text)["reports"]
        for outcome in report["outcomes"]
        if outcome["status"] == "confirmed" and outcome["results"] > 1_000_000
    }
    assert {name for name in FUSED if name.startswith("sm90.")} <= confirmed


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sm100.mma.fp8", "1793 of 5000"),
        ("sm100.mma.fp8.f16out", "1793 of 5000"),
        ("sm90.mma.fp8", "sm90.wgmma.fp8"),
        ("sm90.wgmma.sp.f16", "sparse"),
        ("sm100.tcgen05.ws.f16", ".ws"),
        ("sm100.tcgen05.f16.ws", ".ws"),
        ("sm100.tcgen05.cta_group::2.f16", "cta_group::2"),
        ("sm100.tcgen05.i8", "integer"),
        ("sm103.tcgen05.mxf4nvf4", "no model of this device"),
        ("sm121.mma.mxf4nvf4", "no model of this device"),
    ],
)
def test_what_has_no_model_is_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match="is refused: ") as raised:
        products.fused_dot(
            np.zeros((1, 32), np.uint8), np.zeros((1, 32), np.uint8), np.zeros(1, np.uint32), name
        )
    text = str(raised.value)
    assert reason in text
    assert "\n" not in text
    assert name not in INSTRUCTIONS


def test_a_product_of_the_widest_formats_fits_an_int32() -> None:
    """Sixteen cut products, each below 4 * 2^F, are added in an int32; none is shifted left."""
    for rules in FUSED.values():
        if rules.group == 1:
            widest = max(FORMATS[name].mantissa_bits for name in rules.operand_formats)
            assert rules.fraction_bits >= 2 * widest
            largest = (2 - 2.0**-widest) ** 2
            assert 16 * int(largest * 2**rules.fraction_bits) < 2**31


# How many rows of a file the engine gets wrong with a wrong number. Two other implementations, that
# of the files' maker and tests/independent, count the same (tests/independent/test_machine.py).
WRONG = {
    "tcgen05_mxf8f6f4_e4m3_e4m3_ue8m0": {
        "fraction_bits - 1": 1243,
        "fraction_bits + 1": 941,
        "exponent_floor - 1": 7,
        "exponent_floor + 1": 17,
    },
    "tcgen05_mxf4nvf4_block16_ue4m3": {
        "fraction_bits - 1": 292,
        "fraction_bits + 1": 271,
        "group / 2": 121,
    },
    "tcgen05_f16kind_bf16_bf16_f32": {
        "fraction_bits - 1": 559,
        "fraction_bits + 1": 426,
        "exponent_floor - 1": 8,
        "exponent_floor + 1": 12,
        "terms / 2": 666,
    },
}


def changed(rules: Any, change: str, fields: dict[str, str]) -> Any:
    """Rules with a number changed as `change` says."""
    field, operation, number = change.split()
    field = fields.get(field, field)
    value = getattr(rules, field)
    value = value // 2 if operation == "/" else value + int(operation + number)
    return dataclasses.replace(rules, **{field: value})


def run_with(rules: Instruction, patch: pytest.MonkeyPatch, given: dict[str, Any]) -> Any:
    """`fused_dot` with other rules by the name of an instruction."""
    wrong = {rules.name: rules}
    patch.setattr(operands, "INSTRUCTIONS", wrong)
    patch.setattr(products, "INSTRUCTIONS", wrong)
    with np.errstate(all="ignore"):
        return products.fused_dot(**given)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        pytest.param(file, change, id=f"{file.name}-{change}")
        for file in ALL
        for change in WRONG.get(file.name, ())
    ],
)
def test_recorded_rows_show_a_wrong_number(
    file: Recorded, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, recorded = rows(file)
    rules = changed(INSTRUCTIONS[file.instruction], change, {})
    got = run_with(rules, monkeypatch, given | formats(file))
    assert int((got != recorded[:, 0]).sum()) == WRONG[file.name][change]


CASES = [
    Case(instruction="sm80.mma.bf16", a="bf16", b="bf16"),
    Case(instruction="sm90.wgmma.fp8", a="e4m3", b="e5m2"),
    Case(instruction="sm90.wgmma.f16.f16out", a="fp16", b="fp16"),
    Case(instruction="sm100.tcgen05.mxf4", a="e2m1", b="e2m1", scale_format="e8m0"),
]


CHANGES = ("fraction_bits - 1", "exponent_floor - 1", "exponent_floor + 1", "terms / 2")


@pytest.mark.parametrize(
    ("case", "change"),
    [*((case, change) for case in CASES for change in CHANGES), (CASES[-1], "group / 2")],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_the_engine_follows_its_data(
    case: Case, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a wrong number it gives what the slow machine gives with the same wrong number."""
    given, right = adversarial(case)
    given = given[::3]
    theirs = changed(case.rules, change, {"exponent_floor": "floor"})
    ours = changed(INSTRUCTIONS[case.instruction], change, {})
    got = run_with(ours, monkeypatch, arguments(given, case))
    wanted = results(given, case, theirs)
    np.testing.assert_array_equal(got, wanted)
    if "floor" not in change:
        assert (wanted != right[::3]).any()
