"""NVFP4 of attention and inference kernels: FlashInfer and SageAttention3."""

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import BlockFormat, NanPolicy, PartialBlock, ScaleRule
from flamia_ref.formats.libraries.common import ROWS_OF_16
from flamia_ref.formats.scalar import E2M1, UE4M3

FORMATS = (
    BlockFormat(
        name="flashinfer-nvfp4",
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=ROWS_OF_16,
        partial=PartialBlock.REFUSE,
        tensor_scale="2688 / tensor_amax",
        tensor_divides=True,
        quotient="tensor_scale * (amax * rcp(6))",
        scaled="x * rcp(scale * rcp(tensor_scale))",
        nan=NanPolicy.IGNORE,
        source="FlashInfer cvt_warp_fp16_to_fp4, default (fast) build; rcp.approx.ftz.f32 as measured on an H200",
        version="fb28d72",
        evidence=Evidence.ASSUMED,
    ),
    BlockFormat(
        name="sage3-nvfp4",
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=((1, 16), (16, 1)),
        quotient="amax / 6",
        scaled="x * (1 / scale)",
        nan=NanPolicy.IGNORE,
        source="SageAttention sageattn3 quantization/fp4_quantization_4d.cu",
        version="d1a57a5",
        evidence=Evidence.SOURCE,
    ),
)
