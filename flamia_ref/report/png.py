"""PNG files of few colours, written with the standard library."""

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_DEPTH, _PALETTE, _NONE = 8, 3, 0


def encode(pixels: NDArray[np.uint8], palette: Sequence[tuple[int, int, int]]) -> bytes:
    """Return a PNG file of `pixels` [height, width], indices into `palette` (red, green, blue, 0 to 255).

    Raises ValueError where that is no picture: no pixel, a colour too many, or an index without a colour.
    Source: PNG specification (third edition), colour type 3, filter 0.
    """
    if pixels.ndim != 2 or not pixels.size or pixels.dtype != np.uint8:
        raise ValueError(
            f"pixels are {pixels.dtype} of shape {pixels.shape}; they must be uint8 [height, width], at least one"
        )
    if not int(pixels.max()) < len(palette) <= 256:
        raise ValueError(
            f"a pixel is {int(pixels.max())} and the palette has {len(palette)} colours; there can be 256, and"
            " each pixel must be below their number"
        )
    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, _DEPTH, _PALETTE, 0, 0, 0)
    filters = np.full((height, 1), _NONE, dtype=np.uint8)
    lines = np.concatenate([filters, pixels], axis=1).tobytes()
    return b"".join(
        [
            _SIGNATURE,
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", bytes(value for colour in palette for value in colour)),
            _chunk(b"IDAT", zlib.compress(lines, 9)),
            _chunk(b"IEND", b""),
        ]
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    checked = name + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))
