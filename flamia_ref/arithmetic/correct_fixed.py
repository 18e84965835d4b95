"""Numbers of 64 bits with a fixed point: the upper half of a product, and rounding to float32."""

from __future__ import annotations

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array

LOW_HALF = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
_SIGNIFICANT = 24


def high(a: Array, b: Array) -> Array:
    """a * b / 2^64 for uint64, less than 3 too small and never too large."""
    a_high, a_low = a >> HALF, a & LOW_HALF
    b_high, b_low = b >> HALF, b & LOW_HALF
    return a_high * b_high + ((a_high * b_low) >> HALF) + ((a_low * b_high) >> HALF)


def to_float32(number: Array, unit: Array) -> Array:
    """float32 bits nearest to number * 2^unit; a tie goes up, so there must be none.

    `number` is uint64 and at least 2^32, or the result means nothing; `unit` is int32, and the
    result a normal number. Called with 64-bit types in scope.
    """
    # Room for a carry. The bit that goes is below every boundary, so no comparison with one changes.
    number = number >> np.uint64(1)
    length = _backend.bit_length((number >> np.uint64(31)).astype(np.uint32)) + 31
    dropped = (length - _SIGNIFICANT).astype(np.uint64)
    kept = (number + (np.uint64(1) << (dropped - np.uint64(1)))) >> dropped
    # The leading bit of `kept` adds 1 to the exponent, and a carry out of it one more.
    exponent = length + unit + (127 - 1)
    return kept.astype(np.uint32) + (exponent.astype(np.uint32) << np.uint32(23))
