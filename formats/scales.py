"""From the amax of a block to its scale code."""

import dataclasses

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.formats.bits import decode_bits, encode_bits
from flamia_ref.formats.block import BlockFormat, Log2, ScaleRule
from flamia_ref.formats.formula import Formula
from flamia_ref.formats.logarithms import exponents
from flamia_ref.formats.rounding import Overflow, Rounding
from flamia_ref.formats.scalar import E8M0, FP32, ScalarFormat

_MANTISSA = np.uint32(0x7FFFFF)


def tensor_scale_bits(
    tensor_amax: Array, block_format: BlockFormat, source: ScalarFormat = FP32
) -> Array:
    """float32 bits of the tensor scale, of those of the amax that it is made from. Subnormals are kept: who calls the
    library makes it.
    """
    formula = Formula.parse(block_format.tensor_scale or "")
    machine = dataclasses.replace(block_format.machine(source), ftz=False)
    return formula.evaluate({"tensor_amax": tensor_amax}, machine)


def scale_codes(
    amax: Array,
    block_format: BlockFormat,
    tensor_scale: Array | None = None,
    source: ScalarFormat = FP32,
    *,
    factor: float = 1.0,
) -> Array:
    """Scale codes of the float32 bits of amax, where a NaN stands for a block with a NaN.

    Args:
        amax: uint32, of any shape.
        block_format: the format.
        tensor_scale: float32 bits that broadcast against `amax`, where the format has one.
        source: the type that x had.
        factor: what the quotient is multiplied by before it is rounded to the scale format.
    """
    xp = _backend.namespace(amax)
    if block_format.flushes_subnormals:
        amax = _float32.flush(amax)
    counted = amax
    if block_format.smallest_amax:
        counted = xp.maximum(amax, np.float32(block_format.smallest_amax).view(np.uint32))
    if block_format.rule is ScaleRule.QUOTIENT:
        d = quotient(counted, block_format, tensor_scale, source)
        if block_format.smallest_quotient:
            small = d < np.float32(block_format.smallest_quotient).view(np.uint32)
            d = xp.where(small, _float32.ONE, d)
        if factor != 1.0:
            d = _float32.multiply(d, np.asarray(np.float32(factor).view(np.uint32)))
        codes = _quotient_codes(d, block_format, source)
        return _with_odd_blocks(codes, amax, d, block_format)
    if block_format.even_overflow:
        half = np.uint32(1 << (22 - _kept(block_format)))
        rounds_out = (amax < _float32.INFINITY) & (amax + half >= _float32.INFINITY)
        amax = xp.where(rounds_out, _float32.INFINITY, amax)
    return _with_odd_blocks(_power(counted, block_format, source), amax, amax, block_format)


def _kept(block_format: BlockFormat) -> int:
    """Mantissa bits that EVEN rounds to."""
    even = block_format.even_bits
    return block_format.element.mantissa_bits if even is None else even


def quotient(
    amax: Array,
    block_format: BlockFormat,
    tensor_scale: Array | None = None,
    source: ScalarFormat = FP32,
) -> Array:
    """float32 bits of what rule QUOTIENT rounds to the scale format."""
    values = (
        {"amax": amax} if tensor_scale is None else {"amax": amax, "tensor_scale": tensor_scale}
    )
    formula = Formula.parse(block_format.quotient or "")
    return formula.evaluate(values, block_format.machine(source))


def _with_odd_blocks(codes: Array, amax: Array, d: Array, block_format: BlockFormat) -> Array:
    """Codes within their range, and those of blocks of zeros, with an infinity or with a NaN.

    `d` is the quotient, or amax itself: a block whose quotient is 0 counts as one of zeros.
    """
    xp = _backend.namespace(codes, amax)
    code = block_format.scale.code_dtype.type
    least, largest = block_format.codes_of_scales
    if least:
        codes = xp.maximum(codes, code(least))
    if largest < block_format.scale.max_code:
        codes = xp.minimum(codes, code(largest))
    if block_format.underflow_scale is not None:
        codes = xp.where(codes == 0, code(block_format.underflow_scale), codes)
    if block_format.infinity_scale is not None:
        codes = xp.where(amax == _float32.INFINITY, code(block_format.infinity_scale), codes)
    if block_format.zero_scale is not None:
        codes = xp.where(d == 0, code(block_format.zero_scale), codes)
    if block_format.nan_scale is not None:
        nan = (amax > _float32.INFINITY) | _float32.is_nan(d)
        codes = xp.where(nan, code(block_format.nan_scale), codes)
    return codes


def _quotient_codes(d: Array, block_format: BlockFormat, source: ScalarFormat) -> Array:
    """Scale codes of the quotient by `scale_rounding`."""
    scale, rounding = block_format.scale, block_format.scale_rounding
    if _takes_log2(block_format, source):
        found = exponents(d, up=rounding is Rounding.UP, log2=block_format.log2, source=source)
        return _code_of_power(found, d, scale, FP32)
    return encode_bits(d, scale, rounding=rounding)


def _takes_log2(block_format: BlockFormat, source: ScalarFormat) -> bool:
    """Whether exponents are those of a rounded log2."""
    return block_format.log2 is not Log2.EXACT and source.bits == 16


def _code_of_power(
    exponent: Array, like: Array, scale: ScalarFormat, arithmetic: ScalarFormat
) -> Array:
    """Codes of 2^exponent, `like` being an array of its shape: in E8M0 clamped, in FP32 rounded to `arithmetic`."""
    one = _backend.namespace(like).full_like(like, _float32.ONE)
    if scale != FP32:
        return encode_bits(one, scale, exponent=exponent)
    codes = encode_bits(one, arithmetic, overflow=Overflow.NATIVE, exponent=exponent)
    return decode_bits(codes, arithmetic)


def _power(amax: Array, block_format: BlockFormat, source: ScalarFormat) -> Array:
    """Scale codes by the rules that give powers of two."""
    element, scale = block_format.element, block_format.scale
    offset = np.int32(-(element.emax if block_format.exponent is None else block_format.exponent))
    if scale == FP32 or _takes_log2(block_format, source):
        up = block_format.rule is ScaleRule.CEIL
        found = exponents(amax, up=up, log2=block_format.log2, source=source) + offset
        return _code_of_power(found, amax, scale, block_format.machine(source).arithmetic)
    match block_format.rule:
        case ScaleRule.FLOOR:
            return encode_bits(amax, scale, rounding=Rounding.TOWARD_ZERO, exponent=offset)
        case ScaleRule.CEIL:
            return encode_bits(amax, scale, rounding=Rounding.UP, exponent=offset)
        case ScaleRule.EVEN:
            # Half a unit of the last place that is kept, added to amax, may carry into its exponent.
            half = np.uint32(1 << (22 - _kept(block_format)))
            carry = ((amax + half) >> np.uint32(23)) - (amax >> np.uint32(23))
            offset = carry.astype(np.int32) + offset
            return encode_bits(amax, scale, rounding=Rounding.TOWARD_ZERO, exponent=offset)
        case ScaleRule.RCEIL:
            reciprocal = (np.float32(1) / np.float32(element.max)).view(np.uint32)
            return encode_bits(_float32.multiply(amax, reciprocal), scale, rounding=Rounding.UP)
        case ScaleRule.EXACT_RCEIL:
            return least_power(amax, element.max)
        case ScaleRule.QUOTIENT:
            raise AssertionError("a quotient is rounded to the scale format")


def least_power(amax: Array, largest: float) -> Array:
    """E8M0 codes of the smallest 2^k, from 2^-127 to 2^127, with amax <= largest 2^k: 254 for infinity, 255 for NaN.

    By integers: the difference of their exponents, and 1 if amax has more mantissa. `amax` are float32 bits of
    magnitudes, `largest` is a normal float32 above 1.
    """
    xp = _backend.namespace(amax)
    limit = np.float32(largest).view(np.uint32)
    exponent = (amax >> np.uint32(23)).astype(np.int32) - np.int32((limit >> 23) - 127)
    more = (amax & _MANTISSA) > (limit & _MANTISSA)
    # A subnormal amax is below largest 2^-127, and its exponent field 0 gives code 0.
    codes = xp.clip(exponent + more.astype(np.int32), 0, E8M0.max_code)
    codes = xp.where(amax == _float32.INFINITY, np.int32(E8M0.max_code), codes)
    codes = xp.where(amax > _float32.INFINITY, np.int32(E8M0.nan_code), codes)
    return codes.astype(E8M0.code_dtype)
