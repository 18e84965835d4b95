"""Where a preset claims to equal its library: `in_contract`."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend, _float32
from flamia_ref._backend import Array
from flamia_ref.formats.block import BlockFormat, Log2, NanPolicy, ScaleRule, TensorExtent
from flamia_ref.formats.encoding import as_matrices, source_bits
from flamia_ref.formats.quantizer import quantize, source_of
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import FP32, ScalarFormat
from flamia_ref.formats.scales import quotient

# Units in the last place of log2 by which a library's may err. PyTorch 2.13 on CPU rounds correctly (1/2): misled are
# up to 22 units of d above 2^64 and more and 44 below; a ratio in JAX 0.10.2 misleads up to 61 above and 35 below.
_ROUNDED_UNITS, _RATIO_UNITS = 0.6, 1.5
FARTHEST = 64  # units in the last place of d, however large the exponent is


def in_contract(
    x: Array, preset_or_format: str | BlockFormat, *, block: Any = None, tensor_amax: Any = None
) -> npt.NDArray[np.bool_]:
    """Which blocks of x the claim of a format to equal its source is made for.

    Out of contract are, as far as the format says so: blocks beside powers of two where the library
    rounds a float32 log2 to an integer; blocks with a NaN (all that have part in the tensor scale,
    where it is made from x); blocks with an infinity. `out_of_contract` of a format says what else
    is, none of it a matter of single blocks.

    Args:
        x, preset_or_format, block, tensor_amax: as in `quantize`, which refuses the same.

    Returns bool [..., down, across], one a block, numpy.
    """
    x = _backend.host(as_matrices(x, "in_contract"))
    tensor = quantize(x, preset_or_format, block=block, tensor_amax=tensor_amax)
    source = source_of(x)
    block_format = tensor.format.of_input(source)
    bits = source_bits(x.astype(np.float32) if x.dtype == np.float64 else x)
    magnitude = bits & _float32.MAGNITUDE
    nan = magnitude > _float32.INFINITY
    counted = magnitude
    if block_format.nan is not NanPolicy.PROPAGATE:
        counted = np.where(nan, np.uint32(0), magnitude)
    amax = _of_blocks(counted, tensor.block, np.maximum)
    tensor_scale = tensor.tensor_scale
    if tensor_scale is not None:
        tensor_scale = _backend.bits(tensor_scale)
    outside = misled_by_log2(amax, tensor.format, tensor_scale, source)
    if block_format.element_log2:
        rows, columns = tensor.block
        spread = np.repeat(np.repeat(tensor.scales, rows, axis=-2), columns, axis=-1)
        spread = spread[..., : x.shape[-2], : x.shape[-1]]
        misled = misled_elements(bits, spread, tensor.format, source)
        outside = outside | _of_blocks(misled, tensor.block, np.logical_or)
    if not block_format.nan_in_contract:
        of_block = _of_blocks(nan, tensor.block, np.logical_or)
        if block_format.has_tensor_scale and tensor_amax is None:
            by_row = block_format.tensor_extent is TensorExtent.ROW
            of_block = of_block | nan.any(axis=-1 if by_row else None, keepdims=True)
        outside = outside | of_block
    if not block_format.infinity_in_contract:
        infinite = magnitude == _float32.INFINITY
        outside = outside | _of_blocks(infinite, tensor.block, np.logical_or)
    return ~outside


def _of_blocks(
    values: npt.NDArray[Any], block: tuple[int, int], reduction: np.ufunc
) -> npt.NDArray[Any]:
    """Values [..., rows, columns] reduced over each block, partial ones filled with zeros."""
    *batch, height, width = values.shape
    rows, columns = block
    down, across = -(-height // rows), -(-width // columns)
    ends = [(0, 0)] * len(batch) + [(0, down * rows - height), (0, across * columns - width)]
    blocks = np.pad(values, ends).reshape((*batch, down, rows, across, columns))
    found: npt.NDArray[Any] = reduction.reduce(blocks, axis=(-3, -1))
    return found


def misled_by_log2(
    amax: npt.NDArray[np.uint32],
    block_format: BlockFormat,
    tensor_scale: Any = None,
    source: ScalarFormat = FP32,
) -> npt.NDArray[np.bool_]:
    """Where a library that rounds log2 of a float32 to an integer may find the next one.

    log2 d of a d just above 2^k, taken in float32, is k where they differ by less than half a unit
    in the last place of k; so a rounding up finds k, not k + 1, and one down of a d just below 2^k
    finds k, not k - 1. Which of these d it happens to depends on the platform's log2. A ratio of two
    logarithms may err to either side, and at 2^k itself.

    Args:
        amax: float32 bits of the amax of each block.
        block_format: the format; nowhere unless it is `by_log2` for x of that type.
        tensor_scale, source: as in `scale_codes`.
    """
    block_format = block_format.of_input(source)
    if not block_format.by_log2:
        return np.zeros(amax.shape, bool)
    d = amax
    if block_format.rule is ScaleRule.QUOTIENT:
        d = quotient(amax, block_format, tensor_scale, source)
    up = block_format.rule is ScaleRule.CEIL or (
        block_format.rule is ScaleRule.QUOTIENT and block_format.scale_rounding is Rounding.UP
    )
    d = _backend.host(d)
    if block_format.log2 is Log2.RATIO:
        return _beside(d, above=True, units=_RATIO_UNITS) | _beside(
            d, above=False, units=_RATIO_UNITS, itself=True
        )
    return _beside(d, above=up)


def misled_elements(
    bits: npt.NDArray[np.uint32],
    scales: npt.NDArray[Any],
    block_format: BlockFormat,
    source: ScalarFormat = FP32,
) -> npt.NDArray[np.bool_]:
    """Where a library that takes log2 of each element may cut it to twice its step.

    That is where the element over its scale lies just below a power of two, and the rounding is
    toward zero: nearest roundings give the power of two with either step.

    Args:
        bits: float32 bits of x.
        scales: scale codes that broadcast against `bits`.
        block_format: the format; nowhere unless it is `by_log2` for x of that type, and takes log2
            of elements.
        source: the type that x had.
    """
    block_format = block_format.of_input(source)
    cuts = block_format.rounding is Rounding.TOWARD_ZERO and block_format.element_log2
    if not (block_format.by_log2 and cuts):
        return np.zeros(bits.shape, bool)
    power = np.int32(block_format.scale.bias) - scales.astype(np.int32)
    scaled = _float32.shift(bits & _float32.MAGNITUDE, power)
    return _beside(scaled, above=False)


def _beside(
    d: npt.NDArray[np.uint32], *, above: bool, units: float = _ROUNDED_UNITS, itself: bool = False
) -> npt.NDArray[np.bool_]:
    """Where d lies just above a power of two, or just below one, or where `itself` is one.

    `units` in the last place of log2 are how far; at most `FARTHEST` ones of d.
    """
    # Subnormals too: as normalised numbers with 24 bits.
    with np.errstate(invalid="ignore"):  # signalling NaN
        mantissa, exponent = np.frexp(d.view(np.float32).astype(np.float64))
    finite = np.isfinite(mantissa) & (mantissa != 0)
    whole = np.where(finite, mantissa, 0.5) * 2.0**24  # 2^23 at a power of two
    # d = mantissa 2^exponent with mantissa in [1/2, 1): just above 2^(exponent - 1), below 2^exponent.
    distance = whole - 2.0**23 if above else 2.0**24 - whole
    power = np.where(finite, exponent - 1 if above else exponent, 0)
    step = np.where(finite, 2.0 ** np.maximum(-125 - exponent, 0), 1.0)  # a unit of d, if subnormal
    far = np.minimum(reach(power, up=above, units=units), FARTHEST * step)
    near = (distance > 0) & (distance <= far)
    found: npt.NDArray[np.bool_] = finite & (near | (itself & (mantissa == 0.5)))
    return found


def reach(power: npt.NDArray[Any], *, up: bool, units: float = 1.0) -> npt.NDArray[Any]:
    """Units of 24-bit numbers beside 2^power within which log2 may round to `power`.

    `units` in the last place of `power` are how far log2 may err.
    """
    last = np.array([0.0] + [2.0 ** (math.frexp(k)[1] - 24) for k in range(1, 256)])
    step = 2.0**-23 if up else 2.0**-24
    far: npt.NDArray[Any] = np.floor(units * last[np.abs(power)] * math.log(2) / step)
    return far
