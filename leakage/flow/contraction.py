"""Sums of products: an output sees both factors of each product of which neither is known to be 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flamia_ref.leakage.flow.context import Assumption, Context
from flamia_ref.leakage.flow.sets import EMPTY, Bits, Ids
from flamia_ref.leakage.flow.value import KNOWN, Array, Flow, alike, made

Bools = NDArray[np.bool_]


def seen_in_products(
    context: Context, a: Ids, b: Ids, a_zero: Bools, b_zero: Bools
) -> tuple[Bits, Bools]:
    """What a sum over the first axis of products sees, and whether any product is alive, by lanes.

    All are [K, ...lanes] and broadcast against each other. Equal terms are looked at once.
    """
    lanes = np.broadcast_shapes(*(x.shape[1:] for x in (a, b, a_zero, b_zero)))
    seen = np.zeros((*lanes, context.sets.bits(a[:1]).shape[-1]), dtype=np.uint64)
    alive = np.zeros(lanes, dtype=np.bool_)
    for k in _distinct(a, b, a_zero, b_zero):
        left, right, left_zero, right_zero = (
            x[0 if len(x) == 1 else k] for x in (a, b, a_zero, b_zero)
        )
        live = ~(left_zero | right_zero)
        if not live.any():
            continue
        alive |= live
        term = context.sets.bits(left) | context.sets.bits(right)
        seen |= term if live.all() else np.where(live[..., None], term, np.uint64(0))
    return seen, alive


def _distinct(*terms: Array) -> list[int]:
    """One place along the first axis for each distinct slice of all arrays together."""
    length = max(len(x) for x in terms)
    whole = [np.ascontiguousarray(x).reshape(len(x), -1) for x in terms if len(x) > 1]
    if not whole:
        return [0] if length else []
    found: dict[tuple[bytes, ...], int] = {}
    for k in range(length):
        found.setdefault(tuple(x[k].tobytes() for x in whole), k)
    return list(found.values())


def dot_general(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`dot_general`."""
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    a, b = (alike(x) for x in operands)
    out = equation.outvars[0].aval
    shape, dtype = tuple(out.shape), out.dtype
    left_free = [x for x in range(a.ndim) if x not in left_sum and x not in left_batch]
    right_free = [x for x in range(b.ndim) if x not in right_sum and x not in right_batch]
    if 0 in shape:
        return Flow(shape, dtype, np.full(shape, KNOWN, dtype=np.int32), np.zeros(shape, dtype))

    def laid_out(x: Array, full: Sequence[int], order: Sequence[int], left: bool) -> Array:
        """[K, ...batch, ...left, ...right], compact but for sums over several axes."""
        count = len(left_sum)
        summed = [full[axis] for axis in order[:count]]
        moved = x.transpose(order)
        if count != 1:
            grow = any(extent > 1 for extent in moved.shape[:count])
            if grow:
                moved = np.broadcast_to(moved, [*summed, *moved.shape[count:]])
            moved = moved.reshape(-1 if grow else 1, *moved.shape[count:])
        batch = moved.shape[1 : 1 + len(left_batch)]
        free = moved.shape[1 + len(left_batch) :]
        ones_left, ones_right = (1,) * len(left_free), (1,) * len(right_free)
        tail = (*free, *ones_right) if left else (*ones_left, *free)
        return moved.reshape(moved.shape[0], *batch, *tail)

    left_order = [*left_sum, *left_batch, *left_free]
    right_order = [*right_sum, *right_batch, *right_free]
    parts = []
    for x, order, left in ((a, left_order, True), (b, right_order, False)):
        zero = _zero(x)
        parts.append(
            (
                laid_out(np.maximum(x.ids, EMPTY), x.shape, order, left),
                laid_out(zero, x.shape, order, left),
                laid_out(x.known, x.shape, order, left),
            )
        )
    (a_ids, a_zero, a_known), (b_ids, b_zero, b_known) = parts
    length = int(np.prod([a.shape[axis] for axis in left_sum], dtype=np.int64))
    if length == 0:
        return made(shape, dtype, np.full((1,) * len(shape), KNOWN, dtype=np.int32), np.zeros((1,) * len(shape), dtype))
    exact = np.dtype(dtype).kind in "iub"
    if not (exact or context.strict):
        count = ((a_zero & ~b_known) | (b_zero & ~a_known)).reshape(-1)
        wide = length * int(np.prod(shape, dtype=np.int64))
        context.assumed[Assumption.ZERO_TIMES_FINITE] += int(count.sum()) * (wide // count.size)
    if context.strict and not exact:
        a_zero, b_zero = a_zero & b_known, b_zero & a_known
    seen, alive = seen_in_products(context, a_ids, b_ids, a_zero, b_zero)
    ids = context.sets.intern(seen)
    # All products known to be 0: the sum is 0. Known products with others in them are of no source, not known.
    ids = np.where(alive, ids, np.int32(KNOWN))
    return made(shape, dtype, ids, np.zeros((1,) * len(shape), dtype=dtype))


def _zero(x: Flow) -> Bools:
    """Where an array is known to be 0."""
    if x.values is None:
        return np.zeros((1,) * x.ndim, dtype=np.bool_)
    flags: Bools = x.known & (x.values == 0)
    return flags


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = {"dot_general": dot_general}
