"""The formats themselves: their numbers, their tables, and what is refused."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.formats import E4M3, E8M0, FORMATS, TF32, UE4M3, ScalarFormat, Specials, decode
from tests.formats import exact

# Largest, smallest normal and smallest value, emax, codes of the largest and of NaN.
# OCP MX v1.0 tables 1 to 5 and section 5.4; IEEE 754-2019 table 3.5; CUDA for the code of NaN.
PUBLISHED = {
    "e4m3": (448, 2**-6, 2**-9, 8, 0x7E, 0x7F),
    "e5m2": (57344, 2**-14, 2**-16, 15, 0x7B, 0x7F),
    "e2m1": (6, 1, 0.5, 2, 0x7, 0x7),
    "e2m3": (7.5, 1, 0.125, 2, 0x1F, 0x1F),
    "e3m2": (28, 0.25, 0.0625, 4, 0x1F, 0x1F),
    "e8m0": (2**127, 2**-127, 2**-127, 127, 0xFE, 0xFF),
    "ue4m3": (448, 2**-6, 2**-9, 8, 0x7E, 0x7F),
    "bf16": (3.3895313892515355e38, 2**-126, 2**-133, 127, 0x7F7F, 0x7FFF),
    "fp16": (65504, 2**-14, 2**-24, 15, 0x7BFF, 0x7FFF),
    "tf32": (3.4011621342146535e38, 2**-126, 2**-136, 127, 0x7F7FE000, 0x7FFFE000),
    "fp32": (3.4028234663852886e38, 2**-126, 2**-149, 127, 0x7F7FFFFF, 0x7FFFFFFF),
}
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}


def same(a: object, b: object) -> bool:
    """Equal values, the sign of zero told apart, NaN equal to NaN."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    signs = np.isnan(x) | (np.signbit(x) == np.signbit(y))
    return np.array_equal(x, y, equal_nan=True) and bool(signs.all())


def test_names() -> None:
    assert list(FORMATS) == list(PUBLISHED)
    assert all(FORMATS[name].name == name for name in FORMATS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers(name: str) -> None:
    f = FORMATS[name]
    found = (f.max, f.smallest_normal, f.smallest, f.emax, f.max_code, f.nan_code)
    assert found == PUBLISHED[name]
    assert f.value(f.max_code) == f.max
    assert math.isnan(f.value(f.nan_code)) is f.has_nan
    assert (f.infinity_code is not None) is f.has_infinity
    assert f.infinity_code is None or math.isinf(f.value(f.infinity_code))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("e4m3", "uint8"), ("e8m0", "uint8"), ("bf16", "uint16"), ("fp16", "uint16")]
    + [("tf32", "uint32"), ("fp32", "uint32")],
)
def test_code_dtype(name: str, dtype: str) -> None:
    assert FORMATS[name].code_dtype == np.dtype(dtype)


def test_nan_codes() -> None:
    codes = {name: list(FORMATS[name].nan_codes) for name in exact.SMALL}
    assert codes.pop("e5m2") == [0x7D, 0x7E, 0x7F]
    assert codes.pop("e8m0") == [0xFF]
    assert codes.pop("e4m3") == codes.pop("ue4m3") == [0x7F]
    assert all(found == [] for found in codes.values())
    assert len(FORMATS["fp16"].nan_codes) == 1023
    assert TF32.nan_codes[0] == 0x7F802000


@pytest.mark.parametrize("name", exact.SMALL)
def test_the_table_is_the_definition(name: str) -> None:
    """The table against exact rationals, and `decode` against the table, for every code."""
    f, spec = FORMATS[name], exact.SPECS[name]
    table = f.table()
    assert table.shape == (1 << f.bits,)
    for code in exact.finite_codes(spec):
        assert table[code] == exact.value(code, spec)
        if spec.signed:
            assert table[code | spec.sign] == -exact.value(code, spec)
            assert np.signbit(table[code | spec.sign])
    codes = np.arange(1 << f.bits)
    assert same(decode(codes, f, np.float64), table)
    assert same(decode(codes, f), table)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_tables_equal_ml_dtypes(name: str) -> None:
    f = FORMATS[name]
    codes = np.arange(1 << f.bits, dtype=np.uint8)
    theirs = codes.view(ML_DTYPES[name]).astype(np.float64)
    assert np.array_equal(f.table(), theirs, equal_nan=True)


def test_sums_of_tables() -> None:
    """Check sums of facts worked out by hand: E4M3 0..0x7e is 43263/8, E2M1 0..7 is 18."""
    assert E4M3.table()[:0x7F].sum() == 43263 / 8
    assert FORMATS["e2m1"].table()[:8].sum() == 18


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"exponent_bits": 0}, "exponent_bits"),
        ({"exponent_bits": 9}, "exponent_bits"),
        ({"mantissa_bits": -1}, "mantissa_bits"),
        ({"mantissa_bits": 24}, "mantissa_bits"),
        ({"bias": 200}, "float32"),
        ({"bias": -200}, "float32"),
        ({"specials": Specials.POWER}, "powers of two"),
        ({"specials": Specials.POWER, "signed": False}, "powers of two"),
        ({"specials": Specials.IEEE, "mantissa_bits": 0}, "IEEE"),
        ({"specials": Specials.IEEE, "exponent_bits": 1}, "IEEE"),
        ({"mantissa_bits": 0}, "NaN"),
    ],
)
def test_impossible_formats(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(E4M3, **changes)


def test_formats_are_frozen_values() -> None:
    assert dataclasses.replace(E4M3) == E4M3
    assert hash(dataclasses.replace(E4M3)) == hash(E4M3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        E4M3.bias = 8
    with pytest.raises(TypeError):
        ScalarFormat("e4m3", 4, 3, 7)


def test_unknown_names_name_near_ones() -> None:
    for given, near in (("e4m3fn", "e4m3"), ("E4M3", "e4m3"), ("e5m3", "e5m2")):
        with pytest.raises(ValueError, match=f"did you mean.*'{near}'"):
            decode([0], given)
    with pytest.raises(ValueError, match="allowed: e4m3, e5m2"):
        decode([0], "zzzzzzzz")
    with pytest.raises(TypeError, match="ScalarFormat or a name"):
        decode([0], np.float32)


def test_codes_outside_a_format() -> None:
    with pytest.raises(ValueError, match="e2m1 has no code 16"):
        FORMATS["e2m1"].value(16)
    with pytest.raises(ValueError, match="tables are for 8"):
        TF32.table()
    assert UE4M3.value(0x81) == E4M3.value(0x01)
    assert E8M0.value(0) == 2.0**-127
