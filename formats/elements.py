"""From values and the scales of their blocks to element codes, and back."""

import math
from typing import Any

import numpy as np

from flamia_ref import _backend, _float32, _primitive
from flamia_ref._backend import Array
from flamia_ref.formats.added_rounding import codes_by_factor, fits
from flamia_ref.formats.bits import decode_bits, encode_bits
from flamia_ref.formats.block import Arithmetic, BlockFormat, NanElement, TensorExtent, ZeroSign
from flamia_ref.formats.factors import Factor, power_factor, table_factor
from flamia_ref.formats.formula import Formula
from flamia_ref.formats.logarithms import exponents
from flamia_ref.formats.rounding import Overflow, Rounding
from flamia_ref.formats.scalar import FP32, ScalarFormat

_FARTHEST = 4096  # a power of two beyond all others: what is multiplied by it overflows


def element_codes(
    bits: Array,
    scales: Array,
    block_format: BlockFormat,
    tensor_scale: Array | None = None,
    source: ScalarFormat = FP32,
    random_bits: Array | None = None,
    nan_blocks: Array | None = None,
    amax: Array | None = None,
) -> Array:
    """Element codes of float32 bits.

    Args:
        bits: uint32 values.
        scales: scale codes that broadcast against `bits`.
        block_format: the format.
        tensor_scale: float32 bits that broadcast, where the format has one.
        source: the type that x had.
        random_bits: for stochastic rounding in place of the format's own, as in `encode`.
        nan_blocks: where the amax of the block is NaN, broadcast; None for nowhere.
        amax: float32 bits of the amax of the block, broadcast, for formulas that use it.
    """
    xp = _backend.namespace(bits, scales)
    element = block_format.element
    code = element.code_dtype.type
    x = _float32.flush(bits) if block_format.flushes_subnormals else bits
    if block_format.scaled is None:
        values, exponent = x, _exponents(scales, block_format)
        made_nan = _made_nan(x, scales, block_format)
        if block_format.element_log2 and source.bits == 16:
            values, exponent = _on_found_steps(x, exponent, block_format, source), None
    else:
        values = scaled_values(x, scales, block_format, tensor_scale, source, amax)
        exponent = None
        made_nan = _float32.is_nan(values)
    codes = encode_bits(
        values,
        element,
        rounding=block_format.rounding if random_bits is None else block_format.stochastic,
        overflow=block_format.overflow,
        exponent=exponent,
        random_bits=random_bits,
    )
    if block_format.half_added:
        rounds_up = _just_below_half(x, _exponents(scales, block_format), block_format, source)
        codes = xp.where(rounds_up, codes | code(1), codes)
    if block_format.zero_sign is not ZeroSign.KEEP:
        zero = _vanishes(values, exponent, block_format.machine(source).arithmetic)
        for given, value in block_format.scale_values:
            if math.isinf(value):
                zero = zero | (scales == scales.dtype.type(given))
        codes = _with_zero_sign(codes, zero, block_format)
    if made_nan is not None:
        codes = xp.where(_primitive.special(made_nan), code(block_format.nan_elements[2]), codes)
    own = _nan_codes(x, block_format)
    if own is not None:
        codes = xp.where(_primitive.special(_float32.is_nan(x)), own, codes)
    if nan_blocks is not None and block_format.nan_block_code is not None:
        if not block_format.nan_scale_has_value:
            nan_blocks = nan_blocks | (scales == scales.dtype.type(block_format.scale.nan_code))
        in_nan_block = _primitive.special(nan_blocks)
        codes = xp.where(in_nan_block, code(block_format.nan_block_code), codes)
    return codes


def _nan_codes(x: Array, block_format: BlockFormat) -> Array | None:
    """The codes of x where x is NaN; None for that of the element format, which `encode` gives."""
    xp = _backend.namespace(x)
    element = block_format.element
    code = element.code_dtype.type
    negative = (x & _float32.SIGN) != 0
    if block_format.nan_element is NanElement.AS_NUMBER:
        dropped = np.uint32(23 - element.mantissa_bits)
        bits = (x & _float32.MAGNITUDE) | np.uint32(1 << 22)  # an operation makes it a quiet NaN
        half = np.uint32((1 << (22 - element.mantissa_bits)) - 1)
        rounded = (bits + half + ((bits >> dropped) & np.uint32(1))) >> dropped
        rebased = rounded + np.uint32((element.bias - 127) << element.mantissa_bits & 0xFFFFFFFF)
        low = (rebased & np.uint32(element.sign_code - 1)).astype(element.code_dtype)
        return low | xp.where(negative, code(element.sign_code), code(0))
    if block_format.nan_codes is None:
        return None
    plus, minus = (code(given) for given in block_format.nan_codes[:2])
    return xp.where(negative, minus, plus)


def _vanishes(values: Array, exponent: Array | None, arithmetic: ScalarFormat) -> Array:
    """Where values times 2^exponent, rounded to that arithmetic, are zeros."""
    if exponent is None:
        return _float32.is_zero(values)
    codes = encode_bits(values, arithmetic, exponent=exponent)
    return (codes & arithmetic.code_dtype.type(arithmetic.sign_code - 1)) == 0


def _on_found_steps(
    x: Array, exponent: Array, block_format: BlockFormat, source: ScalarFormat
) -> Array:
    """float32 bits of x times 2^exponent, cut to the step that a rounded log2 finds for each.

    Where that finds the next exponent, the step is twice as large. Nearest roundings never show
    it: it happens within 1/32 of the next power of two, to which both steps round.
    """
    xp = _backend.namespace(x, exponent)
    scaled = _float32.shift(x, exponent)
    if block_format.rounding is not Rounding.TOWARD_ZERO:
        return scaled
    magnitude = scaled & _float32.MAGNITUDE
    found = exponents(magnitude, up=False, log2=block_format.log2, source=source)
    larger = found > exponents(magnitude, up=False)
    kept = np.uint32(0xFFFFFFFF << (24 - block_format.element.mantissa_bits) & 0xFFFFFFFF)
    number = magnitude < _float32.INFINITY
    return xp.where(larger & number, scaled & (kept | _float32.SIGN), scaled)


def _just_below_half(
    x: Array, exponent: Array, block_format: BlockFormat, source: ScalarFormat
) -> Array:
    """Where x times 2^exponent is the predecessor of half of the smallest code, in the type of x.

    Its sum with that half lies in the middle between two values, of which the upper one is even:
    the smallest code. A subnormal predecessor lies further below, and the sum is exact.
    """
    element = block_format.element
    half = np.int32(127 + element.emin - element.mantissa_bits - 1)
    field = half - exponent
    normal = (field > 1) & (field < 255)
    last = np.uint32(1 << (23 - source.mantissa_bits))
    below = (field.astype(np.uint32) << np.uint32(23)) - last
    return normal & ((x & _float32.MAGNITUDE) == below)


def scaled_values(
    x: Array,
    scales: Array,
    block_format: BlockFormat,
    tensor_scale: Array | None = None,
    source: ScalarFormat = FP32,
    amax: Array | None = None,
) -> Array:
    """float32 bits of what the formula `scaled` gives."""
    given = {"x": x, "scale": scale_bits(scales, block_format)}
    if amax is not None:
        given["amax"] = amax
    if tensor_scale is not None:
        given["tensor_scale"] = tensor_scale
    formula = Formula.parse(block_format.scaled or "")
    return formula.evaluate(given, block_format.machine(source))


def scale_bits(scales: Array, block_format: BlockFormat) -> Array:
    """float32 bits of what x is divided by for each scale code."""
    xp = _backend.namespace(scales)
    values = decode_bits(scales, block_format.scale)
    for code, value in block_format.scale_values:
        bits = np.float32(value).view(np.uint32)
        values = xp.where(scales == scales.dtype.type(code), bits, values)
    return values


def _exponents(scales: Array, block_format: BlockFormat) -> Array:
    """The power of two that x is multiplied by for each scale code, int32."""
    xp = _backend.namespace(scales)
    exponents = np.int32(block_format.scale.bias) - scales.astype(np.int32)
    for code, value in block_format.scale_values:
        if not math.isnan(value):
            power = -_FARTHEST if math.isinf(value) else _FARTHEST
            if value and not math.isinf(value):
                power = 1 - math.frexp(value)[1]
            exponents = xp.where(scales == scales.dtype.type(code), np.int32(power), exponents)
    return exponents


def _made_nan(x: Array, scales: Array, block_format: BlockFormat) -> Array | None:
    """Where x over a scale that is a power of two, 0, infinity or NaN is NaN; None for nowhere."""
    special = dict(block_format.scale_values)
    if block_format.can_be_nan:
        special.setdefault(block_format.scale.nan_code, math.nan)
    where: Any = None
    for code, value in special.items():
        here = scales == scales.dtype.type(code)
        if value == 0:
            here = here & _float32.is_zero(x)
        elif math.isinf(value):
            here = here & ((x & _float32.MAGNITUDE) == _float32.INFINITY)
        elif not math.isnan(value):
            continue
        where = here if where is None else where | here
    return where


def _with_zero_sign(codes: Array, where: Array, block_format: BlockFormat) -> Array:
    """Codes with the sign of zeros that the format gives them, `where` x over its scale is one."""
    xp = _backend.namespace(codes, where)
    code = block_format.element.code_dtype.type
    minus = code(block_format.element.sign_code)
    if block_format.zero_sign is ZeroSign.PLUS:
        return xp.where(codes == minus, code(0), codes)
    zero = code(0) if block_format.zero_sign is ZeroSign.PLUS_OF_ZERO else minus
    # A zero that a scale made NaN is no zero any more.
    still = (codes & code(block_format.element.code_mask & ~block_format.element.sign_code)) == 0
    return xp.where(where & still, zero, codes)


def fast(block_format: BlockFormat) -> bool:
    """Whether `codes_of_blocks` has element codes like these: ordinary ones, a factor a block."""
    ordinary = (
        block_format.nan_codes is None
        and block_format.nan_block_code is None
        and block_format.nan_element is NanElement.CODE
        and block_format.zero_sign is ZeroSign.KEEP
        and not (block_format.half_added or block_format.element_log2)
        and not block_format.flushes_subnormals
        and block_format.arithmetic is Arithmetic.FLOAT32
        and block_format.tensor_extent is TensorExtent.TENSOR
        and block_format.scale.bits <= 8
    )
    return (
        ordinary
        and fits(block_format.element, block_format.rounding, block_format.overflow)
        and (block_format.scaled is None or _factor_formula(block_format) is not None)
    )


def _factor_formula(block_format: BlockFormat) -> Formula | None:
    """What `scaled` multiplies x by, where it does that alone.

    Not a divisor: XLA makes of a division by one value a block a product with its reciprocal, which rounds twice.
    """
    found = Formula.parse(block_format.scaled or "").factor("x")
    if found is None or found[1] or "amax" in found[0].variables:
        return None
    return found[0]


def codes_of_blocks(
    x: Array, scales: Array, block_format: BlockFormat, tensor_scale: Array | None = None
) -> Array:
    """What `element_codes` gives for a format that is `fast`, fast.

    Args:
        x: float32 bits (uint32) or bfloat16 bits (uint16), in blocks [..., down, rows, across, columns].
        scales: scale codes [..., down, across].
        block_format: the format.
        tensor_scale: float32 bits of the one tensor scale, where the format has one.
    """
    factor, divide = scale_factor(scales, block_format, tensor_scale)
    return codes_by_factor(x, factor, block_format.element, divide=divide)


def scale_factor(
    scales: Array, block_format: BlockFormat, tensor_scale: Array | None = None
) -> tuple[Factor, bool]:
    """What elements are multiplied by, or divided by if True, for each scale code of a format that is `fast`."""
    if block_format.scaled is None and not block_format.scale_values:
        return power_factor(scales), False
    every = np.arange(256, dtype=np.uint8)
    divisors = scale_bits(every, block_format)
    formula = None if block_format.scaled is None else _factor_formula(block_format)
    if formula is None:  # powers of two, of which the reciprocals are exact
        return table_factor(scales, divisors), True
    given = {"scale": divisors}
    if tensor_scale is not None:
        given["tensor_scale"] = tensor_scale.reshape(1)
    table = formula.evaluate(given, block_format.machine(FP32))
    return table_factor(scales, table), False


def value_bits(codes: Array, scales: Array, block_format: BlockFormat) -> Array:
    """float32 bits of code values times scale values; `scales` broadcast against `codes`."""
    xp = _backend.namespace(codes, scales)
    elements = decode_bits(codes, block_format.element)
    if not block_format.scales_are_powers:
        return _float32.multiply(elements, decode_bits(scales, block_format.scale))
    exponents = scales.astype(np.int32) - np.int32(block_format.scale.bias)
    values = encode_bits(elements, FP32, overflow=Overflow.NATIVE, exponent=exponents)
    return xp.where(scales == block_format.scale.nan_code, _float32.NAN, values)
