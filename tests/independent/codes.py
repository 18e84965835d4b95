"""Element formats and the scale format E8M0, from their definitions.

Source: OCP Microscaling Formats (MX) v1.0, section 5; IEEE 754-2019 for 16 bits and more. Overflow
of ``encode`` saturates and NaN becomes what CUDA's conversions give: 0x7f in both 8-bit formats,
+max where there is no NaN.
"""

from dataclasses import dataclass
from fractions import Fraction

from tests.independent import float32


@dataclass(frozen=True, kw_only=True)
class Element:
    """A signed element format."""

    name: str
    exponent_bits: int
    fraction_bits: int
    bias: int
    largest: int  # code of the largest finite magnitude
    infinity: int | None  # code of +infinity
    nan: int  # what a NaN encodes to (0x7f, or the largest code)

    @property
    def sign_bit(self) -> int:
        """The bit that holds the sign."""
        return 1 << (self.exponent_bits + self.fraction_bits)


E4M3 = Element(
    name="e4m3", exponent_bits=4, fraction_bits=3, bias=7, largest=0x7E, infinity=None, nan=0x7F
)
E5M2 = Element(
    name="e5m2", exponent_bits=5, fraction_bits=2, bias=15, largest=0x7B, infinity=0x7C, nan=0x7F
)
E2M3 = Element(
    name="e2m3", exponent_bits=2, fraction_bits=3, bias=1, largest=0x1F, infinity=None, nan=0x1F
)
E3M2 = Element(
    name="e3m2", exponent_bits=3, fraction_bits=2, bias=3, largest=0x1F, infinity=None, nan=0x1F
)
E2M1 = Element(
    name="e2m1", exponent_bits=2, fraction_bits=1, bias=1, largest=0x7, infinity=None, nan=0x7
)
BF16 = Element(
    name="bf16",
    exponent_bits=8,
    fraction_bits=7,
    bias=127,
    largest=0x7F7F,
    infinity=0x7F80,
    nan=0x7FFF,
)
FP16 = Element(
    name="fp16",
    exponent_bits=5,
    fraction_bits=10,
    bias=15,
    largest=0x7BFF,
    infinity=0x7C00,
    nan=0x7FFF,
)
TF32 = Element(  # the 19 bits that count; they are stored in a word with 13 bits below them
    name="tf32",
    exponent_bits=8,
    fraction_bits=10,
    bias=127,
    largest=0x3FBFF,
    infinity=0x3FC00,
    nan=0x3FFFF,
)
FP32 = Element(
    name="fp32",
    exponent_bits=8,
    fraction_bits=23,
    bias=127,
    largest=0x7F7FFFFF,
    infinity=0x7F800000,
    nan=0x7FFFFFFF,
)
NARROW = (E4M3, E5M2, E2M3, E3M2, E2M1)
ELEMENTS = {element.name: element for element in (*NARROW, BF16, FP16, TF32, FP32)}
TF32_PADDING = 13
E8M0_NAN = 255


def split(code: int, element: Element) -> tuple[int, int]:
    """A finite code as (signed significand m, exponent e): value = m * 2**(e - fraction_bits).

    Subnormals and zero keep the smallest normal exponent. Raises ValueError for NaN and infinity.
    """
    magnitude = code & (element.sign_bit - 1)
    if magnitude > element.largest:
        raise ValueError(f"{element.name} code {code:#04x} is not finite: pass a finite one")
    field = magnitude >> element.fraction_bits
    significand = magnitude & ((1 << element.fraction_bits) - 1)
    if field:
        significand |= 1 << element.fraction_bits
    else:
        field = 1
    return -significand if code & element.sign_bit else significand, field - element.bias


def decode(code: int, element: Element) -> Fraction:
    """The exact value of a finite code."""
    significand, exponent = split(code, element)
    return significand * float32.power_of_two(exponent - element.fraction_bits)


def encode(bits: int, element: Element) -> int:
    """A float32 to the nearest code, ties to even, saturating; the sign of zero is kept."""
    if float32.is_nan(bits):
        return element.nan
    sign = element.sign_bit if bits & float32.SIGN else 0
    if float32.is_zero(bits):
        return sign
    if float32.is_infinite(bits):
        return sign | element.largest
    significand, exponent = float32.split(bits)
    magnitude = abs(significand)
    least = 1 - element.bias - element.fraction_bits
    unit = max(exponent + magnitude.bit_length() - 1 - element.fraction_bits, least)
    integer = float32.nearest_even_multiple(magnitude, exponent, unit)
    code = (unit - least << element.fraction_bits) + integer
    return sign | min(code, element.largest)


def encode_scale_up(bits: int) -> int:
    """A float32 to E8M0, rounded toward +infinity: the smallest s with 2**(s-127) >= abs(x).

    Saturates at 254, infinity included; NaN is 255; the sign is ignored.
    """
    if float32.is_nan(bits):
        return E8M0_NAN
    if float32.is_infinite(bits):
        return 254
    magnitude = abs(float32.value(bits))
    if magnitude <= float32.power_of_two(-127):
        return 0
    exponent = float32.floor_log2(magnitude)
    if float32.power_of_two(exponent) < magnitude:
        exponent += 1
    return min(exponent + 127, 254)
