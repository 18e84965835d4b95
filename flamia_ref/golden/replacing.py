"""A folder that appears whole or not at all, and whose making may be stopped and resumed.

Until a pack is whole it lies beside its target, in the hidden folder ``.NAME.part``::

    lock          who is writing: held while that process lives
    work.json     what is being made
    done/         a record of each case that is done: what it is of, and the digest of its file
    pack/         the files; becomes the target
    old           what was at the target, for the moment between two renames
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flamia_ref._errors import printable, shown
from flamia_ref.golden.canonical import render, sha256
from flamia_ref.golden.files import read_plain
from flamia_ref.golden.locking import LOCK, Lock, locked
from flamia_ref.golden.manifest import FILE_NAME, MAX_BYTES, SCHEMA
from flamia_ref.golden.shards import SHARD_FILE_NAME, SHARD_SCHEMA

_WORK_SCHEMA = "flamia-ref golden work"
_WORK, _DONE, _PACK, _OLD, _NEW = "work.json", "done", "pack", "old", "new"
_RECORD_BYTES = 4096


def require_free(target: Path, *, force: bool) -> None:
    """Require that a pack may be written at `target`.

    Raises ValueError where its parent is missing, where it exists, and, with `force`, where it is
    anything but an empty folder or a pack or shard with nothing else in it: of whatever version, and
    changed or not, as long as its manifest says what belongs to it. Raises OSError where the disk
    refuses.
    """
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent} to write {target.name} in; make it")
    require_outside_packs(target)
    if not os.path.lexists(target):
        return
    _require_replaceable(target)
    if not force:
        raise ValueError(f"{target} exists; choose another folder, or replace it with --force")


def require_outside_packs(target: Path) -> None:
    """Require that what is written at `target` does not become part of a pack: raises ValueError where it would."""
    for folder in Path(os.path.realpath(target)).parents:
        if (folder / FILE_NAME).is_file() and _belonging(folder / FILE_NAME) is not None:
            raise ValueError(f"{target} lies in the pack {folder}; choose a place outside it")


def _require_replaceable(target: Path) -> None:
    if target.is_symlink() or not target.is_dir():
        raise ValueError(f"{target} exists and is no folder; choose another name")
    found = sorted(os.listdir(target))
    if not found:
        return
    name = next((name for name in (FILE_NAME, SHARD_FILE_NAME) if name in found), None)
    if name is None:
        raise ValueError(f"{target} exists and is no golden pack; choose another folder")
    belonging = _belonging(target / name)
    if belonging is None:
        raise ValueError(
            f"{target} exists, and its {name} does not say what belongs to a pack; delete the "
            "folder, or choose another"
        )
    for path in _files(target):
        if path not in belonging:
            raise ValueError(
                f"{target} exists and holds {shown(path)}, which is no part of the pack; move it "
                "elsewhere, or choose another folder"
            )


def _files(folder: Path) -> Iterator[str]:
    """Yield what a folder holds, as paths in it: files, links, and folders that hold nothing."""
    for one in sorted(os.scandir(folder), key=lambda one: one.name):
        if one.is_dir(follow_symlinks=False) and (inner := list(_files(Path(one.path)))):
            yield from (f"{one.name}/{name}" for name in inner)
        else:
            yield one.name


def _belonging(path: Path) -> set[str] | None:
    """Return the files of a pack or shard, by a manifest that may be damaged or of another version."""
    with suppress(ValueError, RecursionError, LookupError, TypeError, AttributeError):
        document = json.loads(read_plain(path, limit=2 * MAX_BYTES))
        if path.name == SHARD_FILE_NAME and document["schema"] == SHARD_SCHEMA:
            inner = document["manifest"]
            cases = json.loads(inner)["cases"] if inner else []
        elif document["schema"] == SCHEMA:
            cases = document["cases"]
        else:
            return None
        files = {str(case["file"]) for case in cases}
        # What --raw adds.
        raw = {f"{case['name']}/{name}.bin" for case in cases for name in case["tensors"]}
        return {path.name, "raw.txt", *files, *raw}
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """A pack that is being made, in the hidden folder beside its target."""

    target: Path

    @property
    def folder(self) -> Path:
        """The hidden folder."""
        return self.target.with_name(f".{self.target.name}.part")

    @property
    def pack(self) -> Path:
        """Where the files of the pack are until it is whole."""
        return self.folder / _PACK

    @property
    def count(self) -> int:
        """How many cases are recorded as done."""
        with suppress(OSError):
            return len(os.listdir(self.folder / _DONE))
        return 0

    def kept(self, name: str, job: str) -> bytes | None:
        """Return the data of a case that an earlier run made, or None where it is to be made.

        `job` is the digest of what it is made from. A file that is missing, or was changed, is to be
        made again.
        """
        try:
            record = json.loads(read_plain(self._record(name), limit=_RECORD_BYTES))
            path = self.pack / _file(name)
            data = read_plain(path, limit=path.lstat().st_size)
            if (record["job"], record["sha256"]) == (job, sha256(data)):
                return data
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            pass
        return None

    def keep(self, name: str, job: str, data: bytes) -> None:
        """Write the file of a case, then its record. Raises OSError where the disk refuses."""
        new = self.folder / _NEW
        self._record(name).unlink(missing_ok=True)
        write_whole(new, data)
        new.replace(self.pack / _file(name))
        record = {"job": job, "size": len(data), "sha256": sha256(data)}
        new.write_bytes(render(record).encode("ascii"))
        new.replace(self._record(name))

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Write the last files, whole."""
        for name, data in files.items():
            new = self.folder / _NEW
            write_whole(new, data)
            new.replace(self.pack / name)

    def strip(self, names: Mapping[str, Any]) -> None:
        """Remove from the files of the pack what is no case of these names."""
        wanted = {_file(name) for name in names}
        for one in list(os.scandir(self.pack)):
            if one.is_dir(follow_symlinks=False):
                shutil.rmtree(one.path)
            elif one.name not in wanted:
                os.unlink(one.path)

    def words(self) -> str:
        """Say in a message what is left behind."""
        if not self.count:
            return "nothing was left behind"
        cases = "1 case is" if self.count == 1 else f"{self.count} cases are"
        return (
            f"{cases} kept in {printable(str(self.folder))}; the same command resumes there, and "
            "deleting that folder forgets them"
        )

    def _record(self, name: str) -> Path:
        return self.folder / _DONE / f"{name}.json"


@contextmanager
def reported(target: Path) -> Iterator[None]:
    """Turn the disk's refusals into ValueErrors that say what was left behind."""
    try:
        yield
    except OSError as error:
        left = "; ".join(getattr(error, "__notes__", ())) or "nothing was left behind"
        reason = error.strerror or error
        raise ValueError(f"cannot write {target}: {reason}; {left}") from error


def _file(name: str) -> str:
    return f"{name}.safetensors"


@contextmanager
def replacing(target: Path, work: Mapping[str, Any], *, force: bool) -> Iterator[Unfinished]:
    """Give a folder to fill; when the block ends without error its pack becomes `target`.

    `work` is JSON data that says what is made. What an earlier run of the same work left is there.
    Where the block is left with an exception, Ctrl-C included, the cases that are done are kept for
    the next run, a note of the exception says where, and what was at `target` is as before.

    Raises ValueError where another process is at it, and where an earlier run left other work, which
    is deleted only with `force`; OSError where the disk refuses.
    """
    unfinished = Unfinished(target=target)
    require_free(target, force=force)
    with _owned(unfinished) as lock:
        ours = False
        try:
            _put_back(unfinished)
            require_free(target, force=force)
            _prepare(unfinished, work, force=force)
            ours = True
            yield unfinished
            require_free(target, force=force)
            _move(unfinished)
        except BaseException as error:
            if not unfinished.count:
                _clear(unfinished, lock)
            elif ours:
                error.add_note(unfinished.words())
            raise
        _clear(unfinished, lock)


@contextmanager
def _owned(unfinished: Unfinished) -> Iterator[Lock]:
    folder = unfinished.folder
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(
            f"{folder} is no folder of ours; move it elsewhere, or choose another name"
        )
    if folder.is_dir():
        foreign = {*os.listdir(folder)} - {LOCK, _WORK, _DONE, _PACK, _OLD, _NEW}
        if foreign:
            raise ValueError(
                f"{folder} holds {shown(min(foreign))}, which is not ours; move it elsewhere, or "
                "choose another name for the pack"
            )
    with locked(folder, unfinished.target) as lock:
        yield lock


def _put_back(unfinished: Unfinished) -> None:
    """Put back what was at the target, where a run was killed between the two renames."""
    old = unfinished.folder / _OLD
    if not old.exists():
        return
    if os.path.lexists(unfinished.target):
        shutil.rmtree(old)  # the new pack is in place: that run was killed a moment later
    else:
        old.rename(unfinished.target)


def _prepare(unfinished: Unfinished, work: Mapping[str, Any], *, force: bool) -> None:
    path = unfinished.folder / _WORK
    text = render({"schema": _WORK_SCHEMA, **work})
    if unfinished.count and (found := _read(path)) not in (None, json.loads(text)):
        if not force:
            raise ValueError(
                f"{unfinished.folder} holds unfinished work, {shown(found.get('what'))}; finish that, "
                "delete the folder, or start anew with --force"
            )
        shutil.rmtree(unfinished.folder / _DONE)
    for name in (_DONE, _PACK):
        one = unfinished.folder / name
        if one.is_symlink():
            one.unlink()
        one.mkdir(exist_ok=True)
    new = unfinished.folder / _NEW
    new.write_bytes(text.encode("ascii"))
    new.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        found = json.loads(read_plain(path, limit=MAX_BYTES))
        return found if isinstance(found, dict) else None
    return None


def _clear(unfinished: Unfinished, lock: Lock) -> None:
    """Remove the hidden folder, the lock last: until then nobody else begins there."""
    for name in (_NEW, _WORK):
        with suppress(OSError):
            (unfinished.folder / name).unlink(missing_ok=True)
    for name in (_DONE, _PACK):
        shutil.rmtree(unfinished.folder / name, ignore_errors=True)
    if os.path.lexists(unfinished.target):  # else this is all that there is of what was there
        shutil.rmtree(unfinished.folder / _OLD, ignore_errors=True)
    lock.remove()
    with suppress(OSError):
        unfinished.folder.rmdir()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it: some report that they are full only then."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _move(unfinished: Unfinished) -> None:
    target, old = unfinished.target, unfinished.folder / _OLD
    if not target.exists():
        unfinished.pack.rename(target)
        return
    try:
        target.rename(old)
        unfinished.pack.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
