"""float32 operations on bit patterns, equal to the last bit in numpy and inside any XLA program.

Operands and results are uint32 arrays holding float32 bits. Every operation follows IEEE 754 and
returns 0x7fffffff for every NaN, as NVIDIA GPUs do. Subnormals are kept unless `ftz` is set, which
does what .ftz of the PTX ISA does: subnormal operands and results become zeros of their sign, where
a result counts as subnormal if it is below 2^-126 after rounding to 24 bits with an unbounded
exponent. So 0x3f7fffff times 0x00800000 is 0 with `ftz`, though it rounds to 0x00800000 without.

numpy uses its own float32 operations for rounding to nearest; everything else does one float64
operation and narrows its result to float32, by `flamia_ref._float64`, because XLA on CPU contracts
and flushes whatever it sees as float32. In float64 XLA still takes two liberties, both repaired:
x + 0 with a constant zero becomes x, and a division by a scalar becomes a multiplication by its
rounded reciprocal.

The float64 step is exact or harmless: products of two float32 are exact in float64, and so are sums
where they are subnormal; sums of two rounded to 53 bits and then to at most 24 round as if once
(53 >= 2 * 24 + 2). Where a rounding direction matters or three operands meet, the float64 sum is
rounded to odd first; a quotient always is.

Evidence: IEEE 754-2019 (specified). PTX ISA, add, sub, mul, fma, div, min and max of .f32, in every
rounding, with .ftz and without: measured on an H200 (sm_90), 2^17 operands each, most at the limits,
no bit different.
"""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any, cast, get_args

import numpy as np

from flamia_ref import _backend, _float64
from flamia_ref._backend import Array, Function
from flamia_ref._errors import shown, type_of

NAN = _float64.NAN
INFINITY = _float64.INFINITY
MAX_FINITE = _float64.MAX_FINITE
ONE = np.uint32(0x3F800000)
SIGN = _float64.SIGN
MAGNITUDE = _float64.MAGNITUDE

Direction = _float64.Direction

_BELOW_ALL, _ABOVE_ALL = np.uint32(0), np.uint32(0xFFFFFFFF)  # of the keys of numbers

_widen = _float64.widen
_narrow = _float64.narrow


def is_nan(a: Array) -> Array:
    """Where `a` is a NaN."""
    _check(a)
    return (a & MAGNITUDE) > INFINITY


def is_zero(a: Array) -> Array:
    """Where `a` is +0 or -0."""
    _check(a)
    return (a & MAGNITUDE) == 0


def negate(a: Array) -> Array:
    """-a: the sign bit flipped."""
    _check(a)
    return a ^ SIGN


def canonical(a: Array) -> Array:
    """`a` with every NaN written as 0x7fffffff."""
    return _backend.namespace(a).where(is_nan(a), NAN, a)


def _order(a: Array) -> Array:
    """uint32 keys that sort as the values do, -0 before +0."""
    xp = _backend.namespace(a)
    return xp.where((a & SIGN) != 0, ~a, a | SIGN)


def flush(a: Array) -> Array:
    """`a` with subnormals as zeros of their sign, as the .ftz of PTX does to an operand or result."""
    _check(a)
    return _backend.namespace(a).where((a & MAGNITUDE) < _float64.SMALLEST_NORMAL, a & SIGN, a)


def less(a: Array, b: Array) -> Array:
    """a < b as values: False with a NaN, and -0 is not less than +0."""
    _check(a, b)
    ordered = ~(is_nan(a) | is_nan(b) | (is_zero(a) & is_zero(b)))
    return ordered & (_order(a) < _order(b))


def maximum(a: Array, b: Array, *, ftz: bool = False) -> Array:
    """The larger of a and b; a NaN wins; +0 over -0. Source: max.NaN.f32 of the PTX ISA."""
    _check(a, b)
    if ftz:
        a, b = flush(a), flush(b)
    return _chosen(_order(a) < _order(b), b, a)


def minimum(a: Array, b: Array, *, ftz: bool = False) -> Array:
    """The smaller of a and b; a NaN wins; -0 under +0. Source: min.NaN.f32 of the PTX ISA."""
    _check(a, b)
    if ftz:
        a, b = flush(a), flush(b)
    return _chosen(_order(a) < _order(b), a, b)


def _chosen(first: Array, a: Array, b: Array) -> Array:
    """`a` where `first`, else `b`; NaN where one of them is."""
    xp = _backend.namespace(a, b)
    return xp.where(is_nan(a) | is_nan(b), NAN, xp.where(first, a, b))


def maximum_number(a: Array, b: Array, *others: Array, ftz: bool = False) -> Array:
    """The largest of a, b and `others`; a NaN beside a number is ignored; +0 over -0.

    Source: IEEE 754-2019, section 9.6, maximumNumber; max.f32 of the PTX ISA, with three operands
    too.
    """
    _check(a, b, *others)
    keys = [_number_order(x, _BELOW_ALL, ftz) for x in (a, b, *others)]
    return _from_order(functools.reduce(_backend.namespace(*keys).maximum, keys), _BELOW_ALL)


def minimum_number(a: Array, b: Array, *others: Array, ftz: bool = False) -> Array:
    """The smallest of a, b and `others`; a NaN beside a number is ignored; -0 under +0.

    Source: IEEE 754-2019, section 9.6, minimumNumber; min.f32 of the PTX ISA, with three operands
    too.
    """
    _check(a, b, *others)
    keys = [_number_order(x, _ABOVE_ALL, ftz) for x in (a, b, *others)]
    return _from_order(functools.reduce(_backend.namespace(*keys).minimum, keys), _ABOVE_ALL)


def max_along(a: Array, axis: int) -> Array:
    """The maximum along `axis`, of one element at least, under the rules of `maximum`."""
    _check(a)
    axis = _filled_axis(axis, a)
    largest = _from_order(_order(a).max(axis=axis), _BELOW_ALL)
    return _backend.namespace(a).where(is_nan(a).any(axis=axis), NAN, largest)


def maximum_number_along(a: Array, axis: int) -> Array:
    """The maximum along `axis` under the rules of `maximum_number`: NaN only where all are NaN."""
    _check(a)
    axis = _filled_axis(axis, a)
    return _from_order(_number_order(a, _BELOW_ALL).max(axis=axis), _BELOW_ALL)


def axis_of(axis: object, name: str, axes: int) -> int:
    """`axis` counted from the first. Raises TypeError for no integer, ValueError where `name` has no such axis."""
    try:
        place = operator.index(cast(Any, axis))
    except TypeError:
        raise TypeError(f"axis is {shown(axis)}; it must be an integer") from None
    if not -axes <= place < axes:
        raise ValueError(f"axis is {place}; {name} has {axes} axes")
    return place % axes


def _filled_axis(axis: object, a: Array) -> int:
    place = axis_of(axis, "the operand", a.ndim)
    if a.shape[place] == 0:
        raise ValueError(
            f"the operand has no elements along axis {place}; a maximum takes one at least"
        )
    return place


def _number_order(a: Array, nan: np.uint32, ftz: bool = False) -> Array:
    """The keys of `_order`, and `nan`, which no number has, for every NaN."""
    _check(a)
    a = flush(a) if ftz else a
    return _backend.namespace(a).where(is_nan(a), nan, _order(a))


def _from_order(keys: Array, nan: np.uint32) -> Array:
    xp = _backend.namespace(keys)
    number = xp.where((keys & SIGN) != 0, keys ^ SIGN, ~keys)
    return xp.where(keys == nan, NAN, number)


def _check(*operands: Array) -> None:
    for x in operands:
        _check_type(x, np.uint32, "uint32 bit patterns")
    _check_shapes(*operands)


def _check_shapes(*operands: Array) -> None:
    shapes = [tuple(x.shape) for x in operands]
    if len(set(shapes)) <= 1:
        return
    for sizes in itertools.zip_longest(*(shape[::-1] for shape in shapes), fillvalue=1):
        if len(set(sizes) - {1}) > 1:
            raise ValueError(
                f"operands have shapes {' and '.join(map(str, shapes))}; they must broadcast"
            )


def _rounds(function: Function) -> Function:
    """`_backend.jit` of an operation; its options are checked before JAX asks whether they can be hashed."""
    compiled = _backend.jit(static=("rounding", "ftz"))(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        rounding, ftz = kwargs.get("rounding", "nearest_even"), kwargs.get("ftz", False)
        if not isinstance(rounding, str) or rounding not in get_args(Direction):
            allowed = ", ".join(map(repr, get_args(Direction)))
            raise ValueError(f"rounding {shown(rounding)} is not one of {allowed}")
        if not isinstance(ftz, bool | np.bool_):
            raise TypeError(f"ftz is {shown(ftz)}; it must be True or False")
        return compiled(*args, **kwargs)

    return cast(Function, call)


def _check_type(x: Array, dtype: type, wanted: str) -> None:
    if getattr(x, "dtype", None) != dtype:
        raise TypeError(f"operand holds {type_of(x)}; float32 operations take {wanted}")
    _backend.plain("operand", x)  # refuses what is no plain array


@_rounds
def add(a: Array, b: Array, *, rounding: Direction = "nearest_even", ftz: bool = False) -> Array:
    """a + b in float32, rounded once."""
    _check(a, b)
    if ftz:
        a, b = flush(a), flush(b)
    if rounding == "nearest_even" and not _backend.uses_jax(a, b):
        total = canonical(_backend.bits(_native(a) + _native(b)))
        return flush(total) if ftz else total  # a subnormal sum is exact
    p, c = _widen(a, normal=ftz), _widen(b, normal=ftz)
    wide = p + c if rounding == "nearest_even" else _float64.sum_to_odd(p, c)
    return _with_zero_sign(_narrow(wide, rounding, ftz=ftz), wide, a, b, rounding)


@_rounds
def subtract(
    a: Array, b: Array, *, rounding: Direction = "nearest_even", ftz: bool = False
) -> Array:
    """a - b in float32, rounded once."""
    _check(a, b)
    return add(a, negate(b), rounding=rounding, ftz=ftz)


@_rounds
def multiply(
    a: Array, b: Array, *, rounding: Direction = "nearest_even", ftz: bool = False
) -> Array:
    """a * b in float32, rounded once."""
    _check(a, b)
    if ftz:
        a, b = flush(a), flush(b)
    elif rounding == "nearest_even" and not _backend.uses_jax(a, b):
        return canonical(_backend.bits(_native(a) * _native(b)))
    return _narrow(_widen(a, normal=ftz) * _widen(b, normal=ftz), rounding, ftz=ftz)


@_rounds
def divide(a: Array, b: Array, *, rounding: Direction = "nearest_even", ftz: bool = False) -> Array:
    """a / b in float32, rounded once."""
    _check(a, b)
    if ftz:
        a, b = flush(a), flush(b)
    elif rounding == "nearest_even" and not _backend.uses_jax(a, b):
        return canonical(_backend.bits(_native(a) / _native(b)))
    quotient = _float64.quotient(_widen(a, normal=ftz), _widen(b, normal=ftz))
    return _narrow(quotient, rounding, ftz=ftz)


@_rounds
def fma(
    a: Array, b: Array, c: Array, *, rounding: Direction = "nearest_even", ftz: bool = False
) -> Array:
    """a * b + c in float32, rounded once."""
    _check(a, b, c)
    if ftz:
        a, b, c = flush(a), flush(b), flush(c)
    product = _widen(a, normal=ftz) * _widen(b, normal=ftz)
    wide = _float64.sum_to_odd(product, _widen(c, normal=ftz))
    return _with_zero_sign(_narrow(wide, rounding, ftz=ftz), wide, a ^ b, c, rounding)


def _with_zero_sign(result: Array, wide: Array, p: Array, c: Array, direction: Direction) -> Array:
    """`result` where an exact zero `wide`, the sum of terms with the signs of `p` and `c`, has IEEE's sign.

    Rounding down, -0 unless both are +0; else +0 unless both are -0. XLA gets it wrong by itself:
    it drops the addition of a constant +0.
    """
    sign = ((p | c) if direction == "down" else (p & c)) & SIGN
    return _backend.namespace(result).where(wide == 0.0, sign, result)


@_backend.jit
def shift(a: Array, k: Array) -> Array:
    """a * 2^k for int32 k, rounded once to nearest even; overflow gives infinity."""
    _check(a)
    _check_type(k, np.int32, "int32 exponents")
    _check_shapes(a, k)
    xp = _backend.namespace(a, k)
    # Beyond 400 in either direction every finite float32 has overflowed or rounded to zero.
    power = (xp.clip(k, -400, 400) + 1023).astype(np.uint64) << np.uint64(52)
    return _narrow(_widen(a) * _backend.from_bits(power, np.float64))


@_backend.jit
def ceil(a: Array) -> Array:
    """The smallest integer not below a, as float32; -0.5 gives -0."""
    _check(a)
    wide = _widen(a)
    return _narrow(_backend.namespace(wide).ceil(wide))


@_backend.jit
def floor(a: Array) -> Array:
    """The largest integer not above a, as float32."""
    _check(a)
    wide = _widen(a)
    return _narrow(_backend.namespace(wide).floor(wide))


@_backend.jit
def to_int32(a: Array) -> Array:
    """Integer-valued float32 as int32, clipped to +-2^30; NaN gives 0."""
    _check(a)
    xp = _backend.namespace(a)
    wide = xp.where(is_nan(a), 0.0, _widen(a))
    return xp.clip(wide, -float(1 << 30), float(1 << 30)).astype(np.int32)


@_backend.jit
def from_int32(n: Array) -> Array:
    """float32 bits of int32 values, rounded to nearest even."""
    _check_type(n, np.int32, "int32 integers here")
    return _narrow(n.astype(np.float64))


def _native(a: Array) -> Array:
    return np.asarray(a).view(np.float32)
