"""One quantized copy of an input (q, k, v, dO), taken tile by tile in either orientation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32, _primitive
from flamia_ref._backend import Array
from flamia_ref.attention import sides
from flamia_ref.attention.product import Operand, Scope, Use
from flamia_ref.attention.sides import BLOCK, UNIT
from flamia_ref.formats import E8M0, FORMATS, PRESETS, decode_bits
from flamia_ref.packing import Documents
from flamia_ref.packing.tiles import Indices

OVER_CHANNELS = frozenset({Use.S_Q, Use.S_K, Use.DP_DO, Use.DP_V})
"""Uses whose contraction runs over the channels; that of the others runs over tokens."""


class Grid(NamedTuple):
    """Blocks of 32 tokens, or of 16, that start at each document.

    Attributes:
        tokens: [blocks, 32 or 16], packed tokens, -1 past a document's end.
        block: [tokens], the block of each token.
        offset: [tokens], its place there.
        previous: [blocks], the block before it in its document, -1 for a document's first.
    """

    tokens: Indices
    block: Indices
    offset: Indices
    previous: Indices

    @classmethod
    def of(cls, documents: Documents, size: int = BLOCK) -> Grid:
        """The grid of packed documents, in blocks of `size`."""
        rows, block, offset, previous, count = [], [], [], [], 0
        for document in documents:
            length = document.stop - document.start
            place = np.arange(length, dtype=np.int32)
            blocks = -(-length // size)
            filled = np.arange(blocks * size, dtype=np.int32)
            filled = np.where(filled < length, filled + np.int32(document.start), np.int32(-1))
            rows.append(filled.reshape(blocks, size))
            block.append(place // size + np.int32(count))
            offset.append(place % size)
            earlier = np.arange(count - 1, count - 1 + blocks, dtype=np.int32)
            earlier[:1] = -1
            previous.append(earlier)
            count += blocks
        return cls(*(np.concatenate(x).astype(np.int32) for x in (rows, block, offset, previous)))

    def of_documents(self, documents: Documents) -> Indices:
        """[documents, most blocks of one], the blocks of each document, -1 past its end."""
        counts = [-(-length // self.size) for length in documents.lengths]
        place = np.arange(max(counts, default=0), dtype=np.int32)
        first = np.cumsum([0, *counts])[: len(counts), None]
        inside = place < np.array(counts, dtype=np.int32).reshape(-1, 1)
        return np.where(inside, first + place, -1).astype(np.int32)

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return int(self.tokens.shape[1])


class Copy(NamedTuple):
    """One copy of an input.

    Attributes:
        codes: [tokens * heads + 1, channels]; the last row is 0, for places past a document's end.
        scales: [tokens * heads + 1, ...] or [blocks * heads + 1, ...], the last row the code of 1; None where no scale
            follows from the values.
        heads: heads of the input.
        operand: the use it was made for.
        grid: the token blocks.
        descales: float32 bits [documents, kv_heads] that the codes of a document and key/value head stand for times,
            or None.
        powers: e8m0 codes [tokens * heads + 1, 1] of a power of two that each token has besides its scales, or None.
        dequantized: bfloat16 codes of the values [tokens * heads + 1, channels], for products that take these, or None.
    """

    codes: Array
    scales: Array | None
    heads: int
    operand: Operand
    grid: Grid
    powers: Array | None = None
    descales: Array | None = None
    dequantized: Array | None = None

    @property
    def channels(self) -> int:
        """Channels of the input."""
        return int(self.codes.shape[1])

    @property
    def by_token(self) -> bool:
        """Whether each token has scales of its own."""
        return self.operand.block is None or self.operand.block[0] == 1

    @property
    def channel_block(self) -> int:
        """Channels that share a scale in a contraction over channels."""
        return channel_block(self.operand)

    def trace(self) -> tuple[Array, Array | None]:
        """Codes [tokens, heads, channels], and scales [tokens or token blocks, heads, ...]."""
        shape = (-1, self.heads)
        codes = self.codes[:-1].reshape(*shape, self.codes.shape[1])
        if self.scales is None:
            return codes, self.descales
        return codes, self.scales[:-1].reshape(*shape, self.scales.shape[1])

    @property
    def token_scales(self) -> Array | None:
        """The powers of two that tokens have besides their scales, as they are traced: [tokens, heads, 1], or None."""
        return None if self.powers is None else self.powers[:-1].reshape(-1, self.heads, 1)

    def not_finite(self) -> Array:
        """Whether each code is NaN or infinite: bool [tokens, heads, channels]."""
        codes = self.codes if self.dequantized is None else self.dequantized
        values = decode_bits(codes[:-1], FORMATS[sides.taken_format(self.operand)])
        bad = _primitive.special((values & _float32.MAGNITUDE) >= _float32.INFINITY)
        return bad.reshape(-1, self.heads, self.codes.shape[1])

    def rows_of(self, tokens: Indices, heads: Indices) -> Indices:
        """Rows of `codes` for packed `tokens` [tiles, rows] (-1 for none) of one of `heads` for each tile."""
        last = self.codes.shape[0] - 1
        return np.where(tokens < 0, last, tokens * self.heads + heads[:, None]).astype(np.int32)

    def scales_over_channels(self, tokens: Indices, heads: Indices) -> Array | None:
        """Scales [tiles, rows, channel blocks] for a contraction over channels."""
        blocks = -(-self.channels // self.channel_block)
        if self.scales is None:
            return self._static((*tokens.shape, blocks))
        if self.by_token:
            scales = _backend.gather(self.scales, self.rows_of(tokens, heads))
        else:
            of_token = np.append(self.grid.block, np.int32(-1))[tokens]
            scales = _backend.gather(self.scales, self._block_index(of_token, heads))
        if scales.shape[2] == blocks:
            return scales
        xp = _backend.namespace(scales)
        return xp.repeat(scales, blocks, axis=2)

    def scales_over_tokens(self, tokens: Indices, heads: Indices) -> Array | None:
        """Scales [row blocks, tiles, channels] for a contraction over tokens."""
        channels = self.channels
        if self.scales is None:
            return self._static((tokens.shape[1] // BLOCK, len(tokens), channels))
        if self.by_token:
            return None
        of_token = np.append(self.grid.block, np.int32(-1))[tokens[:, :: self.grid.size]]
        index = np.ascontiguousarray(self._block_index(of_token, heads).T)
        scales = _backend.gather(self.scales, index)
        if scales.shape[2] == channels:
            return scales
        xp = _backend.namespace(scales)
        return xp.repeat(scales, BLOCK, axis=2)[:, :, :channels]

    def scale_rows(self) -> Indices | None:
        """The row of `scales` of each row of `codes` but the last; None where they are the same rows."""
        if self.by_token:
            return None
        heads = np.arange(self.heads, dtype=np.int32)
        return (self.grid.block[:, None] * np.int32(self.heads) + heads).reshape(-1)

    def _static(self, shape: tuple[int, ...]) -> Array | None:
        """The constant scale, where there is one."""
        if self.operand.scope is not Scope.STATIC:
            return None
        return _backend.namespace(self.codes).full(shape, self.operand.static_scale, dtype=np.uint8)

    def _block_index(self, blocks: Indices, heads: Indices) -> Indices:
        last = len(self.grid.tokens) * self.heads
        return np.where(blocks < 0, last, blocks * self.heads + heads[:, None]).astype(np.int32)


def channel_block(operand: Operand) -> int:
    """Channels that share a scale of an operand in a contraction over channels."""
    columns = BLOCK if operand.block is None else operand.block[1]
    return columns if isinstance(columns, int) and columns > 1 else BLOCK


def unit_code(operand: Operand) -> np.uint8:
    """The code of 1 in an operand's scale format."""
    if operand.format not in PRESETS or PRESETS[operand.format].scale is E8M0:
        return UNIT
    scale = PRESETS[operand.format].scale
    return np.uint8(scale.bias << scale.mantissa_bits)


def taken(
    copy: Copy,
    use: Use,
    operand: Operand,
    high: Array | None,
    tokens: Indices,
    heads: Indices,
    convert: Callable[[Array], Array],
) -> sides.Rows:
    """Rows of a copy for one use, of `tokens` [tiles, rows] and of one of `heads` for each tile. `high`: bfloat16 codes
    as `copy.codes`, for uses with guarded blocks."""
    index = copy.rows_of(tokens, heads)
    fold = shift = scales = None
    taken_high = None if high is None else _backend.gather(high, index)
    if copy.dequantized is not None:
        at = index if use in OVER_CHANNELS else np.ascontiguousarray(index.T)
        codes = _backend.gather(copy.dequantized, at)
    elif use in OVER_CHANNELS:
        codes = _backend.gather(copy.codes, index)
        scales = copy.scales_over_channels(tokens, heads)
        if copy.powers is not None:
            power = _backend.gather(copy.powers[:, 0], index)
            shift = power.astype(np.int32) - np.int32(E8M0.bias)
    else:
        codes = _backend.gather(copy.codes, np.ascontiguousarray(index.T))
        if operand.scale_folded_into is not None and copy.scales is not None:
            fold = _backend.gather(copy.scales[:, 0], index)
            xp = _backend.namespace(codes)
            shape = (codes.shape[0] // BLOCK, *codes.shape[1:])
            scales = xp.full(shape, UNIT, dtype=np.uint8)
        else:
            scales = copy.scales_over_tokens(tokens, heads)
    parts = (codes, scales, fold, taken_high, shift)
    return sides.Rows(*(None if part is None else convert(part) for part in parts))
