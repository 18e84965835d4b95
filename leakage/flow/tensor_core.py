"""The fused sum of a tensor core as one rule: what a lane sees of its operands, its scales and its accumulator.

The rule is what the interpreter finds in the primitive's own program, which `tests/leakage/flow/test_tensor_core.py`
holds for every instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.arithmetic.instructions import Instruction, Summation
from flamia_ref.formats import FORMATS, ScalarFormat, decode
from flamia_ref.leakage.flow.context import Assumption, Context
from flamia_ref.leakage.flow.contraction import seen_in_products
from flamia_ref.leakage.flow.sets import Bits
from flamia_ref.leakage.flow.value import (
    KNOWN,
    Array,
    Bools,
    Flow,
    alike,
    contiguous,
    elements,
    known,
    made,
)


def fused_sum(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`fused_sum`: an accumulator and products of codes with block scales, chained along K.

    A product with a code or a scale that is known to be 0 is 0 and reaches nothing, nor does a scale of a block of
    nothing else. A NaN that is known is the result. Strict, a code or a scale that may be NaN or infinite reaches the
    sum though its partner is 0, and so does one that gives a zero its sign, where the sum may be of negative zeros.
    """
    parameters = equation.params
    out = equation.outvars[0].aval
    shape, dtype = tuple(out.shape), out.dtype
    if all(x.all_known for x in operands):
        return known(_computed(parameters, *(contiguous(x.full_values()) for x in operands)))
    a, b, a_scales, b_scales, c = (alike(x) for x in operands)
    rules, scaling = INSTRUCTIONS[parameters["instruction"]], parameters["scaling"]
    sides = [(x, FORMATS[parameters[name]]) for x, name in ((a, "a_format"), (b, "b_format"))]
    length, block = a.shape[0], 1 if scaling is None else scaling.block
    scales = [] if scaling is None else [(x, FORMATS[scaling.format]) for x in (a_scales, b_scales)]
    dead = _dead(context, rules, sides, scales, c, block)
    if not context.strict:
        unsure = dead & ~(a.known & b.known)
        context.assumed[Assumption.ZERO_TIMES_FINITE] += elements(unsure, (length, *shape))
    none = np.zeros((1,) * a.ndim, dtype=np.bool_)
    seen, alive = seen_in_products(context, a.sources, b.sources, dead, none)
    if scales and a_scales.shape[0]:
        blocks_dead = _whole_blocks(dead, length, block)
        of_blocks, _ = seen_in_products(
            context, a_scales.sources, b_scales.sources, blocks_dead, none
        )
        seen = seen | of_blocks
    maybe_special: Bools = np.zeros((), dtype=np.bool_)
    if context.strict:
        for x, element in (*sides, *scales):
            if element.has_nan or element.has_infinity:
                seen = seen | _union(context, x)
                maybe_special = maybe_special | ~x.known.all(axis=0)
    ids = context.sets.intern(seen | context.sets.bits(c.ids))
    # Where all products are 0 the sum is that of nothing and the accumulator.
    values = None if c.values is None else _of_nothing(parameters, rules, length, c.values)
    sure = c.known & ~alive & ~maybe_special
    others = c.known & alive & ~maybe_special & _none_unknown(sides, scales, dead, length, block)
    if others.any():
        found = _computed(parameters, *(contiguous(x.full_values()) for x in operands))
        values = np.where(others, found, np.zeros((), dtype) if values is None else values)
    ids = np.where(sure | others, np.int32(KNOWN), ids)
    poisoned = _poisoned(rules, [*sides, *scales], c)
    if poisoned.any():
        nan = np.array(FORMATS[rules.result.accumulator_format].sign_code - 1, dtype=dtype)
        ids = np.where(poisoned, np.int32(KNOWN), ids)
        values = np.where(poisoned, nan, np.zeros((), dtype) if values is None else values)
    return made(shape, dtype, ids, values)


_Side = tuple[Flow, ScalarFormat]


def _dead(
    context: Context,
    rules: Instruction,
    sides: Sequence[_Side],
    scales: Sequence[_Side],
    c: Flow,
    block: int,
) -> Bools:
    """Which products are 0 whatever is not known of them, [K, ...lanes]."""
    (a, a_format), (b, b_format) = sides
    a_zero, b_zero = _where(a, a_format, 0), _where(b, b_format, 0)
    length = a.shape[0]
    for side, (scale, form) in enumerate(scales):
        zero = _where(scale, form, 0)
        if zero.any():
            spread = zero if len(zero) == 1 else np.repeat(zero, block, axis=0)[:length]
            a_zero, b_zero = (a_zero | spread, b_zero) if side == 0 else (a_zero, b_zero | spread)
    dead = a_zero | b_zero
    if context.strict and rules.summation is Summation.EXACT:
        # A sum of negative zeros alone is one: the sign of each product shows unless one is known to be no such zero.
        signed = ~c.known | (c.known & (c.compact_values() == FORMATS["fp32"].sign_code))
        plain = (a.known & b.known & ~_negative_zero(sides, dead)).any(axis=0)
        dead = dead & ((a.known & b.known) | ~signed | plain)
    if context.strict and rules.summation is Summation.FMA:
        dead = dead & a.known & b.known
    return dead


def _negative_zero(sides: Sequence[_Side], dead: Bools) -> Bools:
    """Where products of known codes are negative zeros."""
    minus: Bools = np.zeros((), dtype=np.bool_)
    for x, form in sides:
        minus = minus ^ ((x.compact_values().astype(np.int64) & form.sign_code) != 0)
    return dead & minus


def _none_unknown(
    sides: Sequence[_Side], scales: Sequence[_Side], dead: Bools, length: int, block: int
) -> Bools:
    """Lanes in which all that is not surely 0 is known."""
    (a, _), (b, _) = sides
    found: Bools = np.asarray((dead | (a.known & b.known)).all(axis=0))
    if scales and scales[0][0].shape[0] and found.any():
        blocks = _whole_blocks(dead, length, block)
        found = found & (blocks | (scales[0][0].known & scales[1][0].known)).all(axis=0)
    return found


def _computed(parameters: Mapping[str, Any], *operands: Array) -> Array:
    from flamia_ref.arithmetic import products

    with np.errstate(all="ignore"):
        return np.asarray(products.chain(*operands, **parameters))


def _of_nothing(parameters: Mapping[str, Any], rules: Instruction, length: int, c: Array) -> Array:
    """The sum of zeros onto the accumulator: its cut, its zero and its NaN as the instruction has them."""
    rows = (rules.terms or 1) if length else 0
    codes = np.zeros((rows, *(1,) * c.ndim), dtype=np.uint8)
    sides = [
        codes.astype(FORMATS[parameters[name]].code_dtype) for name in ("a_format", "b_format")
    ]
    scales = codes[:0]
    return _computed(parameters, *sides, scales, scales, contiguous(c))


def _where(x: Flow, form: ScalarFormat, value: float) -> Bools:
    """Where codes are known to have a value, a zero of either sign; NaN is equal to itself here."""
    if x.values is None or x.values.size == 0:
        return np.zeros((1,) * x.ndim, dtype=np.bool_)
    distinct, inverse = np.unique(x.values, return_inverse=True)
    with np.errstate(all="ignore"):
        decoded = decode((distinct & form.code_mask).astype(form.code_dtype), form, np.float64)
    same = np.isnan(decoded) if np.isnan(value) else decoded == value
    flags: Bools = x.known & same[inverse].reshape(x.values.shape)
    return flags


def _poisoned(rules: Instruction, parts: Sequence[_Side], c: Flow) -> Bools:
    """Lanes with a NaN that is known."""
    found: Bools = np.zeros((1,) * c.ndim, dtype=np.bool_)
    for x, form in parts:
        found = found | _where(x, form, np.nan).any(axis=0)
    return found | _where(c, FORMATS[rules.result.accumulator_format], np.nan)


def _whole_blocks(dead: Bools, length: int, block: int) -> Bools:
    """Where all products of a block are 0, by blocks along the first axis; the last block may be short."""
    if len(dead) == 1:
        return dead
    rows = [dead[start : start + block].all(axis=0) for start in range(0, length, block)]
    return np.stack(rows)


def _union(context: Context, x: Flow) -> Bits:
    return context.sets.bits(context.sets.union_over(x.sources, [0])[0])


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = {"fused_sum": fused_sum}
