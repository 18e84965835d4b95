"""`quantize` and `dequantize` against exact rationals and worked examples."""

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import (
    E2M1,
    E2M3,
    E4M3,
    E5M2,
    FORMATS,
    PRESETS,
    UE4M3,
    BlockFormat,
    BlockTensor,
    Rounding,
    ScaleRule,
    dequantize,
    encode,
    encoding,
    error,
    in_contract,
    quantize,
    quantizer,
)
from tests.formats import exact, points
from tests.formats.representatives import daily_first

TE, OCP = "te-mx-e4m3", "ocp-mx-floor-e4m3"
BLOCKS = [(1, 32), (32, 1), (32, 32), (1, "all"), ("all", 1)]
RULES = ["floor", "ceil", "even", "rceil", "exact_rceil"]
# Presets of the rules that `scale_of` has; others are in test_exact_scales and test_presets.
EXACT_BLOCKS = [
    (name, block) for name in (TE, OCP, "cudnn-mx-e4m3") for block in PRESETS[name].blocks
]
NAN, INF = math.nan, math.inf


def float32(values: Any) -> npt.NDArray[np.float32]:
    return np.asarray(values, np.float32)


def row(*first: float) -> npt.NDArray[np.float32]:
    """One block of 32: the values given, then zeros."""
    return float32([[*first, *[0.0] * (32 - len(first))]])


def scale_of(rule: str, amax: Fraction, element: str) -> int:
    f = FORMATS[element]
    match rule:
        case "floor":
            return exact.floor_scale(amax, f.emax)
        case "ceil":
            return exact.ceil_scale(amax, f.emax)
        case "even":
            return exact.even_scale(amax, f.emax, f.mantissa_bits)
        case "exact_rceil":
            return exact.exact_rceil_scale(amax, Fraction(f.max))
        case _:
            return exact.rceil_scale(amax, Fraction(f.max))


def with_rule(rule: str, element: str) -> BlockFormat:
    return dataclasses.replace(
        PRESETS[TE], name="test", rule=ScaleRule(rule), element=FORMATS[element]
    )


def blocks_of_any_exponent() -> npt.NDArray[np.float32]:
    """Finite blocks: all binades, amax at and beside max * 2^k, subnormals, wide and narrow."""
    rng = np.random.default_rng(1)
    rows = [points.random_bits32(32, seed).view(np.float32) for seed in range(12)]
    rows = [np.where(np.isfinite(r), r, float32(1)) for r in rows]
    rows += [rng.standard_normal(32) * 2.0 ** rng.integers(-140, 120) for _ in range(60)]
    for top in (448.0, 57344.0, 6.0, 7.5, 28.0, 1.0, 1.75, 1.9375, 1.875, 1.984375):
        for k in (-149, -140, -135, -130, -127, -120, -60, -1, 0, 1, 50, 118):
            with np.errstate(under="ignore", over="ignore"):
                amax = float32(np.ldexp(top, k - (math.frexp(top)[1] if k < -100 else 0)))
            for near in (np.nextafter(amax, float32(0)), amax, np.nextafter(amax, float32(INF))):
                if np.isfinite(near):
                    rows.append(np.r_[-near, near * rng.uniform(-1, 1, 31)])
    with np.errstate(over="ignore"):
        found = float32(rows)
    return found[np.isfinite(found).all(axis=1)]


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_rule_and_element_exactly(rule: str, element: str, step: int) -> None:
    x = blocks_of_any_exponent()[:: 1 if (rule, element) == ("rceil", "e4m3") else step]
    tensor = quantize(x, with_rule(rule, element))
    spec = exact.SPECS[element]
    for values, scales, codes in zip(
        x.tolist(), tensor.scales.tolist(), tensor.codes.tolist(), strict=True
    ):
        wanted = scale_of(rule, max(abs(Fraction(v)) for v in values), element)
        assert scales == [wanted], [v.hex() for v in values[:2]]
        assert codes == exact.block_codes(values, wanted, spec)


def test_element_rounding_belongs_to_the_format() -> None:
    x = blocks_of_any_exponent()[::3]
    away = dataclasses.replace(PRESETS[OCP], rounding=Rounding.NEAREST_AWAY)
    tensor = quantize(x, away)
    for values, (scale,), codes in zip(
        x.tolist(), tensor.scales.tolist(), tensor.codes.tolist(), strict=True
    ):
        shifted = [Fraction(v) / exact.TWO ** (scale - 127) for v in values]
        wanted = [
            exact.encode(v, exact.SPECS["e4m3"], "nearest_away", negative=bool(np.signbit(u)))
            for v, u in zip(shifted, values, strict=True)
        ]
        assert codes == wanted


EXAMPLES = [
    # first values, scale code and first element codes of te-mx-e4m3, of ocp-mx-floor-e4m3
    ([449, 1], (128, [0x76, 0x30]), (127, [0x7E, 0x38])),
    ([448, 17], (127, [0x7E, 0x58]), (127, [0x7E, 0x58])),
    ([float.fromhex("0x1.c00002p12"), 1], (132, [0x76, 0x10]), (131, [0x7E, 0x18])),
    ([float.fromhex("0x1.fffffep2"), 1], (122, [0x78, 0x60]), (121, [0x7E, 0x68])),
    ([float.fromhex("0x1.effffep8")], (128, [0x77]), (127, [0x7E])),
    ([0.0, -0.0], (0, [0x00, 0x80]), (0, [0x00, 0x80])),
    ([2.0**-126], (0, [0x40]), (0, [0x40])),
    ([float.fromhex("0x1.fffffep127"), 1e38], (247, [0x78, 0x69]), (246, [0x7E, 0x71])),
    ([957], (129, [0x77]), (128, [0x7E])),
    ([2.0**-149], (0, [0x00]), (0, [0x00])),
    ([2.0**-130], (0, [0x20]), (0, [0x20])),
    ([2.0**-119], (0, [0x78]), (0, [0x78])),
    ([2.0**-118], (1, [0x78]), (1, [0x78])),
    ([INF, 1, -1], (254, [0x7E, 0x00, 0x80]), (255, [0x7F] * 32)),
    ([-INF, 1, -1], (254, [0xFE, 0x00, 0x80]), (255, [0x7F] * 32)),
    ([NAN, 1, -1], (119, [0x7F, 0x78, 0xF8]), (255, [0x7F] * 32)),
    ([NAN] * 32, (0, [0x7F] * 32), (255, [0x7F] * 32)),
    ([NAN, INF], (254, [0x7F, 0x7E, 0x00]), (255, [0x7F] * 32)),
]


@pytest.mark.parametrize(("first", "te", "ocp"), EXAMPLES, ids=[str(e[0][:3]) for e in EXAMPLES])
def test_worked_examples(first: list[float], te: tuple[int, Any], ocp: tuple[int, Any]) -> None:
    for name, (scale, codes) in ((TE, te), (OCP, ocp)):
        tensor = quantize(row(*first), name)
        assert tensor.scales.tolist() == [[scale]]
        assert tensor.codes[0, : len(codes)].tolist() == codes


@pytest.mark.parametrize(
    ("amax", "te", "ocp"),
    [
        (float.fromhex("0x1.bffffep8"), 127, 127),
        (448, 127, 127),
        (float.fromhex("0x1.c00002p8"), 128, 127),
        (896, 128, 128),
        (1.75, 119, 119),
        (float.fromhex("0x1.c00002p0"), 120, 119),
    ],
)
def test_scales_at_448_times_a_power_of_two(amax: float, te: int, ocp: int) -> None:
    assert quantize(row(amax), TE).scales.item() == te
    assert quantize(row(amax), OCP).scales.item() == ocp


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("place", [0, 1, 17, 31])
def test_a_nan_is_not_lost(place: int, dtype: str) -> None:
    import ml_dtypes

    x = np.ones((3, 32), np.float32)
    x[1, place] = NAN
    x = x.astype(getattr(ml_dtypes, dtype, dtype))
    floor = quantize(x, OCP)
    assert floor.scales.ravel().tolist() == [119, 255, 119]
    assert np.isnan(dequantize(floor)).all(axis=1).tolist() == [False, True, False]
    te = quantize(x, TE)
    assert te.scales.ravel().tolist() == [119, 119, 119]
    assert np.flatnonzero(np.isnan(dequantize(te)).ravel()).tolist() == [32 + place]


def test_no_infinity_becomes_an_ordinary_number() -> None:
    te, ocp = (dequantize(quantize(row(INF, 1.0), name)) for name in (TE, OCP))
    assert te[0, 0] == np.inf
    assert dequantize(quantize(row(-INF), TE))[0, 0] == -np.inf
    assert np.isnan(ocp).all()


def test_tiny_blocks_come_back() -> None:
    values = float32([[2.0**-149], [2.0**-130], [2.0**-119], [2.0**-118]])
    wanted = float32([[0], [2.0**-130], [2.0**-119], [2.0**-118]])
    for name in (TE, OCP):
        np.testing.assert_array_equal(dequantize(quantize(values, name)), wanted)


def test_zeros_keep_their_signs() -> None:
    x = row(0.0, -0.0)
    for name in (TE, OCP):
        back = dequantize(quantize(x, name))
        assert np.signbit(back[0]).tolist() == [False, True] + [False] * 30
        assert not back.any()


def test_zero_scale_and_flush() -> None:
    ones = dataclasses.replace(PRESETS[TE], zero_scale=127)
    assert quantize(row(0.0, -0.0), ones).scales.item() == 127
    flush = dataclasses.replace(PRESETS[TE], scale_values=((0, INF),))
    tensor = quantize(row(2.0**-119, -(2.0**-119), NAN), flush)
    assert tensor.scales.item() == 0
    assert tensor.codes[0, :4].tolist() == [0x00, 0x80, 0x7F, 0x00]
    assert quantize(row(2.0**-118), flush).codes[0, 0] == 0x78


def test_infinity_makes_a_nan_block_only_where_asked() -> None:
    both = dataclasses.replace(PRESETS[TE], infinity_scale=255)
    tensor = quantize(np.concatenate([row(INF, 1.0), row(NAN, 1.0)]), both)
    assert tensor.scales.ravel().tolist() == [255, 119]
    assert set(tensor.codes[0].tolist()) == {0x7F}


# shapes and blocks


def test_rows_do_not_share_a_block() -> None:
    x = float32([[1.0] * 48, [1024.0] * 48])
    for name in (TE, OCP):
        assert quantize(x, name).scales.tolist() == [[119, 119], [129, 129]]


SHAPES = [(1, 1), (3, 31), (33, 33), (2, 3, 40, 65), (64, 32), (0, 8), (8, 0)]
LARGE_DAILY = [(TE, (32, 32)), (OCP, (1, "all")), ("cudnn-mx-e4m3", (32, 1))]


def daily_small_first() -> list[Any]:
    """Blocks and shapes; the large ones daily with three blocks, nightly with the others."""
    return [
        pytest.param(
            *case,
            shape,
            marks=() if case in LARGE_DAILY or math.prod(shape) < 2000 else pytest.mark.nightly,
        )
        for case in EXACT_BLOCKS
        for shape in SHAPES
    ]


@pytest.mark.parametrize(("name", "block", "shape"), daily_small_first(), ids=str)
def test_each_block_is_quantized_exactly(name: str, block: Any, shape: Any) -> None:
    """Blocks cut by hand, partial ones too, each by the exact rule."""
    count = math.prod(shape)
    x = points.narrow_range(count, 2).reshape(shape).view(np.float32)
    tensor = quantize(x, name, block=block)
    *batch, height, width = shape
    r, c = (s if b == "all" else b for b, s in zip(block, (height, width), strict=True))
    r, c = max(r, 1), max(c, 1)
    assert tensor.block == (r, c)
    assert tensor.tensor_scale is None
    assert tensor.codes.shape == shape
    assert tensor.scales.shape == (*batch, -(-height // r), -(-width // c))
    assert tensor.codes.dtype == tensor.scales.dtype == np.uint8
    rule = PRESETS[name].rule.value
    for index in np.ndindex(tensor.scales.shape):
        *lead, down, across = index
        cut = (*lead, slice(r * down, r * down + r), slice(c * across, c * across + c))
        values = x[cut].ravel().tolist()
        scale = scale_of(rule, max(abs(Fraction(v)) for v in values), "e4m3")
        assert tensor.scales[index] == scale
        wanted = exact.block_codes(values, scale, exact.SPECS["e4m3"])
        assert tensor.codes[cut].ravel().tolist() == wanted


def same(one: BlockTensor, other: BlockTensor) -> None:
    np.testing.assert_array_equal(one.codes, other.codes)
    np.testing.assert_array_equal(one.scales, other.scales)


def odd_values(shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    """Wide exponents in some blocks, others of zeros; few NaN and infinities."""
    rng = np.random.default_rng(seed)
    x = points.narrow_range(math.prod(shape), seed).reshape(shape)
    x = np.where(rng.random(shape) < 0.003, np.uint32(0x7FC00000), x)
    x = np.where(rng.random(shape) < 0.003, np.uint32(0xFF800000), x)
    x[..., 16:48] &= np.uint32(0x80000000)
    x[..., -5:] &= np.uint32(0x81FFFFFF)  # subnormals
    return x.view(np.float32)


# One of each way in which a block could depend on others.
BY_ITSELF = {"te-mx-e4m3", "cudnn-mx-e4m3", "triton-mx-rounddown-e2m1", "quark-mx-ceil-e2m3"}
BY_ITSELF |= {"te-nvfp4-rowscaled", "te-nvfp4-2d", "te-nvfp4-rht", "te-nvfp4-4over6-mse"}
BY_ITSELF |= {"compressedtensors-nvfp4", "jax-nvfp4"}


@pytest.mark.parametrize(
    "name",
    [n if n in BY_ITSELF else pytest.param(n, marks=pytest.mark.nightly) for n in PRESETS],
)
def test_each_block_is_quantized_by_itself(name: str) -> None:
    """Cut out of the tensor, with its tensor_amax, it has the same codes and scale."""
    import ml_dtypes

    preset = PRESETS[name]
    dtype = "bfloat16" if preset.narrow else "float32"  # which compares the more steps
    for block in preset.blocks:
        r, c = (64 if extent == "all" else int(extent) for extent in block)
        with np.errstate(all="ignore"):
            x = odd_values((2 * r, 192), 8).astype(getattr(ml_dtypes, dtype, dtype))
        amax = np.float32(1e4) if preset.has_tensor_scale else None
        tensor = quantize(x, name, block=block, tensor_amax=amax)
        width = 192 if preset.row_span is not None or c == 64 else c  # what has part in a scale
        r = 2 * r if block[0] == "all" else r
        across = max(width // c, 1) if block[1] != "all" else 1
        for place, (down, right) in enumerate(np.ndindex(x.shape[0] // r, 192 // width)):
            cut = np.s_[down * r : down * r + r, right * width : right * width + width]
            part = quantize(x[cut], name, block=block, tensor_amax=amax)
            np.testing.assert_array_equal(part.codes, tensor.codes[cut], f"{block} {place}")
            there = np.s_[down : down + 1, right * across : right * across + across]
            np.testing.assert_array_equal(part.scales, tensor.scales[there])


@pytest.mark.parametrize("name", daily_first())
def test_partial_blocks_are_refused_or_filled_with_zeros(name: str) -> None:
    preset = PRESETS[name]
    x = odd_values((2, 3 * 33, 70), 9)
    for block in preset.blocks:
        r, c = (math.inf if extent == "all" else int(extent) for extent in block)
        if preset.partial == "refuse":
            with pytest.raises(
                ValueError, match=r"takes whole blocks of .* pad it with zeros"
            ) as error:
                quantize(x, name, block=block)
            assert preset.library in str(error.value)
            continue
        rows, columns = (
            0 if n in (1, math.inf) else int(-size % n) for n, size in ((r, 99), (c, 70))
        )
        filled = np.pad(x, [(0, 0), (0, rows), (0, columns)])
        part, whole = quantize(x, name, block=block), quantize(filled, name, block=block)
        np.testing.assert_array_equal(part.codes, whole.codes[:, :99, :70])
        np.testing.assert_array_equal(part.scales, whole.scales)


@pytest.mark.parametrize("name", daily_first())
def test_empty_and_batched_tensors(name: str) -> None:
    preset = PRESETS[name]
    amax = np.float32(1e4) if preset.has_tensor_scale else None
    r, c = (int(extent) for extent in preset.block)
    for shape in ((0, 2 * c), (2 * r, 0), (0, r, c)):
        tensor = quantize(np.zeros(shape, np.float32), name)
        assert tensor.codes.shape == dequantize(tensor).shape == shape
        assert tensor.scales.shape == (*shape[:-2], shape[-2] // r, shape[-1] // c)
    x = odd_values((2, 3, 2 * r, 192), 10)
    many = quantize(x, name, tensor_amax=amax)
    assert many.scales.shape == (2, 3, 2, 192 // c)
    one = quantize(x[1, 2], name, tensor_amax=amax)
    np.testing.assert_array_equal(many.codes[1, 2], one.codes)
    np.testing.assert_array_equal(many.scales[1, 2], one.scales)
    view = np.asfortranarray(np.repeat(x[1, 2], 2, axis=0))[::2]
    view.flags.writeable = False
    same(quantize(view, name, tensor_amax=amax), one)


@pytest.mark.parametrize("shape", [(5, 7), (33, 70), (64, 64)])
@pytest.mark.parametrize("name", [TE, OCP])
def test_square_blocks_are_the_same_in_both_orientations(name: str, shape: Any) -> None:
    x = points.narrow_range(math.prod(shape), 3).reshape(shape).view(np.float32)
    one, other = quantize(x, name, block=(32, 32)), quantize(x.T, name, block=(32, 32))
    np.testing.assert_array_equal(one.codes.T, other.codes)
    np.testing.assert_array_equal(one.scales.T, other.scales)
    one, other = quantize(x, name, block=(1, 32)), quantize(x.T, name, block=(32, 1))
    np.testing.assert_array_equal(one.codes.T, other.codes)


def test_requantizing_the_other_orientation_differs() -> None:
    x = np.zeros((32, 32), np.float32)
    x[0, 0], x[1, 0] = 0.49, 1.0
    by_row = dequantize(quantize(x, OCP))
    assert by_row[0, 0] == 0.4375
    assert dequantize(quantize(x, OCP, block=(32, 1)))[0, 0] == 0.5
    assert dequantize(quantize(by_row, OCP, block=(32, 1)))[0, 0] == 0.4375


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_large_arrays_are_cut_without_a_trace(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = [3, 70, 40]
    shape[axis] *= 3
    x = points.narrow_range(math.prod(shape), 4).reshape(shape).view(np.float32)
    for block in BLOCKS:
        whole = quantize(x, TE, block=block)
        values, codes = dequantize(whole), encode(x, "e4m3")
        with monkeypatch.context() as patch:
            patch.setattr(quantizer, "_PART", 100)
            patch.setattr(encoding, "_CHUNK", 1000)
            cut = quantize(x, TE, block=block)
            np.testing.assert_array_equal(cut.codes, whole.codes)
            np.testing.assert_array_equal(cut.scales, whole.scales)
            np.testing.assert_array_equal(dequantize(cut), values)
            np.testing.assert_array_equal(encode(x, "e4m3"), codes)


# dequantize


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M3, E2M1], ids=lambda f: f.name)
def test_dequantize_every_code_and_scale(element: Any) -> None:
    """Exact in float64; in float32 exact but for what is beyond it."""
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    codes = np.broadcast_to(codes, (256, codes.size))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    f = dataclasses.replace(PRESETS[TE], element=element)
    tensor = BlockTensor(codes=codes, scales=scales, format=f, block=(1, codes.shape[1]))
    powers = np.append(np.ldexp(1.0, np.arange(-127, 128)), np.nan)[:, None]
    wanted = element.table() * powers
    wide, narrow = dequantize(tensor, np.float64), dequantize(tensor)
    np.testing.assert_array_equal(wide, wanted)
    np.testing.assert_array_equal(np.signbit(wide), np.signbit(wanted))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(narrow, wanted.astype(np.float32))
    finite = np.isfinite(wanted) & (np.abs(wanted) < 2.0**128)
    np.testing.assert_array_equal(narrow[finite].astype(np.float64), wanted[finite])


@pytest.mark.parametrize("element", ["e4m3", "e2m1"])
@pytest.mark.parametrize("rule", RULES)
def test_quantizing_again_changes_nothing(rule: str, element: str) -> None:
    """Values that came out of a block format go back into the same values."""
    f = with_rule(rule, element)
    once = dequantize(quantize(points.narrow_range(6400, 5).reshape(-1, 32).view(np.float32), f))
    np.testing.assert_array_equal(dequantize(quantize(once, f)), once)


# bad input


@pytest.mark.parametrize("name", PRESETS)
def test_other_blocks_are_refused(name: str) -> None:
    preset = PRESETS[name]
    x = np.ones((64, 64), np.float32)
    allowed = re.escape(f"allowed: {', '.join(map(str, preset.blocks))}") + "$"
    sizes = [(0, 32), (1, 0), (1, 7), (1, 17), (16, 16), (32, 7), (1, 64), (1, -2), ("all", "all")]
    no_sizes = [32, "all", (1,), (1, 32, 1), (1.0, 32.0), (1, "32"), (True, 32)]
    for block in (*sizes, *no_sizes):
        if block not in preset.blocks or block in no_sizes:
            with pytest.raises(ValueError, match=allowed):
                quantize(x, name, block=block)


@pytest.mark.parametrize("block", [(1, "all"), (1, -1), (1, None), [1, -1], np.array([1, -1])])
def test_ways_to_say_all(block: Any) -> None:
    assert quantize(np.ones((2, 5), np.float32), TE, block=block).block == (1, 5)


def test_bad_quantize_arguments() -> None:
    x = np.ones((2, 32), np.float32)
    with pytest.raises(ValueError, match="no scale of the whole tensor"):
        quantize(x, TE, tensor_amax=1.0)
    with pytest.raises(ValueError, match="unknown preset 'te-mx-e4m4'; did you mean 'te-mx-e4m3'"):
        quantize(x, "te-mx-e4m4")
    with pytest.raises(TypeError, match="a BlockFormat or a name"):
        quantize(x, E4M3)
    for wrong in (x.astype(np.int32), x > 0, x.astype(object), np.array([["a"]])):
        with pytest.raises(TypeError, match="quantize takes"):
            quantize(wrong, TE)


@pytest.mark.parametrize("function", [quantize, error, in_contract], ids=lambda f: f.__name__)
def test_what_x_may_be(function: Any) -> None:
    """In the name of the function that was called, with what to do."""
    name = function.__name__
    takes = f"{name} takes [..., rows, columns], not shape "
    for wrong, shape in ((np.ones(32, np.float32), "(32,)"), (np.float32(1), "()")):
        says = f"{takes}{shape}; give it two axes or more: x.reshape(1, -1) is one row"
        with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
            function(wrong, TE)
    with pytest.raises(ValueError, match=f"^{name} takes an array; x has rows of different"):
        function([[1.0] * 32, [1.0]], TE)
    with pytest.raises(TypeError, match=f"^{name} takes float64, float32"):
        function(np.ones((2, 32), np.int32), TE)


def test_float64_is_not_rounded_on_the_way() -> None:
    """float64 that float32 holds is as good as float32; anything else would round twice."""
    x = points.narrow_range(64, 6).view(np.float32).reshape(2, 32)
    x[0, 0] = NAN
    wide = quantize(x.astype(np.float64), TE)
    np.testing.assert_array_equal(wide.codes, quantize(x, TE).codes)
    with pytest.raises(ValueError, match="float32 lacks"):
        quantize(np.full((1, 32), 0.1), TE)
    with pytest.raises(ValueError, match="float32 lacks"):
        quantize(np.full((1, 32), 1e300), TE)


def test_bad_block_tensors() -> None:
    good = quantize(np.ones((2, 40), np.float32), TE)
    with pytest.raises(ValueError, match=r"scales have shape \(2, 1\).* have \(2, 2\)"):
        dequantize(dataclasses.replace(good, scales=good.scales[:, :1]))
    with pytest.raises(ValueError, match="no block tensor"):
        dequantize(dataclasses.replace(good, block=(0, 32)))
    with pytest.raises(ValueError, match="no block tensor"):
        dequantize(dataclasses.replace(good, codes=good.codes[0]))
    with pytest.raises(TypeError, match=r"^codes are integers, not float32; encode gives them"):
        dequantize(dataclasses.replace(good, codes=good.codes.astype(np.float32)))
    with pytest.raises(TypeError, match=r"^scales are integers, not float32; encode gives them"):
        dequantize(dataclasses.replace(good, scales=good.scales.astype(np.float32)))
    with pytest.raises(ValueError, match="e8m0 has no code 256"):
        dequantize(dataclasses.replace(good, scales=good.scales.astype(np.int64) + 137))
    with pytest.raises(TypeError, match="float32 or float64, not float16"):
        dequantize(good, np.float16)


QUOTIENT: dict[str, Any] = {"rule": "quotient", "quotient": "amax / 6"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rule": "ceil2"}, "unknown rule 'ceil2'; did you mean 'ceil'"),
        ({"nan": "drop"}, "unknown nan 'drop'"),
        ({"scale": E4M3}, "scales have no sign; scale format e4m3 has one"),
        ({"scale": UE4M3}, "its scale format is E8M0, not ue4m3"),
        ({"rule": "quotient"}, "goes with rule 'quotient'"),
        ({"quotient": "amax / 6"}, "only with it"),
        (QUOTIENT | {"scale": UE4M3}, "`scaled` must say"),
        (QUOTIENT | {"scale": E4M3, "scaled": "x / scale"}, "scales have no sign"),
        (QUOTIENT | {"quotient": "amax / x"}, "has ['x']; it may use ['amax', 'tensor_scale']"),
        (QUOTIENT | {"quotient": "amax * tensor_scale"}, "uses tensor_scale, and there is none"),
        ({"row_span": -1}, "row_span is -1; allowed: 0 to 254"),
        (QUOTIENT | {"scale": UE4M3, "scaled": "x / scale", "row_span": 3}, "with scales in E8M0"),
        ({"block": (1, 16)}, "not among its blocks"),
        ({"rounding": "stochastic"}, "takes no random bits"),
        ({"stochastic": "up"}, "stochastic is 'up'; allowed: stochastic, stochastic_sum"),
        ({"zero_scale": 256}, "zero_scale is 256; allowed: 0 to 255"),
        ({"infinity_scale": -1}, "infinity_scale is -1"),
        ({"nan_scale": 255}, "nan_scale is 255; it goes with an amax that may be NaN"),
        ({"nan": "propagate"}, "nan_scale is None"),
        ({"scale_range": (9, 3)}, "scale_range is (9, 3); allowed: two ascending codes"),
        ({"signs": (1, -1)}, "signs are 16"),
        ({"choice": "mae"}, "a choice of two scales goes with"),
        ({"choice": "max"}, "unknown choice 'max'"),
    ],
)
def test_impossible_block_formats(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        dataclasses.replace(PRESETS[TE], **changes)


def test_presets_say_where_they_come_from() -> None:
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert preset.source
        assert preset.version
        if name.startswith("flamia-"):
            assert preset.evidence == "assumed"
        if name.startswith("ocp-"):
            assert preset.evidence == "specified"
        assert hash(preset) == hash(dataclasses.replace(preset))
