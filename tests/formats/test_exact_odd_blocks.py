"""Where libraries disagree: the smallest inputs, and the scale and first codes that each gives.

The blocks start with the values listed and are filled with +0. Each was run with the library, or
follows from its source where it has no CPU path.
"""

import numpy as np
import pytest

from flamia_ref.formats import PRESETS, dequantize, quantize

NAN, INF = float("nan"), float("inf")
ULP_448 = float.fromhex("0x1.c00002p12")  # 448 2^4 and a unit
EIGHT = float.fromhex("0x1.fffffep2")  # 8 less a unit
F32_MAX = float.fromhex("0x1.fffffep127")

# Values, presets, scale code, first codes.
E4M3 = [
    ([449, 1], "te torchao-rceil torchao-ceil deepgemm jax compressedtensors", 128, [0x76, 0x30]),
    ([449, 1], "ocp gfloat torchao-floor torchao-even triton-rounddown", 127, [0x7E, 0x38]),
    ([449, 1], "vllm", 135, [0x3E, 0x02]),
    ([448, 17], "te ocp torchao-even torchao-rceil", 127, [0x7E, 0x58]),
    ([448, 17], "torchao-ceil compressedtensors", 128, [0x76, 0x50]),
    ([ULP_448, 1], "te torchao-rceil jax triton-roundup deepgemm", 132, [0x76, 0x10]),
    ([EIGHT, 1], "ocp torchao-floor", 121, [0x7E, 0x68]),
    ([EIGHT, 1], "torchao-even", 122, [0x78, 0x60]),
    ([float.fromhex("0x1.effffep8")], "torchao-even", 127, [0x7E]),
    ([496], "torchao-even", 128, [0x78]),
    ([496], "torchao-floor", 127, [0x7E]),
    ([0], "te ocp torchao-even modelopt gfloat compressedtensors triton-roundup", 0, [0x00]),
    ([0], "deepgemm", 105, [0x00]),
    ([0], "qwix", 127, [0x00]),
    ([0], "vllm", 1, [0x00]),
    ([0], "jax", 0, [0xFF]),
    ([2.0**-126], "te ocp torchao-ceil torchao-rceil gfloat modelopt compressedtensors", 0, [0x40]),
    ([2.0**-126], "torchao018-floor torchao018-ceil torchao018-even", 0, [0x38]),
    ([2.0**-126], "torchao018-rceil triton-rounddown", 0, [0x00]),
    ([2.0**-126], "triton-roundup", 1, [0x38]),
    ([2.0**-126], "jax", 0, [0x7E, 0xFF]),
    ([INF, 1, -1], "te gfloat modelopt deepgemm torchao018-rceil", 254, [0x7E, 0x00, 0x80]),
    (
        [INF, 1, -1],
        "torchao018-floor torchao018-ceil torchao018-even",
        247,
        [0x7E, 0x00, 0x80],
    ),
    ([INF, 1, -1], "torchao-floor torchao-ceil torchao-even torchao-rceil", 255, [0x7F] * 32),
    ([INF, 1, -1], "jax triton-roundup qwix", 255, [0xFF, 0x00, 0x80]),
    ([INF, 1, -1], "compressedtensors", 255, [0xFF, 0x00, 0x00]),
    ([NAN, 1, -1], "torchao-floor torchao-rceil torchao018-rceil", 255, [0x7F] * 32),
    ([NAN, 1, -1], "torchao018-floor torchao018-even triton-rounddown", 255, [0x7F, 0x00, 0x80]),
    ([NAN, 1, -1], "triton-roundup", 0, [0x7F, 0x00, 0x80]),
    ([NAN, 1, -1], "modelopt", 0, [0x7F, 0x7E, 0xFE]),
    ([NAN, 1, -1], "jax", 119, [0x7F, 0x78, 0xF8]),
    ([NAN] * 32, "jax", 255, [0x7F] * 32),
    ([NAN] * 32, "te cudnn", 0, [0x7F] * 32),
    ([NAN, 1, -1], "gfloat", 255, [0xFF] * 32),
    ([NAN, 1, -1], "deepgemm", 254, [0x7F, 0x00, 0x80]),
    ([NAN, 1, -1], "te cudnn", 119, [0x7F, 0x78, 0xF8]),
    ([F32_MAX, 1e38], "te torchao-rceil", 247, [0x78, 0x69]),
    ([F32_MAX, 1e38], "ocp torchao-floor", 246, [0x7E, 0x71]),
    ([F32_MAX, 1e38], "torchao-even", 255, [0x7F] * 32),
]
E2M1 = [
    ([7, 2.5], "torchao-rceil torchao-even torchao-ceil qwix compressedtensors", 128, [6, 2]),
    ([7, 2.5], "torchao-floor gfloat ocp", 127, [7, 4]),
    ([7, 2.5], "deepgemm modelopt", 128, [5, 2]),
    ([6.5, 1], "torchao-rceil torchao-ceil modelopt deepgemm", 128, [5, 1]),
    ([6.5, 1], "torchao-even torchao-floor", 127, [7, 2]),
    (
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5],
        "ocp torchao-floor torchao-rceil qwix",
        127,
        [7, 0, 2, 2, 4, 4, 6, 6],
    ),
    (
        [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5],
        "deepgemm modelopt",
        127,
        [7, 0, 1, 2, 3, 4, 5, 6],
    ),
    ([0], "modelopt", 0, [8] * 32),
    ([0], "torchao-floor ocp compressedtensors triton-roundup", 0, [0] * 32),
    ([-0.0], "torchao-floor ocp modelopt gfloat triton-roundup", 0, [8]),
    ([-0.0], "compressedtensors", 0, [0]),
    ([-0.0], "deepgemm", 112, [0]),
    ([6, -0.1], "torchao-floor ocp modelopt compressedtensors qwix", 127, [7, 8]),
    ([6, -0.1], "deepgemm", 127, [7, 0]),
    ([NAN, 1, -1], "torchao018-floor torchao018-ceil torchao018-even", 255, [3, 0, 8]),
    ([NAN, 1, -1], "torchao018-rceil torchao-floor torchao-even torchao-rceil", 255, [3] * 3),
    ([NAN, 1, -1], "triton-rounddown", 255, [7, 0, 8]),
    ([NAN, 1, -1], "modelopt", 0, [8] * 3),
]
CASES = [
    (values, preset, element, scale, codes)
    for element, table in (("e4m3", E4M3), ("e2m1", E2M1))
    for values, presets, scale, codes in table
    for preset in presets.split()
]


def full_name(short: str, element: str) -> str:
    """ "torchao-even" and "e4m3" are torchao-mx-even-e4m3, "ocp" ocp-mx-floor-e4m3."""
    library, _, rule = short.partition("-")
    rule = rule or {"ocp": "floor", "vllm": "fallback"}.get(library, "")
    library = {"qwix": "qwix018"}.get(library, library)
    return "-".join(part for part in (library, "mx", rule, element) if part)


def row(values: list[float]) -> np.ndarray:
    return np.array([[*values, *[0.0] * (32 - len(values))]], np.float32)


@pytest.mark.parametrize(
    ("values", "preset", "element", "scale", "codes"),
    CASES,
    ids=[f"{full_name(p, e)}-{v}" for v, p, e, _, _ in CASES],
)
def test_an_input_on_which_libraries_differ(
    values: list[float], preset: str, element: str, scale: int, codes: list[int]
) -> None:
    found = quantize(row(values), full_name(preset, element))
    assert found.scales.item() == scale
    assert found.codes[0, : len(codes)].tolist() == codes


def values_of(values: list[float], name: str, count: int) -> list[float]:
    found: list[float] = dequantize(quantize(row(values), name))[0, :count].tolist()
    return found


def test_microxcaling_by_value() -> None:
    """It returns values, not codes."""
    ties = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    nearest, even = "microxcaling-mx-nearest-e2m1", "microxcaling-mx-even-e2m1"
    assert values_of(ties, nearest, 8) == [6, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values_of(ties, even, 8) == [6, 0, 1, 1, 2, 2, 4, 4]
    assert values_of(ties, "microxcaling-mx-floor-e2m1", 8) == [6, 0, 0.5, 1, 1.5, 2, 3, 4]
    assert values_of([7, 2.5], nearest, 2) == [6, 3]
    assert values_of([7, 2.5], even, 2) == [6, 2]
    for odd in (NAN, INF):
        for name in (nearest, "quark-mx-floor-e4m3", "quark-mx-ceil-e2m1"):
            assert np.isnan(values_of([odd, 1.0], name, 32)).all(), name


def test_blocks_below_the_normal_range_are_zeros_where_flushed() -> None:
    for amax, kept in ((2.0**-127, False), (2.0**-126, True)):
        flushed = quantize(row([amax]), "microxcaling-mx-nearest-flush-e4m3")
        assert bool(dequantize(flushed).any()) == kept
        assert dequantize(quantize(row([amax]), "microxcaling-mx-nearest-e4m3")).any()


def test_every_nan_policy_is_met() -> None:
    policies = {PRESETS[full_name(p, e)].nan for _, p, e, _, _ in CASES}
    assert policies == {preset.nan for preset in PRESETS.values()}
