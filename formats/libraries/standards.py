"""OCP MX with its floor scales, and this project's own formats."""

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import BlockFormat, NanPolicy, ScaleRule
from flamia_ref.formats.libraries.common import CODE_0_FLUSHES, MX_BLOCKS, MX_ELEMENTS, ROWS_OF_16
from flamia_ref.formats.scalar import E2M1, E8M0, UE4M3, ScalarFormat


def _ocp(element: ScalarFormat) -> BlockFormat:
    return BlockFormat(
        name=f"ocp-mx-floor-{element.name}",
        element=element,
        scale=E8M0,
        rule=ScaleRule.FLOOR,
        block=(1, 32),
        blocks=MX_BLOCKS,
        nan=NanPolicy.PROPAGATE,
        nan_scale=E8M0.nan_code,
        infinity_scale=E8M0.nan_code,
        source="OCP Microscaling Formats (MX) Specification section 6.3",
        version="1.0",
        evidence=Evidence.SPECIFIED,
        out_of_contract="blocks with a NaN or an infinity and scales below 2^-127, which the standard"
        " leaves open: here a NaN block, and 2^-127 (torchao 36027d8 FLOOR does the same)",
    )


FORMATS = (
    *map(_ocp, MX_ELEMENTS),
    BlockFormat(
        name="flamia-fp4-e8m0",
        element=E2M1,
        scale=E8M0,
        rule=ScaleRule.RCEIL,
        block=(1, 16),
        blocks=ROWS_OF_16,
        nan=NanPolicy.PROPAGATE,
        nan_scale=E8M0.nan_code,
        row_span=14,
        source="our choice within arXiv:2611.03344, an abstract; a row is what e4m3 holds with one scale",
        version="1",
        evidence=Evidence.ASSUMED,
    ),
    BlockFormat(
        name="flamia-fp4-ue4m3",
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=((1, 16), (16, 1)),
        quotient="amax / 6",
        scaled="x / scale",
        nan=NanPolicy.PROPAGATE,
        nan_scale=UE4M3.nan_code,
        scale_values=CODE_0_FLUSHES,
        source="our choice within arXiv:2611.03344, an abstract",
        version="1",
        evidence=Evidence.ASSUMED,
    ),
)
