"""The factor c = softmax_scale * log2(e) of the scores, in the three ways the recipes round it."""

import decimal
import math
from fractions import Fraction

from tests.independent import float32

LOG2_E_FLOAT32 = 0x3FB8AA3B
LOG2_E_FLOAT64 = float.fromhex("0x1.71547652b82fep+0")


def _checked(softmax_scale: float) -> float:
    if not (softmax_scale > 0 and math.isfinite(softmax_scale)):
        raise ValueError(f"softmax_scale {softmax_scale!r}: pass a positive finite number")
    return softmax_scale


def exact_product(softmax_scale: float) -> int:
    """float32 bits of softmax_scale * log2(e), the exact product rounded once.

    Raises ValueError unless softmax_scale is positive and finite.
    """
    scale = Fraction(_checked(softmax_scale))
    context = decimal.Context(prec=60)
    log2_e = Fraction(context.divide(1, decimal.Decimal(2).ln(context)))
    margin = Fraction(1, 10**55)
    low, high = (float32.nearest(scale * (log2_e + error)) for error in (-margin, margin))
    if low != high:
        raise ArithmeticError(f"softmax_scale {softmax_scale!r} is too near a rounding boundary")
    return low


def float64_product(softmax_scale: float) -> int:
    """float32 bits of the float64 product of softmax_scale and the float64 next to log2(e)."""
    product = _checked(softmax_scale) * LOG2_E_FLOAT64
    return float32.nearest(Fraction(product)) if math.isfinite(product) else float32.INFINITY


def float32_product(softmax_scale: float) -> int:
    """float32 bits of the float32 product of softmax_scale and log2(e), both float32."""
    return float32.multiply(rounded(softmax_scale), LOG2_E_FLOAT32)


def float32_scale(softmax_scale: float) -> int:
    """float32 bits of the float64 product of the float32 softmax_scale and the float64 next to log2(e)."""
    return float64_product(float(float32.value(rounded(softmax_scale))))


def rounded(softmax_scale: float) -> int:
    """softmax_scale itself as float32 bits."""
    return float32.nearest(Fraction(_checked(softmax_scale)))
