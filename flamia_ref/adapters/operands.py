"""Operands of a pack as kernels load them: codes and tiled scales of one use, a document at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref.adapters.documents import Document
from flamia_ref.adapters.refusal import Refused
from flamia_ref.packing import Documents, Mask

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """One operand of one document.

    Attributes:
        codes: uint8 [rows, heads, channels].
        scales: uint8, flat: the bytes of the tiles of 128x4 in the order of a dense tensor. Over channels, a head at a
            time, tiles of rows by tiles of blocks; over tokens, a plane of 128 channels at a time, and in it a head at
            a time.
    """

    codes: Array
    scales: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Operands:
    """The operands of a pack, by use.

    `given` is what the protocol calls `operands`: arrays by the name of their stage, and tiled scales as a list with an
    array a document. `kernel` names the adapter in refusals.
    """

    given: Mapping[str, Any]
    kernel: str

    def over_channels(self, product: str, tensor: str, document: int, rows: slice) -> Payload:
        """The operand of a product that contracts over channels."""
        codes, tiles = self._stages(product, tensor, "tiled")
        return Payload(codes=codes[rows], scales=np.ravel(tiles[document]))

    def over_tokens(self, product: str, tensor: str, document: int, rows: slice) -> Payload:
        """The operand of a product that contracts over tokens.

        A pack has the planes of a head together. A dense tensor of several heads has the planes outermost, as the
        tiling of [channels, heads x blocks] puts them (cuDNN front end 1.32.0, sdpa/kernels/_mxfp8_sf.py); up to 128
        channels there is one plane, and the bytes are the same.
        """
        codes, tiles = self._stages(product, tensor, "tiled_transposed")
        return Payload(codes=codes[rows], scales=np.ravel(np.moveaxis(tiles[document], 1, 0)))

    def plain(self, tensor: str, rows: slice) -> Array:
        """The bfloat16 rows of an input."""
        if tensor not in self.given:
            raise Refused(self.kernel, f"takes {tensor} in bfloat16 too, which was not given")
        found: Array = self.given[tensor][rows]
        return found

    def _stages(self, product: str, tensor: str, order: str) -> tuple[Array, Sequence[Array]]:
        """Codes and tiles of a use: of a copy of its own, or of the only one that its tensor has."""
        for copy in (f"{tensor}.{product}", tensor):
            codes, tiles = f"{copy}.codes", f"{copy}.scales.{order}"
            if codes in self.given and tiles in self.given:
                return self.given[codes], self.given[tiles]
        along = "channels" if order == "tiled" else "tokens"
        raise Refused(
            self.kernel,
            f"takes {tensor} in MXFP8 with scales along {along} in the product {product}, which the recipe has not",
        )


def forward_payloads(operands: Operands, mask: Mask, document: Document) -> dict[str, Payload]:
    """What an MXFP8 forward takes of a document, by the names of the arguments of cuDNN."""
    rows, columns = rows_of(mask.queries, document.index), rows_of(mask.keys, document.index)
    return {
        "q": operands.over_channels("s", "q", document.index, rows),
        "k": operands.over_channels("s", "k", document.index, columns),
        "v": operands.over_tokens("o", "v", document.index, columns),
    }


def backward_payloads(operands: Operands, mask: Mask, document: Document) -> dict[str, Payload]:
    """What an MXFP8 backward takes of a document, by the names of the arguments of cuDNN."""
    rows, columns = rows_of(mask.queries, document.index), rows_of(mask.keys, document.index)
    return {
        "q": operands.over_channels("s", "q", document.index, rows),
        "q_T": operands.over_tokens("dk", "q", document.index, rows),
        "k": operands.over_channels("s", "k", document.index, columns),
        "k_T": operands.over_tokens("dq", "k", document.index, columns),
        "v": operands.over_channels("dp", "v", document.index, columns),
        "dO": operands.over_channels("dp", "do", document.index, rows),
        "dO_T": operands.over_tokens("dv", "do", document.index, rows),
    }


def rows_of(documents: Documents, document: int) -> slice:
    """The rows of a document."""
    return slice(documents.offsets[document], documents.offsets[document + 1])
