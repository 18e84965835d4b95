"""Packs of recipes without a backward, and of one whose lse no kernel returns: what a check asks for and says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref import attention, golden
from flamia_ref.report.model import Status

NO_BACKWARD = "forward alone: this recipe has no backward"
SMOOTHED = (
    "lse not given: this recipe's is that of the smoothed scores, which a kernel need not return"
)
RECIPES = ("cutlass-fp8", "sage3-nvfp4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small cases of both recipes."""
    made = tmp_path_factory.mktemp("forward-only") / "pack"
    golden.make(made, RECIPES, suite="tiny")
    return made


@pytest.fixture(autouse=True)
def _tiny(tiny_suite: None) -> None:
    """`golden.make` knows the small cases."""


def kernel(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any,
    causal: Any,
    softmax_scale: Any,
    recipe: Any,
    dout: Any = None,
) -> Any:
    """A right kernel that gives every gradient there can be, of NaN and another at each call."""
    assert dout is None
    settings = {"cu_seqlens": cu_seqlens, "causal": causal, "softmax_scale": softmax_scale}
    found = attention.forward(q, k, v, recipe, **settings)
    noise = np.random.default_rng().standard_normal(q.shape).astype(np.float32)
    gradients = {"dq": noise, "dk": np.full(k.shape, np.nan, np.float32), "dsink": np.zeros(2)}
    return {"out": found.out, "lse": found.lse, **gradients}


def outputs(
    q: Any, k: Any, v: Any, *, cu_seqlens: Any, causal: Any, softmax_scale: Any, recipe: Any
) -> Any:
    """One that gives out alone."""
    settings = {"cu_seqlens": cu_seqlens, "causal": causal, "softmax_scale": softmax_scale}
    return {"out": attention.forward(q, k, v, recipe, **settings).out}


def test_gradients_beside_a_forward_are_named_and_not_compared(folder: Path) -> None:
    report = golden.check(folder, kernel, repeats=2)
    assert report.passed
    for case in report.cases:
        assert case.note == f"{NO_BACKWARD}; given and not compared: dk, dq, dsink"
        assert [one.name for one in case.tensors] == ["out", "lse"]
    for name in RECIPES:
        assert f"note: {name}: {NO_BACKWARD}, no gradient was checked" in str(report).splitlines()
    assert NO_BACKWARD in json.loads(report.to_json())["notes"][0]


def test_other_names_beside_a_forward_do_not_pass(folder: Path) -> None:
    case = golden.load(folder)["tiny.cutlass-fp8"]
    given = {name: case.tensors[name].copy() for name in ("out", "lse")}
    report = golden.check(case, {case.name: given | {"dqq": given["out"]}})
    assert [one.status for one in report.cases] == [Status.UNKNOWN]
    assert golden.check(case, {case.name: given}).cases[0].note == NO_BACKWARD


def test_lse_is_owed_but_where_it_is_of_smoothed_scores(folder: Path) -> None:
    report = golden.check(folder, outputs)
    for case in report.cases:
        smoothed = case.name.endswith("sage3-nvfp4")
        assert case.status is (Status.PASS if smoothed else Status.MISSING)
        assert (SMOOTHED in case.note) is smoothed
    case = golden.load(folder)["tiny.sage3-nvfp4"]
    lse = case.tensors["lse"].copy()
    with pytest.raises(ValueError, match="hold no stage and no output"):
        golden.check(case, {case.name: {"dq": lse}})
    found = golden.check(case, {case.name: {"lse": lse}}).cases[0]
    assert (found.status, found.tensors[-1].name) == (Status.MISSING, "out")
    lse.view(np.uint32)[0, 1] ^= 1 << 20
    out = case.tensors["out"].copy()
    found = golden.check(case, {case.name: {"out": out, "lse": lse}}).cases[0]
    assert (found.failed, found.departs) == (True, "lse")  # what is given is compared
