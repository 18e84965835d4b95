"""The smoke pack as users make it, and the example that checks a kernel in their CI."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flamia_ref import golden
from flamia_ref.golden.simulator import numpy_kernel

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


def test_the_example_test_passes_and_fails(smoke: Path, tmp_path: Path) -> None:
    for name in ("kernels.py", "test_my_kernel.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path / name)
    shutil.copytree(smoke, tmp_path / "pack")
    example = tmp_path / "test_my_kernel.py"
    text = example.read_text()
    assert "import simulator as my_kernel" in text
    example.write_text(text.replace("import simulator as", "import v_scale_off_by_one as"))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    failing = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert failing.returncode == 1, failing.stdout
    assert "8 failed" in failing.stdout
    assert "first departs at v.scales" in failing.stdout

    fast = text.replace(
        "kernels import simulator", "flamia_ref.golden.simulator import numpy_kernel"
    )
    example.write_text(fast)
    passing = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert passing.returncode == 0, passing.stdout
    assert "8 passed" in passing.stdout
