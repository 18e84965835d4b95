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
        (lambda r: r.update(schema=2), "unknown field of recipe 'schema'"),
        (lambda r: r["softmax"].pop("exp2"), "recipe.softmax has no exp2"),
        (lambda r: r["softmax"].update(mask_value="-inf"), "recipe.softmax.mask_value is '-inf'"),
        (lambda r: r["softmax"].update(rescale_threshold=1.5), "rescale_threshold is 1.5; it must"),
        (lambda r: r["tiles"].update(key=100), "tiles.key is 100; allowed: multiples of 32"),
        (lambda r: r["softmax"].update(base="raw_max"), "exp2_argument is 'split' with base 'raw"),
        (lambda r: r.update(schedules=[{}]), "recipe.schedules[0] has no name"),
        (lambda r: r.update(schedules=[{"name": "a"}] * 2), "two schedules of one name"),
        (lambda r: r.update(schedules={}), "recipe.schedules is {}; it must be a list"),
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
        ("softmax", {"row_sum": "random"}, "Softmax.row_sum is 'random'"),
        ("softmax", {"rescale_threshold": -1}, "rescale_threshold is -1; allowed: 0 to 64"),
        ("s", {"tile_order": "random"}, "Product.tile_order is 'random'"),
        ("s", {"guard_instruction": "exact"}, "guard_instruction is 'exact'; a product has one if"),
        ("gradient", {"delta": "rowsum"}, "Gradient.delta is 'rowsum'"),
        ("gradient", {"heads": "atomic"}, "Gradient.heads is 'atomic'; allowed: 'float32_sum', "),
        ("tiles", {"query": 128.0}, "Tiles.query is 128.0; it must be a int"),
        ("tiles", {"query": 48}, "tiles.query is 48; allowed: multiples of 32"),
        ("tiles", {"key": 288}, "tiles.key is 288; allowed: multiples of 32"),
        ("tiles", {"key": 0}, "tiles.key is 0; allowed: multiples of 32"),
        ("tiles", {"splits": 0}, "tiles.splits is 0; allowed: 1 to 256"),
        ("tiles", {"masked": "left out"}, "Tiles.masked is 'left out'; allowed: 'computed', 'sk"),
        ("softmax", {"base": "raw_max"}, "exp2_argument is 'split' with base 'raw_max'; the exp"),
        ("softmax", {"lse": "log2_fma"}, "lse is 'log2_fma' with base 'integer_max'; 'log2_fma'"),
        ("softmax", {"mask_value": -float("inf")}, "mask_value is -inf; it must be a finite float"),
        ("softmax", {"mask_value": float("nan")}, "mask_value is nan; it must be a finite float32"),
        ("softmax", {"mask_value": -1e39}, "mask_value is -1e+39; it must be a finite float32"),
        ("softmax", {"mask_value": 0.0}, "mask_value is 0.0; it must be a finite float32 below 0"),
        ("softmax", {"tanh": "polynomial3"}, "unknown tanh model 'polynomial3'"),
        ("softmax", {"combine": "first"}, "Softmax.combine is 'first'; allowed"),
        ("gradient", {"p_offset": 65}, "p_offset is 65; allowed: 0 to 64"),
        ("gradient", {"delta_source": "out"}, "Gradient.delta_source is 'out'; allowed"),
        ("s", {"k_order": "shifted"}, "Product.k_order is 'shifted'; allowed"),
    ],
)
def test_a_knob_cannot_be_set_to_what_it_does_not_know(part: str, change, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        dataclasses.replace(getattr(FOLDED, part), **change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        (
            "bf16-fa4",
            "softmax.exp2_argument",
            "split",
            "exp2_argument is 'split' with base 'raw_max'; the exponent n - base is an integer only",
        ),
        (
            "bf16-fa4",
            "softmax.lse",
            "log2_sum",
            "lse is 'log2_sum' with base 'raw_max'; 'log2_fma' takes a base in units of S",
        ),
        (
            "cudnn-mxfp8",
            "softmax.p_offset",
            5,
            "lets P reach 2^9 by softmax.rescale_threshold and softmax.p_offset together; e4m3 hol",
        ),
        ("cudnn-mxfp8", "softmax.rescale_threshold", 5, "lets P reach 2^9"),
        ("cudnn-mxfp8", "gradient.p_offset", 9, "lets dV's P reach 2^9 by gradient.p_offset"),
        ("flamia-mxfp8-unguarded", "gradient.normalisation", "fold_into_dout", None),
        ("o", "left.static_scale", 255, "static_scale is 255; allowed: 0 to 254"),
        ("o", "left.scope", "previous_block", "e4m3 has scope 'previous_block'; allowed: static"),
        ("o", "left.static_scale", None, "static_scale is None with scope 'static'; give an e8m0"),
        ("o", "right.scope", "unit", "has scope 'unit'; allowed: block, token or previous_block"),
        (
            "o",
            "right.promoted_from",
            Use.DP_V,
            None,
        ),
    ],
)
def test_fields_that_contradict_each_other(name: str, path: str, value, message) -> None:
    """At construction, whichever comes first: before anything is computed."""
    part = RECIPES["cudnn-mxfp8"].o if name == "o" else RECIPES[name]
    if message is None:
        changed(part, path, value)  # nothing contradicts that
        return
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        changed(part, path, value)
    assert "\n" not in str(caught.value)


def test_the_range_of_p_is_that_of_a_constant_scale() -> None:
    """2^8 is e4m3's largest power of two: threshold and offset together must not pass it."""
    base = RECIPES["cudnn-mxfp8"]
    for threshold, offset in ((8, 0), (0, 8), (4, 4), (1, 7)):
        softmax = dataclasses.replace(base.softmax, rescale_threshold=threshold, p_offset=offset)
        assert dataclasses.replace(base, softmax=softmax).softmax == softmax
        beyond = dataclasses.replace(softmax, rescale_threshold=threshold + 1)
        with pytest.raises(ValueError, match=r"lets P reach 2\^9"):
            dataclasses.replace(base, softmax=beyond)
    block_scaled = changed(RECIPES["flamia-mxfp8-folded"], "softmax.p_offset", 20)
    assert block_scaled.softmax.p_offset == 20


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
        ("bf16-fa4", "s.tile_order", TileOrder.DESCENDING, "s.tile_order = 'descending'"),
        ("bf16-fa4", "input", "fp16", "input = 'fp16'; computed are 'bf16'"),
        ("bf16-fa4", "o.tile_order", TileOrder.SHIFTED, "o.tile_order = 'shifted'; computed are"),
        (
            "bf16-fa4",
            "dk.tile_order",
            TileOrder.DESCENDING,
            "one loop over query tiles adds to both",
        ),
        ("bf16-fa4", "tiles.masked", "computed", "has o.right.format = 'bf16'; computed are "),
        ("cudnn-mxfp8", "tiles.masked", "computed", "gradient.heads = 'one_chain'; computed are "),
        ("flamia-mxfp8-folded", "gradient.masked_ds", "product", "gradient.masked_ds = 'product'"),
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
