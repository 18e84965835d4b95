"""`compare` and `smallest`: the right blocks, the right codes, and the step that makes them.

DISAGREEMENTS are inputs on which real libraries were seen to disagree, each with the scale and the
first codes of both and the step that their sources differ in.
"""

import dataclasses
import itertools
import json
import math
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flamia_ref.formats import PRESETS, BlockFormat, compare, quantize, smallest
from flamia_ref.formats.diagnosis.steps import DATA, Step
from flamia_ref.formats.diagnosis.witness import Kind, Witness

NAN, INF = math.nan, math.inf
LARGEST = float(np.finfo(np.float32).max)
RNE = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
GAMAX = 0x458ECCCD


def bits(*given: int) -> list[float]:
    """The values of float32 bits."""
    return np.array(given, np.uint32).view(np.float32).tolist()


# values, tensor amax (bits), then for each side the preset, its scale code and first element codes.
DISAGREEMENTS: dict[str, tuple[list[float], int | None, Any, Any, Step]] = {
    "floor clips 449": (
        [449, 1],
        None,
        ("te-mx-e4m3", 128, [0x76, 0x30]),
        ("ocp-mx-floor-e4m3", 127, [0x7E, 0x38]),
        Step.SCALE_ROUNDING,
    ),
    "no emax taken off": (
        [449, 1],
        None,
        ("te-mx-e4m3", 128, [0x76, 0x30]),
        ("vllm-mx-fallback-e4m3", 135, [0x3E, 0x02]),
        Step.QUOTIENT,
    ),
    "ceil at 448": (
        [448, 17],
        None,
        ("torchao-mx-rceil-e4m3", 127, [0x7E, 0x58]),
        ("torchao-mx-ceil-e4m3", 128, [0x76, 0x50]),
        Step.QUOTIENT,
    ),
    "mantissa 1.75": (
        [448, 17],
        None,
        ("torchao-mx-floor-e4m3", 127, [0x7E, 0x58]),
        ("compressedtensors-mx-e4m3", 128, [0x76, 0x50]),
        Step.SCALE_RULE,
    ),
    "log2 beside 448 2^4": (
        [*bits(0x45E00001), 1],
        None,
        ("torchao-mx-rceil-e4m3", 132, [0x76, 0x10]),
        ("torchao-mx-floor-e4m3", 131, [0x7E, 0x18]),
        Step.SCALE_ROUNDING,
    ),
    "8 - ulp": (
        [*bits(0x40FFFFFF), 1],
        None,
        ("torchao-mx-floor-e4m3", 121, [0x7E, 0x68]),
        ("torchao-mx-even-e4m3", 122, [0x78, 0x60]),
        Step.SCALE_RULE,
    ),
    "496": (
        [496],
        None,
        ("torchao-mx-floor-e4m3", 127, [0x7E]),
        ("torchao-mx-even-e4m3", 128, [0x78]),
        Step.SCALE_RULE,
    ),
    "zeros, clamped amax": (
        [0],
        None,
        ("te-mx-e4m3", 0, [0]),
        ("deepgemm-mx-e4m3", 105, [0]),
        Step.SMALLEST,
    ),
    "zeros, scale 1": (
        [0],
        None,
        ("te-mx-e4m3", 0, [0]),
        ("qwix018-mx-e4m3", 127, [0]),
        Step.SMALLEST,
    ),
    "zeros, 0 over 0": (
        [0],
        None,
        ("te-mx-e4m3", 0, [0]),
        ("jax-mx-e4m3", 0, [0xFF]),
        Step.SCALE_VALUE,
    ),
    "2^-126 over 2^-126": (
        [2.0**-126],
        None,
        ("torchao-mx-floor-e4m3", 0, [0x40]),
        ("torchao018-mx-floor-e4m3", 0, [0x38]),
        Step.SCALE_VALUE,
    ),
    "2^-126 over 1": (
        [2.0**-126],
        None,
        ("te-mx-e4m3", 0, [0x40]),
        ("torchao018-mx-rceil-e4m3", 0, [0x00]),
        Step.SCALE_VALUE,
    ),
    "2^-126, reciprocal 0": (
        [2.0**-126],
        None,
        ("te-mx-e4m3", 0, [0x40]),
        ("triton-mx-rounddown-e4m3", 0, [0x00]),
        Step.SCALE_VALUE,
    ),
    "2^-126, least scale": (
        [2.0**-126],
        None,
        ("te-mx-e4m3", 0, [0x40]),
        ("triton-mx-roundup-e4m3", 1, [0x38]),
        Step.SCALE_RANGE,
    ),
    "2^-126 over 0": (
        [2.0**-126],
        None,
        ("te-mx-e4m3", 0, [0x40]),
        ("jax-mx-e4m3", 0, [0x7E]),
        Step.SCALE_VALUE,
    ),
    "infinity, 247": (
        [INF, 1, -1],
        None,
        ("te-mx-e4m3", 254, [0x7E, 0x00, 0x80]),
        ("torchao018-mx-floor-e4m3", 247, [0x7E, 0x00, 0x80]),
        Step.INFINITY,
    ),
    "infinity, NaN": (
        [INF, 1, -1],
        None,
        ("te-mx-e4m3", 254, [0x7E, 0x00, 0x80]),
        ("torchao-mx-rceil-e4m3", 255, [0x7F, 0x7F, 0x7F]),
        Step.INFINITY,
    ),
    "infinity, sign of zero": (
        [INF, 1, -1],
        None,
        ("jax-mx-e4m3", 255, [0xFF, 0x00, 0x80]),
        ("compressedtensors-mx-e4m3", 255, [0xFF, 0x00, 0x00]),
        Step.ZERO_SIGN,
    ),
    "NaN in amax": (
        [NAN, 1, -1],
        None,
        ("torchao-mx-rceil-e4m3", 255, [0x7F, 0x7F, 0x7F]),
        ("te-mx-e4m3", 119, [0x7F, 0x78, 0xF8]),
        Step.NAN_AMAX,
    ),
    "NaN, largest scale": (
        [NAN, 1, -1],
        None,
        ("torchao-mx-rceil-e4m3", 255, [0x7F, 0x7F, 0x7F]),
        ("deepgemm-mx-e4m3", 254, [0x7F, 0x00, 0x80]),
        Step.NAN_AMAX,
    ),
    "NaN block": (
        [NAN, 1, -1],
        None,
        ("torchao-mx-rceil-e4m3", 255, [0x7F, 0x7F, 0x7F]),
        ("torchao018-mx-floor-e4m3", 255, [0x7F, 0x00, 0x80]),
        Step.NAN_BLOCK,
    ),
    "NaN, scale 0": (
        [NAN, 1, -1],
        None,
        ("modelopt-mx-e4m3", 0, [0x7F, 0x7E, 0xFE]),
        ("triton-mx-roundup-e4m3", 0, [0x7F, 0x00, 0x80]),
        Step.SCALE_VALUE,
    ),
    "NaN code": (
        [NAN, 1, -1],
        None,
        ("gfloat-mx-e4m3", 255, [0xFF, 0xFF, 0xFF]),
        ("torchao018-mx-floor-e4m3", 255, [0x7F, 0x00, 0x80]),
        Step.NAN_CODE,
    ),
    "the largest float32": (
        [LARGEST, 1e38],
        None,
        ("te-mx-e4m3", 247, [0x78, 0x69]),
        ("torchao-mx-floor-e4m3", 246, [0x7E, 0x71]),
        Step.SCALE_ROUNDING,
    ),
    "even overflows": (
        [LARGEST, 1e38],
        None,
        ("torchao-mx-floor-e4m3", 246, [0x7E, 0x71]),
        ("torchao-mx-even-e4m3", 255, [0x7F, 0x7F]),
        Step.INFINITY,
    ),
    "7 clipped": (
        [7, 2.5],
        None,
        ("torchao-mx-rceil-e2m1", 128, [6, 2]),
        ("gfloat-mx-e2m1", 127, [7, 4]),
        Step.SCALE_ROUNDING,
    ),
    "3.5 toward zero": (
        [7, 2.5],
        None,
        ("torchao-mx-rceil-e2m1", 128, [6, 2]),
        ("deepgemm-mx-e2m1", 128, [5, 2]),
        Step.ROUNDING,
    ),
    "2.5 away": (
        [7, 2.5],
        None,
        ("microxcaling-mx-nearest-e2m1", 127, [7, 5]),
        ("microxcaling-mx-even-e2m1", 127, [7, 4]),
        Step.ROUNDING,
    ),
    "6.5": (
        [6.5, 1],
        None,
        ("modelopt-mx-e2m1", 128, [5, 1]),
        ("torchao-mx-even-e2m1", 127, [7, 2]),
        Step.SCALE_RULE,
    ),
    "ties toward zero": (
        [6, *RNE],
        None,
        ("torchao-mx-rceil-e2m1", 127, [7, 0, 2, 2, 4, 4, 6, 6]),
        ("modelopt-mx-e2m1", 127, [7, 0, 1, 2, 3, 4, 5, 6]),
        Step.ROUNDING,
    ),
    "ties away": (
        [6, *RNE],
        None,
        ("gfloat-mx-e2m1", 127, [7, 0, 2, 2, 4, 4, 6, 6]),
        ("microxcaling-mx-nearest-e2m1", 127, [7, 1, 2, 3, 4, 5, 6, 7]),
        Step.ROUNDING,
    ),
    "minus zeros of zeros": (
        [0],
        None,
        ("torchao-mx-rceil-e2m1", 0, [0]),
        ("modelopt-mx-e2m1", 0, [8]),
        Step.ZERO_SIGN,
    ),
    "sign of zero lost": (
        [-0.0] * 32,
        None,
        ("torchao-mx-even-e2m1", 0, [8]),
        ("compressedtensors-mx-e2m1", 0, [0]),
        Step.ZERO_SIGN,
    ),
    "-0.1 under 6": (
        [6, -0.1],
        None,
        ("torchao-mx-rceil-e2m1", 127, [7, 8]),
        ("deepgemm-mx-e2m1", 127, [7, 0]),
        Step.ZERO_SIGN,
    ),
    "NaN block in FP4": (
        [NAN, 1, -1],
        None,
        ("torchao-mx-floor-e2m1", 255, [3, 3, 3]),
        ("torchao018-mx-floor-e2m1", 255, [3, 0, 8]),
        Step.NAN_BLOCK,
    ),
    "NaN code in FP4": (
        [NAN, 1, -1],
        None,
        ("torchao018-mx-floor-e2m1", 255, [3, 0, 8]),
        ("triton-mx-rounddown-e2m1", 255, [7, 0, 8]),
        Step.NAN_CODE,
    ),
    "NaN in FP4, scale 0": (
        [NAN, 1, -1],
        None,
        ("torchao-mx-floor-e2m1", 255, [3, 3, 3]),
        ("modelopt-mx-e2m1", 0, [8, 8, 8]),
        Step.NAN_AMAX,
    ),
    # compressed-tensors takes 1 / amax first: its tensor scale is another one, by a unit.
    "2688 / amax or 1 / amax * 2688": (
        bits(0x3FAD6667),
        GAMAX,
        ("te-nvfp4", 0x20, []),
        ("compressedtensors-nvfp4", 0x21, []),
        Step.TENSOR_SCALE,
    ),
    "division or product": (
        bits(0x4541CCCD),
        GAMAX,
        ("te-nvfp4", 0x7A, []),
        ("modelopt-nvfp4", 0x79, []),
        Step.QUOTIENT,
    ),
    "order of products": (
        bits(0x43FEFFFF),
        GAMAX,
        ("te-nvfp4", 0x64, []),
        ("vllm-nvfp4-reference", 0x65, []),
        Step.QUOTIENT,
    ),
    "least scale 2^-6": (
        bits(0x3D27FFFF),
        0x45280000,
        ("te-nvfp4", 0x03, []),
        ("torchao-nvfp4", 0x08, []),
        Step.SCALE_RANGE,
    ),
    "divide or multiply by a rounded reciprocal": (
        [2688, *bits(0xC4C3FFFF)],
        0x45280000,
        ("te-nvfp4", 0x7E, [7, 0xE]),
        ("modelopt-nvfp4", 0x7E, [7, 0xD]),
        Step.SCALED,
    ),
    "minus zero": (
        [1, -0.0],
        0x3F800000,
        ("torchao-nvfp4", 0x7E, [7, 8]),
        ("vllm-nvfp4-reference", 0x7E, [7, 0]),
        Step.ZERO_SIGN,
    ),
    "scale that underflows": (
        bits(0xB1D1F91B, 0x323614BC),
        0x400B8C89,
        ("te-nvfp4", 0x00, [0xF]),
        ("vllm-nvfp4-reference", 0x00, [0x8]),
        Step.SCALED,
    ),
}


def block_of(values: list[float], preset: str) -> np.ndarray:
    """One block of a row, filled with zeros."""
    x = np.zeros((1, int(PRESETS[preset].block[1])), np.float32)
    x[0, : len(values)] = values
    return x


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_disagreement_has_its_codes_and_its_step(name: str) -> None:
    values, amax, a, b, step = DISAGREEMENTS[name]
    given = None if amax is None else np.array(amax, np.uint32).view(np.float32)
    for first, second in ((a, b), (b, a)):
        found = compare(block_of(values, first[0]), first[0], second[0], tensor_amax=given)
        witness = found.witnesses[0]
        assert witness.scales == (first[1], second[1])
        other = [i for i, (p, q) in enumerate(zip(first[2], second[2], strict=True)) if p != q]
        if other:
            assert witness.element == (0, other[0])
            assert witness.codes == (first[2][other[0]], second[2][other[0]])
        assert witness.step is step
        assert step.value in found.sentence
        assert [trace.preset for trace in witness.traces] == [first[0], second[0]]


def test_just_below_496_even_is_floor() -> None:
    x = block_of(bits(0x43F7FFFF), "torchao-mx-even-e4m3")
    found = compare(x, "torchao-mx-even-e4m3", "torchao-mx-floor-e4m3")
    assert not found.differ
    assert found.exit_code == 0
    assert found.witnesses == ()


def test_the_operations_of_a_formula_with_their_bits() -> None:
    """16 of the table by float32 arithmetic of numpy."""
    amax, tensor = np.float32(bits(0x43FEFFFF)[0]), np.float32(bits(GAMAX)[0])
    x = block_of([float(amax)], "te-nvfp4")
    found = compare(x, "te-nvfp4", "vllm-nvfp4-reference", tensor_amax=tensor).witnesses[0]
    one, six = np.float32(1), np.float32(6)
    s = np.float32(2688) / tensor
    wanted = [one / six, s * (one / six), amax * (s * (one / six))]
    assert [one.bits for one in found.traces[0].quotient] == [
        int(w.view(np.uint32)) for w in wanted
    ]
    s = one / tensor * np.float32(2688)
    wanted = [one / six, amax * (one / six), s * (amax * (one / six))]
    assert [one.bits for one in found.traces[1].quotient] == [
        int(w.view(np.uint32)) for w in wanted
    ]
    assert found.operation is not None
    index, first, second = found.operation
    assert index == 1
    assert (str(first)[:24], str(second)[:14]) == ("tensor_scale * (1 / 6) =", "amax * (1 / 6)")


def test_counts() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 40, 70)).astype(np.float32)
    a, b = quantize(x, "te-mx-e4m3"), quantize(x, "ocp-mx-floor-e4m3")
    found = compare(x, "te-mx-e4m3", "ocp-mx-floor-e4m3")
    scales = a.scales != b.scales
    assert found.blocks == scales.size
    assert found.scales_differ == scales.sum() > 0
    assert found.codes_differ == (a.codes != b.codes).sum() > 0
    assert found.blocks_differ == scales.sum()  # a code differs only where its scale does
    assert found.witnesses[0].at == tuple(np.argwhere(scales)[0].tolist())
    data = json.loads(found.to_json())
    assert data["codes_differ"] == found.codes_differ
    assert compare(jnp.asarray(x), "te-mx-e4m3", "ocp-mx-floor-e4m3") == found


def test_a_block_of_columns_and_a_partial_one() -> None:
    x = np.zeros((40, 3), np.float32)
    x[33, 2] = 449
    found = compare(x, "te-mx-e4m3", "ocp-mx-floor-e4m3", block=(32, 1))
    assert [w.at for w in found.witnesses] == [(1, 2)]
    assert found.witnesses[0].element == (1, 0)
    assert found.witnesses[0].values == (0, 0x43E08000)


def test_tensor_scales_of_rows_and_of_a_tensor() -> None:
    x = np.ones((2, 16), np.float32)
    x[0] = 64
    found = compare(x, "te-nvfp4", "te-nvfp4-rowscaled")
    assert [w.at for w in found.witnesses] == [(1, 0)]
    witness = found.witnesses[0]
    assert witness.step is Step.TENSOR_SCALE
    assert witness.tensor_amax == (0x42800000, 0x3F800000)
    assert witness.scales == (0x4E, 0x7E)  # 448 / 64 = 7, and 448


def test_scales_that_a_row_holds_up() -> None:
    x = np.ones((1, 32), np.float32)
    x[0, :16] = 2.0**-20
    found = compare(x, "flamia-fp4-e8m0", "te-nvfp4-pow2")
    assert [w.at for w in found.witnesses] == [(0, 0)]
    assert found.witnesses[0].step is Step.ROW
    assert found.witnesses[0].scales == (125 - 14, 105)


def test_where_a_library_rounds_log2_no_claim_is_made() -> None:
    x = block_of(bits(0x45E00001), "torchao018-mx-rceil-e4m3")
    released = "torchao018-mx-rceil-e4m3"
    found = compare(x, released, "torchao-mx-floor-e4m3")
    assert found.not_claimed == 1
    assert found.witnesses[0].not_claimed == (released,)
    assert "Out of contract" in found.sentence
    assert not compare(x, released, "torchao-mx-rceil-e4m3").differ
    searched = smallest(released, "torchao-mx-rceil-e4m3")
    assert searched.not_claimed > 0
    assert "may do other" in searched.sentence


def holds(witness: Witness, names: tuple[str, str]) -> None:
    """What a witness says of two presets is what `quantize` does."""
    x = np.zeros(witness.block, np.uint32)
    x.flat[: len(witness.values)] = witness.values
    values = x.view(np.float32)
    for side, name in enumerate(names):
        amax = witness.tensor_amax[side]
        given = None if amax is None else np.array(amax, np.uint32).view(np.float32)
        if given is not None and not np.isfinite(given):
            given = None  # that of the block itself
        made = quantize(values, name, block=witness.block, tensor_amax=given)
        assert int(made.scales[0, 0]) == witness.scales[side]
        if witness.codes is not None:
            assert int(made.codes[witness.element]) == witness.codes[side]


PAIRS = [
    ("te-mx-e4m3", "ocp-mx-floor-e4m3"),
    pytest.param("torchao-mx-rceil-e2m1", "deepgemm-mx-e2m1", marks=pytest.mark.nightly),
    ("quark-mx-floor-e2m1", "torchao-mx-floor-e2m1"),
    pytest.param("te-nvfp4", "torchao-nvfp4-onelevel", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_witnesses_hold(a: str, b: str) -> None:
    found = smallest(a, b)
    assert found.differ
    assert found.exit_code == 1
    for witness in found.witnesses:
        holds(witness, (a, b))
    kinds = [(w.kind, w.scales_differ) for w in found.witnesses]
    assert len(set(kinds)) == len(kinds)
    assert json.loads(found.to_json())["none_of"] == [kind.value for kind in found.none_of]


@pytest.mark.nightly
@pytest.mark.parametrize("element", ["e4m3", "e2m3", "e2m1"])
def test_witnesses_of_all_pairs_hold(element: str) -> None:
    names = [name for name, one in PRESETS.items() if one.element.name == element]
    for a, b in itertools.combinations(names, 2):
        if not set(PRESETS[a].blocks) & set(PRESETS[b].blocks):
            continue
        for witness in smallest(a, b).witnesses:
            holds(witness, (a, b))


def of_one(bfloat16: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Scales and first codes of blocks with one value."""
    x = np.zeros((len(bfloat16), 32), ml_dtypes.bfloat16)
    x[:, 0] = bfloat16
    made = quantize(x, name)
    return made.scales[:, 0], made.codes


def test_the_smallest_of_all_bfloat16_values() -> None:
    """Every block with one bfloat16 value says which are the smallest, and that there is no other."""
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = every.astype(np.float32)
    ordinary = np.isfinite(wide) & (np.abs(wide) >= 2.0**-100)
    for a, b, differ in (
        ("te-mx-e4m3", "ocp-mx-floor-e4m3", True),
        ("te-mx-e4m3", "torchao-mx-rceil-e4m3", False),
    ):
        (scales, codes), (other_scales, other_codes) = of_one(every, a), of_one(every, b)
        where = (scales != other_scales) | (codes != other_codes).any(axis=1)
        found = smallest(a, b, dtype="bfloat16")
        assert found.dtype == "bfloat16"
        assert bool((where & ordinary).any()) is differ
        assert any(w.kind is Kind.ORDINARY for w in found.witnesses) is differ
        if differ:
            magnitude = np.abs(wide[where & ordinary]).view(np.uint32).astype(np.int64)
            nearest = np.abs(magnitude - 0x3F800000).min()
            first = found.witnesses[0]
            assert len(first.values) == 1
            assert abs(first.values[0] - 0x3F800000) == nearest


def test_no_difference_is_said_with_the_number_of_inputs() -> None:
    same = dataclasses.replace(PRESETS["te-mx-e4m3"], name="mine")
    found = smallest("te-mx-e4m3", same)
    assert not found.differ
    assert found.exit_code == 0
    assert found.inputs > 1000
    assert f"no difference found at {found.inputs} boundary inputs" in found.sentence


@pytest.mark.parametrize(
    ("changes", "step", "kind"),
    [
        ({"rounding": "nearest_away"}, Step.ROUNDING, Kind.ORDINARY),
        ({"zero_sign": "plus"}, Step.ZERO_SIGN, Kind.ORDINARY),
        ({"infinity_scale": 254 - 8}, Step.INFINITY, Kind.INFINITY),
        ({"zero_scale": 127}, Step.ZERO_BLOCK, Kind.ZERO),
        ({"nan_codes": (0x7F, 0xFF, 0x7F)}, Step.NAN_CODE, Kind.NAN),
        ({"scale_range": (1, 254)}, Step.SCALE_RANGE, Kind.TINY),
        ({"smallest_amax": 1e-4}, Step.SMALLEST, Kind.ORDINARY),
        ({"overflow": "native", "rule": "floor"}, Step.OVERFLOW, Kind.ORDINARY),
    ],
    ids=str,
)
def test_a_planted_change_is_found_and_named(changes: Any, step: Step, kind: Kind) -> None:
    start = PRESETS["te-mx-e4m3"]
    if "rule" in changes:
        start = dataclasses.replace(start, rule="floor")
    mutant = dataclasses.replace(start, name="mutant", **changes)
    found = smallest(start, mutant)
    assert (found.witnesses[0].step, found.witnesses[0].kind) == (step, kind)
    assert {w.step for w in found.witnesses} == {step}


def test_every_field_of_a_format_belongs_to_a_step_or_to_none() -> None:
    fields = {field.name for field in dataclasses.fields(BlockFormat)}
    about = {"name", "source", "version", "evidence"}
    claims = {"nan_in_contract", "infinity_in_contract", "out_of_contract"}
    shape = {"element", "block", "blocks", "partial"}
    elsewhere = {"narrow", "stochastic"}  # applied before; only with random bits
    assert set(DATA) | about | claims | shape | elsewhere == fields
    assert len(set(DATA)) == len(DATA)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: compare(x, "te-mx-e4m3", "te-mx-e5m2"), ValueError, "not comparable"),
        (lambda x: compare(x, "te-mx-e4m3", "te-nvfp4"), ValueError, "not comparable"),
        (lambda x: compare(x, "te-nvfp4", "te-nvfp4-2d"), ValueError, "no block in common"),
        (lambda x: compare(x, "te-mx-e4m3", "te-mx-e4m4"), ValueError, "did you mean"),
        (lambda x: compare(x, "te-mx-e4m3", 3), TypeError, "not 3"),
        (
            lambda x: compare(x, "te-mx-e4m3", "gfloat-mx-e4m3", block=(2, 2)),
            ValueError,
            "no block",
        ),
        (lambda x: compare(x[0], "te-mx-e4m3", "gfloat-mx-e4m3"), ValueError, "rows, columns"),
        (lambda x: compare(x > 0, "te-mx-e4m3", "gfloat-mx-e4m3"), TypeError, "compare takes"),
        (lambda x: compare(x + 1e-20, "te-mx-e4m3", "gfloat-mx-e4m3"), ValueError, "float64"),
        (
            lambda x: compare(x, "te-mx-e4m3", "gfloat-mx-e4m3", tensor_amax=1.0),
            ValueError,
            "no tensor_amax",
        ),
        (lambda x: smallest("te-mx-e4m3", "gfloat-mx-e4m3", dtype="int8"), TypeError, "float16"),
    ],
)
def test_bad_input(call: Any, error: type[Exception], message: str) -> None:
    x = np.full((32, 32), 0.1)
    x = x if "float64" in message else x.astype(np.float32)
    with pytest.raises(error, match=message):
        call(x)


def test_lists_are_taken() -> None:
    x = [[500.0] * 32] * 4
    found = compare(x, "te-mx-e4m3", "ocp-mx-floor-e4m3")
    assert found == compare(np.asarray(x, np.float32), "te-mx-e4m3", "ocp-mx-floor-e4m3")


def test_an_empty_array_has_no_difference() -> None:
    found = compare(np.zeros((0, 32), np.float32), "te-mx-e4m3", "gfloat-mx-e4m3")
    assert (found.blocks, found.differ) == (0, False)


@pytest.mark.nightly
def test_a_tensor_too_small_for_a_block_of_its_own() -> None:
    """Among the amaxes of tensors is one below which no bfloat16 amax lies on a boundary."""
    found = smallest("vllm-nvfp4-reference", "te-nvfp4-rowscaled", dtype="bfloat16")
    assert found.differ
    assert "for each row" in found.note
