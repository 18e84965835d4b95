"""Timelines: by hand, against every assignment, and what must hold of any."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flamia_ref.schedule.hardware import GPUS
from flamia_ref.schedule.order import Order
from flamia_ref.schedule.policies import POLICIES
from flamia_ref.schedule.simulation import Timeline, run
from flamia_ref.schedule.turns import ALONG, Turns, turns_of
from flamia_ref.schedule.work import Problem, Size, Work, work_of

TILES = Size(128, 128)


def natural(count: int) -> Order:
    return Order(places=np.arange(count))


def test_by_hand() -> None:
    # Two multiprocessors, 3 2 2: the first takes 3, the second 2 and then 2.
    found = run(np.array([3.0, 2.0, 2.0]), natural(3), 2)
    assert found.sm.tolist() == [0, 1, 1]
    assert found.start.tolist() == [0.0, 0.0, 2.0]
    assert found.end.tolist() == [3.0, 2.0, 4.0]
    assert (found.makespan, found.work, found.lower_bound, found.tail) == (4.0, 7.0, 3.5, 1.0)
    assert found.utilisation == 7 / 8
    # Two equally free: the lower index takes the tile.
    assert run(np.ones(4), natural(4), 2).sm.tolist() == [0, 1, 0, 1]
    # Named multiprocessors, in the order given.
    fixed = run(
        np.array([1.0, 2.0, 4.0]), Order(places=np.array([2, 0, 1]), sm=np.array([1, 1, 0])), 2
    )
    assert fixed.start.tolist() == [4.0, 0.0, 0.0]
    assert fixed.sm.tolist() == [1, 0, 1]


def test_nothing_to_do() -> None:
    found = run(np.zeros(0), natural(0), 3)
    assert (found.makespan, found.lower_bound, found.utilisation, found.tail) == (
        0.0,
        0.0,
        1.0,
        0.0,
    )


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 3))
def test_longest_first_is_within_a_third_of_the_best(costs: list[int], sms: int) -> None:
    cycles = np.array(costs, dtype=np.float64)
    best = min(
        max(sum(c for c, at in zip(costs, places, strict=True) if at == sm) for sm in range(sms))
        for places in itertools.product(range(sms), repeat=len(costs))
    )
    found = run(cycles, Order(places=np.argsort(-cycles, kind="stable")), sms)
    # Graham 1969: (4/3 - 1/(3 m)) of the optimum.
    assert found.lower_bound <= best <= found.makespan
    assert found.makespan * 3 * sms <= best * (4 * sms - 1)


@st.composite
def works(draw) -> Work:
    lengths = draw(st.lists(st.integers(0, 900), min_size=1, max_size=6))
    heads = draw(st.sampled_from((1, 2, 4)))
    problem = Problem.of(
        [0, *np.cumsum(lengths).tolist()],
        heads=heads,
        kv_heads=draw(st.sampled_from((1, heads))),
        causal=draw(st.booleans()),
    )
    return work_of(problem, draw(st.sampled_from(("forward", "backward"))), TILES)


def check(found: Timeline, cycles: np.ndarray) -> None:
    """No multiprocessor does two tiles at once, every tile takes what it takes, none starts before 0."""
    assert (found.start >= 0).all()
    np.testing.assert_allclose(found.end - found.start - found.waited, cycles, rtol=0, atol=1e-6)
    for sm in range(found.sms):
        own = np.flatnonzero(found.sm == sm)
        own = own[np.lexsort((found.end[own], found.start[own]))]
        assert (found.start[own][1:] >= found.end[own][:-1] - 1e-9).all()
    assert found.makespan >= found.lower_bound - 1e-6
    assert 0 <= found.utilisation <= 1 + 1e-9


@settings(max_examples=40)
@given(works(), st.sampled_from(list(POLICIES)), st.sampled_from(list(GPUS)))
def test_every_policy_runs_every_tile_once(work: Work, name: str, gpu: str) -> None:
    policy, chip = POLICIES[name], GPUS[gpu]
    cycles = work.products * 3.0 + 1.0
    if policy.dense and len(set(work.problem.mask.queries.lengths)) > 1:
        with pytest.raises(ValueError, match="of documents of one length"):
            policy.of(work, chip, cycles)
        return
    order = policy.of(work, chip, cycles)
    assert sorted(order.places.tolist()) == list(range(len(work)))
    check(run(cycles, order, chip.sms.value), cycles)


@settings(max_examples=60)
@given(works(), st.sampled_from(ALONG), st.sampled_from(ALONG), st.integers(1, 9), st.booleans())
def test_turns_are_kept(work: Work, keys: str, queries: str, sms: int, backwards: bool) -> None:
    work = work_of(work.problem, "backward", TILES)
    turns = turns_of(work, np.full(len(work), 2.0), keys=keys, queries=queries)
    besides = np.full(len(work), 1.0)
    places = np.arange(len(work))[::-1] if backwards else np.arange(len(work))
    try:
        found = run(besides, Order(places=places.copy()), sms, turns)
    except ValueError:
        assert sms < len(work)  # a stall: whoever is begun waits for what is not
        return
    check(found, besides + 2.0 * work.products)
    ends = added(found, turns, besides)
    for tile in range(len(work)):
        last = turns.first[tile + 1] - 1
        wanted = ends[last] if work.products[tile] else found.start[tile] + besides[tile]
        assert found.end[tile] == pytest.approx(wanted)


def added(found: Timeline, turns: Turns, besides: np.ndarray) -> np.ndarray:
    """When each product is added, from the starts alone: the least times that keep both kinds of order, by repeating
    what each waits for until nothing moves."""
    count = len(turns.row)
    before = np.full(count, -1)
    for row in range(turns.rows):
        own = np.flatnonzero(turns.row == row)
        own = own[np.argsort(turns.turn[own])]
        assert turns.turn[own].tolist() == list(range(len(own)))
        before[own[1:]] = own[:-1]
    ends = np.zeros(count)
    while True:
        old = ends.copy()
        for tile in range(len(found.start)):
            now = found.start[tile] + besides[tile]
            for at in range(turns.first[tile], turns.first[tile + 1]):
                now = max(now + turns.cycles[at], ends[before[at]] if before[at] >= 0 else 0.0)
                ends[at] = now
        if (ends == old).all():
            return ends


def test_a_chain_by_hand() -> None:
    # One causal document of 3 tiles on 3 multiprocessors. Key tile 0 meets queries 0 1 2, tile 1 meets 1 2, tile 2
    # meets 2. Ascending: tile 1 adds to query 1 after tile 0 has, at 2, to query 2 after 3; tile 2 at last, at 3.
    work = work_of(Problem.of([0, 384], heads=1), "backward", TILES)
    turns = turns_of(work, np.ones(3), keys="ascending", queries="ascending")
    found = run(np.zeros(3), natural(3), 3, turns)
    assert found.end.tolist() == [3.0, 3.0, 3.0]
    assert found.waited.tolist() == [0.0, 1.0, 2.0]
    assert found.path == 3.0
    # From the last query on nobody waits but for the sum of query 2: tile 0 adds at 1, tile 1 and tile 2 after it.
    turns = turns_of(work, np.ones(3), keys="ascending", queries="descending")
    found = run(np.zeros(3), natural(3), 3, turns)
    assert found.end.tolist() == [3.0, 2.0, 1.0]
    # The last tile first, one multiprocessor: it waits for tile 0, which is never begun.
    with pytest.raises(
        ValueError, match="1 of 1 multiprocessors wait for tiles that are not begun"
    ):
        run(np.zeros(3), Order(places=np.array([2, 1, 0])), 1, turns)


def test_bad_input() -> None:
    for call, message in (
        (lambda: run(np.ones(2), natural(2), 0), "sms is 0"),
        (lambda: run(np.ones(2), natural(3), 1), "2 cycles for 3 tiles"),
        (lambda: run(np.array([1.0, np.nan]), natural(2), 1), "finite and not negative"),
        (lambda: run(np.array([1.0, -1.0]), natural(2), 1), "finite and not negative"),
        (lambda: Order(places=np.array([0, 0])), "must have each of them once"),
        (lambda: Order(places=np.array([0, 2])), "must have each of them once"),
        (lambda: Order(places=np.array([0, 1]), sm=np.array([0])), "1 multiprocessors for 2 tiles"),
        (lambda: POLICIES["ltp"], "did you mean 'lpt'"),
        (lambda: GPUS["B100"], "GPU"),
    ):
        with pytest.raises(Exception, match=message):
            call()
