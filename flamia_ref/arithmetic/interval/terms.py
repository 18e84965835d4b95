"""The terms of a product, for bounds: exact float64 values with the exponents that alignment sees.

A term is what one instruction step cuts toward zero as a whole: a product, or, for instructions that add
groups of products exactly, a group. Its value is exact in float64: a product has at most 48 significant bits,
a group at most 20.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref.arithmetic.instructions import Instruction, Scaling
from flamia_ref.formats import FORMATS, ScalarFormat, decode

Floats = NDArray[np.float64]
Integers = NDArray[np.int32]
Booleans = NDArray[np.bool_]

NOTHING = np.int32(-4000)
"""Exponent of a term that is not there: far below every floor, whatever scales add to it."""

_FINEST = np.int32(4000)  # lowest place of a zero: above every place of a number


class Operand(NamedTuple):
    """Codes of one operand as numbers, K leading."""

    value: Floats
    """[K, ...lanes]; 0 for NaN and infinities."""
    exponent: Integers
    """Not normalised; `NOTHING` or less for zeros."""
    place: Integers
    """Exponent of the lowest bit that is set; large for zeros."""
    infinite: Floats
    """+1 or -1 at infinities, else 0."""
    nan: Booleans
    """[...lanes]: whether a code or a scale along K is NaN."""
    scale: Floats
    """[blocks, ...lanes]; not yet in the value. Empty without scales, or where they are in the value."""
    scale_exponent: Integers
    scale_place: Integers


class Terms(NamedTuple):
    """The terms of all steps, for lanes of a flat axis."""

    value: Floats
    """[steps, terms, lanes]."""
    exponent: Integers
    """What a term counts with where the largest exponent is sought; `NOTHING` or less where it does not count."""
    place: Integers
    """A power of two that divides the value; large where the value is 0."""
    infinite: Integers
    """[lanes]: the sign of the infinite products, 0 without any."""
    nan: Booleans
    """[lanes]: whether the result is NaN in any order."""


def exponent_of(x: Floats) -> Integers:
    """floor(log2 |x|) of finite float64; `NOTHING` for zeros."""
    return np.where(x == 0.0, NOTHING, np.frexp(x)[1].astype(np.int32) - np.int32(1))


def power(exponent: Any) -> Floats:
    """2^exponent for integers within the normal range of float64."""
    return ((np.asarray(exponent, dtype=np.int64) + 1023) << np.int64(52)).view(np.float64)


def place_of(x: Floats) -> Integers:
    """Exponent of the lowest set bit of finite float64; large for zeros."""
    fraction, exponent = np.frexp(x)
    integer = (fraction * 2.0**53).astype(np.int64)
    lowest = (integer & -integer).astype(np.float64)
    place = np.frexp(lowest)[1] - 1 + exponent - 53
    return np.where(x == 0.0, _FINEST, place.astype(np.int32))


def operand(
    codes: NDArray[Any],
    element: ScalarFormat,
    scales: NDArray[np.uint8] | None,
    scaling: Scaling | None,
    rules: Instruction,
) -> Operand:
    """The numbers of codes [K, ...lanes] and their scales [ceil(K / block), ...lanes]."""
    wide = decode(codes, element, dtype=np.float64)
    nan = np.isnan(wide).any(axis=0)
    infinite = np.where(np.isinf(wide), np.sign(wide), 0.0)
    value = np.where(np.isfinite(wide), wide, 0.0)
    exponent = np.maximum(exponent_of(value), np.int32(element.emin))
    exponent = np.where(value == 0.0, NOTHING, exponent)
    place = place_of(value)
    none = np.zeros((0, *codes.shape[1:]))
    scale, scale_exponent, scale_place = none, none.astype(np.int32), none.astype(np.int32)
    if scales is not None and scaling is not None:
        kind = FORMATS[scaling.format]
        scale = decode(scales, kind, dtype=np.float64)
        nan = nan | np.isnan(scale).any(axis=0)
        scale = np.where(np.isnan(scale), 0.0, scale)
        scale_exponent = np.maximum(exponent_of(scale), np.int32(kind.emin))
        scale_exponent = np.where(scale == 0.0, NOTHING, scale_exponent)
        scale_place = place_of(scale)
        if rules.group == 1:
            spread = np.repeat(np.arange(scale.shape[0]), scaling.block)[: codes.shape[0]]
            # Infinity times a zero scale is NaN.
            infinite = np.where((infinite != 0.0) & (scale[spread] == 0.0), np.nan, infinite)
            value = value * scale[spread]
            exponent = exponent + scale_exponent[spread]
            place = place + scale_place[spread]
            scale, scale_exponent, scale_place = none, scale_exponent[:0], scale_place[:0]
    return Operand(value, exponent, place, infinite, nan, scale, scale_exponent, scale_place)


def terms(a: Operand, b: Operand, rules: Instruction) -> Terms:
    """The terms of all steps, K being a whole number of them; the operands' lanes broadcast and become one axis."""
    lanes = np.broadcast_shapes(a.value.shape[1:], b.value.shape[1:])
    count = a.value.shape[0]
    value = (a.value * b.value).reshape(count, -1)
    place = (a.place + b.place).reshape(count, -1)
    exponent = (a.exponent + b.exponent).reshape(count, -1)
    infinite = _infinite(a, b).reshape(count, -1)
    positive, negative = (infinite > 0).any(axis=0), (infinite < 0).any(axis=0)
    nan = (np.broadcast_to(a.nan | b.nan, lanes)).reshape(-1)
    nan = nan | np.isnan(infinite).any(axis=0) | (positive & negative)
    sign = np.where(positive, np.int32(1), np.where(negative, np.int32(-1), np.int32(0)))
    steps = count // (rules.terms or 1)
    if rules.group > 1:
        value, exponent, place = _grouped(value, exponent, place, a, b, rules.group)
    shape = (steps, value.shape[0] // max(steps, 1), value.shape[1])
    return Terms(value.reshape(shape), exponent.reshape(shape), place.reshape(shape), sign, nan)


def _infinite(a: Operand, b: Operand) -> Floats:
    """+1 or -1 at infinite products, NaN at infinity times zero, else 0."""
    if not a.infinite.any() and not b.infinite.any():
        return np.zeros(np.broadcast_shapes(a.value.shape, b.value.shape))
    left = np.sign(a.value) + a.infinite
    right = np.sign(b.value) + b.infinite
    some = (a.infinite != 0) | (b.infinite != 0)
    invalid = ((a.infinite != 0) & (right == 0)) | ((b.infinite != 0) & (left == 0))
    return np.where(invalid, np.nan, np.where(some, left * right, 0.0))


def _grouped(
    value: Floats, exponent: Integers, place: Integers, a: Operand, b: Operand, group: int
) -> tuple[Floats, Integers, Integers]:
    """Groups of products as terms: exact sums, aligned by the exponents of their scales alone."""
    lanes = value.shape[1]
    parts = (x.reshape(-1, group, lanes) for x in (value, exponent, place))
    values, exponents, places = parts
    count = values.shape[0]

    def each(pair: NDArray[Any]) -> NDArray[Any]:
        # A block of scales holds whole groups.
        flat = pair.reshape(pair.shape[0], -1)
        return np.repeat(flat, -(-count // pair.shape[0]), axis=0)[:count]

    scale = each(a.scale * b.scale)
    scale_exponent = each(a.scale_exponent + b.scale_exponent)
    scale_place = each(a.scale_place + b.scale_place)
    some = (exponents > NOTHING // 2).any(axis=1) & (scale != 0.0)
    return (
        values.sum(axis=1) * scale,
        np.where(some, scale_exponent, NOTHING),
        np.where(some, places.min(axis=1) + scale_place, _FINEST),
    )
