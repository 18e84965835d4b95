"""What is drawn anew, and how: the tokens that some outputs must not depend on, in families of data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import Registry
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.bases import Draws, rounded
from flamia_ref.leakage.search.setting import Bools, Setting

Values = NDArray[np.float64]


class Drawn(StrEnum):
    """Which tokens are drawn anew."""

    SUFFIX = "suffix"
    """q, k, v and dO of the tokens from a cut on: earlier out, lse and dQ must not move."""
    PAST_QUERIES = "past_queries"
    """q and dO of the tokens before the cut: out, lse, dQ, dK and dV from the cut on must not move."""
    OTHER_DOCUMENT = "other_document"
    """All of another document: nothing of this one may move."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Tokens that are drawn anew.

    Attributes:
        drawn: which.
        operands: the inputs of theirs that are.
        tokens: packed tokens.
    """

    drawn: Drawn
    operands: tuple[str, ...]
    tokens: NDArray[np.int64]

    def observed(self, setting: Setting, output: str) -> Bools:
        """The tokens of an output that may depend on none of what is drawn anew."""
        found = np.ones(setting.tokens, dtype=np.bool_)
        for operand in self.operands:
            found &= setting.forbidden(output, operand, self.tokens)
        return found

    def severities(self, setting: Setting, output: str) -> tuple[Severity, ...]:
        """The severities of a dependence of the observed tokens of an output on what is drawn anew."""
        rows = np.flatnonzero(self.observed(setting, output))
        found: set[Severity] = set()
        for operand in self.operands:
            found |= setting.severities(output, rows, operand, self.tokens)
        return tuple(severity for severity in Severity if severity in found)


def change_of(drawn: Drawn, setting: Setting, cut: int) -> Change:
    """What is drawn anew in a setting: of its first document from or up to `cut`, or all of its last document."""
    operands = setting.operands
    if drawn is Drawn.OTHER_DOCUMENT:
        tokens = np.flatnonzero(setting.document == len(setting.lengths) - 1)
    elif drawn is Drawn.SUFFIX:
        tokens = np.arange(cut, setting.lengths[0])
    else:
        tokens = np.arange(cut)
        operands = tuple(name for name in ("q", "dout") if name in operands)
    return Change(drawn=drawn, operands=operands, tokens=tokens)


def drawn_inputs(
    setting: Setting, change: Change, family: str, samples: int, seed: int
) -> dict[str, NDArray[Any]]:
    """Inputs bfloat16 [tokens, samples, heads, channels]: alike in all samples but for what is drawn anew.

    All of them are of the family. The numbers are the same on any machine.
    """
    make = CHANGE_FAMILIES[family]
    word = list(CHANGE_FAMILIES).index(family)
    base = make(setting, Draws(seed, 2, word))
    every = [make(setting, Draws(seed, 3, word, index)) for index in range(samples)]
    found = {}
    for name in setting.operands:
        x = np.repeat(rounded(base[name])[:, None], samples, axis=1)
        if name in change.operands:
            for index, one in enumerate(every):
                x[change.tokens, index] = rounded(one[name])[change.tokens]
        found[name] = x
    return found


def _shape(setting: Setting, name: str) -> tuple[int, int, int]:
    return setting.shape("q" if name == "dout" else name)


def _bell(setting: Setting, draws: Draws) -> dict[str, Values]:
    """Bell-shaped values."""
    return {name: draws.bell(_shape(setting, name)) for name in ("q", "k", "v", "dout")}


def _token_wide(setting: Setting, draws: Draws) -> dict[str, Values]:
    """Bell-shaped, times a power of two from 2^-20 to 2^4 for each token."""
    made = _bell(setting, draws)
    return {name: np.ldexp(x, draws.integers(-20, 4, (len(x), 1, 1))) for name, x in made.items()}


def _outliers(setting: Setting, draws: Draws) -> dict[str, Values]:
    """Bell-shaped; one element in 32 is 2^4 to 2^16 times as large."""
    made = {}
    for name, x in _bell(setting, draws).items():
        chosen = draws.integers(0, 31, x.shape) == 0
        made[name] = np.ldexp(x, np.where(chosen, draws.integers(4, 16, x.shape), 0))
    return made


def _document(setting: Setting, draws: Draws) -> dict[str, Values]:
    """As of another text: bell-shaped, with a loudness of its own, 2^-4 to 2^4, and another of each channel, 2^-3 to
    2^3."""
    made = {}
    for name, x in _bell(setting, draws).items():
        loud = draws.integers(-4, 4, (1, 1, 1)) + draws.integers(-3, 3, (1, *x.shape[1:]))
        made[name] = np.ldexp(x, loud)
    return made


def _low_scores(setting: Setting, draws: Draws) -> dict[str, Values]:
    """Scores far below any finite number that a mask may give to a masked pair, all alike; v and dout bell-shaped."""
    made = _bell(setting, draws)
    made["q"] = np.full(_shape(setting, "q"), 2.0**18)
    made["k"] = np.full(_shape(setting, "k"), -(2.0**18))
    return made


CHANGE_FAMILIES: Mapping[str, Callable[[Setting, Draws], dict[str, Values]]] = Registry(
    "family of draws",
    (
        ("bell", _bell),
        ("token_wide", _token_wide),
        ("outliers", _outliers),
        ("document", _document),
        ("low_scores", _low_scores),
    ),
)
"""How inputs are drawn: by name, a function of the setting and of random numbers."""
