"""Libraries that find exponents by log2: microxcaling, Quark, qwix."""

import dataclasses
import functools
import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.formats import BF16, PRESETS, dequantize, quantize
from flamia_ref.formats.block import Log2
from flamia_ref.formats.contract import misled_by_log2, misled_elements
from flamia_ref.formats.logarithms import exponents, rounded_exponents

Bits = npt.NDArray[np.uint32]
bfloat16 = ml_dtypes.bfloat16

MX = {"e4m3": (4, 3, 8, 448.0), "e5m2": (5, 2, 15, 57344.0), "e2m1": (2, 1, 2, 6.0)}


def float32(bits: Any) -> npt.NDArray[np.float32]:
    return np.asarray(bits, np.uint32).view(np.float32)


def bits_of(values: Any) -> Bits:
    return np.asarray(values, np.float32).view(np.uint32)


def same(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Equal to the bit, all NaN alike."""
    return bool(((bits_of(a) == bits_of(b)) | (np.isnan(a) & np.isnan(b))).all())


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        return values.astype(bfloat16).astype(np.float32)


def test_exact_exponents() -> None:
    bits = np.array(
        [1, 2, 3, 0x7FFFFF, 0x800000, 0x800001, 0x3F800000, 0x3F7FFFFF, 0x7F7FFFFF], np.uint32
    )
    values = [Fraction(float(value)) for value in float32(bits)]
    floors = [
        next(k for k in range(-150, 129) if Fraction(2) ** (k + 1) > value) for value in values
    ]
    ceils = [next(k for k in range(-150, 129) if Fraction(2) ** k >= value) for value in values]
    assert exponents(bits, up=False).tolist() == floors
    assert exponents(bits, up=True).tolist() == ceils
    assert exponents(bits_of([0.0]), up=False).tolist() == [-4096]


def middle_below(n: int) -> Fraction:
    """Halfway between n and the next bfloat16 below it."""
    below = np.array(n, bfloat16).view(np.uint16).astype(np.int64) + (1 if n < 0 else -1)
    return (n + Fraction(float(below.astype(np.uint16).view(bfloat16)))) / 2


def first_of_next(exponent: int) -> int:
    """The least m of 129..256 for which log2(m 2^(exponent - 7)) rounds in bfloat16 to exponent + 1."""
    if exponent == -1:
        return 256  # bfloat16 has values that near to 0
    target = middle_below(exponent + 1) - exponent + 7
    # log2 m >= a / b where m^b >= 2^a, in integers. It is no tie: m is no power of two.
    return next(m for m in range(129, 257) if m**target.denominator >= 1 << target.numerator)


def test_log2_rounded_to_bfloat16_is_that_of_exact_integers() -> None:
    table = rounded_exponents(BF16, Log2.ROUNDED, up=False)
    for exponent in range(-126, 128):
        first = first_of_next(exponent)
        wanted = [exponent + (m >= first) for m in range(128, 256)]
        start = (exponent + 127) << 7
        assert table[start : start + 128].tolist() == wanted, exponent


def test_log2_by_a_ratio_is_that_of_jax() -> None:
    """Normal numbers: XLA on CPU makes zeros of the others."""
    import jax.numpy as jnp

    codes = np.arange(0x80, 0x7F80, dtype=np.uint16)
    taken = jnp.ceil(jnp.log2(jnp.asarray(codes.view(bfloat16)))).astype(jnp.float32)
    table = rounded_exponents(BF16, Log2.RATIO, up=True)
    np.testing.assert_array_equal(table[codes], np.asarray(taken))


def fake_quantized(
    x: npt.NDArray[Any], element: str, rounding: str, *, flush: bool
) -> npt.NDArray[np.float32]:
    """The steps of _quantize_mx as facts tell them, each rounded to bfloat16 by ml_dtypes."""
    exponent_bits, mantissa_bits, emax, largest = MX[element]

    def b(values: Any) -> npt.NDArray[Any]:
        return np.asarray(values, np.float32).astype(bfloat16)

    def f(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        return values.astype(np.float32)

    def whole_log2(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        return np.floor(f(b(np.log2(f(values).astype(np.float64)))))

    amax = np.abs(x).max(axis=-1, keepdims=True)
    shared = whole_log2(np.where(amax == 0, bfloat16(2.0**-126), amax))
    if flush:
        x = b(f(x) * (shared > -127))
    shared = np.maximum(np.where(shared - emax > 127, np.nan, shared - emax), np.float32(-127))
    a = b(f(x) / np.exp2(shared))
    private = whole_log2(b(np.abs(f(a)) + (f(a) == 0)))
    private = np.maximum(private, np.float32(2 - 2 ** (exponent_bits - 1)))
    v = b(np.abs(f(b(f(a) / np.exp2(private)))) * 2.0**mantissa_bits)
    match rounding:
        case "floor":
            whole = np.floor(f(v))
        case "nearest":
            whole = np.floor(f(b(f(v) + 0.5)))
        case "even":
            odd = np.fmod(f(b(f(v) - 0.5)), 2.0) == 0
            whole = np.floor(f(b(f(v) + 0.5))) - odd
    found = np.sign(f(a)) * whole / 2.0**mantissa_bits * np.exp2(private)
    found = np.clip(found, -largest, largest)
    return f(b(f(b(found)) * np.exp2(shared)))


def blocks_of_bfloat16(count: int, seed: int) -> npt.NDArray[Any]:
    """Blocks of any exponents, most elements within some binades of the largest, some zeros."""
    random = np.random.default_rng(seed)
    top = random.integers(1, 254, (count, 1))
    field = np.clip(top - random.integers(0, 14, (count, 32)), 0, 254)
    codes = (field << 7) | random.integers(0, 128, (count, 32))
    codes[random.random((count, 32)) < 0.05] = 0
    codes |= random.integers(0, 2, (count, 32)) << 15
    return codes.astype(np.uint16).view(bfloat16)


@pytest.mark.parametrize("element", MX)
@pytest.mark.parametrize(
    ("rounding", "flush"),
    [("nearest", False), ("even", False), ("floor", False), ("nearest", True), ("even", True)],
)
def test_microxcaling_in_bfloat16(element: str, rounding: str, flush: bool) -> None:
    """Every step in bfloat16, log2 and the sum with 1/2 too, on other blocks than the recorded ones."""
    x = blocks_of_bfloat16(3000, 7)
    with np.errstate(all="ignore"):
        wanted = fake_quantized(x, element, rounding, flush=flush)
    preset = f"microxcaling-mx-{rounding}{'-flush' if flush else ''}-{element}"
    assert same(to_bfloat16(dequantize(quantize(x, preset))), wanted)


@pytest.mark.parametrize("rounding", ["nearest", "even"])
@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
def test_half_is_added_and_cut(rounding: str, dtype: Any) -> None:
    """e4m3 under scale 1: half of its smallest value is 2^-10, and the value just below that rounds up."""
    half = np.array(2.0**-10, dtype)
    below = [half]
    for _ in range(2):
        below.append(np.nextafter(below[-1], np.array(0, dtype)))
    x = np.zeros((1, 32), dtype)
    x[0, :6] = [256, *below[1:], -below[1], -below[2], -0.0]
    for name, first in ((f"microxcaling-mx-{rounding}-e4m3", 1), ("ocp-mx-floor-e4m3", 0)):
        codes = quantize(x, name).codes[0, :6].tolist()
        zero = 0x80 if first == 0 else 0
        assert codes == [0x78, first, 0, 0x80 | first, 0x80, zero], name


def test_a_product_that_underflows_has_no_sign() -> None:
    """-2^-149 over a scale of 2^100 is -0 in float32, whose sign microxcaling drops; -2^-40 is not."""
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = 2.0**108, -(2.0**-149), -(2.0**-40)
    assert quantize(x, "microxcaling-mx-even-e4m3").codes[0, :3].tolist() == [0x78, 0x00, 0x80]


@pytest.mark.parametrize(("dtype", "least"), [(np.float32, 2.0**-126), (bfloat16, 108 * 2.0**-133)])
def test_blocks_below_the_normal_numbers_are_zeros(dtype: Any, least: float) -> None:
    """In bfloat16 the log2 of 108 2^-133, which is -126.2451, rounds to -126; that of 107 2^-133 to -126.5."""
    kept = np.array(least, dtype)
    assert np.array(math.log2(108) - 133, bfloat16) == -126
    assert np.array(math.log2(107) - 133, bfloat16) == -126.5
    x = np.zeros((2, 32), dtype)
    x[:, 0] = kept, np.nextafter(kept, np.array(0, dtype))
    x[:, 1] = -x[:, 0]
    values = dequantize(quantize(x, "microxcaling-mx-nearest-flush-e4m3"))
    assert (values[0, :2] != 0).all()
    assert bits_of(values[1]).tolist() == [0] * 32


def test_quark_scales_below_those_of_e8m0() -> None:
    """float32 has them down to 2^-149; a smaller one is 0, and 2^-23 takes its place, under which x is lost."""
    x = np.zeros((4, 32), np.float32)
    x[:, 0] = 2.0**-141, 2.0**-142, 0.0, 3 * 2.0**-149
    found = quantize(x, "quark-mx-floor-e4m3")
    epsilon = 2.0**-23
    assert float32(found.scales).ravel().tolist() == [2.0**-149, epsilon, epsilon, epsilon]
    assert dequantize(found)[:, 0].tolist() == [2.0**-141, 0, 0, 0]
    narrow = np.zeros((2, 32), bfloat16)
    narrow[:, 0] = 2.0**-125, 2.0**-126
    found = quantize(narrow, "quark-mx-floor-e4m3")
    assert float32(found.scales).ravel().tolist() == [2.0**-133, epsilon]


@pytest.mark.parametrize("mode", ["floor", "ceil"])
def test_quark_in_bfloat16(mode: str) -> None:
    x = blocks_of_bfloat16(3000, 11)
    amax = np.abs(x.astype(np.float64)).max(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        taken = np.log2(amax).astype(bfloat16).astype(np.float32)
        scale = np.exp2((np.floor if mode == "floor" else np.ceil)(taken).astype(np.float64) - 8)
    scale = scale.astype(np.float32).astype(bfloat16).astype(np.float32)
    scale[scale == 0] = 2.0**-23
    found = quantize(x, f"quark-mx-{mode}-e4m3")
    np.testing.assert_array_equal(float32(found.scales), scale)
    cut = np.clip(x.astype(np.float32) / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert found.codes.tobytes() == cut.tobytes()


@pytest.mark.parametrize("up", [False, True])
def test_neighbourhoods_hold_what_misleads_a_correct_log2(up: bool) -> None:
    """Up to 44 units below the largest powers, 22 above; and 1.2 times as far they end."""
    preset = PRESETS[f"quark-mx-{'ceil' if up else 'floor'}-e4m3"]
    farthest = 0
    for power in range(-148, 128 if up else 129):
        top = int(bits_of(2.0**power)) if power < 128 else 0x7F800000
        steps = np.arange(1, 65)
        places = top + steps if up else top - steps
        bits = places[places > 0].astype(np.uint32)
        taken = np.log2(float32(bits).astype(np.float64)).astype(np.float32)
        misled = np.ceil(taken) <= power if up else np.floor(taken) >= power
        covered = misled_by_log2(bits, preset)
        assert not (misled & ~covered).any(), power
        assert covered.sum() <= ((26 if up else 53) if abs(power) < 128 else 64)
        farthest = max(farthest, int(misled.sum()))
    assert farthest == (22 if up else 44)
    assert not misled_by_log2(bits_of([1.0, 1.5, 2.0**-60, 0.0, np.inf, np.nan]), preset).any()


def test_a_ratio_errs_at_powers_of_two_too() -> None:
    """JAX's log2 in float32 beside every power of two, up to 32 units away."""
    import jax.numpy as jnp

    preset = dataclasses.replace(PRESETS["qwix018-mx-e4m3"], quotient="amax")
    steps = np.arange(-32, 33)
    tops = bits_of([2.0**power for power in range(-62, 127)]).astype(np.int64)
    bits = (tops[:, None] + steps).astype(np.uint32)
    taken = np.asarray(jnp.ceil(jnp.log2(jnp.asarray(float32(bits)))))
    wrong = taken != exponents(bits, up=True)
    assert wrong[:, 32].any()  # at the powers themselves
    assert not (wrong & ~misled_by_log2(bits, preset)).any()


def test_nothing_is_excluded_in_bfloat16() -> None:
    bits = np.arange(0x8000, dtype=np.uint32) << np.uint32(16)
    for name in ("microxcaling-mx-floor-e4m3", "quark-mx-ceil-e2m1", "qwix018-mx-e4m3"):
        assert not misled_by_log2(bits, PRESETS[name], source=BF16).any()
        assert not misled_elements(bits, np.full_like(bits, 127), PRESETS[name], BF16).any()


def test_elements_cut_to_twice_their_step() -> None:
    """Just below 16, over its scale, log2 in float32 is 4; nearest roundings give 16 either way."""
    bits = bits_of([np.nextafter(np.float32(64), np.float32(0)), 64, 63])
    scale = np.full(3, 129, np.uint8)
    floor, nearest = (
        PRESETS[f"microxcaling-mx-{rounding}-e4m3"] for rounding in ("floor", "nearest")
    )
    assert misled_elements(bits, scale, floor).tolist() == [True, False, False]
    assert not misled_elements(bits, scale, nearest).any()


@functools.cache
def odd_blocks(dtype: Any) -> npt.NDArray[Any]:
    """Ordinary blocks, and one each of zeros, NaN alone, NaN beside numbers, infinities, tiny numbers."""
    x = blocks_of_bfloat16(400, 3).astype(np.float32)
    x[0], x[1], x[2, 5], x[3, 7] = 0, np.nan, np.nan, -np.inf
    x[4] *= 2.0**-20
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        "microxcaling-mx-nearest-flush-e4m3",
        "microxcaling-mx-floor-e5m2",
        "quark-mx-ceil-e2m1",
        "quark-mx-even-e4m3",
        "qwix018-mx-e4m3",
    ],
)
def test_jax_gives_the_same(name: str, dtype: Any) -> None:
    import jax.numpy as jnp

    x = odd_blocks(dtype)
    ours, theirs = quantize(x, name), quantize(jnp.asarray(x), name)
    np.testing.assert_array_equal(ours.codes, np.asarray(theirs.codes))
    np.testing.assert_array_equal(ours.scales, np.asarray(theirs.scales))
    assert same(dequantize(ours), np.asarray(dequantize(theirs)))
