"""The headers compiled once: a harness under the sanitizers, and the examples by CMake."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from flamia_ref.golden.headers import include_dir

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).parent
EXAMPLES = ROOT / "examples" / "cpp"
CACHE = ROOT / ".cache" / "cpp"

Command = tuple[str | Path, ...]
Run = Callable[..., subprocess.CompletedProcess[str]]


def tool(*names: str) -> str:
    """The first of some programs that is there. Without, skip; in CI, where it is required, fail."""
    for name in names:
        if found := shutil.which(name):
            return found
    reason = f"none of {', '.join(names)} is installed"
    if os.environ.get("FLAMIA_REQUIRE_CPP"):
        pytest.fail(f"{reason}, and FLAMIA_REQUIRE_CPP is set")
    pytest.skip(reason)


def done(*command: str | Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program to its end, within bounds of time and memory."""
    # A size that a file merely claims must never be allocated.
    bounds = {"ASAN_OPTIONS": "max_allocation_size_mb=256:detect_leaks=0"}
    return subprocess.run(
        list(map(str, command)),
        input=text,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **bounds, "PYTHONPATH": str(ROOT)},
    )


def built(name: str, sources: Iterable[Path], build: Callable[[Path], Iterable[Command]]) -> Path:
    """Return a folder with what some commands make of sources, as they are now.

    It is kept until one of them, a header, the compiler or a command changes: compiling takes longer
    than all tests. Of several processes one builds, the others wait.
    """
    headers = sorted(include_dir().rglob("*.hpp"))
    commands = [list(map(str, command)) for command in build(Path("HERE"))]
    versions = [done(command[0], "--version").stdout for command in commands]
    key = hashlib.sha256(repr((commands, versions)).encode())
    for path in (*headers, *sources):
        key.update(path.read_bytes())
    folder = CACHE / f"{name}-{key.hexdigest()[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for old in CACHE.glob(f"{name}-*"):
                shutil.rmtree(old)
            scratch = CACHE / f"{name}-building"
            scratch.mkdir()
            for command in build(scratch):
                result = done(*command)
                assert result.returncode == 0, result.stdout + result.stderr
            scratch.rename(folder)
    return folder


@pytest.fixture(scope="session")
def harness() -> Run:
    """Run harness.cpp with arguments."""
    compiler = tool("c++", "g++", "clang++")
    warnings = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror")
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    options = ("-std=c++17", "-O0", *warnings, *sanitizers, f"-I{include_dir()}")
    source = HERE / "harness.cpp"
    folder = built(
        "harness", [source], lambda to: [(compiler, *options, source, "-o", to / "harness")]
    )
    return lambda *arguments, text="": done(folder / "harness", *arguments, text=text)


@pytest.fixture(scope="session")
def examples() -> Path:
    """The folder of the examples' programs, built as their CMakeLists.txt says."""
    cmake = tool("cmake")
    tool("c++", "g++", "clang++")
    tool("make", "ninja")
    options = (
        f"-DPython3_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=Debug",
        "-DCMAKE_CXX_FLAGS=-Werror -g0",
    )
    return built(
        "examples",
        sorted(path for path in EXAMPLES.iterdir() if path.is_file()),
        lambda to: [
            (cmake, "-S", EXAMPLES, "-B", to, *options),
            (cmake, "--build", to, "--parallel", "2"),
        ],
    )
