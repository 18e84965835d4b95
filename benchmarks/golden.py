"""Golden packs: making and checking the smoke suite, reading a large pack, what the plugin adds to pytest."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.command import NO_JAX, python
from benchmarks.measure import Result, compare
from flamia_ref._errors import Registry
from flamia_ref.golden import SUITES
from flamia_ref.golden.case_file import CaseFile
from flamia_ref.golden.header import PREFIX, canonical_header
from flamia_ref.golden.manifest import CaseEntry, TensorEntry

RECIPE = "flamia-mxfp8-folded"
NUMPY_KERNEL = "flamia_ref.golden.simulator:numpy_kernel"
TENSORS, TENSOR_BYTES = 16, 64 << 20  # 1 GB


def run(seconds: float) -> Iterator[Result]:
    """The smoke suite by the command line, the rate of reading, the start of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        yield from _smoke(Path(folder), seconds)
        yield _read(Path(folder), seconds)
        yield _plugin(Path(folder), seconds)


def _smoke(folder: Path, seconds: float) -> Iterator[Result]:
    """The smoke pack in numpy alone, JAX kept from being imported, beside importing numpy."""
    pack, copy = folder / "pack", folder / "copy"
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


def _read(folder: Path, seconds: float) -> Result:
    """All digests of a file of 1 GB beside reading it, from the disk where the system lets go of its copy."""
    path = folder / "large.safetensors"
    entry = _large(path)

    def plain() -> None:
        _forget(path)
        part = bytearray(1 << 20)
        with path.open("rb", buffering=0) as file:
            while file.readinto(part):
                pass

    def ours() -> None:
        _forget(path)
        CaseFile(path, entry).verify()

    return compare(
        "golden",
        f"read and verify a file of {entry.size / 1e9:.1f} GB, from disk",
        ours,
        "reading it",
        plain,
        seconds=seconds,
        work=entry.size,
        unit="bytes",
    )


def _forget(path: Path) -> None:
    """Ask the system to drop what it has of a file in memory."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _large(path: Path) -> CaseEntry:
    """Write a case file of equal tensors, and return its entry."""
    data = np.random.default_rng(0).bytes(TENSOR_BYTES)
    digest = hashlib.sha256(data).hexdigest()
    tensors = {
        name: TensorEntry(
            name=name,
            shape=(TENSOR_BYTES // 4,),
            dtype="F32",
            view="F32",
            layout="",
            sha256=digest,
        )
        for name in (f"t.{index:02}" for index in range(TENSORS))
    }
    header = canonical_header(tensors.values())
    with path.open("wb") as file:
        file.write(len(header).to_bytes(PREFIX, "little") + header)
        for _ in tensors:
            file.write(data)
        file.flush()
        os.fsync(file.fileno())  # what is not on the disk yet cannot be dropped
    return CaseEntry(
        name="large",
        recipe=RECIPE,
        spec=SUITES["smoke"][0],
        file=path.name,
        size=path.stat().st_size,
        sha256="",
        tensors=Registry("tensor", tensors.items()),
    )


def _plugin(folder: Path, seconds: float) -> Result:
    """pytest on one empty test, with the plugin and without."""
    test = folder / "test_nothing.py"
    test.write_text("def test_nothing():\n    pass\n", encoding="utf-8")
    pytest = ("-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider", str(test))
    return compare(
        "golden",
        "pytest with the plugin, one empty test",
        python(*pytest),
        "without",
        python(*pytest, "-p", "no:flamia_ref.pytest_plugin"),
        seconds=seconds,
    )
