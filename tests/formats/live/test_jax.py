"""The quantizers of jax.nn.scaled_matmul, as they are run eagerly on CPU."""

from collections.abc import Callable

import pytest

from flamia_ref.formats import PRESETS
from tests.formats.live import inputs, libraries
from tests.formats.live.agreement import same

libraries.need("jax")

Record = Callable[[str, object], None]


@pytest.mark.parametrize("dtype", libraries.daily(("f32", "bf16"), "f32"))
def test_mx(dtype: str, record_property: Record) -> None:
    for count in (64, 12_000):  # XLA compiles reductions of few rows in another way
        x = inputs.blocks(inputs.generator("jax-mx", dtype), inputs.FLOATS[dtype], count)
        same(x[None], "jax-mx-e4m3", libraries.jax_mx, record_property)


@pytest.mark.parametrize("dtype", libraries.daily(("f32", "bf16"), "bf16"))
def test_nvfp4(dtype: str, record_property: Record) -> None:
    x = inputs.tensors(inputs.generator("jax-nvfp4", dtype), inputs.FLOATS[dtype], 160)
    for tensors in (x, inputs.joined(x)):
        same(tensors, "jax-nvfp4", libraries.jax_nvfp4, record_property)


def test_the_presets_are_of_this_version() -> None:
    for name in ("jax-mx-e4m3", "jax-nvfp4"):
        assert PRESETS[name].version == libraries.VERSIONS["jax"]
