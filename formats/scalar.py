"""Scalar formats as data: `ScalarFormat`, its constants and `FORMATS`.

A code is an unsigned integer: sign, exponent field, mantissa, from the top bit down. Its value is

    (-1)^sign * 2^(field - bias) * (1 + mantissa / 2^mantissa_bits)        exponent field above 0
    (-1)^sign * 2^(1 - bias) * mantissa / 2^mantissa_bits                  exponent field 0

except where `Specials` says otherwise. For formats of 8 bits or fewer the table of all codes,
`ScalarFormat.table`, is the definition; the bit formulas of `encoding` are tested equal to it.

Sources: OCP Microscaling Formats (MX) v1.0 section 5 for E4M3, E5M2, E2M1, E2M3, E3M2 and E8M0;
IEEE 754-2019 for FP16 and FP32; PTX ISA 9.1, "Alternate floating point data formats", for BF16,
TF32 and UE4M3.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref._errors import Registry, shown, unknown_name


class Specials(StrEnum):
    """Which codes of a format are not ordinary numbers."""

    #: The top exponent field: mantissa 0 is infinity, any other NaN (IEEE 754).
    IEEE = "ieee"
    #: Exponent field and mantissa all ones are NaN; there is no infinity.
    NAN = "nan"
    #: Every code is a finite number.
    FINITE = "finite"
    #: Every code c is the power of two 2^(c - bias), all ones is NaN; there is no zero.
    POWER = "power"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarFormat:
    """A floating-point format of at most 32 bits whose values are all float32 values.

    Attributes:
        name: the name in `FORMATS`.
        exponent_bits: bits of the exponent field, 1 to 8.
        mantissa_bits: explicit bits of the mantissa, 0 to 23.
        bias: what is taken off the exponent field.
        signed: whether there is a sign bit. An unsigned format stores magnitudes: signs are
            ignored when encoding, bits above the exponent when decoding.
        specials: which codes are not ordinary numbers.

    Raises ValueError for a combination that is no such format.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    signed: bool = True
    specials: Specials

    def __post_init__(self) -> None:
        if self.specials not in list(Specials):
            raise unknown_name("specials", self.specials, Specials)
        object.__setattr__(self, "specials", Specials(self.specials))
        if not 1 <= self.exponent_bits <= 8:
            raise ValueError(f"{self.name}: exponent_bits is {self.exponent_bits}; allowed: 1 to 8")
        if not 0 <= self.mantissa_bits <= 23:
            raise ValueError(
                f"{self.name}: mantissa_bits is {self.mantissa_bits}; allowed: 0 to 23"
            )
        if self.specials is Specials.POWER and (self.signed or self.mantissa_bits):
            raise ValueError(
                f"{self.name}: a format of powers of two has no sign and no mantissa bits"
            )
        if self.specials is Specials.IEEE and (self.exponent_bits < 2 or not self.mantissa_bits):
            raise ValueError(
                f"{self.name}: IEEE specials need 2 exponent bits and 1 mantissa bit or more"
            )
        if self.specials is Specials.NAN and not self.mantissa_bits:
            raise ValueError(f"{self.name}: a NaN of all ones needs 1 mantissa bit or more")
        low = self.emin - self.mantissa_bits
        if self.emax > 127 or (low < -126 and not (self.bias == 127 and self.exponent_bits == 8)):
            raise ValueError(
                f"{self.name}: bias {self.bias} gives values outside float32; take one that keeps"
                " them within 2^-126 and 2^127, or the float32 exponent (8 bits, bias 127)"
            )

    @property
    def bits(self) -> int:
        """Bits of a number: sign, exponent and mantissa."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def code_dtype(self) -> np.dtype[Any]:
        """The unsigned integer type that holds one code: 8, 16 or 32 bits."""
        width = 8 if self.bits <= 8 else 16 if self.bits <= 16 else 32
        return np.dtype(f"uint{width}")

    @property
    def padding_bits(self) -> int:
        """Low bits of a code that do not count: 13 for TF32, whose code is the word a tensor core
        reads, else 0. They are written as zeros. Codes of 8 bits or fewer are in the low bits.
        """
        return 8 * self.code_dtype.itemsize - self.bits if self.bits > 8 else 0

    @property
    def sign_code(self) -> int:
        """The sign bit of a code, 0 for an unsigned format."""
        return 1 << (self.bits - 1 + self.padding_bits) if self.signed else 0

    @property
    def code_mask(self) -> int:
        """The bits of a code that count."""
        return ((1 << self.bits) - 1) << self.padding_bits

    @property
    def has_nan(self) -> bool:
        """Whether a code is NaN."""
        return self.specials is not Specials.FINITE

    @property
    def has_infinity(self) -> bool:
        """Whether a code is infinity."""
        return self.specials is Specials.IEEE

    @property
    def has_zero(self) -> bool:
        """Whether a code is zero. E8M0 has none."""
        return self.specials is not Specials.POWER

    @property
    def nan_code(self) -> int:
        """What a NaN encodes to: all ones but the sign, as in CUDA; the largest value (`max_code`)
        in a format without NaN.
        """
        return (self.code_mask & ~self.sign_code) if self.has_nan else self.max_code

    @property
    def infinity_code(self) -> int | None:
        """The code of +infinity."""
        if not self.has_infinity:
            return None
        return ((1 << self.exponent_bits) - 1) << (self.mantissa_bits + self.padding_bits)

    @property
    def nan_codes(self) -> range:
        """The NaN codes without the sign bit."""
        step = 1 << self.padding_bits
        if self.infinity_code is not None:
            return range(self.infinity_code + step, self.nan_code + step, step)
        return range(self.nan_code, self.nan_code + step * self.has_nan, step)

    @property
    def max_code(self) -> int:
        """The code of the largest finite value."""
        ones = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        match self.specials:
            case Specials.IEEE:
                ones -= 1 << self.mantissa_bits
            case Specials.NAN | Specials.POWER:
                ones -= 1
            case Specials.FINITE:
                pass
        return ones << self.padding_bits

    @property
    def emin(self) -> int:
        """The exponent of the smallest normal value."""
        return (0 if self.specials is Specials.POWER else 1) - self.bias

    @property
    def emax(self) -> int:
        """The exponent of the largest finite value."""
        return (self.max_code >> (self.mantissa_bits + self.padding_bits)) - self.bias

    @property
    def max(self) -> float:
        """The largest finite value."""
        return self.value(self.max_code)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with a full mantissa."""
        return math.ldexp(1.0, self.emin)

    @property
    def smallest(self) -> float:
        """The smallest positive value, a subnormal where the format has them."""
        return math.ldexp(1.0, self.emin - self.mantissa_bits)

    def value(self, code: int) -> float:
        """The value of one code by the definition, exact.

        Raises ValueError for a code outside the format.
        """
        if not 0 <= code < 1 << (8 * self.code_dtype.itemsize) or (
            self.bits < 8 and self.signed and code > self.code_mask
        ):
            raise ValueError(f"{self.name} has no code {code}; codes are 0 to {self.code_mask}")
        sign = -1.0 if code & self.sign_code else 1.0
        magnitude = (code & self.code_mask & ~self.sign_code) >> self.padding_bits
        field, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if magnitude << self.padding_bits in self.nan_codes:
            return math.nan
        if magnitude << self.padding_bits == self.infinity_code:
            return sign * math.inf
        if field == 0 and self.has_zero:
            return sign * math.ldexp(mantissa, self.emin - self.mantissa_bits)
        significand = (1 << self.mantissa_bits) + mantissa
        return sign * math.ldexp(significand, field - self.bias - self.mantissa_bits)

    def table(self) -> npt.NDArray[np.float64]:
        """The values of all codes in order, for a format of 8 bits or fewer: its definition.

        Raises ValueError for a wider format.
        """
        if self.bits > 8:
            raise ValueError(f"{self.name} has {self.bits} bits; tables are for 8 or fewer")
        return np.array([self.value(code) for code in range(1 << self.bits)])


E4M3 = ScalarFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7, specials=Specials.NAN)
E5M2 = ScalarFormat(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, specials=Specials.IEEE)
E2M1 = ScalarFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, specials=Specials.FINITE)
E2M3 = ScalarFormat(name="e2m3", exponent_bits=2, mantissa_bits=3, bias=1, specials=Specials.FINITE)
E3M2 = ScalarFormat(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3, specials=Specials.FINITE)
E8M0 = ScalarFormat(
    name="e8m0",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    signed=False,
    specials=Specials.POWER,
)
UE4M3 = ScalarFormat(
    name="ue4m3",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    signed=False,
    specials=Specials.NAN,
)
BF16 = ScalarFormat(name="bf16", exponent_bits=8, mantissa_bits=7, bias=127, specials=Specials.IEEE)
FP16 = ScalarFormat(name="fp16", exponent_bits=5, mantissa_bits=10, bias=15, specials=Specials.IEEE)
TF32 = ScalarFormat(
    name="tf32", exponent_bits=8, mantissa_bits=10, bias=127, specials=Specials.IEEE
)
FP32 = ScalarFormat(
    name="fp32", exponent_bits=8, mantissa_bits=23, bias=127, specials=Specials.IEEE
)

FORMATS = Registry(
    "format",
    [
        (format_.name, format_)
        for format_ in (E4M3, E5M2, E2M1, E2M3, E3M2, E8M0, UE4M3, BF16, FP16, TF32, FP32)
    ],
)


def scalar_format(given: object) -> ScalarFormat:
    """The format that a `format` argument means: a `ScalarFormat`, or a name in `FORMATS`.

    Raises ValueError for an unknown name and TypeError for anything else.
    """
    if isinstance(given, ScalarFormat):
        return given
    if isinstance(given, str):
        return FORMATS[given]
    raise TypeError(f"a format is a ScalarFormat or a name in FORMATS, not {shown(given)}")
