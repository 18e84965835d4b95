"""The quantized copies of an input (q, k, v, dO): made once, taken tile by tile in either orientation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.attention import sides
from flamia_ref.attention.product import Guard, Operand, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.sides import BLOCK, UNIT
from flamia_ref.formats import FORMATS, PRESETS, decode_bits, quantize_bits
from flamia_ref.formats.block import Block
from flamia_ref.packing import Documents
from flamia_ref.packing.tiles import Indices

_ROWS = 1024  # rows that are quantized together

INPUT_USES: Mapping[str, tuple[Use, ...]] = {
    "q": (Use.S_Q, Use.DK_Q),
    "k": (Use.S_K, Use.DQ_K),
    "v": (Use.O_V, Use.DP_V),
    "do": (Use.DP_DO, Use.DV_DO),
}
"""The uses of each input, in the order of the dataflow."""

OVER_CHANNELS = frozenset({Use.S_Q, Use.S_K, Use.DP_DO, Use.DP_V})
"""Uses whose contraction runs over the channels; that of the others runs over tokens."""


def copy_names(recipe: Recipe) -> dict[Use, str]:
    """The copy that each use of an input takes: "q" where all uses of q share one, else "q.s" by its first use."""
    names: dict[Use, str] = {}
    for tensor, uses in INPUT_USES.items():
        first = {use: recipe.operand(use).same_codes_as or use for use in uses}
        shared = len(set(first.values())) == 1
        for use in uses:
            names[use] = tensor if shared else f"{tensor}.{first[use].split('.')[0]}"
    return names


@_backend.jit(static=("preset", "block"))
def _quantize(x: Array, *, preset: str, block: Block) -> tuple[Array, Array]:
    return quantize_bits(x, PRESETS[preset], block)


@_backend.jit
def _high(x: Array) -> Array:
    return sides.bfloat16(x)


class Grid(NamedTuple):
    """Blocks of 32 tokens that start at each document.

    Attributes:
        tokens: [blocks, 32], packed tokens, -1 past a document's end.
        block: [tokens], the block of each token.
        offset: [tokens], its place there.
    """

    tokens: Indices
    block: Indices
    offset: Indices

    @classmethod
    def of(cls, documents: Documents) -> Grid:
        """The grid of packed documents."""
        rows, block, offset, count = [], [], [], 0
        for document in documents:
            length = document.stop - document.start
            place = np.arange(length, dtype=np.int32)
            blocks = -(-length // BLOCK)
            filled = np.arange(blocks * BLOCK, dtype=np.int32)
            filled = np.where(filled < length, filled + np.int32(document.start), np.int32(-1))
            rows.append(filled.reshape(blocks, BLOCK))
            block.append(place // BLOCK + np.int32(count))
            offset.append(place % BLOCK)
            count += blocks
        return cls(
            np.concatenate(rows).astype(np.int32),
            np.concatenate(block).astype(np.int32),
            np.concatenate(offset).astype(np.int32),
        )


class Copy(NamedTuple):
    """One copy of an input.

    Attributes:
        codes: [tokens * heads + 1, channels]; the last row is 0, for places past a document's end.
        scales: [tokens * heads + 1, ...] or [blocks * heads + 1, ...], the last row 2^0; None without scales.
        heads: heads of the input.
        operand: the use it was made for.
        grid: the token blocks.
    """

    codes: Array
    scales: Array | None
    heads: int
    operand: Operand
    grid: Grid

    @property
    def by_token(self) -> bool:
        """Whether each token has scales of its own."""
        return self.operand.block is None or self.operand.block[0] == 1

    def trace(self) -> tuple[Array, Array | None]:
        """Codes [tokens, heads, channels], and scales [tokens or token blocks, heads, ...]."""
        shape = (-1, self.heads)
        codes = self.codes[:-1].reshape(*shape, self.codes.shape[1])
        if self.scales is None:
            return codes, None
        return codes, self.scales[:-1].reshape(*shape, self.scales.shape[1])

    def not_finite(self) -> Array:
        """Whether each code is NaN or infinite: bool [tokens, heads, channels]."""
        values = decode_bits(self.codes[:-1], FORMATS[sides.element(self.operand)])
        bad = (values & _float32.MAGNITUDE) >= _float32.INFINITY
        return bad.reshape(-1, self.heads, self.codes.shape[1])

    def rows_of(self, tokens: Indices, heads: Indices) -> Indices:
        """Rows of `codes` for packed `tokens` [tiles, rows] (-1 for none) of one of `heads` for each tile."""
        last = self.codes.shape[0] - 1
        return np.where(tokens < 0, last, tokens * self.heads + heads[:, None]).astype(np.int32)

    def scales_over_channels(self, tokens: Indices, heads: Indices) -> Array | None:
        """Scales [tiles, rows, channel blocks] for a contraction over channels."""
        if self.scales is None:
            return None
        blocks = -(-self.codes.shape[1] // BLOCK)
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
        if self.scales is None or self.by_token:
            return None
        channels = self.codes.shape[1]
        of_token = np.append(self.grid.block, np.int32(-1))[tokens[:, ::BLOCK]]
        index = np.ascontiguousarray(self._block_index(of_token, heads).T)
        scales = _backend.gather(self.scales, index)
        if scales.shape[2] == channels:
            return scales
        xp = _backend.namespace(scales)
        return xp.repeat(scales, BLOCK, axis=2)[:, :, :channels]

    def _block_index(self, blocks: Indices, heads: Indices) -> Indices:
        last = len(self.grid.tokens) * self.heads
        return np.where(blocks < 0, last, blocks * self.heads + heads[:, None]).astype(np.int32)


class Maker:
    """Makes copies: of one set of documents, in one array library, computed in another."""

    def __init__(
        self,
        documents: Documents,
        layout: ModuleType,
        to_compute: Callable[[Array], Array],
        to_layout: Callable[[Array], Array],
        fixed_shapes: bool,
    ) -> None:
        self.grid = Grid.of(documents)
        self.layout, self.fixed_shapes = layout, fixed_shapes
        self.to_compute, self.to_layout = to_compute, to_layout

    def copy(self, x: Array, operand: Operand) -> Copy:
        """A copy of float32 bits `x` [tokens, heads, channels] for one use."""
        tokens, heads, channels = x.shape
        if operand.format not in PRESETS:
            return self._filled(self.high(x), None, heads, operand)
        block = PRESETS[operand.format].checked_block(operand.block)
        if block[0] == 1:
            codes, scales = self._batches(
                x.reshape(tokens * heads, channels), _ROWS, operand.format, block
            )
            return self._filled(codes, scales, heads, operand)
        padded = self.layout.concatenate(
            [x, self.layout.zeros((1, heads, channels), dtype=np.uint32)]
        )
        tokens_or_last = np.where(self.grid.tokens < 0, tokens, self.grid.tokens)
        blocks = _backend.gather(padded, tokens_or_last)  # [blocks, 32, heads, channels]
        blocks = self.layout.moveaxis(blocks, 2, 1).reshape(-1, BLOCK, channels)
        codes, scales = self._batches(blocks, _ROWS // BLOCK, operand.format, block)
        head = np.arange(heads, dtype=np.int32)
        place = (self.grid.block[:, None] * heads + head) * BLOCK + self.grid.offset[:, None]
        codes = _backend.gather(codes.reshape(-1, channels), place.ravel())
        return self._filled(codes, scales[:, 0], heads, operand)

    def high(self, x: Array) -> Array:
        """bfloat16 codes [tokens * heads, channels] of float32 bits [tokens, heads, channels]."""
        rows = x.reshape(-1, x.shape[2])
        return self._in_batches(rows, _ROWS, lambda part: (_high(part),))[0]

    def _filled(self, codes: Array, scales: Array | None, heads: int, operand: Operand) -> Copy:
        xp = self.layout
        codes = xp.concatenate([codes, xp.zeros((1, codes.shape[1]), dtype=codes.dtype)])
        if scales is not None:
            scales = xp.concatenate([scales, xp.full((1, scales.shape[1]), UNIT, dtype=np.uint8)])
        return Copy(codes, scales, heads, operand, self.grid)

    def _batches(self, x: Array, step: int, preset: str, block: Block) -> tuple[Array, Array]:
        """Codes and scales of `x`, quantized in batches of a fixed shape where arrays are compiled on the host."""
        codes, scales = self._in_batches(
            x, step, lambda part: _quantize(part, preset=preset, block=block)
        )
        return codes, scales

    def _in_batches(
        self, x: Array, step: int, function: Callable[[Array], tuple[Array, ...]]
    ) -> list[Array]:
        if not self.fixed_shapes:
            step = max(len(x), 1)
        parts: list[tuple[Array, ...]] = []
        for first in range(0, max(len(x), 1), step):
            part = x[first : first + step]
            short = step - len(part)
            if short:
                fill = self.layout.zeros((short, *x.shape[1:]), dtype=np.uint32)
                part = self.layout.concatenate([part, fill])
            results = function(self.to_compute(part))
            parts.append(tuple(self.to_layout(result)[: step - short] for result in results))
        return [self.layout.concatenate(column) for column in zip(*parts, strict=True)]


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
    fold = scales = None
    taken_high = None if high is None else _backend.gather(high, index)
    if use in OVER_CHANNELS:
        codes = _backend.gather(copy.codes, index)
        scales = copy.scales_over_channels(tokens, heads)
    else:
        codes = _backend.gather(copy.codes, np.ascontiguousarray(index.T))
        if operand.scale_folded_into is not None and copy.scales is not None:
            fold = _backend.gather(copy.scales[:, 0], index)
            xp = _backend.namespace(codes)
            shape = (codes.shape[0] // BLOCK, *codes.shape[1:])
            scales = xp.full(shape, UNIT, dtype=np.uint8)
        else:
            scales = copy.scales_over_tokens(tokens, heads)
    parts = (codes, scales, fold, taken_high)
    return sides.Rows(*(None if part is None else convert(part) for part in parts))


def needs_high(recipe: Recipe, use: Use) -> bool:
    """Whether a use takes bfloat16 values in guarded blocks."""
    product = getattr(recipe, use.split(".")[0])
    return Guard.HIGH_PRECISION_WHERE_CUT in (product.left.guard, product.right.guard)
