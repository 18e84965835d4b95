"""Finding recorded data: the files of tests/oracles, and more of them where somebody has more.

The environment variable FLAMIA_ORACLES names a folder that is looked into for files that the
repository does not hold. numpy reads the LZMA compression of our files by itself.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

COMMITTED = Path(__file__).resolve().parents[1] / "oracles"


def load(folder: str, name: str) -> dict[str, npt.NDArray[Any]]:
    """All arrays of one oracle file; skips the test, saying why, where the file is missing."""
    roots = [COMMITTED]
    if "FLAMIA_ORACLES" in os.environ:
        roots.append(Path(os.environ["FLAMIA_ORACLES"]))
    for root in roots:
        path = root / folder / f"{name}.npz"
        if path.is_file():
            with np.load(path, allow_pickle=False) as stored:
                return {key: stored[key] for key in stored.files}
    places = " or ".join(str(root) for root in roots)
    pytest.skip(
        f"NOT CHECKED: no oracle file {folder}/{name}.npz in {places};"
        " set FLAMIA_ORACLES to a folder that has it"
    )
