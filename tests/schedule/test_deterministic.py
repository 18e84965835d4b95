"""Deterministic backwards: what waits by hand, and what each order does to the bits."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES
from flamia_ref.attention.samples import bell
from flamia_ref.schedule.deterministic import DETERMINISTIC, recipe_in_order
from flamia_ref.schedule.launches import simulate
from flamia_ref.schedule.order import Order
from flamia_ref.schedule.simulation import Timeline, run
from flamia_ref.schedule.text import json_of_simulation, of_simulation
from flamia_ref.schedule.turns import turns_of
from flamia_ref.schedule.work import Problem, Size, work_of

TILES = Size(128, 128)


def triangle(name: str, *, latency: float = 0.0, causal: bool = True) -> Timeline:
    """One document of 3 tiles, products of 1 cycle, 3 multiprocessors."""
    work = work_of(Problem.of([0, 384], heads=1, causal=causal), "backward", TILES)
    order = DETERMINISTIC[name]
    turns = turns_of(work, np.ones(3), keys=order.keys, queries=order.queries, latency=latency)
    return run(np.zeros(3), order.order(work), 3, turns)


def test_orders_by_hand() -> None:
    # Key tile j meets query tiles j and later. Ascending: tile 1 adds to query 1 after tile 0, at 2, tile 2 at 3.
    found = triangle("ascending")
    assert (found.end.tolist(), found.waited.tolist()) == ([3, 3, 3], [0, 1, 2])
    # Shortest first: tile 2 adds to query 2 at 1; tile 1 to query 1 at 1, to query 2 at 2; tile 0 at 1, 2 and 3.
    found = triangle("spt")
    assert (found.end.tolist(), found.waited.tolist()) == ([3, 2, 1], [0, 0, 0])
    assert found.sm.tolist() == [2, 1, 0]
    # From the last query on: all three compute query 2 first, and add at 1.
    found = triangle("descending")
    assert (found.end.tolist(), found.waited.tolist()) == ([3, 2, 1], [0, 0, 0])
    # Without a mask all three compute query 0 first. Additions that take no time are made one after another at 1.
    found = triangle("ascending", causal=False)
    assert (found.end.tolist(), found.waited.tolist()) == ([3, 3, 3], [0, 0, 0])
    # Those that take half a cycle make tile j wait for j of them, once; shifted nobody waits.
    found = triangle("ascending", latency=0.5, causal=False)
    assert (found.end.tolist(), found.waited.tolist()) == ([3, 3.5, 4], [0, 0.5, 1])
    found = triangle("shifted", latency=0.5, causal=False)
    assert (found.end.tolist(), found.waited.tolist()) == ([3, 3, 3], [0, 0, 0])


def test_latency_by_hand() -> None:
    # All of query 2 are computed at 1: tile 0 adds at 1, tile 1 at 1.5, tile 2 at 2. Tile 0 adds to query 1 at 2 and
    # to query 0 at 3; tile 1 has its query 1 at 2.5, half a cycle after tile 0.
    found = triangle("descending", latency=0.5)
    assert found.end.tolist() == [3.0, 2.5, 2.0]
    assert found.waited.tolist() == [0.0, 0.5, 1.0]
    # Its turn comes while the addition before is not through: tile 1 computes query 1 at 2.5, and adds at 3.
    found = triangle("descending", latency=1.0)
    assert found.end.tolist() == [3.0, 3.0, 3.0]
    assert found.waited.tolist() == [0.0, 1.0, 2.0]
    found = triangle("descending", latency=1.5)
    # Query 2: 1, 2.5, 4. Query 1: tile 0 at 2, tile 1 computes it at 3.5, when it is open.
    assert found.end.tolist() == [3.0, 3.5, 4.0]
    # The longest chain has the latency in it.
    assert found.path == 4.0
    with pytest.raises(ValueError, match="latency is -1"):
        triangle("spt", latency=-1.0)


def test_no_latency_is_no_latency() -> None:
    work = work_of(Problem.of([0, 900, 2000, 2100], heads=3), "backward", TILES)
    for order in DETERMINISTIC.values():
        if order.name == "shifted":
            continue
        ends = []
        for latency in (0.0, 1e-12):
            turns = turns_of(
                work,
                np.full(len(work), 2.0),
                keys=order.keys,
                queries=order.queries,
                latency=latency,
            )
            ends.append(run(np.ones(len(work)), order.order(work), 5, turns).makespan)
        assert ends[0] == pytest.approx(ends[1], abs=1e-6)


def test_a_tile_that_is_issued_last_waits_for_none_that_is_not_begun() -> None:
    # One multiprocessor is enough for all but the shifted order, which needs all tiles of a head at once.
    work = work_of(Problem.of([0, 900, 1300], heads=2), "backward", TILES)
    for order in DETERMINISTIC.values():
        turns = turns_of(work, np.ones(len(work)), keys=order.keys, queries=order.queries)
        besides, places = np.zeros(len(work)), order.order(work)
        if order.name == "shifted":
            with pytest.raises(ValueError, match="this order stalls"):
                run(besides, places, 1, turns)
        else:
            assert run(besides, places, 1, turns).makespan == work.products.sum()
    assert isinstance(places, Order)


def test_simulate() -> None:
    problem = Problem.of([0, 1024, 1200, 4096], heads=8)
    plain = simulate(problem, "bf16-fa4", library="fa4", policy="natural")
    for name in ("ascending", "spt", "descending"):
        found = simulate(problem, "bf16-fa4", library="fa4", deterministic=name)
        forward, backward = found.launches
        assert (forward.policy, backward.policy) == ("fa4-varlen", name)
        assert forward.timeline.waited.sum() == 0
        timeline = backward.timeline
        # The same work, and what it waits for comes on top.
        assert timeline.work == pytest.approx(plain.launches[1].timeline.work)
        waited = float(timeline.waited.sum()) / timeline.sms / timeline.makespan
        stored = json.loads(json_of_simulation(found))["launches"][1]["waited_seconds"]
        assert stored == timeline.waited.sum() / backward.clock
        assert ("waits" in of_simulation(found)) is (waited > 5e-4)
        assert (waited > 0.05) is (name == "ascending")
    with pytest.raises(ValueError, match="unknown deterministic order 'stp'; did you mean 'spt'"):
        simulate(problem, "bf16-fa4", deterministic="stp")


def test_two_orders_have_other_bits_of_dq_alone() -> None:
    # Keys with a large mean, which cancels in dQ over all keys, but not over one tile of them.
    sample = bell((512,), 1, 1, 64)
    keys = (np.asarray(sample.k, np.float32) + 16).astype(ml_dtypes.bfloat16)
    bits = {}
    for name in ("ascending", "spt"):
        recipe = recipe_in_order("bf16-fa4", name)
        forward = attention.forward(sample.q, keys, sample.v, recipe, causal=True)
        found = attention.backward(sample.q, keys, sample.v, sample.dout, forward)
        bits[name] = {x: np.asarray(getattr(found, x)).tobytes() for x in ("dq", "dk", "dv")}
    assert bits["ascending"]["dq"] != bits["spt"]["dq"]
    assert bits["ascending"]["dk"] == bits["spt"]["dk"]
    assert bits["ascending"]["dv"] == bits["spt"]["dv"]


def test_the_recipe_of_an_order() -> None:
    spt = recipe_in_order("bf16-fa4", "spt")
    assert spt.name == "bf16-fa4, spt"
    assert (spt.backward.dq.tile_order, spt.backward.dk.tile_order) == ("descending", "ascending")
    # It is the schedule of that name.
    wanted = RECIPES["bf16-fa4"].scheduled("dq descending")
    assert dataclasses.replace(spt, name="x") == dataclasses.replace(wanted, name="x")
    shifted = recipe_in_order("flamia-mxfp8", "shifted")
    wanted = RECIPES["flamia-mxfp8"].scheduled("shifted")
    assert dataclasses.replace(shifted, name="x") == dataclasses.replace(wanted, name="x")
    with pytest.raises(ValueError, match="has no backward"):
        recipe_in_order("fp8-fa4", "spt")
    with pytest.raises(ValueError, match="unknown deterministic order"):
        recipe_in_order("bf16-fa4", "sorted")
