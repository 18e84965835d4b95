"""Where a preset claims to equal its library: `in_contract`."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref import _backend, _float32
from flamia_ref.formats.block import BlockFormat, Log2, ScaleRule
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import FP32, ScalarFormat
from flamia_ref.formats.scales import quotient

FARTHEST = 32  # units in the last place, however large the exponent is
_RATIO_UNITS = 2.0  # of log2 by a ratio: those of the two logarithms, and of the division


def misled_by_log2(
    amax: npt.NDArray[np.uint32],
    block_format: BlockFormat,
    tensor_scale: Any = None,
    source: ScalarFormat = FP32,
) -> npt.NDArray[np.bool_]:
    """Where a library that rounds log2 of a float32 to an integer may find the next one.

    log2 d of a d just above 2^k, taken in float32, is k where they differ by less than a unit in
    the last place of k; so a rounding up finds k, not k + 1, and one down of a d just below 2^k
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
    d: npt.NDArray[np.uint32], *, above: bool, units: float = 1.0, itself: bool = False
) -> npt.NDArray[np.bool_]:
    """Where d lies just above a power of two, or just below one, or where `itself` is one.

    `units` in the last place of log2 are how far; at most `FARTHEST` ones of d.
    """
    # Subnormals too: as normalised numbers with 24 bits.
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
