"""That the live comparison sees what it should: other presets stand in for a library."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flamia_ref.formats import PRESETS, quantize
from tests.formats.live import inputs, libraries
from tests.formats.live.agreement import same
from tests.repository.layout import project

CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("torchao018-mx-floor-e4m3", {"rule": "ceil"}),
    ("torchao018-mx-floor-e4m3", {"scale_values": ((255, float("inf")),)}),
    ("torchao018-mx-floor-e2m1", {"nan_element": "code"}),
    ("torchao018-mx-even-e4m3", {"even_bits": 2}),
    ("torchao018-mx-rceil-e3m2", {"quotient": "amax * 1.0000002 / 28"}),
    ("gfloat-mx-e2m3", {"rounding": "nearest_away"}),
    ("gfloat-mx-e5m2", {"zero_sign": "plus"}),
    ("jax-mx-e4m3", {"subnormals": "keep"}),
    ("torchao-nvfp4", {"quotient": "amax / (6 * tensor_scale)"}),
    ("torchao-nvfp4", {"scaled": "x / (scale * tensor_scale)"}),
    ("torchao-nvfp4", {"scale_range": None}),
    ("torchao-nvfp4", {"tensor_scale": "tensor_amax * (1 / 2688)"}),
    ("torchao-nvfp4-onelevel", {"scaled": "x / scale"}),
    ("jax-nvfp4", {"prepared": "x / tensor_scale"}),
]


def standing_in(change: dict[str, Any], name: str) -> Callable[[Any], libraries.Encoded]:
    """A library that quantizes by a preset with a change."""

    def encode(x: Any) -> libraries.Encoded:
        tensor = quantize(x, dataclasses.replace(PRESETS[name], **change))
        return libraries.Encoded(tensor.codes, tensor.scales, tensor.tensor_scale)

    return encode


def some(name: str, dtype: str = "f32") -> Any:
    """Input for a preset, the same in every run."""
    rng = np.random.default_rng(17)
    if "nvfp4" in name:
        return inputs.tensors(rng, inputs.FLOATS[dtype], 44)
    return inputs.blocks(rng, inputs.FLOATS[dtype], 8000)[None]


DAILY = [CHANGES[place] for place in (0, 3, 6, 7, 9)]  # a rule, a policy of each sort, a chain


@pytest.mark.parametrize(("name", "change"), libraries.daily(CHANGES, *DAILY), ids=str)
def test_another_rule_is_seen(name: str, change: dict[str, Any]) -> None:
    counts: dict[str, Any] = {}
    same(some(name), name, standing_in({}, name), counts.__setitem__)
    assert counts["blocks"] > 500
    with pytest.raises(AssertionError, match=f"{name}: .* differ.*FLAMIA_LIVE_SEED="):
        same(some(name), name, standing_in(change, name), counts.__setitem__)


def test_the_smallest_input_is_shown() -> None:
    name = "torchao018-mx-floor-e4m3"
    x = np.full((1, 3, 32), 1.5, np.float32)
    x[0, 1, 7] = 449.0  # beyond 448: by another rule the scale is the next one

    def one_more(x: Any) -> libraries.Encoded:
        tensor = quantize(x, name)
        beyond = (np.abs(x).max(axis=1, keepdims=True) > 448).astype(np.uint8)
        return libraries.Encoded(tensor.codes, tensor.scales + beyond)

    with pytest.raises(AssertionError) as found:
        same(x, name, one_more, lambda *_: None)
    _, *lines = str(found.value).splitlines()
    assert lines == [
        "x of shape (1, 32), zeros but for:",
        "  [0, 7] = 0x43e08000 (449.0): code 0x7e, library 0x7e; scale 0x7f, library 0x80",
    ]


def test_blocks_out_of_contract_are_not_compared() -> None:
    name, counts = "torchao-nvfp4", {}
    x = np.ones((2, 4, 64), np.float32)
    x[1, 0, 0] = np.nan

    def library(x: Any) -> libraries.Encoded:
        tensor = quantize(x, name)
        return libraries.Encoded(tensor.codes ^ np.isnan(x).any(), tensor.scales)

    same(x, name, library, counts.__setitem__)
    assert counts == {"blocks": 16, "outside": 16}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_inputs_hold_every_kind_of_number(dtype: str) -> None:
    kind, rng = inputs.FLOATS[dtype], np.random.default_rng(3)
    width = 8 * np.dtype(kind.dtype).itemsize
    for x in (inputs.blocks(rng, kind, 4000), inputs.tensors(rng, kind, 300)):
        patterns = x.view(f"uint{width}").astype(np.int64)
        fields = (patterns & kind.infinity) >> kind.mantissa
        assert set(fields.ravel().tolist()) == set(range(256))
        assert (patterns == 0).any()
        assert (patterns == 1 << (width - 1)).any()
        rest = patterns & ((1 << kind.mantissa) - 1)
        assert ((fields == 0) & (rest != 0)).any()
        assert ((fields == 255) & (rest == 0)).any()
        assert ((fields == 255) & (rest != 0)).any()
        blocks = np.isfinite(x.astype(np.float32)).reshape(-1, 32).all(axis=1)
        assert blocks.mean() > 0.5


def test_input_repeats_by_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = inputs.FLOATS["f32"]
    monkeypatch.setattr(inputs, "SEED", 5)
    one, other = (inputs.numbers(inputs.generator(n), kind, 9).view(np.uint32) for n in "ab")
    again = inputs.numbers(inputs.generator("a"), kind, 9).view(np.uint32)
    assert (one == again).all()
    assert (one != other).any()
    monkeypatch.setattr(inputs, "SEED", 6)
    assert (inputs.numbers(inputs.generator("a"), kind, 9).view(np.uint32) != one).any()


def test_the_extra_installs_the_versions_compared() -> None:
    extra = project()["project"]["optional-dependencies"]["libraries"]
    pins = dict(requirement.split("==") for requirement in extra)
    assert pins == {name: libraries.VERSIONS[name] for name in ("torch", "torchao", "gfloat")}


def test_another_version_is_skipped_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.VERSIONS, "numpy", "0.1")
    monkeypatch.setitem(libraries.VERSIONS, "no-such-package", "0.1")
    monkeypatch.delenv("FLAMIA_LIVE_REQUIRED", raising=False)
    for name in ("numpy", "no-such-package"):
        with pytest.raises(pytest.skip.Exception, match=r"compared in 0\.1: make live installs it"):
            libraries.need(name)
    monkeypatch.setenv("FLAMIA_LIVE_REQUIRED", "1")
    with pytest.raises(RuntimeError, match="numpy is "):
        libraries.need("numpy")
