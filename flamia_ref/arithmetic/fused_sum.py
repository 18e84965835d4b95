"""The fused sum of a tensor core: integers in, float32 bits out, one source for numpy and JAX.

For each lane (one element of D) and each step of L products:

- A product has an exact integer significand and the exponent E = e_a + e_b, plus the exponents of its two block
  scales. It is not renormalised. The accumulator is one more term.
- Emax is the largest of the exponent floor, E of the products that are not zero, and the accumulator's exponent if it
  is not zero.
- Every term is cut toward zero to a multiple of 2^(Emax - F), the cut terms are added exactly, and the sum is cut
  toward zero to float32: subnormal results kept, 2^128 and beyond is infinity, zero is always +0.
- NaN, infinity times zero, or infinities of both signs give 0x7fffffff; else an infinite term gives that infinity.

D of one step is the accumulator of the next. The source and the evidence are with each instruction.

Operands have K as their leading axis; the axes behind it broadcast against the lanes, so a matmul is
[K, m, 1] x [K, 1, n] -> [m, n] and a row-wise dot product is [K, n] x [K, n] -> [n].
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple, cast

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic.instructions import Instruction
from flamia_ref.formats.scalar import ScalarFormat

_FAR = np.int32(-4000)  # exponent of a zero: below the floor whatever is added to it
_PARTIAL = 16  # cut products (each below 2^27) whose sum fits an int32
_ACCUMULATOR_BITS = 23  # fraction bits of the accumulator
_NEGATIVE_INFINITY = _float32.INFINITY | _float32.SIGN


class Terms(NamedTuple):
    """An operand taken apart: value = significand * 2^(exponent - fraction bits), specials as flags."""

    significand: Array
    """int32, 0 for zeros and specials."""
    exponent: Array
    """int32, far below everything where the significand is 0."""
    negative: Array
    nan: Array | None
    """None where the format has no NaN."""
    infinite: Array | None
    """None where the format has no infinity."""


def unpack(codes: Array, element: ScalarFormat) -> Terms:
    """The integer parts of element codes."""
    xp = _backend.namespace(codes)
    word = codes.astype(np.uint32) >> np.uint32(element.padding_bits)
    all_ones = np.uint32((1 << element.mantissa_bits) - 1)
    top = np.uint32((1 << element.exponent_bits) - 1)
    fraction = word & all_ones
    field = (word >> np.uint32(element.mantissa_bits)) & top
    sign_place = np.uint32(element.mantissa_bits + element.exponent_bits)
    negative = ((word >> sign_place) & np.uint32(1)) != 0
    nan = infinite = None
    finite = None
    if element.has_infinity:
        nan, infinite = (field == top) & (fraction != 0), (field == top) & (fraction == 0)
        finite = field != top
    elif element.has_nan:
        nan = (field == top) & (fraction == all_ones)
        finite = ~nan
    hidden = xp.where(field == 0, np.uint32(0), np.uint32(1 << element.mantissa_bits))
    magnitude = (fraction | hidden).astype(np.int32)
    if finite is not None:
        magnitude = xp.where(finite, magnitude, np.int32(0))
    exponent = xp.maximum(field.astype(np.int32), np.int32(1)) - np.int32(element.bias)
    exponent = xp.where(magnitude == 0, _FAR, exponent)
    return Terms(xp.where(negative, -magnitude, magnitude), exponent, negative, nan, infinite)


def scaled(terms: Terms, scales: Array, block: int) -> Terms:
    """`terms` with the exponents of their e8m0 scales [ceil(K / block), ...] added. NaN scales are the caller's."""
    xp = _backend.namespace(terms.exponent, scales)
    shift = xp.repeat(scales.astype(np.int32) - np.int32(127), block, axis=0)[
        : terms.exponent.shape[0]
    ]
    return terms._replace(exponent=terms.exponent + shift)


def chain(a: Terms, b: Terms, c: Array, instruction: Instruction, product_bits: int) -> Array:
    """The fused sums of `instruction` chained along K onto the accumulator bits `c` [...lanes].

    `a` and `b` are [K, ...lanes] with K a multiple of the instruction's terms and scales already added.
    `product_bits` is the number of fraction bits of a product. NaN operands are the caller's.
    """
    length = cast(int, instruction.terms)  # every fused instruction has it

    def by_step(x: Array) -> Array:
        return x.reshape((x.shape[0] // length, length, *x.shape[1:]))

    operands = [by_step(x) for x in (a.significand, a.exponent, b.significand, b.exponent)]
    xp = _backend.namespace(*operands, c)
    with_infinities = a.infinite is not None or b.infinite is not None
    if with_infinities:
        for terms in (a, b):
            infinite = xp.zeros_like(terms.negative) if terms.infinite is None else terms.infinite
            operands += [by_step(infinite), by_step(terms.negative)]

    def step(carry: Array, x: tuple[Array, ...]) -> tuple[Array, None]:
        total = _fused_sum(x[0], x[1], x[2], x[3], carry, instruction, product_bits)
        if with_infinities:
            some = x[4].any() | x[6].any()
            total = _backend.cond(some, _with_infinities, lambda total, *_: total, total, carry, *x)
        return total, None

    return _backend.scan(step, c, operands)


def _fused_sum(
    a: Array,
    a_exponent: Array,
    b: Array,
    b_exponent: Array,
    c: Array,
    instruction: Instruction,
    product_bits: int,
) -> Array:
    """One step on finite products: [L, ...] int32 operands, uint32 accumulator bits. An infinite or NaN `c` stays."""
    xp = _backend.namespace(a, b, c)
    field = ((c >> np.uint32(23)) & np.uint32(255)).astype(np.int32)
    fraction = c & np.uint32(0x7FFFFF)
    c_exponent = xp.maximum(field, np.int32(1)) - np.int32(127)
    c_significand = xp.where(field == 0, fraction, fraction | np.uint32(1 << 23))
    largest = xp.where(c_significand != 0, c_exponent, _FAR)
    largest = xp.maximum(largest, np.int32(instruction.exponent_floor))
    for k in range(a.shape[0]):
        largest = xp.maximum(largest, a_exponent[k] + b_exponent[k])

    up = np.uint32(instruction.fraction_bits - product_bits)
    a_magnitude, a_negative = abs(a).astype(np.uint32) << up, a < 0
    b_magnitude, b_negative = abs(b).astype(np.uint32), b < 0
    sums = []
    for first in range(0, a.shape[0], _PARTIAL):
        partial: Array = None
        for k in range(first, min(first + _PARTIAL, a.shape[0])):
            distance = largest - (a_exponent[k] + b_exponent[k])
            term = _cut(a_magnitude[k] * b_magnitude[k], distance, a_negative[k] ^ b_negative[k])
            partial = term if partial is None else partial + term
        sums.append(partial)
    c_up = np.uint32(instruction.fraction_bits - _ACCUMULATOR_BITS)
    sums.append(_cut(c_significand << c_up, largest - c_exponent, (c & _float32.SIGN) != 0))

    high = sum(partial >> np.int32(16) for partial in sums)
    low = sum(partial & np.int32(0xFFFF) for partial in sums)
    result = _cut_to_float32(high, low, largest - np.int32(instruction.fraction_bits), xp)
    return xp.where(field == 255, c, result)


def _cut(magnitude: Array, distance: Array, negative: Array) -> Array:
    """The int32 term of a uint32 magnitude cut by `distance` places, toward zero."""
    xp = _backend.namespace(magnitude, distance, negative)
    # 31 places already cut every magnitude to 0. Only a zero can be nearer than 0: large, unsigned.
    places = xp.minimum(_backend.reinterpret(distance, np.uint32), np.uint32(31))
    cut = _backend.reinterpret(magnitude >> places, np.int32)
    return xp.where(negative, -cut, cut)


def _cut_to_float32(high: Array, low: Array, exponent: Array, xp: ModuleType) -> Array:
    """float32 bits of (high * 2^16 + low) * 2^exponent, cut toward zero; int32 high and low, the sum below 2^40."""
    high = high + (low >> np.int32(16))
    low = low & np.int32(0xFFFF)
    negative = high < 0
    opposite_low = (-low) & np.int32(0xFFFF)
    opposite_high = -high - (low != 0).astype(np.int32)
    upper = xp.where(negative, opposite_high, high).astype(np.uint32)
    lower = xp.where(negative, opposite_low, low).astype(np.uint32)
    nonzero = (upper | lower) != 0
    length = xp.where(
        upper != 0, _backend.bit_length(upper) + np.int32(16), _backend.bit_length(lower)
    )
    # Keep 32 bits that hold the leading 24, then shift those into place.
    excess = length - np.int32(24)
    long = excess >= 8
    window = xp.where(
        long, (upper << np.uint32(8)) | (lower >> np.uint32(8)), (upper << np.uint32(16)) | lower
    )
    right = xp.where(long, excess - np.int32(8), excess)
    leading = xp.where(
        right >= 0,
        window >> xp.maximum(right, np.int32(0)).astype(np.uint32),
        window << xp.minimum(xp.maximum(-right, np.int32(0)), np.int32(31)).astype(np.uint32),
    )
    biased = length - np.int32(1) + exponent + np.int32(127)
    to_subnormal = xp.minimum(xp.maximum(np.int32(1) - biased, np.int32(0)), np.int32(31)).astype(
        np.uint32
    )
    normal = (xp.maximum(biased, np.int32(0)).astype(np.uint32) << np.uint32(23)) | (
        leading & np.uint32(0x7FFFFF)
    )
    result = xp.where(biased >= 1, normal, leading >> to_subnormal)
    result = xp.where(biased >= 255, _float32.INFINITY, result)
    result = xp.where(nonzero, result, np.uint32(0))
    return xp.where(negative & (result != 0), result | _float32.SIGN, result)


def _with_infinities(total: Array, c: Array, *x: Array) -> Array:
    """`total` corrected for infinite operands of one step."""
    xp = _backend.namespace(total)
    a, _, b, _, a_infinite, a_negative, b_infinite, b_negative = x
    positive, negative = c == _float32.INFINITY, c == _NEGATIVE_INFINITY
    invalid = _float32.is_nan(c)
    for k in range(a.shape[0]):
        infinite = a_infinite[k] | b_infinite[k]
        a_zero, b_zero = (a[k] == 0) & ~a_infinite[k], (b[k] == 0) & ~b_infinite[k]
        invalid = invalid | (infinite & (a_zero | b_zero))
        minus = a_negative[k] ^ b_negative[k]
        positive, negative = positive | (infinite & ~minus), negative | (infinite & minus)
    result = xp.where(positive, _float32.INFINITY, xp.where(negative, _NEGATIVE_INFINITY, total))
    return xp.where(invalid | (positive & negative), _float32.NAN, result)
