"""Sums of products: an output sees both factors of each product of which neither is known to be 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flamia_ref.leakage.flow.context import Assumption, Context
from flamia_ref.leakage.flow.sets import Bits, Ids
from flamia_ref.leakage.flow.value import (
    KNOWN,
    Array,
    Bools,
    Flow,
    Shape,
    alike,
    empty,
    is_float,
    known,
    known_ids,
    made,
)


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


class Factor(NamedTuple):
    """One side of products: compact arrays."""

    ids: Ids
    """Sources, the empty set where known."""
    zero: Bools
    """Known to be 0, be it of unknown sign."""
    known: Bools
    finite: Bools
    """Known to be finite, or within finite bounds."""

    @classmethod
    def of(cls, x: Flow) -> Factor:
        """The parts of an array."""
        finite: Bools = np.zeros((1,) * x.ndim, dtype=np.bool_)
        zero = x.where_known(0)
        if x.bounds is not None:
            finite = ~x.known & np.isfinite(x.bounds[0]) & np.isfinite(x.bounds[1])
            zero = zero | (~x.known & (x.bounds[0] == 0) & (x.bounds[1] == 0))
        if x.values is not None:
            with np.errstate(invalid="ignore"):
                finite = finite | (x.known & np.isfinite(x.values))
        return cls(x.sources, zero, x.known, finite)

    @classmethod
    def of_parts(cls, parts: Sequence[Array]) -> Factor:
        """A factor of its four arrays."""
        return cls(*parts)

    def full(self, shape: Shape) -> Factor:
        """The parts in the full shape."""
        return Factor.of_parts([np.broadcast_to(part, shape) for part in self])


def sum_of_products(
    context: Context, a: Factor, b: Factor, length: int, shape: Shape, dtype: Any
) -> Flow:
    """The sums of `length` products; the parts are [K, ...lanes] and broadcast against the lanes, `shape`."""
    a_zero, b_zero = a.zero, b.zero
    if is_float(dtype):
        if context.strict:
            a_zero, b_zero = a_zero & b.finite, b_zero & a.finite
        else:
            # 0 times what is known not to be finite is NaN, which is known, but not 0.
            special = [x.known & ~x.finite for x in (a, b)]
            if special[1].any():
                a_zero = a_zero & ~special[1]
            if special[0].any():
                b_zero = b_zero & ~special[0]
            assumed = (a_zero & ~b.known) | (b_zero & ~a.known)
            wide = length * int(np.prod(shape, dtype=np.int64))
            context.assumed[Assumption.ZERO_TIMES_FINITE] += int(assumed.sum()) * (
                wide // max(1, assumed.size)
            )
    seen, alive = seen_in_products(context, a.ids, b.ids, a_zero, b_zero)
    # All products known to be 0: the sum is 0. Known products with others in them are of no source, not known.
    ids = np.where(alive, context.sets.intern(seen), np.int32(KNOWN))
    return made(shape, dtype, ids, np.zeros((1,) * len(shape), dtype=dtype))


def dot_general(context: Context, equation: Any, operands: Sequence[Flow]) -> Flow:
    """`dot_general`."""
    (left_sum, right_sum), (left_batch, right_batch) = equation.params["dimension_numbers"]
    a, b = (alike(x) for x in operands)
    out = equation.outvars[0].aval
    shape, dtype = tuple(out.shape), out.dtype
    if 0 in shape:
        return empty(shape, dtype)
    if not is_float(dtype) and a.all_known and b.all_known:
        return known(_evaluated(equation, operands).astype(dtype))
    length = int(np.prod([a.shape[axis] for axis in left_sum], dtype=np.int64))
    if length == 0:
        zero = np.zeros((1,) * len(shape), dtype=dtype)
        return Flow(shape, dtype, known_ids(len(shape)), zero)
    left_free, right_free = (
        [axis for axis in range(x.ndim) if axis not in (*of_sum, *of_batch)]
        for x, of_sum, of_batch in ((a, left_sum, left_batch), (b, right_sum, right_batch))
    )

    def laid_out(x: Flow, order: Sequence[int], before: int, after: int) -> Factor:
        """[K, ...batch, ...left, ...right] with `before` and `after` axes of the other side, compact."""
        count, batch = len(left_sum), len(left_batch)
        parts: list[Array] = []
        for part in Factor.of(x):
            moved: Array = part.transpose(order)
            summed, rest = moved.shape[:count], moved.shape[count:]
            if count != 1:
                if any(extent > 1 for extent in summed):
                    summed = tuple(x.shape[axis] for axis in order[:count])
                moved = np.broadcast_to(moved, (*summed, *rest))
            at = (-1, *rest[:batch], *(1,) * before, *rest[batch:], *(1,) * after)
            parts.append(moved.reshape(at))
        return Factor.of_parts(parts)

    left = laid_out(a, [*left_sum, *left_batch, *left_free], 0, len(right_free))
    right = laid_out(b, [*right_sum, *right_batch, *right_free], len(left_free), 0)
    return sum_of_products(context, left, right, length, shape, dtype)


def _evaluated(equation: Any, operands: Sequence[Flow]) -> Array:
    import jax

    with jax.enable_x64(True):
        given = [jax.numpy.asarray(x.full_values()) for x in operands]
        return np.asarray(equation.primitive.bind(*given, **equation.params))


RULES: Mapping[str, Callable[[Context, Any, Sequence[Flow]], Any]] = {"dot_general": dot_general}
