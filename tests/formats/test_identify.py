"""`identify` names the preset of every recording of a library, and says where others depart."""

import json
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import E8M0, PRESETS, BlockFormat, identify, layout, quantize
from flamia_ref.formats.diagnosis.ordinary import Facts, ordinary_form
from flamia_ref.formats.diagnosis.steps import Step
from flamia_ref.formats.scalar import FP32
from tests.formats import comparison
from tests.formats.stored import oracle, presets

Codes = npt.NDArray[np.uint8]

# One of each library, and each kind of recording: codes, values, NVFP4 with and without a tensor scale.
DAILY = (
    "mx-compressed_tensors-0.20.1-e2m3",
    "mx-deepgemm-54e22612-e2m1-ue8m0",
    "mx-gfloat-0.5.2-e2m1",
    "mx-jax-0.10.2-e4m3-scaled_dot",
    "mx-microxcaling-7bc41952-e2m1-nearest-flush",
    "mx-modelopt-0.47.0-e4m3",
    "mx-quark-0.13-e2m1-floor",
    "mx-qwix-0.1.8-mxfp4",
    "mx-torchao-0.18.0-e3m2-even",
    "mx-triton_kernels-018a674f-e5m2-round_up",
    "mx-vllm_torch_fallback-00134422-e4m3",
    "nvfp4-qwix-0.1.8-nvfp4",
    "nvfp4-te_ref-d0067d0d-16x16",
    "nvfp4-torchao-0.18.0-two_level",
)


def every(chosen: tuple[str, ...] = DAILY) -> list[Any]:
    """All recordings, those not chosen in the nightly run."""
    return [
        name if name in chosen else pytest.param(name, marks=pytest.mark.nightly)
        for name in presets()
    ]


def outputs(recording: str, dtype: str) -> list[tuple[npt.NDArray[Any], Codes, npt.NDArray[Any]]]:
    """x, codes and scales of a recording, a tensor at a time.

    Where it has values, the codes are those of value over scale, which is exact; where it has no
    scales, these are the preset's. What a recording does not show is that of the preset: the sign
    of zeros of Transformer Engine's reference, blocks at which gfloat raised.
    """
    block_format = PRESETS[presets()[recording]]
    x, _ = comparison.values(recording, dtype)
    recorded = oracle(recording)
    found = []
    for index, one in enumerate([x] if x.ndim == 2 else x):
        made = quantize(one, block_format)
        rows = made.block[0]
        scales = np.repeat(made.scales, rows, axis=-2) if rows > 1 else made.scales
        if f"scale_codes_{dtype}" in recorded:
            scales = recorded[f"scale_codes_{dtype}"]
            scales = (scales if x.ndim == 2 else scales[index]).reshape(
                made.scales.shape[0] * rows, -1
            )
        if f"element_codes_{dtype}" in recorded:
            codes = recorded[f"element_codes_{dtype}"]
            codes = codes if x.ndim == 2 else codes[index]
        else:
            codes = codes_of_values(
                recorded[f"dequant_f32_bits_{dtype}"], made.codes, scales, block_format
            )
        if block_format.name.startswith("te-nvfp4"):
            codes = np.where((codes | made.codes) & 7 == 0, made.codes, codes)
        shown = recorded.get(f"ok_{dtype}")
        if shown is not None:
            one, codes, scales = one[shown], codes[shown], scales[shown]
        found.append((one, codes, scales))
    return found


def codes_of_values(
    value_bits: npt.NDArray[np.uint32],
    own: Codes,
    scales: npt.NDArray[Any],
    block_format: BlockFormat,
) -> Codes:
    """Codes of values, by division of float64 and a search in the table; those of the preset for NaN and infinities."""
    element = block_format.element
    table = element.table()
    if block_format.scale == FP32:
        scale = scales.view(np.float32).astype(np.float64)
    else:
        assert block_format.scale == E8M0
        scale = block_format.scale.table()[scales]
    values = value_bits.view(np.float32)
    with np.errstate(all="ignore"):
        quotient = values / np.repeat(scale, values.shape[-1] // scale.shape[-1], axis=-1)
    codes = np.arange(len(table))
    finite = np.isfinite(table)
    nearest = np.abs(quotient[..., None] - table[finite]).argmin(axis=-1)
    found = codes[finite][nearest].astype(np.uint8)
    magnitude = found & (element.sign_code - 1)
    signed = magnitude | np.where(np.signbit(values), element.sign_code, 0)
    return np.where(np.isfinite(quotient), signed, own).astype(np.uint8)


@pytest.mark.parametrize("recording", every())
def test_the_preset_of_a_recording_is_named(recording: str) -> None:
    named(recording, "f32", step=9)


@pytest.mark.parametrize("recording", every(DAILY[::4]))
def test_the_preset_of_a_recording_in_bfloat16_is_named(recording: str) -> None:
    named(recording, "bf16", step=9)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("recording", [name for name in presets() if name.startswith("nvfp4")])
def test_the_preset_of_every_tensor_is_named(recording: str, dtype: str) -> None:
    named(recording, dtype, step=1)


def named(recording: str, dtype: str, *, step: int) -> None:
    """Of every `step`-th tensor of a recording the preset is named, where it claims any block of it."""
    name = presets()[recording]
    found = [identify(*tensor) for tensor in outputs(recording, dtype)[::step]]
    said = [one for one in found if name not in one.silent]
    assert said
    assert all(name in one.explained_by for one in said)
    assert all(one.exit_code == 0 for one in said)


@pytest.mark.parametrize(
    "recording",
    [
        "mx-torchao-0.18.0-e2m1-rceil",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("mx-gfloat-0.5.2-e4m3", "mx-deepgemm-54e22612-e4m3-ue8m0")
        ),
    ],
)
def test_the_others_that_are_named_equal_the_recording(recording: str) -> None:
    """By the comparison of whole recordings, which shares no code with `identify`."""
    found = identify(*outputs(recording, "f32")[0])
    for name in found.tried:
        other = PRESETS[name]
        if other.block == (1, 32) and other.scale == E8M0:
            wrong = comparison.compare(recording, "f32", preset=other).wrong
            assert (wrong == 0) == (name in found.explained_by), name


def normal(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_the_first_block_that_departs_and_who_does_the_same() -> None:
    """A kernel that floors the scale of one block, where the others are rounded up."""
    x = normal(16, 64)
    x[5, 32] = 500 / 128
    good, floor = quantize(x, "torchao-mx-rceil-e4m3"), quantize(x, "torchao-mx-floor-e4m3")
    assert good.scales[5, 1] == floor.scales[5, 1] + 1
    codes, scales = good.codes.copy(), good.scales.copy()
    codes[5, 32:], scales[5, 1] = floor.codes[5, 32:], floor.scales[5, 1]
    found = identify(x, codes, scales)
    assert not found.identified
    assert found.exit_code == 1
    near = found.nearest[0]
    family = {near.preset, *near.same}
    assert {"te-mx-e4m3", "torchao-mx-rceil-e4m3"} <= family
    assert (near.explained, near.of, near.at) == (31, 32, (5, 1))
    assert near.scales == (good.scales[5, 1], floor.scales[5, 1])
    different = np.flatnonzero(good.codes[5, 32:] != floor.codes[5, 32:])
    assert near.differing == len(different)
    assert near.element == (0, different[0])
    assert near.codes == (good.codes[5, 32 + different[0]], floor.codes[5, 32 + different[0]])
    assert "torchao-mx-floor-e4m3" in near.like
    assert near.why is not None
    assert near.why.step is Step.SCALE_ROUNDING
    assert (near.preset, near.like[0]) == ("torchao-mx-rceil-e4m3", "torchao-mx-floor-e4m3")
    assert near.sentence in found.to_text()
    assert json.loads(found.to_json())["nearest"][0]["at"] == [5, 1]


def test_a_fault_that_no_preset_has() -> None:
    x = normal(8, 32)
    made = quantize(x, "te-mx-e4m3")
    codes = made.codes.copy()
    codes[3, 7] ^= 1
    near = identify(x, codes, made.scales).nearest[0]
    assert (near.at, near.element, near.differing) == ((3, 0), (0, 7), 1)
    assert near.codes == (made.codes[3, 7], codes[3, 7])
    assert near.like == ()
    assert "No preset gives that" in near.sentence


def test_a_fault_outside_of_the_sample_is_found() -> None:
    """In a tensor with more blocks than are sampled, each block is looked at in the end."""
    x = normal(512, 128)
    made = quantize(x, "te-mx-e4m3")
    for place in [(0, 1), (201, 77), (500, 127)]:
        codes = made.codes.copy()
        codes[place] ^= 1
        found = identify(x, codes, made.scales)
        assert found.sampled < found.blocks
        assert not found.identified
        assert found.nearest[0].at == (place[0], place[1] // 32)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("te-mx-e4m3", (32, 32)),
        ("te-mx-e4m3", ("all", 1)),
        ("te-nvfp4", (16, 1)),
        ("te-nvfp4-rht", None),
        ("te-nvfp4-rowscaled", None),
        ("flamia-fp4-e8m0", None),
        ("quark-mx-ceil-e2m1", None),
    ],
)
def test_blocks_of_every_form(name: str, block: Any) -> None:
    x = normal(2, 32, 64, seed=3)
    made = quantize(x, name, block=block)
    found = identify(x, made.codes, made.scales, tensor_scale=made.tensor_scale)
    assert name in found.explained_by
    assert made.block in found.block
    assert name in identify(x, made.codes, made.scales, block=block).explained_by


def test_scales_in_floats_and_codes_in_narrow_floats() -> None:
    x = normal(4, 32)
    made = quantize(x, "quark-mx-floor-e4m3")
    floats = made.scales.view(np.float32)
    assert "quark-mx-floor-e4m3" in identify(x, made.codes, floats).explained_by
    made = quantize(x, "te-mx-e4m3")
    codes = made.codes.view(ml_dtypes.float8_e4m3fn)
    scales = made.scales.view(ml_dtypes.float8_e8m0fnu)
    assert "te-mx-e4m3" in identify(x, codes, scales).explained_by
    given = (jnp.asarray(x), jnp.asarray(made.codes), jnp.asarray(made.scales))
    assert identify(*given) == identify(x, made.codes, made.scales)


def test_a_tensor_scale_must_be_that_of_the_preset() -> None:
    x = normal(16, 64)
    made = quantize(x, "te-nvfp4")
    assert made.tensor_scale is not None
    assert "te-nvfp4" in identify(x, made.codes, made.scales).explained_by
    wrong = np.nextafter(made.tensor_scale, np.float32(np.inf))
    found = identify(x, made.codes, made.scales, tensor_scale=wrong)
    assert "te-nvfp4" not in found.explained_by
    near = found.nearest[0]
    assert "te-nvfp4" in (near.preset, *near.same)
    own = quantize(x, near.preset).tensor_scale
    assert own is not None
    assert near.tensor_scales == (own.view(np.uint32), wrong.view(np.uint32))
    assert "but its tensor scale" in found.sentence
    without = quantize(x, "sage3-nvfp4")
    assert "sage3-nvfp4" in identify(x, without.codes, without.scales).explained_by


def test_the_amax_of_a_larger_tensor() -> None:
    x = normal(16, 64)
    made = quantize(x, "te-nvfp4", tensor_amax=16.0)
    assert "te-nvfp4" not in identify(x, made.codes, made.scales).explained_by
    found = identify(x, made.codes, made.scales, tensor_amax=np.float32(16))
    assert "te-nvfp4" in found.explained_by


def test_bit_7_of_a_ue4m3_code_does_not_count() -> None:
    x = normal(2, 16)
    made = quantize(x, "sage3-nvfp4")
    assert "sage3-nvfp4" in identify(x, made.codes, made.scales | 0x80).explained_by


def test_where_a_library_rounds_log2_either_scale_is_explained() -> None:
    x = normal(4, 32)
    x[2, 3] = np.uint32(0x45E00001).view(np.float32)  # 448 2^4, and a unit more
    exact, lower = quantize(x, "torchao-mx-rceil-e4m3"), quantize(x, "torchao-mx-floor-e4m3")
    codes, scales = exact.codes.copy(), exact.scales.copy()
    codes[2], scales[2] = lower.codes[2], lower.scales[2]
    found = identify(x, codes, scales)
    assert "torchao018-mx-rceil-e4m3" in found.explained_by
    assert "torchao-mx-rceil-e4m3" not in found.explained_by
    place = found.explained_by.index("torchao018-mx-rceil-e4m3")
    assert found.not_claimed[place] == 1
    assert "makes no claim for 1" in found.to_text()


def test_presets_with_no_claim_for_the_input_are_said() -> None:
    x = normal(2, 32)
    x[:, 0] = np.nan
    made = quantize(x, "te-nvfp4")
    found = identify(x, made.codes, made.scales)
    assert "te-nvfp4" in found.silent
    assert "te-nvfp4" not in found.explained_by


def some(name: str = "te-mx-e4m3", rows: int = 256, columns: int = 128) -> tuple[Any, Any, Any]:
    x = normal(rows, columns)
    made = quantize(x, name)
    return x, made.codes, made.scales


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, c, s: (x, layout.pack_fp4(c & 15), s), ValueError, "unpack_fp4"),
        (lambda x, c, s: (x, c, layout.tile_scales_128x4(s)), ValueError, "untile_scales_128x4"),
        (lambda x, c, s: (x, c, s[:-1]), ValueError, "no preset has scales of shape"),
        (lambda x, c, s: (x, c[:, :-1], s), ValueError, "codes have shape"),
        (lambda x, c, s: (x[0], c[0], s[0]), ValueError, "rows, columns"),
        (lambda x, c, s: (x[:0], c[:0], s[:0]), ValueError, "no block to identify"),
        (lambda x, c, s: (x, c.astype(np.float32), s), TypeError, "codes are codes"),
        (lambda x, c, s: (x, -c.astype(np.int16), s), ValueError, "from 0 to 255"),
        (lambda x, c, s: (x, c, s.astype(np.float64)), TypeError, "scales are codes"),
        (lambda x, c, s: (x.astype(int), c, s), TypeError, "identify takes"),
    ],
)
def test_bad_input(change: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        identify(*change(*some()))


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="in blocks"):
        identify(*some(), block=(7, 3))
    with pytest.raises(ValueError, match="with a tensor scale"):
        identify(*some(), tensor_scale=np.float32(1))
    with pytest.raises(TypeError, match="tensor_scale is float32"):
        identify(*some("te-nvfp4"), tensor_scale=3)


def one_form(name: str, x: npt.NDArray[np.float32]) -> BlockFormat:
    bits = x.view(np.uint32)
    amax = (bits & 0x7FFFFFFF).reshape(x.shape[0], -1, 32).max(axis=-1)
    return ordinary_form(PRESETS[name].of_input(FP32), Facts.of(bits, amax), FP32)


def test_formats_that_are_taken_for_one_are_one() -> None:
    """Presets with one ordinary form give the same, for values that fill their range of it."""
    rng = np.random.default_rng(4)
    plain = rng.integers(0x21800000, 0x5D800000, (512, 32), np.uint32)  # 2^-60 to 2^60
    plain[:256] = rng.integers(0x3E000000, 0x43000000, (256, 32), np.uint32)
    edges = np.array([448, 7.5, 28, 6, 57344, 1, 1.75, 1e-4], np.float32).view(np.uint32)
    plain[:64, 0] = (edges[:, None] + np.arange(-4, 4)).reshape(-1).astype(np.uint32)
    plain |= rng.integers(0, 2, plain.shape, np.uint32) << np.uint32(31)
    with_zeros = np.where(rng.integers(0, 4, plain.shape) == 0, np.uint32(0), plain)
    with_blocks = np.where(np.arange(512)[:, None] % 9 == 0, np.uint32(0x80000000), with_zeros)
    for bits in (plain, with_zeros, with_blocks):
        x = bits.view(np.float32)
        groups: dict[BlockFormat, list[str]] = {}
        for name, one in PRESETS.items():
            if one.scale == E8M0 and one.block == (1, 32):
                groups.setdefault(one_form(name, x), []).append(name)
        assert bits is not plain or max(map(len, groups.values())) > 5
        for names in groups.values():
            first = quantize(x, names[0])
            for name in names[1:]:
                other = quantize(x, name)
                np.testing.assert_array_equal(other.scales, first.scales, f"{names[0]} {name}")
                np.testing.assert_array_equal(other.codes, first.codes, f"{names[0]} {name}")


@pytest.mark.nightly
@pytest.mark.parametrize("largest", [448, 57344, 7.5, 28, 6])
def test_quotients_of_every_mantissa_round_up_to_one_power(largest: float) -> None:
    """amax / max, amax fl(1 / max), amax rcp(max) and the exact quotient: one exponent."""
    amax = np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32)
    one = np.float32(1)
    limit = np.float32(largest)
    exact = np.ceil(np.log2(amax.astype(np.float64) / largest))  # 29 bits more than amax has
    bits = [(amax / limit).view(np.uint32), (amax * (one / limit)).view(np.uint32)]
    for d in bits:
        up = (d >> 23).astype(np.int32) - 127 + ((d & 0x7FFFFF) != 0)
        np.testing.assert_array_equal(up, exact)
    # rcp.approx.ftz.f32 of these is the correctly rounded reciprocal.
    from flamia_ref import _mufu

    assert _mufu.reciprocal_bits(limit.reshape(1).view(np.uint32)) == (one / limit).view(np.uint32)
