"""Tiles of a matrix product: their operands, the file that a CUDA program reads them from, and what the model gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref.arithmetic import fused_dot
from flamia_ref.device.probes import FORMATS, KINDS, SCALE_FORMATS, ProductProbe
from flamia_ref.device.toolchain import ProgramFailed

MAGIC, VERSION = 0x504D4C46, 1
"""The first two words of every file."""

Codes = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]

_AT_ONCE = 1 << 22  # products that the model works on at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Operands of some tiles; each takes `steps` instructions in a row.

    Attributes:
        a: codes [tiles, steps, m, k].
        b: codes of the columns of B [tiles, steps, n, k].
        a_scales: scale codes [tiles, steps, m, scales], uint8; the last axis is 0 where there are none.
        b_scales: scale codes [tiles, steps, n, scales].
        c: accumulators [tiles, m, n] as words: float32 bits, or float16 bits.
    """

    a: Codes
    b: Codes
    a_scales: Codes
    b_scales: Codes
    c: Words

    @property
    def steps(self) -> int:
        """Instructions in a row."""
        return int(self.a.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The operands of one result: `a` and `b` [steps, k], scales [steps, scales], and the accumulator's bits."""

    a: Codes
    b: Codes
    a_scales: Codes
    b_scales: Codes
    c: int


def to_file(probe: ProductProbe, tiles: Tiles) -> bytes:
    """The file that the probe's program reads; `cuda/tiles.cuh` says what is in it."""
    scale_format = "none" if probe.scaling is None else probe.scaling.format
    count, steps = tiles.a.shape[:2]
    header = (
        MAGIC,
        VERSION,
        KINDS.index(probe.kind),
        FORMATS.index(probe.a_format),
        FORMATS.index(probe.b_format),
        int(probe.half),
        SCALE_FORMATS.index(scale_format),
        probe.scales,
        count,
        steps,
        probe.m,
        probe.n,
        probe.k,
        0,
        0,
        0,
    )
    parts = [np.array(header, dtype="<u4").tobytes()]
    for codes in (tiles.a, tiles.b, tiles.a_scales, tiles.b_scales, tiles.c):
        little = codes.dtype.newbyteorder("<")
        parts.append(np.ascontiguousarray(codes).astype(little, copy=False).tobytes())
    return b"".join(parts)


def from_file(probe: ProductProbe, tiles: Tiles, data: bytes) -> Words:
    """The results [tiles, m, n] that a program wrote.

    Raises ProgramFailed where their number is wrong.
    """
    if len(data) != tiles.c.size * 4:
        raise ProgramFailed(
            f"the program of {probe.name} wrote {len(data)} bytes of results, not {tiles.c.size * 4}"
        )
    return np.frombuffer(data, dtype="<u4").astype(np.uint32).reshape(tiles.c.shape)


def expected(probe: ProductProbe, tiles: Tiles) -> Words:
    """What the model gives: words [tiles, m, n]."""
    found = np.empty_like(tiles.c)
    count, steps, m, k = tiles.a.shape
    n = tiles.b.shape[2]
    at_once = max(1, _AT_ONCE // (m * n * steps * k))
    for start in range(0, count, at_once):
        part = slice(start, start + at_once)
        size = len(tiles.c[part])

        def lanes(codes: Codes, axis: int, part: slice = part, size: int = size) -> Codes:
            chosen = np.moveaxis(codes[part], 1, 2)  # [tiles, rows, steps, k]
            shape = (size, m, n, steps * codes.shape[-1])
            flat = chosen.reshape(*chosen.shape[:2], steps * codes.shape[-1])
            return np.broadcast_to(np.expand_dims(flat, axis), shape).reshape(size * m * n, -1)

        found[part] = _model(
            probe,
            lanes(tiles.a, 2),
            lanes(tiles.b, 1),
            lanes(tiles.a_scales, 2),
            lanes(tiles.b_scales, 1),
            tiles.c[part].reshape(-1),
        ).reshape(size, m, n)
    return found


def expected_of(probe: ProductProbe, row: Row) -> int:
    """What the model gives for one row."""
    a, b, a_scales, b_scales = (
        x.reshape(1, -1) for x in (row.a, row.b, row.a_scales, row.b_scales)
    )
    c = np.array([row.c], dtype=np.uint32)
    return int(_model(probe, a, b, a_scales, b_scales, c)[0])


def _model(
    probe: ProductProbe, a: Codes, b: Codes, a_scales: Codes, b_scales: Codes, c: Words
) -> Words:
    scaling = probe.scaling
    result = fused_dot(
        a,
        b,
        c.astype(np.uint16) if probe.half else c,
        probe.instruction,
        a_format=probe.a_format,
        b_format=probe.b_format,
        a_scales=None if scaling is None else a_scales,
        b_scales=None if scaling is None else b_scales,
        scale_format=None if scaling is None else scaling.format,
    )
    return np.asarray(result).astype(np.uint32)


def row_of(tiles: Tiles, tile: int, i: int, j: int) -> Row:
    """The operands of one result."""
    return Row(
        a=tiles.a[tile, :, i].copy(),
        b=tiles.b[tile, :, j].copy(),
        a_scales=tiles.a_scales[tile, :, i].copy(),
        b_scales=tiles.b_scales[tile, :, j].copy(),
        c=int(tiles.c[tile, i, j]),
    )


def tiles_of(probe: ProductProbe, rows: list[Row]) -> Tiles:
    """A tile for each row, whose result is in the first row and column; the rest is zeros."""
    steps = len(rows[0].a)

    def placed(parts: list[Codes], size: int) -> Codes:
        found = np.zeros((len(rows), steps, size, parts[0].shape[-1]), dtype=parts[0].dtype)
        found[:, :, 0] = np.stack(parts)
        return found

    c = np.zeros((len(rows), probe.m, probe.n), dtype=np.uint32)
    c[:, 0, 0] = [row.c for row in rows]
    return Tiles(
        a=placed([row.a for row in rows], probe.m),
        b=placed([row.b for row in rows], probe.n),
        a_scales=placed([row.a_scales for row in rows], probe.m),
        b_scales=placed([row.b_scales for row in rows], probe.n),
        c=c,
    )
