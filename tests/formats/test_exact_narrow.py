"""Every bfloat16 and every float16 through every encoder, alone and in blocks.

A code is found by looking a value up among the midpoints of the format, which float64 holds, as it
does all quotients by powers of two here.
"""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import FORMATS, decode, encode, quantize
from tests.formats import exact

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
Floats = npt.NDArray[np.float64]


def every(dtype: str) -> npt.NDArray[Any]:
    return np.arange(1 << 16, dtype=np.uint16).view(TYPES[dtype])


def wide(x: npt.NDArray[Any]) -> Floats:
    with np.errstate(invalid="ignore"):
        return x.astype(np.float32).astype(np.float64)


@cache
def middles(name: str) -> Floats:
    """Between each value of a format and the next; the last lies above the largest value."""
    spec = exact.SPECS[name]
    values = np.array([float(exact.value(code, spec)) for code in range(spec.last + 2)])
    return (values[:-1] + values[1:]) / 2


def nearest(x: Floats, name: str) -> npt.NDArray[np.int64]:
    """Magnitude codes to nearest, ties to the even code, saturating; NaN anything."""
    spec = exact.SPECS[name]
    magnitude = np.abs(x)
    low = np.searchsorted(middles(name), magnitude, side="left")  # how many lie below
    tie = np.searchsorted(middles(name), magnitude, side="right") - low  # 1 at a midpoint
    code = low + tie * (low & 1)
    return np.minimum(code, spec.last)


def with_sign(codes: npt.NDArray[np.int64], x: Floats, name: str) -> npt.NDArray[np.int64]:
    spec = exact.SPECS[name]
    found = codes | np.where(np.signbit(x) & spec.signed, spec.sign, 0)
    return np.where(np.isnan(x), spec.nan, found)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [*exact.SMALL, "bf16", "fp16"])
def test_every_value_alone(name: str, dtype: str) -> None:
    x = every(dtype)
    wanted = with_sign(nearest(wide(x), name), wide(x), name)
    np.testing.assert_array_equal(encode(x, name), wanted)
    spec = exact.SPECS[name]
    outside = spec.nan if spec.infinity is None else spec.infinity
    magnitude = np.abs(wide(x))
    beyond = (magnitude > middles(name)[-1]) | (np.isinf(magnitude))
    if spec.last % 2:  # a tie with the value above goes to it, as its code is even
        beyond |= magnitude == middles(name)[-1]
    native = with_sign(np.where(beyond, outside, nearest(wide(x), name)), wide(x), name)
    np.testing.assert_array_equal(encode(x, name, overflow="native"), native)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["tf32", "fp32"])
def test_wider_formats_hold_every_value(name: str, dtype: str) -> None:
    x = every(dtype)
    values = wide(decode(encode(x, name, overflow="native"), name))
    np.testing.assert_array_equal(values, wide(x))
    number = ~np.isnan(wide(x))
    np.testing.assert_array_equal(np.signbit(values[number]), np.signbit(wide(x)[number]))
    assert set(FORMATS) == {*exact.SPECS}


# In blocks.


def in_blocks(dtype: str, width: int) -> npt.NDArray[Any]:
    """All finite values in ascending blocks, in shuffled ones, and each in a block of its own."""
    finite = every(dtype)[np.isfinite(wide(every(dtype)))]
    shuffled = np.random.default_rng(1).permutation(finite)
    alone = np.zeros((finite.size, width), finite.dtype)
    alone[:, 3] = finite
    return np.concatenate([finite.reshape(-1, width), shuffled.reshape(-1, width), alone])


def scale_exponents(amax: Floats, rule: str, name: str) -> npt.NDArray[np.int64]:
    f = FORMATS[name]
    mantissa, exponent = np.frexp(amax)  # mantissa in [1/2, 1)
    if rule == "floor":
        found = exponent - 1 - f.emax
    elif rule == "ceil":
        found = exponent - (mantissa == 0.5) - f.emax
    else:  # the least power of two that holds amax
        top, place = np.frexp(f.max)
        found = exponent - place + (mantissa > top)
    return np.clip(np.where(amax == 0, -127, found), -127, 127)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("preset", "rule", "element"),
    [
        ("ocp-mx-floor-e4m3", "floor", "e4m3"),
        ("ocp-mx-floor-e5m2", "floor", "e5m2"),
        ("ocp-mx-floor-e2m3", "floor", "e2m3"),
        ("ocp-mx-floor-e3m2", "floor", "e3m2"),
        ("torchao-mx-ceil-e2m1", "ceil", "e2m1"),
        ("te-mx-e4m3", "rceil", "e4m3"),
        ("te-mx-e5m2", "rceil", "e5m2"),
        ("torchao-mx-rceil-e2m1", "rceil", "e2m1"),
    ],
)
def test_every_value_in_a_block(preset: str, rule: str, element: str, dtype: str) -> None:
    x = in_blocks(dtype, 32)
    found = quantize(x, preset)
    values = wide(x)
    exponents = scale_exponents(np.abs(values).max(axis=1), rule, element)
    np.testing.assert_array_equal(found.scales[:, 0], exponents + 127)
    scaled = np.ldexp(values, -exponents[:, None])
    wanted = with_sign(nearest(scaled, element), scaled, element)
    np.testing.assert_array_equal(found.codes, wanted)


@pytest.mark.parametrize("dtype", TYPES)
def test_every_value_in_a_block_with_a_scale_in_e4m3(dtype: str) -> None:
    """flamia-fp4-ue4m3: two roundings to nearest of exact quotients, each taken in float32 first."""
    x = in_blocks(dtype, 16)
    found = quantize(x, "flamia-fp4-ue4m3")
    values = wide(x)
    # float64 quotients rounded to float32 are float32 quotients: 53 is more than 2 * 24 + 1.
    quotient = (np.abs(values).max(axis=1) / 6).astype(np.float32).astype(np.float64)
    scales = nearest(quotient, "ue4m3")
    np.testing.assert_array_equal(found.scales[:, 0], scales)
    spec = exact.SPECS["ue4m3"]
    table = np.array([float(exact.value(code, spec)) for code in range(spec.last + 1)])
    divisor = table[scales][:, None]
    with np.errstate(all="ignore"):
        over = np.where(divisor == 0, np.copysign(0.0, values), values / divisor)
        over = over.astype(np.float32).astype(np.float64)
    wanted = with_sign(nearest(over, "e2m1"), values, "e2m1")
    np.testing.assert_array_equal(found.codes, wanted)
