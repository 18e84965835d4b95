"""cuDNN front end: what its attention kernels do with dS in the backward, and its fake quantization to NVFP4."""

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import BlockFormat, NanPolicy, ScaleRule
from flamia_ref.formats.libraries.common import (
    CODE_0_FLUSHES,
    ROWS_OF_16,
    ROWS_OR_COLUMNS_OF_32,
)
from flamia_ref.formats.scalar import E2M1, E4M3, E8M0, UE4M3

FORMATS = (
    BlockFormat(
        name="cudnn-mx-e4m3",
        element=E4M3,
        scale=E8M0,
        rule=ScaleRule.EXACT_RCEIL,
        block=(1, 32),
        blocks=ROWS_OR_COLUMNS_OF_32,
        nan=NanPolicy.IGNORE,
        scale_values=CODE_0_FLUSHES,
        source="nvidia-cudnn-frontend sdpa/bwd/kernels/sm100: cvt_amax_to_e8m0_rp in _bprop_mxfp8_common.py and its"
        " use for dS in bprop_dkdv_d256_mxfp8.py and bprop_dq_d256_mxfp8.py; CuTe DSL 4.8.1",
        version="1.32.0",
        evidence=Evidence.SOURCE,
    ),
    BlockFormat(
        name="cudnn-qat-nvfp4",
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=ROWS_OF_16,
        quotient="amax / 6",
        scale_range=(0x01, UE4M3.max_code),  # max(amax / 6, 2^-9)
        scaled="x / scale",
        nan=NanPolicy.IGNORE,
        source="nvidia-cudnn-frontend sdpa/bwd/qat/_nvfp4.py, _quantize_nvfp4; amax / 6 is an approximate division"
        " there, here a correct one",
        version="1.32.0",
        evidence=Evidence.ASSUMED,
    ),
)
