"""Every piece of work is done, once, on every engine, whoever dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import sweep
from flamia_ref.sweep import Shard
from tests.sweep import functions

ROOT = Path(__file__).resolve().parents[2]
WORK = {f"case-{number}": number for number in range(7)}
SQUARES = {"case-0": 0, "case-1": 1, "case-2": 4, "case-3": 9, "case-4": 16, "case-5": 25} | {
    "case-6": 36
}


class Odd:
    """An executor whose futures and refusals are chosen: each entry is one submission."""

    def __init__(self, *behaviours: str) -> None:
        self.behaviours = list(behaviours)
        self.submitted = 0

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        self.submitted += 1
        behaviour = self.behaviours.pop(0) if self.behaviours else "well"
        future: Future[Any] = Future()
        match behaviour:
            case "refused":
                raise RuntimeError("cannot schedule new futures after shutdown")
            case "cancelled":
                future.cancel()
                future.set_running_or_notify_cancel()
            case "lost":
                future.set_exception(OSError("the worker went away"))
            case _:
                future.set_result(call(*arguments))
        return future


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("1/3", (0, 3, 6)),
        ("2/3", (1, 4)),
        ("3/3", (2, 5)),
        ("1/1", (0, 1, 2, 3, 4, 5, 6)),
        ("9/9", ()),
    ],
)
def test_shards(text: str, part: tuple[int, ...]) -> None:
    assert Shard.parse(text).of(range(7)) == part
    assert str(Shard.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["0/3", "4/3", "1", "1/0", "a/b", "-1/3", "1/3/5", "", " 1/3", "²/3"]
)
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(ValueError, match="the first of three is 1/3"):
        Shard.parse(text)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_shards_hold_everything_once(count: int) -> None:
    parts = [Shard(index=index, count=count).of(range(7)) for index in range(1, count + 1)]
    assert sorted(one for part in parts for one in part) == list(range(7))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("executor", [None, "serial", 1, 2])
def test_engines(executor: Any) -> None:
    told: list[tuple[int, int]] = []
    found = list(
        sweep.run(
            functions.square,
            WORK,
            executor=executor,
            progress=lambda done, total, name: told.append((done, total)),
        )
    )
    assert len(found) == len(WORK)
    assert dict(found) == SQUARES
    assert told[0] == (0, 7)
    assert told[-1][0] <= 6
    assert told == sorted(told)


def test_an_executor_that_is_lent_is_not_closed() -> None:
    with ThreadPoolExecutor(3) as pool:
        assert dict(sweep.run(functions.square, WORK, executor=pool)) == SQUARES
        assert pool.submit(functions.square, 5).result() == 25


def test_nothing_to_do() -> None:
    for executor in (None, 2):
        assert list(sweep.run(functions.square, {}, executor=executor)) == []


@pytest.mark.parametrize(
    ("executor", "error", "message"),
    [
        (0, ValueError, "executor is 0 processes"),
        (-1, ValueError, "1 to 1024"),
        (True, TypeError, "give a number of processes"),
        ("threads", ValueError, "executor 'threads' is none; give a number of processes, serial"),
        ("dask:", ValueError, "has no address"),
        (1.5, TypeError, "executor is 'float'"),
    ],
)
def test_what_is_no_executor(executor: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(sweep.run(functions.square, WORK, executor=executor))


@pytest.mark.parametrize("executor", [None, 2])
def test_what_the_function_raises_is_raised(executor: Any) -> None:
    with pytest.raises(ValueError, match="three is refused"):
        dict(sweep.run(functions.failing, WORK, executor=executor))


def test_an_error_that_cannot_travel_is_told() -> None:
    with pytest.raises(RuntimeError, match="Unpicklable: 4 and 4"):
        dict(sweep.run(functions.failing_oddly, {"one": 4}, executor=1))


def deadly(folder: Path, **deaths: int) -> dict[str, tuple[str, int, int]]:
    return {
        name: (str(folder), number, deaths.get(f"n{number}", 0)) for name, number in WORK.items()
    }


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    found = list(sweep.run(functions.dying, deadly(tmp_path, n1=1, n4=2), executor=2))
    assert sorted(found) == sorted(WORK.items())
    calls = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert calls["1"] == 2
    assert calls["4"] == 3
    # A neighbour of one that dies is done twice at most for each death.
    assert all(count <= 4 for count in calls.values())


def test_work_that_always_kills_is_named(tmp_path: Path) -> None:
    found: list[tuple[str, int]] = []
    results = sweep.run(functions.dying, deadly(tmp_path, n3=99), executor=2)
    with pytest.raises(
        ValueError, match=r"case-3 was not done: its worker failed 3 times"
    ) as caught:
        found.extend(results)
    assert "BrokenProcessPool" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(dict(found)) == len(found)
    assert "case-3" not in dict(found)
    assert (tmp_path / "3").stat().st_size == 3


def test_work_that_leaves_is_named() -> None:
    with pytest.raises(ValueError, match=r"one was not done: .* SystemExit: 4"):
        dict(sweep.run(functions.leaving, {"one": 4}, executor=1, attempts=2))


def test_an_executor_that_loses_work() -> None:
    odd = Odd("lost", "well", "cancelled", "well", "lost")
    assert dict(sweep.run(functions.square, WORK, executor=odd)) == SQUARES
    assert odd.submitted == 7 + 3


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("lost", "OSError: the worker went away"),
        ("cancelled", CancelledError.__name__),
        ("refused", "RuntimeError: cannot schedule new futures"),
    ],
)
def test_an_executor_that_never_works(behaviour: str, reason: str) -> None:
    odd = Odd(*[behaviour] * 100)
    with pytest.raises(ValueError, match=f"was not done: its worker failed 3 times.*{reason}"):
        dict(sweep.run(functions.square, {"one": 1}, executor=odd))


def test_an_executor_that_refuses_for_a_while() -> None:
    odd = Odd("well", "refused", "well", "refused", "refused")
    assert dict(sweep.run(functions.square, WORK, executor=odd)) == SQUARES


def test_a_worker_has_one_thread() -> None:
    (_, (pid, names)) = next(iter(sweep.run(functions.environment, {"one": 1}, executor=1)))
    assert pid != os.getpid()
    assert names["OMP_NUM_THREADS"] == "1"
    assert "intra_op_parallelism_threads=1" in names["XLA_FLAGS"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool]) -> bool:
    for _ in range(1200):
        if condition():
            return True
        time.sleep(0.05)
    return False


PROGRAM = """
import sys
from flamia_ref import sweep
from tests.sweep import functions
if __name__ == "__main__":
    work = {"a": (sys.argv[1], 1), "b": (sys.argv[1], 2)}
    list(sweep.run(functions.sleeping, work, executor=2))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    script, folder = tmp_path / "program.py", tmp_path / "pids"
    folder.mkdir()
    script.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert until(lambda: len(list(folder.iterdir())) == 2)
        pids = [int(path.name) for path in folder.iterdir()]
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert until(lambda: not any(map(alive, pids)))
    finally:
        process.kill()
    # The workers have nothing to say of a Ctrl-C.
    assert errors.count("Traceback") == (1 if number == signal.SIGINT else 0)


def test_closing_early_ends_the_workers() -> None:
    with closing(sweep.run(functions.environment, WORK, executor=2)) as results:
        _, (pid, _) = next(results)
    assert until(lambda: not alive(pid))
