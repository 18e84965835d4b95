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


def test_subtract_and_divide() -> None:
    a, b = operands(COUNT, 12), operands(COUNT, 13)
    with np.errstate(all="ignore"):
        difference = expected(as_floats(a) - as_floats(b))
        quotient = expected(as_floats(a) / as_floats(b))
    pairs = list(zip(a, b, strict=True))
    assert [float32.subtract(x, y) for x, y in pairs] == difference
    assert [float32.divide(x, y) for x, y in pairs] == quotient


def test_add_down() -> None:
    """The sum is not above the exact one, and the next float32 is."""
    a, b = operands(COUNT, 14), operands(COUNT, 15)
    # A third of the cases is nearly equal and opposite.
    b[::3] = [x ^ float32.SIGN ^ (i % 3) for i, x in enumerate(a[::3])]
    compared = 0
    for x, y in zip(a, b, strict=True):
        special = [float32.is_nan(z) or float32.is_infinite(z) for z in (x, y)]
        got = float32.add_down(x, y)
        if any(special):
            assert got == float32.add(x, y)
            continue
        exact = float32.value(x) + float32.value(y)
        if not exact:
            # -0 wherever the terms differ.
            assert got == (0 if x == y == 0 else float32.SIGN)
            continue
        rank = float32.order(got)
        above = got - 1 if got & float32.SIGN and not float32.is_zero(got) else got + 1
        above = 1 if float32.is_zero(got) else above
        assert float32.order(above) > rank
        if got == float32.MINUS_INFINITY:
            assert exact < -float32.value(0x7F7FFFFF)
        else:
            assert float32.value(got) <= exact
        assert above == float32.INFINITY or exact < float32.value(above)
        compared += 1
    assert compared > COUNT // 2


OPERATIONS = {
    "add": (float32.add, lambda x, y, z: x + y),
    "subtract": (float32.subtract, lambda x, y, z: x - y),
    "multiply": (float32.multiply, lambda x, y, z: x * y),
    "divide": (float32.divide, lambda x, y, z: x / y),
    "fma": (float32.fused_multiply_add, lambda x, y, z: x * y + z),
}


def checked_operands() -> list[tuple[int, int, int]]:
    a, b, c = operands(1000, 24), operands(1000, 25), operands(1000, 26)
    b[::3] = [x ^ float32.SIGN ^ (i % 3) for i, x in enumerate(a[::3])]
    c[::4] = [float32.multiply(x, y) ^ float32.SIGN for x, y in zip(a[::4], b[::4], strict=True)]
    return list(zip(a, b, c, strict=True))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_directions(operation: str) -> None:
    """What a direction means: the nearest float32 on that side of the exact value."""
    function, exact_function = OPERATIONS[operation]
    compared = 0
    for given in checked_operands():
        b = given[1]
        args = given if operation == "fma" else given[:2]
        nearest, zero, up, down = (function(*args, d) for d in float32.DIRECTIONS)
        if any(float32.is_nan(x) or float32.is_infinite(x) for x in args) or (
            operation == "divide" and float32.is_zero(b)
        ):
            assert nearest == zero == up == down
            continue
        exact = exact_function(*(float32.value(x) for x in (*args, 0)[:3]))
        if not exact:
            assert float32.is_zero(nearest)
            assert nearest == zero == up
            # Opposite signs cancel to -0 downward, and to +0 else.
            assert down == nearest or (operation in ("add", "subtract", "fma") and not nearest)
            continue
        for got, inward in ((zero, True), (up, exact < 0), (down, exact > 0)):
            assert got >> 31 == (exact < 0)
            magnitude, size = got & 0x7FFFFFFF, abs(exact)
            if inward:
                assert float32.value(magnitude) <= size
                beyond = magnitude + 1
                assert beyond == float32.INFINITY or size < float32.value(beyond)
            else:
                assert magnitude == float32.INFINITY or size <= float32.value(magnitude)
                assert float32.value(magnitude - 1) < size
        assert nearest in (up, down)
        compared += 1
    assert compared > 300


LIMIT = float32.power_of_two(-126)
LAST = LIMIT - float32.power_of_two(-150)  # the last number of 24 bits below


def at_the_limit(operation: str) -> list[list[int]]:
    """Normal operands whose exact result is near 2^-126, and some that have nothing to do with it."""
    source = random.Random(27)
    rows = []
    for _ in range(400):
        sign = source.getrandbits(1) << 31
        a = source.getrandbits(31) % 0x60000000 + 0x10000000
        target = LIMIT - source.randint(-8, 40) * float32.power_of_two(-153)
        b = 0x00800000 + source.getrandbits(23)
        c = b ^ float32.SIGN
        match operation:
            case "multiply" | "fma":
                b = float32.nearest(target / float32.value(a))
                c = source.choice((0, float32.SIGN))
            case "divide":
                a, b = float32.nearest(target * float32.value(a)), a
            case _:
                a = 0x00800000 + source.getrandbits(24)
                c = 0
        if operation == "fma" and source.random() < 0.3:
            c = 0x00800000 + source.randint(0, 3) | float32.SIGN
            b = float32.nearest(LIMIT / source.choice((1, 2, 4)) / 2**24 / float32.value(a))
        rows.append([a | sign, b, c])
    return rows + [list(row) for row in checked_operands()[:200]]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("direction", float32.DIRECTIONS)
def test_flushed(operation: str, direction: str) -> None:
    """A result is flushed where its 24 bits would round to less than 2^-126."""
    function, exact_function = OPERATIONS[operation]
    counts = {True: 0, False: 0}
    for given in at_the_limit(operation):
        args = [float32.flush(x) for x in (given if operation == "fma" else given[:2])]
        got = function(*given[: len(args)], direction, ftz=True)
        kept = function(*args, direction)
        if any(float32.is_nan(x) or float32.is_infinite(x) for x in (*args, kept)):
            assert got == kept
            continue
        exact = exact_function(*(float32.value(x) for x in (*args, 0)[:3]))
        if not exact:
            assert got == kept
            continue
        if direction == "nearest_even":
            flushed = abs(exact) < (LAST + LIMIT) / 2  # the halfway case goes to the even 2^-126
        elif direction == ("up" if exact > 0 else "down"):
            flushed = abs(exact) <= LAST
        else:
            flushed = abs(exact) < LIMIT
        assert got == (kept & float32.SIGN if flushed else kept)
        counts[flushed] += abs(exact) < 2 * LIMIT
    assert min(counts.values()) > 30


@pytest.mark.parametrize(
    ("direction", "a", "b", "wanted"),
    [
        ("nearest_even", 0x3F7FFFFF, 0x00800000, 0),  # 2^-126 - 2^-150 is a number of 24 bits
        ("up", 0x3F7FFFFF, 0x00800000, 0),
        ("down", 0xBF7FFFFF, 0x00800000, float32.SIGN),
        ("nearest_even", 0x3FFFFFFF, 0x007FFFFF, 0),  # an operand is subnormal
        ("nearest_even", 0x3FFFFFFD, 0x00400001, 0),
        # (1 + 3 2^-23)(1 - 3 2^-23) = 1 - 9 2^-46, times 2^-126
        ("nearest_even", 0x3F800003, 0x00FFFFFA, 0x01000000),
        ("nearest_even", 0x3F000003, 0x00FFFFFA, 0x00800000),
        ("up", 0x3F000003, 0x00FFFFFA, 0x00800000),
        ("down", 0x3F000003, 0x00FFFFFA, 0),
        ("toward_zero", 0x3F000003, 0x00FFFFFA, 0),
        ("down", 0xBF000003, 0x00FFFFFA, 0x80800000),
        ("toward_zero", 0xBF000003, 0x00FFFFFA, 0x80000000),
    ],
)
def test_flushed_products_by_hand(direction: str, a: int, b: int, wanted: int) -> None:
    assert float32.multiply(a, b, direction, ftz=True) == wanted


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (0x3F800000, 0x4B400000, 0x4B400001),
        (0xBF000000, 0x4B400000, 0x4B3FFFFF),  # 12582912 - 1/2: down to 12582911
        (0x3F7FFFFF, 0x4B400000, 0x4B400000),  # down where nearest would be up
        (0x7F7FFFFF, 0x7F7FFFFF, 0x7F7FFFFF),  # no overflow from below
        (0xFF7FFFFF, 0x80000001, 0xFF800000),
        (0x3F800000, 0xBF800000, 0x80000000),
    ],
)
def test_add_down_by_hand(a: int, b: int, wanted: int) -> None:
    assert float32.add_down(a, b) == wanted


def test_maxnum() -> None:
    """A NaN loses, +0 beats -0; otherwise numpy's fmax."""
    a, b = operands(COUNT, 16), operands(COUNT, 17)
    wanted = expected(np.fmax(as_floats(a), as_floats(b)))
    for x, y, z in zip(a, b, wanted, strict=True):
        if not (float32.is_zero(x) and float32.is_zero(y)):
            assert float32.maxnum(x, y) == float32.maxnum(y, x) == z
    zero, nan = float32.SIGN, 0xFFC00000
    assert float32.maxnum(0, zero) == float32.maxnum(zero, 0) == 0
    assert float32.maxnum(nan, zero) == float32.maxnum(zero, nan) == zero
    assert float32.maxnum(nan, nan) == float32.NAN


def test_minnum() -> None:
    """The maximum of the negatives, negated, and numpy's fmin."""
    a, b = operands(COUNT, 22), operands(COUNT, 23)
    wanted = expected(np.fmin(as_floats(a), as_floats(b)))
    for x, y, z in zip(a, b, wanted, strict=True):
        got = float32.minnum(x, y)
        assert got == float32.minnum(y, x)
        assert got == float32.negate(float32.maxnum(x ^ float32.SIGN, y ^ float32.SIGN))
        if not (float32.is_zero(x) and float32.is_zero(y)):
            assert got == z
    assert float32.minnum(0, float32.SIGN) == float32.SIGN
    assert float32.minnum(0xFFC00000, 0x3F800000) == float32.ONE


def test_exceeds() -> None:
    a, b = operands(COUNT, 18), operands(COUNT, 19)
    a[::7] = b[::7]
    wanted = (as_floats(a) > as_floats(b)).tolist()
    assert [float32.exceeds(x, y) for x, y in zip(a, b, strict=True)] == wanted
    assert not float32.exceeds(0, float32.SIGN)


def test_flush() -> None:
    cases = {0x007FFFFF: 0, 0x80000001: 0x80000000, 0x00800000: 0x00800000, 0: 0}
    cases |= {0xFF800000: 0xFF800000, 0x7FC00000: 0x7FC00000}
    assert {x: float32.flush(x) for x in cases} == cases


def test_products_of_bfloat16() -> None:
    """One rounding, by rationals; it is what rounding to float32 first gives too.

    A product has 16 significant bits, so that float32 holds all that are not below 2**-134, half
    the smallest bfloat16.
    """
    source = random.Random(20)
    subnormal = 0
    for _ in range(COUNT):
        a = source.choice((source.getrandbits(16), source.randrange(0x1E00, 0x2000)))
        b = source.choice((source.getrandbits(16), source.randrange(0x1E00, 0x2000)))
        got = float32.multiply_bfloat16(a, b)
        product = float32.multiply(a << 16, b << 16)
        assert got == float32.to_bfloat16(product)
        if float32.is_nan(product) or float32.is_infinite(product):
            continue
        exact = abs(float32.value(a << 16) * float32.value(b << 16))
        if exact < float32.power_of_two(-126):
            subnormal += 1
            # A subnormal bfloat16 counts units of 2**-133.
            assert got & 0x7FFF == round(exact * 2**133)
            assert got >> 15 == (a ^ b) >> 15
    assert subnormal > 100


def test_round_dyadic_is_nearest() -> None:
    source = random.Random(21)
    for _ in range(COUNT):
        significand = source.getrandbits(source.choice((1, 24, 25, 26, 60)))
        significand *= source.choice((1, -1))
        exponent = source.choice((source.randint(-220, 120), source.randint(-160, -120)))
        exact = significand * float32.power_of_two(exponent)
        for sign in (0, 1):
            wanted = float32.nearest(exact, sign)
            assert float32.round_dyadic(significand, exponent, sign) == wanted


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


def test_floor() -> None:
    a = operands(COUNT, 22)
    with np.errstate(all="ignore"):
        wanted = expected(np.floor(as_floats(a)))
    assert [float32.floor(x) for x in a] == wanted


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
