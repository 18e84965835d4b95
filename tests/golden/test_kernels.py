"""Kernels are found, called with what they take, and their failures are one line."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import golden, kernels
from flamia_ref.attention import RECIPES
from flamia_ref.attention.stages import backward_stages, forward_stages
from flamia_ref.golden.simulator import numpy_kernel
from tests.golden.packs import FIRST, RECIPE


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory to put modules in, forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_kernel_of_the_current_directory_is_found(here: Path) -> None:
    (here / "mine.py").write_text("class A:\n    @staticmethod\n    def run(): return 7\n")
    assert kernels.load("mine:A.run")() == 7
    (here / "folder").mkdir()
    (here / "folder" / "deep.py").write_text("def run(): return 8\n")
    assert kernels.load("folder.deep:run")() == 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nocolon", "must have the form module:function"),
        (":f", "must have the form"),
        ("m:", "must have the form"),
        ("", "must have the form"),
        ("no_such_module:f", "there is no module 'no_such_module' here or installed"),
        ("json.nothing:f", "there is no module 'json.nothing'"),
        ("fine:runn", "unknown function in fine 'runn'; did you mean 'run'"),
        ("fine:run.more", "unknown function in fine 'run.more'"),
        ("fine:number", "is 3, which cannot be called"),
        ("broken:f", r"importing it failed: ZeroDivisionError: .*broken.py:1\)"),
        ("unparsable:f", "importing it failed: SyntaxError"),
        ("leaving:f", "importing it failed: SystemExit: 0"),
        ("needing:f", "importing it failed: ModuleNotFoundError: No module named 'not_there'"),
        ("..:f", "importing it failed|there is no module"),
    ],
)
def test_a_kernel_that_cannot_be_imported(here: Path, name: str, message: str) -> None:
    (here / "fine.py").write_text("def run(): pass\nnumber = 3\n")
    (here / "broken.py").write_text("1 / 0\n")
    (here / "unparsable.py").write_text("def\n")
    (here / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    (here / "needing.py").write_text("import not_there\n")
    with pytest.raises(kernels.KernelError, match=message) as caught:
        kernels.load(name)
    assert "\n" not in str(caught.value)


def test_what_a_kernel_is_called_with(made: Path) -> None:
    case = golden.load(made)[FIRST]
    seen: dict[str, Any] = {}

    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> dict[str, Any]:
        seen.update(keywords, q=q, k=k, v=v)
        return numpy_kernel(q, k, v, **keywords)

    assert golden.check(case, kernel).passed
    assert seen["q"].dtype == seen["k"].dtype == seen["v"].dtype == ml_dtypes.bfloat16
    assert (seen["q"].shape, seen["k"].shape) == ((37, 2, 32), (37, 1, 32))
    assert seen["cu_seqlens"].tolist() == [0, 2, 2, 37]
    assert seen["cu_seqlens"].dtype == np.int32
    assert seen["causal"] is True
    assert seen["softmax_scale"] == case.spec.softmax_scale
    assert seen["recipe"] == RECIPE
    assert seen["dout"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(seen["dout"].view(np.uint16), case.tensors["dout"])
    recipe = RECIPES[RECIPE]
    assert set(seen["trace"]) == {*forward_stages(recipe), *backward_stages(recipe)}
    assert set(seen) == {
        "q",
        "k",
        "v",
        "cu_seqlens",
        "causal",
        "softmax_scale",
        "dout",
        "recipe",
        "recipe_json",
        "trace",
    }


def test_a_plain_kernel_gets_plain_arguments(made: Path) -> None:
    def kernel(
        q: Any,
        k: Any,
        v: Any,
        *,
        cu_seqlens: Any,
        causal: bool,
        softmax_scale: float,
        window: Any = None,
        softcap: Any = None,
        dout: Any = None,
    ) -> dict[str, Any]:
        assert window is softcap is None
        return numpy_kernel(
            q, k, v, cu_seqlens=cu_seqlens, causal=causal, softmax_scale=softmax_scale, dout=dout
        )

    (first, _) = golden.check(made, kernel).cases
    assert first.passed
    assert first.not_given[0] == "q.scales"
    assert {"do.codes", "ds"} <= set(first.not_given)
    assert not {"dq", "dk", "dv"} & set(first.not_given)
    assert first.note == ""


def test_a_kernel_without_a_backward_is_not_given_dout(made: Path) -> None:
    def kernel(
        q: Any, k: Any, v: Any, *, cu_seqlens: Any, causal: bool, softmax_scale: float
    ) -> Any:
        return numpy_kernel(
            q, k, v, cu_seqlens=cu_seqlens, causal=causal, softmax_scale=softmax_scale
        )

    report = golden.check(made, kernel)
    assert report.passed
    assert {case.note for case in report.cases} == {
        "forward only: nothing of the backward was given"
    }
    assert "    forward only: nothing of the backward was given" in report.to_text()


def test_a_kernel_may_scribble_on_its_inputs(made: Path) -> None:
    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> dict[str, Any]:
        results = numpy_kernel(q, k, v, **keywords)
        for array in (q, k, v, keywords["cu_seqlens"], keywords["dout"]):
            array[:] = 0
        return results

    pack = golden.load(made)
    assert golden.check(pack, kernel).passed
    assert golden.check(pack, kernel).passed


def test_a_compiled_function_without_a_signature_gets_the_least() -> None:
    class Opaque:
        @property
        def __signature__(self) -> Any:
            raise ValueError("no signature")

        def __call__(self, *tensors: Any, **keywords: Any) -> dict[str, Any]:
            return {"keywords": sorted(keywords)}

    results = kernels.call(
        Opaque(), 1, 2, 3, case="c", cu_seqlens=0, causal=True, softmax_scale=1.0, trace=()
    )
    assert results == {"keywords": ["causal", "cu_seqlens", "softmax_scale"]}


def failing(*_: Any, **__: Any) -> dict[str, Any]:
    raise RuntimeError("CUDA error:\n  misaligned address")


def leaving(*_: Any, **__: Any) -> dict[str, Any]:
    sys.exit(0)


def narrow(q: Any, k: Any, v: Any) -> dict[str, Any]:
    raise AssertionError("never called")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (
            failing,
            r"failed in case tiny.*: RuntimeError: CUDA error: misaligned address \(.*:\d+\)",
        ),
        (leaving, "failed in case tiny.*: SystemExit: 0"),
        (narrow, "cannot be called with .* unexpected keyword argument"),
        (lambda *_, **__: None, "returned 'NoneType' in case tiny"),
        (lambda *_, **__: (1, 2), "returned 'tuple'"),
        (lambda *_, **__: {1: 2}, "returned 'dict'"),
    ],
)
def test_a_kernel_that_fails(made: Path, kernel: Any, message: str) -> None:
    with pytest.raises(kernels.KernelError, match=message) as caught:
        golden.check(made, kernel)
    assert "\n" not in str(caught.value)
