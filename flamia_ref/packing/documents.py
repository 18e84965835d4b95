"""Packed documents as host data: `cu_seqlens`, checked once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flamia_ref import _backend
from flamia_ref._errors import shown


@dataclass(frozen=True)
class Documents:
    """Documents packed one after another along the token axis.

    Attributes:
        offsets: where each document starts, and at the end the number of tokens: `cu_seqlens` as a tuple. A document
            may be empty.
    """

    offsets: tuple[int, ...]

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Any, tokens: int | None, name: str = "cu_seqlens"
    ) -> Documents:
        """Documents from cumulative lengths [documents + 1], or one document of all `tokens` for None.

        `tokens` None: as many as `cu_seqlens` says.

        Raises: TypeError for a traced array or other than integers; ValueError unless it has one axis, starts at 0,
        never decreases and ends at `tokens`.
        """
        if cu_seqlens is None:
            if tokens is None:
                raise ValueError(f"{name} is None, and so is the number of tokens; give one")
            return cls((0, tokens))
        if _backend.is_traced(cu_seqlens):
            raise TypeError(
                f"{name} is traced; it selects shapes, so pass a numpy array and keep it out of jit's arguments"
            )
        try:
            values = _backend.host(_backend.plain(name, cu_seqlens))
        except ValueError:
            raise TypeError(
                f"{name} is {shown(cu_seqlens)}; it must be a flat array of integers"
            ) from None
        if values.size and values.dtype.kind not in "iu":
            raise TypeError(
                f"{name} holds {values.dtype.name}; it must be an integer array such as int32"
            )
        if values.ndim != 1 or values.size < 2:
            raise ValueError(
                f"{name} has shape {values.shape}; it must have one axis and at least two entries, [0, ..., {tokens}]"
            )
        offsets = tuple(int(value) for value in values)
        if offsets[0] != 0:
            raise ValueError(f"{name}[0] is {offsets[0]}; the first document starts at 0")
        for place, (start, end) in enumerate(itertools.pairwise(offsets), start=1):
            if end < start:
                raise ValueError(
                    f"{name}[{place}] is {end}, less than {name}[{place - 1}] = {start}; it must not decrease"
                )
            if tokens is not None and end > tokens:
                raise ValueError(f"{name}[{place}] is {end}, beyond the {tokens} tokens given")
        if tokens is not None and offsets[-1] != tokens:
            raise ValueError(
                f"{name} ends at {offsets[-1]}, but {tokens} tokens were given;"
                " cut the arrays there or add a document for the rest"
            )
        return cls(offsets)

    @property
    def tokens(self) -> int:
        """Number of tokens in all documents."""
        return self.offsets[-1]

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each document."""
        return tuple(end - start for start, end in itertools.pairwise(self.offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[slice]:
        """The token range of each document."""
        return (slice(start, end) for start, end in itertools.pairwise(self.offsets))

    def __repr__(self) -> str:
        return f"Documents(lengths={shown(self.lengths)})"
