"""NVIDIA Transformer Engine: MXFP8, and NVFP4 with its variants."""

from typing import Any

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import (
    BlockFormat,
    Choice,
    NanPolicy,
    PartialBlock,
    ScaleRule,
    TensorExtent,
)
from flamia_ref.formats.libraries.common import MX_BLOCKS, TENSORS_ON_CPU
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import BF16, E2M1, E4M3, E5M2, E8M0, UE4M3

_VERSION = "d0067d0"
_BF16_MAX = BF16.max
# Diagonal of the transform: fixed, the same for all tensors.
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def _encode_scale(span: int) -> str:
    """Largest block scale times largest element over amax, finite; 1 for an amax of 0 or infinity."""
    return f"if_zero(tensor_amax, 1, min(nonzero({span} / tensor_amax, 1), largest))"


def _mx(element: Any) -> BlockFormat:
    return BlockFormat(
        name=f"te-mx-{element.name}",
        element=element,
        scale=E8M0,
        rule=ScaleRule.RCEIL,
        block=(1, 32),
        blocks=MX_BLOCKS,
        nan=NanPolicy.IGNORE,
        source="Transformer Engine common/cast/mxfp8/quantize_mxfp8.cuh and util/ptx.cuh",
        version=_VERSION,
        evidence=Evidence.SOURCE,
        out_of_contract='blocks with an extent "all", which Transformer Engine does not have; a build'
        " with _ENABLE_MXFMA, for blocks of bfloat16 below 2^-100",
    )


def _nvfp4(name: str, **changes: Any) -> BlockFormat:
    kept: dict[str, Any] = {
        "element": E2M1,
        "scale": UE4M3,
        "rule": ScaleRule.QUOTIENT,
        "block": (1, 16),
        "blocks": ((1, 16), (16, 1)),
        "partial": PartialBlock.REFUSE,
        "tensor_scale": _encode_scale(2688),
        "tensor_divides": True,
        "quotient": "amax * (tensor_scale * (1 / 6))",
        "scaled": "x * min(1 / (scale * (1 / tensor_scale)), largest)",
        "nan": NanPolicy.PROPAGATE,
        "nan_scale": UE4M3.nan_code,
        "source": f"Transformer Engine common/cast/nvfp4; reference_nvfp4.py, {TENSORS_ON_CPU}",
        "version": _VERSION,
        # The reference was run; of the kernel, the signs of zeros and NaN are as its code says.
        "evidence": Evidence.SOURCE,
        "nan_in_contract": False,
        "out_of_contract": "the sign of zeros and the codes of NaN, where the reference is not the"
        " kernel: here those of the kernel's conversion; a tensor with a NaN, and use_fast_math",
    }
    return BlockFormat(name=name, **kept | changes)


FORMATS = (
    _mx(E4M3),
    _mx(E5M2),
    _nvfp4("te-nvfp4"),
    _nvfp4(
        "te-nvfp4-fastmath",
        blocks=((1, 16),),
        scaled=f"x * bf16(min(tensor_scale / scale, {_BF16_MAX!r}))",
        source="Transformer Engine common/cast/nvfp4, use_fast_math",
        out_of_contract="a tensor with a NaN",
    ),
    _nvfp4("te-nvfp4-2d", block=(16, 16), blocks=((16, 16),)),
    _nvfp4("te-nvfp4-rowscaled", blocks=((1, 16),), tensor_extent=TensorExtent.ROW),
    _nvfp4("te-nvfp4-rht", blocks=((1, 16),), signs=_SIGNS),
    _nvfp4(
        "te-nvfp4-4over6-mae",
        blocks=((1, 16),),
        quotient="amax / 6 * tensor_scale",
        choice=Choice.MAE,
        decoded="code * scale * tensor_amax / 2688",
    ),
    _nvfp4(
        "te-nvfp4-4over6-mse",
        blocks=((1, 16),),
        tensor_scale=_encode_scale(1536),
        quotient="amax / 6 * tensor_scale",
        choice=Choice.MSE,
        decoded="code * scale * tensor_amax / 1536",
    ),
    _nvfp4(
        "te-nvfp4-pow2",
        scale=E8M0,
        tensor_scale=None,
        tensor_divides=False,
        quotient="amax / 6",
        scale_rounding=Rounding.UP,
        scaled=None,
        nan_scale=E8M0.nan_code,
    ),
)
