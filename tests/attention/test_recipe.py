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
from flamia_ref.attention.computed import check_computed
from flamia_ref.attention.knobs import EmulatedColumns, Schedule
from flamia_ref.attention.product import Accumulation, Scope, TileOrder
from flamia_ref.attention.recipe import RECIPE_SCHEMA
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


def schedule(**fields) -> dict:
    """The data of a schedule that changes nothing but some fields."""
    plain = dict.fromkeys(("o_order", "dq_order", "key_order", "heads_order", "splits"))
    return {"name": "a", **plain, **fields}


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
        (
            lambda r: r["o"]["left"].update(block=[1, "row"]),
            "recipe.o.left.block[1] is 'row'; it must be a whole number or 'all'",
        ),
        (lambda r: r["o"]["left"].update(block=[1]), "it must be a list of 2"),
        (lambda r: r["o"]["left"].update(scope="row"), "recipe.o.left.scope is 'row'; allowed"),
        (lambda r: r["softmax"].update(base="max"), "recipe.softmax.base is 'max'; allowed"),
        (lambda r: r["softmax"].update(exp2="libm"), "unknown exp2 model 'libm'"),
        (lambda r: r["tiles"].update(key=True), "recipe.tiles.key is True; it must be a whole"),
        (lambda r: r.update(input="bf17"), "unknown format 'bf17'"),
        (lambda r: r.update(name=3), "recipe.name is 3; it must be a string"),
        (lambda r: r.update(s=[]), "recipe.s is []; it must be an object"),
        (
            lambda r: r["steps"].update(softmx=r["steps"]["s"]),
            "unknown part with evidence 'softmx'",
        ),
        (lambda r: r["steps"]["s"].update(evidence="sure"), "recipe.steps['s'].evidence is 'sure'"),
        (
            lambda r: r.update(schema=3),
            "recipe has schema 3 and this version reads schema 1 and 2; read",
        ),
        (
            lambda r: r.update(schema="1"),
            "recipe has schema '1' and this version reads schema 1 and 2",
        ),
        (
            lambda r: r.update(schema=True),
            "recipe has schema True and this version reads schema 1 and 2",
        ),
        (
            lambda r: r.update(schema=None),
            "recipe has schema None and this version reads schema 1 and 2",
        ),
        (lambda r: r.update(schema=3, sofmax=1), "recipe has schema 3 and this version reads sch"),
        (lambda r: r.pop("tiles"), "recipe has no tiles"),
        (lambda r: (r.pop("input"), r.pop("schedules")), "recipe has no input, schedules"),
        (lambda r: r["tiles"].pop("splits"), "recipe.tiles has no splits"),
        (lambda r: r["softmax"].pop("score"), "recipe.softmax has no score"),
        (lambda r: r["gradient"].pop("delta_source"), "recipe.gradient has no delta_source"),
        (lambda r: r["o"].pop("tile_order"), "recipe.o has no tile_order"),
        (lambda r: r["dk"]["left"].pop("guard"), "recipe.dk.left has no guard"),
        (lambda r: r.update(schedules=[{"name": "a"}]), "recipe.schedules[0] has no o_order, dq_"),
        (lambda r: r["softmax"].pop("exp2"), "recipe.softmax has no exp2"),
        (lambda r: r["softmax"].update(mask_value="-inf"), "recipe.softmax.mask_value is '-inf'"),
        (lambda r: r["softmax"].update(rescale_threshold=1.5), "rescale_threshold is 1.5; it must"),
        (lambda r: r["tiles"].update(key=100), "tiles.key is 100; allowed: multiples of 32"),
        (lambda r: r["softmax"].update(base="raw_max"), "exp2_argument is 'split' with base 'raw"),
        (lambda r: r.update(schedules=[{}]), "recipe.schedules[0] has no name"),
        (lambda r: r.update(schedules=[schedule()] * 2), "two schedules of one name"),
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
        ("tiles", {"query": 128.0}, "Tiles.query is 128.0; it must be a whole"),
        ("softmax", {"rescale_threshold": 33, "p_offset": 32}, "rescale_threshold is 33 and p_off"),
        ("tiles", {"query": 48}, "tiles.query is 48; allowed: multiples of 32"),
        ("tiles", {"key": 288}, "tiles.key is 288; allowed: multiples of 32"),
        ("tiles", {"key": 0}, "tiles.key is 0; allowed: multiples of 32"),
        ("tiles", {"splits": 0}, "tiles.splits is 0; allowed: 1 to 256"),
        ("tiles", {"masked": "left out"}, "Tiles.masked is 'left out'; allowed: 'computed', 'sk"),
        ("softmax", {"base": "raw_max"}, "exp2_argument is 'split' with base 'raw_max'; the exp"),
        ("softmax", {"lse": "log2_fma"}, "lse is 'log2_fma' with base 'integer_max'; 'log2_fma'"),
        ("softmax", {"mask_value": -float("inf")}, "mask_value is -inf; in float32 it must be"),
        (
            "softmax",
            {"mask_value": float("nan")},
            "mask_value is nan; in float32 it must be finite",
        ),
        ("softmax", {"mask_value": -1e39}, "mask_value is -1e+39; in float32 it must be finite"),
        (
            "softmax",
            {"mask_value": 0.0},
            "mask_value is 0.0; in float32 it must be finite and below 0",
        ),
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
            "lse is 'log2_sum' with base 'raw_max'; 'log2_fma', 'factor_fma', 'scale_fma' take a base",
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
        (
            "o",
            "left.scope",
            "previous_block",
            "e4m3 has scope 'previous_block'; allowed: head, static, unit",
        ),
        ("o", "left.static_scale", None, "static_scale is None with scope 'static'; give an e8m0"),
        (
            "o",
            "right.scope",
            "unit",
            "has scope 'unit'; allowed: block, token, previous_block, largest_score",
        ),
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"splits": 0}, "schedule 'a' has splits = 0; allowed: 1 to 256"),
        ({"splits": 1000}, "schedule 'a' has splits = 1000; allowed: 1 to 256"),
        ({"o_order": "shifted"}, "schedule 'a' has o_order = 'shifted'; computed are 'ascending'"),
        (
            {"key_order": "descending_where_causal"},
            "schedule 'a' has key_order = 'descending_where_causal'; computed are 'ascending', 'desc",
        ),
        ({"heads_order": "shifted"}, "recipe.schedules[0].heads_order is 'shifted'; allowed"),
        ({"name": ""}, "a schedule's name is ''; a name has 1 to 100 printable characters"),
        ({"name": "x" * 100}, "recipe 'flamia-mxfp8-folded' has a schedule 'xxx"),
    ],
)
def test_a_schedule_is_checked_with_its_recipe(fields, message: str) -> None:
    plain = json.loads(FOLDED.to_json())
    plain["schedules"] = [schedule(**fields)]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Recipe.from_json(plain)
    assert "\n" not in str(caught.value)


def test_every_schedule_that_is_taken_makes_a_recipe_that_is_computed() -> None:
    for fields in (
        *({"o_order": order} for order in TileOrder if order is not TileOrder.SHIFTED),
        *({"dq_order": order} for order in TileOrder),
        *(
            {"key_order": order}
            for order in TileOrder
            if order is not TileOrder.DESCENDING_WHERE_CAUSAL
        ),
        *({"heads_order": order} for order in ("ascending", "descending")),
        *({"splits": splits} for splits in (1, 2, 256)),
    ):
        recipe = dataclasses.replace(FOLDED, schedules=(Schedule(name="a", **fields),))
        check_computed(recipe.scheduled("a"))


@pytest.mark.parametrize(
    "name", ["", " ", "a\nb", "../x", "a\\b", "x" * 101, "a\x1b[2J", "a\u2028b"]
)
def test_names_are_plain(name: str) -> None:
    for make in (
        lambda: dataclasses.replace(FOLDED, name=name),
        lambda: Schedule(name=name),
        lambda: Recipe.from_json(_broken(lambda r: r.update(name=name))),
    ):
        with pytest.raises(ValueError, match="a name has 1 to 100 printable characters") as caught:
            make()
        assert caught.value.args[0].isprintable()
        assert len(str(caught.value)) < 200
    for fine in ("x", "x" * 100, "\u00fc 1, b"):
        assert dataclasses.replace(FOLDED, name=fine, schedules=()).name == fine


def test_the_columns_of_a_tile_are_at_most_256() -> None:
    fields = {"exp2": "polynomial3", "period": 256, "count": 256, "first": 255, "stop": 256}
    EmulatedColumns(**fields)
    for name in ("period", "stop"):
        for value in (257, 10**30):
            with pytest.raises(ValueError, match=rf"{name} {value}.*allowed: 0 < count <= period"):
                EmulatedColumns(**{**fields, name: value})
    with pytest.raises(ValueError, match="count 1000000"):
        EmulatedColumns(**{**fields, "period": 10**30, "count": 10**30})


@pytest.mark.parametrize("value", [-1e-50, -1e-46, -0.0, -3.5e38])
def test_a_mask_value_is_checked_as_float32(value: float) -> None:
    with pytest.raises(ValueError, match="in float32 it must be finite and below 0"):
        dataclasses.replace(FOLDED.softmax, mask_value=value)


def test_whole_numbers_stand_for_floats_and_numpys_numbers_for_pythons() -> None:
    found = Recipe.from_json(_broken(lambda r: r["softmax"].update(mask_value=-1000)))
    assert found.softmax.mask_value == -1000.0
    assert type(found.softmax.mask_value) is float
    with pytest.raises(
        ValueError, match=r"mask_value is -1000000000.*; it must be a finite number"
    ):
        Recipe.from_json(_broken(lambda r: r["softmax"].update(mask_value=-(10**400))))
    assert type(dataclasses.replace(FOLDED.tiles, query=np.int64(64)).query) is int
    softmax = dataclasses.replace(
        FOLDED.softmax, mask_value=np.float32(-1e4), exp2=np.str_("correct"), p_offset=np.int32(4)
    )
    assert Recipe.from_json(dataclasses.replace(FOLDED, softmax=softmax).to_json())
    block = (np.int64(1), "all")
    assert dataclasses.replace(FOLDED.s.left, block=block) == FOLDED.s.left


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ([32.0, 1], "recipe.s.left.block[0] is 32.0; it must be a whole number or 'all'"),
        ([1, True], "recipe.s.left.block[1] is True; it must be a whole number or 'all'"),
    ],
)
def test_which_entry_of_a_block_is_wrong(block, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Recipe.from_json(_broken(lambda r: r["s"]["left"].update(block=block)))


def test_the_schema_is_written_and_read() -> None:
    plain = json.loads(FOLDED.to_json())
    assert plain["schema"] == RECIPE_SCHEMA == 2
    # Without one it is of a version that wrote none: what came later has its default.
    del plain["schema"], plain["softmax"]["tanh"], plain["schedules"]
    assert Recipe.from_json(plain) == dataclasses.replace(FOLDED, schedules=())
    del plain["softmax"]["exp2"]
    with pytest.raises(ValueError, match=r"recipe\.softmax has no exp2"):
        Recipe.from_json(plain)


def test_a_recipe_of_the_first_schema_is_read() -> None:
    plain = json.loads(FOLDED.to_json())
    plain["schema"] = 1
    with_all = json.dumps(plain)
    assert Recipe.from_json(with_all) == FOLDED
    # What came with the second schema has its default; what was there before must be there.
    for later in _later(FOLDED):
        part = plain
        for name in later[:-1]:
            part = part[name]
        del part[later[-1]]
    assert Recipe.from_json(plain) == FOLDED
    del plain["softmax"]["tanh"]
    with pytest.raises(ValueError, match=r"recipe\.softmax has no tanh"):
        Recipe.from_json(plain)


FIRST = {
    "": "name s o dp dv dq dk softmax gradient steps tiles guard_operands input output schedules",
    "softmax": (
        "exp2 log2 reciprocal tanh emulated score score_factor base exp2_argument mask_value rescale_threshold"
        " p_offset row_sum row_sum_of normalisation lse combine"
    ),
    "gradient": (
        "softmax_scale score_factor normalisation delta delta_source p_for_dv p_offset masked_ds heads heads_order"
    ),
    "tiles": "query key masked splits",
    "product": "left right instruction guard_instruction tile_order k_order accumulation",
    "operand": (
        "format block scope static_scale same_codes_as promoted_from scale_folded_into guard"
    ),
}
"""The fields of a recipe of schema 1, as the version before the second wrote them."""


def _later(recipe: Recipe) -> list[tuple[str, ...]]:
    """The paths of fields that were not there in the first schema."""
    plain, found = json.loads(recipe.to_json()), []
    for part in ("softmax", "gradient", "tiles"):
        found += [(part, name) for name in set(plain[part]) - set(FIRST[part].split())]
    for product in ("s", "o", "dp", "dv", "dq", "dk"):
        names = set(plain[product]) - set(FIRST["product"].split())
        found += [(product, name) for name in names]
        for side in ("left", "right"):
            names = set(plain[product][side]) - set(FIRST["operand"].split())
            found += [(product, side, name) for name in names]
    assert set(plain) - {"schema"} == set(FIRST[""].split())
    return found


def test_texts_that_are_no_str() -> None:
    with pytest.raises(ValueError, match="recipe is bytes; decode it as UTF-8 first"):
        Recipe.from_json(FOLDED.to_json().encode())
    with pytest.raises(ValueError, match="recipe begins with a byte order mark"):
        Recipe.from_json("\ufeff" + FOLDED.to_json())


def test_stages_take_the_name_of_a_recipe() -> None:
    for stages in (attention.forward_stages, attention.backward_stages):
        assert stages(FOLDED.name) == stages(FOLDED)
        with pytest.raises(TypeError, match="recipe is None; it must be a Recipe or a name"):
            stages(None)
        with pytest.raises(ValueError, match="unknown recipe 'x'"):
            stages("x")


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
        ("bf16-fa4", "input", "fp16", "input = 'fp16'; computed is 'bf16': inputs and"),
        ("bf16-fa4", "o.tile_order", TileOrder.SHIFTED, "o.tile_order = 'shifted'; computed are"),
        (
            "bf16-fa4",
            "dk.tile_order",
            TileOrder.DESCENDING,
            "one loop over query tiles adds to both",
        ),
        ("bf16-fa4", "tiles.masked", "computed", "has o.right.format = 'bf16'; computed are "),
        ("cudnn-mxfp8", "tiles.masked", "computed", "gradient.heads = 'one_chain'; computed is "),
        ("flamia-mxfp8-folded", "gradient.masked_ds", "product", "gradient.masked_ds = 'product'"),
        ("cudnn-mxfp8", "dk.accumulation", Accumulation.FLOAT32_PARTIALS, "dk.accumulation = "),
        ("cudnn-mxfp8", "o.right.block", (1, 32), "o.right.block = (1, 32)"),
        ("flamia-mxfp8", "o.left.format", "e5m2", "o.left.format = 'e5m2'; computed is 'e4m3'"),
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
