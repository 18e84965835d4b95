"""Kernels of inference and attention: FlashInfer, vLLM, CUTLASS epilogues and SageAttention3."""

import math

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import BlockFormat, NanPolicy, PartialBlock, ScaleRule, Subnormals
from flamia_ref.formats.libraries.common import (
    CODE_0_FLUSHES,
    MX_ELEMENTS,
    ROWS_OF_16,
    ROWS_OF_32,
    ROWS_OR_COLUMNS_OF_32,
)
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import E2M1, E4M3, E8M0, UE4M3, ScalarFormat

_RCP = "; rcp.approx.ftz.f32 as an H200 computes it"


def _fast_nvfp4(name: str, scaled: str, source: str, version: str) -> BlockFormat:
    """The chain of FlashInfer's default build, which vLLM's kernel shares."""
    return BlockFormat(
        name=name,
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=ROWS_OF_16,
        partial=PartialBlock.REFUSE,
        subnormals=Subnormals.FLUSH,
        tensor_scale="if_zero(tensor_amax, 1, 2688 / tensor_amax)",
        tensor_divides=True,
        quotient="tensor_scale * (amax * rcp(6))",
        scaled=scaled,
        nan=NanPolicy.IGNORE,
        source=source + _RCP,
        version=version,
        evidence=Evidence.ASSUMED,
        out_of_contract="the caller gives the tensor scale: here 2688 over amax, 1 for an amax of 0",
    )


def _cutlass(element: ScalarFormat) -> BlockFormat:
    return BlockFormat(
        name=f"cutlass-mx-{element.name}",
        element=element,
        scale=E8M0,
        rule=ScaleRule.QUOTIENT,
        block=(1, 32),
        blocks=ROWS_OR_COLUMNS_OF_32,
        partial=PartialBlock.REFUSE,
        quotient=f"amax * rcp({element.max:g})",
        scale_rounding=Rounding.UP,
        nan=NanPolicy.PROPAGATE,
        nan_scale=E8M0.nan_code,
        source="CUTLASS SM100 epilogue with scale factors, norm_const 1" + _RCP,
        version="7107b05",
        evidence=Evidence.ASSUMED,
    )


FORMATS = (
    _fast_nvfp4(
        "flashinfer-nvfp4",
        "x * if_zero(amax, 0, rcp(scale * rcp(tensor_scale)))",
        "FlashInfer cvt_warp_fp16_to_fp4, default (fast) build",
        "fb28d72",
    ),
    _fast_nvfp4(
        "vllm-nvfp4",
        "x * if_zero(scale, 0, rcp(scale * rcp(tensor_scale)))",
        "vLLM nvfp4_utils.cuh, cvt_warp_fp16_to_fp4",
        "055e47c",
    ),
    BlockFormat(
        name="flashinfer-mx-e4m3",
        element=E4M3,
        scale=E8M0,
        rule=ScaleRule.QUOTIENT,
        block=(1, 32),
        blocks=ROWS_OF_32,
        partial=PartialBlock.REFUSE,
        subnormals=Subnormals.FLUSH,
        quotient="amax * rcp(448)",
        scale_rounding=Rounding.UP,
        nan=NanPolicy.IGNORE,
        # rcp.approx.ftz of 2^-127 is not taken, and that of 2^127 is flushed: zeros.
        scale_values=((0, math.inf), (254, math.inf)),
        source="FlashInfer cvt_warp_fp16_to_mxfp8" + _RCP,
        version="fb28d72",
        evidence=Evidence.ASSUMED,
    ),
    *map(_cutlass, MX_ELEMENTS),
    BlockFormat(
        name="sage3-nvfp4",
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=((1, 16), (16, 1)),
        quotient="amax / 6",
        scaled="x * (1 / scale)",
        scale_values=CODE_0_FLUSHES,
        nan=NanPolicy.IGNORE,
        source="SageAttention sageattn3 quantization/fp4_quantization_4d.cu",
        version="d1a57a5",
        evidence=Evidence.SOURCE,
    ),
)
