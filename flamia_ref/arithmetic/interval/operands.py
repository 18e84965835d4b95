"""What bounds on products are given: checked, on the host, K leading, and a part of the lanes at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref import _backend
from flamia_ref.arithmetic import operands, products
from flamia_ref.arithmetic.instructions import Instruction, Result
from flamia_ref.arithmetic.interval.terms import Floats, Terms
from flamia_ref.arithmetic.interval.terms import operand as parts_of
from flamia_ref.arithmetic.interval.terms import terms as both_terms
from flamia_ref.arithmetic.interval.value import Interval, exactly, float16_interval, floats
from flamia_ref.arithmetic.operands import Operand, Pair
from flamia_ref.formats import FORMATS

_CHUNK = 1 << 21  # numbers that are worked on at once

Given = Mapping[str, Any]
"""a_format, b_format, a_scales, b_scales, scale_format as a caller gave them."""


def as_given(
    a_format: Any, b_format: Any, a_scales: Any, b_scales: Any, scale_format: Any
) -> Given:
    """Formats and scales under the names that they have as arguments."""
    return {
        "a_format": a_format,
        "b_format": b_format,
        "a_scales": a_scales,
        "b_scales": b_scales,
        "scale_format": scale_format,
    }


def row_pair(a: Any, b: Any, given: Given, rules: Instruction) -> Pair:
    """The operands of row-wise dot products, [K, n] each."""
    left, right = _operands(a, b, given, rules, ("(n, K)", 1), ("(n, K)", 1))
    if left.codes.shape != right.codes.shape:
        raise ValueError(
            f"a has shape {left.codes.shape} and b {right.codes.shape}; both must be the same (n, K)"
        )
    both = _on_host(operands.pair(left, right, rules))
    return both._replace(a=both.a.T, b=both.b.T, a_scales=both.a_scales.T, b_scales=both.b_scales.T)


def matrix_pair(a: Any, b: Any, given: Given, rules: Instruction) -> Pair:
    """The operands of a matrix product, [K, m, 1] and [K, 1, n]."""
    left, right = _operands(a, b, given, rules, ("(m, K)", 1), ("(K, n)", 0))
    if left.codes.shape[1] != right.codes.shape[0]:
        raise ValueError(
            f"a has shape {left.codes.shape} and b {right.codes.shape}; they must be (m, K) and (K, n)"
        )
    both = _on_host(operands.pair(left, right, rules))
    return both._replace(
        a=both.a.T[:, :, None],
        a_scales=both.a_scales.T[:, :, None],
        b=both.b[:, None, :],
        b_scales=both.b_scales[:, None, :],
    )


def lanes_of(both: Pair) -> tuple[int, ...]:
    """The shape of the results."""
    return np.broadcast_shapes(both.a.shape[1:], both.b.shape[1:])


def zero_accumulator(both: Pair) -> Interval:
    """+0 for every result."""
    return exactly(np.zeros(lanes_of(both)))


def bits_accumulator(name: str, c: Any, both: Pair, rules: Instruction) -> Interval:
    """The accumulator that is given as bits, as an interval."""
    dtype = np.uint16 if rules.result is Result.FLOAT16 else np.uint32
    checked = operands.checked_array(name, c, lanes_of(both), dtype)
    _refuse_traced(name, checked)
    return exactly(checked)


def accumulator(name: str, c: Any, both: Pair, rules: Instruction) -> Interval:
    """The accumulator of bits, or an Interval of values that accumulators can have."""
    if not isinstance(c, Interval):
        return bits_accumulator(name, c, both, rules)
    shape = lanes_of(both)
    if c.shape != shape:
        raise ValueError(f"{name} has shape {c.shape}; it must be {shape}")
    return float16_interval(name, c) if rules.result is Result.FLOAT16 else c


def by_lanes(
    both: Pair,
    c: Interval,
    held: int,
    work: Callable[[Pair, Interval], tuple[NDArray[Any], ...]],
) -> list[NDArray[Any]]:
    """The arrays that `work` makes of all lanes, a part of the first lane axis at a time, `held` numbers a lane."""
    count, others = c.shape[0], math.prod(c.shape[1:])
    part = max(1, _CHUNK // max(held * others, 1))
    found = []
    for first in range(0, max(count, 1), part):
        rows = slice(first, first + part)
        along = {
            name: x
            if x.shape[1] == 1 and len(c.shape) == 2 and name.startswith("b")
            else x[:, rows]
            for name, x in _arrays(both).items()
        }
        found.append(work(both._replace(**along), c[rows].reshape(-1)))
    return [np.concatenate(parts).reshape(c.shape) for parts in zip(*found, strict=True)]


def terms_of(both: Pair, rules: Instruction) -> Terms:
    """The terms of a pair of operands."""
    left, right = (
        parts_of(codes, FORMATS[name], scales, both.scaling, rules)
        for codes, name, scales in (
            (both.a, both.a_format, both.a_scales),
            (both.b, both.b_format, both.b_scales),
        )
    )
    return both_terms(left, right, rules)


def ascending(both: Pair, c: Floats, rules: Instruction) -> Floats:
    """What the instruction returns for every lane, K ascending, from accumulators that it can hold."""
    lanes = lanes_of(both)
    flat = {
        name: np.broadcast_to(x, (x.shape[0], *lanes)).reshape(x.shape[0], math.prod(lanes)).T
        for name, x in _arrays(both).items()
    }
    kind = np.float16 if rules.result is Result.FLOAT16 else np.float32
    with np.errstate(invalid="ignore"):
        start = _backend.bits(c.astype(kind))
    scaled = both.scaling is not None
    result = products.fused_dot(
        flat["a"],
        flat["b"],
        start,
        rules,
        a_format=both.a_format,
        b_format=both.b_format,
        a_scales=flat["a_scales"] if scaled else None,
        b_scales=flat["b_scales"] if scaled else None,
        scale_format=both.scaling.format if both.scaling is not None else None,
    )
    return floats(result, "result")


def _operands(
    a: Any, b: Any, given: Given, rules: Instruction, *places: tuple[str, int]
) -> list[Operand]:
    return [
        operands.operand(
            name,
            x,
            given[f"{name}_format"],
            given[f"{name}_scales"],
            given["scale_format"],
            rules,
            k_axis=k_axis,
            axes=axes,
        )
        for (name, x), (axes, k_axis) in zip((("a", a), ("b", b)), places, strict=True)
    ]


def _arrays(both: Pair) -> dict[str, Any]:
    return {"a": both.a, "b": both.b, "a_scales": both.a_scales, "b_scales": both.b_scales}


def _on_host(both: Pair) -> Pair:
    operands.check_devices(_arrays(both))
    for name, x in _arrays(both).items():
        _refuse_traced(name, x)
    return both._replace(
        a=_backend.host(both.a),
        b=_backend.host(both.b),
        a_scales=_backend.host(both.a_scales),
        b_scales=_backend.host(both.b_scales),
    )


def _refuse_traced(name: str, x: Any) -> None:
    if _backend.is_traced(x):
        raise TypeError(f"{name} is traced; bounds are numpy, so compute them outside jit")
