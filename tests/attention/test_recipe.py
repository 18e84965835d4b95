"""The recipe as data: round trip, uses, evidence, and errors that name the field."""

import copy
import dataclasses
import json
import pickle
import re

import numpy as np
import pytest

from flamia_ref import attention
from flamia_ref.attention import RECIPES, Forward, Operand, Recipe, Use
from flamia_ref.attention.product import Accumulation, Scope, TileOrder
from flamia_ref.evidence import Evidence
from tests.attention.changes import changed

FOLDED = RECIPES["flamia-mxfp8-folded"]


@pytest.mark.parametrize("name", RECIPES)
def test_json_round_trip(name: str) -> None:
    recipe = RECIPES[name]
    text = recipe.to_json()
    again = Recipe.from_json(text)
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert again.to_json() == text
    assert Recipe.from_json(json.loads(text)) == recipe


def test_the_twelve_uses() -> None:
    uses = dict(FOLDED.uses())
    assert len(uses) == 12
    assert uses[Use("dk.q")].same_codes_as is Use.S_Q
    assert FOLDED.operand("o.v").scale_folded_into is Use.O_P
    with pytest.raises(ValueError, match=r"unknown use 'o\.k'"):
        FOLDED.operand("o.k")


def test_every_part_has_evidence_and_the_weakest_is_shown() -> None:
    assert FOLDED.evidence("s.instruction").evidence is Evidence.ASSUMED  # its exponent floor
    assert FOLDED.evidence("o.right.scale_folded_into").evidence is Evidence.DERIVED
    assert FOLDED.evidence("s.left.format").evidence is Evidence.ASSUMED
    assert FOLDED.label is Evidence.ASSUMED
    steps = {path: step for path, step in FOLDED.steps.items() if path != "tiles"}
    with pytest.raises(ValueError, match=r"no evidence for tiles\.query, tiles\.key"):
        dataclasses.replace(FOLDED, steps=steps)


def test_replace_makes_another_recipe() -> None:
    softmax = dataclasses.replace(FOLDED.softmax, exp2="correct")
    other = dataclasses.replace(FOLDED, name="mine", softmax=softmax)
    assert other != FOLDED
    assert Recipe.from_json(other.to_json()) == other


def _broken(change) -> str:
    plain = json.loads(FOLDED.to_json())
    change(plain)
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("softmax"), "recipe has no softmax"),
        (lambda r: r.update(sofmax={}), "unknown field of recipe 'sofmax'; did you mean 'softmax'"),
        (lambda r: r["s"].update(instruction="mxf8"), "unknown instruction 'mxf8'"),
        (lambda r: r["s"]["left"].update(format="e4m4"), "unknown operand format 'e4m4'"),
        (lambda r: r["o"]["left"].update(block=[1, "row"]), "recipe.o.left.block[] is 'row'"),
        (lambda r: r["o"]["left"].update(block=[1]), "it must be a list of 2"),
        (lambda r: r["o"]["left"].update(scope="row"), "recipe.o.left.scope is 'row'; allowed"),
        (lambda r: r["softmax"].update(base="max"), "recipe.softmax.base is 'max'; allowed"),
        (lambda r: r["softmax"].update(exp2="libm"), "unknown exp2 model 'libm'"),
        (lambda r: r["tiles"].update(key=True), "recipe.tiles.key is True; it must be a int"),
        (lambda r: r.update(input="bf17"), "unknown format 'bf17'"),
        (lambda r: r.update(name=3), "recipe.name is 3; it must be a str"),
        (lambda r: r.update(s=[]), "recipe.s is []; it must be an object"),
        (
            lambda r: r["steps"].update(softmx=r["steps"]["s"]),
            "unknown part with evidence 'softmx'",
        ),
        (lambda r: r["steps"]["s"].update(evidence="sure"), "recipe.steps['s'].evidence is 'sure'"),
    ],
)
def test_bad_json_names_the_field(change, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Recipe.from_json(_broken(change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("softmax", {"exp2_argument": "exact"}, "Softmax.exp2_argument is 'exact'; allowed"),
        ("softmax", {"base": "real"}, "Softmax.base is 'real'"),
        ("softmax", {"row_sum": "ascending"}, "Softmax.row_sum is 'ascending'"),
        ("softmax", {"rescale_threshold": -1}, "rescale_threshold is -1; allowed: 0 to 64"),
        ("s", {"tile_order": "random"}, "Product.tile_order is 'random'"),
        ("s", {"guard_instruction": "exact"}, "guard_instruction is 'exact'; a product has one if"),
        ("gradient", {"delta": "rowsum"}, "Gradient.delta is 'rowsum'"),
        ("gradient", {"heads": "atomic"}, "Gradient.heads is 'atomic'; allowed: 'float32_sum', "),
        ("tiles", {"query": 128.0}, "Tiles.query is 128.0; it must be a int"),
    ],
)
def test_a_knob_cannot_be_set_to_what_it_does_not_know(part: str, change, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(getattr(FOLDED, part), **change)


def test_copies_are_equal() -> None:
    assert copy.deepcopy(FOLDED) == FOLDED
    assert pickle.loads(pickle.dumps(FOLDED)) == FOLDED
    assert dataclasses.asdict(FOLDED)["s"]["instruction"] == FOLDED.s.instruction


def test_a_name_twice_in_one_object_is_refused() -> None:
    text = FOLDED.to_json().replace('"input": "bf16",', '"input": "bf16", "input": "bf16",')
    with pytest.raises(ValueError, match="'input' comes twice"):
        Recipe.from_json(text)
    with pytest.raises(ValueError, match="recipe"):
        Recipe.from_json('{"a":' * 100_000)


def test_blocks_of_operands_are_checked() -> None:
    for block in ((0, 32), (1, -5), (1, 16), (32, 64)):
        with pytest.raises(ValueError, match="te-mx-e4m3 has no block"):
            Operand(format="te-mx-e4m3", block=block)
    with pytest.raises(ValueError, match="bf16 has no scales"):
        Operand(format="bf16", block=(1, 32))
    assert Operand(format="te-mx-e4m3").block == (1, 32)


def test_not_json() -> None:
    with pytest.raises(ValueError, match="recipe is not JSON"):
        Recipe.from_json("{")
    with pytest.raises(ValueError, match="it must be an object"):
        Recipe.from_json("[]")


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("flamia-mxfp8-folded", "s.left.block", (1, 32), "has s.left.scope = 'token'; computed"),
        ("flamia-mxfp8-folded", "s.right.scope", Scope.BLOCK, "has s.right.scope = 'block'"),
        (
            "flamia-mxfp8-folded",
            "o.right.scale_folded_into",
            None,
            "o.right.scale_folded_into = None",
        ),
        (
            "flamia-mxfp8-folded",
            "s.instruction",
            "sm100.tcgen05.f16",
            "s.left in te-mx-e4m3, which",
        ),
        ("flamia-mxfp8-folded", "gradient.heads", "one_chain", "gradient.heads = 'one_chain'"),
        ("flamia-mxfp8-folded", "gradient.normalisation", "lse", "gradient.normalisation = 'lse'"),
        (
            "flamia-mxfp8-folded",
            "softmax.rescale_threshold",
            4,
            "rescale_threshold = 4; computed are 0",
        ),
        (
            "bf16-fa4",
            "softmax.exp2_argument",
            "split",
            "exp2_argument = 'split'; computed are 'fused'",
        ),
        (
            "bf16-fa4",
            "softmax.lse",
            "log2_sum",
            "softmax.lse = 'log2_sum'; computed are 'log2_fma'",
        ),
        ("bf16-fa4", "s.tile_order", TileOrder.DESCENDING, "s.tile_order = 'descending'"),
        ("bf16-fa4", "input", "fp16", "input = 'fp16'; computed are 'bf16'"),
        (
            "bf16-fa4",
            "tiles.key",
            64,
            "tiles of 128 queries and 64 keys; square tiles are computed",
        ),
        ("cudnn-mxfp8", "softmax.p_offset", 5, "lets P reach 2^9, rescale_threshold and p_offset"),
        ("cudnn-mxfp8", "dk.accumulation", Accumulation.FLOAT32_PARTIALS, "dk.accumulation = "),
        ("cudnn-mxfp8", "o.right.block", (1, 32), "o.right.block = (1, 32)"),
        ("flamia-mxfp8", "o.left.format", "e5m2", "o.left.format = 'e5m2'; computed are 'e4m3'"),
        ("flamia-mxfp8", "dv.left.same_codes_as", Use.O_P, "dv.left.same_codes_as = 'o.p'"),
        ("flamia-mxfp8-unguarded", "dq.left.block", (1, 32), "one copy of dS for dQ and dK"),
    ],
)
def test_a_recipe_that_is_not_computed_is_refused(name, path, value, message: str) -> None:
    """By each function that takes a recipe, before it looks at anything else. `test_computed.py` has every change."""
    recipe = changed(RECIPES[name], path, value)
    x = np.zeros((4, 1, 32), np.float32)
    other = attention.forward(x, x, x, name)
    calls = (
        lambda: attention.forward(None, None, None, recipe),
        lambda: attention.attention(None, None, None, recipe),
        lambda: Forward.from_kernel(None, None, recipe),
        lambda: attention.backward(
            None, None, None, None, dataclasses.replace(other, recipe=recipe)
        ),
    )
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(message)) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)
