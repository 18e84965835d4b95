"""The harness of the benchmarks: what it counts and prints, never how long something takes."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import measure
from tests.repository.layout import ROOT


class Clock:
    """A clock that moves only when a call says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.calls.append(name)
            self.now += seconds

        return run


def test_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    result = measure.compare(
        "b",
        "w",
        clock.call("ours", 0.5),
        "p",
        clock.call("theirs", 0.25),
        seconds=6,
        work=100.0,
        unit="x",
        peer_work=200.0,
    )
    warm_up = ["ours"] * 2 + ["theirs"] * 2
    assert clock.calls == warm_up + ["ours", "theirs"] * 8  # 6 s of 0.75 s each
    assert (result.seconds, result.fastest, result.peer_seconds) == (0.5, 0.5, 0.25)
    assert result.rounds == 8
    assert result.rate == 200
    assert result.ratio == 0.25  # the peer does twice the work in half the time
    assert (
        command.line(result)
        == "w: 200 x/s (best 200 x/s), 4 times slower than p (800 x/s), 8 rounds"
    )


def test_short_calls_fill_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    result = measure.compare(
        "b", "w", clock.call("ours", 1 / 128), "p", clock.call("theirs", 1), seconds=0.1
    )
    assert result.seconds == 1 / 128
    assert result.ratio == 128
    assert clock.calls.count("ours") == 2 + 3 * measure.FEWEST_ROUNDS
    assert clock.calls.count("theirs") == 2 + measure.FEWEST_ROUNDS


def test_the_bound_of_moving_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    result = measure.compare(
        "b", "w", clock.call("ours", 1), "p", clock.call("theirs", 3), seconds=0.1
    )
    bound = dataclasses.replace(result, bound=0.25)
    assert "0.25 of the bound of moving its bytes (250.0 ms)" in command.line(bound)
    assert bound.to_dict()["bound"] == 0.25


def test_few_rounds_even_where_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    result = measure.compare(
        "b", "w", clock.call("ours", 1), "p", clock.call("theirs", 3), seconds=0.1
    )
    assert result.rounds == measure.FEWEST_ROUNDS
    assert result.rate is None
    assert (
        command.line(result)
        == "w: 1.000 s (best 1.000 s), 3 times as fast as p (3.000 s), 5 rounds"
    )


def fake(seconds: float) -> Any:
    yield measure.Result(
        benchmark="fake",
        what="w",
        work=3e9,
        unit="MAC",
        seconds=1.0,
        fastest=1.0,
        peer="p",
        peer_seconds=2.0,
        peer_work=3e9,
        ratio=2.0,
        rounds=int(seconds),
    )


def test_json_has_standard_output_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "BENCHMARKS", {"fake": fake, "other": fake})
    monkeypatch.setattr(sys, "argv", ["benchmarks", "fake", "--seconds", "7", "--json"])
    assert command.main() == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert [result["rate"] for result in document["results"]] == [3e9]
    assert document["machine"]["cores"] >= 1
    assert (
        "w: 3 G MAC/s (best 3 G MAC/s), 2 times as fast as p (1.5 G MAC/s), 7 rounds" in printed.err
    )


def test_an_unknown_name_is_refused() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", "matmuls"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "unknown benchmark 'matmuls'; allowed: arithmetic, " in run.stderr
