"""docs/device-probe.md and the recorded report say what is so."""

import json
import re
from pathlib import Path

import pytest

from flamia_ref.device import Plan
from flamia_ref.device.architectures import ARCHITECTURES
from flamia_ref.device.probes import probes

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "device-probe.md").read_text(encoding="utf-8")
REPORTS = json.loads((DOCS / "evidence" / "probe-sm90-h200.json").read_text())["reports"]
OUTCOMES = [outcome for report in REPORTS for outcome in report["outcomes"]]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_numbers_of_probes(name: str) -> None:
    row = next(
        line for line in PAGE.splitlines() if line.startswith("| `sm_") and f"`{name}`" in line
    )
    names, releases, counts, state = (cell.strip() for cell in row.strip("|").split("|"))
    at = names.replace("`", "").split(", ").index(name)
    architecture = ARCHITECTURES[name]
    assert releases.split(", ")[at] == ".".join(map(str, architecture.nvcc))
    assert int(counts.split(", ")[at]) == len(probes(architecture))
    assert ("never run" in state) == (not architecture.was_run)
    assert ("compared with the models of" in state) == (not architecture.own_model)


def test_the_report_is_of_sm_90a_and_has_no_mismatch() -> None:
    assert {report["architecture"] for report in REPORTS} == {"sm_90a"}
    assert {report["device"] for report in REPORTS} == {"NVIDIA H200"}
    assert all(outcome["status"] == "confirmed" for outcome in OUTCOMES)
    assert sum(outcome["mismatches"] for outcome in OUTCOMES) == 0
    total = sum(outcome["results"] for outcome in OUTCOMES)
    assert f"{total:,} results, no mismatch" in PAGE
    known = {probe.name for probe in probes(ARCHITECTURES["sm_90a"])}
    assert sorted(outcome["probe"] for outcome in OUTCOMES) == sorted(known)


@pytest.mark.parametrize(
    ("program", "accumulator", "said"),
    [
        ("wgmma", "f32", "7 x 1,089,536"),
        ("wgmma", "f16", "5 x 1,089,536"),
        ("mma", "", "8 x 1,096,704"),
        ("cvt", "", "11 x 2^32"),
    ],
)
def test_the_counts_of_the_report(program: str, accumulator: str, said: str) -> None:
    found = [
        outcome["results"]
        for outcome in OUTCOMES
        if outcome["probe"].startswith(f"{program}.")
        and (not accumulator or outcome["probe"].endswith(accumulator))
    ]
    assert len(set(found)) == 1
    written = "2^32" if found[0] == 1 << 32 else f"{found[0]:,}"
    assert f"{len(found)} x {written}" == said
    assert said in PAGE


def test_options() -> None:
    named = set(re.findall(r"`--([a-z-]+)", PAGE))
    fields = {field.replace("_", "-") for field in Plan.__dataclass_fields__}
    assert fields - {"architecture"} <= named | {"arch"}
