"""What each library makes of an array: its own calls, as in the README of tests/oracles.

Element codes uint8, one a code, and scale codes uint8, one a block. Libraries are imported where
they are called.
"""

import importlib.metadata
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

Codes = npt.NDArray[np.uint8]

# What the presets are of. The extra `libraries` of pyproject.toml installs the same.
VERSIONS = {"torch": "2.13.0", "torchao": "0.18.0", "gfloat": "0.5.2", "jax": "0.10.2"}


REQUIRED = bool(os.environ.get("FLAMIA_LIVE_REQUIRED"))


def daily(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Parameters of a test: those kept daily, the others nightly; `make live` runs all."""
    return [
        pytest.param(
            *((case,) if isinstance(case, str) else case),
            marks=() if REQUIRED or case in kept else pytest.mark.nightly,
        )
        for case in cases
    ]


class Encoded(NamedTuple):
    """What a library made."""

    codes: Codes
    scales: Codes
    tensor_scale: npt.NDArray[np.float32] | None = None


def need(*names: str) -> None:
    """Skip the module that asks where a library is missing, or of another version than its presets.

    With FLAMIA_LIVE_REQUIRED set that is an error: `make live` has installed them.
    """
    for name in names:
        try:
            found = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        if found != VERSIONS[name]:
            reason = f"{name} is {found}, and compared in {VERSIONS[name]}: make live installs it"
            if os.environ.get("FLAMIA_LIVE_REQUIRED"):
                raise RuntimeError(reason)
            pytest.skip(reason, allow_module_level=True)


def as_torch(x: npt.NDArray[Any]) -> Any:
    """An array as a tensor of the same type."""
    import torch

    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def _bytes(tensor: Any) -> Codes:
    import torch

    codes: Codes = tensor.view(torch.uint8).numpy()
    return codes


def _nibbles(tensor: Any) -> Codes:
    """Two codes a byte, the first in the low half."""
    packed = _bytes(tensor)
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape((*packed.shape[:-1], -1))


def torchao_mx(x: npt.NDArray[Any], rule: str, element: str) -> Encoded:
    """Rows in blocks of 32."""
    import torch
    from torchao.prototype.mx_formats import constants
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    formats = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "e2m3": constants.DTYPE_FP6_E2M3,
        "e3m2": constants.DTYPE_FP6_E3M2,
        "e2m1": torch.float4_e2m1fn_x2,
    }
    scales, codes = to_mx(as_torch(x), formats[element], 32, ScaleCalculationMode(rule))
    return Encoded((_nibbles if element == "e2m1" else _bytes)(codes), _bytes(scales))


def torchao_nvfp4(x: npt.NDArray[Any], levels: int) -> Encoded:
    """Rows in blocks of 16, by the amax of the whole tensor where there are two levels."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    given = as_torch(x)
    whole = per_tensor_amax_to_scale(given.abs().max()) if levels == 2 else None
    scales, codes = nvfp4_quantize(given, 16, whole)
    return Encoded(_nibbles(codes), _bytes(scales), None if whole is None else whole.numpy())


def gfloat_mx(x: npt.NDArray[Any], element: str) -> Encoded:
    """Rows of 32, each a block. Raises AssertionError for NaN and an element format without one."""
    import gfloat
    from gfloat import formats

    kind = getattr(formats, f"format_info_ocp_{element}")
    of_scale = formats.format_info_ocp_e8m0
    wide = x.astype(np.float32)
    with np.errstate(all="ignore"):
        found = [gfloat.compute_scale_amax(kind.emax, row) for row in wide]
        scaled = np.stack([row / scale for row, scale in zip(wide, found, strict=True)])
        codes = gfloat.encode_ndarray(kind, gfloat.round_ndarray(kind, scaled, sat=True))
        scales = gfloat.encode_ndarray(of_scale, np.array(found, np.float64))
    return Encoded(codes.astype(np.uint8), scales.astype(np.uint8)[:, None])


def jax_mx(x: npt.NDArray[Any]) -> Encoded:
    """Rows in blocks of 32, E4M3."""
    return _jax(x, "mxfp8", None)


def jax_nvfp4(x: npt.NDArray[Any]) -> Encoded:
    """Rows in blocks of 16. JAX takes the tensor scale from its caller: amax / 2688, or 1."""
    with np.errstate(invalid="ignore"):
        scale = np.abs(x.astype(np.float32)).max() / np.float32(2688)
    if not (np.isfinite(scale) and scale > 0):
        scale = np.float32(1)
    return _jax(x, "nvfp4", np.array([scale], np.float32))


def _jax(x: npt.NDArray[Any], mode: Any, tensor_scale: Any) -> Encoded:
    import jax
    import jax.numpy as jnp
    from jax._src.cudnn import scaled_matmul_stablehlo

    with jax.numpy_dtype_promotion("standard"):  # it divides bfloat16 by float32
        whole = None if tensor_scale is None else jnp.asarray(tensor_scale)
        config = jax.nn.get_scaled_dot_general_config(mode, whole)
        codes, scales = scaled_matmul_stablehlo.quantize(jnp.asarray(x)[None], config)
    return Encoded(
        np.asarray(codes)[0].view(np.uint8), np.asarray(scales)[0].view(np.uint8), tensor_scale
    )
