"""Scales four to a 32-bit word, rows fastest: what DeepGEMM's Blackwell kernels read."""

from typing import Any

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import type_of
from flamia_ref.formats._layout_arrays import (
    as_scales,
    in_order,
    padded,
    refuse_other_shape,
    scale_shape,
)

_BYTES = 4  # scales of a word
_ALIGNED = 4  # rows are filled up to a multiple of it: 16 bytes, which TMA asks of a stride


def pack_scales_int32(scales: Array) -> Array:
    """Four E8M0 scales along the contraction a word, the first in its low byte; words row by row.

    The word of row m and columns 4 w to 4 w + 3 is at [..., w, m]. In DeepGEMM's terms the result
    is the storage of a tensor of shape (rows, words) and strides (1, padded rows), MN-major with
    TMA alignment: in torch `result.mT[..., :rows, :]`.

    Args:
        scales: uint8 E8M0 codes [..., rows, columns], columns along the contraction.

    Returns:
        int32 [..., ceil(columns / 4), 4 * ceil(rows / 4)]. Bytes past the last column are 0. Words
        past the last row are 0 too; the kernels leave those unset. A word is negative where its
        fourth scale is 128 or more.

    Raises TypeError for scales that are not integers, ValueError for fewer than two axes or numbers
    above 255.

    Source: DeepGEMM csrc/jit_kernels/impls/smxx_layout.hpp,
    get_mn_major_tma_aligned_packed_ue8m0_tensor, and its kernels in smxx_layout.cuh. Not its form
    for K-grouped products, where columns are filled up group by group.
    """
    return _pack(as_scales(scales))


@_backend.jit
def _pack(scales: Array) -> Array:
    *batch, rows, columns = scales.shape
    words, filled = _sizes(rows, columns)
    whole = padded(scales, filled, words * _BYTES).swapaxes(-1, -2)
    quarters = whole.reshape((*batch, words, _BYTES, filled)).astype(np.uint32)
    word = quarters[..., 0, :]
    for i in range(1, _BYTES):
        word = word | (quarters[..., i, :] << np.uint32(8 * i))
    return _backend.reinterpret(in_order(word), np.int32)


def unpack_scales_int32(packed: Array, shape: Any) -> Array:
    """The inverse of `pack_scales_int32`; padding is dropped whatever it holds.

    Args:
        packed: int32 or uint32 [..., ceil(columns / 4), 4 * ceil(rows / 4)]. Of a DeepGEMM tensor
            this is the transposed one with its padding, not the tensor as torch shows it.
        shape: (..., rows, columns) of the scales.

    Returns:
        uint8 scales of that shape.

    Raises TypeError for words of another type, ValueError for a shape that is none or a size that
    is not the one of these scales.
    """
    words = _backend.plain("packed", packed)
    if words.dtype not in (np.int32, np.uint32):
        raise TypeError(f"packed scales are int32 words, not {type_of(words)}")
    wanted = scale_shape(shape)
    *batch, rows, columns = wanted
    refuse_other_shape(words, (*batch, *_sizes(rows, columns)), "packed scales", wanted)
    return _unpack(words, shape=wanted)


@_backend.jit(static=("shape",))
def _unpack(words: Array, *, shape: tuple[int, ...]) -> Array:
    *batch, rows, columns = shape
    count, filled = _sizes(rows, columns)
    unsigned = words.astype(np.uint32)
    shifts = (np.arange(_BYTES, dtype=np.uint32) * np.uint32(8))[:, None]
    quarters = (unsigned[..., None, :] >> shifts) & np.uint32(255)
    whole = quarters.astype(np.uint8).reshape((*batch, count * _BYTES, filled))
    return in_order(whole.swapaxes(-1, -2)[..., :rows, :columns])


def _sizes(rows: int, columns: int) -> tuple[int, int]:
    return -(-columns // _BYTES), -(-rows // _ALIGNED) * _ALIGNED
