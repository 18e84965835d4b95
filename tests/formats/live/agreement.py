"""A preset beside the library itself, on input of this run."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref.formats import PRESETS, UE4M3, BlockFormat, in_contract, quantize
from tests.formats.live.inputs import REPEAT
from tests.formats.live.libraries import Encoded

Values = npt.NDArray[Any]
Blocks = npt.NDArray[np.bool_]
Encode = Callable[[Values], Encoded]


def differing(x: Values, block_format: BlockFormat, library: Encode) -> tuple[Blocks, Blocks]:
    """Which blocks of x [rows, columns] differ in any bit, and which the preset claims: [rows, blocks].

    Bit 7 of a UE4M3 scale means nothing, and one NaN of a tensor scale is as good as another.
    """
    ours, theirs = quantize(x, block_format), library(x)
    mask = np.uint8(0x7F if block_format.scale is UE4M3 else 0xFF)
    differs: Blocks = (ours.scales & mask) != (theirs.scales & mask)
    elements = ours.codes != theirs.codes
    differs |= elements.reshape((*differs.shape, -1)).any(axis=-1)
    if theirs.tensor_scale is not None and ours.tensor_scale is not None:
        scale, other = np.float32(ours.tensor_scale), np.float32(theirs.tensor_scale.item())
        differs |= not np.array_equal(scale, other, equal_nan=True)
    return differs, in_contract(x, block_format)


def same(
    tensors: Values,
    preset: str | BlockFormat,
    library: Encode,
    record: Callable[[str, object], None],
) -> None:
    """Hold a preset to its library, block by block and bit by bit; `record` takes how many blocks.

    Args:
        tensors: [tensors, rows, columns], float32 or bfloat16.
        preset: its name, or another format.
        library: what the library makes of one tensor.
        record: pytest's record_property.

    Raises AssertionError with the smallest input found that differs.
    """
    block_format = PRESETS[preset] if isinstance(preset, str) else preset
    compared = outside = wrong = 0
    first: Values | None = None
    for x in tensors:
        differs, inside = differing(x, block_format, library)
        compared, outside = compared + int(inside.sum()), outside + int((~inside).sum())
        wrong += int((differs & inside).sum())
        if first is None and (differs & inside).any():
            first = x
            if not block_format.has_tensor_scale:  # one row is enough
                first = x[(differs & inside).any(axis=1).argmax()][None]
    record("blocks", compared)
    record("outside", outside)
    if first is not None:
        raise AssertionError(
            f"{block_format.name}: {wrong} of {compared} blocks of {tensors.dtype} differ from the"
            f" library; {REPEAT}\n{_shown(_smallest(first, block_format, library), block_format, library)}"
        )


def _smallest(x: Values, block_format: BlockFormat, library: Encode) -> Values:
    """x with every number made 0 that is not needed for a block in contract to differ."""
    part = x.size
    while part := part // 2:
        for start in range(0, x.size, part):
            less = x.copy()
            less.reshape(-1)[start : start + part] = 0
            if np.array_equal(less.view(np.uint8), x.view(np.uint8)):
                continue  # zeros before
            differs, inside = differing(less, block_format, library)
            if (differs & inside).any():
                x = less
    return x


def _shown(x: Values, block_format: BlockFormat, library: Encode) -> str:
    """The numbers of x that are not +0, and both answers there."""
    ours, theirs = quantize(x, block_format), library(x)
    bits = x.view(f"uint{8 * x.dtype.itemsize}")
    lines = [f"x of shape {x.shape}, zeros but for:"]
    width = x.shape[1] // ours.scales.shape[1]
    shown = bits != 0
    shown |= (ours.codes != theirs.codes) & ~shown.any()
    for row, column in np.argwhere(shown).tolist():
        lines.append(
            f"  [{row}, {column}] = {bits[row, column]:#x} ({float(x[row, column])!r}):"
            f" code {ours.codes[row, column]:#04x}, library {theirs.codes[row, column]:#04x};"
            f" scale {ours.scales[row, column // width]:#04x},"
            f" library {theirs.scales[row, column // width]:#04x}"
        )
    if ours.tensor_scale is not None:
        lines.append(f"  tensor scale {ours.tensor_scale!r}, library {theirs.tensor_scale!r}")
    return "\n".join(lines)
