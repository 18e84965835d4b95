"""A pack says which recipe it was made with, and no other recipe passes under its name."""

import copy
import dataclasses
import json
import multiprocessing
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref import golden
from flamia_ref.attention import RECIPES, Recipe
from flamia_ref.golden.recipes import RecipeEntry
from flamia_ref.golden.simulator import numpy_kernel
from tests.golden.packs import FIRST, RECIPE, forge, older, results, spec

pytestmark = pytest.mark.usefixtures("tiny_suite")

OURS = RECIPES[RECIPE]


def changed(**changes: Any) -> Recipe:
    tiles = dataclasses.replace(OURS.tiles, query=32, key=32)
    return dataclasses.replace(OURS, **{"tiles": tiles} | changes)


def test_a_changed_recipe_needs_a_name_of_its_own(tmp_path: Path) -> None:
    message = f"recipe {RECIPE} differs from the registered one of that name; rename it"
    with pytest.raises(ValueError, match=message):
        golden.make(tmp_path / "pack", [changed()], suite="tiny")
    first = next(iter(OURS.steps))
    better = dataclasses.replace(OURS.steps[first], source="measured by me")
    with pytest.raises(ValueError, match=message):
        golden.make(
            tmp_path / "pack",
            [dataclasses.replace(OURS, steps={**OURS.steps, first: better})],
            suite="tiny",
        )
    assert list(tmp_path.iterdir()) == []
    golden.make(tmp_path / "pack", [Recipe.from_json(OURS.to_json())], suite="tiny")


@pytest.mark.parametrize("recipe", [5, None, {}, ["flamia-mxfp8-folded"]])
def test_what_is_no_recipe(tmp_path: Path, recipe: Any) -> None:
    with pytest.raises(TypeError, match="is neither a name nor a Recipe") as caught:
        golden.make(tmp_path / "pack", [recipe], suite="tiny")
    assert "\n" not in str(caught.value)


def test_a_recipe_of_somebody_else_is_noted(tmp_path: Path) -> None:
    golden.make(tmp_path / "pack", [changed(name="mine")], suite="tiny")
    report = golden.check(tmp_path / "pack", numpy_kernel)
    assert report.passed
    assert report.evidence == {"mine": "assumed"}
    assert report.notes == (
        "recipe mine is none of this version's; its evidence is what its author claims",
    )


def test_a_pack_with_another_recipe_of_that_name_is_noted(pack: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["recipes"][RECIPE]["recipe"]["steps"]["o"]["source"] = "other"

    forge(pack, change)
    report = golden.check(pack, numpy_kernel)
    assert report.notes == (f"recipe {RECIPE} of the pack is not this version's of that name",)


# The recipes that there were before a recipe had a schema.
BEFORE = (
    *("bf16-fa4", "cudnn-mxfp8", "cudnn-mxfp8-pv-bf16"),
    *("flamia-mxfp8", "flamia-mxfp8-folded", "flamia-mxfp8-unguarded"),
)


@pytest.mark.parametrize("name", BEFORE)
def test_a_recipe_without_the_fields_that_came_later_is_the_same(name: str) -> None:
    data = older(RECIPES[name].to_json())
    assert len(json.dumps(data)) < len(RECIPES[name].to_json())
    now = RECIPES[name]
    # What has another value since matters only where keys are split, which was not possible.
    softmax = dataclasses.replace(now.softmax, combine="every_split")
    assert Recipe.from_json(data) == dataclasses.replace(now, softmax=softmax, schedules=())


def test_fields_that_are_not_there_and_have_their_defaults_are_no_difference(pack: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        data = older(OURS.to_json())
        data["schedules"] = json.loads(OURS.to_json())["schedules"]
        document["recipes"][RECIPE]["recipe"] = data

    forge(pack, change)
    report = golden.check(pack, numpy_kernel)
    assert report.passed
    assert report.notes == ()


# A pack that the version before the second schema of recipes wrote, of documents of 3, 0 and 2 tokens.
FIRST_SCHEMA = Path(__file__).parent / "data" / "recipe-schema-1"


def test_a_pack_of_the_first_schema_of_recipes_loads_and_passes() -> None:
    pack = golden.load(FIRST_SCHEMA)
    data = pack.manifest.recipes["flamia-mxfp8"].recipe
    assert data["schema"] == 1
    assert not {"p_scale", "nan_p"} & set(data["softmax"])
    assert not {"dequantized", "smoothing"} & set(data["s"]["left"])
    assert Recipe.from_json(data) == RECIPES["flamia-mxfp8"]
    report = golden.check(FIRST_SCHEMA, numpy_kernel)
    assert report.passed, str(report)
    assert report.notes == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["softmax"].pop("combine"), r"recipe\.softmax has no combine"),
        (lambda data: data.pop("dq"), "recipe has no dq"),
        (lambda data: data.update(gradient=None), "and no gradient; a backward needs all"),
        (lambda data: data.update(schema=2), r"has no correction_instruction|has no dequantized"),
        (lambda data: data.update(schema=3), "recipe has schema 3"),
    ],
)
def test_what_the_first_schema_must_have(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    folder = Path(shutil.copytree(FIRST_SCHEMA, tmp_path / "pack"))
    forge(folder, lambda document: change(document["recipes"]["flamia-mxfp8"]["recipe"]))
    with pytest.raises(ValueError, match=message) as caught:
        golden.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ((), "unknown field of recipe 'spare'"),
        (("softmax",), r"unknown field of recipe\.softmax 'spare'"),
        (("dq", "right"), r"unknown field of recipe\.dq\.right 'spare'"),
        (("steps", "o"), r"unknown field of recipe\.steps\['o'\] 'spare'"),
    ],
)
def test_a_field_that_nobody_knows_is_refused(
    pack: Path, part: tuple[str, ...], message: str
) -> None:
    def change(document: dict[str, Any]) -> None:
        inner = document["recipes"][RECIPE]["recipe"]
        for name in part:
            inner = inner[name]
        inner["spare"] = 1

    forge(pack, change)
    with pytest.raises(ValueError, match=message) as caught:
        golden.load(pack)
    assert "\n" not in str(caught.value)


def test_the_evidence_is_that_of_the_steps(made: Path) -> None:
    entry = golden.load(made).manifest.recipes[RECIPE]
    assert entry == RecipeEntry.of(OURS)
    assert (entry.evidence, entry.query_tile, entry.key_tile) == ("assumed", 128, 128)
    assert Recipe.from_json(json.dumps(dict(entry.recipe))) == OURS


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_tiles_are_named_as_the_recipe_has_them(tmp_path: Path, tile: int) -> None:
    tiles = dataclasses.replace(OURS.tiles, query=tile, key=tile)
    recipe = OURS if tile == 128 else dataclasses.replace(OURS, name="mine", tiles=tiles)
    entry = RecipeEntry.of(recipe)
    pack = golden.make(tmp_path / "pack", [recipe], suite="tiny")
    case = golden.load(tmp_path / "pack")[f"tiny.{recipe.name}"]
    assert case.recipe == entry == pack.recipes[recipe.name]
    given = results(case)

    def where(name: str, index: tuple[int, ...]) -> dict[str, Any]:
        wrong = given[name].copy()
        # Of a float a bit that no order of additions reaches.
        wrong.view(f"u{wrong.itemsize}")[index] ^= 1 << 20 if wrong.itemsize == 4 else 1
        actual = {case.name: given | {name: wrong}}
        first = golden.check(case, actual, diagnose=False).cases[0].first
        assert first is not None
        assert first.first is not None
        return dict(first.first.where)

    # Row 34 of document 2, which starts at token 2.
    assert where("p.2", (0, 34, 33))["query tile"] == 34 // tile
    assert where("p.2", (0, 34, 33))["key tile"] == 33 // tile
    assert where("q.codes", (36, 0, 0))["tile"] == 34 // tile
    assert where("k.codes", (36, 0, 0))["tile"] == 34 // tile
    assert where("row_sum", (0, 36))["tile"] == 34 // tile
    # Row 33 of a tile of scales is in byte 33 % 32 * 16 + 33 // 32 * 4.
    assert where("v.scales.tiled.2", (0, 0, 0, 20))["tile"] == 33 // tile


def name_of(case: golden.Case) -> tuple[str, float]:
    return case.name, float(np.nansum(case.tensors["lse"], dtype=np.float64))


def test_packs_can_be_copied_and_sent(made: Path) -> None:
    pack = golden.load(made)
    for case in pack:
        assert np.array_equal(case.tensors["q"], case.tensors["q"])
    for copied in (copy.deepcopy(pack), pickle.loads(pickle.dumps(pack)), copy.copy(pack)):
        assert copied == pack
        assert hash(copied) == hash(pack)
        for case in copied:
            assert case in pack
            assert hash(case) == hash(pack[case.name])
            assert not case.tensors["q"].flags.writeable
    assert copy.deepcopy(pack.manifest) == pack.manifest
    assert hash(copy.deepcopy(pack.manifest)) == hash(pack.manifest)
    assert len({*pack, *golden.load(made)}) == 2
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(name_of, list(pack)) == [name_of(case) for case in pack]
    with pytest.raises(TypeError):
        pack[FIRST].tensors["q"] = None
    report = golden.check(pack, numpy_kernel)
    assert pickle.loads(pickle.dumps(report)) == report == copy.deepcopy(report)
    assert copy.deepcopy(spec()) == spec()


def test_near_names_of_cases(made: Path) -> None:
    pack = golden.load(made)
    for given, meant in [("tiny-poisn", "tiny-poison"), ("tiny-p", "tiny-poison"), ("tin", FIRST)]:
        with pytest.raises(ValueError, match=f"did you mean .*'{meant}"):
            pack[given]
