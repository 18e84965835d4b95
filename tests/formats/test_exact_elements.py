"""Elements over scales that are powers of two, at every midpoint under every scale, by exact rationals.

Scales are given, so that elements beyond the range of the block come up too. What each library does
with an element is written from its formula; float32 operations are those of tests/independent.
"""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from flamia_ref.formats import PRESETS, encode_blocks
from tests.formats import exact
from tests.independent import float32

Cast = Callable[[int, int], int]  # float32 bits of a finite element and a scale code, to a code
SIGN = 0x80000000
HALF = Fraction(1, 2)


def grid_and_middles(element: str) -> list[Fraction]:
    """Every value of the format, every midpoint, half and a quarter of the smallest, two beyond."""
    spec = exact.SPECS[element]
    values = [exact.value(code, spec) for code in range(spec.last + 3)]
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    return sorted({*values, *middles, values[1] / 4, values[-1] * 4})


def inputs(element: str, scale: int) -> list[int]:
    """float32 bits of what lies on and one ulp beside those, times the scale; both signs; the ends."""
    power = exact.power(scale - 127)
    found = {0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF}
    for value in grid_and_middles(element):
        if value * power < exact.power(128):
            at = float32.nearest(value * power)
            found |= {at - 1, at, at + 1}
    magnitudes = [bits for bits in sorted(found) if 0 <= bits < float32.INFINITY]
    return [*magnitudes, *(bits | SIGN for bits in magnitudes)]


def over(bits: int, exponent: int) -> Fraction:
    """|x| 2^-exponent, exact."""
    return abs(float32.value(bits)) * exact.power(-exponent)


def sign_of(bits: int, element: str) -> int:
    return exact.SPECS[element].sign if bits & SIGN else 0


@functools.cache
def nearest_even(element: str) -> Cast:
    """x 2^(127 - c), to nearest even, saturating, the sign kept."""
    spec = exact.SPECS[element]

    @functools.cache
    def magnitude(bits: int, scale: int) -> int:
        return exact.encode(over(bits, scale - 127), spec)

    return lambda bits, scale: magnitude(bits & ~SIGN, scale) | sign_of(bits, element)


def with_scale_0(cast: Cast, special: Callable[[int], int]) -> Cast:
    """`cast`, but for scale code 0."""
    return lambda bits, scale: special(bits) if scale == 0 else cast(bits, scale)


def toward_zero_in_ties(element: str) -> Cast:
    """How many midpoints lie below |x|: what DeepGEMM and ModelOpt count."""
    spec = exact.SPECS[element]
    values = [exact.value(code, spec) for code in range(spec.last + 1)]
    middles = [(a + b) / 2 for a, b in pairwise(values)]

    def cast(bits: int, scale: int) -> int:
        x = over(bits, scale - 127)
        return sum(x > middle for middle in middles) | sign_of(bits, element)

    return cast


def zero_when(cast: Cast, element: str, *, plus: bool, always: bool = False) -> Cast:
    """A zero gets one sign: any zero code, or one whose x over its scale, in float32, is a zero."""
    sign = exact.SPECS[element].sign

    def signed(bits: int, scale: int) -> int:
        code = cast(bits, scale)
        vanishes = float32.nearest(over(bits, scale - 127)) == 0
        if vanishes or (always and code & (sign - 1) == 0):
            return 0 if plus else sign
        return code

    return signed


@functools.cache
def microxcaling(how: str, element: str) -> Cast:
    """floor(|A| + 1/2) in units of the step of |A|, the sum in float32; floor(|A|) for "floor"."""
    spec = exact.SPECS[element]

    @functools.cache
    def magnitude(bits: int, scale: int) -> int:
        a = over(bits, scale - 127)
        if float32.nearest(a) == 0:
            return 0
        exponent = max(exact.floor_log2(a), 1 - spec.bias)
        step = exact.power(exponent - spec.mantissa_bits)
        steps = a / step
        whole = math.floor(steps)
        if how != "floor":
            whole = math.floor(exact.float32(steps + HALF))
            if how == "even" and (steps - HALF) % 2 == 0:
                whole -= 1
        value = whole * step
        return exact.encode(min(value, exact.value(spec.last, spec)), spec)

    def cast(bits: int, scale: int) -> int:
        vanishes = float32.nearest(over(bits, scale - 127)) == 0
        return magnitude(bits & ~SIGN, scale) | (0 if vanishes else sign_of(bits, element))

    return cast


def jax_of_zero(bits: int) -> int:
    """2^-127 is a zero to XLA on CPU: x / 0 is infinite or NaN, and clips to 448."""
    if float32.flush(bits) & ~SIGN == 0:
        return 0xFF  # 0 / 0 has the sign bit on x86
    return 0x7E | (0x80 if bits & SIGN else 0)


def flashinfer(bits: int, scale: int) -> int:
    """Subnormals are zeros; 1 / scale is 0 for code 0, and for code 254, whose reciprocal is one."""
    if scale in (0, 254):
        return sign_of(bits, "e4m3")
    return nearest_even("e4m3")(float32.flush(bits), scale)


def casts() -> dict[str, Cast]:
    found: dict[str, Cast] = {}
    for element in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1"):
        plain = nearest_even(element)
        for name in ("ocp-mx-floor", "gfloat-mx", "cutlass-mx"):
            found[f"{name}-{element}"] = plain
        for mode in ("floor", "ceil", "even", "rceil"):
            found[f"torchao-mx-{mode}-{element}"] = plain
            # 0.18.0 divides by 2^-126 at least, and multiplies by 1 for code 0 in RCEIL.
            instead = 127 if mode == "rceil" else 1
            found[f"torchao018-mx-{mode}-{element}"] = with_scale_0(
                plain, lambda bits, plain=plain, instead=instead: plain(bits, instead)
            )
        for how in ("nearest", "even", "floor", "nearest-flush", "even-flush"):
            found[f"microxcaling-mx-{how}-{element}"] = microxcaling(
                how.removesuffix("-flush"), element
            )
        found[f"quark-mx-even-{element}"] = (
            plain
            if element in ("e4m3", "e5m2")
            else zero_when(plain, element, plus=True, always=True)
        )
    for element in ("e4m3", "e5m2", "e2m1"):
        zeros = with_scale_0(
            nearest_even(element), lambda bits, element=element: sign_of(bits, element)
        )
        for how in ("roundup", "rounddown"):
            found[f"triton-mx-{how}-{element}"] = zeros  # 1 / scale is 0 where the scale code is 0
        if element != "e2m1":
            found[f"te-mx-{element}"] = nearest_even(element)
    e4m3, e2m1 = nearest_even("e4m3"), nearest_even("e2m1")
    found["cudnn-mx-e4m3"] = with_scale_0(e4m3, lambda bits: sign_of(bits, "e4m3"))
    found["jax-mx-e4m3"] = with_scale_0(
        lambda bits, scale: e4m3(float32.flush(bits), scale), jax_of_zero
    )
    found["jax-mx-jit-e4m3"] = lambda bits, scale: e4m3(float32.flush(bits), scale)
    found["flashinfer-mx-e4m3"] = flashinfer
    found["qwix018-mx-e4m3"] = lambda bits, scale: e4m3(float32.flush(bits), scale)
    found["qwix018-mx-e2m1"] = lambda bits, scale: e2m1(float32.flush(bits), scale)
    found["modelopt-mx-e4m3"] = found["deepgemm-mx-e4m3"] = e4m3
    ties = toward_zero_in_ties("e2m1")
    found["modelopt-mx-e2m1"] = zero_when(ties, "e2m1", plus=False)
    found["deepgemm-mx-e2m1"] = zero_when(ties, "e2m1", plus=True, always=True)
    for element in ("e4m3", "e2m3", "e2m1"):
        cast = zero_when(nearest_even(element), element, plus=True)
        found[f"compressedtensors-mx-{element}"] = cast
    found["te-nvfp4-pow2"] = found["flamia-fp4-e8m0"] = e2m1
    found["vllm-mx-fallback-e4m3"] = e4m3
    return found


CASTS = casts()
SCALES = (0, 1, 127, 254)


@functools.cache
def drawn(element: str, scale: int) -> tuple[int, ...]:
    return tuple(inputs(element, scale))


@functools.lru_cache(maxsize=64)
def right_codes(cast: Cast, element: str, scale: int) -> tuple[int, ...]:
    """Many presets have one cast."""
    return tuple(cast(bits, scale) for bits in drawn(element, scale))


def check(name: str, scale: int) -> None:
    preset, cast = PRESETS[name], CASTS[name]
    if scale == 0 and name == "vllm-mx-fallback-e4m3":
        return  # it gives that to a NaN alone
    bits = drawn(preset.element.name, scale)
    wanted = right_codes(cast, preset.element.name, scale)
    x = np.array(bits, np.uint32)[None]
    scales = np.full((1, 1), scale, np.uint8)
    codes = encode_blocks(x, scales, preset, (1, "all")).ravel().tolist()
    wrong = [
        (scale, f"{b:#010x}", f"{ours:#04x}", f"{right:#04x}")
        for b, ours, right in zip(bits, codes, wanted, strict=True)
        if ours != right
    ]
    assert wrong == []


@pytest.mark.parametrize("name", CASTS)
def test_elements_at_every_midpoint(name: str) -> None:
    for scale in SCALES:
        check(name, scale)


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASTS)
def test_elements_at_every_midpoint_and_scale(name: str) -> None:
    for scale in range(255):
        check(name, scale)


def test_every_preset_with_scales_in_e8m0_is_here() -> None:
    assert set(CASTS) == {name for name, p in PRESETS.items() if p.scales_are_powers}
