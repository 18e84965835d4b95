"""Elementwise primitives on known numbers: integers, comparisons and single roundings by numpy, the rest by JAX."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flamia_ref.leakage.flow.value import (
    Array,
    Bools,
    contiguous,
    integer_info,
    is_float,
    is_integer,
    is_narrow,
)

_Numpy = Callable[..., Array]

_FAR = 1e4  # what exp and its kin give beyond is 0, 1 or infinity everywhere


def evaluate(equation: Any, values: Sequence[Array], dtype: Any) -> tuple[Array, Bools | None]:
    """The result of an elementwise equation on arrays that broadcast, and which of its elements are sure, None for all.

    What numpy rounds once is IEEE 754's result; a compiler that flushes subnormals or fuses gives others. Functions
    like exp are computed otherwise everywhere: sure is only a 0, 1, infinity or NaN of an argument that is one of these
    itself, or is far.
    """
    name, parameters = equation.primitive.name, equation.params
    with np.errstate(all="ignore"):
        if not any(is_narrow(x.dtype) for x in values) and not is_narrow(dtype):
            if name in _TABLE:
                return np.asarray(_TABLE[name](*values)).astype(dtype, copy=False), None
            if name in _WITH_PARAMETERS:
                found = np.asarray(_WITH_PARAMETERS[name](parameters, *values))
                return found.astype(dtype, copy=False), None
        found = by_jax(equation, values, dtype)
        if name in _EXACT or not is_float(found.dtype):
            return found, None
        if name == "integer_pow" and abs(parameters["y"]) <= 2:
            return found, None
        sure = _is_plain(found)
        for x in values:
            sure = sure & (_is_plain(x) | (abs(x) >= _FAR))
        return found, sure


def _is_plain(x: Array) -> Bools:
    """Where a number is 0, 1 or -1, infinite or NaN; integers all are."""
    if not is_float(x.dtype):
        return np.ones((1,) * x.ndim, dtype=np.bool_)
    return np.asarray((x == 0) | (abs(x) == 1) | ~np.isfinite(x))


def by_jax(equation: Any, values: Sequence[Array], dtype: Any) -> Array:
    """By the primitive itself, on each distinct tuple of values once: compiled for few shapes."""
    import jax

    arrays = np.broadcast_arrays(*values)
    words = [
        contiguous(x).view(np.uint8).reshape(x.size, x.dtype.itemsize) for x in map(_flat, arrays)
    ]
    rows = np.concatenate(words, axis=1)
    _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    count = 1 << max(3, int(len(first) - 1).bit_length())
    places = np.resize(first, count)
    with jax.enable_x64(True):
        given = [jax.numpy.asarray(x.reshape(-1)[places]) for x in arrays]
        found = np.asarray(equation.primitive.bind(*given, **equation.params))
    return np.asarray(
        found[: len(first)][inverse.reshape(-1)].reshape(arrays[0].shape).astype(dtype)
    )


def _flat(x: Array) -> Array:
    return contiguous(x).reshape(-1)


def _convert(parameters: Mapping[str, Any], x: Array) -> Array:
    target = np.dtype(parameters["new_dtype"])
    if is_integer(target) and is_float(x.dtype) and x.dtype.kind != "c":
        # XLA: toward zero, NaN to 0, and what is out of range to the nearest end.
        wide = np.trunc(x.astype(np.float64))
        limits = integer_info(target)
        inside = (wide >= limits.min) & (wide < float(limits.max) + 1)
        exact = np.where(inside, wide, 0).astype(target)
        ends = np.where(wide > 0, np.array(limits.max, target), np.array(limits.min, target))
        return np.asarray(
            np.where(inside, exact, np.where(np.isnan(wide), np.zeros((), target), ends))
        )
    return x.astype(target)


def _shift(function: _Numpy) -> Callable[[Array, Array], Array]:
    def shifted(x: Array, places: Array) -> Array:
        width = x.dtype.itemsize * 8
        amount = places.astype(np.uint64)
        inside = amount < width
        unsigned = x.dtype.kind == "u" or function is np.left_shift
        last = np.zeros_like(x) if unsigned else np.where(x < 0, -1, 0).astype(x.dtype)
        return np.asarray(
            np.where(inside, function(x, np.where(inside, amount, 0).astype(x.dtype)), last)
        )

    return shifted


def _logical_shift(x: Array, places: Array) -> Array:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return _shift(np.right_shift)(x.view(unsigned), places.view(unsigned)).view(x.dtype)


def _arithmetic_shift(x: Array, places: Array) -> Array:
    """By the sign bit of unsigned integers too."""
    signed = np.dtype(f"i{x.dtype.itemsize}")
    return _shift(np.right_shift)(x.view(signed), places.view(signed)).view(x.dtype)


def _divide(a: Array, b: Array) -> Array:
    if not is_integer(a.dtype):
        return np.asarray(a / b)
    zero = b == 0
    low = np.array(-1).astype(a.dtype)
    # The least integer over -1 stays itself; numpy would warn.
    wraps = (a == np.iinfo(a.dtype).min) & (b == low) if a.dtype.kind == "i" else np.False_
    safe = np.where(zero | wraps, np.ones((), a.dtype), b)
    quotient = a // safe
    if a.dtype.kind == "i":  # toward zero
        quotient = quotient + ((quotient < 0) & (quotient * safe != a)).astype(a.dtype)
    return np.asarray(np.where(zero, low, quotient))


def _remainder(a: Array, b: Array) -> Array:
    if not is_integer(a.dtype):
        return np.fmod(a, b)
    wraps = b == np.array(-1).astype(a.dtype) if a.dtype.kind == "i" else np.False_
    one = np.ones((), a.dtype)
    return np.asarray(np.where(b == 0, a, np.fmod(a, np.where((b == 0) | wraps, one, b))))


def _round(parameters: Mapping[str, Any], x: Array) -> Array:
    if int(parameters["rounding_method"]) == 1:
        return np.asarray(np.rint(x))
    whole = np.trunc(x)
    away = abs(x - whole) >= 0.5  # exact
    return np.asarray(np.where(away, whole + np.copysign(x.dtype.type(1), x), whole))


def _leading_zeros(x: Array) -> Array:
    width = x.dtype.itemsize * 8
    wide = x.view(np.dtype(f"u{x.dtype.itemsize}")).astype(np.uint64)
    length = np.zeros(x.shape, dtype=np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        more = wide >= (np.uint64(1) << np.uint64(step))
        length += np.where(more, step, 0)
        wide = np.where(more, wide >> np.uint64(step), wide)
    return width - np.where(wide > 0, length + 1, 0)


_TABLE: Mapping[str, _Numpy] = {
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divide,
    "rem": _remainder,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "sqrt": np.sqrt,
    "square": np.square,
    "is_finite": np.isfinite,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shift_left": _shift(np.left_shift),
    "shift_right_logical": _logical_shift,
    "shift_right_arithmetic": _arithmetic_shift,
    "population_count": lambda x: np.bitwise_count(x.view(f"u{x.dtype.itemsize}")),
    "clz": _leading_zeros,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "stop_gradient": lambda x: x,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "real": np.real,
    "imag": np.imag,
    "conj": np.conj,
}

_WITH_PARAMETERS: Mapping[str, Callable[..., Array]] = {
    "convert_element_type": _convert,
    "round": _round,
}

_EXACT = frozenset(["reduce_precision", "nextafter", "complex", "mulhi", "eq_to", "lt_to", "le_to"])

_BY_JAX = frozenset(
    [
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
        "tanh",
        "tan",
        "sin",
        "cos",
        "asin",
        "acos",
        "atan",
        "atan2",
        "sinh",
        "cosh",
        "asinh",
        "acosh",
        "atanh",
        "logistic",
        "pow",
        "rsqrt",
        "cbrt",
        "erf",
        "erfc",
        "erf_inv",
        "lgamma",
        "digamma",
        "polygamma",
        "zeta",
        "igamma",
        "igammac",
        "igamma_grad_a",
        "regularized_incomplete_beta",
        "bessel_i0e",
        "bessel_i1e",
        "random_gamma_grad",
        "integer_pow",
    ]
)

ELEMENTWISE = frozenset(_TABLE) | frozenset(_WITH_PARAMETERS) | _EXACT | _BY_JAX
"""The primitives whose every output element depends on the same element of each input."""
