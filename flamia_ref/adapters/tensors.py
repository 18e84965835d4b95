"""Arrays of the protocol as tensors of PyTorch, and back: bits are moved, nothing is converted."""

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]


def to_torch(torch: ModuleType, array: Array, device: Any) -> Any:
    """A tensor with the bits of an array: bfloat16 of bfloat16, the same type of others."""
    if array.dtype == ml_dtypes.bfloat16:
        bits = np.ascontiguousarray(array).view(np.int16)
        return torch.from_numpy(bits.copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(np.ascontiguousarray(array).copy()).to(device)


def to_numpy(torch: ModuleType, tensor: Any) -> Array:
    """The array with the bits of a tensor."""
    host = tensor.detach().contiguous().cpu()
    if host.dtype == torch.bfloat16:
        bits: Array = host.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    array: Array = host.numpy()
    return array


def e4m3(torch: ModuleType, codes: Array, device: Any) -> Any:
    """A tensor of E4M3 from codes, uint8."""
    return to_torch(torch, codes, device).view(torch.float8_e4m3fn)
