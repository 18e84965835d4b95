"""Parts of a case: elements that are overwritten, and what its twin must share with it."""

from dataclasses import dataclass

from flamia_ref._errors import shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Plant:
    """One element of an input that is overwritten: its place and its bfloat16 bits."""

    tensor: str
    token: int
    head: int
    channel: int
    bits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """A box of an input that is overwritten, before the plants and in the order of the fills.

    `tokens`, `heads` and `channels` are (first, end). The element at (t, h, c) gets the bfloat16 bits
    ``bits + (t - tokens[0]) * steps[0] + (h - heads[0]) * steps[1] + (c - channels[0]) div 32 * steps[2]``
    modulo 2^16: a step of 0x80 doubles.
    """

    tensor: str
    tokens: tuple[int, int]
    heads: tuple[int, int]
    channels: tuple[int, int]
    bits: int
    steps: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of a result: tokens `first` to `end`, `end` excluded, of all heads."""

    tensor: str
    first: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """The case that differs from this one in `changed` tokens of one input, and what must be equal.

    `case` is the name of the other one's data. `changed` are rows of an input; `equal` are rows of
    results that do not depend on them by the mask: a kernel whose results differ there leaks.
    """

    case: str
    changed: Rows
    equal: tuple[Rows, ...]

    def __post_init__(self) -> None:
        for rows in (self.changed, *self.equal):
            if not 0 <= rows.first < rows.end:
                raise ValueError(f"twin {shown(self.case)}: {shown(rows)} are no rows")
