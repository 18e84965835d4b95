"""`identify` names the preset of every recording of a library, and says where others depart."""

import dataclasses
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

# Each kind of recording: rows left out where the library raised, float32 scales, NVFP4.
DAILY = (
    "mx-gfloat-0.5.2-e2m1",
    "mx-quark-0.13-e2m1-floor",
    "nvfp4-qwix-0.1.8-nvfp4",
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


@pytest.mark.parametrize("recording", every(("mx-quark-0.13-e2m1-floor",)))
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
        "mx-deepgemm-54e22612-e4m3-ue8m0",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("mx-gfloat-0.5.2-e4m3", "mx-torchao-0.18.0-e2m1-rceil")
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
    x = normal(256, 128)
    made = quantize(x, "te-mx-e4m3")
    for place in [(201, 77)]:
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
        pytest.param("te-nvfp4", (16, 1), marks=pytest.mark.nightly),
        ("te-nvfp4-rht", None),
        pytest.param("te-nvfp4-rowscaled", None, marks=pytest.mark.nightly),
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


def test_a_negative_scale_is_not_that_of_a_preset() -> None:
    """Read as float8_e4m3fn it is negative: no UE4M3 code has bit 7 set, but for the NaN."""
    x = normal(4, 32)
    made = quantize(x, "sage3-nvfp4")
    one = made.scales.copy()
    one[2, 1] |= 0x80
    for scales, count in ((made.scales | 0x80, "8 scales have"), (one, "1 scale has")):
        found = identify(x, made.codes, scales)
        assert found.explained_by == ()
        assert f"{count} bit 7 set" in found.sentence
        cleared = next(note for note in found.notes if "bit 7 of the scales cleared" in note)
        presets = identify(x, made.codes, made.scales).explained_by
        assert "sage3-nvfp4" in presets
        assert all(name in cleared for name in presets[:3])
        assert f"{len(presets) - 3} more" in cleared
    x[1, 3] = np.nan
    made = quantize(x, "flamia-fp4-ue4m3")
    assert made.scales[1, 0] == 0x7F
    scales = made.scales.copy()
    scales[1, 0] = 0xFF
    same = identify(x, made.codes, made.scales).explained_by
    assert "flamia-fp4-ue4m3" in same
    assert identify(x, made.codes, scales).explained_by == same


def test_codes_of_32_bits_are_not_cut() -> None:
    x, codes, scales = some()
    with pytest.raises(ValueError, match="from 0 to 255"):
        identify(x, codes.astype(np.uint32) + 256, scales)
    assert identify(x, codes.astype(np.uint32), scales).identified


def test_the_nearest_explains_the_most() -> None:
    """Two faults that the sample may miss: the presets with one of them explain less."""
    x = normal(256, 128)
    x[3, 5] = -0.0
    made = quantize(x, "te-nvfp4")
    codes = made.codes.copy()
    codes[7, 20] ^= 1
    found = identify(x, codes, made.scales, tensor_scale=made.tensor_scale)
    assert found.sampled < found.blocks
    near = found.nearest[0]
    assert "te-nvfp4" in (near.preset, *near.same)
    assert (near.explained, near.of, near.at) == (2047, 2048, (7, 1))
    assert [one.explained for one in found.nearest] == sorted(
        (one.explained for one in found.nearest), reverse=True
    )


@pytest.mark.parametrize(
    ("name", "of"),
    [("te-nvfp4", 16), pytest.param("torchao-mx-rceil-e2m1", 32, marks=pytest.mark.nightly)],
)
def test_a_code_that_fp4_lacks_is_named(name: str, of: int) -> None:
    x = normal(64, 64)
    made = quantize(x, name)
    codes = made.codes.copy()
    codes[5, 5] = 0x1F
    found = identify(x, codes, made.scales)
    assert not found.identified
    assert "1 code is over 15, the largest of FP4: the first is 31 (0x1f) at [5, 5]" in found.notes
    near = found.nearest[0]
    assert PRESETS[near.preset].element.name == "e2m1"
    assert (near.explained, near.at) == (64 * 64 // of - 1, (5, 0))
    assert near.codes == (made.codes[5, 5], 0x1F)


def test_only_presets_with_that_tensor_scale_are_the_same() -> None:
    x = normal(16, 64)
    made = quantize(x, "jax-nvfp4")
    own = made.tensor_scale
    assert own is not None
    wrong = np.nextafter(own, np.float32(1))
    near = identify(x, made.codes, made.scales, tensor_scale=wrong).nearest[0]
    assert near.tensor_scales == (own.view(np.uint32), wrong.view(np.uint32))
    assert "jax-nvfp4" in (near.preset, *near.same)
    for name in (near.preset, *near.same):
        scale = quantize(x, name).tensor_scale
        assert scale is not None
        assert scale.view(np.uint32) == own.view(np.uint32)


def test_scales_in_float32_that_are_powers_are_tried_as_codes() -> None:
    x, codes, scales = some(rows=32)
    found = identify(x, codes, np.exp2(scales.astype(np.float32) - 127))
    assert not found.identified
    assert any("as E8M0 codes" in note and "-mx-e4m3" in note for note in found.notes)
    first = found.nearest[0]
    number = f"scale {2.0 ** (int(first.scales[0] >> 23) - 127)}, given"
    assert number in first.sentence


@pytest.mark.parametrize(
    "name", ["te-nvfp4", pytest.param("torchao-mx-rceil-e2m1", marks=pytest.mark.nightly)]
)
def test_swapped_pairs_of_codes_are_named(name: str) -> None:
    x = normal(32, 64)
    made = quantize(x, name)
    swapped = made.codes.reshape(32, -1, 2)[..., ::-1].reshape(32, 64)
    found = identify(x, swapped, made.scales, tensor_scale=made.tensor_scale)
    note = next(note for note in found.notes if "the codes of each pair swapped" in note)
    assert note in found.sentence
    assert name.split("-")[0] in note or "more" in note
    assert PRESETS[found.nearest[0].preset].element.name == "e2m1"


@pytest.mark.nightly
def test_x_rounded_first_is_named() -> None:
    x = normal(32, 64)
    made = quantize(x.astype(ml_dtypes.bfloat16), "te-mx-e4m3")
    found = identify(x, made.codes, made.scales)
    assert not found.identified
    assert any("if x is rounded to bfloat16 first" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "te-mx-e4m3",
            {"rule": "quotient", "quotient": "amax / 448", "scale_rounding": "toward_zero"},
            "quotient amax / 448 and scale_rounding toward_zero",
        ),
        pytest.param(
            *("te-mx-e4m3", {"rounding": "toward_zero"}, "with rounding toward_zero"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("te-nvfp4", {"zero_sign": "plus"}, "with zero_sign plus"), marks=pytest.mark.nightly
        ),
    ],
)
def test_one_change_of_a_preset_is_named(name: str, changes: Any, words: str) -> None:
    x = normal(32, 64)
    x[3, :4] = [-0.0, -1e-4, 0, 1e-4]
    made = quantize(x, dataclasses.replace(PRESETS[name], name="mine", **changes))
    found = identify(x, made.codes, made.scales)
    assert not found.identified
    assert any(words in note for note in found.notes)


def test_the_block_is_said() -> None:
    x = normal(64, 32)
    made = quantize(x, "te-mx-e4m3", block=(32, 1))
    assert identify(x, made.codes, made.scales).sentence.startswith("All 64 blocks of 32x1 are")


def test_lists_are_taken() -> None:
    x = normal(2, 32)
    made = quantize(x, "te-mx-e4m3")
    found = identify(x.tolist(), made.codes.tolist(), made.scales.tolist())
    assert "te-mx-e4m3" in found.explained_by


@pytest.mark.nightly
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
        (lambda x, c, s: (x, c, s.T), ValueError, "transposed they fit"),
        (lambda x, c, s: (x, c[:, ::2], s), ValueError, "if they are FP4"),
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
    with pytest.raises(ValueError, match="leave tensor_scale out"):
        identify(*some(), tensor_scale=np.float32(1))
    four = some("te-nvfp4")
    with pytest.raises(ValueError, match=r"tensor_scale has shape \(7,\)"):
        identify(*four, tensor_scale=np.ones(7, np.float32))
    with pytest.raises(ValueError, match="tensor_scale has a NaN"):
        identify(*four, tensor_scale=np.float32("nan"))
    with pytest.raises(TypeError, match="tensor_amax takes"):
        identify(*four, tensor_amax="x")
    with pytest.raises(TypeError, match="tensor_amax takes"):
        identify(*four, tensor_amax=1j)
    with pytest.raises(ValueError, match=r"tensor_amax has shape \(3,\)"):
        identify(*four, tensor_amax=np.ones(3))
    with pytest.raises(ValueError, match="no float32 value"):
        identify(*four, tensor_amax=1e39)
    with pytest.raises(TypeError, match="tensor_scale is float32"):
        identify(*some("te-nvfp4"), tensor_scale=3)


def one_form(name: str, x: npt.NDArray[np.float32]) -> BlockFormat:
    bits = x.view(np.uint32)
    amax = (bits & 0x7FFFFFFF).reshape(x.shape[0], -1, 32).max(axis=-1)
    return ordinary_form(PRESETS[name].of_input(FP32), Facts.of(bits, amax), FP32)


@pytest.mark.nightly
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
