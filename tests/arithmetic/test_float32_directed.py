"""Every rounding of every operation, with flushing and without, against exact integers."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import float32
from tests.arithmetic.operands import KINDS, SPECIAL, Words, differing, drawn
from tests.independent import float32 as exact

VARIANTS = [(direction, ftz) for direction in exact.DIRECTIONS for ftz in (False, True)]
OPERATIONS: dict[str, Callable[..., int]] = {
    "add": exact.add,
    "subtract": exact.subtract,
    "multiply": exact.multiply,
    "divide": exact.divide,
    "fma": exact.fused_multiply_add,
}

_CENTRES = (
    0x00000000, 0x00000003, 0x00400000, 0x00800000, 0x01000000,  # zero to 2^-125
    0x0C800000, 0x1A000000, 0x1A800000, 0x1F800000, 0x20000000,  # 2^-102, 2^-75, 2^-74, 2^-64, 2^-63
    0x33000000, 0x33800000, 0x34000000, 0x3E800000, 0x3F000000,  # 2^-25, 2^-24, 2^-23, 1/4, 1/2
    0x3F800000, 0x3FC00000, 0x40000000, 0x40400000, 0x4B000000,  # 1, 1.5, 2, 3, 2^23
    0x4B800000, 0x4C000000, 0x5F000000, 0x5F800000, 0x72800000,  # 2^24, 2^25, 2^63, 2^64, 2^102
    0x73000000, 0x73800000, 0x7E800000, 0x7F000000, 0x7F7FFFFE,  # 2^103, 2^104, 2^126, 2^127, the largest
    0x7F800000, 0x7FC00000, 0x7FFFFFFE, 0x40490FDB, 0x3EAAAAAB,  # infinity, NaN, pi, 1/3
)  # fmt: skip
NEIGHBOURS: Words = np.unique(
    [
        (centre + step) | sign
        for centre in _CENTRES
        for step in (-1, 0, 1)
        for sign in (0, 1 << 31)
        if centre + step >= 0
    ]
).astype(np.uint32)
"""Limits, halfway points and what is beside them."""

TRIPLES: Words = np.array(
    [
        magnitude | sign
        for magnitude in (
            0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x00FFFFFF, 0x0C800000,
            0x1F800000, 0x20000001, 0x33800000, 0x34000001, 0x3F000000, 0x3F7FFFFF, 0x3F800000,
            0x3F800001, 0x40400000, 0x4B7FFFFF, 0x5F800000, 0x7F000000, 0x7F7FFFFF, 0x7F800000,
            0x7F800001,
        )
        for sign in (0, 1 << 31)
    ],
    np.uint32,
)  # fmt: skip


def test_enough_special_values() -> None:
    assert len(NEIGHBOURS) >= 200
    assert len(TRIPLES) >= 40


def variants(operation: str) -> Callable[..., Any]:
    """All variants of an operation at once."""
    function = getattr(float32, operation)
    return lambda *x: tuple(function(*x, rounding=d, ftz=ftz) for d, ftz in VARIANTS)


@functools.cache
def compiled(operation: str) -> Callable[..., Any]:
    return jax.jit(variants(operation))


def results(operation: str, *operands: Words) -> Iterator[tuple[str, Any]]:
    yield "numpy", variants(operation)(*operands)
    yield "jax", compiled(operation)(*(jnp.asarray(x) for x in operands))


def check(operation: str, *operands: Words) -> None:
    rows = list(zip(*(x.tolist() for x in operands), strict=True))
    expected = [
        np.array([OPERATIONS[operation](*row, direction, ftz) for row in rows], np.uint32)
        for direction, ftz in VARIANTS
    ]
    for library, actual in results(operation, *operands):
        for variant, got, wanted in zip(VARIANTS, actual, expected, strict=True):
            found = differing(got, wanted, *operands)
            assert not found, f"{library}, {variant}: {found}"


def padded(*operands: Words, multiple: int = 1 << 13) -> list[Words]:
    """Operands repeated to one of few lengths, each of which JAX compiles for."""
    size = -(-operands[0].size // multiple) * multiple
    return [np.resize(x, size) for x in operands]


def all_of(values: Words, count: int) -> list[Words]:
    return [x.ravel() for x in np.meshgrid(*[values] * count)]


def small_results(operation: str, count: int, seed: int) -> list[Words]:
    """Operands whose result is near the smallest normal number, 2^-126."""
    random = np.random.default_rng(seed)
    a = random.integers(0x10000000, 0x70000000, count, dtype=np.uint32)
    target = 2.0**-126 - random.integers(-8, 40, count) * 2.0**-153
    wide = a.view(np.float32).astype(np.float64)
    c = random.choice(SPECIAL, count)
    match operation:
        case "multiply" | "fma":
            b = (target / wide).astype(np.float32).view(np.uint32)
            c[::2] &= np.uint32(1 << 31)
            # And sums of nearly 2^-126 and a product half a last place from it.
            c[::5] = 0x80800000 + random.integers(0, 4, c[::5].size, dtype=np.uint32)
            tiny = 2.0**-150 * random.choice([0.25, 0.5, 1, 2], c[::5].size) / wide[::5]
            b[::5] = tiny.astype(np.float32).view(np.uint32)
        case "divide":
            with np.errstate(over="ignore"):
                a, b = (target * wide).astype(np.float32).view(np.uint32), a
        case _:
            a, b = (random.integers(0, 0x02000000, count, dtype=np.uint32) for _ in range(2))
    a = a | random.integers(0, 2, count, dtype=np.uint32) << np.uint32(31)
    return [a, b, c]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_variants(operation: str) -> None:
    count = 3 if operation == "fma" else 2
    every = all_of(TRIPLES if operation == "fma" else NEIGHBOURS, count)
    some = np.random.default_rng(31).choice(every[0].size, 4000, replace=False)
    parts = [[x[some] for x in every], small_results(operation, 1500, 32)[:count]]
    parts += [drawn(kind, count, 500, 33) for kind in KINDS]
    check(operation, *padded(*(np.concatenate(x) for x in zip(*parts, strict=True))))


@pytest.mark.nightly
@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_special_values(operation: str) -> None:
    """All pairs of more than 200, all triples of more than 40."""
    count = 3 if operation == "fma" else 2
    check(operation, *padded(*all_of(TRIPLES if operation == "fma" else NEIGHBOURS, count)))
    check(operation, *padded(*small_results(operation, 60_000, 34)[:count]))
    for kind in KINDS:
        check(operation, *padded(*drawn(kind, count, 40_000, 35)))


def chained(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
    """Results fed into each other, which a compiler would like to contract, reassociate or drop."""
    f = float32
    constant = np.float32(0.1).view(np.uint32)
    product = f.multiply(a, b, rounding="up", ftz=True)
    total = f.add(product, c, rounding="down")
    nested = f.fma(product, total, f.negate(product), rounding="toward_zero", ftz=True)
    quotient = f.divide(nested, constant, rounding="up")
    back = f.multiply(f.divide(f.add(a, c), b), b)
    flushed = f.multiply(a, b, ftz=True)
    return (
        total,
        f.subtract(f.add(a, b, ftz=True), b, ftz=True),
        f.add(flushed, c, ftz=True),
        f.subtract(f.multiply(flushed, constant, ftz=True), f.multiply(b, c, ftz=True), ftz=True),
        f.fma(flushed, f.ONE, f.divide(flushed, c, ftz=True), ftz=True),
        nested,
        quotient,
        f.fma(f.fma(a, b, c), back, quotient, ftz=True),
        f.minimum_number(f.multiply(back, f.flush(c)), total, c, ftz=True),
        f.maximum(f.multiply(a, f.ONE), f.minimum(b, nested), ftz=True),
    )


@pytest.mark.parametrize("mapped", [False, True], ids=["jit", "jit of vmap"])
def test_chains_equal_numpy(mapped: bool) -> None:
    """numpy's results are held to exact integers above, operation by operation."""
    function = jax.vmap(jax.vmap(chained)) if mapped else chained
    function = jax.jit(function)
    for kind in KINDS:
        operands = drawn(kind, 3, 16_000, 36)
        shape = (8, 10, -1) if mapped else (-1,)
        actual = function(*(jnp.asarray(x.reshape(shape)) for x in operands))
        for place, (got, wanted) in enumerate(zip(actual, chained(*operands), strict=True)):
            found = differing(np.asarray(got).ravel(), wanted, *operands)
            assert not found, f"{kind}, result {place}: {found}"


@pytest.mark.parametrize("divisor", [3.0, 0.1, 2.0**-149 * 5])
def test_division_by_a_constant(divisor: float) -> None:
    """XLA makes it a multiplication by the reciprocal; exact quotients must stay exact in every
    direction, and those a little beside them must not become exact."""
    b = np.float32(divisor).view(np.uint32)
    k = np.arange(1, 1500, dtype=np.float64) * np.float64(np.float32(divisor))
    a = k.astype(np.float32).view(np.uint32)
    a = np.concatenate([a, a + np.uint32(1), np.maximum(a, 1) - np.uint32(1)])
    a = np.concatenate([a, a ^ np.uint32(1 << 31)])
    for direction in exact.DIRECTIONS:
        expected = np.array([exact.divide(x, int(b), direction) for x in a.tolist()], np.uint32)
        function = functools.partial(float32.divide, b=b, rounding=direction)
        assert not differing(function(a), expected, a)
        assert not differing(jax.jit(function)(jnp.asarray(a)), expected, a)


EXTREMES = {
    "maximum_number": exact.maxnum,
    "minimum_number": exact.minnum,
    "maximum": lambda a, b: exact.NAN if exact.is_nan(a) or exact.is_nan(b) else exact.maxnum(a, b),
    "minimum": lambda a, b: exact.NAN if exact.is_nan(a) or exact.is_nan(b) else exact.minnum(a, b),
}


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("operation", EXTREMES)
def test_extremes(operation: str, ftz: bool) -> None:
    """min and max of the PTX ISA, and min.NaN and max.NaN."""
    a, b = all_of(SPECIAL, 2)
    given = [x.tolist() for x in (a, b)]
    if ftz:
        given = [[exact.flush(x) for x in row] for row in given]
    expected = np.array(list(map(EXTREMES[operation], *given)), np.uint32)
    function = functools.partial(getattr(float32, operation), ftz=ftz)
    for actual in (function(a, b), jax.jit(function)(jnp.asarray(a), jnp.asarray(b))):
        assert not differing(actual, expected, a, b)


@pytest.mark.parametrize("operation", ["maximum_number", "minimum_number"])
def test_extremes_of_three(operation: str) -> None:
    operands = all_of(TRIPLES, 3)
    pick = EXTREMES[operation]
    expected = np.array(
        [pick(pick(a, b), c) for a, b, c in zip(*(x.tolist() for x in operands), strict=True)],
        np.uint32,
    )
    for convert in (np.asarray, jnp.asarray):
        actual = getattr(float32, operation)(*(convert(x) for x in operands))
        assert not differing(actual, expected, *operands)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_unknown_rounding(operation: str) -> None:
    operands = [SPECIAL] * (3 if operation == "fma" else 2)
    with pytest.raises(ValueError, match="'rn' is not one of 'nearest_even', 'toward_zero', 'up'"):
        getattr(float32, operation)(*operands, rounding="rn")
