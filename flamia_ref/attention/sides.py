"""One side of a matrix product on tiles, and the products.

A side is rows of an input (q, k, v, dO), or the codes of pairs (P, dS). Each product is compiled by itself: all recipes
share the program of an instruction and a shape.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.arithmetic.products import chain
from flamia_ref.attention.product import Operand, Product
from flamia_ref.formats import BF16, FORMATS, PRESETS, Overflow, encode_bits, quantize_bits

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
        high: bfloat16 codes for guarded blocks, [tiles, rows, channels].
    """

    codes: Array
    scales: Array | None = None
    fold: Array | None = None
    high: Array | None = None


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


def element(operand: Operand) -> str:
    """The name of an operand's element format."""
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


def over_channels(left: Rows, right: Rows, product: Product, guarded: Array | None) -> Array:
    """float32 bits [tiles, left rows, right rows] of a product over channels, from +0.

    `guarded` [tiles, left rows / 32]: the 32 right rows for which the guard instruction runs, -1 for none.
    """
    s = _over_channels(
        left.codes,
        left.scales,
        right.codes,
        right.scales,
        instruction=product.instruction,
        formats=(element(product.left), element(product.right)),
    )
    if guarded is None or left.high is None or product.guard_instruction is None:
        return s
    return _with_guarded(s, left.high, right.high, guarded, instruction=product.guard_instruction)


@_backend.jit(static=("instruction", "formats"))
def _over_channels(
    left: Array,
    left_scales: Array | None,
    right: Array,
    right_scales: Array | None,
    *,
    instruction: str,
    formats: tuple[str, str],
) -> Array:
    xp = _backend.namespace(left, right)
    return _contracted(
        xp.moveaxis(left, 2, 0),
        None if left_scales is None else xp.moveaxis(left_scales, 2, 0),
        xp.moveaxis(right, 2, 0),
        None if right_scales is None else xp.moveaxis(right_scales, 2, 0),
        xp.zeros((left.shape[0], left.shape[1], right.shape[1]), dtype=np.uint32),
        instruction,
        formats,
    )


@_backend.jit(static=("instruction",))
def _with_guarded(
    s: Array, left: Array, right: Array, guarded: Array, *, instruction: str
) -> Array:
    """`s` with the guarded blocks computed from bfloat16 codes."""
    xp = _backend.namespace(s, left, right)
    tiles, rows, columns = s.shape
    groups = rows // BLOCK
    queries = left.reshape(tiles * groups, BLOCK, -1)
    keys = _key_blocks(right, guarded, xp).reshape(tiles * groups, BLOCK, -1)
    high = _contracted(
        xp.moveaxis(queries, 2, 0),
        None,
        xp.moveaxis(keys, 2, 0),
        None,
        xp.zeros((tiles * groups, BLOCK, BLOCK), dtype=np.uint32),
        instruction,
        _BFLOAT16,
    ).reshape(tiles, groups, BLOCK, 1, BLOCK)
    blocks = s.reshape(tiles, groups, BLOCK, columns // BLOCK, BLOCK)
    here = in_guarded(guarded, columns, xp)
    return xp.where(here, high, blocks).reshape(tiles, rows, columns)


def left_over_keys(pairs: Pairs, operand: Operand) -> Left:
    """The pairs' side of a product over keys."""
    xp = _backend.namespace(pairs.codes)
    scales = pairs.scales
    if scales is not None:
        scales = xp.moveaxis(scales, 2, 0)
        if operand.block == (BLOCK, BLOCK):
            scales = xp.repeat(scales, BLOCK, axis=2)
    return _left(xp.moveaxis(pairs.codes, 2, 0), scales, operand)


def left_over_queries(pairs: Pairs, operand: Operand) -> Left:
    """The pairs' side of a product over queries."""
    xp = _backend.namespace(pairs.codes)
    scales = pairs.scales
    if scales is not None:
        scales = xp.moveaxis(scales, 1, 0)
        if operand.block == (BLOCK, BLOCK):
            scales = xp.repeat(scales, BLOCK, axis=2)
    return _left(xp.moveaxis(pairs.codes, 1, 0), scales, operand)


def _left(codes: Array, scales: Array | None, operand: Operand) -> Left:
    xp = _backend.namespace(codes)
    if operand.static_scale is not None:
        shape = (codes.shape[0] // BLOCK, *codes.shape[1:])
        scales = xp.full(shape, operand.static_scale, dtype=np.uint8)
    return Left(codes, scales)


def over_rows(left: Left, right: Rows, accumulator: Array, product: Product) -> Array:
    """The accumulator [tiles, others, channels] after the rows of one tile."""
    return _over_rows(
        left.codes,
        left.scales,
        right.codes,
        right.scales,
        accumulator,
        instruction=product.instruction,
        formats=(element(product.left), element(product.right)),
    )


@_backend.jit(static=("instruction", "formats"))
def _over_rows(
    left: Array,
    left_scales: Array | None,
    right: Array,
    right_scales: Array | None,
    accumulator: Array,
    *,
    instruction: str,
    formats: tuple[str, str],
) -> Array:
    return _contracted(left, left_scales, right, right_scales, accumulator, instruction, formats)


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
    groups = rows // BLOCK
    blocks = xp.moveaxis(x.reshape(tiles, groups, BLOCK, columns // BLOCK, BLOCK), 3, 2)
    index = xp.maximum(guarded, 0)[:, :, None, None, None]
    blocks = xp.take_along_axis(blocks, index, axis=2)[:, :, 0]
    codes = bfloat16(blocks).reshape(tiles * groups, BLOCK, BLOCK)
    keys = _key_blocks(right, guarded, xp).reshape(tiles * groups, BLOCK, -1)
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
    here = (guarded >= 0).reshape(tiles * groups, 1, 1)
    return xp.where(here, end, start).reshape(accumulator.shape)


def in_guarded(guarded: Array, keys: int, xp: ModuleType) -> Array:
    """Whether pairs are in a guarded block: bool [tiles, query blocks, 1, key blocks, 1]."""
    blocks = xp.arange(keys // BLOCK, dtype=np.int32)
    return (guarded[:, :, None] == blocks)[:, :, None, :, None]


def without_guarded(x: Array, guarded: Array | None) -> Array:
    """float32 bits [tiles, queries, keys], +0 in guarded blocks."""
    if guarded is None:
        return x
    xp = _backend.namespace(x, guarded)
    tiles, rows, keys = x.shape
    blocks = x.reshape(tiles, rows // BLOCK, BLOCK, keys // BLOCK, BLOCK)
    return xp.where(in_guarded(guarded, keys, xp), np.uint32(0), blocks).reshape(x.shape)


def _key_blocks(keys: Array, guarded: Array, xp: ModuleType) -> Array:
    """The guarded 32 of `keys` [tiles, keys, channels] for each query block: [tiles, query blocks, 32, channels]."""
    tiles, count, channels = keys.shape
    blocks = keys.reshape(tiles, count // BLOCK, BLOCK, channels)
    index = xp.maximum(guarded, 0)[:, :, None, None]
    return xp.take_along_axis(blocks, index, axis=1)


def _contracted(
    left: Array,
    left_scales: Array | None,
    right: Array,
    right_scales: Array | None,
    accumulator: Array,
    instruction: str,
    formats: tuple[str, str],
) -> Array:
    """left [K, tiles, M] times right [K, tiles, N] onto [tiles, M, N]; scales [K / 32, tiles, ...], None for unit."""
    xp = _backend.namespace(left, right)
    scaling = next(iter(INSTRUCTIONS[instruction].scalings), None)  # E8M0, blocks of 32

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
