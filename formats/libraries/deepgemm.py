"""DeepGEMM per_token_cast_to_fp8 and per_token_cast_to_fp4 with UE8M0 scales."""

from typing import Any

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import BlockFormat, NanPolicy, ScaleRule, ZeroSign
from flamia_ref.formats.libraries.common import BLOCKS_ON_CPU, ROWS_OF_32
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import E2M1, E4M3, E8M0, ScalarFormat


def _mx(element: ScalarFormat, function: str, **changes: Any) -> BlockFormat:
    return BlockFormat(
        name=f"deepgemm-mx-{element.name}",
        element=element,
        scale=E8M0,
        rule=ScaleRule.QUOTIENT,
        block=(1, 32),
        blocks=ROWS_OF_32,
        quotient=f"amax / {element.max:g}",
        scale_rounding=Rounding.UP,
        smallest_amax=1e-4,
        scale_range=(1, 254),
        nan=NanPolicy.PROPAGATE,
        nan_scale=254,
        source=f"DeepGEMM deep_gemm/utils/math.py, {function}(use_ue8m0=True, gran_k=32), {BLOCKS_ON_CPU}",
        version="54e2261",
        evidence=Evidence.MEASURED,
        **changes,
    )


FORMATS = (
    _mx(E4M3, "per_token_cast_to_fp8", nan_codes=(0x7F, 0xFF, 0x7F)),
    _mx(
        E2M1,
        "per_token_cast_to_fp4",
        rounding=Rounding.NEAREST_ZERO,
        nan_codes=(0x00, 0x00, 0x00),
        zero_sign=ZeroSign.PLUS,
    ),
)
