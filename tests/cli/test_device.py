"""`flamia-ref device probe`."""

import json
from pathlib import Path

import pytest

from flamia_ref import cli
from tests.device import programs


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


def test_the_help_says_what_was_never_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "device", "probe", "--help")
    assert code == 0
    said = " ".join(output.split())
    assert "Probes were run on sm_90a alone" in said
    assert "Blackwell among them, were compiled but never run" in said


def test_a_confirmed_probe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nvcc = programs.write_nvcc(tmp_path)
    given = ("--only", "cvt.rn.satfinite.e4m3", "--rows", 1, "--nvcc", nvcc)
    file = tmp_path / "report.json"
    code, output, errors = run(capsys, "device", "probe", *given, "--json", file)
    assert (code, errors) == (0, "")
    assert "1 confirmed; 4294967296 results compared, 0 mismatches" in output
    assert json.loads(file.read_text())["exit_code"] == 0
    code, output, _ = run(capsys, "device", "probe", *given, "--json")
    assert json.loads(output)["schema"] == "flamia-ref device probe"


def test_a_refuted_probe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nvcc = programs.write_nvcc(tmp_path, fault="a fault")
    given = ("--only", "cvt.rn.satfinite.e4m3", "--rows", 1, "--nvcc", nvcc)
    code, output, _ = run(capsys, "device", "probe", *given)
    assert code == 1
    assert "    expected: 0x" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nvcc", "no-such-program"), "'no-such-program' is no program; name an nvcc"),
        (("--arch", "blackwell"), "unknown architecture 'blackwell'"),
        (("--rows", "many"), "argument --rows: invalid int value"),
        (("--rows", "0"), "rows is 0; it must be 1 to 100000000"),
        (("--seed", "-1"), "seed is -1; it must be 0 or more"),
        (("--keep", ""), "keep is an empty name; name a folder"),
        (("--only", "wgma"), "no probe is named like 'wgma'; flamia-ref device probe --list names"),
        (("--compile-only", "--rows", "100000"), "--compile-only runs nothing; leave out --rows"),
        (("--compile-only", "--seed", "0"), "--compile-only runs nothing; leave out --seed"),
        (("--compile-only", "--exhaustive"), "runs nothing; leave out --exhaustive"),
        (("--list", "--compile-only", "--keep", "x"), "leave out --compile-only, --keep"),
        (("--list", "--arch", "sm_90a", "--only", "tcgen05"), "no probe of sm_90a is named like"),
        (("--json", "no/such/folder/x.json"), "there is no folder"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, output, errors = run(capsys, "device", "probe", *arguments)
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


def test_no_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nvcc = programs.write_nvcc(tmp_path, capability=None)
    code, output, errors = run(capsys, "device", "probe", "--nvcc", nvcc)
    assert (code, output) == (2, "")
    assert (
        errors
        == "flamia-ref: no GPU to probe (no CUDA device: none found); --compile-only needs none\n"
    )


def test_the_names_of_probes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # neither an nvcc nor a GPU is asked
    code, output, errors = run(capsys, "device", "probe", "--list", "--arch", "sm_90a")
    assert (code, errors) == (0, "")
    assert output.startswith("sm_90a: 35 probes\n    cvt.rn.f16.f32\n")
    assert "    wgmma.k32.e4m3.e5m2.f16\n" in output
    given = ("--list", "--only", "*.mxf4.*", "--only", "wgmma.k8", "--json")
    code, output, _ = run(capsys, "device", "probe", *given)
    assert code == 0
    assert {name: len(found) for name, found in json.loads(output)["probes"].items()} == {
        "sm_90a": 1,
        "sm_100a": 1,
        "sm_103a": 1,
        "sm_120a": 1,
        "sm_121a": 1,
    }


def test_compiling_the_programs_of_some_probes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nvcc = programs.write_nvcc(tmp_path, capability=None)
    given = ("--compile-only", "--only", "wgmma", "--nvcc", nvcc)
    code, output, _ = run(capsys, "device", "probe", *given)
    assert code == 0
    assert "wgmma.cu for sm_90a  compiled\n1 compiled; 0 results compared" in output


def test_names_that_no_probe_of_the_gpu_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nvcc = programs.write_nvcc(tmp_path)
    code, output, errors = run(capsys, "device", "probe", "--only", "tcgen05", "--nvcc", nvcc)
    assert (code, output) == (2, "")
    assert "no probe of sm_90a is named like 'tcgen05'" in errors
