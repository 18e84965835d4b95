"""What else may lie where a pack or results should: links, pipes, folders, and files that change."""

import errno
import io
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from flamia_ref import golden
from flamia_ref.golden import case_file
from flamia_ref.golden.files import read_plain
from tests.golden.fuzz.refusals import refused
from tests.golden.packs import FIRST, SECOND, flip, offset, results, typed, write_safetensors

FILE = f"{FIRST}.safetensors"


def read_all(pack: Path) -> None:
    for case in golden.load(pack):
        case.verify()


def folder(path: Path) -> None:
    path.mkdir()


def socket(path: Path) -> None:
    import socket as sockets

    with sockets.socket(sockets.AF_UNIX) as one:
        one.bind(str(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def nowhere(path: Path) -> None:
    path.symlink_to("nothing")


def up(path: Path) -> None:
    (path.parent.parent / "outside").write_bytes(b"secret")
    path.symlink_to("../outside")


def hard_link(path: Path) -> None:
    """A hard link cannot be told from the file; its digest can."""
    outside = path.parent.parent / "outside"
    outside.write_bytes(b"secret" * 100)
    os.link(outside, path)


def unreadable(path: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0)


THINGS: list[Callable[[Path], None]] = [
    folder, os.mkfifo, socket, device, loop, nowhere, up, hard_link, unreadable,
]  # fmt: skip


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.__name__)
@pytest.mark.parametrize("name", [FILE, "manifest.json"])
def test_in_place_of_a_file_of_a_pack(
    pack: Path, name: str, thing: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (pack / name).unlink()
    monkeypatch.chdir(pack)  # a socket's path must be short
    thing(Path(name) if thing is socket else pack / name)
    message = refused(lambda: read_all(pack))
    assert name in message
    assert "secret" not in message


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.__name__)
def test_in_place_of_results(
    made: Path, tmp_path: Path, thing: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "results"
    inside.mkdir()
    monkeypatch.chdir(inside)
    thing(Path(FILE) if thing is socket else inside / FILE)
    message = refused(lambda: golden.check(golden.load(made)[FIRST], inside))
    assert "secret" not in message


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.__name__)
def test_a_file_that_is_replaced_after_the_pack_was_opened(
    pack: Path, thing: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = golden.load(pack)[FIRST]
    assert case.tensors["q"].size  # the header is known
    (pack / FILE).unlink()
    monkeypatch.chdir(pack)
    thing(Path(FILE) if thing is socket else pack / FILE)
    assert FIRST in refused(case.verify)
    assert FIRST in refused(lambda: case.tensors["lse"])
    assert FIRST in refused(lambda: golden.check(case, golden.load(pack.parent / "pack")))


@pytest.mark.parametrize("name", [FILE, "manifest.json"])
@pytest.mark.parametrize("opened", [False, True])
def test_a_link_to_the_right_bytes_is_not_followed(pack: Path, name: str, opened: bool) -> None:
    case = golden.load(pack)[FIRST] if opened else None
    os.rename(pack / name, pack.parent / "outside")
    (pack / name).symlink_to("../outside")
    if case is None or name == "manifest.json":
        assert "is a symbolic link" in refused(lambda: read_all(pack))
    else:
        assert "is a symbolic link" in refused(case.verify)


def test_a_hard_link_to_the_right_bytes_is_the_file(pack: Path) -> None:
    os.link(pack / FILE, pack.parent / "outside")
    read_all(pack)


def test_another_case_in_its_place(pack: Path) -> None:
    case = golden.load(pack)[FIRST]
    os.replace(pack / f"{SECOND}.safetensors", pack / FILE)
    assert FILE in refused(lambda: case.tensors["q"])


@pytest.mark.parametrize("keep", [0, 4, 100, 10_000, -1])
def test_a_file_that_is_shortened_while_arrays_are_in_use(pack: Path, keep: int) -> None:
    """With a memory map this would end the process."""
    case = golden.load(pack)[FIRST]
    held = case.tensors["q"]
    before = held.tobytes()
    data = (pack / FILE).read_bytes()
    size = len(data)
    os.truncate(pack / FILE, keep if keep >= 0 else size - 1)
    assert held.tobytes() == before
    assert FILE in refused(lambda: case.tensors["lse"])
    os.truncate(pack / FILE, size)  # zeros, and the size that it had
    if (pack / FILE).read_bytes() != data:
        assert FILE in refused(case.verify)


def test_what_is_written_after_the_check_does_not_reach_an_array(pack: Path) -> None:
    case = golden.load(pack)[FIRST]
    case.verify()
    held = case.tensors["lse"]
    before = held.tobytes()
    flip(pack / FILE, offset(pack / FILE, "lse"))
    assert held.tobytes() == before
    assert "tensor lse was changed" in refused(case.verify)
    # A process that opens it now has no array from before.
    assert "tensor lse was changed" in refused(lambda: golden.load(pack)[FIRST].tensors["lse"])


def test_only_what_is_used_is_read(pack: Path) -> None:
    flip(pack / FILE, offset(pack / FILE, "lse"))
    case = golden.load(pack)[FIRST]
    assert case.tensors["q"].size
    assert "tensor lse was changed" in refused(lambda: case.tensors["lse"])
    assert "tensor lse was changed" in refused(case.verify)


def test_a_file_that_shrinks_while_it_is_read(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = case_file.fill
    q = golden.load(pack)[FIRST].tensors["q"].nbytes

    def fill(file: io.FileIO, part: memoryview, *, source: Path) -> None:
        if len(part) == q:
            os.truncate(source, 1000)
        real(file, part, source=source)

    monkeypatch.setattr(case_file, "fill", fill)
    assert "early; it is being written" in refused(lambda: read_all(pack))


def test_arrays_cannot_be_written(pack: Path) -> None:
    array = golden.load(pack)[FIRST].tensors["q"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True


def test_an_array_is_read_once_while_somebody_holds_it(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case_file, "_KEPT", case_file._Kept())
    monkeypatch.setattr(case_file, "KEPT_BYTES", 0)  # the last one stays all the same
    case = golden.load(pack)[FIRST]
    held = case.tensors["q"]
    assert case.tensors["k"].size
    assert np.shares_memory(case.tensors["q"], held)
    (pack / FILE).unlink()
    assert case.tensors["q"].tobytes() == held.tobytes()
    assert FILE in refused(lambda: case.tensors["k"])  # nobody holds it, it is read again


def test_many_threads_read_a_case(pack: Path) -> None:
    case = golden.load(pack)[FIRST]
    expected = {name: array.tobytes() for name, array in golden.load(pack)[FIRST].tensors.items()}
    wrong: list[str] = []

    def read() -> None:
        for name in case.tensors:
            if case.tensors[name].tobytes() != expected[name]:
                wrong.append(name)
        case.verify()

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_copy_in_another_process_reads_for_itself(pack: Path) -> None:
    case = golden.load(pack)[FIRST]
    case.verify()
    copy = pickle.loads(pickle.dumps(case))
    flip(pack / FILE, offset(pack / FILE, "lse"))
    assert "tensor lse was changed" in refused(lambda: copy.tensors["lse"])


def test_a_large_file_is_verified_in_threads(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_file, "_SMALL", 0)
    monkeypatch.setattr(case_file, "_CHUNK", 1000)
    read_all(pack)
    for name in ("q", "lse", "s.2"):
        at = offset(pack / FILE, name)
        flip(pack / FILE, at)
        assert f"tensor {name} was changed" in refused(lambda: read_all(pack))
        flip(pack / FILE, at)
    read_all(pack)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_fails(pack: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(case_file, "fill", fill)
    assert os.strerror(code) in refused(lambda: read_all(pack))


def test_a_limit_costs_no_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert read_plain(tmp_path / "file", limit=1 << 62) == b"abc"
    (tmp_path / "file").write_bytes(b"")
    assert read_plain(tmp_path / "file", limit=0) == b""
    assert "at most 2 are" in refused(
        lambda: read_plain((tmp_path / "file", (tmp_path / "file").write_bytes(b"abc"))[0], limit=2)
    )


def test_results_in_a_folder_with_hostile_names(made: Path, tmp_path: Path) -> None:
    case = golden.load(made)[FIRST]
    write_safetensors(tmp_path / FILE, typed(results(case)))
    for name in (b"\xff\xfe", b"a\nb", b"\x1b[2J", b"-rf", b"..safetensors"):
        (tmp_path / os.fsdecode(name + b".safetensors")).write_bytes(b"")
    report = golden.check(case, tmp_path)
    assert report.passed
    assert all(note.isprintable() for note in report.notes)
    report.to_text().encode()
