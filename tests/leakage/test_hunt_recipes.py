"""The hunt in our own recipes: the public witness from nothing, the leaks that are known, and nothing where none is."""

from typing import Any

import numpy as np
import pytest

from flamia_ref.attention import RECIPES
from flamia_ref.leakage import FoundWitness, Severity, hunt
from flamia_ref.leakage.search.plan import cases
from flamia_ref.leakage.search.setting import Setting
from flamia_ref.leakage.search.subjects import RecipeSubject

LEAKING = {
    "cudnn-mxfp8": {("v", Severity.FORWARD), ("k", Severity.BACKWARD), ("dout", Severity.BACKWARD)},
    "cudnn-mxfp8-reference": {
        ("v", Severity.FORWARD),
        ("k", Severity.BACKWARD),
        ("dout", Severity.BACKWARD),
    },
    "flamia-mxfp8-unguarded": {
        ("q", Severity.FORWARD),
        ("k", Severity.FORWARD),
        ("v", Severity.FORWARD),
        ("dout", Severity.BACKWARD),
    },
    "sage3-nvfp4": {(name, Severity.FORWARD) for name in ("q", "k", "v")},
    "fp8-fa3": {(name, Severity.FORWARD) for name in ("q", "k", "v")},
    "fp8-fa4": {(name, Severity.FORWARD) for name in ("q", "k", "v")},
}


def test_the_public_witness_is_found_from_nothing() -> None:
    report = hunt("cudnn-mxfp8", lengths=(64,), head_dim=64, backward=False, enough=1)
    assert report.leaks
    assert report.calls < 100
    (witness,) = report.witnesses
    # As the public one: q = k = 1, v small but for one later token of its block.
    before = witness.inputs(changed=False)
    assert (before["q"] == 1).all()
    assert (before["k"] == 1).all()
    assert witness.sentence == (
        "v[1, head 0, channel 0] from 0x0000 (0.0) to 0x3f80 (1.0) changes out[0, head 0, channel 0] from 0x3580"
        " (2^-20) to 0x0000 (0.0): forward, token 1 is later than token 0"
    )
    assert witness.reproduce("cudnn-mxfp8")
    assert not witness.reproduce("cudnn-mxfp8-pv-bf16")
    assert report.evidence == str(RECIPES["cudnn-mxfp8"].label)


def test_scale_bytes_of_a_recipe_are_an_oracle() -> None:
    report = hunt("flamia-mxfp8-unguarded", lengths=(40,), head_dim=32, backward=False, calls=60)
    assert report.leaks
    subject = RecipeSubject(recipe=RECIPES["flamia-mxfp8-unguarded"])
    assert set(subject.uses["k.scales"]) == {"s.k", "dq.k"}
    guarded = RecipeSubject(recipe=RECIPES["flamia-mxfp8"])
    assert guarded.uses["k.scales"] == ()
    assert guarded.uses["q.scales"] != ()


def test_a_guarded_recipe_shows_nothing_in_a_small_budget() -> None:
    report = hunt("flamia-mxfp8", lengths=(24, 16), head_dim=32, backward=False, calls=90)
    assert report.verdict == "none_found", report


@pytest.mark.nightly
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("lengths", [(64,), (40, 24)])
def test_every_recipe(name: str, lengths: tuple[int, ...]) -> None:
    report = hunt(name, lengths=lengths, head_dim=64)
    found = {(one.operand, one.severity) for one in report.witnesses}
    assert report.leaks == (name in LEAKING), report
    assert found >= LEAKING.get(name, set())
    assert not report.reasons
    for witness in report.witnesses:
        assert FoundWitness.from_document(witness.to_document()).reproduce(name)


@pytest.mark.parametrize("library", ["numpy", pytest.param("jax", marks=pytest.mark.nightly)])
def test_inputs_that_are_run_together_give_what_each_gives_alone(library: str) -> None:
    setting = Setting.of(
        lengths=(24, 9),
        head_dim=32,
        heads=2,
        kv_heads=1,
        causal=True,
        window=None,
        alignment="bottom_right",
        softmax_scale=None,
        backward=True,
    )
    recipe = RECIPES["flamia-mxfp8-unguarded"]
    inputs = [
        case.edit.applied(case.base.inputs(setting))
        for case in cases(setting, setting.operands, seed=2)[:5]
    ]
    together = RecipeSubject(recipe=recipe, library=library, together=8).run(setting, inputs)
    for one, found in zip(inputs, together, strict=True):
        (alone,) = RecipeSubject(recipe=recipe, together=1).run(setting, [one])
        assert set(alone.outputs) == {"out", "lse", "dq", "dk", "dv"}
        assert set(alone.scales) == set(found.scales)
        for kind in ("outputs", "scales"):
            parts: Any = zip(
                getattr(alone, kind).items(), getattr(found, kind).values(), strict=True
            )
            for (name, x), y in parts:
                assert np.array_equal(x.view(np.uint8), y.view(np.uint8)), name
