"""The demonstration: what it finds on the recipes, against values by hand, and that it finds what is planted."""

import dataclasses
import json
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flamia_ref.attention import RECIPES, Recipe, Use, forward
from flamia_ref.attention.product import Guard
from flamia_ref.leakage import WITNESSES
from flamia_ref.leakage import demo as module
from flamia_ref.leakage.demo import SHOWN, Demo, Outputs, Trial, demo
from tests.leakage import by_hand

WITNESS_NAMES = ("same-block", "next-block", "whole-tensor")
LEAKING = ("cudnn-mxfp8", "same-block")


def trial(of: Demo, recipe: str, witness: str) -> Trial:
    (found,) = (one for one in of.trials if (one.recipe, one.witness.name) == (recipe, witness))
    return found


def by_token(rows: list[Fraction]) -> np.ndarray:
    """out [tokens, channels] from its value by token."""
    return np.repeat(np.array([float(x) for x in rows], dtype=np.float32)[:, None], 128, axis=1)


def expected(recipe: str, witness: str, *, changed: bool) -> np.ndarray:
    one = WITNESSES[witness]
    v = by_hand.values(Fraction(one.first), one.token if changed else None, Fraction(one.value))
    if recipe == "cudnn-mxfp8":
        return by_token(by_hand.cudnn_rows(by_hand.blocked(v, 32)))
    if recipe == "cudnn-mxfp8-pv-bf16":
        return by_token(by_hand.cudnn_rows(v))
    return by_token(by_hand.flamia_rows(v))


@pytest.mark.parametrize("witness", WITNESS_NAMES)
@pytest.mark.parametrize("recipe", SHOWN)
def test_every_output_by_hand(shown: Demo, recipe: str, witness: str) -> None:
    found = trial(shown, recipe, witness)
    for outputs, changed in ((found.before, False), (found.after, True)):
        assert outputs.out.dtype == np.float32
        wanted = expected(recipe, witness, changed=changed)
        assert np.array_equal(outputs.out.view(np.uint32), wanted.view(np.uint32))
        # lse: 128 / sqrt(128) + ln(i + 1), to a few float32.
        lse = 128**0.5 + np.log(np.arange(1, 129))
        np.testing.assert_allclose(outputs.lse, lse, rtol=3e-7)


def test_fp4_scores_change_nothing_here() -> None:
    names = ("flamia-nvfp4-fp8", "flamia-nvfp4-fp8-ue4m3")
    found = demo(names)
    assert found.as_expected
    assert {one.verdict for one in found.trials} == {"none_found"}
    for one in found.trials[: len(WITNESS_NAMES)]:
        for outputs, changed in ((one.before, False), (one.after, True)):
            # q = k = 1 is 4 times 2^-2, so that S is that of the other recipes. In UE4M3 it becomes 1.03125.
            wanted = expected(names[0], one.witness.name, changed=changed)
            assert np.array_equal(outputs.out.view(np.uint32), wanted.view(np.uint32))


def test_what_is_shown(shown: Demo) -> None:
    names = ("cudnn-mxfp8", "cudnn-mxfp8-pv-bf16", "flamia-mxfp8", "flamia-mxfp8-folded")
    assert tuple(shown.evidence) == names
    assert [(one.recipe, one.witness.name) for one in shown.trials] == [
        (recipe, witness) for recipe in names for witness in WITNESS_NAMES
    ]
    assert shown.evidence == {name: RECIPES[name].label for name in names}
    assert shown.as_expected
    assert shown.exit_code == 0


@pytest.mark.parametrize("witness", WITNESS_NAMES)
@pytest.mark.parametrize("recipe", SHOWN)
def test_what_moved(shown: Demo, recipe: str, witness: str) -> None:
    found = trial(shown, recipe, witness)
    token = {"same-block": 16, "next-block": 32, "whole-tensor": 64}[witness]
    leaks = (recipe, witness) == LEAKING
    assert found.verdict == found.expected == ("leak" if leaks else "none_found")
    assert found.doubts == ()
    out, lse = found.moved
    assert out[token:].all()
    assert out[:token].all() == leaks
    assert out[:token].any() == leaks
    assert not lse.any()
    leaked, _ = found.leaked
    assert leaked.sum() == (2048 if leaks else 0)
    assert found.forbidden[0].sum() == token * 128
    assert found.forbidden[1].sum() == 128


def test_which_blocks_share_a_scale() -> None:
    # Bytes of V's scales along tokens: 2^-28 for 2^-20 alone, 2^-8 for 1, both 256 times a code; 0 for zeros.
    found = {}
    for name, changed in (("same-block", False), ("same-block", True), ("next-block", True)):
        run = forward(
            *WITNESSES[name].inputs(changed=changed), "cudnn-mxfp8", trace=("v.o.scales",)
        )
        scales = np.asarray(run.trace["v.o.scales"])
        assert scales.shape == (4, 1, 128)
        assert (scales == scales[..., :1]).all()
        found[name, changed] = scales[:, 0, 0].tolist()
    assert found == {
        ("same-block", False): [127 - 28, 0, 0, 0],
        ("same-block", True): [127 - 8, 0, 0, 0],
        ("next-block", True): [127 - 28, 127 - 8, 0, 0],
    }


def test_the_text(shown: Demo) -> None:
    text = str(shown)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert "LEAK, 2048 of 2048   none, 0 of 4096   none, 0 of 8192" in text
    assert text.count("none, 0 of 2048   ") == 3
    assert [line.split()[0] for line in lines if line.endswith(" assumed")] == list(SHOWN)
    assert (
        "cudnn-mxfp8: v[16] = 1 changes out of tokens 0 to 15"
        " (2048 of 2048 values before it; out[0, 0] from 2^-20 to 0)" in lines
    )
    assert lines[-1] == "As expected: cudnn-mxfp8 leaks, and nothing else does."


def test_the_json(shown: Demo) -> None:
    document = json.loads(shown.to_json())
    assert document["schema"] == "flamia-ref leak demo"
    assert document["schema_version"] == 1
    assert document["as_expected"] is True
    assert document["recipes"] == dict(shown.evidence)
    assert len(document["trials"]) == 12
    first, second = document["trials"][:2]
    assert first["witness"]["token"] == 16
    assert (first["verdict"], first["expected"]) == ("leak", "leak")
    assert first["out"] == {
        "forbidden": 2048,
        "forbidden_moved": 2048,
        "forbidden_moved_tokens": list(range(16)),
        "allowed": 14336,
        "allowed_moved": 14336,
    }
    assert first["lse"]["forbidden"] == 128
    assert first["lse"]["forbidden_moved"] == 0
    assert first["sentence"].startswith("cudnn-mxfp8: v[16] = 1 changes out of tokens 0 to 15")
    assert second["verdict"] == "none_found"
    assert second["sentence"] == "cudnn-mxfp8: v[32] = 1 changes nothing before it"


def altered(name: str, **products: Any) -> Recipe:
    return dataclasses.replace(RECIPES[name], **products)


def unguarded_o() -> Recipe:
    recipe = RECIPES["flamia-mxfp8"]
    right = dataclasses.replace(recipe.o.right, guard=Guard.NONE)
    product = dataclasses.replace(recipe.o, right=right, guard_instruction=None)
    steps = {path: step for path, step in recipe.steps.items() if path != "o.guard_instruction"}
    return dataclasses.replace(recipe, o=product, steps=steps)


@pytest.mark.parametrize(
    ("make", "tokens"),
    [
        (lambda: RECIPES["flamia-mxfp8-unguarded"], "0 to 15"),
        (unguarded_o, "0 to 15"),
        (lambda: altered("cudnn-mxfp8-pv-bf16", o=RECIPES["cudnn-mxfp8"].o), "0 to 15"),
    ],
    ids=["unguarded", "o-unguarded", "v-along-tokens"],
)
def test_a_planted_leak_is_found(make: Any, tokens: str) -> None:
    found = demo([make()])
    verdicts = [one.verdict for one in found.trials]
    assert verdicts == ["leak", "none_found", "none_found"]
    assert not found.as_expected
    assert found.exit_code == 1
    text = str(found)
    assert f"v[16] = 1 changes out of tokens {tokens} (2048 of 2048 values" in text
    assert text.splitlines()[-1].startswith("NOT AS EXPECTED: ")
    assert text.splitlines()[-1].endswith("with same-block: expected none_found, found leak")


def test_a_known_leak_that_is_gone_is_reported() -> None:
    pv_bf16 = RECIPES["cudnn-mxfp8-pv-bf16"]
    found = demo([altered("cudnn-mxfp8", o=pv_bf16.o, softmax=pv_bf16.softmax)])
    assert [one.verdict for one in found.trials] == ["none_found"] * 3
    assert found.exit_code == 1
    assert str(found).splitlines()[-1] == (
        "NOT AS EXPECTED: cudnn-mxfp8 with same-block: expected leak, found none_found"
    )


# Forwards by hand: v by token and channel to out by token and channel. With uniform weights out is a running mean.


def running_mean(v: np.ndarray) -> np.ndarray:
    return np.cumsum(v, axis=0) / np.arange(1, 129)[:, None]


def one_scale_a_tensor(v: np.ndarray) -> np.ndarray:
    unit = v.max() / 448
    codes = np.where(v / unit < 2.0**-10, 0, v)
    return running_mean(codes)


def lost(v: np.ndarray) -> np.ndarray:
    return running_mean(np.where(v < 2.0**-5, 0, v))


def unmoved(v: np.ndarray) -> np.ndarray:
    return running_mean(np.where(v > 2.0**-5, 0, v))


def infinite(v: np.ndarray) -> np.ndarray:
    return np.where(np.cumsum(v, axis=0) > 0.5, np.inf, running_mean(v))


def one_channel(v: np.ndarray) -> np.ndarray:
    out = running_mean(v)
    out[5, 7] += v[16, 0] * 2.0**-9
    out[3, 9] += v[64, 0] * 2.0**-40
    return out


def negative_zero(v: np.ndarray) -> np.ndarray:
    out = running_mean(v)
    out[2, 4] = -0.0 if v[32, 0] else 0.0
    return out


def faked(monkeypatch: pytest.MonkeyPatch, attend: Any, lse: Any = lambda v: np.zeros(128)) -> Demo:
    def fake(q: np.ndarray, k: np.ndarray, v: np.ndarray, recipe: Recipe) -> SimpleNamespace:
        values = v[:, 0].astype(np.float64)
        return SimpleNamespace(
            out=attend(values).astype(np.float32)[:, None], lse=lse(values).astype(np.float32)[None]
        )

    monkeypatch.setattr(module, "forward", fake)
    return demo(["flamia-mxfp8"])


@pytest.mark.parametrize(
    ("attend", "verdicts", "code", "text"),
    [
        (running_mean, ("none_found",) * 3, 0, "As expected: none leaks, and nothing else does."),
        (one_scale_a_tensor, ("leak",) * 3, 1, "v[64] = 1024 changes out of tokens 0 to 63 (8192"),
        (lost, ("inconclusive",) * 3, 2, "an out before token 16 is 0 without the change"),
        (unmoved, ("inconclusive",) * 3, 2, "not every out of token 32 and later moves"),
        (infinite, ("inconclusive",) * 3, 2, "proves nothing: an output is not finite"),
        (
            one_channel,
            ("leak", "none_found", "leak"),
            1,
            "changes out of token 5 (1 of 2048 values before it; out[5, 7] from",
        ),
        (
            negative_zero,
            ("inconclusive", "leak", "inconclusive"),
            1,
            "changes out of token 2 (1 of 4096 values before it; out[2, 4] from 0 to -0)",
        ),
    ],
)
def test_forwards_by_hand(
    monkeypatch: pytest.MonkeyPatch, attend: Any, verdicts: Any, code: int, text: str
) -> None:
    found = faked(monkeypatch, attend)
    assert tuple(one.verdict for one in found.trials) == verdicts
    assert found.exit_code == code
    assert found.as_expected == (code == 0)
    assert text in str(found)


def test_an_lse_that_moves_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def lse(v: np.ndarray) -> np.ndarray:
        return np.where(np.arange(128) == 100, v[16, 0], 0)

    found = faked(monkeypatch, running_mean, lse)
    assert [one.verdict for one in found.trials] == ["leak", "none_found", "none_found"]
    assert "v[16] = 1 changes lse of token 100" in str(found)
    assert "LEAK, 0 of 2048, 1 lse" in str(found)
    document = json.loads(found.to_json())
    assert document["trials"][0]["lse"]["forbidden_moved_tokens"] == [100]


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ([], "give at least one, and each name once"),
        (["flamia-mxfp8", "flamia-mxfp8"], "give at least one, and each name once"),
        (["flamia-mxfp"], "unknown recipe 'flamia-mxfp'"),
    ],
)
def test_bad_recipes(recipes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        demo(recipes)
    assert "\n" not in str(error.value)


def test_the_runs_do_not_touch_their_outputs(shown: Demo) -> None:
    before = trial(shown, "cudnn-mxfp8", "same-block").before
    assert isinstance(before, Outputs)
    assert before is trial(shown, "cudnn-mxfp8", "next-block").before
    assert RECIPES["cudnn-mxfp8"].operand(Use.O_V).block == (32, 1)
