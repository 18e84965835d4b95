"""Finding the recorded data that this package is held against."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

ROOT = Path(os.environ.get("FLAMIA_ORACLES", Path(__file__).parents[1] / "oracles"))


def load(folder: str, name: str) -> dict[str, npt.NDArray[Any]]:
    """All arrays of one oracle file; skips the test, saying why, where the file is missing."""
    path = ROOT / folder / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"NOT CHECKED: no oracle file {path}; set FLAMIA_ORACLES to the oracles folder")
    with np.load(path) as stored:
        return {key: stored[key] for key in stored.files}
