"""The numerics of one pair of tiles of the backward, of the rows before it, and of the gradients after it.

Floats are float32 bits. Only these functions are compiled, for a few fixed shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32, _primitive
from flamia_ref._backend import Array
from flamia_ref.arithmetic import reductions, special
from flamia_ref.arithmetic.reductions import REDUCTIONS, Reduction
from flamia_ref.attention import row_end, sides, softmax
from flamia_ref.attention.forward_tile import pairs_visible, weighted
from flamia_ref.attention.knobs import DeltaSum
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.sides import Rows
from flamia_ref.attention.softmax import Factors

_HEADS = Reduction(begins="term")


class Prologue(NamedTuple):
    """What every row brings along.

    Attributes:
        dout: [rows, channels], what takes the place of dO in both products.
        base: [rows], what P is relative to: b, or lse log2 e.
        rest: [rows], what was taken into dO: 2^(b - lse log2 e), or 1.
        dead: [rows], whether the row has no gradient.
        total: [rows], the sum that P is divided by, where the backward makes the softmax of a row again.
    """

    dout: Array
    base: Array
    rest: Array
    dead: Array
    total: Array | None = None


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

    `key_start` [tiles], `least` and `last` [tiles, rows], `skipped` [tiles] and `guarded` [tiles, rows / 32, slots] as
    in the forward; `opens` and `closes` [tiles]: the first and the last of the pairs of one partial sum.
    """

    key_start: Array
    least: Array
    last: Array
    skipped: Array
    opens: Array
    closes: Array
    guarded: Array | None


class Values(NamedTuple):
    """`base`, `delta` and `dead` of `Prologue` [tiles, rows]; what the forward's P of the key tile is relative to,
    where dV takes that P; and `total` of `Prologue`."""

    base: Array
    delta: Array
    dead: Array
    row_base: Array | None = None
    total: Array | None = None


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
def prologue(dout: Array, out: Array, lse: Array, unseen: Array, *, recipe: Recipe) -> Prologue:
    """What rows bring along, from dO and the returned out [rows, channels], lse, and whether they see no key [rows]."""
    xp = _backend.namespace(dout, out, lse)
    scaled = _float32.multiply(lse, softmax.LOG2_E)
    # Beside an out of zeros; other rows with that lse have a sum of zero or NaN, and a NaN out.
    infinite = _primitive.special(lse == softmax.NEGATIVE_INFINITY)
    dead = infinite & ~((out & _float32.MAGNITUDE) != 0).any(axis=1)
    dead = dead | unseen
    base, rest = scaled, xp.full(lse.shape, _float32.ONE, dtype=np.uint32)
    if recipe.softmax.base == "natural_max":
        base = lse
    if recipe.softmax.normalisation == "zero_safe_reciprocal":
        base = xp.where(lse == softmax.NEGATIVE_INFINITY, np.uint32(0), base)
    if recipe.backward.gradient.normalisation == "fold_into_dout":
        # A NaN of dO' would reach the dV of keys that the row does not see, in its chain: 0 NaN = NaN.
        lost = ~dead & ((scaled & _float32.MAGNITUDE) >= _float32.INFINITY)
        base = xp.where(lost, _float32.NAN, _float32.floor(scaled))
        rest = special.exp2_bits(_float32.subtract(base, scaled), model=recipe.softmax.exp2)
        dout = _float32.multiply(dout, rest[:, None])
        dout = xp.where((dead | lost)[:, None], np.uint32(0), dout)
    return Prologue(dout, base, rest, dead)


@_backend.jit(static=("recipe",))
def row_delta(dout: Array, out: Array, dead: Array, *, recipe: Recipe) -> Array:
    """delta [rows] from what stands for dO and for O [rows, channels]."""
    xp = _backend.namespace(dout, out)
    delta = _delta(dout, out, recipe.backward.gradient.delta)
    if recipe.backward.gradient.normalisation == "fold_into_dout":
        delta = xp.where(dead, np.uint32(0), delta)
    return delta


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
            half = sides.rounded_bfloat16(_float32.multiply(out, dout))
            threads = REDUCTIONS["cudnn.mxfp8.delta"]
            return reductions.reduce(_padded(half, threads.dealt), threads, 1)


@_backend.jit(static=("recipe",))
def sink_sums(
    sink: Array,
    base: Array,
    delta: Array,
    dead: Array,
    total: Array | None = None,
    *,
    recipe: Recipe,
) -> Array:
    """What the rows of each tile add to the sink's gradient, less its sign: the sum of P of the sink times delta
    [tiles], ascending, from [tiles, rows]; `sink` [tiles]."""
    xp = _backend.namespace(base, delta)
    parts = row_end.sink_parts(sink[:, None], recipe.softmax)
    p = sink_probabilities(parts, base, sink[:, None], recipe, total)
    terms = xp.where(dead, np.uint32(0), _float32.multiply(p, delta))
    return reductions.reduce(terms, REDUCTIONS["ascending"], 1)


def sink_probabilities(
    parts: row_end.Sink, base: Array, sink: Array, recipe: Recipe, total: Array | None = None
) -> Array:
    """P of a sink relative to the base of rows. All broadcast."""
    xp = _backend.namespace(base, sink)
    if recipe.softmax.base == "natural_max":
        p = _natural(sink, base, total, recipe)
    elif _splits(recipe):
        p = softmax.raised(parts.es, parts.ns, base)
    else:
        p = special.exp2_bits(_float32.subtract(parts.u, base), model=recipe.softmax.exp2)
    return xp.where(sink == softmax.NEGATIVE_INFINITY, np.uint32(0), p)


@_backend.jit
def negated_sum(x: Array) -> Array:
    """The sums [heads] of [tiles, heads], ascending, with the other sign."""
    return _float32.canonical(_float32.negate(reductions.reduce(x, REDUCTIONS["ascending"], 0)))


def _splits(recipe: Recipe) -> bool:
    """Whether the backward splits the exponent, its base an integer."""
    return (
        recipe.softmax.exp2_argument == "split"
        and recipe.backward.gradient.normalisation == "fold_into_dout"
    )


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
    factors: Factors,
    scale: Array,
    o_fold: Array | None,
    *,
    recipe: Recipe,
) -> tuple[Accumulators, Stages]:
    """S, P, dP and dS of one pair of tiles each, and what they add to dQ, dK and dV. `scale`: the softmax scale;
    `o_fold`: the scales that the forward's P took over, where dV takes that P."""
    guarded = work.guarded
    s = sides.over_channels(x.s_q, x.s_k, recipe.s, guarded if recipe.s.guarded else None)
    dp = sides.over_channels(
        x.dp_do, x.dp_v, recipe.backward.dp, guarded if recipe.backward.dp.guarded else None
    )
    folds = (x.dv_do.fold, x.dq_k.fold, x.dk_q.fold, o_fold)
    middle = _differences(s, dp, values, work, folds, factors, scale, recipe=recipe)
    dv = sides.over_rows(middle.dv_left, x.dv_do, state.dv, recipe.backward.dv)
    dk = sides.over_rows(middle.dk_left, x.dk_q, state.dk, recipe.backward.dk)
    begin = state.dq
    if state.dq_partial is not None:
        begin = _opened(work.opens, state.dq_partial)
    dq = sides.over_rows(middle.dq_left, x.dq_k, begin, recipe.backward.dq)
    if recipe.backward.dq.guarded and guarded is not None:
        dq = sides.over_guarded_keys(middle.ds, x.dq_k, dq, recipe.backward.dq, guarded)
    new = _kept(work, state, dq, dk, dv)
    stages = Stages(s, dp, middle.p, *middle.dv, middle.ds, *middle.dq, *middle.dk)
    return new, stages


def delta_step(
    sums: Array,
    s_q: Rows,
    s_k: Rows,
    dp_do: Rows,
    dp_v: Rows,
    values: Values,
    work: Work,
    factors: Factors,
    *,
    recipe: Recipe,
) -> Array:
    """The sums of P dP [tiles, rows, lanes] after one pair of tiles each."""
    guarded = work.guarded
    s = sides.over_channels(s_q, s_k, recipe.s, guarded if recipe.s.guarded else None)
    dp = sides.over_channels(
        dp_do, dp_v, recipe.backward.dp, guarded if recipe.backward.dp.guarded else None
    )
    return _with_products(sums, s, dp, values, work, factors, recipe=recipe)


@_backend.jit(static=("recipe",))
def _with_products(
    sums: Array,
    s: Array,
    dp: Array,
    values: Values,
    work: Work,
    factors: Factors,
    *,
    recipe: Recipe,
) -> Array:
    xp = _backend.namespace(s, dp)
    scores, _ = softmax.scores(s, factors, recipe.softmax)
    visible = (
        pairs_visible(work.key_start, work.least, work.last, s.shape[2]) & ~values.dead[:, :, None]
    )
    p = pair_probabilities(scores, visible, values.base, factors.c, recipe, values.total)
    terms = xp.where(visible, _float32.multiply(p, dp), np.uint32(0))
    new = softmax.carried(sums, terms, recipe.softmax)
    return xp.where(work.skipped[:, None, None], sums, new)


@_backend.jit(static=("recipe",))
def whole_delta(sums: Array, rest: Array, dead: Array, *, recipe: Recipe) -> Array:
    """delta [rows] from the sums of P dP [rows, lanes], in units of the dO that `rest` was taken into."""
    xp = _backend.namespace(sums, rest)
    delta = _float32.multiply(softmax.total(sums[:, None], recipe.softmax)[:, 0], rest)
    return xp.where(dead, np.uint32(0), delta)


def pair_probabilities(
    s: Array, visible: Array, base: Array, c: Array, recipe: Recipe, total: Array | None = None
) -> Array:
    """P of the backward relative to `base` [tiles, rows], from scores; over `total` [tiles, rows] if there is one."""
    xp = _backend.namespace(s, base)
    base = base[:, :, None]
    if recipe.softmax.base == "natural_max":
        p = _natural(s, base, None if total is None else total[:, :, None], recipe)
    elif _splits(recipe):
        parts = softmax.split(s, c, recipe.softmax)
        p = softmax.raised(parts.e, parts.n, base)
    else:
        exponent = softmax.exponent(s, c, _float32.negate(base), recipe.softmax)
        p = special.exp2_bits(exponent, model=recipe.softmax.exp2)
    return xp.where(visible, softmax.without_nan(p, recipe.softmax), np.uint32(0))


def _natural(s: Array, base: Array, total: Array | None, recipe: Recipe) -> Array:
    """e^(S' - base), over `total` where there is one. All broadcast."""
    xp = _backend.namespace(s, base)
    p = softmax.natural_power(s, base, recipe.softmax)
    return p if total is None else _float32.divide(p, xp.broadcast_to(total, p.shape))


@_backend.jit(static=("recipe",))
def _differences(
    s: Array,
    dp: Array,
    values: Values,
    work: Work,
    folds: tuple[Array | None, Array | None, Array | None, Array | None],
    factors: Factors,
    scale: Array,
    *,
    recipe: Recipe,
) -> _Middle:
    xp = _backend.namespace(s, dp)
    gradient = recipe.backward.gradient
    scores, tanh = softmax.scores(s, factors, recipe.softmax)
    visible = (
        pairs_visible(work.key_start, work.least, work.last, s.shape[2]) & ~values.dead[:, :, None]
    )
    p = pair_probabilities(scores, visible, values.base, factors.c, recipe, values.total)
    delta = values.delta[:, :, None]
    if gradient.softmax_scale == "in_ds":
        distance = _float32.fma(dp, scale, _float32.negate(_float32.multiply(delta, scale)))
    else:
        distance = _float32.subtract(dp, delta)
    ds = _float32.multiply(p, distance)
    if tanh is not None:
        ds = _float32.multiply(ds, _float32.fma(_float32.negate(tanh), tanh, _float32.ONE))
    if gradient.softmax_scale == "times_ds":
        ds = _float32.multiply(ds, scale)
    if gradient.masked_ds == "select":
        ds = xp.where(visible, ds, np.uint32(0))

    dv_fold, dq_fold, dk_fold, o_fold = folds
    weights = p
    if values.row_base is not None:
        forward = softmax.again(
            scores,
            pairs_visible(work.key_start, work.least, work.last, s.shape[2]),
            values.row_base,
            factors.c,
            recipe.softmax,
        )
        weights = _forward_weights(forward, o_fold, values, work, visible, factors.c, recipe)
    if gradient.p_offset:
        weights = _float32.shift(weights, xp.full(p.shape, gradient.p_offset, dtype=np.int32))
    dv = sides.encoded_pairs(weights, recipe.backward.dv.left, _by_query(dv_fold))
    cut = sides.without_guarded(ds, work.guarded if recipe.backward.dq.guarded else None)
    dq_fold = None if dq_fold is None else dq_fold[:, None, :]
    dq = sides.encoded_pairs(
        sides.in_static_units(cut, recipe.backward.dq.left), recipe.backward.dq.left, dq_fold
    )
    dk = dq
    if recipe.backward.dk.left.same_codes_as is None:
        in_units = sides.in_static_units(ds, recipe.backward.dk.left)
        dk = sides.encoded_pairs(in_units, recipe.backward.dk.left, _by_query(dk_fold))
    return _Middle(
        p,
        ds,
        dv,
        dq,
        dk,
        sides.left_over_queries(dv, recipe.backward.dv.left),
        sides.left_over_keys(dq, recipe.backward.dq.left),
        sides.left_over_queries(dk, recipe.backward.dk.left),
    )


def _forward_weights(
    p: Array,
    fold: Array | None,
    values: Values,
    work: Work,
    visible: Array,
    c: Array,
    recipe: Recipe,
) -> Array:
    """The P that the forward rounded for O, relative to the backward's base."""
    xp = _backend.namespace(p)
    knobs = recipe.softmax
    rounded = weighted(p, fold, work.guarded, recipe, valued=True).values
    base = softmax.in_log2_units(values.row_base, c, knobs)
    if knobs.base == "integer_max" and recipe.backward.gradient.normalisation == "fold_into_dout":
        distance = _float32.to_int32(_float32.subtract(base, values.base))
        moved = _float32.shift(rounded, (distance - np.int32(knobs.p_offset))[:, :, None])
        lost = _float32.is_nan(values.base) | _float32.is_nan(base)
        moved = xp.where(lost[:, :, None], _float32.NAN, moved)
    else:
        base = _float32.subtract(base, softmax.integer(knobs.p_offset))
        factor = special.exp2_bits(_float32.subtract(base, values.base), model=knobs.exp2)
        moved = _float32.multiply(rounded, factor[:, :, None])
    return xp.where(visible, moved, np.uint32(0))


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


@_backend.jit(static=("scaled", "descending"))
def finished(accumulator: Array, scale: Array, *, scaled: bool, descending: bool = False) -> Array:
    """bfloat16 codes of gradients [rows, channels] from the accumulators [rows, heads, channels], whose heads are added
    in float32, ascending or `descending`, and then multiplied by `scale`, if `scaled`."""
    total = reductions.reduce(accumulator[:, ::-1] if descending else accumulator, _HEADS, 1)
    if scaled:
        total = _float32.multiply(total, scale)
    return sides.bfloat16(total)
