"""compressed-tensors calculate_qparams and quantize: MX and NVFP4."""

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import BlockFormat, NanPolicy, PartialBlock, ScaleRule, ZeroSign
from flamia_ref.formats.libraries.common import (
    BLOCKS_ON_CPU,
    ROWS_OF_16,
    ROWS_OF_32,
    TENSORS_ON_CPU,
)
from flamia_ref.formats.scalar import E2M1, E2M3, E4M3, E8M0, UE4M3, ScalarFormat

_SOURCE = "compressed_tensors quantization/utils, calculate_qparams; lifecycle/forward.py, quantize"
_VERSION = "0.20.1"


def _mx(
    element: ScalarFormat, even_bits: int, nan: tuple[int, int, int], narrow_nan: int
) -> BlockFormat:
    return BlockFormat(
        name=f"compressedtensors-mx-{element.name}",
        element=element,
        scale=E8M0,
        rule=ScaleRule.EVEN,
        even_bits=even_bits,
        block=(1, 32),
        blocks=ROWS_OF_32,
        partial=PartialBlock.REFUSE,
        nan=NanPolicy.PROPAGATE,
        nan_scale=E8M0.nan_code,
        infinity_scale=E8M0.nan_code,
        scale_values=((255, float("inf")),),
        nan_codes=nan,
        narrow=(
            ("nan_codes", (narrow_nan,) * 3),
            *((("infinity_in_contract", False),) if element is E2M1 else ()),
        ),
        even_overflow=True,
        nan_in_contract=False,
        out_of_contract="blocks with a NaN, and in bfloat16 to e2m1 with an infinity: the sign of"
        " its code depends on its place in a vector",
        zero_sign=ZeroSign.PLUS_OF_ZERO,
        source=f"{_SOURCE}, {BLOCKS_ON_CPU}",
        version=_VERSION,
        evidence=Evidence.MEASURED,
    )


FORMATS = (
    _mx(E4M3, 1, (0x7F, 0xFF, 0xFF), 0x7F),
    _mx(E2M3, 3, (0x20, 0x00, 0x00), 0x00),
    _mx(E2M1, 1, (0x08, 0x08, 0x08), 0x00),
    BlockFormat(
        name="compressedtensors-nvfp4",
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=ROWS_OF_16,
        partial=PartialBlock.REFUSE,
        tensor_scale="finite(input(input(1 / max(tensor_amax, tiny)) * 2688), 1)",
        tensor_divides=True,
        quotient="tensor_scale * input(amax / 6)",
        underflow_scale=0x20,
        scaled="x / (scale / tensor_scale)",
        nan=NanPolicy.PROPAGATE,
        nan_scale=UE4M3.nan_code,
        nan_codes=(0x08, 0x08, 0x08),
        narrow=(("nan_codes", (0x00, 0x00, 0x00)),),
        zero_sign=ZeroSign.PLUS_OF_ZERO,
        source=f"{_SOURCE}; generate_gparam, {TENSORS_ON_CPU}",
        version=_VERSION,
        evidence=Evidence.MEASURED,
    ),
)
