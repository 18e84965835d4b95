"""Scales and codes in another order: of the neighbouring block, transposed, in tiles where there are none."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.mistake import Name
from flamia_ref.golden.stage import TILE_BYTES, TILE_COLUMNS, TILE_ROWS

Offsets = npt.NDArray[np.int64]


class Order(NamedTuple):
    """A way to take elements of matrices [..., rows, columns] from the wrong places, and its words."""

    name: Name
    words: str
    moved: Callable[[Tensor], Tensor]


def scale_orders() -> Iterator[Order]:
    """Yield the ways to read the scales of a matrix of rows by blocks wrongly."""
    for axis, of in ((-1, "block"), (-2, "row")):
        for step, words in ((1, "after"), (-1, "before")):
            yield Order(
                Name.NEIGHBOURING_SCALE,
                f"the scale of the {of} {words} it",
                partial(_neighbour, axis=axis, step=step),
            )
    yield Order(Name.TRANSPOSED_SCALES, "the scales transposed", _transposed)
    yield Order(
        Name.UNTILED_SCALES, "untiled scales as tiles of 128x4", lambda x: _read(x, "rows", "tiles")
    )
    yield Order(
        Name.TILED_SCALES,
        "scales in tiles of 128x4 as untiled ones",
        lambda x: _read(x, "tiles", "rows"),
    )
    yield Order(
        Name.TILE_SPLIT,
        "tiles of scales whose 128 rows are split as 32x4",
        lambda x: _read(x, "split", "tiles"),
    )
    yield Order(
        Name.TILE_SPLIT,
        "tiles of scales as if their 128 rows were split as 32x4",
        lambda x: _read(x, "tiles", "split"),
    )
    yield Order(
        Name.PLANE_ORDER,
        "tiles of scales in the order of columns",
        lambda x: _read(x, "planes", "tiles"),
    )


def row_orders() -> Iterator[Order]:
    """Yield the ways to read one scale a row wrongly: that of the neighbouring row."""
    for step, words in ((1, "after"), (-1, "before")):
        yield Order(
            Name.NEIGHBOURING_SCALE,
            f"the scale of the token {words} it",
            partial(_neighbour, axis=-2, step=step),
        )


def tile_orders() -> Iterator[Order]:
    """Yield the wrong ways to write [..., row tiles, column tiles, 512]."""
    for name, words, order in (
        (Name.UNTILED_SCALES, "untiled scales", "rows"),
        (Name.TILE_SPLIT, "tiles whose 128 rows are split as 32x4", "split"),
        (Name.PLANE_ORDER, "tiles in the order of columns", "planes"),
        (Name.TRANSPOSED_SCALES, "tiles of the transposed scales", "transposed"),
    ):
        yield Order(name, words, partial(_rewritten, order=order))


def code_orders() -> Iterator[Order]:
    """Yield the wrong orders of codes."""
    yield Order(Name.TRANSPOSED_CODES, "transposed codes", _transposed)
    yield Order(Name.SWAPPED_NIBBLES, "codes with the nibbles of each byte swapped", _swapped)


def _neighbour(x: Tensor, axis: int, step: int) -> Tensor:
    """Each element is that of the neighbour; there is none past the end, so it is its own."""
    index = np.clip(np.arange(x.shape[axis]) + step, 0, x.shape[axis] - 1)
    return np.take(x, index, axis=axis)


def _transposed(x: Tensor) -> Tensor:
    """The same memory read as the transposed matrix."""
    return np.ascontiguousarray(np.swapaxes(x, -1, -2)).reshape(x.shape)


def _swapped(x: Tensor) -> Tensor:
    if x.shape[-1] % 2:
        return x
    return x.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)


@cache
def _offsets(rows: int, columns: int, order: str) -> Offsets:
    """Where element (r, c) of a matrix, filled up to whole tiles, lies in memory."""
    r, c = np.arange(rows)[:, None], np.arange(columns)[None, :]
    across, down = -(-columns // TILE_COLUMNS), -(-rows // TILE_ROWS)
    tile = (r // TILE_ROWS * across + c // TILE_COLUMNS) * TILE_BYTES
    place = r % TILE_ROWS
    match order:
        case "rows":
            return r * across * TILE_COLUMNS + c
        case "tiles":
            return tile + place % 32 * 16 + place // 32 * 4 + c % 4
        case "split":  # 128 rows as 32x4 instead of 4x32
            return tile + place // 4 * 16 + place % 4 * 4 + c % 4
        case "planes":
            tile = (c // TILE_COLUMNS * down + r // TILE_ROWS) * TILE_BYTES
            return tile + place % 32 * 16 + place // 32 * 4 + c % 4
    raise ValueError(f"order is {order!r}; it must be rows, tiles, split or planes")


def _read(x: Tensor, written: str, read: str) -> Tensor:
    """A matrix written in one order and read in another. What was never written is 0."""
    rows, columns = x.shape[-2:]
    if not x.size:
        return x
    size = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS) * TILE_BYTES
    memory = np.zeros((*x.shape[:-2], size), x.dtype)
    memory[..., _offsets(rows, columns, written)] = x
    return memory[..., _offsets(rows, columns, read)]


def _rewritten(x: Tensor, order: str) -> Tensor:
    """Tiles [..., row tiles, column tiles, 512] written in another order."""
    down, across = x.shape[-3:-1]
    if not x.size:
        return x
    rows, columns = down * TILE_ROWS, across * TILE_COLUMNS
    flat = x.reshape(*x.shape[:-3], -1)
    matrix = flat[..., _offsets(rows, columns, "tiles")]
    if order == "transposed":
        if (down, across) != (1, 1):
            return x
        # The first 128x4 of the transposed matrix: its 4 columns as rows.
        wide = np.zeros_like(matrix)
        wide[..., :4, :4] = np.swapaxes(matrix[..., :4, :], -1, -2)
        matrix, order = wide, "tiles"
    memory = np.zeros_like(flat)
    memory[..., _offsets(rows, columns, order)] = matrix
    return memory.reshape(x.shape)
