"""A case as data: its shapes, its inputs, and why it exists."""

import math
import re
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from flamia_ref._errors import shown
from flamia_ref.golden.files import tensors_from_bytes
from flamia_ref.golden.inputs import MAX_EXPONENT, TENSORS, U16, Distribution, hashed

# Names become file names on every system, and ids of tests.
PLAIN_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,78}[a-z0-9])?\Z")

LARGEST = 1 << 24  # a bound on each count of a case, so that products stay far from 2^64
MOST_DOCUMENTS = 1 << 14
FLAGS = MappingProxyType(
    {
        "real": "inputs recorded from a model",
        "nan": "NaN is expected in the results",
        "empty-document": "a document without tokens",
        "partial-block": "a document whose length is no multiple of 32",
        "several-tiles": "a document longer than a tile of 128",
        "grouped-heads": "several query heads share a key/value head",
        "full": "no causal mask",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """One element of an input that is overwritten: its place and its bfloat16 bits."""

    tensor: str
    token: int
    head: int
    channel: int
    bits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseSpec:
    """What a case is, without its results.

    `lengths` are those of the documents in tokens. `softmax_scale` multiplies S. `seed` and
    `exponent` parametrise the formulas of `flamia_ref.golden.inputs`; a recorded case has seed 0.

    Raises ValueError for values that no case can have.
    """

    name: str
    why: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    softmax_scale: float
    distribution: Distribution
    seed: int
    exponent: int
    plants: tuple[Plant, ...] = ()
    flags: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not PLAIN_NAME.match(self.name):
            raise ValueError(
                f"case name {shown(self.name)} is not plain; use at most 80 of a-z 0-9 . _ -"
            )
        if not self.why.isprintable():
            raise ValueError(f"case {self.name}: why is {shown(self.why)}; it must be printable")
        counts = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        for what, count in counts.items():
            if not 1 <= count <= LARGEST:
                raise ValueError(f"case {self.name}: {what} is {count}; it must be 1 to {LARGEST}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"case {self.name}: {self.heads} heads do not divide over {self.kv_heads} kv_heads"
            )
        if self.head_dim % 32:
            raise ValueError(f"case {self.name}: head_dim {self.head_dim} is no multiple of 32")
        if len(self.lengths) > MOST_DOCUMENTS:
            raise ValueError(f"case {self.name}: more than {MOST_DOCUMENTS} documents")
        if any(not 0 <= n <= LARGEST for n in self.lengths):
            raise ValueError(f"case {self.name}: every length must be 0 to {LARGEST} tokens")
        if self.tokens > LARGEST:
            raise ValueError(f"case {self.name}: {self.tokens} tokens are more than {LARGEST}")
        if not (math.isfinite(self.softmax_scale) and self.softmax_scale > 0):
            raise ValueError(
                f"case {self.name}: softmax_scale is {self.softmax_scale}; it must be above 0"
            )
        if abs(self.exponent) > MAX_EXPONENT or not 0 <= self.seed < 2**64:
            raise ValueError(f"case {self.name}: seed or exponent is out of range")
        for plant in self.plants:
            heads = self.heads if plant.tensor in ("q", "dout") else self.kv_heads
            if (
                plant.tensor not in TENSORS
                or not 0 <= plant.token < self.tokens
                or not 0 <= plant.head < heads
                or not 0 <= plant.channel < self.head_dim
                or not 0 <= plant.bits < 2**16
            ):
                raise ValueError(f"case {self.name}: {shown(plant)} lies outside the case")
        for flag in self.flags:
            if flag not in FLAGS:
                raise ValueError(f"case {self.name}: unknown flag {shown(flag)}")

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(self.lengths)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each document, and the number of tokens: `cu_seqlens` as integers."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        return tuple(starts)

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32 [documents + 1]: where each document starts, and the end."""
        return np.array(self.starts, np.int32)

    @property
    def pairs(self) -> int:
        """Query-key pairs of all documents and heads, masked ones too."""
        return self.heads * sum(length * length for length in self.lengths)

    def inputs(self) -> dict[str, U16]:
        """Make q, dout [tokens, heads, head_dim] and k, v [tokens, kv_heads, head_dim]: bfloat16 bits."""
        made = {}
        for tensor in TENSORS:
            heads = self.heads if tensor in ("q", "dout") else self.kv_heads
            shape = (self.tokens, heads, self.head_dim)
            if self.distribution is Distribution.RECORDED:
                bits = _recorded()[tensor].copy()
            else:
                bits = hashed(
                    tensor,
                    shape,
                    seed=self.seed,
                    distribution=self.distribution,
                    exponent=self.exponent,
                )
            if bits.shape != shape:
                raise ValueError(f"case {self.name}: the recording of {tensor} is {bits.shape}")
            for plant in self.plants:
                if plant.tensor == tensor:
                    bits[plant.token, plant.head, plant.channel] = plant.bits
            made[tensor] = bits
        return made


@cache
def _recorded() -> dict[str, U16]:
    data = resources.files("flamia_ref.golden") / "data" / "smollm2-layer14.safetensors"
    stored = tensors_from_bytes(data.read_bytes(), source="smollm2-layer14.safetensors")
    return {name: np.asarray(stored[name].array, np.uint16) for name in TENSORS}
