"""The scale of every preset with scales that are powers of two, at every boundary, by exact rationals.

Rules are written from what each library computes; float32 operations are those of
tests/independent. A block here has one element, so that amax is the value itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest

from flamia_ref.formats import FORMATS, PRESETS, BlockFormat, ScaleRule, quantize, quantize_bits
from flamia_ref.formats.contract import misled_by_log2
from tests.formats import exact, points
from tests.independent import float32

Rule = Callable[[int], int]  # bits of amax, finite, to a scale code
SUBNORMAL = 1 << 23  # the first bits of a normal number
LARGEST = 0x7F7FFFFF


def bits_of(x: float | Fraction) -> int:
    return float32.nearest(Fraction(x))


def up(d: int, *, least: int = 0) -> int:
    """Code of the smallest power of two that is not below d: 0 for 0, at most 254."""
    if float32.is_infinite(d):
        return 254
    return max(least, exact.ceil_scale(float32.value(d), 0))


@functools.cache
def floor(emax: int) -> Rule:
    return lambda amax: exact.floor_scale(float32.value(amax), emax)


@functools.cache
def ceil(emax: int) -> Rule:
    return lambda amax: exact.ceil_scale(float32.value(amax), emax)


@functools.cache
def even(emax: int, mantissa_bits: int, beyond: int | None = None) -> Rule:
    """`beyond`: the code where amax rounds to 2^128."""

    def rule(amax: int) -> int:
        half = exact.power(127 - mantissa_bits - 1)
        if beyond is not None and float32.value(amax) >= exact.power(128) - half:
            return beyond
        return exact.even_scale(float32.value(amax), emax, mantissa_bits)

    return rule


@functools.cache
def rceil(largest: float) -> Rule:
    return lambda amax: exact.rceil_scale(float32.value(amax), Fraction(largest))


@functools.cache
def divided(largest: float, *, least: int = 0) -> Rule:
    """amax / max in float32, rounded up; a subnormal quotient counts as any other."""
    return lambda amax: up(float32.divide(amax, bits_of(largest)), least=least)


def triton_up(largest: float) -> Rule:
    """The code of a quotient above 0 is 1 or more."""

    def rule(amax: int) -> int:
        d = float32.divide(amax, bits_of(largest))
        return up(d, least=1 if d else 0)

    return rule


def triton_down(emax: int) -> Rule:
    def rule(amax: int) -> int:
        d = float32.divide(amax, bits_of(2**emax))
        return 0 if d < SUBNORMAL else exact.floor_scale(float32.value(d), 0)

    return rule


def qwix(largest: float) -> Rule:
    def rule(amax: int) -> int:
        d = float32.divide(amax, bits_of(largest), ftz=True)
        return 127 if float32.value(d) < exact.power(-63) else up(d)

    return rule


def deepgemm(largest: float) -> Rule:
    def rule(amax: int) -> int:
        clamped = max(amax, np.float32(1e-4).view(np.uint32).item())
        return up(float32.divide(clamped, bits_of(largest)), least=1)

    return rule


def multiplied(largest: float) -> Rule:
    """amax times the reciprocal of max in float32, subnormals being zeros, rounded up."""
    reciprocal = bits_of(1 / Fraction(largest))
    return lambda amax: up(float32.multiply(amax, reciprocal, ftz=True))


def vllm(amax: int) -> int:
    return exact.floor_scale(max(float32.value(amax), exact.power(-126)), 0)


def of_float32(power: Callable[[Fraction], int]) -> Rule:
    """float32 bits of 2^(power - emax); 2^-23 where float32 has none so small."""

    def rule(amax: int) -> int:
        if amax == 0:
            return bits_of(exact.power(-23))
        e = power(float32.value(amax))
        return bits_of(exact.power(e)) if e >= -149 else bits_of(exact.power(-23))

    return rule


def ceil_log2(x: Fraction) -> int:
    e = exact.floor_log2(x)
    return e + (x != exact.power(e))


def rules() -> Iterator[tuple[str, str, Rule]]:
    """Preset, its element, and its rule."""
    for name in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"):
        f = FORMATS[name]
        emax, bits, largest = f.emax, f.mantissa_bits, f.max
        modes = {"floor": floor(emax), "ceil": ceil(emax), "rceil": rceil(largest)}
        yield f"ocp-mx-floor-{name}", name, floor(emax)
        yield f"gfloat-mx-{name}", name, floor(emax)
        # rcp.approx.ftz of every max is the nearest float32 (measured on sm_90).
        yield f"cutlass-mx-{name}", name, rceil(largest)
        for mode, rule in modes.items():
            yield f"torchao-mx-{mode}-{name}", name, rule
            old = divided(largest) if mode == "rceil" else rule
            yield f"torchao018-mx-{mode}-{name}", name, old
        yield f"torchao-mx-even-{name}", name, even(emax, bits, 255)
        yield f"torchao018-mx-even-{name}", name, even(emax, bits)
        for how in ("nearest", "even", "floor", "nearest-flush", "even-flush"):
            yield f"microxcaling-mx-{how}-{name}", name, floor(emax)
        yield f"quark-mx-even-{name}", name, even(emax, bits, 254)
        yield (
            f"quark-mx-floor-{name}",
            name,
            of_float32(lambda x, emax=emax: exact.floor_log2(x) - emax),
        )
        yield f"quark-mx-ceil-{name}", name, of_float32(lambda x, emax=emax: ceil_log2(x) - emax)
    yield "te-mx-e4m3", "e4m3", rceil(448)
    yield "te-mx-e5m2", "e5m2", rceil(57344)
    yield "flashinfer-mx-e4m3", "e4m3", multiplied(448)
    yield "cudnn-mx-e4m3", "e4m3", lambda amax: exact.exact_rceil_scale(float32.value(amax), 448)
    # XLA makes a division by a constant a product with its reciprocal.
    yield "jax-mx-e4m3", "e4m3", multiplied(448)
    yield "jax-mx-jit-e4m3", "e4m3", multiplied(448)
    for name, largest in (("e4m3", 448), ("e5m2", 57344), ("e2m1", 6)):
        yield f"triton-mx-roundup-{name}", name, triton_up(largest)
        yield f"triton-mx-rounddown-{name}", name, triton_down(FORMATS[name].emax)
    yield "modelopt-mx-e4m3", "e4m3", divided(448)
    yield "modelopt-mx-e2m1", "e2m1", divided(6)
    yield "compressedtensors-mx-e4m3", "e4m3", even(8, 1, 255)
    yield "compressedtensors-mx-e2m3", "e2m3", even(2, 3, 255)
    yield "compressedtensors-mx-e2m1", "e2m1", even(2, 1, 255)
    yield "qwix018-mx-e4m3", "e4m3", qwix(448)
    yield "qwix018-mx-e2m1", "e2m1", qwix(6)
    yield "deepgemm-mx-e4m3", "e4m3", deepgemm(448)
    yield "deepgemm-mx-e2m1", "e2m1", deepgemm(6)
    yield "vllm-mx-fallback-e4m3", "e4m3", vllm
    yield "te-nvfp4-pow2", "e2m1", divided(6)
    yield "flamia-fp4-e8m0", "e2m1", rceil(6)


RULES = list(rules())


def boundaries(element: str) -> list[int]:
    """Bits of max 2^k, of 2^k and of the ties of EVEN for every k of float32, one ulp either side.

    Every subnormal power of two and three of them, and the ends of float32, too.
    """
    f = FORMATS[element]
    tops = [Fraction(f.max), Fraction(1)]
    tops += [2 - exact.power(-(bits + 1)) for bits in {f.mantissa_bits, 1, 3}]
    found = {0, 1, 2, 3, LARGEST, LARGEST - 1, SUBNORMAL - 1, SUBNORMAL, SUBNORMAL + 1}
    found |= {np.float32(1e-4).view(np.uint32).item() + step for step in (-1, 0, 1)}
    for top in tops:
        for k in range(-151 - exact.floor_log2(top), 129 - exact.floor_log2(top)):
            at = float32.nearest(top * exact.power(k))
            found |= {at - 1, at, at + 1}
    return sorted(bits for bits in found if 0 <= bits <= LARGEST)


BOUNDARIES = {element: boundaries(element) for element in {element for _, element, _ in RULES}}


def found_scales(bits: list[int], block_format: BlockFormat) -> list[int]:
    x = np.array(bits, np.uint32)[:, None].view(np.float32)
    full = np.zeros((len(bits), block_format.block[1]), np.float32)
    full[:, :1] = x
    scales: list[int] = quantize(full, block_format).scales[:, 0].tolist()
    return scales


def wrong(bits: list[int], block_format: BlockFormat, rule: Rule) -> list[tuple[str, int, int]]:
    """Bits, the scale found and the right one, where they differ; smallest first."""
    found = found_scales(bits, block_format)
    return [
        (f"{b:#010x}", ours, right)
        for b, ours, right in zip(bits, found, right_scales(rule, tuple(bits)), strict=True)
        if ours != right
    ]


@functools.cache
def right_scales(rule: Rule, bits: tuple[int, ...]) -> list[int]:
    """Many presets have one rule."""
    return list(map(rule, bits))


@pytest.mark.parametrize(("name", "element", "rule"), RULES, ids=[name for name, *_ in RULES])
def test_scales_at_every_boundary(name: str, element: str, rule: Rule) -> None:
    assert wrong(BOUNDARIES[element], PRESETS[name], rule) == []


def test_every_preset_with_powers_of_two_is_here() -> None:
    powers = {
        name
        for name, preset in PRESETS.items()
        if preset.scales_are_powers or preset.rule in (ScaleRule.FLOOR, ScaleRule.CEIL)
    }
    assert {name for name, *_ in RULES} == powers


@pytest.mark.parametrize("bits", range(8))
def test_even_bits(bits: int) -> None:
    """Ties of every width, in every binade."""
    preset = dataclasses.replace(PRESETS["torchao-mx-even-e4m3"], even_bits=bits)
    tie = 2 - exact.power(-(bits + 1))
    near = {
        float32.nearest(tie * exact.power(k)) + step
        for k in range(-149, 128)
        for step in (-1, 0, 1)
    }
    near |= {
        float32.nearest((1 + exact.power(-(bits + 1))) * exact.power(k)) for k in range(-149, 128)
    }
    assert wrong(sorted(b for b in near if b <= LARGEST), preset, even(8, bits, 255)) == []


@pytest.mark.parametrize("exponent", [-3, 0, 5, 15])
def test_another_exponent(exponent: int) -> None:
    for rule, right in (("floor", floor), ("ceil", ceil)):
        preset = dataclasses.replace(
            PRESETS["ocp-mx-floor-e4m3"], rule=ScaleRule(rule), exponent=exponent
        )
        assert wrong(BOUNDARIES["e4m3"], preset, right(exponent)) == []


def test_a_product_and_a_quotient_give_the_same_scales() -> None:
    """amax fl(1/max) and amax/max never differ in the power of two above them, for no mantissa.

    All 2^23 mantissas of a binade, in steps here; the nearest 4096 to max itself one by one.
    """
    for element in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"):
        top = bits_of(FORMATS[element].max)
        near = np.arange(top - 2048, top + 2048, dtype=np.uint32)
        spread = np.arange(0x3F800000, 0x40000000, 1021, dtype=np.uint32)
        bits = np.concatenate([near, spread])[:, None]
        product = dataclasses.replace(
            PRESETS["te-mx-e4m3"], element=FORMATS[element], rule=ScaleRule.RCEIL
        )
        exactly = dataclasses.replace(product, rule=ScaleRule.EXACT_RCEIL)
        one, other = (quantize_bits(bits, f, (1, 32))[1] for f in (product, exactly))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["te-mx-e4m3", "torchao-mx-even-e2m1", "triton-mx-roundup-e5m2"])
@pytest.mark.parametrize("place", [0, 5, 31])
def test_the_place_and_the_sign_of_amax_do_not_count(name: str, place: int) -> None:
    """B14, B23: amax is over magnitudes, wherever it stands, and not over the largest signed value."""
    _, element, rule = next(entry for entry in RULES if entry[0] == name)
    bits = BOUNDARIES[element][::7]
    x = np.zeros((len(bits), 32), np.uint32)
    x[:, place] = np.array(bits, np.uint32) | np.uint32(0x80000000)
    x[:, (place + 1) % 32] = np.array(bits, np.uint32) >> 1  # positive and smaller
    scales = quantize(x.view(np.float32), name).scales[:, 0].tolist()
    assert scales == [rule(b) for b in bits]


# Where a library that takes log2 is out of contract, and nowhere else.


@pytest.mark.parametrize("name", [name for name, *_ in RULES if PRESETS[name].by_log2])
def test_misled_by_log2_is_beside_powers_of_two_alone(name: str) -> None:
    """Where log2 may mislead, amax or its quotient lies within 32 ulp of a power of two."""
    preset = PRESETS[name]
    largest = preset.element.max if preset.rule is ScaleRule.QUOTIENT else 1.0
    bits = np.concatenate([points.random_bits32(4000, 1), points.narrow_range(4000, 2)])
    bits = np.unique(bits & np.uint32(0x7FFFFFFF))
    bits = bits[(bits >= 1 << 23) & (bits < np.uint32(0x7F800000))]
    bits = np.union1d(bits, np.array([b for b in BOUNDARIES[preset.element.name] if b], np.uint32))
    misled = misled_by_log2(bits, preset)
    for b in bits[misled].tolist():
        d = float32.divide(b, bits_of(largest))
        if d < SUBNORMAL:
            continue  # a unit of a subnormal is wider
        away = min(d & 0x7FFFFF, -(d & 0x7FFFFF) % (1 << 23))
        assert away <= 32, f"{b:#010x}"
    if misled.any():  # and the boundary itself is one
        assert not misled.all()
