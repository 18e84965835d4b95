"""exp2, log2 and reciprocal as the special function unit of sm_90 computes them.

What ``ex2.approx.ftz.f32``, ``lg2.approx.ftz.f32`` and ``rcp.approx.ftz.f32`` returned on an NVIDIA
H200 (sm_90, CUDA 13.0) for each of the 2^32 float32 inputs, as four tables of 2^23 results and a
rule around each. Other architectures, sm_100 included, were not measured.

A table is stored as its difference from a correctly rounded one and rebuilt on first use; its
sha256 is checked, so a result never depends on the machine it was rebuilt on. The tables are
arguments of the functions here: 32 MB each, they must not become constants of a compiled program.
"""

from __future__ import annotations

import functools
import hashlib
import io
import lzma
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Context, Decimal
from importlib import resources
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref._errors import unknown_name
from flamia_ref.arithmetic import correct

ENTRIES = 1 << 23
"""Entries of a table: one for each mantissa."""

DIGESTS = {
    "ex2": "b2a42c4a626469c986e33e43f16f41bde9d84de94347cd9ceaa1bd68d36bcdf0",
    "rcp": "c408381446132e07fa5581e930dc33fb790bea7ec4276ef3621e322df2492a55",
    "lg2_above": "7fd9be9a924e40a0ee18ba20e7f5158135112947597c8dd86131d3d4d8f9dbfa",
    "lg2_below": "883e42d8f751983063b4c93a966fba006f08c1e111d90fe20e0fee3dd67ddd22",
}
"""sha256 of each table as little-endian uint32."""

_WITH_EXCEPTIONS = ("lg2_above", "lg2_below")
_EXCEPTION = -128  # a difference that does not fit: the result itself is in the exceptions file
_MANTISSA = np.uint32(ENTRIES - 1)
_HIDDEN = np.uint32(ENTRIES)
_NEGATIVE_INFINITY = _float32.INFINITY | _float32.SIGN
_CHUNK = 1 << 16
_128, _MINUS_126 = np.uint32(0x43000000), np.uint32(0xC2FC0000)

# Results of the platform's float64 log2 this near to halfway between two float32 (in units of the
# last place of float64) are decided by `decimal`. The best known libraries err by 1, the worst by 4.
_LOG2_MARGIN = 256


class Tables(NamedTuple):
    """float32 results as uint32 [2^23]; None for a table that was not asked for."""

    ex2: Array = None
    """2^x at x = i 2^-23."""
    rcp: Array = None
    """1 / x at x = 1 + i 2^-23."""
    lg2_above: Array = None
    """log2 x at x = 1 + i 2^-23."""
    lg2_below: Array = None
    """log2 x at x = (1 + i 2^-23) / 2."""


EX2, RCP, LG2 = ("ex2",), ("rcp",), ("lg2_above", "lg2_below")
"""The tables that exp2, reciprocal and log2 read."""


def tables(xp: ModuleType, names: tuple[str, ...] = Tables._fields) -> Tables:
    """The named tables as arrays of `xp`, numpy or jax.numpy, built once and kept.

    The first call takes up to 0.3 s a table. A table takes 32 MB in each library that asked for it.

    Raises ValueError for an unknown name, RuntimeError where a data file is damaged.
    """
    for name in names:
        if name not in DIGESTS:
            raise unknown_name("table", name, DIGESTS)
    get = host_table if xp is np else _device_table
    with ThreadPoolExecutor(
        len(DIGESTS)
    ) as threads:  # building one is mostly outside the interpreter
        list(threads.map(host_table, names))
    return Tables(**{name: get(name) for name in names})


@functools.cache
def host_table(name: str) -> NDArray[np.uint32]:
    """One table, read-only."""
    table = _REFERENCES[name]()
    differences = np.frombuffer(lzma.decompress(_data(f"{name}.i8.xz")), dtype=np.int8)
    if differences.shape == table.shape:
        for start in range(0, ENTRIES, _CHUNK):
            part = differences[start : start + _CHUNK].astype(np.int32)
            table[start : start + _CHUNK] += part.view(np.uint32)
    if name in _WITH_EXCEPTIONS:
        with np.load(io.BytesIO(_data(f"{name}_exceptions.npz"))) as stored:
            table[stored["index"]] = stored["bits"]
    digest = hashlib.sha256(table.astype("<u4", copy=False).data).hexdigest()
    if digest != DIGESTS[name]:
        raise RuntimeError(
            f"table {name!r} has sha256 {digest[:12]}..., it must be {DIGESTS[name][:12]}...: "
            "its data file is damaged, install flamia-ref again"
        )
    table.flags.writeable = False
    return table


@functools.cache
def _device_table(name: str) -> Array:
    import jax

    # Inside somebody's jit, too, the kept array must be a concrete one.
    with jax.ensure_compile_time_eval():
        return jax.numpy.asarray(host_table(name))


def _data(name: str) -> bytes:
    return (resources.files("flamia_ref.arithmetic") / "data" / name).read_bytes()


def _rounded_exp2() -> NDArray[np.uint32]:
    """2^x rounded to nearest at x = i 2^-23."""
    position = np.arange(1 << 16, dtype=np.int32).reshape(-1, 256, 1)
    rest = np.arange(1 << 7, dtype=np.uint64) << np.uint64(25)
    table = np.empty((256, 256, 128), dtype=np.uint32)
    half = np.uint64(1 << 38)
    for rows, target in zip(position, table, strict=True):
        significand = (correct.power_of_fraction(rows, rest) + half) >> np.uint64(39)
        target[:] = significand + np.uint64(126 << 23)
    return table.reshape(-1)


def _rounded_reciprocal() -> NDArray[np.uint32]:
    """1/x rounded to nearest at x = 1 + i 2^-23: one IEEE division."""
    table = np.arange(0x3F800000, 0x40000000, dtype=np.uint32)
    for start in range(0, ENTRIES, _CHUNK):
        x = table[start : start + _CHUNK].view(np.float32)
        np.divide(np.float32(1), x, out=x)
    return table


def _rounded_log2(scale: float) -> NDArray[np.uint32]:
    """log2(x) rounded to nearest at x = scale (1 + i 2^-23), whatever the platform's log2."""
    table = np.empty(ENTRIES, dtype=np.uint32)
    for start in range(0, ENTRIES, _CHUNK):
        x = np.arange(ENTRIES + start, ENTRIES + start + _CHUNK) * (scale / ENTRIES)
        wide = np.log2(x)
        rounded = wide.astype(np.float32).view(np.uint32)
        dropped = (wide.view(np.uint64) & np.uint64((1 << 29) - 1)).astype(np.int32)
        for i in np.flatnonzero(np.abs(dropped - (1 << 28)) <= _LOG2_MARGIN):
            rounded[i] = _decided_log2(float(x[i]), float(wide[i]))
        table[start : start + _CHUNK] = rounded
    return table


def _decided_log2(x: float, near: float) -> np.uint32:
    """log2(x) rounded to nearest, where `near` is close to it and to halfway between two float32."""
    pattern = np.array(near).view(np.uint64) >> np.uint64(29) << np.uint64(29)
    halfway = (pattern | np.uint64(1 << 28)).view(np.float64)
    context = Context(prec=40)
    exact = context.divide(context.ln(Decimal(x)), context.ln(Decimal(2)))
    away = abs(exact) > abs(Decimal(float(halfway)))
    return np.uint32(int(pattern.view(np.float64).astype(np.float32).view(np.uint32)) + away)


_REFERENCES: dict[str, Callable[[], NDArray[np.uint32]]] = {
    "ex2": _rounded_exp2,
    "rcp": _rounded_reciprocal,
    "lg2_above": lambda: _rounded_log2(1.0),
    "lg2_below": lambda: _rounded_log2(0.5),
}


def _flushed(x: Array) -> Array:
    """`x` with subnormals made zeros of their sign."""
    xp = _backend.namespace(x)
    return xp.where((x & _float32.INFINITY) == 0, x & _float32.SIGN, x)


@_backend.jit
def exp2_bits(x: Array, tables: Tables) -> Array:
    """2^x of float32 bits by table ex2: uint32 bits in and out.

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
    entry = _backend.gather(tables.ex2, position & _MANTISSA)
    result = entry + (position & ~_MANTISSA)
    result = xp.where(~negative & (magnitude >= _128), _float32.INFINITY, result)
    result = xp.where(negative & (x > _MINUS_126), np.uint32(0), result)
    return xp.where(_float32.is_nan(x), _float32.NAN, result)


@_backend.jit
def reciprocal_bits(x: Array, tables: Tables) -> Array:
    """1/x of float32 bits by table rcp: uint32 bits in and out.

    Subnormal inputs count as zeros and give infinity; subnormal results are flushed to zero.
    """
    xp = _backend.namespace(x)
    x = _flushed(x)
    sign = x & _float32.SIGN
    magnitude = x & _float32.MAGNITUDE
    # The exponent of the result is two too large, so that it stays positive.
    entry = _backend.gather(tables.rcp, x & _MANTISSA) + np.uint32(129 << 23)
    result = entry - (magnitude & _float32.INFINITY)
    normal = result >= np.uint32(3 << 23)
    result = xp.where(normal, result - np.uint32(2 << 23), np.uint32(0))
    result = xp.where(magnitude == 0, _float32.INFINITY, result)
    result = xp.where(magnitude == _float32.INFINITY, np.uint32(0), result)
    return xp.where(_float32.is_nan(x), _float32.NAN, result | sign)


@_backend.jit
def log2_bits(x: Array, tables: Tables) -> Array:
    """log2 x of float32 bits by tables lg2_above and lg2_below: uint32 bits in and out.

    Subnormal inputs count as zeros and give -infinity, negative ones NaN.
    """
    xp = _backend.namespace(x)
    x = _flushed(x)
    mantissa = x & _MANTISSA
    exponent = ((x & _float32.INFINITY) >> np.uint32(23)).astype(np.int32) - 127
    above = exponent >= 0
    entry = xp.where(
        above,
        _backend.gather(tables.lg2_above, mantissa),
        _backend.gather(tables.lg2_below, mantissa),
    )
    whole = _float32.from_int32(xp.where(above, exponent, exponent + 1))
    result = _float32.add(whole, entry, rounding="toward_zero")
    result = xp.where((x & _float32.SIGN) != 0, _float32.NAN, result)
    result = xp.where(_float32.is_zero(x), _NEGATIVE_INFINITY, result)
    result = xp.where(x == _float32.INFINITY, _float32.INFINITY, result)
    return xp.where(_float32.is_nan(x), _float32.NAN, result)
