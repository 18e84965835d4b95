"""Arrays of the libraries that kernels use: the same bits both ways."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flamia_ref import golden
from flamia_ref.golden import arrays
from flamia_ref.golden.stage import View
from tests.golden.packs import FIRST

CODES = np.arange(256, dtype=np.uint8)
PATTERNS = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture
def case(made: Any) -> golden.Case:
    return golden.load(made)[FIRST]


def test_numpy(case: golden.Case) -> None:
    inputs = arrays.inputs_for(case)
    assert list(inputs) == ["cu_seqlens", "q", "k", "v", "dout"]
    assert {str(x.dtype) for x in inputs.values()} == {"bfloat16", "int32"}
    for name, x in inputs.items():
        assert np.array_equal(x.view(case.tensors[name].dtype), case.tensors[name])
        assert x.flags.writeable
        assert not np.shares_memory(x, case.tensors[name])
    plain = arrays.inputs_for(case, typed=False)
    assert plain["q"].dtype == np.uint16
    operands = arrays.operands_for(case)
    assert {"q.codes", "q.scales", "q.scales.tiled.0", "do.codes", "v.codes"} <= set(operands)
    assert not {"p.o.codes", "s.0", "out", "ds.dq.codes"} & set(operands)
    assert {x.dtype for x in operands.values()} == {np.dtype(np.uint8)}
    typed = arrays.operands_for(case, typed=True)
    assert typed["q.codes"].dtype == ml_dtypes.float8_e4m3fn
    assert typed["q.scales"].dtype == ml_dtypes.float8_e8m0fnu


def test_jax(case: golden.Case) -> None:
    jax = pytest.importorskip("jax")
    for typed in (False, True):
        made = arrays.inputs_for(case, "jax", "cpu:0", typed=typed)
        made |= arrays.operands_for(case, "jax", typed=typed)
        for name, x in made.items():
            assert isinstance(x, jax.Array)
            back, expected = arrays.to_host(x), case.tensors[name]
            assert np.array_equal(back.view(expected.dtype), expected), name


class Cupy:
    """CuPy's interface, as far as it is used, on the host: nothing here was run on CuPy itself."""

    class ndarray:
        def __init__(self, array: Any) -> None:
            self.array = array

        def get(self) -> Any:
            return self.array.copy()

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise TypeError("Implicit conversion to a NumPy array is not allowed.")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("memory of a GPU")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    used: list[int] = []

    class Device:
        def __init__(self, number: int) -> None:
            self.number = number

        def __enter__(self) -> None:
            used.append(self.number)

        def __exit__(self, *_: object) -> None:
            pass

    module: Any = types.ModuleType("cupy")
    Cupy.ndarray.__module__ = "cupy"
    module.ndarray, module.cuda = Cupy.ndarray, types.SimpleNamespace(Device=Device)
    module.asarray = Cupy.ndarray
    monkeypatch.setitem(sys.modules, "cupy", module)
    return used


def test_cupy_by_its_interface(case: golden.Case, cupy: list[int]) -> None:
    made = arrays.inputs_for(case, "cupy", "cuda:1") | arrays.operands_for(case, "cupy")
    assert cupy == [1] * 5
    for name, x in made.items():
        assert type(x).__name__ == "ndarray"
        assert np.array_equal(arrays.to_host(x), case.tensors[name]), name
    outputs = {name: Cupy.ndarray(case.tensors[name].copy()) for name in ("out", "lse", "q.codes")}
    assert golden.check(case, {case.name: outputs}).passed


def test_dlpack() -> None:
    class Anything:
        def __init__(self, device: int) -> None:
            self.array, self.device = np.arange(6, dtype=np.float32), device

        def __dlpack_device__(self) -> tuple[int, int]:
            return (self.device, 0)

        def __dlpack__(self, **keywords: Any) -> Any:
            return self.array.__dlpack__(**keywords)

    assert arrays.to_host(Anything(1)).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(TypeError, match="'Anything' is not in the memory of the host; copy it"):
        arrays.to_host(Anything(2))


@pytest.mark.parametrize(
    ("library", "device", "message"),
    [
        ("torhc", None, "unknown library 'torhc'; did you mean 'torch'"),
        ("numpy", "cuda", "numpy has no device 'cuda'"),
        ("not_there", None, "unknown library"),
    ],
)
def test_what_cannot_be_had(case: golden.Case, library: str, device: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        arrays.inputs_for(case, library, device)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_a_library_that_is_not_installed(
    case: golden.Case, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=f"{library} cannot hold the arrays of tiny.*; install it"):
        arrays.inputs_for(case, library)


def test_torch_inputs_and_operands(case: golden.Case) -> None:
    torch = pytest.importorskip("torch")
    for typed in (False, True):
        made = arrays.inputs_for(case, "torch", "cpu", typed=typed)
        made |= arrays.operands_for(case, "torch", typed=typed)
        for name, x in made.items():
            assert torch.is_tensor(x)
            expected = case.tensors[name]
            assert np.array_equal(arrays.to_host(x).view(expected.dtype), expected), name
    assert made["q"].dtype == torch.bfloat16
    assert made["q.codes"].dtype == torch.float8_e4m3fn
    assert made["q.scales"].dtype == torch.float8_e8m0fnu


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_every_torch_byte(name: str) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(CODES.copy()).view(getattr(torch, name)).reshape(16, 16)
    back = arrays.to_host(x)
    assert back.dtype == getattr(ml_dtypes, name)
    assert np.array_equal(back.view(np.uint8), CODES.reshape(16, 16))
    assert np.array_equal(arrays.to_host(x.t()).view(np.uint8), CODES.reshape(16, 16).T)
    assert np.array_equal(
        arrays.to_host(x[::2, 1::3]).view(np.uint8), CODES.reshape(16, 16)[::2, 1::3]
    )


def test_every_torch_bfloat16_and_its_gradient() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(PATTERNS.view(np.int16).copy()).view(torch.bfloat16).reshape(256, 256)
    x.requires_grad_(True)
    assert np.array_equal(arrays.to_host(x).view(np.uint16), PATTERNS.reshape(256, 256))
    assert np.array_equal(arrays.to_host(x.t()).view(np.uint16), PATTERNS.reshape(256, 256).T)
    assert arrays.to_host(x * 1).dtype == ml_dtypes.bfloat16
    negated = torch.view_as_complex(torch.ones(3, 2)).conj().imag
    assert arrays.to_host(negated).tolist() == [-1, -1, -1]


def test_fp4_in_torch_has_the_first_code_below() -> None:
    torch = pytest.importorskip("torch")
    pair = torch.tensor([[0x21, 0xF7]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert arrays.to_host(pair).tolist() == [[1, 2, 7, 15]]
    made = arrays._torch(np.array([[1, 2, 7, 15]], np.uint8), View.F4_E2M1, None)
    assert made.view(torch.uint8).tolist() == [[0x21, 0xF7]]


def test_torch_tensors_without_plain_data_are_refused() -> None:
    torch = pytest.importorskip("torch")
    for x in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        with pytest.raises(TypeError, match="is no plain array; give a dense one"):
            arrays.to_host(x)
