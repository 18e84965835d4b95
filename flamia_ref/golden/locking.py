"""One writer at a time: a lock file that says who holds it, and that the system lets go of."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flamia_ref._errors import shown

LOCK = "lock"
_TRIES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """A lock that is held: its file, open."""

    path: Path
    descriptor: int

    def remove(self) -> None:
        """Remove the file. Whoever waits for it sees that, and begins anew."""
        with suppress(OSError):
            self.path.unlink()


@contextmanager
def locked(folder: Path, target: Path) -> Iterator[Lock]:
    """Make a folder where it is missing, and hold the lock in it. `target` names it in errors.

    The system lets go of the lock of a process that dies, however it does.

    Raises ValueError where another process holds it, or the file system has no locks; OSError where
    the disk refuses.
    """
    lock = _taken(folder, target)
    try:
        yield lock
    finally:
        os.close(lock.descriptor)


def _taken(folder: Path, target: Path) -> Lock:
    import fcntl  # Unix alone

    path = folder / LOCK
    for _ in range(_TRIES):
        folder.mkdir(exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # the folder went meanwhile: who held it was done
        except OSError:
            _forget(folder)
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _same(path, descriptor):
                os.close(descriptor)
                continue
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode("ascii", "replace").split()
            same = _same(path, descriptor)
            os.close(descriptor)
            if not same:
                continue
            if _dead(holder):
                # A child that it left behind, which writes nothing, still has the lock.
                path.unlink(missing_ok=True)
                continue
            who = f"process {holder[0]}" if holder else "another process"
            raise ValueError(
                f"{who} is writing {target}; wait until it ends, or choose another folder"
            ) from None
        except OSError as error:
            os.close(descriptor)
            _forget(folder)
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise ValueError(
                    f"the file system of {folder.parent} has no locks; write to another, and move "
                    "the pack"
                ) from error
            raise
        return Lock(path=path, descriptor=descriptor)
    raise ValueError(f"{shown(str(folder))} comes and goes; another process works there")


def _forget(folder: Path) -> None:
    """Leave no empty folder behind."""
    with suppress(OSError):
        if os.listdir(folder) == [LOCK]:
            (folder / LOCK).unlink()
        folder.rmdir()


def _same(path: Path, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _dead(holder: list[str]) -> bool:
    """Whether the process that wrote its number and host into a lock is known to be dead."""
    if len(holder) != 2 or not holder[0].isdigit() or holder[1] != socket.gethostname():
        return False
    try:
        os.kill(int(holder[0]), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
