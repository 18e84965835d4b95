"""Entropy of what was drawn, with what is certain of it: the plug-in estimate, its correction, and exact bounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
"""Of every interval here."""

_RESAMPLES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Entropy:
    """The entropy of independent draws of one source, in bits.

    Attributes:
        samples: how many draws.
        distinct: how many different outcomes.
        plugin: the entropy of their frequencies: on average below that of the source.
        corrected: that plus (distinct - 1) / (2 samples ln 2), Miller and Madow's correction of the mean.
        cap: log2(samples), the most that so many draws can show.
        low: a lower bound of the source's entropy, which holds with 95 % whatever the source is.
        high: the upper end of a 95 % bootstrap interval of `corrected`: approximate, and no bound, as no sample
            bounds what it has not met.
        rate: the share of draws that differ from the first one, which is not counted.
        rate_low, rate_high: its exact 95 % interval, of Clopper and Pearson.
    """

    samples: int
    distinct: int
    plugin: float
    corrected: float
    cap: float
    low: float
    high: float
    rate: float
    rate_low: float
    rate_high: float

    @property
    def saturated(self) -> bool:
        """Whether more than half of the draws are different: the source may have far more than the cap."""
        return 2 * self.distinct > self.samples


def entropy(outcomes: Sequence[Hashable], *, seed: int = 0) -> Entropy:
    """The entropy of the source of independent draws.

    `low` is the larger of two bounds, each with half of the error e: the plug-in estimate less
    log2(n) sqrt(2 ln(2/e) / n), since its mean is below the entropy and one draw moves it by at most 2 log2(n) / n
    (Antos and Kontoyiannis, doi:10.1002/rsa.10019); and the least entropy of a coin whose rate is within the exact
    interval of the share of draws that differ from the first.

    Raises ValueError for fewer than two draws.
    """
    count = len(outcomes)
    if count < 2:
        raise ValueError(f"there are {count} outcomes; entropy takes 2 or more")
    frequencies = np.array(sorted(Counter(outcomes).values(), reverse=True), dtype=np.int64)
    estimate = plugin(frequencies)
    differing = sum(one != outcomes[0] for one in outcomes[1:])
    error = 1 - CONFIDENCE
    exact = interval(differing, count - 1, error)
    low = 0.0
    if len(frequencies) > 1:
        spread = math.log2(count) * math.sqrt(2 * math.log(2 / error) / count)
        rates = interval(differing, count - 1, error / 2)
        low = max(0.0, estimate - spread, min(coin(rates[0]), coin(rates[1])))
    return Entropy(
        samples=count,
        distinct=len(frequencies),
        plugin=estimate,
        corrected=corrected(frequencies),
        cap=math.log2(count),
        low=low,
        high=_high(frequencies, seed),
        rate=differing / (count - 1),
        rate_low=exact[0],
        rate_high=exact[1],
    )


def plugin(frequencies: NDArray[np.int64]) -> float:
    """The entropy of frequencies, in bits."""
    shares = frequencies[frequencies > 0] / frequencies.sum()
    return max(0.0, float(-(shares * np.log2(shares)).sum()))


def corrected(frequencies: NDArray[np.int64]) -> float:
    """The same, corrected for its bias: G. Miller, Note on the bias of information estimates, 1955."""
    seen = int((frequencies > 0).sum())
    return plugin(frequencies) + (seen - 1) / (2 * int(frequencies.sum()) * math.log(2))


def coin(rate: float) -> float:
    """The entropy of a coin, in bits."""
    return -sum(p * math.log2(p) for p in (rate, 1 - rate) if 0 < p < 1)


def interval(successes: int, trials: int, error: float = 1 - CONFIDENCE) -> tuple[float, float]:
    """The exact interval of a rate (Clopper and Pearson): each side wrong with at most half of `error`."""
    # The rate at which so many or more have half of the error, and that at which so many or fewer have it.
    low = _reached(successes, trials, error / 2) if successes > 0 else 0.0
    high = 1 - _reached(trials - successes, trials, error / 2) if successes < trials else 1.0
    return low, high


def _reached(successes: int, trials: int, level: float) -> float:
    """The rate, from below, at which the probability of so many successes or more reaches a level."""
    count = np.arange(successes, trials + 1)
    ways = np.array(
        [
            math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
            for k in count.tolist()
        ]
    )
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        logs = ways + count * math.log(middle) + (trials - count) * math.log1p(-middle)
        if np.exp(logs).sum() < level:
            low = middle
        else:
            high = middle
    return low


def _high(frequencies: NDArray[np.int64], seed: int) -> float:
    if len(frequencies) < 2:
        return 0.0
    source = np.random.Generator(np.random.PCG64(seed))
    count = int(frequencies.sum())
    drawn = source.multinomial(count, frequencies / count, size=_RESAMPLES)
    shares = np.maximum(drawn, 1) / count  # a share of 0 counts for nothing below
    found = -np.where(drawn > 0, shares * np.log2(shares), 0).sum(axis=1)
    found += ((drawn > 0).sum(axis=1) - 1) / (2 * count * math.log(2))
    centre = corrected(frequencies)
    # The basic bootstrap: resampling is biased downwards as sampling is, so its errors are turned over.
    return max(centre, float(2 * centre - np.quantile(found, (1 - CONFIDENCE) / 2)))
