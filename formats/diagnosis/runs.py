"""Running block formats on float32 bits of blocks that stand alone."""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref import _float32
from flamia_ref.formats.bits import decode_bits
from flamia_ref.formats.block import BlockFormat, NanPolicy, TensorExtent
from flamia_ref.formats.blocks import Quantized, amax_of_tensor, quantize_values
from flamia_ref.formats.contract import misled_by_log2, misled_elements
from flamia_ref.formats.hadamard import transformed
from flamia_ref.formats.scalar import FP32, UE4M3, ScalarFormat
from flamia_ref.formats.scales import tensor_scale_bits

Bits = npt.NDArray[np.uint32]
_PART = 1 << 20  # elements at once


class Result(NamedTuple):
    """Codes [N, r, c], scale codes [N], and float32 bits of the value of each scale [N]."""

    codes: npt.NDArray[Any]
    scales: npt.NDArray[Any]
    values: Bits


def run(
    blocks: Bits,
    block_format: BlockFormat,
    tensor_amax: Bits | None,
    source: ScalarFormat = FP32,
) -> Result:
    """Codes and scales of blocks, each by itself.

    Args:
        blocks: float32 bits [N, r, c].
        block_format: the format.
        tensor_amax: float32 bits [N]: the amax of the tensor that each is from; None for its own.
        source: the type that x had.
    """
    shape = blocks.shape[-2:]
    amax = None
    if block_format.has_tensor_scale:
        amax = own_amax(blocks, block_format, source) if tensor_amax is None else tensor_amax
        amax = amax.reshape(-1, 1, 1)
    step = max(1, _PART // max(shape[0] * shape[1], 1))
    parts: list[Quantized] = [
        quantize_values(
            blocks[start : start + step],
            block_format,
            shape,
            source=source,
            tensor_amax=None if amax is None else amax[start : start + step],
        )
        for start in range(0, max(len(blocks), 1), step)
    ]
    codes = np.concatenate([part.codes for part in parts])
    scales = np.concatenate([part.scales for part in parts])[:, 0, 0]
    return Result(codes, scales, scale_values(scales, block_format))


def scale_values(scales: npt.NDArray[Any], block_format: BlockFormat) -> Bits:
    """float32 bits of the values of scale codes; codes that mean the same are one."""
    values = decode_bits(same_scales(scales, block_format), block_format.scale)
    found: Bits = _float32.canonical(values)
    return found


def same_scales(scales: npt.NDArray[Any], block_format: BlockFormat) -> npt.NDArray[Any]:
    """Scale codes, 0xff and 0x7f of UE4M3 as one NaN. Other codes with bit 7 set no preset gives."""
    if block_format.scale != UE4M3:
        return scales
    return np.where((scales & 0x7F) == 0x7F, np.uint8(0x7F), scales)


def own_amax(blocks: Bits, block_format: BlockFormat, source: ScalarFormat = FP32) -> Bits:
    """float32 bits of the amax of each block [N], as the tensor scale takes it."""
    if block_format.signs is not None:
        blocks = transformed(blocks, block_format.signs, source)
    magnitude = blocks & _float32.MAGNITUDE
    if block_format.nan is not NanPolicy.PROPAGATE:
        magnitude = np.where(magnitude > _float32.INFINITY, np.uint32(0), magnitude)
    found: Bits = magnitude.max(axis=(-2, -1), initial=0)
    return found


def tensor_amax_of(bits: Bits, block_format: BlockFormat, source: ScalarFormat = FP32) -> Bits:
    """float32 bits of the amax of a tensor [..., rows, columns], or of each of its rows."""
    flat = bits.reshape(-1, bits.shape[-1])
    step = max(1, _PART // max(bits.shape[-1], 1))
    found = []
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        if block_format.signs is not None:
            part = transformed(part, block_format.signs, source)
        found.append(np.broadcast_to(amax_of_tensor(part, block_format), (len(part), 1)))
    rows = np.concatenate(found) if found else np.zeros((0, 1), np.uint32)
    if block_format.tensor_extent is TensorExtent.TENSOR:
        whole = rows.max(initial=0).astype(np.uint32)
        return np.full((1,) * bits.ndim, whole, np.uint32)
    return rows.reshape((*bits.shape[:-1], 1))


def claimed(
    blocks: Bits,
    scales: npt.NDArray[Any],
    block_format: BlockFormat,
    tensor_amax: Bits | None,
    source: ScalarFormat = FP32,
) -> npt.NDArray[np.bool_]:
    """Which blocks [N] a preset claims to give as its library does; arguments as in `run`."""
    own = block_format.of_input(source)
    nan = _float32.is_nan(blocks).any(axis=(-2, -1))
    fine = np.ones(len(blocks), bool)
    if not own.nan_in_contract:
        fine &= ~nan
        if own.has_tensor_scale and tensor_amax is not None:
            fine &= ~_float32.is_nan(tensor_amax)
    if not own.infinity_in_contract:
        fine &= ((blocks & _float32.MAGNITUDE) != _float32.INFINITY).all(axis=(-2, -1))
    if own.by_log2:
        amax = own_amax(blocks, own, source)
        tensor = None
        if own.has_tensor_scale:
            tensor = tensor_scale_bits(amax if tensor_amax is None else tensor_amax, own, source)
        fine &= ~misled_by_log2(amax, own, tensor, source)
        fine &= ~misled_elements(blocks, scales[:, None, None], own, source).any(axis=(-2, -1))
    return fine


def number(bits: int) -> str:
    """float32 bits as the shortest decimal that means them."""
    value = float(np.uint32(bits).view(np.float32))
    if math.isnan(value):
        return "-nan" if bits >> 31 else "nan"
    text = str(np.uint32(bits).view(np.float32))
    return text.removesuffix(".0")
