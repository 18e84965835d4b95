"""google/qwix quantize_api, release 0.1.8: MXFP8, MXFP4 and one-level NVFP4."""

import math

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import (
    Arithmetic,
    BlockFormat,
    Log2,
    NanPolicy,
    PartialBlock,
    ScaleRule,
    Subnormals,
)
from flamia_ref.formats.libraries.common import BLOCKS_ON_CPU, ROWS_OF_16, ROWS_OF_32
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import E2M1, E4M3, E8M0, UE4M3, ScalarFormat

_SOURCE = f"qwix _src/core/qarray.py, quantize_api, {BLOCKS_ON_CPU}"


def _mx(element: ScalarFormat) -> BlockFormat:
    nan = (0x08, 0x08, 0x08) if element is E2M1 else (0x7F, 0xFF, 0xFF)
    return BlockFormat(
        name=f"qwix018-mx-{element.name}",
        element=element,
        scale=E8M0,
        rule=ScaleRule.QUOTIENT,
        block=(1, 32),
        blocks=ROWS_OF_32,
        partial=PartialBlock.REFUSE,
        arithmetic=Arithmetic.INPUT,
        subnormals=Subnormals.FLUSH,
        quotient=f"amax / {element.max:g}",
        smallest_quotient=2.0**-63,
        scale_rounding=Rounding.UP,
        log2=Log2.RATIO,
        nan=NanPolicy.IGNORE,
        infinity_scale=E8M0.nan_code,
        scale_values=((255, math.inf),),
        nan_codes=nan,
        narrow=(
            ("nan", NanPolicy.PROPAGATE),
            ("nan_scale", E8M0.nan_code),
            ("nan_block_code", nan[2]),
            ("by_log2", False),
        ),
        source=_SOURCE,
        version="0.1.8",
        evidence=Evidence.MEASURED,
        by_log2=True,
        nan_in_contract=element is E2M1,
        out_of_contract="x in float16"
        if element is E2M1
        else "x in float16; blocks with a NaN, the sign of whose code in bfloat16 depends on its place in a vector",
    )


FORMATS = (
    _mx(E4M3),
    _mx(E2M1),
    BlockFormat(
        name="qwix018-nvfp4",
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=ROWS_OF_16,
        partial=PartialBlock.REFUSE,
        arithmetic=Arithmetic.INPUT,
        subnormals=Subnormals.FLUSH,
        quotient="amax / 6",
        smallest_quotient=2.0**-63,
        scaled="x / scale",
        nan=NanPolicy.IGNORE,
        narrow=(("nan", NanPolicy.PROPAGATE), ("nan_scale", UE4M3.nan_code)),
        nan_codes=(0x08, 0x08, 0x08),
        source=_SOURCE,
        version="0.1.8",
        evidence=Evidence.MEASURED,
    ),
)
