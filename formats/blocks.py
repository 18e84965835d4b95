"""Blocks on bits: `quantize_bits` and `encode_blocks`."""

from typing import NamedTuple

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.formats.amax import beside, block_amax, in_blocks, out_of_blocks
from flamia_ref.formats.bits import check_type, decode_bits
from flamia_ref.formats.block import (
    ALL,
    Block,
    BlockFormat,
    Choice,
    NanPolicy,
    TensorExtent,
)
from flamia_ref.formats.elements import codes_of_blocks, element_codes, fast
from flamia_ref.formats.factors import settled
from flamia_ref.formats.formula import Formula, Machine
from flamia_ref.formats.hadamard import transformed
from flamia_ref.formats.scalar import FP32, ScalarFormat
from flamia_ref.formats.scales import scale_codes, tensor_scale_bits


class Quantized(NamedTuple):
    """Codes, scale codes, and float32 bits of the tensor scale where there is one."""

    codes: Array
    scales: Array
    tensor_scale: Array | None


def quantize_bits(
    bits: Array, block_format: BlockFormat, block: Block | None = None
) -> tuple[Array, Array]:
    """Element codes and scale codes of float32 bits, for formats without a tensor scale.

    Args:
        bits: uint32 [..., rows, columns].
        block_format: the format.
        block: rows and columns that share a scale; None for the format's own. Not checked.

    Returns:
        Element codes of the shape of `bits`, scale codes [..., ceil(rows / r), ceil(columns / c)].

    Raises TypeError for bits that are not uint32, ValueError for fewer than two axes.
    """
    check_type("bits", bits, np.uint32)
    found = quantize_values(bits, block_format, block, general=True)
    return found.codes, found.scales


@_backend.jit(static=("block_format", "block", "source", "general"))
def quantize_values(
    bits: Array,
    block_format: BlockFormat,
    block: Block | None = None,
    *,
    source: ScalarFormat = FP32,
    tensor_amax: Array | None = None,
    random_bits: Array | None = None,
    general: bool = False,
) -> Quantized:
    """What `quantize_bits` does, for every format.

    Args:
        bits: uint32 [..., rows, columns], or uint16 bits of bfloat16.
        block_format, block: as in `quantize_bits`.
        source: the type that x had, where the format computes in it.
        tensor_amax: float32 bits that broadcast against `bits`; None for that of x.
        random_bits: for stochastic rounding, as in `encode`.
        general: never the fast way, whose programs hold more primitives and float32 arithmetic.
    """
    if bits.ndim < 2:
        raise ValueError(f"quantize_bits takes [..., rows, columns], not shape {bits.shape}")
    block_format = block_format.of_input(source)
    if not general and quick(block_format) and random_bits is None and _is_one(tensor_amax):
        return _quick(bits, block_format, block, tensor_amax)
    if bits.dtype == np.uint16:
        bits = bits.astype(np.uint32) << np.uint32(16)
    if block_format.signs is not None:
        bits = transformed(bits, block_format.signs, source)
    tensor_scale = None
    if block_format.has_tensor_scale:
        if tensor_amax is None:
            tensor_amax = amax_of_tensor(bits, block_format)
        tensor_scale = tensor_scale_bits(tensor_amax, block_format, source)
        if block_format.prepared is not None:
            given = {"x": bits, "tensor_scale": tensor_scale}
            formula = Formula.parse(block_format.prepared)
            bits = formula.evaluate(given, block_format.machine(source))
    rows, columns = block_extents(block_format.block if block is None else block, bits.shape)
    blocks = _Blocks(bits, rows, columns, block_format, tensor_amax, tensor_scale, source)
    drawn = None if random_bits is None else in_blocks(random_bits, rows, columns)
    codes, scales = blocks.quantized(drawn)
    return Quantized(out_of_blocks(codes, bits.shape), scales, tensor_scale)


def quick(block_format: BlockFormat) -> bool:
    """Whether blocks of the format are quantized the fast way."""
    return (
        fast(block_format)
        and block_format.nan is not NanPolicy.MAXIMUM_NUMBER
        and not block_format.zero_below
        and block_format.choice is None
        and block_format.signs is None
        and block_format.prepared is None
    )


def _is_one(tensor_amax: Array | None) -> bool:
    return tensor_amax is None or tensor_amax.size == 1


def _quick(
    bits: Array, block_format: BlockFormat, block: Block | None, tensor_amax: Array | None
) -> Quantized:
    """`quantize_values` of a format that is `quick`, with one tensor scale at most."""
    rows, columns = block_extents(block_format.block if block is None else block, bits.shape)
    x = in_blocks(bits, rows, columns)
    amax = block_amax(x, ignore_nan=block_format.nan is NanPolicy.IGNORE)
    tensor_scale = None
    if block_format.has_tensor_scale:
        if tensor_amax is None:
            tensor_amax = amax.max(axis=tuple(range(amax.ndim)), keepdims=True, initial=0)
        tensor_scale = tensor_scale_bits(tensor_amax, block_format)
    scales = settled(scales_of_amax(amax, block_format, tensor_scale), amax)
    codes = codes_of_blocks(x, scales, block_format, tensor_scale)
    return Quantized(out_of_blocks(codes, bits.shape), scales, tensor_scale)


def scales_of_amax(
    amax: Array, block_format: BlockFormat, tensor_scale: Array | None = None
) -> Array:
    """Scale codes of blocks [..., down, across], those of a row raised to what `row_span` allows."""
    scales = scale_codes(amax, block_format, tensor_scale)
    if block_format.row_span is None:
        return scales
    row = scale_codes(amax.max(axis=-1, keepdims=True, initial=0), block_format, tensor_scale)
    return _raised(scales, row, block_format)


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
    x = in_blocks(bits, rows, columns)
    amax = _counted(x, block_format).max(axis=(-3, -1)) if block_format.scaled_uses_amax else None
    codes = element_codes(
        x, beside(scales), block_format, amax=None if amax is None else beside(amax)
    )
    return out_of_blocks(codes, bits.shape)


def amax_of_tensor(bits: Array, block_format: BlockFormat) -> Array:
    """float32 bits of the largest magnitude of x, or of each of its rows; 0 of nothing.

    The shape is that of `bits` with axes of one element.
    """
    axes = tuple(range(bits.ndim)) if block_format.tensor_extent is TensorExtent.TENSOR else (-1,)
    magnitude = _counted(bits, block_format)
    return magnitude.max(axis=axes, keepdims=True, initial=0)


def block_extents(block: Block, shape: tuple[int, ...]) -> tuple[int, int]:
    """A block with "all" replaced by the extent of an array of that shape, 1 if it is empty."""
    rows, columns = (
        max(size, 1) if extent == ALL else int(extent)
        for extent, size in zip(block, shape[-2:], strict=True)
    )
    return rows, columns


class _Blocks:
    """x in blocks of one format."""

    def __init__(
        self,
        bits: Array,
        rows: int,
        columns: int,
        block_format: BlockFormat,
        tensor_amax: Array | None,
        tensor_scale: Array | None,
        source: ScalarFormat,
    ) -> None:
        self.x = in_blocks(bits, rows, columns)
        self.format = block_format
        self.source = source
        self.nan_blocks: Array | None = None
        self.amax: Array | None = None
        # One of the whole tensor, or one of each row: then its blocks have one row.
        self.tensor_amax = None if tensor_amax is None else _of_rows(tensor_amax, bits, rows)
        self.tensor_scale = None if tensor_scale is None else _of_rows(tensor_scale, bits, rows)

    def quantized(self, random_bits: Array | None) -> tuple[Array, Array]:
        """Codes in blocks, and scale codes [..., down, across]."""
        amax = _counted(self.x, self.format).max(axis=(-3, -1))
        if self.format.nan is NanPolicy.MAXIMUM_NUMBER:
            alone = (self.x & _float32.MAGNITUDE).min(axis=(-3, -1)) > _float32.INFINITY
            amax = _backend.namespace(amax).where(alone, _float32.NAN, amax)
        if self.format.zero_below:
            least = np.float32(self.format.zero_below).view(np.uint32)
            self.x = _backend.namespace(amax).where(beside(amax < least), np.uint32(0), self.x)
        if self.format.scaled_uses_amax:
            self.amax = beside(amax)
        scales = self.scales(amax)
        if self.format.row_span is not None:
            row = self.scales(amax.max(axis=-1, keepdims=True, initial=0))
            scales = _raised(scales, row, self.format)
        if self.format.nan_block_code is not None:
            # Where the scale code of NaN has a value, that of an infinite amax is no NaN.
            alike = self.format.infinity_scale == self.format.nan_scale
            alike = alike and not self.format.nan_scale_has_value
            least = _float32.INFINITY - np.uint32(alike)
            self.nan_blocks = beside(amax > least)
        codes = self.codes(scales, random_bits)
        if self.format.choice is None:
            return codes, scales
        others = self.scales(amax, factor=1.5)
        other_codes = self.codes(others, random_bits)
        pick = _float32.less(self.error(other_codes, others), self.error(codes, scales))
        xp = _backend.namespace(pick)
        return xp.where(beside(pick), other_codes, codes), xp.where(pick, others, scales)

    def scales(self, amax: Array, factor: float = 1.0) -> Array:
        own = None if self.tensor_scale is None else self.tensor_scale[..., :, 0, :, 0]
        return scale_codes(amax, self.format, own, self.source, factor=factor)

    def codes(self, scales: Array, random_bits: Array | None) -> Array:
        return element_codes(
            self.x,
            beside(scales),
            self.format,
            self.tensor_scale,
            self.source,
            random_bits,
            self.nan_blocks,
            self.amax,
        )

    def error(self, codes: Array, scales: Array) -> Array:
        """float32 bits of the error of each block, [..., down, across]."""
        given = {
            "code": decode_bits(codes, self.format.element),
            "scale": beside(decode_bits(scales, self.format.scale)),
            "tensor_amax": self.tensor_amax,
        }
        formula = Formula.parse(self.format.decoded or "")
        value = formula.evaluate(given, Machine())
        error = _float32.subtract(value, self.x)
        squared = self.format.choice is Choice.MSE
        error = _float32.multiply(error, error) if squared else error & _float32.MAGNITUDE
        total = error[..., 0, :, 0]
        for column in range(1, error.shape[-1]):
            total = _float32.add(total, error[..., 0, :, column])
        return total


def _of_rows(per_tensor: Array, bits: Array, rows: int) -> Array:
    """Something of x, [..., 1, 1] or [..., R, 1], as [..., R / rows, 1, 1, 1] beside blocks."""
    shape = (1,) * (bits.ndim - per_tensor.ndim) + tuple(per_tensor.shape)
    if shape[-2] != 1 and rows != 1:
        raise ValueError(f"a tensor_amax of each row goes with blocks of one row, not of {rows}")
    return per_tensor.reshape((*shape[:-1], 1, 1, 1))


def _counted(bits: Array, block_format: BlockFormat) -> Array:
    """Magnitudes, those of NaN 0 where the format ignores it."""
    magnitude = bits & _float32.MAGNITUDE
    if block_format.nan is not NanPolicy.PROPAGATE:
        xp = _backend.namespace(bits)
        magnitude = xp.where(magnitude > _float32.INFINITY, np.uint32(0), magnitude)
    return magnitude


def _raised(scales: Array, row: Array, block_format: BlockFormat) -> Array:
    """Scales not more than `row_span` powers below that of their row; NaN where that is."""
    xp = _backend.namespace(scales, row)
    nan, dtype = block_format.scale.nan_code, block_format.scale.code_dtype
    least = row.astype(np.int32) - np.int32(block_format.row_span or 0)
    raised = xp.maximum(scales.astype(np.int32), least).astype(dtype)
    return xp.where(row == dtype.type(nan), dtype.type(nan), raised)
