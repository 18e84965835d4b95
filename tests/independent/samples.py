"""Random inputs and float64 views of bits, for the tests of this package."""

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.independent import codes

Array = npt.NDArray[Any]

E4M3_VALUES = np.array(
    [float(codes.decode(c, codes.E4M3)) if c & 0x7F != 0x7F else np.nan for c in range(256)]
)


def bell(seed: int, *shape: int, spread: float = 1.0) -> Array:
    """Bell-shaped bfloat16 bits."""
    values = np.random.default_rng(seed).normal(size=shape) * spread
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def constant(value: float, *shape: int) -> Array:
    """bfloat16 bits of one number everywhere."""
    return np.full(shape, value, ml_dtypes.bfloat16).view(np.uint16)


def as_float64(bits: Array) -> Array:
    """bfloat16 (uint16) or float32 (uint32) bits as float64."""
    dtype = ml_dtypes.bfloat16 if bits.dtype == np.uint16 else np.float32
    return bits.view(dtype).astype(np.float64)


def as_bfloat16(values: Array) -> Array:
    """float64 values rounded to bfloat16 by way of float32, as float64."""
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def scale_values(scales: Array) -> Array:
    """The powers of two that E8M0 bytes stand for."""
    return np.ldexp(1.0, scales.astype(np.int32) - 127)
