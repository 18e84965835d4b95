"""Tensors and their blocks, for diagnosis: on the host, as float32 bits."""

from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend
from flamia_ref._errors import shown
from flamia_ref.formats.block import BlockFormat
from flamia_ref.formats.diagnosis.runs import Bits, tensor_amax_of
from flamia_ref.formats.encoding import as_floats, source_bits
from flamia_ref.formats.presets import PRESETS
from flamia_ref.formats.scalar import ScalarFormat


def preset(given: Any) -> BlockFormat:
    """A format, or the preset of that name. Raises as `quantize` does."""
    if isinstance(given, BlockFormat):
        return given
    if isinstance(given, str):
        return PRESETS[given]
    raise TypeError(f"a block format is a BlockFormat or a name in PRESETS, not {shown(given)}")


def floats(x: Any, caller: str) -> npt.NDArray[Any]:
    """x on the host, float64 narrowed where float32 has all its values.

    Raises TypeError for other types, ValueError for fewer than two axes or values that float32 lacks.
    """
    values = _backend.host(as_floats(x, caller))
    if values.ndim < 2:
        raise ValueError(f"{caller} takes [..., rows, columns], not shape {values.shape}")
    if values.dtype != np.float64:
        return values
    with np.errstate(all="ignore"):
        narrow = values.astype(np.float32)
    if not np.array_equal(narrow, values, equal_nan=True):
        raise ValueError(
            "x has float64 values that float32 lacks; round them first: astype(float32)"
        )
    return narrow


def amaxes_of(
    values: npt.NDArray[Any], block_format: BlockFormat, given: Any, source: ScalarFormat
) -> Bits | None:
    """float32 bits of the tensor amax beside every row, [..., rows, 1]; None without a tensor scale."""
    if not block_format.has_tensor_scale:
        return None
    if given is None:
        amax = tensor_amax_of(source_bits(values), block_format, source)
    else:
        amax = source_bits(_backend.host(_backend.plain("tensor_amax", given)).astype(np.float32))
    found: Bits = np.broadcast_to(amax, (*values.shape[:-1], 1))
    return found


def of_blocks(x: npt.NDArray[Any], block: tuple[int, int]) -> npt.NDArray[Any]:
    """[..., R, C] as [..., R / rows, rows, C / columns, columns], filled with zeros."""
    *batch, height, width = x.shape
    rows, columns = block
    down, across = -(-height // rows), -(-width // columns)
    if (down * rows, across * columns) != (height, width):
        padding = [(0, 0)] * len(batch) + [(0, down * rows - height), (0, across * columns - width)]
        x = np.pad(x, padding)
    return x.reshape((*batch, down, rows, across, columns))


def blocks_at(
    x: npt.NDArray[Any], places: npt.NDArray[Any], block: tuple[int, int]
) -> npt.NDArray[Any]:
    """Blocks [N, r, c] at the places [N, axes] of their scales; floats as float32 bits."""
    found = np.zeros((len(places), *block), x.dtype)
    for index, (*batch, down, across) in enumerate(places.tolist()):
        rows = slice(down * block[0], (down + 1) * block[0])
        part = x[(*batch, rows, slice(across * block[1], (across + 1) * block[1]))]
        found[index, : part.shape[0], : part.shape[1]] = part
    return found if found.dtype.kind in "ui" else source_bits(found)


def blocks_of(amaxes: Bits, places: npt.NDArray[Any], block: tuple[int, int]) -> Bits:
    """Of something beside every row, [..., rows, 1], that of the first row of each block [N]."""
    index = [*places.T[:-2], places.T[-2] * block[0], np.zeros(len(places), np.int64)]
    found: Bits = amaxes[tuple(index)]
    return found
