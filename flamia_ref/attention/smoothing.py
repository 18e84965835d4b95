"""What smoothing takes off q and k before they are quantized: means over tokens, channel by channel.

Floats are float32 bits, [tokens, heads, channels]. Where they are on the host, so is this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.attention.product import Operand
from flamia_ref.attention.sides import rounded_bfloat16
from flamia_ref.packing import Documents
from flamia_ref.packing.tiles import Indices

TILE = 128
"""Tokens whose mean is taken off q, those of a query tile or of several, and of a partial sum of a document's."""

BUTTERFLIES: Mapping[int, tuple[int, ...]] = {
    64: (16, 32, 64, 2, 1, 8, 4),
    128: (8, 16, 32, 64, 1, 4, 2),
}
"""The distances at which the tokens of a tile are added in bfloat16, one after another, by head_dim: up to 64, and from
65 on. Source: SageAttention d1a57a5, sageattn3/api.py, group_mean_kernel, compiled by Triton 3.8.0 for sm_120 and
bfloat16, head_dim 64 and 128; which tokens a thread has is Triton's choice."""


class Tiles(NamedTuple):
    """Runs of 128 tokens that start at each document.

    Attributes:
        tokens: [tiles, 128], packed tokens, as many as there are past a document's end.
        tile: [tokens], the tile of each token.
        documents: [documents, most tiles of one], the tiles of each, as many as there are for none.
        document: [tokens], the document of each token.
        lengths: [documents].
    """

    tokens: Indices
    tile: Indices
    documents: Indices
    document: Indices
    lengths: Indices

    @classmethod
    def of(cls, documents: Documents) -> Tiles:
        """The runs of packed documents."""
        lengths = np.array(documents.lengths, dtype=np.int32)
        counts = -(-lengths // TILE)
        firsts = np.cumsum(counts) - counts
        rows = []
        for document, count in zip(documents, counts, strict=True):
            place = np.arange(count * TILE, dtype=np.int32) + document.start
            rows.append(np.where(place < document.stop, place, documents.tokens).reshape(-1, TILE))
        column = np.arange(counts.max(initial=0))
        table = np.where(column < counts[:, None], firsts[:, None] + column, counts.sum())
        place = np.concatenate([np.arange(length) for length in lengths])
        owner = np.repeat(np.arange(len(lengths)), lengths)
        return cls(
            np.concatenate(rows).astype(np.int32),
            (firsts[owner] + place // TILE).astype(np.int32),
            table.astype(np.int32),
            owner.astype(np.int32),
            lengths,
        )


def smoothed(x: Array, operand: Operand, documents: Documents) -> Array:
    """`x` as it is quantized for a use: bfloat16 values."""
    if operand.smoothing == "none":
        return x
    return rounded_bfloat16(_float32.subtract(x, means(x, operand, documents)))


def correction(x: Array, operand: Operand, documents: Documents) -> Array:
    """What a use brings to the product that a corrected one begins at: bfloat16 values, the mean that was taken off
    tiles, or the values before they are quantized."""
    if operand.smoothing != "tile_mean":
        return smoothed(x, operand, documents)
    return rounded_bfloat16(means(x, operand, documents))


def means(x: Array, operand: Operand, documents: Documents) -> Array:
    """What is taken off each token."""
    tiles = Tiles.of(documents)
    if operand.smoothing == "tile_mean":
        return _tile_means(x, tiles)
    return _document_means(x, tiles)


def _tile_means(x: Array, tiles: Tiles) -> Array:
    """The mean over the tile of each token, those past the document's end as zeros."""
    xp = _backend.namespace(x)
    channels = x.shape[2]
    sums = _with_zero(x, tiles.tokens)  # [tiles, 128, heads, channels]
    bits = sorted(BUTTERFLIES[64], reverse=True)
    sums = sums.reshape((len(tiles.tokens), *(2 for _ in bits), *x.shape[1:]))
    for distance in BUTTERFLIES[64 if channels <= 64 else 128]:
        before = (slice(None),) * (1 + bits.index(distance))
        sums = rounded_bfloat16(_float32.add(sums[(*before, 0)], sums[(*before, 1)]))
        bits.remove(distance)
    shift = xp.full(sums.shape, -(TILE.bit_length() - 1), dtype=np.int32)
    return _with_zero(_float32.shift(sums, shift), tiles.tile)


def _document_means(x: Array, tiles: Tiles) -> Array:
    """The mean over the document of each token, in bfloat16."""
    xp = _backend.namespace(x)
    parts = _added(xp.moveaxis(_with_zero(x, tiles.tokens), 1, 0))
    sums = _added(xp.moveaxis(_with_zero(parts, tiles.documents), 1, 0))
    with np.errstate(divide="ignore"):
        inverse = (np.float32(1) / tiles.lengths.astype(np.float32)).view(np.uint32)
    factor = xp.broadcast_to(xp.asarray(inverse)[:, None, None], sums.shape)
    return _with_zero(rounded_bfloat16(_float32.multiply(sums, factor)), tiles.document)


def _added(x: Array) -> Array:
    """The sums along the first axis, ascending from +0."""
    start = _backend.namespace(x).zeros(x.shape[1:], dtype=np.uint32)
    return _backend.scan(lambda total, term: (_float32.add(total, term[0]), None), start, (x,))


def _with_zero(x: Array, index: Indices) -> Array:
    """Rows of `x`, +0 for the index after the last."""
    xp = _backend.namespace(x)
    zero = xp.zeros((1, *x.shape[1:]), dtype=x.dtype)
    return _backend.gather(xp.concatenate([x, zero]), index)
