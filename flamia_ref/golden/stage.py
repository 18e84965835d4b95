"""A tensor of a pack as a step of the dataflow: what it holds, its shape, what it is computed from."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from flamia_ref.golden.cases import CaseSpec

BLOCK = 32  # tokens, and but for FP4 channels, that share a scale in an MMA
TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 128, 4, 512  # a tile of scales


class View(StrEnum):
    """What the stored bits of a tensor mean, by the name that safetensors has for it.

    F4_E2M1 and F8_UE4M3 are our names: one code a byte, and a scale without a sign.
    """

    F4_E2M1 = "F4_E2M1"
    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    F8_UE4M3 = "F8_UE4M3"
    BF16 = "BF16"
    F32 = "F32"
    I32 = "I32"

    @property
    def storage(self) -> str:
        """The name of the dtype on disk: unsigned integers for what numpy has not."""
        return _STORAGE.get(self.value, self.value)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type of the stored tensor."""
        return np.dtype({"U8": "u1", "U16": "u2", "F32": "f4", "I32": "i4"}[self.storage])


_STORAGE = {"F4_E2M1": "U8", "F8_E4M3": "U8", "F8_E8M0": "U8", "F8_UE4M3": "U8", "BF16": "U16"}


class Role(StrEnum):
    """What a tensor is for whoever checks a kernel."""

    INPUT = "input"
    STAGE = "stage"
    OUTPUT = "output"


# The axes that run over all documents. "sinks" is one number a head, of no document.
PACKED = frozenset(
    {"tokens", "key_tokens", "token_blocks", "key_token_blocks", "starts", "sinks", "documents"}
)

# The axes of scales in the order that kernels load: tiles of tokens by blocks of channels, or of
# channels by blocks of tokens.
TILES = ("token_tiles", "channel_block_tiles", "bytes")
TRANSPOSED_TILES = ("channel_tiles", "token_block_tiles", "bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A step of the dataflow.

    `axes` name the dimensions (see `shape`). `parents` are the stages it is computed from. `scales`
    names the stage that holds the scales of these codes. `masked_optional`: a kernel may skip masked
    pairs; zero, NaN, -infinity or any number up to -1e4 there says that it did. `backward`: it belongs
    to the backward, which a kernel need not have. `block`: channels, keys of pairs or tokens to a block, of codes,
    of the scales of such blocks, and of their tiles. `needs` names the field of a case without which the case has no
    such tensor.
    """

    name: str
    view: View
    axes: tuple[str, ...]
    parents: tuple[str, ...] = ()
    role: Role = Role.STAGE
    scales: str | None = None
    masked_optional: bool = False
    backward: bool = False
    block: int = BLOCK
    needs: str = ""

    @property
    def per_document(self) -> bool:
        """Whether the stage is a list with one array a document."""
        return not PACKED & set(self.axes)

    @property
    def of_keys(self) -> bool:
        """Whether its tokens are keys: it is K or V, or is made of them alone."""
        return "kv_heads" in self.axes

    @property
    def tiled(self) -> bool:
        """Whether the tensor is scales in the 128x4 order that kernels load."""
        return "bytes" in self.axes

    @property
    def layout(self) -> str:
        """The order of the elements in memory, in words."""
        order = f"row-major [{', '.join(self.axes)}]"
        if not self.tiled:
            along = {
                "channel_blocks": "channels",
                "key_blocks": "keys",
                "token_blocks": "tokens",
                "key_token_blocks": "tokens",
            }
            words = [word for axis, word in along.items() if axis in self.axes]
            narrow = words and self.block != BLOCK
            return f"{order}, blocks of {self.block} {words[0]}" if narrow else order
        by_tokens = "token_tiles" in self.axes
        rows, columns = ("tokens", "channels") if by_tokens else ("channels", "tokens")
        size = self.block if by_tokens else BLOCK
        return f"{order}, scales of 128x4 tiles, {rows} by blocks of {size} {columns}, padding scale_padding"

    def shape(self, case: CaseSpec, document: int | None) -> tuple[int, ...]:
        """Return the shape in a case: of one document's array where the stage is a list."""
        queries = 0 if document is None else case.lengths[document]
        keys = 0 if document is None else case.lengths_of_keys[document]
        rows = keys if self.of_keys else queries
        channel_blocks = blocks(case.head_dim, self.block)
        sizes = {
            "tokens": case.tokens,
            "key_tokens": case.key_tokens,
            "token_blocks": sum(blocks(length, self.block) for length in case.lengths),
            "key_token_blocks": sum(blocks(length, self.block) for length in case.lengths_of_keys),
            "starts": len(case.lengths) + 1,
            "documents": len(case.lengths),
            "heads": case.heads,
            "sinks": case.heads,
            "kv_heads": case.kv_heads,
            "head_dim": case.head_dim,
            "channel_blocks": channel_blocks,
            "one": 1,
            "queries": queries,
            "query_blocks": blocks(queries),
            "keys": keys,
            "key_blocks": blocks(keys, self.block),
            "token_tiles": -(-rows // TILE_ROWS),
            "channel_block_tiles": -(-channel_blocks // TILE_COLUMNS),
            "channel_tiles": -(-case.head_dim // TILE_ROWS),
            "token_block_tiles": -(-blocks(rows) // TILE_COLUMNS),
            "bytes": TILE_BYTES,
        }
        return tuple(sizes[axis] for axis in self.axes)


def blocks(extent: int, size: int = BLOCK) -> int:
    """Return how many blocks an extent has. The last one may be partial."""
    return -(-extent // size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A tensor of a case: its stage and, where the stage is a list, its document."""

    name: str
    stage: Stage
    document: int | None
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor."""
        return math.prod(self.shape) * self.stage.view.dtype.itemsize
