"""`flamia-ref leak demo`: what it prints, what it writes, and what it loads."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import cli
from flamia_ref.leakage import demo as module

ROOT = Path(__file__).resolve().parents[2]
SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def ran(shown: module.Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has its result at once."""
    monkeypatch.setattr(module, "demo", lambda: shown)


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Run the command in this process; return status, output and errors."""
    try:
        code = cli.main([str(argument) for argument in ("leak", *arguments)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    output, errors = capsys.readouterr()
    return code, output, errors


def refused(result: tuple[int, str, str], message: str) -> None:
    code, output, errors = result
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


def process(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def test_a_process_of_its_own_without_jax(tmp_path: Path) -> None:
    program = """
import sys
from flamia_ref import cli
for name in ("jax", "matplotlib", "torch", "hypothesis"):
    sys.modules[name] = None
sys.exit(cli.main(["leak", "demo", "--picture", sys.argv[1]]))
"""
    done = process("-W", "error", "-c", program, tmp_path / "leak.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert "cudnn-mxfp8: v[16] = 1 changes out of tokens 0 to 15" in done.stdout
    assert (tmp_path / "leak.png").read_bytes().startswith(SIGNATURE)


@pytest.mark.usefixtures("ran")
def test_without_a_picture_no_file_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, errors = run(capsys, "demo")
    assert (code, errors) == (0, "")
    assert output.endswith("As expected: cudnn-mxfp8 leaks, and nothing else does.\n")
    assert not list(tmp_path.iterdir())
    code, output, errors = run(capsys, "demo", "--json")
    assert (code, errors) == (0, "")
    assert json.loads(output)["as_expected"] is True
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("ran")
def test_the_picture_and_the_json_as_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture, document = tmp_path / "leak.png", tmp_path / "leak.json"
    code, output, errors = run(capsys, "demo", "--picture", picture, "--json", document)
    assert (code, errors) == (0, "")
    assert output.endswith(f"wrote {picture}\n")
    assert picture.read_bytes().startswith(SIGNATURE)
    assert json.loads(document.read_text())["as_expected"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["leak.json", "leak.png"]


@pytest.mark.usefixtures("ran")
def test_an_existing_file_is_kept_unless_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "thesis.png"
    picture.write_text("the only copy")
    refused(run(capsys, "demo", "--picture", picture), "exists; choose another name, or replace it")
    assert picture.read_text() == "the only copy"
    link = tmp_path / "link.png"
    link.symlink_to(picture)
    refused(run(capsys, "demo", "--picture", link), "link.png exists")
    assert picture.read_text() == "the only copy"
    code, _, errors = run(capsys, "demo", "--picture", picture, "--force")
    assert (code, errors) == (0, "")
    assert picture.read_bytes().startswith(SIGNATURE)


def fail(*_: Any) -> None:
    raise AssertionError("work was done before the arguments were checked")


def test_bad_usage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "demo", fail)
    refused(run(capsys), "the following arguments are required: COMMAND")
    refused(run(capsys, "demo", "--recipe", "bf16-fa4"), "unrecognized arguments: --recipe")
    refused(run(capsys, "demo", "--picture"), "expected one argument")
    refused(run(capsys, "demo", "--picture", tmp_path), "it is a folder")
    refused(run(capsys, "demo", "--picture", tmp_path / "no/leak.png"), "there is no folder")
    refused(run(capsys, "demo", "--picture", tmp_path / ("x" * 300)), "name too long")
    both = tmp_path / "both"
    refused(
        run(capsys, "demo", "--picture", both, "--json", tmp_path / "." / "both"),
        "the picture and the JSON are both to be",
    )
    assert not both.exists()


@pytest.mark.parametrize("code", [1, 2])
@pytest.mark.usefixtures("ran")
def test_what_is_not_as_expected_decides_the_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(module.Demo, "exit_code", code)
    assert run(capsys, "demo")[0] == code


def test_the_help_says_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = run(capsys, "demo", "--help")
    assert code == 0
    words = " ".join(output.split())
    assert "Exit status: 0 all came out as known" in words
    assert "--picture FILE" in words
    assert "demo" in run(capsys, "--help")[1]


@pytest.mark.nightly
def test_under_two_seconds() -> None:
    # Processor time of the process: on a machine with nothing else to do that is what one waits.
    times = []
    for _ in range(3):
        start = os.times()
        assert process("-m", "flamia_ref.cli", "leak", "demo").returncode == 0
        end = os.times()
        times.append(
            end.children_user - start.children_user + end.children_system - start.children_system
        )
    assert min(times) < 2
