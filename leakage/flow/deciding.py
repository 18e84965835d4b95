"""What one known operand of an elementwise primitive decides alone: 0 times x, and(0, x), infinity plus x."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from flamia_ref.leakage.flow.context import Assumption, Context
from flamia_ref.leakage.flow.value import (
    Bools,
    Flow,
    elements,
    integer_info,
    is_bool,
    is_float,
    is_integer,
)

_Rule = Callable[[Sequence[Flow], Any], Iterator[tuple[Bools, Any, "Assumption | None"]]]


def decided(
    context: Context, name: str, operands: Sequence[Flow], dtype: Any
) -> Iterator[tuple[Bools, Any]]:
    """Where results are known though not all operands are, and their value."""
    rule = _RULES.get(name)
    if rule is None:
        return
    known: Bools | None = None
    shape = operands[0].shape
    for flags, value, assumption in rule(operands, dtype):
        if not flags.any():
            continue
        if known is None:
            known = functools.reduce(operator.and_, (x.known for x in operands))
        alone = flags & ~known
        if not alone.any() or (assumption is not None and context.strict):
            continue
        if assumption is not None:
            context.assumed[assumption] += elements(alone, shape)
        yield alone, value


def _absorbing(value: Callable[[Any], Any]) -> _Rule:
    """Any operand that is `value` is the result."""

    def rule(operands: Sequence[Flow], dtype: Any) -> Iterator[tuple[Bools, Any, None]]:
        end = value(dtype)
        if end is not None:
            for x in operands:
                if x.values is not None:
                    yield x.where_known(end), end, None

    return rule


def _ones(dtype: Any) -> Any:
    return True if is_bool(dtype) else np.array(-1).astype(dtype)


def _end(which: str) -> Callable[[Any], Any]:
    def end(dtype: Any) -> Any:
        if is_bool(dtype):
            return which == "max"
        return getattr(integer_info(dtype), which) if is_integer(dtype) else None

    return end


def _product(
    operands: Sequence[Flow], dtype: Any
) -> Iterator[tuple[Bools, Any, Assumption | None]]:
    a, b = operands
    zeros = a.where_known(0) | b.where_known(0)
    yield zeros, 0, Assumption.ZERO_TIMES_FINITE if is_float(dtype) else None


def _quotient(operands: Sequence[Flow], dtype: Any) -> Iterator[tuple[Bools, Any, Assumption]]:
    yield operands[0].where_known(0), 0, Assumption.ZERO_OVER_NONZERO


def _remainder(operands: Sequence[Flow], dtype: Any) -> Iterator[tuple[Bools, Any, None]]:
    if is_integer(dtype):
        yield operands[0].where_known(0), 0, None


def _shifted(operands: Sequence[Flow], dtype: Any) -> Iterator[tuple[Bools, Any, None]]:
    yield operands[0].where_known(0), 0, None


def _out_of_width(operands: Sequence[Flow], dtype: Any) -> Iterator[tuple[Bools, Any, None]]:
    x, places = operands
    yield x.where_known(0), 0, None
    if places.values is not None:
        # As unsigned numbers: a negative one is large.
        width = integer_info(dtype).bits
        far = (places.values < 0) | (places.values >= width)
        yield places.known & far, 0, None


def _sum(second: int) -> _Rule:
    def rule(operands: Sequence[Flow], dtype: Any) -> Iterator[tuple[Bools, Any, Assumption]]:
        if not is_float(dtype) or np.dtype(dtype).kind == "c":
            return
        for x, sign in zip(operands, (1, second), strict=True):
            if x.values is None:
                continue
            if _has_infinity(dtype):
                for end in (np.inf, -np.inf):
                    yield x.where_known(end), sign * end, Assumption.INFINITY_PLUS_FINITE
            if np.dtype(dtype) in _WIDE:
                huge = x.known & np.isfinite(x.values) & (abs(x.values) >= _WIDE[np.dtype(dtype)])
                if huge.any():
                    value = x.values if sign == 1 else -x.values
                    yield huge, value, Assumption.HUGE_PLUS_MODERATE

    return rule


def _compared(above: bool, below: bool) -> _Rule:
    """A comparison whose result is `above` where the first operand is beyond the second, else `below`."""

    def rule(operands: Sequence[Flow], dtype: Any) -> Iterator[tuple[Bools, Any, Assumption]]:
        if not _has_infinity(operands[0].dtype):
            return
        for x, first in zip(operands, (True, False), strict=True):
            for end in (np.inf, -np.inf):
                beyond = (end > 0) == first
                found = above if beyond else below
                yield x.where_known(end), found, Assumption.INFINITY_AGAINST_FINITE

    return rule


@functools.cache
def _has_infinity(dtype: Any) -> bool:
    """Whether a dtype holds real floats and an infinity."""
    if not is_float(dtype) or np.dtype(dtype).kind == "c":
        return False
    return bool(np.isinf(np.array(np.inf).astype(dtype)))


_info: Any = ml_dtypes.finfo
_WIDE = {
    np.dtype(dtype): _info(dtype).max / np.array(2, dtype)
    for dtype in (np.float32, np.float64, ml_dtypes.bfloat16)
}

_RULES: Mapping[str, _Rule] = {
    "mul": _product,
    "and": _absorbing(lambda dtype: 0),
    "or": _absorbing(_ones),
    "min": _absorbing(_end("min")),
    "max": _absorbing(_end("max")),
    "div": _quotient,
    "rem": _remainder,
    "add": _sum(1),
    "add_any": _sum(1),
    "sub": _sum(-1),
    "eq": _compared(above=False, below=False),
    "ne": _compared(above=True, below=True),
    "gt": _compared(above=True, below=False),
    "ge": _compared(above=True, below=False),
    "lt": _compared(above=False, below=True),
    "le": _compared(above=False, below=True),
    "shift_left": _out_of_width,
    "shift_right_logical": _out_of_width,
    "shift_right_arithmetic": _shifted,
}
