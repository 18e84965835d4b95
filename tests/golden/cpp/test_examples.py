"""The examples as a user builds them, and the command line: they say the same."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from flamia_ref import golden
from flamia_ref.golden.headers import include_dir
from flamia_ref.golden.stage import Role
from tests.golden.cpp.conftest import ROOT, done
from tests.golden.packs import FIRST


@pytest.fixture(scope="session")
def checked(
    examples: Path, made: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, subprocess.CompletedProcess[str]]:
    """What check_pack says of some tensors with a bit changed, one at a time, and "" of none."""
    folder = tmp_path_factory.mktemp("checked")
    case = golden.load(made)[FIRST]
    names = [name for name, place in case.places.items() if place.stage.role is not Role.INPUT]
    found = {}
    some = [name for name in names if case.tensors[name].size][::5]
    for name in ["", *some]:
        arguments = [name] if name else []
        given = done(examples / "toy_kernel", made, folder / f"broken-{name}", *arguments)
        found[name] = done(examples / "check_pack", made, folder / f"broken-{name}")
        # In memory and from the files that it wrote.
        assert (given.stdout, given.returncode) == (found[name].stdout, found[name].returncode)
    return found


def test_a_right_kernel_passes(checked: dict[str, subprocess.CompletedProcess[str]]) -> None:
    assert (checked[""].returncode, checked[""].stderr) == (0, "")
    assert checked[""].stdout.startswith(f"PASS {FIRST}: ")


def test_both_checks_name_the_stage_that_departs_first(
    checked: dict[str, subprocess.CompletedProcess[str]], made: Path
) -> None:
    places = golden.load(made)[FIRST].places
    assert len(checked) > 6
    for name, result in checked.items():
        if name:
            line, place = result.stdout.splitlines()[0], places[name]
            assert result.returncode == 1
            assert line.startswith(f"FAIL {FIRST}: first departs at {place.stage.name}: ")
            assert f"bit mismatch in '{name}', 1 of {math.prod(place.shape)} elements" in line


@pytest.mark.parametrize(
    "name", ["v.codes", pytest.param("s.2", marks=pytest.mark.nightly), "p.o.scales.2"]
)
def test_the_package_agrees(examples: Path, made: Path, tmp_path: Path, name: str) -> None:
    done(examples / "toy_kernel", made, tmp_path / "results", name)
    cpp = done(examples / "check_pack", made, tmp_path / "results")
    case = golden.load(made)[FIRST]
    report = golden.check(case, tmp_path / "results" / f"{FIRST}.safetensors", diagnose=False)
    assert (report.exit_code, cpp.returncode) == (1, 1)
    assert f"first departs at {report.cases[0].departs}: " in cpp.stdout.splitlines()[0]


@pytest.mark.nightly
def test_the_command_line_agrees(examples: Path, made: Path, tmp_path: Path) -> None:
    done(examples / "toy_kernel", made, tmp_path / "results", "v.codes")
    command = (sys.executable, "-m", "flamia_ref.cli", "golden", "check", made)
    python = done(*command, "--actual", tmp_path / "results")
    cpp = done(examples / "check_pack", made, tmp_path / "results")
    assert (python.returncode, cpp.returncode) == (1, 1)
    assert "v.codes" in python.stdout
    assert "first departs at v.codes" in cpp.stdout


@pytest.mark.parametrize("program", ["check_pack", "toy_kernel", "host_inputs"])
def test_bad_input_is_status_2(examples: Path, tmp_path: Path, program: str) -> None:
    assert done(examples / program).returncode == 2
    folder = [tmp_path / "results"] if program != "host_inputs" else []
    result = done(examples / program, tmp_path, *folder)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{program.replace('host', 'cuda')}: {tmp_path}")
    assert result.stderr.count("\n") == 1


def test_the_inputs_of_a_pack_are_made_anew(examples: Path, made: Path) -> None:
    result = done(examples / "host_inputs", made)
    assert result.returncode == 0, result.stderr
    expected = [
        f"{case} {name} {case.entry.tensors[name].sha256} same"
        for case in golden.load(made)
        for name in ("q", "k", "v", "dout")
    ]
    assert result.stdout.splitlines() == expected


def test_the_headers_are_found_from_anywhere(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flamia_ref.golden.headers"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.stdout == f"{include_dir()}\n"
    for name in ("pack.hpp", "inputs.hpp"):
        assert (include_dir() / "flamia_ref" / name).is_file()
