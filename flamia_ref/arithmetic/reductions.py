"""Sums of float32 along an axis, in the orders that kernels add in.

An order is data: a row's terms are dealt to lanes (threads, or halves of packed registers), every
lane adds up its own, and then the lanes are added. `reduce` gives the sum, `partial_sums` the lanes,
which a kernel may carry from tile to tile, and `combine` the sum of lanes. Addition in float32 is
commutative, so it is the grouping alone that decides the bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref._errors import Registry, shown
from flamia_ref.evidence import Evidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """An order of float32 additions, each rounded to nearest even. Equal data, equal bits.

    Attributes:
        lanes: partial sums.
        vector: terms that a lane takes at a time: term k goes to lane (k // vector) % lanes.
        grouped: whether a lane adds up each vector by itself, from +0, before it adds that to its
            sum; else it adds the terms of the vector one after the other.
        chunk: terms after which the lanes start afresh; the lanes of the chunks are then added lane
            by lane, ascending. None: never.
        begins: what a lane adds its terms to: "zero", +0; or "term", its first term.
        exchanges: how the lanes are added: at these distances, in this order; at distance d each lane
            adds the sum of the lane whose number differs in the bit d (a butterfly: all lanes end
            with the same sum). Every power of two below `lanes`, once. None: ascending, one by one.
        ftz: whether the additions flush subnormals, as add.ftz.f32 does.
        evidence, source: what the order rests on. They do not count in comparisons.

    Raises ValueError for numbers that are no order.
    """

    lanes: int = 1
    vector: int = 1
    grouped: bool = False
    chunk: int | None = None
    begins: Literal["zero", "term"] = "zero"
    exchanges: tuple[int, ...] | None = None
    ftz: bool = False
    evidence: Evidence = field(default=Evidence.ASSUMED, compare=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("lanes", "vector"):
            _positive(name, getattr(self, name))
        if self.begins not in ("zero", "term"):
            raise ValueError(f"begins is {shown(self.begins)}; allowed: 'zero', 'term'")
        if self.chunk is not None:
            _positive("chunk", self.chunk)
            if self.chunk % self.dealt:
                raise ValueError(
                    f"chunk is {self.chunk}; lanes times vector, {self.dealt}, must divide it"
                )
        if self.exchanges is not None:
            object.__setattr__(self, "exchanges", _distances(self.exchanges))
            wanted = [1 << bit for bit in range(self.lanes.bit_length() - 1)]
            if self.lanes & (self.lanes - 1) or sorted(self.exchanges) != wanted:
                raise ValueError(
                    f"exchanges is {shown(self.exchanges)} for {self.lanes} lanes; it takes each "
                    "power of two below lanes once, and lanes that are a power of two"
                )

    @property
    def dealt(self) -> int:
        """Terms that go round the lanes once; the terms of a sum are a multiple of them."""
        return self.lanes * self.vector


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {shown(value)}; it must be a whole number, 1 or more")


def _distances(given: object) -> tuple[int, ...]:
    if not isinstance(given, tuple | list) or not all(type(x) is int for x in given):
        raise ValueError(
            f"exchanges is {shown(given)}; it must be a tuple of whole numbers, or None"
        )
    return tuple(given)


def _registered(order: object) -> Reduction:
    """The order that an `order` argument means."""
    if isinstance(order, Reduction):
        return order
    if not isinstance(order, str):
        raise TypeError(f"order is {shown(order)}; it must be a Reduction or a name in REDUCTIONS")
    return REDUCTIONS[order]


def reduce(x: Array, order: Reduction | str, axis: int = -1, start: Array | None = None) -> Array:
    """The sum of float32 bits along `axis`, in this order.

    Arguments:
        x: uint32 bits [..., terms, ...], terms a multiple of `order.dealt`.
        order: a Reduction, or a name in REDUCTIONS.
        start: uint32 bits of the shape of the result, or one for all: what lane 0 adds its terms to
            instead of +0. For other lanes that begin with a sum, take `partial_sums`. Not for an
            order that begins with a term or has chunks.

    Returns: uint32 bits, the shape of x without `axis`. NaN is 0x7fffffff.

    Raises TypeError for what is no uint32 array, order or integer axis, ValueError for an unknown
    order, an axis that x does not have, a count of terms or a start that does not fit.
    """
    order = _registered(order)
    if start is not None:
        _float32.is_nan(start)  # refuses what is no array of bits
        xp = _backend.namespace(start)
        lanes = [start] + [xp.zeros_like(start) for _ in range(order.lanes - 1)]
        start = xp.stack(lanes, axis=-1)
    return combine(partial_sums(x, order, axis, start), order)


def partial_sums(
    x: Array, order: Reduction | str, axis: int = -1, start: Array | None = None
) -> Array:
    """The sums of the lanes, [..., lanes]: the shape of x without `axis`, and a last axis of lanes.

    `start` has that shape too, or one that broadcasts to it. Arguments and errors otherwise as for
    `reduce`.
    """
    order = _registered(order)
    _float32.is_nan(x)
    axis = _float32.axis_of(axis, "x", x.ndim)
    terms = x.shape[axis]
    if terms % order.dealt or (terms == 0 and order.begins == "term"):
        least = " above 0" if order.begins == "term" else ""
        raise ValueError(
            f"x has {terms} terms along axis {axis}; this order takes a multiple of "
            f"{order.dealt}{least}: pad with +0 where the kernel does"
        )
    if start is not None:
        _float32.is_nan(start)
        _check_start(start.shape, x.shape[:axis] + x.shape[axis + 1 :], order)
    return _partial_sums(x, start, order=order, axis=axis)


def _check_start(given: tuple[int, ...], rest: tuple[int, ...], order: Reduction) -> None:
    if order.begins == "term" or order.chunk is not None:
        raise ValueError(
            "start is given, but lanes of this order begin with a term or afresh in each chunk: "
            "add it to the sum"
        )
    wanted = (*rest, order.lanes)
    try:
        fits = np.broadcast_shapes(given, wanted) == wanted
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"start has shape {given} with its lanes; it must broadcast to {wanted}")


def combine(lanes: Array, order: Reduction | str) -> Array:
    """The sums [...] of partial sums [..., lanes], as uint32 bits.

    Raises TypeError for what is no uint32 array or order, ValueError for an unknown order or another number of lanes.
    """
    order = _registered(order)
    _float32.is_nan(lanes)
    if lanes.ndim == 0 or lanes.shape[-1] != order.lanes:
        raise ValueError(f"lanes has shape {lanes.shape}; the last axis must have {order.lanes}")
    return _combined(lanes, order=order)


@_backend.jit(static=("order",))
def _combined(lanes: Array, *, order: Reduction) -> Array:
    if order.exchanges is None:
        total = lanes[..., 0]
        for lane in range(1, order.lanes):
            total = _float32.add(total, lanes[..., lane], ftz=order.ftz)
        return total
    # One axis for each bit of a lane's number, the highest first; an exchange adds along one.
    bits = sorted(order.exchanges, reverse=True)
    lanes = lanes.reshape((*lanes.shape[:-1], *(2 for _ in bits)))
    for distance in order.exchanges:
        axis = lanes.ndim - len(bits) + bits.index(distance)
        before = (slice(None),) * axis
        lanes = _float32.add(lanes[(*before, 0)], lanes[(*before, 1)], ftz=order.ftz)
        bits.remove(distance)
    return lanes


@_backend.jit(static=("order", "axis"))
def _partial_sums(x: Array, start: Array | None, *, order: Reduction, axis: int) -> Array:
    xp = _backend.namespace(x, start)
    x = xp.moveaxis(x, axis, 0)
    width = len(x) if order.chunk is None else order.chunk
    if start is not None:
        start = xp.broadcast_to(xp.moveaxis(start, -1, 0), (order.lanes, *x.shape[1:]))
    total = _dealt(x[:width], start, order)
    for first in range(width, len(x), max(width, 1)):
        total = _float32.add(total, _dealt(x[first : first + width], None, order), ftz=order.ftz)
    return xp.moveaxis(total, 0, -1)


def _dealt(x: Array, start: Array | None, order: Reduction) -> Array:
    """The sums [lanes, ...] of the terms [terms, ...] of one chunk."""
    xp = _backend.namespace(x, start)
    # Rounds of [vector, lanes, ...]: what the lanes add at the same time is together.
    dealt = (len(x) // order.dealt, order.lanes, order.vector)
    rounds = xp.moveaxis(x.reshape((*dealt, *x.shape[1:])), 2, 1)
    if order.grouped:
        group = xp.zeros_like(rounds[:, 0])
        for place in range(order.vector):
            group = _float32.add(group, rounds[:, place], ftz=order.ftz)
        terms = group
    else:
        terms = rounds.reshape((dealt[0] * order.vector, *rounds.shape[2:]))
    if order.begins == "term":
        start, terms = terms[0], terms[1:]
    elif start is None:
        start = xp.zeros(terms.shape[1:], dtype=np.uint32)
    return _backend.scan(
        lambda sums, x: (_float32.add(sums, x[0], ftz=order.ftz), None), start, (terms,)
    )


REDUCTIONS = Registry(
    "reduction",
    [
        (
            "ascending",
            Reduction(evidence=Evidence.SPECIFIED, source="its definition: +0, then term by term"),
        ),
        (
            "fa4.row_sum",
            Reduction(
                lanes=8,
                exchanges=(2, 4, 1),
                evidence=Evidence.SOURCE,
                source="flash-attention 0251105a, flash_attn/cute/utils.py, fadd_reduce: the sum so far "
                "begins lane 0. Lanes 2 to 7 begin with a term there: the same bits, as no P is -0. "
                "CUTLASS 0429176e, example 77, sums so too, but with half of it in lanes 0 and 1",
            ),
        ),
        (
            "fa3.row_sum",
            Reduction(
                lanes=4,
                vector=2,
                exchanges=(2, 1),
                evidence=Evidence.SOURCE,
                source="flash-attention 7a802796, hopper/softmax.h, thread_reduce_ and quad_allreduce_: each lane "
                "begins with its sum so far, and they exchange after the last tile. Columns of a thread: PTX ISA, "
                "wgmma, fragment of D",
            ),
        ),
        (
            "sage3.row_sum",
            Reduction(
                lanes=4,
                vector=8,
                exchanges=(1, 2),
                evidence=Evidence.SOURCE,
                source="SageAttention d1a57a5, sageattn3/blackwell/softmax_fused.h, online_softmax_with_quant and "
                "finalize: each lane begins with its sum so far, and they exchange after the last tile. Columns of a "
                "thread: cute_extension.h, CLayout, with keys permuted by scaled_fp4_quant_permute",
            ),
        ),
        (
            "cudnn.mxfp8.row_sum",
            Reduction(
                lanes=2,
                chunk=64,
                begins="term",
                exchanges=(1,),
                evidence=Evidence.SOURCE,
                source="nvidia-cudnn-frontend 1.32.0, sdpa/fwd/kernels/sm100/prefill_d128_mxfp8.py",
            ),
        ),
        (
            "cudnn.mxfp8.delta",
            Reduction(
                lanes=8,
                vector=2,
                grouped=True,
                exchanges=(4, 2, 1),
                evidence=Evidence.SOURCE,
                source="nvidia-cudnn-frontend 1.32.0, sdpa/bwd/kernels/sm100, sum_OdO",
            ),
        ),
        *(
            (
                f"fa4.delta.{width}",
                Reduction(
                    lanes=width // 8,
                    vector=8,
                    exchanges=tuple(1 << bit for bit in range((width // 8).bit_length() - 1)),
                    evidence=Evidence.SOURCE,
                    source="flash-attention 0251105a, flash_attn/cute/flash_bwd_preprocess.py; the width is "
                    "the largest of 128, 64 and 32 that divides the channels, filled up to 32s with +0",
                ),
            )
            for width in (32, 64, 128)
        ),
    ],
)
"""Orders of public kernels, by name."""
