"""A kernel's codes and scales, and the presets whose formats and blocks fit them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend
from flamia_ref._errors import shown, type_of
from flamia_ref.formats.block import ALL, Block, BlockFormat, PartialBlock
from flamia_ref.formats.blocks import block_extents
from flamia_ref.formats.presets import PRESETS
from flamia_ref.formats.scalar import FP32

_MASKS = {15: "FP4", 63: "FP6"}  # the largest code of each


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """Codes of the shape of x, scale codes, and the tensor scale as float32, if any."""

    codes: npt.NDArray[Any]
    scales: npt.NDArray[Any]
    tensor_scale: npt.NDArray[np.float32] | None

    @classmethod
    def of(cls, values: npt.NDArray[Any], codes: Any, scales: Any, tensor_scale: Any) -> "Output":
        """The output of a kernel, on the host. Raises TypeError or ValueError for what is none."""
        found = _codes("codes", codes)
        if found.shape != values.shape:
            hint = ""
            if found.shape[:-1] == values.shape[:-1] and 2 * found.shape[-1] == values.shape[-1]:
                hint = (
                    ": if they are FP4, two in a byte, layout.unpack_fp4(codes) takes them apart;"
                    " other codes are one for each element of x"
                )
            raise ValueError(f"codes have shape {found.shape}, x {values.shape}{hint}")
        tensor = None
        if tensor_scale is not None:
            tensor = np.asarray(
                _backend.host(tensor_scale) if hasattr(tensor_scale, "dtype") else tensor_scale
            )
            if tensor.dtype.kind != "f" or not tensor.size:
                raise TypeError(f"tensor_scale is float32, not {shown(tensor_scale)}")
            with np.errstate(all="ignore"):
                tensor = tensor.astype(np.float32)
            rows = (*values.shape[:-1], 1)
            if tensor.size != 1 and tensor.shape not in (rows, rows[:-1]):
                raise ValueError(
                    f"tensor_scale has shape {tensor.shape}; x of shape {values.shape} takes one"
                    f" number, or one for each row, {rows}"
                )
            if np.isnan(tensor).any() and np.isfinite(values).all():
                raise ValueError(
                    "tensor_scale has a NaN, and x has none: check the kernel's output"
                )
        return cls(codes=found, scales=_codes("scales", scales, floats=True), tensor_scale=tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A preset with a block that the shapes allow.

    Attributes:
        format: the preset.
        named: the block as the preset names it.
        block: its extents.
        repeated: the scales of a block are repeated for each of its rows.
    """

    format: BlockFormat
    named: Block
    block: tuple[int, int]
    repeated: bool = False

    @property
    def name(self) -> str:
        """The name of the preset."""
        return self.format.name


def candidates(values: npt.NDArray[Any], output: Output, block: Any) -> list[Candidate]:
    """The presets that may have given an output.

    Raises ValueError where none fits, saying what the shapes would have to be.
    """
    if found := _all_fitting(values, output, block):
        return found
    raise ValueError(_nothing_fits(values, output, block))


def _all_fitting(values: npt.NDArray[Any], output: Output, block: Any) -> list[Candidate]:
    found = []
    largest, stray = int(output.codes.max(initial=0)), stray_mask(output.codes)
    wide = output.scales.dtype == np.uint32
    for one in PRESETS.values():
        # A few codes that FP4 lacks are a fault in FP4, not another format.
        mask = one.element.code_mask
        if (largest > mask and mask != stray) or (one.scale == FP32) != wide:
            continue
        if output.tensor_scale is not None and not one.has_tensor_scale:
            continue
        if fitting := _fitting(one, values.shape, output.scales.shape, block):
            found.append(fitting)
    return found


def _fitting(
    one: BlockFormat, shape: tuple[int, ...], scales: tuple[int, ...], block: Any
) -> Candidate | None:
    """The preset with the first of its blocks that gives scales of that shape."""
    if block is not None:
        try:
            blocks = [one.checked_block(block)]
        except ValueError:
            return None
    else:
        blocks = [one.block, *(b for b in one.blocks if b != one.block)]
    if one.signs is not None and shape[-1] % len(one.signs):
        return None
    for named in blocks:
        rows, columns = block_extents(named, shape)
        partial = shape[-2] % rows or shape[-1] % columns
        if partial and one.partial is PartialBlock.REFUSE:
            continue
        down, across = -(-shape[-2] // rows), -(-shape[-1] // columns)
        if scales == (*shape[:-2], down, across):
            return Candidate(format=one, named=named, block=(rows, columns))
        square = rows > 1 and columns > 1 and ALL not in named
        if square and not partial and scales == (*shape[:-2], shape[-2], across):
            return Candidate(format=one, named=named, block=(rows, columns), repeated=True)
    return None


def stray_mask(codes: npt.NDArray[Any]) -> int | None:
    """The largest code of FP4 or FP6 where a few codes are over it and nearly all others are not."""
    for mask in _MASKS:
        count = np.count_nonzero(codes > mask)
        if count and 8 * count <= np.count_nonzero(codes):
            return mask
    return None


def stray_codes(codes: npt.NDArray[Any]) -> str:
    """Which codes these are, in words; nothing where there are none."""
    mask = stray_mask(codes)
    if mask is None:
        return ""
    places = np.argwhere(codes > mask)
    at = places[0].tolist()
    first = int(codes[tuple(at)])
    count = "1 code is" if len(places) == 1 else f"{len(places)} codes are"
    return (
        f"{count} over {mask}, the largest of {_MASKS[mask]}: the first is {first} (0x{first:02x})"
        f" at {at}"
    )


def powers(scales: npt.NDArray[Any]) -> npt.NDArray[np.uint8] | None:
    """The E8M0 codes of float32 scales that are powers of two, by their bits; None for others."""
    if scales.dtype != np.uint32 or (scales & 0x807FFFFF).any():
        return None
    return (scales >> 23).astype(np.uint8)


def _nothing_fits(values: npt.NDArray[Any], output: Output, block: Any) -> str:
    if output.tensor_scale is not None:
        plain = dataclasses.replace(output, tensor_scale=None)
        if fitting := _all_fitting(values, plain, block):
            elements = ", ".join(sorted({one.format.element.name for one in fitting}))
            return (
                f"no preset with elements {elements} has a tensor scale, and these codes and scales"
                " fit no other: leave tensor_scale out"
            )
    codes = powers(output.scales)
    if codes is not None and _all_fitting(values, dataclasses.replace(output, scales=codes), block):
        return (
            "no preset has these scales in float32; they are powers of two: give them as E8M0"
            " codes, log2(scales) + 127 in uint8"
        )
    text = f"no preset has scales of shape {output.scales.shape} ({type_of(output.scales)})"
    text += f" for x of shape {values.shape}"
    if block is not None:
        text += f" in blocks {shown(block)}"
    shapes = []
    for rows, columns in ((1, 32), (1, 16), (32, 32), (16, 16)):
        down, across = -(-values.shape[-2] // rows), -(-values.shape[-1] // columns)
        shapes.append(f"{(*values.shape[:-2], down, across)} in blocks of {rows}x{columns}")
    text += f"; they have {', '.join(shapes)}"
    turned = output
    if output.scales.ndim > 1:
        turned = dataclasses.replace(output, scales=output.scales.swapaxes(-1, -2))
    if _all_fitting(values, turned, block):
        text += "; transposed they fit: scales.swapaxes(-1, -2)"
    elif output.scales.size % 512 == 0 and output.scales.size:
        text += "; if they are tiled or padded: layout.untile_scales_128x4(scales, shape) first"
    if output.tensor_scale is not None:
        text += "; with a tensor scale they are in blocks of 16"
    return text


def _codes(name: str, given: Any, *, floats: bool = False) -> npt.NDArray[Any]:
    """Codes as unsigned integers; floats of 8 bits as their codes, scales in float32 as their bits."""
    found = _backend.host(_backend.plain(name, given))
    if floats and found.dtype == np.float32:
        return np.ascontiguousarray(found).view(np.uint32)
    if found.dtype.kind in "iu":
        if found.dtype == np.uint32 and floats:
            return found
        if found.size and (found.min() < 0 or found.max() > 255):
            raise ValueError(f"{name} are codes from 0 to 255, not {found.min()} to {found.max()}")
        return found.astype(np.uint8)
    if found.dtype.itemsize == 1 and found.dtype.kind != "b":  # float8 and narrower, one in a byte
        return found.view(np.uint8)
    what = "convert the values to their codes first"
    if floats:
        what = "scales in float32 are taken as they are, powers of two also as log2(scales) + 127"
    raise TypeError(f"{name} are codes, unsigned integers, not {type_of(found)}; {what}")
