"""The smoke pack as users make it, and the example that checks a kernel in their CI."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flamia_ref import golden, kernels
from flamia_ref.golden.simulator import numpy_kernel
from flamia_ref.report import Status

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke") / "pack"
    golden.make(folder)
    return folder


def test_the_smoke_pack_is_small(smoke: Path) -> None:
    files = list(smoke.iterdir())
    assert sum(path.stat().st_size for path in files) == golden.load(smoke).manifest.size
    assert golden.load(smoke).manifest.size < 5_000_000


def test_the_simulator_passes_the_smoke_pack(smoke: Path) -> None:
    report = golden.check(smoke, numpy_kernel)
    assert report.passed, str(report)


@pytest.mark.parametrize(
    ("recipe", "cases"),
    [
        ("flamia-mxfp8-folded", "one-head-200.*"),
        pytest.param("flamia-mxfp8-folded", "*", marks=pytest.mark.nightly),
        pytest.param("cudnn-mxfp8", "*", marks=pytest.mark.nightly),
    ],
)
def test_a_wrong_backward_is_named_where_it_starts(
    smoke: Path, tmp_path: Path, recipe: str, cases: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    kernel = kernels.load("examples.kernels:delta_of_truncated_o")
    if recipe == "flamia-mxfp8-folded":
        pack = golden.load(smoke)
    else:
        golden.make(tmp_path / "pack", [recipe])
        pack = golden.load(tmp_path / "pack")
    report = golden.check(pack, kernel, cases=[cases], diagnose=False)
    for case in report.cases:
        assert (case.departs, case.suspects) == ("delta", ()), case.name
        wrong = {one.stage for one in case.tensors if one.status is not Status.PASS}
        differs = {one.stage for one in case.tensors if one.differing}
        # What follows is right, given this delta. dV is made of P and dO alone.
        assert wrong == {"delta"}
        assert {"delta", "ds", "dq", "dk"} <= differs
        assert not {"dp", "p.dv", "dv", "out", "lse"} & differs


def test_the_example_test_passes_and_fails(repository: Path) -> None:
    example = repository / "examples" / "test_my_kernel.py"
    text = example.read_text()
    assert "import simulator as my_kernel" in text
    example.write_text(text.replace("import simulator as", "import v_scale_off_by_one as"))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    failing = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=300
    )
    assert failing.returncode == 1, failing.stdout
    assert "2 failed" in failing.stdout
    assert "first departs at v.scales" in failing.stdout

    fast = text.replace(
        "examples.kernels import simulator", "flamia_ref.golden.simulator import numpy_kernel"
    )
    example.write_text(fast)
    passing = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, timeout=300
    )
    assert passing.returncode == 0, passing.stdout
    assert "2 passed" in passing.stdout


@pytest.fixture
def repository(made: Path, tmp_path: Path) -> Path:
    """A repository with the examples and a pack, but without settings of pytest."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(made, tmp_path / "pack")
    return tmp_path


def run_example(repository: Path, *options: str) -> str:
    """Run the example as the README shows it, and return what pytest printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "examples/test_my_kernel.py"],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_example_runs_as_it_is_in_this_checkout(repository: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", repository)
    assert "2 passed" in run_example(repository)


@pytest.mark.parametrize(
    ("mode", "checkout"),
    [
        ("importlib", True),
        ("prepend", False),
        pytest.param("importlib", False, marks=pytest.mark.nightly),
        pytest.param("prepend", True, marks=pytest.mark.nightly),
        pytest.param("append", True, marks=pytest.mark.nightly),
        pytest.param("append", False, marks=pytest.mark.nightly),
    ],
)
def test_the_example_is_found_in_every_mode(repository: Path, checkout: bool, mode: str) -> None:
    if checkout:
        shutil.copy(ROOT / "pyproject.toml", repository)
    assert "2 tests collected" in run_example(repository, f"--import-mode={mode}", "--collect-only")
