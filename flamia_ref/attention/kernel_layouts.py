"""Quantized operands as kernels read them: payloads and tiled scales, documents padded to 128 rows, both orientations.

Documents are filled up to whole tiles of 128 rows, one after another; an empty one has none. What is filled up has
codes 0 and scales of 1, which is 0x7f in E8M0: 0 times a NaN scale would be NaN. Row-wise is for contractions over
channels, column-wise for those over tokens; both come from one copy, and `codes` and `scales` give it back.

Scales lie in tiles of 128x4 (`flamia_ref.formats.layout`). Column-wise the matrix that is tiled has, for each head,
channels as rows and token blocks as columns; from 129 channels on, the planes of 128 channels of the same 128 tokens
lie one after another. Source: NVIDIA cuDNN front end 1.32.0, sdpa/kernels/_mxfp8_sf.py, what it says of packed (THD)
tensors; dense ones have the planes outermost, `layout.TileOrder` has both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref.attention import sides
from flamia_ref.attention.copy_rows import Copy, unit_code
from flamia_ref.attention.product import Operand
from flamia_ref.attention.sides import BLOCK, UNIT
from flamia_ref.formats import layout
from flamia_ref.packing import Documents
from flamia_ref.packing.tiles import Indices

ROWS = 128
"""Rows of a scale tile, to which each document is filled up."""

_COLUMNS = 4
_TILE_BYTES = ROWS * _COLUMNS


class Padding(NamedTuple):
    """Documents filled up to whole tiles.

    Attributes:
        tokens: [rows], the packed token of each row, -1 for what is filled up.
        rows: [tokens], the row of each packed token.
        first_rows: [token blocks], the row of the first token of each block of 32.
    """

    tokens: Indices
    rows: Indices
    first_rows: Indices

    @classmethod
    def of(cls, documents: Documents) -> Padding:
        """The padding of packed documents."""
        tokens, rows, firsts, filled = [], [], [], 0
        for document in documents:
            length = document.stop - document.start
            whole = -(-length // ROWS) * ROWS
            place = np.arange(whole, dtype=np.int32)
            tokens.append(np.where(place < length, place + document.start, -1))
            rows.append(place[:length] + filled)
            firsts.append(place[:length:BLOCK] + filled)
            filled += whole
        return cls(*(np.concatenate(x).astype(np.int32) for x in (tokens, rows, firsts)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelLayout:
    """One orientation of one copy. A pytree once JAX is in use.

    Attributes:
        payload: codes, those of the values in bfloat16 where the operand is dequantized; row-wise [heads, rows,
            channels] with channels filled up to whole instruction steps (64 of FP4, else 32), column-wise [heads,
            channels, rows]. FP4 is two codes a byte along the last axis.
        scales: scale bytes in tiles of 128x4, row-wise [heads, row tiles, channel tiles, 512], column-wise [heads, row
            tiles, channel planes, 512]; None for operands without scales.
        token_scales: e8m0 bytes [heads, rows] that stand beside the tiled scales: those that the other operand takes
            instead, or powers of two of whole tokens; None for operands without such.
        orientation: "row_wise" or "column_wise".
        operand: the use that the copy was made for.
        documents: the documents.
        channels: channels of the input.
    """

    payload: Array
    scales: Array | None
    token_scales: Array | None
    orientation: Literal["row_wise", "column_wise"]
    operand: Operand
    documents: Documents
    channels: int

    def __post_init__(self) -> None:
        _backend.register_value_type(
            KernelLayout,
            data=("payload", "scales", "token_scales"),
            meta=("orientation", "operand", "documents", "channels"),
        )

    def codes(self) -> Array:
        """The copy's codes, or the values of a dequantized one as bfloat16 codes: [tokens, heads, channels]."""
        xp = _backend.namespace(self.payload)
        codes = layout.unpack_fp4(self.payload) if _packed(self.operand) else self.payload
        if self.orientation == "column_wise":
            codes = xp.moveaxis(codes, 1, 2)
        codes = _backend.gather(codes, Padding.of(self.documents).rows, axis=1)
        return xp.moveaxis(codes[:, :, : self.channels], 0, 1)

    def copied_scales(self) -> Array | None:
        """The copy's scales as they are traced, [tokens or token blocks, heads, ...]; None where none follows from the
        values, or where this orientation does not hold them."""
        block = self.operand.block
        if block is None or self.scales is None:
            return None
        if self.orientation == "row_wise":
            return self._from_rows(self.scales, block)
        return self._from_columns(self.scales, block)

    def copied_token_scales(self) -> Array | None:
        """The powers of two that tokens have besides their scales, as they are traced: [tokens, heads, 1], or None."""
        if self.orientation == "column_wise" or self.token_scales is None:
            return None
        return self._per_token()

    def _per_token(self) -> Array:
        xp = _backend.namespace(self.payload)
        found = _backend.gather(self.token_scales, Padding.of(self.documents).rows, axis=1)
        return xp.moveaxis(found, 0, 1)[:, :, None]

    def _from_rows(self, scales: Array, block: tuple[int | str, int | str]) -> Array:
        xp = _backend.namespace(scales)
        heads, down, across, _ = scales.shape
        flat = scales.reshape(heads, down * across * _TILE_BYTES)
        whole = layout.untile_scales_128x4(flat, (heads, down * ROWS, across * _COLUMNS))
        padding = Padding.of(self.documents)
        whole = _backend.gather(
            whole, padding.rows if block[0] == 1 else padding.first_rows, axis=1
        )
        whole = xp.moveaxis(whole, 0, 1)
        return whole[:, :, : 1 if block[1] == "all" else -(-self.channels // int(block[1]))]

    def _from_columns(self, scales: Array, block: tuple[int | str, int | str]) -> Array | None:
        if block[0] == 1:
            return None if self.token_scales is None else self._per_token()
        xp = _backend.namespace(scales)
        heads, down, planes, _ = scales.shape
        shape = (heads, planes * ROWS, down * _COLUMNS)
        whole = layout.untile_scales_128x4(scales.reshape(heads, -1), shape, order="planes_last")
        first = Padding.of(self.documents).first_rows // np.int32(BLOCK)
        whole = _backend.gather(whole[:, : self.channels], first, axis=2)
        whole = xp.moveaxis(whole, (0, 1, 2), (1, 2, 0))
        return whole[:, :, :: int(block[1])]


def row_wise(copy: Copy, documents: Documents) -> KernelLayout:
    """A copy for contractions over channels."""
    copy = _as_taken(copy)
    xp = _backend.namespace(copy.codes)
    tokens, heads = _rows(copy, documents)
    step = 64 if _packed(copy.operand) else BLOCK
    payload = _backend.gather(copy.codes, copy.rows_of(tokens, heads))
    payload = xp.pad(payload, [(0, 0), (0, 0), (0, -copy.channels % step)])
    scales = copy.scales_over_channels(tokens, heads)
    if scales is not None:
        unit = unit_code(copy.operand)
        scales = xp.where((tokens < 0)[:, :, None], unit, scales)
        fill = [(0, 0), (0, 0), (0, -scales.shape[2] % _COLUMNS)]
        scales = xp.pad(scales, fill, constant_values=unit)
        tiled = layout.tile_scales_128x4(scales)
        shape = (copy.heads, tokens.shape[1] // ROWS, scales.shape[2] // _COLUMNS, _TILE_BYTES)
        scales = tiled.reshape(shape)
    powers = None
    if copy.powers is not None:
        powers = _backend.gather(copy.powers[:, 0], copy.rows_of(tokens, heads))
    return _layout(copy, documents, payload, scales, powers, "row_wise")


def column_wise(copy: Copy, documents: Documents) -> KernelLayout:
    """A copy for contractions over tokens. Scales of tokens go to the other operand; in their place are scales of 1."""
    copy = _as_taken(copy)
    xp = _backend.namespace(copy.codes)
    tokens, heads = _rows(copy, documents)
    index = copy.rows_of(tokens, heads)
    payload = xp.moveaxis(_backend.gather(copy.codes, index), 1, 2)
    fold = None
    scales = copy.scales_over_tokens(tokens, heads)
    if copy.by_token and copy.scales is not None:
        fold = _backend.gather(copy.scales[:, 0], index)
        shape = (tokens.shape[1] // BLOCK, copy.heads, copy.channels)
        scales = xp.full(shape, UNIT, dtype=np.uint8)
    if scales is not None:
        empty = (tokens[0, ::BLOCK] < 0)[:, None, None]
        scales = xp.moveaxis(xp.where(empty, UNIT, scales), (0, 1, 2), (2, 0, 1))
        planes = -(-copy.channels // ROWS)
        fill = [(0, 0), (0, planes * ROWS - copy.channels), (0, 0)]
        filled = xp.pad(scales, fill, constant_values=UNIT)
        tiled = layout.tile_scales_128x4(filled, order="planes_last")
        scales = tiled.reshape(copy.heads, tokens.shape[1] // ROWS, planes, _TILE_BYTES)
    return _layout(copy, documents, payload, scales, fold, "column_wise")


def _layout(
    copy: Copy,
    documents: Documents,
    payload: Array,
    scales: Array | None,
    token_scales: Array | None,
    orientation: Literal["row_wise", "column_wise"],
) -> KernelLayout:
    return KernelLayout(
        payload=layout.pack_fp4(payload) if _packed(copy.operand) else payload,
        scales=scales,
        token_scales=token_scales,
        orientation=orientation,
        operand=copy.operand,
        documents=documents,
        channels=copy.channels,
    )


def _as_taken(copy: Copy) -> Copy:
    """The copy, a dequantized one as the bfloat16 values that products take."""
    if copy.dequantized is None:
        return copy
    return copy._replace(codes=copy.dequantized, scales=None, dequantized=None)


def _rows(copy: Copy, documents: Documents) -> tuple[Indices, Indices]:
    """Packed tokens [heads, rows] of the padded documents, and the heads."""
    tokens = Padding.of(documents).tokens
    heads = np.arange(copy.heads, dtype=np.int32)
    return np.broadcast_to(tokens, (copy.heads, len(tokens))), heads


def _packed(operand: Operand) -> bool:
    return sides.taken_format(operand) == "e2m1"
