"""Orders of additions, against exact integers dealt to lanes one by one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flamia_ref.arithmetic import reductions
from flamia_ref.arithmetic.reductions import REDUCTIONS, Reduction
from flamia_ref.evidence import Evidence
from tests.arithmetic.operands import KINDS, SPECIAL, Words, differing
from tests.independent import deltas, float32, sums

LIBRARIES = {"numpy": np.asarray, "jax": jnp.asarray}

ORDERS = {
    "ascending": Reduction(),
    "from the first": Reduction(begins="term"),
    "tree": Reduction(lanes=64, exchanges=(1, 2, 4, 8, 16, 32)),
    "other tree": Reduction(lanes=64, exchanges=(32, 16, 8, 4, 2, 1), begins="term"),
    "strided": Reduction(lanes=16),
    "vectors": Reduction(lanes=4, vector=4, exchanges=(2, 1)),
    "groups": Reduction(lanes=4, vector=4, grouped=True, exchanges=(1, 2)),
    "groups, flushed": Reduction(lanes=2, vector=8, grouped=True, ftz=True, exchanges=(1,)),
    "chunks": Reduction(lanes=2, chunk=16, exchanges=(1,)),
    "chunks of groups": Reduction(lanes=2, vector=2, grouped=True, chunk=32, begins="term"),
    "three lanes": Reduction(lanes=3, begins="term"),
    "flushed": Reduction(lanes=8, exchanges=(4, 1, 2), ftz=True),
} | dict(REDUCTIONS)


def terms(rows: int, count: int, seed: int) -> Words:
    """Rows of terms of every kind: sums that round, cancel, underflow, and special values."""
    random = np.random.default_rng(seed)
    x = np.stack([list(KINDS.values())[row % len(KINDS)](random, count) for row in range(rows)])
    x[::3, : count // 2] = x[::3, count // 2 :][:, : count // 2] ^ np.uint32(1 << 31)
    x[5] = random.choice(SPECIAL, count)
    x[6] = 0x80000000
    x[7] &= np.uint32(0x807FFFFF)
    return x


def given(order: Reduction) -> dict[str, Any]:
    """The order without its evidence, as keywords."""
    data = dataclasses.asdict(order)
    return {name: data[name] for name in data if name not in ("evidence", "source")}


@pytest.mark.parametrize("name", ORDERS)
def test_orders(name: str) -> None:
    order = ORDERS[name]
    count = order.dealt * -(-96 // order.dealt)
    x = terms(12, count, 1)
    starts: list[Words | None] = [None]
    if order.begins == "zero" and order.chunk is None:
        starts.append(np.random.default_rng(2).choice(SPECIAL, 12))
    for start in starts:
        expected, lanes = [], []
        for row, terms_of_row in enumerate(x.tolist()):
            first = None if start is None else [int(start[row]), *[0] * (order.lanes - 1)]
            total, partial = sums.reduced(terms_of_row, **given(order), start=first)
            # A sum of one term is that term, as it is.
            expected.append(float32.NAN if float32.is_nan(total) else total)
            lanes.append([float32.NAN if float32.is_nan(y) else y for y in partial])
        wanted = np.array(expected, np.uint32)
        assert not differing(reductions.reduce(x, order, 1, start), wanted)
        if start is None:
            held = reductions.partial_sums(x, order)
            assert not differing(held, np.array(lanes, np.uint32))
            # Along another axis, and with more of them.
            turned = reductions.reduce(x.T.reshape(count, 3, 4), order, 0)
            assert not differing(turned.reshape(-1), wanted)


@pytest.mark.parametrize("name", ["tree", "groups, flushed", "chunks of groups", "fa3.row_sum"])
def test_orders_in_jax(name: str) -> None:
    order = ORDERS[name]
    x = terms(12, 64, 1)
    assert not differing(reductions.reduce(jnp.asarray(x), order), reductions.reduce(x, order))


SAME = {"fa4.delta.32", "sage3.row_sum"}
"""Four threads of eight columns each in both, and the same exchanges."""


def test_orders_differ() -> None:
    """Else the tests above would say nothing."""
    x = np.random.default_rng(4).normal(size=(200, 128)).astype(np.float32).view(np.uint32)
    seen: dict[bytes, str] = {}
    for name, order in ORDERS.items():
        if 128 % order.dealt or order.ftz or (order.begins == "term" and order.lanes == 1):
            continue
        result = reductions.reduce(x, order).tobytes()
        assert result not in seen or {name, seen[result]} == SAME, f"{name} is {seen[result]}"
        seen[result] = name
    assert len(seen) > 8


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
def test_jit_of_vmap(x64: bool) -> None:
    order = REDUCTIONS["fa4.row_sum"]
    x, start = terms(16, 64, 5), SPECIAL[:16]
    expected = reductions.reduce(x, order, 1, start)
    with jax.enable_x64(x64):
        one = jax.jit(jax.vmap(lambda row, first: reductions.reduce(row, order, 0, first)))
        assert not differing(one(jnp.asarray(x), jnp.asarray(start)), expected)


def positive(*shape: int, seed: int) -> Words:
    """What softmax makes: numbers from 0 to 256, of many magnitudes."""
    random = np.random.default_rng(seed)
    return np.exp2(random.uniform(-30, 8, shape)).astype(np.float32).view(np.uint32)


@pytest.mark.parametrize("library", LIBRARIES)
def test_row_sums_by_hand(library: str) -> None:
    p, held = positive(6, 128, seed=6), positive(6, seed=7)
    convert = LIBRARIES[library]
    eight = [sums.eight_lanes(*row) for row in zip(held.tolist(), p.tolist(), strict=True)]
    got = reductions.reduce(convert(p), REDUCTIONS["fa4.row_sum"], 1, convert(held))
    assert not differing(got, np.array(eight, np.uint32))
    order = REDUCTIONS["cudnn.mxfp8.row_sum"]
    two = np.array([sums.two_lanes(row) for row in p.tolist()], np.uint32)
    assert not differing(reductions.partial_sums(convert(p), order), two)
    whole = [float32.add(even, odd) for even, odd in two.tolist()]
    assert not differing(reductions.combine(convert(two), order), np.array(whole, np.uint32))


@pytest.mark.parametrize("channels", [32, 64, 96, 128, 256])
def test_deltas_by_hand(channels: int) -> None:
    """With dO = 1 the products are O's values, which bfloat16 holds."""
    random = np.random.default_rng(channels)
    out = random.normal(size=(6, channels)).astype(np.float32).view(np.uint32) >> np.uint32(16)
    ones = [0x3F80] * channels
    width = next(width for width in (128, 64, 32) if channels % width == 0)
    for name, function in (
        (f"fa4.delta.{width}", deltas.flash_attention),
        ("cudnn.mxfp8.delta", deltas.cudnn),
    ):
        expected = np.array([function(ones, row) for row in out.tolist()], np.uint32)
        assert not differing(reductions.reduce(out << np.uint32(16), REDUCTIONS[name]), expected)


def test_halved_start() -> None:
    """CUTLASS begins lanes 0 and 1 with half the sum so far."""
    order = REDUCTIONS["fa4.row_sum"]
    p, half = positive(5, 128, seed=9), positive(5, seed=10)
    start = np.zeros((5, 8), np.uint32)
    start[:, 0] = start[:, 1] = half
    expected = [
        sums.reduced(row, **given(order), start=begun)[0]
        for row, begun in zip(p.tolist(), start.tolist(), strict=True)
    ]
    lanes = reductions.partial_sums(p, order, 1, start)
    assert not differing(reductions.combine(lanes, order), np.array(expected, np.uint32))


def test_nothing_to_add() -> None:
    empty = np.zeros((3, 0), np.uint32)
    assert reductions.reduce(empty, Reduction()).tolist() == [0, 0, 0]
    start = np.array([0x80000000, 1, 0x3F800000], np.uint32)
    assert reductions.reduce(empty, Reduction(), 1, start).tolist() == start.tolist()
    order = Reduction(begins="term")
    with pytest.raises(ValueError, match="takes a multiple of 1 above 0"):
        reductions.reduce(empty, order)
    assert reductions.reduce(np.zeros((0, 8), np.uint32), REDUCTIONS["fa4.row_sum"]).shape == (0,)


def test_registered() -> None:
    for name, order in REDUCTIONS.items():
        assert order.source, name
        assert order.evidence in (Evidence.SOURCE, Evidence.SPECIFIED)
    # Equal data are one order, whatever they rest on.
    assert REDUCTIONS["ascending"] == Reduction()
    with pytest.raises(KeyError, match=r"unknown reduction 'fa4\.rowsum'; did you mean"):
        REDUCTIONS["fa4.rowsum"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"lanes": 0}, "lanes is 0; it must be a whole number, 1 or more"),
        ({"vector": 1.5}, "vector is 1.5"),
        ({"lanes": True}, "lanes is True"),
        ({"begins": "one"}, "begins is 'one'; allowed: 'zero', 'term'"),
        ({"chunk": 0}, "chunk is 0"),
        ({"lanes": 4, "vector": 2, "chunk": 12}, "lanes times vector, 8, must divide it"),
        ({"lanes": 4, "exchanges": (1, 4)}, r"exchanges is \(1, 4\) for 4 lanes"),
        ({"lanes": 3, "exchanges": (1,)}, "lanes that are a power of two"),
        ({"lanes": 4, "exchanges": 5}, "exchanges is 5; it must be a tuple of whole numbers"),
        ({"lanes": 4, "exchanges": (1, "2")}, "it must be a tuple of whole numbers"),
        ({"lanes": 4, "exchanges": (1, 1)}, "each power of two below lanes once"),
    ],
)
def test_no_order(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reduction(**data)


def test_names_and_lists() -> None:
    x = positive(3, 16, seed=11)
    for name, order in REDUCTIONS.items():
        if 16 % order.dealt == 0:
            lanes = reductions.partial_sums(x, name)
            assert not differing(lanes, reductions.partial_sums(x, order))
            assert not differing(reductions.combine(lanes, name), reductions.combine(lanes, order))
            assert not differing(reductions.reduce(x, name), reductions.reduce(x, order))
    assert not differing(
        reductions.reduce(x, "ascending", np.int64(1)), reductions.reduce(x, Reduction())
    )
    listed = Reduction(lanes=4, exchanges=[2, 1])  # type: ignore[arg-type]
    assert listed == Reduction(lanes=4, exchanges=(2, 1))
    assert not differing(reductions.reduce(jnp.asarray(x), listed), reductions.reduce(x, listed))


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_no_order_or_axis(library: str) -> None:
    x = LIBRARIES[library](np.zeros((2, 8), np.uint32))
    calls = (reductions.reduce, reductions.partial_sums, reductions.combine)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ("ascendin", ValueError, "unknown reduction 'ascendin'; did you mean 'ascending'"),
        (None, TypeError, "order is None; it must be a Reduction or a name in REDUCTIONS"),
        (["ascending"], TypeError, "must be a Reduction or a name in REDUCTIONS"),
    ]
    for call in calls:
        for order, error, message in wrong:
            with pytest.raises(error, match=message) as raised:
                call(x, order)
            assert "\n" not in str(raised.value)
    for axis in (None, 0.0, (0, 1)):
        with pytest.raises(TypeError, match=r"axis is .*; it must be an integer"):
            reductions.reduce(x, "ascending", axis)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="axis is -3; x has 2 axes"):
        reductions.reduce(x, "ascending", -3)


def test_refusals() -> None:
    order = REDUCTIONS["fa4.row_sum"]
    x = np.zeros((2, 12), np.uint32)
    with pytest.raises(ValueError, match=r"x has 12 terms along axis 1; .* multiple of 8: pad"):
        reductions.reduce(x, order)
    with pytest.raises(ValueError, match="axis is 2; x has 2 axes"):
        reductions.reduce(x, order, 2)
    with pytest.raises(TypeError, match="float32 operations take uint32 bit patterns"):
        reductions.reduce(x.view(np.float32), order)
    with pytest.raises(TypeError, match="holds list"):
        reductions.reduce([1, 2], order)
    with pytest.raises(TypeError, match="holds float32"):
        reductions.reduce(x[:, :8], order, 1, np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"must broadcast to \(2, 8\)"):
        reductions.reduce(x[:, :8], order, 1, np.zeros(3, np.uint32))
    with pytest.raises(ValueError, match="start is given, but lanes of this order begin"):
        reductions.reduce(x, REDUCTIONS["cudnn.mxfp8.row_sum"], 1, np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="the last axis must have 8"):
        reductions.combine(x, order)
