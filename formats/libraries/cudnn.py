"""cuDNN front end: what its attention kernels do with dS in the backward."""

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import BlockFormat, NanPolicy, ScaleRule
from flamia_ref.formats.libraries.common import CODE_0_FLUSHES, ROWS_OR_COLUMNS_OF_32
from flamia_ref.formats.scalar import E4M3, E8M0

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
)
