"""What `encode` and `decode` accept and refuse, and how arrays come back."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import formats
from flamia_ref.formats import FORMATS, decode, decode_bits, encode
from tests.formats import exact, points


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = np.full(shape, 1.0, np.float32)
    codes = encode(x, "e4m3")
    assert isinstance(codes, np.ndarray)
    assert codes.shape == shape
    assert (codes == 0x38).all()
    values = decode(codes, "e4m3")
    assert isinstance(values, np.ndarray)
    assert values.shape == shape
    assert values.dtype == np.float32
    draws = np.zeros(shape, np.uint8)
    assert encode(x, "e4m3", rounding="stochastic", random_bits=draws).shape == shape


def test_array_likes_and_memory_orders() -> None:
    assert encode(1.0, "e4m3") == 0x38
    assert encode([1.0, -2.0], "e4m3").tolist() == [0x38, 0xC0]
    assert decode([0x38, 0xC0], "e4m3").tolist() == [1.0, -2.0]
    for empty in ([], [[], []]):  # of no type: neither values nor codes are missing
        assert encode(empty, "e4m3").shape == decode(empty, "e4m3").shape == np.shape(empty)
    x = points.narrow_range(60, 1).view(np.float32).reshape(6, 10)
    whole = encode(x, "e4m3")
    np.testing.assert_array_equal(encode(x[::2, ::-3], "e4m3"), whole[::2, ::-3])
    np.testing.assert_array_equal(encode(np.asfortranarray(x), "e4m3"), whole)
    np.testing.assert_array_equal(encode(x.astype(">f4"), "e4m3"), whole)
    np.testing.assert_array_equal(encode(x.astype(">f8"), "e4m3"), whole)
    frozen = x.copy()
    frozen.flags.writeable = False
    np.testing.assert_array_equal(encode(frozen, "e4m3"), whole)


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_comes_back(name: str) -> None:
    """decode then encode is the identity on finite codes, for each input type that holds them."""
    f, spec = FORMATS[name], exact.SPECS[name]
    last = spec.last + 1
    magnitudes = np.unique(np.r_[0 : min(last, 3000), max(0, last - 3000) : last])
    codes = (magnitudes << spec.pad).astype(f.code_dtype)
    codes = np.concatenate([codes, codes | f.code_dtype.type(f.sign_code)])
    np.testing.assert_array_equal(encode(decode(codes, f), f), codes)
    np.testing.assert_array_equal(encode(decode(codes, f, np.float64), f), codes)
    if f.bits <= 8:
        narrow = decode(codes, f).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(encode(narrow, f), codes)


@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32", "fp32"])
def test_wide_formats_decode_exactly(name: str) -> None:
    f, spec = FORMATS[name], exact.SPECS[name]
    rng = np.random.default_rng(1)
    magnitudes = [0, 1, 2, spec.last, spec.last - 1, *rng.integers(0, spec.last, 400).tolist()]
    codes = np.array(magnitudes, np.uint64) << np.uint64(spec.pad)
    values = decode(codes, f, np.float64)
    assert values.tolist() == [float(exact.value(code, spec)) for code in magnitudes]
    negative = decode(codes | np.uint64(f.sign_code), f, np.float64)
    np.testing.assert_array_equal(negative, -values)
    assert np.signbit(negative).all()
    assert decode([f.infinity_code, f.infinity_code | f.sign_code], f).tolist() == [
        np.inf,
        -np.inf,
    ]
    for code in (f.nan_code, f.nan_code | f.sign_code, f.infinity_code + (1 << spec.pad)):
        bits = decode_bits(np.array([code], f.code_dtype), f)
        assert bits.tolist() == [0x7FFFFFFF]


def test_decode_against_numpy() -> None:
    """All 65,536 codes of the two formats that numpy has types for."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    for name, dtype in (("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)):
        ours, theirs = decode(codes, name), codes.view(dtype).astype(np.float32)
        np.testing.assert_array_equal(ours, theirs)
        number = ~np.isnan(theirs)
        np.testing.assert_array_equal(ours[number].view(np.uint32), theirs[number].view(np.uint32))


def test_e8m0_and_ignored_bits() -> None:
    bits = decode([0, 1, 127, 254, 255], "e8m0").view(np.uint32)
    assert bits.tolist() == [0x00400000, 0x00800000, 0x3F800000, 0x7F000000, 0x7FFFFFFF]
    for code in range(128):
        one, other = decode([code, code | 0x80], "ue4m3").view(np.uint32).tolist()
        assert one == other
    assert decode([0x3F801FFF, 0x3F802000], "tf32").tolist() == [1.0, 1.0009765625]
    # A NaN whose payload is only in the bits that do not count is an infinity to a tensor core.
    assert decode([0x7F800001], "tf32").tolist() == [np.inf]


def test_subnormals_of_e4m3() -> None:
    codes = [*range(1, 9), 0x81]
    values = [k * 2.0**-9 for k in range(1, 8)] + [2.0**-6, -(2.0**-9)]
    assert decode(codes, "e4m3").tolist() == values


@pytest.mark.parametrize(
    "x",
    [1, [1, 2], True, np.array([1], np.int64), np.array([1], np.uint8), np.array([True])]
    + [np.array([1.0], object), np.array(["1"]), np.array([1j]), np.array([1.0], np.longdouble)]
    + [np.array([1.0], ml_dtypes.float8_e4m3fn), None],
    ids=repr,
)
def test_other_types_are_refused(x: Any) -> None:
    with pytest.raises(TypeError, match="encode takes float64, float32, bfloat16 or float16"):
        encode(x, "e4m3")


@pytest.mark.parametrize("codes", [1.0, [True], [1.5], np.array([1], object), ["1"], None])
def test_codes_of_other_types_are_refused(codes: Any) -> None:
    with pytest.raises(TypeError, match="codes are integers"):
        decode(codes, "e4m3")


@pytest.mark.parametrize(
    ("name", "code"),
    [("e4m3", 256), ("e4m3", -1), ("e2m1", 16), ("e2m3", 64), ("e3m2", 255), ("bf16", 1 << 16)]
    + [("e8m0", 256), ("fp32", 1 << 32)],
)
def test_codes_outside_the_format_are_refused(name: str, code: int) -> None:
    with pytest.raises(ValueError, match=f"{name} has no code {code}; codes are 0 to"):
        decode(np.array([0, code]), name)


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^encode takes an array; x has rows of different lengths"
    ):
        encode([[1.0], [1.0, 2.0]], "e4m3")
    with pytest.raises(ValueError, match=r"^codes have rows of different lengths; fill them up"):
        decode([[1], [1, 2]], "e4m3")


def test_unknown_settings() -> None:
    with pytest.raises(ValueError, match="did you mean 'nearest_even'"):
        encode(1.0, "e4m3", rounding="nearest_evn")
    with pytest.raises(ValueError, match="unknown overflow 'saturat'; did you mean 'saturate'"):
        encode(1.0, "e4m3", overflow="saturat")
    for wrong in (np.float16, np.int32, "bfloat16"):
        with pytest.raises(TypeError):
            decode([1], "e4m3", wrong)


def test_random_bits() -> None:
    x, draws = np.ones(3, np.float32), np.zeros(3, np.uint8)
    with pytest.raises(ValueError, match="are for rounding 'stochastic'"):
        encode(x, "e4m3", random_bits=draws)
    with pytest.raises(ValueError, match="needs random_bits"):
        encode(x, "e4m3", rounding="stochastic")
    with pytest.raises(ValueError, match=r"have shape \(2,\); give them that of x, \(3,\)"):
        encode(x, "e4m3", rounding="stochastic", random_bits=draws[:2])
    for wrong in (draws.astype(np.int8), draws.astype(np.float32), draws.astype(np.uint64)):
        with pytest.raises(TypeError, match="uint8, uint16 or uint32"):
            encode(x, "e4m3", rounding="stochastic", random_bits=wrong)


def test_messages_are_one_line() -> None:
    for call in (
        lambda: encode(np.ones((40, 40), np.int32), "e4m3"),
        lambda: decode(np.full((40, 40), 300), "e4m3"),
        lambda: encode(1.0, "x" * 500),
        lambda: formats.quantize(np.ones((4, 4), np.float32), "te-mx-e4m3", block="\n" * 300),
    ):
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 300


def test_exports() -> None:
    assert all(hasattr(formats, name) for name in formats.__all__)
    surface = (
        "E4M3 E5M2 E2M1 E2M3 E3M2 E8M0 UE4M3 BF16 FP16 TF32 FP32 FORMATS PRESETS encode decode"
    )
    assert {*surface.split(), "quantize", "dequantize", "BlockTensor", "layout"} <= {
        *formats.__all__
    }
