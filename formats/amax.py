"""Arrays in blocks, and the largest magnitude of each."""

from typing import Any

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array

_FLAT = 32  # at most so many elements are reduced in one loop
_LANES = {2: 4, 4: 8}  # by bytes of an element: what the last axis is split into


def in_blocks(x: Array, rows: int, columns: int) -> Array:
    """[..., R, C] as [..., R / rows, rows, C / columns, columns], partial blocks filled with 0."""
    *batch, height, width = x.shape
    down, across = -(-height // rows), -(-width // columns)
    if (down * rows, across * columns) != (height, width):
        padding = [(0, 0)] * len(batch) + [(0, down * rows - height), (0, across * columns - width)]
        x = _backend.namespace(x).pad(x, padding)
    return x.reshape((*batch, down, rows, across, columns))


def out_of_blocks(x: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `in_blocks`."""
    *batch, down, rows, across, columns = x.shape
    whole = x.reshape((*batch, down * rows, across * columns))
    return whole[..., : shape[-2], : shape[-1]]


def beside(per_block: Array) -> Array:
    """[..., down, across] to broadcast against elements in blocks."""
    return per_block[..., :, None, :, None]


def block_amax(x: Array, *, ignore_nan: bool) -> Array:
    """The largest magnitude of each block, as float32 bits; a NaN where the block has one, or 0 if it has nothing else.

    Args:
        x: float32 bits (uint32), or bfloat16 bits (uint16), in blocks [..., down, rows, across, columns].
        ignore_nan: amax is over the other elements.

    Returns uint32 [..., down, across].
    """
    narrow = x.dtype == np.uint16
    word: Any = np.uint16 if narrow else np.uint32
    infinity = word(0x7F80 if narrow else 0x7F800000)
    key = x & word(0x7FFF if narrow else 0x7FFFFFFF)
    if ignore_nan:
        key = key - (infinity + word(1))  # NaN below all numbers, modulo the width
    key = _max(key, -3)
    key = _max(key, -1)
    if ignore_nan:
        key = key + (infinity + word(1))
        key = _backend.namespace(key).where(key > infinity, word(0), key)
    amax = key.astype(np.uint32) << np.uint32(16) if narrow else key
    return _backend.apart(amax)  # a maximum of it, of a row or of all, is no reduction of x


def _max(key: Array, axis: int) -> Array:
    """`key.max(axis)` in steps that XLA and numpy make fast loops of."""
    axis %= key.ndim
    last = axis == key.ndim - 1
    size = key.shape[axis]
    if size == 1:
        return key.reshape((*key.shape[:axis], *key.shape[axis + 1 :]))
    if not _backend.is_jax(key) and last:
        return _halved(key)
    if size > _FLAT and size % _FLAT == 0:
        # Apart, or XLA makes one reduction of the two, which is slower by far.
        return _backend.apart(_max(_split(key, axis, _FLAT), axis + 1)).max(axis=axis)
    lanes = _LANES[key.dtype.itemsize]
    if last and size > lanes and size % lanes == 0:
        return _split(key, axis, lanes).max(axis=(axis, axis + 1))
    return key.max(axis=axis)


def _split(key: Array, axis: int, inner: int) -> Array:
    return key.reshape((*key.shape[:axis], key.shape[axis] // inner, inner, *key.shape[axis + 1 :]))


def _halved(key: Array) -> Array:
    """The maximum along the last axis by halves: numpy is slow along short axes."""
    while key.shape[-1] > 4 and key.shape[-1] % 2 == 0:
        half = key.shape[-1] // 2
        key = np.maximum(key[..., :half], key[..., half:])
    if key.shape[-1] > 4:
        return key.max(axis=-1)
    result = key[..., 0]
    for place in range(1, key.shape[-1]):
        result = np.maximum(result, key[..., place])
    return result
