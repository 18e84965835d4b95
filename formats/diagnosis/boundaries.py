"""Inputs at the boundaries of two formats: where their scales, codes and odd blocks change."""

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend, _float32
from flamia_ref.formats.block import BlockFormat
from flamia_ref.formats.diagnosis.runs import Bits, run
from flamia_ref.formats.encoding import source_bits
from flamia_ref.formats.scalar import E8M0, ScalarFormat
from flamia_ref.formats.scales import tensor_scale_bits

Values = npt.NDArray[np.float64]

_TENSORS = 24  # amaxes of tensors, spread over a binade
_NEAR = 2  # units in the last place on either side of a boundary


class Inputs(NamedTuple):
    """Blocks as float32 bits [N, n], and the amax of the tensor that each is from [N], or None for its own."""

    blocks: Bits
    tensor_amax: Bits | None


def boundary_inputs(
    a: BlockFormat, b: BlockFormat, size: int, dtype: np.dtype[Any], source: ScalarFormat
) -> list[Inputs]:
    """Blocks of `size` elements at the boundaries of both formats, simple ones first.

    Args:
        a, b: the formats, as they are for that input (`of_input`).
        size: elements of a block.
        dtype, source: the type of the values, which are exact in it.
    """
    own = [Inputs(_padded(_special(dtype), size), None)]
    single = [Inputs(_padded(_amaxes(a, b, dtype)[:, None], size), None)]
    if not (a.has_tensor_scale or b.has_tensor_scale):
        anchors = _anchors(a, b, dtype)
        return [*own, *single, *_elements(anchors, None, a, b, size, dtype, source)]
    found = [*own, *single]
    for tensor in _tensors(dtype):
        amaxes = np.unique(np.concatenate([_quotients(one, tensor, dtype) for one in (a, b)]))
        amaxes = amaxes[(amaxes <= tensor) & (amaxes > 0)]
        tensors = np.full(len(amaxes), tensor, np.uint32)
        found.append(Inputs(_padded(amaxes[:, None], size), tensors))
        full = np.float64(tensor.view(np.float32)) / 2688
        anchors = _bits(6 * full * _positive(a, b), dtype)
        found += _elements(anchors[anchors <= tensor], tensor, a, b, size, dtype, source)
    return found


def _positive(a: BlockFormat, b: BlockFormat) -> Values:
    """The values of the scale codes, those of powers of two within the ones of E4M3."""
    values: list[Values] = []
    for one in (a, b):
        if one.scale.bits <= 8 and one.scale != E8M0:
            table = one.scale.table()
            values.append(table[np.isfinite(table) & (table > 0)])
        else:
            values.append(np.ldexp(1.0, np.arange(-9, 9)))
    return np.unique(np.concatenate(values))


def _amaxes(a: BlockFormat, b: BlockFormat, dtype: np.dtype[Any]) -> Bits:
    """Amaxes at which a scale may change, over all exponents, as blocks that are tensors of their own."""
    mantissas = {1.0, 1.5, 1.75, 1.875}
    points = [0.0]
    for one in (a, b):
        mantissas |= {one.element.max / 2.0**one.element.emax}
        bits = one.element.mantissa_bits if one.even_bits is None else one.even_bits
        mantissas |= {2 - 2.0 ** -(bits + 1)}
        points += [one.smallest_amax, one.zero_below, one.smallest_quotient * one.element.max]
    every = np.array(sorted(mantissas))[:, None] * 2.0 ** np.arange(-149, 128)
    exact = [np.array(points), every.ravel(), np.array([float(np.finfo(np.float32).max)])]
    for one in (a, b):
        if not one.has_tensor_scale and one.scale.bits == 8 and one.scale != E8M0:
            exact.append(one.element.max * _steps(one.scale))
    return _near(np.concatenate(exact), dtype)


def _anchors(a: BlockFormat, b: BlockFormat, dtype: np.dtype[Any]) -> Bits:
    """Amaxes of blocks whose elements are then put on their boundaries."""
    powers = 2.0 ** np.array([0, 1, -1, 8, -8, 60, -60, 100, -100, -110, -118, -120, -124, -126])
    found = [one.element.max * powers for one in (a, b)]
    found += [2.0**one.element.emax * powers[:7] for one in (a, b)]
    if not (a.scales_are_powers and b.scales_are_powers):
        found.append(a.element.max * _positive(a, b))
    return np.unique(_bits(np.concatenate(found), dtype))


def _tensors(dtype: np.dtype[Any]) -> Bits:
    """Amaxes of tensors: those with a scale of 1, of all kinds of mantissas, very large and small."""
    spread = 2688 * (1 + np.arange(_TENSORS) / _TENSORS)
    known = np.array([0x458ECCCD, 0x400B8C89], np.uint32).view(np.float32)
    edges = [1.0, 448.0 * 2**-20, 2.0**-100, 2.0**-126, 2.0**-140, 2.0**100, 3e38]
    return _bits(np.concatenate([spread, known, edges]), dtype)


def _quotients(block_format: BlockFormat, tensor: np.uint32, dtype: np.dtype[Any]) -> Bits:
    """Amaxes about which the quotient is on a boundary of the scale format, for a tensor."""
    steps: Values = np.ldexp(1.0, np.arange(-9, 9))
    if block_format.scale != E8M0:
        steps = _steps(block_format.scale)
    factor = 1.0
    if block_format.has_tensor_scale:
        factor = float(tensor.view(np.float32)) / 2688
    return _near(block_format.element.max * factor * steps, dtype)


def _steps(scale: ScalarFormat) -> Values:
    """Values of a scale format and the midpoints between them, positive."""
    table = scale.table()
    table = np.unique(table[np.isfinite(table) & (table >= 0)])
    return np.unique(np.concatenate([table[1:], (table[1:] + table[:-1]) / 2]))


def _elements(
    amaxes: Bits,
    tensor: np.uint32 | None,
    a: BlockFormat,
    b: BlockFormat,
    size: int,
    dtype: np.dtype[Any],
    source: ScalarFormat,
) -> list[Inputs]:
    """Blocks with these amaxes, and in the other places elements between two codes."""
    if not len(amaxes) or size < 2:
        return []
    first = _padded(amaxes[:, None], size)
    tensors = None if tensor is None else np.full(len(amaxes), tensor, np.uint32)
    points = _midpoints(a.element)
    rows = []
    for one in (a, b):
        unit = run(first[:, None, :], one, tensors, source).values.view(np.float32)
        step = unit.astype(np.float64)
        if one.has_tensor_scale:
            given = tensors if tensors is not None else amaxes
            scale = tensor_scale_bits(given, one, source).view(np.float32).astype(np.float64)
            with np.errstate(all="ignore"):
                step = step / scale if one.tensor_divides else step * scale
        rows.append(step[:, None] * points)
    exact = np.concatenate(rows, axis=1)
    exact = np.where(np.isfinite(exact), exact, 0)
    near = [_shifted(_bits(exact, dtype), units, dtype) for units in range(-_NEAR, _NEAR + 1)]
    values = np.concatenate(near, axis=1)
    values = np.where(values <= amaxes[:, None], values, np.uint32(0))
    # Half of them negative; the zeros among them too.
    values = np.concatenate([values, values | _float32.SIGN], axis=1)
    room = size - 1
    short = -values.shape[1] % room
    values = np.pad(values, [(0, 0), (0, short)]).reshape(len(amaxes), -1, room)
    heads = np.broadcast_to(amaxes[:, None, None], (*values.shape[:2], 1))
    blocks = np.concatenate([heads, values], axis=2).reshape(-1, size)
    blocks = np.unique(blocks, axis=0)
    return [Inputs(blocks, None if tensor is None else np.full(len(blocks), tensor, np.uint32))]


def _midpoints(element: ScalarFormat) -> Values:
    """Between neighbouring codes, the codes themselves, and the edge beyond the largest."""
    table = element.table()
    table = np.unique(table[np.isfinite(table) & (table >= 0)])
    found: Values = np.unique(np.concatenate([table, (table[1:] + table[:-1]) / 2]))
    return found


def _special(dtype: np.dtype[Any]) -> Bits:
    """Blocks with zeros, infinities and NaN."""
    inf, nan = math.inf, math.nan
    rows = [
        [0.0],
        [-0.0],
        [1.0, -0.0],
        [1.0, 2.0**-30],
        [1.0, -(2.0**-30)],
        [inf],
        [-inf],
        [inf, 1.0],
        [inf, -1.0],
        [inf, -0.0],
        [nan],
        [-nan],
        [nan, 1.0],
        [nan, -1.0],
        [1.0, -nan],
        [nan, inf],
    ]
    blocks = np.array([[*row, 0.0][:2] for row in rows])
    found = source_bits(blocks.astype(dtype))
    negative = np.array([[math.copysign(1, x) < 0 for x in row] for row in blocks.tolist()])
    blocks_found: Bits = np.where(negative, found | _float32.SIGN, found & _float32.MAGNITUDE)
    return blocks_found


def _near(exact: Values, dtype: np.dtype[Any]) -> Bits:
    """float32 bits of values beside these in the type, without repetition."""
    centre = _bits(exact, dtype)
    found = [_shifted(centre, units, dtype) for units in range(-_NEAR, _NEAR + 1)]
    return np.unique(np.concatenate(found))


def _bits(exact: Values, dtype: np.dtype[Any]) -> Bits:
    with np.errstate(all="ignore"):
        found: Bits = source_bits(exact.astype(np.float32).astype(dtype))
    return found


def _shifted(bits: Bits, units: int, dtype: np.dtype[Any]) -> Bits:
    """Magnitudes some units in the last place of the type further, from 0 to the largest finite."""
    with np.errstate(all="ignore"):
        codes = _backend.bits(bits.view(np.float32).astype(dtype)).astype(np.int64)
    top = int(_backend.bits(np.array(np.inf).astype(dtype))) - 1
    codes = np.clip(codes + units, 0, top)
    width = np.dtype(f"uint{8 * dtype.itemsize}")
    found: Bits = source_bits(codes.astype(width).view(dtype))
    return found


def _padded(blocks: Bits, size: int) -> Bits:
    """Blocks [N, k] with zeros up to `size`, or without what is beyond it."""
    blocks = blocks[:, :size]
    return np.pad(blocks, [(0, 0), (0, size - blocks.shape[1])]).astype(np.uint32)
