"""torchao's own quantizers: MX in four modes and five element formats, NVFP4 of one and two levels."""

from collections.abc import Callable

import pytest

from flamia_ref.formats import PRESETS
from tests.formats.live import inputs, libraries
from tests.formats.live.agreement import same

libraries.need("torch", "torchao")

# In its docstrings, at the first import.
pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")

ELEMENTS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
Record = Callable[[str, object], None]


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil"])
def test_mx(rule: str, element: str, dtype: str, record_property: Record) -> None:
    name = f"torchao018-mx-{rule}-{element}"
    x = inputs.blocks(inputs.generator(name, dtype), inputs.FLOATS[dtype], 16_000)
    same(x[None], name, lambda x: libraries.torchao_mx(x, rule, element), record_property)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("name", "levels"), [("torchao-nvfp4", 2), ("torchao-nvfp4-onelevel", 1)])
def test_nvfp4(name: str, levels: int, dtype: str, record_property: Record) -> None:
    x = inputs.tensors(inputs.generator(name, dtype), inputs.FLOATS[dtype], 256)
    for tensors in (x, inputs.joined(x)):
        same(tensors, name, lambda x: libraries.torchao_nvfp4(x, levels), record_property)


def test_the_presets_are_of_this_version() -> None:
    of_release = [preset for name, preset in PRESETS.items() if name.startswith("torchao018")]
    assert len(of_release) == 20
    of_release += [PRESETS["torchao-nvfp4"], PRESETS["torchao-nvfp4-onelevel"]]
    assert {preset.version for preset in of_release} == {libraries.VERSIONS["torchao"]}
