"""Kernels that work in stages are given the pack's bytes, and held to the same pack."""

import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import golden, kernels
from flamia_ref._errors import Registry
from flamia_ref.golden import calls, making
from flamia_ref.golden.actual import from_kernel
from flamia_ref.golden.simulator import numpy_kernel
from flamia_ref.report.model import Status
from tests.golden import staged_kernels
from tests.golden.packs import FIRST, RECIPE, spec

WHOLE = kernels.Staged(
    quantize=staged_kernels.quantize,
    forward=staged_kernels.forward,
    backward=staged_kernels.backward,
)

MASKED = (
    spec(name="keys", key_lengths=(5, 3, 40), alignment="top_left"),
    spec(name="masked", sinks=(1.0, -0.5), window=(8, 0), softcap=20.0),
)


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> golden.Pack:
    """A pack of cases that have all that a case can have."""
    folder = tmp_path_factory.mktemp("masked") / "pack"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "SUITES", Registry("suite", [("masked", MASKED)]))
        golden.make(folder, [RECIPE, "cudnn-mxfp8"], suite="masked")
    return golden.load(folder)


@pytest.fixture
def case(made: Path) -> golden.Case:
    return golden.load(made)[FIRST]


def test_all_stages_pass(made: Path) -> None:
    report = golden.check(made, WHOLE)
    assert report.passed, str(report)
    (first, _) = report.cases
    assert first.not_given == ("do.scales", "do.codes")
    assert {"q.codes", "s.0", "out", "delta", "ds.2", "dq"} <= {one.name for one in first.tensors}
    assert report.subject == (
        "tests.golden.staged_kernels:quantize, tests.golden.staged_kernels:forward, "
        "tests.golden.staged_kernels:backward"
    )


def test_with_every_kind_of_mask(masked: golden.Pack) -> None:
    report = golden.check(masked, WHOLE)
    assert report.passed, str(report)
    assert len(report.cases) == 4


@pytest.mark.nightly
def test_every_recipe(every: golden.Pack) -> None:
    report = golden.check(every, WHOLE)
    assert report.passed, str(report)


def test_a_fault_of_one_stage_is_not_in_the_next(case: golden.Case) -> None:
    def quantize(
        q: Any, k: Any, v: Any, *, cu_seqlens: Any, recipe_json: str, trace: Any
    ) -> dict[str, Any]:
        found = staged_kernels.quantize(
            q, k, v, cu_seqlens=cu_seqlens, recipe_json=recipe_json, trace=trace
        )
        return found | {"q.codes": found["q.codes"] ^ np.uint8(1)}

    kernel = kernels.Staged(quantize=quantize, forward=staged_kernels.forward)
    (result,) = golden.check(case, kernel).cases
    assert result.departs == "q.codes"
    assert [one.name for one in result.tensors if one.status is not Status.PASS] == ["q.codes"]


def test_what_a_forward_and_a_backward_are_given(case: golden.Case) -> None:
    seen: dict[str, Any] = {}

    def forward(operands: Any, *, cu_seqlens: Any, causal: Any, softmax_scale: Any) -> Any:
        seen["forward"] = operands
        return {"out": case.tensors["out"].copy(), "lse": case.tensors["lse"].copy()}

    def backward(
        operands: Any,
        *,
        cu_seqlens: Any,
        causal: Any,
        softmax_scale: Any,
        out: Any,
        lse: Any,
        dout: Any,
        row_max: Any,
        delta: Any,
    ) -> Any:
        seen.update(backward=operands, out=out, lse=lse, dout=dout, row_max=row_max, delta=delta)
        return {}

    assert golden.check(case, kernels.Staged(forward=forward, backward=backward)).passed
    documents = len(case.spec.lengths)
    ahead, back = seen["forward"], seen["backward"]
    assert set(ahead) == {
        "q",
        "k",
        "v",
        *(f"{x}.{part}" for x in "qkv" for part in ("codes", "scales", "scales.tiled")),
    }
    assert set(back) - set(ahead) == {
        "dout",
        "do.codes",
        "do.scales",
        "do.scales.tiled",
    }
    for operands in (ahead, back):
        for name, x in operands.items():
            if isinstance(x, list):
                assert len(x) == documents
                pairs = [(array, case.tensors[f"{name}.{n}"]) for n, array in enumerate(x)]
            else:
                pairs = [(x, case.tensors[name])]
            for array, expected in pairs:
                assert np.array_equal(array.view(expected.dtype), expected), name
                assert not np.shares_memory(array, expected)
                assert array.flags.writeable
    assert ahead["q"].dtype == seen["out"].dtype == seen["dout"].dtype == ml_dtypes.bfloat16
    for name in ("out", "lse", "dout", "row_max", "delta"):
        expected = case.tensors[name]
        assert np.array_equal(seen[name].view(expected.dtype), expected)


def test_what_is_handed_is_no_suspect(case: golden.Case) -> None:
    backward = kernels.Staged(backward=staged_kernels.backward)
    results = from_kernel({case.name: case}, backward)
    assert results.owed == ()
    assert {"q.codes", "q.scales", "do.codes", "out", "lse"} <= results.handed(case)
    assert not {"row_max", "delta", "s", "p.dv"} & results.handed(case)
    quantizer = kernels.Staged(quantize=staged_kernels.quantize)
    assert calls.handed(case, quantizer) == frozenset()


@pytest.mark.parametrize("keyword", ["sink", "window", "softcap", "cu_seqlens_k", "alignment"])
def test_a_kernel_that_does_not_take_what_a_case_has(masked: golden.Pack, keyword: str) -> None:
    name = "keys" if keyword in ("cu_seqlens_k", "alignment") else "masked"
    case = masked[f"{name}.{RECIPE}"]
    needed = ("cu_seqlens_k", "alignment") if name == "keys" else ("window", "softcap", "sink")
    names = [one for one in needed if one != keyword]
    scope: dict[str, Any] = {}
    text = ", ".join(("cu_seqlens", "causal", "softmax_scale", *names))
    exec(f"def kernel(q, k, v, *, {text}): raise AssertionError('never called')", scope)
    with pytest.raises(kernels.Unsupported, match=f"takes no {keyword}, which case {name}") as no:
        calls.whole(case, scope["kernel"])
    assert no.value.note == f"takes no {keyword}"
    seen: dict[str, Any] = {}

    def whole(q: Any, k: Any, v: Any, **settings: Any) -> Any:
        seen.update(settings)
        return numpy_kernel(q, k, v, **settings)

    assert golden.check(case, whole).passed
    assert {one for one in (*MASKS, "sink") if one in seen} == set(needed)


MASKS = ("cu_seqlens_k", "alignment", "window", "softcap")


def test_staged_kernels_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "split_kernels.py").write_text(
        "import types\n"
        "def forward(operands, **settings): return {}\n"
        "class Mine:\n    @staticmethod\n    def backward(operands, **settings): return {}\n"
        "instance = Mine()\n"
        "space = types.SimpleNamespace(forward=forward)\n"
    )
    for name, parts in (("Mine", ["backward"]), ("instance", ["backward"]), ("space", ["forward"])):
        found = kernels.load(f"split_kernels:{name}")
        assert isinstance(found, kernels.Staged)
        assert list(found.parts) == parts
    (tmp_path / "whole_package").mkdir()
    (tmp_path / "whole_package" / "__init__.py").write_text("from whole_package import mxfp8\n")
    (tmp_path / "whole_package" / "mxfp8.py").write_text("def quantize(q, k, v, **x): return {}\n")
    found = kernels.load("whole_package:mxfp8")
    assert isinstance(found, kernels.Staged)
    assert found.name == "whole_package.mxfp8"


def test_an_object_that_can_be_called_is_a_kernel_as_a_whole() -> None:
    class Module:
        def forward(self) -> None: ...

        def __call__(self) -> None: ...

    assert kernels.staged(Module()) is None
    assert kernels.staged(numpy_kernel) is None
    assert kernels.staged(3) is None
    assert kernels.staged(types.SimpleNamespace(forward=None)) is None


def test_errors(case: golden.Case) -> None:
    with pytest.raises(kernels.KernelError, match="has quantize or forward or backward; give at"):
        kernels.Staged()
    with pytest.raises(kernels.KernelError, match="forward is 3, which cannot be called"):
        kernels.Staged(forward=3)  # type: ignore[arg-type]
    with pytest.raises(kernels.KernelError, match="works in stages, on the operands of a pack"):
        WHOLE(1, 2, 3)
    twice = kernels.Staged(
        quantize=staged_kernels.quantize, forward=lambda *_, **__: {"q.codes": 1}
    )
    with pytest.raises(kernels.KernelError, match=r"forward gives q.codes .* which quantize gives"):
        golden.check(case, twice)

    def narrow(operands: Any) -> dict[str, Any]:
        return {}

    with pytest.raises(kernels.KernelError, match=r"cannot be called with \(operands, \*, cu_seq"):
        golden.check(case, kernels.Staged(forward=narrow))
