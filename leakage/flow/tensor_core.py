"""The fused sum of a tensor core as one rule: what a lane sees of its operands, its scales and its accumulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.formats import FORMATS, ScalarFormat, decode
from flamia_ref.leakage.flow.context import Assumption, Context
from flamia_ref.leakage.flow.contraction import seen_in_products
from flamia_ref.leakage.flow.sets import EMPTY
from flamia_ref.leakage.flow.value import KNOWN, Array, Flow, alike, made

Bools = NDArray[np.bool_]


def fused_sum(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`fused_sum`: an accumulator and products of codes with block scales, chained along K.

    A product with a code known to be 0 is 0 and reaches nothing, nor does its block's scale where all of the block are;
    the scales of groups that are aligned by them reach the sum whatever their codes. Strict, a code or a scale that may
    be NaN or infinite reaches the sum though its partner is 0.
    """
    parameters = equation.params
    out = equation.outvars[0].aval
    shape, dtype = tuple(out.shape), out.dtype
    if all(x.all_known for x in operands):
        return _computed(equation, operands)
    a, b, a_scales, b_scales, c = (alike(x) for x in operands)
    rules = INSTRUCTIONS[parameters["instruction"]]
    elements = [FORMATS[parameters[side]] for side in ("a_format", "b_format")]
    zeros = [_zero(x, element) for x, element in zip((a, b), elements, strict=True)]
    length = a.shape[0]
    if length == 0:
        return _accumulator_alone(c, shape, dtype)
    # Where a product is surely 0: one code is 0, and the other is known too, or cannot be special, or is assumed not to be.
    dead = []
    for zero, partner, element in ((zeros[0], b, elements[1]), (zeros[1], a, elements[0])):
        if context.strict and (element.has_nan or element.has_infinity):
            dead.append(zero & partner.known)
        else:
            if not context.strict:
                _count(context, zero & ~partner.known, length, shape)
            dead.append(zero)
    # `seen_in_products` takes one flag a factor; here a flag of the pair goes with the first factor.
    pair_dead = dead[0] | dead[1]
    a_ids, b_ids = np.maximum(a.ids, EMPTY), np.maximum(b.ids, EMPTY)
    none = np.zeros((1,) * a.ndim, dtype=np.bool_)
    seen, alive = seen_in_products(context, a_ids, b_ids, pair_dead, none)
    scaling = parameters["scaling"]
    if scaling is not None and a_scales.shape[0]:
        of_scales = [np.maximum(x.ids, EMPTY) for x in (a_scales, b_scales)]
        if rules.group != 1 or context.strict:
            blocks_dead = none
        else:
            blocks_dead = _whole_blocks(pair_dead, length, scaling.block)
            _count(context, blocks_dead, a_scales.shape[0], shape)
        of_blocks, block_alive = seen_in_products(context, *of_scales, blocks_dead, none)
        seen = seen | of_blocks
        alive = alive | block_alive
    own = context.sets.bits(np.maximum(c.ids, EMPTY))
    ids = context.sets.intern(seen | own)
    if c.values is None:
        return Flow(shape, dtype, ids, None)
    # All products 0: the sum is the accumulator, known where that is, in the instruction's spelling.
    kept = c.known & ~alive
    values = _spelled(c.values, rules.result)
    return made(shape, dtype, np.where(kept, np.int32(KNOWN), ids), values)


def _computed(equation: Any, operands: Sequence[Flow]) -> Flow:
    from flamia_ref.arithmetic import products

    values = [np.ascontiguousarray(x.full_values()) for x in operands]
    with np.errstate(all="ignore"):
        found = products.chain(*values, **equation.params)
    return Flow(found.shape, found.dtype, np.full((1,) * found.ndim, KNOWN, dtype=np.int32), found)


def _accumulator_alone(c: Flow, shape: tuple[int, ...], dtype: Any) -> Flow:
    return Flow(shape, dtype, c.ids, c.values)


def _zero(x: Flow, element: ScalarFormat) -> Bools:
    """Where codes are known to be 0, of either sign."""
    if x.values is None:
        return np.zeros((1,) * x.ndim, dtype=np.bool_)
    distinct, inverse = np.unique(x.values, return_inverse=True)
    zero = decode(distinct.astype(element.code_dtype), element) == 0
    flags: Bools = x.known & zero[inverse].reshape(x.values.shape)
    return flags


def _whole_blocks(dead: Bools, length: int, block: int) -> Bools:
    """Where all products of a block are 0, by blocks along the first axis; the last block may be short."""
    if len(dead) == 1:
        return dead
    rows = [dead[start : start + block].all(axis=0) for start in range(0, length, block)]
    return np.stack(rows)


def _count(context: Context, flags: Bools, length: int, shape: tuple[int, ...]) -> None:
    found = int(flags.sum())
    if found:
        total = length * int(np.prod(shape, dtype=np.int64))
        context.assumed[Assumption.ZERO_TIMES_FINITE] += found * (total // flags.size)


def _spelled(bits: Array, result: Any) -> Array:
    """Accumulator bits as a sum with nothing gives them back: zero is +0."""
    form = FORMATS[result.accumulator_format]
    return np.where(bits == form.sign_code, np.zeros((), dtype=bits.dtype), bits)


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = {"fused_sum": fused_sum}
