"""Named block formats: what real libraries and standards do, bit for bit."""

from flamia_ref._errors import Registry
from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import (
    ALL,
    Block,
    BlockFormat,
    InfinityPolicy,
    NanPolicy,
    ScaleRule,
    UnderflowPolicy,
)
from flamia_ref.formats.scalar import E2M1, E4M3, E8M0, UE4M3

MX_BLOCKS: tuple[Block, ...] = ((1, 32), (32, 1), (32, 32), (1, ALL), (ALL, 1))

TE_MX_E4M3 = BlockFormat(
    name="te-mx-e4m3",
    element=E4M3,
    scale=E8M0,
    rule=ScaleRule.RCEIL,
    block=(1, 32),
    blocks=MX_BLOCKS,
    nan=NanPolicy.IGNORE,
    infinity=InfinityPolicy.SATURATE,
    source="Transformer Engine common/cast/mxfp8/quantize_mxfp8.cuh and util/ptx.cuh",
    version="d0067d0",
    evidence=Evidence.SOURCE,
    out_of_contract='blocks with an extent "all", which Transformer Engine does not have; a build'
    " with _ENABLE_MXFMA, for blocks of bfloat16 below 2^-100",
)

CUDNN_MX_E4M3 = BlockFormat(
    name="cudnn-mx-e4m3",
    element=E4M3,
    scale=E8M0,
    rule=ScaleRule.EXACT_RCEIL,
    block=(1, 32),
    blocks=((1, 32), (32, 1)),
    nan=NanPolicy.IGNORE,
    infinity=InfinityPolicy.SATURATE,
    underflow=UnderflowPolicy.FLUSH,
    source="nvidia-cudnn-frontend sdpa/bwd/kernels/sm100: cvt_amax_to_e8m0_rp in _bprop_mxfp8_common.py and its"
    " use for dS in bprop_dkdv_d256_mxfp8.py and bprop_dq_d256_mxfp8.py; CuTe DSL 4.8.1",
    version="1.32.0",
    evidence=Evidence.SOURCE,
)

OCP_MX_FLOOR_E4M3 = BlockFormat(
    name="ocp-mx-floor-e4m3",
    element=E4M3,
    scale=E8M0,
    rule=ScaleRule.FLOOR,
    block=(1, 32),
    blocks=MX_BLOCKS,
    nan=NanPolicy.NAN_BLOCK,
    infinity=InfinityPolicy.NAN_BLOCK,
    source="OCP Microscaling Formats (MX) Specification section 6.3",
    version="1.0",
    evidence=Evidence.SPECIFIED,
    out_of_contract="blocks with a NaN or an infinity and scales below 2^-127, which the standard"
    " leaves open: here a NaN block, and 2^-127 (torchao 36027d8 FLOOR does the same)",
)

FLAMIA_FP4_E8M0 = BlockFormat(
    name="flamia-fp4-e8m0",
    element=E2M1,
    scale=E8M0,
    rule=ScaleRule.RCEIL,
    block=(1, 16),
    blocks=((1, 16),),
    nan=NanPolicy.NAN_BLOCK,
    infinity=InfinityPolicy.SATURATE,
    row_span=14,
    source="our choice within arXiv:2611.03344, an abstract; a row is what e4m3 holds with one scale",
    version="1",
    evidence=Evidence.ASSUMED,
)

FLAMIA_FP4_UE4M3 = BlockFormat(
    name="flamia-fp4-ue4m3",
    element=E2M1,
    scale=UE4M3,
    rule=ScaleRule.NVFP4_ONE_LEVEL,
    block=(1, 16),
    blocks=((1, 16), (16, 1)),
    nan=NanPolicy.NAN_BLOCK,
    infinity=InfinityPolicy.SATURATE,
    underflow=UnderflowPolicy.FLUSH,
    source="our choice within arXiv:2611.03344, an abstract",
    version="1",
    evidence=Evidence.ASSUMED,
)

PRESETS = Registry(
    "preset",
    [
        (preset.name, preset)
        for preset in (
            CUDNN_MX_E4M3,
            FLAMIA_FP4_E8M0,
            FLAMIA_FP4_UE4M3,
            OCP_MX_FLOOR_E4M3,
            TE_MX_E4M3,
        )
    ],
)
