"""Packs are written whole or not at all, and always with the same bytes."""

import errno
import hashlib
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref import golden
from flamia_ref._errors import Registry
from flamia_ref.attention import RECIPES
from flamia_ref.golden import making
from flamia_ref.golden.cases import Plant
from flamia_ref.golden.files import tensors_to_bytes
from flamia_ref.golden.simulation import simulate
from tests.golden.packs import FIRST, RECIPE, SECOND, canonical, read_safetensors, spec

pytestmark = pytest.mark.usefixtures("tiny_suite")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_runs_give_the_same_bytes(made: Path, tmp_path: Path) -> None:
    manifest = golden.make(tmp_path / "again", suite="tiny")
    assert contents(tmp_path / "again") == contents(made)
    assert manifest.digest == golden.load(made).manifest.digest


def test_the_bytes_of_a_file_are_fixed() -> None:
    # Written out by hand: a new version of safetensors must not change a byte unnoticed.
    tensors = {
        "a": np.array([[1, 2, 3]], np.uint8),
        "b.0": np.array([1.5, -0.0], np.float32),
        "b.1": np.zeros((2, 0, 0), np.float32),
        "c": np.array([0x3F80], np.uint16),
        "d": np.array([-1], np.int32),
    }
    header = (
        b'{"b.0":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"b.1":{"dtype":"F32","shape":[2,0,0],"data_offsets":[8,8]},'
        b'"d":{"dtype":"I32","shape":[1],"data_offsets":[8,12]},'
        b'"c":{"dtype":"U16","shape":[1],"data_offsets":[12,14]},'
        b'"a":{"dtype":"U8","shape":[1,3],"data_offsets":[14,17]}}'
    )
    header += b" " * (-len(header) % 8)
    data = struct.pack("<ffiH3B", 1.5, -0.0, -1, 0x3F80, 1, 2, 3)
    written = tensors_to_bytes(tensors)
    assert written == struct.pack("<Q", len(header)) + header + data
    assert tensors_to_bytes(dict(reversed(tensors.items()))) == written


def test_memory_order_does_not_reach_the_file() -> None:
    plain = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert tensors_to_bytes({"a": np.asfortranarray(plain)}) == tensors_to_bytes({"a": plain})


def test_floats_that_numpy_has_not_are_refused() -> None:
    with pytest.raises(TypeError, match="float16"):
        tensors_to_bytes({"a": np.zeros(1, np.float16)})


def test_the_manifest_is_canonical_and_complete(made: Path) -> None:
    text = (made / "manifest.json").read_text()
    document = json.loads(text)
    assert canonical(document) == text
    digest = document.pop("digest")
    assert hashlib.sha256(canonical(document).encode()).hexdigest() == digest
    assert [case["name"] for case in document["cases"]] == [FIRST, SECOND]
    assert document["recipes"][RECIPE]["recipe"] == json.loads(RECIPES[RECIPE].to_json())
    assert document["recipes"][RECIPE]["evidence"] == RECIPES[RECIPE].label
    for case in document["cases"]:
        data = (made / case["file"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (case["size"], case["sha256"])
        tensors = read_safetensors(made / case["file"])
        assert set(tensors) == set(case["tensors"])
        for name, tensor in tensors.items():
            entry = case["tensors"][name]
            assert hashlib.sha256(tensor.tobytes()).hexdigest() == entry["sha256"]
            assert list(tensor.shape) == entry["shape"]
    scale = document["cases"][0]["spec"]["softmax_scale"]
    assert scale == {
        "bits": f"0x{struct.pack('>d', 1 / math.sqrt(32)).hex()}",
        "repr": repr(1 / math.sqrt(32)),
    }


def test_files_have_plain_types_and_no_header_metadata(made: Path) -> None:
    for path in made.glob("*.safetensors"):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert "__metadata__" not in header
        assert {entry["dtype"] for entry in header.values()} == {"U8", "U16", "I32", "F32"}


def test_a_manifest_holds_no_field_of_this_run(made: Path) -> None:
    document = json.loads((made / "manifest.json").read_text())
    assert set(document) == {
        "cases",
        "digest",
        "nan",
        "numerics_version",
        "recipes",
        "schema",
        "schema_version",
        "suite",
    }
    assert set(document["cases"][0]) == {
        "file",
        "name",
        "recipe",
        "sha256",
        "size",
        "spec",
        "tensors",
    }
    assert set(document["cases"][0]["tensors"]["q"]) == {
        "dtype",
        "layout",
        "sha256",
        "shape",
        "view",
    }
    for data in contents(made).values():
        assert str(made.parent).encode() not in data


@pytest.mark.parametrize("recipe", RECIPES)
def test_tiled_scales_are_where_the_layout_puts_them(recipe: str) -> None:
    case = spec(lengths=(140, 0, 3), head_dim=160)
    tensors = simulate(case, RECIPES[recipe])
    tiled = {name for name in tensors if ".tiled" in name}
    assert len(tiled) % 3 == 0
    for name in tiled:
        source, form, document = name.replace(".scales.", " ").replace(".", " ").rsplit(maxsplit=2)
        scales = tensors[f"{source.replace(' ', '.')}.scales"]
        start, length = case.starts[int(document)], case.lengths[int(document)]
        # Blocks of 32 tokens start at each document: 5, 0 and 1 of them.
        first_block = (0, 5, 5)[int(document)]
        by_token, by_channel = scales.shape[0] == case.tokens, scales.shape[2]
        heads = scales.shape[1]
        size = 16 if by_channel == 10 else 32  # FP4 has ten blocks of channels, the rest five
        down, across = (length, 160 // size)
        if form == "tiled_transposed":
            down, across = 160, -(-length // 32)
        width = -(-across // 4)
        expected = np.zeros((heads, -(-down // 128) * width * 512), np.uint8)
        for head in range(heads):
            for row in range(down):
                for column in range(across):
                    token, channel = (column * 32, row) if down == 160 else (row, column * size)
                    along = start + token if by_token else first_block + token // 32
                    # One scale a token, one for some channels, or one a channel.
                    of = {1: 0, 160: channel}.get(by_channel, channel // size)
                    tile = row // 128 * width + column // 4
                    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
                    expected[head, place] = scales[along, head, of]
        assert tensors[name].reshape(expected.shape).tolist() == expected.tolist(), name


def test_tiled_scales_of_a_pack(made: Path) -> None:
    tensors = read_safetensors(made / f"{FIRST}.safetensors")
    starts = tensors["cu_seqlens"].tolist()
    for operand in ("q", "k", "v", "do"):
        for document in range(3):
            rows = starts[document + 1] - starts[document]
            expected = np.zeros((tensors[f"{operand}.codes"].shape[1], -(-rows // 128) * 512), "u1")
            for head in range(len(expected)):
                for row in range(rows):
                    # Offset of row r and column c = 0; 32 channels are one block.
                    place = row // 128 * 512 + row % 32 * 16 + row % 128 // 32 * 4
                    token = starts[document] + row
                    expected[head, place] = tensors[f"{operand}.scales"][token, head, 0]
            tiled = tensors[f"{operand}.scales.tiled.{document}"]
            assert tiled.reshape(expected.shape).tolist() == expected.tolist()


def test_nan_is_written_in_one_form(made: Path) -> None:
    tensors = read_safetensors(made / f"{SECOND}.safetensors")
    out = tensors["out"]
    assert set(out[(out & 0x7FFF) > 0x7F80].tolist()) == {0x7FFF}
    lse = tensors["lse"]
    assert set(lse[np.isnan(lse)].view(np.uint32).tolist()) == {0x7FFFFFFF}


def test_nan_that_a_case_does_not_ask_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Plant(tensor="v", token=0, head=0, channel=0, bits=0x7FC0)
    suite = Registry("suite", [("bad", (spec(plants=(plant,)),))])
    monkeypatch.setattr(making, "SUITES", suite)
    with pytest.raises(ValueError, match=r"case tiny: o holds NaN; the case does not ask for it"):
        golden.make(tmp_path / "pack", suite="bad")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "empty folder", "file", "link", "dangling link"])
def test_what_exists_is_not_touched(made: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    match kind:
        case "folder":
            target.mkdir()
            (target / "notes.txt").write_text("mine")
        case "empty folder":
            target.mkdir()
        case "file":
            target.write_text("mine")
        case "link":
            target.symlink_to(made)
        case "dangling link":
            target.symlink_to(tmp_path / "nowhere")
    if kind == "empty folder":
        message = "target exists; choose another folder, or replace it with --force"
    elif kind == "folder":
        message = "target exists and is no golden pack; choose another folder"
    else:
        message = "target exists and is no folder; choose another name"
    with pytest.raises(ValueError, match=message) as caught:
        golden.make(target, suite="tiny")
    # What would be refused is not advised.
    assert ("--force" in str(caught.value)) == (kind == "empty folder")
    if kind != "empty folder":
        with pytest.raises(ValueError, match=message):
            golden.make(target, suite="tiny", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    if kind == "folder":
        assert (target / "notes.txt").read_text() == "mine"


def test_force_replaces_an_empty_folder_and_a_pack(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    first = golden.make(tmp_path / "pack", suite="tiny", force=True)
    assert golden.make(tmp_path / "pack", suite="tiny", force=True) == first
    assert golden.load(tmp_path / "pack").manifest == first
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


def test_force_spares_a_pack_with_foreign_files(pack: Path) -> None:
    (pack / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'notes.txt', which is no part of the pack"):
        golden.make(pack, suite="tiny", force=True)
    assert (pack / "notes.txt").read_text() == "mine"


def test_a_new_pack_has_the_rights_of_other_files(made: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    assert made.stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("successes", [0, 1, 2])
def test_a_run_that_is_stopped_leaves_what_was_there(
    pack: Path,
    monkeypatch: pytest.MonkeyPatch,
    force: bool,
    error: BaseException,
    successes: int,
) -> None:
    before = contents(pack)
    target = pack if force else pack.parent / "new"
    left = successes

    def fsync(_: int) -> None:
        nonlocal left
        if left == 0:
            raise type(error)(*error.args)  # a new one: notes stay with an exception
        left -= 1

    kept = {
        0: "nothing was left behind",
        1: "1 case is kept in .*; the same command resumes there",
        2: "2 cases are kept in .*; the same command resumes there",
    }[successes]
    expected, message = ValueError, rf"cannot write .*: No space left on device; {kept}"
    if isinstance(error, KeyboardInterrupt):
        expected, message = KeyboardInterrupt, None
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(expected, match=message):
            golden.make(target, suite="tiny", force=force)
    assert contents(pack) == before
    hidden = [f".{target.name}.part"] if successes else []
    assert sorted(path.name for path in pack.parent.iterdir()) == [*hidden, "pack"]
    golden.make(target, suite="tiny", force=force)
    assert contents(target) == before
    assert {path.name for path in pack.parent.iterdir()} == {"pack", target.name}


def test_a_rename_that_fails_brings_the_old_pack_back(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(pack)
    rename = Path.rename

    def failing(self: Path, target: Any) -> Path:
        if self == pack.parent / ".pack.part" / "pack":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(ValueError, match="Input/output error"):
        golden.make(pack, suite="tiny", force=True)
    assert contents(pack) == before
    assert sorted(path.name for path in pack.parent.iterdir()) == [".pack.part", "pack"]
    assert not (pack.parent / ".pack.part" / "old").exists()


def test_a_folder_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def progress(done: int, total: int, name: str) -> None:
        if done == 1:
            (tmp_path / "pack").mkdir()
            (tmp_path / "pack" / "theirs").write_text("theirs")

    with pytest.raises(ValueError, match="exists"):
        golden.make(tmp_path / "pack", suite="tiny", progress=progress)
    # Neither theirs nor ours is lost.
    assert (tmp_path / "pack" / "theirs").read_text() == "theirs"
    (tmp_path / "pack").rename(tmp_path / "theirs")
    golden.make(tmp_path / "pack", suite="tiny", progress=pytest.fail)
    assert {path.name for path in tmp_path.iterdir()} == {"pack", "theirs"}


def test_bad_requests_are_refused_before_any_work(tmp_path: Path) -> None:
    recipe = RECIPES[RECIPE]
    bad = [
        (ValueError, "unknown recipe 'flamia-mxfp8-foldet'; did you mean", ["flamia-mxfp8-foldet"]),
        (ValueError, "given twice", [RECIPE, recipe]),
        (ValueError, "no recipe", []),
        (TypeError, "give a sequence", RECIPE),
    ]
    for kind, message, recipes in bad:
        with pytest.raises(kind, match=message):
            golden.make(tmp_path / "pack", recipes, suite="tiny")
    with pytest.raises(ValueError, match="unknown suite 'standart'"):
        golden.make(tmp_path / "pack", suite="standart")
    with pytest.raises(ValueError, match="there is no folder"):
        golden.make(tmp_path / "no" / "pack", suite="tiny")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_into_a_pack(pack: Path) -> None:
    before = {path: path.read_bytes() for path in pack.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="lies in the pack"):
        golden.make(pack / "inside", suite="tiny")
    assert {path: path.read_bytes() for path in pack.rglob("*") if path.is_file()} == before
