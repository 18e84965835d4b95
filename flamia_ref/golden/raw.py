"""Packs as plain files, for harnesses without JSON: a file a tensor, and one list of them.

Beside the safetensors files of a pack lie ``raw.txt`` and, for each case, a folder with
``TENSOR.bin``: the elements row-major, little-endian, of the stored dtype, nothing before or after.
``raw.txt`` is ASCII, a record a line, its fields separated by one space::

    raw 1
    case NAME HEADS KV_HEADS HEAD_DIM DOCUMENTS CAUSAL ALIGNMENT LEFT RIGHT SOFTMAX_SCALE SOFTCAP
    tensor NAME DTYPE VIEW SHAPE FILE BYTES SHA256

A ``tensor`` belongs to the ``case`` before it, and the tensors of a case are in the order of the
dataflow. SHAPE is the sizes joined by ``x``; FILE is relative to the pack, with ``/``. A float is its
float64 bits, ``0x`` and sixteen digits; CAUSAL is 0 or 1; LEFT and RIGHT are the sides of the window.
What a case has not is ``-``. The lengths of documents are in ``cu_seqlens``.
"""

import os
import struct
from pathlib import Path

from flamia_ref.golden.canonical import sha256
from flamia_ref.golden.files import little_endian
from flamia_ref.golden.manifest import CaseEntry, Manifest, TensorEntry
from flamia_ref.golden.pack import Case
from flamia_ref.golden.replacing import write_whole

LIST_NAME = "raw.txt"
VERSION = 1


def write_raw(pack_folder: str | os.PathLike[str], manifest: Manifest) -> None:
    """Write every tensor of a pack as a plain file, and the list of them.

    `pack_folder` holds the case files that `manifest` lists; they are read and verified. The same
    pack gives the same bytes. The list is written last.

    Raises ValueError where a case file is not what the manifest says, and OSError where the disk
    refuses or a folder of a case is there already.
    """
    folder = Path(pack_folder)
    lines = [f"raw {VERSION}"]
    for entry in manifest.cases:
        case = Case(
            folder=folder,
            entry=entry,
            recipe=manifest.recipes[entry.recipe],
            numerics_version=manifest.numerics_version,
        )
        (folder / entry.name).mkdir()
        lines.append(_case_line(entry))
        for name, listed in entry.tensors.items():
            data = little_endian(case.tensors[name])
            if sha256(data) != listed.sha256:
                raise ValueError(f"{case.path}: tensor {name} was changed since it was written")
            write_whole(folder / entry.name / f"{name}.bin", data)
            lines.append(_tensor_line(entry, listed, len(data)))
    write_whole(folder / LIST_NAME, "".join(f"{line}\n" for line in lines).encode("ascii"))


def _case_line(entry: CaseEntry) -> str:
    spec = entry.spec
    left, right = (None, None) if spec.window is None else spec.window
    values = (
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        len(spec.lengths),
        int(spec.causal),
        spec.alignment,
        left,
        right,
        spec.softmax_scale,
        spec.softcap,
    )
    return " ".join(("case", entry.name, *map(_field, values)))


def _field(value: str | float | None) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"0x{struct.pack('>d', value).hex()}"
        case _:
            return str(value)


def _tensor_line(entry: CaseEntry, listed: TensorEntry, size: int) -> str:
    shape = "x".join(map(str, listed.shape))
    file = f"{entry.name}/{listed.name}.bin"
    return (
        f"tensor {listed.name} {listed.dtype} {listed.view} {shape} {file} {size} {listed.sha256}"
    )
