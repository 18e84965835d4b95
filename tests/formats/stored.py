"""Reading the recorded data in tests/oracles, described in its README.

A pack holds many recordings of quantizers. Arrays of one shape that mean the same are stacked in
it along a first axis, and NAME.rows says which recording and which of its keys each row of NAME
is. `oracle` undoes that: it gives one recording, as it was before it was packed.
"""

import csv
import functools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1] / "oracles"
QUANTIZERS = ROOT / "quantizers"

Arrays = dict[str, npt.NDArray[Any]]


def read(name: str) -> Arrays:
    """All arrays of a file. numpy reads the LZMA compression of its members by itself."""
    with np.load(ROOT / f"{name}.npz", allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


@functools.cache
def conversions() -> Arrays:
    """Conversions measured on an H200."""
    return read("conversions/conversions")


def oracle_names() -> tuple[str, ...]:
    """Every recording of a library or a device, in alphabetical order: casts, MX, NVFP4."""
    return tuple(name for name in _table("digests") if name != "inputs")


def presets() -> dict[str, str]:
    """The preset that must reproduce a recording, by the recording's name; casts have none."""
    return {name: row["preset"] for name, row in _table("presets").items()}


def digests() -> dict[str, str]:
    """SHA-256 of every recording and of the inputs; how it is taken is in test_stored.py."""
    return {name: row["sha256"] for name, row in _table("digests").items()}


def inputs() -> Arrays:
    """What every recording was made from: `mx_*` for mx, `nv_*` for nvfp4, `cast_*` for casts.

    `mx_f32_bits` uint32 [2043, 32] and `nv_f32_bits` [19, 32, 64] are float32 bits,
    `mx_bf16_bits` and `nv_bf16_bits` uint16 the same values rounded to bfloat16; `mx_tags`,
    `nv_tags` say what a block or a tensor is for. `cast_bits` uint32 [76898] starts with the
    `cast_n_bf16` bfloat16 values.
    """
    return oracle("inputs")


def oracle(name: str) -> Arrays:
    """The arrays of one recording, or of "inputs": keys, dtypes and shapes as recorded.

    They are read once and shared, so they are read-only.
    """
    rows = _table("digests")
    if name not in rows:
        raise KeyError(f"no recording {name!r}; oracle_names() lists them")
    return dict(_pack(rows[name]["pack"])[name])


@functools.cache
def _table(name: str) -> dict[str, dict[str, str]]:
    with (QUANTIZERS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return {row["oracle_file"]: row for row in csv.DictReader(file)}


@functools.cache
def _pack(name: str) -> dict[str, Arrays]:
    members = read(f"quantizers/{name}")
    recordings: dict[str, Arrays] = {}
    for member, stack in members.items():
        if member.endswith(".rows"):
            continue
        stack.flags.writeable = False
        for row, label in enumerate(members[f"{member}.rows"].tolist()):
            recording, key = label.split("/")
            recordings.setdefault(recording, {})[key] = stack[row, ...]  # 0-d rows stay arrays
    if name == "inputs":
        for kind in ("mx", "nv"):
            arrays = recordings["inputs"]
            arrays[f"{kind}_bf16_bits"] = _bfloat16_bits(arrays[f"{kind}_f32_bits"])
    return recordings


def _bfloat16_bits(float32_bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rounded to nearest even. They were recorded, and are not stored as this gives them all."""
    with np.errstate(invalid="ignore"):  # NaN
        bits = float32_bits.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    bits.flags.writeable = False
    return bits
