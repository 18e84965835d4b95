"""In which order the instruction steps of a product along K are issued, and where float32 additions come between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref._errors import shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order of a product's instruction steps: chains, each in an accumulator of its own.

    Step i takes elements i L to (i + 1) L of K, with L the `terms` of the instruction. Each chain starts from 0, or the
    first from c; the chains' results are added in float32, rounded to nearest even, one after another.

    Attributes:
        chains: the steps of each chain, in order of issue. Together they are all steps, each once.
        c_starts_first_chain: whether c is the accumulator that the first chain starts from. If not, it is what the
            chains' results are added to, as where a kernel promotes partial sums to a float32 accumulator.
    """

    chains: tuple[tuple[int, ...], ...]
    c_starts_first_chain: bool = True

    def __post_init__(self) -> None:
        """Refuse chains that are not all steps, each once."""
        try:
            chains = tuple(tuple(map(_step, chain)) for chain in self.chains)
        except TypeError:
            raise TypeError(
                f"chains are {shown(self.chains)}; they must be a sequence of chains, each of step numbers"
            ) from None
        if type(self.c_starts_first_chain) is not bool:
            raise TypeError(
                f"c_starts_first_chain is {shown(self.c_starts_first_chain)}; it must be True or False"
            )
        object.__setattr__(self, "chains", chains)
        steps = [step for chain in chains for step in chain]
        if not all(type(step) is int for step in steps) or sorted(steps) != list(range(len(steps))):
            raise ValueError(
                f"chains are {shown(chains)}; together they must have each step from 0 on, once"
            )
        if any(not chain for chain in chains):
            raise ValueError(f"chains are {shown(chains)}; each must have one step at least")

    @property
    def steps(self) -> int:
        """The number of instruction steps."""
        return sum(len(chain) for chain in self.chains)

    @classmethod
    def ascending(cls, steps: int) -> Order:
        """One accumulator, steps in ascending order: what a product does without an order."""
        return cls.issued(range(_count("steps", steps)))

    @classmethod
    def issued(cls, steps: Sequence[int]) -> Order:
        """One accumulator, steps as given."""
        return cls(chains=(tuple(steps),) if len(steps) else ())

    @classmethod
    def split(cls, sizes: Sequence[int]) -> Order:
        """An accumulator for each run of consecutive steps, of the sizes given: (3, 1) for K split 96 and 32."""
        chains, start = [], 0
        for size in sizes:
            end = start + _count("a size", size)
            chains.append(tuple(range(start, end)))
            start = end
        return cls(chains=tuple(chain for chain in chains if chain))

    @classmethod
    def interleaved(cls, steps: int, accumulators: int) -> Order:
        """Step i goes to accumulator i modulo `accumulators`."""
        if _count("accumulators", accumulators) == 0:
            raise ValueError("accumulators is 0; steps go to at least one")
        count = min(_count("steps", steps), accumulators)
        return cls(chains=tuple(tuple(range(first, steps, count)) for first in range(count)))

    @classmethod
    def promoted(cls, steps: int, every: int) -> Order:
        """The sum of `every` consecutive steps at a time, added to a float32 accumulator that starts from c."""
        if _count("every", every) == 0:
            raise ValueError("every is 0; at least one step comes before a promotion")
        starts = range(0, _count("steps", steps), every)
        chains = tuple(tuple(range(start, min(start + every, steps))) for start in starts)
        return cls(chains=chains, c_starts_first_chain=False)


def _step(given: Any) -> Any:
    """An integer of numpy as an int; anything else as it is."""
    return int(given) if isinstance(given, np.integer) else given


def _count(name: str, given: Any) -> int:
    given = _step(given)
    if type(given) is not int or given < 0:
        raise ValueError(f"{name} is {shown(given)}; it must be a whole number, 0 or more")
    return given
