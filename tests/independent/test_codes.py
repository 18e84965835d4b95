"""The element and scale codecs against conversions recorded on a device, at every boundary."""

import pytest

from tests.independent import codes, float32
from tests.independent.oracles import load

ELEMENTS = {
    "e4m3_sat": codes.E4M3,
    "e5m2_sat": codes.E5M2,
    "e2m3": codes.E2M3,
    "e3m2": codes.E3M2,
    "e2m1": codes.E2M1,
}


def convert(kind: str, bits: int) -> int:
    """The conversion that the recording calls ``kind``."""
    if kind == "e8m0_rp_sat":
        return codes.encode_scale_up(bits)
    return codes.encode(bits, ELEMENTS[kind])


@pytest.mark.parametrize("kind", [*ELEMENTS, "e8m0_rp_sat"])
def test_float32_boundaries(kind: str) -> None:
    """Each code interval is right at both ends: the codec is monotonic, so inside it as well."""
    oracle = load("conversions", "conversions")
    starts = oracle[f"f32_{kind}_bits"].tolist()
    wanted = oracle[f"f32_{kind}_code"].tolist()
    ends = [*(start - 1 for start in starts[1:]), 0xFFFFFFFF]
    assert starts[0] == 0
    for start, end, code in zip(starts, ends, wanted, strict=True):
        for bits in {start, min(start + 1, end), max(end - 1, start), end}:
            assert convert(kind, bits) == code, f"{kind} {bits:#010x}"


@pytest.mark.parametrize("kind", [*ELEMENTS, "e8m0_rp_sat"])
def test_bfloat16(kind: str) -> None:
    wanted = load("conversions", "conversions")[f"bf16_{kind}"].tolist()
    for bits in range(0, 1 << 16, 17):
        assert convert(kind, float32.from_bfloat16(bits)) == wanted[bits], f"{bits:#06x}"


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=lambda element: element.name)
def test_finite_codes_come_back(element: codes.Element) -> None:
    for magnitude in range(element.largest + 1):
        for code in (magnitude, magnitude | element.sign_bit):
            sign = int(code != magnitude)
            assert codes.encode(float32.nearest(codes.decode(code, element), sign), element) == code


def test_values_from_the_standard() -> None:
    """OCP MX v1.0, tables 1 to 5: largest and smallest magnitudes."""
    table = {
        codes.E4M3: (448, 2**-6, 2**-9),
        codes.E5M2: (57344, 2**-14, 2**-16),
        codes.E2M3: (7.5, 1, 0.125),
        codes.E3M2: (28, 0.25, 0.0625),
        codes.E2M1: (6, 1, 0.5),
    }
    for element, (largest, normal, subnormal) in table.items():
        assert codes.decode(element.largest, element) == largest
        assert codes.decode(1 << element.fraction_bits, element) == normal
        assert codes.decode(1, element) == subnormal
