"""From values to codes and back: `encode` and `decode`."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import type_of
from flamia_ref.formats.bits import decode_bits, encode_bits
from flamia_ref.formats.rounding import RANDOM, Overflow, Rounding, overflow_of, rounding_of
from flamia_ref.formats.scalar import FP16, ScalarFormat, scalar_format

_FLOATS = tuple(map(np.dtype, (np.float64, np.float32, ml_dtypes.bfloat16, np.float16)))
_CHUNK = 1 << 18  # elements of a numpy array that are worked on at once, to keep copies small


def encode(
    x: Array,
    format: ScalarFormat | str,
    *,
    rounding: Rounding | str = Rounding.NEAREST_EVEN,
    overflow: Overflow | str = Overflow.SATURATE,
    random_bits: Array | None = None,
) -> Array:
    """The codes of values, each rounded once.

    Args:
        x: float64, float32, bfloat16 or float16 values of any shape, numpy or JAX.
        format: a `ScalarFormat` or its name in `FORMATS`.
        rounding: as in `Rounding`; the default takes the nearest, ties to the even code.
        overflow: as in `Overflow`; the default saturates, infinities too.
        random_bits: for stochastic rounding only: uint8, uint16 or uint32, of the shape of x.

    Returns:
        Codes of `format.code_dtype`, one for each element, in the shape and the library of x. A
        NaN becomes `format.nan_code`: 0x7f in E4M3, the largest value in a format without NaN. An
        unsigned format takes the magnitude. E8M0 has no zero: a zero becomes its smallest power,
        code 0. The derivative under JAX is zero, as that of `jax.numpy.round`, so that
        x + stop_gradient(decode(encode(x, f), f) - x) is the straight-through estimator.

    Raises:
        TypeError: for values of another type, or random bits that are none of the three.
        ValueError: for an unknown name, random bits of another shape, without stochastic rounding
            or missing with it.

    Source: CUDA 13.0 cuda_fp8.h, cuda_fp6.h and cuda_fp4.h, measured on an H200 for every float32;
        IEEE 754-2019 for the wider formats.
    """
    target = scalar_format(format)
    how, beyond = rounding_of(rounding), overflow_of(overflow)
    values = as_floats(x, "encode")
    drawn = _random(random_bits, how, values.shape)

    def codes(part: Array, drawn: Array | None = None) -> Array:
        return _encode(part, target, rounding=how, overflow=beyond, random_bits=drawn)

    return by_chunks(codes, values) if drawn is None else by_chunks(codes, values, drawn)


@_backend.jit(static=("target", "rounding", "overflow"))
def _encode(
    values: Array,
    target: ScalarFormat,
    *,
    rounding: Rounding,
    overflow: Overflow,
    random_bits: Array | None,
) -> Array:
    return encode_bits(
        source_bits(values), target, rounding=rounding, overflow=overflow, random_bits=random_bits
    )


def by_chunks(function: Callable[..., Array], *arrays: Array) -> Array:
    """An elementwise function of arrays of one shape; of numpy arrays a part at a time, so that
    its temporaries stay small.
    """
    if _backend.uses_jax(*arrays):
        return function(*arrays)
    flat = [array.reshape(-1) for array in arrays]
    starts = range(0, max(flat[0].size, 1), _CHUNK)
    parts = [function(*(array[start : start + _CHUNK] for array in flat)) for start in starts]
    return np.concatenate(parts).reshape(arrays[0].shape)


def source_bits(values: Array) -> Array:
    """Floats as float32 bits, exact; float64 as float64 bits."""
    pattern = _backend.bits(values)
    if values.dtype == np.dtype(np.float16):
        return decode_bits(pattern, FP16)
    if values.dtype == np.dtype(ml_dtypes.bfloat16):
        return pattern.astype(np.uint32) << np.uint32(16)
    return pattern


def as_floats(x: Any, caller: str) -> Array:
    """x as a float array in the byte order of the machine.

    Raises TypeError for other types.
    """
    try:
        values = _backend.plain("x", x)
    except ValueError:  # of numpy, for nested lists
        raise ValueError(
            f"{caller} takes an array; x has rows of different lengths: fill them up with zeros"
        ) from None
    if not _backend.is_jax(values) and not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if values.dtype not in _FLOATS:
        raise TypeError(
            f"{caller} takes float64, float32, bfloat16 or float16 values, not {values.dtype};"
            " convert them to one of these first"
        )
    return values


def as_matrices(x: Any, caller: str) -> Array:
    """`as_floats` of two axes and more. Raises ValueError for fewer."""
    values = as_floats(x, caller)
    if values.ndim < 2:
        raise ValueError(
            f"{caller} takes [..., rows, columns], not shape {values.shape}; give it two axes or"
            " more: x.reshape(1, -1) is one row"
        )
    return values


def _random(given: Any, rounding: Rounding, shape: tuple[int, ...]) -> Array | None:
    if rounding not in RANDOM:
        if given is not None:
            raise ValueError(f"random_bits are for rounding 'stochastic', not {rounding.value!r}")
        return None
    if given is None:
        raise ValueError(f"rounding {rounding.value!r} needs random_bits: uint8, uint16 or uint32")
    return as_random(given, shape)


def as_random(given: Any, shape: tuple[int, ...]) -> Array:
    """Random bits as an array of that shape. Raises TypeError for other types, ValueError for another shape."""
    drawn = _backend.plain("random_bits", given)
    if drawn.dtype not in (np.uint8, np.uint16, np.uint32):
        raise TypeError(f"random_bits are uint8, uint16 or uint32, not {type_of(drawn)}")
    if drawn.shape != shape:
        raise ValueError(f"random_bits have shape {drawn.shape}; give them that of x, {shape}")
    return drawn


def decode(
    codes: Array,
    format: ScalarFormat | str,
    dtype: Any = np.float32,
) -> Array:
    """The values of codes, exact.

    Args:
        codes: integers of any shape, numpy or JAX, one code each. Bit 7 of UE4M3 and the low 13
            bits of TF32 are ignored. Under `jax.jit` codes are not checked.
        format: a `ScalarFormat` or its name in `FORMATS`.
        dtype: float32, or float64, which is always numpy.

    Returns:
        Values in the shape and the library of `codes`. In float32 every NaN is the bit pattern
        0x7fffffff; in float64 a NaN is whatever numpy widens that to.

    Raises:
        TypeError: for codes that are not integers, another dtype, or float64 of a traced array.
        ValueError: for an unknown name, or a code outside the format.
    """
    source = scalar_format(format)
    wanted = np.dtype(dtype)
    if wanted not in _FLOATS[:2]:
        raise TypeError(f"decode gives float32 or float64, not {wanted}")
    checked = as_codes(codes, source)
    if wanted == np.float64 and _backend.is_traced(checked):
        raise TypeError("float64 values are numpy, and a traced array has none; ask for float32")
    values = by_chunks(lambda part: _decode(part, source), checked)
    return values if wanted == np.float32 else _backend.host(values).astype(np.float64)


@_backend.jit(static=("source",))
def _decode(codes: Array, source: ScalarFormat) -> Array:
    return _backend.from_bits(decode_bits(codes, source), np.float32)


def as_codes(codes: Any, source: ScalarFormat, name: str = "codes") -> Array:
    """Codes as unsigned integers, checked against the format unless they are traced.

    Raises TypeError for other types and ValueError for a code outside the format. `name` is what
    the caller calls them.
    """
    try:
        given = _backend.plain(name, codes)
    except ValueError:  # of numpy, for nested lists
        raise ValueError(
            f"{name} have rows of different lengths; fill them up with zeros"
        ) from None
    if not given.size and not hasattr(codes, "dtype"):  # an empty list is of no type
        given = given.astype(source.code_dtype)
    if given.dtype.kind not in "ui":
        raise TypeError(f"{name} are integers, not {given.dtype}; encode gives them")
    limit = (1 << (8 * source.code_dtype.itemsize)) - 1
    if source.bits < 8 and source.signed:
        limit = source.code_mask
    held = np.iinfo(given.dtype)
    if not _backend.is_traced(given) and (held.min < 0 or held.max > limit) and given.size:
        host = _backend.host(given)
        if int(host.min()) < 0 or int(host.max()) > limit:
            wrong = int(host[(host < 0) | (host > limit)].ravel()[0])
            raise ValueError(f"{source.name} has no code {wrong}; codes are 0 to {limit}")
    return given if given.dtype == source.code_dtype else given.astype(source.code_dtype)
