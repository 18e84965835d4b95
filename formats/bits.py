"""Between float bits and codes: `encode_bits` and `decode_bits`.

Everything works on integers, so that numpy, JAX and any program around them give the same bits. A
NaN encodes to one code whatever its sign and payload, and decodes to 0x7fffffff, as in CUDA.
"""

from typing import Any

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref._errors import type_of
from flamia_ref.formats.rounding import Overflow, Rounding, overflow_of, rounding_of
from flamia_ref.formats.scalar import ScalarFormat, Specials

_FARTHEST = 4096  # an exponent offset beyond it changes nothing more


def check_type(name: str, x: Array, *allowed: Any) -> None:
    """Raise TypeError unless `x` is an array of one of the types `allowed`."""
    if getattr(x, "dtype", None) not in allowed:
        types = " or ".join(np.dtype(dtype).name for dtype in allowed)
        raise TypeError(f"{name} must be an array of {types}, not {type_of(x)}")
    _backend.plain(name, x)  # refuses what is no plain array


@_backend.jit(static=("target", "rounding", "overflow"))
def encode_bits(
    bits: Array,
    target: ScalarFormat,
    *,
    rounding: Rounding | str = Rounding.NEAREST_EVEN,
    overflow: Overflow | str = Overflow.SATURATE,
    exponent: Array | None = None,
    random_bits: Array | None = None,
) -> Array:
    """The codes in `target` of x * 2^exponent, rounded once.

    Args:
        bits: x as float32 bits (uint32) or float64 bits (uint64).
        target: the format.
        rounding: as in `Rounding`.
        overflow: as in `Overflow`.
        exponent: int32, broadcast against `bits`; None is 0.
        random_bits: uint8, uint16 or uint32 of the shape of `bits`, for stochastic rounding.

    Returns:
        Codes of `target.code_dtype`, of the shape of `bits`.

    Raises TypeError for bits, exponents or random bits of another type, ValueError for an unknown
    name.
    """
    check_type("bits", bits, np.uint32, np.uint64)
    if exponent is not None:
        check_type("exponent", exponent, np.int32)
    if random_bits is not None:
        check_type("random_bits", random_bits, np.uint8, np.uint16, np.uint32)
    rounding, overflow = rounding_of(rounding), overflow_of(overflow)
    if rounding is Rounding.STOCHASTIC_SUM:
        bits, rounding = _with_random_sum(bits, target, random_bits, exponent), Rounding.TOWARD_ZERO
        random_bits = None
    xp = _backend.namespace(bits, exponent)
    wide = bits.dtype == np.uint64
    word: Any = np.uint64 if wide else np.uint32
    source_mantissa, source_bias = (52, 1023) if wide else (23, 127)
    infinity = word((2 * source_bias + 1) << source_mantissa)
    hidden = word(1 << source_mantissa)
    magnitude = bits & word((1 << (64 if wide else 32) - 1) - 1)
    negative = (magnitude != bits) if target.signed else None

    field = (magnitude >> word(source_mantissa)).astype(np.int32)
    fraction = magnitude & (hidden - word(1))
    if exponent is None and target.has_zero:
        # A subnormal of the source is a subnormal of the target: no need to normalise it.
        significand = xp.where(field == 0, fraction, fraction | hidden)
        field = xp.maximum(field, np.int32(1))
    else:
        # A subnormal's mantissa, as a float of its own, is normalised and never subnormal.
        signed, float_type = (np.int64, np.float64) if wide else (np.int32, np.float32)
        whole = _backend.bits(fraction.astype(signed).astype(float_type))
        whole_field = (whole >> word(source_mantissa)).astype(np.int32)
        normalised = whole_field - np.int32(source_bias + source_mantissa - 1)
        significand = xp.where(field == 0, whole & (hidden - word(1)), fraction) | hidden
        significand = xp.where(magnitude == 0, word(0), significand)
        field = xp.where(field == 0, normalised, field)
    target_field = field + np.int32(target.bias - source_bias)
    if exponent is not None:
        target_field = target_field + xp.clip(exponent, -_FARTHEST, _FARTHEST)
    if exponent is not None or not target.has_zero:
        # After the exponent: 0 is 0 whatever it is multiplied by, also for who only reads the program.
        target_field = xp.where(magnitude == 0, np.int32(-_FARTHEST), target_field)
    target_field = xp.where(magnitude >= infinity, np.int32(2 * _FARTHEST), target_field)

    code = _round(
        significand, target_field, source_mantissa, target, rounding, negative, random_bits
    )
    largest = word(target.max_code >> target.padding_bits)
    beyond = code > largest
    code = xp.minimum(code, largest)
    if overflow is Overflow.NATIVE and target.has_nan:
        inward = _rounds_inward(rounding, negative)
        if inward is not None:
            beyond = beyond & (~inward | (magnitude == infinity))
        outside = target.nan_code if target.infinity_code is None else target.infinity_code
        code = xp.where(beyond, word(outside >> target.padding_bits), code)
    if negative is not None:
        code = code | (negative.astype(word) << word(target.bits - 1))
    code = xp.where(magnitude > infinity, word(target.nan_code >> target.padding_bits), code)
    if target.padding_bits:
        code = code << word(target.padding_bits)
    return code.astype(target.code_dtype)


def _round(
    significand: Array,
    field: Array,
    source_mantissa: int,
    target: ScalarFormat,
    rounding: Rounding,
    negative: Array | None,
    random_bits: Array | None,
) -> Array:
    """The magnitude code of significand * 2^(field - bias - source_mantissa), without upper limit.

    `field` is the exponent field that the value would have in the target, if it were normal there.
    """
    xp = _backend.namespace(significand, field)
    word: Any = significand.dtype.type
    shortest = source_mantissa - target.mantissa_bits
    random_width = 0 if random_bits is None else 8 * random_bits.dtype.itemsize
    # Beyond this many bits everything is dropped, and lies below the midpoint or any random bits.
    longest = source_mantissa + 2 + random_width
    field = xp.minimum(field, np.int32(1 << target.exponent_bits))
    if target.has_zero:
        subnormal = xp.clip(np.int32(1) - field, np.int32(0), np.int32(longest - shortest))
        dropped = (subnormal + np.int32(shortest)).astype(word)
        base = xp.maximum(field - np.int32(1), np.int32(0)).astype(word)
        base = base << word(target.mantissa_bits)
    else:
        # No hidden bit to carry into the exponent, and nothing below the smallest power.
        below = field < 0
        significand = significand & word((1 << source_mantissa) - 1)
        significand = xp.where(below, word(0), significand)
        dropped = xp.full_like(significand, word(source_mantissa))
        base = xp.maximum(field, np.int32(0)).astype(word)
    shift = (
        xp.minimum(dropped, word(8 * significand.dtype.itemsize - 1)) if random_width else dropped
    )
    unit = word(1) << shift
    code = base + (significand >> shift)
    rest = significand & (unit - word(1))
    match rounding:
        case Rounding.NEAREST_EVEN:
            twice = rest + rest + (code & word(1))
            return code + (twice > unit).astype(word)
        case Rounding.NEAREST_AWAY:
            return code + (rest + rest >= unit).astype(word)
        case Rounding.NEAREST_ZERO:
            return code + (rest + rest > unit).astype(word)
        case Rounding.TOWARD_ZERO:
            return code
        case Rounding.UP | Rounding.DOWN:
            inward = _rounds_inward(rounding, negative)
            away = (rest != 0) if inward is None else (rest != 0) & ~inward
            return code + away.astype(word)
        case Rounding.STOCHASTIC:
            if random_bits is None:
                raise ValueError("rounding 'stochastic' needs random_bits")
            top = _top_bits(rest, dropped, random_width)
            limit = word((1 << random_width) - 1) - random_bits.astype(word)
            return code + (top > limit).astype(word)


def _with_random_sum(
    bits: Array, target: ScalarFormat, random_bits: Array | None, exponent: Array | None
) -> Array:
    """float32 bits of x with a random part of the step to its neighbour added to its magnitude."""
    if random_bits is None:
        raise ValueError("rounding 'stochastic_sum' needs random_bits")
    if bits.dtype != np.uint32 or exponent is not None or not target.has_zero:
        raise ValueError(
            "rounding 'stochastic_sum' is of float32 values to a format with a zero; use 'stochastic'"
        )
    xp = _backend.namespace(bits, random_bits)
    magnitude = bits & _float32.MAGNITUDE
    field = xp.maximum(magnitude >> np.uint32(23), np.uint32(target.emin + 127))
    step = (field - np.uint32(target.mantissa_bits)) << np.uint32(23)
    if random_bits.dtype == np.uint32:
        raise ValueError("rounding 'stochastic_sum' takes random_bits of uint8 or uint16")
    drawn = _float32.from_int32(random_bits.astype(np.int32))
    part = _float32.shift(drawn, np.asarray(np.int32(-8 * random_bits.dtype.itemsize)))
    total = _float32.fma(part, step, magnitude)
    return xp.where(magnitude < _float32.INFINITY, total | (bits & _float32.SIGN), bits)


def _top_bits(rest: Array, dropped: Array, count: int) -> Array:
    """floor(rest / 2^dropped * 2^count)."""
    xp = _backend.namespace(rest)
    word: Any = rest.dtype.type
    last = word(8 * rest.dtype.itemsize - 1)
    shrunk = rest >> xp.minimum(dropped - xp.minimum(dropped, word(count)), last)
    return shrunk << xp.minimum(word(count) - xp.minimum(dropped, word(count)), last)


def _rounds_inward(rounding: Rounding, negative: Array | None) -> Array | None:
    """Where the rounding never increases a magnitude; None for nowhere."""
    match rounding:
        case Rounding.TOWARD_ZERO:
            return np.bool_(True)
        case Rounding.UP:
            return negative
        case Rounding.DOWN:
            return np.bool_(True) if negative is None else ~negative
        case _:
            return None


@_backend.jit(static=("source",))
def decode_bits(codes: Array, source: ScalarFormat) -> Array:
    """The float32 bits of codes in `source`, exact. Bits of a code that do not count are ignored.

    `codes` are of `source.code_dtype`; the result has their shape.

    Raises TypeError for codes of another type.
    """
    check_type("codes", codes, source.code_dtype)
    xp = _backend.namespace(codes)
    code = codes.astype(np.uint32) >> np.uint32(source.padding_bits)
    ones = (1 << (source.exponent_bits + source.mantissa_bits)) - 1
    magnitude = code & np.uint32(ones)
    mantissa_shift = np.uint32(23 - source.mantissa_bits)
    if source.specials is Specials.POWER:
        rebias = np.uint32((127 - source.bias) << 23 & 0xFFFFFFFF)
        power = (magnitude << np.uint32(23)) + rebias
        if source.bias == 127:
            power = xp.where(magnitude == 0, np.uint32(0x00400000), power)
        return xp.where(magnitude == ones, _float32.NAN, power)
    result = magnitude << mantissa_shift
    if source.exponent_bits < 8 or source.bias != 127:
        normal = result + np.uint32((127 - source.bias) << 23 & 0xFFFFFFFF)
        # A subnormal is its mantissa, as an integer, times a power of two.
        whole = _backend.bits(magnitude.astype(np.float32))
        offset = (source.emin - source.mantissa_bits) << 23
        subnormal = xp.where(magnitude == 0, np.uint32(0), whole + np.uint32(offset & 0xFFFFFFFF))
        result = xp.where(magnitude < np.uint32(1 << source.mantissa_bits), subnormal, normal)
        if source.infinity_code is not None:
            infinite = magnitude == np.uint32(source.infinity_code >> source.padding_bits)
            result = xp.where(infinite, _float32.INFINITY, result)
    if source.signed:
        sign = code >> np.uint32(source.bits - 1) << np.uint32(31)
        result = result | sign
    if source.has_nan:
        first = np.uint32(source.nan_codes.start >> source.padding_bits)
        result = xp.where(magnitude >= first, _float32.NAN, result)
    return result
