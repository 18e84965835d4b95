"""Changes of one thing in a format or in its input, tried where no preset explains a kernel."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flamia_ref.formats.block import BlockFormat, ScaleRule, ZeroSign
from flamia_ref.formats.diagnosis.outputs import Output, powers
from flamia_ref.formats.rounding import RANDOM, Overflow, Rounding

CLEARED = "with bit 7 of the scales cleared"
_PLAIN = tuple(one for one in Rounding if one not in RANDOM)
_OF_SCALES = tuple(one for one in _PLAIN if one is not Rounding.DOWN)  # they have no sign
_FIELDS: dict[str, tuple[Any, ...]] = {
    "zero_sign": tuple(ZeroSign),
    "rounding": _PLAIN,
    "scale_rounding": _OF_SCALES,
    "overflow": tuple(Overflow),
    "rule": tuple(one for one in ScaleRule if one is not ScaleRule.QUOTIENT),
}


def of_format(block_format: BlockFormat) -> Iterator[tuple[str, BlockFormat]]:
    """Formats with one field changed, or with another rounding of amax / max, and what changed."""
    for field, choices in _FIELDS.items():
        own = getattr(block_format, field)
        if field == "scale_rounding" and block_format.rule is not ScaleRule.QUOTIENT:
            continue
        if field == "rule" and not block_format.scales_are_powers:
            continue
        for one in choices:
            if one == own:
                continue
            changes: dict[str, Any] = {field: one}
            if field == "rule":
                changes["quotient"] = None
            if found := _replaced(block_format, changes):
                yield f"{field} {one.value}", found
    if block_format.scales_are_powers and not block_format.has_tensor_scale:
        largest = f"{block_format.element.max:g}"
        for rounding in _OF_SCALES:
            changes = {
                "rule": ScaleRule.QUOTIENT,
                "exponent": None,
                "quotient": f"amax / {largest}",
                "scale_rounding": rounding,
            }
            if found := _replaced(block_format, changes):
                yield f"quotient amax / {largest} and scale_rounding {rounding.value}", found


def _replaced(block_format: BlockFormat, changes: dict[str, Any]) -> BlockFormat | None:
    # A field that narrow inputs change would hide what is changed here.
    narrow = tuple(pair for pair in block_format.narrow if pair[0] not in changes)
    try:
        return dataclasses.replace(block_format, **changes, narrow=narrow)
    except ValueError:  # parts that need each other
        return None


def of_data(
    values: npt.NDArray[Any], output: Output
) -> Iterator[tuple[str, npt.NDArray[Any], Output]]:
    """Inputs and outputs with one thing changed, and what changed."""
    if values.dtype == np.float32:
        with np.errstate(all="ignore"):
            rounded = values.astype(ml_dtypes.bfloat16)
        if not np.array_equal(rounded.astype(np.float32), values, equal_nan=True):
            yield "if x is rounded to bfloat16 first", rounded, output
    codes = output.codes
    if codes.shape[-1] % 2 == 0 and codes.max(initial=0) <= 15:
        swapped = codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1].reshape(codes.shape)
        if not np.array_equal(swapped, codes):
            changed = dataclasses.replace(output, codes=np.ascontiguousarray(swapped))
            yield "with the codes of each pair swapped", values, changed
    as_powers = powers(output.scales)
    if as_powers is not None:
        text = "with the scales as E8M0 codes, log2(scales) + 127 in uint8"
        yield text, values, dataclasses.replace(output, scales=as_powers)
    if output.scales.dtype == np.uint8 and negative(output.scales).any():
        cleared = np.where(negative(output.scales), output.scales & 0x7F, output.scales)
        yield CLEARED, values, dataclasses.replace(output, scales=cleared.astype(np.uint8))


def negative(scales: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which UE4M3 scale bytes have bit 7 set and are no NaN: as float8_e4m3fn they are negative."""
    found: npt.NDArray[np.bool_] = (scales >= 0x80) & (scales != 0xFF)
    return found


def signs_of_scales(output: Output) -> str:
    """Which UE4M3 scales have bit 7 set, in words; nothing where none has."""
    if output.scales.dtype != np.uint8:
        return ""
    where = negative(output.scales)
    if not where.any():
        return ""
    count, at = int(where.sum()), np.argwhere(where)[0].tolist()
    scales = "1 scale has" if count == 1 else f"{count} scales have"
    return (
        f"{scales} bit 7 set, the first at {at}: UE4M3 has no sign and no preset sets it;"
        " read as float8_e4m3fn these are negative"
    )
