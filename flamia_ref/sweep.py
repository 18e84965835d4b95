"""Sweeps: independent pieces of work, in shards, on any engine, with the same results.

A piece of work is a name and an argument; a function of the argument gives its result. Neither the
order in which they are done nor who does them reaches a result, so a sweep may be cut in shards, and
run here, in processes, or on whatever has the interface of `concurrent.futures`.
"""

import importlib
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from flamia_ref._errors import line, shown

T = TypeVar("T")
Argument = TypeVar("Argument")
Result = TypeVar("Result")

Progress = Callable[[int, int, str], None]  # done, in all, the name of one that is being done

ATTEMPTS = 3
"""How often a piece of work is tried whose worker dies."""

MOST_PROCESSES = 1024
_MOST_SUBMITTED = 1024  # to an executor that is not ours, whose size nobody can ask for
_SECONDS_TO_CONNECT = 30

# A worker is one of many: each of these would start a thread a core.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


class Submitting(Protocol):
    """What a sweep needs of an executor: that of `concurrent.futures`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a call, and return its future."""
        ...


# None does the work here; a number is that of processes; a string is "serial", "processes" (one a
# core), or "dask:ADDRESS", the scheduler of a Dask cluster.
Executor = int | str | Submitting | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One of `count` parts of a sweep, counted from 1."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count <= 1_000_000:
            raise ValueError(f"shard {self} is none: the first of three is 1/3, the last 3/3")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @classmethod
    def parse(cls, text: "str | Shard") -> "Shard":
        """Read ``i/n``. Raises ValueError where it is not of that form."""
        if isinstance(text, Shard):
            return text
        match = re.fullmatch(r"([0-9]{1,7})/([0-9]{1,7})", text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                f"shard {shown(text)} is not of the form i/n; the first of three is 1/3"
            )
        return cls(index=int(match[1]), count=int(match[2]))

    def of(self, work: Sequence[T]) -> tuple[T, ...]:
        """Return this shard's part: every n-th piece, so that neighbours, often alike, are spread."""
        return tuple(work[self.index - 1 :: self.count])


def run(
    function: Callable[[Argument], Result],
    work: Mapping[str, Argument],
    *,
    executor: Executor = None,
    attempts: int = ATTEMPTS,
    progress: Progress | None = None,
) -> Generator[tuple[str, Result], None, None]:
    """Yield the name and the result of every piece of work, once, in the order in which they end.

    `function`, the arguments and the results are pickled where they leave this process. Where a
    worker dies, what it did is tried again, at most `attempts` times; what the function raises is
    raised here at once. Processes that the sweep started are ended when the iterator is closed.

    Raises ValueError for an executor that is none, for work whose worker dies every time, and where
    the executor takes no more work; TypeError for what is no executor.
    """
    if not isinstance(attempts, int) or attempts < 1:
        raise ValueError(f"attempts is {shown(attempts)}; it must be 1 or more")
    if executor is None or executor == "serial":
        return _serial(function, work, progress)
    return _Sweep(function, work, attempts, progress).run(executor)


def _serial(
    function: Callable[[Argument], Result], work: Mapping[str, Argument], progress: Progress | None
) -> Generator[tuple[str, Result], None, None]:
    for done, (name, argument) in enumerate(work.items()):
        if progress is not None:
            progress(done, len(work), name)
        yield name, function(argument)


class _Pool:
    """Processes of ours. When one dies all are ended, and started anew."""

    def __init__(self, processes: int) -> None:
        self.window = processes
        self._processes = processes
        self._pool = self._started()

    def _started(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
        )

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._pool.submit(call, *arguments)

    def renew(self) -> None:
        self.end()
        self._pool = self._started()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def end(self) -> None:
        # What is being done is of no use any more, and may take hours.
        for process in list((getattr(self._pool, "_processes", None) or {}).values()):
            process.terminate()
        self.close()


class _Lent:
    """An executor that is not ours: it is neither renewed nor closed."""

    window = _MOST_SUBMITTED

    def __init__(self, executor: Submitting) -> None:
        self._executor = executor

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._executor.submit(call, *arguments)

    def renew(self) -> None:
        """Hope that it takes work again."""


@contextmanager
def _opened(executor: Executor) -> Iterator[_Pool | _Lent]:
    match executor:
        case bool():
            raise TypeError(f"executor is {executor}; give a number of processes")
        case int() | "processes":
            count = _cores() if isinstance(executor, str) else executor
            if not 1 <= count <= MOST_PROCESSES:
                raise ValueError(
                    f"executor is {count} processes; it must be 1 to {MOST_PROCESSES} of them"
                )
            pool = _Pool(count)
            try:
                yield pool
            except BaseException:
                pool.end()
                raise
            pool.close()
        case str() if executor.startswith("dask:"):
            with _dask(executor.removeprefix("dask:")) as client:
                yield _Lent(client.get_executor(pure=False))
        case str():
            raise ValueError(
                f"executor {shown(executor)} is none; give a number of processes, serial, "
                "processes, or dask:ADDRESS"
            )
        case _ if callable(getattr(executor, "submit", None)):
            yield _Lent(executor)  # type: ignore[arg-type]
        case _:
            raise TypeError(
                f"executor is {shown(type(executor).__name__)}; give a number of processes, "
                '"dask:ADDRESS", or an object with the interface of concurrent.futures.Executor'
            )


@contextmanager
def _dask(address: str) -> Iterator[Any]:
    if not address:
        raise ValueError("executor dask: has no address; give dask:HOST:PORT, a scheduler's")
    try:
        distributed: Any = importlib.import_module("distributed")  # it has no types
    except ImportError as error:
        raise ImportError("executor dask: needs the package distributed; install it") from error
    try:
        client = distributed.Client(address, timeout=_SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise ValueError(f"no Dask scheduler answers at {shown(address)}: {error}") from error
    with client:
        yield client


class _Sweep:
    """One run on an executor: what waits, what is being done, and how often a worker died of it."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        work: Mapping[str, Any],
        attempts: int,
        progress: Progress | None,
    ) -> None:
        self._function = function
        self._work = work
        self._order = {name: place for place, name in enumerate(work)}
        self._attempts = attempts
        self._progress = progress
        self._waiting = deque(work)
        # Where a process dies nobody knows of what: they are done one at a time then.
        self._suspects: deque[str] = deque()
        self._running: dict[Future[Any], str] = {}
        self._deaths = dict.fromkeys(work, 0)
        self._done = 0

    def run(self, executor: Executor) -> Generator[tuple[str, Any], None, None]:
        with _opened(executor) as engine:
            try:
                while self._done < len(self._work):
                    self._submit(engine)
                    if self._progress is not None:
                        name = min(self._running.values(), key=self._order.__getitem__)
                        self._progress(self._done, len(self._work), name)
                    ended, _ = wait(self._running, return_when=FIRST_COMPLETED)
                    yield from self._results(ended, engine)
            finally:
                for future in self._running:
                    future.cancel()

    def _submit(self, engine: _Pool | _Lent) -> None:
        while self._suspects or self._waiting:
            if len(self._running) >= (1 if self._suspects else engine.window):
                return
            queue = self._suspects or self._waiting
            try:
                future = engine.submit(_call, self._function, self._work[queue[0]])
            except (RuntimeError, OSError) as error:  # BrokenExecutor is a RuntimeError
                if self._running:
                    return  # what is being done fails first, and says why
                self._died(queue[0], error)
                engine.renew()
            else:
                self._running[future] = queue.popleft()

    def _results(self, ended: set[Future[Any]], engine: _Pool | _Lent) -> Iterator[tuple[str, Any]]:
        raised: list[Exception] = []
        broken = False
        for future in [one for one in self._running if one in ended]:
            name = self._running.pop(future)
            try:
                error = future.exception()
            except CancelledError as cancelled:
                error = cancelled
            if error is not None:
                broken |= isinstance(error, BrokenExecutor)
                self._died(name, error)
                self._suspects.append(name)
                continue
            given, its = future.result()
            if its is not None:
                raised.append(its)
                continue
            self._done += 1
            yield name, given
        if raised:
            raise raised[0]
        if broken and isinstance(engine, _Pool):
            self._suspects.extend(self._running.values())
            self._running.clear()
            engine.renew()

    def _died(self, name: str, error: BaseException) -> None:
        """Count a failure that is none of the function's."""
        self._deaths[name] += 1
        if self._deaths[name] < self._attempts:
            return
        kind = type(error).__name__
        why = line(str(error))
        hint = (
            "; a program that makes packs in processes needs `if __name__ == '__main__':`"
            if isinstance(error, BrokenExecutor) and self._done == 0
            else ""
        )
        raise ValueError(
            f"{name} was not done: its worker failed {self._deaths[name]} times, at last with "
            f"{kind}{': ' if why else ''}{why}{hint}"
        ) from error


def _call(function: Callable[[Any], Any], argument: Any) -> tuple[Any, Exception | None]:
    """Call in a worker: what the function raises is a result, what else fails is the worker's."""
    try:
        return function(argument), None
    except Exception as error:  # noqa: BLE001  raised again by whoever asked
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001  any exception may be one that cannot travel
            return None, RuntimeError(f"{type(error).__name__}: {line(str(error))}")
        return None, error


def _begin_worker() -> None:
    """Begin a process of a pool: one thread, no Ctrl-C of its own, and no life without its parent."""
    os.environ.update(_ONE_THREAD)
    for name in ("SIGINT", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None:
            signal.signal(number, signal.SIG_IGN)  # the parent hears it too, and ends us
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_outlive, args=(parent,), daemon=True).start()


def _outlive(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
