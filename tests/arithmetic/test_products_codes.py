"""All pairs of codes as single products, and all pairs of scales, against exact arithmetic.

A single product with c = 0 is exact: no more than 22 bits are multiplied, and float32 keeps 24.
"""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from flamia_ref.arithmetic import fused_dot, matmul_bits
from tests.independent import codes, float32, machine, tensor_cores

NARROW = tensor_cores.INSTRUCTIONS["sm100.tcgen05.mxf8f6f4"].formats
PRODUCTS = [
    *(("sm100.tcgen05.mxf8f6f4", a, b, "e8m0", 32) for a in NARROW for b in NARROW),
    *(("sm100.tcgen05.f8f6f4", a, a, None, 32) for a in NARROW),
    *(("sm90.wgmma.fp8", a, b, None, 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *(("sm90.wgmma.fp8.f16out", a, "e5m2", None, 32) for a in ("e4m3", "e5m2")),
    *(("sm100.tcgen05.f8f6f4.f16out", a, "e4m3", None, 32) for a in NARROW),
    ("sm89.mma.fp8", "e4m3", "e4m3", None, 32),
    ("sm100.tcgen05.mxf4", "e2m1", "e2m1", "e8m0", 32),
    ("sm100.tcgen05.mxf4nvf4", "e2m1", "e2m1", "ue4m3", 16),
    ("sm120.mma.mxf4nvf4", "e2m1", "e2m1", "e8m0", 16),
]
ONE = {"e8m0": 127, "ue4m3": 0x38}
Floats = npt.NDArray[np.float64]


def values(name: str) -> Floats:
    """Every code of an element format."""
    found = []
    for kind, m, e in machine.element_operands(codes.ELEMENTS[name]):
        value = m * 2.0 ** (e - codes.ELEMENTS[name].fraction_bits)
        found.append({machine.FINITE: value, machine.INFINITE: m * np.inf}.get(kind, np.nan))
    return np.array(found)


def stored(x: Floats, half: bool) -> Any:
    """Bits of exact values: zeros without a sign, one NaN."""
    with np.errstate(over="ignore"):
        narrow = x.astype(np.float16 if half else np.float32) + 0.0  # -0 becomes +0
    bits = narrow.view(np.uint16 if half else np.uint32)
    return np.where(np.isnan(x), 0x7FFF if half else float32.NAN, bits).astype(bits.dtype)


def operands(name: str, a: Any, b: Any, scale_format: str | None, block: int) -> dict[str, Any]:
    """Arguments of a matmul of columns `a` and `b`, padded with zeros to a step, scales of 1."""
    terms = tensor_cores.INSTRUCTIONS[name].rules.terms
    padding = terms - 1
    given: dict[str, Any] = {
        "a": np.pad(a[:, None], ((0, 0), (0, padding))),
        "b": np.pad(b[None], ((0, padding), (0, 0))),
        "instruction": name,
    }
    if scale_format:
        one = ONE[scale_format]
        given["a_scales"] = np.full((len(a), terms // block), one, dtype=np.uint8)
        given["b_scales"] = np.full((terms // block, len(b)), one, dtype=np.uint8)
        given["scale_format"] = scale_format
    return given


@pytest.mark.parametrize(
    ("name", "a", "b", "scale_format", "block"),
    PRODUCTS,
    ids=["-".join(map(str, x[:4])) for x in PRODUCTS],
)
def test_every_pair_of_codes(
    name: str, a: str, b: str, scale_format: str | None, block: int
) -> None:
    first, second = values(a), values(b)
    every = [np.arange(len(x), dtype=np.uint8) for x in (first, second)]
    with np.errstate(invalid="ignore"):
        products = first[:, None] * second[None]
    given = operands(name, *every, scale_format, block)
    got = matmul_bits(**given, a_format=a, b_format=b)
    np.testing.assert_array_equal(got, stored(products, name.endswith(".f16out")))


E8M0 = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan])
E4M3 = values("e4m3")
UE4M3 = E4M3[np.arange(256) & 0x7F]  # bit 7 does not count
SCALES = [
    ("sm100.tcgen05.mxf8f6f4", "e4m3", "e8m0", 32),
    ("sm100.tcgen05.mxf4", "e2m1", "e8m0", 32),
    ("sm100.tcgen05.mxf4nvf4", "e2m1", "e8m0", 16),
    ("sm100.tcgen05.mxf4nvf4", "e2m1", "ue4m3", 16),
    ("sm120.mma.mxf4nvf4", "e2m1", "ue4m3", 16),
]


@pytest.mark.parametrize(
    ("name", "element", "scale_format", "block", "xp"),
    [*((*x, np) for x in SCALES), (*SCALES[0], jnp), (*SCALES[3], jnp)],
)
def test_every_pair_of_scales(
    name: str, element: str, scale_format: str, block: int, xp: Any
) -> None:
    """1.5 times 1 under each pair of scales, cut to float32 where it is subnormal."""
    scales = E8M0 if scale_format == "e8m0" else UE4M3
    table = values(element)
    one, more = (np.full(256, int(np.flatnonzero(table == x)[0]), np.uint8) for x in (1.0, 1.5))
    given = operands(name, more, one, scale_format, block)
    given["a_scales"][:, 0] = given["b_scales"][0] = np.arange(256)
    got = matmul_bits(
        **{key: xp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in given.items()},
        a_format=element,
        b_format=element,
    )
    exact = 1.5 * scales[:, None] * scales[None]
    cut = np.where(exact < 2.0**-126, np.trunc(exact * 2.0**149) * 2.0**-149, exact)
    np.testing.assert_array_equal(np.asarray(got), stored(cut, half=False))


@pytest.mark.parametrize(("name", "element", "scale_format", "block"), SCALES)
def test_each_scale_reaches_its_block_alone(
    name: str, element: str, scale_format: str, block: int
) -> None:
    """One product of 1 in one place, under scales that are all different."""
    terms = 2 * tensor_cores.INSTRUCTIONS[name].rules.terms
    one = int(np.flatnonzero(values(element) == 1.0)[0])
    scales = E8M0 if scale_format == "e8m0" else UE4M3
    blocks = terms // block
    code = np.arange(2 * blocks, dtype=np.uint8) * (5 if scale_format == "ue4m3" else 3) + 40
    left, right = code[:blocks], code[blocks:]
    a = (one * np.eye(terms)).astype(np.uint8)
    b = np.full((terms, 1), one, dtype=np.uint8)
    got = matmul_bits(
        a,
        b,
        name,
        a_format=element,
        b_format=element,
        a_scales=np.tile(left, (terms, 1)),
        b_scales=right[:, None],
        scale_format=scale_format,
    )
    per_block = scales[left] * scales[right]
    wanted = np.repeat(per_block, block)[:, None]
    np.testing.assert_array_equal(got, stored(wanted, half=False))
    assert len(set(per_block.tolist())) == blocks


@pytest.mark.parametrize("instruction", ["sm90.wgmma.f16.f16out", "sm100.tcgen05.f16.f16out"])
def test_float16_results_are_rounded_as_numpy_does(instruction: str) -> None:
    """A sum that is exact before it is rounded: c plus one product, both whole numbers of 2^-20."""
    rng = np.random.default_rng(8)
    parts = [rng.integers(0, 1 << 11, 4000) * 2.0 ** rng.integers(-10, 1, 4000) for _ in range(2)]
    c = (rng.integers(-(1 << 11), 1 << 11, 4000) * 2.0 ** rng.integers(-8, -2, 4000)).astype(
        np.float16
    )
    a, b = (x.astype(np.float16) for x in parts)
    total = a.astype(np.float64) * b.astype(np.float64)
    keep = (total < 2.0**14) & (np.abs(c.astype(np.float64)) > 0)
    a, b, c, total = (x[keep] for x in (a, b, c, total))
    padded = [np.pad(x.view(np.uint16)[:, None], ((0, 0), (0, 15))) for x in (a, b)]
    got = fused_dot(*padded, c.view(np.uint16), instruction, a_format="fp16", b_format="fp16")
    # 25 bits below the larger of the two keep both whole.
    exact = total + c.astype(np.float64)
    sizes = np.maximum(np.abs(total), np.abs(c.astype(np.float64)))
    whole = sizes < 2.0**5
    assert whole.sum() > 500
    np.testing.assert_array_equal(got[whole], stored(exact, half=True)[whole])


@pytest.mark.parametrize("name", ["sm90.wgmma.tf32", "sm100.tcgen05.tf32", "sm80.mma.tf32"])
def test_a_tf32_nan_in_bits_that_do_not_count_is_infinite(name: str) -> None:
    """As in MMA-Sim; nobody has shown what a device makes of it."""
    a = np.zeros((2, 8), dtype=np.uint32)
    a[:, 0] = 0x7F800001, 0xFF801FFF
    b = np.full((2, 8), 0x3F800000, dtype=np.uint32)
    got = fused_dot(a, b, np.zeros(2, np.uint32), name)
    assert got.tolist() == [float32.INFINITY, float32.MINUS_INFINITY]


def test_all_pairs_are_counted() -> None:
    assert sum(1 for _ in itertools.product(values("e2m1"), repeat=2)) == 256
    assert len(values("e4m3")) ** 2 == 65536
