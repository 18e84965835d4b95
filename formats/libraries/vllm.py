"""vLLM's PyTorch fallback for MXFP8, and its reference for NVFP4."""

import math

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import BlockFormat, NanPolicy, PartialBlock, ScaleRule, ZeroSign
from flamia_ref.formats.libraries.common import (
    BLOCKS_ON_CPU,
    ROWS_OF_16,
    ROWS_OF_32,
    TENSORS_ON_CPU,
)
from flamia_ref.formats.scalar import E2M1, E4M3, E8M0, UE4M3

_INVERSE = "(1 / nonzero({0}, 1e8))"

FORMATS = (
    BlockFormat(
        name="vllm-mx-fallback-e4m3",
        element=E4M3,
        scale=E8M0,
        rule=ScaleRule.FLOOR,
        exponent=0,
        smallest_amax=2.0**-126,
        block=(1, 32),
        blocks=ROWS_OF_32,
        partial=PartialBlock.REFUSE,
        nan=NanPolicy.PROPAGATE,
        nan_scale=0,
        scale_values=((0, math.nan),),
        nan_codes=(0x7F, 0xFF, 0x7F),
        source=f"vLLM mxfp8_utils.py, _mxfp8_e4m3_quantize_torch, {BLOCKS_ON_CPU}",
        version="0013442",
        evidence=Evidence.MEASURED,
        by_log2=True,
    ),
    BlockFormat(
        name="vllm-nvfp4-reference",
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=ROWS_OF_16,
        partial=PartialBlock.REFUSE,
        tensor_scale="1 / tensor_amax * 2688",
        tensor_divides=True,
        quotient="tensor_scale * (amax * (1 / 6))",
        scaled=f"x * {_INVERSE.format('scale * ' + _INVERSE.format('tensor_scale'))}",
        zero_sign=ZeroSign.PLUS_OF_ZERO,
        nan=NanPolicy.PROPAGATE,
        nan_scale=UE4M3.nan_code,
        nan_codes=(0x08, 0x08, 0x08),
        source=f"vLLM nvfp4_emulation_utils.py, ref_nvfp4_quant, {TENSORS_ON_CPU}",
        version="055e47c",
        evidence=Evidence.MEASURED,
    ),
)
