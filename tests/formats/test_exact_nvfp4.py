"""NVFP4 chains of every library, each operation rounded from exact rationals, at every tie.

A chain says, in the order of the library: the tensor scale, the quotient that becomes a block
scale, and what an element is multiplied by or divided by. Written from what the libraries compute;
float32 operations and rcp.approx are those of tests/independent. Python's `1 / tensor` and
`2688 / tensor` are a reciprocal and a product in PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.formats import PRESETS, ScaleRule, quantize
from tests.formats import exact
from tests.independent import float32, mufu

SIGN = 0x80000000
LARGEST, TINY = 0x7F7FFFFF, 0x00800000
UE4M3, E2M1 = exact.SPECS["ue4m3"], exact.SPECS["e2m1"]
divide, multiply = float32.divide, float32.multiply
ftz_divide, ftz_multiply = partial(divide, ftz=True), partial(multiply, ftz=True)


@cache
def f32(x: float | Fraction) -> int:
    return float32.nearest(Fraction(x))


SIXTH = f32(Fraction(1, 6))
rcp = cache(mufu.reciprocal)


def least(a: int, b: int) -> int:
    """The smaller; NaN where one is."""
    return float32.NAN if float32.is_nan(a) or float32.is_nan(b) else float32.minnum(a, b)


def narrow(bits: int) -> int:
    """Rounded to bfloat16."""
    return float32.from_bfloat16(float32.to_bfloat16(bits))


def to_code(v: int, spec: exact.Spec) -> int:
    """Magnitude code to nearest even, saturating; that of the largest for infinity; NaN's for NaN."""
    if float32.is_nan(v):
        return spec.nan
    if float32.is_infinite(v):
        return spec.last
    return exact.encode(abs(float32.value(v)), spec)


@cache
def scale_value(code: int) -> int:
    return float32.NAN if code == UE4M3.nan else f32(exact.value(code, UE4M3))


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Functions of float32 bits.

    Attributes:
        tensor: tensor scale, of the amax of the tensor; None without one.
        prepared: what takes the place of x, of x and the tensor scale.
        quotient: what becomes a block scale, of the amax of the block and the tensor scale.
        limits: least and largest scale code.
        instead: scale code where the quotient is 0, or where its code is 0.
        scaled: what becomes an element, of x, the block scale, the tensor scale and the amax.
        minus_zero: whether -0 keeps its sign.
    """

    tensor: Callable[[int], int] | None = None
    prepared: Callable[[int, int], int] = lambda x, _: x
    quotient: Callable[[int, int], int]
    limits: tuple[int, int] = (0, 0x7E)
    instead: tuple[int | None, int | None] = (None, None)
    scaled: Callable[[int, int, int, int], int]
    minus_zero: bool = True

    def scale(self, amax: int, tensor_scale: int) -> int:
        d = self.quotient(amax, tensor_scale)
        code = to_code(d, UE4M3)
        if code == UE4M3.nan:
            return code
        code = min(max(code, self.limits[0]), self.limits[1])
        of_zero, of_zero_code = self.instead
        if of_zero is not None and float32.is_zero(d):
            return of_zero
        return of_zero_code if of_zero_code is not None and code == 0 else code

    def element(self, x: int, scale: int, tensor_scale: int, amax: int) -> int:
        v = self.scaled(x, scale_value(scale), tensor_scale, amax)
        code = to_code(v, E2M1)
        if float32.is_nan(v):
            return code
        keeps = self.minus_zero or not float32.is_zero(v)
        return code | (8 if x & SIGN and keeps else 0)


def te_tensor(amax: int, span: int = 2688) -> int:
    encode = LARGEST if amax == 0 else least(divide(f32(span), amax), LARGEST)
    return f32(1) if amax == 0 or encode == 0 else encode


def te_scaled(x: int, scale: int, tensor: int, _: int) -> int:
    decode = multiply(scale, divide(f32(1), tensor))
    return multiply(x, least(divide(f32(1), decode), LARGEST))


def te_fast_scaled(x: int, scale: int, tensor: int, _: int) -> int:
    """The multiplier in bfloat16, at most the largest one."""
    return multiply(x, narrow(least(divide(tensor, scale), 0x7F7F0000)))


def vllm_inverse(v: int) -> int:
    """1 / v, of 1e8 where v is 0."""
    return divide(f32(1), f32(100000000) if float32.is_zero(v) else v)


def fast_quotient(amax: int, tensor: int) -> int:
    return ftz_multiply(tensor, ftz_multiply(amax, rcp(f32(6))))


def fast_scaled(x: int, scale: int, tensor: int, stop: int) -> int:
    """`stop`: what makes the multiplier 0 by being 0."""
    if float32.is_zero(stop):
        return ftz_multiply(x, 0)
    return ftz_multiply(x, rcp(ftz_multiply(scale, rcp(tensor))))


def compressed_tensor(amax: int, cut: Callable[[int], int] = lambda x: x) -> int:
    scale = cut(multiply(cut(divide(f32(1), max(amax, TINY))), f32(2688)))
    return f32(1) if float32.is_infinite(scale) else scale


def by_sixth(amax: int, _: int) -> int:
    return divide(amax, f32(6))


def inverse_or_zero(scale: int) -> int:
    return 0 if float32.is_zero(scale) else divide(f32(1), scale)


def qwix_quotient(amax: int, _: int) -> int:
    d = ftz_divide(amax, f32(6))
    return f32(1) if float32.value(d) < exact.power(-63) else d


FAST = {"tensor": lambda a: f32(1) if a == 0 else ftz_divide(f32(2688), a)}
CHAINS = {
    "te-nvfp4": Chain(
        tensor=te_tensor,
        quotient=lambda a, t: multiply(a, multiply(t, SIXTH)),
        scaled=te_scaled,
    ),
    "te-nvfp4-fastmath": Chain(
        tensor=te_tensor,
        quotient=lambda a, t: multiply(a, multiply(t, SIXTH)),
        scaled=te_fast_scaled,
    ),
    "torchao-nvfp4": Chain(
        tensor=lambda a: divide(a, f32(2688)),
        quotient=lambda a, t: divide(divide(a, f32(6)), t),
        limits=(0x08, 0x7E),
        scaled=lambda x, s, t, _: multiply(x, divide(divide(f32(1), t), s)),
    ),
    "torchao-nvfp4-onelevel": Chain(
        quotient=by_sixth,
        limits=(0x08, 0x7E),
        scaled=lambda x, s, _, __: multiply(x, divide(f32(1), s)),
    ),
    "modelopt-nvfp4": Chain(
        tensor=lambda a: divide(a, f32(2688)),
        quotient=lambda a, t: divide(a, multiply(f32(6), t)),
        limits=(0x01, 0x7E),
        instead=(0x38, None),
        scaled=lambda x, s, t, _: divide(x, multiply(s, t)),
        minus_zero=False,
    ),
    "vllm-nvfp4-reference": Chain(
        tensor=lambda a: multiply(divide(f32(1), a), f32(2688)),
        quotient=lambda a, t: multiply(t, multiply(a, SIXTH)),
        scaled=lambda x, s, t, _: multiply(x, vllm_inverse(multiply(s, vllm_inverse(t)))),
        minus_zero=False,
    ),
    "compressedtensors-nvfp4": Chain(
        tensor=compressed_tensor,
        quotient=lambda a, t: multiply(t, divide(a, f32(6))),
        instead=(None, 0x20),
        scaled=lambda x, s, t, _: divide(x, divide(s, t)),
        minus_zero=False,
    ),
    "jax-nvfp4": Chain(
        # The caller gives the tensor scale. XLA on CPU takes subnormals for zeros, and divides by one
        # number, or a row of blocks by theirs, as a product with the reciprocal.
        tensor=lambda a: f32(1) if a == 0 else divide(a, f32(2688)),
        prepared=lambda x, t: ftz_multiply(x, ftz_divide(f32(1), t)),
        quotient=lambda a, _: ftz_multiply(a, SIXTH),
        scaled=lambda x, s, _, __: ftz_multiply(x, ftz_divide(f32(1), s)),
    ),
    "sage3-nvfp4": Chain(
        quotient=by_sixth, scaled=lambda x, s, _, __: multiply(x, inverse_or_zero(s))
    ),
    "flashinfer-nvfp4": Chain(
        **FAST,
        quotient=fast_quotient,
        scaled=lambda x, s, t, amax: fast_scaled(x, s, t, float32.flush(amax)),
    ),
    "vllm-nvfp4": Chain(
        **FAST, quotient=fast_quotient, scaled=lambda x, s, t, _: fast_scaled(x, s, t, s)
    ),
    "triton-nvfp4-roundup": Chain(
        quotient=by_sixth, scaled=lambda x, s, _, __: multiply(x, inverse_or_zero(s))
    ),
    "qwix018-nvfp4": Chain(quotient=qwix_quotient, scaled=lambda x, s, _, __: ftz_divide(x, s)),
    "flamia-fp4-ue4m3": Chain(
        quotient=by_sixth,
        scaled=lambda x, s, _, __: x & SIGN if float32.is_zero(s) else divide(x, s),
    ),
}
CHAINS["triton-nvfp4-roundnearest"] = CHAINS["triton-nvfp4-roundup"]
CHAINS["te-nvfp4-rowscaled"] = CHAINS["te-nvfp4"]
NARROW = {
    "compressedtensors-nvfp4": Chain(
        tensor=partial(compressed_tensor, cut=narrow),
        quotient=lambda a, t: multiply(t, narrow(divide(a, f32(6)))),
        instead=(None, 0x20),
        scaled=CHAINS["compressedtensors-nvfp4"].scaled,
        minus_zero=False,
    )
}

TENSOR_AMAXES = {  # float32 bits
    "1": 0x3F800000,
    "largest": LARGEST,
    "3.2 2^-118": 0x04CCCCCD,
    "4569.6": 0x458ECCCD,
    "2688": 0x45280000,
    "2688 2^100": 0x77280000,
    "2^-126": 0x00800000,
    "7.9 2^-120": 0x047CCCCD,
    "2^-149": 1,
    "1 - 2^-24": 0x3F7FFFFF,
    "prime": 0x40490FDB,
    "2.4e-7": 0x3480D959,
}
DAILY = ("1", "4569.6", "3.2 2^-118")


def beside(x: Fraction) -> list[int]:
    at = float32.nearest(x)
    return [bits for bits in (at - 1, at, at + 1) if 0 <= bits <= LARGEST]


def block_amaxes(tensor_amax: int, *, two_level: bool, step: int) -> list[int]:
    """Where amax / 6 over the tensor scale is a value or a midpoint of E4M3, and one ulp beside."""
    unit = float32.value(tensor_amax) / 2688 if two_level else Fraction(1)
    grid = [exact.value(code, UE4M3) for code in range(UE4M3.last + 3)]
    middles = [(a + b) / 2 for a, b in pairwise(grid)]
    targets = [grid[1] / 4, grid[1], grid[8], grid[UE4M3.last], *middles[::step], middles[0]]
    found = {bits for target in targets for bits in beside(target * 6 * unit)}
    return sorted(found | {0, tensor_amax, 1})


def block(amax: int, scale: int, tensor: int, chain: Chain, turn: int) -> list[int]:
    """16 elements: amax, and what lies at and beside midpoints of E2M1 under that scale."""
    one = float32.ONE
    value = scale_value(scale)
    factor = chain.scaled(one, value, tensor, amax)
    elements = [amax | (SIGN if turn % 2 else 0), SIGN, 0]
    if float32.is_zero(factor) or factor >= float32.INFINITY:
        return (elements + [1, 1 | SIGN, amax >> 1] + [amax] * 16)[:16]
    step = 1 / float32.value(factor)
    middles = [Fraction(m) for m in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)]
    near = [bits for m in middles for bits in beside(m * step) if bits <= amax]
    near = near[turn % 3 :] + near[: turn % 3]
    near = [bits | (SIGN if (turn + i) % 3 == 0 else 0) for i, bits in enumerate(near)]
    return (elements + near + [amax] * 16)[:16]


def differences(
    name: str, tensor_amax: int, step: int, chain: Chain, dtype: type = np.float32
) -> list[tuple[str, ...]]:
    """Of scales: amax, ours, the right one. Of elements: x, amax, the scale, ours, the right one."""
    two_level = chain.tensor is not None
    tensor = chain.tensor(tensor_amax) if chain.tensor else f32(1)
    rows, amaxes = [], []
    for turn, amax in enumerate(block_amaxes(tensor_amax, two_level=two_level, step=step)):
        kept = amax if dtype is np.float32 else narrow(amax)
        if kept > LARGEST:
            continue
        scale = chain.scale(chain.prepared(kept, tensor), tensor)
        row = block(kept, scale, tensor, chain, turn)
        rows.append(row if dtype is np.float32 else [narrow(bits) for bits in row])
        amaxes.append(max(bits & ~SIGN for bits in rows[-1]))
    x = np.array(rows, np.uint32).view(np.float32).astype(dtype)
    given = {"tensor_amax": np.uint32(tensor_amax).view(np.float32)} if two_level else {}
    found = quantize(x, name, **given)
    wrong: list[tuple[str, ...]] = []
    if two_level:
        ours = np.asarray(found.tensor_scale).view(np.uint32).ravel()[0]
        if ours != tensor and not (float32.is_nan(tensor) and float32.is_nan(int(ours))):
            wrong.append(
                ("tensor scale", f"{tensor_amax:#010x}", f"{ours:#010x}", f"{tensor:#010x}")
            )
    for row, amax, scale, codes in zip(
        rows, amaxes, found.scales[:, 0].tolist(), found.codes.tolist(), strict=True
    ):
        prepared = [chain.prepared(x, tensor) for x in row]
        nan = any(map(float32.is_nan, prepared))
        counted = float32.NAN if nan else chain.prepared(amax, tensor)
        right = chain.scale(counted, tensor)
        if scale != right:
            wrong.append((f"{amax:#010x}", f"{scale:#04x}", f"{right:#04x}"))
            continue
        if right == UE4M3.nan:
            continue  # what libraries make of NaN elements is in their recordings
        for x_bits, p, code in zip(row, prepared, codes, strict=True):
            wanted = chain.element(p, right, tensor, counted)
            if float32.is_nan(chain.scaled(p, scale_value(right), tensor, counted)):
                wanted = PRESETS[name].nan_elements[2]
            if code != wanted:
                given_to = (f"{x_bits:#010x}", f"{amax:#010x}", f"{right:#04x}")
                wrong.append((*given_to, f"{code:#x}", f"{wanted:#x}"))
    return wrong


def amaxes_of(name: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    return labels if CHAINS[name].tensor else labels[:1]


@pytest.mark.parametrize("name", CHAINS)
def test_chains_at_ties(name: str) -> None:
    for label in amaxes_of(name, DAILY):
        assert differences(name, TENSOR_AMAXES[label], 6, CHAINS[name]) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHAINS)
def test_chains_at_every_tie(name: str) -> None:
    for label in amaxes_of(name, tuple(TENSOR_AMAXES)):
        assert differences(name, TENSOR_AMAXES[label], 1, CHAINS[name]) == []


@pytest.mark.parametrize(
    "label",
    ["3.2 2^-118"]
    + [pytest.param(label, marks=pytest.mark.nightly) for label in ("1", "4569.6", "2688")],
)
def test_chains_of_bfloat16(label: str) -> None:
    """Where a library computes in the type of x, its own chain; elsewhere that of float32."""
    amax = narrow(TENSOR_AMAXES[label])
    for name, chain in NARROW.items():
        assert differences(name, amax, 2, chain, ml_dtypes.bfloat16) == []
    for name in ("te-nvfp4", "modelopt-nvfp4", "sage3-nvfp4"):
        assert differences(name, amax, 6, CHAINS[name], ml_dtypes.bfloat16) == []


def test_every_preset_with_scales_in_ue4m3_is_here() -> None:
    others = {"te-nvfp4-2d", "te-nvfp4-rht", "te-nvfp4-4over6-mae", "te-nvfp4-4over6-mse"}  # below
    quotients = {
        name
        for name, preset in PRESETS.items()
        if preset.rule is ScaleRule.QUOTIENT and preset.scale.name == "ue4m3"
    }
    elsewhere = {"cudnn-qat-nvfp4"}  # test_qat_preset.py
    assert {*CHAINS} | others | elsewhere == quotients


# Variants of Transformer Engine.


def samples(rows: int, columns: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal((rows, columns)) * 2.0 ** rng.integers(-12, 1, (rows, 1))
    return wide.astype(np.float32)


def bits_list(x: np.ndarray) -> list[int]:
    found: list[int] = x.view(np.uint32).ravel().tolist()
    return found


def test_two_dimensional_blocks() -> None:
    x, chain = samples(48, 32, 1), CHAINS["te-nvfp4"]
    found = quantize(x, "te-nvfp4-2d")
    tensor = te_tensor(max(bits & ~SIGN for bits in bits_list(x)))
    for down in range(3):
        for across in range(2):
            cut = (slice(16 * down, 16 * down + 16), slice(16 * across, 16 * across + 16))
            inside = bits_list(np.ascontiguousarray(x[cut]))
            amax = max(bits & ~SIGN for bits in inside)
            scale = chain.scale(amax, tensor)
            assert found.scales[down, across] == scale
            wanted = [chain.element(bits, scale, tensor, amax) for bits in inside]
            assert found.codes[cut].ravel().tolist() == wanted


def test_each_row_has_its_own_tensor_scale() -> None:
    x, chain = samples(20, 32, 2), CHAINS["te-nvfp4"]
    found = quantize(x, "te-nvfp4-rowscaled")
    for row in range(20):
        bits = bits_list(x[row])
        tensor = te_tensor(max(b & ~SIGN for b in bits))
        assert found.tensor_scale[row, 0].view(np.uint32) == tensor
        for at in (0, 16):
            amax = max(b & ~SIGN for b in bits[at : at + 16])
            scale = chain.scale(amax, tensor)
            assert found.scales[row, at // 16] == scale
            wanted = [chain.element(b, scale, tensor, amax) for b in bits[at : at + 16]]
            assert found.codes[row, at : at + 16].tolist() == wanted


@pytest.mark.parametrize(("how", "span"), [("mae", 2688), ("mse", 1536)])
def test_four_over_six(how: str, span: int) -> None:
    """The scale of amax / 6, or 1.5 times it, whichever leaves the smaller error; the first in a tie."""
    x = samples(60, 16, 3)
    found = quantize(x, f"te-nvfp4-4over6-{how}")
    tensor_amax = max(bits & ~SIGN for bits in bits_list(x))
    tensor = te_tensor(tensor_amax, span)
    chain = CHAINS["te-nvfp4"]
    picked = set()
    for row in range(60):
        bits = bits_list(x[row])
        six = multiply(divide(max(b & ~SIGN for b in bits), f32(6)), tensor)
        tried = []
        for d in (six, multiply(six, f32(1.5))):
            scale = to_code(d, UE4M3)
            codes = [chain.element(b, scale, tensor, 0) for b in bits]
            error = 0
            for b, code in zip(bits, codes, strict=True):
                value = f32(exact.value(code & 7, E2M1)) | (SIGN if code & 8 else 0)
                back = multiply(multiply(value, scale_value(scale)), tensor_amax)
                off = float32.subtract(divide(back, f32(span)), b)
                error = float32.add(error, multiply(off, off) if how == "mse" else off & ~SIGN)
            tried.append((float32.value(error), scale, codes))
        choice = int(tried[1][0] < tried[0][0])
        picked.add(choice)
        assert found.scales[row].tolist() == [tried[choice][1]]
        assert found.codes[row].tolist() == tried[choice][2]
    assert picked == {0, 1}


@pytest.mark.parametrize(("how", "span"), [("mae", 2688), ("mse", 1536)])
def test_four_over_six_takes_the_first_in_a_tie(how: str, span: int) -> None:
    """6 and 3 are codes under a scale of 1, and 4 and 2 under 1.5: no error either way."""
    x = np.array([[6.0, -3.0, *[0.0] * 14]], np.float32)
    found = quantize(x, f"te-nvfp4-4over6-{how}", tensor_amax=np.float32(span))
    assert found.scales.item() == 0x38
    assert found.codes[0, :3].tolist() == [0x7, 0xD, 0x0]


def test_the_hadamard_transform() -> None:
    """y = x D H / 4 of integers, which is exact, then as without the transform."""
    hadamard = np.array([[1]])
    for _ in range(4):
        hadamard = np.kron(np.array([[1, 1], [1, -1]]), hadamard)
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
    x = np.random.default_rng(4).integers(-500, 500, (12, 32))
    y = (x.reshape(12, 2, 16) * signs @ hadamard).reshape(12, 32) / 4
    with_transform = quantize(x.astype(np.float32), "te-nvfp4-rht")
    without = quantize(y.astype(np.float32), "te-nvfp4")
    np.testing.assert_array_equal(with_transform.codes, without.codes)
    np.testing.assert_array_equal(with_transform.scales, without.scales)
    assert with_transform.tensor_scale == without.tensor_scale


# Where libraries differ, worked examples.


def one(amax: int, tensor_amax: int, x: int, name: str) -> tuple[int, int]:
    """Scale code and code of x in a block with that amax, all float32 bits."""
    row = np.array([[amax, x, *[0] * 14]], np.uint32).view(np.float32)
    found = quantize(row, name, tensor_amax=np.uint32(tensor_amax).view(np.float32))
    return found.scales.item(), found.codes[0, 1].item()


@pytest.mark.parametrize(
    ("name", "amax", "tensor_amax", "scale"),
    [
        ("te-nvfp4", 0x3FAD6667, 0x458ECCCD, 0x20),
        ("compressedtensors-nvfp4", 0x3FAD6667, 0x458ECCCD, 0x21),
        ("te-nvfp4", 0x4541CCCD, 0x458ECCCD, 0x7A),
        ("modelopt-nvfp4", 0x4541CCCD, 0x458ECCCD, 0x79),
        ("te-nvfp4", 0x43FEFFFF, 0x458ECCCD, 0x64),
        ("vllm-nvfp4-reference", 0x43FEFFFF, 0x458ECCCD, 0x65),
        ("te-nvfp4", 0x3D27FFFF, 0x45280000, 0x03),
        ("torchao-nvfp4", 0x3D27FFFF, 0x45280000, 0x08),
    ],
)
def test_where_libraries_differ_in_the_scale(
    name: str, amax: int, tensor_amax: int, scale: int
) -> None:
    assert one(amax, tensor_amax, 0, name)[0] == scale


@pytest.mark.parametrize(
    ("name", "x", "amax", "tensor_amax", "scale", "code"),
    [
        ("te-nvfp4", 0xC4C3FFFF, 0x45280000, 0x45280000, 0x7E, 0x0E),
        ("modelopt-nvfp4", 0xC4C3FFFF, 0x45280000, 0x45280000, 0x7E, 0x0D),
        ("compressedtensors-nvfp4", 0xC4C3FFFF, 0x45280000, 0x45280000, 0x7E, 0x0D),
        ("te-nvfp4", 0xB1D1F91B, 0x323614BC, 0x400B8C89, 0x00, 0x0F),
        ("vllm-nvfp4-reference", 0xB1D1F91B, 0x323614BC, 0x400B8C89, 0x00, 0x08),
    ],
)
def test_where_libraries_differ_in_an_element(
    name: str, x: int, amax: int, tensor_amax: int, scale: int, code: int
) -> None:
    assert one(amax, tensor_amax, x, name) == (scale, code)
