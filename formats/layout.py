"""How codes and scales lie in memory: 4-bit packing, and the 128x4 tiles of scales.

Tensor cores read the scales of a block-scaled operand in tiles of 128 rows by 4 columns, 512 bytes
each, that lie one after another along the columns. Within a tile the scale of row m and column k is
at byte (m % 32) * 16 + (m % 128 // 32) * 4 + k % 4. Source: NVIDIA cuDNN front end, "128x4 scale
factor layout"; CUTLASS SfKMajorAtom; torchao to_blocked.
"""

import operator
from typing import Any

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import shown
from flamia_ref.formats.encoding import as_codes
from flamia_ref.formats.scalar import E2M1, E8M0

_ROWS, _COLUMNS = 128, 4


def tile_scales_128x4(scales: Array) -> Array:
    """Scales in tile order, rows padded to 128 and columns to 4 with zero bytes.

    Args:
        scales: uint8 [..., rows, columns], columns along the contraction. For an operand scaled
            along its rows, transpose the scales first.

    Returns:
        uint8 [..., 512 * ceil(rows / 128) * ceil(columns / 4)].

    Raises TypeError for codes that are not integers, ValueError for fewer than two axes or codes
    above 255.
    """
    codes = as_codes(scales, E8M0, "scales")
    if codes.ndim < 2:
        raise ValueError(f"scales are [..., rows, columns], not of shape {codes.shape}")
    return _tile(codes)


@_backend.jit
def _tile(codes: Array) -> Array:
    *batch, rows, columns = codes.shape
    down, across = -(-rows // _ROWS), -(-columns // _COLUMNS)
    padding = [(0, 0)] * len(batch) + [(0, down * _ROWS - rows), (0, across * _COLUMNS - columns)]
    padded = _backend.namespace(codes).pad(codes, padding)
    # Rows of a tile are 4 groups of 32: the row within the group is the slowest index in memory.
    split = padded.reshape((*batch, down, 4, 32, across, _COLUMNS))
    first = len(batch)
    order = (*range(first), first, first + 3, first + 2, first + 1, first + 4)
    return split.transpose(order).reshape((*batch, down * across * _ROWS * _COLUMNS))


def untile_scales_128x4(tiled: Array, shape: Any) -> Array:
    """The inverse of `tile_scales_128x4`; padding is dropped whatever it holds.

    Args:
        tiled: uint8 [..., 512 * ceil(rows / 128) * ceil(columns / 4)].
        shape: [..., rows, columns] of the scales.

    Returns:
        uint8 scales of that shape.

    Raises TypeError for codes that are not integers, ValueError for a shape that is none or a size
    that is not the one of these scales.
    """
    codes = as_codes(tiled, E8M0, "tiled")
    try:
        wanted = tuple(operator.index(size) for size in shape)
    except TypeError:
        wanted = ()
    if len(wanted) < 2 or min(wanted) < 0:
        raise ValueError(f"shape is (..., rows, columns) of the scales, not {shown(shape)}")
    *batch, rows, columns = wanted
    down, across = -(-rows // _ROWS), -(-columns // _COLUMNS)
    expected = (*batch, down * across * _ROWS * _COLUMNS)
    if codes.shape != expected:
        raise ValueError(
            f"tiled scales have shape {codes.shape}; scales of shape {wanted} take {expected}"
        )
    return _untile(codes, wanted)


@_backend.jit(static=("shape",))
def _untile(codes: Array, shape: tuple[int, ...]) -> Array:
    *batch, rows, columns = shape
    down, across = -(-rows // _ROWS), -(-columns // _COLUMNS)
    split = codes.reshape((*batch, down, across, 32, 4, _COLUMNS))
    first = len(batch)
    order = (*range(first), first, first + 3, first + 2, first + 1, first + 4)
    whole = split.transpose(order).reshape((*batch, down * _ROWS, across * _COLUMNS))
    return whole[..., :rows, :columns]


def pack_fp4(codes: Array) -> Array:
    """Two 4-bit codes a byte, the even index in the low four bits.

    Args:
        codes: E2M1 codes 0 to 15 [..., n], n even.

    Returns:
        uint8 [..., n / 2].

    Raises TypeError for codes that are not integers, ValueError for an odd n, no axis, or codes
    above 15.
    """
    checked = as_codes(codes, E2M1)
    if checked.ndim < 1 or checked.shape[-1] % 2:
        raise ValueError(f"pairs of codes are packed; the last of {checked.shape} must be even")
    return _pack(checked)


@_backend.jit
def _pack(codes: Array) -> Array:
    pairs = (codes & np.uint8(15)).reshape((*codes.shape[:-1], codes.shape[-1] // 2, 2))
    return pairs[..., 0] | (pairs[..., 1] << np.uint8(4))


def unpack_fp4(packed: Array) -> Array:
    """The inverse of `pack_fp4`: uint8 [..., n] to codes 0 to 15 [..., 2 n].

    Raises TypeError for bytes that are not integers, ValueError for no axis or bytes above 255.
    """
    whole = as_codes(packed, E8M0, "packed")
    if whole.ndim < 1:
        raise ValueError("packed codes have at least one axis")
    return _unpack(whole)


@_backend.jit
def _unpack(packed: Array) -> Array:
    xp = _backend.namespace(packed)
    pairs = xp.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1)
    return pairs.reshape((*packed.shape[:-1], 2 * packed.shape[-1]))
