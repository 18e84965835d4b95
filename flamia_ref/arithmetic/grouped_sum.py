"""The fused sum of the FP4 kinds, which add groups of products exactly before anything is cut.

For each lane and each step of L products in groups of G:

- The products of a group are added exactly: P, a multiple of 1/4.
- The group's two block scales multiply to an exact significand s and an exponent e = e_A + e_B; blocks of more than G
  elements give several groups one scale pair. The term is P s, and its exponent is e alone, whatever P is.
- Emax is the largest of the exponent floor, e of the groups that have a product that is not zero and no zero scale, and
  the accumulator's exponent if it is not zero. A group whose products cancel counts.
- Terms and accumulator are cut toward zero to multiples of 2^(Emax - F), added exactly, and the sum is rounded as in
  `flamia_ref.arithmetic.fused_sum`, with the same accumulator words and axes.

A term has at most 24 significant bits, before it is cut and after: it is exact in float32, and so is its multiple by
2^(F - Emax). The sum of four terms and the accumulator has 50 bits and is exact in float64.
"""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple, cast

import numpy as np

from flamia_ref import _backend, _primitive
from flamia_ref._backend import Array
from flamia_ref.arithmetic import fused_sum
from flamia_ref.arithmetic.fused_sum import FAR, Terms
from flamia_ref.arithmetic.instructions import Instruction, Scaling
from flamia_ref.formats.scalar import FORMATS, ScalarFormat

_LEAST = (
    -900
)  # exponents of two below this are not needed: what they multiply is below 2^100 and is cut to 0


class Scales(NamedTuple):
    """Block scales taken apart: value = significand * 2^(exponent - fraction bits)."""

    significand: Array
    """int32; 1 for E8M0, 0 for a zero."""
    exponent: Array
    """int32."""
    nan: Array


def unpack_scales(codes: Array, scale: ScalarFormat) -> Scales:
    """The integer parts of scale codes. The sign bit that an unsigned format has no use for is ignored."""
    xp = _backend.namespace(codes)
    if scale.mantissa_bits == 0:
        exponent = codes.astype(np.int32) - np.int32(scale.bias)
        nan = _primitive.special(codes == np.uint8(scale.nan_code))
        return Scales(xp.ones_like(exponent), exponent, nan)
    code = codes & np.uint8((1 << scale.bits) - 1)
    field = (code >> np.uint8(scale.mantissa_bits)).astype(np.int32)
    fraction = (code & np.uint8((1 << scale.mantissa_bits) - 1)).astype(np.int32)
    significand = xp.where(field == 0, fraction, fraction | np.int32(1 << scale.mantissa_bits))
    exponent = xp.maximum(field, np.int32(1)) - np.int32(scale.bias)
    return Scales(significand, exponent, _primitive.special(code == np.uint8(scale.nan_code)))


def chain(
    a: Terms,
    b: Terms,
    a_scales: Scales,
    b_scales: Scales,
    c: Array,
    instruction: Instruction,
    scaling: Scaling,
) -> Array:
    """The fused sums of `instruction` chained along K onto the accumulator words `c` [...lanes].

    `a` and `b` are finite, [K, ...lanes] with K a multiple of the instruction's terms; scales are
    [K / block, ...lanes], and NaN ones are the caller's.
    """
    xp = _backend.namespace(a.significand, b.significand, c)
    length, group = cast(int, instruction.terms), instruction.group

    groups = length // group

    def by_group(x: Array) -> Array:
        return x.reshape((x.shape[0] // length, groups, group, *x.shape[1:]))

    def to_groups(x: Array) -> Array:
        """One entry of a block's scale for each of its groups: [steps, groups, ...]."""
        x = xp.repeat(x, scaling.block // group, axis=0)
        return x.reshape((x.shape[0] // groups, groups, *x.shape[1:]))

    # Scales of few binades are multiplied into the values; others only come in with the power of two.
    small = fused_sum.is_small(FORMATS[scaling.format])
    values, packed = [], []
    for terms, scales in ((a, a_scales), (b, b_scales)):
        value = by_group(terms.value)
        present = (value != 0).astype(np.int32)
        places = [present[:, :, k] << np.int32(k) for k in range(group)]
        exponent = xp.where(scales.significand == 0, np.int32(FAR), scales.exponent)
        # One array for both: arrays that are cut step by step are dear.
        packed.append(
            (to_groups(exponent) << np.int32(16)) | functools.reduce(operator.or_, places)
        )
        if small:
            below = np.int32(FORMATS[scaling.format].mantissa_bits)
            scale = scales.significand.astype(np.float32)
            scale = scale * fused_sum.power_of_two(scales.exponent - below, np.float32)
            value = value * to_groups(scale)[:, :, None]
        values.append(value)

    def step(carry: Array, x: tuple[Array, ...]) -> tuple[Array, None]:
        a, b, a_packed, b_packed = x
        old = fused_sum.unpack_accumulator(carry, instruction.result)
        top = xp.where(old.significand != 0, old.exponent, np.int32(FAR))
        top = xp.maximum(top, np.int32(instruction.exponent_floor))
        exponents = []
        for g in range(groups):
            some = (a_packed[g] & b_packed[g] & np.int32(0xFFFF)) != 0
            exponent = (a_packed[g] >> np.int32(16)) + (b_packed[g] >> np.int32(16))
            top = xp.maximum(top, xp.where(some, exponent, np.int32(FAR)))
            exponents.append(exponent)
        down = top - np.int32(instruction.fraction_bits)
        unit = fused_sum.power_of_two(-down, np.float32)
        terms = []
        for g, exponent in enumerate(exponents):
            # Of at most 20 bits with its scales, and so are partial sums.
            products = _backend.exact_contraction(a[g], b[g])
            power = unit if small else fused_sum.power_of_two(exponent - down, np.float32)
            terms.append(xp.trunc(products * power))
        places = FORMATS[instruction.result.accumulator_format].mantissa_bits
        power = fused_sum.power_of_two(old.exponent - down - np.int32(places), np.float32)
        cut = xp.trunc(old.significand.astype(np.float32) * power)
        terms.append(xp.where(old.negative, -cut, cut))
        total = sum(term.astype(np.float64) for term in terms)
        result = fused_sum.rounded(total, down, instruction.result)
        return xp.where(old.special, carry, result), None

    # Two steps a turn: XLA vectorises that loop, and not one that cuts its operands at every step.
    return _backend.scan(step, c, (*values, *packed), unroll=2)
