"""From values to codes and scales: `quantize`."""

from typing import Any

import ml_dtypes
import numpy as np

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref._errors import shown
from flamia_ref.formats.block import Block, BlockFormat, NanPolicy, PartialBlock, TensorExtent
from flamia_ref.formats.block_tensors import BlockTensor
from flamia_ref.formats.blocks import (
    Quantized,
    amax_of_tensor,
    block_extents,
    quantize_values,
    quick,
    scales_of_amax,
)
from flamia_ref.formats.elements import scale_factor
from flamia_ref.formats.encoding import (
    as_floats,
    as_matrices,
    as_random,
    source_bits,
)
from flamia_ref.formats.parts import quantize_array
from flamia_ref.formats.presets import PRESETS
from flamia_ref.formats.scalar import BF16, FP16, FP32, ScalarFormat
from flamia_ref.formats.scales import tensor_scale_bits

_PART = 1 << 18  # elements of a numpy array that are quantized at once
_LARGE, _THREADS = 1 << 20, 8  # elements from which threads share the work, and how many at most
_SOURCES: dict[Any, ScalarFormat] = {
    np.dtype(ml_dtypes.bfloat16): BF16,
    np.dtype(np.float16): FP16,
}


def quantize(
    x: Array,
    preset_or_format: str | BlockFormat,
    *,
    block: Any = None,
    tensor_amax: Any = None,
    random_bits: Any = None,
) -> BlockTensor:
    """x in a block format, the scale of each block from its own amax.

    Args:
        x: float32, bfloat16 or float16 [..., rows, columns], numpy or JAX. float64 values are taken
            if all are float32 values, since rounding them here would round twice.
        preset_or_format: a `BlockFormat` or its name in `PRESETS`.
        block: (rows, columns) that share a scale, one of the format's `blocks`; "all", -1 or None
            stands for a whole extent. By default the format's own. The last blocks of a row or
            column cover what is there, where the format has such (`partial`).
        tensor_amax: for formats with a tensor scale: the amax that it is made from, in place of
            that of x; finite, 0 or more. One number, or an array that broadcasts against x with one
            column; with one row too unless the format scales each row.
        random_bits: uint8, uint16 or uint32 of the shape of x: elements are rounded stochastically
            by them, as in `encode`, whatever the format's rounding.

    Returns:
        A `BlockTensor` in the library of x. The derivative under JAX is zero, as in `encode`.

    Raises:
        TypeError: for values of another type.
        ValueError: for an unknown name, fewer than two axes, a block the format does not have, a
            partial block that it refuses, a tensor_amax that it does not take or that is NaN,
            infinite or negative, random bits of another shape, or float64 values that are not
            float32 values.
    """
    block_format = _block_format(preset_or_format)
    chosen = block_format.checked_block(block)
    values = as_matrices(x, "quantize")
    extents = block_extents(chosen, values.shape)
    _check_partial(values.shape, extents, block_format)
    values = _float32_values(values)
    amax = _checked_amax(tensor_amax, values, block_format)
    drawn = None if random_bits is None else as_random(random_bits, values.shape)
    if _goes_by_rows(values, extents, block_format, amax, drawn):
        found = _by_rows(values, block_format, extents, amax)
    else:
        if amax is None and block_format.has_tensor_scale and not _backend.is_jax(values):
            amax = _amax_by_parts(values, block_format)
        found = _by_parts(values, block_format, extents, amax, drawn)
    tensor_scale = found.tensor_scale
    if tensor_scale is not None:
        tensor_scale = _backend.from_bits(tensor_scale, np.float32)
        if tensor_scale.size == 1 and block_format.tensor_extent is TensorExtent.TENSOR:
            tensor_scale = tensor_scale.reshape(())
    return BlockTensor(
        codes=found.codes,
        scales=found.scales,
        tensor_scale=tensor_scale,
        format=block_format,
        block=extents,
    )


def _check_partial(
    shape: tuple[int, ...], extents: tuple[int, int], block_format: BlockFormat
) -> None:
    ends = [size % extent for size, extent in zip(shape[-2:], extents, strict=True)]
    if any(ends) and block_format.partial is PartialBlock.REFUSE:
        raise ValueError(
            f"{block_format.name} takes whole blocks of {extents}, as {block_format.library} does; x has"
            f" {shape[-2]} rows and {shape[-1]} columns: pad it with zeros"
        )
    if block_format.signs is not None and shape[-1] % len(block_format.signs):
        raise ValueError(
            f"{block_format.name} transforms {len(block_format.signs)} columns at a time; x has {shape[-1]}:"
            " pad it with zeros"
        )


def _checked_amax(given: Any, values: Array, block_format: BlockFormat) -> Array | None:
    """float32 bits of the amax given, [..., 1 or rows, 1]."""
    if given is None:
        return None
    if not block_format.has_tensor_scale:
        raise ValueError(f"{block_format.name} has no scale of the whole tensor: no tensor_amax")
    amax = _backend.plain("tensor_amax", given)
    if amax.dtype.kind in "iu" or (amax.dtype == np.float64 and not _backend.is_jax(amax)):
        with np.errstate(all="ignore"):
            narrow = amax.astype(np.float32)
        if not np.array_equal(narrow.astype(np.float64), amax, equal_nan=True):
            raise ValueError(
                f"tensor_amax {shown(given)} is no float32 value; round it first: numpy.float32"
            )
        amax = narrow
    amax = as_floats(amax, "tensor_amax")
    by_row = block_format.tensor_extent is TensorExtent.ROW
    rows = (1, values.shape[-2]) if by_row else (1,)
    shape = (1,) * (values.ndim - amax.ndim) + tuple(amax.shape)
    fits = len(shape) == values.ndim and shape[-1] == 1 and shape[-2] in rows
    if not fits or any(a not in (1, b) for a, b in zip(shape[:-2], values.shape[:-2], strict=True)):
        allowed = "[..., rows, 1]" if by_row else "[..., 1, 1]"
        raise ValueError(
            f"tensor_amax has shape {tuple(amax.shape)}; x of shape {tuple(values.shape)} takes one number or {allowed}"
        )
    if not _backend.is_traced(amax):
        host = _backend.host(amax).astype(np.float32)
        wrong = host[~(np.isfinite(host) & (host >= 0))]
        if wrong.size:
            raise ValueError(f"tensor_amax is {wrong.ravel()[0]}; it must be finite and 0 or more")
    return (source_bits(amax) & _float32.MAGNITUDE).reshape(shape)  # -0 is 0


def _goes_by_rows(
    values: Array,
    block: tuple[int, int],
    block_format: BlockFormat,
    amax: Array | None,
    random_bits: Array | None,
) -> bool:
    """Whether `quantize_array` takes it: a numpy array of whole blocks, of a format that is quick."""
    return (
        not _backend.is_jax(values)
        and values.dtype in (np.float32, np.dtype(ml_dtypes.bfloat16))
        and values.size > 0
        and random_bits is None
        and (amax is None or amax.size == 1)
        and not any(size % extent for size, extent in zip(values.shape[-2:], block, strict=True))
        and quick(block_format.of_input(source_of(values)))
    )


def _by_rows(
    values: Array, block_format: BlockFormat, block: tuple[int, int], amax: Array | None
) -> Quantized:
    """Quantize a numpy array some rows of blocks at a time."""
    block_format = block_format.of_input(source_of(values))
    tensor_scale = None

    def scales_of(found: Array) -> Array:
        nonlocal tensor_scale
        if block_format.has_tensor_scale:
            of_all = found.max().reshape((1,) * values.ndim) if amax is None else amax
            tensor_scale = tensor_scale_bits(of_all, block_format)
        own = None if tensor_scale is None else tensor_scale.reshape(1, 1)
        return scales_of_amax(found, block_format, own)

    codes, scales = quantize_array(
        _backend.bits(np.ascontiguousarray(values)),
        block,
        block_format.element,
        ignore_nan=block_format.nan is NanPolicy.IGNORE,
        scales_of=scales_of,
        factor_of_scales=lambda found: scale_factor(found, block_format, tensor_scale),
        threads=min(_backend.cores(), _THREADS) if values.size >= _LARGE else 1,
    )
    return Quantized(codes, scales, tensor_scale)


def _amax_by_parts(values: Array, block_format: BlockFormat) -> Array:
    """`amax_of_tensor` of a numpy array, large ones a part at a time."""
    if block_format.signs is not None or values.size <= _PART:
        return None
    flat = values.reshape(-1, values.shape[-1])
    step = max(1, _PART // max(values.shape[-1], 1))
    parts = [
        amax_of_tensor(source_bits(flat[start : start + step]), block_format)
        for start in range(0, flat.shape[0], step)
    ]
    if block_format.tensor_extent is TensorExtent.ROW:
        return np.concatenate(parts).reshape((*values.shape[:-1], 1))
    return np.stack(parts).max().reshape((1,) * values.ndim)


def _by_parts(
    values: Array,
    block_format: BlockFormat,
    block: tuple[int, int],
    amax: Array | None,
    random_bits: Array | None,
) -> Quantized:
    """Quantize; large numpy arrays half by half, so that the temporaries stay small."""
    rows = values.ndim - 2
    axis = next((axis for axis in range(rows) if values.shape[axis] > 1), rows)
    unit = block[0] if axis == rows else 1
    middle = values.shape[axis] // (2 * unit) * unit
    whole = block_format.has_tensor_scale and amax is None
    if _backend.is_jax(values) or values.size <= _PART or not middle or whole:
        return _quantize(values, block_format, block, amax, random_bits)
    halves = [
        _by_parts(*half)
        for half in zip(
            np.split(values, [middle], axis),
            (block_format,) * 2,
            (block,) * 2,
            _split(amax, middle, axis),
            _split(random_bits, middle, axis),
            strict=True,
        )
    ]
    codes, scales, tensor_scales = zip(*halves, strict=True)
    tensor_scale = tensor_scales[0]
    if amax is not None and amax.shape[axis] > 1:
        tensor_scale = np.concatenate(tensor_scales, axis)
    return Quantized(np.concatenate(codes, axis), np.concatenate(scales, axis), tensor_scale)


def _split(x: Array | None, middle: int, axis: int) -> Any:
    if x is None or x.shape[axis] == 1:
        return x, x
    return np.split(x, [middle], axis)


@_backend.jit(static=("block_format", "block"))
def _quantize(
    values: Array,
    block_format: BlockFormat,
    block: Block,
    tensor_amax: Array | None,
    random_bits: Array | None,
) -> Quantized:
    source = source_of(values)
    return quantize_values(
        _backend.bits(values) if source is BF16 else source_bits(values),
        block_format,
        block,
        source=source,
        tensor_amax=tensor_amax,
        random_bits=random_bits,
    )


def source_of(values: Array) -> ScalarFormat:
    """The type of x as formulas round to it: float32, for float64 too, bfloat16 or float16."""
    return _SOURCES.get(np.dtype(values.dtype), FP32)


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
