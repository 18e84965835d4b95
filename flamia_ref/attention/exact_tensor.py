"""q, k, v and dO as one use of a recipe takes them, in float64: the values of their codes, by the real quantizers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref.attention import smoothing
from flamia_ref.attention.parts import Values
from flamia_ref.attention.product import Operand, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.formats import (
    FORMATS,
    PRESETS,
    BlockTensor,
    Overflow,
    decode,
    dequantize,
    encode,
    encode_blocks,
    quantize,
)
from flamia_ref.packing import Documents

UNIT = 127  # e8m0 code of 2^0
HIGH = "bf16"  # the format of guarded blocks

_LARGEST = np.finfo(np.float32).max

Exponents = npt.NDArray[np.int32]
Narrow = npt.NDArray[np.float32]


class Tensor(NamedTuple):
    """One use of q, k, v or dO: its values and those that guarded blocks take [tokens, heads, channels], or, of a
    product that is corrected, those that its start takes; and the exponents of the scales that another use takes over,
    0 where none does [tokens, heads]."""

    values: Values
    guarded: Values
    exponents: Exponents

    @property
    def elements(self) -> Values:
        """What the product sees: without the scale that another use takes over."""
        return np.ldexp(self.values, -self.exponents[:, :, None])


def tensor(
    x: Values,
    recipe: Recipe,
    use: Use,
    documents: Documents,
    *,
    quantized: bool,
    kv_heads: int = 1,
) -> Tensor:
    """`x` [tokens, heads, channels] for one use, quantized document by document, or as it is."""
    operand = recipe.operand(use)
    values, exponents = x.copy(), np.zeros(x.shape[:2], dtype=np.int32)
    if quantized or operand.scale_folded_into is not None:
        narrow = x.astype(np.float32)
        if operand.smoothing != "none":
            bits = smoothing.smoothed(narrow.view(np.uint32), operand, documents)
            narrow = bits.view(np.float32)
        for document in documents:
            if document.start == document.stop:
                continue
            rows = np.moveaxis(narrow[document], 1, 0)  # [heads, tokens, channels]
            if operand.scope is Scope.HEAD:
                stored, codes = _per_head(rows, operand, kv_heads), None
            else:
                stored, codes = _stored(rows, recipe, use)
            if operand.scale_folded_into is not None and codes is not None:
                exponents[document] = codes.scales[:, :, 0].T.astype(np.int32) - UNIT
            if quantized:
                values[document] = np.moveaxis(stored, 0, 1)
    guarded = x
    if quantized:  # bfloat16 inputs stay as they are, a dO that took in a factor does not
        high = values if recipe.guard_operands == "codes" else x
        guarded = encoded(high.astype(np.float32), HIGH)
        if operand.smoothing != "none":
            given = x.astype(np.float32).view(np.uint32)
            guarded = smoothing.correction(given, operand, documents).view(np.float32)
            guarded = guarded.astype(np.float64)
    return Tensor(values, guarded, exponents)


def pairs(x: Values, operand: Operand) -> Values:
    """P or dS of some rows and keys, with the scales that they took over, as one use takes them: the values of their
    codes, without a static scale. Blocks begin at the first row and key."""
    narrow = x.astype(np.float32)
    if operand.format not in PRESETS:
        return encoded(narrow, operand.format)
    if operand.scope is Scope.LARGEST_SCORE:
        return _by_largest(narrow.astype(np.float64), operand)
    return np.asarray(dequantize(quantize(narrow, operand.format, block=operand.block), np.float64))


def _by_largest(x: Values, operand: Operand) -> Values:
    """P in blocks of keys by what the largest score of each gives, which is its largest P: over the largest element
    that is what P is divided by, and, rounded, the scale."""
    chosen = PRESETS[operand.format]
    rows, keys = x.shape
    size = PRESETS[operand.format].checked_block(operand.block)[1]
    wide = np.pad(x, ((0, 0), (0, -keys % int(size)))).reshape(rows, -1, int(size))
    divisor = wide.max(axis=2, keepdims=True, initial=0) / chosen.element.max
    scale = decode(encode(divisor, chosen.scale), chosen.scale, np.float64)
    quotient = np.divide(wide, divisor, out=np.zeros_like(wide), where=divisor > 0)
    values = decode(encode(quotient, chosen.element), chosen.element, np.float64) * scale
    return np.asarray(values.reshape(rows, -1)[:, :keys])


def encoded(x: Narrow, name: str, *, static_scale: int | None = None) -> Values:
    """`x` in a scalar format, as its values. What is too large is infinite where the format has infinity; with a
    static scale, an e8m0 code that `x` is divided by first, it is the largest value."""
    chosen = FORMATS[name]
    if static_scale is None:
        overflow = Overflow.SATURATE if chosen.infinity_code is None else Overflow.NATIVE
        return np.asarray(decode(encode(x, chosen, overflow=overflow), chosen, np.float64))
    codes = encode(np.ldexp(x, UNIT - static_scale), chosen, overflow=Overflow.SATURATE)
    return np.asarray(np.ldexp(decode(codes, chosen, np.float64), static_scale - UNIT))


def _stored(rows: Narrow, recipe: Recipe, use: Use) -> tuple[Values, BlockTensor | None]:
    """The values of one document [heads, tokens, channels], and its codes with their scales where it has such."""
    operand = recipe.operand(use)
    if operand.promoted_from is not None:
        source, given = _stored(rows, recipe, operand.promoted_from)
        rows = source.astype(np.float32)
        if given is not None:  # scales that are powers of two, under which the elements are exact
            finite = np.clip(rows, -_LARGEST, _LARGEST)
            return source, quantize(finite, operand.format, block=operand.block)
    if operand.format not in PRESETS:
        return encoded(rows, operand.format, static_scale=operand.static_scale), None
    if operand.scope is Scope.PREVIOUS_BLOCK:
        codes = _by_previous(rows, operand)
    elif operand.has_token_scales:
        return _two_levels(rows, operand), None
    else:
        codes = quantize(rows, operand.format, block=operand.block)
    return np.asarray(dequantize(codes, np.float64)), codes


def _per_head(rows: Narrow, operand: Operand, kv_heads: int) -> Values:
    """One document [heads, tokens, channels] in codes that stand for a float32 descale times them, one for all heads
    that share a key/value head."""
    grouped = rows.reshape(kv_heads, -1)
    amax = np.abs(grouped).max(axis=1, keepdims=True)
    descale = np.where(amax == 0, np.float32(1), amax / np.float32(FORMATS[operand.format].max))
    quotient = np.asarray(grouped / descale, np.float32)
    values = encoded(quotient, operand.format) * descale.astype(np.float64)
    return values.reshape(rows.shape)


def _by_previous(rows: Narrow, operand: Operand) -> BlockTensor:
    """Each block of tokens by the scale of the one before it, the first by the static scale."""
    own = quantize(rows, operand.format, block=operand.block)
    first = np.full_like(own.scales[:, :1], operand.static_scale)
    scales = np.concatenate([first, own.scales[:, :-1]], axis=1)
    codes = encode_blocks(rows.view(np.uint32), scales, own.format, own.block)
    return BlockTensor(codes=codes, scales=scales, format=own.format, block=own.block)


def _two_levels(rows: Narrow, operand: Operand) -> Values:
    """Blocks with scales that have a mantissa, of what a power of two for each token brings into their reach.

    That power is the smallest with amax <= its multiple by the largest element times the largest scale.
    """
    chosen = PRESETS[operand.format]
    largest, power = np.frexp(chosen.element.max * chosen.scale.max)
    amax = np.abs(rows).max(axis=2, keepdims=True)
    mantissa, exponent = np.frexp(amax.astype(np.float64))
    token = np.where(np.isfinite(amax), exponent - power + (mantissa > largest), UNIT)
    token = np.where(amax == 0, -UNIT, np.clip(token, -UNIT, UNIT)).astype(np.int32)
    codes = quantize(np.ldexp(rows, -token), operand.format, block=operand.block)
    values = np.ldexp(np.asarray(dequantize(codes, np.float64)), token)
    return np.where(np.isnan(amax), np.nan, values)
