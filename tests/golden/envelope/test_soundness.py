"""No legal variant of a recipe leaves its envelopes; what no order of additions gives is outside.

The variants are the simulator's own with other orders: of instruction steps, of row sums, of delta. They are legal
because these orders are what envelopes leave open.
"""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest

from flamia_ref.attention import RECIPES, Recipe
from flamia_ref.golden.bitwise import values
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.dataflow import dataflow
from flamia_ref.golden.envelope.judging import permitted
from flamia_ref.golden.envelope.record import Permitted
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.simulation import simulate
from flamia_ref.golden.stage import Role, View

PRODUCTS = ("s", "o", "dp", "dv", "dq", "dk")
DAILY = ("flamia-mxfp8-folded", "bf16-fa4", "flamia-mxfp8")
DAILY_CASES = {
    (DAILY[0], "two-tiles"),
    (DAILY[0], "window-cap"),
    (DAILY[1], "sink"),
    (DAILY[2], "peaked"),
    ("cudnn-mxfp8", "wide"),
}


def spec(name: str = "two-tiles", **changed: Any) -> CaseSpec:
    fields: dict[str, Any] = {
        "name": name,
        "why": "orders",
        "lengths": (140, 37),
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 64,
        "causal": True,
        "softmax_scale": 0.25,
        "distribution": Distribution.BELL,
        "seed": 5,
        "exponent": -8,
    }
    return CaseSpec(**fields | changed)


CASES = {
    "two-tiles": spec(),
    "peaked": spec("peaked", exponent=-6, lengths=(60, 130), heads=1),
    "wide": spec("wide", distribution=Distribution.WIDE, exponent=0, lengths=(70,), causal=False),
    "window-cap": spec("window-cap", window=(40, 0), softcap=5.0, lengths=(100,), heads=1),
    "sink": spec("sink", sinks=(0.5, -3.0), lengths=(70, 5)),
}


def variants(recipe: Recipe) -> list[Recipe]:
    """The recipe with every open order turned round, and with one of them."""

    own = [product for product, _ in recipe.products()]

    def turned(names: tuple[str, ...]) -> dict[str, Any]:
        return {
            name: dataclasses.replace(getattr(recipe, name), k_order="descending")
            for name in names
            if name in own
        }

    sums: dict[str, Any] = {"softmax": dataclasses.replace(recipe.softmax, row_sum="ascending")}
    if recipe.has_backward:
        delta = recipe.backward.gradient.delta
        other = "thread_vectors" if delta == "fma_ascending" else delta
        sums["gradient"] = dataclasses.replace(recipe.gradient, delta=other)
    name, none = "variant", ()
    return [
        dataclasses.replace(recipe, name=name, schedules=none, **turned(PRODUCTS), **sums),
        dataclasses.replace(recipe, name=name, schedules=none, **turned(("s", "dp"))),
        dataclasses.replace(recipe, name=name, schedules=none, **sums),
    ]


def bits(x: Any) -> Any:
    x = np.asarray(x)
    return x.view(np.uint32) if x.dtype == np.float32 else x


@cache
def expected(case: str, recipe: str) -> Mapping[str, Any]:
    return simulate(CASES[case], RECIPES[recipe])


def stages(case: str, recipe: Recipe) -> dict[str, Any]:
    """Every stage of a variant as the pack would hold it."""
    found = simulate(CASES[case], recipe)
    places = dataflow(recipe).places(CASES[case])
    return {name: bits(x) for name, x in found.items() if places[name].stage.role is not Role.INPUT}


def outside(
    found: Mapping[str, Permitted], given: Mapping[str, Any], case: str, recipe: str
) -> dict[str, int]:
    """How many elements of each tensor are not permitted."""
    places = dataflow(RECIPES[recipe]).places(CASES[case])
    bad = {}
    for name, of in found.items():
        if name not in places:
            continue
        view = places[name].stage.view
        low, high, x = (values(y, view) for y in (of.low, of.high, given[name]))
        with np.errstate(invalid="ignore"):
            fits = ((x >= low) & (x <= high)) | (np.isnan(x) & (of.nan | np.isnan(low))) | ~of.known
        if not fits.all():
            bad[name] = int(np.count_nonzero(~fits))
    return bad


def every(cases: Mapping[str, CaseSpec], recipes: Any) -> list[Any]:
    rows = []
    for recipe in recipes:
        for case in cases:
            daily = (recipe, case) in DAILY_CASES
            rows.append(
                pytest.param(
                    case, recipe, marks=() if daily else pytest.mark.nightly, id=f"{case}-{recipe}"
                )
            )
    return rows


@pytest.mark.parametrize(("case", "recipe"), every(CASES, RECIPES))
def test_no_variant_is_outside(case: str, recipe: str) -> None:
    for variant in variants(RECIPES[recipe])[: 2 if case == "two-tiles" else 1]:
        given = stages(case, variant)
        # Stage by stage, each judged by what the variant has before it.
        bad = outside(
            permitted(CASES[case], RECIPES[recipe], expected(case, recipe), given),
            given,
            case,
            recipe,
        )
        assert not {name: n for name, n in bad.items() if name not in ("row_max", "row_sum")}
        # By the outputs alone, the gradients after the variant's own out and lse.
        own = {name: given[name] for name in ("out", "lse")}
        wanted = ("out", "lse", *(("dq", "dk", "dv") if RECIPES[recipe].has_backward else ()))
        found = permitted(CASES[case], RECIPES[recipe], expected(case, recipe), own, wanted)
        assert not outside(found, given, case, recipe)


@cache
def of_the_pack(recipe: str) -> tuple[dict[str, Any], dict[str, Permitted]]:
    """The pack's own stages as a kernel would give them, and what is permitted after them."""
    places = dataflow(RECIPES[recipe]).places(CASES["peaked"])
    given = {
        name: bits(x)
        for name, x in expected("peaked", recipe).items()
        if places[name].stage.role is not Role.INPUT
    }
    return given, permitted(CASES["peaked"], RECIPES[recipe], expected("peaked", recipe), given)


@pytest.mark.parametrize("recipe", DAILY[:2])
def test_the_pack_itself_is_inside(recipe: str) -> None:
    given, found = of_the_pack(recipe)
    assert not outside(found, given, "peaked", recipe)
    stages_ = {
        "s.0",
        "p.0",
        "o",
        "out",
        "lse",
        "delta",
        "dp.0",
        "ds.0",
        "dq",
        "dk",
        "dv",
        "row_max",
    }
    assert stages_ <= set(found)


@pytest.mark.parametrize("recipe", DAILY[:2])
def test_envelopes_are_narrow(recipe: str) -> None:
    """Given its inputs a stage has next to no freedom: an envelope that permitted much would be no test."""
    given, found = of_the_pack(recipe)
    places = dataflow(RECIPES[recipe]).places(CASES["peaked"])
    most = {"s.0": 1e-5, "o": 1e-4, "dq": 1e-4, "dk": 1e-4, "dv": 1e-4, "delta": 1e-4}
    for name, width in most.items():
        view = places[name].stage.view
        low, high, exact = (
            values(x, view) for x in (found[name].low, found[name].high, given[name])
        )
        assert np.mean(high - low) < width * np.sqrt(np.mean(exact**2)), name
    # Given P and the scales, codes are what they are.
    for name in ("p.0", "p.o.codes.0", "ds.dq.codes.0", "p.dv.codes.0"):
        assert np.array_equal(found[name].low, found[name].high), name


@pytest.mark.parametrize("name", ["s.0", "o", "delta", "dp.0", "lse", "out", "dq", "dk", "dv"])
def test_what_is_a_little_beyond_is_outside(name: str) -> None:
    """By 2^-12 of each value, or a step of bfloat16: less than any tolerance in use, more than orders can do."""
    recipe = "flamia-mxfp8-folded"
    given, found = of_the_pack(recipe)
    view = dataflow(RECIPES[recipe]).places(CASES["peaked"])[name].stage.view
    moved = dict(given)
    moved[name] = given[name] + (0x800 if view is View.F32 else 1)  # further from zero
    counted = outside({name: found[name]}, moved, "peaked", recipe)[name]
    exact = values(given[name], view)
    of_size = found[name].known & (np.abs(exact) > 0.1 * np.sqrt(np.mean(exact**2)))
    assert counted > 0.97 * np.count_nonzero(of_size)


def test_another_instruction_has_another_envelope() -> None:
    """A device without the recipe's instruction: its sums are inside the envelope of the one that it has."""
    recipe, case = RECIPES["bf16-fa4"], "peaked"
    swapped = dataclasses.replace(
        recipe,
        name="swapped",
        schedules=(),
        **{n: dataclasses.replace(getattr(recipe, n), instruction="float32") for n in PRODUCTS},
    )
    given = stages(case, swapped)
    exact = expected(case, recipe.name)
    own = permitted(CASES[case], recipe, exact, given, instruction="float32")
    assert not {
        n for n in outside(own, given, case, recipe.name) if n not in ("row_max", "row_sum")
    }
    with pytest.raises(ValueError, match="instruction"):
        permitted(CASES[case], recipe, exact, given, instruction="sm80.mma")
