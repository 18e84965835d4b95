"""golden_case as users run it: pytest in a process of its own, in an empty folder."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

from tests.golden.packs import FIRST, RECIPE, SECOND
from tests.repository.layout import ROOT

KERNELS = """
def right(case):
    return {name: x.copy() for name, x in case.tensors.items() if name not in ("q", "k", "v", "dout")}

def wrong(case):
    results = right(case)
    results["q.scales"][1, 0, 0] += 1
    return results

def raising(case):
    def kernel(q, k, v, **arguments):
        raise OSError("no device")

    return kernel
"""

TEST = """
import my_kernels

def test_kernel(golden_case):
    golden_case.check(my_kernels.{}(golden_case.case))
"""


def run(folder: Path, *arguments: str, kernel: str = "right", status: int = 0) -> str:
    """Run pytest and return what it printed."""
    (folder / "my_kernels.py").write_text(KERNELS)
    (folder / "test_mine.py").write_text(TEST.format(kernel))
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "CI": "1", "COLUMNS": "200"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-W", "error", "-m", "pytest", "-p", "flamia_ref.pytest_plugin"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-q", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def test_the_first_line_of_a_failure_says_it_all(made: Path, tmp_path: Path) -> None:
    printed = run(
        tmp_path, f"--flamia-pack={made}", "--flamia-cases=tiny", kernel="wrong", status=1
    )
    (line,) = [one for one in printed.splitlines() if one.startswith("FAILED ")]
    for part in (
        f"test_mine.py::test_kernel[{FIRST}] - CaseFailed: q.scales: bit mismatch, 1 of 74 elements",
        "document 0, head 0, token 1, ",
        "block 0",
        "scale expected 0x",
    ):
        assert part in line
    assert "first departs at q.scales; every stage that leads to it is equal" in printed
    assert "Traceback" not in printed


def test_cases_reports_and_properties(made: Path, tmp_path: Path) -> None:
    files = ("--flamia-report-json=report.json", "--flamia-html=report.html", "--junitxml=j.xml")
    printed = run(tmp_path, f"--flamia-pack={made}", *files, kernel="wrong", status=1)
    assert "report.json: 2 cases checked" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert [case["name"] for case in report["cases"]] == [FIRST, SECOND]
    assert (report["passed"], report["subject"]) == (False, "the given arrays")
    html = (tmp_path / "report.html").read_text()
    assert html.count(FIRST) >= 1
    found = {}
    for test in ET.parse(tmp_path / "j.xml").iter("testcase"):
        pairs = [(one.attrib["name"], one.attrib["value"]) for one in test.iter("property")]
        found[test.attrib["name"]] = dict(pairs)
    first = found[f"test_kernel[{FIRST}]"]
    diagnosis = first.pop("diagnosis", "")
    assert first == {
        "recipe": RECIPE,
        "numerics version": "1",
        "evidence": "assumed",
        "status": "bit mismatch",
        "departs": "q.scales",
    }
    assert "\n" not in diagnosis


def test_under_xdist_there_is_one_report_with_all_cases(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    for folder, more in (("one", ()), ("two", ("-p", "xdist", "-n", "2"))):
        printed = run(
            tmp_path / folder,
            f"--flamia-pack={made}",
            "--flamia-report-json=report.json",
            "--flamia-html=report.html",
            *more,
        )
        assert "2 passed" in printed
        assert printed.count("report.json: 2 cases checked") == 1
    for name in ("report.json", "report.html"):
        one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
        assert one == two, name


@pytest.mark.parametrize("form", ["toml", pytest.param("json", marks=pytest.mark.nightly)])
def test_expectations(made: Path, tmp_path: Path, form: str) -> None:
    expected = {
        "tiny": {"outcome": "xfail", "reason": "Q is wrong"},
        "*-poison.*": {"outcome": "skip", "reason": "no NaN here"},
    }
    file = tmp_path / f"expected.{form}"
    tables = (
        f'["{n}"]\n' + "".join(f'{k} = "{x}"\n' for k, x in one.items())
        for n, one in expected.items()
    )
    file.write_text(json.dumps(expected) if form == "json" else "".join(tables))
    known = (f"--flamia-pack={made}", f"--flamia-golden-expect={file}", "-rxs")
    printed = run(tmp_path, *known, kernel="wrong")
    assert "1 skipped, 1 xfailed" in printed
    assert "Q is wrong" in printed
    assert "no NaN here" in printed
    if form == "json":
        return
    # Not run at all: that was not expected.
    assert "OSError: no device" in run(tmp_path, *known, kernel="raising", status=1)


@pytest.mark.nightly
def test_a_case_that_was_repaired_is_told_so(made: Path, tmp_path: Path) -> None:
    file = tmp_path / "expected.toml"
    file.write_text('["*"]\noutcome = "xfail"\nreason = "Q is wrong"\n')
    known = (f"--flamia-pack={made}", f"--flamia-golden-expect={file}")
    assert "[XPASS(strict)] Q is wrong" in run(tmp_path, *known, status=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--flamia-cases=tinny",), "unknown case 'tinny'; did you mean 'tiny'"),
        pytest.param(
            ("--flamia-golden-expect=none.toml",),
            "cannot read none.toml",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            ("--flamia-html=none/x.html",),
            "cannot write none/x.html: there is no folder none",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_wrong_options_are_named(
    made: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    status = 4 if "html" in arguments[0] else 2
    printed = run(tmp_path, f"--flamia-pack={made}", *arguments, status=status)
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.nightly
def test_the_ini_file_may_be_elsewhere(made: Path, tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "pack").symlink_to(made)
    (tmp_path / "pytest.ini").write_text("[pytest]\nflamia_pack = pack\n")
    assert "1 passed" in run(tmp_path / "inside", "--flamia-cases=tiny", "test_mine.py")


SEVERAL = """
import pytest
from flamia_ref import golden
from flamia_ref.golden.simulator import numpy_kernel

def test_kernel(golden_case):
    assert golden_case.check(numpy_kernel).passed

def test_results(golden_case):
    x, spec = golden_case.inputs(), golden_case.spec
    assert x["q"].dtype.name == "bfloat16"
    assert spec.causal
    assert golden_case.operands()["q.codes"].dtype.name == "uint8"
    out, lse = (golden_case.case.tensors[name].copy() for name in ("out", "lse"))
    assert golden_case.check({"out": out, "lse": lse}).passed

def test_needs_a_softcap(golden_case):
    from flamia_ref import kernels
    from flamia_ref.golden import comparison
    def check(*_, **__):
        raise kernels.Unsupported("my:kernel", "takes no softcap", golden_case.case.name)
    golden.check, before = check, golden.check
    try:
        golden_case.check(numpy_kernel)
    finally:
        golden.check = before

def test_nothing(golden_case):
    golden_case.check({})

def test_no_kernel(golden_case):
    golden_case.check(3)
"""


def test_results_in_hand_and_cases_that_a_kernel_does_not_take(made: Path, tmp_path: Path) -> None:
    (tmp_path / "test_several.py").write_text(SEVERAL)
    printed = run(
        tmp_path, f"--flamia-pack={made}", "--flamia-cases=tiny", "test_several.py", "-rs", status=1
    )
    assert "2 failed, 2 passed, 1 skipped" in printed
    assert "takes no softcap" in printed
    assert "hold no stage and no output" in printed
    assert "give a dict of arrays by name" in printed
    assert "Traceback" not in printed


def test_the_plugin_starts_fast(tmp_path: Path) -> None:
    """The limit is 0.2 s; what is measured here is half of it, for a machine that does other work too."""
    program = (
        "import time, pytest; before = time.perf_counter();"
        " import flamia_ref.pytest_plugin; print(time.perf_counter() - before)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    times = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        times.append(float(done.stdout))
    assert min(times) < 0.1, times


@pytest.mark.nightly
def test_the_plugin_adds_little_to_a_start(tmp_path: Path) -> None:
    (tmp_path / "test_empty.py").write_text("def test_empty():\n    pass\n")
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    spent: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(10):
        for name, more in (("without", []), ("with", ["-p", "flamia_ref.pytest_plugin"])):
            start = perf_counter()
            subprocess.run(
                [*command, *more], cwd=tmp_path, env=environment, capture_output=True, check=True
            )
            spent[name].append(perf_counter() - start)
    added = median(spent["with"]) - median(spent["without"])
    print(f"added to an empty pytest: {added:.3f} s, median of 10")
    assert added < 0.2, spent


def test_every_option_begins_with_flamia() -> None:
    text = (ROOT / "flamia_ref" / "pytest_plugin.py").read_text()
    for option in re.findall(r'addoption\(\s*"(--[a-z-]+)"', text):
        assert option.startswith("--flamia-")
