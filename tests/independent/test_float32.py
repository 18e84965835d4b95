"""The rational float32 operations against the processor's and the C library's."""

import ctypes
import ctypes.util
import math
import random
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.independent import float32

COUNT = 3000
SPECIAL = [
    0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0x7FC00000,
]  # fmt: skip


def operands(count: int, seed: int) -> list[int]:
    """Arbitrary bits, small exponents near the subnormals, ordinary numbers, special values."""
    source = random.Random(seed)
    special = [bits | sign for bits in SPECIAL for sign in (0, float32.SIGN)]
    kinds = (
        lambda: source.getrandbits(32),
        lambda: source.getrandbits(1) << 31 | source.randrange(0x1A000000),
        lambda: source.getrandbits(1) << 31 | source.randrange(0x3F000000, 0x41000000),
        lambda: source.choice(special),
    )
    return [source.choice(kinds)() for _ in range(count)]


def expected(values: np.ndarray) -> list[int]:
    """float32 results as bits, every NaN as NAN."""
    return [
        float32.NAN if float32.is_nan(bits) else bits
        for bits in np.asarray(values, np.float32).view(np.uint32).tolist()
    ]


def as_floats(bits: list[int]) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


@pytest.mark.parametrize("operation", ["multiply", "add"])
def test_two_operands(operation: str) -> None:
    a, b = operands(COUNT, 1), operands(COUNT, 2)
    numpy_operation = {"multiply": np.multiply, "add": np.add}[operation]
    with np.errstate(all="ignore"):
        wanted = expected(numpy_operation(as_floats(a), as_floats(b)))
    assert [getattr(float32, operation)(x, y) for x, y in zip(a, b, strict=True)] == wanted


def test_add_cancels() -> None:
    a = operands(COUNT, 3)
    b = [x ^ float32.SIGN ^ (i % 3) for i, x in enumerate(a)]
    with np.errstate(all="ignore"):
        wanted = expected(as_floats(a) + as_floats(b))
    assert [float32.add(x, y) for x, y in zip(a, b, strict=True)] == wanted


def test_fused_multiply_add() -> None:
    path = ctypes.util.find_library("m")
    if path is None:
        pytest.skip("NOT CHECKED: no C math library to compare fmaf with")
    fmaf = ctypes.CDLL(path).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    a, b, c = operands(COUNT, 4), operands(COUNT, 5), operands(COUNT, 6)
    # Half of the cases nearly cancel.
    for i in range(0, COUNT, 2):
        c[i] = float32.multiply(a[i], b[i]) ^ float32.SIGN
    for x, y, z in zip(a, b, c, strict=True):
        wanted = expected(np.array([fmaf(*as_floats([x, y, z]).tolist())]))
        assert [float32.fused_multiply_add(x, y, z)] == wanted, (hex(x), hex(y), hex(z))


def test_shift() -> None:
    a = operands(COUNT, 7)
    source = random.Random(8)
    exponents = [source.choice((source.randint(-300, 300), source.randint(-30, 30))) for _ in a]
    with np.errstate(all="ignore"):
        wanted = expected(np.ldexp(as_floats(a), np.array(exponents, np.int32)))
    assert [float32.shift(x, k) for x, k in zip(a, exponents, strict=True)] == wanted


def test_shift_far() -> None:
    assert float32.shift(float32.ONE, -(2**127)) == 0
    assert float32.shift(float32.ONE | float32.SIGN, -math.inf) == float32.SIGN
    assert float32.shift(float32.ONE, 2**127) == float32.INFINITY
    assert float32.shift(float32.INFINITY, -math.inf) == 0
    assert float32.shift(0x7FC00000, -math.inf) == float32.NAN


def test_ceiling() -> None:
    a = operands(COUNT, 9)
    assert [float32.ceiling(x) for x in a] == expected(np.ceil(as_floats(a)))


def test_bfloat16() -> None:
    a = operands(COUNT, 10) + [0x3F808000, 0x3F818000, 0x7F7F8000, 0x00008000, 0x80018000]
    with np.errstate(all="ignore"):
        wanted = as_floats(a).astype(ml_dtypes.bfloat16).view(np.uint16).tolist()
    wanted = [
        float32.BFLOAT16_NAN if float32.is_nan(x) else y for x, y in zip(a, wanted, strict=True)
    ]
    assert [float32.to_bfloat16(x) for x in a] == wanted


def test_toward_zero() -> None:
    """Against float64, which holds the numbers used here exactly, cut by hand."""
    source = random.Random(11)
    for _ in range(COUNT):
        x = math.ldexp(source.getrandbits(53), source.randint(-220, 74)) * source.choice((1, -1))
        bits = float32.toward_zero(Fraction(x))
        got, above = (float(v) for v in as_floats([bits, bits + 1]))
        assert abs(got) <= abs(x) < abs(above)
        assert math.copysign(1, got) == math.copysign(1, x)
    assert float32.toward_zero(Fraction(2**128 - 1)) == 0x7F7FFFFF
    assert float32.toward_zero(Fraction(-(2**128))) == float32.MINUS_INFINITY
