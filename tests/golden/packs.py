"""Small cases, and the means to read, change and forge packs without the package's own code."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flamia_ref._errors import Registry
from flamia_ref.golden.cases import CaseSpec, Plant
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.pack import Case
from flamia_ref.golden.stage import Role
from flamia_ref.golden.suites import SUITES

RECIPE = "flamia-mxfp8-folded"
FIRST, SECOND = f"tiny.{RECIPE}", f"tiny-poison.{RECIPE}"


def spec(**changes: Any) -> CaseSpec:
    """A case of three documents, the middle one empty, the last one longer than a block."""
    values: dict[str, Any] = {
        "name": "tiny",
        "why": "three documents",
        "lengths": (2, 0, 35),
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 32,
        "causal": True,
        "softmax_scale": 1 / math.sqrt(32),
        "distribution": Distribution.BELL,
        "seed": 11,
        "exponent": -8,
    }
    return CaseSpec(**values | changes)


TINY = (
    spec(),
    spec(
        name="tiny-poison",
        lengths=(3, 2),
        plants=(Plant(tensor="k", token=1, head=0, channel=3, bits=0x7FC0),),
        flags=("nan",),
    ),
)

# The suites of the package, and one of the small cases.
WITH_TINY = Registry("suite", [*SUITES.items(), ("tiny", TINY)])


def results(case: Case) -> dict[str, Any]:
    """What a perfect kernel gives, in arrays of its own."""
    return {
        name: tensor.copy()
        for name, tensor in case.tensors.items()
        if case.places[name].stage.role is not Role.INPUT
    }


_TYPES = {"U8": "u1", "U16": "<u2", "I32": "<i4", "F32": "<f4"}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read a safetensors file by its definition: length, JSON header, data."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    tensors = {}
    for name, entry in header.items():
        start, end = (8 + size + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(data[start:end], _TYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"]).copy()
    return tensors


def write_safetensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Write a safetensors file by its definition, with dtypes by the names that the format has."""
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def typed(tensors: dict[str, np.ndarray]) -> dict[str, tuple[str, np.ndarray]]:
    """Name the stored dtype of plain arrays."""
    names = {"uint8": "U8", "uint16": "U16", "int32": "I32", "float32": "F32"}
    return {name: (names[str(array.dtype)], array) for name, array in tensors.items()}


def offset(path: Path, tensor: str) -> int:
    """Where the bytes of a tensor start in a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    start: int = json.loads(data[8 : 8 + size])[tensor]["data_offsets"][0]
    return 8 + size + start


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def forge(pack: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of a pack and make its digest fit, as somebody who means harm would."""
    path = pack / "manifest.json"
    document = json.loads(path.read_text())
    del document["digest"]
    change(document)
    document["digest"] = hashlib.sha256(canonical(document).encode()).hexdigest()
    path.write_text(canonical(document))


_LATER = {
    "": ("schema", "schedules"),
    "softmax": (
        *("tanh", "score", "mask_value", "row_sum_of", "combine"),
        *("softcap", "threshold_unit", "p_scale", "p_scaling", "p_overflow", "nan_p"),
    ),
    "gradient": ("delta_source", "masked_ds", "heads_order"),
    "tiles": ("splits",),
    **dict.fromkeys(("s", "o", "dp", "dv", "dq", "dk"), ("k_order", "correction_instruction")),
}


def older(text: str) -> dict[str, Any]:
    """The data of a recipe as packs of before wrote them: without the fields that recipes have since."""
    data: dict[str, Any] = json.loads(text)
    for part, names in _LATER.items():
        for name in names:
            del (data[part] if part else data)[name]
        if "left" in data.get(part, {}):
            for side in ("left", "right"):
                for name in ("promoted_from", "dequantized", "smoothing"):
                    del data[part][side][name]
    return data


def canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, indent=1) + "\n"
