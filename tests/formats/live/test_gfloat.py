"""gfloat's own MX quantizers of five element formats, and its conversions of numbers."""

from collections.abc import Callable

import numpy as np
import pytest

from flamia_ref.formats import PRESETS, encode
from tests.formats.live import inputs, libraries
from tests.formats.live.agreement import same

libraries.need("gfloat")

ELEMENTS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
ROUNDINGS = {
    "nearest_even": "TiesToEven",
    "nearest_away": "TiesToAway",
    "toward_zero": "TowardZero",
    "up": "TowardPositive",
    "down": "TowardNegative",
}
Record = Callable[[str, object], None]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("element", ELEMENTS)
def test_mx(element: str, dtype: str, record_property: Record) -> None:
    name = f"gfloat-mx-{element}"
    assert PRESETS[name].version == libraries.VERSIONS["gfloat"]
    x = inputs.blocks(inputs.generator(name, dtype), inputs.FLOATS[dtype], 8000)
    if not PRESETS[name].element.has_nan:  # it raises there
        x = x[~np.isnan(x.astype(np.float32)).any(axis=1)]
    same(x[None], name, lambda x: libraries.gfloat_mx(x, element), record_property)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_numbers(element: str, rounding: str, record_property: Record) -> None:
    import gfloat
    from gfloat import formats

    kind = getattr(formats, f"format_info_ocp_{element}")
    x = inputs.numbers(inputs.generator("gfloat", element, rounding), inputs.FLOATS["f32"], 20_000)
    with np.errstate(invalid="ignore"):
        x = x[~np.isnan(x)]
        wide = x.astype(np.float64)
    mode = gfloat.RoundMode[ROUNDINGS[rounding]]
    theirs = gfloat.encode_ndarray(kind, gfloat.round_ndarray(kind, wide, mode, True))
    record_property("numbers", x.size)
    wrong = encode(x, element, rounding=rounding) != theirs
    assert not wrong.any(), f"{x[wrong][:5].view(np.uint32)}; {inputs.REPEAT}"
