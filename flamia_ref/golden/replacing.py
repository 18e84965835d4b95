"""A folder that appears whole or not at all.

A process that is killed (SIGKILL, a crash) may leave a hidden folder ``.NAME.*.part`` or
``.NAME.*.old`` beside the target; the second is what was there before, if the target is gone.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flamia_ref._errors import shown
from flamia_ref.golden.files import read_plain
from flamia_ref.golden.manifest import FILE_NAME, MAX_BYTES, SCHEMA


def require_free(target: Path, *, force: bool) -> None:
    """Require that a pack may be written at `target`.

    Raises ValueError where its parent is missing, where it exists, and, with `force`, where it is
    anything but an empty folder or a pack with nothing else in it: of whatever version, and changed
    or not, as long as its manifest says what belongs to it. Raises OSError where the disk refuses.
    """
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent} to write {target.name} in; make it")
    if not os.path.lexists(target):
        return
    _require_replaceable(target)
    if not force:
        raise ValueError(f"{target} exists; choose another folder, or replace it with --force")


def _require_replaceable(target: Path) -> None:
    if target.is_symlink() or not target.is_dir():
        raise ValueError(f"{target} exists and is no folder; choose another name")
    found = sorted(os.listdir(target))
    if not found:
        return
    if FILE_NAME not in found:
        raise ValueError(f"{target} exists and is no golden pack; choose another folder")
    belonging = _belonging(target)
    if belonging is None:
        raise ValueError(
            f"{target} exists, and its {FILE_NAME} does not say what belongs to a pack; delete the "
            "folder, or choose another"
        )
    for name in found:
        if name not in belonging:
            raise ValueError(
                f"{target} exists and holds {shown(name)}, which is no part of the pack; move it "
                "elsewhere, or choose another folder"
            )


def _belonging(folder: Path) -> set[str] | None:
    """Return the files of a pack, by a manifest that may be damaged or of another version."""
    try:
        match json.loads(read_plain(folder / FILE_NAME, limit=MAX_BYTES)):
            case {"schema": str(schema), "cases": list(cases)} if schema == SCHEMA:
                return {FILE_NAME, *(str(case["file"]) for case in cases)}
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    return None


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
