"""The safeguards study: known verdicts, costs and fronts by brute force; nothing leaky is ever called proven."""

import dataclasses
import itertools
import json
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES, Recipe, Use
from flamia_ref.attention.computed import check_computed
from flamia_ref.leakage import Alternative, SafeguardsStudy, safeguards_study, structure
from flamia_ref.leakage.safeguarding import studying
from flamia_ref.leakage.safeguarding.alternatives import groups_of
from flamia_ref.leakage.safeguarding.applying import applied
from flamia_ref.leakage.safeguarding.combining import differing
from flamia_ref.leakage.safeguarding.costs import Costs
from flamia_ref.leakage.safeguarding.measuring import Measurer, overall
from flamia_ref.leakage.safeguarding.points import Merits, Standing, front_of, standing
from flamia_ref.leakage.safeguarding.study_samples import from_file, synthetic

SMALL: dict[str, Any] = {"lengths": [72], "head_dim": 32, "prove_front": False}
CONSTANTS = {"q": 121, "k": 122, "v": 123, "do": 124, "ds": 125}
GUARDED, FOLDED, HIGH = Alternative.GUARDED, Alternative.FOLDED, Alternative.HIGH
OVER_TOKENS, ONE_ROW = Alternative.HIGH_OVER_TOKENS, Alternative.ONE_ROW
PRODUCTS = ("s", "o", "dp", "dv", "dq", "dk")


@pytest.fixture(scope="module")
def cudnn() -> SafeguardsStudy:
    return safeguards_study("cudnn-mxfp8", **SMALL)


def chosen(name: str, choices: dict[str, Alternative]) -> Recipe:
    recipe = RECIPES[name]
    groups = groups_of(recipe)
    full = {group.name: choices.get(group.name, Alternative.AS_IS) for group in groups}
    return applied(recipe, groups, full, CONSTANTS, "chosen")


def parts(recipe: Recipe, *names: str) -> list[Any]:
    return [getattr(recipe, name) for name in names]


# Known recipes are points of the studies of their relatives.


def test_the_guarded_recipe_is_its_twin_with_these_safeguards() -> None:
    choices = {
        "q": FOLDED, "do": FOLDED, "k": GUARDED, "v": GUARDED, "dv.p": ONE_ROW, "ds": ONE_ROW,
    }  # fmt: skip
    names = (*PRODUCTS, "softmax", "gradient", "tiles", "guard_operands", "input", "output")
    found = chosen("flamia-mxfp8-unguarded", choices)
    assert parts(found, *names) == parts(RECIPES["flamia-mxfp8"], *names)


def test_the_folded_recipe_is_the_twin_with_token_scales_everywhere() -> None:
    choices = {
        "q": FOLDED, "do": FOLDED, "k": FOLDED, "v": FOLDED, "dv.p": ONE_ROW, "ds": ONE_ROW,
    }  # fmt: skip
    names = (*PRODUCTS, "softmax", "gradient")
    found = chosen("flamia-mxfp8-unguarded", choices)
    assert parts(found, *names) == parts(RECIPES["flamia-mxfp8-folded"], *names)


def test_nvidias_answer_is_cudnns_recipe_in_bfloat16_over_tokens() -> None:
    found = chosen("cudnn-mxfp8", dict.fromkeys(("o.v", "dv.do", "dq.k", "dk.q"), HIGH))
    names = (*PRODUCTS, "softmax", "gradient", "tiles")
    assert parts(found, *names) == parts(RECIPES["cudnn-mxfp8-pv-bf16"], *names)
    choices = dict.fromkeys(("q", "k", "v", "do"), OVER_TOKENS)
    from_twin = chosen("flamia-mxfp8-unguarded", choices)
    assert parts(from_twin, *PRODUCTS) == parts(RECIPES["cudnn-mxfp8-pv-bf16"], *PRODUCTS)


def test_what_of_a_recipe_differs_beside_equal_products_is_said(cudnn: SafeguardsStudy) -> None:
    over_tokens = chosen(
        "flamia-mxfp8-unguarded", dict.fromkeys(("q", "k", "v", "do"), OVER_TOKENS)
    )
    assert differing(over_tokens, "cudnn-mxfp8-pv-bf16") == ("softmax", "gradient")
    answer = cudnn.named("cudnn-mxfp8-pv-bf16")
    assert answer is not None
    assert (answer.but_for, answer.titles) == ({"cudnn-mxfp8-pv-bf16": ()}, answer.names)
    other = dataclasses.replace(answer, but_for={answer.names[0]: ("softmax", "gradient")})
    assert other.titles == ("cudnn-mxfp8-pv-bf16 but for softmax and gradient",)


def test_without_its_safeguards_the_guarded_recipe_has_the_inputs_of_its_twin() -> None:
    found = chosen("flamia-mxfp8", dict.fromkeys(("q", "k", "v", "do"), Alternative.SHARED))
    twin = RECIPES["flamia-mxfp8-unguarded"]
    for use in (Use.S_Q, Use.S_K, Use.O_V, Use.DP_DO, Use.DP_V, Use.DV_DO, Use.DQ_K, Use.DK_Q):
        assert found.operand(use) == twin.operand(use)
    assert not structure(found, lengths=[64]).legal


def test_bfloat16_over_tokens_skips_tiles_that_no_row_sees() -> None:
    # Zeros of such tiles are computed for block formats alone.
    found = chosen("flamia-mxfp8-folded", {"k": HIGH})
    check_computed(found)
    assert found.tiles.masked == "skipped"
    assert chosen("flamia-mxfp8-folded", {"k": GUARDED}).tiles.masked == "computed"


def test_groups_are_uses_of_one_copy_that_leak_or_are_kept_from_it() -> None:
    names = {name: [group.name for group in groups_of(RECIPES[name])] for name in RECIPES}
    assert names["cudnn-mxfp8"] == ["o.v", "dv.do", "dq.k", "dk.q"]
    assert names["flamia-mxfp8-unguarded"] == ["q", "k", "v", "do", "dv.p", "ds"]
    assert names["flamia-mxfp8"] == ["q", "k", "v", "do"]
    assert names["bf16-fa4"] == names["cudnn-mxfp8-pv-bf16"] == []
    (ds,) = (g for g in groups_of(RECIPES["flamia-mxfp8-unguarded"]) if g.name == "ds")
    assert ds.uses == (Use.DQ_DS, Use.DK_DS)


# By hand, from facts about uses: which alternative of cuDNN's leaking uses leaks, is computed, is safe.
VERDICTS = {
    "o.v": "leak safe leak safe safe safe safe",
    "dv.do": "leak none none safe leak safe safe",
    "dq.k": "leak safe leak safe safe safe safe",
    "dk.q": "leak none none safe leak safe safe",
}
KINDS = (
    Alternative.AS_IS, GUARDED, Alternative.GUARDED_CODES, FOLDED, Alternative.PREVIOUS,
    Alternative.STATIC, HIGH,
)  # fmt: skip


def test_each_alternative_alone(cudnn: SafeguardsStudy) -> None:
    found: dict[str, list[str]] = {}
    for one in cudnn.alone:
        word = "none" if one.point is None else "leak" if one.leaks else "safe"
        found.setdefault(one.group, []).append(word)
    assert {name: " ".join(words) for name, words in found.items()} == VERDICTS
    assert tuple(x.alternative for x in cudnn.alone if x.group == "o.v") == KINDS
    assert all(
        "the other operand of the product has the guard" in (one.reason or "")
        for one in cudnn.alone
        if one.point is None
    )
    # Alone: the three other groups leak, so no such combination is legal.
    assert all(one.point is None or one.point.illegal for one in cudnn.alone)


def test_cudnns_recipes_are_points_of_the_study(cudnn: SafeguardsStudy) -> None:
    assert cudnn.base.names == ("cudnn-mxfp8",)
    assert cudnn.base.standing is Standing.LEAKS
    answer = cudnn.named("cudnn-mxfp8-pv-bf16")
    assert answer is not None
    assert answer.standing is Standing.LEGAL
    assert answer.work == (Fraction(2, 3), Fraction(2, 3))
    # 7 of 7, 5 of 7 alternatives are computed; 5 and 3 are safe.
    assert (cudnn.possible, cudnn.safe) == ((7 * 5) ** 2, (5 * 3) ** 2)
    assert not any(point.illegal or not point.label for point in cudnn.front)
    assert [point.label for point in cudnn.front] == sorted(point.label for point in cudnn.front)


def test_a_recipe_with_nothing_to_choose() -> None:
    found = safeguards_study("cudnn-mxfp8-pv-bf16", **SMALL)
    assert found.groups == found.alone == ()
    assert len(found.points) == 1
    assert "nothing to choose" in found.to_text()
    assert json.loads(found.to_json())["counts"]["measured"] == 1


# Costs, by brute force.


def brute_share(length: int, causal: bool, window: tuple[int, int] | None) -> Fraction:
    """Guarded blocks over blocks with a visible pair, pair by pair."""
    blocks: dict[tuple[int, int], list[bool]] = {}
    end = -(-length // 32) * 32
    for i in range(length):
        for j in range(end):
            seen = j < length and (not causal or j <= i)
            if window is not None:
                left, right = window
                seen = seen and (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
            blocks.setdefault((i // 32, j // 32), []).append(seen)
    visible = [x for x in blocks.values() if any(x)]
    return Fraction(sum(not all(x) for x in visible), len(visible))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100, 161])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, None), (False, None), (True, (20, 0)), (False, (40, 7))]
)
def test_work_is_counted_pair_by_pair(
    length: int, causal: bool, window: tuple[int, int] | None
) -> None:
    costs = Costs(length, head_dim=64, value_dim=96, causal=causal, window=window)
    guarded = brute_share(length, causal, window)
    # S, dQ and dK take 64 channels a pair, O, dP and dV take 96.
    everything = 3 * 64 + 3 * 96
    # flamia-mxfp8 guards S, O, dP and dQ.
    some = guarded * (2 * 64 + 2 * 96)
    assert costs.work(RECIPES["flamia-mxfp8"]) == some / everything
    # NVIDIA's answer has O, dV, dQ and dK in bfloat16.
    assert costs.work(RECIPES["cudnn-mxfp8-pv-bf16"]) == Fraction(2 * 64 + 2 * 96, everything)
    assert costs.work(RECIPES["bf16-fa4"]) == 1
    assert costs.work(RECIPES["flamia-mxfp8-folded"]) == 0
    mixed = chosen("cudnn-mxfp8", {"o.v": GUARDED, "dk.q": HIGH})
    assert costs.work(mixed) == (guarded * 96 + 64) / everything


def test_bytes_by_hand() -> None:
    costs = Costs(2048, head_dim=64, value_dim=96, causal=True, window=None)
    # A token: q and k in 64 codes, v in 96, and a byte each; out in bfloat16, lse in float32.
    kept = costs.kept(RECIPES["flamia-mxfp8-folded"])
    assert kept == 2048 * (2 * (64 + 1) + (96 + 1) + 2 * 96 + 4)
    # q has one byte; k has two scales for 32 tokens and v three; q, k and v are there in bfloat16 for guarded blocks.
    guarded = 2048 * ((64 + 1) + 64 + 96 + 2 * 96 + 4 + 2 * (64 + 64 + 96)) + (2 + 3) * 2048 // 32
    assert costs.kept(RECIPES["flamia-mxfp8"]) == guarded
    # bfloat16 alone: no copy besides the inputs.
    assert costs.kept(RECIPES["bf16-fa4"]) == 2048 * 2 * (64 + 64 + 96 + 96) + 2048 * 4


# Fronts.


def test_fronts_by_brute_force() -> None:
    draw = random.Random(1)
    for _ in range(200):
        points = [
            Merits(*(float(draw.randint(0, 4)) for _ in range(3)))  # type: ignore[arg-type]
            for _ in range(draw.randint(0, 12))
        ]
        found = front_of(points)
        for place, (error, work, size) in enumerate(points):
            worse = any(
                e <= error and w <= work and s <= size and (e < error or w < work or s < size)
                for e, w, s in points
            )
            first = points.index(Merits(error, work, size)) == place
            assert (place in found) == (first and not worse)


# Error, work in percent, bytes: pairs that were on one front; the second is no worse, but for 0.7 to 1%, and better.
PAIRS = (
    ((0.0630, 33.85, 652.0), (0.0636, 33.33, 523.0)),
    ((0.0709, 0.51, 460.0), (0.0715, 0.0, 460.0)),
    ((0.0403, 66.67, 519.0), (0.0406, 66.67, 453.0)),
)


def merits(error: float, work: float, kept: float) -> Merits:
    return Merits(error, Fraction(work), kept)


@pytest.mark.parametrize(("beaten", "better"), PAIRS)
def test_a_point_beaten_but_for_chance_is_on_no_front(
    beaten: tuple[float, float, float], better: tuple[float, float, float]
) -> None:
    both = [merits(*beaten), merits(*better)]
    assert front_of(both) == [1]
    assert front_of(both[::-1]) == [0]
    # 4% are no chance.
    assert front_of([both[0]._replace(error=both[1].error / 1.04), both[1]]) == [0, 1]


def test_what_counts_as_a_difference() -> None:
    one = merits(0.0700, 33, 325.0)
    for other, counts in (
        (one._replace(error=0.0720), False),
        (one._replace(error=0.0722), True),
        (one._replace(kept=328.0), False),
        (one._replace(kept=329.0), True),
        (one._replace(work=one.work + Fraction(1, 10**9)), True),
    ):
        assert front_of([other, one]) == ([1] if counts else [0]), other
    assert front_of([merits(0.01, 0, 0), merits(0, 0, 0)]) == [1]


def test_a_front_of_near_points_is_the_only_set_of_its_kind() -> None:
    """By trying every set: no point of it beats another of it, and whoever is out is beaten by one of it."""

    def beats(one: Merits, other: Merits) -> bool:
        ratio_error = Fraction(one.error) / Fraction(other.error)
        ratio_kept = Fraction(one.kept) / Fraction(other.kept)
        step, small = Fraction(103, 100), Fraction(101, 100)
        no_worse = ratio_error <= step and one.work <= other.work and ratio_kept <= small
        return no_worse and (
            ratio_error < 1 / step or one.work < other.work or ratio_kept < 1 / small
        )

    draw = random.Random(3)
    dropped = chained = 0
    for _ in range(60):
        points = [
            merits(draw.randint(90, 110), draw.randint(0, 2), draw.randint(295, 305))
            for _ in range(7)
        ]
        matrix = [[beats(x, y) for y in points] for x in points]
        kernels = []
        for bits in itertools.product([False, True], repeat=7):
            inside = [place for place in range(7) if bits[place]]
            if all(any(matrix[one][place] for one in inside) != bits[place] for place in range(7)):
                kernels.append(inside)
        (kernel,) = kernels
        found = front_of(points)
        assert set(found) <= set(kernel)
        # Equal points: neither is better, neither is worse; the first of them is there.
        for place in set(kernel) - set(found):
            gone = points[place]
            assert any(
                one < place
                and not matrix[one][place]
                and points[one].work == gone.work
                and abs(points[one].error / gone.error - 1) <= 0.031
                and abs(points[one].kept / gone.kept - 1) <= 0.0101
                for one in found
            )
        dropped += len(kernel) < 7
        chained += any(any(matrix[x][place] for x in range(7)) for place in kernel)
    assert dropped > 50
    assert chained > 0


# Standing.


def test_nothing_is_proven_that_one_method_calls_leaky() -> None:
    assert standing(legal=True, proved=True) is Standing.PROVEN
    assert standing(legal=True, proved=False) is Standing.DISPUTED
    assert standing(legal=True, proved=None) is Standing.LEGAL
    for proved in (True, False, None):
        assert standing(legal=False, proved=proved) is Standing.LEAKS


class Blind(studying._Study):
    """A study that is told that nothing is illegal."""

    def _structure(self, recipe: Recipe) -> dict[Any, int]:
        return {}


def planted(monkeypatch: pytest.MonkeyPatch) -> SafeguardsStudy:
    monkeypatch.setattr(studying, "_Study", Blind)
    return safeguards_study(
        "cudnn-mxfp8",
        lengths=[40],
        head_dim=32,
        groups=["o.v"],
        without=[x for x in Alternative if x not in (Alternative.AS_IS, HIGH)],
    )


def test_what_is_not_proved_is_on_no_front(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(Blind, "_is_proved", lambda self, recipe: asked.append(recipe))
    found = planted(monkeypatch)
    assert len(asked) == len(found.points) == 2
    assert {point.standing for point in found.points} == {Standing.DISPUTED}
    assert not any(point.proven or point.front for point in found.points)
    assert "DISPUTED" in found.to_text()


@pytest.mark.nightly
def test_a_planted_leak_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    # The other groups leak: the proof finds it where the structure is blind.
    found = planted(monkeypatch)
    assert [point.choices for point in found.points] == [{}, {"o.v": HIGH}]
    assert {point.standing for point in found.points} == {Standing.DISPUTED}
    assert not any(point.proven or point.front for point in found.points)


def test_a_front_that_both_methods_call_legal_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studying, "_PROOF", (12, 4))  # seconds less
    every = ("o.v", "dv.do", "dq.k", "dk.q")
    found = safeguards_study(
        chosen("cudnn-mxfp8", dict.fromkeys(every[1:], HIGH)),
        lengths=[40],
        head_dim=32,
        without=[x for x in Alternative if x not in (Alternative.AS_IS, HIGH)],
    )
    assert found.base.standing is Standing.LEAKS
    assert [(point.label, point.proven) for point in found.front] == [("A", True)]
    assert found.front[0].names == ("cudnn-mxfp8-pv-bf16",)


def test_every_legal_point_is_legal_and_every_other_leaks(cudnn: SafeguardsStudy) -> None:
    for point in cudnn.points:
        check_computed(point.recipe)
        assert structure(point.recipe, lengths=[40, 24]).legal == (not point.illegal)
        assert point.proven is False


# Errors.


def test_errors_are_those_of_each_recipe_by_itself(cudnn: SafeguardsStudy) -> None:
    # They are measured together, three gradients of three recipes in one run.
    assert cudnn.runs < len(cudnn.points)
    sample = synthetic([72], 32)
    for point in random.Random(2).sample(cudnn.points, 4):
        alone = attention.error(
            sample.q, sample.k, sample.v, point.recipe, dout=sample.dout
        ).relative_l2
        assert point.errors == {name: alone[name] for name in ("out", "dq", "dk", "dv")}
        squares = [alone[name] ** 2 for name in point.errors]
        assert point.error == pytest.approx((sum(squares) / 4) ** 0.5, rel=1e-12)


def test_a_group_that_stays_as_it_is_and_leaks_leaves_no_front() -> None:
    without = [x for x in Alternative if x not in (Alternative.AS_IS, HIGH)]
    found = safeguards_study("cudnn-mxfp8", **SMALL, groups=["dv.do"], without=without)
    assert found.front == ()
    assert found.held == ("o.v", "dq.k", "dk.q")
    assert "the front is empty" in found.to_text()


def test_what_was_not_measured_would_not_be_on_the_front() -> None:
    base = chosen("cudnn-mxfp8", {"o.v": FOLDED, "dk.q": FOLDED})
    assert not structure(base, lengths=[64]).legal
    some = {**SMALL, "lengths": [40], "groups": ["dv.do", "dq.k"]}
    found, every = (
        safeguards_study(base, **some, exhaustive=exhaustive) for exhaustive in (False, True)
    )
    assert found.front
    assert every.measured > found.measured

    def figures(study: SafeguardsStudy) -> list[Any]:
        return sorted((x.error, x.work[0], x.kept) for x in study.front)

    assert figures(found) == figures(every)


def test_runs_that_are_spent_are_said(cudnn: SafeguardsStudy) -> None:
    base = chosen("cudnn-mxfp8", {"dv.do": FOLDED, "dk.q": FOLDED})
    some = {**SMALL, "lengths": [40], "groups": ["o.v", "dq.k"]}
    short = safeguards_study(base, **some, runs=1)
    assert cudnn.missing == 0
    assert short.missing > 0
    assert "NOT ALL MEASURED" in short.to_text()
    assert "NOT ALL MEASURED" not in cudnn.to_text()


def test_constants_leave_room_for_values_16_times_as_large() -> None:
    ones = np.ones((40, 1, 32), ml_dtypes.bfloat16)
    sample = synthetic([40], 32)._replace(q=ones, k=ones * 448, v=ones * 449, dout=ones * 896)
    sample = sample._replace(v=(np.ones((40, 1, 32)) * 450).astype(ml_dtypes.bfloat16))
    found = Measurer(sample, causal=True, window=None).constants()
    # 16 / 448 needs 2^-4; 16 and 32 times 448 need 2^4 and 2^5.
    assert (found["q"], found["k"], found["v"], found["do"]) == (127 - 4, 127 + 4, 127 + 5, 127 + 5)
    # P (dP - delta) is 0: all values are equal, so dP is delta.
    assert found["ds"] <= 127 + 4


def test_the_overall_error() -> None:
    assert overall({"out": 0.3, "dq": 0.4}) == pytest.approx((0.25 / 2) ** 0.5)


# Forms and refusals.


def test_json_holds_every_point_and_the_recipes_of_the_front(cudnn: SafeguardsStudy) -> None:
    found = json.loads(cudnn.to_json())
    assert len(found["points"]) == len(cudnn.points)
    assert [found["points"][place]["label"] for place in found["front"]] == [
        point.label for point in cudnn.front
    ]
    for place, point in zip(found["front"], cudnn.front, strict=True):
        assert Recipe.from_json(found["points"][place]["recipe"]) == point.recipe
        assert Fraction(found["points"][place]["work_exact"][0]) == point.work[0]
    assert found["counts"]["possible"] == cudnn.possible
    assert all(one["reason"] for one in found["alone"] if not one["computed"])


def test_the_result_is_frozen(cudnn: SafeguardsStudy) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        cudnn.runs = 0  # type: ignore[misc]


def test_a_file_of_inputs(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    bits = {
        name: rng.standard_normal((50, heads, 32)).astype(ml_dtypes.bfloat16).view(np.uint16)
        for name, heads in (("q_bits", 2), ("k_bits", 1), ("v_bits", 1), ("dout_bits", 2))
    }
    settings = {"cu_seqlens": np.array([0, 30, 50], np.int32), "softmax_scale": np.float64(0.125)}
    file = tmp_path / "inputs.npz"
    np.savez(file, **bits, **settings)
    sample = from_file(file, 40)
    assert sample.lengths == (30, 10)
    assert sample.softmax_scale == 0.125
    assert (sample.dout.view(np.uint16) == bits["dout_bits"][:40, :1]).all()
    with pytest.raises(ValueError, match="has 50 tokens, and --lengths asks for 51; give 50 or"):
        from_file(file, 51, given_by="--lengths")
    lost = bits["v_bits"].copy()
    lost[3, 0, 5], lost[7, 0, 1] = 0x7FC0, 0xFF80
    np.savez(file, **{**bits, "v_bits": lost}, **settings)
    with pytest.raises(
        ValueError, match=r"v_bits of .*inputs\.npz has 2 of 1280 values that are NaN"
    ):
        from_file(file, 40)
    np.savez(file, **bits, **{**settings, "cu_seqlens": np.array([0, 30, 20, 50])})
    with pytest.raises(ValueError, match=r"inputs\.npz: cu_seqlens\[2\] is 20"):
        from_file(file, 50)
    np.savez(file, **bits, **{**settings, "softmax_scale": np.float64("nan")})
    with pytest.raises(ValueError, match=r"softmax_scale of .*inputs\.npz is"):
        from_file(file, 40)
    np.savez(file, **{**bits, "q_bits": bits["q_bits"][:9]}, **settings)
    with pytest.raises(ValueError, match="must be uint16"):
        from_file(file, 40)
    np.savez(file, **bits)
    with pytest.raises(ValueError, match="has no cu_seqlens, softmax_scale"):
        from_file(file, 40)
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"is no \.npz file"):
        from_file(file, 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": ["k"]}, "k"),
        ({"without": ["folded"]}, "folded"),
        ({"without": ["as it is"]}, "every group starts from"),
        ({"at": []}, "at is"),
        ({"at": [2.5]}, "at is"),
        ({"lengths": [0]}, "lengths is"),
        ({"lengths": [1]}, "the relative error of dq is inf"),
        ({"head_dim": 0}, "head_dim is 0; it must be a whole number from 1"),
        ({"head_dim": -4}, "head_dim is -4"),
        ({"head_dim": "a"}, "head_dim is 'a'"),
        ({"sample": 5}, "sample is 5; it must be a StudySample"),
        ({"most": "a"}, "most is 'a'; it must be a whole number from 1 on"),
        ({"runs": -1}, "runs is -1"),
        ({"runs": "a"}, "runs is 'a'"),
        ({"groups": []}, "groups is []; name groups that change (o.v, dv.do, dq.k, dk.q)"),
        ({"groups": "o.v"}, "groups is 'o.v'; it must be a list"),
        ({"without": 3}, "without is 3; it must be a list"),
        ({"exhaustive": "no"}, "exhaustive is 'no'"),
        ({"progress": 3}, "progress is 3"),
        (
            {"most": 3, "without": [x for x in Alternative if x not in ("as it is", FOLDED, HIGH)]},
            "combinations of alternatives that are safe alone; allowed are 3",
        ),
    ],
)
def test_refusals_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        safeguards_study("cudnn-mxfp8", **{**SMALL, "lengths": [40], **changes})
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("nan", "q of sample synthetic, with outliers has 1 of 1280 values that are NaN or inf"),
        ("float32", "q of sample synthetic, with outliers is float32 [40, 1, 32]; it must be bf"),
        ("short", "k of sample synthetic, with outliers is [5, 1, 32]"),
        ("scale", "softmax_scale of sample synthetic, with outliers is 'x'"),
        ("documents", "documents of sample synthetic, with outliers is 5"),
    ],
)
def test_a_sample_that_cannot_be_measured_is_refused(changed: str, message: str) -> None:
    sample = synthetic([40], 32)
    lost = sample.q.copy()
    lost[3, 0, 1] = np.nan
    changes: dict[str, dict[str, Any]] = {
        "nan": {"q": lost},
        "float32": {"q": sample.q.astype(np.float32)},
        "short": {"k": sample.k[:5]},
        "scale": {"softmax_scale": "x"},
        "documents": {"documents": 5},
    }
    with pytest.raises((ValueError, TypeError)) as refused:
        safeguards_study("cudnn-mxfp8", sample=sample._replace(**changes[changed]))
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_choices_that_contradict_each_other_are_none() -> None:
    with pytest.raises(ValueError, match=r"takes the scale of dq\.k and has a constant one"):
        chosen("flamia-mxfp8-unguarded", {"k": FOLDED, "ds": Alternative.STATIC})
    with pytest.raises(ValueError, match="inputs in one use and codes in another"):
        chosen("cudnn-mxfp8", {"o.v": GUARDED, "dq.k": Alternative.GUARDED_CODES})
