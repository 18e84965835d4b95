"""The claim's study: its figures from `simulate`, the fastest baseline, and the uncertainty by hand."""

import math

import pytest

from flamia_ref.schedule.claim import BASELINES, Result, Time, combined, spread_of, study
from flamia_ref.schedule.hardware import GPUS
from flamia_ref.schedule.launches import simulate
from flamia_ref.schedule.work import Pass, Problem


@pytest.fixture(scope="module")
def tiny() -> Result:
    (found,) = study([("B200", "lengths:256,2x512", 4, 2)])
    return found


def test_every_baseline_and_candidate_is_there(tiny):
    assert [(one.recipe, one.library) for one in tiny.baselines] == list(BASELINES)
    assert len(tiny.candidates) == 6


def test_times_are_those_of_simulate(tiny):
    problem = Problem.of([0, 256, 768, 1280], heads=4, kv_heads=2)
    for one in (*tiny.baselines, *tiny.candidates):
        policy = None if one.policy == "library" else one.policy
        found = simulate(problem, one.recipe, gpu="B200", library=one.library, policy=policy)
        assert one.forward == found.launches[0].seconds
        if one.recipe != "fp8-fa4":
            assert one.backward == found.launches[1].seconds
            assert one.seconds() == pytest.approx(found.seconds, rel=1e-12)


def test_fp8_quantizes_the_gradient_too(tiny):
    # 1280 tokens, 4 heads of queries and 2 of keys and values, 128 channels: 3 bytes an element of q, k, v and dO, at
    # 0.8 of the memory's rate.
    rate = 0.8 * GPUS["B200"].memory.value
    (fp8,) = (one for one in tiny.baselines if one.recipe == "fp8-fa4")
    assert fp8.quantization == pytest.approx(1280 * 128 * (4 + 2 + 2 + 4) * 3 / rate, rel=1e-12)
    assert fp8.backward > 0


def test_the_fastest_baseline_is_the_least(tiny):
    assert tiny.fastest.seconds() == min(one.seconds() for one in tiny.baselines)
    slow, quick = (
        Time(recipe=name, library="cudnn", policy="library", forward=1.0, backward=2.0,
             quantization=q, spread=0.1)
        for name, q in (("slow", 1.0), ("quick", 0.5))
    )  # fmt: skip
    made = Result(
        gpu="B200", workload="", heads=1, kv_heads=1, baselines=(slow, quick), candidates=()
    )
    assert made.fastest is quick
    assert made.speedup(slow) == 3.5 / 4
    assert made.speedup(slow, fused=True) == 3.5 / 3
    assert made.speedup(slow, baseline=slow) == 1.0
    assert made.spread(slow) == pytest.approx(math.sqrt(0.02))


def test_uncertainty_by_hand():
    # A quarter of the time at 0.08 and three quarters at 0.04: sqrt(0.02^2 + 0.03^2).
    assert combined(1.0, 3.0, (0.08, 0.04)) == pytest.approx(math.sqrt(0.0004 + 0.0009))


def test_spread_names_what_was_not_fitted():
    assert spread_of("B200", "cudnn", Pass.FORWARD, "bf16") == spread_of(
        "GB200", "cudnn", Pass.FORWARD, "bf16"
    )
    with pytest.raises(ValueError, match="nothing was fitted for the forward of fa4 in mxfp8"):
        spread_of("B200", "fa4", Pass.FORWARD, "mxfp8")
