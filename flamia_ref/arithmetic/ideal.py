"""The two ideal sums: exact with one rounding, and IEEE float32 fused multiply-adds in ascending K.

Operands have K as their leading axis and broadcast against the lanes, as in `fused_sum`.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from flamia_ref import _backend, _float32, _primitive
from flamia_ref._backend import Array
from flamia_ref.arithmetic.fused_sum import Terms
from flamia_ref.arithmetic.grouped_sum import Scales
from flamia_ref.arithmetic.instructions import Scaling
from flamia_ref.formats.scalar import FORMATS, ScalarFormat

_LIMB = 32  # bits of an accumulator limb; limbs are int64, so 2^31 terms fit without a carry
_LIMB_MASK = (1 << _LIMB) - 1
_PART = (
    28  # a product of two 24-bit significands and two scales is added in two parts of this width
)
_ACCUMULATOR = (-149, 128)  # exponents of the lowest bit of, and just above, a float32


def fma_chain(a: Array, b: Array, c: Array) -> Array:
    """float32 bits of c + a[0] b[0] + a[1] b[1] + ..., one rounding to nearest even a product."""

    def step(carry: Array, x: tuple[Array, Array]) -> tuple[Array, None]:
        return _float32.fma(x[0], x[1], carry), None

    return _backend.scan(step, _float32.canonical(c), (a, b))


def exact_sum(
    a: Terms,
    b: Terms,
    scales: tuple[Scales, Scales] | None,
    c: Array,
    elements: tuple[ScalarFormat, ScalarFormat],
    scaling: Scaling | None,
) -> Array:
    """float32 bits of the exact c + sum of a[k] b[k], rounded once to nearest even. NaN operands are the caller's.

    `scales` are those of both operands, [ceil(K / block), ...]. The sum is a fixed-point number wide enough for every
    product. An exact zero is +0, unless every term is a negative zero.
    """
    xp = _backend.namespace(a.significand, b.significand, c)
    product_bits = sum(element.mantissa_bits for element in elements)
    low, high = (sum(getattr(x, end) for x in elements) for end in ("emin", "emax"))
    if scaling is not None:
        scale = FORMATS[scaling.format]
        product_bits += 2 * scale.mantissa_bits
        low, high = low + 2 * scale.emin, high + 2 * scale.emax + 2
    lowest = min(low - product_bits, _ACCUMULATOR[0])
    highest = max(high + 2, _ACCUMULATOR[1]) + _LIMB  # room for the growth of the sum
    limbs = (highest - lowest) // _LIMB + 2
    place = np.arange(limbs, dtype=np.int32).reshape((limbs,) + (1,) * c.ndim)

    def add(total: Array, magnitude: Array, exponent: Array, negative: Array) -> Array:
        """`total` plus +-magnitude * 2^exponent, magnitude uint64 below 2^28."""
        position = xp.clip(exponent - np.int32(lowest), 0, (limbs - 2) * _LIMB)
        index = (position // np.int32(_LIMB))[None]
        moved = magnitude << (position % np.int32(_LIMB)).astype(np.uint64)
        parts = [
            (moved & np.uint64(_LIMB_MASK)).astype(np.int64),
            (moved >> np.uint64(_LIMB)).astype(np.int64),
        ]
        first, second = (xp.where(negative, -part, part)[None] for part in parts)
        zero = np.int64(0)
        return (
            total
            + xp.where(place == index, first, zero)
            + xp.where(place == index + 1, second, zero)
        )

    def step(carry: tuple[Array, ...], x: tuple[Array, ...]) -> tuple[tuple[Array, ...], None]:
        total, positive, minus, invalid, only_minus_zero = carry
        a_significand, a_exponent, a_negative, a_infinite = x[:4]
        b_significand, b_exponent, b_negative, b_infinite = x[4:8]
        product = abs(a_significand).astype(np.uint64) * abs(b_significand).astype(np.uint64)
        exponent = a_exponent + b_exponent - np.int32(product_bits)
        if scales is not None:
            product = product * (x[8] * x[9]).astype(np.uint64)
            exponent = exponent + x[10] + x[11]
        negative = a_negative ^ b_negative
        total = add(total, product & np.uint64((1 << _PART) - 1), exponent, negative)
        total = add(total, product >> np.uint64(_PART), exponent + np.int32(_PART), negative)
        infinite = a_infinite | b_infinite
        a_zero, b_zero = (a_significand == 0) & ~a_infinite, (b_significand == 0) & ~b_infinite
        invalid = invalid | (infinite & (a_zero | b_zero))
        if scales is not None:
            invalid = invalid | (infinite & (x[8] * x[9] == 0))
        positive, minus = positive | (infinite & ~negative), minus | (infinite & negative)
        only_minus_zero = only_minus_zero & (product == 0) & negative & ~infinite
        return (total, positive, minus, invalid, only_minus_zero), None

    total = xp.zeros((limbs, *c.shape), dtype=np.int64)
    field = ((c >> np.uint32(23)) & np.uint32(255)).astype(np.int32)
    fraction = c & np.uint32(0x7FFFFF)
    finite = field != 255
    c_magnitude = xp.where(field == 0, fraction, fraction | np.uint32(1 << 23))
    c_magnitude = xp.where(finite, c_magnitude, np.uint32(0)).astype(np.uint64)
    c_negative = (c & _float32.SIGN) != 0
    total = add(total, c_magnitude, xp.maximum(field, np.int32(1)) - np.int32(150), c_negative)
    start = (
        total,
        _primitive.special(c == _float32.INFINITY),
        _primitive.special(~finite & c_negative),
        _primitive.special(_float32.is_nan(c)),
        _primitive.special(c == _float32.SIGN),
    )
    operands = []
    for terms in (a, b):
        infinite = xp.zeros_like(terms.negative) if terms.infinite is None else terms.infinite
        operands += [terms.significand, terms.exponent, terms.negative, infinite]
    if scales is not None and scaling is not None:
        for part in ("significand", "exponent"):
            for side in scales:
                each = xp.repeat(getattr(side, part), scaling.block, axis=0)
                operands.append(each[: a.significand.shape[0]])
    total, positive, minus, invalid, only_minus_zero = _backend.scan(step, start, operands)

    result = _round(total, lowest, xp)
    result = xp.where((result == 0) & only_minus_zero, _float32.SIGN, result)
    result = xp.where(
        positive, _float32.INFINITY, xp.where(minus, _float32.INFINITY | _float32.SIGN, result)
    )
    return xp.where(invalid | (positive & minus), _float32.NAN, result)


def _round(total: Array, lowest: int, xp: ModuleType) -> Array:
    """float32 bits of the fixed-point number `total` [limbs, ...] in units of 2^lowest, to nearest even."""
    digits, negative = _magnitude(total, xp)
    # From the top: the first three limbs from the leading one, and whether anything nonzero is below them.
    zero = xp.zeros_like(digits[0])
    found, lead = zero != 0, zero.astype(np.int32)
    window, taken, sticky = [zero, zero, zero], zero.astype(np.int32), zero != 0
    for index in reversed(range(len(digits))):
        first = ~found & (digits[index] != 0)
        lead = xp.where(first, np.int32(index), lead)
        found = found | first
        for slot in range(3):
            window[slot] = xp.where(found & (taken == slot), digits[index], window[slot])
        sticky = sticky | (found & (taken >= 3) & (digits[index] != 0))
        taken = taken + found.astype(np.int32)
    # A short number ends before three limbs are taken: the missing ones are zeros below 2^lowest.
    length = _backend.bit_length(window[0].astype(np.uint32))
    up = (np.int32(_LIMB) - length).astype(np.uint64)
    pair = (window[0] << np.uint64(_LIMB)) | window[1]
    rest = window[2] << up
    significand = (pair << up) | (rest >> np.uint64(_LIMB))
    sticky = sticky | ((rest & np.uint64(_LIMB_MASK)) != 0)
    # 64 significant bits to a float64 rounded to odd, then once to float32.
    odd = (significand >> np.uint64(11)) | (
        ((significand & np.uint64(0x7FF)) != 0) | sticky
    ).astype(np.uint64)
    exponent = lead * np.int32(_LIMB) + length - np.int32(1) + np.int32(lowest)
    pattern = (odd & np.uint64((1 << 52) - 1)) | (
        (exponent + 1023).astype(np.uint64) << np.uint64(52)
    )
    pattern = xp.where(found, pattern, np.uint64(0)) | (negative.astype(np.uint64) << np.uint64(63))
    result = _float32._narrow(_backend.from_bits(pattern, np.float64))
    return xp.where(found, result, np.uint32(0))


def _magnitude(total: Array, xp: ModuleType) -> tuple[list[Array], Array]:
    """Limbs (uint64, 32 bits each, lowest first) of |total|, and where it is negative."""

    def carried(limbs: list[Array]) -> tuple[list[Array], Array]:
        carry, digits = xp.zeros_like(limbs[0]), []
        for limb in limbs:
            value = limb + carry
            digits.append(value & np.int64(_LIMB_MASK))
            carry = value >> np.int64(_LIMB)
        return digits, carry

    limbs = [total[index] for index in range(total.shape[0])]
    digits, carry = carried(limbs)
    negative = carry < 0
    opposite, _ = carried([-limb for limb in limbs])
    return [
        xp.where(negative, o, d).astype(np.uint64) for o, d in zip(opposite, digits, strict=True)
    ], negative
