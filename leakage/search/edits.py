"""Edits: what a hunt changes in one operand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.search.bases import BFLOAT16, Draws, Inputs, rounded

Indices = NDArray[np.int64]


class Action(StrEnum):
    """What becomes of the values that are edited."""

    TIMES = "times"
    """Times 2^amount; too large ones become the largest."""
    ZERO = "zero"
    """0."""
    NEGATE = "negate"
    """The other sign."""
    RESAMPLE = "resample"
    """Other bell-shaped values of `seed`, times 2^amount."""
    SWAP = "swap"
    """Those of the next edited token, the last one's those of the first."""
    SET = "set"
    """The bfloat16 of the bits `amount`."""
    NAN = "nan"
    """NaN."""
    INFINITY = "infinity"
    """Infinity."""


POISONS = (Action.NAN, Action.INFINITY)
"""Actions whose values are not finite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One change of one operand.

    Attributes:
        operand: "q", "k", "v" or "dout".
        tokens: the tokens that the action works on, ascending.
        action: what it does.
        amount: of the action.
        seed: of the numbers that it draws.
        kept, heads, channels: where the change is kept, of the tokens, heads and channels; None for all.
    """

    operand: str
    tokens: tuple[int, ...]
    action: Action
    amount: int = 0
    seed: int = 0
    kept: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    channels: tuple[int, ...] | None = None

    @property
    def changed_tokens(self) -> tuple[int, ...]:
        """The tokens whose values may change."""
        return self.tokens if self.kept is None else self.kept

    def applied(self, inputs: Inputs) -> dict[str, NDArray[Any]]:
        """The inputs with the change; the other operands are those given."""
        before = inputs[self.operand]
        tokens = np.array(self.tokens, dtype=np.int64)
        after = before.copy()
        after[tokens] = self._acted(before[tokens])
        if (self.kept, self.heads, self.channels) != (None, None, None):
            shape = before.shape
            where = np.ix_(
                _all(self.kept, shape[0]), _all(self.heads, shape[1]), _all(self.channels, shape[2])
            )
            whole, after = after, before.copy()
            after[where] = whole[where]
        return {**inputs, self.operand: after}

    def _acted(self, x: NDArray[Any]) -> NDArray[Any]:
        match self.action:
            case Action.TIMES:
                return rounded(np.ldexp(x.astype(np.float64), self.amount))
            case Action.ZERO:
                return np.zeros_like(x)
            case Action.NEGATE:
                return (x.view(np.uint16) ^ np.uint16(0x8000)).view(x.dtype)
            case Action.RESAMPLE:
                return rounded(np.ldexp(Draws(self.seed).bell(x.shape), self.amount))
            case Action.SWAP:
                return np.roll(x, -1, axis=0)
            case Action.SET:
                return np.full(x.shape, np.uint16(self.amount)).view(BFLOAT16)
            case Action.NAN:
                return np.full_like(x, np.nan)
            case Action.INFINITY:
                return np.full_like(x, np.inf)


def _all(some: tuple[int, ...] | None, count: int) -> Indices:
    return np.arange(count) if some is None else np.array(some, dtype=np.int64)
