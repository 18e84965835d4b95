"""Properties of encoders and quantizers on bit patterns, and which presets they do not hold for, and why.

Inputs are integers, so that NaN, infinities, subnormals and both zeros come up and shrink well.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from flamia_ref.formats import (
    FORMATS,
    PRESETS,
    BlockFormat,
    Rounding,
    decode,
    dequantize,
    encode,
    quantize,
)
from flamia_ref.formats.block import ZeroSign
from tests.formats.representatives import REPRESENTATIVES

Bits = npt.NDArray[np.uint32]
SIGN = np.uint32(0x80000000)
STOCHASTIC = (Rounding.STOCHASTIC, Rounding.STOCHASTIC_SUM)
ROWS = 4  # of an example
NEAREST = (Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY, Rounding.NEAREST_ZERO)


def some(*strategies: Any) -> Callable[[Callable[..., None]], Callable[[str], None]]:
    """A test of presets by examples: daily a few presets that have every policy between them; nightly all."""

    def decorated(test: Callable[..., None]) -> Callable[[str], None]:
        @pytest.mark.parametrize("names", ["few", pytest.param("all", marks=pytest.mark.nightly)])
        def run(names: str) -> None:
            @settings(max_examples=5 if names == "few" else 12)
            @given(st.tuples(*strategies))
            def examples(drawn: tuple[Any, ...]) -> None:
                test(names, *drawn)

            examples()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorated


any_bits = arrays(np.uint32, (ROWS, 32), elements=st.integers(0, (1 << 32) - 1))
sign_and_mantissa = st.integers(0, (1 << 24) - 1)


def floats(sign_mantissa: Any, field: Any) -> Bits:
    """float32 bits of a sign with a mantissa, and an exponent field."""
    both = np.asarray(sign_mantissa, np.uint32)
    mantissa = both & np.uint32(0x7FFFFF)
    found: Bits = (both >> np.uint32(23) << np.uint32(31)) | mantissa
    return found | (np.asarray(field, np.uint32) << np.uint32(23))


@st.composite
def ordinary_rows(draw: Any, *, low: int = 100, high: int = 150, span: int = 12) -> Bits:
    """Rows of 32: fields of a row within `span` below its own; zeros of both signs among them."""
    both = draw(arrays(np.uint32, (ROWS, 32), elements=sign_and_mantissa))
    top = draw(arrays(np.int64, (ROWS, 1), elements=st.integers(low + span, high)))
    below = draw(arrays(np.int64, (ROWS, 32), elements=st.integers(0, span)))
    bits = floats(both, top - below)
    zero = draw(arrays(np.bool_, (ROWS, 32), elements=st.booleans(), fill=st.just(False)))
    return np.where(zero, bits & SIGN, bits)


def as_float(bits: Bits) -> npt.NDArray[np.float32]:
    return bits.view(np.float32)


def presets(
    names: str, keep: Callable[[BlockFormat], bool] = lambda _: True
) -> dict[str, BlockFormat]:
    """Those with blocks of a row, the few or all; blocks of 16 rows have their own test."""
    chosen = REPRESENTATIVES if names == "few" else tuple(PRESETS)
    return {
        name: PRESETS[name]
        for name in chosen
        if PRESETS[name].block in ((1, 32), (1, 16)) and keep(PRESETS[name])
    }


def is_nan_code(codes: npt.NDArray[Any], f: BlockFormat) -> npt.NDArray[np.bool_]:
    return np.isnan(decode(codes, f.element))


# Scalar formats.


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("overflow", ["saturate", "native"])
def test_a_code_decodes_encodes_and_decodes_to_its_value(name: str, overflow: str) -> None:
    """Every code of 16 bits and fewer, NaN and infinities too, which saturation makes the largest value."""
    f = FORMATS[name]
    if f.bits <= 16:
        codes = np.arange(1 << f.bits, dtype=f.code_dtype)
    else:
        codes = np.random.default_rng(1).integers(0, 1 << 32, 20000, np.uint32)
    values = decode(codes, name)
    back = decode(encode(values, name, overflow=overflow), name)
    if overflow == "saturate":
        values = np.clip(values, -np.float32(f.max), np.float32(f.max))
    if not f.has_nan:
        assert not np.isnan(values).any()
    np.testing.assert_array_equal(back.view(np.uint32), values.view(np.uint32))


@pytest.mark.parametrize("rounding", [r for r in Rounding if r not in STOCHASTIC])
@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=5)
@given(any_bits)
def test_encode_is_monotone_and_odd(rounding: Rounding, name: str, bits: Bits) -> None:
    f = FORMATS[name]
    x = np.sort(as_float(bits)[~np.isnan(as_float(bits))])
    codes = encode(x, name, rounding=rounding)
    if f.signed:
        values = decode(codes, name, np.float64)
        assert (np.diff(values) >= 0).all()
        mirror = {Rounding.UP: Rounding.DOWN, Rounding.DOWN: Rounding.UP}.get(rounding, rounding)
        negated = encode(-x, name, rounding=mirror)
        np.testing.assert_array_equal(negated, codes ^ f.code_dtype.type(f.sign_code))
    else:  # the magnitude counts, and "up" is away from zero
        sizes = np.sort(np.abs(x))
        assert (np.diff(encode(sizes, name, rounding=rounding).astype(int)) >= 0).all()
        np.testing.assert_array_equal(encode(-x, name, rounding=rounding), codes)


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.bits <= 16])
@settings(max_examples=8)
@given(any_bits)
def test_nearest_roundings_stay_within_half_a_spacing(name: str, bits: Bits) -> None:
    """Inside the range: no neighbour of the code is nearer; beyond it the largest value."""
    f = FORMATS[name]
    x = as_float(bits)[np.isfinite(as_float(bits))].astype(np.float64)
    sizes = np.abs(x)
    for rounding in NEAREST:
        codes = encode(x, name, rounding=rounding)
        magnitude = (
            codes & f.code_dtype.type(f.sign_code - 1 if f.signed else f.code_mask)
        ).astype(np.int64)
        if name == "ue4m3":
            magnitude &= 0x7F
        value = decode(magnitude.astype(f.code_dtype), name, np.float64)
        lower = decode(np.maximum(magnitude - 1, 0).astype(f.code_dtype), name, np.float64)
        upper = decode(np.minimum(magnitude + 1, f.max_code).astype(f.code_dtype), name, np.float64)
        off = np.abs(value - sizes)
        assert (off <= np.abs(lower - sizes)).all()
        assert (off <= np.abs(upper - sizes)).all()
        assert (value[sizes >= f.max] == f.max).all()


# Blocks.


@some(any_bits, st.permutations(range(16)))
def test_a_permutation_inside_a_block_permutes_codes(
    names: str, bits: Bits, order: list[int]
) -> None:
    """Any bits. Not where a sum over the block depends on its order: a Hadamard transform, 4over6."""
    for name, f in presets(names, lambda f: f.signs is None and f.choice is None).items():
        whole = np.r_[order, 16 + np.array(order)]
        if f.block == (1, 32):
            whole = np.roll(whole, 5)
        amax = {"tensor_amax": 3.0} if f.has_tensor_scale else {}
        one, other = (quantize(as_float(x), f, **amax) for x in (bits, bits[:, whole]))
        np.testing.assert_array_equal(one.scales, other.scales, name)
        np.testing.assert_array_equal(one.codes[:, whole], other.codes, name)


@some(any_bits)
def test_other_blocks_do_not_count(names: str, bits: Bits) -> None:
    """A row alone gives its codes in company. Any bits; the amax of the tensor is given."""
    for name, f in presets(names).items():
        amax = {"tensor_amax": 2.0**-7} if f.has_tensor_scale else {}
        both, one = (quantize(as_float(x), f, **amax) for x in (bits, bits[1:]))
        np.testing.assert_array_equal(both.codes[1:], one.codes, name)
        np.testing.assert_array_equal(both.scales[1:], one.scales, name)


# Zeros in a block with scale 0 become NaN there, by 0 / 0 or by 0 times infinity, and its code has one sign.
ZERO_OVER_ZERO = {"jax-nvfp4", "qwix018-nvfp4", "flashinfer-nvfp4"}


@some(ordinary_rows())
def test_negation_flips_signs(names: str, bits: Bits) -> None:
    """Scales stay. Codes that are not zero flip; zeros do where they keep the sign of the element."""
    for name, f in presets(names, lambda f: f.signs is None).items():
        one, other = (quantize(as_float(x), f) for x in (bits, bits ^ SIGN))
        np.testing.assert_array_equal(one.scales, other.scales, name)
        sign = np.uint8(f.element.sign_code)
        nan = is_nan_code(one.codes, f)  # jax: 0 / 0 in a block of zeros
        zero = (one.codes & (sign - np.uint8(1))) == 0
        flips = ~nan if f.zero_sign is ZeroSign.KEEP else ~nan & ~zero
        if name in ZERO_OVER_ZERO:
            flips = flips & ((bits & ~SIGN) != 0)
        np.testing.assert_array_equal(one.codes[flips] ^ sign, other.codes[flips], name)


@some(ordinary_rows())
def test_order_is_kept_inside_a_block(names: str, bits: Bits) -> None:
    """x <= y gives values in the same order, for finite values in every preset without a transform."""
    for name, f in presets(names, lambda f: f.signs is None).items():
        x = as_float(bits)
        values = dequantize(quantize(x, f))
        width = f.block[1]
        for at in range(0, 32, int(width)):
            order = np.argsort(x[0, at : at + width], kind="stable")
            row = values[0, at : at + width][order]
            if not np.isnan(row).any():
                assert (np.diff(row) >= 0).all(), name


# Scaling by powers of two.

SMALLEST_AMAX = {"deepgemm-mx-e4m3", "deepgemm-mx-e2m1"}  # amax counts as 1e-4 at least


@some(ordinary_rows(low=90, high=150), st.integers(-20, 20))
def test_a_power_of_two_shifts_only_the_scale(names: str, bits: Bits, k: int) -> None:
    """Far from the ends of the range: E8M0 codes move by k, element codes stay.

    Not for DeepGEMM below 1e-4. A block of zeros has a scale of its own.
    """
    rows = ((bits & ~SIGN) != 0).any(axis=1)
    bits = bits[rows]
    assume(bits.size)
    shifted = np.where(bits & ~SIGN, bits + np.uint32((k << 23) & 0xFFFFFFFF), bits)
    for name, f in presets(names, lambda f: f.scales_are_powers).items():
        if name in SMALLEST_AMAX:
            continue
        one, other = quantize(as_float(bits), f), quantize(as_float(shifted), f)
        zero = (bits.reshape(len(bits), -1, f.block[1]) & ~SIGN == 0).all(-1)
        moved = one.scales.astype(int) + k
        np.testing.assert_array_equal(other.scales[~zero], moved[~zero], name)
        element_zero = np.repeat(zero, f.block[1], axis=1)
        same = (one.codes == other.codes) | element_zero
        assert same.all(), name


@some(ordinary_rows(low=110, high=140), st.integers(-20, 20))
def test_a_power_of_two_shifts_only_the_tensor_scale(names: str, bits: Bits, k: int) -> None:
    """NVFP4 with a tensor scale: that moves, block scales and element codes stay.

    Every operation of a chain is a product or a quotient, which a power of two passes through.
    """
    assume((bits & ~SIGN).any(axis=1).all())
    shifted = np.where(bits & ~SIGN, bits + np.uint32((k << 23) & 0xFFFFFFFF), bits)
    for name, f in presets(names, lambda f: f.has_tensor_scale and f.signs is None).items():
        one, other = quantize(as_float(bits), f), quantize(as_float(shifted), f)
        factor = 2.0 ** (-k if f.tensor_divides else k)
        np.testing.assert_array_equal(other.tensor_scale, one.tensor_scale * np.float32(factor))
        np.testing.assert_array_equal(one.scales, other.scales, name)
        np.testing.assert_array_equal(one.codes, other.codes, name)


# Quantizing again.

NOT_IDEMPOTENT = {
    # EVEN that rounds amax to fewer bits than the element has: 1.74 2^8 becomes 1.75 2^8, which the
    # next time counts as 2^9, and the smallest code has no half.
    "compressedtensors-mx-e4m3": 0x43DE0000,
    # The scale is 2^floor(log2 amax): an amax that rounds up to the next power of two has the next.
    "vllm-mx-fallback-e4m3": 0x3FFF0000,
}


def again(x: npt.NDArray[np.float32], f: BlockFormat) -> tuple[Any, Any]:
    once = dequantize(quantize(x, f))
    return once, dequantize(quantize(once, f))


@some(ordinary_rows(low=100, high=150, span=25))
def test_quantizing_again_changes_nothing(names: str, bits: Bits) -> None:
    """Scales that are powers of two, away from the ends of the range.

    FLOOR: rounding keeps amax below 2^(emax + 1) times the scale, by saturation if need be, so the
    second scale is the first. Roundings up: the second scale may be half the first, where amax
    became max / 2 times the scale; then all codes have doubles.
    """
    for name, f in presets(
        names, lambda f: f.scales_are_powers or f.scale is FORMATS["fp32"]
    ).items():
        if name not in NOT_IDEMPOTENT:
            once, twice = again(as_float(bits), f)
            np.testing.assert_array_equal(once, twice, name)


@pytest.mark.parametrize("name", NOT_IDEMPOTENT)
def test_where_quantizing_again_does_change_something(name: str) -> None:
    f = PRESETS[name]
    x = np.zeros((1, 32), np.float32)
    x.view(np.uint32)[0, 0] = NOT_IDEMPOTENT[name]
    first = quantize(x, f).scales.item()
    x[0, 1] = 2.0 ** (first - 127 - 9)  # the smallest code
    once, twice = again(x, f)
    assert once[0, 1] == x[0, 1]
    assert twice[0, 1] == 0.0
    # Still no further than once: a third time changes nothing.
    np.testing.assert_array_equal(dequantize(quantize(twice, f)), twice)


@settings(max_examples=25)
@given(ordinary_rows(low=118, high=135, span=6))
def test_scales_in_e4m3_that_are_normal_come_back(bits: Bits) -> None:
    """amax / 6 rounds within 1/16, so amax becomes the code 6, and the next quotient is the scale.

    A subnormal scale does not come back: amax = 3 2^-9 (1 + 2^-9) has the scale 2^-9, becomes
    3 2^-9, and 2^-10 is a tie that goes to 0.
    """
    f = PRESETS["flamia-fp4-ue4m3"]
    bits = np.where(bits & ~SIGN, bits, np.uint32(0x3F800000))
    once = quantize(as_float(bits), f)
    assume((once.scales >= 8).all() and (once.scales < 0x7E).all())
    twice = quantize(dequantize(once), f)
    np.testing.assert_array_equal(once.scales, twice.scales)
    np.testing.assert_array_equal(once.codes, twice.codes)


def test_a_subnormal_scale_does_not_come_back() -> None:
    x = np.zeros((1, 16), np.float32)
    x[0, 0] = 3 * 2.0**-9 * (1 + 2.0**-9)
    once = quantize(x, "flamia-fp4-ue4m3")
    assert once.scales.item() == 1
    assert dequantize(once)[0, 0] == 3 * 2.0**-9
    assert quantize(dequantize(once), "flamia-fp4-ue4m3").scales.item() == 0


# Errors.


@some(ordinary_rows(low=100, high=150, span=25))
def test_errors_of_blocks(names: str, bits: Bits) -> None:
    """Half a step of the element's binade, times the scale, unless it saturates; a whole step toward zero.

    Where the scale is rounded up from amax / max nothing saturates.
    """
    x = as_float(bits).astype(np.float64)
    for name, f in presets(names, lambda f: f.scales_are_powers).items():
        if f.subnormals.value == "flush" or f.row_span is not None:
            continue
        found = quantize(as_float(bits), f)
        values = dequantize(found, np.float64)
        power = 2.0 ** (np.repeat(found.scales, f.block[1], axis=1).astype(float) - 127)
        sizes = np.abs(x) / power
        element = f.element
        exponent = np.frexp(np.maximum(sizes, 2.0**element.emin))[1] - 1
        step = np.ldexp(1.0, exponent - element.mantissa_bits)
        off = np.abs(values - x) / power
        part = 0.5 if f.rounding in NEAREST else 1.0
        inside = sizes <= element.max
        slack = 2.0**-24 * step if f.half_added else 0.0  # its sum with 1/2 is rounded
        assert (off <= part * step + slack)[inside].all(), name
        np.testing.assert_array_equal(np.abs(values / power)[~inside], element.max, name)
        if "rceil" in name or name.startswith(("te-", "cutlass-", "modelopt-", "deepgemm-")):
            assert inside.all(), name


# numpy and JAX.


@functools.cache
def compiled(name: str) -> tuple[Any, Any]:
    """The user's own jit of both, compiled once."""
    import jax

    return jax.jit(lambda x: quantize(x, name)), jax.jit(dequantize)


@pytest.mark.parametrize(
    "name",
    ["te-nvfp4"]
    + [pytest.param(n, marks=pytest.mark.nightly) for n in ("jax-mx-e4m3", "deepgemm-mx-e2m1")],
)
@settings(max_examples=30)
@given(any_bits)
def test_numpy_and_jitted_jax_agree(name: str, bits: Bits) -> None:
    import jax.numpy as jnp

    to_blocks, back = compiled(name)
    ours = quantize(as_float(bits), name)
    theirs = to_blocks(jnp.asarray(as_float(bits)))
    np.testing.assert_array_equal(ours.codes, np.asarray(theirs.codes))
    np.testing.assert_array_equal(ours.scales, np.asarray(theirs.scales))
    values = np.asarray(back(theirs)).view(np.uint32)
    np.testing.assert_array_equal(dequantize(ours).view(np.uint32), values)
