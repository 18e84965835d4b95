"""The sm_90 special function unit: coefficients, the rules around them, both libraries.

The rules are written again here in two ways: in numpy on int64 and float64 for a million inputs, and,
in `tests.independent.mufu`, on Python integers and fractions. Digests of the device's results hold
both: of whole tables here, of all 2^32 results every night.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref import _mufu as mufu
from tests.arithmetic.operands import MODES, SPECIAL, Words, differing, in_every_mode
from tests.independent import mufu as independent

NAN, INF, NEGATIVE = 0x7FFFFFFF, 0x7F800000, 0x80000000
# sha256 of what an NVIDIA H200 (CUDA 13.0) returned, as little-endian uint32: 2^x at x = i 2^-23; 1 / x
# and log2 x at 1 + i 2^-23; log2 x at (1 + i 2^-23) / 2; for i = 0 ... 2^23 - 1.
SHA256 = {
    "ex2": "b2a42c4a626469c986e33e43f16f41bde9d84de94347cd9ceaa1bd68d36bcdf0",
    "rcp": "c408381446132e07fa5581e930dc33fb790bea7ec4276ef3621e322df2492a55",
    "lg2_above": "7fd9be9a924e40a0ee18ba20e7f5158135112947597c8dd86131d3d4d8f9dbfa",
    "lg2_below": "883e42d8f751983063b4c93a966fba006f08c1e111d90fe20e0fee3dd67ddd22",
}
# The same at the smallest argument of each of the 51 * 2^17 places.
TANH_SHA256 = "9d505a441e95426d30b9eb031ebc3999f1e72456dbaa154538dd9963610c3122"
# The same for the inputs 0, 1, ... 2^32 - 1, every NaN as 0x7fffffff: computed from the device's own
# results (2026-11-30, driver 580.159.04).
ALL_RESULTS = {
    "exp2": "fb25d53085821822f485d26edb22d7d6a24c05457b7d81bc170afa195f8de5dd",
    "reciprocal": "e5c9fc6aa84ca9115f48695277c29692d8b6e01209b6eebd58e7125cc1b630e5",
    "log2": "542a34f3576b91f49b51bac57c5a70f1f882ac3b4b24765fbed3386af27fce2c",
    "tanh": "1e93249507dc8d9b8f3547e8d3180358f03591bc3ad74823aa696e2327b95cc1",
}
RULES: dict[str, Callable[[Any], Any]] = {
    "exp2": mufu.exp2_bits,
    "reciprocal": mufu.reciprocal_bits,
    "log2": mufu.log2_bits,
    "tanh": mufu.tanh_bits,
}


def patterns() -> Words:
    """A million inputs: arbitrary bits, ordinary sizes, every binade's ends and both their sides."""
    source = np.random.default_rng(10)
    ends = np.arange(0, 1 << 32, 1 << 23, dtype=np.int64)
    near = (ends[:, None] + np.arange(-8, 9)).ravel() % (1 << 32)
    ordinary = source.integers(117 << 23, 135 << 23, 400_000, dtype=np.uint32)
    ordinary |= source.integers(0, 2, ordinary.size, dtype=np.uint32) << np.uint32(31)
    parts = [SPECIAL, near.astype(np.uint32), ordinary]
    rest = 1_000_000 - sum(part.size for part in parts)
    return np.concatenate([*parts, source.integers(0, 1 << 32, rest, dtype=np.uint32)])


INPUTS = patterns()


def halves(x: Words) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sign, biased exponent and mantissa."""
    return x >> 31 == 1, (x >> 23 & 0xFF).astype(np.int64), (x & 0x7FFFFF).astype(np.int64)


def exp2_again(x: Words) -> Words:
    negative, field, _ = halves(x)
    with np.errstate(invalid="ignore"):
        value = np.where(field == 0, np.uint32(0), x).view(np.float32).astype(np.float64)
        cut = np.floor(np.abs(np.clip(np.nan_to_num(value), -200, 200)) * 2**23).astype(np.int64)
    k = np.where(negative, np.where(cut % 2**23 == 0, -cut, -cut - 1), cut)
    result = independent.table("ex2")[k % 2**23] + (k // 2**23) * 2**23
    result = np.where(value >= 128, INF, np.where(value < -126, 0, result))
    return np.where(np.isnan(value), NAN, result).astype(np.uint32)


def reciprocal_again(x: Words) -> Words:
    negative, field, mantissa = halves(x)
    entry = independent.table("rcp").astype(np.uint32)[mantissa].view(np.float32).astype(np.float64)
    value = np.ldexp(entry, 127 - field)
    result = np.where(value < 2.0**-126, 0.0, np.where(field == 0, np.inf, value))
    with np.errstate(over="ignore"):
        result = np.where(field == 255, 0.0, result).astype(np.float32).view(np.uint32)
    result = result | np.where(negative, np.uint32(NEGATIVE), np.uint32(0))
    return np.where((field == 255) & (mantissa != 0), np.uint32(NAN), result)


def log2_again(x: Words) -> Words:
    negative, field, mantissa = halves(x)
    above = field >= 127
    tables = [
        independent.table(name).astype(np.uint32)[mantissa].view(np.float32)
        for name in ("lg2_above", "lg2_below")
    ]
    entry = np.where(above, *tables).astype(np.float64)
    # The exact sum, in units of 2^-50; its 24 leading bits.
    scaled = np.ldexp(entry, 50)
    assert (scaled == np.rint(scaled)).all()
    total = np.where(above, field - 127, field - 126) * 2**50 + scaled.astype(np.int64)
    size = np.abs(total)
    extra = np.maximum(np.frexp(size.astype(np.float64))[1] - 24, 0)
    # frexp may round up to a power of two; then nothing but a zero bit is kept more.
    extra = np.where((size >> np.minimum(extra + 23, 63)) == 0, np.maximum(extra - 1, 0), extra)
    kept = np.ldexp(((size >> extra) << extra).astype(np.float64), -50).astype(np.float32)
    result = np.where(total < 0, -kept, kept).view(np.uint32)
    result = np.where(negative, np.uint32(NAN), result)
    result = np.where(field == 0, np.uint32(0xFF800000), result)
    result = np.where(x == INF, np.uint32(INF), result)
    return np.where((field == 255) & (mantissa != 0), np.uint32(NAN), result)


def tanh_again(x: Words) -> Words:
    negative, field, mantissa = halves(x)
    with np.errstate(invalid="ignore"):
        value = np.abs(x.view(np.float32).astype(np.float64))
    result = np.where(value >= 8, np.uint32(0x3F800000), x & np.uint32(0x7FFFFFFF))
    first = 0
    for exponent, count in independent.TANH_SEGMENTS.items():
        here = (value >= 2.0**exponent) & (value < 2.0 ** (exponent + 1))
        place = np.floor((value[here] / 2.0**exponent - 1) * (count << 17)).astype(np.int64)
        result[here] = independent.table("tanh")[(first << 17) + place]
        first += count
    result |= np.where(negative, np.uint32(NEGATIVE), np.uint32(0))
    return np.where((field == 255) & (mantissa != 0), np.uint32(NAN), result)


AGAIN = {
    "exp2": exp2_again,
    "reciprocal": reciprocal_again,
    "log2": log2_again,
    "tanh": tanh_again,
}


def arguments(table: str) -> Words:
    start = {"rcp": 0x3F800000, "lg2_above": 0x3F800000, "lg2_below": 0x3F000000}
    if table == "ex2":
        return (np.arange(1 << 23) / 2**23).astype(np.float32).view(np.uint32)
    return np.arange(start[table], start[table] + (1 << 23), dtype=np.uint32)


def results(table: str, library: Any = jnp) -> Words:
    function = {"ex2": "exp2", "rcp": "reciprocal"}.get(table, "log2")
    x = library.asarray(arguments(table))
    return np.asarray(RULES[function](x))


@pytest.mark.parametrize("name", SHA256)
def test_every_mantissa(name: str) -> None:
    assert hashlib.sha256(results(name).astype("<u4").tobytes()).hexdigest() == SHA256[name]


def test_every_place_of_tanh() -> None:
    places = np.arange(16 << 17) / 2**17
    x = [
        (1 + places[: count << 17] / count) * 2.0**exponent
        for exponent, count in independent.TANH_SEGMENTS.items()
    ]
    words = np.concatenate(x).astype(np.float32).view(np.uint32)
    result = np.asarray(mufu.tanh_bits(jnp.asarray(words)))
    assert hashlib.sha256(result.astype("<u4").tobytes()).hexdigest() == TANH_SHA256


def test_truncated_square() -> None:
    x = np.arange(1 << 17, dtype=np.uint32)
    for xp in (np, jnp):
        square = np.asarray(mufu.truncated_square(xp.asarray(x)))
        np.testing.assert_array_equal(square, independent.truncated_squares())


MUTATIONS = {
    "c0 one more": (0, 1),
    "c0 one less": (0, -1),
    "c1 one more": (1, 1),
    "c1 one less": (1, -1),
    "c2 one more": (2, 1),
    "c2 one less": (2, -1),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", mufu.DIGESTS)
def test_a_wrong_coefficient_shows(
    name: str, mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unit in one coefficient of any segment changes a result of that segment."""
    function = {"ex2": "exp2", "rcp": "reciprocal", "lg2": "log2", "tanh": "tanh"}[name]
    row, change = MUTATIONS[mutation]
    table = mufu.coefficients(name).copy()
    table[row] += change
    places = np.unique(np.concatenate([np.arange(0, 1 << 17, 37), (1 << 17) - 1 - np.arange(400)]))
    segment = np.arange(table.shape[1])[:, None]
    if name == "tanh":
        first = np.repeat(list(independent.TANH_SEGMENTS), list(independent.TANH_SEGMENTS.values()))
        count = np.array([independent.TANH_SEGMENTS[e] for e in first.tolist()])
        within = np.concatenate([np.arange(n) for n in independent.TANH_SEGMENTS.values()])
        x = (1 + (within[:, None] + places / 2**17) / count[:, None]) * 2.0 ** first[:, None]
    else:
        x = (segment + places / 2**17) / table.shape[1] + (name != "ex2")
    words = x.astype(np.float32).view(np.uint32)
    right = RULES[function](words)
    monkeypatch.setattr(mufu, "coefficients", {name: table}.__getitem__)
    wrong = RULES[function](words)
    assert (right != wrong).any(axis=1).all()


def test_damaged_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    content = mufu._data().replace("rcp,5,", "rcp,5,1")
    monkeypatch.setattr(mufu, "_data", lambda: content)
    mufu.coefficients.__wrapped__("ex2")
    with pytest.raises(
        RuntimeError, match=r"coefficients of 'rcp' have sha256 .* install flamia-ref again"
    ):
        mufu.coefficients.__wrapped__("rcp")


def test_coefficients_are_read_once() -> None:
    for name in mufu.DIGESTS:
        assert mufu.coefficients(name) is mufu.coefficients(name)
        assert not mufu.coefficients(name).flags.writeable


@pytest.mark.parametrize("function", RULES)
def test_a_million_inputs(function: str) -> None:
    expected = AGAIN[function](INPUTS)
    for xp in (np, jnp):
        actual = RULES[function](xp.asarray(INPUTS))
        assert not differing(actual, expected, INPUTS)


@pytest.mark.nightly
@pytest.mark.parametrize("function", RULES)
def test_every_input(function: str) -> None:
    digest = hashlib.sha256()
    for start in range(0, 1 << 32, 1 << 23):
        x = np.arange(start, start + (1 << 23), dtype=np.int64).astype(np.uint32)
        words = np.asarray(RULES[function](jnp.asarray(x)))
        digest.update(words.astype("<u4").data)
    assert digest.hexdigest() == ALL_RESULTS[function]


@pytest.mark.parametrize("function", RULES)
def test_python_integers(function: str) -> None:
    x = np.concatenate([SPECIAL, np.random.default_rng(12).choice(INPUTS, 1500)])
    rule = getattr(independent, function)
    expected = np.array([rule(a) for a in x.tolist()], dtype=np.uint32)
    assert not differing(RULES[function](x), expected, x)


SPECIAL_VALUES = {
    # From the tables of the PTX ISA for ex2, rcp and lg2 .approx.ftz.f32, and powers of two.
    "exp2": {
        0x00000000: 0x3F800000, 0x80000000: 0x3F800000, 0x007FFFFF: 0x3F800000,
        0x807FFFFF: 0x3F800000, 0x7F800000: INF, 0xFF800000: 0, 0x7FC00000: NAN, 0xFFC00001: NAN,
        0x3F800000: 0x40000000, 0xBF800000: 0x3F000000, 0x42FE0000: 0x7F000000, 0x43000000: INF,
        0xC2FC0000: 0x00800000, 0xC2FC0001: 0, 0xC3160000: 0,
    },
    "reciprocal": {
        0x00000000: INF, 0x80000000: 0xFF800000, 0x007FFFFF: INF, 0x807FFFFF: 0xFF800000,
        0x7F800000: 0, 0xFF800000: NEGATIVE, 0x7FC00000: NAN, 0xFFC00001: NAN,
        0x3F800000: 0x3F800000, 0xC0000000: 0xBF000000, 0x00800000: 0x7E800000,
        0x7E800000: 0x00800000, 0x7E800001: 0, 0xFF7FFFFF: NEGATIVE,
    },
    "log2": {
        0x00000000: 0xFF800000, 0x80000000: 0xFF800000, 0x007FFFFF: 0xFF800000,
        0x807FFFFF: 0xFF800000, 0x7F800000: INF, 0xFF800000: NAN, 0xBF800000: NAN,
        0x80800000: NAN, 0x7FC00000: NAN, 0x3F800000: 0, 0x40000000: 0x3F800000,
        0x7F000000: 0x42FE0000,
        # Read from an H200: powers of two below 1 fall short of an integer.
        0x3F000000: 0xBF7FFFFE, 0x3E800000: 0xBFFFFFFF, 0x00800000: 0xC2FBFFFF,
    },
    "tanh": {
        # PTX ISA: zeros, infinities, NaN; subnormals are kept.
        0x00000000: 0, 0x80000000: NEGATIVE, 0x7F800000: 0x3F800000, 0xFF800000: 0xBF800000,
        0x7FC00000: NAN, 0xFFC00001: NAN, 0x00000001: 1, 0x807FFFFF: 0x807FFFFF,
        # Read from an H200: up to 2^-8 x itself, from 8 on 1, and the first results of some binades.
        0x3B7FFFFF: 0x3B7FFFFF, 0xBB7FFFFF: 0xBB7FFFFF, 0x41000000: 0x3F800000, 0x40FFFFFF: 0x3F7FFFFC,
        0x3D800000: 0x3D7FAAC0, 0x3E000000: 0x3DFEACD0, 0x3E800000: 0x3E7ACBC0,
        0x3F000000: 0x3EEC9A50, 0x3F800000: 0x3F42F848, 0x40000000: 0x3F76CAA0,
        0xBF800000: 0xBF42F848,
    },
}  # fmt: skip


@pytest.mark.parametrize("function", RULES)
def test_special_values(function: str) -> None:
    x, expected = (np.array(list(f()), dtype=np.uint32) for f in (
        SPECIAL_VALUES[function].keys, SPECIAL_VALUES[function].values
    ))  # fmt: skip
    for xp in (np, jnp):
        actual = RULES[function](xp.asarray(x))
        assert not differing(actual, expected, x)


def test_results_are_near_the_functions() -> None:
    """Within the error bounds of the PTX ISA, and steps in the function's direction."""
    some = np.arange(0, 1 << 23, 7)
    x = 1 + some / 2**23
    values = {name: results(name).view(np.float32) for name in SHA256}
    near = {name: table[some].astype(np.float64) for name, table in values.items()}
    assert np.abs(near["ex2"] / np.exp2(x - 1) - 1).max() < 2**-22.5
    assert np.abs(near["rcp"] * x - 1).max() < 2**-23
    assert np.abs(near["lg2_above"] - np.log2(x)).max() < 2**-22
    assert np.abs(near["lg2_below"] - np.log2(x / 2)).max() < 2**-22
    assert (values["ex2"][:-1] <= values["ex2"][1:]).all()
    assert (values["rcp"][:-1] >= values["rcp"][1:]).all()


def test_tanh_is_near_the_function() -> None:
    """Nearer than the 2^-11, relative, that the PTX ISA promises."""
    x = np.random.default_rng(15).uniform(-9, 9, 400_000).astype(np.float32)
    found = mufu.tanh_bits(x.view(np.uint32)).view(np.float32).astype(np.float64)
    assert np.abs(found / np.tanh(x.astype(np.float64)) - 1).max() < 2.0**-16


@in_every_mode
def test_same_bits_in_every_mode(mode: str, x64: bool) -> None:
    x = np.concatenate([SPECIAL, INPUTS[: 16_000 - SPECIAL.size]])

    def every(x: Any) -> tuple[Any, ...]:
        return tuple(rule(x) for rule in RULES.values())

    expected = every(x)
    with jax.enable_x64(x64):
        found = MODES[mode](every, jnp.asarray(x))
    for actual, wanted in zip(found, expected, strict=True):
        assert not differing(actual, wanted, x)
