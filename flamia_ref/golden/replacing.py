"""A folder that appears whole or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flamia_ref._errors import shown
from flamia_ref.golden.manifest import FILE_NAME
from flamia_ref.golden.pack import read_manifest


def require_free(target: Path, *, force: bool) -> None:
    """Require that a pack may be written at `target`.

    Raises ValueError where its parent is missing, where it exists, and, with `force`, where it is
    anything but an empty folder or a pack with nothing else in it.
    """
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent} to write {target.name} in; make it")
    if not os.path.lexists(target):
        return
    if not force:
        raise ValueError(f"{target} exists; choose another folder, or replace a pack with --force")
    if target.is_symlink() or not target.is_dir():
        raise ValueError(f"{target} is no folder; --force replaces packs and empty folders only")
    found = sorted(os.listdir(target))
    if not found:
        return
    if FILE_NAME not in found:
        raise ValueError(f"{target} is no golden pack; --force replaces packs and empty folders")
    known = {FILE_NAME, *(case.file for case in read_manifest(target).cases)}
    for name in found:
        if name not in known:
            raise ValueError(
                f"{target} holds {shown(name)}, which is no part of the pack; move it elsewhere"
            )


@contextmanager
def replacing(target: Path, *, force: bool) -> Iterator[Path]:
    """Give an empty folder to fill; when the block ends without error it becomes `target`.

    Until then it lies beside `target` under a hidden name. On an error, Ctrl-C included, it is
    removed, and what was at `target` is as before.
    """
    scratch = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    scratch.mkdir()
    try:
        yield scratch
        require_free(target, force=force)
        _move(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it: some report that they are full only then."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _move(scratch: Path, target: Path) -> None:
    if not target.exists():
        scratch.rename(target)
        return
    old = scratch.with_suffix(".old")
    try:
        target.rename(old)
        scratch.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
