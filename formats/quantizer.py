"""Blocks with shared scales: `quantize`, `dequantize` and `BlockTensor`."""

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref import _backend, _float32, _primitive
from flamia_ref._backend import Array
from flamia_ref._errors import shown
from flamia_ref.formats.bits import check_type, decode_bits, encode_bits
from flamia_ref.formats.block import (
    ALL,
    Block,
    BlockFormat,
    InfinityPolicy,
    NanPolicy,
    ScaleRule,
    UnderflowPolicy,
)
from flamia_ref.formats.encoding import as_codes, as_floats, by_chunks, decode, source_bits
from flamia_ref.formats.presets import PRESETS
from flamia_ref.formats.rounding import Overflow, Rounding
from flamia_ref.formats.scalar import E8M0, FP32

_MANTISSA = np.uint32(0x7FFFFF)
_PART = 1 << 18  # elements of a numpy array that are quantized at once


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockTensor:
    """A tensor in a block format. A pytree once JAX is in use; compare its arrays, not itself.

    Attributes:
        codes: element codes [..., rows, columns].
        scales: scale codes [..., ceil(rows / r), ceil(columns / c)] for a block of (r, c).
        tensor_scale: float32 scale of the whole tensor; None for formats without one.
        format: the block format.
        block: rows and columns that share a scale, as numbers.

    Raises TypeError for a `format` that is no `BlockFormat`, ValueError for a `block` that is not
    two integers.
    """

    codes: Array
    scales: Array
    tensor_scale: Array | None = None
    format: BlockFormat
    block: tuple[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.format, BlockFormat):
            raise TypeError(f"format is a BlockFormat, not {shown(self.format)}")
        try:
            rows, columns = map(operator.index, self.block)
        except (TypeError, ValueError):
            raise ValueError(
                f"block is (rows, columns) in numbers, not {shown(self.block)}; quantize"
                ' resolves "all"'
            ) from None
        object.__setattr__(self, "block", (rows, columns))
        _backend.register_value_type(
            BlockTensor, data=("codes", "scales", "tensor_scale"), meta=("format", "block")
        )

    @property
    def T(self) -> "BlockTensor":
        """The transposed tensor: the same codes and scales, seen along the other axis. Views in numpy."""
        return dataclasses.replace(
            self,
            codes=self.codes.swapaxes(-1, -2),
            scales=self.scales.swapaxes(-1, -2),
            block=self.block[::-1],
        )


@_backend.jit(static=("block_format", "block"))
def quantize_bits(
    bits: Array, block_format: BlockFormat, block: Block | None = None
) -> tuple[Array, Array]:
    """Element codes and scale codes of float32 bits.

    Args:
        bits: uint32 [..., rows, columns].
        block_format: the format.
        block: rows and columns that share a scale; None for the format's own. Not checked.

    Returns:
        Element codes of the shape of `bits`, scale codes [..., ceil(rows / r), ceil(columns / c)].

    Raises TypeError for bits that are not uint32, ValueError for fewer than two axes.
    """
    check_type("bits", bits, np.uint32)
    if bits.ndim < 2:
        raise ValueError(f"quantize_bits takes [..., rows, columns], not shape {bits.shape}")
    rows, columns = block_extents(block_format.block if block is None else block, bits.shape)
    x = _in_blocks(bits, rows, columns)
    magnitude = x & _float32.MAGNITUDE
    if block_format.nan is NanPolicy.IGNORE:
        xp = _backend.namespace(bits)
        magnitude = xp.where(magnitude > _float32.INFINITY, np.uint32(0), magnitude)
    amax = magnitude.max(axis=(-3, -1))
    scales = scale_codes(amax, block_format)
    if block_format.row_span is not None:
        row = scale_codes(amax.max(axis=-1, keepdims=True, initial=0), block_format)
        scales = _raised(scales, row, block_format)
    codes = _element_codes(x, scales[..., :, None, :, None], block_format)
    return _out_of_blocks(codes, bits.shape), scales


@_backend.jit(static=("block_format", "block"))
def encode_blocks(
    bits: Array, scales: Array, block_format: BlockFormat, block: Block | None = None
) -> Array:
    """Element codes of float32 bits by scales that are given: what `quantize_bits` does after it chose its own.

    Args:
        bits: uint32 [..., rows, columns].
        scales: scale codes [..., ceil(rows / r), ceil(columns / c)] for a block of (r, c).
        block_format, block: as in `quantize_bits`.

    Returns codes of the shape of `bits`. Raises TypeError for bits or scales of another type.
    """
    check_type("bits", bits, np.uint32)
    check_type("scales", scales, block_format.scale.code_dtype)
    rows, columns = block_extents(block_format.block if block is None else block, bits.shape)
    x = _in_blocks(bits, rows, columns)
    return _out_of_blocks(
        _element_codes(x, scales[..., :, None, :, None], block_format), bits.shape
    )


def _raised(scales: Array, row: Array, block_format: BlockFormat) -> Array:
    """Scales not more than `row_span` powers below that of their row; NaN where that is."""
    xp = _backend.namespace(scales, row)
    nan, dtype = block_format.scale.nan_code, block_format.scale.code_dtype
    least = row.astype(np.int32) - np.int32(block_format.row_span or 0)
    raised = xp.maximum(scales.astype(np.int32), least).astype(dtype)
    return xp.where(row == dtype.type(nan), dtype.type(nan), raised)


def block_extents(block: Block, shape: tuple[int, ...]) -> tuple[int, int]:
    """A block with "all" replaced by the extent of an array of that shape, 1 if it is empty."""
    rows, columns = (
        max(size, 1) if extent == ALL else int(extent)
        for extent, size in zip(block, shape[-2:], strict=True)
    )
    return rows, columns


def _in_blocks(bits: Array, rows: int, columns: int) -> Array:
    """[..., R, C] as [..., R / rows, rows, C / columns, columns], partial blocks filled with +0."""
    *batch, height, width = bits.shape
    down, across = -(-height // rows), -(-width // columns)
    if (down * rows, across * columns) != (height, width):
        padding = [(0, 0)] * len(batch) + [(0, down * rows - height), (0, across * columns - width)]
        bits = _backend.namespace(bits).pad(bits, padding)
    return bits.reshape((*batch, down, rows, across, columns))


def _out_of_blocks(codes: Array, shape: tuple[int, ...]) -> Array:
    *batch, down, rows, across, columns = codes.shape
    whole = codes.reshape((*batch, down * rows, across * columns))
    return whole[..., : shape[-2], : shape[-1]]


def scale_codes(amax: Array, block_format: BlockFormat) -> Array:
    """Scale codes of the float32 bits of amax, where a NaN stands for a block with a NaN."""
    xp = _backend.namespace(amax)
    element, scale = block_format.element, block_format.scale
    offset = np.int32(-element.emax)
    match block_format.rule:
        case ScaleRule.FLOOR:
            codes = encode_bits(amax, scale, rounding=Rounding.TOWARD_ZERO, exponent=offset)
        case ScaleRule.CEIL:
            codes = encode_bits(amax, scale, rounding=Rounding.UP, exponent=offset)
        case ScaleRule.EVEN:
            # Half a unit of the element's last place, added to amax, may carry into its exponent.
            half = np.uint32(1 << (22 - element.mantissa_bits))
            carry = ((amax + half) >> np.uint32(23)) - (amax >> np.uint32(23))
            offset = carry.astype(np.int32) + offset
            codes = encode_bits(amax, scale, rounding=Rounding.TOWARD_ZERO, exponent=offset)
        case ScaleRule.RCEIL:
            reciprocal = (np.float32(1) / np.float32(element.max)).view(np.uint32)
            d = _float32.multiply(amax, reciprocal)
            codes = encode_bits(d, scale, rounding=Rounding.UP)
        case ScaleRule.EXACT_RCEIL:
            codes = least_power(amax, element.max)
        case ScaleRule.NVFP4_ONE_LEVEL:
            largest = np.float32(element.max).view(np.uint32)
            codes = encode_bits(_float32.divide(amax, largest), scale)
    if block_format.infinity is InfinityPolicy.NAN_BLOCK:
        codes = xp.where(amax == _float32.INFINITY, np.uint8(scale.nan_code), codes)
    if block_format.zero_scale:
        codes = xp.where(amax == 0, np.uint8(block_format.zero_scale), codes)
    return codes


def least_power(amax: Array, largest: float) -> Array:
    """E8M0 codes of the smallest 2^k, from 2^-127 to 2^127, with amax <= largest 2^k: 254 for infinity, 255 for NaN.

    By integers: the difference of their exponents, and 1 if amax has more mantissa. `amax` are float32 bits of
    magnitudes, `largest` is a normal float32 above 1.
    """
    xp = _backend.namespace(amax)
    limit = np.float32(largest).view(np.uint32)
    exponent = (amax >> np.uint32(23)).astype(np.int32) - np.int32((limit >> 23) - 127)
    more = (amax & _MANTISSA) > (limit & _MANTISSA)
    # A subnormal amax is below largest 2^-127, and its exponent field 0 gives code 0.
    codes = xp.clip(exponent + more.astype(np.int32), 0, E8M0.max_code)
    codes = xp.where(amax == _float32.INFINITY, np.int32(E8M0.max_code), codes)
    codes = xp.where(amax > _float32.INFINITY, np.int32(E8M0.nan_code), codes)
    return codes.astype(E8M0.code_dtype)


def _element_codes(bits: Array, scales: Array, block_format: BlockFormat) -> Array:
    """Element codes of float32 bits, given scale codes that broadcast against them."""
    xp = _backend.namespace(bits, scales)
    element, scale = block_format.element, block_format.scale
    quotient, exponent = bits, None
    if block_format.rule.gives_powers:
        exponent = np.int32(scale.bias) - scales.astype(np.int32)
    else:
        quotient = _float32.divide(bits, decode_bits(scales, scale))
    codes = encode_bits(
        quotient,
        element,
        rounding=block_format.rounding,
        overflow=block_format.overflow,
        exponent=exponent,
    )
    if block_format.underflow is UnderflowPolicy.FLUSH:
        number = (bits & _float32.MAGNITUDE) <= _float32.INFINITY
        sign = (bits >> np.uint32(31)).astype(element.code_dtype)
        flushed = sign * element.code_dtype.type(element.sign_code)
        codes = xp.where((scales == 0) & number, flushed, codes)
    if block_format.can_be_nan:
        nan = _primitive.special(scales == scale.nan_code)
        codes = xp.where(nan, element.code_dtype.type(element.nan_code), codes)
    return codes


def quantize(
    x: Array,
    preset_or_format: str | BlockFormat,
    *,
    block: Any = None,
    tensor_amax: Any = None,
) -> BlockTensor:
    """x in a block format, the scale of each block from its own amax.

    Args:
        x: float32, bfloat16 or float16 [..., rows, columns], numpy or JAX. float64 values are taken
            if all are float32 values, since rounding them here would round twice.
        preset_or_format: a `BlockFormat` or its name in `PRESETS`.
        block: (rows, columns) that share a scale, one of the format's `blocks`; "all", -1 or None
            stands for a whole extent. By default the format's own. The last blocks of a row or
            column cover what is there.
        tensor_amax: for formats with a scale of the whole tensor; these two have none.

    Returns:
        A `BlockTensor` in the library of x. The derivative under JAX is zero, as in `encode`.

    Raises:
        TypeError: for values of another type.
        ValueError: for an unknown name, fewer than two axes, a block the format does not have, a
            tensor_amax it does not take, or float64 values that are not float32 values.
    """
    block_format = _block_format(preset_or_format)
    chosen = block_format.checked_block(block)
    if tensor_amax is not None:
        raise ValueError(f"{block_format.name} has no scale of the whole tensor: no tensor_amax")
    values = as_floats(x, "quantize")
    if values.ndim < 2:
        raise ValueError(f"quantize takes [..., rows, columns], not shape {values.shape}")
    extents = block_extents(chosen, values.shape)
    codes, scales = _by_parts(_float32_values(values), block_format, extents)
    return BlockTensor(codes=codes, scales=scales, format=block_format, block=extents)


def _by_parts(
    values: Array, block_format: BlockFormat, block: tuple[int, int]
) -> tuple[Array, Array]:
    """Quantize; large numpy arrays half by half, so that the temporaries stay small."""
    rows = values.ndim - 2
    axis = next((axis for axis in range(rows) if values.shape[axis] > 1), rows)
    unit = block[0] if axis == rows else 1
    middle = values.shape[axis] // (2 * unit) * unit
    if _backend.is_jax(values) or values.size <= _PART or not middle:
        return _quantize(values, block_format, block)
    halves = [_by_parts(half, block_format, block) for half in np.split(values, [middle], axis)]
    codes, scales = zip(*halves, strict=True)
    return np.concatenate(codes, axis), np.concatenate(scales, axis)


@_backend.jit(static=("block_format", "block"))
def _quantize(values: Array, block_format: BlockFormat, block: Block) -> tuple[Array, Array]:
    return quantize_bits(source_bits(values), block_format, block)


def _block_format(given: object) -> BlockFormat:
    if isinstance(given, BlockFormat):
        return given
    if isinstance(given, str):
        return PRESETS[given]
    raise TypeError(f"a block format is a BlockFormat or a name in PRESETS, not {shown(given)}")


def _float32_values(values: Array) -> Array:
    if values.dtype != np.float64:
        return values
    if _backend.is_traced(values):
        raise TypeError("under jit quantize takes float32, bfloat16 or float16, not float64")
    host = _backend.host(values)
    with np.errstate(all="ignore"):
        narrow = host.astype(np.float32)
    if not np.array_equal(narrow, host, equal_nan=True):
        raise ValueError(
            "x has float64 values that float32 lacks; round them first: astype(float32)"
        )
    return _backend.namespace(values).asarray(narrow)


def dequantize(block_tensor: BlockTensor, dtype: Any = np.float32) -> Array:
    """The values of a block tensor: code value times scale value.

    Args:
        block_tensor: with codes [..., rows, columns] and one scale for each block.
        dtype: float32, exact but for values of 2^128 and more, which become infinity; or float64,
            exact, always numpy.

    Returns:
        Values of the shape of the codes; NaN where the element or the scale is NaN.

    Raises:
        TypeError: for what is no `BlockTensor`, codes that are not integers, another dtype, or
            float64 of a traced tensor.
        ValueError: for scales whose shape does not fit, codes outside their format, or a scale of
            the whole tensor.
    """
    if not isinstance(block_tensor, BlockTensor):
        raise TypeError(f"dequantize takes a BlockTensor, not a {type(block_tensor).__name__}")
    if block_tensor.tensor_scale is not None:
        raise ValueError(f"{block_tensor.format.name} has no scale of the whole tensor")
    wanted = np.dtype(dtype)
    if wanted not in (np.float32, np.float64):
        raise TypeError(f"dequantize gives float32 or float64, not {wanted}")
    block_format, (rows, columns) = block_tensor.format, block_tensor.block
    codes = as_codes(block_tensor.codes, block_format.element)
    scales = as_codes(block_tensor.scales, block_format.scale, "scales")
    if codes.ndim < 2 or rows < 1 or columns < 1:
        raise ValueError(f"codes {codes.shape} in blocks {block_tensor.block} are no block tensor")
    *batch, height, width = codes.shape
    expected = (*batch, -(-height // rows), -(-width // columns))
    if scales.shape != expected:
        raise ValueError(
            f"scales have shape {scales.shape}; codes {codes.shape} in blocks of"
            f" {block_tensor.block} have {expected}"
        )
    if wanted == np.float64 and (_backend.is_traced(codes) or _backend.is_traced(scales)):
        raise TypeError("float64 values are numpy, and a traced tensor has none; ask for float32")
    spread = _spread(scales, rows, columns, codes.shape)
    if wanted == np.float32:
        return by_chunks(lambda part, scale: _dequantize(part, scale, block_format), codes, spread)
    values = decode(codes, block_format.element, np.float64)
    return values * decode(spread, block_format.scale, np.float64)


@_backend.jit(static=("block_format",))
def _dequantize(codes: Array, scales: Array, block_format: BlockFormat) -> Array:
    return _backend.from_bits(value_bits(codes, scales, block_format), np.float32)


@_backend.jit(static=("block_format",))
def value_bits(codes: Array, scales: Array, block_format: BlockFormat) -> Array:
    """float32 bits of code values times scale values; `scales` broadcast against `codes`."""
    xp = _backend.namespace(codes, scales)
    elements = decode_bits(codes, block_format.element)
    if not block_format.rule.gives_powers:
        return _float32.multiply(elements, decode_bits(scales, block_format.scale))
    exponents = scales.astype(np.int32) - np.int32(block_format.scale.bias)
    values = encode_bits(elements, FP32, overflow=Overflow.NATIVE, exponent=exponents)
    return xp.where(scales == block_format.scale.nan_code, _float32.NAN, values)


def _spread(per_block: Array, rows: int, columns: int, shape: tuple[int, ...]) -> Array:
    """One value a block [..., down, across] repeated for each of its elements."""
    xp = _backend.namespace(per_block)
    repeated = xp.repeat(xp.repeat(per_block, rows, axis=-2), columns, axis=-1)
    return repeated[..., : shape[-2], : shape[-1]]
