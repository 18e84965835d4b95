"""Sets of tokens, one for each token of something else: unions of runs, put together without listing a token."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """For each token a run of packed tokens: from `begin` to before `end`, none where `end` is not beyond `begin`.

    Where there are runs, neither end goes back from one token to the next, and the runs of neighbours leave no gap:
    the union over a run of tokens is then one run, or what holds it.

    Attributes:
        begin, end: int64 [tokens].
        whole: whether a run stands for all tokens that there are, in every document.
        alone: whether each run is the token itself, or none.
    """

    begin: Places
    end: Places
    whole: bool = False
    alone: bool = False

    @functools.cached_property
    def some(self) -> Flags:
        """Which tokens have a run."""
        return np.asarray(self.begin < self.end)

    @functools.cached_property
    def everywhere(self) -> bool:
        """Whether every token has one."""
        return bool(self.some.all())

    @functools.cached_property
    def nowhere(self) -> bool:
        """Whether no token has one."""
        return not self.some.any()

    @functools.cached_property
    def _neighbours(self) -> tuple[Places, Places]:
        """The next token that has a run, from each one on, and the last one up to it."""
        place = np.arange(len(self.begin))
        following = np.where(self.some, place, len(place))[::-1]
        following = np.minimum.accumulate(following)[::-1]
        return following, np.maximum.accumulate(np.where(self.some, place, -1))

    def where(self, some: Flags) -> Runs:
        """Those of some tokens."""
        if some.all():
            return self
        end = np.where(some, self.end, self.begin)
        return Runs(begin=self.begin, end=end, whole=self.whole, alone=self.alone)

    def within(self, begin: Places, end: Places) -> Runs:
        """What of each run lies between two tokens."""
        return Runs(
            begin=np.maximum(self.begin, begin), end=np.minimum(self.end, end), whole=self.whole
        )

    def then(self, other: Runs) -> Runs:
        """For each token, the union of the runs that `other` has for the tokens of its own run."""
        if self.alone and not self.whole:
            return other if self.everywhere else other.where(self.some)
        if self.whole:  # whatever any token has, and at most all there are
            some = self.some if not other.nowhere else np.zeros_like(self.some)
            begin = np.zeros_like(self.begin)
            return Runs(begin=begin, end=some.astype(np.int64), whole=True)
        whole = other.whole
        last = len(other.begin) - 1
        if last < 0:
            none = np.zeros_like(self.begin)
            return Runs(begin=none, end=none, whole=whole)
        first, final = np.minimum(self.begin, last), np.maximum(self.end - 1, 0)
        if other.everywhere:
            begin, end = other.begin[first], other.end[final]
            if not self.everywhere:
                end = np.where(self.some, end, begin)
            return Runs(begin=begin, end=end, whole=whole)
        following, before = other._neighbours
        first, final = following[first], before[final]
        some = self.some & (first <= final)
        begin, end = other.begin[np.minimum(first, last)], other.end[np.maximum(final, 0)]
        return Runs(begin=begin, end=np.where(some, end, begin), whole=whole)

    def joined(self, other: Runs) -> Runs | None:
        """The union as one run a token, None where that is more than the union for some token."""
        if self.whole != other.whole:
            return None
        if self.everywhere and other.everywhere:
            if not ((self.begin <= other.end) & (other.begin <= self.end)).all():
                return None
            return Runs(
                begin=np.minimum(self.begin, other.begin),
                end=np.maximum(self.end, other.end),
                whole=self.whole,
            )
        apart = self.some & other.some & ((self.begin > other.end) | (other.begin > self.end))
        if apart.any():
            return None
        begin = np.where(self.some, self.begin, other.begin)
        end = np.where(self.some, self.end, other.end)
        begin = np.where(other.some, np.minimum(begin, other.begin), begin)
        end = np.where(other.some, np.maximum(end, other.end), end)
        some = self.some | other.some
        for ends in (begin[some], end[some]):
            if (ends[1:] < ends[:-1]).any():  # a run over tokens would not be their union any more
                return None
        return Runs(begin=begin, end=end, whole=self.whole)


Sets = tuple[Runs, ...]
"""For each token the union of its runs."""


def union(*parts: Sets) -> Sets:
    """The union of sets, with as few runs a token as joining gives."""
    distinct = list(_distinct(parts))
    if len(distinct) == 1:
        return tuple(distinct)
    found: list[Runs] = []
    for run in distinct:
        joined = run
        kept = []
        for other in found:
            both = other.joined(joined)
            if both is None:
                kept.append(other)
            else:
                joined = both
        found = [*kept, joined]
    return tuple(found)


def _distinct(parts: Iterable[Sets]) -> Iterator[Runs]:
    seen: set[tuple[int, int, bool]] = set()
    for sets in parts:
        for run in sets:
            key = (id(run.begin), id(run.end), run.whole)
            if key not in seen and not run.nowhere:
                seen.add(key)
                yield run


def then(first: Sets, second: Sets) -> Sets:
    """For each token, the union of the sets that `second` has for the tokens of its set in `first`."""
    return union(tuple(one.then(other) for one in first for other in second))


def measure(sets: Sets, size: int) -> Places:
    """How many tokens the set of each of `size` tokens has, a whole one taken as its run."""
    runs = [run for run in sets if not run.nowhere]
    if not runs:
        return np.zeros(size, dtype=np.int64)
    if len(runs) == 1:
        lengths: Places = np.maximum(runs[0].end - runs[0].begin, 0)
        return lengths
    begin, end = (np.stack([getattr(run, name) for run in runs]) for name in ("begin", "end"))
    order = np.argsort(begin, axis=0, kind="stable")
    begin, end = (np.take_along_axis(x, order, axis=0) for x in (begin, end))
    # Each run counts from where the runs before it, by their beginnings, have ended.
    reached = np.maximum.accumulate(np.maximum(end, begin), axis=0)
    begin[1:] = np.maximum(begin[1:], reached[:-1])
    total: Places = np.maximum(end - begin, 0).sum(axis=0)
    return total
