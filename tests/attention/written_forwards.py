"""Forwards of the recipes written out in JAX and float64, with quantizers of their own, to be differentiated.

They follow the steps in the recipes' docstrings; none of it reads a recipe's data. Arrays of one document: q, k, v
[heads, tokens, channels], every query head with keys of its own.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.attention.masks import visible

LOG2_E = 1 / np.log(2.0)
BLOCK = 32
fixed = jax.lax.stop_gradient


class Scores(NamedTuple):
    """What is between q, k and P besides a recipe.

    `seen`, `cut` [n, m]: the pairs that are visible, and those in guarded blocks; `worked` [n, whole key tiles]: those
    that are worked on; `scale`; `cap`, 0 for none; `sink` [heads], -inf for none; `tile`: keys of a tile.
    """

    seen: Any
    cut: Any
    worked: Any
    scale: Any
    cap: Any
    sink: Any


def through(x, quantized):
    """`quantized` with the derivative of `x`."""
    return x + fixed(quantized - x)


def single(x):
    return x.astype(np.float32).astype(np.float64)


def rounded(x, bits: int, least: int):
    """x to nearest even with `bits` significand bits, and no unit below 2^least."""
    exponent = jnp.maximum(jnp.frexp(x)[1] - bits, least)
    return jnp.ldexp(jnp.round(jnp.ldexp(x, -exponent)), exponent)


def e4m3(x):
    return jnp.clip(rounded(single(x), 4, -9), -448, 448)


def e2m1(x):
    return jnp.clip(rounded(single(x), 2, -1), -6, 6)


def bf16(x):
    return rounded(single(x), 8, -133)


def power_above(x):
    """The exponent of the smallest power of two that is not below x, -127 at least."""
    mantissa, exponent = jnp.frexp(x)
    power = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    return jnp.where(x == 0, -127, jnp.maximum(power, -127))


def in_blocks(x, rows: int, columns: int):
    heads, n, m = x.shape
    padded = jnp.pad(single(x), ((0, 0), (0, -n % rows), (0, -m % columns)))
    return padded.reshape(heads, -(-n // rows), rows, -(-m // columns), columns)


def out_of_blocks(blocks, shape):
    heads, rows, height, columns, width = blocks.shape
    return blocks.reshape(heads, rows * height, columns * width)[:, : shape[1], : shape[2]]


def mx_powers(blocks):
    amax = jnp.abs(blocks).max(axis=(2, 4), keepdims=True)
    return power_above(single(amax * np.float64(np.float32(1 / 448))))


def mx(x, rows: int, columns: int):
    """x [heads, n, m] in blocks of rows x columns: its values, and the powers of two of its blocks, spread."""
    blocks = in_blocks(x, rows, columns)
    power = mx_powers(blocks)
    values = jnp.ldexp(e4m3(jnp.ldexp(blocks, -power)), power)
    spread = jnp.broadcast_to(jnp.ldexp(np.float64(1), power), blocks.shape)
    return out_of_blocks(values, x.shape), out_of_blocks(spread, x.shape)


def mxq(rows, columns):
    return lambda x: through(x, mx(x, rows, columns)[0])


def by_token(x):
    return through(x, mx(x, 1, x.shape[2])[0])


def by_previous(first: int):
    """Blocks of 32 tokens of one channel, each by the scale of the one before it, the first by 2^first."""

    def quantized(x):
        blocks = in_blocks(x, BLOCK, 1)
        power = mx_powers(blocks)
        power = jnp.concatenate([jnp.full_like(power[:, :1], first), power[:, :-1]], axis=1)
        values = jnp.ldexp(e4m3(jnp.ldexp(blocks, -power)), power)
        return through(x, out_of_blocks(values, x.shape))

    return quantized


def static(power: int):
    """e4m3 of what 2^power divides."""
    return lambda x: through(x, jnp.ldexp(e4m3(jnp.ldexp(x, -power)), power))


def fp4_powers(x):
    """e2m1 by powers of two of 16 channels, none more than 2^14 below that of the token."""
    blocks = in_blocks(x, 1, 16)
    power = power_above(jnp.abs(blocks).max(axis=4, keepdims=True) / 6)
    power = jnp.maximum(power, power.max(axis=3, keepdims=True) - 14)
    values = jnp.ldexp(e2m1(jnp.ldexp(blocks, -power)), power)
    return through(x, out_of_blocks(values, x.shape))


def fp4_fractions(x):
    """e2m1 by scales in UE4M3 of 16 channels, under a power of two of the token."""
    token = power_above(jnp.abs(x).max(axis=2, keepdims=True) / 2688)
    blocks = in_blocks(jnp.ldexp(x, -token), 1, 16)
    scale = e4m3(single(jnp.abs(blocks).max(axis=4, keepdims=True) / 6))
    codes = e2m1(single(blocks / jnp.where(scale == 0, 1, scale)))
    values = out_of_blocks(jnp.where(scale == 0, 0, codes * scale), x.shape)
    return through(x, jnp.ldexp(values, token))


def nvfp4(x):
    """e2m1 by scales of 16 elements of a row, amax / 6 in e4m3 and 2^-9 at least."""
    blocks = in_blocks(x, 1, 16)
    scale = jnp.maximum(e4m3(single(jnp.abs(blocks).max(axis=4, keepdims=True) / 6)), 2.0**-9)
    return out_of_blocks(e2m1(single(blocks / scale)) * scale, x.shape)


def exponents(s, scores: Scores):
    """Scores in log2 units: scaled, under the cap if there is one."""
    s = s * scores.scale
    cap = jnp.where(scores.cap == 0, 1.0, scores.cap)
    return jnp.where(scores.cap == 0, s, cap * jnp.tanh(s / cap)) * LOG2_E


def softmax(t, scores: Scores, v, *, rounding, threshold, offset, whole, weights, **options):
    """Running softmax by key tiles: O [heads, n, channels] and lse [heads, n].

    Options: `reverse`, the order of tiles; `tile`, their keys; `splits`; `masked`, the t of masked pairs; `of_codes`,
    whether the row sum is that of P as O takes it, which `weights` then gives besides; `sink_first`, whether the sink
    is the base and 1 the row sum before the first tile.
    """
    tile, splits = options.get("tile", 128), options.get("splits", 1)
    heads, n, m = t.shape
    extra = -m % tile
    seen = jnp.pad(scores.seen, ((0, 0), (0, extra)))
    t = jnp.pad(t, ((0, 0), (0, 0), (0, extra)))
    v = jnp.pad(v, ((0, 0), (0, extra), (0, 0)))
    scores = scores._replace(cut=jnp.pad(scores.cut, ((0, 0), (0, extra))))
    alive = seen.any(axis=1)[:, None]
    present = seen
    if "masked" in options:
        t = jnp.where(seen, t, options["masked"])
        present = scores.worked
    t = jnp.where(present, t, -jnp.inf)

    tiles = list(range(0, m, tile))
    worked = scores.worked[:, ::tile]
    turn = jnp.cumsum(worked, axis=1) - 1
    length = -(-worked.sum(axis=1, keepdims=True) // splits)
    run = turn // jnp.maximum(length, 1)
    states = []
    for split in range(splits):
        base = jnp.full((heads, n, 1), -jnp.inf)
        total = jnp.zeros((heads, n, 1))
        if "sink_first" in options:
            log2_sink = (scores.sink * LOG2_E)[:, None, None]
            base = jnp.broadcast_to(fixed(log2_sink), base.shape)
            finite = jnp.where(log2_sink == -jnp.inf, 0, log2_sink)
            one = jnp.where(log2_sink == -jnp.inf, 0, jnp.exp2(finite - fixed(finite)))
            total = total + one
        o = jnp.zeros((heads, n, v.shape[2]))
        for first in reversed(tiles) if options.get("reverse") else tiles:
            columns = slice(first, first + tile)
            mine = (run[:, first // tile] == split)[:, None] | (splits == 1)
            level = jnp.where(mine, jnp.ceil(t) if whole else t, -jnp.inf)
            most = fixed(level[:, :, columns].max(axis=2, keepdims=True))
            moves = (base == -jnp.inf) | (most - base > threshold)
            new = jnp.where(moves, jnp.maximum(base, most), base)
            finite = jnp.where(new == -jnp.inf, 0, new)
            decay = jnp.where(base == -jnp.inf, 0, jnp.exp2(base - finite))
            visible = present[:, columns] & mine
            shown = jnp.where(visible, t[:, :, columns], 0)
            p = jnp.where(visible, jnp.exp2(shown - finite + offset), 0)
            product, codes = weights(p, v, columns, rounding, scores)
            total = total * decay + (codes if "of_codes" in options else p).sum(
                axis=2, keepdims=True
            )
            o = o * decay + product
            base = new
        states.append((base, total, o))

    sink = (scores.sink * LOG2_E)[:, None, None]
    base = functools.reduce(jnp.maximum, [state[0] for state in states])
    finite = jnp.where(base == -jnp.inf, 0, base)
    shares = [jnp.exp2(one - finite) for one, *_ in states]
    total = sum(share * one for share, (_, one, _) in zip(shares, states, strict=True))
    o = sum(share * one for share, (_, _, one) in zip(shares, states, strict=True))
    if "sink_first" not in options:
        total = total + jnp.exp2(sink - finite + offset)
    some = jnp.where(alive, total, 1)
    lse = jnp.where(alive, finite - offset + jnp.log2(some), sink) / LOG2_E
    return jnp.where(alive, o, 0) / some, lse[:, :, 0]


def plain(quantizer=lambda v: v):
    """P and V each by itself."""

    def weights(p, v, columns, rounding, scores):
        codes = through(p, rounding(p))
        return codes @ quantizer(v)[:, columns], codes

    return weights


def folded(p, v, columns, rounding, scores):
    """V's token scale goes into P before that is quantized."""
    _, scale = mx(v, 1, v.shape[2])
    given = np.arange(v.shape[1]) < scores.seen.shape[1]  # past the document's end scales are 1
    scales = jnp.where(given, scale[:, :, 0], 1)[:, None, columns]
    codes = through(p, rounding(p * scales) / scales)
    return codes @ by_token(v)[:, columns], codes


def guarded(high):
    """V in blocks of 32 x 32; guarded blocks take P in bfloat16, and `high` of v and its codes' values."""

    def weights(p, v, columns, rounding, scores):
        inside, quantized = scores.cut[:, columns], mxq(32, 32)(v)
        low = jnp.where(inside, 0, through(p, e4m3(p)))
        top = jnp.where(inside, through(p, bf16(p)), 0)
        return low @ quantized[:, columns] + top @ high(v, quantized)[:, columns], low + top

    return weights


def inputs(x, quantized):
    return x


def codes(x, quantized):
    return through(x, bf16(quantized))


def by_head(group: int):
    """e4m3 by one float32 of a document and `group` heads: the largest magnitude over 448, 1 where that is 0."""

    def quantized(x):
        grouped = x.reshape(x.shape[0] // group, -1)
        amax = jnp.abs(grouped).max(axis=1, keepdims=True, initial=0)
        descale = jnp.where(amax == 0, 1, single(amax / 448))
        return through(x, (e4m3(grouped / descale) * descale).reshape(x.shape))

    return quantized


def unscaled(x):
    return through(x, e4m3(x))


def without_what_overflows(p):
    """e4m3(16 P) / 16, and 0 from where 16 P rounds past 448."""
    return jnp.where(single(16 * p) > 464, 0, e4m3(16 * p) / 16)


def bf16_fa4(q, k, v, scores):
    t = exponents(q @ k.mT, scores)
    knobs = {"threshold": 8, "offset": 0, "whole": False, "reverse": True}
    return softmax(t, scores, v, rounding=bf16, weights=plain(), **knobs)


def cudnn_mxfp8(q, k, v, scores, weights=None, quantize_q=None, **options):
    quantize = mxq(1, 32)
    t = exponents((quantize_q or quantize)(q) @ quantize(k).mT, scores)
    weights = plain(mxq(32, 1)) if weights is None else weights
    knobs = {"threshold": 4, "offset": 4, "whole": False, "rounding": e4m3} | options
    return softmax(t, scores, v, weights=weights, **knobs)


def cudnn_mxfp8_pv_bf16(q, k, v, scores):
    return cudnn_mxfp8(q, k, v, scores, weights=plain(), rounding=bf16, offset=0)


def cudnn_mxfp8_reference(q, k, v, scores):
    knobs = {"threshold": 4 * LOG2_E, "offset": 0, "rounding": without_what_overflows}
    return cudnn_mxfp8(q, k, v, scores, sink_first=True, **knobs)


def fp8_fa4(q, k, v, scores, tile=128):
    t = exponents(by_head(2)(q) @ by_head(1)(k).mT, scores)
    knobs = {"threshold": 0, "offset": 8, "whole": False, "reverse": True, "tile": tile}
    return softmax(t, scores, v, rounding=e4m3, weights=plain(by_head(1)), **knobs)


def fp8_fa3(q, k, v, scores):
    return fp8_fa4(q, k, v, scores, tile=224)


def cutlass_fp8(q, k, v, scores):
    t = exponents(unscaled(q) @ unscaled(k).mT, scores)
    knobs = {"threshold": 0, "offset": 0, "whole": False}
    return softmax(t, scores, v, rounding=e4m3, weights=plain(unscaled), **knobs)


def flamia_mxfp8_folded(q, k, v, scores, quantize=by_token, **options):
    t = exponents(quantize(q) @ quantize(k).mT, scores)
    knobs = {"threshold": 0, "offset": 0, "whole": True, "rounding": lambda p: mx(p, 1, 32)[0]}
    return softmax(t, scores, v, weights=folded, **knobs, **options)


def flamia_nvfp4_fp8(q, k, v, scores):
    return flamia_mxfp8_folded(q, k, v, scores, fp4_powers)


def flamia_nvfp4_fp8_ue4m3(q, k, v, scores):
    return flamia_mxfp8_folded(q, k, v, scores, fp4_fractions)


def flamia_mxfp8(q, k, v, scores, high=inputs, **options):
    low_q, low_k = by_token(q), mxq(32, 32)(k)
    inside = high(q, low_q) @ high(k, low_k).mT
    t = exponents(jnp.where(scores.cut, inside, low_q @ low_k.mT), scores)
    knobs = {"threshold": 0, "offset": 8, "whole": True, "rounding": None} | options
    return softmax(t, scores, v, weights=guarded(high), **knobs)


def flamia_mxfp8_unguarded(q, k, v, scores, quantize=None, **options):
    t = exponents(mxq(32, 32)(q) @ mxq(32, 32)(k).mT, scores)
    knobs = {"threshold": 0, "offset": 8, "whole": True, "rounding": e4m3} | options
    return softmax(t, scores, v, weights=plain(quantize or mxq(32, 32)), **knobs)


def attn_qat_nvfp4(q, k, v, scores):
    q, k = (through(x, nvfp4(x)) for x in (q, k))
    masked = -1e6 * LOG2_E * jnp.where(scores.cap == 0, scores.scale, 1)
    knobs = {"threshold": 0, "offset": 0, "whole": False, "rounding": nvfp4, "tile": 32}
    weights = plain(lambda x: through(x, nvfp4(x)))
    return softmax(exponents(q @ k.mT, scores), scores, v, weights=weights, masked=masked, **knobs)


FORWARDS = {
    function.__name__.replace("_", "-"): function
    for function in (
        attn_qat_nvfp4,
        bf16_fa4,
        cudnn_mxfp8,
        cudnn_mxfp8_pv_bf16,
        cudnn_mxfp8_reference,
        cutlass_fp8,
        flamia_mxfp8,
        flamia_mxfp8_folded,
        flamia_mxfp8_unguarded,
        flamia_nvfp4_fp8,
        flamia_nvfp4_fp8_ue4m3,
        fp8_fa3,
        fp8_fa4,
    )
}


@functools.cache
def _differentiated(forward):
    """A compiled function of one document."""

    def one(dout, q, k, v, sink, scale, cap, masks):
        group = q.shape[1] // k.shape[1]

        def out(q, k, v, sink):
            q, k, v = (jnp.moveaxis(x, 1, 0) for x in (q, k, v))
            k, v = (jnp.repeat(x, group, axis=0) for x in (k, v))
            out, lse = forward(q, k, v, Scores(*masks, scale, cap, sink))
            return jnp.moveaxis(out, 0, 1), lse

        (out, lse), pull = jax.vjp(out, q, k, v, sink)
        return out, lse, *pull((dout, jnp.zeros_like(lse)))

    return jax.jit(one)


def differentiated(forward, dout, q, k, v, sink, scale: float, cap: float, masks):
    """out, lse, dq, dk, dv and dsink of packed documents, with `seen`, `cut` and `worked` of each.

    Documents have nothing in common but the sink, so each is differentiated by itself; those of one shape compile once.
    """
    results = [np.zeros(dout.shape), np.broadcast_to(sink[:, None], (len(sink), len(q))).copy()]
    results += [np.zeros(x.shape) for x in (q, k, v, sink)]
    start = first = 0
    with jax.enable_x64(True):
        for masked in masks:
            n, m = masked[0].shape
            rows, keys = slice(start, start + n), slice(first, first + m)
            start, first = start + n, first + m
            if n == 0 or m == 0:
                continue
            given = [jnp.asarray(x) for x in (dout[rows], q[rows], k[keys], v[keys], sink)]
            scalars = [jnp.asarray(np.float64(x)) for x in (scale, cap)]
            found = _differentiated(forward)(*given, *scalars, masked)
            places = (rows, (slice(None), rows), rows, keys, keys, slice(None))
            for result, place, x in zip(results, places, found, strict=True):
                result[place] = x + result[place] if result is results[-1] else x
    return results


def dense_masks(queries: int, keys: int, tiles=(128, 128), skips: bool = True, **mask):
    """`seen`, `cut` and `worked` of one document, pair by pair."""
    seen = visible(queries, keys, **mask)
    return seen, guarded_blocks(seen), worked_on(seen, *tiles, skips)


def guarded_blocks(seen):
    """Blocks of 32 queries by 32 keys that hold a visible pair and a masked one, pair by pair."""
    n, m = seen.shape
    cut = np.zeros((n, m), dtype=bool)
    for i in range(0, n, BLOCK):
        for j in range(0, m, BLOCK):
            pairs = [
                key < m and seen[query, key]
                for query in range(i, min(i + BLOCK, n))
                for key in range(j, j + BLOCK)
            ]
            cut[i : i + BLOCK, j : j + BLOCK] = any(pairs) and not all(pairs)
    return cut


def worked_on(seen, rows: int, columns: int, skips: bool):
    """Pairs in pairs of tiles with a visible pair, or in all, up to whole key tiles."""
    n, m = seen.shape
    worked = np.zeros((n, -(-m // columns) * columns), dtype=bool)
    for i in range(0, n, rows):
        for j in range(0, m, columns):
            if seen[i : i + rows, j : j + columns].any() or not skips:
                worked[i : i + rows, j : j + columns] = True
    return worked
