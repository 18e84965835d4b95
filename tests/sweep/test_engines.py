"""A pack has the same bytes whoever makes it."""

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flamia_ref import golden
from flamia_ref.golden import making
from flamia_ref.golden.suites import SUITES
from tests.sweep.conftest import contents

RECIPES = ("flamia-mxfp8-folded", "bf16-fa4")


class Shuffled:
    """An executor that does what it is given in another order, when it is asked for a result."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = ThreadPoolExecutor(1)
        self.given: list[tuple[Future[Any], Any]] = []

    def submit(self, *call: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.append((future, call))
        self.random.shuffle(self.given)
        if len(self.given) == 4:
            for one, (function, *arguments) in self.given:
                one.set_result(function(*arguments))
        return future


@pytest.mark.parametrize("executor", ["serial", 2, "auto", Shuffled(1), Shuffled(2)])
def test_any_engine_gives_the_same_bytes(whole: Path, tmp_path: Path, executor: Any) -> None:
    told: list[tuple[int, int]] = []
    manifest = golden.make(
        tmp_path / "pack",
        suite="several",
        executor=executor,
        progress=lambda done, total, _: told.append((done, total)),
    )
    assert contents(tmp_path / "pack") == contents(whole)
    assert manifest == golden.load(whole).manifest
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]
    assert told[0] == (0, 4)
    assert {total for _, total in told} == {4}


def test_a_worker_of_other_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(making, "_simulated", lambda job: ("0" * 64, b""))
        with pytest.raises(ValueError, match="with other code than is here; install one version"):
            golden.make(tmp_path / "pack", suite="small", executor=pool)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_a_case_in_a_worker_is_that_of_the_case(tmp_path: Path) -> None:
    class Fails:
        def submit(self, *_: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result((None, ValueError("case tiny: o holds NaN")))
            return future

    with pytest.raises(ValueError, match="case tiny: o holds NaN"):
        golden.make(tmp_path / "pack", suite="small", executor=Fails())
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def cluster(workers: int) -> Iterator[Any]:
    """A Dask cluster of processes."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None
    ) as one:
        yield one


@pytest.mark.filterwarnings("ignore")  # those of distributed
def test_a_cluster_whose_worker_is_killed(whole: Path, tmp_path: Path) -> None:
    with cluster(2) as dask:
        killed: list[int] = []

        def kill(done: int, _: int, __: str) -> None:
            if done >= 1 and not killed:
                killed.append(next(iter(dask.workers.values())).pid)
                os.kill(killed[0], signal.SIGKILL)

        golden.make(
            tmp_path / "pack",
            suite="several",
            executor=f"dask:{dask.scheduler_address}",
            progress=kill,
        )
        assert killed
        assert killed[0] not in [worker.pid for worker in dask.workers.values()]
    assert contents(tmp_path / "pack") == contents(whole)


@pytest.mark.filterwarnings("ignore")
def test_a_cluster_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    from flamia_ref import sweep

    monkeypatch.setattr(sweep, "_SECONDS_TO_CONNECT", 0.5)
    with pytest.raises(ValueError, match=r"no Dask scheduler answers at 'tcp://127.0.0.1:1'"):
        golden.make(tmp_path / "pack", suite="small", executor="dask:tcp://127.0.0.1:1")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_the_smoke_suite_on_every_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "SUITES", SUITES)
    golden.make(tmp_path / "one", RECIPES)
    golden.make(tmp_path / "process", RECIPES, executor=1)
    golden.make(tmp_path / "processes", RECIPES, executor=4)
    shards = [tmp_path / f"shard-{index}" for index in (1, 2, 3)]
    for index, shard in enumerate(shards, 1):
        golden.make(shard, RECIPES, shard=f"{index}/3", executor=2)
    golden.merge(tmp_path / "merged", shards)
    names = ["process", "processes", "merged"]
    with contextlib.suppress(pytest.skip.Exception), cluster(3) as dask:
        pids = {worker.pid for worker in dask.workers.values()}

        def kill(done: int, total: int, _: str) -> None:
            if done in (total // 3, total // 2) and pids:
                os.kill(pids.pop(), signal.SIGKILL)

        golden.make(
            tmp_path / "cluster",
            RECIPES,
            executor=f"dask:{dask.scheduler_address}",
            progress=kill,
        )
        assert len(pids) < 3
        names.append("cluster")
    expected = contents(tmp_path / "one")
    assert len(expected) == 2 * len(SUITES["smoke"]) + 1
    for name in names:
        assert contents(tmp_path / name) == expected
