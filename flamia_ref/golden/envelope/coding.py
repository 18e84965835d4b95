"""P and dS as codes: which codes and scales a range of values permits, and what their values may be."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _float32
from flamia_ref.arithmetic.interval.tiles import Factor, uncertain_factor
from flamia_ref.attention import sides
from flamia_ref.attention.product import Operand
from flamia_ref.formats import (
    BF16,
    FORMATS,
    PRESETS,
    ScalarFormat,
    decode,
    encode,
    encode_blocks,
)
from flamia_ref.golden.envelope.ranges import Floats, Range, floats, rising, words

Codes = NDArray[Any]
Given = tuple[Codes, NDArray[np.bool_]] | None
"""Bits of some tiles that a kernel gave, and where it gave them."""


class Coded(NamedTuple):
    """Permitted codes of pairs [tiles, queries, keys] and scales in the shape of their blocks, None without.

    Attributes:
        low, high: the codes of the least and of the greatest value, under the scale that was given, else under
            `low_scales` and `high_scales`.
        low_scales, high_scales: the least and the greatest scale.
        least, greatest: the values, scale included, as float64; NaN in both where only NaN is permitted.
        power, top: [tiles, queries, keys] or a number: the exponents of the least and of the greatest scale.
    """

    low: Codes
    high: Codes
    low_scales: Codes | None
    high_scales: Codes | None
    least: Floats
    greatest: Floats
    power: Any
    top: Any

    @property
    def values(self) -> Range:
        """The values as float32 bits: what a row sum of codes adds up."""
        low = words(self.least)
        if self.least is self.greatest:
            return Range(low, low, np.isnan(self.least))
        return Range(low, words(self.greatest), np.isnan(self.least))


def coded(
    x: Range,
    operand: Operand,
    fold: NDArray[np.uint8] | None,
    codes: Given,
    scales: Given,
) -> Coded:
    """The codes that `sides.encoded_pairs` gives for any values in `x`. `codes`, `scales`: what a kernel gave of them,
    and where."""
    element = FORMATS[sides.element(operand)]
    if operand.format not in PRESETS:
        return _given(_scalar(x, operand, fold), codes, (None, None), operand)
    if x.certain and scales is None:
        low = sides.encoded_pairs(x.low, operand, fold)
        values = _values(low.codes, low.scales, element, operand)
        power = _power(low.scales, low.codes.shape)
        found = Coded(low.codes, low.codes, low.scales, low.scales, values, values, power, power)
        return _given(found, codes, (low.scales, low.scales), operand)
    near, far = _magnitudes(x)
    first, last = (
        np.asarray(sides.encoded_pairs(one, operand, fold).scales) for one in (near, far)
    )
    chosen = (first, last)
    if scales is not None:
        bits, there = scales
        chosen = (np.where(there, bits, first), np.where(there, bits, last))
    ends = [_under(x, scale, operand, fold) for scale in chosen]
    least, greatest = (
        np.minimum(*(end[0] for end in ends)),
        np.maximum(*(end[1] for end in ends)),
    )
    with np.errstate(invalid="ignore"):
        unknown = x.nan & ~_float32.is_nan(x.low)
    if unknown.any():  # a NaN in a block makes all of it NaN
        block = _repeat(_any(unknown, first), unknown.shape)
        least, greatest = np.where(block, -np.inf, least), np.where(block, np.inf, greatest)
    # Under another scale the same value has another code: the least and the greatest of both.
    low_codes, high_codes = ends[0][2], ends[0][3]
    if not np.array_equal(*chosen):
        low_codes = _ordered(low_codes, ends[1][2], element, np.less_equal)
        high_codes = _ordered(high_codes, ends[1][3], element, np.greater_equal)
    far_apart = _repeat(np.abs(np.subtract(*(c.astype(np.int16) for c in chosen))) > 1, x.low.shape)
    if far_apart.any():
        # A scale between the two may hold what saturates under the one and is 0 under the other. No code stands for
        # more than twice the value, which the least subnormal number does at most.
        below, above = (2 * floats(end) for end in _after_fold(x, fold))
        least = np.where(far_apart, np.fmin(below, 0.0), least)
        greatest = np.where(far_apart, np.fmax(above, 0.0), greatest)
        least_code, greatest_code = _ends_of(element)
        low_codes = np.where(far_apart, np.where(below < 0, least_code, low_codes * 0), low_codes)
        high_codes = np.where(
            far_apart, np.where(above > 0, greatest_code, high_codes * 0), high_codes
        )
    power, top = (_power(pick(*chosen), x.low.shape) for pick in (np.minimum, np.maximum))
    found = Coded(low_codes, high_codes, first, last, least, greatest, power, top)
    return _given(found, codes, chosen, operand)


def factor(coding: Coded, operand: Operand, *, over_queries: bool) -> Factor:
    """The left side of a product over keys, [tiles, queries, keys], or over queries, [tiles, keys, queries]."""
    element = FORMATS[sides.element(operand)]
    certain = coding.least is coding.greatest
    parts = [coding.least, coding.greatest, coding.power, coding.top]
    parts = [np.broadcast_to(part, coding.least.shape) for part in parts]
    if over_queries:
        parts = [np.ascontiguousarray(part.swapaxes(1, 2)) for part in parts]
    least, greatest, power, top = parts
    return uncertain_factor(least, least if certain else greatest, power, element, top)


def high_factor(x: Range) -> Factor:
    """The left side of a guarded product: the values rounded to bfloat16."""
    low = floats(sides.rounded_bfloat16(x.low))
    high = low if x.certain else floats(sides.rounded_bfloat16(x.high))
    return uncertain_factor(low, high, np.zeros((1, 1, 1), np.int32), BF16)


def _scalar(x: Range, operand: Operand, fold: NDArray[np.uint8] | None) -> Coded:
    """Codes without scales of their own, which are monotone in the value."""
    element = FORMATS[sides.element(operand)]
    low = sides.encoded_pairs(x.low, operand, fold).codes
    high = low if x.certain else sides.encoded_pairs(x.high, operand, fold).codes
    least = _values(low, None, element, operand)
    greatest = least if x.certain else _values(high, None, element, operand)
    anything = np.isnan(least) != np.isnan(greatest)
    if anything.any():
        least, greatest = np.where(anything, -np.inf, least), np.where(anything, np.inf, greatest)
    power = np.int32(_static(operand))
    return Coded(low, high, None, None, least, greatest, power, power)


def _given(
    found: Coded, codes: Given, scales: tuple[Codes | None, Codes | None], operand: Operand
) -> Coded:
    """The codes that a kernel gave in place of what they may be, where it gave any; their permitted range stays."""
    if codes is None:
        return found
    bits, there = codes
    element = FORMATS[sides.element(operand)]
    ends = [_values(bits, one, element, operand) for one in scales]
    least = np.where(there, np.minimum(*ends), found.least)
    greatest = np.where(there, np.maximum(*ends), found.greatest)
    if np.array_equal(least, greatest, equal_nan=True):
        greatest = least
    return found._replace(least=least, greatest=greatest)


def _after_fold(
    x: Range, fold: NDArray[np.uint8] | None
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The ends of values after the scales that they take over, which round where they leave subnormals."""
    if fold is None:
        return x.low, x.high
    k = fold.astype(np.int32) - np.int32(127)
    moved = rising(lambda y: _float32.shift(y, k), x)
    return moved.low, moved.high


def _ends_of(element: ScalarFormat) -> tuple[Codes, Codes]:
    """The codes of the least and of the greatest number of a format."""
    least, greatest = encode(np.array([-np.inf, np.inf]), element, overflow="saturate")
    return least, greatest


def _under(
    x: Range, scales: Codes, operand: Operand, fold: NDArray[np.uint8] | None
) -> tuple[Floats, Floats, Codes, Codes]:
    """The least and the greatest value, and their codes, under certain scales: by the quantizer's own encoder."""
    least_x, greatest_x = _after_fold(x, fold)
    preset = PRESETS[operand.format]
    low = encode_blocks(least_x, scales, preset, operand.block)
    high = low if x.certain else encode_blocks(greatest_x, scales, preset, operand.block)
    least = _values(low, scales, preset.element, operand)
    greatest = least if x.certain else _values(high, scales, preset.element, operand)
    return least, greatest, low, high


def _ordered(a: Codes, b: Codes, element: Any, relation: Any) -> Codes:
    """Of two codes the one whose number is first."""
    first, second = (decode(codes, element, np.float64) for codes in (a, b))
    return np.where(relation(first, second) | np.isnan(first), a, b)


def _magnitudes(x: Range) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """The least and the greatest magnitude, as bits of positive numbers."""
    a, b = x.low & _float32.MAGNITUDE, x.high & _float32.MAGNITUDE
    across = ((x.low ^ x.high) & _float32.SIGN) != 0
    near = np.where(across, np.uint32(0), np.minimum(a, b))
    return np.where(_float32.is_nan(x.low), x.low, near), np.maximum(a, b)


def _values(codes: Codes, scales: Codes | None, element: Any, operand: Operand) -> Floats:
    wide = decode(codes, element, np.float64)
    if scales is None:
        static = _static(operand)
        return np.asarray(wide if static == 0 else wide * 2.0**static)
    spread = _repeat(scales, codes.shape)
    value = wide * np.ldexp(1.0, spread.astype(np.int32) - 127)
    return np.where(spread == 255, np.nan, value)


def _static(operand: Operand) -> int:
    return 0 if operand.static_scale is None else int(operand.static_scale) - 127


def _power(scales: Codes | None, shape: tuple[int, ...]) -> Any:
    if scales is None:
        return np.int32(0)
    return _repeat(scales, shape).astype(np.int32) - np.int32(127)


def _repeat(blocks: Codes, shape: tuple[int, ...]) -> Codes:
    """An array in the shape of blocks, an entry for each element."""
    for axis in (1, 2):
        blocks = np.repeat(blocks, shape[axis] // blocks.shape[axis], axis=axis)
    return blocks


def _any(flags: NDArray[np.bool_], blocks: Codes) -> NDArray[np.bool_]:
    """Whether a block holds one of some elements."""
    tiles, rows, columns = flags.shape
    down, across = blocks.shape[1:]
    blocked = flags.reshape(tiles, down, rows // down, across, columns // across)
    return np.asarray(blocked.any(axis=(2, 4)))
