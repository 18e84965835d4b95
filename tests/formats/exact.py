"""Scalar formats and block scales with exact rationals, sharing no code with the library.

Written from the definitions: OCP MX v1.0 section 5 and 6.3, IEEE 754-2019 sections 3 and 7.4, the
CUDA conversions recorded in tests/oracles/conversions for NaN, infinities and E8M0, and the kernel
named at `rceil`.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

TWO = Fraction(2)


@functools.cache
def power(exponent: int) -> Fraction:
    """2^exponent."""
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


@dataclass(frozen=True)
class Spec:
    """A format: widths, bias, sign, and the codes that are no finite numbers."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    last: int  # code of the largest finite magnitude
    infinity: int | None
    nan: int  # what a NaN becomes
    signed: bool = True
    zero: bool = True
    pad: int = 0  # low bits of the stored code that do not count

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)


SPECS = {
    "e4m3": Spec(4, 3, 7, 0x7E, None, 0x7F),
    "e5m2": Spec(5, 2, 15, 0x7B, 0x7C, 0x7F),
    "e2m1": Spec(2, 1, 1, 0x7, None, 0x7),
    "e2m3": Spec(2, 3, 1, 0x1F, None, 0x1F),
    "e3m2": Spec(3, 2, 3, 0x1F, None, 0x1F),
    "e8m0": Spec(8, 0, 127, 0xFE, None, 0xFF, signed=False, zero=False),
    "ue4m3": Spec(4, 3, 7, 0x7E, None, 0x7F, signed=False),
    "bf16": Spec(8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF),
    "fp16": Spec(5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF),
    "tf32": Spec(8, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF, pad=13),
    "fp32": Spec(8, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF),
}
SMALL = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "e8m0", "ue4m3")
FINITE = ("e2m1", "e2m3", "e3m2")  # no NaN, no infinity
ROUNDINGS = ("nearest_even", "nearest_away", "nearest_zero", "toward_zero", "up", "down")


def value(code: int, spec: Spec) -> Fraction:
    """The value of a magnitude code, as if the exponent had no upper limit."""
    field, mantissa = code >> spec.mantissa_bits, code & ((1 << spec.mantissa_bits) - 1)
    if not spec.zero:
        return power(code - spec.bias)
    if field == 0:
        return mantissa * power(1 - spec.bias - spec.mantissa_bits)
    return ((1 << spec.mantissa_bits) + mantissa) * power(field - spec.bias - spec.mantissa_bits)


def floor_log2(x: Fraction) -> int:
    """The largest e with 2^e <= x, for x > 0."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if power(e) <= x else e - 1


def below(x: Fraction, spec: Spec) -> tuple[int, Fraction]:
    """The largest magnitude code whose value is not above x >= 0, and how far x is to the next."""
    lowest = -spec.bias if not spec.zero else 1 - spec.bias
    if not spec.zero and x < power(lowest):
        return 0, Fraction(0)
    if x < power(lowest):
        steps = x * power(spec.mantissa_bits - lowest)
        return math.floor(steps), steps - math.floor(steps)
    e = floor_log2(x)
    steps = x * power(spec.mantissa_bits - e) - 2**spec.mantissa_bits
    base = (e + spec.bias) << spec.mantissa_bits
    return base + math.floor(steps), steps - math.floor(steps)


def round_up(
    code: int, part: Fraction, negative: bool, rounding: str, draw: tuple[int, int] = (0, 0)
) -> bool:
    """Whether a magnitude `part` of the way from `code` to the next takes the next."""
    if rounding == "nearest_even":
        return part > Fraction(1, 2) or (part == Fraction(1, 2) and code % 2 == 1)
    if rounding == "nearest_away":
        return part >= Fraction(1, 2)
    if rounding == "nearest_zero":
        return part > Fraction(1, 2)
    if rounding == "stochastic":
        bits, drawn = draw
        return math.floor(part * 2**bits) + drawn >= 2**bits
    return part != 0 and {"toward_zero": False, "up": not negative, "down": negative}[rounding]


def encode(
    x: float | Fraction,
    spec: Spec,
    rounding: str = "nearest_even",
    overflow: str = "saturate",
    *,
    negative: bool | None = None,
    draw: tuple[int, int] = (0, 0),
) -> int:
    """The code of x. `negative` gives the sign of a zero."""
    if isinstance(x, float) and math.isnan(x):
        return spec.nan << spec.pad
    if negative is None:
        negative = x < 0 or (isinstance(x, float) and math.copysign(1.0, x) < 0)
    negative = negative and spec.signed
    sign = spec.sign if negative else 0
    outside = spec.nan if spec.infinity is None else spec.infinity
    if overflow == "saturate":
        outside = spec.last
    if isinstance(x, float) and math.isinf(x):
        return (sign | outside) << spec.pad
    code, part = below(abs(Fraction(x)), spec)
    code += round_up(code, part, negative, rounding, draw)
    if code > spec.last:
        inward = {"toward_zero": True, "up": negative, "down": not negative}.get(rounding, False)
        code = spec.last if inward else outside
    return (sign | code) << spec.pad


def finite_codes(spec: Spec) -> range:
    """The magnitude codes of finite values."""
    return range(spec.last + 1)


def floor_scale(amax: Fraction, emax: int) -> int:
    """OCP MX v1.0 section 6.3, clamped to the codes of E8M0."""
    return 0 if amax == 0 else min(max(floor_log2(amax) - emax + 127, 0), 254)


def ceil_scale(amax: Fraction, emax: int) -> int:
    """`floor_scale` with the logarithm rounded up."""
    if amax == 0:
        return 0
    e = floor_log2(amax)
    return min(max(e + (amax != power(e)) - emax + 127, 0), 254)


def even_scale(amax: Fraction, emax: int, mantissa_bits: int) -> int:
    """`floor_scale` of amax rounded to `mantissa_bits`, ties away from zero."""
    if amax == 0:
        return 0
    step = power(max(floor_log2(amax), -126) - mantissa_bits)
    return floor_scale(math.floor(amax / step + Fraction(1, 2)) * step, emax)


def float32(x: Fraction) -> Fraction:
    """x >= 0 rounded to float32, to nearest even. No overflow."""
    return value(encode(x, SPECS["fp32"]), SPECS["fp32"])


def rceil_scale(amax: Fraction, largest: int | Fraction) -> int:
    """Transformer Engine d0067d0, quantize_mxfp8.cuh: amax times 1/max in float32, rounded up."""
    d = float32(amax * float32(1 / Fraction(largest)))
    if d <= power(-127):
        return 0
    e = floor_log2(d)
    return min(e + (d != power(e)) + 127, 254)


def exact_rceil_scale(amax: Fraction, largest: int | Fraction) -> int:
    """amax / max rounded up to a power of two, nothing rounded before, clamped."""
    if amax == 0:
        return 0
    quotient = amax / Fraction(largest)
    e = floor_log2(quotient)
    return min(max(e + (quotient != power(e)) + 127, 0), 254)


def block_codes(xs: Sequence[float], code: int, spec: Spec) -> list[int]:
    """Elements of a block with an E8M0 scale code below 255, nearest even, saturating."""
    result = []
    for x in xs:
        special = math.isnan(x) or math.isinf(x)
        scaled = x if special else Fraction(x) / power(code - 127)
        result.append(encode(scaled, spec, negative=math.copysign(1.0, x) < 0))
    return result
