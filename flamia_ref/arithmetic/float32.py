"""float32 operations on uint32 bit patterns: IEEE 754 to the last bit, in numpy and inside XLA.

For code that must give the same bits in both libraries. Operands and results are uint32 arrays that
hold float32 bits (`x.view(np.uint32)`); an operation rounds once, keeps subnormals, and returns
0x7fffffff for every NaN. `add`, `subtract`, `multiply`, `divide` and `fma` take a `rounding`:
"nearest_even", "toward_zero", "up" or "down". They, the maxima and the minima take `ftz`: as .ftz of
the PTX ISA does, subnormal operands and results become zeros of their sign. A result is subnormal
if it is below 2^-126 after rounding to 24 bits with an unbounded exponent (measured on sm_90).
`maximum` and `minimum` are max.NaN and min.NaN of PTX, `maximum_number` and `minimum_number` are its
max and min, of two operands or more. `shift` and `from_int32` take int32 integers. Arrays of any
other type, masked arrays and matrices raise TypeError, unknown roundings ValueError.

Plain float32 arithmetic under XLA on CPU differs from IEEE 754: it contracts a * b - c to one
rounding, flushes subnormals, and divides by multiplying.
"""

from flamia_ref._float32 import (
    INFINITY,
    MAGNITUDE,
    MAX_FINITE,
    NAN,
    ONE,
    SIGN,
    Direction,
    add,
    canonical,
    ceil,
    divide,
    floor,
    flush,
    fma,
    from_int32,
    is_nan,
    is_zero,
    less,
    max_along,
    maximum,
    maximum_number,
    maximum_number_along,
    minimum,
    minimum_number,
    multiply,
    negate,
    shift,
    subtract,
    to_int32,
)

__all__ = [
    "INFINITY",
    "MAGNITUDE",
    "MAX_FINITE",
    "NAN",
    "ONE",
    "SIGN",
    "Direction",
    "add",
    "canonical",
    "ceil",
    "divide",
    "floor",
    "flush",
    "fma",
    "from_int32",
    "is_nan",
    "is_zero",
    "less",
    "max_along",
    "maximum",
    "maximum_number",
    "maximum_number_along",
    "minimum",
    "minimum_number",
    "multiply",
    "negate",
    "shift",
    "subtract",
    "to_int32",
]
