"""NVIDIA ModelOpt MXFP8QTensor, MXFP4QTensor and NVFP4QTensor."""

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import BlockFormat, NanPolicy, PartialBlock, ScaleRule, ZeroSign
from flamia_ref.formats.libraries.common import (
    BLOCKS_ON_CPU,
    ROWS_OF_16,
    ROWS_OF_32,
    TENSORS_ON_CPU,
)
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import E2M1, E4M3, E8M0, UE4M3

_VERSION = "0.47.0"

FORMATS = (
    BlockFormat(
        name="modelopt-mx-e4m3",
        element=E4M3,
        scale=E8M0,
        rule=ScaleRule.QUOTIENT,
        block=(1, 32),
        blocks=ROWS_OF_32,
        quotient="amax / 448",
        scale_rounding=Rounding.UP,
        nan=NanPolicy.PROPAGATE,
        nan_scale=0,
        nan_codes=(0x7F, 0xFF, 0x7F),
        source=f"modelopt MXFP8QTensor.quantize, {BLOCKS_ON_CPU}",
        version=_VERSION,
        evidence=Evidence.MEASURED,
        by_log2=True,
    ),
    BlockFormat(
        name="modelopt-mx-e2m1",
        element=E2M1,
        scale=E8M0,
        rule=ScaleRule.QUOTIENT,
        block=(1, 32),
        blocks=ROWS_OF_32,
        partial=PartialBlock.REFUSE,
        quotient="amax / 6",
        scale_rounding=Rounding.UP,
        rounding=Rounding.NEAREST_ZERO,
        nan=NanPolicy.PROPAGATE,
        nan_scale=0,
        infinity_scale=0,
        nan_codes=(0x08, 0x08, 0x08),
        nan_block_code=0x08,
        zero_sign=ZeroSign.MINUS_OF_ZERO,
        source=f"modelopt MXFP4QTensor.quantize, {BLOCKS_ON_CPU}",
        version=_VERSION,
        evidence=Evidence.MEASURED,
        by_log2=True,
    ),
    BlockFormat(
        name="modelopt-nvfp4",
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=ROWS_OF_16,
        partial=PartialBlock.REFUSE,
        tensor_scale="tensor_amax / 2688",
        quotient="amax / (6 * tensor_scale)",
        scale_range=(0x01, UE4M3.max_code),
        zero_scale=0x38,
        scaled="x / (scale * tensor_scale)",
        nan=NanPolicy.PROPAGATE,
        nan_scale=UE4M3.nan_code,
        nan_codes=(0x07, 0x07, 0x07),
        zero_sign=ZeroSign.PLUS_OF_ZERO,
        source=f"modelopt NVFP4QTensor.quantize, {TENSORS_ON_CPU}",
        version=_VERSION,
        evidence=Evidence.MEASURED,
    ),
)
