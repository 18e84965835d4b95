"""Shards: parts of a pack that are no packs, and become one when all are there."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import golden
from flamia_ref.golden import merging
from tests.golden.packs import FIRST, RECIPE, SECOND, canonical, flip
from tests.sweep.conftest import contents


@pytest.fixture(scope="module")
def made(suites: None, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The shards of the suite "several". Nobody may change them."""
    root = tmp_path_factory.mktemp("shards")
    folders = [root / f"{index}of3" for index in (1, 2, 3)]
    for index, folder in enumerate(folders, 1):
        golden.make(folder, suite="several", shard=f"{index}/3")
    return folders


@pytest.fixture
def shards(made: list[Path], tmp_path: Path) -> list[Path]:
    """Copies of the shards."""
    return [Path(shutil.copytree(one, tmp_path / one.name)) for one in made]


def change(shard: Path, how: Callable[[dict[str, Any]], None], *, sign: bool = True) -> None:
    """Change what a shard says of itself, and make its digest fit."""
    path = shard / "shard.json"
    document = json.loads(path.read_text())
    digest = document.pop("digest")
    how(document)
    if sign:
        digest = hashlib.sha256(canonical(document).encode()).hexdigest()
    path.write_text(canonical(document | {"digest": digest}))


def test_shards_hold_their_cases(made: list[Path]) -> None:
    third, fourth = f"third.{RECIPE}", f"fourth.{RECIPE}"
    for folder, names in zip(made, ([FIRST, fourth], [SECOND], [third]), strict=True):
        files = {"shard.json", *(f"{name}.safetensors" for name in names)}
        assert {path.name for path in folder.iterdir()} == files


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_merged_shards_are_the_pack(
    made: list[Path], whole: Path, tmp_path: Path, order: tuple[int, ...]
) -> None:
    before = [contents(one) for one in made]
    told: list[int] = []
    manifest = golden.merge(
        tmp_path / "pack", [made[i] for i in order], progress=lambda *step: told.append(step[0])
    )
    assert contents(tmp_path / "pack") == contents(whole)
    assert manifest == golden.load(tmp_path / "pack").manifest
    assert told == [0, 1, 2, 3]
    assert [contents(one) for one in made] == before
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


def test_more_shards_than_cases(whole: Path, tmp_path: Path) -> None:
    folders = [tmp_path / str(index) for index in range(1, 6)]
    for index, folder in enumerate(folders, 1):
        golden.make(folder, suite="several", shard=f"{index}/5")
    assert [path.name for path in folders[4].iterdir()] == ["shard.json"]
    golden.merge(tmp_path / "pack", folders[::-1])
    assert contents(tmp_path / "pack") == contents(whole)


def test_a_shard_is_no_pack(made: list[Path], tmp_path: Path) -> None:
    message = "1of3 is a shard of a pack; join all shards with `flamia-ref golden merge`"
    with pytest.raises(ValueError, match=message):
        golden.load(made[0])


def test_a_pack_is_no_shard(made: list[Path], whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pack is no shard: it has no shard.json"):
        golden.merge(tmp_path / "pack", [*made[:2], whole])
    with pytest.raises(ValueError, match="there is no folder"):
        golden.merge(tmp_path / "pack", [*made[:2], tmp_path / "no"])
    with pytest.raises(ValueError, match="no shard is given"):
        golden.merge(tmp_path / "pack", [])
    with pytest.raises(TypeError, match="give a sequence of folders"):
        golden.merge(tmp_path / "pack", made[0])  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ((0, 1), "shards are missing: 3/3; give the folders of all 3"),
        ((2,), "shards are missing: 1/3, 2/3"),
        ((0, 1, 1, 2), "are both shard 2/3"),
    ],
)
def test_all_shards_are_wanted_once(
    made: list[Path], tmp_path: Path, which: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        golden.merge(tmp_path / "pack", [made[i] for i in which])
    assert list(tmp_path.iterdir()) == []


def test_shards_of_two_packs(shards: list[Path], tmp_path: Path) -> None:
    golden.make(tmp_path / "other", suite="small", shard="2/3")
    with pytest.raises(ValueError, match="are shards of two packs"):
        golden.merge(tmp_path / "pack", [shards[0], tmp_path / "other", shards[2]])
    golden.make(tmp_path / "half", suite="several", shard="2/2")
    with pytest.raises(ValueError, match="are shards of two packs"):
        golden.merge(tmp_path / "pack", [shards[0], tmp_path / "half", shards[2]])


def test_shards_of_different_code(shards: list[Path], tmp_path: Path) -> None:
    change(shards[1], lambda document: document.update(code="0" * 64))
    with pytest.raises(ValueError, match="were made by different code"):
        golden.merge(tmp_path / "pack", shards)


@pytest.mark.parametrize("how", ["a bit", "cut", "missing", "link"])
def test_a_file_that_was_changed(shards: list[Path], tmp_path: Path, how: str) -> None:
    file = shards[1] / f"{SECOND}.safetensors"
    match how:
        case "a bit":
            flip(file, file.stat().st_size - 1)
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "missing":
            file.unlink()
        case "link":
            file.rename(tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=SECOND):
        golden.merge(tmp_path / "pack", shards)
    assert not (tmp_path / "pack").exists()


def broken(document: dict[str, Any], how: str) -> None:
    match how:
        case "schema":
            document["schema"] = "other"
        case "version":
            document["schema_version"] = 2
        case "index":
            document["index"] = 4
        case "other index":
            document["index"] = 1
        case "twice":
            document["work"][0] = document["work"][2]
        case "work":
            document["work"][1] = "../../etc/passwd"
        case "manifest":
            document["manifest"] = "{}"
        case "extra":
            document["more"] = 1
        case "count":
            document["count"] = 10**12


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("schema", "is not that of a flamia-ref golden shard"),
        ("version", "has schema version 2, this version reads 1; make the shard again"),
        ("index", "shard 4/3 is none"),
        ("other index", "lists cases that are not those of 1/3"),
        ("twice", "lists a case twice"),
        ("work", "lists cases that are not those of 2/3"),
        ("manifest", r"manifest.json"),
        ("extra", "has a field 'more'"),
        ("count", "is none: the first of three"),
    ],
)
def test_what_a_shard_may_not_say(
    shards: list[Path], tmp_path: Path, how: str, message: str
) -> None:
    change(shards[1], lambda document: broken(document, how))
    with pytest.raises(ValueError, match=message):
        golden.merge(tmp_path / "pack", shards)
    assert not (tmp_path / "pack").exists()


def test_a_shard_that_was_changed_by_hand(shards: list[Path], tmp_path: Path) -> None:
    change(shards[1], lambda document: document.update(suite="other"), sign=False)
    with pytest.raises(ValueError, match="was changed since it was written"):
        golden.merge(tmp_path / "pack", shards)
    (shards[1] / "shard.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="2of3"):
        golden.merge(tmp_path / "pack", shards)


def test_nothing_is_overwritten(shards: list[Path], whole: Path, tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    with pytest.raises(ValueError, match="replace it with --force"):
        golden.merge(tmp_path / "pack", shards)
    golden.merge(tmp_path / "pack", shards, force=True)
    assert contents(tmp_path / "pack") == contents(whole)
    # A shard is replaced like a pack, and spared where there is more in its folder.
    with pytest.raises(ValueError, match="replace it with --force"):
        golden.make(shards[0], suite="several", shard="1/3")
    before = contents(shards[0])
    golden.make(shards[0], suite="several", shard="1/3", force=True)
    assert contents(shards[0]) == before
    (shards[0] / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 'notes.txt', which is no part"):
        golden.make(shards[0], suite="several", shard="1/3", force=True)


def test_a_merge_that_is_stopped_is_resumed(
    shards: list[Path], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true, calls = merging.case_data, []

    def counting(folder: Path, entry: Any) -> bytes:
        calls.append(entry.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return true(folder, entry)

    monkeypatch.setattr(merging, "case_data", counting)
    with pytest.raises(KeyboardInterrupt) as caught:
        golden.merge(tmp_path / "pack", shards)
    assert "2 cases are kept" in caught.value.__notes__[0]
    assert not (tmp_path / "pack").exists()
    golden.merge(tmp_path / "pack", shards)
    assert len(calls) == 3 + 2
    assert contents(tmp_path / "pack") == contents(whole)
    assert not os.path.lexists(tmp_path / ".pack.part")


def test_a_shard_has_no_raw_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ask for them where the shards are merged"):
        golden.make(tmp_path / "pack", suite="small", shard="1/2", raw=True)
    with pytest.raises(ValueError, match="of the form i/n"):
        golden.make(tmp_path / "pack", suite="small", shard="1")
