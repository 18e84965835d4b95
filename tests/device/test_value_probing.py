"""Probes of conversions and special functions against devices that are none, some of them recorded ones."""

import dataclasses
import struct

import numpy as np
import pytest

from flamia_ref.device import value_probing
from flamia_ref.device.architectures import ARCHITECTURES
from flamia_ref.device.outcomes import Outcome, Status
from flamia_ref.device.probes import ConversionProbe, SpecialProbe, probes
from flamia_ref.device.toolchain import ProgramFailed
from flamia_ref.device.value_probing import probe_conversion, probe_special
from tests.device import programs

BLACKWELL = {probe.name: probe for probe in probes(ARCHITECTURES["sm_100a"])}
RECORDED = (
    "cvt.rn.satfinite.e4m3x2.f32",
    "cvt.rn.satfinite.e5m2x2.f32",
    "cvt.rn.satfinite.e2m1x2.f32",
    "cvt.rn.satfinite.e2m3x2.f32",
    "cvt.rn.satfinite.e3m2x2.f32",
    "cvt.rz.ue8m0x2.f32",
    "cvt.rp.ue8m0x2.f32",
    "cvt.rz.satfinite.ue8m0x2.f32",
    "cvt.rp.satfinite.ue8m0x2.f32",
)
STOCHASTIC = [name for name in BLACKWELL if name.startswith("cvt.rs")]


def conversion(name: str) -> ConversionProbe:
    probe = BLACKWELL[name]
    assert isinstance(probe, ConversionProbe)
    return probe


def special_outcome(name: str, fault: str | None = None) -> Outcome:
    probe = BLACKWELL[name]
    assert isinstance(probe, SpecialProbe)
    run = programs.runner("special", "sm_100a", fault)
    return probe_special(probe, run, capability="10.0", rows=1000, seed=0, exhaustive=False)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_device_is_confirmed_on_every_float32(name: str) -> None:
    run = programs.runner("convert", "sm_100a")
    outcome = probe_conversion(conversion(name), run, rows=1, seed=0)
    assert outcome.status is Status.CONFIRMED
    assert outcome.results == 1 << 32


def test_one_tie_that_goes_the_other_way_is_found() -> None:
    run = programs.runner("convert", "sm_100a", "a fault")
    outcome = probe_conversion(conversion(RECORDED[0]), run, rows=1, seed=0)
    assert outcome.status is Status.REFUTED
    assert outcome.counterexample is not None
    expected, got = (int(outcome.counterexample[key], 16) for key in ("expected", "got"))
    assert abs(expected - got) == 1
    assert "runs of equal results" in outcome.reason


def test_more_changes_than_can_be_recorded_are_looked_at_one_by_one() -> None:
    def run(files: list[bytes]) -> list[bytes]:
        return [struct.pack("<5I", 1 << 31, 0, 0, 0x3F800000, 0x77)]

    outcome = probe_conversion(conversion(RECORDED[0]), run, rows=1, seed=0)
    assert outcome.status is Status.REFUTED
    assert outcome.counterexample == {"input": "0x3f800000", "expected": "0x38", "got": "0x77"}


def test_as_many_changes_that_are_all_right_are_no_confirmation() -> None:
    def run(files: list[bytes]) -> list[bytes]:
        return [struct.pack("<3I", 1 << 31, 0, 0)]

    with pytest.raises(ProgramFailed, match="2147483648 times"):
        probe_conversion(conversion(RECORDED[0]), run, rows=1, seed=0)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding(name: str) -> None:
    run = programs.runner("convert", "sm_100a")
    outcome = probe_conversion(conversion(name), run, rows=3000, seed=0)
    assert (outcome.status, outcome.results) == (Status.CONFIRMED, 3000)
    wrong = programs.runner("convert", "sm_100a", "a fault")
    outcome = probe_conversion(conversion(name), wrong, rows=3000, seed=0)
    assert outcome.status is Status.REFUTED
    assert outcome.counterexample is not None
    assert set(outcome.counterexample) == {"input", "random_bits", "expected", "got"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in BLACKWELL if ".approx" in name])
def test_a_special_function_is_compared_on_two_whole_binades(name: str) -> None:
    outcome = special_outcome(name)
    assert outcome.status is Status.CONFIRMED
    assert outcome.results > 1 << 23
    assert outcome.evidence == "assumed"  # measured on sm_90 alone


def test_one_wrong_result_of_a_special_function_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_probing, "_BINADES", (0x3F810000, 0x3F820000))
    assert special_outcome("lg2.approx.ftz.f32").status is Status.CONFIRMED
    outcome = special_outcome("lg2.approx.ftz.f32", "a fault")
    assert (outcome.status, outcome.mismatches) == (Status.REFUTED, 1)
    assert outcome.counterexample is not None
    assert outcome.counterexample["input"] == f"{programs.WRONG_INPUT:#010x}"


def test_a_function_without_a_model_is_not_run() -> None:
    probe = BLACKWELL["ex2.approx.ftz.f32"]
    assert isinstance(probe, SpecialProbe)
    probe = dataclasses.replace(probe, function="tanh", model="polynomial3")
    outcome = probe_special(
        probe, lambda files: [], capability="9.0", rows=1, seed=0, exhaustive=False
    )
    assert outcome.status is Status.NOT_RUN
    assert outcome.reason == "polynomial3 has no tanh"


def test_a_program_that_gives_too_few_results_failed() -> None:
    probe = conversion(STOCHASTIC[0])
    with pytest.raises(ProgramFailed, match="gave 1 results for 5 inputs"):
        probe_conversion(probe, lambda files: [np.zeros(1, "<u4").tobytes()], rows=5, seed=0)


@pytest.mark.parametrize(
    "data", [b"", b"abc", struct.pack("<I", 0), struct.pack("<4I", 1, 0, 0, 1)]
)
def test_results_that_are_no_runs_failed(data: bytes) -> None:
    with pytest.raises(ProgramFailed, match=r"not a count and pairs|words of 4"):
        probe_conversion(conversion(RECORDED[0]), lambda files: [data], rows=1, seed=0)


def test_runs_that_leave_out_the_first_inputs_failed() -> None:
    (data,) = programs.runner("convert", "sm_100a")([value_probing.request(9, 2, 0, 0)])
    (count,) = struct.unpack("<I", data[:4])
    data = struct.pack("<I", count - 1) + data[12:]
    with pytest.raises(ProgramFailed, match="says nothing of inputs below 0x"):
        probe_conversion(conversion(RECORDED[0]), lambda files: [data], rows=1, seed=0)
