"""One side of a matrix product on tiles, and the products.

A side is rows of an input (q, k, v, dO), or the codes of pairs (P, dS). Each product is compiled by itself: all recipes
share the program of an instruction and a shape.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from flamia_ref import _backend, _float32, _primitive
from flamia_ref._backend import Array
from flamia_ref.arithmetic import INSTRUCTIONS, special
from flamia_ref.arithmetic.instructions import Scaling
from flamia_ref.arithmetic.products import chain
from flamia_ref.attention.product import Operand, Product
from flamia_ref.formats import (
    BF16,
    E8M0,
    FORMATS,
    FP32,
    PRESETS,
    Overflow,
    decode_bits,
    encode,
    encode_bits,
    quantize_bits,
    value_bits,
)

BLOCK = 32
UNIT = np.uint8(127)  # e8m0 code of 2^0
_BFLOAT16 = ("bf16", "bf16")


class Rows(NamedTuple):
    """Rows of an input for one use.

    Attributes:
        codes: over channels [tiles, rows, channels], over rows [rows, tiles, channels].
        scales: over channels [tiles, rows, channel blocks], over rows [row blocks, tiles, channels]; None for operands
            without scales.
        fold: [tiles, rows], the scales that the other side takes instead.
        high: bfloat16 codes for guarded blocks, [tiles, rows, channels]; for a product that is corrected those of the
            mean that was taken off the left side, and of the right side before it was quantized.
        shift: int32 [tiles, rows], powers of two that a product over channels is multiplied by, where rows have such a
            scale besides those of their blocks.
    """

    codes: Array
    scales: Array | None = None
    fold: Array | None = None
    high: Array | None = None
    shift: Array | None = None


class Pairs(NamedTuple):
    """Codes of pairs [tiles, queries, keys] for one use, and their scales in the shape of their blocks, None if none
    follows from the values."""

    codes: Array
    scales: Array | None


class Left(NamedTuple):
    """The pairs' side of a product over rows: codes [rows, tiles, others], scales [row blocks, tiles, others] or
    None."""

    codes: Array
    scales: Array | None


def taken_format(operand: Operand) -> str:
    """The name of the scalar format in which a product takes an operand."""
    return BF16.name if operand.dequantized else element(operand)


def element(operand: Operand) -> str:
    """The name of an operand's element format, that of its codes."""
    if operand.format in PRESETS:
        return PRESETS[operand.format].element.name
    return operand.format


def bfloat16(x: Array) -> Array:
    """bfloat16 codes of float32 bits, to nearest even, overflow to infinity."""
    return encode_bits(x, BF16, overflow=Overflow.NATIVE)


def encoded_pairs(x: Array, operand: Operand, fold: Array | None) -> Pairs:
    """Codes of float32 bits [tiles, queries, keys]. `fold`: bytes that broadcast against `x`, whose powers are taken in
    first."""
    if fold is not None:
        x = _float32.shift(x, fold.astype(np.int32) - np.int32(127))
    if operand.format in PRESETS:
        return Pairs(*quantize_bits(x, PRESETS[operand.format], operand.block))
    scalar = FORMATS[operand.format]
    overflow = Overflow.NATIVE if scalar is BF16 else Overflow.SATURATE
    return Pairs(encode_bits(x, scalar, overflow=overflow), None)


def divided_pairs(x: Array, divisors: Array, operand: Operand, reciprocal: str) -> Pairs:
    """Codes of float32 bits [tiles, queries, keys] times the reciprocals of `divisors` [tiles, queries, blocks], which
    are the scales, themselves rounded to the scale format."""
    xp, preset = _backend.namespace(x, divisors), PRESETS[operand.format]
    inverse = special.reciprocal_bits(divisors, model=reciprocal)
    inverse = xp.repeat(inverse, x.shape[2] // inverse.shape[2], axis=2)
    codes = encode_bits(_float32.multiply(x, inverse), preset.element)
    return Pairs(codes, encode_bits(divisors, preset.scale))


def in_static_units(x: Array, operand: Operand) -> Array:
    """float32 bits divided by a static scale; P takes its own by `p_offset` instead."""
    if operand.static_scale is None or operand.static_scale == UNIT:
        return x
    xp = _backend.namespace(x)
    return _float32.shift(x, xp.full(x.shape, 127 - operand.static_scale, dtype=np.int32))


def pair_values(pairs: Pairs, operand: Operand, fold: Array | None) -> Array:
    """The values of `encoded_pairs` as float32 bits, without the scale that was taken over."""
    xp = _backend.namespace(pairs.codes)
    x = decode_bits(pairs.codes, FORMATS[element(operand)])
    if pairs.scales is not None:
        scales = pairs.scales
        for axis in (1, 2):
            scales = xp.repeat(scales, x.shape[axis] // scales.shape[axis], axis=axis)
        preset = PRESETS[operand.format]
        if preset.scale is E8M0:
            bad = _primitive.special(scales == np.uint8(255))
            moved = _float32.shift(x, scales.astype(np.int32) - np.int32(127))
            x = xp.where(bad, _float32.NAN, moved)
        else:
            x = value_bits(pairs.codes, scales, preset)
    elif operand.static_scale is not None:
        x = _float32.shift(x, xp.full(x.shape, operand.static_scale - 127, dtype=np.int32))
    if fold is None:
        return x
    back = np.int32(127) - xp.broadcast_to(fold, x.shape).astype(np.int32)
    return _float32.shift(x, back)


def rounded_bfloat16(x: Array) -> Array:
    """float32 bits rounded to bfloat16."""
    return bfloat16(x).astype(np.uint32) << np.uint32(16)


def over_channels(left: Rows, right: Rows, product: Product, guarded: Array | None) -> Array:
    """float32 bits [tiles, left rows, right rows] of a product over channels, from +0, or from a product of the `high`
    of both sides where the product is corrected.

    `guarded` [tiles, left rows / 32, slots]: the blocks of 32 right rows for which the guard instruction runs, -1 for
    none.
    """
    start = None
    if product.correction_instruction is not None:
        start = _correction(left.high, right.high, instruction=product.correction_instruction)
    one, other = (_taken(rows, product, side, 2) for rows, side in _both(left, right, product))
    s = _over_channels(
        one.codes,
        one.scales,
        other.codes,
        other.scales,
        left.shift,
        right.shift,
        start,
        instruction=product.instruction,
        formats=(one.format, other.format),
        scaling=scaling_of(product),
        k_order=product.k_order,
    )
    if guarded is None or left.high is None or product.guard_instruction is None:
        return s
    return _with_guarded(s, left.high, right.high, guarded, instruction=product.guard_instruction)


class _Taken(NamedTuple):
    """A side as an instruction takes it: codes, their scales, and the scalar format of the codes."""

    codes: Array
    scales: Array | None
    format: str


def _both(left: Rows | Left, right: Rows, product: Product) -> tuple[Any, Any]:
    return (left, product.left), (right, product.right)


def _taken(side: Rows | Left, product: Product, operand: Operand, axis: int) -> _Taken:
    """A side as the product's instruction takes it. An instruction without scales takes the values as float32, each
    rounded once; blocks are along `axis`."""
    name = taken_format(operand)
    if side.scales is None or INSTRUCTIONS[product.instruction].scalings:
        return _Taken(side.codes, side.scales, name)
    return _Taken(_float32_values(side.codes, side.scales, name=name, axis=axis), None, FP32.name)


@_backend.jit(static=("name", "axis"))
def _float32_values(codes: Array, scales: Array, *, name: str, axis: int) -> Array:
    xp = _backend.namespace(codes, scales)
    wide = xp.repeat(scales, BLOCK, axis=axis)
    wide = wide[(slice(None),) * axis + (slice(codes.shape[axis]),)]
    values = _float32.shift(
        decode_bits(codes, FORMATS[name]), wide.astype(np.int32) - np.int32(127)
    )
    return xp.where(_primitive.special(wide == np.uint8(255)), _float32.NAN, values)


def scaling_of(product: Product) -> Scaling | None:
    """How the instruction of a product takes scales, None if it takes none."""
    scalings = INSTRUCTIONS[product.instruction].scalings
    if not scalings:
        return None
    if product.left.format in PRESETS and not product.left.dequantized:
        preset = PRESETS[product.left.format]
        if preset.element.name == "e2m1":
            return Scaling(format=preset.scale.name, block=int(preset.block[1]))
    return next(iter(scalings), None)  # E8M0, blocks of 32


@_backend.jit(static=("instruction", "formats", "scaling", "k_order"))
def _over_channels(
    left: Array,
    left_scales: Array | None,
    right: Array,
    right_scales: Array | None,
    left_shift: Array | None,
    right_shift: Array | None,
    start: Array | None,
    *,
    instruction: str,
    formats: tuple[str, str],
    scaling: Scaling | None,
    k_order: str,
) -> Array:
    xp = _backend.namespace(left, right)
    shape = (left.shape[0], left.shape[1], right.shape[1])
    zeros = xp.zeros(shape, dtype=np.uint32)
    s = _contracted(
        xp.moveaxis(left, 2, 0),
        None if left_scales is None else xp.moveaxis(left_scales, 2, 0),
        xp.moveaxis(right, 2, 0),
        None if right_scales is None else xp.moveaxis(right_scales, 2, 0),
        zeros if start is None else xp.broadcast_to(start, shape),
        instruction,
        formats,
        scaling,
        k_order,
    )
    if left_shift is None or right_shift is None:
        return s
    return _float32.shift(s, left_shift[:, :, None] + right_shift[:, None, :])


@_backend.jit(static=("instruction",))
def _correction(left: Array, right: Array, *, instruction: str) -> Array:
    """float32 bits [tiles, 1, right rows] of the products of bfloat16 codes, rounded to bfloat16; all rows of the left
    are alike."""
    xp = _backend.namespace(left, right)
    products = _contracted(
        xp.moveaxis(left[:, :1], 2, 0),
        None,
        xp.moveaxis(right, 2, 0),
        None,
        xp.zeros((left.shape[0], 1, right.shape[1]), dtype=np.uint32),
        instruction,
        _BFLOAT16,
    )
    return rounded_bfloat16(products)


@_backend.jit(static=("instruction",))
def _with_guarded(
    s: Array, left: Array, right: Array, guarded: Array, *, instruction: str
) -> Array:
    """`s` with the guarded blocks computed from bfloat16 codes."""
    xp = _backend.namespace(s, left, right)
    tiles, rows, columns = s.shape
    groups, slots = rows // BLOCK, guarded.shape[2]
    queries = left.reshape(tiles * groups, BLOCK, -1)
    keys = _key_blocks(right, guarded, xp).reshape(tiles * groups, slots * BLOCK, -1)
    high = _contracted(
        xp.moveaxis(queries, 2, 0),
        None,
        xp.moveaxis(keys, 2, 0),
        None,
        xp.zeros((tiles * groups, BLOCK, slots * BLOCK), dtype=np.uint32),
        instruction,
        _BFLOAT16,
    ).reshape(tiles, groups, BLOCK, slots, BLOCK)
    blocks = s.reshape(tiles, groups, BLOCK, columns // BLOCK, BLOCK)
    for slot in range(slots):
        here = in_guarded(guarded[:, :, slot : slot + 1], columns, xp)
        blocks = xp.where(here, high[:, :, :, slot : slot + 1], blocks)
    return blocks.reshape(tiles, rows, columns)


def left_over_keys(pairs: Pairs, operand: Operand) -> Left:
    """The pairs' side of a product over keys."""
    xp = _backend.namespace(pairs.codes)
    pairs = _dequantized(pairs, operand)
    scales = pairs.scales
    if scales is not None:
        scales = xp.moveaxis(scales, 2, 0)
        if operand.block == (BLOCK, BLOCK):
            scales = xp.repeat(scales, BLOCK, axis=2)
    return _left(xp.moveaxis(pairs.codes, 2, 0), scales, operand)


def left_over_queries(pairs: Pairs, operand: Operand) -> Left:
    """The pairs' side of a product over queries."""
    xp = _backend.namespace(pairs.codes)
    pairs = _dequantized(pairs, operand)
    scales = pairs.scales
    if scales is not None:
        scales = xp.moveaxis(scales, 1, 0)
        if operand.block == (BLOCK, BLOCK):
            scales = xp.repeat(scales, BLOCK, axis=2)
    return _left(xp.moveaxis(pairs.codes, 1, 0), scales, operand)


def _dequantized(pairs: Pairs, operand: Operand) -> Pairs:
    """What a product takes of pairs: their codes and scales, or their values as bfloat16 codes."""
    if not operand.dequantized:
        return pairs
    return Pairs(bfloat16(pair_values(pairs, operand, None)), None)


def _left(codes: Array, scales: Array | None, operand: Operand) -> Left:
    xp = _backend.namespace(codes)
    if operand.static_scale is not None:
        shape = (codes.shape[0] // BLOCK, *codes.shape[1:])
        scales = xp.full(shape, operand.static_scale, dtype=np.uint8)
    return Left(codes, scales)


def over_rows(left: Left, right: Rows, accumulator: Array, product: Product) -> Array:
    """The accumulator [tiles, others, channels] after the rows of one tile."""
    one, other = (_taken(rows, product, side, 0) for rows, side in _both(left, right, product))
    return _over_rows(
        one.codes,
        one.scales,
        other.codes,
        other.scales,
        accumulator,
        instruction=product.instruction,
        formats=(one.format, other.format),
        scaling=scaling_of(product),
        k_order=product.k_order,
    )


@_backend.jit(static=("instruction", "formats", "scaling", "k_order"))
def _over_rows(
    left: Array,
    left_scales: Array | None,
    right: Array,
    right_scales: Array | None,
    accumulator: Array,
    *,
    instruction: str,
    formats: tuple[str, str],
    scaling: Scaling | None,
    k_order: str,
) -> Array:
    return _contracted(
        left,
        left_scales,
        right,
        right_scales,
        accumulator,
        instruction,
        formats,
        scaling,
        k_order,
    )


def over_guarded_keys(
    x: Array, right: Rows, accumulator: Array, product: Product, guarded: Array
) -> Array:
    """The accumulator [tiles, queries, channels] after the guarded blocks of one tile: bfloat16 of the float32 bits `x`
    [tiles, queries, keys] times the right side's values before quantization."""
    return _over_guarded_keys(
        x, right.high, accumulator, guarded, instruction=str(product.guard_instruction)
    )


@_backend.jit(static=("instruction",))
def _over_guarded_keys(
    x: Array, right: Array, accumulator: Array, guarded: Array, *, instruction: str
) -> Array:
    xp = _backend.namespace(x, accumulator)
    tiles, rows, columns = x.shape
    groups, slots = rows // BLOCK, guarded.shape[2]
    used = guarded >= 0
    blocks = xp.moveaxis(x.reshape(tiles, groups, BLOCK, columns // BLOCK, BLOCK), 3, 2)
    index = xp.maximum(guarded, 0)[:, :, :, None, None]
    blocks = xp.take_along_axis(blocks, index, axis=2)
    # A slot without a block is zeros on both sides, which add nothing.
    codes = xp.where(used[:, :, :, None, None], bfloat16(blocks), np.uint16(0))
    codes = xp.moveaxis(codes, 3, 2).reshape(tiles * groups, BLOCK, slots * BLOCK)
    keys = _key_blocks(right, guarded, xp)
    keys = xp.where(used[:, :, :, None, None], keys, np.uint16(0))
    keys = keys.reshape(tiles * groups, slots * BLOCK, -1)
    start = accumulator.reshape(tiles * groups, BLOCK, -1)
    end = _contracted(
        xp.moveaxis(codes, 2, 0),
        None,
        xp.moveaxis(keys, 1, 0),
        None,
        start,
        instruction,
        _BFLOAT16,
    )
    here = used.any(axis=2).reshape(tiles * groups, 1, 1)
    return xp.where(here, end, start).reshape(accumulator.shape)


def in_guarded(guarded: Array, keys: int, xp: ModuleType) -> Array:
    """Whether pairs are in a guarded block: bool [tiles, query blocks, 1, key blocks, 1]."""
    blocks = xp.arange(keys // BLOCK, dtype=np.int32)
    return (guarded[:, :, :, None] == blocks).any(axis=2)[:, :, None, :, None]


def without_guarded(x: Array, guarded: Array | None) -> Array:
    """float32 bits [tiles, queries, keys], +0 in guarded blocks."""
    return x if guarded is None else where_guarded(guarded, None, x)


def where_guarded(guarded: Array, high: Array | None, x: Array) -> Array:
    """float32 bits [tiles, queries, keys] of `high` in guarded blocks, +0 for None, and of `x` elsewhere."""
    xp = _backend.namespace(x, guarded)
    tiles, rows, keys = x.shape
    shape = (tiles, rows // BLOCK, BLOCK, keys // BLOCK, BLOCK)
    there = np.uint32(0) if high is None else high.reshape(shape)
    return xp.where(in_guarded(guarded, keys, xp), there, x.reshape(shape)).reshape(x.shape)


def _key_blocks(keys: Array, guarded: Array, xp: ModuleType) -> Array:
    """The guarded 32s of `keys` [tiles, keys, channels] for each query block: [tiles, query blocks, slots, 32,
    channels]."""
    tiles, count, channels = keys.shape
    groups, slots = guarded.shape[1:]
    blocks = keys.reshape(tiles, count // BLOCK, BLOCK, channels)
    index = xp.maximum(guarded, 0).reshape(tiles, groups * slots, 1, 1)
    found = xp.take_along_axis(blocks, index, axis=1)
    return found.reshape(tiles, groups, slots, BLOCK, channels)


def _contracted(
    left: Array,
    left_scales: Array | None,
    right: Array,
    right_scales: Array | None,
    accumulator: Array,
    instruction: str,
    formats: tuple[str, str],
    scaling: Scaling | None = None,
    k_order: str = "ascending",
) -> Array:
    """left [K, tiles, M] times right [K, tiles, N] onto [tiles, M, N]; scales [K / block, tiles, ...], None for 2^0."""
    xp = _backend.namespace(left, right)
    terms = INSTRUCTIONS[instruction].terms
    if k_order == "descending" and terms is not None:
        count = -(-left.shape[0] // terms)
        left, right = (_backwards(x, count, terms, np.uint8(0)) for x in (left, right))
        if scaling is not None:
            left_scales, right_scales = (
                None if x is None else _backwards(x, count, terms // scaling.block, _one(scaling))
                for x in (left_scales, right_scales)
            )

    def with_unit(scales: Array | None) -> Array:
        if scales is None or scaling is None:
            blocks = 0 if scaling is None else -(-left.shape[0] // scaling.block)
            return xp.full((blocks, 1, 1), UNIT, dtype=np.uint8)
        return scales

    return chain(
        left[:, :, :, None],
        right[:, :, None, :],
        with_unit(left_scales)[:, :, :, None],
        with_unit(right_scales)[:, :, None, :],
        accumulator,
        instruction=instruction,
        a_format=formats[0],
        b_format=formats[1],
        scaling=scaling,
    )


def _one(scaling: Scaling) -> np.uint8:
    """The scale code of 1."""
    return np.uint8(encode(np.float32(1), FORMATS[scaling.format]))


def _backwards(x: Array, steps: int, length: int, fill: np.uint8) -> Array:
    """`x` [K, ...] filled up to `steps` of `length`, the steps in descending order."""
    xp = _backend.namespace(x)
    short = steps * length - x.shape[0]
    if short:
        filled = xp.full((short, *x.shape[1:]), fill, dtype=x.dtype)
        x = xp.concatenate([x, filled])
    return x.reshape((steps, length, *x.shape[1:]))[::-1].reshape(x.shape)
