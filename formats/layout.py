"""How codes and scales lie in memory.

Codes of fewer than 8 bits are packed, and block-scaled kernels read their scales in tiles or words
of their own. Each form has its inverse. All take numpy or JAX arrays, work under `jax.jit` and
`jax.vmap`, and refuse a shape that is not theirs; under `jax.jit` the values of codes and scales
are not checked. Results are in C order, so that their bytes are what a kernel finds at a pointer.

| form | of | functions |
|---|---|---|
| nibbles | 4-bit codes | `pack_fp4`, `unpack_fp4` |
| 4 codes in 3 bytes | 6-bit codes | `pack_fp6`, `unpack_fp6` |
| 16 codes in 16 bytes | 6-bit codes | `pack_fp6_b6x16_p32`, `unpack_fp6_b6x16_p32` |
| 128x4 tiles | scales | `tile_scales_128x4`, `untile_scales_128x4` |
| 8x4 tiles | scales | `tile_scales_8x4`, `untile_scales_8x4` |
| words | E8M0 scales | `pack_scales_int32`, `unpack_scales_int32` |

What libraries do, and where they differ, is in docs/decisions/013-scale-layouts.md.
"""

from flamia_ref.formats._layout_arrays import Orientation
from flamia_ref.formats._packing import (
    pack_fp4,
    pack_fp6,
    pack_fp6_b6x16_p32,
    unpack_fp4,
    unpack_fp6,
    unpack_fp6_b6x16_p32,
)
from flamia_ref.formats._scale_tiles import (
    TileOrder,
    tile_scales_8x4,
    tile_scales_128x4,
    untile_scales_8x4,
    untile_scales_128x4,
)
from flamia_ref.formats._scale_words import pack_scales_int32, unpack_scales_int32

__all__ = [
    "Orientation",
    "TileOrder",
    "pack_fp4",
    "pack_fp6",
    "pack_fp6_b6x16_p32",
    "pack_scales_int32",
    "tile_scales_8x4",
    "tile_scales_128x4",
    "unpack_fp4",
    "unpack_fp6",
    "unpack_fp6_b6x16_p32",
    "unpack_scales_int32",
    "untile_scales_8x4",
    "untile_scales_128x4",
]
