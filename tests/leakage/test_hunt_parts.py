"""The parts of the hunt, each against what is worked out by hand or by brute force."""

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref.leakage.legal import LEGAL, Severity
from flamia_ref.leakage.search import noise, plan
from flamia_ref.leakage.search.bases import FAMILIES, LARGEST, Base, rounded
from flamia_ref.leakage.search.controls import Control, controls_for, shared_scale
from flamia_ref.leakage.search.edits import Action, Edit
from flamia_ref.leakage.search.observing import judged
from flamia_ref.leakage.search.outcomes import Outcome, moved, number
from flamia_ref.leakage.search.scale_bytes import changes, unread
from flamia_ref.leakage.search.setting import Setting, reach
from flamia_ref.leakage.search.simplifications import changed

BF16 = np.dtype(ml_dtypes.bfloat16)


def setting(*lengths: int, **changes: Any) -> Setting:
    given: dict[str, Any] = {
        "head_dim": 8,
        "heads": 2,
        "kv_heads": 1,
        "causal": True,
        "window": None,
        "alignment": "bottom_right",
        "softmax_scale": None,
        "backward": True,
    }
    return Setting.of(lengths=lengths, **(given | changes))


@pytest.mark.parametrize("lengths", [(5, 3), (1,), (4, 0, 2)])
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": (1, 0)}], ids=str)
def test_forbidden_rows_are_those_without_a_legal_source(
    lengths: tuple[int, ...], mask: dict[str, Any]
) -> None:
    one = setting(*lengths, **mask)
    for output, operand in itertools.product(one.outputs, one.operands):
        legal = one.legal.dense(output, operand)
        for tokens in [(0,), (one.tokens - 1,), (0, one.tokens - 1), tuple(range(one.tokens))]:
            chosen = np.array(tokens)
            expected = ~legal[:, chosen].any(axis=1)
            assert (one.forbidden(output, operand, chosen) == expected).all()


def test_what_can_be_found_by_brute_force() -> None:
    one = setting(20, 14)
    for operand in one.operands:
        expected: dict[Severity, set[int]] = {}
        for output in one.outputs:
            legal = one.legal.dense(output, operand)
            for i, j in itertools.permutations(range(34), 2):
                if legal[i, j]:
                    continue
                kind = Severity(one.legal.severity(output, i, operand, j).item())
                same = (i < 20) == (j < 20)
                place = [t if t < 20 else t - 20 for t in (i, j)]
                for size in (16, 32, 64, 128):
                    local = same and place[0] // size == place[1] // size
                    if local or i // size == j // size:
                        expected.setdefault(kind, set()).add(size)
        found = reach(one, operand, one.outputs)
        assert {kind: set(sizes) for kind, sizes in found.severities.items()} == expected


def test_documents_that_end_at_blocks_share_none() -> None:
    found = reach(setting(128, 128), "v", ("out", "lse"))
    assert Severity.CROSS_DOCUMENT in found.apart
    (own, tail, across) = controls_for("v", found)
    assert (own.grid, own.size, tail.grid, across.grid) == ("document", 32, "tail", "tensor")


def test_no_control_where_no_scale_could_leak() -> None:
    assert controls_for("v", reach(setting(64, causal=False), "v", ("out", "lse"))) == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_finite_and_the_same_each_time(family: str) -> None:
    one = setting(40, 24)
    inputs = Base(family=family, seed=3).inputs(one)
    again = Base(family=family, seed=3).inputs(setting(40, 24))
    assert set(inputs) == {"q", "k", "v", "dout"}
    for name, x in inputs.items():
        assert x.dtype == BF16
        assert x.shape == (64, 1 if name in "kv" else 2, 8)
        assert np.isfinite(x.astype(np.float64)).all()
        assert np.array_equal(x.view(np.uint16), again[name].view(np.uint16))


def test_alternating_keys_leave_tiny_weights() -> None:
    one = setting(64, head_dim=32, heads=1)
    inputs = Base(family="near_32", seed=0).inputs(one)
    q, k, v = (inputs[name][:, 0].astype(np.float64) for name in "qkv")
    s = q @ k.T * one.softmax_scale
    weights = np.exp(s[40] - s[40, :41].max())
    assert (weights[32:41] == 1).all()
    assert weights[:32].max() < 2.0**-16
    assert not v[32:].any()


def test_exact_inputs_give_each_row_two_equal_weights() -> None:
    one = setting(40, 24, head_dim=32, heads=1)
    inputs = Base(family="two_hot", seed=1).inputs(one)
    q, k = (inputs[name][:, 0].astype(np.float64) for name in "qk")
    for first, last in ((0, 40), (40, 64)):
        s = q[first:last] @ k[first:last].T * one.softmax_scale
        for row in range(1, last - first):
            weights = np.exp(s[row, : row + 1] - s[row, : row + 1].max())
            assert sorted(weights)[-2:] == [1, 1]
            assert weights.sum() == 2


def test_edits_by_hand() -> None:
    x = np.arange(1, 7, dtype=np.float64).reshape(3, 1, 2).astype(BF16)
    inputs = {"v": x}

    def edited(**given: Any) -> list[list[float]]:
        after = Edit(operand="v", **given).applied(inputs)["v"]
        return after[:, 0].astype(np.float64).tolist()

    assert edited(tokens=(1,), action=Action.TIMES, amount=3) == [[1, 2], [24, 32], [5, 6]]
    assert edited(tokens=(0, 2), action=Action.ZERO) == [[0, 0], [3, 4], [0, 0]]
    assert edited(tokens=(0, 1), action=Action.SWAP) == [[3, 4], [1, 2], [5, 6]]
    assert edited(tokens=(2,), action=Action.NEGATE, channels=(1,)) == [[1, 2], [3, 4], [5, -6]]
    assert edited(tokens=(0, 1, 2), action=Action.ZERO, kept=(1,)) == [[1, 2], [0, 0], [5, 6]]
    assert edited(tokens=(0,), action=Action.SET, amount=0x4780, channels=(0,))[0] == [65536, 2]
    assert edited(tokens=(0,), action=Action.TIMES, amount=200)[0] == [LARGEST, LARGEST]
    assert np.isnan(edited(tokens=(0,), action=Action.NAN)[0]).all()
    assert x[0, 0, 0] == 1


def test_the_largest_bfloat16() -> None:
    assert float(ml_dtypes.finfo(BF16).max) == LARGEST
    assert float(rounded(np.array([1e300]))[0]) == LARGEST


def test_changes_by_hand() -> None:
    x = np.array([[[1.5, -3]], [[0, 5]]]).astype(BF16)
    inputs = {"q": x}
    assert changed(inputs, ("powers", "q"))["q"].tolist() == [[[1, -2]], [[0, 4]]]
    assert changed(inputs, ("positive", "q"))["q"].tolist() == [[[1.5, 3]], [[0, 5]]]
    assert changed(inputs, ("tokens", "q", 1))["q"].tolist() == [[[0, 0]], [[0, 5]]]
    assert changed(inputs, ("channels", "q", 0))["q"].tolist() == [[[1.5, 0]], [[0, 0]]]
    assert changed(inputs, ("put", "q", 0, 0, 1, 0x3F80))["q"].tolist() == [[[1.5, 1]], [[0, 5]]]


def test_the_plan_changes_every_token_alone_by_several_edits_those_of_cut_blocks_first() -> None:
    one = setting(40, 24)
    cases = plan.cases(one, one.operands, seed=0)
    assert [case.index for case in cases] == list(range(len(cases)))
    tail = {*range(32, 40), *range(56, 64)}
    for operand in one.operands:
        own = [c for c in cases if c.edit.operand == operand and len(c.edit.tokens) == 1]
        for token in range(64):
            alone = [c for c in own if c.edit.tokens == (token,)]
            assert {c.edit.action for c in alone} >= {Action.TIMES, Action.NEGATE, Action.ZERO}
            assert any(c.edit.action is Action.TIMES and c.edit.amount >= 16 for c in alone)
            assert len({(c.base.family, c.edit.action) for c in alone}) >= 3 + (token in tail)
        # By then every token of a cut block was multiplied, and few others were changed at all.
        done = {t: i for i, c in reversed(list(enumerate(own))) for t in c.edit.tokens}
        assert max(done[t] for t in tail) < 40
        assert sum(done[t] < 40 for t in range(64)) < 50
    assert cases == plan.cases(setting(40, 24), one.operands, seed=0)
    assert cases != plan.cases(one, one.operands, seed=1)


def test_controls_of_the_last_block_and_of_the_gradients() -> None:
    one = setting(40, 24, heads=1)
    found = controls_for("q", reach(one, "q", one.outputs))
    (tail,) = (x for x in found if x.grid == "tail")
    (backward,) = (x for x in found if x.severity is Severity.BACKWARD)
    assert not backward.wanted(Severity.FORWARD)
    assert backward.wanted(Severity.BACKWARD)
    inputs = {"q": np.full((64, 1, 8), 2.0**-20).astype(BF16)}
    inputs["q"][:, 0, 0] = 1.0703125  # no value of e4m3
    for token, shared in ((35, set(range(32, 40))), (50, set(range(40, 64))), (20, set())):
        edited = {"q": inputs["q"].copy()}
        edited["q"][token, 0, 1] = 1
        after = tail.planted(edited, one)["q"][:, 0].astype(np.float64)
        assert set(np.flatnonzero(after[:, 1] == 0).tolist()) == shared - {token}
        assert (after[:32, 0] == 1.0703125).all()


def test_one_operand_is_changed_at_a_time_by_every_kind_of_edit() -> None:
    one = setting(64)
    cases = plan.cases(one, one.operands, seed=0)
    kinds = {(case.edit.operand, case.edit.action) for case in cases}
    wanted = (Action.TIMES, Action.ZERO, Action.NEGATE, Action.RESAMPLE, Action.SWAP)
    assert kinds >= set(itertools.product(one.operands, wanted))
    for case in cases[:60]:
        inputs = case.base.inputs(one)
        after = case.edit.applied(inputs)
        assert all(after[name] is inputs[name] for name in inputs if name != case.edit.operand)


def test_bits_are_compared_as_integers() -> None:
    x = np.array([0.0, -0.0, 1.0, np.nan, np.nan], dtype=np.float32)
    y = np.array([-0.0, -0.0, np.nextafter(1, 2, dtype=np.float32), 0, 0], dtype=np.float32)
    y[3] = np.uint32(0x7FC00001).view(np.float32)
    assert moved(x, y).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (1.125, BF16, "0x3f90 (1.125)"),
        (2.0**16, np.float32, "0x4780 (2^16)"),
        (1.1, np.float32, "0x3f8ccccd (1.1)"),
        (-(2.0**-20), BF16, "0xb580 (-2^-20)"),
        (0.0, BF16, "0x0000 (0.0)"),
        (3.0, np.float16, "0x4200 (3.0)"),
        (math.nan, BF16, "0x7fc0 (nan)"),
    ],
)
def test_numbers_in_words(value: float, dtype: Any, text: str) -> None:
    assert number(np.array(value, dtype=dtype)) == text


def test_a_shared_scale_by_hand() -> None:
    x = np.array([[2.0**-20, 3.0], [1.0, 448.0], [0.0, 449.0]])
    # amax 1: scale 2^-8, so 2^-20 is 2^-12 and below half of e4m3's smallest, 2^-9. amax 449: scale 2, 3 / 2 is exact.
    assert shared_scale(x).tolist() == [[0, 3], [1, 448], [0, 448]]


def test_controls_couple_the_tokens_of_their_blocks_alone() -> None:
    one = setting(40, 24, heads=1)
    inputs = {"v": np.full((64, 1, 8), 2.0**-20).astype(BF16)}
    for grid, shared in (
        ("document", range(40, 64)),
        ("packed", range(32, 64)),
        ("tensor", range(64)),
    ):
        control = Control(operand="v", grid=grid, size=32)  # type: ignore[arg-type]
        edited = {"v": inputs["v"].copy()}
        edited["v"][50] = 1
        after = control.planted(edited, one)["v"][:, 0, 0].astype(np.float64)
        assert {int(t) for t in np.flatnonzero(after == 0)} == set(shared) - {50}


def test_noisy_outputs_are_compared_where_sums_are_exact_alone() -> None:
    one = setting(8)
    before = Outcome(
        outputs={name: np.zeros(one.shape(name), np.float32) for name in ("out", "lse")}
    )
    after = Outcome(outputs={name: x + 1 for name, x in before.outputs.items()})
    edit = Edit(operand="v", tokens=(3,), action=Action.ZERO)
    noisy = noise.QUIET.more({"out"}, "bell")
    for family, expected in (("bell", {"lse"}), ("two_hot", {"out", "lse"})):
        case = plan.Case(index=0, base=Base(family=family, seed=0), edit=edit)
        seen = judged(case, before, after, one, noisy=noisy)
        assert set(seen.illegal) == expected
    assert seen.illegal["out"].tolist() == [True] * 3 + [False] * 5
    worse = noisy.more({"lse"}, "two_hot")
    assert set(judged(case, before, after, one, noisy=worse).illegal) == {"out"}


# The permutation test.


def by_brute_force(x: np.ndarray[Any, Any], repeats: int) -> float:
    """The share of splits whose largest t statistic is that of the true one or more, in plain loops."""

    def statistic(half: set[int]) -> float:
        best = 0.0
        for column in x.T.tolist():
            one = [column[i] for i in half]
            other = [column[i] for i in range(2 * repeats) if i not in half]
            means = [sum(side) / repeats for side in (one, other)]
            within = sum(
                (y - m) ** 2 for side, m in zip((one, other), means, strict=True) for y in side
            )
            apart = abs(means[0] - means[1])
            if apart > 1e-12:
                best = max(best, apart / math.sqrt(within) if within > 1e-12 else math.inf)
        return best

    halves = [set(half) for half in itertools.combinations(range(2 * repeats), repeats)]
    true = statistic(set(range(repeats)))
    return sum(statistic(half) >= true - 1e-9 for half in halves) / len(halves)


@pytest.mark.parametrize("seed", range(4))
def test_p_values_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8, 3)) + 10
    x[4:, 1] += seed
    assert noise.p_value(x[:4], x[4:]) == pytest.approx(by_brute_force(x, 4))


def test_a_constant_shift_is_the_rarest_split() -> None:
    rng = np.random.default_rng(0)
    noisy = rng.normal(size=(16, 40)) * 1e-7 + 1
    assert noise.p_value(noisy[:8], noisy[8:]) > 0.01
    noisy[8:, 7] = 0
    assert noise.p_value(noisy[:8], noisy[8:]) == pytest.approx(1 / math.comb(15, 7))
    equal = np.ones((16, 5))
    assert noise.p_value(equal[:8], equal[8:]) == 1


def test_the_test_holds_its_level() -> None:
    rng = np.random.default_rng(1)
    found = [noise.p_value(*rng.normal(size=(2, 4, 5))) for _ in range(400)]
    assert np.mean(np.array(found) <= 0.1) < 0.15


def test_holm_by_hand() -> None:
    # Sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2 (at least what came before), 0.5 x 1.
    assert noise.holm([0.5, 0.01, 0.03, 0.02]) == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert noise.holm([]) == []


# Scale bytes.


def byte_change(stage: str, shape: tuple[int, ...], index: tuple[int, ...]) -> dict[str, Any]:
    before = np.zeros(shape, dtype=np.uint8)
    after = before.copy()
    after[index] = 9
    return {"before": {stage: before}, "after": {stage: after}}


@pytest.mark.parametrize(
    ("stage", "shape", "index", "operand", "token", "found"),
    [
        # 40 and 24 tokens in blocks of 32, counted from documents: 0 to 31, 32 to 39, 40 to 63.
        ("v.o.scales", (3, 1, 8), (0, 0, 3), "v", 17, ("out", 0, "tokens 0 to 31")),
        ("v.o.scales", (3, 1, 8), (0, 0, 3), "v", 0, None),
        ("v.o.scales", (3, 1, 8), (1, 0, 3), "v", 50, ("out", 32, "tokens 32 to 39")),
        # Row 63 of the second document sees all of it.
        ("v.o.scales", (3, 1, 8), (2, 0, 3), "v", 40, None),
        # One scale a token: it is that token's own.
        ("k.s.scales", (64, 1, 1), (17, 0, 0), "k", 17, None),
        ("k.s.scales", (64, 1, 1), (16, 0, 0), "k", 17, ("out", 16, "token 16")),
        ("q.dk.scales", (3, 2, 8), (0, 1, 0), "q", 5, ("dk", 6, "tokens 0 to 31")),
        # P of the first document: 40 queries by blocks of 32 keys, and blocks of both.
        ("p.o.scales.0", (2, 40, 2), (0, 20, 0), "q", 20, None),
        ("p.o.scales.0", (2, 40, 2), (0, 20, 0), "k", 21, ("out", 20, "queries 20 to 20, keys 0 to 31")),
        ("p.o.scales.0", (2, 2, 2), (1, 0, 0), "q", 20, ("out", 0, "queries 0 to 31, keys 0 to 31")),
        ("p.o.scales.1", (2, 1, 1), (1, 0, 0), "q", 45, ("out", 40, "queries 40 to 63, keys 40 to 63")),
        # dV of a key takes rows from it on: a column of 32 rows is legal, a block of keys is not.
        ("p.dv.scales.0", (2, 2, 40), (0, 0, 3), "q", 20, None),
        ("p.dv.scales.0", (2, 2, 2), (0, 0, 0), "q", 20, ("dv", 21, "queries 0 to 31, keys 0 to 31")),
    ],
)  # fmt: skip
def test_which_bytes_feed_whom(
    stage: str,
    shape: tuple[int, ...],
    index: tuple[int, ...],
    operand: str,
    token: int,
    found: tuple[str, int, str] | None,
) -> None:
    one = setting(40, 24)
    changes_found = changes(
        **byte_change(stage, shape, index), setting=one, operand=operand, tokens=np.array([token])
    )
    if found is None:
        assert changes_found == []
    else:
        first = changes_found[0]
        assert (first.output, first.token, first.feeds) == found
        assert (first.index, first.before, first.after) == (index, 0, 9)


def test_stages_whose_shape_says_nothing_are_named() -> None:
    one = setting(40, 24)
    byte = np.zeros(1, dtype=np.uint8)
    scales = {
        "v.scales": np.zeros((7, 1, 8), dtype=np.uint8),
        "p.o.scales.0": np.zeros((2, 9, 9), dtype=np.uint8),
        "k.scales": np.zeros((3, 1, 8), dtype=np.uint8),
        "other.scales": byte,
    }
    assert unread(scales, one) == ["v.scales", "p.o.scales.0", "other.scales"]


def test_every_output_of_the_hunt_is_in_the_legal_table() -> None:
    assert set(setting(4).outputs) == set(LEGAL) - {"delta"}
