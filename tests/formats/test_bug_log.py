"""Faults that people of this field reported, each at its smallest input, with the right value.

A number is that of an entry; the issue or pull request that it comes from stands at its test. Faults of layout are in
test_layout*.py, of encoders alone in test_rounding.py too: here each has one place.
"""

import dataclasses
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import PRESETS, BlockTensor, decode, dequantize, encode, layout, quantize

NAN, INF = float("nan"), float("inf")
FLOOR, RCEIL = "ocp-mx-floor-e4m3", "te-mx-e4m3"
# A quantizer that rounds amax_b / 6 over the tensor scale once, and divides by the product of scales.
ONE_ROUNDING = "modelopt-nvfp4"


def row(*first: float, width: int = 32) -> npt.NDArray[np.float32]:
    return np.array([[*first, *[0.0] * (width - len(first))]], np.float32)


def codes(x: Any, name: str, **settings: str) -> list[int]:
    found: list[int] = encode(np.asarray(x, np.float64), name, **settings).tolist()
    return found


def test_b01_double_rounding_from_float64() -> None:
    """jax-ml/ml_dtypes PR 401."""
    x = [-431.99999999999994, 1.0625 + 2**-40, 1.0625]
    assert codes(x, "e4m3") == [0xFD, 0x39, 0x38]
    with pytest.raises(ValueError, match="float64 values that float32 lacks"):
        quantize(np.array([x]), RCEIL)


def test_b02_the_overflow_edge_of_e4m3() -> None:
    """jax-ml/ml_dtypes 400, pytorch/pytorch 178817, pytorch/ao 1912."""
    x = [448, 464, np.nextafter(464.0, INF), 465, 480, 1000, -1000, INF, -INF]
    assert codes(x, "e4m3") == [0x7E] * 6 + [0xFE, 0x7E, 0xFE]
    native = codes(x, "e4m3", overflow="native")
    assert native[:2] == [0x7E, 0x7E]
    assert all(code & 0x7F == 0x7F for code in native[2:])


def test_b03_subnormals_of_e4m3() -> None:
    """local-inference-lab/b12x PR 388."""
    values = decode([*range(1, 9), 0x81], "e4m3", np.float64).tolist()
    assert values == [k * 2.0**-9 for k in range(1, 9)] + [-(2.0**-9)]
    for name in ("e4m3", "ue4m3"):
        assert decode(np.arange(0x7F), name, np.float64).sum() == 5407.875


def test_b04_signed_zero() -> None:
    """intel/torch-xpu-ops 2951, intel/llm-scaler PR 569."""
    x = [-0.0, -(2**-11), -(2**-10), -(2**-10) * (1 + 2**-23), -(2**-9)]
    assert codes(x, "e4m3") == [0x80, 0x80, 0x80, 0x81, 0x81]
    zero = decode([0x80], "e4m3")
    assert zero.view(np.uint32).tolist() == [0x80000000]


def test_b05_ties_of_e2m1() -> None:
    """ROCm/aiter PR 3992, flashinfer-ai/flashinfer PR 4601."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert codes(ties, "e2m1") == [0, 2, 2, 4, 4, 6, 6]
    assert codes(np.negative(ties), "e2m1") == [0x8, 0xA, 0xA, 0xC, 0xC, 0xE, 0xE]


def test_b06_every_code_of_e2m1() -> None:
    """tile-ai/tilelang 2704."""
    values = decode(np.arange(16), "e2m1")
    assert values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    np.testing.assert_array_equal(values[8:].view(np.uint32), (-values[:8]).view(np.uint32))
    assert values[:8].sum() == 18


def test_b07_a_carry_out_of_the_mantissa() -> None:
    """triton-lang/triton PR 11897."""
    x = [126.24, 0.99, 15.51, 447.9, 2**-6 - 2**-12, 2**-6 - 2**-10]
    assert codes(x, "e4m3") == [0x70, 0x38, 0x58, 0x7E, 0x08, 0x08]
    assert codes([0.76], "e2m1") == [2]


def test_b08_no_nan_and_no_infinity_in_e2m1() -> None:
    """MurrellGroup/Microfloats.jl 23, jax-ml/ml_dtypes PR 181.

    An element that was NaN never comes back as an ordinary number where the scale can say NaN.
    """
    assert codes([NAN, -NAN, INF, -INF], "e2m1") == [0x7, 0x7, 0x7, 0xF]
    for name in ("torchao-mx-rceil-e2m1", "ocp-mx-floor-e2m1", "flamia-fp4-ue4m3"):
        tensor = quantize(row(1.0, NAN, 3.0), name)
        assert np.isnan(dequantize(tensor)[0, :16]).all()


def test_b09_bytes_0_and_255_of_e8m0() -> None:
    """NVIDIA/TransformerEngine PR 3262, pytorch/ao PR 4725."""
    scales = np.array([[0], [1], [127], [254], [255]], np.uint8)
    tensor = BlockTensor(
        codes=np.full((5, 1), 0x38, np.uint8), scales=scales, format=PRESETS[RCEIL], block=(1, 32)
    )
    bits = dequantize(tensor).view(np.uint32).ravel()
    assert bits[:4].tolist() == [0x00400000, 0x00800000, 0x3F800000, 0x7F000000]
    assert np.isnan(dequantize(tensor)[4, 0])


def test_b10_rounding_to_e8m0() -> None:
    """jax-ml/ml_dtypes PR 398, 298, PR 223."""
    x = [1, 1.125, 1.25, 1.5, 3, 5, 0.75, 6, 12]
    wanted = {
        "toward_zero": [127, 127, 127, 127, 128, 129, 126, 129, 130],
        "up": [127, 128, 128, 128, 129, 130, 127, 130, 131],
        "nearest_even": [127, 127, 127, 128, 128, 129, 126, 130, 130],
    }
    for rounding, right in wanted.items():
        assert codes(x, "e8m0", rounding=rounding) == right


def test_b11_beyond_the_range_of_e8m0() -> None:
    """graphcore-research/gfloat 62. No finite scale becomes NaN, from 2^-140 to the largest float32."""
    x = [2.0**-128, 2.0**-140, 2.0**-127, 2.0**127, 3.4e38, 0.0]
    for rounding in ("up", "toward_zero"):
        assert codes(x, "e8m0", rounding=rounding) == [0, 0, 0, 254, 254, 0]
    for name, preset in PRESETS.items():
        # EVEN of two libraries rounds that to infinity before anything else.
        if preset.scales_are_powers and preset.block[0] == 1 and not preset.even_overflow:
            ends = quantize(np.concatenate([row(2.0**-149), row(3e38)]), name).scales[:, 0]
            assert (ends < 255).all(), name


def test_b12_floor_clips_amax() -> None:
    """microsoft/microxcaling 4, ROCm/aiter PR 3212."""
    for name, scale, code, value in ((FLOOR, 128, 0x7E, 896), (RCEIL, 129, 0x77, 960)):
        tensor = quantize(row(957.0), name)
        assert (tensor.scales.item(), tensor.codes[0, 0]) == (scale, code)
        assert dequantize(tensor)[0, 0] == value


@pytest.mark.parametrize(
    ("bits", "rceil", "floor"),
    [
        (0x43DFFFFF, 127, 127),
        (0x43E00000, 127, 127),
        (0x43E00001, 128, 127),
        (0x44600000, 128, 128),
        (0x3FE00000, 119, 119),
        (0x3FE00001, 120, 119),
    ],
)
def test_b13_at_448_times_a_power_of_two(bits: int, rceil: int, floor: int) -> None:
    """pytorch/ao PR 1835. Every preset that rounds amax / 448 up by integers."""
    x = row(np.uint32(bits).view(np.float32))
    ups = (RCEIL, "torchao-mx-rceil-e4m3", "cudnn-mx-e4m3", "jax-mx-e4m3", "triton-mx-roundup-e4m3")
    for name in (*ups, "deepgemm-mx-e4m3"):
        assert quantize(x, name).scales.item() == rceil, name
    assert quantize(x, FLOOR).scales.item() == floor


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("place", [0, 1, 17, 31])
def test_b14_a_nan_in_the_amax(place: int, dtype: type) -> None:
    """NVIDIA/TransformerEngine 3550, pytorch/ao PR 4201 and PR 4271.

    A preset that lets a NaN through has a NaN block, wherever it stands, and no other block of it;
    one whose kernel ignores a NaN keeps it in its element.
    """
    x = np.ones((3, 32), np.float32)
    x[1, place] = NAN
    for name in (FLOOR, "torchao-mx-rceil-e4m3", "cutlass-mx-e4m3"):
        tensor = quantize(x.astype(dtype), name)
        assert tensor.scales.ravel().tolist()[1] == 255
        assert np.isnan(dequantize(tensor)).all(axis=1).tolist() == [False, True, False]
    tensor = quantize(x.astype(dtype), RCEIL)
    assert np.flatnonzero(np.isnan(dequantize(tensor)).ravel()).tolist() == [32 + place]
    assert tensor.scales.ravel().tolist() == [119] * 3


@pytest.mark.parametrize("infinity", [INF, -INF])
def test_b15_an_infinity_in_a_block(infinity: float) -> None:
    """pytorch/ao PR 4725. Never an ordinary number: 448 2^127 is infinite, a NaN block is NaN."""
    te = quantize(row(infinity, 1.0), RCEIL)
    assert te.scales.item() == 254
    assert te.codes[0, 0] == (0x7E if infinity > 0 else 0xFE)
    assert dequantize(te)[0, 0] == infinity
    ao = quantize(row(infinity, 1.0), "torchao-mx-rceil-e4m3")
    assert ao.scales.item() == 255
    assert np.isnan(dequantize(ao)).all()


def test_b16_a_block_of_zeros() -> None:
    """huggingface/kernels-community PR 680, graphcore-research/gfloat PR 14. No warning, no NaN, one scale."""
    x = row(0.0)
    x[0, 5] = -0.0
    wanted = {RCEIL: 0, FLOOR: 0, "deepgemm-mx-e4m3": 105, "qwix018-mx-e4m3": 127}
    wanted |= {"vllm-mx-fallback-e4m3": 1, "modelopt-mx-e4m3": 0, "torchao-mx-even-e4m3": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, scale in wanted.items():
            tensor = quantize(x, name)
            assert tensor.scales.item() == scale, name
            assert tensor.codes[0].tolist() == [0x80 if i == 5 else 0 for i in range(32)], name
            assert not dequantize(tensor).any()
            assert np.flatnonzero(np.signbit(dequantize(tensor))).tolist() == [5]
    # What XLA on CPU makes of it, which flushes 2^-127: a NaN, as that library gives.
    assert set(quantize(row(0.0), "jax-mx-e4m3").codes.ravel().tolist()) == {0xFF}


def test_b17_an_amax_whose_reciprocal_overflows() -> None:
    """leanprover/TensorLib PR 99."""
    values = [2.0**-149, 2.0**-130, 2.0**-119, 2.0**-118]
    x = np.concatenate([row(value) for value in values])
    for name in (FLOOR, RCEIL, "torchao-mx-rceil-e4m3"):
        tensor = quantize(x, name)
        assert tensor.scales.ravel().tolist() == [0, 0, 0, 1]
        assert tensor.codes[:, 0].tolist() == [0x00, 0x20, 0x78, 0x78]
        assert dequantize(tensor, np.float64)[:, 0].tolist() == [0.0, *values[1:]]


def test_b18_jax_on_cpu_flushes_subnormals() -> None:
    """jax-ml/jax 38995, 37762, 16200: numpy and JAX give the same bits under a scale of 2^-127."""
    import jax.numpy as jnp

    for library in (np, jnp):
        tensor = BlockTensor(
            codes=library.asarray([[0x78]], np.uint8),
            scales=library.asarray([[0]], np.uint8),
            format=PRESETS[RCEIL],
            block=(1, 32),
        )
        assert np.asarray(dequantize(tensor)).view(np.uint32).tolist() == [[0x04000000]]
        back = quantize(dequantize(tensor), RCEIL)
        assert (int(back.scales[0, 0]), int(back.codes[0, 0])) == (0, 0x78)


def test_b19_a_tensor_of_zeros() -> None:
    """vllm-project/compressed-tensors PR 595, radixark/miles PR 1054. A finite scale, also for a tiny amax."""
    zeros = np.zeros((2, 16), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = quantize(zeros, "te-nvfp4")
        assert tensor.tensor_scale == 1.0
        assert not tensor.codes.any()
        assert not tensor.scales.any()
        assert not dequantize(tensor).any()
        for amax in (7.8993225e-36, 7e-36, 2.0**-149):
            scale = quantize(zeros, "te-nvfp4", tensor_amax=np.float32(amax)).tensor_scale
            assert np.isfinite(scale)
            assert scale <= np.finfo(np.float32).max
    largest = np.finfo(np.float32).max
    assert quantize(zeros, "te-nvfp4", tensor_amax=np.float32(7e-36)).tensor_scale == largest


def test_b20_a_block_of_zeros_in_a_tensor() -> None:
    """NVIDIA/Model-Optimizer PR 1397. The scale of the zero block is never NaN."""
    x = row(1.0)
    tensor = quantize(x, "te-nvfp4")
    assert tensor.tensor_scale == 2688
    assert tensor.scales.tolist() == [[0x7E, 0x00]]
    assert tensor.codes[0].tolist() == [7] + [0] * 31
    for name, preset in PRESETS.items():
        if preset.has_tensor_scale and preset.block == (1, 16) and preset.signs is None:
            found = quantize(x, name)
            assert (found.scales & 0x7F).max() < 0x7F, name
            values = dequantize(found)
            assert values[0, 0] == 1.0, name
            if "jax" not in name:  # 0 / 0 there: elements of the block are NaN before the cast
                assert not values[0, 1:].any(), name


@pytest.mark.parametrize(
    ("t", "scale", "code", "element"),
    [
        (1e-7, 0x00, None, 0.0),
        (2.2e-6, 0x01, 5, 3.0),
        (3e-6, 0x01, 6, 4.0),
        (2**-9 / 448, 0x01, 7, 6.0),
    ],
)
def test_b21_a_scale_that_underflows(
    t: float, scale: int, code: int | None, element: float
) -> None:
    """pytorch/ao PR 4598, NVIDIA/Model-Optimizer PR 1898. Flattened, not NaN."""
    x = np.concatenate([np.ones((1, 16)), np.full((1, 16), t)], axis=1).astype(np.float32)
    tensor = quantize(x, "te-nvfp4")
    assert tensor.scales.tolist() == [[0x7E, scale]]
    values = dequantize(tensor)[0, 16:]
    assert set(values.tolist()) == {np.float32(element * 2.0**-9 / 2688).item()}
    if code is not None:
        assert set(tensor.codes[0, 16:].tolist()) == {code}
    for name in (ONE_ROUNDING, "torchao-nvfp4", "vllm-nvfp4-reference"):
        assert np.isfinite(dequantize(quantize(x, name))).all(), name


def test_b22_a_reciprocal_is_not_a_division() -> None:
    """arch-hdl-lang/arch-com 905, flashinfer-ai/flashinfer 3656. Each preset says which; both exist."""
    scale = decode(np.array([0x07], np.uint8), "ue4m3").item()
    v = np.float32(0.02392577938735485)
    x = row(np.float32(6 * scale), v, width=16)
    divides = quantize(x, "flamia-fp4-ue4m3")
    multiplies = quantize(x, "torchao-nvfp4-onelevel")
    assert divides.scales.item() == 0x07
    assert divides.codes[0, 1] == 3
    by_reciprocal = dataclasses.replace(
        PRESETS["flamia-fp4-ue4m3"], name="by reciprocal", scaled="x * (1 / scale)"
    )
    assert quantize(x, by_reciprocal).codes[0, 1] == 4
    assert multiplies.scales.item() == 0x08  # that one has a least scale


def test_b23_amax_is_of_magnitudes() -> None:
    """vllm-project/vllm PR 20578."""
    x = np.array([[-5376.0, *[1.0] * 15]], np.float32)
    tensor = quantize(x, "te-nvfp4")
    assert tensor.tensor_scale == 0.5
    assert tensor.scales.item() == 0x7E
    assert tensor.codes[0].tolist() == [0xF] + [0] * 15
    assert dequantize(tensor)[0].tolist() == [-5376.0] + [0.0] * 15


def test_b24_the_order_of_nibbles() -> None:
    """Comfy-Org/comfy-kitchen PR 41, ROCm/aiter 5547. The even column is low; an odd width is refused."""
    assert layout.pack_fp4(np.array([[0x2, 0xF]], np.uint8)).tolist() == [[0xF2]]
    for width in (15, 17):
        with pytest.raises(ValueError, match=str(width)):
            layout.pack_fp4(np.zeros((1, width), np.uint8))


def test_b25_the_128x4_interleave() -> None:
    """NVIDIA/Fuser PR 4745."""
    scales = ((np.arange(256)[:, None] * 8 + np.arange(8)) % 251).astype(np.uint8)
    tiled = np.asarray(layout.tile_scales_128x4(scales)).ravel()
    spots = {(0, 0): 0, (1, 0): 16, (31, 0): 496, (32, 0): 4, (33, 1): 21, (127, 3): 511}
    spots |= {(0, 4): 512, (128, 0): 1024, (129, 5): 1553, (255, 7): 2047}
    marked = np.zeros((256, 8), np.uint8)
    for number, place in enumerate(spots, 1):
        marked[place] = number
    found = np.asarray(layout.tile_scales_128x4(marked)).ravel()
    assert {offset: int(found[offset]) for offset in spots.values()} == {
        offset: number for number, offset in enumerate(spots.values(), 1)
    }
    np.testing.assert_array_equal(layout.untile_scales_128x4(tiled.reshape(-1), (256, 8)), scales)


@pytest.mark.parametrize(
    ("shape", "rowwise", "columnwise"),
    [((64, 64), (128, 4), (4, 128)), ((160, 96), (256, 4), (8, 128))],
)
def test_b26_the_padding_of_a_scale_plane(
    shape: tuple[int, int], rowwise: tuple[int, int], columnwise: tuple[int, int]
) -> None:
    """NVIDIA/TransformerEngine PR 1431, 3518, NVIDIA/cudnn-frontend 600. Zeros, and none of them read."""
    x = np.ones(shape, np.float32)
    rows = quantize(x, RCEIL).scales
    columns = quantize(x, RCEIL, block=(32, 1)).scales
    assert rows.shape == (shape[0], shape[1] // 32)
    assert columns.shape == (shape[0] // 32, shape[1])
    for plane, padded in ((rows, rowwise), (columns.T, columnwise[::-1])):
        tiled = np.asarray(layout.tile_scales_128x4(plane))
        assert tiled.size == padded[0] * padded[1]
        assert np.count_nonzero(tiled) == plane.size
        dirty = np.where(tiled == 0, np.uint8(0xFF), tiled)
        back = layout.untile_scales_128x4(dirty, plane.shape)
        np.testing.assert_array_equal(back, plane)


def test_b27_blocks_end_with_their_row() -> None:
    """DeepWok/mase PR 321."""
    x = np.array([[1.0] * 48, [1024.0] * 48], np.float32)
    for name in (FLOOR, RCEIL):
        assert quantize(x, name).scales.tolist() == [[119, 119], [129, 129]]
    for columns in (33, 31, 1):
        x = np.stack([np.ones(columns), np.full(columns, 1024.0)]).astype(np.float32)
        scales = quantize(x, FLOOR).scales
        assert scales.tolist() == [[119] * -(-columns // 32), [129] * -(-columns // 32)]


def test_b28_the_other_orientation() -> None:
    """NVIDIA/TransformerEngine 1490, PR 2634, Dao-AILab/quack PR 198.

    Quantizing again along columns differs from quantizing once; square blocks are the same both ways.
    """
    x = np.zeros((32, 32), np.float32)
    x[0, 0], x[1, 0] = 0.49, 1.0
    by_row = dequantize(quantize(x, FLOOR))
    assert by_row[0, 0] == 0.4375
    assert dequantize(quantize(x, FLOOR, block=(32, 1)))[0, 0] == 0.5
    assert dequantize(quantize(by_row, FLOOR, block=(32, 1)))[0, 0] == 0.4375
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((70, 45)) * 2.0 ** rng.integers(-9, 9, (70, 45))).astype(np.float32)
    for name, square in ((FLOOR, (32, 32)), (RCEIL, (32, 32)), ("te-nvfp4-2d", (16, 16))):
        whole = x[:64, :32] if square == (16, 16) else x
        one, other = quantize(whole, name, block=square), quantize(whole.T, name, block=square)
        np.testing.assert_array_equal(one.codes.T, other.codes)
        np.testing.assert_array_equal(one.scales.T, other.scales)
