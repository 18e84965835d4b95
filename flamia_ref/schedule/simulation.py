"""Tiles on streaming multiprocessors over time: who computes what when, who waits, and what no order can beat."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref._errors import shown
from flamia_ref.schedule.order import Order
from flamia_ref.schedule.turns import Turns

Floats = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """When each tile ran, in cycles from the start of the launch; an entry a tile, in the order of the work.

    Attributes:
        sms: how many streaming multiprocessors there are.
        sm: which of them computed the tile.
        start, end: when it began there and when it was done.
        waited: how long it waited in between for its turns to add.
        path: the longest chain of tile products, each of which waits for the one before it.
    """

    sms: int
    sm: Counts
    start: Floats
    end: Floats
    waited: Floats
    path: float

    @property
    def makespan(self) -> float:
        """From the start to the last tile's end."""
        return float(self.end.max(initial=0.0))

    @property
    def work(self) -> float:
        """Cycles of all tiles, without waiting."""
        return float((self.end - self.start - self.waited).sum())

    @property
    def lower_bound(self) -> float:
        """What no order can beat: the longest chain, and all work shared evenly."""
        return max(self.path, self.work / self.sms)

    @property
    def utilisation(self) -> float:
        """The share of all multiprocessors' time in which they computed; 1 for no work."""
        return self.work / (self.sms * self.makespan) if self.makespan else 1.0

    @property
    def tail(self) -> float:
        """From when the first multiprocessor has nothing left to do to the end."""
        last = np.zeros(self.sms)
        np.maximum.at(last, self.sm, self.end)
        return self.makespan - float(last.min(initial=self.makespan))


def run(cycles: Floats, order: Order, sms: int, turns: Turns | None = None) -> Timeline:
    """Run tiles on `sms` multiprocessors, one at a time each.

    Args:
        cycles: what each tile takes [tiles], in the order of the work, not negative; with `turns` what it takes besides
            its tile products.
        order: in which order they are taken, and where to.
        sms: multiprocessors.
        turns: what waits for what, where sums have a fixed order; None where nothing waits.

    Returns: the timeline. It is the same in every run: of multiprocessors that are free at once the one with the least
    index takes the next tile.

    Raises: ValueError for bad cycles or sms, and for an order in which tiles wait for tiles that are never begun.
    """
    if isinstance(sms, bool) or not isinstance(sms, int) or sms < 1:
        raise ValueError(f"sms is {shown(sms)}; it must be a positive integer")
    if len(cycles) != len(order.places):
        raise ValueError(f"{len(cycles)} cycles for {len(order.places)} tiles; give one a tile")
    if not (np.isfinite(cycles).all() and (cycles >= 0).all()):
        raise ValueError("cycles must be finite and not negative")
    if turns is not None:
        return _with_turns(cycles, order, sms, turns)
    taken = cycles[order.places]
    if order.sm is None:
        start, sm = _next_free(taken, sms)
    else:
        start, sm = _assigned(taken, order.sm), order.sm
    place = np.empty(len(taken), dtype=np.int64)
    place[order.places] = np.arange(len(taken))
    return Timeline(
        sms=sms,
        sm=sm[place],
        start=start[place],
        end=(start + taken)[place],
        waited=np.zeros(len(taken)),
        path=float(cycles.max(initial=0.0)),
    )


def _next_free(cycles: Floats, sms: int) -> tuple[Floats, Counts]:
    """The next tile goes to whoever is free first."""
    free = [(0.0, sm) for sm in range(sms)]
    start, sms_of = [], []
    replace = heapq.heapreplace
    for one in cycles.tolist():
        now, sm = free[0]
        start.append(now)
        sms_of.append(sm)
        replace(free, (now + one, sm))
    return np.array(start), np.array(sms_of, dtype=np.int64)


def _assigned(cycles: Floats, sm: Counts) -> Floats:
    """Every multiprocessor computes its own tiles one after another."""
    by_sm = np.argsort(sm, kind="stable")
    sorted_cycles, owner = cycles[by_sm], sm[by_sm]
    start = np.empty_like(cycles)
    edges = [*np.flatnonzero(np.diff(owner, prepend=-1)).tolist(), len(owner)]
    for begin, end in itertools.pairwise(edges):
        own = sorted_cycles[begin:end]
        start[by_sm[begin:end]] = np.concatenate([[0.0], np.cumsum(own)[:-1]])
    return start


def _with_turns(cycles: Floats, order: Order, sms: int, turns: Turns) -> Timeline:
    """Event by event: a tile product is computed, waits for its turn to be added, and then lets the next one go on."""
    tiles = len(cycles)
    places = order.places.tolist()
    queues, shared = _queues(order, places, sms)
    first, rows, turn, step = (
        turns.first.tolist(),
        turns.row.tolist(),
        turns.turn.tolist(),
        turns.cycles.tolist(),
    )
    besides = cycles.tolist()
    next_turn = [0] * turns.rows
    chain = [0.0] * turns.rows  # the longest chain up to when each row is open again
    latency, opens = turns.latency, [0.0] * turns.rows
    computed: dict[int, float] = {}  # when products that wait were computed
    start, end, waited = np.zeros(tiles), np.zeros(tiles), np.zeros(tiles)
    sm_of = np.full(tiles, -1, dtype=np.int64)
    path = [0.0] * tiles
    waiting: dict[tuple[int, int], tuple[int, int, float, int]] = {}
    events: list[
        tuple[float, int, int, int]
    ] = []  # when a product is computed, its multiprocessor, tile and place
    longest, done = 0.0, 0

    def begin(sm: int, now: float) -> None:
        queue = queues[0] if shared else queues[sm]
        if queue:
            tile = queue.pop()
            sm_of[tile], start[tile], path[tile] = sm, now, besides[tile]
            at = first[tile]
            if at < first[tile + 1]:
                heapq.heappush(events, (now + besides[tile] + step[at], sm, tile, at))
            else:
                heapq.heappush(events, (now + besides[tile], sm, tile, -1))

    for sm in range(sms):
        begin(sm, 0.0)
    while events:
        now, sm, tile, at = heapq.heappop(events)
        if at < 0:  # a tile without products
            end[tile], longest, done = now, max(longest, path[tile]), done + 1
            begin(sm, now)
            continue
        row = rows[at]
        if next_turn[row] != turn[at]:
            waiting[row, turn[at]] = (sm, tile, now, at)
            continue
        if opens[row] > now:  # its turn, but the addition before it is not through
            computed[at] = now
            heapq.heappush(events, (opens[row], sm, tile, at))
            continue
        # Added now; whoever waits for it is added at once after it, and so on.
        ready: tuple[int, int, float, int] | None = (sm, tile, computed.pop(at, now), at)
        while ready is not None:
            sm, tile, since, at = ready
            waited[tile] += now - since
            reached = max(path[tile] + step[at], chain[row])
            path[tile], chain[row] = reached, reached + latency
            next_turn[row] += 1
            opens[row] = now + latency
            ready = waiting.pop((row, next_turn[row]), None)
            if ready is not None and latency:
                computed[ready[3]] = ready[2]
                heapq.heappush(events, (opens[row], ready[0], ready[1], ready[3]))
                ready = None
            at += 1
            if at < first[tile + 1]:
                heapq.heappush(events, (now + step[at], sm, tile, at))
            else:
                end[tile] = now
                longest = max(longest, reached)
                done += 1
                begin(sm, now)
    if done < tiles:
        raise ValueError(
            f"{len(waiting)} of {sms} multiprocessors wait for tiles that are not begun: this order stalls; take one"
            " that begins a tile after those it waits for, or more multiprocessors"
        )
    return Timeline(sms=sms, sm=sm_of, start=start, end=end, waited=waited, path=longest)


def _queues(order: Order, places: list[int], sms: int) -> tuple[list[list[int]], bool]:
    """Tiles to take, the next one last: one queue for all, or one each."""
    if order.sm is None:
        return [places[::-1]], True
    queues: list[list[int]] = [[] for _ in range(sms)]
    for place, sm in zip(reversed(places), reversed(order.sm.tolist()), strict=True):
        queues[sm].append(place)
    return queues, False
