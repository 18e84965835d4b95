"""Cases in memory, and kernels that are wrong in one place, made with the attention API and numpy alone."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from flamia_ref import attention
from flamia_ref.attention import RECIPES, Recipe
from flamia_ref.golden.bitwise import Aligned
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.dataflow import visible_pairs
from flamia_ref.golden.inputs import Distribution
from flamia_ref.golden.mistakes import diagnose
from flamia_ref.golden.recipes import RecipeEntry
from flamia_ref.golden.simulation import simulate
from flamia_ref.golden.stage import Place, Role, View
from flamia_ref.report.model import Diagnosis

FINAL = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, eq=False)
class InMemory:
    """What `diagnose` takes of a case, without files."""

    spec: CaseSpec
    recipe: RecipeEntry
    tensors: Mapping[str, Any]
    places: Mapping[str, Place]

    @property
    def name(self) -> str:
        return f"{self.spec.name}.{self.recipe.recipe['name']}"


def spec(**changes: Any) -> CaseSpec:
    values: dict[str, Any] = {
        "name": "planted",
        "why": "a small case",
        "lengths": (5, 33, 40),
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "causal": True,
        "softmax_scale": 1 / 8,
        "distribution": Distribution.BELL,
        "seed": 5,
        "exponent": -7,
    }
    return CaseSpec(**values | changes)


SPECS = {
    "documents": spec(),
    "wide": spec(lengths=(34, 40), distribution=Distribution.WIDE, exponent=-2, seed=3),
    "d128": spec(
        lengths=(40, 33),
        head_dim=128,
        heads=2,
        kv_heads=1,
        seed=8,
        distribution=Distribution.WIDE,
        exponent=-2,
    ),
    "d192": spec(
        lengths=(40, 33),
        head_dim=192,
        heads=2,
        kv_heads=1,
        seed=10,
        distribution=Distribution.WIDE,
        exponent=-2,
    ),
    "full": spec(lengths=(40, 33), causal=False, seed=6),
    "equal": spec(lengths=(40,), heads=2, kv_heads=2, seed=9),
    "tiles": spec(lengths=(200,), heads=1, kv_heads=1, seed=2, exponent=-6),
    # The last tile of the first document ends before the second document does.
    "stale": spec(lengths=(20, 150, 30), heads=1, kv_heads=1, seed=18),
    "square": spec(lengths=(64,), heads=2, kv_heads=1, seed=12),
    "keys": spec(lengths=(20, 33), key_lengths=(30, 40), seed=13),
    "window": spec(lengths=(33, 40), window=(6, 0), seed=14),
    "two-sided": spec(lengths=(33, 40), causal=False, window=(6, 3), seed=15),
    "capped": spec(lengths=(33, 40), softcap=2.0, seed=16),
    "sink": spec(lengths=(33, 40), sinks=(0.5, 1.0, -1.0, 0.25), seed=17),
}


@cache
def case_of(name: str, recipe: str) -> InMemory:
    """A case of SPECS under a recipe. Nobody may change it."""
    of = SPECS[name]
    entry = RecipeEntry.of(RECIPES[recipe])
    return InMemory(of, entry, simulate(of, RECIPES[recipe]), entry.dataflow.places(of))


def inputs(case: InMemory) -> dict[str, Any]:
    return {
        name: np.array(case.tensors[name]).view(ml_dtypes.bfloat16)
        for name in ("q", "k", "v", "dout")
    }


def settings(case: InMemory) -> dict[str, Any]:
    """The keywords of the forward of a case."""
    of = case.spec
    return {
        "cu_seqlens": of.cu_seqlens,
        "cu_seqlens_k": of.cu_seqlens_k,
        "causal": of.causal,
        "alignment": of.alignment,
        "window": of.window,
        "softmax_scale": of.softmax_scale,
        "softcap": of.softcap,
        "sink": of.sink,
    }


def recipe_of(case: InMemory) -> Recipe:
    return RECIPES[str(case.recipe.recipe["name"])]


def forward(case: InMemory, recipe: Recipe | None = None, **changes: Any) -> dict[str, Any]:
    """Every stage of a forward with something changed, and its outputs."""
    chosen = recipe or recipe_of(case)
    given = inputs(case) | {name: changes.pop(name) for name in ("q", "k", "v") if name in changes}
    ahead = attention.forward(
        given["q"],
        given["k"],
        given["v"],
        chosen,
        trace=attention.forward_stages(chosen),
        **settings(case) | changes,
    )
    return {**ahead.trace, "out": ahead.out, "lse": ahead.lse}


def backward(
    case: InMemory,
    recipe: Recipe | None = None,
    change: Callable[[Any, Any], tuple[Any, Any]] = lambda rows, ahead: (rows, ahead),
    before: Callable[[Any], Any] = lambda ahead: ahead,
    **operands: Any,
) -> dict[str, Any]:
    """Every stage of a backward with something changed, after the right forward, and its outputs.

    `operands` are stages by name, with _ for the dots.
    """
    right, chosen = recipe_of(case), recipe or recipe_of(case)
    given, where = inputs(case), settings(case)
    ahead = attention.forward(
        given["q"], given["k"], given["v"], right, trace=attention.forward_stages(right), **where
    )
    stages = {**ahead.trace, "out": ahead.out, "lse": ahead.lse}
    if attention.stages.kept_for_backward(chosen) != attention.stages.kept_for_backward(right):  # type: ignore[attr-defined]
        saved = attention.forward(given["q"], given["k"], given["v"], chosen, **where).saved
        ahead = dataclasses.replace(ahead, saved=saved)
    ahead = before(dataclasses.replace(ahead, recipe=chosen))
    lengths = {"cu_seqlens": where["cu_seqlens"], "cu_seqlens_k": where["cu_seqlens_k"]}
    prepared = attention.prepare(given["q"], given["k"], given["v"], chosen, **lengths)
    rows = attention.preprocess(given["dout"], ahead)
    rows, ahead = change(rows, ahead)
    back = attention.backward_from_operands(
        prepared, rows, ahead, trace=attention.backward_stages(chosen)
    )
    return {**stages, **back.trace, "dq": back.dq, "dk": back.dk, "dv": back.dv}


def changed(recipe: Recipe, path: str, **fields: Any) -> Recipe:
    """A recipe with fields of one part changed."""

    def inner(part: Any, names: list[str]) -> Any:
        if not names:
            return dataclasses.replace(part, **fields)
        return dataclasses.replace(part, **{names[0]: inner(getattr(part, names[0]), names[1:])})

    return inner(recipe, path.split("."))  # type: ignore[no-any-return]


def bits(value: Any, view: View) -> np.ndarray[Any, Any]:
    """Stored bits of a result."""
    x = np.asarray(value)
    if view is View.F32:
        return np.where(np.isnan(x), np.float32(np.nan), x).astype(np.float32).view(np.uint32)
    if view is View.BF16 and x.dtype != np.uint16:
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x


def aligned(case: InMemory, given: Mapping[str, Any]) -> dict[str, Aligned]:
    """What the check would align: stages by name, lists one tensor a document, single tensors by their own name."""
    found = {}
    for name, place in case.places.items():
        if place.stage.role is Role.INPUT:
            continue
        if name in given:
            value = given[name]
        elif place.stage.name in given and place.document is None:
            value = given[place.stage.name]
        elif place.stage.name in given:
            value = given[place.stage.name][place.document]
        else:
            continue
        expected = np.array(case.tensors[name])
        expected = expected.view(np.uint32) if expected.dtype == np.float32 else expected
        found[name] = Aligned(
            view=place.stage.view, expected=expected, actual=bits(value, place.stage.view)
        )
    return found


def first_of(case: InMemory, given: Mapping[str, Aligned]) -> str:
    """The first tensor that fails."""
    for name, one in given.items():
        differs, place = one.differs(), case.places[name]
        if place.stage.masked_optional:
            differs = differs & (visible_pairs(case.spec, place) | ~one.skipped())
        if differs.any():
            return name
    raise AssertionError("nothing fails: the mistake was not made")


def diagnosed(
    case: InMemory, given: Mapping[str, Any], *, final: bool
) -> tuple[str, tuple[Diagnosis, ...]]:
    """The first tensor that fails, and what is said of it; `final`: of out, lse and the gradients alone."""
    if final:
        given = {name: value for name, value in given.items() if name in FINAL}
    tensors = aligned(case, given)
    first = first_of(case, tensors)
    return first, diagnose(case, tensors, first)  # type: ignore[arg-type]


LOG2_E = math.log2(math.e)
