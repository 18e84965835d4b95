"""`flamia-ref leak hunt`: what it prints, what it writes, and its exit status."""

import json
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import cli
from tests.leakage.planted import planted

SAFE = planted()
LEAKY = planted({"o.v": "col"})


def safe(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    print("a kernel may print")
    return SAFE(q, k, v, **keywords)


def leaky(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
    return LEAKY(q, k, v, **keywords)


def failing(q: Any, k: Any, v: Any, **_: Any) -> Any:
    raise RuntimeError("no device\nhere")


SHAPE = ("--lengths", "32", "--head-dim", "8", "--calls", "90", "--forward-only")


def run(capsys: pytest.CaptureFixture[str], kernel: str, *arguments: Any) -> tuple[int, str, str]:
    """Run the command in this process; return status, output and errors."""
    given = ("leak", "hunt", "--kernel", f"{__name__}:{kernel}", *SHAPE, *arguments)
    try:
        code = cli.main([str(one) for one in given])
    except SystemExit as stop:
        code = int(stop.code or 0)
    output, errors = capsys.readouterr()
    return code, output, errors


def test_a_safe_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = run(capsys, "safe")
    assert code == 0
    assert output.splitlines()[-1].startswith("NONE FOUND: ")
    assert "a kernel may print" in errors
    assert "a kernel may print" not in output


def test_a_leak(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "leaky", "--enough", 1)
    assert code == 1
    assert "leak: v[1, head 0, channel 0] from 0x0000 (0.0) to 0x3f80 (1.0) changes out[0" in output


def test_json_on_standard_output_and_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, output, _ = run(capsys, "leaky", "--enough", 1, "--json")
    assert (code, json.loads(output)["verdict"]) == (1, "leak")
    file = tmp_path / "report.json"
    run(capsys, "leaky", "--enough", 1, "--json", file)
    assert json.loads(file.read_text())["verdict"] == "leak"


def test_files_are_written_and_never_replaced_by_accident(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = {form: tmp_path / f"report.{form}" for form in ("junit", "html", "png")}
    options = [text for form, file in names.items() for text in (f"--{form}", file)]
    code, output, _ = run(capsys, "leaky", "--enough", 1, *options)
    assert code == 1
    assert all(f"wrote {file}" in output for file in names.values())
    assert names["html"].read_text().startswith("<!doctype html>")
    before = names["png"].read_bytes()
    code, output, errors = run(capsys, "safe", *options)
    assert (code, output) == (2, "")
    assert "exists; choose another name, or replace it with --force" in errors
    assert names["png"].read_bytes() == before
    assert run(capsys, "safe", *options, "--force")[0] == 0
    assert names["png"].read_bytes() != before


def test_two_results_in_one_file_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "report"
    code, output, errors = run(capsys, "safe", "--html", file, "--junit", file)
    assert (code, output) == (2, "")
    assert "two results are both to be" in errors
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "x"], "must be whole numbers with commas between them"),
        (["--calls", "0"], "calls is 0; it must be 1 or more"),
        (["--window", "4"], "must be two whole numbers"),
        (["--severity", "future"], "unknown severity 'future'"),
        (["--recipe", "cudnn-mxfp8"], "not allowed with argument"),
    ],
)
def test_wrong_arguments(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, output, errors = run(capsys, "safe", *arguments)
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


def test_a_kernel_that_fails_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = run(capsys, "failing")
    assert (code, output) == (2, "")
    assert "RuntimeError: no device here" in errors
    assert errors.count("\n") == 1


def test_shapes_that_show_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "map.png"
    code, output, _ = run(capsys, "safe", "--lengths", "1,1", "--png", picture)
    assert code == 2
    assert "INCONCLUSIVE" in output
    assert "not written, as there is no map of moves" in output
    assert not picture.exists()


def test_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["leak", "hunt", "--recipe", "cudnn-mxfp8", *SHAPE[2:], "--enough", "1"]
    assert cli.main(given) == 1
    assert "leak hunt in cudnn-mxfp8 (evidence assumed)" in capsys.readouterr().out
