"""Arrays of the libraries that kernels use: inputs of a case for them, and what they give as numpy.

Bits pass unchanged both ways, through unsigned integers or DLPack. No library is imported but the one
that is asked for; an array is known by the module of its type.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from flamia_ref._errors import Registry, line, shown
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.stage import View

if TYPE_CHECKING:
    from flamia_ref.golden.pack import Case

# The types of ml_dtypes that hold what numpy has no type for.
_TYPED: Mapping[View | None, Any] = {
    View.BF16: ml_dtypes.bfloat16,
    View.F8_E4M3: ml_dtypes.float8_e4m3fn,
    View.F8_E8M0: ml_dtypes.float8_e8m0fnu,
    View.F8_UE4M3: ml_dtypes.float8_e4m3fn,  # no library has the type without the sign
}

# Types of PyTorch by name, and what numpy calls the same bits.
_TORCH_BITS = {
    "bfloat16": ("int16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
    "float8_e8m0fnu": ("uint8", ml_dtypes.float8_e8m0fnu),
}
_TORCH_OF = {
    View.BF16: "bfloat16",
    View.F8_E4M3: "float8_e4m3fn",
    View.F8_E8M0: "float8_e8m0fnu",
    View.F8_UE4M3: "float8_e4m3fn",
    View.F4_E2M1: "float4_e2m1fn_x2",
}

_CPU, _PINNED = 1, 3  # devices of DLPack whose memory a host reads


def inputs_for(
    case: "Case", library: str = "numpy", device: Any = None, *, typed: bool = True
) -> dict[str, Any]:
    """Return copies of the inputs of a case as arrays of a library, to call a kernel with.

    They are q, dout [tokens, heads, head_dim], k, v [tokens, kv_heads, head_dim] in bfloat16,
    `cu_seqlens` int32 [documents + 1] and, where the case has them, `cu_seqlens_k` and `sink`.
    CuPy has no bfloat16: there they are its bits in uint16.

    Args:
        case: a case of a pack.
        library: "numpy", "torch", "jax" or "cupy".
        device: what the library calls a device ("cuda", "cuda:1", "gpu", 0); the library's own choice
            if None. numpy has none.
        typed: False gives bfloat16 as its bits, uint16.

    Raises ValueError for an unknown library, one that is not installed, and a device that it has not.
    """
    from flamia_ref.golden.stage import Role

    names = [name for name, place in case.places.items() if place.stage.role is Role.INPUT]
    return arrays_for(case, names, library, device, typed=typed)


def operands_for(
    case: "Case", library: str = "numpy", device: Any = None, *, typed: bool = False
) -> dict[str, Any]:
    """Return copies of what the contractions of a case take, in a library: codes and scales by name.

    They are "q.codes", "q.scales", "k.s.codes", ..., of q, k, v and dO, as the recipe has them, and
    for each document the scales in 128x4 tiles, "q.scales.tiled.0".

    Args are those of `inputs_for`. `typed` gives float8_e4m3fn, float8_e8m0fnu and, in PyTorch where
    the channels are even, float4_e2m1fn_x2, which holds two codes a byte, the first one lower; else
    codes and scales are uint8, FP4 one code a byte, and bfloat16 codes uint16.
    """
    return arrays_for(case, operand_names(case), library, device, typed=typed)


def operand_names(case: "Case") -> list[str]:
    """Return the tensors of a case that are codes or scales of q, k, v or dO."""
    tensors = ("q", "k", "v", "do")
    parts = ("codes", "scales", "token_scales")
    return [
        name
        for name in case.places
        if name.split(".")[0] in tensors and set(parts) & set(name.split("."))
    ]


def arrays_for(
    case: "Case", names: list[str], library: str, device: Any, *, typed: bool
) -> dict[str, Any]:
    """Return copies of some tensors of a case in a library, by their names."""
    make = _LIBRARIES[library]
    with _one_line(f"{library} cannot hold the arrays of {case}"):
        return {
            name: make(
                case.tensors[name].copy(), case.places[name].stage.view if typed else None, device
            )
            for name in names
        }


def to_host(x: Any) -> Tensor:
    """Return an array of any library, on any device, as a numpy array of the same bits.

    Types that numpy has not are those of ml_dtypes; PyTorch's float4_e2m1fn_x2 becomes one code a
    byte. The gradient of a tensor, and its order in memory, do not matter.

    Raises TypeError or ValueError for what is no array, or cannot be read: a sparse tensor, one
    without data, an array on a device that nothing here reads.
    """
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x)
    for kind in type(x).__mro__:
        package = kind.__module__.partition(".")[0]
        if package == "torch" and hasattr(x, "detach"):
            return _from_torch(x)
        if package == "cupy" and hasattr(x, "get"):
            return np.asarray(x.get())
    if not hasattr(x, "__array__") and hasattr(x, "__dlpack__"):
        return _from_dlpack(x)
    return np.asarray(x)


def _from_torch(x: Any) -> Tensor:
    torch = sys.modules["torch"]
    if x.is_sparse or x.layout != torch.strided or x.is_quantized or x.device.type == "meta":
        raise TypeError(
            f"a tensor of PyTorch on {x.device} with layout {x.layout} and type {x.dtype} is no plain "
            "array; give a dense one"
        )
    x = x.detach().resolve_neg().contiguous().cpu()
    name = str(x.dtype).removeprefix("torch.")
    if name == "float4_e2m1fn_x2":
        return _unpacked(x.view(torch.uint8).numpy())
    if name in _TORCH_BITS:
        bits, kind = _TORCH_BITS[name]
        found: Tensor = x.view(getattr(torch, bits)).numpy().view(kind)
        return found
    return np.asarray(x.numpy())


def _from_dlpack(x: Any) -> Tensor:
    if int(x.__dlpack_device__()[0]) not in (_CPU, _PINNED):
        if hasattr(x, "get"):
            return np.asarray(x.get())
        raise TypeError(
            f"{shown(type(x).__name__)} is not in the memory of the host; copy it there, or give a "
            "tensor of PyTorch, JAX or CuPy"
        )
    return np.from_dlpack(x)


def _unpacked(pairs: Tensor) -> Tensor:
    """Return FP4 codes one a byte from two a byte, the first one in the lower half."""
    codes: Tensor = np.stack([pairs & 15, pairs >> 4], axis=-1)
    return codes.reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])


def _packed(codes: Tensor) -> Tensor:
    packed: Tensor = codes[..., ::2] | codes[..., 1::2] << 4
    return packed


def _numpy(bits: Tensor, view: View | None, device: Any) -> Any:
    if device not in (None, "cpu"):
        raise ValueError(f"numpy has no device {shown(device)}; leave it out")
    return bits if view not in _TYPED else bits.view(_TYPED[view])


def _torch(bits: Tensor, view: View | None, device: Any) -> Any:
    torch: Any = importlib.import_module("torch")
    kind = None if view is None else getattr(torch, _TORCH_OF.get(view, ""), None)
    if view is View.F4_E2M1:
        if bits.shape[-1] % 2:
            kind = None
        elif kind is not None:
            bits = _packed(bits)
    # Old versions of PyTorch have no unsigned integers but uint8.
    signed = bits.view(np.int16) if bits.dtype == np.uint16 else bits
    made = torch.from_numpy(np.ascontiguousarray(signed))
    if kind is not None:
        made = made.view(kind)
    elif bits.dtype == np.uint16 and hasattr(torch, "uint16"):
        made = made.view(torch.uint16)
    return made if device is None else made.to(device)


def _jax(bits: Tensor, view: View | None, device: Any) -> Any:
    import jax

    if isinstance(device, str):
        platform, _, index = device.partition(":")
        device = jax.devices(platform)[int(index or 0)]
    return jax.device_put(bits if view not in _TYPED else bits.view(_TYPED[view]), device)


def _cupy(bits: Tensor, _: View | None, device: Any) -> Any:
    cupy: Any = importlib.import_module("cupy")
    if isinstance(device, str):
        device = int(device.partition(":")[2] or 0)
    with contextlib.nullcontext() if device is None else cupy.cuda.Device(device):
        return cupy.asarray(bits)


_LIBRARIES: Mapping[str, Callable[[Tensor, View | None, Any], Any]] = Registry(
    "library", [("numpy", _numpy), ("torch", _torch), ("jax", _jax), ("cupy", _cupy)]
)


@contextlib.contextmanager
def _one_line(failure: str) -> Any:
    """Raise what a library raises as one ValueError of one line."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"{failure}: {line(str(error))}; install it") from error
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{failure}: {type(error).__name__}: {line(first)}") from error
