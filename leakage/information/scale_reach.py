"""Which scales a block can have, and how many values an element can take over them: by enumeration."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref.formats import FORMATS, decode
from flamia_ref.formats.block import BlockFormat
from flamia_ref.formats.blocks import encode_blocks
from flamia_ref.formats.scales import scale_codes

Bits = NDArray[np.uint32]
Floats = NDArray[np.float64]

_MAGNITUDES = np.arange(0x7F80, dtype=np.uint32) << np.uint32(16)  # of every finite bfloat16
_ANY = np.uint32(0x7F7F0000)  # the largest
_PART = 1 << 21  # values that are looked at together


class Scales(NamedTuple):
    """The scales that a rule gives to an amax of any finite bfloat16 magnitude above 0.

    Attributes:
        codes: scale codes, ascending, each once.
        least, most: float32 bits of the smallest and the largest amax of each.
    """

    codes: NDArray[Any]
    least: Bits
    most: Bits


def not_enumerable(block_format: BlockFormat) -> str | None:
    """Why the scales of a format cannot be enumerated one by one, None if they can."""
    if block_format.has_tensor_scale:
        return "it has a scale of the whole tensor besides those of its blocks"
    if block_format.choice is not None:
        return "its scales follow from the errors of all elements, not from their amax"
    if block_format.scaled_uses_amax:
        return "its elements take the amax itself, not only the scale"
    if block_format.signs is not None or block_format.prepared is not None:
        return "its elements are transformed before they are scaled"
    return None


@functools.lru_cache(maxsize=32)
def scales_of(block_format: BlockFormat) -> Scales:
    """The scales that blocks of a format can have, by its rule on every magnitude."""
    found = np.asarray(scale_codes(_MAGNITUDES[1:], block_format))
    codes, first = np.unique(found, return_index=True)
    last = len(found) - 1 - np.unique(found[::-1], return_index=True)[1]
    return Scales(codes, _MAGNITUDES[1:][first], _MAGNITUDES[1:][last])


@functools.lru_cache(maxsize=32)
def scale_count(block_format: BlockFormat, *, computed: bool = False, zero: bool = False) -> int:
    """How many scales a block can have at most.

    Args:
        block_format: the format.
        computed: the values are no bfloat16 inputs, but float32 that is computed of them: down to the least subnormal,
            and up to an infinity or NaN that finite inputs overflow to.
        zero: also that of a block of zeros, which matters where other blocks take it.
    """
    more = [0] if zero else []
    if computed:
        more += [1 << power for power in range(23)] + [0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    codes = scales_of(block_format).codes
    if not more:
        return len(codes)
    others = np.asarray(scale_codes(np.array(more, dtype=np.uint32), block_format))
    return len(np.unique(np.concatenate([codes, others])))


def reachable(amax: Bits, block_format: BlockFormat, growth: int | None) -> NDArray[np.bool_]:
    """Which of `scales_of` a block can have, [blocks, scales], whose legal tokens have this amax.

    Args:
        amax: float32 bits of magnitudes [blocks].
        block_format: the format.
        growth: illegal tokens raise the amax up to its 2^growth-fold; None: to any finite bfloat16 magnitude.
    """
    scales = scales_of(block_format)
    if growth is None:
        most = np.full_like(amax, _ANY)
    else:
        with np.errstate(over="ignore"):
            grown = np.ldexp(amax.view(np.float32), growth)
        most = np.minimum(grown.view(np.uint32), _ANY)
    found: NDArray[np.bool_] = scales.most >= amax[:, None]
    found &= scales.least <= most[:, None]
    # The amax of the legal tokens itself need not be a bfloat16 value.
    own = np.asarray(scale_codes(np.maximum(amax, 1), block_format))
    return np.asarray(found | (scales.codes == own[:, None]))


def dequantized(x: Bits, block_format: BlockFormat) -> Floats:
    """The value of each element at each of `scales_of`, [..., scales], exact in float64, for float32 bits [...]."""
    codes = scales_of(block_format).codes
    flat = x.reshape(-1, 1)
    step = max(1, _PART // len(codes))
    parts = [
        _values(flat[start : start + step], codes, block_format)
        for start in range(0, len(flat), step)
    ]
    found = np.concatenate(parts) if parts else np.zeros((0, len(codes)))
    return found.reshape(*x.shape, len(codes))


def _values(x: Bits, scales: NDArray[Any], block_format: BlockFormat) -> Floats:
    shape = (len(x), len(scales))
    spread = np.broadcast_to(scales, shape)
    codes = encode_blocks(np.broadcast_to(x, shape), spread, block_format, (1, 1))
    element = decode(codes, FORMATS[block_format.element.name], np.float64)
    return np.asarray(element * decode(scales, FORMATS[block_format.scale.name], np.float64))


def counts(values: Floats, reach: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many different values each element has over the scales that it can have; `reach` broadcasts."""
    # Zeros of both signs are two values: what is equal to the bit is certainly equal.
    bits = values.view(np.int64)
    there = np.broadcast_to(reach, bits.shape)
    first = np.take_along_axis(bits, there.argmax(axis=-1)[..., None], axis=-1)
    ordered = np.sort(np.where(there, bits, first), axis=-1)
    return np.asarray((ordered[..., 1:] != ordered[..., :-1]).sum(axis=-1) + 1)


def joint_counts(values: Floats, reach: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many different rows of values [blocks, elements, scales] blocks have over their scales [blocks, scales]."""
    bits = values.view(np.int64)
    return np.array(
        [
            len(np.unique(block[:, there].T, axis=0))
            for block, there in zip(bits, reach, strict=True)
        ],
        dtype=np.int64,
    )


@functools.lru_cache(maxsize=32)
def most_values(block_format: BlockFormat, any_scale: bool = False) -> int:
    """The most values that an element can take: over every finite bfloat16 element, alone in its block, and every
    scale that others can give the block; with `any_scale` every scale there is."""
    most = 1
    for x in np.array_split(_MAGNITUDES[1:], 16):
        amax = np.zeros_like(x) if any_scale else x
        found = counts(dequantized(x, block_format), reachable(amax, block_format, None))
        most = max(most, int(found.max()))
    return most
