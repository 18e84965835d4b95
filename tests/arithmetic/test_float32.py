"""float32 on bit patterns, against numpy's float32 and against exact rationals."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import float32
from tests.arithmetic import rational
from tests.arithmetic.operands import KINDS, MODES, SPECIAL, Words, differing, drawn, pairs, run

COUNT = 16_000
LIBRARIES: dict[str, Callable[[Any], Any]] = {"numpy": np.asarray, "jax": jnp.asarray}


def as_bits(values: Any) -> Words:
    """Bits of numpy's float32 results, every NaN as 0x7fffffff."""
    values = np.asarray(values)
    assert values.dtype == np.float32
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.view(np.uint32))


def floats(*words: Words) -> list[Any]:
    return [x.view(np.float32) for x in words]


def words(integers: Any) -> Words:
    return np.array(list(integers), dtype=np.uint32)


# The constants are numpy scalars on purpose: XLA rewrites x + 0, x * 1 and x / 3.
ZERO, MINUS_ZERO, THREE, TENTH = (
    np.float32(x).view(np.uint32) for x in (0.0, -0.0, 3.0, 0.1)
)  # fmt: skip


def expressions(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
    """Each operation alone, and what a compiler would fuse, contract or simplify."""
    f = float32
    product = f.multiply(a, b)
    return (
        product,
        f.add(a, b),
        f.subtract(a, b),
        f.divide(a, b),
        f.subtract(product, c),
        f.add(product, f.multiply(b, c)),
        f.add(f.subtract(f.add(a, b), b), MINUS_ZERO),
        f.multiply(f.add(f.multiply(a, THREE), c), TENTH),
        f.divide(f.add(a, c), THREE),
        f.divide(f.multiply(f.divide(a, b), b), a),
        f.add(a, ZERO),
        f.subtract(a, MINUS_ZERO),
        f.subtract(ZERO, a),
        f.multiply(f.subtract(f.add(a, ZERO), a), b),
    )


def expressions_by_numpy(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
    zero, minus_zero, three, tenth = floats(ZERO, MINUS_ZERO, THREE, TENTH)
    return (
        a * b,
        a + b,
        a - b,
        a / b,
        a * b - c,
        a * b + b * c,
        ((a + b) - b) + minus_zero,
        (a * three + c) * tenth,
        (a + c) / three,
        ((a / b) * b) / a,
        a + zero,
        a - minus_zero,
        zero - a,
        ((a + zero) - a) * b,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_numpy_rounds_natively(kind: str) -> None:
    operands = drawn(kind, 3, COUNT, seed=1)
    with np.errstate(all="ignore"):
        expected = expressions_by_numpy(*floats(*operands))
    for actual, values in zip(expressions(*operands), expected, strict=True):
        assert not differing(actual, as_bits(values), *operands)


@pytest.mark.parametrize(("mode", "x64"), [*((mode, False) for mode in MODES), ("jit", True)])
def test_jax_equals_numpy(mode: str, x64: bool) -> None:
    for kind in KINDS:
        operands = drawn(kind, 3, COUNT, seed=2)
        with np.errstate(all="ignore"):
            expected = expressions_by_numpy(*floats(*operands))
        results = run(mode, x64, expressions, *operands)
        for place, (actual, values) in enumerate(zip(results, expected, strict=True)):
            found = differing(actual, as_bits(values), *operands)
            assert not found, f"{kind} operands, result {place}: {found}"


def test_plain_jax_would_be_caught() -> None:
    """The planted faults: what these tests are for, as XLA does them on CPU."""

    def plain(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
        return (a * b - c, a + b, a / np.float32(3))

    faults = {"contracted": 0, "flushed": 0, "divided by multiplying": 0}
    for kind in KINDS:
        operands = drawn(kind, 3, COUNT, seed=2)
        a, b, c = floats(*operands)
        with np.errstate(all="ignore"):
            expected = (a * b - c, a + b, a / np.float32(3))
        results = jax.jit(plain)(*(jnp.asarray(x) for x in (a, b, c)))
        for name, actual, values in zip(faults, results, expected, strict=True):
            faults[name] += bool(differing(as_bits(actual), as_bits(values), *operands))
    if jax.default_backend() != "cpu":
        pytest.skip("NOT CHECKED: known of XLA on CPU only")
    assert all(faults.values()), f"XLA no longer does all it did, look again: {faults}"


def fma_operands() -> list[Words]:
    """Triples that cancel, or whose product is far beside, or just beside, a rounding boundary."""
    triples = [np.concatenate(x) for x in zip(*(drawn(k, 3, 400, 4) for k in KINDS), strict=True)]
    a, b, c = triples
    random = np.random.default_rng(5)
    with np.errstate(all="ignore"):
        product = (a.view(np.float32) * b.view(np.float32)).view(np.uint32)
    kind = random.integers(0, 4, a.size)
    c = np.where(kind == 1, product ^ np.uint32(1 << 31), c)
    # A third operand 24 to 26 binades away from the product decides ties.
    away = random.integers(24, 27, a.size).astype(np.uint32) << np.uint32(23)
    c = np.where((kind == 2) & ((product & 0x7FFFFFFF) > away), product - away, c)
    c = np.where((kind == 3) & ((product & 0x7FFFFFFF) < 0x7F000000 - away), product + away, c)
    x, y = pairs()
    some = random.choice(x.size, 900, replace=False)
    z = random.choice(SPECIAL, 900)
    large = SPECIAL[((SPECIAL & 0x7FFFFFFF) >= 0x7E800000) & ((SPECIAL & 0x7FFFFFFF) < 0x7F800000)]
    over = np.meshgrid(large, words([0x3F800000, 0xC0000000]), [*large, ZERO, MINUS_ZERO])
    return [np.concatenate([*p, q.ravel()]) for *p, q in (
        (a, x[some], over[0]), (b, y[some], over[1]), (c, z, over[2])
    )]  # fmt: skip


@pytest.mark.parametrize("direction", rational.DIRECTIONS)
def test_fma(direction: str) -> None:
    a, b, c = fma_operands()
    triples = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    expected = words(rational.fma(x, y, z, direction) for x, y, z in triples)
    for convert in LIBRARIES.values():
        actual = float32.fma(convert(a), convert(b), convert(c), rounding=direction)
        assert not differing(actual, expected, a, b, c)


@pytest.mark.parametrize("mode", MODES)
def test_fma_equals_numpy_in_every_mode(mode: str) -> None:
    def fused(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
        square = float32.fma(a, a, ZERO)
        return (
            float32.fma(a, b, c),
            float32.fma(a, THREE, float32.negate(c), rounding="down"),
            float32.add(square, float32.fma(b, ZERO, c), rounding="toward_zero"),
        )

    for kind in KINDS:
        operands = drawn(kind, 3, COUNT, seed=6)
        expected = fused(*operands)
        for x64 in (False, True) if mode == "jit" else (False,):
            for actual, wanted in zip(run(mode, x64, fused, *operands), expected, strict=True):
                assert not differing(actual, wanted, *operands)


@pytest.mark.parametrize("odd", [3, 5, 7, 49, 99, 107, 161, 197, 100001, 8388607])
def test_divide_ties_between_subnormals(odd: int) -> None:
    """XLA divides by a scalar as a multiplication by its reciprocal, which moves exact ties."""
    k = np.arange(min(1500, (1 << 23) // (2 * odd)), dtype=np.uint32)
    a = np.uint32(odd) * (2 * k + 1)
    b = np.float32(2 * odd).view(np.uint32)  # a / b = (k + 1/2) 2^-149
    expected = words(n + (n & 1) for n in k.tolist())
    results = {
        "numpy": float32.divide(a, b),
        "scalar": float32.divide(jnp.asarray(a), jnp.asarray(b)),
        "vector": float32.divide(jnp.asarray(a), jnp.full(a.shape, b)),
        "constant": jax.jit(lambda x: float32.divide(x, b))(jnp.asarray(a)),
    }
    for name, actual in results.items():
        assert not differing(actual, expected, a), name


def test_shift() -> None:
    distances = [0, 1, 2, 22, 23, 24, 25, 126, 127, 128, 149, 150, 151, 253, 276, 277, 278, 400]
    distances += [401, 500, 1 << 20, (1 << 31) - 1]
    k = np.array([s * d for d in distances for s in (1, -1)] + [-(1 << 31)], dtype=np.int32)
    a, k = (x.ravel() for x in np.meshgrid(SPECIAL, k))
    expected = words(rational.shift(x, y) for x, y in zip(a.tolist(), k.tolist(), strict=True))
    for convert in LIBRARIES.values():
        assert not differing(float32.shift(convert(a), convert(k)), expected, a, k)
    some = slice(0, a.size // 80 * 80)
    for mode in MODES:
        actual = run(mode, False, float32.shift, a[some], k[some])
        assert not differing(actual, expected[some], a[some], k[some])


def exact_integer(a: int, function: Callable[[Any], int]) -> int:
    if rational.is_nan(a):
        return rational.NAN
    if rational.is_infinite(a):
        return a
    # A zero has the sign of the operand: IEEE 754-2019, 5.9.
    return rational.rounded(function(rational.value(a)) * rational.Fraction(1), "up", a >> 31)


@pytest.mark.parametrize("name", ["ceil", "floor"])
def test_integers(name: str) -> None:
    a = np.concatenate([SPECIAL, *(drawn(kind, 1, 500, 7)[0] for kind in KINDS)])
    expected = words(exact_integer(x, getattr(math, name)) for x in a.tolist())
    for convert in LIBRARIES.values():
        assert not differing(getattr(float32, name)(convert(a)), expected, a)


def test_to_int32() -> None:
    values = [0.0, -0.0, 1.0, -1.0, 3.0, 8388607.0, -16777216.0, 2.0**30, -(2.0**30), 2.0**31]
    values += [-(2.0**31), 2.0**100, -(2.0**127), math.inf, -math.inf, math.nan]
    bound = 1 << 30
    a = np.array(values, dtype=np.float32).view(np.uint32)
    expected = np.array(
        [0 if math.isnan(x) else int(max(-bound, min(bound, x))) for x in values], dtype=np.int32
    )
    for convert in LIBRARIES.values():
        assert not differing(float32.to_int32(convert(a)), expected, a)


def test_from_int32() -> None:
    random = np.random.default_rng(8)
    near = [s * ((1 << e) + d) for e in range(31) for d in (-1, 0, 1, 3) for s in (1, -1)]
    n = np.concatenate([np.array([*near, -(1 << 31)]), random.integers(-(1 << 31), 1 << 31, 2000)])
    n = n.astype(np.int32)
    exact = (rational.rounded(rational.Fraction(x), "nearest_even") for x in n.tolist())
    expected = words(exact)
    for convert in LIBRARIES.values():
        assert not differing(float32.from_int32(convert(n)), expected, n)


def test_order() -> None:
    a, b = pairs()
    less, larger = [], []
    ranks = {x: rational.rank(x) for x in SPECIAL.tolist() if not rational.is_nan(x)}
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        nan = rational.is_nan(x) or rational.is_nan(y)
        zeros = (x | y) & 0x7FFFFFFF == 0
        less.append(not nan and not zeros and ranks[x] < ranks[y])
        larger.append(rational.NAN if nan else max(x, y, key=ranks.__getitem__))
    for convert in LIBRARIES.values():
        x, y = convert(a), convert(b)
        assert not differing(float32.less(x, y), np.array(less), a, b)
        assert not differing(float32.maximum(x, y), words(larger), a, b)
    some = slice(0, a.size // 80 * 80)
    for mode in MODES:
        actual = run(mode, False, float32.maximum, a[some], b[some])
        assert not differing(actual, words(larger)[some], a[some], b[some])


def test_maximum_number() -> None:
    drawings = [drawn(kind, 2, 400, seed=10) for kind in KINDS]
    a, b = (np.concatenate(x) for x in zip(pairs(), *drawings, strict=True))
    a, b = (x[: x.size // 80 * 80] for x in (a, b))
    expected = words(map(rational.maximum_number, a.tolist(), b.tolist()))
    for convert in LIBRARIES.values():
        assert not differing(float32.maximum_number(convert(a), convert(b)), expected, a, b)
    for mode in MODES:
        assert not differing(run(mode, False, float32.maximum_number, a, b), expected, a, b)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_maximum_number_along(axis: int) -> None:
    a = np.random.default_rng(11).choice(SPECIAL, (60, 5))
    a[::3] = np.random.default_rng(12).integers(0, 1 << 32, (20, 5), dtype=np.uint32)
    a[1], a[2] = [0x7FC00000, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], 0x80000000
    a[4], a[5] = (
        [0x80000000, 0, 0xFFC00000, 0x80000001, 0x80000000],
        [*[0xFFFFFFFF] * 4, 0xFF800000],
    )
    lines = np.moveaxis(a, axis, -1).tolist()
    expected = words(functools.reduce(rational.maximum_number, line) for line in lines)
    for convert in LIBRARIES.values():
        assert not differing(float32.maximum_number_along(convert(a), axis), expected)
        single = float32.maximum_number_along(convert(a[:, :1]), 1)
        assert not differing(single, words(map(rational.maximum_number, *[a[:, 0].tolist()] * 2)))
    for x64 in (False, True):
        with jax.enable_x64(x64):
            compiled = jax.jit(lambda x: float32.maximum_number_along(x, axis))
            assert not differing(compiled(jnp.asarray(a)), expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_max_along(axis: int) -> None:
    random = np.random.default_rng(9)
    ordinary = SPECIAL[(SPECIAL & 0x7FFFFFFF) <= 0x7F800000]
    a = random.choice(ordinary, (40, 7))
    a[::5] = random.choice(SPECIAL, (8, 7))
    a[1], a[2] = 0x80000000, [0x80000000, 0, *[0x80000001] * 5]
    lines = np.moveaxis(a, axis, -1).tolist()
    expected = words(
        rational.NAN if any(map(rational.is_nan, line)) else max(line, key=rational.rank)
        for line in lines
    )
    for convert in LIBRARIES.values():
        assert not differing(float32.max_along(convert(a), axis), expected)


def test_signs_and_classes() -> None:
    nan = np.array([rational.is_nan(a) for a in SPECIAL.tolist()])
    zero = np.array([a << 1 & 0xFFFFFFFF == 0 for a in SPECIAL.tolist()])
    for convert in LIBRARIES.values():
        a = convert(SPECIAL)
        assert not differing(float32.is_nan(a), nan, SPECIAL)
        assert not differing(float32.is_zero(a), zero, SPECIAL)
        assert not differing(float32.negate(a), SPECIAL ^ np.uint32(1 << 31), SPECIAL)
        wanted = np.where(nan, np.uint32(0x7FFFFFFF), SPECIAL)
        assert not differing(float32.canonical(a), wanted, SPECIAL)
        wanted = words(map(rational.flush, SPECIAL.tolist()))
        assert not differing(float32.flush(a), wanted, SPECIAL)
        assert not differing(jax.jit(float32.flush)(jnp.asarray(a)), wanted, SPECIAL)


def test_shapes() -> None:
    one, many = float32.ONE, np.full((3, 1), float32.ONE)
    for convert in LIBRARIES.values():
        for rounding in rational.DIRECTIONS:
            row = convert(np.full((1, 4), float32.ONE))
            result = float32.add(convert(many), row, rounding=rounding)
            assert result.shape == (3, 4)
            assert result.dtype == np.uint32
            assert int(float32.fma(convert(one), convert(one), convert(one))) == 0x40000000
            empty = convert(np.zeros((0, 4), dtype=np.uint32))
            assert float32.multiply(empty, row, rounding=rounding).shape == (0, 4)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda x, name=name: getattr(float32, name)(x, x)
        for name in (
            *("add", "subtract", "multiply", "divide", "less"),
            *("maximum", "maximum_number", "minimum", "minimum_number"),
        )
    },
    **{
        name: getattr(float32, name)
        for name in (
            "is_nan",
            "is_zero",
            "negate",
            "canonical",
            "flush",
            "ceil",
            "floor",
            "to_int32",
        )
    },
    "fma": lambda x: float32.fma(x, x, x),
    "shift": lambda x: float32.shift(x, np.ones(3, np.int32)),
    "max_along": lambda x: float32.max_along(x, 0),
    "maximum_number_along": lambda x: float32.maximum_number_along(x, 0),
}


@pytest.mark.parametrize("convert", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_bit_patterns_are_taken(operation: str, convert: Any) -> None:
    for dtype in ("float32", "int32", "uint8", "bool"):
        with pytest.raises(TypeError, match=f"holds {dtype}; float32 operations take uint32 bit"):
            OPERATIONS[operation](convert(np.ones(3, dtype)))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_only_plain_arrays_are_taken(operation: str) -> None:
    x = np.ones(3, np.uint32)
    for wrong in (np.ma.array(x, mask=[True, False, False]), x.view(np.matrix)):
        with pytest.raises(TypeError, match="pass a plain array"):
            OPERATIONS[operation](wrong)
    with pytest.raises(TypeError, match="operand holds list"):
        OPERATIONS[operation]([1, 2, 3])
    with pytest.raises(TypeError, match=r"holds uint32 in the other byte order \(>u4\)"):
        OPERATIONS[operation](x.astype(">u4"))


@pytest.mark.parametrize("convert", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "float32", "bool"])
def test_only_int32_integers_are_taken(dtype: str, convert: Any) -> None:
    k = convert(np.array([1, 0, 1], dtype))
    with pytest.raises(TypeError, match=f"holds {dtype}; float32 operations take int32 exponents"):
        float32.shift(convert(words([0x3F800000] * 3)), k)
    with pytest.raises(TypeError, match=f"holds {dtype}; float32 operations take int32 integers"):
        float32.from_int32(k)


def test_int64_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="holds int64"):
        float32.from_int32(np.array([1 << 40]))
    with pytest.raises(TypeError, match="holds int64"):
        float32.shift(words([0x3F800000]), np.array([1]))


BINARY = (
    *("add", "subtract", "multiply", "divide", "less"),
    *("maximum", "maximum_number", "minimum", "minimum_number"),
)


def refused(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("convert", LIBRARIES.values(), ids=LIBRARIES)
def test_shapes_that_do_not_broadcast(convert: Any) -> None:
    a, b = (convert(np.zeros(shape, np.uint32)) for shape in ((2, 3), (4, 2)))
    message = r"operands have shapes \(2, 3\) and \(4, 2\); they must broadcast"
    for name in BINARY:
        refused(ValueError, message, lambda name=name: getattr(float32, name)(a, b))
    three = r"operands have shapes \(2, 3\) and \(2, 3\) and \(4, 2\)"
    for call in (float32.fma, float32.maximum_number, float32.minimum_number):
        refused(ValueError, three, lambda call=call: call(a, a, b))
    k = convert(np.zeros(2, np.int32))
    refused(ValueError, r"shapes \(2, 3\) and \(2,\)", lambda: float32.shift(a, k))


@pytest.mark.parametrize("convert", LIBRARIES.values(), ids=LIBRARIES)
def test_options_that_are_none(convert: Any) -> None:
    a = convert(np.zeros(3, np.uint32))
    for name in ("add", "subtract", "multiply", "divide"):
        call = getattr(float32, name)
        for wrong in (["x"], None, "odd", np.zeros(2)):
            refused(
                ValueError,
                "rounding .* is not one of 'nearest_even', 'toward_zero', 'up', 'down'",
                lambda call=call, wrong=wrong: call(a, a, rounding=wrong),
            )
        refused(
            TypeError,
            r"ftz is \[True\]; it must be True or False",
            lambda call=call: call(a, a, ftz=[True]),
        )
        assert call(a, a, ftz=np.True_).shape == (3,)


@pytest.mark.parametrize("convert", LIBRARIES.values(), ids=LIBRARIES)
@pytest.mark.parametrize("name", ["max_along", "maximum_number_along"])
def test_axes_without_a_maximum(name: str, convert: Any) -> None:
    call = getattr(float32, name)
    a = convert(np.zeros((2, 0), np.uint32))
    refused(ValueError, "the operand has no elements along axis 1", lambda: call(a, -1))
    assert call(a, 0).shape == (0,)
    refused(ValueError, "axis is 2; the operand has 2 axes", lambda: call(a, 2))
    refused(
        ValueError,
        "axis is 0; the operand has 0 axes",
        lambda: call(a[0, :0].sum(dtype=np.uint32), 0),
    )
    for wrong in (None, 0.0, (0, 1)):
        refused(TypeError, "axis is .*; it must be an integer", lambda wrong=wrong: call(a, wrong))
