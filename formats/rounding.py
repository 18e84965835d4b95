"""How a value between two codes, or beyond the last one, becomes a code."""

from enum import StrEnum

from flamia_ref._errors import unknown_name


class Rounding(StrEnum):
    """What becomes of a value x between two neighbouring values a < x < b of a format.

    Under an unsigned format x is the magnitude. The neighbours are taken as if the exponent had no
    upper limit; beyond the largest finite value `Overflow` decides.
    """

    #: The nearer of a and b; at the midpoint the one with the even code.
    NEAREST_EVEN = "nearest_even"
    #: The nearer of a and b; at the midpoint the one of larger magnitude.
    NEAREST_AWAY = "nearest_away"
    #: The nearer of a and b; at the midpoint the one of smaller magnitude.
    NEAREST_ZERO = "nearest_zero"
    #: The one of smaller magnitude.
    TOWARD_ZERO = "toward_zero"
    #: b.
    UP = "up"
    #: a.
    DOWN = "down"
    #: With n random bits r and f = (|x| - |lo|) / (|hi| - |lo|), where lo and hi are the neighbours
    #: of smaller and larger magnitude: hi if floor(f 2^n) + r >= 2^n, else lo. n is the width of
    #: the type of `random_bits`: 8, 16 or 32. Random bits shifted left to fill a wider type give
    #: the same result. NVIDIA's cvt.rs adds 16 bits to a value in bf16, e4m3, e5m2, e2m3, e3m2 and
    #: e2m1, and 13 in fp16 (pass these times 8 as uint16). Source: PTX ISA 9.1, cvt; how the one
    #: word of four values in e2m1 is shared among them is not public.
    STOCHASTIC = "stochastic"
    #: With n random bits r: |x| + (|hi| - |lo|) r / 2^n, rounded once to float32, then the value of
    #: largest magnitude not above it. It differs from STOCHASTIC where that sum rounds up to |hi|.
    #: Of float32 values only. Transformer Engine's fallback for e2m1, which takes byte i of a word
    #: for value i. Source: Transformer Engine d0067d0, util/ptx.cuh, stochastic_round_fp4_e2m1.
    STOCHASTIC_SUM = "stochastic_sum"


RANDOM = (Rounding.STOCHASTIC, Rounding.STOCHASTIC_SUM)
"""Those that take random bits."""


class Overflow(StrEnum):
    """What becomes of a value that rounds beyond the largest finite value, and of an infinity."""

    #: The largest finite value, with the sign. CUDA: __NV_SATFINITE.
    SATURATE = "saturate"
    #: The format's own answer: infinity with the sign; without infinity NaN, with the sign where
    #: there is one; without either the largest finite value. A finite value rounded toward zero, or
    #: up or down toward it, stays finite (IEEE 754-2019 section 7.4). CUDA: __NV_NOSAT.
    NATIVE = "native"


def rounding_of(given: Rounding | str) -> Rounding:
    """The rounding of that name. Raises ValueError for an unknown one."""
    try:
        return Rounding(given)
    except ValueError:
        raise unknown_name("rounding", given, Rounding) from None


def overflow_of(given: Overflow | str) -> Overflow:
    """The overflow rule of that name. Raises ValueError for an unknown one."""
    try:
        return Overflow(given)
    except ValueError:
        raise unknown_name("overflow", given, Overflow) from None
