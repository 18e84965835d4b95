"""`encode` against the conversions of libraries and of a device (tests/oracles/quantizers, casts).

Every bfloat16, and grid points and midpoints of the formats, a step either side, as float32. Equal on
all finite input and on infinities: of a library only the rounding and the rule for overflow are
stated here. What each does with NaN is stated too, and to E8M0 where values have no code.
"""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import FORMATS, encode
from tests.formats.stored import inputs, oracle, oracle_names

ROUNDINGS = {
    "rn": "nearest_even",
    "rz": "toward_zero",
    "rp": "up",
    "rm": "down",
    "TiesToEven": "nearest_even",
    "TiesToAway": "nearest_away",
    "TowardZero": "toward_zero",
    "TowardPositive": "up",
    "TowardNegative": "down",
    "nearest": "nearest_even",
    "up": "up",
    "down": "toward_zero",
}
OVERFLOWS = {"sat": "saturate", "nosat": "native"}
# What keys that do not say it do. Formats without NaN saturate either way.
UNSAID = {
    "ml_dtypes": "native",
    "jax": "native",
    "hw_h200": "saturate",
    "onnx": "saturate",
    "cuda_headers": "saturate",
}
# Codes of NaN, without and with a sign.
OWN_NAN = {"e4m3": (0x7F, 0x7F), "e5m2": (0x7F, 0x7F)}
IEEE = {"e4m3": (0x7F, 0xFF), "e5m2": (0x7E, 0xFE)}
ZEROS = {"e2m1": (0x08, 0x00), "e2m3": (0x20, 0x00), "e3m2": (0x20, 0x00)}
LARGEST = {"e2m1": (0x07, 0x07), "e2m3": (0x1F, 0x1F), "e3m2": (0x1F, 0x1F)}
RAISED = dict.fromkeys(LARGEST, (0xEE, 0xEE))
NANS = {
    "cuda_headers": OWN_NAN | LARGEST,
    "hw_h200": OWN_NAN,
    "ml_dtypes": IEEE | ZEROS,
    "jax": IEEE | {"e2m1": (0x08, 0x08)},
    "onnx": IEEE | ZEROS,
    "torch": {"e4m3": (0x7F, 0xFF), "e5m2": (0x7F, 0xFF)},
    "gfloat": {"e4m3": (0xFF, 0xFF), "e5m2": (0xFF, 0xFF)} | RAISED,
}
KEYS = [
    (name, key)
    for name in oracle_names()
    if name.startswith("cast-")
    for key in sorted(oracle(name))
]


def given(key: str) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.float32]]:
    """What the library was given, and that as float32."""
    arrays = inputs()
    bits = arrays["cast_bits"]
    if key.endswith("_from_bf16"):
        short = bits[: int(arrays["cast_n_bf16"])]
        return (short >> np.uint32(16)).astype(np.uint16).view(ml_dtypes.bfloat16), short.view(
            np.float32
        )
    return bits.view(np.float32), bits.view(np.float32)


def conversion(name: str, key: str) -> tuple[str, str, str, str]:
    """Library, format, rounding and overflow rule of a recording's key."""
    library = name.split("-")[1]
    target, *modes = key.removesuffix("_from_bf16").split("_")
    rounding, overflow = "nearest_even", UNSAID.get(library)
    for mode in modes:
        rounding, overflow = ROUNDINGS.get(mode, rounding), OVERFLOWS.get(mode, overflow)
    if library == "torch":
        overflow = "saturate" if target == "e4m3" else "native"
    assert overflow is not None
    return library, target, rounding, overflow


@pytest.mark.parametrize(("name", "key"), [pair for pair in KEYS if "e8m0" not in pair[1]])
def test_elements(name: str, key: str) -> None:
    x, wide = given(key)
    library, target, rounding, overflow = conversion(name, key)
    wanted = oracle(name)[key]
    codes = encode(x, target, rounding=rounding, overflow=overflow)
    nan, minus = np.isnan(wide), np.signbit(wide)
    plain = ~nan
    if library == "gfloat" and overflow == "native" and target == "e4m3":
        # Its one code of NaN has a sign, whatever overflowed.
        codes = np.where(codes == 0x7F, np.uint8(0xFF), codes)
    np.testing.assert_array_equal(codes[plain], wanted[plain])
    assert plain.sum() > 65_000
    ours = FORMATS[target].nan_code
    assert (encode(x, target)[nan] == ours).all()
    plus_code, minus_code = NANS[library][target]
    if library == "torch" and key.endswith("_from_bf16"):
        plus_code = 0xFF
    assert set(wanted[nan & ~minus].tolist()) == {plus_code}
    assert set(wanted[nan & minus].tolist()) == {minus_code}


@pytest.mark.parametrize(("name", "key"), [pair for pair in KEYS if "e8m0" in pair[1]])
def test_e8m0(name: str, key: str) -> None:
    x, wide = given(key)
    library, _, rounding, overflow = conversion(name, key)
    wanted = oracle(name)[key]
    # All take a midpoint up, to the larger power. onnx never saturates an infinity.
    nearest = rounding == "nearest_even"
    rounding = "nearest_away" if nearest else rounding
    codes = encode(x, "e8m0", rounding=rounding, overflow=overflow)
    magnitude = np.abs(wide)
    if library == "onnx":
        codes = np.where(np.isinf(wide), np.uint8(255), codes)
    if library in ("torch", "onnx", "ml_dtypes", "jax") and nearest:
        # 2^-127 to 1.5 2^-127 goes up by its mantissa bits, as no other binade does.
        up = (magnitude > np.float32(2.0**-127)) & (magnitude < np.float32(1.5 * 2.0**-127))
        codes = np.where(up, np.uint8(1), codes)
    if library == "onnx" and rounding == "up":
        # Any mantissa bit goes up, that of 2^-127 itself too.
        codes = np.where((magnitude > 0) & (magnitude <= 2.0**-127), np.uint8(1), codes)
    if library in ("ml_dtypes", "jax"):
        codes = np.where((wide == 0) | np.signbit(wide), np.uint8(255), codes)  # no code, so NaN
    np.testing.assert_array_equal(codes, wanted)


def test_another_rounding_or_overflow_shows() -> None:
    """In every recording: what is stated above is no freedom."""
    for name, key in KEYS:
        x, wide = given(key)
        library, target, rounding, overflow = conversion(name, key)
        wanted, finite = oracle(name)[key], np.isfinite(wide)
        if target == "e8m0" and library in ("ml_dtypes", "jax"):
            finite &= wide > 0
        other = "toward_zero" if rounding != "toward_zero" else "nearest_even"
        differs = encode(x, target, rounding=other, overflow=overflow) != wanted
        assert differs[finite].sum() > 100, (name, key)
        if target in ("e4m3", "e5m2"):
            other = "native" if overflow == "saturate" else "saturate"
            differs = encode(x, target, rounding=rounding, overflow=other) != wanted
            towards = rounding != "nearest_even" and rounding != "nearest_away"
            assert differs[finite].sum() > 10_000 or towards, (name, key)
