"""The command line: how long it takes to start, to make the smoke pack and to check it."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.measure import Result, compare

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "flamia-mxfp8-folded"
NUMPY_KERNEL = "flamia_ref.golden.simulator:numpy_kernel"
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


def golden(seconds: float) -> Iterator[Result]:
    """The smoke pack in numpy alone, JAX kept from being imported, beside importing numpy."""
    with tempfile.TemporaryDirectory() as folder:
        pack, copy = Path(folder, "pack"), Path(folder, "copy")
        options = ["--recipe", RECIPE, "--suite", "smoke", "--force"]
        calls: dict[str, Sequence[str]] = {
            "make": ("make", str(pack), *options),
            "check --kernel (numpy)": ("check", str(pack), "--kernel", NUMPY_KERNEL),
            "check --actual": ("check", str(pack), "--actual", str(copy)),
        }
        for what, arguments in calls.items():
            if what == "check --actual":
                shutil.copytree(pack, copy)
            yield compare(
                "golden",
                f"golden {what}, smoke suite",
                python("-c", NO_JAX, "golden", *arguments),
                'python -c "import numpy"',
                python("-c", "import numpy"),
                seconds=seconds,
            )
