"""exp2, log2, reciprocal and tanh as the special function unit of sm_90 computes them.

What ``ex2.approx.ftz.f32``, ``lg2.approx.ftz.f32``, ``rcp.approx.ftz.f32`` and ``tanh.approx.f32``
return on an NVIDIA H200 (sm_90, CUDA 13.0) for each of the 2^32 float32 inputs. Other
architectures, sm_100 included, were not measured.

The unit interpolates by a polynomial of degree 2 in fixed point. The leading bits of an argument
choose a segment with three coefficients; the next 17 (reciprocal: 16) are the place x in it; and

    y = 2^13 c0 + bias + c1 x + c2 s(x)

counts 2^-39, where s(x) is x^2 in units of 2^19 without the partial products below one unit. y is
exact; the result is y cut to 24 bits. The form is that of the unit that Oberman and Siu describe
("A high-performance area-efficient multifunction interpolator", 17th IEEE Symposium on Computer
Arithmetic, 2005); the widths, the cut of s, the coefficients and the biases were found from the
measured results (docs/decisions/022-mufu-tables.md says how) and give all of them.
"""

from __future__ import annotations

import csv
import functools
import hashlib
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array

DIGESTS = {
    "ex2": "96a79910e7e56ac3219a013d2c4cf690a7ecf4ee297b244a791acafe13bac731",
    "rcp": "4a68a5e2289e261d2e9f1b98bf99121990d3130d1ee1e65436543da4ab35e5a2",
    "lg2": "a0e34f9ac360f2cf2ca42d3c429c01a9e1c30d3373cfc2f933196a8e8671d9c8",
    "tanh": "9d9a814cfb88ff0426e2251f024dc653f246d890da0783de97e5c7181ae42b58",
}
"""sha256 of the coefficients as little-endian int32: of 2^x in [0, 1), 64 segments; 1 / x in [1, 2), 128; log2 x in
[1, 2), 64; tanh x in [2^-8, 8), 51."""

_PLACE_BITS = 17
_PLACE = np.uint32((1 << _PLACE_BITS) - 1)
_DROPPED = 19  # partial products of the square below 2^19 are left out
_FRACTION_BITS = 39  # y counts 2^-39
_COEFFICIENT_BITS = 26  # c0 counts 2^-26
_LOG2_KEPT = np.int64(-8)
_EX2_BIAS, _RCP_BIAS, _LG2_BIAS, _TANH_BIAS = 4036, 2023, 1672, 0

_MANTISSA = np.uint32((1 << 23) - 1)
_HIDDEN = np.uint32(1 << 23)
_NEGATIVE_INFINITY = _float32.INFINITY | _float32.SIGN
_128, _MINUS_126 = np.uint32(0x43000000), np.uint32(0xC2FC0000)
_TANH_LOW, _TANH_HIGH = 119, 130  # biased exponents of 2^-8 and 8
# Of the binades between them: the first segment, and the bits of a mantissa that are not used.
_TANH_FIRST = np.array([0, 1, 2, 3, 5, 7, 11, 15, 19, 27, 43], dtype=np.uint32)
_TANH_UNUSED = np.array([6, 6, 6, 5, 5, 4, 4, 4, 3, 2, 3], dtype=np.uint32)


@functools.cache
def coefficients(name: str) -> NDArray[np.int32]:
    """Coefficients [3, segments], rows c0, c1, c2, by a name of `DIGESTS`: read once, not to be written to.

    Raises RuntimeError where the data file is damaged.
    """
    rows = [row for row in csv.DictReader(_data().splitlines()) if row["function"] == name]
    columns = [[int(row[column]) for row in rows] for column in ("c0", "c1", "c2")]
    values = np.array(columns, dtype=np.int32)
    digest = hashlib.sha256(values.astype("<i4").tobytes()).hexdigest()
    if digest != DIGESTS[name]:
        raise RuntimeError(
            f"the coefficients of {name!r} have sha256 {digest[:12]}..., it must be "
            f"{DIGESTS[name][:12]}...: their data file is damaged, install flamia-ref again"
        )
    values.flags.writeable = False
    return values


def _data() -> str:
    return (resources.files("flamia_ref") / "data" / "mufu.csv").read_text("ascii")


@_backend.jit
def truncated_square(x: Array) -> Array:
    """x^2 in units of 2^19 without its partial products below 2^19: uint32 in (17 bits) and out.

    x^2 is the sum over bits i of 2^(2i), and over pairs i > j of 2^(i + j + 1).
    """
    total = None
    for i in range(10, _PLACE_BITS):  # below bit 10 every partial product is left out
        lowest = _DROPPED - 1 - i
        pairs = (x & np.uint32((1 << i) - (1 << lowest))) >> np.uint32(lowest)
        row = pairs + np.uint32(1 << (2 * i - _DROPPED))
        row = row * ((x >> np.uint32(i)) & np.uint32(1))
        total = row if total is None else total + row
    return total


def _interpolated(name: str, segment: Array, place: Array, square: Array, bias: int) -> Array:
    """y in units of 2^-39, int64, by the coefficients of that name."""
    segment = segment.astype(np.int32)
    c0, c1, c2 = (_backend.gather(row, segment).astype(np.int64) for row in coefficients(name))
    line = (c0 << (_FRACTION_BITS - _COEFFICIENT_BITS)) + bias + c1 * place.astype(np.int64)
    return line + c2 * square.astype(np.int64)


def _cut(y: Array) -> Array:
    """float32 bits of y 2^-39 rounded toward zero, for int64 y in [1, 2^53)."""
    # A float64 holds y; its exponent is biased by 1023, that of a float32 by 127.
    wide = _backend.bits(y.astype(np.float64)) >> np.uint64(29)
    return (wide - np.uint64((1023 - 127 + _FRACTION_BITS) << 23)).astype(np.uint32)


def _flushed(x: Array) -> Array:
    """`x` with subnormals made zeros of their sign."""
    xp = _backend.namespace(x)
    return xp.where((x & _float32.INFINITY) == 0, x & _float32.SIGN, x)


@_backend.jit
def exp2_bits(x: Array) -> Array:
    """2^x of float32 bits: uint32 bits in and out.

    Subnormal inputs count as zeros; below -126 the result is +0, from 128 on infinity.
    """
    xp = _backend.namespace(x)
    magnitude = x & _float32.MAGNITUDE
    negative = (x & _float32.SIGN) != 0
    exponent = (magnitude >> np.uint32(23)).astype(np.int32)
    significand = (magnitude & _MANTISSA) | _HIDDEN
    # |x| in units of 2^-23, cut. Beyond 2^7 what is computed is not used.
    left = xp.clip(exponent - 127, 0, 7).astype(np.uint32)
    right = xp.clip(127 - exponent, 0, 31).astype(np.uint32)
    cut = (significand << left) >> right
    # A negative position is the one's complement, except where the cut argument is an integer.
    below = xp.where((cut & _MANTISSA) == 0, ~cut + np.uint32(1), ~cut)
    position = xp.where(negative, below, cut)
    place = position & _PLACE
    segment = (position & _MANTISSA) >> np.uint32(_PLACE_BITS)
    y = _interpolated("ex2", segment, place, truncated_square(place), _EX2_BIAS)
    result = _cut(y) + (position & ~_MANTISSA)
    result = xp.where(~negative & (magnitude >= _128), _float32.INFINITY, result)
    result = xp.where(negative & (x > _MINUS_126), np.uint32(0), result)
    return xp.where(_float32.is_nan(x), _float32.NAN, result)


@_backend.jit
def reciprocal_bits(x: Array) -> Array:
    """1/x of float32 bits: uint32 bits in and out.

    Subnormal inputs count as zeros and give infinity; subnormal results are flushed to zero.
    """
    xp = _backend.namespace(x)
    x = _flushed(x)
    sign = x & _float32.SIGN
    magnitude = x & _float32.MAGNITUDE
    mantissa = x & _MANTISSA
    # The square is that of a place of 17 bits whose last bit is 0.
    place = mantissa & (_PLACE >> np.uint32(1))
    square = truncated_square(place << np.uint32(1))
    segment = mantissa >> np.uint32(_PLACE_BITS - 1)
    y = _interpolated("rcp", segment, place, square, _RCP_BIAS)
    # The exponent of the result is two too large, so that it stays positive.
    result = _cut(y) + np.uint32(129 << 23) - (magnitude & _float32.INFINITY)
    normal = result >= np.uint32(3 << 23)
    result = xp.where(normal, result - np.uint32(2 << 23), np.uint32(0))
    result = xp.where(magnitude == 0, _float32.INFINITY, result)
    result = xp.where(magnitude == _float32.INFINITY, np.uint32(0), result)
    return xp.where(_float32.is_nan(x), _float32.NAN, result | sign)


@_backend.jit
def log2_bits(x: Array) -> Array:
    """log2 x of float32 bits: uint32 bits in and out.

    Subnormal inputs count as zeros and give -infinity, negative ones NaN.
    """
    xp = _backend.namespace(x)
    x = _flushed(x)
    mantissa = x & _MANTISSA
    place = mantissa & _PLACE
    segment = mantissa >> np.uint32(_PLACE_BITS)
    y = _interpolated("lg2", segment, place, truncated_square(place), _LG2_BIAS)
    # The bias is 2 more where c1 / 2 is odd.
    y = y + (_backend.gather(coefficients("lg2")[1], segment.astype(np.int32)) & 2).astype(np.int64)
    exponent = ((x & _float32.INFINITY) >> np.uint32(23)).astype(np.int64) - 127
    total = y + (exponent << _FRACTION_BITS)
    # The magnitude of a negative sum is its one's complement, on multiples of 2^-36.
    result = _cut(xp.where(total < 0, ~total, total) & _LOG2_KEPT)
    result = xp.where(total < 0, result | _float32.SIGN, result)
    result = xp.where(x == _float32.ONE, np.uint32(0), result)
    result = xp.where((x & _float32.SIGN) != 0, _float32.NAN, result)
    result = xp.where(_float32.is_zero(x), _NEGATIVE_INFINITY, result)
    result = xp.where(x == _float32.INFINITY, _float32.INFINITY, result)
    return xp.where(_float32.is_nan(x), _float32.NAN, result)


@_backend.jit
def tanh_bits(x: Array) -> Array:
    """tanh x of float32 bits: uint32 bits in and out.

    Below 2^-8 the result is x, subnormals included; from 8 on it is 1 with the sign of x.
    """
    xp = _backend.namespace(x)
    magnitude = x & _float32.MAGNITUDE
    binade = (magnitude >> np.uint32(23)).astype(np.int32)
    among = xp.clip(binade, _TANH_LOW, _TANH_HIGH - 1) - _TANH_LOW
    used = (magnitude & _MANTISSA) >> _backend.gather(_TANH_UNUSED, among)
    place = used & _PLACE
    segment = _backend.gather(_TANH_FIRST, among) + (used >> np.uint32(_PLACE_BITS))
    y = _interpolated("tanh", segment, place, truncated_square(place), _TANH_BIAS)
    result = xp.where(binade < _TANH_LOW, magnitude, _cut(y))
    result = xp.where(binade >= _TANH_HIGH, _float32.ONE, result) | (x & _float32.SIGN)
    return xp.where(_float32.is_nan(x), _float32.NAN, result)
