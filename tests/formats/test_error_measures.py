"""`error`: against exact rationals, tables by hand, and known answers."""

import json
import math
import tracemalloc
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref import formats
from flamia_ref.formats import PRESETS, BlockTensor, QuantizationError, quantize
from flamia_ref.formats import error_measures as module
from tests.formats import exact

COUNTS = ("counted", "saturated", "flushed", "subnormal", "nan", "infinite", "lost")
EPSILON = Fraction(1, 2**53)


def element_value(code: int, name: str) -> Fraction | None:
    """The value of a code by the definition, None if it is no finite number."""
    spec = exact.SPECS[name]
    magnitude = code & (spec.sign - 1) if spec.signed else code
    if magnitude > spec.last:
        return None
    return exact.value(magnitude, spec) * (-1 if spec.signed and code & spec.sign else 1)


def tensor_scale_of(tensor: BlockTensor, i: int) -> Fraction:
    """What a value in row i is multiplied by."""
    if tensor.tensor_scale is None:
        return Fraction(1)
    flat = np.asarray(tensor.tensor_scale, np.float64).ravel()
    scale = Fraction(flat[i if flat.size > 1 else 0])
    return 1 / scale if tensor.format.tensor_divides else scale


def measured(x: npt.NDArray[Any], tensor: BlockTensor) -> dict[str, Any]:
    """What `error` should find in a matrix: sums and the largest error as exact rationals."""
    rows, columns = tensor.block
    element = tensor.format.element.name
    spec = exact.SPECS[element]
    codes, scales = np.asarray(tensor.codes), np.asarray(tensor.scales)
    found: dict[str, Any] = {name: np.zeros(scales.shape, int) for name in COUNTS}
    sums = {name: np.full(scales.shape, Fraction(0)) for name in ("signal", "noise", "largest")}
    elements = np.full(codes.shape, np.nan)
    for i, j in np.ndindex(*codes.shape):
        block = (i // rows, j // columns)
        given = float(x[i, j])
        if math.isnan(given) or math.isinf(given):
            found["nan" if math.isnan(given) else "infinite"][block] += 1
            continue
        value = element_value(int(codes[i, j]), element)
        scale = element_value(int(scales[block]), tensor.format.scale.name)
        if value is None or scale is None:
            found["lost"][block] += 1
            continue
        scale = scale * tensor_scale_of(tensor, i)
        value = value * scale
        found["counted"][block] += 1
        found["saturated"][block] += bool(
            abs(Fraction(given)) > exact.value(spec.last, spec) * scale and scale != 0
        )
        found["flushed"][block] += given != 0 and value == 0
        magnitude = int(codes[i, j]) & (spec.sign - 1)
        found["subnormal"][block] += 0 < magnitude < 1 << spec.mantissa_bits
        if tensor.format.tensor_divides:
            value = Fraction(float(value))  # as `dequantize` gives it
        elements[i, j] = float(value - Fraction(given))
        wrong = Fraction(elements[i, j])
        sums["signal"][block] += Fraction(given) ** 2
        sums["noise"][block] += wrong**2
        sums["largest"][block] = max(sums["largest"][block], abs(wrong))
    return found | sums | {"elements": elements}


def check(x: npt.NDArray[Any], tensor: BlockTensor, found: QuantizationError) -> None:
    """All measures of a matrix; float64 sums of n squares may be off by n + 1 roundings."""
    wanted = measured(x, tensor)
    np.testing.assert_array_equal(found.elements, wanted["elements"])
    assert found.elements.dtype == np.float64
    for name in COUNTS:
        blocks = getattr(found.blocks, name)
        np.testing.assert_array_equal(blocks, wanted[name], err_msg=name)
        assert getattr(found.total, name) == wanted[name].sum()
    for place in np.ndindex(*wanted["signal"].shape):
        roundings = int(wanted["counted"][place]) + 1
        for name in ("signal", "noise"):
            exactly = wanted[name][place]
            off = abs(Fraction(getattr(found.blocks, name)[place]) - exactly)
            assert off <= roundings * EPSILON * exactly
        assert Fraction(found.blocks.largest[place]) == wanted["largest"][place]
    for name in ("signal", "noise"):
        exactly = sum(wanted[name].ravel(), start=Fraction(0))
        roundings = x.size + 1
        assert abs(Fraction(getattr(found.total, name)) - exactly) <= roundings * EPSILON * exactly


def sample(shape: tuple[int, ...], seed: int, spread: int = 12) -> npt.NDArray[np.float32]:
    """Normal values times powers of two, a few of them zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread, shape)
    return np.where(rng.random(shape) < 0.05, 0, x).astype(np.float32)


CASES = [
    ("ocp-mx-floor-e4m3", None, (2, 64)),
    ("ocp-mx-floor-e2m1", (32, 1), (64, 3)),
    ("ocp-mx-floor-e3m2", (32, 32), (40, 50)),
    ("te-mx-e5m2", "all", (3, 50)),
    ("te-mx-e4m3", (32, 1), (33, 5)),
    ("torchao018-mx-floor-e4m3", None, (2, 64)),
    ("te-nvfp4", None, (3, 48)),
    ("te-nvfp4-2d", None, (32, 32)),
    ("te-nvfp4-rowscaled", None, (4, 32)),
    ("te-nvfp4-4over6-mse", None, (2, 48)),
    ("torchao-nvfp4", None, (2, 48)),
    ("flashinfer-nvfp4", None, (2, 48)),
    ("sage3-nvfp4", (16, 1), (20, 3)),
    ("jax-nvfp4", None, (2, 32)),
]


@pytest.mark.parametrize(("name", "block", "shape"), CASES, ids=str)
@pytest.mark.parametrize("spread", [1, 12])
def test_all_measures_against_exact_rationals(
    name: str, block: Any, shape: tuple[int, int], spread: int
) -> None:
    x = sample(shape, len(name), spread)
    given = (1, "all") if block == "all" else block
    check(x, quantize(x, name, block=given), formats.error(x, name, block=given))


@pytest.mark.parametrize("name", ["ocp-mx-floor-e4m3", "te-mx-e5m2", "te-mx-e4m3", "te-nvfp4"])
def test_nan_and_infinity_are_counted_and_left_out(name: str) -> None:
    """As tensors go: te ignores a NaN, so its neighbours count; ocp makes the block NaN, so they are lost."""
    x = np.ones((4, 32), np.float32)
    x[0, 3], x[1, 5], x[2, 7:9] = np.nan, np.inf, -np.inf
    tensor, found = quantize(x, name), formats.error(x, name)
    check(x, tensor, found)
    assert (found.total.nan, found.total.infinite) == (1, 3)
    row = found.blocks[0]
    if name.startswith("ocp"):
        assert (row.counted.sum(), row.nan.sum(), row.lost.sum()) == (0, 1, 31)
        assert np.isnan(row.rms).all()
        assert np.isnan(row.snr_db).all()
    if name.startswith("te-mx"):
        assert (row.counted.sum(), row.nan.sum(), row.lost.sum()) == (31, 1, 0)
        assert found.blocks[3].snr_db == np.inf


def test_one_block_by_hand() -> None:
    """Amax 7 is in [4, 8): the scale is 1, and E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    x = np.zeros((1, 32), np.float32)
    x[0, :9] = [4, 0.25, 0.75, 1.25, 2.5, 3.5, 5, 7, -0.5]
    found = formats.error(x, "ocp-mx-floor-e2m1")
    assert found.elements[0, :9].tolist() == [0, -0.25, 0.25, -0.25, -0.5, 0.5, -1, -1, 0]
    total = found.total
    assert (total.signal, total.noise, total.largest) == (110.9375, 2.6875, 1)
    assert total.rms == math.sqrt(2.6875 / 32)
    assert total.snr_db == pytest.approx(10 * math.log10(110.9375 / 2.6875), rel=1e-15)
    assert (total.counted, total.saturated, total.flushed, total.subnormal) == (32, 1, 1, 1)


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"])
@pytest.mark.parametrize("power", [-100, 0, 90])
def test_what_a_format_has_has_no_error(element: str, power: int) -> None:
    spec = exact.SPECS[element]
    grid = [float(exact.value(code, spec)) for code in range(spec.last + 1)]
    x = np.ldexp(np.float32(grid), power)[None]
    found = formats.error(x, f"ocp-mx-floor-{element}", block=(1, "all"))
    assert not found.elements.any()
    assert found.total.snr_db == np.inf
    assert found.total.rms == found.total.saturated == found.total.flushed == 0
    assert found.total.subnormal == (1 << spec.mantissa_bits) - 1


@pytest.mark.parametrize("points", [2, 8, 64])
def test_a_uniform_grid_has_a_twelfth_of_the_squared_step(points: int) -> None:
    """n points in the middle of n equal parts of a step err by (1 - 1 / n^2) / 12 in the mean square."""
    lattice = 2 + (np.arange(2 * points) + 0.5) / points  # E2M1 has 2, 3, 4 there: step 1
    x = np.concatenate([lattice, [4.0]]).astype(np.float32)[None]
    found = formats.error(x, "ocp-mx-floor-e2m1", block=(1, "all"))
    wanted = 2 * points * (1 - Fraction(1, points**2)) / 12
    assert Fraction(found.total.noise) == wanted


def test_a_scale_of_zero_flushes_and_does_not_saturate() -> None:
    """Transformer Engine gives these the code of 6 and a scale of 0, whose value is 0."""
    x = np.full((1, 16), 2.0**-30, np.float32)
    tensor = quantize(x, "te-nvfp4", tensor_amax=2688.0)
    assert (tensor.codes == 7).all()
    assert (tensor.scales == 0).all()
    total = formats.error(x, "te-nvfp4", tensor_amax=2688.0).total
    assert (total.flushed, total.saturated, total.subnormal) == (16, 0, 0)
    assert total.snr_db == 0  # the error is x


def test_saturated_is_beyond_the_largest_value_and_not_only_rounded_to_it() -> None:
    x = np.zeros((3, 32), np.float32)
    x[:, 0] = [448, np.nextafter(np.float32(448), np.float32(500)), 511]
    found = formats.error(x, "ocp-mx-floor-e4m3")
    assert found.blocks.saturated.ravel().tolist() == [0, 1, 1]
    x = np.zeros((2, 16), np.float32)
    x[:, 0] = [6, 6.25]
    # Amax 2688 makes the tensor scale 1; 6.25 / 6 is nearest to 1 in E4M3.
    found = formats.error(x, "te-nvfp4", tensor_amax=2688.0)
    assert found.blocks.saturated.ravel().tolist() == [0, 1]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_a_transformed_tensor_is_compared_with_the_transformed_x(dtype: Any) -> None:
    """x D H / 4 by a matrix of our own, of integers so small that every sum is exact."""
    hadamard = np.array([[1]])
    for _ in range(4):
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    preset = PRESETS["te-nvfp4-rht"]
    x = np.random.default_rng(4).integers(-3, 4, (4, 32))
    y = (x.reshape(4, 2, 16) * np.array(preset.signs) @ hadamard).reshape(4, 32) / 4
    given = x.astype(dtype)
    check(y, quantize(given, preset), formats.error(given, preset))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, ">f4"], ids=str)
def test_types_of_x(dtype: Any) -> None:
    x = sample((3, 64), 5, spread=2).astype(np.float16).astype(dtype)
    for name in ("te-mx-e4m3", "te-nvfp4"):
        check(x, quantize(x, name), formats.error(x, name))
    strided = np.asfortranarray(np.repeat(x, 2, axis=1))[:, ::2]
    check(x, quantize(x, "te-mx-e4m3"), formats.error(strided, "te-mx-e4m3"))


@pytest.mark.parametrize("name", ["te-mx-e4m3", "te-nvfp4", "te-nvfp4-rowscaled"])
def test_jax_gives_the_measures_of_numpy(name: str) -> None:
    x = sample((2, 3, 64), 8, spread=3)
    found, wanted = formats.error(jnp.asarray(x), name), formats.error(x, name)
    np.testing.assert_array_equal(found.elements, wanted.elements)
    assert found.to_json() == wanted.to_json()
    assert isinstance(found.tensor.codes, jax.Array)
    assert isinstance(found.elements, np.ndarray)


@pytest.mark.parametrize("name", ["te-nvfp4", "te-nvfp4-rowscaled", "ocp-mx-floor-e4m3"])
@pytest.mark.parametrize("part", [1, 100, 1 << 17])
def test_batches_are_measured_matrix_by_matrix(
    name: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large the parts are that it works in."""
    monkeypatch.setattr(module, "_PART", part)
    x = sample((2, 3, 5, 48), 9, spread=3)
    # An amax of all of x would couple the matrices.
    amax = np.abs(x).max(axis=(-2, -1), keepdims=True) if name == "te-nvfp4" else None
    whole = formats.error(x, name, tensor_amax=amax)
    assert whole.elements.shape == x.shape
    for place in np.ndindex(2, 3):
        one = formats.error(x[place], name, tensor_amax=None if amax is None else amax[place])
        np.testing.assert_array_equal(whole.elements[place], one.elements)
        for field in (*COUNTS, "signal", "noise", "largest"):
            blocks = getattr(whole.blocks, field)[place]
            np.testing.assert_array_equal(blocks, getattr(one.blocks, field))


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 2, 32), (1, 1)], ids=str)
def test_small_and_empty_arrays(shape: tuple[int, ...]) -> None:
    found = formats.error(np.zeros(shape, np.float32), "te-mx-e4m3")
    total = found.total
    assert found.elements.shape == shape
    assert (
        found.blocks.rms.shape == quantize(np.zeros(shape, np.float32), "te-mx-e4m3").scales.shape
    )
    assert (total.counted, total.noise) == (math.prod(shape), 0)
    assert np.isnan(total.snr_db) if total.counted == 0 else total.snr_db == np.inf
    assert np.isnan(total.rms) if total.counted == 0 else total.rms == 0


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset(name: str) -> None:
    x = sample((32, 32), 3, spread=2)
    found = formats.error(x, name)
    assert found.total.counted == 1024
    np.testing.assert_array_equal(found.tensor.codes, quantize(x, name).codes)
    if name != "vllm-mx-fallback-e4m3":  # its elements use eight binades fewer than they could
        assert found.total.snr_db > 10


def test_the_document() -> None:
    x = sample((40, 64), 2)
    x[7, 32:] = np.inf
    x[8] = [0.5, 0.25] * 32
    found = formats.error(x, "ocp-mx-floor-e4m3")
    document = json.loads(found.to_json())
    assert document["format"] == "ocp-mx-floor-e4m3"
    assert (document["block"], document["shape"], document["blocks"]) == (
        [1, 32],
        [40, 64],
        [40, 2],
    )
    assert document["total"]["infinite"] == 32
    assert document["total"]["rms"] == found.total.rms
    assert document["total"]["noise"] == found.total.noise
    worst = document["worst_blocks"]
    assert len(worst) == 8
    ranked = np.sort(found.blocks.rms[np.isfinite(found.blocks.rms)])[::-1]
    assert [block["rms"] for block in worst] == ranked[:8].tolist()
    for block in worst:
        assert block["counted"] == found.blocks.counted[tuple(block["index"])]
    # JSON has no NaN and no infinity.
    assert found.blocks[8, 0].to_dict()["snr_db"] == "inf"
    assert found.blocks[7, 1].to_dict()["rms"] == "nan"


@pytest.mark.parametrize("name", [n for n, f in PRESETS.items() if f.has_tensor_scale])
def test_a_tensor_of_zeros_has_no_error(name: str) -> None:
    """Without a warning, where the tensor scale is 2688 / 0 too; but for 0 / 0, which is NaN in JAX's."""
    total = formats.error(np.zeros((32, 64), np.float32), name).total
    assert total.counted + total.lost == 32 * 64
    assert total.counted == 0 or (total.signal, total.noise, total.largest) == (0, 0, 0)
    assert (total.saturated, total.flushed, total.subnormal) == (0, 0, 0)


def test_memory_stays_within_a_few_bytes_an_element() -> None:
    x = sample((1024, 2048), 1)
    formats.error(x[:2, :32], "te-nvfp4")
    tracemalloc.start()
    try:
        formats.error(x, "te-nvfp4")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The errors take 8, the codes and measures 5; what passes as parts does not grow with x.
    assert peak < 16 * x.size + 32 * 2**20


def test_bad_input() -> None:
    x = np.ones((2, 32), np.float32)
    with pytest.raises(TypeError, match="call it outside jit"):
        jax.make_jaxpr(lambda x: formats.error(x, "te-mx-e4m3").total)(x)
    with pytest.raises(ValueError, match="unknown preset"):
        formats.error(x, "te-mx-e4m4")
    with pytest.raises(TypeError, match="float32"):
        formats.error(x.astype(np.int32), "te-mx-e4m3")
    with pytest.raises(ValueError, match="no block"):
        formats.error(x, "te-mx-e4m3", block=(2, 2))
    with pytest.raises(ValueError, match="tensor_amax"):
        formats.error(x, "te-nvfp4", tensor_amax=-1.0)
