"""Every preset against the recording of its library, bit by bit, wherever it claims to equal it."""

import dataclasses
import functools
import importlib.util
import math
from typing import Any

import numpy as np
import pytest

from flamia_ref.formats import PRESETS, BlockFormat, NanPolicy, Rounding, in_contract, quantize
from tests.formats import points
from tests.formats.comparison import DTYPES, Comparison, compare
from tests.formats.stored import presets
from tests.repository.layout import ROOT

RECORDINGS = presets()
BY_PRESET = {preset: recording for recording, preset in RECORDINGS.items()}
JAX_MX = BY_PRESET["jax-mx-e4m3"]


@functools.cache
def found(recording: str, dtype: str) -> Comparison:
    return compare(recording, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recording", RECORDINGS)
def test_every_preset_equals_its_recording(recording: str, dtype: str) -> None:
    result = found(recording, dtype)
    assert result.wrong == 0, result.wrong_tags
    assert result.compared >= 1500


def test_every_recorded_preset_is_measured() -> None:
    for name, preset in PRESETS.items():
        recorded = name in BY_PRESET or name == "jax-mx-jit-e4m3"  # by other keys of a file
        # Of Transformer Engine's NVFP4 the reference is recorded, not the kernel that it stands for.
        expected = recorded and not name.startswith("te-nvfp4")
        assert (preset.evidence == "measured") == expected, name


def test_what_jax_does_differently_under_jit() -> None:
    """One rule: a scale of code 0 is not flushed to zero there, and elements are not divided by 0."""
    eager, compiled = PRESETS["jax-mx-e4m3"], PRESETS["jax-mx-jit-e4m3"]
    same = dataclasses.replace(compiled, scale_values=eager.scale_values)
    assert dataclasses.replace(same, name=eager.name, source=eager.source) == eager
    for dtype in DTYPES:
        assert compare(JAX_MX, f"{dtype}_jit", preset=compiled).wrong == 0
        eagerly = compare(JAX_MX, f"{dtype}_jit")
        assert (eagerly.differs & eagerly.recorded).sum() == 231  # of 2043 blocks


# docs/presets.md


def made_page() -> Any:
    spec = importlib.util.spec_from_file_location("presets", ROOT / "docs" / "presets.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_from_the_presets_and_the_recordings() -> None:
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    results = [[found(recording, dtype) for dtype in DTYPES] for recording in RECORDINGS]
    assert made_page().page(results) == page, "run python docs/presets.py"
    assert "blocks compared: all equal.\n" in page


def test_the_page_says_what_differs() -> None:
    script = made_page()
    other = dataclasses.replace(PRESETS["torchao018-mx-floor-e4m3"], rule="ceil")
    good = [found(BY_PRESET["gfloat-mx-e4m3"], dtype) for dtype in DTYPES]
    bad = [compare(BY_PRESET["torchao018-mx-floor-e4m3"], dtype, preset=other) for dtype in DTYPES]
    assert script.all_equal([good])
    assert not script.all_equal([good, bad])
    assert "all equal" in script.comparison_section([good])
    section = script.comparison_section([good, bad])
    assert f"**{bad[0].wrong}**" in section
    assert f"**{bad[0].wrong + bad[1].wrong} blocks differ**" in section


# what is left out


def beside_powers(preset: BlockFormat) -> set[str]:
    """What the blocks are for that a preset built on log2 may leave out."""
    beside = "_up" if preset.scale_rounding is Rounding.UP or preset.rule == "ceil" else "_dn"
    largest = {"e4m3": "448", "e5m2": "57344", "e2m3": "7.5", "e3m2": "28", "e2m1": "6"}
    if preset.rule != "quotient":
        return {f"pow2{beside}"} | ({"f32max"} if beside == "_dn" else set())
    same = {"448", "57344", "28"} if preset.element.name in ("e4m3", "e5m2", "e3m2") else set()
    edges = {f"max{value}{beside}" for value in same | {largest[preset.element.name]}}
    mantissa = {"e4m3": "1.75", "e5m2": "1.75", "e3m2": "1.75", "e2m3": "1.875", "e2m1": "1.5"}
    return edges | {f"mant{mantissa[preset.element.name]}"}


BY_LOG2 = sorted(name for name in BY_PRESET if PRESETS[name].by_log2)
VALUES_DO_NOT_SHOW = {"quark-mx-ceil-e4m3", "quark-mx-ceil-e5m2"}


@pytest.mark.parametrize("name", BY_LOG2)
def test_what_log2_excludes_is_excluded_for_a_reason(name: str) -> None:
    """Some excluded block differs; nothing is excluded but what was made to lie beside a power of two."""
    preset = PRESETS[name]
    result = found(BY_PRESET[name], "f32")
    outside = result.recorded & ~result.inside
    tags = set(result.tags[outside.any(axis=1)].tolist())
    allowed = beside_powers(preset)
    if name.startswith("qwix"):  # an error of either sign, at the powers themselves too
        middles = {f"mid_{element}" for element in ("e4m3", "e5m2", "e3m2", "e2m1")}
        allowed |= {tag.replace("_up", end) for tag in allowed for end in ("", "_dn")} | middles
        allowed |= set() if preset.nan_in_contract else {"naninf"}
    if name.startswith("microxcaling-mx-floor"):  # of elements as well
        allowed |= {tag for tag in result.tags.tolist() if tag.startswith("mid_")}
    assert tags <= allowed
    # The values of a wide element are the same under either scale.
    assert (result.differing_outside > 0) == (name not in VALUES_DO_NOT_SHOW)
    narrow = found(BY_PRESET[name], "bf16")
    assert narrow.outside == (0 if preset.nan_in_contract else 8)


@pytest.mark.parametrize("name", BY_LOG2)
def test_few_inputs_are_excluded(name: str) -> None:
    """Of 2^23 in a binade few, and these beside a power of two of what log2 is taken of.

    A correctly rounded log2 of a float32 misleads within 2^-18 ln 2 of the largest powers: 44.4 units
    in the last place below them, 22.2 above. The contract leaves out 1.2 times that; of a ratio of
    two logarithms the power itself and 64 units on either side.
    """
    preset = PRESETS[name]
    top = preset.element.max if preset.rule == "quotient" else 1.0
    up = preset.rule == "ceil" or preset.scale_rounding == "up"
    units = 1.2 * 2.0**-18 * math.log(2) * 2.0 ** (23 if up else 24)
    # In units of amax, which are the smaller the larger its mantissa is at the power.
    mantissa = top / 2.0 ** math.floor(math.log2(top))
    largest = (64 + 32) * mantissa + 1 if name.startswith("qwix") else units * mantissa
    fields = np.arange(40, 254, 23, dtype=np.uint32)
    edge = np.float32(top).view(np.uint32) & np.uint32(0x7FFFFF)
    near = np.arange(-200, 201).astype(np.uint32)
    beside = ((fields[:, None] << np.uint32(23)) | edge) + near
    x = np.zeros((*beside.shape, 32), np.float32)
    x[..., 5] = beside.view(np.float32)
    outside = ~in_contract(x, preset)[..., 0]
    assert outside.any()
    assert outside.sum(axis=1).max() <= largest
    assert not outside[:, [0, -1]].any()
    if not name.startswith("microxcaling-mx-floor"):  # which asks for the log2 of each element
        random = np.random.default_rng(4).integers(0, 1 << 23, (4000, 32), dtype=np.uint32)
        far = (np.abs(random.astype(np.int64) - edge) > 200) & (random < (1 << 23) - 200)
        random = random[(far & (random > 200)).all(axis=1)] | np.uint32(120 << 23)
        assert len(random) > 3800
        assert in_contract(random.view(np.float32), preset).all()


@pytest.mark.parametrize(
    "name",
    # What XLA does with a NaN depends on the number of rows, of which the recordings have one
    # (tests/formats/live/test_jax.py sees several).
    sorted(
        name
        for name in BY_PRESET
        if not PRESETS[name].nan_in_contract and not name.startswith("jax-")
    ),
)
def test_blocks_with_a_nan_are_excluded_for_a_reason(name: str) -> None:
    results = [found(BY_PRESET[name], dtype) for dtype in DTYPES]
    assert sum(result.differing_outside for result in results) > 0
    if not PRESETS[name].by_log2:
        tags = {tag for r in results for tag in r.tags[~r.inside.all(axis=_rest(r))].tolist()}
        assert tags <= {"naninf", "one_nan", "f32max"}
        # f32max is infinite in bfloat16, where that is no contract either.
        assert ("f32max" in tags) == (name == "compressedtensors-mx-e2m1")


def _rest(result: Comparison) -> tuple[int, ...]:
    return tuple(range(1, result.inside.ndim))


def test_contract_of_tensors_rows_and_blocks() -> None:
    x = points.narrow_range(3 * 64, 9).reshape(3, 64).view(np.float32).copy()
    x[1, 20] = np.nan
    of_tensor, of_row = "te-nvfp4", "te-nvfp4-rowscaled"
    assert not in_contract(x, of_tensor).any()
    rows = in_contract(x, of_row)
    assert rows.tolist() == [[True] * 4, [False] * 4, [True] * 4]
    block = [[True] * 4, [True, False, True, True], [True] * 4]
    assert in_contract(x, of_tensor, tensor_amax=1.0).tolist() == block
    assert in_contract(x, "te-nvfp4-pow2").tolist() == block
    assert in_contract(x, "te-mx-e4m3").tolist() == [[True] * 2] * 3
    assert in_contract(x[:, :32], "te-mx-e4m3", block=(32, 1)).shape == (1, 32)
    with pytest.raises(ValueError, match="takes whole blocks"):
        in_contract(x[:, :20], of_tensor)
    with pytest.raises(ValueError, match="unknown preset"):
        in_contract(x, "te-nvfp5")


def test_contract_of_other_input_types() -> None:
    x = points.narrow_range(2 * 64, 9).reshape(2, 64).view(np.float32).astype(np.float64)
    x[0, 0] = 2.0**60 - 2.0**36  # a unit below, which is more than all others
    x[0, 1:32] = 0
    assert in_contract(x, "gfloat-mx-e4m3").tolist() == [[False, True], [True, True]]
    assert in_contract(x.T.copy().T, "gfloat-mx-e4m3", block=(1, 32)).sum() == 3
    assert in_contract(x.T, "gfloat-mx-e4m3", block=(32, 1)).T.sum() == 3


# that the comparison sees what it should


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("torchao018-mx-floor-e4m3", {"rule": "ceil"}),
    ("torchao018-mx-even-e4m3", {"even_bits": 2}),
    ("torchao018-mx-floor-e4m3", {"scale_values": ((255, math.inf),)}),
    ("torchao018-mx-floor-e2m1", {"nan_element": "code"}),
    ("triton-mx-roundup-e4m3", {"zero_scale": None}),
    ("triton-mx-roundup-e4m3", {"nan_scale": 255}),
    ("deepgemm-mx-e2m1", {"rounding": "nearest_even"}),
    ("deepgemm-mx-e4m3", {"smallest_amax": 0.0}),
    ("modelopt-mx-e2m1", {"zero_sign": "keep"}),
    ("microxcaling-mx-nearest-e2m1", {"rounding": "nearest_even"}),
    ("microxcaling-mx-nearest-e4m3", {"half_added": False}),
    ("microxcaling-mx-even-flush-e4m3", {"zero_below": 0.0}),
    ("quark-mx-even-e4m3", {"even_overflow": False}),
    ("jax-mx-e4m3", {"subnormals": "keep"}),
    ("jax-nvfp4", {"prepared": "x / tensor_scale"}),
    ("te-nvfp4", {"quotient": "tensor_scale * (amax / 6)"}),
    ("te-nvfp4", {"scaled": "x / (scale / tensor_scale)"}),
    ("te-nvfp4-2d", {"block": (1, 16), "blocks": ((1, 16),)}),
    ("te-nvfp4-rowscaled", {"tensor_extent": "tensor"}),
    ("te-nvfp4-rht", {"signs": (1,) * 16}),
    ("te-nvfp4-4over6-mae", {"choice": "mse"}),
    ("te-nvfp4-pow2", {"scale_rounding": "nearest_even"}),
    ("modelopt-nvfp4", {"tensor_scale": "tensor_amax * (1 / 2688)"}),
    ("torchao-nvfp4", {"scale_range": None}),
    ("vllm-nvfp4-reference", {"zero_sign": "keep"}),
    ("qwix018-mx-e4m3", {"smallest_quotient": 0.0}),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=str)
def test_another_rule_is_seen(name: str, change: dict[str, Any]) -> None:
    other = dataclasses.replace(PRESETS[name], **change)
    assert sum(compare(BY_PRESET[name], dtype, preset=other).wrong for dtype in DTYPES) > 0


def test_one_bit_of_a_recording_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of scale codes, element codes, values, tensor scales and transformed inputs."""
    from tests.formats import comparison

    whole = comparison.oracle
    for name, key in (
        ("te-nvfp4", "scale_codes_f32"),
        ("torchao018-mx-floor-e5m2", "element_codes_f32"),
        ("quark-mx-even-e4m3", "scale_f32_bits_f32"),
        ("microxcaling-mx-even-e4m3", "dequant_f32_bits_f32"),
        ("modelopt-nvfp4", "global_scale_bits_f32"),
        ("te-nvfp4-rht", "rht_f32_bits_f32"),
    ):
        arrays = whole(BY_PRESET[name])
        changed = arrays[key].copy()
        changed.ravel()[7 if changed.size > 19 else 3] ^= changed.dtype.type(1)
        with monkeypatch.context() as patch:
            patch.setattr(comparison, "oracle", lambda _, new=arrays | {key: changed}: new)
            assert compare(BY_PRESET[name], "f32").wrong >= 1, key


# presets without a recording


def test_torchao_before_and_after_its_release() -> None:
    """36027d8 differs from 0.18.0, which was recorded, in four things its source shows, and in nothing else."""
    for rule in ("floor", "ceil", "even"):
        for element in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"):
            released = PRESETS[f"torchao018-mx-{rule}-{element}"]
            newer = PRESETS[f"torchao-mx-{rule}-{element}"]
            fields = ("infinity_scale", "scale_values", "even_overflow", "nan_block_code")
            texts = ("name", "source", "version", "evidence", "nan_codes")
            same = {key: getattr(released, key) for key in (*fields, *texts)}
            assert dataclasses.replace(newer, **same) == released


def test_presets_of_one_rule_agree() -> None:
    """Transformer Engine, torchao RCEIL and DeepGEMM on ordinary numbers: one rule, written three ways."""
    x = points.narrow_range(500 * 32, 12).reshape(500, 32).view(np.float32)
    one = quantize(x, "te-mx-e4m3")
    for name in ("torchao-mx-rceil-e4m3", "triton-mx-roundup-e4m3", "cudnn-mx-e4m3"):
        other = quantize(x, name)
        np.testing.assert_array_equal(other.codes, one.codes)
        np.testing.assert_array_equal(other.scales, one.scales)


def test_a_nan_policy_shows_in_every_recording_with_a_nan() -> None:
    policies = {PRESETS[name].nan for name in BY_PRESET}
    assert policies == set(NanPolicy)
