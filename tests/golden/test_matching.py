"""Which recipe fits what a kernel gave, and the knob that brings it closer."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import cli, golden
from flamia_ref.attention import RECIPES, Recipe, backward, forward
from flamia_ref.attention.variants import joint_changes, permitted_changes, with_changes
from flamia_ref.golden.matching import Match, outputs, searching, turning
from flamia_ref.golden.matching.fits import Fit, StageFit, fit
from flamia_ref.golden.matching.samples import of_case, own_results
from flamia_ref.golden.matching.turning import words
from tests.golden.packs import write_safetensors

ROOT = Path(__file__).resolve().parents[2]
FLASH_2 = ROOT / "examples/recipes/flash-attention-2-bf16.json"
BF16 = np.dtype(ml_dtypes.bfloat16)


def inputs(tokens: int, *, heads: int = 1, head_dim: int = 32, seed: int = 0) -> dict[str, Any]:
    """Inputs whose scores rise along the keys, so that the maximum moves from tile to tile."""
    made = np.random.default_rng(seed)
    shape = (tokens, heads, head_dim)
    found = {name: made.normal(size=shape).astype(np.float32) for name in ("q", "k", "v", "dout")}
    found["k"] *= np.linspace(0.5, 3, tokens, dtype=np.float32)[:, None, None]
    return {name: x.astype(BF16) for name, x in found.items()}


def run(
    recipe: Recipe | str, given: dict[str, Any], *, gradients: bool = False, trace: Any = ()
) -> dict[str, Any]:
    """Inputs with what a recipe gives for them."""
    q, k, v = (given[name] for name in ("q", "k", "v"))
    ahead = forward(q, k, v, recipe, causal=True, trace=trace)
    found = {**given, **ahead.trace, "out": ahead.out, "lse": ahead.lse}
    if gradients and ahead.recipe.has_backward:
        back = backward(q, k, v, given["dout"], ahead)
        found |= {"dq": back.dq, "dk": back.dk, "dv": back.dv}
    return found


def changed(recipe: str, changes: dict[str, Any]) -> Recipe:
    """The recipe with other values at dotted paths, made by way of JSON."""
    data = json.loads(RECIPES[recipe].to_json()) | {"name": "planted", "schedules": []}
    for path, value in changes.items():
        *parents, name = path.split(".")
        part = data
        for parent in parents:
            part = part[parent]
        assert name in part, path
        part[name] = value
    return Recipe.from_json(data)


def match(given: Any, **options: Any) -> Match:
    return golden.match(given, causal=True, **options)


def bits(x: Any) -> bytes:
    return np.asarray(x, np.float32).tobytes()


FEW = ("bf16-fa4", "cutlass-fp8", "flamia-nvfp4-fp8", "sage3-nvfp4")


@pytest.mark.parametrize(
    "name",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.nightly) for name in RECIPES],
)
def test_the_outputs_of_a_recipe_match_it_and_its_twins_first(name: str) -> None:
    candidates = list(RECIPES) if name not in FEW[1:] else list(dict.fromkeys([*FEW, name]))
    given = run(name, inputs(40), gradients=name == "bf16-fa4")
    found = match(given, recipes=candidates, knobs=False)
    assert found.exit_code == 0
    assert name in found.best.recipes
    results = [one for one in given if one not in ("q", "k", "v", "dout")]
    made = {other: run(other, inputs(40), gradients=name == "bf16-fa4") for other in candidates}
    for entry in found.entries:
        assert len({bits(made[one]["out"]) for one in entry.recipes}) == 1
    for other, again in made.items():
        twin = all(one in again and bits(again[one]) == bits(given[one]) for one in results)
        assert (other in found.best.recipes) == twin, other
    assert found.fitting is not None
    assert found.fitting.name == found.best.recipes[0]


@pytest.mark.parametrize(
    ("base", "path", "value", "gradients"),
    [
        pytest.param("bf16-fa4", "softmax.row_sum", "quads", False, marks=pytest.mark.nightly),
        pytest.param(
            "cutlass-fp8", "softmax.rescale_threshold", 8, False, marks=pytest.mark.nightly
        ),
        ("bf16-fa4", "gradient.softmax_scale", "in_ds", True),
        pytest.param("fp8-fa4", "softmax.p_offset", 2, False, marks=pytest.mark.nightly),
        pytest.param("bf16-fa4", "softmax.exp2", "correct", False, marks=pytest.mark.nightly),
        pytest.param("bf16-fa4", "tiles.key", 64, False, marks=pytest.mark.nightly),
        pytest.param("bf16-fa4", "s.k_order", "descending", False, marks=pytest.mark.nightly),
        pytest.param("fp8-fa3", "o.instruction", "float32", False, marks=pytest.mark.nightly),
        pytest.param("bf16-fa4", "softmax.emulated", None, False, marks=pytest.mark.nightly),
        pytest.param(
            "flamia-mxfp8-folded", "o.tile_order", "descending", False, marks=pytest.mark.nightly
        ),
        pytest.param(
            "bf16-fa4", "gradient.delta", "half_products", True, marks=pytest.mark.nightly
        ),
    ],
)
def test_a_planted_knob_is_found_by_name(base: str, path: str, value: Any, gradients: bool) -> None:
    planted = changed(base, {path: value})
    tokens = 24 if gradients else 40
    if any(word in path for word in ("threshold", "tile", "emulated")):
        tokens = 160  # over more than a tile of keys, or past the columns that are not emulated
    given = run(planted, inputs(tokens), gradients=gradients)
    found = match(given, recipes=[base])
    assert found.exit_code == 1
    assert found.near
    first = found.turns[0]
    assert first.after.exact
    assert len(first.changes) == 1
    named = [first.words, *map(words, first.same)]
    end = f"-> {'none' if value is None else value}"
    assert any(one.startswith(f"{path} ") and one.endswith(end) for one in named)
    # What it says to do gives every bit, by a run of its own.
    assert found.fitting is not None
    again = run(found.fitting, inputs(tokens), gradients=gradients)
    assert all(bits(again[name]) == bits(given[name]) for name in again if name not in inputs(1))


@pytest.mark.nightly
def test_two_planted_knobs_are_found() -> None:
    changes = {"softmax.row_sum": "by_tiles", "softmax.rescale_threshold": 8}
    stages = ("s", "row_max", "row_sum", "o")
    given = run(changed("cutlass-fp8", changes), inputs(160), trace=stages)
    found = match(given, recipes=["cutlass-fp8"])
    assert found.turns[0].after.exact
    every = [found.turns[0].words, *map(words, found.turns[0].same)]
    assert any(
        "softmax.row_sum halved_lanes -> by_tiles" in one and "threshold 0 -> 8" in one
        for one in every
    )
    assert found.fitting is not None
    assert found.fitting.softmax.row_sum == "by_tiles"


def test_several_knobs_that_only_go_together_are_one_change() -> None:
    recipe = RECIPES["flamia-mxfp8-folded"]
    assert with_changes(recipe, {"softmax.base": "raw_max"}) is None
    joint = {"softmax.base": "raw_max", "softmax.exp2_argument": "fused", "softmax.lse": "log2_fma"}
    assert joint in joint_changes(recipe)
    assert not any(
        path == "softmax.base" and x == "raw_max" for path, x in permitted_changes(recipe)
    )


@pytest.mark.nightly
def test_flash_attention_2_is_found_from_4() -> None:
    recipe = Recipe.from_json(FLASH_2.read_text())
    given = run(recipe, inputs(300, head_dim=64), gradients=True)
    found = match(given, recipes=["bf16-fa4", "flamia-mxfp8"])
    assert found.best.recipes == ("bf16-fa4",)
    assert found.turns[0].after.exact
    assert "softmax.emulated" in found.turns[0].words
    assert "softmax.rescale_threshold 8 -> " in found.turns[0].words


def test_a_stage_is_measured_element_by_element() -> None:
    given = run("cutlass-fp8", inputs(40))
    out = np.array(given["out"])
    raised = out.astype(BF16).view(np.uint16).copy()
    raised[3, 0, 5] += 3  # three representable numbers up in magnitude
    raised[7, 0, 1] += 1
    wrong = raised.view(BF16).astype(np.float32)
    found = match(given | {"out": wrong}, recipes=["cutlass-fp8"], knobs=False)
    stage = next(one for one in found.best.fit.stages if one.name == "out")
    assert (stage.elements, stage.equal) == (out.size, out.size - 2)
    assert stage.relative_l2 == pytest.approx(
        math.sqrt(((wrong - out).astype(float) ** 2).sum() / (out.astype(float) ** 2).sum())
    )
    assert found.best.fit.departs == "out"
    stored = match(given | {"out": raised.view(BF16)}, recipes=["cutlass-fp8"], knobs=False)
    assert next(one for one in stored.best.fit.stages if one.name == "out").steps == 3


def test_an_equal_chain_of_stages_beats_a_small_distance() -> None:
    def one(name: str, equal: int, difference: float) -> StageFit:
        return StageFit(
            name=name, backward=False, elements=10, equal=equal, difference=difference, norm=1.0
        )

    chain = Fit(stages=(one("s", 10, 0.0), one("out", 0, 100.0)))
    near = Fit(stages=(one("s", 9, 1e-9), one("out", 9, 1e-9)))
    assert chain.key > near.key
    assert Fit(stages=(one("s", 9, 2e-9), one("out", 9, 1e-9))).key < near.key
    later = StageFit(name="dq", backward=True, elements=10, equal=10)
    assert Fit(stages=(*near.stages, later)).key < chain.key


def test_parts_of_a_pack_are_cut_as_they_are(every: golden.Pack) -> None:
    for name in ("cudnn-mxfp8", "flamia-mxfp8-folded", "flamia-nvfp4-fp8"):
        case = every[f"tiny.{name}"]
        sample = of_case(case, own_results(case))
        recipe = RECIPES[name]
        count = 0
        for part in sample.parts():
            compared = fit(recipe, part)
            assert compared.exact, (name, part.name, compared.departs)
            stages = {place.stage.name for place in sample.places(recipe).values()}
            assert {stage.name for stage in compared.stages} == stages
            count += sum(stage.elements for stage in compared.stages if stage.name == "out")
        assert count == case.tensors["out"].size
        wrong = np.array(case.tensors["out"])
        wrong[-1, -1, -1] ^= 1
        damaged = own_results(case)
        damaged["out"] = dataclasses.replace(damaged["out"], array=wrong)
        *_, last = of_case(case, damaged).parts()
        assert fit(recipe, last).departs == "out"


def test_parts_have_the_query_heads_of_their_key_value_head() -> None:
    given = inputs(40, heads=4)
    given |= {name: given[name][:, 1:3] for name in ("k", "v")}
    given["cu_seqlens"] = np.array([0, 7, 40], np.int32)
    q, k, v = (given[name] for name in ("q", "k", "v"))
    ahead = forward(
        q, k, v, "cutlass-fp8", cu_seqlens=given["cu_seqlens"], causal=True, trace=("s", "k.codes")
    )
    given |= {**ahead.trace, "out": ahead.out, "lse": ahead.lse}
    (sample,), _, _ = outputs.read(given, causal=True)
    parts = list(sample.parts())
    assert [part.spec.lengths for part in parts] == [(7,), (7,), (33,), (33,)]
    for part in parts:
        compared = fit(RECIPES["cutlass-fp8"], part)
        assert compared.exact, (part.name, compared.departs)
        assert {stage.name for stage in compared.stages} == {"k.codes", "s", "out", "lse"}


def test_a_pack_is_matched_and_stages_that_a_recipe_lacks_are_said(made: Path) -> None:
    found = golden.match(made, recipes=["flamia-mxfp8-folded", "cutlass-fp8"])
    assert found.exit_code == 0
    assert found.best.recipes == ("flamia-mxfp8-folded",)
    other = next(one for one in found.entries if one.recipes == ("cutlass-fp8",))
    assert "dq" in other.fit.absent
    assert "dq" not in {stage.name for stage in other.fit.stages}
    assert "has no" in found.to_text()
    only = golden.match(made, recipes=["cutlass-fp8"], knobs=False, cases=["tiny.*"])
    assert only.exit_code == 1


def test_outputs_alone_of_a_kernel_beside_a_pack(made: Path) -> None:
    def kernel(
        q: Any, k: Any, v: Any, *, cu_seqlens: Any, causal: bool, softmax_scale: float
    ) -> Any:
        ahead = forward(
            q,
            k,
            v,
            "cutlass-fp8",
            cu_seqlens=cu_seqlens,
            causal=causal,
            softmax_scale=softmax_scale,
        )
        return {"out": ahead.out, "lse": ahead.lse}

    seen: list[str] = []
    found = golden.match(
        made,
        kernel,
        recipes=["flamia-mxfp8-folded", "cutlass-fp8", "bf16-fa4"],
        progress=lambda done, total, name: seen.append(name),
    )
    assert found.exit_code == 0
    assert found.best.recipes == ("cutlass-fp8",)
    assert {stage.name for stage in found.best.fit.stages} == {"out", "lse"}
    assert "bf16-fa4" in seen


def stored(given: dict[str, Any]) -> dict[str, Any]:
    """Arrays with the dtypes that a safetensors file names."""
    names = {"bfloat16": "BF16", "float32": "F32", "int32": "I32", "float16": "F16"}
    found = {name: np.asarray(x) for name, x in given.items()}
    return {
        name: (names[x.dtype.name], x.view(np.uint16) if x.dtype == BF16 else x)
        for name, x in found.items()
    }


TWO_HEADS = {"k": np.zeros((40, 2, 32), BF16), "v": np.zeros((40, 2, 32), BF16), "dout": None}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": None}, "has no q"),
        ({"out": None, "lse": None}, "no result"),
        ({"k": np.zeros((40, 32), BF16)}, "must be [tokens, heads, head_dim]"),
        ({"k": np.zeros((39, 1, 32), BF16), "v": np.zeros((39, 1, 32), BF16)}, "give cu_seqlens_k"),
        ({"k": np.zeros((40, 1, 64), BF16)}, "must be alike"),
        ({"q": np.full((40, 1, 32), 0.1, np.float32)}, "no bfloat16"),
        ({"q": np.zeros((40, 1, 32), np.float16)}, "F16"),
        ({"cu_seqlens": np.array([0, 50], np.int32)}, "rise from 0 to the 40"),
        ({"cu_seqlens": np.array([0.0, 40.0], np.float32)}, "must be I32"),
        ({"dout": None, "dq": np.zeros((40, 1, 32), BF16)}, "no dout"),
        ({"dout": np.zeros((4, 1, 32), BF16)}, "must be alike"),
        (
            {"out": np.zeros((10, 1, 32), BF16)},
            "it must be [tokens, heads, head_dim], here [40, 1, 32]",
        ),
        ({"out": np.zeros((1, 40, 32), BF16)}, "move the axes"),
        ({"out": np.zeros((40, 1, 32), np.float16)}, "out is F16; it must be U16 or BF16 or F32"),
        ({"lse": np.zeros((40, 1), np.float32)}, "it must be [heads, tokens], here [1, 40]"),
        ({"out": None, "lse": None, "outt": np.zeros(3, np.float32)}, "unknown result 'outt'"),
        (
            {
                "q": np.zeros((40, 3, 32), BF16),
                "k": np.zeros((40, 2, 32), BF16),
                "v": np.zeros((40, 2, 32), BF16),
                "dout": None,
            },
            "do not divide",
        ),
    ],
)
def test_bad_inputs_are_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    given = {
        name: x for name, x in (run("cutlass-fp8", inputs(40)) | change).items() if x is not None
    }
    file = tmp_path / "kernel.safetensors"
    write_safetensors(file, stored(given))
    assert cli.main(["recipes", "match", str(file), "--causal"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no recipe may run."""
    monkeypatch.setattr(searching, "fit", lambda *_, **__: pytest.fail("a recipe was run"))


def test_nothing_to_compare_is_refused_before_any_recipe_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = run("cutlass-fp8", inputs(40))
    without_running(monkeypatch)
    misspelt = {name: x for name, x in given.items() if name not in ("out", "lse")}
    with pytest.raises(ValueError, match=r"unknown result 'outt'; did you mean 'out'.*: out, lse"):
        match(misspelt | {"outt": given["out"]})
    no_tokens = {"out": given["out"][:0], "lse": given["lse"][:, :0]}
    no_tokens |= {name: given[name][:0] for name in ("q", "k", "v", "dout")}
    with pytest.raises(ValueError, match="nothing to compare: out, lse have no elements"):
        match(no_tokens)
    forward_only = ["cutlass-fp8", "fp8-fa4"]
    with pytest.raises(ValueError, match="cutlass-fp8, fp8-fa4 have nothing of what was given, dq"):
        match(misspelt | {"dq": given["q"]}, recipes=forward_only)
    with pytest.raises(ValueError, match=r"s is an array a document, give s\.0"):
        match(given | {"s.1": np.zeros((1, 40, 40), np.float32)})
    with pytest.raises(TypeError, match="causal is 'no'; it must be True or False"):
        golden.match(given, causal="no")
    with pytest.raises(TypeError, match="softmax_scale is 'a'"):
        match(given, softmax_scale="a")
    with pytest.raises(ValueError, match="hides every key to the right"):
        match(given, window=(3, 4))


def test_recipes_that_have_nothing_of_it_are_left_out_with_a_line() -> None:
    given = run("bf16-fa4", inputs(24), gradients=True)
    only = {name: given[name] for name in ("q", "k", "v", "dout", "dq")} | {"zz": given["out"]}
    found = match(only, recipes=["cutlass-fp8", "fp8-fa4", "bf16-fa4"], knobs=False)
    assert [one.recipes for one in found.entries] == [("bf16-fa4",)]
    assert "left out, as they have nothing of what was given (dq): cutlass-fp8, fp8-fa4" in (
        found.to_text()
    )
    assert "in none of the recipes asked for: 'zz'" in found.to_text()


def test_values_that_are_not_finite_have_no_distance_and_are_not_near() -> None:
    given = run("cutlass-fp8", inputs(40))
    out = np.array(given["out"])
    count = out.size
    for rows, word in ((slice(None), "no recipe is near"), (slice(20, None), "departs at out")):
        broken = out.copy()
        broken[rows] = np.nan
        lost = int(np.isnan(broken).sum())
        results = {name: x for name, x in given.items() if name != "lse"} | {"out": broken}
        found = match(results, recipes=["cutlass-fp8"], knobs=lost == count)
        stage = found.best.fit.stages[0]
        assert (stage.name, stage.equal, stage.lost) == ("out", count - lost, lost)
        assert stage.relative_l2 == math.inf
        assert word in found.to_text()
        assert f"relative L2 -, {lost} NaN or infinite in one of the two" in found.to_text()
        assert found.near == (lost < count)
        assert not found.turns
        document = json.loads(found.to_json(), parse_constant=pytest.fail)
        assert document["recipes"][0]["stages"][0]["relative_l2"] is None
    poisoned = inputs(40)
    poisoned["k"][3, 0, 0] = np.nan
    assert match(run("cutlass-fp8", poisoned), recipes=["cutlass-fp8"]).exit_code == 0


def test_what_is_not_finite_ranks_behind_any_distance() -> None:
    def one(difference: float, lost: int) -> Fit:
        stage = StageFit(
            name="out",
            backward=False,
            elements=10,
            equal=4,
            difference=difference,
            norm=1.0,
            lost=lost,
        )
        return Fit(stages=(stage,))

    keys = [one(*x).key for x in ((1e-9, 0), (0.5, 0), (1e9, 0), (0.0, 1))]
    assert keys == sorted(keys, reverse=True)
    assert len(set(keys)) == 4
    assert one(0.0, 1).plus(one(0.0, 2)).stages[0].lost == 3


@pytest.mark.parametrize(
    ("stages", "near"),
    [  # name, share of equal elements, relative L2
        ([("out", 0.0, 1.0)], False),
        ([("out", 0.049, 0.8)], False),
        ([("out", 0.0, 0.79)], True),
        ([("out", 0.05, 1.4)], True),
        ([("out", 0.0, 1.4), ("lse", 0.02, 0.3)], False),  # of another mask
        ([("out", 0.0, 1.4), ("lse", 1.0, 0.0)], True),
        ([("lse", 0.0, 1e-4)], True),
        ([("s", 1.0, 0.0), ("out", 0.0, 1.4)], True),
    ],
)
def test_a_recipe_is_near_by_bits_or_by_distance(
    stages: list[tuple[str, float, float]], near: bool
) -> None:
    made = [
        StageFit(
            name=name,
            backward=False,
            elements=1000,
            equal=round(1000 * share),
            difference=distance**2,
            norm=1.0,
        )
        for name, share, distance in stages
    ]
    assert Fit(stages=tuple(made)).near == near


def test_float32_that_was_not_rounded_gets_a_hint() -> None:
    given = run("cutlass-fp8", inputs(24))
    wide = np.asarray(given["out"], np.float32)
    assert match(given | {"out": wide}, recipes=["cutlass-fp8"], knobs=False).notes == ()
    found = match(given | {"out": wide * np.float32(1.0003)}, recipes=["cutlass-fp8"], knobs=False)
    assert "out is float32 with values that are no bfloat16" in found.to_text()


def test_no_part_is_tried_twice_and_a_change_that_gives_every_bit_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[tuple[str, str, bool]] = []

    def counted(recipe: Recipe, sample: Any, *, backward: bool = True) -> Fit:
        tried.append((recipe.to_json(), sample.name, backward))
        return fit(recipe, sample, backward=backward)

    monkeypatch.setattr(turning, "fit", counted)
    seen: list[str] = []
    given = run(changed("fp8-fa4", {"softmax.p_offset": 7}), inputs(12))
    found = match(
        given,
        recipes=["fp8-fa4", "fp8-fa3"],
        progress=lambda done, total, name: seen.append(name),
    )
    assert found.turns[0].words == "softmax.p_offset 8 -> 7"
    assert found.best.recipes == ("fp8-fa4",)
    assert len(tried) > 50
    assert len(tried) == len(set(tried))
    changes = [name for name in seen if "change 1 of at most" in name]
    assert changes
    assert all(name.startswith("fp8-fa4") for name in changes)


def test_the_command_says_it_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    planted = changed("cutlass-fp8", {"softmax.row_sum": "ascending"})
    folder = tmp_path / "outputs"
    folder.mkdir()
    for at, tokens in enumerate((12, 40)):
        given = run(planted, inputs(tokens, seed=at))
        write_safetensors(folder / f"Case {at}.safetensors", stored(given))
    arguments = ["recipes", "match", str(folder), "--recipe", "cutlass-fp8"]
    assert cli.main(arguments) == 2
    assert "--causal or --full" in capsys.readouterr().err
    written = tmp_path / "fitting.json"
    assert cli.main([*arguments, "--causal", "--write", str(written)]) == 1
    text = capsys.readouterr().out
    assert "softmax.row_sum halved_lanes -> ascending" in text
    assert "gives every bit" in text
    recipe = Recipe.from_json(written.read_text())
    assert recipe.softmax.row_sum == "ascending"
    again = ["recipes", "match", str(folder), "--causal", "--recipe", str(written), "--json"]
    assert cli.main(again) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exact"] is True
    assert cli.main([*arguments, "--full", "--no-knobs"]) == 1
    assert cli.main([*arguments, "--causal", "--write", str(written)]) == 2
    capsys.readouterr()
    for options in ([], ["--causal"]):
        assert cli.main(["recipes", "match", str(tmp_path / "none"), *options]) == 2
        assert "there is no file or folder" in capsys.readouterr().err
    assert cli.main(["recipes", "match", str(tmp_path)]) == 2
    assert "no .safetensors file" in capsys.readouterr().err
