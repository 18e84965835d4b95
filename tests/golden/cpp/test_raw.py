"""Packs as plain files: read back as a C harness would, and the same bytes for the same pack."""

import hashlib
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref import golden
from flamia_ref.golden.raw import write_raw
from tests.golden.packs import FIRST, SECOND, flip, offset, read_safetensors

FILE_TYPES = {"U8": "u1", "U16": "<u2", "I32": "<i4", "F32": "<f4"}


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.fixture
def raw(pack: Path) -> Path:
    write_raw(pack, golden.load(pack).manifest)
    return pack


def test_every_tensor_is_there(raw: Path) -> None:
    lines = [line.split(" ") for line in (raw / "raw.txt").read_text("ascii").splitlines()]
    assert lines[0] == ["raw", "1"]
    read: dict[str, dict[str, Any]] = {}
    for kind, *fields in lines[1:]:
        if kind == "case":
            current = read.setdefault(fields[0], {})
            continue
        assert kind == "tensor"
        name, dtype, view, shape, file, size, digest = fields
        data = (raw / file).read_bytes()
        assert (str(len(data)), hashlib.sha256(data).hexdigest()) == (size, digest)
        sizes = [int(one) for one in shape.split("x")]
        current[name] = np.frombuffer(data, FILE_TYPES[dtype]).reshape(sizes)
        assert view in ("BF16", "F32", "I32", "F8_E4M3", "F8_E8M0")
    assert list(read) == [FIRST, SECOND]
    for case in golden.load(raw):
        assert list(read[str(case)]) == list(case.places)
        for name, tensor in read_safetensors(case.path).items():
            assert read[str(case)][name].shape == tensor.shape
            assert read[str(case)][name].tobytes() == tensor.tobytes()


def test_a_case_has_its_numbers(raw: Path) -> None:
    line = (raw / "raw.txt").read_text().splitlines()[1]
    scale = struct.pack(">d", 1 / math.sqrt(32)).hex()
    assert line == f"case {FIRST} 2 1 32 3 1 bottom_right - - 0x{scale} -"


def test_the_same_pack_gives_the_same_bytes(raw: Path, made: Path, tmp_path: Path) -> None:
    again = Path(shutil.copytree(made, tmp_path / "again"))
    write_raw(again, golden.load(again).manifest)
    assert files(again) == files(raw)


def test_the_pack_is_as_before(raw: Path, made: Path) -> None:
    before = files(made)
    assert {name: data for name, data in files(raw).items() if name in before} == before
    assert golden.load(raw)[FIRST].tensors


def test_a_changed_pack_is_refused(pack: Path) -> None:
    manifest = golden.load(pack).manifest
    file = pack / f"{FIRST}.safetensors"
    flip(file, offset(file, "v.scales"))
    with pytest.raises(ValueError, match=r"tensor v\.scales was changed"):
        write_raw(pack, manifest)
    assert not (pack / "raw.txt").exists()


def test_files_that_are_there_are_kept(raw: Path) -> None:
    with pytest.raises(FileExistsError):
        write_raw(raw, golden.load(raw).manifest)
