"""From codes and scales to values: `dequantize`."""

from typing import Any

import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.formats.block import BlockFormat
from flamia_ref.formats.block_tensors import BlockTensor
from flamia_ref.formats.elements import value_bits
from flamia_ref.formats.encoding import (
    as_codes,
    as_floats,
    by_chunks,
    decode,
)
from flamia_ref.formats.scalar import E8M0
from flamia_ref.formats.values import power_values


def dequantize(block_tensor: BlockTensor, dtype: Any = np.float32) -> Array:
    """The values of a block tensor: code value times scale value, times or over the tensor scale.

    Args:
        block_tensor: with codes [..., rows, columns] and one scale for each block.
        dtype: float32, or float64, which is always numpy. Without a tensor scale both are exact but
            for values of 2^128 and more, infinity in float32; with one the exact value is rounded
            once to float32, and to float64 where it is divided by the tensor scale.

    Returns:
        Values of the shape of the codes; NaN where the element or the scale is NaN.

    Raises:
        TypeError: for what is no `BlockTensor`, codes that are not integers, another dtype, or
            float64 of a traced tensor.
        ValueError: for scales whose shape does not fit, codes outside their format, or a tensor
            scale that is missing, of another shape, or one too many.
    """
    if not isinstance(block_tensor, BlockTensor):
        raise TypeError(f"dequantize takes a BlockTensor, not a {type(block_tensor).__name__}")
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
    tensor_scale = _tensor_scale(block_tensor, codes.shape)
    if (
        wanted == np.float32
        and _has_power_values(block_format)
        and _backend.uses_jax(codes, scales)
    ):
        return power_values(codes, scales, block_format.element, (rows, columns))
    spread = _spread(scales, rows, columns, codes.shape)
    if wanted == np.float64:
        values = decode(codes, block_format.element, np.float64)
        values = values * decode(spread, block_format.scale, np.float64)
        if tensor_scale is None:
            return values
        factor = _backend.host(tensor_scale).astype(np.float64)
        with np.errstate(all="ignore"):
            return values / factor if block_format.tensor_divides else values * factor
    if tensor_scale is None:
        return by_chunks(lambda part, scale: _dequantize(part, scale, block_format), codes, spread)
    return _dequantize_scaled(codes, spread, tensor_scale, block_format)


def _has_power_values(block_format: BlockFormat) -> bool:
    element, scale = block_format.element, block_format.scale
    return (
        scale is E8M0 and element.signed and element.bits <= 8 and not block_format.has_tensor_scale
    )


def _tensor_scale(block_tensor: BlockTensor, shape: tuple[int, ...]) -> Array | None:
    """The tensor scale as it broadcasts against codes of that shape."""
    name, given = block_tensor.format.name, block_tensor.tensor_scale
    if block_tensor.format.has_tensor_scale != (given is not None):
        raise ValueError(
            f"{name} has {'a' if given is None else 'no'} tensor scale; the block tensor has"
            f" {'none' if given is None else 'one'}"
        )
    if given is None:
        return None
    scale = as_floats(given, "tensor_scale")
    if scale.dtype != np.float32:
        raise TypeError(f"tensor_scale is float32, not {scale.dtype}")
    sizes = (1,) * (len(shape) - scale.ndim) + tuple(scale.shape)
    if (
        len(sizes) != len(shape)
        or sizes[-1] != 1
        or any(a not in (1, b) for a, b in zip(sizes, shape, strict=True))
    ):
        raise ValueError(
            f"tensor_scale has shape {tuple(scale.shape)}; codes {shape} take (), or [..., rows, 1]"
        )
    return scale.reshape(sizes)


@_backend.jit(static=("block_format",))
def _dequantize(codes: Array, scales: Array, block_format: BlockFormat) -> Array:
    return _backend.from_bits(value_bits(codes, scales, block_format), np.float32)


@_backend.jit(static=("block_format",))
def _dequantize_scaled(
    codes: Array, scales: Array, tensor_scale: Array, block_format: BlockFormat
) -> Array:
    operation = _float32.divide if block_format.tensor_divides else _float32.multiply
    value = operation(value_bits(codes, scales, block_format), _backend.bits(tensor_scale))
    return _backend.from_bits(value, np.float32)


def _spread(per_block: Array, rows: int, columns: int, shape: tuple[int, ...]) -> Array:
    """One value a block [..., down, across] repeated for each of its elements."""
    xp = _backend.namespace(per_block)
    repeated = xp.repeat(xp.repeat(per_block, rows, axis=-2), columns, axis=-1)
    return repeated[..., : shape[-2], : shape[-1]]
