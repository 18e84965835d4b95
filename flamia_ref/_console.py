"""What the command line needs of the process: its streams, its signals, and files for results."""

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from flamia_ref._errors import line

_PROGRESS_AFTER = 2.0  # seconds
_BAR = 24  # characters


class Stopped(KeyboardInterrupt):
    """The process was told to end. A KeyboardInterrupt, so that no kernel's failure hides it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def take_over() -> None:
    """Make the process that of the command: result on standard output, all else on standard error.

    Whatever writes to descriptor 1 from now on, a kernel in C say, goes to standard error: only
    `sys.stdout` writes where standard output was. Streams that were closed lead nowhere. SIGTERM
    and SIGHUP raise Stopped, so that what is half-written is cleared away; one that was ignored
    (nohup) still is.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  open until the end
    sys.stdout.flush()
    sys.stdout = open(  # noqa: SIM115
        os.dup(sys.stdout.fileno()),
        "w",
        encoding=sys.stdout.encoding,
        errors="backslashreplace",
        closefd=False,
    )
    os.dup2(sys.stderr.fileno(), 1)
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, _: FrameType | None) -> None:
    raise Stopped(number)


def complain(message: str) -> None:
    """Print one line on standard error."""
    print(f"flamia-ref: {line(message)}", file=sys.stderr)


def show(text: str) -> None:
    """Write a result to standard output. Whoever stops reading it has seen enough.

    Raises ValueError where the disk refuses.
    """
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # What is still buffered must not be tried once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ValueError(f"cannot write the result: {error.strerror or error}") from error


def require_writable(file: str) -> None:
    """Require that a result can be written to a file, before the work for it is done.

    Raises ValueError where the folder is missing or may not be written in, or the file is a folder.
    """
    path = _target(file)
    try:
        if path.is_dir():
            raise ValueError(f"cannot write {file}: it is a folder")
        if not path.parent.is_dir():
            raise ValueError(f"cannot write {file}: there is no folder {path.parent}")
        # A regular file is replaced, which asks for its folder alone; a device is written to.
        opened = path if path.exists() and not path.is_file() else path.parent
        if not os.access(opened, os.W_OK):
            raise ValueError(f"cannot write {file}: {opened} may not be written")
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror or error}") from error


def require_new(file: str, *, force: bool) -> None:
    """Require that writing a result replaces no file, unless that is asked for. Devices and pipes are no files.

    Raises ValueError where it would, and where the file cannot be written.
    """
    if not force and _target(file).is_file():
        raise ValueError(f"{file} exists; choose another name, or replace it with --force")
    require_writable(file)


def same_file(one: str, other: str) -> bool:
    """Whether two names lead to one file."""
    return _target(one) == _target(other)


def write(file: str, content: str | bytes) -> None:
    """Write a file whole or not at all, unless it is a device or a pipe. Text is written as UTF-8.

    Raises ValueError where the disk refuses.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        path = _target(file)
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        scratch = path.with_name(f".{secrets.token_hex(8)}.part")
        try:
            scratch.write_bytes(data)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {file}: {error.strerror or error}") from error


def _target(file: str) -> Path:
    """Return where a file is: a symbolic link stays, and what it leads to is replaced."""
    return Path(os.path.realpath(file))


def progress() -> Callable[[int, int, str], None] | None:
    """Return a reporter that speaks on a terminal, and only when the work takes a while."""
    if not sys.stderr.isatty():
        return None
    start = time.monotonic()

    def report(done: int, total: int, name: str) -> None:
        if time.monotonic() - start > _PROGRESS_AFTER:
            print(f"{done} of {total} done, now {name}", file=sys.stderr)

    return report


@contextmanager
def bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """Give a reporter that draws a bar on a terminal when the work takes a while, and clears it at the end.

    It is None where standard error is no terminal; where the terminal cannot go back in a line, it
    prints a line a step.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield progress()
        return
    start = phase = time.monotonic()
    drawn, last = False, (0, 0)

    def report(done: int, total: int, name: str) -> None:
        nonlocal drawn, phase, last
        now = time.monotonic()
        if total != last[1] or done < last[0]:
            phase = (
                now  # of another count: what came before says nothing of how long this one takes
            )
        last = (done, total)
        if now - start > _PROGRESS_AFTER:
            drawn = True
            text = _bar(done, total, now - phase, name)[: max(20, _columns() - 1)]
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if drawn:
            with suppress(OSError):
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _bar(done: int, total: int, seconds: float, name: str) -> str:
    """One line: a bar, how much is done, how long it takes yet, and what is being done."""
    full = _BAR * done // max(total, 1)
    left = f", {_duration(seconds / done * (total - done))} left" if done else ""
    return f"[{'#' * full}{'-' * (_BAR - full)}] {done}/{total}{left}: {line(name)}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return (
        f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
        if minutes >= 60
        else f"{minutes}:{rest:02d}"
    )


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
