"""Results and kernels that mean harm, or are merely odd: one verdict or one line, never a pass."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flamia_ref import golden, kernels
from flamia_ref.golden.simulator import numpy_kernel
from tests.golden.packs import (
    FIRST,
    SECOND,
    flip,
    forge,
    read_safetensors,
    results,
    typed,
    write_safetensors,
)


@pytest.fixture
def case(made: Path) -> golden.Case:
    return golden.load(made)[FIRST]


@pytest.mark.parametrize("list_first", [True, False])
@pytest.mark.parametrize("by_kernel", [True, False])
def test_a_tensor_that_is_given_twice(case: golden.Case, list_first: bool, by_kernel: bool) -> None:
    given = results(case)
    wrong = np.zeros_like(given["s.0"])
    whole = [given.pop(f"s.{document}") for document in range(3)]
    twice: dict[str, Any] = {"s": whole, "s.0": wrong} if list_first else {"s.0": wrong, "s": whole}
    actual: Any = (lambda *_, **__: given | twice) if by_kernel else {FIRST: given | twice}
    with pytest.raises(ValueError, match=r"^s\.0 of tiny.* is given twice"):
        golden.check(case, actual)


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


ENDINGS: list[BaseException] = [
    asyncio.CancelledError("away"),
    GeneratorExit("away"),
    SystemExit(0),
    StopIteration("away"),
    pytest.skip.Exception("away"),
    RecursionError("away"),
    Unreadable(),
    RuntimeError("\x1b[2Jaway\nand more"),
]


@pytest.mark.parametrize("error", ENDINGS, ids=lambda error: type(error).__name__)
def test_whatever_a_kernel_raises_is_one_line(case: golden.Case, error: BaseException) -> None:
    def kernel(*_: Any, **__: Any) -> Any:
        raise error

    with pytest.raises(kernels.KernelError, match=rf"failed in case {FIRST}: ") as caught:
        golden.check(case, kernel)
    assert type(error).__name__ in str(caught.value)
    assert "test_hostile_results.py:" in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("error", ENDINGS, ids=lambda error: type(error).__name__)
def test_whatever_an_array_raises_is_one_line(case: golden.Case, error: BaseException) -> None:
    class Odd:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise error

    with pytest.raises(TypeError, match=f"^lse of {FIRST} is no array: ") as caught:
        golden.check(case, {FIRST: results(case) | {"lse": Odd()}})
    assert str(caught.value).isprintable()


def test_whatever_an_import_raises_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone_kernel.py").write_text("import asyncio\nraise asyncio.CancelledError\n")
    (tmp_path / "odd_kernel.py").write_text("def __getattr__(name):\n    raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(kernels.KernelError, match="importing it failed: CancelledError"):
        kernels.load("gone_kernel:f")
    with pytest.raises(kernels.KernelError, match="importing it failed: SystemExit"):
        kernels.load("odd_kernel:f")


def test_ctrl_c_is_the_user(case: golden.Case) -> None:
    def kernel(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        golden.check(case, kernel)


def test_results_that_raise_when_they_are_read(case: golden.Case) -> None:
    class Odd(dict[str, Any]):
        def __iter__(self) -> Iterator[str]:
            raise RuntimeError("not iterable")

    with pytest.raises(kernels.KernelError, match="RuntimeError: not iterable"):
        golden.check(case, lambda *_, **__: Odd())


@pytest.mark.parametrize("given", [None, [], 3, "out", {1: np.zeros(3)}, np.zeros(3)])
def test_results_that_are_no_dict(case: golden.Case, given: Any) -> None:
    with pytest.raises(TypeError, match=f"the results of {FIRST} are '.*'; give a dict") as caught:
        golden.check(case, {FIRST: given})
    assert "\n" not in str(caught.value)


def test_signalling_nan_is_compared_like_any_other(case: golden.Case) -> None:
    given = results(case)
    given["lse"].view(np.uint32)[0, 0] = 0x7FA00000
    given["out"][0, 0, 0] = 0x7F90
    report = golden.check(case, {FIRST: given})
    assert report.cases[0].departs == "out"
    assert "NaN" in report.to_text() or "nan" in report.to_text()


def test_a_kernel_may_make_numpy_raise(made: Path) -> None:
    def kernel(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        given = numpy_kernel(q, k, v, **keywords)
        np.seterr(all="raise")
        lse = given["lse"].view(np.uint32).copy()
        lse[0, 0] = 0x7FA00000
        out = given["out"].copy()
        out[0, 0, 0] = np.float32(3e38)
        return given | {"lse": lse, "out": out}

    with np.errstate():
        (first, _) = golden.check(made, kernel).cases
    assert first.departs == "out"


def test_names_are_printed_so_that_a_terminal_shows_them(made: Path, tmp_path: Path) -> None:
    pack = golden.load(made)
    case = pack[FIRST]
    name = "\x1b[2Js\nPASS: 2 cases: 2 pass\u202e"
    text = golden.check(case, {FIRST: results(case) | {name: np.zeros(3)}}).to_text()
    write_safetensors(
        tmp_path / f"{FIRST}.safetensors",
        typed(results(case)) | {name: ("U8", np.zeros(3, np.uint8))},
    )
    for found in (text, golden.check(made, tmp_path).to_text()):
        assert "unknown tensor" in found
        assert all(line.isprintable() for line in found.split("\n"))
        assert not any(line.startswith("PASS") for line in found.split("\n"))


def test_the_pack_is_verified_before_a_kernel_runs(pack: Path) -> None:
    file = pack / f"{SECOND}.safetensors"
    flip(file, file.stat().st_size - 1)
    called = []

    def kernel(*tensors: Any, **keywords: Any) -> Any:
        called.append(1)
        return numpy_kernel(*tensors, **keywords)

    with pytest.raises(ValueError, match="was changed since it was written"):
        golden.check(pack, kernel)
    assert not called
    # The case that is whole can be checked alone.
    assert golden.check(golden.load(pack)[FIRST], kernel).passed


def test_what_belongs_to_no_case_is_noted(made: Path, tmp_path: Path) -> None:
    case = golden.load(made)[FIRST]
    report = golden.check(case, {FIRST: results(case), "tiny\n.other": {}})
    assert report.passed
    assert report.notes == (r"results that belong to no case here: 'tiny\n.other'",)
    write_safetensors(tmp_path / f"{FIRST}.safetensors", typed(results(case)))
    write_safetensors(tmp_path / "tiny.safetensors", typed(results(case)))
    (tmp_path / "README.md").write_text("no results")
    (note,) = golden.check(made, tmp_path).notes
    assert note == f"files in {tmp_path} that belong to no case here: 'tiny.safetensors'"


def test_a_file_with_a_tensor_twice_is_no_file(made: Path, tmp_path: Path) -> None:
    tensors = read_safetensors(made / f"{FIRST}.safetensors")
    path = tmp_path / f"{FIRST}.safetensors"
    write_safetensors(path, typed({"lse": tensors["lse"], "zzz": tensors["lse"] + 1}))
    path.write_bytes(path.read_bytes().replace(b'"zzz"', b'"lse"'))
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        golden.check(made, tmp_path)


@pytest.mark.parametrize("name", ["a" * 300, "no\0such"])
@pytest.mark.parametrize(
    "open_it",
    [
        golden.load,
        lambda path: golden.make(Path(path) / "pack"),
        lambda path: golden.make(path, force=True),
    ],
)
def test_a_folder_that_the_system_refuses(
    tmp_path: Path, name: str, open_it: Callable[[Any], Any]
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        open_it(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_actual_results_that_the_system_refuses(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*File name too long"):
        golden.check(made, tmp_path / ("a" * 300))


def test_another_numerics_version_is_said(pack: Path) -> None:
    forge(pack, lambda document: document.update(numerics_version=2))
    report = golden.check(pack, numpy_kernel)
    assert report.passed
    (note,) = report.notes
    assert note.startswith("the pack has numerics version 2, this version has 1")
    assert f"note: {note}" in report.to_text()


def test_a_pack_is_found_from_another_folder(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made.parent)
    pack = golden.load(made.name)
    monkeypatch.chdir(tmp_path)
    assert pack.folder == made
    assert pack[FIRST].tensors
