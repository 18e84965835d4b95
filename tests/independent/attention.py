"""Attention forward of the recipe `flamia-mxfp8-folded`, one number at a time.

The steps are those of the recipe's description: token scales for q, k and v, S by the scaled
tensor-core instruction, a softmax whose base is an integer, V's scale folded into P before P is
quantized over 32 keys, one O chain per row over all key blocks of the document. Key tiles of 128
and blocks of 32 start at the document.

Where the description is silent:

- t = +inf counts as NaN; a NaN t of a visible pair makes m NaN from its key tile on, and with it P
  of every visible pair of the row from there, l, O, out and lse.
- A visible t = -inf has P = 0 and n = -inf; -inf - (-inf) is 0, -inf - (a number) shifts to 0.
- The O chain covers masked blocks too (P = 0), so a NaN code of V reaches every row of the
  document that is not dead.
- A row with m = -inf (no visible key, or only t = -inf) is dead: out = o = +0, lse = -inf.
- A row maximum of zero is +0.
"""

import decimal
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.independent import float32, machine, mufu
from tests.independent.quantizer import quantize

BLOCK = 32
TILE = 128
LANES = 8
UNIT_SCALE = 127  # E8M0 byte of 2**0
LN2 = 0x3F317218

Bits = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class Vector:
    """One token of one head, quantized: codes along the channels and one scale byte."""

    codes: list[int]
    scale: int


@dataclass(kw_only=True)
class Row:
    """All stages of one query row of one head; lists over the keys of the document."""

    s: list[int]
    p: list[int] = field(default_factory=list)
    p_codes: list[int] = field(default_factory=list)
    p_scales: list[int] = field(default_factory=list)
    row_max: int = float32.MINUS_INFINITY
    row_sum: int = 0
    o: list[int] = field(default_factory=list)
    out: list[int] = field(default_factory=list)
    lse: int = float32.MINUS_INFINITY


def score_factor(softmax_scale: float) -> int:
    """float32 bits of softmax_scale * log2(e), the exact product rounded once.

    Raises ValueError unless softmax_scale is positive and finite.
    """
    if not (softmax_scale > 0 and math.isfinite(softmax_scale)):
        raise ValueError(f"softmax_scale {softmax_scale!r}: pass a positive finite number")
    context = decimal.Context(prec=60)
    log2_e = Fraction(context.divide(1, decimal.Decimal(2).ln(context)))
    margin = Fraction(1, 10**55)
    low, high = (
        float32.nearest(Fraction(softmax_scale) * (log2_e + error)) for error in (-margin, margin)
    )
    if low != high:
        raise ArithmeticError(f"softmax_scale {softmax_scale!r} is too near a rounding boundary")
    return low


def forward(
    q_bits: Bits,
    k_bits: Bits,
    v_bits: Bits,
    cu_seqlens: Sequence[int] | Bits,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
) -> dict[str, Any]:
    """Run the forward pass and return every stage.

    ``q_bits`` is [tokens, heads, head_dim], ``k_bits`` and ``v_bits`` are [tokens, kv_heads,
    head_dim], all bfloat16 bits (uint16). ``cu_seqlens`` runs from 0 to tokens; documents may be
    empty. ``softmax_scale`` is a float64, 1 / sqrt(head_dim) by default.

    Returned arrays (bits are unsigned integers):

    - ``out`` uint16 [tokens, heads, head_dim], ``lse`` uint32 [heads, tokens]
    - ``q.codes``, ``k.codes``, ``v.codes`` uint8 of the input's shape; ``q.scales``, ``k.scales``,
      ``v.scales`` uint8 [tokens, that operand's heads, 1]
    - ``row_max``, ``row_sum`` uint32 [heads, tokens]: final m and l
    - ``o`` uint32 [tokens, heads, head_dim]: normalised, before output rounding
    - lists, one array a document: ``s`` and ``p`` uint32 [heads, queries, keys], ``p.o.codes``
      uint8 [heads, queries, keys], ``p.o.scales`` uint8 [heads, queries, ceil(keys / 32)]. ``s``
      holds masked pairs too; ``p`` and its codes are relative to the m of their key tile, and 0
      where masked.

    Raises ValueError for shapes or bounds that do not fit.
    """
    tokens, heads, head_dim = q_bits.shape
    kv_heads = k_bits.shape[1]
    bounds = [int(bound) for bound in cu_seqlens]
    if k_bits.shape != v_bits.shape or k_bits.shape != (tokens, kv_heads, head_dim):
        raise ValueError(
            f"shapes {q_bits.shape}, {k_bits.shape}, {v_bits.shape}: make k and v fit q"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} heads over {kv_heads}: pass a multiple")
    if bounds[0] != 0 or bounds[-1] != tokens or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens {bounds}: must ascend from 0 to {tokens}")
    c = score_factor(1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale)

    q, k, v = (_quantize_operand(bits) for bits in (q_bits, k_bits, v_bits))
    result: dict[str, Any] = {}
    for name, operand in (("q", q), ("k", k), ("v", v)):
        shape = (tokens, heads if name == "q" else kv_heads)
        result[f"{name}.codes"] = np.zeros((*shape, head_dim), np.uint8)
        result[f"{name}.scales"] = np.zeros((*shape, 1), np.uint8)
        for token, head in np.ndindex(*shape):
            vector = operand[token][head]
            result[f"{name}.codes"][token, head] = vector.codes
            result[f"{name}.scales"][token, head] = vector.scale
    result["out"] = np.zeros((tokens, heads, head_dim), np.uint16)
    result["o"] = np.zeros((tokens, heads, head_dim), np.uint32)
    for name in ("lse", "row_max", "row_sum"):
        result[name] = np.zeros((heads, tokens), np.uint32)
    for name in ("s", "p", "p.o.codes", "p.o.scales"):
        result[name] = []

    for start, end in itertools.pairwise(bounds):
        length = end - start
        pairs = (heads, length, length)
        s, p = np.zeros(pairs, np.uint32), np.zeros(pairs, np.uint32)
        codes = np.zeros(pairs, np.uint8)
        scales = np.zeros((heads, length, -(-length // BLOCK)), np.uint8)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            keys = [k[token][kv_head] for token in range(start, end)]
            values = [v[token][kv_head] for token in range(start, end)]
            for query in range(length):
                token = start + query
                visible = query + 1 if causal else length
                row = _attend(q[token][head], keys, values, c, visible)
                s[head, query], p[head, query] = row.s, row.p
                codes[head, query], scales[head, query] = row.p_codes, row.p_scales
                result["out"][token, head], result["o"][token, head] = row.out, row.o
                result["lse"][head, token] = row.lse
                result["row_max"][head, token] = row.row_max
                result["row_sum"][head, token] = row.row_sum
        for name, array in (("s", s), ("p", p), ("p.o.codes", codes), ("p.o.scales", scales)):
            result[name].append(array)
    return result


def _quantize_operand(bits: Bits) -> list[list[Vector]]:
    """Step 1: one scale a token and head; indexed [token][head]."""
    operand = []
    for token in bits.tolist():
        vectors = []
        for channels in token:
            codes, scale = quantize([float32.from_bfloat16(x) for x in channels])
            vectors.append(Vector(codes=codes, scale=scale))
        operand.append(vectors)
    return operand


def _attend(query: Vector, keys: list[Vector], values: list[Vector], c: int, visible: int) -> Row:
    """Steps 2 to 7 for one query; it sees the first ``visible`` keys of its document."""
    row = Row(s=[_score(query, key) for key in keys])
    channels = [[value.codes[channel] for value in values] for channel in range(len(query.codes))]
    accumulators = [0] * len(channels)
    exponents = [_split_exponential(score, c) for score in row.s[:visible]]

    for start in range(0, len(keys), TILE):
        end = min(start + TILE, len(keys))
        # Step 4: the new maximum, and what it does to the sums so far.
        tile = exponents[start : min(end, visible)]
        old_max, row.row_max = row.row_max, _maximum([row.row_max, *(n for _, n in tile)])
        rescale = _shift_by_difference(old_max, row.row_max)
        row.row_sum = rescale(row.row_sum)
        accumulators = [rescale(accumulator) for accumulator in accumulators]
        p = [_shift_by_difference(n, row.row_max)(e) for e, n in tile] + [0] * (
            end - start - len(tile)
        )
        row.p += p
        # Step 5.
        row.row_sum = _add_by_lanes(row.row_sum, p)
        # Step 6.
        for block in range(start, end, BLOCK):
            block_end = min(block + BLOCK, end)
            codes, scale = quantize(
                [
                    float32.shift(row.p[key], values[key].scale - UNIT_SCALE)
                    for key in range(block, block_end)
                ]
            )
            row.p_codes += codes
            row.p_scales.append(scale)
            accumulators = [
                machine.scaled_chain(
                    codes, channel[block:block_end], [scale], [UNIT_SCALE], c_bits=accumulator
                )[0]
                for accumulator, channel in zip(accumulators, channels, strict=True)
            ]
    _normalise(row, accumulators)
    return row


def _score(query: Vector, key: Vector) -> int:
    """Step 2: S of one pair, channels in ascending steps of 32, the same bytes in each step."""
    steps = -(-len(query.codes) // machine.SCALED_TERMS)
    return machine.scaled_chain(query.codes, key.codes, [query.scale] * steps, [key.scale] * steps)[
        -1
    ]


def _split_exponential(score: int, c: int) -> tuple[int, int]:
    """Step 3: (E, n) with 2**(score * c) about E * 2**n; float32 bits, n integer-valued."""
    t = float32.multiply(score, c)
    if float32.is_nan(t) or t == float32.INFINITY:
        return float32.NAN, float32.NAN
    if t == float32.MINUS_INFINITY:
        return 0, float32.MINUS_INFINITY
    n = float32.ceiling(t)
    return mufu.exp2(float32.fused_multiply_add(score, c, float32.negate(n))), n


def _maximum(values: Sequence[int]) -> int:
    """The largest of some float32 that are integers or -inf; NaN if there is one, zero is +0."""
    if any(float32.is_nan(x) for x in values):
        return float32.NAN
    finite = [float32.value(x) for x in values if not float32.is_infinite(x)]
    return float32.nearest(max(finite)) if finite else float32.MINUS_INFINITY


def _shift_by_difference(n: int, m: int) -> Callable[[int], int]:
    """The function that shifts a float32 by the exact n - m; n <= m, integers or -inf, or NaN."""
    if float32.is_nan(n) or float32.is_nan(m):
        return lambda _: float32.NAN
    exponent: int | float
    if n == float32.MINUS_INFINITY:
        exponent = 0 if m == float32.MINUS_INFINITY else -math.inf
    else:
        exponent = int(float32.value(n) - float32.value(m))
    return lambda x: float32.shift(x, exponent)


def _add_by_lanes(start: int, p: Sequence[int]) -> int:
    """Step 5: the row sum after one key tile, by eight lanes."""
    lanes = [start] + [0] * (LANES - 1)
    for column, x in enumerate(p):
        lanes[column % LANES] = float32.add(lanes[column % LANES], x)
    add = float32.add
    even = add(add(lanes[0], lanes[2]), add(lanes[4], lanes[6]))
    odd = add(add(lanes[1], lanes[3]), add(lanes[5], lanes[7]))
    return add(even, odd)


def _normalise(row: Row, accumulators: Sequence[int]) -> None:
    """Step 7: o, out and lse of a finished row."""
    if row.row_max == float32.MINUS_INFINITY:
        row.o = [0] * len(accumulators)
        row.out = [0] * len(accumulators)
        row.lse = float32.MINUS_INFINITY
        return
    inverse = mufu.reciprocal(row.row_sum)
    row.o = [float32.multiply(accumulator, inverse) for accumulator in accumulators]
    row.out = [float32.to_bfloat16(o) for o in row.o]
    row.lse = float32.multiply(float32.add(row.row_max, mufu.log2(row.row_sum)), LN2)
