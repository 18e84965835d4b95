"""The instructions `exact` and `float32` against exact rationals, for every pair of formats."""

import functools
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.arithmetic import fused_dot, matmul
from tests.independent import codes, float32

ELEMENTS = codes.ELEMENTS
PADDING = {"tf32": codes.TF32_PADDING}
WIDTHS = {"bf16": np.uint16, "fp16": np.uint16, "tf32": np.uint32, "fp32": np.uint32}
PAIRS = [pytest.param(pair, id="-".join(pair)) for pair in itertools.product(ELEMENTS, ELEMENTS)]
Codes = npt.NDArray[np.unsignedinteger]


# What is expected. An operand is a Fraction, "nan", "inf" or "-inf", and the sign of its zero.


@functools.cache
def decoded(code: int, name: str) -> tuple[Fraction | str, int]:
    """The value of a stored code and its sign bit."""
    element = ELEMENTS[name]
    code >>= PADDING.get(name, 0)
    sign = int(bool(code & element.sign_bit))
    magnitude = code & (element.sign_bit - 1)
    if magnitude <= element.largest:
        return codes.decode(code, element), sign
    return ("-inf" if sign else "inf") if magnitude == element.infinity else "nan", sign


def exact(
    a: Sequence[int],
    b: Sequence[int],
    c: int,
    formats: tuple[str, str],
    scales: tuple[Sequence[int], Sequence[int]] | None = None,
) -> int:
    """The float32 nearest to c + sum a b; a zero is -0 only if every term is -0."""
    total, infinities, all_minus_zero = Fraction(0), set(), True
    operands = [*(zip(a, b, range(len(a)), strict=True)), (c, None, None)]
    for x, y, k in operands:
        value, sign = decoded(x, formats[0] if k is not None else "fp32")
        other, other_sign = decoded(y, formats[1]) if k is not None else (Fraction(1), 0)
        if "nan" in (value, other):
            return float32.NAN
        factor = Fraction(1)
        if scales is not None and k is not None:
            bytes_ = [side[k // 32] for side in scales]
            if codes.E8M0_NAN in bytes_:
                return float32.NAN
            factor = float32.power_of_two(sum(bytes_) - 254)
        sign ^= other_sign
        if isinstance(value, str) or isinstance(other, str):
            if value == 0 or other == 0:
                return float32.NAN
            infinities.add(sign)
        else:
            product = value * other * factor
            total += product
            all_minus_zero &= product == 0 and sign == 1
    if infinities:
        pattern = float32.MINUS_INFINITY if 1 in infinities else float32.INFINITY
        return float32.NAN if len(infinities) == 2 else pattern
    return float32.nearest(total, int(all_minus_zero))


def fma_chain(a: Sequence[int], b: Sequence[int], c: int, formats: tuple[str, str]) -> int:
    """c, then a fused multiply-add a product in ascending K."""
    c = float32.NAN if float32.is_nan(c) else c
    for x, y in zip(a, b, strict=True):
        c = float32.fused_multiply_add(as_float32(x, formats[0]), as_float32(y, formats[1]), c)
    return c


@functools.cache
def as_float32(code: int, name: str) -> int:
    value, sign = decoded(code, name)
    specials = {"nan": float32.NAN, "inf": float32.INFINITY, "-inf": float32.MINUS_INFINITY}
    return specials[value] if isinstance(value, str) else float32.nearest(value, sign)


# Operands.


def stored(code: int, name: str) -> int:
    return code << PADDING.get(name, 0)


def any_codes(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Codes:
    """Codes of all kinds: any bits, moderate values, zeros, a few specials."""
    element = ELEMENTS[name]
    bits = rng.integers(0, 2 * element.sign_bit, shape)
    half = 1 << (element.exponent_bits - 1)
    field = np.clip(rng.integers(half - 8, half + 8, shape), 0, 2 * half - 2)
    moderate = field << element.fraction_bits | bits & ((1 << element.fraction_bits) - 1)
    kind = rng.integers(0, 20, shape)
    magnitude = bits & (element.sign_bit - 1)
    finite = np.minimum(np.where(kind < 12, moderate, magnitude), element.largest)
    finite = np.where(kind == 19, 0, finite)
    with_specials = rng.integers(0, 4, (shape[0],) + (1,) * (len(shape) - 1)) == 0
    special = rng.choice([element.infinity or element.nan, element.nan, element.largest], shape)
    chosen = np.where(with_specials & (kind == 18), special, finite) | bits & element.sign_bit
    padding = PADDING.get(name, 0)
    # Bits of a tf32 word that do not count may be anything, but where they decide about NaN.
    below = rng.integers(0, 1 << padding, shape) if padding else 0
    below = np.where((chosen & (element.sign_bit - 1)) > element.largest, 0, below)
    return (chosen << padding | below).astype(WIDTHS.get(name, np.uint8))


def rows(
    pair: tuple[str, str], k: int, count: int, *, seed: int = 0
) -> tuple[Codes, Codes, Codes, Codes, Codes]:
    """a, b, c and scales, a third of the rows built to cancel."""
    rng = np.random.default_rng([seed, *(ord(letter) for letter in "".join(pair))])
    a, b = (any_codes(rng, name, (count, k)) for name in pair)
    c = any_codes(rng, "fp32", (count,))
    third, half = count // 3, k // 2
    flip = stored(ELEMENTS[pair[0]].sign_bit, pair[0])
    a[:third, half : 2 * half] = a[:third, :half] ^ flip
    b[:third, half : 2 * half] = b[:third, :half]
    c[:third:2] &= float32.SIGN
    blocks = -(-k // 32)
    scales = rng.integers(0, 255, (2, count, blocks))
    near = rng.integers(100, 150, (2, count, blocks))
    scales = np.where(rng.integers(0, 2, (1, count, 1)), near, scales)
    scales = np.where(rng.integers(0, 40, scales.shape) == 0, codes.E8M0_NAN, scales)
    return a, b, c, *scales.astype(np.uint8)


def run(xp: Any, pair: tuple[str, str], name: str, a: Any, b: Any, c: Any, *scales: Any) -> Any:
    given = {f"{side}_scales": xp.asarray(x) for side, x in zip("ab", scales, strict=False)}
    if scales:
        given["scale_format"] = "e8m0"
    return fused_dot(
        xp.asarray(a),
        xp.asarray(b),
        xp.asarray(c),
        name,
        a_format=pair[0],
        b_format=pair[1],
        **given,
    )


def check(got: Any, wanted: list[int]) -> None:
    assert got.dtype == np.uint32
    np.testing.assert_array_equal(np.asarray(got), np.array(wanted, dtype=np.uint32))


def check_exact(xp: Any, pair: tuple[str, str], k: int, count: int, *, seed: int = 0) -> None:
    a, b, c, *scales = rows(pair, k, count, seed=seed)
    lists = [x.tolist() for x in (a, b, c, *scales)]
    plain = [exact(*row[:3], pair) for row in zip(*lists, strict=True)]
    check(run(xp, pair, "exact", a, b, c), plain)
    scaled = [exact(*row[:3], pair, row[3:]) for row in zip(*lists, strict=True)]
    check(run(xp, pair, "exact", a, b, c, *scales), scaled)


def check_float32(xp: Any, pair: tuple[str, str], k: int, count: int, *, seed: int = 0) -> None:
    a, b, c, *_ = rows(pair, k, count, seed=seed)
    wanted = [fma_chain(*row, pair) for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    check(run(xp, pair, "float32", a, b, c), wanted)


@pytest.mark.parametrize("pair", PAIRS)
def test_exact(pair: tuple[str, str]) -> None:
    check_exact(np, pair, 7, 60)


@pytest.mark.parametrize("pair", PAIRS)
def test_float32(pair: tuple[str, str]) -> None:
    check_float32(np, pair, 5, 50)


@pytest.mark.parametrize("pair", [("fp32", "fp32"), ("e5m2", "e4m3")], ids="-".join)
def test_in_jax(pair: tuple[str, str]) -> None:
    check_exact(jnp, pair, 33, 60)
    check_float32(jnp, pair, 33, 60)


@pytest.mark.nightly
@pytest.mark.parametrize("pair", PAIRS)
def test_longer(pair: tuple[str, str]) -> None:
    check_exact(np, pair, 40, 300, seed=1)
    check_float32(np, pair, 40, 300, seed=1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ELEMENTS)
def test_longer_in_jax(name: str) -> None:
    """Each format beside itself and beside the one with the most bits."""
    for pair in {(name, name), (name, "fp32"), ("fp32", name)}:
        check_exact(jnp, pair, 40, 300, seed=2)
        check_float32(jnp, pair, 40, 300, seed=2)


def power(exponent: int) -> int:
    """float32 bits of 2^exponent."""
    return float32.nearest(float32.power_of_two(exponent))


ONE, MINUS = power(0), float32.SIGN
LARGEST = 0x7F7FFFFF

# c, products of two float32, and the sum rounded once.
WORKED = {
    "a tie goes to even, down": (ONE, [(ONE, power(-24))], ONE),
    "a tie goes to even, up": (ONE + 1, [(ONE, power(-24))], ONE + 2),
    "a tie and the smallest product": (ONE, [(ONE, power(-24)), (1, 1)], ONE + 1),
    "a tie less the smallest product": (ONE + 1, [(ONE, power(-24)), (1, MINUS | 1)], ONE + 1),
    "two halves of a tie": (ONE, [(ONE, power(-25))] * 2, ONE),
    "three halves of a tie": (ONE, [(ONE, power(-25))] * 3, ONE + 1),
    "cancels but for a tail": (
        ONE,
        [
            (ONE, power(100)),
            (power(-100), power(-40)),
            (MINUS | ONE, power(100)),
            (MINUS | ONE, ONE),
        ],
        power(-140),
    ),
    "half of the largest step overflows": (LARGEST, [(power(103), ONE)], float32.INFINITY),
    "less does not": (LARGEST, [(power(103), ONE), (1, MINUS | 1)], LARGEST),
    "beyond the range and back": (
        ONE,
        [(LARGEST, LARGEST), (MINUS | LARGEST, LARGEST)],
        ONE,
    ),
    "half of the smallest subnormal": (0, [(power(-75), power(-75))], 0),
    "its negative": (0, [(power(-75), MINUS | power(-75))], MINUS),
    "and a little": (0, [(power(-75), power(-75)), (1, 1)], 1),
    "one and a half of it": (1, [(power(-75), power(-75))], 2),
    "a subnormal result": (power(-126), [(MINUS | power(-127), ONE)], power(-127)),
    "carry into the normal range": (0x7FFFFF, [(power(-75), power(-75))], 0x800000),
    "x - x is +0": (MINUS | ONE, [(ONE, ONE)], 0),
    "all terms -0": (MINUS, [(MINUS, ONE), (0, MINUS | ONE)], MINUS),
    "all products -0, c +0": (0, [(MINUS, ONE)], 0),
    "one product +0": (MINUS, [(MINUS, ONE), (0, ONE)], 0),
    "no product, c -0": (MINUS, [], MINUS),
    "no product, c NaN": (0xFF800001, [], float32.NAN),
    "infinity": (ONE, [(float32.INFINITY, ONE), (LARGEST, MINUS | LARGEST)], float32.INFINITY),
    "minus infinity": (ONE, [(float32.INFINITY, MINUS | 1)], float32.MINUS_INFINITY),
    "both infinities": (float32.INFINITY, [(float32.INFINITY, MINUS | 1)], float32.NAN),
    "infinity times zero": (ONE, [(float32.INFINITY, MINUS)], float32.NAN),
    "infinite c": (float32.MINUS_INFINITY, [(LARGEST, LARGEST)], float32.MINUS_INFINITY),
    "NaN times zero": (ONE, [(float32.NAN, 0)], float32.NAN),
}


@pytest.mark.parametrize("name", WORKED)
def test_exact_worked_examples(name: str) -> None:
    c, products, wanted = WORKED[name]
    a = np.array([[x for x, _ in products]], dtype=np.uint32).reshape(1, -1)
    b = np.array([[y for _, y in products]], dtype=np.uint32).reshape(1, -1)
    got = run(np, ("fp32", "fp32"), "exact", a, b, np.array([c], dtype=np.uint32))
    assert [hex(x) for x in got.tolist()] == [hex(wanted)]
    assert exact(a[0].tolist(), b[0].tolist(), c, ("fp32", "fp32")) == wanted


def test_exact_keeps_every_bit_under_extreme_scales() -> None:
    """2^254 - 2^254 + 2^-148 2^-1 leaves the smallest float32; with a larger c it leaves c."""
    a, b = np.zeros((2, 1, 96), dtype=np.uint8)
    a[0, [0, 32, 64]] = 0x38, 0xB8, 0x38  # 1, -1, 1
    b[0, [0, 32, 64]] = 0x38, 0x38, 0x30  # 1, 1, 1/2
    scales = np.array([[254, 254, 53]], dtype=np.uint8)
    pair = ("e4m3", "e4m3")
    for c, wanted in ((0, 1), (power(-126), power(-126) + 1), (ONE, ONE)):
        bits = np.array([c], dtype=np.uint32)
        check(run(np, pair, "exact", a, b, bits, scales, scales), [wanted])
    a[0, 32] = 0x38
    check(run(np, pair, "exact", a, b, bits, scales, scales), [float32.INFINITY])


def test_the_sums_differ() -> None:
    """1 + 2^-24 twice: exactly 1 + 2^-23, lost one by one, cut by a fused sum."""
    one, tiny = np.float32(1), np.float32(2**-12)
    a = np.array([[one, tiny, tiny]], dtype=np.float32).view(np.uint32)
    b = np.array([[one], [tiny], [tiny]], dtype=np.float32).view(np.uint32)
    formats = {"a_format": "fp32", "b_format": "fp32"}
    assert matmul(a, b, "exact", **formats) == 1 + 2**-23
    assert matmul(a, b, "float32", **formats) == 1
    a, b = np.pad(a, ((0, 0), (0, 13))), np.pad(b, ((0, 13), (0, 0)))
    narrow = [np.right_shift(x, 16).astype(np.uint16) for x in (a, b)]
    assert matmul(*narrow, "sm100.tcgen05.f16", a_format="bf16", b_format="bf16") == 1 + 2**-23


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_infinity_under_a_zero_scale_is_nan(xp: Any) -> None:
    """Infinity times zero, whichever of the four factors is the zero."""
    a = xp.asarray(np.array([[0x7C00, 0x3C00]], dtype=np.uint16))
    b = xp.asarray(np.array([[0x3C00, 0x3C00]], dtype=np.uint16))
    c = xp.asarray(np.zeros(1, dtype=np.uint32))
    formats = {"a_format": "fp16", "b_format": "fp16", "scale_format": "ue4m3"}
    for pair, wanted in (((0, 56), 0x7FFFFFFF), ((56, 0), 0x7FFFFFFF), ((56, 56), 0x7F800000)):
        scales = [xp.asarray(np.array([[code]], dtype=np.uint8)) for code in pair]
        got = fused_dot(a, b, c, "exact", a_scales=scales[0], b_scales=scales[1], **formats)
        assert int(got[0]) == wanted, pair


def test_scales_that_can_be_two_formats_are_named() -> None:
    """16 elements a scale are E8M0 or UE4M3; 32 are E8M0."""
    a = np.full((1, 64), 2, dtype=np.uint8)
    c = np.zeros(1, dtype=np.uint32)
    given = {"a_format": "e2m1", "b_format": "e2m1"}
    scales = np.full((1, 4), 56, dtype=np.uint8)
    with pytest.raises(ValueError, match=r"scale_format is missing; .* e8m0 or ue4m3"):
        fused_dot(a, a, c, "exact", a_scales=scales, b_scales=scales, **given)
    named = fused_dot(
        a, a, c, "exact", a_scales=scales, b_scales=scales, scale_format="ue4m3", **given
    )
    assert named.view(np.float32)[0] == 64
    wide = np.full((1, 2), 127, dtype=np.uint8)
    assert fused_dot(a, a, c, "exact", a_scales=wide, b_scales=wide, **given) == named
