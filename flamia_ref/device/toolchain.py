"""The user's CUDA compiler, and the programs that it makes of the sources in this package."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from flamia_ref._errors import line, shown
from flamia_ref.device.architectures import Architecture

_NO_DEVICE = 3  # the exit status of a program that finds no device, or has no kernel for its input
_COMPILE_SECONDS, _RUN_SECONDS = 600, 600
# An absolute path of two parts or more, and its last part.
_PART = r"[^\s/:;,'\"()<>\[\]]"
_PATH = re.compile(rf"(?<![\w.])(?:/{_PART}+)+/({_PART}+)")


class ProgramFailed(ValueError):
    """A program did not compile, or stopped with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """An nvcc and its CUDA release, (13, 0)."""

    path: str
    release: tuple[int, int]

    @property
    def version(self) -> str:
        """The release as text: "13.0"."""
        return ".".join(map(str, self.release))


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU as its driver describes it: the first one that CUDA shows."""

    name: str
    capability: str
    driver_cuda: str
    runtime_cuda: str


def find_compiler(given: str | os.PathLike[str] | None = None) -> Compiler:
    """The nvcc to use: `given`, or the one on PATH, or in CUDA_HOME or CUDA_PATH, or else in /usr/local/cuda.

    Raises ValueError where there is none, where such a variable leads to none, and where it does not say its
    release.
    """
    path = _compiler_path(given)
    try:
        told = _run([path, "--version"], 60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"{path} does not run: {_why(error)}") from error
    release = re.search(r"release (\d+)\.(\d+)", told)
    if release is None:
        raise ValueError(f"{path} --version names no CUDA release; is it nvcc?")
    return Compiler(path=path, release=(int(release[1]), int(release[2])))


def _compiler_path(given: str | os.PathLike[str] | None) -> str:
    if given is not None:
        found = shutil.which(given)
        if found is None:
            raise ValueError(f"{shown(os.fspath(given))} is no program; name an nvcc")
        return os.fspath(found)
    found = shutil.which("nvcc")
    if found is not None:
        return found
    for name in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(name)
        if home:
            found = shutil.which(str(Path(home) / "bin" / "nvcc"))
            if found is None:
                # Whoever sets it means that installation, not whichever else there may be.
                raise ValueError(
                    f"{name} is {shown(home)}, in which there is no bin/nvcc; "
                    "correct it, unset it, or name an nvcc with --nvcc"
                )
            return found
    found = shutil.which("/usr/local/cuda/bin/nvcc")
    if found is not None:
        return found
    raise ValueError(
        "nvcc was not found on PATH, in CUDA_HOME, or in /usr/local/cuda; install the CUDA toolkit "
        "(12.0 for sm_90a, 12.8 for Blackwell), or name its nvcc with --nvcc"
    )


def write_sources(folder: Path) -> None:
    """Write the CUDA sources of this package into a folder, which is made."""
    folder.mkdir(parents=True)
    for source in (resources.files("flamia_ref.device") / "cuda").iterdir():
        if source.name.endswith((".cu", ".cuh")):
            (folder / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")


def compile_program(
    compiler: Compiler, folder: Path, name: str, architecture: Architecture | None
) -> Path:
    """Compile `name`.cu of a folder of sources beside it; for the host alone without an architecture.

    Raises ProgramFailed with the compiler's first error.
    """
    command = [compiler.path, "-O2", "-std=c++17"]
    output = folder / name
    if architecture is not None:
        output = folder / f"{name}-{architecture.name}"
        target = architecture.name.removeprefix("sm_")
        command += [
            f"-DFLAMIA_ARCH={architecture.number}",
            f"-gencode=arch=compute_{target},code=sm_{target}",
        ]
    command += ["-o", str(output), str(folder / f"{name}.cu")]
    try:
        run = _run(command, _COMPILE_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise ProgramFailed(f"nvcc could not compile {name}.cu: {_why(error)}") from error
    if run.returncode:
        said = _said(_first_error(run), run.returncode, folder)
        raise ProgramFailed(f"nvcc {compiler.version} refuses {name}.cu: {said}")
    if not output.is_file():
        raise ProgramFailed(f"the compiler wrote no program for {name}.cu; is it nvcc?")
    return output


def _run(
    command: Sequence[str | Path], seconds: float, *, check: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a command and keep what it says, whatever its encoding."""
    return subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=check,
    )


def _first_error(run: subprocess.CompletedProcess[str]) -> str:
    said = [one for one in (run.stderr + run.stdout).splitlines() if one.strip()]
    errors = [one for one in said if re.search(r"error|fatal", one, re.IGNORECASE)]
    return (errors or said or [""])[0]


def _said(text: str, status: int, *folders: Path) -> str:
    """What a compiler or program said, as one line for the report, which names no folder of this machine.

    `folders` are ours, whose names may have spaces; of any other absolute path the last part stays.
    """
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    return line(_PATH.sub(r"\1", text)) or f"exit status {status}"


def _why(error: OSError | subprocess.SubprocessError) -> str:
    """Why a command did not run, without the command, whose paths are no part of a report."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it took more than {error.timeout:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit status {error.returncode}"
    return line(getattr(error, "strerror", None) or type(error).__name__)


def describe_device(compiler: Compiler, folder: Path) -> Device:
    """The GPU of this machine, as a program compiled into a folder of sources sees it.

    Raises ValueError where there is none.
    """
    program = compile_program(compiler, folder, "describe", None)
    what = "the program that looks for a GPU"
    try:
        run = _run([program], _RUN_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise ProgramFailed(f"{what} failed: {_why(error)}") from error
    said = _said(run.stderr, run.returncode, folder)
    if run.returncode == _NO_DEVICE:
        raise ValueError(f"no GPU to probe ({said}); --compile-only needs none")
    if run.returncode:
        raise ProgramFailed(f"{what} failed: {said}")
    try:
        device = Device(**json.loads(run.stdout))
    except (ValueError, TypeError, RecursionError) as error:
        raise ProgramFailed(f"{what} wrote {shown(run.stdout)}, not a description") from error
    if not all(isinstance(value, str) for value in dataclasses.astuple(device)):
        raise ProgramFailed(f"{what} wrote {shown(run.stdout)}, not a description")
    return device


def run_program(program: Path, inputs: Sequence[bytes], folder: Path) -> list[bytes]:
    """Run a program on some inputs, in one process; its results. Files go to a folder and are removed.

    Raises ProgramFailed where it stops with an error.
    """
    names: list[Path] = []
    try:
        for at, data in enumerate(inputs):
            pair = (folder / f"{at}.in", folder / f"{at}.out")
            names += pair
            pair[0].write_bytes(data)
        run = _run([program, *names], _RUN_SECONDS)
        if run.returncode:
            said = _said(run.stderr, run.returncode, folder, program.parent)
            raise ProgramFailed(f"{program.name} failed: {said}")
        missing = [name.name for name in names[1::2] if not name.is_file()]
        if missing:
            raise ProgramFailed(f"{program.name} ended well and wrote no {missing[0]}")
        return [name.read_bytes() for name in names[1::2]]
    except (OSError, subprocess.SubprocessError) as error:
        raise ProgramFailed(f"{program.name} failed: {_why(error)}") from error
    finally:
        for name in names:
            # A program may have made a folder of that name; what stays goes with the run's own folder.
            with contextlib.suppress(OSError):
                name.unlink(missing_ok=True)
