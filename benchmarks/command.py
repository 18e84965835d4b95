"""The command line: how long it takes to start."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.measure import Result, compare

ROOT = Path(__file__).resolve().parents[1]
# Without JAX, as in the CI of a kernel that has none.
NO_JAX = """
import runpy, sys
sys.modules["jax"] = None
runpy.run_module("flamia_ref.cli", run_name="__main__", alter_sys=True)
"""


def python(*arguments: str) -> Callable[[], object]:
    """A call of a new interpreter that must succeed."""

    def call() -> None:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip() or done.stdout}")

    return call


def start(seconds: float) -> Iterator[Result]:
    """``flamia-ref --help`` beside the interpreter alone."""
    yield compare(
        "help",
        "flamia-ref --help",
        python("-m", "flamia_ref.cli", "--help"),
        "python -c pass",
        python("-c", "pass"),
        seconds=seconds,
    )
