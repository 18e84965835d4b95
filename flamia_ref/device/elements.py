"""Codes from exponents and fractions, and back, for making operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref.formats import ScalarFormat

Integers = npt.NDArray[np.int64]
Codes = npt.NDArray[Any]


def codes_of(
    element: ScalarFormat, exponents: Any, fractions: Any, negative: Any
) -> npt.NDArray[Any]:
    """The codes of 2^exponent (1 + fraction / 2^mantissa_bits), fractions modulo their bits (-1 is all ones).

    Below the normal range the significand is cut; above it the largest finite value is taken.
    """
    bits = element.mantissa_bits
    exponents, fractions, negative = np.broadcast_arrays(exponents, fractions, negative)
    fractions = fractions.astype(np.int64) & ((1 << bits) - 1)
    below = np.clip(element.emin - exponents, 0, bits + 1)
    field = np.clip(exponents - element.emin + 1, 1, element.emax - element.emin + 1)
    normal = field.astype(np.int64) << bits | fractions
    magnitude = np.where(below > 0, (fractions | 1 << bits) >> below, normal)
    largest = element.max_code >> element.padding_bits
    magnitude = np.where(exponents > element.emax, largest, np.minimum(magnitude, largest))
    return with_sign(element, magnitude, negative)


def with_sign(element: ScalarFormat, magnitude: Any, negative: Any) -> npt.NDArray[Any]:
    """Codes of magnitudes, which are codes without padding bits and sign."""
    signs = np.where(negative, element.sign_code, 0)
    return np.asarray(magnitude << element.padding_bits | signs).astype(element.code_dtype)


def magnitudes(element: ScalarFormat, codes: Codes) -> Integers:
    """Codes without padding bits and sign."""
    kept = codes.astype(np.int64) & element.code_mask & ~element.sign_code
    return np.asarray(kept >> element.padding_bits)


def exponents_of(element: ScalarFormat, codes: Codes) -> Integers:
    """The exponent that the alignment of a fused sum counts: that of the least normal value for subnormal codes."""
    field = magnitudes(element, codes) >> element.mantissa_bits
    first = 0 if not element.has_zero else 1
    return np.asarray(np.maximum(field, first) - first + element.emin)


def is_zero(element: ScalarFormat, codes: Codes) -> npt.NDArray[np.bool_]:
    """Where a code is zero."""
    return np.asarray((magnitudes(element, codes) == 0) & element.has_zero)


def special_codes(element: ScalarFormat) -> npt.NDArray[Any]:
    """NaN and infinity codes of both signs; empty for a format without them. A NaN of each end is enough."""
    found = []
    if element.has_infinity and element.infinity_code is not None:
        found.append(element.infinity_code)
    if element.has_nan:
        found += [element.nan_codes[0], element.nan_codes[-1]]
    signs = (0, element.sign_code) if element.signed else (0,)
    return np.array([code | sign for code in found for sign in signs], dtype=element.code_dtype)
