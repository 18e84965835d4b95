"""The numerics of one pair of tiles of the backward, of the rows before it, and of the gradients after it.

Floats are float32 bits. Only these functions are compiled, for a few fixed shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic import reductions, special
from flamia_ref.arithmetic.reductions import REDUCTIONS, Reduction
from flamia_ref.attention import sides, softmax
from flamia_ref.attention.forward_tile import pairs_visible
from flamia_ref.attention.knobs import DeltaSum
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.sides import Rows

_HEADS = Reduction(begins="term")


class Prologue(NamedTuple):
    """What every row brings along.

    Attributes:
        dout: [rows, channels], what takes the place of dO in both products.
        base: [rows], what P is relative to: b, or lse log2 e.
        delta: [rows].
        dead: [rows], whether the row has no gradient.
    """

    dout: Array
    base: Array
    delta: Array
    dead: Array


class Inputs(NamedTuple):
    """The rows of one pair of tiles for each use."""

    s_q: Rows
    s_k: Rows
    dp_do: Rows
    dp_v: Rows
    dv_do: Rows
    dq_k: Rows
    dk_q: Rows


class Accumulators(NamedTuple):
    """dQ of the query tile and the partial sum it is adding up (None where there is none), dK and dV of the key tile,
    each [tiles, rows, channels]."""

    dq: Array
    dq_partial: Array | None
    dk: Array
    dv: Array


class Work(NamedTuple):
    """Which pairs are computed.

    `key_start` [tiles], `last` [tiles, rows], `skipped` [tiles] and `guarded` [tiles, rows / 32] as in the forward;
    `opens` and `closes` [tiles]: the first and the last of the pairs of one partial sum.
    """

    key_start: Array
    last: Array
    skipped: Array
    opens: Array
    closes: Array
    guarded: Array | None


class Values(NamedTuple):
    """`base` and `delta` [tiles, rows] as in `Prologue`, `dead` likewise."""

    base: Array
    delta: Array
    dead: Array


class Stages(NamedTuple):
    """The traced values of one pair of tiles, [tiles, queries, keys], and the scales in the shape of their blocks."""

    s: Array
    dp: Array
    p: Array
    dv_codes: Array
    dv_scales: Array | None
    ds: Array
    dq_codes: Array
    dq_scales: Array | None
    dk_codes: Array
    dk_scales: Array | None


@_backend.jit(static=("recipe",))
def prologue(dout: Array, out: Array, lse: Array, *, recipe: Recipe) -> Prologue:
    """What rows bring along, from dO and the returned out [rows, channels] and lse [rows]."""
    xp = _backend.namespace(dout, out, lse)
    scaled = _float32.multiply(lse, softmax.LOG2_E)
    # Beside an out of zeros; other rows with that lse have a sum of zero or NaN, and a NaN out.
    dead = (lse == softmax.NEGATIVE_INFINITY) & ~((out & _float32.MAGNITUDE) != 0).any(axis=1)
    base = scaled
    if recipe.softmax.normalisation == "zero_safe_reciprocal":
        base = xp.where(lse == softmax.NEGATIVE_INFINITY, np.uint32(0), base)
    if recipe.gradient.normalisation == "fold_into_dout":
        # A NaN of dO' would reach the dV of keys that the row does not see, in its chain: 0 NaN = NaN.
        lost = ~dead & ((scaled & _float32.MAGNITUDE) >= _float32.INFINITY)
        base = xp.where(lost, _float32.NAN, _float32.floor(scaled))
        rest = special.exp2_bits(_float32.subtract(base, scaled), model=recipe.softmax.exp2)
        dout = _float32.multiply(dout, rest[:, None])
        dout = xp.where((dead | lost)[:, None], np.uint32(0), dout)
    delta = _delta(dout, out, recipe.gradient.delta)
    if recipe.gradient.normalisation == "fold_into_dout":
        delta = xp.where(dead, np.uint32(0), delta)
    return Prologue(dout, base, delta, dead)


def _delta(dout: Array, out: Array, order: DeltaSum) -> Array:
    xp = _backend.namespace(dout, out)
    zero = xp.zeros(dout.shape[:1], dtype=np.uint32)
    match order:
        case DeltaSum.FMA_ASCENDING:
            columns = (xp.moveaxis(dout, 1, 0), xp.moveaxis(out, 1, 0))
            return _backend.scan(
                lambda sums, x: (_float32.fma(x[0], x[1], sums), None), zero, columns
            )
        case DeltaSum.THREAD_VECTORS:
            products = _padded(_float32.multiply(out, dout), 32)
            width = next(width for width in (128, 64, 32) if products.shape[1] % width == 0)
            return reductions.reduce(products, REDUCTIONS[f"fa4.delta.{width}"], 1)
        case DeltaSum.HALF_PRODUCTS:
            half = sides.bfloat16(_float32.multiply(out, dout)).astype(np.uint32) << np.uint32(16)
            threads = REDUCTIONS["cudnn.mxfp8.delta"]
            return reductions.reduce(_padded(half, threads.dealt), threads, 1)


def _padded(x: Array, multiple: int) -> Array:
    """`x` [rows, channels] with channels of +0 up to a multiple."""
    xp = _backend.namespace(x)
    return xp.pad(x, ((0, 0), (0, -x.shape[1] % multiple)))


class _Middle(NamedTuple):
    """P and dS of a pair of tiles, their codes, and their sides of dV, dQ and dK."""

    p: Array
    ds: Array
    dv: sides.Pairs
    dq: sides.Pairs
    dk: sides.Pairs
    dv_left: sides.Left
    dq_left: sides.Left
    dk_left: sides.Left


def pair_step(
    state: Accumulators,
    x: Inputs,
    values: Values,
    work: Work,
    score_factor: Array,
    *,
    recipe: Recipe,
) -> tuple[Accumulators, Stages]:
    """S, P, dP and dS of one pair of tiles each, and what they add to dQ, dK and dV."""
    guarded = work.guarded
    s = sides.over_channels(x.s_q, x.s_k, recipe.s, guarded if recipe.s.guarded else None)
    dp = sides.over_channels(x.dp_do, x.dp_v, recipe.dp, guarded if recipe.dp.guarded else None)
    folds = (x.dv_do.fold, x.dq_k.fold, x.dk_q.fold)
    middle = _differences(s, dp, values, work, folds, score_factor, recipe=recipe)
    dv = sides.over_rows(middle.dv_left, x.dv_do, state.dv, recipe.dv)
    dk = sides.over_rows(middle.dk_left, x.dk_q, state.dk, recipe.dk)
    begin = state.dq
    if state.dq_partial is not None:
        begin = _opened(work.opens, state.dq_partial)
    dq = sides.over_rows(middle.dq_left, x.dq_k, begin, recipe.dq)
    if recipe.dq.guarded:
        dq = sides.over_guarded_keys(middle.ds, x.dq_k, dq, recipe.dq, guarded)
    new = _kept(work, state, dq, dk, dv)
    stages = Stages(s, dp, middle.p, *middle.dv, middle.ds, *middle.dq, *middle.dk)
    return new, stages


@_backend.jit(static=("recipe",))
def _differences(
    s: Array,
    dp: Array,
    values: Values,
    work: Work,
    folds: tuple[Array | None, Array | None, Array | None],
    score_factor: Array,
    *,
    recipe: Recipe,
) -> _Middle:
    xp = _backend.namespace(s, dp)
    visible = pairs_visible(work.key_start, work.last, s.shape[2]) & ~values.dead[:, :, None]
    base = values.base[:, :, None]
    if recipe.softmax.exp2_argument == "split":
        n, e = softmax.split(s, score_factor, recipe.softmax)
        p = softmax.raised(e, n, base)
    else:
        exponent = _float32.fma(s, score_factor, _float32.negate(base))
        p = special.exp2_bits(exponent, model=recipe.softmax.exp2)
    p = xp.where(visible, p, np.uint32(0))
    ds = _float32.multiply(p, _float32.subtract(dp, values.delta[:, :, None]))
    ds = xp.where(visible, ds, np.uint32(0))

    weights = p
    if recipe.gradient.p_offset:
        weights = _float32.shift(p, xp.full(p.shape, recipe.gradient.p_offset, dtype=np.int32))
    dv_fold, dq_fold, dk_fold = folds
    dv = sides.encoded_pairs(weights, recipe.dv.left, _by_query(dv_fold))
    cut = sides.without_guarded(ds, work.guarded if recipe.dq.guarded else None)
    dq_fold = None if dq_fold is None else dq_fold[:, None, :]
    dq = sides.encoded_pairs(cut, recipe.dq.left, dq_fold)
    dk = dq
    if recipe.dk.left.same_codes_as is None:
        dk = sides.encoded_pairs(ds, recipe.dk.left, _by_query(dk_fold))
    return _Middle(
        p,
        ds,
        dv,
        dq,
        dk,
        sides.left_over_queries(dv, recipe.dv.left),
        sides.left_over_keys(dq, recipe.dq.left),
        sides.left_over_queries(dk, recipe.dk.left),
    )


@_backend.jit
def _opened(opens: Array, partial: Array) -> Array:
    xp = _backend.namespace(partial)
    return xp.where(opens[:, None, None], np.uint32(0), partial)


@_backend.jit
def _kept(work: Work, state: Accumulators, dq: Array, dk: Array, dv: Array) -> Accumulators:
    """The accumulators after a pair of tiles; the old ones where it is skipped."""
    xp = _backend.namespace(dq, dk, dv)
    skipped = work.skipped[:, None, None]
    partial = state.dq_partial
    if partial is not None:
        partial = xp.where(skipped, partial, dq)
        dq = xp.where(work.closes[:, None, None], _float32.add(state.dq, dq), state.dq)
    return Accumulators(
        xp.where(skipped, state.dq, dq),
        partial,
        xp.where(skipped, state.dk, dk),
        xp.where(skipped, state.dv, dv),
    )


def _by_query(fold: Array | None) -> Array | None:
    return None if fold is None else fold[:, :, None]


@_backend.jit(static=("scaled",))
def finished(accumulator: Array, scale: Array, *, scaled: bool) -> Array:
    """bfloat16 codes of gradients [rows, channels] from the accumulators [rows, heads, channels], whose heads are added
    in float32, ascending, and then multiplied by `scale`, if `scaled`."""
    total = reductions.reduce(accumulator, _HEADS, 1)
    if scaled:
        total = _float32.multiply(total, scale)
    return sides.bfloat16(total)
