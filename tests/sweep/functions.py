"""Functions for workers: they are found by name in another process."""

import os
import signal
import time
from pathlib import Path


def square(number: int) -> int:
    return number * number


def failing(number: int) -> int:
    if number == 3:
        raise ValueError("three is refused\nin two lines")
    return number


class Unpicklable(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def failing_oddly(number: int) -> int:
    raise Unpicklable(number, number)


def leaving(number: int) -> int:
    raise SystemExit(number)


def dying(given: tuple[str, int, int]) -> int:
    """Count the calls in a folder, and die in the first `deaths` of them."""
    folder, number, deaths = given
    calls = Path(folder) / str(number)
    with open(calls, "ab") as file:
        file.write(b".")
    if calls.stat().st_size <= deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def environment(_: int) -> tuple[int, dict[str, str]]:
    return os.getpid(), {
        name: os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "XLA_FLAGS")
    }


def sleeping(given: tuple[str, int]) -> int:
    folder, number = given
    (Path(folder) / f"{os.getpid()}").touch()
    time.sleep(600)
    return number
