"""What a pass over tiles permits of each tensor, and what a kernel gave of it, by document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _float32
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.envelope.ranges import Range, hull
from flamia_ref.golden.stage import Place, View

Bits = NDArray[Any]


_EXTREMES = {
    View.F32: (0xFF800000, 0x7F800000),
    View.BF16: (0xFF80, 0x7F80),
    View.F8_E4M3: (0xFE, 0x7E),
    View.F4_E2M1: (0xF, 0x7),
    View.F8_E8M0: (0, 254),
    View.F8_UE4M3: (0, 0x7E),
}

PAIR = "row_max and row_sum"
"""Not the name of a tensor: where the two together are permitted."""


class Permitted(NamedTuple):
    """The least and the greatest permitted bits of a tensor by value, where NaN is permitted, and which elements were
    worked on: of the rest nothing is known here."""

    low: Bits
    high: Bits
    nan: NDArray[np.bool_]
    known: NDArray[np.bool_]


class Record:
    """The permitted ranges of the tensors that are asked for, and the bits that a kernel gave of some.

    `given` maps tensor names to bits in the shape and type of the pack, float32 as uint32.
    """

    def __init__(
        self,
        spec: CaseSpec,
        places: Mapping[str, Place],
        given: Mapping[str, Bits],
        wanted: Iterable[str],
    ) -> None:
        self.spec, self.places = spec, places
        self.given = dict(given)
        self.wanted = frozenset(wanted)
        self.found: dict[str, Permitted] = {}

    def name(self, stage: str, document: int | None) -> str:
        """The tensor of a stage."""
        return stage if document is None else f"{stage}.{document}"

    def has(self, stage: str) -> bool:
        """Whether the kernel gave anything of a stage."""
        return any(name == stage or name.rpartition(".")[0] == stage for name in self.given)

    def wants(self, stage: str) -> bool:
        """Whether the permitted range of a stage is asked for."""
        return any(
            place.stage.name == stage for name, place in self.places.items() if name in self.wanted
        )

    # Tiles of stages that are lists, [tiles, rows, columns].

    def tile(
        self,
        stage: str,
        tiles: Any,
        key_start: Any,
        rows: int,
        columns: int,
        step: tuple[int, int] = (1, 1),
    ) -> tuple[Bits, NDArray[np.bool_]] | None:
        """The bits that the kernel gave of some tiles, and where: None where it gave nothing of the stage."""
        if not self.has(stage):
            return None
        found: Bits | None = None
        there = np.zeros((len(key_start), rows, columns), dtype=bool)
        for at, (name, mine, theirs) in enumerate(
            self._cuts(stage, tiles, key_start, rows, columns, step)
        ):
            given = self.given.get(name)
            if given is None:
                continue
            if found is None:
                found = np.zeros(there.shape, dtype=given.dtype)
            found[at][mine] = given[theirs]
            there[at][mine] = True
        return None if found is None else (found, there)

    def put_tile(
        self,
        stage: str,
        tiles: Any,
        key_start: Any,
        worked: NDArray[np.bool_],
        low: Bits,
        high: Bits,
        nan: NDArray[np.bool_] | None = None,
        step: tuple[int, int] = (1, 1),
        rows: NDArray[np.bool_] | None = None,
    ) -> None:
        """Note what is permitted of some tiles; with `rows` [tiles, rows], that besides what was noted, in these."""
        if not self.wants(stage):
            return
        nan = np.zeros(low.shape, dtype=bool) if nan is None else nan
        down, across = low.shape[1:]
        for at, (name, mine, theirs) in enumerate(
            self._cuts(stage, tiles, key_start, down, across, step)
        ):
            if not worked[at] or name not in self.wanted:
                continue
            of = self._of(name)
            chosen = None if rows is None else rows[at][mine[0]]
            self._merge(of, theirs, low[at][mine], high[at][mine], nan[at][mine], chosen)

    def forget(
        self,
        stage: str,
        tiles: Any,
        key_start: Any,
        worked: NDArray[np.bool_],
        rows: NDArray[np.bool_],
        columns: int,
        step: tuple[int, int] = (1, 1),
    ) -> None:
        """Note that anything is permitted of some rows [tiles, rows] of a stage."""
        if not self.wants(stage):
            return
        shape = (rows.shape[1] // step[0], columns // step[1])
        chosen = np.asarray(rows.reshape(len(rows), shape[0], step[0]).any(axis=2))
        for at, (name, mine, theirs) in enumerate(
            self._cuts(stage, tiles, key_start, *shape, step)
        ):
            if not worked[at] or name not in self.wanted or not chosen[at].any():
                continue
            of, pick = self._of(name), chosen[at][mine[0]][:, None]
            for part, end in zip(of[:2], _EXTREMES[self.places[name].stage.view], strict=True):
                part[theirs] = np.where(pick, part.dtype.type(end), part[theirs])
            of.nan[theirs] |= pick

    # Rows, [tiles, rows, ...], of tensors that hold all tokens.

    def put_rows(self, name: str, tokens: Any, heads: Any, x: Range, *, heads_first: bool) -> None:
        """Note what is permitted of rows: `tokens` [tiles, rows], -1 for none, of one of `heads` for each tile."""
        if name not in self.wanted:
            return
        of = self._of(name)
        inside = tokens >= 0
        token = tokens[inside]
        head = np.broadcast_to(heads[:, None], tokens.shape)[inside]
        index = (head, token) if heads_first else (token, head)
        low, high = _as(x.low[inside], of.low.dtype), _as(x.high[inside], of.low.dtype)
        of.low[index], of.high[index], of.nan[index] = low, high, x.nan[inside]
        of.known[index] = True

    def put_pair(self, tokens: Any, heads: Any, fits: NDArray[np.bool_]) -> None:
        """Note where the kernel's own maximum and sum of rows give an lse that is permitted."""
        if PAIR not in self.found:
            shape = self.places["row_max"].shape
            zero = np.zeros(shape, dtype=np.uint32)
            self.found[PAIR] = Permitted(zero, zero, np.zeros(shape, bool), np.zeros(shape, bool))
        inside = tokens >= 0
        index = (np.broadcast_to(heads[:, None], tokens.shape)[inside], tokens[inside])
        self.found[PAIR].known[index] = fits[inside]

    def rows(self, name: str, tokens: Any, heads: Any, *, heads_first: bool) -> Bits | None:
        """The float32 bits that the kernel gave of rows, 0 where there is none; None where it gave no such tensor."""
        given = self.given.get(name)
        if given is None:
            return None
        bits = wide(given)
        inside = tokens >= 0
        head = np.broadcast_to(heads[:, None], tokens.shape)
        safe = np.where(inside, tokens, 0)
        found = bits[head, safe] if heads_first else bits[safe, head]
        keep = inside.reshape(inside.shape + (1,) * (found.ndim - 2))
        return np.where(keep, found, np.uint32(0))

    def put(self, name: str, x: Range) -> None:
        """Note what is permitted of a whole tensor."""
        if name in self.wanted:
            of = self._of(name)
            of.low[...], of.high[...] = _as(x.low, of.low.dtype), _as(x.high, of.low.dtype)
            of.nan[...], of.known[...] = x.nan, True

    def _cuts(
        self, stage: str, tiles: Any, key_start: Any, rows: int, columns: int, step: tuple[int, int]
    ) -> Iterable[tuple[str, tuple[slice, slice], tuple[int, slice, slice]]]:
        """For each tile the tensor, the part of the tile that is in the document, and where it is in the tensor."""
        for document, head, first, key in zip(
            tiles.document, tiles.head, tiles.first, key_start, strict=True
        ):
            name = self.name(stage, int(document))
            shape = self.places[name].shape if name in self.places else (0, 0, 0)
            top, left = int(first) // step[0], int(key) // step[1]
            down, across = min(rows, shape[1] - top), min(columns, shape[2] - left)
            down, across = max(down, 0), max(across, 0)
            yield (
                name,
                (slice(0, down), slice(0, across)),
                (int(head), slice(top, top + down), slice(left, left + across)),
            )

    def _of(self, name: str) -> Permitted:
        if name not in self.found:
            place = self.places[name]
            dtype = (
                np.dtype(np.uint32) if place.stage.view.value == "F32" else place.stage.view.dtype
            )
            self.found[name] = Permitted(
                np.zeros(place.shape, dtype),
                np.zeros(place.shape, dtype),
                np.zeros(place.shape, dtype=bool),
                np.zeros(place.shape, dtype=bool),
            )
        return self.found[name]

    @staticmethod
    def _merge(
        of: Permitted,
        at: Any,
        low: Bits,
        high: Bits,
        nan: NDArray[np.bool_],
        rows: NDArray[np.bool_] | None,
    ) -> None:
        if rows is None:
            of.low[at], of.high[at], of.nan[at], of.known[at] = low, high, nan, True
            return
        chosen = rows[:, None]
        if low.dtype == np.uint32:
            both = hull(Range(of.low[at], of.high[at], of.nan[at]), Range(low, high, nan))
            of.low[at] = np.where(chosen, both.low, of.low[at])
            of.high[at] = np.where(chosen, both.high, of.high[at])
        else:  # codes of numbers of one sign: by their bits they are in order
            of.low[at] = np.where(chosen, np.minimum(of.low[at], low), of.low[at])
            of.high[at] = np.where(chosen, np.maximum(of.high[at], high), of.high[at])
        of.nan[at] |= chosen & nan


def taken(
    x: Range, given: tuple[Bits, NDArray[np.bool_]] | None, visible: NDArray[np.bool_] | None = None
) -> Range:
    """The kernel's own values in place of what they may be."""
    if given is None:
        return x
    bits, there = given
    if visible is not None:  # a kernel may skip what is masked
        there = there & visible
    low = np.where(there, _canonical(wide(bits)), x.low)
    nan = np.where(there, _float32.is_nan(low), x.nan)
    if there.all() or x.certain:
        return Range(low, low, nan)
    return Range(low, np.where(there, low, x.high), nan)


def wide(bits: Bits) -> NDArray[np.uint32]:
    """float32 bits of a tensor that holds float32 or bfloat16 bits."""
    if bits.dtype == np.uint16:
        return bits.astype(np.uint32) << np.uint32(16)
    return bits.view(np.uint32) if bits.dtype == np.float32 else bits


def _canonical(bits: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.where(_float32.is_nan(bits), _float32.NAN, bits)


def _as(bits: NDArray[np.uint32], dtype: Any) -> Bits:
    return (bits >> np.uint32(16)).astype(np.uint16) if dtype == np.uint16 else bits
