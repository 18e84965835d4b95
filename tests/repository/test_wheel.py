"""The built distribution, installed in an environment of its own, away from the checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import flamia_ref
from tests.repository.layout import MAPPED, ROOT, modules, package_folders, project
from tests.repository.test_text import files

pytestmark = pytest.mark.wheel

SETUPTOOLS = project()["tool"]["setuptools"]
LICENSE = f"flamia_ref-{flamia_ref.__version__}.dist-info/licenses/LICENSE"


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return what it printed; show that where the command fails."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def installed_name(path: Path) -> str:
    """Return where a file of the tree is in the wheel."""
    inside = path.relative_to(ROOT)
    return inside.as_posix() if inside.parts[0] == "flamia_ref" else f"flamia_ref/{inside}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist from what git has, and the wheel from the sdist."""
    source = tmp_path_factory.mktemp("source")
    for path in files():
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for name in MAPPED:
        (source / "flamia_ref" / name).symlink_to(f"../{name}")
    output = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", output, source, cwd=output)
    (built,) = output.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel without extras in an empty environment."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        folder / "bin/python",
    )
    run(*pip, "install", wheel, cwd=folder)
    return folder


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    expected = {installed_name(module.path) for module in modules()}
    tops = package_folders()
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = tops.get(package, ROOT.joinpath(*package.split(".")))
        expected |= {installed_name(path) for pattern in patterns for path in folder.glob(pattern)}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(expected)
    assert LICENSE in names


def test_every_package_imports_without_extras(environment: Path, tmp_path: Path) -> None:
    program = f"""
import importlib, sys
for name in {SETUPTOOLS["packages"]!r}:
    package = importlib.import_module(name)
    assert {str(environment)!r} in package.__file__, package.__file__
for name in ("formats", "leakage", "properties"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{{name}} is importable by its bare name")
"""
    run(environment / "bin/python", "-I", "-W", "error", "-c", program, cwd=tmp_path)


def test_the_command_is_installed(environment: Path, tmp_path: Path) -> None:
    assert "golden" in run(environment / "bin/flamia-ref", "--help", cwd=tmp_path)
