"""Quantizing a numpy array part by part, in arrays that fit the cache."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref import _float32
from flamia_ref.formats.added_rounding import constants
from flamia_ref.formats.amax import beside, block_amax
from flamia_ref.formats.factors import Factor, whole
from flamia_ref.formats.scalar import ScalarFormat

_EXPONENT = np.uint32(0x7F800000)
_PART = (
    1 << 17
)  # elements of a numpy array that are worked on at once: a few arrays of them fit the cache of a core


class _Workspace(threading.local):
    """Three arrays that parts are worked on in, so that none is made for a step."""

    def __init__(self, size: int) -> None:
        self.flat = tuple(np.empty(size, np.uint32) for _ in range(3))

    def arrays(self, shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], ...]:
        size = math.prod(shape)
        return tuple(array[:size].reshape(shape) for array in self.flat)


def array_amax(
    x: npt.NDArray[Any], room: _Workspace, *, ignore_nan: bool
) -> tuple[npt.NDArray[Any], bool]:
    """`block_amax` of a numpy array in blocks, and whether there is a NaN."""
    magnitude = room.arrays(x.shape)[0]
    # Signed integers: numpy has the faster loops for them.
    key = np.bitwise_and(x, _float32.MAGNITUDE, out=magnitude).view(np.int32)
    amax = (
        (key[..., 0, :, :] if key.shape[-3] == 1 else key.max(axis=-3)).max(axis=-1).view(np.uint32)
    )
    nan = bool((amax > _float32.INFINITY).any())
    return (block_amax(x, ignore_nan=True) if ignore_nan and nan else amax), nan


def array_codes(
    x: npt.NDArray[Any],
    factors: npt.NDArray[Any],
    element: ScalarFormat,
    room: _Workspace,
    out: npt.NDArray[Any],
    *,
    divide: bool = False,
    within: bool = False,
) -> None:
    """`codes_by_factor` of a numpy array in blocks into `out`.

    `factors` are those of the blocks, float32; `within` says that nothing is beyond the format, infinite or NaN.
    """
    number = constants(element)
    addend, bits, power = room.arrays(x.shape)
    y = bits.view(np.float32)
    magnitude = np.bitwise_and(x, _float32.MAGNITUDE, out=addend).view(np.float32)
    (np.divide if divide else np.multiply)(magnitude, beside(factors), out=y)
    nan = None if within else y != y
    if not within:
        np.minimum(bits, number.largest, out=bits)
    np.bitwise_and(bits, _EXPONENT, out=power)
    signed = power.view(np.int32)
    np.maximum(signed, number.smallest.view(np.int32), out=signed)
    np.add(power, number.added, out=addend)
    np.add(y, addend.view(np.float32), out=y)
    np.subtract(bits, power, out=bits)
    np.right_shift(power, number.shift, out=power)
    np.add(bits, power, out=bits)
    np.right_shift(x, number.sign_shift, out=power)
    np.bitwise_and(power, number.sign, out=power)
    np.bitwise_or(bits, power, out=bits)
    np.copyto(out, bits, casting="unsafe")
    if nan is not None and nan.any():
        out[nan] = element.nan_code


def quantize_array(
    x: npt.NDArray[Any],
    block: tuple[int, int],
    element: ScalarFormat,
    *,
    ignore_nan: bool,
    scales_of: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    factor_of_scales: Callable[[npt.NDArray[Any]], tuple[Factor, bool]],
    threads: int = 1,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Element codes and scale codes of a numpy array of whole blocks, some rows at a time.

    Args:
        x: float32 bits (uint32) or bfloat16 bits (uint16) [..., rows, columns].
        block: (r, c), which divide rows and columns.
        element: as `fits` says.
        ignore_nan: as in `block_amax`.
        scales_of: scale codes of amax bits [blocks down, blocks across].
        factor_of_scales: the factor of each scale code, and whether it is a divisor.
        threads: that parts are spread over; numpy lets go of the interpreter in its loops.

    What it takes besides the result is a few arrays of the shape of the scales, and three of a part for each thread.
    """
    rows, columns = block
    *batch, height, width = x.shape
    down, across = height // rows, width // columns
    blocks = x.reshape((-1, rows, across, columns))
    step = max(1, _PART // (width * rows))
    parts = [slice(start, start + step) for start in range(0, len(blocks), step)]
    room = _Workspace(min(step, len(blocks)) * rows * width)
    amax = np.empty((len(blocks), across), np.uint32)
    codes = np.empty(blocks.shape, element.code_dtype)

    def wide(part: slice) -> npt.NDArray[Any]:
        here = blocks[part]
        return here.astype(np.uint32) << np.uint32(16) if here.dtype == np.uint16 else here

    def find(part: slice) -> bool:
        amax[part], nan = array_amax(wide(part), room, ignore_nan=ignore_nan)
        return nan

    with _workers(threads) as each, np.errstate(all="ignore"):
        has_nan = any(list(each(find, parts)))
        scales = scales_of(amax)
        factor, divide = factor_of_scales(scales)
        factors = whole(factor)
        largest = amax.view(np.float32) / factors if divide else amax.view(np.float32) * factors
        within = not has_nan and bool((largest <= np.float32(element.max)).all())

        def encode(part: slice) -> None:
            with np.errstate(all="ignore"):
                array_codes(
                    wide(part),
                    factors[part],
                    element,
                    room,
                    codes[part],
                    divide=divide,
                    within=within,
                )

        list(each(encode, parts))
    return codes.reshape(x.shape), scales.reshape((*batch, down, across))


@contextlib.contextmanager
def _workers(threads: int) -> Iterator[Any]:
    if threads < 2:
        yield map
        return
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        yield pool.map
