"""Reading the recorded data in tests/oracles, described in its README."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1] / "oracles"


def read(name: str) -> dict[str, npt.NDArray[Any]]:
    """All arrays of a file. numpy reads the LZMA compression of its members by itself."""
    with np.load(ROOT / f"{name}.npz", allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


@functools.cache
def conversions() -> dict[str, npt.NDArray[Any]]:
    """Conversions measured on an H200."""
    return read("conversions/conversions")


@functools.cache
def quantizers() -> dict[str, npt.NDArray[Any]]:
    """Blocks of 32 and what libraries make of them in MXFP8 E4M3."""
    return read("quantizers/mx-e4m3")
