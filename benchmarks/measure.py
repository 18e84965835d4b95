"""Timing a call beside a peer's, turn by turn, so that both see the same machine."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

FEWEST_ROUNDS = 5
TURN = 0.02  # seconds; a call that is shorter is repeated within its turn


@dataclass(frozen=True, kw_only=True)
class Result:
    """One call beside one peer.

    Attributes:
        benchmark: the group that it belongs to.
        what: what was called.
        work: how much a call does, in `unit`; None where the time of a call is the figure.
        unit: of the work.
        seconds: a call, the median over turns.
        fastest: a call, the fastest turn.
        peer: what it is measured beside.
        peer_seconds: a call of the peer, the median.
        peer_work: how much a call of the peer does.
        ratio: the median over rounds of the peer's time over ours, for the same work. Above 1 we
            are faster.
        rounds: turns that each of the two had.
        bound: seconds that moving the bytes of a call takes at the rate of a copy; None where no
            such bound was named.
    """

    benchmark: str
    what: str
    work: float | None = None
    unit: str = "s"
    seconds: float
    fastest: float
    peer: str
    peer_seconds: float
    peer_work: float | None = None
    ratio: float
    rounds: int
    bound: float | None = None

    @property
    def rate(self) -> float | None:
        """Work a second."""
        return None if self.work is None else self.work / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """All fields and the rate."""
        return {**asdict(self), "rate": self.rate}


def compare(
    benchmark: str,
    what: str,
    ours: Callable[[], object],
    peer: str,
    theirs: Callable[[], object],
    *,
    seconds: float,
    work: float | None = None,
    unit: str = "s",
    peer_work: float | None = None,
) -> Result:
    """Call both to warm up, then in turns for about `seconds`."""
    repeats = [_repeats(call) for call in (ours, theirs)]
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while len(times) < FEWEST_ROUNDS or time.perf_counter() < end:
        times.append((_time(ours, repeats[0]), _time(theirs, repeats[1])))
    own, other = zip(*times, strict=True)
    share = 1.0 if work is None or peer_work is None else work / peer_work
    return Result(
        benchmark=benchmark,
        what=what,
        work=work,
        unit=unit,
        seconds=statistics.median(own),
        fastest=min(own),
        peer=peer,
        peer_seconds=statistics.median(other),
        peer_work=work if peer_work is None else peer_work,
        ratio=statistics.median(share * y / x for x, y in times),
        rounds=len(times),
    )


def copy_rate(x: np.ndarray[Any, Any]) -> float:
    """Bytes a second that copying x reads and writes, the median of some turns."""
    target = np.empty_like(x)
    np.copyto(target, x)
    times = [_time(lambda: np.copyto(target, x), 1) for _ in range(15)]
    return 2 * x.nbytes / statistics.median(times)


def _repeats(call: Callable[[], object]) -> int:
    """Calls that fill a turn."""
    call()  # compiles, fills caches
    return max(1, round(TURN / max(_time(call, 1), 1e-7)))


def _time(call: Callable[[], object], repeats: int) -> float:
    """Seconds a call, the mean of `repeats` in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def machine() -> dict[str, Any]:
    """What the figures depend on besides our code."""
    installed = {}
    for package in ("numpy", "jax", "torch", "torchao", "mmasim"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = None
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": installed,
    }


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    if described.is_file():
        for line in described.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
