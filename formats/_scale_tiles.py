"""Scales in tiles of 128x4 and 8x4 bytes, as block-scaled matrix kernels read them."""

from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import unknown_name
from flamia_ref.formats._layout_arrays import (
    Orientation,
    as_bytes,
    as_scales,
    orientation_of,
    padded,
    refuse_other_shape,
    scale_shape,
)

_ROWS, _COLUMNS = 128, 4
_SHORT = 8  # rows of the 8x4 tile


class TileOrder(StrEnum):
    """Which tile comes after which, in memory. They differ where there are several rows of tiles.

    A row of tiles is a plane of 128 rows. In column-wise scales of attention the rows are channels,
    so that planes are d / 128: with d = 128 or less there is one, and all orders agree.
    """

    #: Each matrix of the batch on its own, its tiles row by row: matrix, plane, tile of columns.
    #: All matrix products read this, and attention reads its row-wise scales so.
    MATRIX = "matrix"
    #: Plane, matrix, tile of columns. cuDNN's attention reads dense column-wise scales so.
    PLANES_FIRST = "planes_first"
    #: Matrix, tile of columns, plane. cuDNN's attention reads packed (THD) column-wise scales so.
    PLANES_LAST = "planes_last"


def tile_scales_128x4(
    scales: Array,
    *,
    orientation: Orientation | str = Orientation.ROW_WISE,
    order: TileOrder | str = TileOrder.MATRIX,
) -> Array:
    """Scales in tiles of 128 rows by 4 columns, 512 bytes, rows and columns padded with zero bytes.

    Within a tile the scale of row m and column k is at byte (m % 32) * 16 + (m % 128 // 32) * 4 +
    k % 4. Tiles lie one after another as `order` says.

    Args:
        scales: uint8, row-wise [..., rows, columns] with columns along the contraction, column-wise
            [..., columns, rows]: the shape that `quantize` gives in blocks (1, 32) and (32, 1).
        orientation: as in `Orientation`. Column-wise scales are transposed first.
        order: as in `TileOrder`.

    Returns:
        uint8 [..., 512 * planes * across], planes = ceil(rows / 128), across = ceil(columns / 4);
        with planes_first [planes, ..., 512 * across].

    Raises TypeError for scales that are not integers, ValueError for fewer than two axes, numbers
    above 255, or an unknown orientation or order.

    Source: NVIDIA cuDNN front end 1.32.0, "128x4 scale factor layout", frost/tile_dsl/sf_layout.py,
    and for the orders sdpa/kernels/_mxfp8_sf.py; CUTLASS SfKMajorAtom; torchao to_blocked;
    TransformerEngine swizzle.cu, which has a kernel for each orientation.
    """
    side, after = orientation_of(orientation), _order_of(order)
    return _tile(as_scales(scales), side=side, order=after)


@_backend.jit(static=("side", "order"))
def _tile(scales: Array, *, side: Orientation, order: TileOrder) -> Array:
    matrix = scales if side is Orientation.ROW_WISE else scales.swapaxes(-1, -2)
    *batch, rows, columns = matrix.shape
    tiles = _Tiles.of(rows, columns, _ROWS)
    whole = padded(matrix, tiles.down * _ROWS, tiles.across * _COLUMNS)
    # Rows of a tile are 4 groups of 32: the row within the group is the slowest index in memory.
    split = whole.reshape((*batch, tiles.down, 4, 32, tiles.across, _COLUMNS))
    stored = split.transpose(_tile_axes(len(batch), order))
    return stored.reshape(_tiled_shape(batch, tiles, order))


def untile_scales_128x4(
    tiled: Array,
    shape: Any,
    *,
    orientation: Orientation | str = Orientation.ROW_WISE,
    order: TileOrder | str = TileOrder.MATRIX,
) -> Array:
    """The inverse of `tile_scales_128x4`; padding is dropped whatever it holds.

    Args:
        tiled: uint8 of the shape that `tile_scales_128x4` gives.
        shape: that of the scales, row-wise (..., rows, columns), column-wise (..., columns, rows).
        orientation: as there.
        order: as there.

    Returns:
        uint8 scales of that shape.

    Raises TypeError for bytes that are not integers, ValueError for a shape that is none, a size
    that is not the one of these scales, numbers above 255, or an unknown orientation or order.
    """
    side, after = orientation_of(orientation), _order_of(order)
    codes, wanted = as_bytes(tiled, "tiled"), scale_shape(shape)
    *batch, rows, columns = _matrix_shape(wanted, side)
    expected = _tiled_shape(batch, _Tiles.of(rows, columns, _ROWS), after)
    refuse_other_shape(codes, expected, "tiled scales", wanted)
    return _untile(codes, shape=wanted, side=side, order=after)


@_backend.jit(static=("shape", "side", "order"))
def _untile(codes: Array, *, shape: tuple[int, ...], side: Orientation, order: TileOrder) -> Array:
    *batch, rows, columns = _matrix_shape(shape, side)
    tiles = _Tiles.of(rows, columns, _ROWS)
    axes = _tile_axes(len(batch), order)
    split = (*batch, tiles.down, 4, 32, tiles.across, _COLUMNS)
    stored = codes.reshape(tuple(split[axis] for axis in axes))
    whole = stored.transpose(tuple(int(axis) for axis in np.argsort(axes)))
    return _cut(whole.reshape((*batch, tiles.down * _ROWS, tiles.across * _COLUMNS)), shape, side)


def tile_scales_8x4(
    scales: Array, *, orientation: Orientation | str = Orientation.ROW_WISE
) -> Array:
    """Scales in tiles of 8 rows by 4 columns, 32 bytes, rows and columns padded with zero bytes.

    The scale of row m and column k is at byte (m // 8 * ceil(columns / 4) + k // 4) * 32 +
    (m % 8) * 4 + k % 4. For products with few rows.

    Args:
        scales: uint8, row-wise [..., rows, columns] with columns along the contraction, column-wise
            [..., columns, rows].
        orientation: as in `Orientation`. Column-wise scales are transposed first.

    Returns:
        uint8 [..., 32 * ceil(rows / 8) * ceil(columns / 4)].

    Raises TypeError for scales that are not integers, ValueError for fewer than two axes, numbers
    above 255, or an unknown orientation.

    Source: TensorRT-LLM and FlashInfer, get_sf_out_offset_8x4 (SfLayout.layout_8x4). They have it
    for row-wise scales; column-wise is ours, by the same transposition.
    """
    return _tile_short(as_scales(scales), side=orientation_of(orientation))


@_backend.jit(static=("side",))
def _tile_short(scales: Array, *, side: Orientation) -> Array:
    matrix = scales if side is Orientation.ROW_WISE else scales.swapaxes(-1, -2)
    *batch, rows, columns = matrix.shape
    tiles = _Tiles.of(rows, columns, _SHORT)
    whole = padded(matrix, tiles.down * _SHORT, tiles.across * _COLUMNS)
    split = whole.reshape((*batch, tiles.down, _SHORT, tiles.across, _COLUMNS))
    stored = split.swapaxes(-2, -3)
    return stored.reshape((*batch, tiles.down * tiles.across * _SHORT * _COLUMNS))


def untile_scales_8x4(
    tiled: Array, shape: Any, *, orientation: Orientation | str = Orientation.ROW_WISE
) -> Array:
    """The inverse of `tile_scales_8x4`; padding is dropped whatever it holds.

    Args:
        tiled: uint8 [..., 32 * ceil(rows / 8) * ceil(columns / 4)].
        shape: that of the scales, row-wise (..., rows, columns), column-wise (..., columns, rows).
        orientation: as there.

    Returns:
        uint8 scales of that shape.

    Raises TypeError for bytes that are not integers, ValueError for a shape that is none, a size
    that is not the one of these scales, numbers above 255, or an unknown orientation.
    """
    side = orientation_of(orientation)
    codes, wanted = as_bytes(tiled, "tiled"), scale_shape(shape)
    *batch, rows, columns = _matrix_shape(wanted, side)
    tiles = _Tiles.of(rows, columns, _SHORT)
    expected = (*batch, tiles.down * tiles.across * _SHORT * _COLUMNS)
    refuse_other_shape(codes, expected, "tiled scales", wanted)
    return _untile_short(codes, shape=wanted, side=side)


@_backend.jit(static=("shape", "side"))
def _untile_short(codes: Array, *, shape: tuple[int, ...], side: Orientation) -> Array:
    *batch, rows, columns = _matrix_shape(shape, side)
    tiles = _Tiles.of(rows, columns, _SHORT)
    stored = codes.reshape((*batch, tiles.down, tiles.across, _SHORT, _COLUMNS))
    whole = stored.swapaxes(-2, -3)
    return _cut(whole.reshape((*batch, tiles.down * _SHORT, tiles.across * _COLUMNS)), shape, side)


class _Tiles(NamedTuple):
    down: int
    across: int

    @classmethod
    def of(cls, rows: int, columns: int, tile_rows: int) -> "_Tiles":
        return cls(-(-rows // tile_rows), -(-columns // _COLUMNS))


def _order_of(given: TileOrder | str) -> TileOrder:
    try:
        return TileOrder(given)
    except ValueError:
        raise unknown_name("tile order", given, TileOrder) from None


def _tile_axes(batch: int, order: TileOrder) -> tuple[int, ...]:
    """Axes of [..., down, 4, 32, across, 4] from the slowest in memory to the fastest."""
    down, group, row, across, column = range(batch, batch + 5)
    matrices = tuple(range(batch))
    tiles = {
        TileOrder.MATRIX: (*matrices, down, across),
        TileOrder.PLANES_FIRST: (down, *matrices, across),
        TileOrder.PLANES_LAST: (*matrices, across, down),
    }
    return (*tiles[order], row, group, column)


def _tiled_shape(batch: list[int], tiles: _Tiles, order: TileOrder) -> tuple[int, ...]:
    if order is TileOrder.PLANES_FIRST:
        return (tiles.down, *batch, tiles.across * _ROWS * _COLUMNS)
    return (*batch, tiles.down * tiles.across * _ROWS * _COLUMNS)


def _matrix_shape(shape: tuple[int, ...], side: Orientation) -> tuple[int, ...]:
    """The shape of the matrix that is tiled, of the one that the scales have."""
    return shape if side is Orientation.ROW_WISE else (*shape[:-2], shape[-1], shape[-2])


def _cut(whole: Array, shape: tuple[int, ...], side: Orientation) -> Array:
    """The scales without padding, in an array of their own."""
    *_, rows, columns = _matrix_shape(shape, side)
    matrix = whole[..., :rows, :columns]
    scales = matrix if side is Orientation.ROW_WISE else matrix.swapaxes(-1, -2)
    return scales if _backend.is_jax(scales) else np.array(scales, order="C")
