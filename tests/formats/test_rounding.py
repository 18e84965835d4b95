"""Every rounding and both overflow rules against exact rationals."""

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import FORMATS, encode, encode_bits
from tests.formats import exact, points

OVERFLOWS = ("saturate", "native")


def check(values: npt.NDArray[Any], name: str, rounding: str, overflow: str) -> None:
    codes = encode(values, name, rounding=rounding, overflow=overflow)
    spec = exact.SPECS[name]
    wanted = [exact.encode(float(x), spec, rounding, overflow) for x in values]
    wrong = np.flatnonzero(codes != np.array(wanted))
    assert not wrong.size, [
        (float(values[i]).hex(), int(codes[i]), wanted[i]) for i in wrong[:5].tolist()
    ]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("name", exact.SMALL)
def test_small_formats_at_every_grid_point_and_midpoint(name: str, kind: type) -> None:
    """One step of the input type on each side of all that matters, both signs."""
    values = points.around(points.small_format_values(exact.SPECS[name]), kind)
    if name == "e8m0":
        values = values[::2] if kind is np.float64 else values
    for rounding in exact.ROUNDINGS:
        for overflow in OVERFLOWS:
            check(values, name, rounding, overflow)


@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32", "fp32"])
def test_wide_formats(name: str) -> None:
    """float32 bits of any kind, and float64 next to what the format holds and its midpoints."""
    spec = exact.SPECS[name]
    bits = np.concatenate([points.float32_edges()[::3], points.random_bits32(300, 1)])
    values = bits.view(np.float32)
    rng = np.random.default_rng(2)
    codes = [*rng.integers(0, spec.last + 1, 60).tolist(), 0, 1, spec.last - 1, spec.last]
    grid = [exact.value(code, spec) for code in codes]
    middle = [(exact.value(c, spec) + exact.value(c + 1, spec)) / 2 for c in codes]
    beside = points.around([*grid, *middle], np.float64)
    for rounding in exact.ROUNDINGS:
        for overflow in OVERFLOWS:
            check(values, name, rounding, overflow)
            check(beside, name, rounding, overflow)


@pytest.mark.parametrize("name", FORMATS)
def test_random_float64(name: str) -> None:
    """float64 bits of any kind, and with exponents near those of the format."""
    rng = np.random.default_rng(3)
    any_bits = rng.integers(0, 1 << 64, 200, dtype=np.uint64).view(np.float64)
    near = rng.standard_normal(200) * 2.0 ** rng.integers(-20, 20, 200)
    for rounding in exact.ROUNDINGS:
        check(any_bits, name, rounding, "native")
        check(near, name, rounding, "native")


@pytest.mark.parametrize(
    ("values", "name", "codes"),
    [
        # Rounding to float32 first would make ties of these.
        ([-431.99999999999994, 1.0625 + 2**-40, 1.0625], "e4m3", [0xFD, 0x39, 0x38]),
        ([2.0**-10 * (1 + 2**-50)], "e4m3", [0x01]),
        ([464 * (1 + 2.0**-52), 464.0, 464 * (1 - 2.0**-53)], "e4m3", [0x7E, 0x7E, 0x7E]),
        ([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8], "bf16", [0x3F81, 0x3F80]),
        ([1 + 2.0**-24 + 2.0**-52, 1 + 2.0**-24], "fp32", [0x3F800001, 0x3F800000]),
        ([2.0**-150 * (1 + 2.0**-52), 2.0**-150, 2.0**-1074], "fp32", [1, 0, 0]),
    ],
)
def test_float64_is_rounded_once(values: list[float], name: str, codes: list[int]) -> None:
    assert encode(np.array(values), name).tolist() == codes


def test_overflow_edge_of_e4m3() -> None:
    inputs = [448, 464, np.nextafter(464.0, np.inf), 465, 480, 1000, -1000, np.inf, -np.inf]
    x = np.array(inputs, np.float64)
    saturated = [0x7E] * 6 + [0xFE, 0x7E, 0xFE]
    assert encode(x, "e4m3").tolist() == saturated
    native = [0x7E, 0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0xFF, 0x7F, 0xFF]
    assert encode(x, "e4m3", overflow="native").tolist() == native


@pytest.mark.parametrize(
    ("values", "name", "codes"),
    [
        # signed zero and the tie below the smallest subnormal
        (
            [-0.0, -(2**-11), -(2**-10), -(2**-10) * (1 + 2**-23), -(2**-9)],
            "e4m3",
            [0x80, 0x80, 0x80, 0x81, 0x81],
        ),
        # ties of E2M1
        ([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], "e2m1", [0, 2, 2, 4, 4, 6, 6]),
        (
            [-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0],
            "e2m1",
            [0x8, 0xA, 0xA, 0xC, 0xC, 0xE, 0xE],
        ),
        # carries into the exponent, and from subnormal to normal
        (
            [126.24, 0.99, 15.51, 447.9, 2**-6 - 2**-12, 2**-6 - 2**-10],
            "e4m3",
            [0x70, 0x38, 0x58, 0x7E, 0x08, 0x08],
        ),
        ([0.76], "e2m1", [2]),
        # no NaN and no infinity in the format: what CUDA gives
        ([np.nan, -np.nan, np.inf, -np.inf], "e2m1", [0x7, 0x7, 0x7, 0xF]),
        ([np.nan, -np.nan, np.inf, -np.inf], "e2m3", [0x1F, 0x1F, 0x1F, 0x3F]),
        ([np.nan, -np.nan, np.inf, -np.inf], "e3m2", [0x1F, 0x1F, 0x1F, 0x3F]),
        ([np.nan, -np.nan], "e4m3", [0x7F, 0x7F]),
        ([np.nan, -np.nan], "e5m2", [0x7F, 0x7F]),
        ([np.nan, -np.nan], "bf16", [0x7FFF, 0x7FFF]),
        ([np.nan, -np.nan], "tf32", [0x7FFFE000, 0x7FFFE000]),
        # unsigned: the magnitude
        ([-1.0, -0.0, -np.inf, -(2.0**-9)], "ue4m3", [0x38, 0x00, 0x7E, 0x01]),
    ],
)
def test_worked_examples(values: list[float], name: str, codes: list[int]) -> None:
    assert encode(np.array(values, np.float32), name).tolist() == codes


def test_ties_toward_zero() -> None:
    """As x > midpoint counts them. DeepGEMM, modelopt."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    above = np.nextafter(ties, np.float32(9))
    for sign in (0, 8):
        x = ties if not sign else -ties
        assert encode(x, "e2m1", rounding="nearest_zero").tolist() == [sign | c for c in range(7)]
        x = above if not sign else -above
        codes = encode(x, "e2m1", rounding="nearest_zero").tolist()
        assert codes == [sign | c for c in range(1, 8)]
    # 464 lies in the middle between 448 and the absent 480.
    x = np.array([464.0, np.nextafter(np.float32(464), np.float32(500))], np.float32)
    found = encode(x, "e4m3", rounding="nearest_zero", overflow="native")
    assert found.tolist() == [0x7E, 0x7F]


NEAR_POWERS = [1, 1.125, 1.25, 1.5, 3, 5, 0.75, 6, 12]


@pytest.mark.parametrize(
    ("rounding", "codes"),
    [
        ("toward_zero", [127, 127, 127, 127, 128, 129, 126, 129, 130]),
        ("down", [127, 127, 127, 127, 128, 129, 126, 129, 130]),
        ("up", [127, 128, 128, 128, 129, 130, 127, 130, 131]),
        ("nearest_even", [127, 127, 127, 128, 128, 129, 126, 130, 130]),
        # a tie goes up in CUDA's software conversion
        ("nearest_away", [127, 127, 127, 128, 129, 129, 127, 130, 131]),
        ("nearest_zero", [127, 127, 127, 127, 128, 129, 126, 129, 130]),
    ],
)
def test_e8m0(rounding: str, codes: list[int]) -> None:
    x = np.array(NEAR_POWERS, np.float32)
    assert encode(x, "e8m0", rounding=rounding).tolist() == codes
    assert encode(-x, "e8m0", rounding=rounding).tolist() == codes


def test_e8m0_ends() -> None:
    x = np.array([2.0**-128, 2.0**-140, 2.0**-127, 2.0**127, 3.4e38, 0, -0.0, np.inf, np.nan])
    for rounding in ("nearest_even", "up", "toward_zero"):
        codes = encode(x, "e8m0", rounding=rounding)
        assert codes.tolist() == [0, 0, 0, 254, 254, 0, 0, 254, 255]
    assert encode(x, "e8m0", rounding="up", overflow="native").tolist()[4:] == [255, 0, 0, 255, 255]


@pytest.mark.parametrize("name", exact.SMALL)
def test_stochastic_with_all_random_bytes(name: str) -> None:
    """Every 8-bit draw at values of all kinds: the count that round away is the exact one."""
    values = points.around(points.small_format_values(exact.SPECS[name])[::3], np.float32)
    values = values[:: max(1, values.size // 150)]
    x, draws = np.broadcast_arrays(values[:, None], np.arange(256, dtype=np.uint8))
    spec = exact.SPECS[name]
    for overflow in OVERFLOWS:
        codes = encode(x, name, rounding="stochastic", overflow=overflow, random_bits=draws)
        for row, value in zip(codes.tolist(), values.tolist(), strict=True):
            wanted = [
                exact.encode(value, spec, "stochastic", overflow, draw=(8, r)) for r in (0, 255)
            ]
            if np.isfinite(value):
                part = exact.below(abs(Fraction(value)), spec)[1]
                away = int(part * 256)  # draws from 256 - away on round away from zero
                assert row == [wanted[0]] * (256 - away) + [wanted[1]] * away, value.hex()
            else:
                assert set(row) == {wanted[0]}


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("name", ["e4m3", "e2m1", "e8m0", "bf16", "fp16", "fp32"])
def test_stochastic(name: str, width: int, kind: type) -> None:
    """Random draws, tiny values too, where more bits are dropped than the input has."""
    rng = np.random.default_rng(width)
    values = (rng.standard_normal(120) * 2.0 ** rng.integers(-40, 12, 120)).astype(kind)
    values = np.concatenate([values, values[:20] * kind(2.0**-110)])
    draws = rng.integers(0, 1 << width, values.size, dtype=np.dtype(f"uint{width}"))
    draws[::4] = np.iinfo(draws.dtype).max
    codes = encode(values, name, rounding="stochastic", random_bits=draws)
    spec = exact.SPECS[name]
    wanted = [
        exact.encode(x, spec, "stochastic", draw=(width, r))
        for x, r in zip(values.tolist(), draws.tolist(), strict=True)
    ]
    assert codes.tolist() == wanted


def test_fewer_random_bits_are_the_top_ones() -> None:
    """13 bits, as NVIDIA adds to a value in fp16, are 16 with three zeros below them."""
    rng = np.random.default_rng(4)
    values = rng.standard_normal(500).astype(np.float32)
    draws = rng.integers(0, 1 << 13, 500, dtype=np.uint16)
    codes = encode(values, "fp16", rounding="stochastic", random_bits=draws << 3)
    spec = exact.SPECS["fp16"]
    assert codes.tolist() == [
        exact.encode(x, spec, "stochastic", draw=(13, r))
        for x, r in zip(values.tolist(), draws.tolist(), strict=True)
    ]


@pytest.mark.parametrize("name", ["e4m3", "e2m1", "e8m0", "fp16", "fp32"])
def test_an_exponent_offset_is_exact(name: str) -> None:
    """encode_bits(x, exponent=k) is x * 2^k rounded once, subnormals and specials included."""
    rng = np.random.default_rng(5)
    edges = points.float32_edges()
    bits = np.concatenate([edges[rng.integers(0, edges.size, 500)], points.random_bits32(300, 6)])
    shifts = rng.integers(-280, 281, bits.size, dtype=np.int32)
    spec = exact.SPECS[name]
    for rounding in exact.ROUNDINGS:
        for overflow in OVERFLOWS:
            codes = encode_bits(
                bits, FORMATS[name], rounding=rounding, overflow=overflow, exponent=shifts
            )
            for x, shift, code in zip(
                bits.view(np.float32).tolist(), shifts.tolist(), codes.tolist(), strict=True
            ):
                scaled = x if not np.isfinite(x) else Fraction(x) * exact.TWO**shift
                negative = bool(np.signbit(x))
                wanted = exact.encode(scaled, spec, rounding, overflow, negative=negative)
                assert code == wanted, (x.hex(), shift, rounding, overflow)


def test_far_exponent_offsets() -> None:
    bits = np.array([0x3F800000, 0x80000001, 0x7F800000, 0], np.uint32)
    for shift, codes in ((2**31 - 1, [0x7E, 0xFE, 0x7E, 0]), (-(2**31), [0, 0x80, 0x7E, 0])):
        assert encode_bits(bits, FORMATS["e4m3"], exponent=np.int32(shift)).tolist() == codes
