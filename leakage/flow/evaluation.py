"""Elementwise primitives on known numbers: integers, comparisons and single roundings by numpy, the rest by JAX."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.flow.value import Array

_Numpy = Callable[..., Array]


def evaluate(
    equation: Any, values: Sequence[Array], dtype: Any
) -> tuple[Array, NDArray[np.bool_] | None]:
    """The result of an elementwise equation on arrays that broadcast, and which of its elements are sure, None for all.

    What numpy rounds once is IEEE 754's result; a compiler that flushes subnormals or fuses gives others. Of functions
    like exp, which are computed otherwise everywhere, only 0, 1, infinity and NaN are sure.
    """
    name = equation.primitive.name
    with np.errstate(all="ignore"):
        if name in _TABLE:
            return np.asarray(_TABLE[name](*values)).astype(dtype, copy=False), None
        if name in _WITH_PARAMETERS:
            found = np.asarray(_WITH_PARAMETERS[name](equation.params, *values))
            return found.astype(dtype, copy=False), None
        found = _by_jax(equation, values, dtype)
        return found, (found == 0) | (abs(found) == 1) | ~np.isfinite(found)


def _by_jax(equation: Any, values: Sequence[Array], dtype: Any) -> Array:
    """By the primitive itself, on each distinct tuple of values once: compiled for few shapes."""
    import jax

    arrays = np.broadcast_arrays(*values)
    words = np.stack(
        [np.ascontiguousarray(x).view(f"V{x.dtype.itemsize}").reshape(-1) for x in arrays]
        if len({x.dtype for x in arrays}) == 1
        else [np.unique(x.reshape(-1), return_inverse=True)[1].reshape(-1) for x in arrays],
        axis=-1,
    )
    keys = np.ascontiguousarray(words).reshape(len(words), -1)
    keys = keys.view(f"V{keys.dtype.itemsize * keys.shape[1]}").reshape(-1)
    _, first, inverse = np.unique(
        np.array([bytes(key) for key in keys.tolist()]), return_index=True, return_inverse=True
    )
    count = 1 << max(3, int(len(first) - 1).bit_length())
    places = np.resize(first, count)
    with jax.enable_x64(True):
        given = [jax.numpy.asarray(x.reshape(-1)[places]) for x in arrays]
        found = np.asarray(equation.primitive.bind(*given, **equation.params))
    return cast(
        Array, found[: len(first)][inverse.reshape(-1)].reshape(arrays[0].shape).astype(dtype)
    )


def _convert(parameters: Mapping[str, Any], x: Array) -> Array:
    target = np.dtype(parameters["new_dtype"])
    if target.kind in "iu" and x.dtype.kind not in "iub":
        # XLA: toward zero, NaN to 0, and what is out of range to the nearest end.
        wide = np.trunc(x.astype(np.float64))
        limits = np.iinfo(target)
        inside = (wide >= limits.min) & (wide <= limits.max)
        exact = np.where(inside, wide, 0).astype(target)
        ends = np.where(wide > 0, limits.max, limits.min).astype(target)
        return cast(Array, np.where(inside, exact, np.where(np.isnan(wide), 0, ends)))
    return x.astype(target)


def _shift(function: _Numpy) -> Callable[[Array, Array], Array]:
    def shifted(x: Array, places: Array) -> Array:
        width = x.dtype.itemsize * 8
        amount = places.astype(np.uint64)
        inside = amount < width
        unsigned = x.dtype.kind == "u" or function is np.left_shift
        last = np.zeros_like(x) if unsigned else np.where(x < 0, -1, 0).astype(x.dtype)
        return cast(
            Array, np.where(inside, function(x, np.where(inside, amount, 0).astype(x.dtype)), last)
        )

    return shifted


def _logical_shift(x: Array, places: Array) -> Array:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return _shift(np.right_shift)(x.view(unsigned), places.view(unsigned)).view(x.dtype)


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return cast(Array, a / b)
    safe = np.where(b == 0, 1, b)
    quotient = a // safe
    if a.dtype.kind == "i":  # toward zero
        quotient = quotient + ((quotient < 0) & (quotient * safe != a))
    return cast(Array, np.where(b == 0, np.array(-1).astype(a.dtype), quotient))


def _remainder(a: Array, b: Array) -> Array:
    if a.dtype.kind not in "iu":
        return np.fmod(a, b)
    return cast(Array, np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b))))


def _negative(x: Array) -> Array:
    return cast(Array, np.negative(x) if x.dtype.kind != "b" else x)


def _sign(x: Array) -> Array:
    return cast(Array, np.sign(x))


def _clamp(low: Array, x: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


def _round(parameters: Mapping[str, Any], x: Array) -> Array:
    if int(parameters["rounding_method"]) == 1:
        return cast(Array, np.rint(x))
    return cast(Array, np.trunc(x + np.copysign(x.dtype.type(0.5), x)))


def _integer_power(parameters: Mapping[str, Any], x: Array) -> Array:
    return cast(Array, x ** x.dtype.type(parameters["y"]))


def _population(x: Array) -> Array:
    return np.bitwise_count(x)


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
    "neg": _negative,
    "abs": np.abs,
    "sign": _sign,
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
    "shift_right_arithmetic": _shift(np.right_shift),
    "population_count": _population,
    "clz": _leading_zeros,
    "clamp": _clamp,
    "nextafter": np.nextafter,
    "stop_gradient": lambda x: x,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "real": np.real,
}

_WITH_PARAMETERS: Mapping[str, Callable[..., Array]] = {
    "convert_element_type": _convert,
    "round": _round,
    "integer_pow": _integer_power,
}

BY_JAX = frozenset(
    "exp exp2 expm1 log log1p log2 tanh tan sin cos asin acos atan atan2 sinh cosh asinh acosh atanh logistic pow rsqrt"
    " cbrt erf erfc erf_inv lgamma digamma igamma igammac regularized_incomplete_beta bessel_i0e bessel_i1e"
    " reduce_precision imag conj complex nextafter random_gamma_grad".split()
)

ELEMENTWISE = frozenset(_TABLE) | frozenset(_WITH_PARAMETERS) | BY_JAX
"""The primitives whose every output element depends on the same element of each input."""
