"""The numerics of a row's end: the sink, the normalisation, the log-sum-exp, and splits of its keys put together.

Floats are float32 bits. Arrays have axes [tiles, rows], and O a last one of channels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic import special
from flamia_ref.attention import softmax as softmaxes
from flamia_ref.attention.knobs import Softmax
from flamia_ref.attention.softmax import LN_2, LOG2_E, NEGATIVE_INFINITY, integer

_SMALLEST_SUM = np.uint32(0x0DA24260)  # fl(1e-30)


class Row(NamedTuple):
    """The end of rows: O before its output rounding, the log-sum-exp, and the maximum and the sum that they are of."""

    o: Array
    lse: Array
    row_max: Array
    row_sum: Array


class Sink(NamedTuple):
    """A sink in log2 units: u = ns + log2(es), or no sink where ns is -inf."""

    u: Array
    ns: Array
    es: Array


def sink_parts(sink: Array, softmax: Softmax) -> Sink:
    """The parts of a sink's logits."""
    xp = _backend.namespace(sink)
    u = _float32.multiply(sink, LOG2_E)
    ns = _float32.ceil(u)
    ns = xp.where(_float32.is_zero(ns), np.uint32(0), ns)
    return Sink(u, ns, special.exp2_bits(_float32.subtract(u, ns), model=softmax.exp2))


def finished(
    o: Array,
    row_max: Array,
    lanes: Array,
    sink: Array | None,
    unseen: Array,
    c: Array,
    softmax: Softmax,
    descale: Array | None = None,
    natural: Array | None = None,
) -> Row:
    """O and lse from the accumulator, the maximum and the sum `lanes` [tiles, rows, lanes] of all key tiles. `sink`
    [tiles], `unseen` [tiles, rows]: rows that see no key; `descale` [tiles]: what O is multiplied by besides;
    `natural`: as of `Factors`."""
    xp = _backend.namespace(o, row_max)
    row_sum = softmaxes.total(lanes, softmax)
    if softmax.mask_value is not None:  # what masked pairs left in rows of nothing else
        row_max = xp.where(unseen, softmaxes.start_max(softmax), row_max)
        row_sum = xp.where(unseen, np.uint32(0), row_sum)
    dead = unseen | _dead(row_max, row_sum, softmax)
    inverse = None
    if sink is not None and softmax.base == "scaled_max":
        inverse, lse = _natural_sink(row_max, row_sum, sink[:, None], softmax)
        lse = xp.where(dead, xp.broadcast_to(sink[:, None], dead.shape), lse)
    elif softmax.base == "natural_max":  # a sink is in the maximum and in the sum from the start
        lse = _log_sum_exp(row_max, row_sum, c, softmax)
    else:
        if sink is not None:
            with_sink = _integer_sink if softmax.base == "integer_max" else _raw_sink
            o, row_max, row_sum = with_sink(o, row_max, row_sum, sink[:, None], c, softmax)
        lse = _log_sum_exp(row_max, row_sum, c, softmax, natural)
        if sink is None:
            lse = xp.where(dead, NEGATIVE_INFINITY, lse)
        else:
            lse = xp.where(dead & (sink[:, None] == NEGATIVE_INFINITY), NEGATIVE_INFINITY, lse)
    if inverse is None and softmax.normalisation == "quotient":
        o = _float32.divide(o, xp.broadcast_to(row_sum[:, :, None], o.shape))
    elif inverse is None and softmax.normalisation == "clamped_quotient":
        divisor = _float32.maximum(row_sum, _float32.ONE)  # a NaN stays
        o = _float32.divide(o, xp.broadcast_to(divisor[:, :, None], o.shape))
    else:
        inverse = _inverse(row_sum, softmax) if inverse is None else inverse
        if descale is not None:
            inverse = _float32.multiply(inverse, descale[:, None])
        o = _float32.multiply(o, inverse[:, :, None])
    return Row(xp.where(dead[:, :, None], np.uint32(0), o), lse, row_max, row_sum)


def combined(o: Array, lse: Array, sink: Array | None, softmax: Softmax) -> tuple[Array, Array]:
    """O [tiles, rows, channels] and lse of the splits of rows, from those of each, [splits, ...]. `sink` [tiles]: where
    it is not in a split."""
    xp = _backend.namespace(o, lse)
    late = softmax.combine == "divide_last"
    most = lse[0]
    for one in lse[1:]:
        most = _float32.maximum_number(most, one)
    if sink is not None:
        sink = xp.broadcast_to(sink[:, None], most.shape)
        most = _float32.maximum_number(most, sink)
    if late:  # the kernel's maximum begins there, so that NaN alone leave nothing
        most = _float32.maximum_number(most, NEGATIVE_INFINITY)
    base = xp.where(most == NEGATIVE_INFINITY, np.uint32(0), most)
    # Not where the largest of some NaN is -inf, unless NaN do not count.
    dead = ~(lse != NEGATIVE_INFINITY).any(axis=0)
    none = (most == NEGATIVE_INFINITY) & (True if late else dead)
    zero = xp.zeros_like(most)

    def weight(x: Array) -> Array:
        if not late:
            shift = _float32.negate(_float32.multiply(base, LOG2_E))
            return special.exp2_bits(_float32.fma(x, LOG2_E, shift), model=softmax.exp2)
        x = _float32.multiply(_float32.subtract(x, base), LOG2_E)
        power = special.exp2_bits(x, model=softmax.exp2)
        return xp.where(_float32.is_nan(x), zero, power)

    weights = [weight(one) for one in lse]
    total = zero if sink is None else weight(sink)
    for w in weights:
        total = _float32.add(total, w)
    log = _float32.multiply(special.log2_bits(total, model=softmax.log2), LN_2)
    found = _float32.add(base, log) if late else _float32.add(log, most)
    if not late:
        inverse = _float32.divide(xp.full(total.shape, _float32.ONE, dtype=np.uint32), total)
        if softmax.combine == "scales_first":
            inverse = xp.where(_no_sum(total), np.uint32(0), inverse)
        weights = [_float32.multiply(w, inverse) for w in weights]
    out = xp.zeros_like(o[0])
    for one, w in zip(o, weights, strict=True):
        added = _float32.fma(xp.broadcast_to(w[:, :, None], one.shape), one, out)
        if softmax.combine != "every_split":
            counts = ~_float32.is_nan(w) & _float32.less(zero, w)
            added = xp.where(counts[:, :, None], added, out)
        out = added
    if late:
        out = _float32.multiply(out, _clamped_inverse(total)[:, :, None])
    out = xp.where(dead[:, :, None], np.uint32(0), out)
    return out, xp.where(none, NEGATIVE_INFINITY, found)


def _dead(row_max: Array, row_sum: Array, softmax: Softmax) -> Array:
    """Rows that see nothing, from their maximum and their sum."""
    match softmax.base:
        case "integer_max":
            return row_max == NEGATIVE_INFINITY
        case "raw_max" | "natural_max":  # a sum of zero is normalised by one instead
            return row_max != row_max
        case "scaled_max":
            return _float32.is_zero(row_sum) | _float32.less(row_sum, np.uint32(0))


def _integer_sink(
    o: Array, row_max: Array, row_sum: Array, sink: Array, c: Array, softmax: Softmax
) -> tuple[Array, Array, Array]:
    """A key of value 0 at the end: the maximum rises to it, exactly."""
    xp = _backend.namespace(o, row_max)
    parts = sink_parts(sink, softmax)
    new = _float32.maximum(row_max, parts.ns)
    moved = _float32.to_int32(_float32.subtract(row_max, new))
    rise = _float32.to_int32(_float32.subtract(parts.ns, new)) + np.int32(softmax.p_offset)
    term = _float32.shift(parts.es, rise)
    alone = row_max == NEGATIVE_INFINITY
    total = _float32.add(_float32.shift(row_sum, moved), term)
    total = xp.where(alone, term, total)
    shifted = xp.where(alone[:, :, None], np.uint32(0), _float32.shift(o, moved[:, :, None]))
    lost = _float32.is_nan(new)
    total = xp.where(lost, _float32.NAN, total)
    none = xp.broadcast_to(parts.ns == NEGATIVE_INFINITY, new.shape)
    return (
        xp.where(none[:, :, None], o, shifted),
        xp.where(none, row_max, new),
        xp.where(none, row_sum, total),
    )


def _raw_sink(
    o: Array, row_max: Array, row_sum: Array, sink: Array, c: Array, softmax: Softmax
) -> tuple[Array, Array, Array]:
    """A key of value 0 relative to the maximum there is; a row without a key takes the sink for its maximum."""
    xp = _backend.namespace(o, row_max)
    c = softmaxes.against(c, row_max)
    scaled = _float32.negate(_float32.multiply(row_max, c))
    x = _float32.fma(xp.broadcast_to(sink, scaled.shape), LOG2_E, scaled)
    if softmax.p_offset:
        x = _float32.add(x, integer(softmax.p_offset))
    if softmax.p_scale != 1:
        x = _float32.add(x, softmaxes.log2_of(softmax.p_scale))
    total = _float32.add(row_sum, special.exp2_bits(x, model=softmax.exp2))
    c = xp.asarray(c)
    log2_e = xp.full(c.shape, LOG2_E, dtype=np.uint32)
    in_units_of_s = _float32.multiply(sink, _float32.divide(log2_e, c))
    alone = row_max == NEGATIVE_INFINITY
    none = xp.broadcast_to(sink == NEGATIVE_INFINITY, alone.shape)
    one = np.uint32(np.float32(2.0**softmax.p_offset * softmax.p_scale).view(np.uint32))
    return (
        o,
        xp.where(alone & ~none, xp.broadcast_to(in_units_of_s, alone.shape), row_max),
        xp.where(none, row_sum, xp.where(alone, one, total)),
    )


def _natural_sink(
    row_max: Array, row_sum: Array, sink: Array, softmax: Softmax
) -> tuple[Array, Array]:
    """The factor that normalises O, and lse."""
    xp = _backend.namespace(row_max, row_sum)
    natural = _float32.multiply(row_max, LN_2)
    sink = xp.broadcast_to(sink, natural.shape)
    most = _float32.maximum_number(natural, sink)

    def power(x: Array) -> Array:
        x = _float32.multiply(_float32.subtract(x, most), LOG2_E)
        return special.exp2_bits(x, model=softmax.exp2)

    scale = power(natural)
    lift = np.uint32(np.float32(2.0**softmax.p_offset).view(np.uint32))
    total = _float32.fma(row_sum, scale, _float32.multiply(power(sink), lift))
    log = special.log2_bits(total, model=softmax.log2)
    lse = _float32.subtract(
        _float32.fma(log, LN_2, most), _float32.multiply(integer(softmax.p_offset), LN_2)
    )
    return _float32.divide(scale, total), lse


def _inverse(row_sum: Array, softmax: Softmax) -> Array:
    """The factor that normalises O."""
    xp = _backend.namespace(row_sum)
    if softmax.normalisation == "division":
        return _clamped_inverse(row_sum)
    if softmax.normalisation == "zero_safe_reciprocal":
        row_sum = xp.where(_no_sum(row_sum), _float32.ONE, row_sum)
    if softmax.normalisation == "zeroing_reciprocal":
        inverse = special.reciprocal_bits(row_sum, model=softmax.reciprocal)
        return xp.where(_no_sum(row_sum), np.uint32(0), inverse)
    return special.reciprocal_bits(row_sum, model=softmax.reciprocal)


def _clamped_inverse(row_sum: Array) -> Array:
    xp = _backend.namespace(row_sum)
    one = xp.full(row_sum.shape, _float32.ONE, dtype=np.uint32)
    return _float32.divide(one, _float32.maximum_number(row_sum, _SMALLEST_SUM))


def _log_sum_exp(
    row_max: Array, row_sum: Array, c: Array, softmax: Softmax, natural: Array | None = None
) -> Array:
    """lse of rows that are not dead."""
    if softmax.lse == "natural_sum":
        return _float32.add(row_max, special.log_bits(row_sum, model=softmax.log2))
    xp = _backend.namespace(row_max, row_sum)
    if softmax.lse in ("factor_fma", "scale_fma"):
        unit = np.float32(2.0**-softmax.p_offset / softmax.p_scale).view(np.uint32)
        log2 = special.log2_bits(_float32.multiply(row_sum, np.uint32(unit)), model=softmax.log2)
        log = _float32.multiply(log2, LN_2)
        if softmax.lse == "scale_fma":
            factor = softmaxes.against(_float32.ONE if natural is None else natural, row_max)
            return _float32.fma(row_max, factor, log)
        factor = softmaxes.against(_float32.multiply(c, LN_2), row_max)
        lse = _float32.fma(row_max, factor, log)
        return xp.where(_no_sum(row_sum), NEGATIVE_INFINITY, lse)
    log2 = special.log2_bits(row_sum, model=softmax.log2)
    offset = integer(softmax.p_offset)
    match softmax.lse:
        case "log2_sum":
            base = _float32.subtract(row_max, offset) if softmax.p_offset else row_max
            return _float32.multiply(_float32.add(base, log2), LN_2)
        case "log2_fma":
            log2 = _float32.subtract(log2, offset) if softmax.p_offset else log2
            if softmax.p_scale != 1:
                log2 = _float32.subtract(log2, softmaxes.log2_of(softmax.p_scale))
            c = softmaxes.against(c, row_max)
            lse = _float32.multiply(_float32.fma(row_max, c, log2), LN_2)
            return xp.where(_no_sum(row_sum), NEGATIVE_INFINITY, lse)
        case "natural_fma":
            lse = _float32.fma(row_max, LN_2, _float32.multiply(log2, LN_2))
            return _float32.subtract(lse, _float32.multiply(offset, LN_2))


def _no_sum(row_sum: Array) -> Array:
    return _float32.is_zero(row_sum) | _float32.is_nan(row_sum)
