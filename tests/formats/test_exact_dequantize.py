"""Every element code under every scale code of every pair of formats in use, from exact rationals."""

import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import FORMATS, PRESETS, BlockFormat, BlockTensor, dequantize
from tests.formats import exact
from tests.independent import float32

PAIRS = sorted({(preset.element.name, preset.scale.name) for preset in PRESETS.values()})
SIGN = 0x80000000


def preset_of(element: str, scale: str, *, divides: bool | None = None) -> BlockFormat:
    """A preset with those formats; `divides` None for one without a tensor scale."""
    return next(
        preset
        for preset in PRESETS.values()
        if (preset.element.name, preset.scale.name) == (element, scale)
        and preset.has_tensor_scale == (divides is not None)
        and (divides is None or preset.tensor_divides == divides)
    )


def element_values(element: str) -> list[Fraction | float]:
    """Value of every code; a zero with a sign, infinity and NaN are floats."""
    spec = exact.SPECS[element]
    found: list[Fraction | float] = []
    for code in range(1 << (spec.exponent_bits + spec.mantissa_bits + 1)):
        magnitude, sign = code & (spec.sign - 1), -1 if code & spec.sign else 1
        if magnitude > spec.last:
            found.append(sign * math.inf if magnitude == spec.infinity else math.nan)
        elif magnitude == 0:
            found.append(math.copysign(0.0, sign))
        else:
            found.append(sign * exact.value(magnitude, spec))
    return found


def scale_codes_of(scale: str, step: int = 1) -> npt.NDArray[np.integer]:
    """All, or every `step`th and the two at each end."""
    codes: npt.NDArray[np.integer] = np.arange(256, dtype=np.uint8)
    if scale == "fp32":  # powers of two, those of AMD Quark
        powers = [1 << k for k in range(23)] + [field << 23 for field in range(1, 255)]
        codes = np.array([*powers, float32.NAN], np.uint32)
    place = np.arange(codes.size)
    return codes[(place % step == 0) | (place < 2) | (place >= codes.size - 2)]


def scale_of(code: int, scale: str) -> Fraction | float:
    if scale == "fp32":
        return math.nan if float32.is_nan(code) else float32.value(code)
    spec = exact.SPECS[scale]
    if scale == "ue4m3":
        code &= 0x7F  # the top bit does not count
    return math.nan if code == spec.nan else exact.value(code, spec)


def product(element: Fraction | float, scale: Fraction | float) -> Fraction | float:
    """Exact; zeros keep the sign of the element."""
    if isinstance(element, float) or isinstance(scale, float):
        return float(element) * float(scale)
    return element * scale if element * scale else math.copysign(0.0, element)


def bits_of(x: Fraction | float) -> int:
    """float32 bits, rounded once."""
    if not isinstance(x, float):
        return float32.nearest(x)
    if math.isnan(x):
        return float32.NAN
    sign = SIGN if math.copysign(1.0, x) < 0 else 0
    return sign | (float32.INFINITY if math.isinf(x) else 0)


def same(found: npt.NDArray[np.floating], wanted: list[int]) -> None:
    """Bits, all NaN alike."""
    bits = np.where(np.isnan(found), np.uint32(float32.NAN), found.view(np.uint32))
    np.testing.assert_array_equal(bits.ravel(), np.array(wanted, np.uint32))


def tensor_of(f: BlockFormat, step: int, tensor_scale: int | None = None) -> BlockTensor:
    """One row of all element codes for every scale code of `scale_codes_of`."""
    scales = scale_codes_of(f.scale.name, step)
    codes = np.arange(1 << f.element.bits, dtype=np.uint8)
    return BlockTensor(
        codes=np.broadcast_to(codes, (scales.size, codes.size)),
        scales=scales[:, None],
        tensor_scale=None if tensor_scale is None else np.uint32(tensor_scale).view(np.float32),
        format=f,
        block=(1, codes.size),
    )


def products(f: BlockFormat, step: int) -> list[Fraction | float]:
    values = element_values(f.element.name)
    scales = [scale_of(code, f.scale.name) for code in scale_codes_of(f.scale.name, step).tolist()]
    return [product(value, scale) for scale in scales for value in values]


# Fractions of every pair of codes take seconds.
steps = pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.nightly)])


@steps
@pytest.mark.parametrize(("element", "scale"), PAIRS)
def test_every_code_under_every_scale(element: str, scale: str, step: int) -> None:
    """float64 is exact; float32 but for what lies beyond it."""
    try:
        f = preset_of(element, scale)
    except StopIteration:
        pytest.fail(f"no preset of {element} and {scale} without a tensor scale")
    wanted = products(f, step)
    tensor = tensor_of(f, step)
    same(dequantize(tensor), [bits_of(x) for x in wanted])
    wide = dequantize(tensor, np.float64).ravel()
    expected = np.array([float(x) for x in wanted])
    np.testing.assert_array_equal(wide, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(wide[number]), np.signbit(expected[number]))
    exactly = [Fraction(x) for x in wide[np.isfinite(wide)].tolist()]
    assert exactly == [Fraction(x) for x in wanted if not isinstance(x, float) or x == 0]


TENSOR_SCALES = [0x3F800000, 0x3F800001, 0x40490FDB, 0x00000001, 0x00400001, 0x7F7FFFFF, 0x3A000001]


@steps
@pytest.mark.parametrize("divides", [False, True])
def test_a_tensor_scale_rounds_once(divides: bool, step: int) -> None:
    f = preset_of("e2m1", "ue4m3", divides=divides)
    exactly = products(f, step)
    for bits in TENSOR_SCALES:
        factor = float32.value(bits)
        wanted = [
            x if isinstance(x, float) else (x / factor if divides else x * factor) for x in exactly
        ]
        tensor = tensor_of(f, step, bits)
        same(dequantize(tensor), [bits_of(x) for x in wanted])
        wide = dequantize(tensor, np.float64).ravel()
        np.testing.assert_array_equal(wide, [float(x) for x in wanted])  # float() rounds once


def test_zero_and_infinite_tensor_scales() -> None:
    """A tensor of zeros has a tensor scale of 0 in some libraries: no warning, zeros or NaN as IEEE 754 says."""
    for divides in (False, True):
        f = preset_of("e2m1", "ue4m3", divides=divides)
        for bits in (0, float32.INFINITY, float32.NAN):
            codes = np.array([[0x0, 0x8, 0x2, 0xA]], np.uint8)
            tensor = BlockTensor(
                codes=codes,
                scales=np.full((1, 1), 0x38, np.uint8),
                tensor_scale=np.uint32(bits).view(np.float32),
                format=f,
                block=(1, 4),
            )
            operation = float32.divide if divides else float32.multiply
            values = [0, SIGN, 0x3F800000, 0xBF800000]
            same(dequantize(tensor), [operation(v, bits) for v in values])


def test_pairs_in_use() -> None:
    """The pairs that the others here run over."""
    assert set(FORMATS) >= {name for pair in PAIRS for name in pair}
    assert {pair for pair in PAIRS if pair[1] == "e8m0"} == {
        (element, "e8m0") for element in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
    }
    assert ("e2m1", "ue4m3") in PAIRS
