"""triton_kernels downcast_to_mxfp, by its PyTorch twin: MXFP8 and MXFP4 in two roundings; NVFP4 scales."""

import math
from typing import Any

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import BlockFormat, NanPolicy, ScaleRule
from flamia_ref.formats.libraries.common import (
    BLOCKS_ON_CPU,
    CODE_0_FLUSHES,
    ROWS_OF_16,
    ROWS_OR_COLUMNS_OF_32,
    TENSORS_ON_CPU,
)
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import E2M1, E4M3, E5M2, E8M0, UE4M3, ScalarFormat

_SOURCE = "triton_kernels numerics_details/mxfp.py, downcast_to_mxfp_torch"
_VERSION = "018a674"


def _nan(element: ScalarFormat) -> tuple[int, int, int]:
    if element is E2M1:
        return (0x07, 0x0F, 0x0F)
    return (0x7F, 0xFF, 0xFF)


def _mx(rounding: str, element: ScalarFormat) -> BlockFormat:
    changes: dict[str, Any] = (
        {
            "quotient": f"amax / {element.max:g}",
            "scale_rounding": Rounding.UP,
            "scale_range": (1, 254),
            "zero_scale": 0,
            "nan_scale": 0,
        }
        if rounding == "roundup"
        else {
            "quotient": f"amax / {2**element.emax}",
            "scale_rounding": Rounding.TOWARD_ZERO,
            "nan_scale": E8M0.nan_code,
        }
    )
    return BlockFormat(
        name=f"triton-mx-{rounding}-{element.name}",
        element=element,
        scale=E8M0,
        rule=ScaleRule.QUOTIENT,
        block=(1, 32),
        blocks=ROWS_OR_COLUMNS_OF_32,
        nan=NanPolicy.PROPAGATE,
        infinity_scale=E8M0.nan_code,
        scale_values=((0, math.inf), (255, math.inf)),
        nan_codes=_nan(element),
        source=f"{_SOURCE}, {BLOCKS_ON_CPU}",
        version=_VERSION,
        evidence=Evidence.MEASURED,
        **changes,
    )


def _nvfp4(rounding: str) -> BlockFormat:
    return BlockFormat(
        name=f"triton-nvfp4-{rounding}",
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=ROWS_OF_16,
        quotient="amax / 6",
        scaled="x * (1 / scale)",
        scale_values=CODE_0_FLUSHES,
        nan=NanPolicy.PROPAGATE,
        nan_scale=UE4M3.nan_code,
        nan_codes=(0x07, 0x0F, 0x07),
        nan_block_code=0x07,
        source=f"{_SOURCE}, {TENSORS_ON_CPU}",
        version=_VERSION,
        evidence=Evidence.MEASURED,
    )


FORMATS = (
    *(_mx(how, element) for how in ("roundup", "rounddown") for element in (E4M3, E5M2, E2M1)),
    _nvfp4("roundup"),
    _nvfp4("roundnearest"),
)
