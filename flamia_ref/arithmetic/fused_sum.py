"""The fused sum of a tensor core: codes in, accumulator bits out, one source for numpy and JAX.

For each lane (one element of D) and each step of L products:

- A product has an exact integer significand and the exponent E = e_a + e_b, plus the exponents of its two block
  scales. It is not renormalised. The accumulator is one more term.
- Emax is the largest of the exponent floor, E of the products that are not zero, and the accumulator's exponent if it
  is not zero.
- Every term is cut toward zero to a multiple of 2^(Emax - F), the cut terms are added exactly, and the sum is rounded
  to the instruction's result: float32 cut toward zero, the same with 13 fraction bits, or float16 to nearest even.
  Subnormal results are kept, what reaches 2^128 (65520 for float16) is infinity, zero is always +0.
- NaN, infinity times zero, or infinities of both signs give a NaN with all other bits set; else an infinite term gives
  that infinity.

A term's cut needs no shifts: the product of two element values is exact as a float, so is its multiple by the power of
two 2^(F - Emax), and the conversion to an integer cuts toward zero. Products of 8-bit and float16 elements fit float32.
Those of bfloat16 and tf32 fit float64, and float32 too once each row and column is divided by its largest power of two:
if Emax of no lane is more than 90 below the sum of both powers, all that is subnormal then is cut to 0. The cut terms
are below 2^27 and are added as integers.

D of one step is the accumulator of the next. Kinds that cut whole groups of products are in
`flamia_ref.arithmetic.grouped_sum`. The source and the evidence are with each instruction.

Operands have K as their leading axis; the axes behind it broadcast against the lanes, so a matmul is
[K, m, 1] x [K, 1, n] -> [m, n] and a row-wise dot product is [K, n] x [K, n] -> [n]. Accumulators are uint32 words; a
float16 one is in the low half.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

import numpy as np

from flamia_ref import _backend, _float32, _primitive
from flamia_ref._backend import Array
from flamia_ref.arithmetic.instructions import Instruction, Result
from flamia_ref.formats.scalar import FORMATS, ScalarFormat

FAR = -4000  # exponent of a zero: below the floor whatever is added to it
_PARTIAL = 16  # cut products (each below 2^27) whose sum fits an int32
_RANGE = 90  # binades below a row's and a column's largest powers of two in which float32 holds every term


class Terms(NamedTuple):
    """An operand taken apart: value = significand * 2^(exponent - fraction bits), specials as flags."""

    value: Array
    """Exact, 0 for specials: float32 where a product of two such values is an exact float32, else float64."""

    significand: Array
    """int32, 0 for zeros and specials."""
    exponent: Array
    """int32, FAR where the significand is 0."""
    negative: Array
    nan: Array | None
    """None where the format has no NaN."""
    infinite: Array | None
    """None where the format has no infinity."""


class Accumulator(NamedTuple):
    """Accumulator bits taken apart."""

    significand: Array
    """uint32; what stands for a special is not to be used."""
    exponent: Array
    """int32, the least normal exponent for zeros and subnormals."""
    negative: Array
    special: Array
    """Where the accumulator is infinite or NaN."""


def unpack(codes: Array, element: ScalarFormat) -> Terms:
    """The integer parts of element codes; bits that the format does not have are ignored."""
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
        nan = _primitive.special((field == top) & (fraction != 0))
        infinite = _primitive.special((field == top) & (fraction == 0))
        finite = field != top
    elif element.has_nan:
        nan = _primitive.special((field == top) & (fraction == all_ones))
        finite = ~nan
    hidden = xp.where(field == 0, np.uint32(0), np.uint32(1 << element.mantissa_bits))
    magnitude = (fraction | hidden).astype(np.int32)
    if finite is not None:
        magnitude = xp.where(finite, magnitude, np.int32(0))
    exponent = xp.maximum(field.astype(np.int32), np.int32(1)) - np.int32(element.bias)
    exponent = xp.where(magnitude == 0, np.int32(FAR), exponent)
    significand = xp.where(negative, -magnitude, magnitude)
    value = significand.astype(np.float64) * power_of_two(
        exponent - element.mantissa_bits, np.float64
    )
    if is_small(element):
        value = value.astype(np.float32)
    return Terms(value, significand, exponent, negative, nan, infinite)


def is_small(element: ScalarFormat) -> bool:
    """Whether exponents fit int8, and products of two such elements a float32 that is not subnormal."""
    return element.emin >= -16 and element.emax <= 16


def power_of_two(exponent: Array, dtype: type) -> Array:
    """2^exponent in float32 or float64 for int32 exponents, those out of range made the nearest normal one."""
    xp = _backend.namespace(exponent)
    if dtype is np.float32:
        field = xp.clip(exponent + np.int32(127), 1, 254).astype(np.uint32)
        return _backend.from_bits(field << np.uint32(23), np.float32)
    field = xp.clip(exponent + np.int32(1023), 1, 2046).astype(np.uint64)
    return _backend.from_bits(field << np.uint64(52), np.float64)


def unpack_accumulator(c: Array, result: Result) -> Accumulator:
    """The integer parts of accumulator bits."""
    xp = _backend.namespace(c)
    form = FORMATS[result.accumulator_format]
    places, top = form.mantissa_bits, (1 << form.exponent_bits) - 1
    field = ((c >> np.uint32(places)) & np.uint32(top)).astype(np.int32)
    fraction = c & np.uint32((1 << places) - 1)
    significand = xp.where(field == 0, fraction, fraction | np.uint32(1 << places))
    exponent = xp.maximum(field, np.int32(1)) - np.int32(form.bias)
    return Accumulator(significand, exponent, (c & np.uint32(form.sign_code)) != 0, field == top)


def infinity(result: Result) -> np.uint32:
    """Bits of +infinity in the accumulator."""
    return np.uint32(cast(int, FORMATS[result.accumulator_format].infinity_code))


def not_a_number(result: Result) -> np.uint32:
    """The NaN that every instruction returns: all bits below the sign."""
    return np.uint32(FORMATS[result.accumulator_format].sign_code - 1)


def is_nan(c: Array, result: Result) -> Array:
    """Where accumulator bits are a NaN."""
    return _primitive.special((c & not_a_number(result)) > infinity(result))


def chain(
    a: Terms,
    b: Terms,
    scale: tuple[Array, Array] | None,
    c: Array,
    instruction: Instruction,
) -> Array:
    """The fused sums of `instruction` chained along K onto the accumulator words `c` [...lanes].

    `a` and `b` are [K, ...lanes] with K a multiple of the instruction's terms; `scale` has the int32 exponents of their
    block scales, [K / terms, ...lanes] each. NaN operands are the caller's.
    """
    length = cast(int, instruction.terms)  # every fused instruction has it
    xp = _backend.namespace(a.value, b.value, c)

    def by_step(x: Array) -> Array:
        return x.reshape((x.shape[0] // length, length, *x.shape[1:]))

    dtype = np.promote_types(a.value.dtype, b.value.dtype)
    operands = [by_step(side.value.astype(dtype)) for side in (a, b)]
    operands += [by_step(_narrowed(side.exponent, dtype)) for side in (a, b)]
    operands += scale or ()
    with_infinities = a.infinite is not None or b.infinite is not None
    if with_infinities:
        for terms in (a, b):
            infinite = xp.zeros_like(terms.negative) if terms.infinite is None else terms.infinite
            operands += [by_step(infinite), by_step(terms.negative)]

    def step(carry: Array, x: tuple[Array, ...]) -> tuple[Array, None]:
        (a, b, a_exponent, b_exponent), rest = x[:4], x[4:]
        largest = _largest(a_exponent, b_exponent)
        if scale is not None:
            shift, rest = rest[0] + rest[1], rest[2:]
            total = _fused_sum(largest, a, b, shift, carry, instruction)
        elif dtype == np.float64:
            total = _wide_fused_sum(largest, a, b, a_exponent, b_exponent, carry, instruction)
        else:
            total = _fused_sum(largest, a, b, None, carry, instruction)
        if with_infinities:
            total = _backend.cond(
                _primitive.shortcut(rest[0].any() | rest[2].any(), general=True),
                functools.partial(_with_infinities, result=instruction.result),
                lambda total, *_: total,
                *(total, carry, a, b, *rest),
            )
        return total, None

    return _backend.scan(step, c, operands)


def _narrowed(exponent: Array, dtype: np.dtype[Any]) -> Array:
    """Exponents in the narrowest integers that hold the sum of two; what stands for zeros is -60 in int8."""
    xp = _backend.namespace(exponent)
    if dtype == np.float32:
        return xp.maximum(exponent, np.int32(-60)).astype(np.int8)
    return exponent.astype(np.int16)


def _largest(a: Array, b: Array) -> Array:
    """The largest sum of two exponents over the first axis: int32, FAR where no product is other than 0."""
    xp = _backend.namespace(a, b)
    # No sum with what stands for a zero is above this, and only such sums are as low: who reads the program for what
    # its results depend on sees from it that the exponent beside a zero does not count.
    least = a.dtype.type(-44 if a.dtype == np.int8 else FAR + 128)
    largest = xp.maximum(least, a[0] + b[0])
    for k in range(1, a.shape[0]):
        largest = xp.maximum(largest, a[k] + b[k])
    return xp.where(largest == least, np.int32(FAR), largest.astype(np.int32))


def _wide_fused_sum(
    largest: Array,
    a: Array,
    b: Array,
    a_exponent: Array,
    b_exponent: Array,
    c: Array,
    instruction: Instruction,
) -> Array:
    """`_fused_sum` of float64 values, in float32 where the exponents allow it."""
    xp = _backend.namespace(a, b, c)
    sides, tops = [], []
    for value, exponent in ((a, a_exponent), (b, b_exponent)):
        top = exponent.max(axis=0).astype(np.int32)
        top = xp.where(top == np.int32(FAR), np.int32(0), top)
        sides.append((value * power_of_two(-top, np.float64)[None]).astype(np.float32))
        tops.append(top)
    shift = tops[0] + tops[1]
    some = largest != np.int32(FAR)
    near = ~some | (largest >= shift - np.int32(_RANGE))
    relative = xp.where(some, largest - shift, largest)

    def narrow(c: Array, a: Array, b: Array, *_: Array) -> Array:
        return _fused_sum(relative, a, b, shift, c, instruction)

    def wide(c: Array, _: Array, __: Array, a: Array, b: Array) -> Array:
        return _fused_sum(largest, a, b, None, c, instruction)

    near_all = _primitive.shortcut(near.all(), general=False)
    return _backend.cond(near_all, narrow, wide, c, *sides, a, b)


def _fused_sum(
    largest: Array,
    a: Array,
    b: Array,
    shift: Array | None,
    c: Array,
    instruction: Instruction,
) -> Array:
    """One step on finite values [L, ...] and accumulator words. An infinite or NaN `c` stays.

    `largest` is the largest exponent of a product without its scales, whose exponents `shift` has.
    """
    xp = _backend.namespace(a, b, c)
    old = unpack_accumulator(c, instruction.result)
    scaled = largest if shift is None else largest + shift
    top = xp.maximum(scaled, np.int32(instruction.exponent_floor))
    top = xp.maximum(top, xp.where(old.significand != 0, old.exponent, np.int32(FAR)))

    # Out of range only where all products are 0 or all are cut to 0: the nearest power in range does the same.
    unscaled = top if shift is None else top - shift
    unit = power_of_two(np.int32(instruction.fraction_bits) - unscaled, a.dtype.type)
    sums = []
    for first in range(0, a.shape[0], _PARTIAL):
        partial: Array = None
        for k in range(first, min(first + _PARTIAL, a.shape[0])):
            term = (a[k] * b[k] * unit).astype(np.int32)
            partial = term if partial is None else partial + term
        sums.append(partial)
    sums.append(_cut_accumulator(old, top, instruction))
    total = sum(partial.astype(np.float64) for partial in sums)  # integers below 2^53: exact
    result = rounded(total, top - np.int32(instruction.fraction_bits), instruction.result)
    return xp.where(old.special, c, result)


def _cut_accumulator(old: Accumulator, top: Array, instruction: Instruction) -> Array:
    """The accumulator's int32 term in units of 2^(top - F)."""
    xp = _backend.namespace(top)
    places = FORMATS[instruction.result.accumulator_format].mantissa_bits
    up = instruction.fraction_bits - places
    magnitude = old.significand
    magnitude = magnitude << np.uint32(up) if up >= 0 else magnitude >> np.uint32(-up)
    # Shifts of 32 places and more give 0. Only a zero can be nearer than 0: large, unsigned.
    distance = _backend.reinterpret(top - old.exponent, np.uint32)
    cut = _backend.reinterpret(magnitude >> distance, np.int32)
    return xp.where(old.negative, -cut, cut)


def rounded(total: Array, exponent: Array, result: Result) -> Array:
    """Accumulator words of total * 2^exponent for integer-valued float64 `total`, int32 `exponent`."""
    xp = _backend.namespace(total, exponent)
    word = _backend.bits(total)
    low, high = word.astype(np.uint32), (word >> np.uint64(32)).astype(np.uint32)
    form = FORMATS[result.accumulator_format]
    places = form.mantissa_bits
    magnitude = high & _float32.MAGNITUDE
    binade = (magnitude >> np.uint32(20)).astype(np.int32) - np.int32(1023 - form.bias) + exponent
    fraction = (magnitude & np.uint32(0xFFFFF)) | np.uint32(0x100000)
    # Places that go: those of a normal result, more as it becomes subnormal, all in the end.
    below = xp.clip(np.int32(1) - binade, 0, 31).astype(np.uint32)
    if result is Result.FLOAT16:
        kept = _nearest(fraction, low, below + np.uint32(20 - places))
    else:
        kept = ((fraction << np.uint32(places - 20)) | (low >> np.uint32(52 - places))) >> below
    # A subnormal has no hidden bit and a carry of the rounding moves up a binade: both by the sum.
    field = xp.clip(binade - 1, 0, (1 << form.exponent_bits) - 2).astype(np.uint32)
    word = xp.minimum(kept + (field << np.uint32(places)), infinity(result))
    word = xp.where(binade > np.int32((1 << form.exponent_bits) - 2), infinity(result), word)
    if result is Result.FLOAT32_13:
        word = word & ~np.uint32((1 << (places - 13)) - 1)
    word = xp.where(magnitude == 0, np.uint32(0), word)
    sign = (high >> np.uint32(31)) << np.uint32(form.bits - 1)
    return xp.where(word == 0, word, word | sign)


def _nearest(fraction: Array, low: Array, dropped: Array) -> Array:
    """`fraction` without its last `dropped` places, rounded to nearest even; `low` is what follows it."""
    xp = _backend.namespace(fraction, low)
    one = np.uint32(1)
    dropped = xp.minimum(
        dropped, np.uint32(24)
    )  # a value below a quarter of the last place gives 0
    exact = (fraction << one) | xp.minimum(low, one)
    odd = (fraction >> dropped) & one
    return (exact + ((one << dropped) - one) + odd) >> (dropped + one)


def _with_infinities(
    total: Array,
    c: Array,
    a: Array,
    b: Array,
    a_infinite: Array,
    a_negative: Array,
    b_infinite: Array,
    b_negative: Array,
    *,
    result: Result,
) -> Array:
    """`total` corrected for infinite operands of one step."""
    xp = _backend.namespace(total)
    above = infinity(result)
    below = above | np.uint32(FORMATS[result.accumulator_format].sign_code)
    positive, negative = c == above, c == below
    invalid = is_nan(c, result)
    for k in range(a.shape[0]):
        infinite = a_infinite[k] | b_infinite[k]
        a_zero, b_zero = (a[k] == 0) & ~a_infinite[k], (b[k] == 0) & ~b_infinite[k]
        invalid = invalid | (infinite & (a_zero | b_zero))
        minus = a_negative[k] ^ b_negative[k]
        positive, negative = positive | (infinite & ~minus), negative | (infinite & minus)
    total = xp.where(positive, above, xp.where(negative, below, total))
    return xp.where(invalid | (positive & negative), not_a_number(result), total)
