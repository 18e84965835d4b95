"""`fused_dot` against the slow machine of tests/independent, at the edges of every rule."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import fused_dot, matmul_bits
from tests.arithmetic.product_row_maker import Maker, adversarial
from tests.arithmetic.product_rows import PAIRS, Row, arguments, results
from tests.independent import float32, machine

ALL = [pytest.param(pair, id="-".join(pair)) for pair in PAIRS]
IN_JAX = [  # every element format, and infinities on one side, the other, both and none
    ("e4m3", "e4m3"),
    ("e2m1", "e5m2"),
    ("e5m2", "e3m2"),
    ("e5m2", "e5m2"),
    ("e2m3", "e2m1"),
    ("fp16", "fp16"),
]
WRONG = [
    ("FRACTION_BITS", 24),
    ("FRACTION_BITS", 26),
    ("EXPONENT_FLOOR", -132),
    ("EXPONENT_FLOOR", -134),
]


def check(rows: list[Row], got: Any, wanted: Any) -> None:
    for index in np.flatnonzero(np.asarray(got) != wanted).tolist():
        row = rows[index]
        raise AssertionError(
            f"row {index} ({row.why}): {int(got[index]):#010x}, not {int(wanted[index]):#010x}; {row}"
        )
    assert got.dtype == np.uint32


def in_jax(given: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}


@pytest.mark.parametrize("pair", ALL)
def test_numpy(pair: tuple[str, str]) -> None:
    rows, wanted = adversarial(pair)
    assert len(rows) > 800
    check(rows, fused_dot(**arguments(rows, pair)), wanted)


@pytest.mark.parametrize("pair", [pytest.param(pair, id="-".join(pair)) for pair in IN_JAX])
def test_jax(pair: tuple[str, str]) -> None:
    rows, wanted = adversarial(pair)
    check(rows, fused_dot(**in_jax(arguments(rows, pair))), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("pair", ALL)
def test_jax_with_every_pair(pair: tuple[str, str]) -> None:
    rows, wanted = adversarial(pair)
    check(rows, fused_dot(**in_jax(arguments(rows, pair))), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("pair", ALL)
@pytest.mark.parametrize("seed", range(5))
def test_many_random_rows(pair: tuple[str, str], seed: int) -> None:
    maker = Maker(pair, seed=seed)
    rows = [row for _ in range(40) for row in (*maker.any_bits(), *maker.any_finite())]
    check(rows, fused_dot(**arguments(rows, pair)), results(rows, pair))


@pytest.mark.parametrize(("rule", "wrong"), WRONG)
@pytest.mark.parametrize("pair", ALL)
def test_the_rows_show_a_wrong_rule(
    pair: tuple[str, str], rule: str, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pair == ("fp16", "fp16") and rule == "EXPONENT_FLOOR":
        return  # the smallest product of two fp16 is far above it
    rows, right = adversarial(pair)
    if rule == "EXPONENT_FLOOR":
        chosen = [index for index, row in enumerate(rows) if "floor" in row.why]
    else:
        chosen = [index for index, row in enumerate(rows) if "c" in row.why]
    monkeypatch.setattr(machine, rule, wrong)
    assert (results([rows[index] for index in chosen], pair) != right[chosen]).sum() >= 4


def test_the_rows_reach_every_kind_of_result() -> None:
    rows, wanted = adversarial(("e4m3", "e4m3"))
    by_value = dict(zip(wanted.tolist(), rows, strict=True))
    assert {0, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF} <= by_value.keys()
    assert {float32.INFINITY, float32.MINUS_INFINITY, float32.NAN} <= by_value.keys()
    assert float32.SIGN not in by_value  # a zero is +0
    for end, result in (
        ("largest + 2^104", float32.INFINITY),
        ("largest + 2^103", 0x7F7FFFFF),
        ("largest + 2 * 2^103", float32.INFINITY),
    ):
        found = {int(x) for row, x in zip(rows, wanted, strict=True) if row.why == end}
        assert found == {result, result | float32.SIGN}


@pytest.mark.parametrize("k", [0, 1, 15, 16, 17, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("pair", [("e5m2", "e4m3"), ("fp16", "fp16")], ids="-".join)
def test_k_that_is_no_whole_number_of_steps(pair: tuple[str, str], k: int) -> None:
    maker = Maker(pair, seed=k, k=k)
    rows = [*maker.any_finite(), *maker.any_bits()]
    given, wanted = arguments(rows, pair), results(rows, pair)
    assert given["a"].shape == (len(rows), k)
    check(rows, fused_dot(**given), wanted)
    transposed = {name: given[name].T for name in ("b", "b_scales") if name in given}
    square = matmul_bits(
        **{name: x for name, x in (given | transposed).items() if name != "c_bits"},
        c=np.tile(given["c_bits"][:, None], len(rows)),
    )
    check(rows, square.diagonal(), wanted)


@pytest.mark.parametrize("k", [0, 33])
def test_k_that_is_no_whole_number_of_steps_in_jax(k: int) -> None:
    pair = ("e4m3", "e4m3")
    rows = [*Maker(pair, seed=k, k=k).any_finite()]
    check(rows, fused_dot(**in_jax(arguments(rows, pair))), results(rows, pair))


@pytest.mark.parametrize(
    ("xp", "shape"),
    [
        (np, (0, 32, 3)),
        (np, (3, 32, 0)),
        (np, (0, 0, 0)),
        (np, (2, 0, 3)),
        (jnp, (3, 33, 0)),
        (jnp, (2, 0, 3)),
    ],
)
def test_empty_products(xp: Any, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    got = matmul_bits(
        xp.zeros((m, k), dtype=np.uint8),
        xp.zeros((k, n), dtype=np.uint8),
        "sm100.tcgen05.mxf8f6f4",
        a_format="e4m3",
        b_format="e5m2",
        a_scales=xp.zeros((m, -(-k // 32)), dtype=np.uint8),
        b_scales=xp.zeros((-(-k // 32), n), dtype=np.uint8),
    )
    assert got.shape == (m, n)
    assert not got.any()


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_zero_codes_leave_the_accumulator_as_it_is(xp: Any) -> None:
    """What makes padded and masked lanes neutral: any c but -0 and NaN comes out bit for bit."""
    rng = np.random.default_rng(3)
    c = rng.integers(0, 1 << 32, 4000, dtype=np.uint32)
    c = np.concatenate([c, c & 0x807FFFFF, np.arange(200, dtype=np.uint32), [0x7F800000]])
    c = np.where(c == float32.SIGN, 0, np.where((c & 0x7FFFFFFF) > 0x7F800000, 0, c))
    c = c.astype(np.uint32)
    zeros = rng.integers(0, 2, (2, len(c), 64)).astype(np.uint8) << 7
    scales = rng.integers(0, 255, (2, len(c), 2)).astype(np.uint8)
    got = fused_dot(
        *(xp.asarray(x) for x in (*zeros, c)),
        "sm100.tcgen05.mxf8f6f4",
        a_format="e4m3",
        b_format="e4m3",
        a_scales=xp.asarray(scales[0]),
        b_scales=xp.asarray(scales[1]),
    )
    np.testing.assert_array_equal(got, c)
