"""Witnesses: inputs made so that one later token shows whether it reaches an earlier output."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flamia_ref._errors import Registry

_PUBLIC = "https://github.com/NVIDIA/TransformerEngine/issues/3248"

Values = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Witness:
    """One document and one head, and a change of one token of V.

    q = k = 1, so that every row weighs the tokens it sees alike. v is 0 but for its token 0. Changed, `token` of v is
    `value` too. A token of v has one value, in all its channels. So each channel shows the same, whichever of them
    share a scale.

    Attributes:
        name: the registry name.
        tokens, head_dim: the shape.
        first: v[0], which rows before `token` see and no rounding may lose.
        token: the token that is changed; causal attention lets no row before it see it.
        value: what it is changed to, so much larger than `first` that a scale shared with it leaves nothing of that.
        shares: what must share a scale for the change to reach an earlier row.
        source: where it comes from.
    """

    name: str
    tokens: int = 128
    head_dim: int = 128
    first: float
    token: int
    value: float
    shares: str
    source: str = _PUBLIC

    def inputs(self, *, changed: bool) -> tuple[Values, Values, Values]:
        """q, k, v [tokens, 1, head_dim] as float32; every value is exact in bfloat16."""
        ones = np.ones((self.tokens, 1, self.head_dim), dtype=np.float32)
        v = np.zeros_like(ones)
        v[0] = self.first
        if changed:
            v[self.token] = self.value
        return ones, ones.copy(), v


WITNESSES: Mapping[str, Witness] = Registry(
    "witness",
    (
        (one.name, one)
        for one in (
            Witness(
                name="same-block",
                first=2.0**-20,
                token=16,
                value=1.0,
                shares="tokens of one block of 32",
            ),
            Witness(
                name="next-block",
                first=2.0**-20,
                token=32,
                value=1.0,
                shares="tokens of two blocks of 32",
            ),
            Witness(
                name="whole-tensor",
                first=2.0**-10,
                token=64,
                value=1024.0,
                shares="all tokens",
            ),
        )
    ),
)
"""The witnesses of the public report, by name: for MXFP8, its control, and for one scale a tensor."""
