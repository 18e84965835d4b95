"""What Hypothesis draws, as data of small integers: examples, their edits, and the space that they are drawn from."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flamia_ref._errors import shown, unknown_name

OPERANDS = ("q", "k", "v", "dout")
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129)
"""Documents: empty, of one token, and on either side of a block of 32 and of a tile of 128."""
BLOCK = 32
"""Tokens that share a scale in MXFP8."""

_MOST_TOKENS = 1 << 20
_MOST_EXPONENT = 120


class Poison(StrEnum):
    """What an edit can put in the place of a value, besides a multiple of it."""

    NAN = "nan"
    """NaN."""
    INFINITY = "inf"
    """+infinity."""
    NEGATIVE_INFINITY = "-inf"
    """-infinity."""
    HUGE = "huge"
    """The largest finite bfloat16."""


class Family(StrEnum):
    """Base data of an example: q, k, v and dout before the edits, made of a seed by integers; the simplest first."""

    ONES = "ones"
    """q and k are 1, so that every key counts alike; v and dout are bell-shaped."""
    BELL = "bell"
    """Bell-shaped, a standard deviation of 0.8."""
    TOKENS = "tokens"
    """Bell-shaped, each token times 2^-12 to 2^3."""
    OUTLIERS = "outliers"
    """Bell-shaped, one element in 256 times 2^16; q and k bell-shaped."""
    WIDE = "wide"
    """Bell-shaped, each element times 2^-28 to 2^3 and each token times 2^-12 to 2^3; q and k as in TOKENS."""
    BLOCKS = "blocks"
    """For one scale of the P of several queries. Blocks of 32 tokens are of two kinds, even and odd: queries weigh keys
    of their own kind 2^43 times the others, and v is 2^40 times as large in even ones, so that odd queries show both.
    A query with its sign changed weighs the others, and what shares a scale with its P vanishes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """One change of an input: a value, or all of a token, times ``sign * 2^exponent``, or replaced by poison.

    Attributes:
        operand: "q", "k", "v" or "dout".
        token: counted over all documents. All heads are edited.
        channel: None for all.
        exponent: -120 to 120. What leaves bfloat16 becomes its largest finite value; a zero is taken as 1.
        sign: 1 or -1.
        poison: "nan", "inf", "-inf" or "huge" in the place of the value.

    Raises ValueError for other values.
    """

    operand: str
    token: int
    channel: int | None = None
    exponent: int = 0
    sign: int = 1
    poison: str | None = None

    def __post_init__(self) -> None:
        if self.operand not in OPERANDS:
            raise unknown_name("operand", self.operand, OPERANDS)
        _require_whole("edit.token", self.token, 0, _MOST_TOKENS)
        if self.channel is not None:
            _require_whole("edit.channel", self.channel, 0, _MOST_TOKENS)
        _require_whole("edit.exponent", self.exponent, -_MOST_EXPONENT, _MOST_EXPONENT)
        if self.sign not in (1, -1):
            raise ValueError(f"edit.sign is {shown(self.sign)}; it must be 1 or -1")
        if self.poison is not None and self.poison not in list(Poison):
            raise unknown_name("poison", self.poison, Poison)

    def __repr__(self) -> str:
        return _line(self)

    def __str__(self) -> str:
        """As a clause: ``v of token 1, channel 0, times 2^15``."""
        place = f"{self.operand} of token {self.token}"
        place += "" if self.channel is None else f", channel {self.channel}"
        if self.poison is not None:
            return f"{place}, made {self.poison}"
        return f"{place}, times {'-' if self.sign < 0 else ''}2^{self.exponent}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One case of one property: all that its inputs are made of, and what is done to them.

    Its repr is the line that makes it again.

    Attributes:
        property: a name of `PROPERTIES`.
        lengths: of the documents, in tokens.
        heads, kv_heads, head_dim: the shape; kv_heads divides heads.
        window: how many earlier keys a query sees besides its own; None for all.
        family, seed: the base data.
        document: the document that the property looks at, where it looks at one.
        cut: how many of its first tokens are taken alone (prefix_parity).
        operand, exponent: what is scaled, and by which power of two (scale_invariance).
        garbage: what all other documents are filled with (padding_garbage): a `Poison`.
        edits: the changes, where the property makes any.

    Raises ValueError for what no example can be.
    """

    property: str
    lengths: tuple[int, ...]
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    window: int | None = None
    family: str = "ones"
    seed: int = 0
    document: int = 0
    cut: int = 0
    operand: str = "v"
    exponent: int = 0
    garbage: str = "nan"
    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        for name in ("lengths", "edits"):
            if not isinstance(getattr(self, name), tuple):
                raise ValueError(f"example.{name} is {shown(getattr(self, name))}; give a tuple")
        if not self.lengths:
            raise ValueError("example.lengths is (); give at least one document")
        for length in self.lengths:
            _require_whole("a length", length, 0, _MOST_TOKENS)
        _require_whole("example.document", self.document, 0, len(self.lengths) - 1)
        _require_whole("example.cut", self.cut, 0, self.lengths[self.document])
        for name in ("heads", "kv_heads", "head_dim"):
            _require_whole(f"example.{name}", getattr(self, name), 1, 1 << 16)
        _require_divides(self.heads, self.kv_heads)
        if self.window is not None:
            _require_whole("example.window", self.window, 0, _MOST_TOKENS)
        if self.family not in list(Family):
            raise unknown_name("family", self.family, Family)
        _require_whole("example.seed", self.seed, 0, (1 << 64) - 1)
        if self.operand not in OPERANDS:
            raise unknown_name("operand", self.operand, OPERANDS)
        if self.garbage not in list(Poison):
            raise unknown_name("garbage", self.garbage, Poison)
        _require_whole("example.exponent", self.exponent, -_MOST_EXPONENT, _MOST_EXPONENT)
        for edit in self.edits:
            if not isinstance(edit, Edit):
                raise ValueError(f"an edit is {shown(edit)}; give Edit(...)")
            if edit.token >= sum(self.lengths) or (edit.channel or 0) >= self.head_dim:
                raise ValueError(
                    f"{edit!r} lies outside {sum(self.lengths)} tokens of {self.head_dim} channels"
                )

    def __repr__(self) -> str:
        return _line(self)

    def __str__(self) -> str:
        """In a few words: what the inputs are."""
        lengths = ",".join(map(str, self.lengths))
        heads = f"{self.heads}/{self.kv_heads}"
        window = "" if self.window is None else f", window {self.window}"
        return (
            f"{self.property} (lengths {lengths}, heads {heads}, head_dim {self.head_dim}{window},"
            f" {self.family} of seed {self.seed})"
        )

    def tokens(self) -> range:
        """The tokens of `document`, counted over all documents."""
        start = sum(self.lengths[: self.document])
        return range(start, start + self.lengths[self.document])


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What examples are drawn from: shapes that a kernel takes.

    Attributes:
        heads, kv_heads, head_dim: the one shape of all examples; kv_heads divides heads.
        lengths: those that documents may have. Kernels that are compiled for each number of tokens want few.
        documents: how many documents an example has at most.
        window: as in `Example`.

    Raises ValueError for what no space can be.
    """

    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    lengths: tuple[int, ...] = LENGTHS
    documents: int = 3
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "head_dim"):
            _require_whole(name, getattr(self, name), 1, 1 << 16)
        _require_whole("documents", self.documents, 1, 1 << 10)
        _require_divides(self.heads, self.kv_heads)
        if not self.lengths:
            raise ValueError("lengths is (); give at least one")
        for length in self.lengths:
            _require_whole("a length", length, 0, _MOST_TOKENS)
        if not any(self.lengths):
            raise ValueError("lengths holds only 0; give one of at least 1 token")
        if self.window is not None:
            _require_whole("window", self.window, 0, _MOST_TOKENS)
        object.__setattr__(self, "lengths", tuple(sorted(set(self.lengths))))

    @property
    def shape(self) -> dict[str, Any]:
        """What every example of the space has, as keywords of `Example`."""
        return {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "window": self.window,
        }

    def at_least(self, tokens: int) -> tuple[int, ...]:
        """The lengths that are not shorter than so many tokens."""
        return tuple(length for length in self.lengths if length >= tokens)


def default_scale(head_dim: int) -> float:
    """The softmax scale of all examples, but where it is what changes."""
    return 1 / math.sqrt(head_dim)


def _line(value: Any) -> str:
    """A dataclass as the call that makes it, fields that have their defaults left out."""
    parts = []
    for field in dataclasses.fields(value):
        one = getattr(value, field.name)
        if one != field.default:
            one = str(one) if isinstance(one, str) else one
            parts.append(f"{field.name}={one!r}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _require_whole(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {shown(value)}; it must be an integer from {low} to {high}")


def _require_divides(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ValueError(f"{heads} heads do not divide over {kv_heads} kv_heads")
