"""A make that is stopped at any moment loses nothing: what was there stays, what is done is resumed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("kill", "interrupt", "full", "filled")


def stops(folder: Path, *arguments: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.sweep.stops", str(folder), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("kind", "first"),
    [("kill", 2), pytest.param("interrupt", 4, marks=pytest.mark.nightly), ("filled", 6)],
)
def test_stopped_at_some_steps(tmp_path: Path, kind: str, first: int) -> None:
    found = stops(tmp_path, kind, "force", str(first), "6")
    assert found["wrong"] == []


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", ["new", "force"])
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_at_any_step(tmp_path: Path, kind: str, scenario: str) -> None:
    found = stops(tmp_path, kind, scenario)
    assert found["wrong"] == []
    assert found["steps"] > 25
