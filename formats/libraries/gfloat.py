"""gfloat compute_scale_amax with round_ndarray and encode_ndarray."""

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import BlockFormat, NanPolicy, ScaleRule
from flamia_ref.formats.libraries.common import BLOCKS_ON_CPU, MX_ELEMENTS, ROWS_OR_COLUMNS_OF_32
from flamia_ref.formats.scalar import E8M0, ScalarFormat


def _mx(element: ScalarFormat) -> BlockFormat:
    nan = element.nan_code | element.sign_code if element.has_nan else element.max_code
    return BlockFormat(
        name=f"gfloat-mx-{element.name}",
        element=element,
        scale=E8M0,
        rule=ScaleRule.FLOOR,
        block=(1, 32),
        blocks=ROWS_OR_COLUMNS_OF_32,
        nan=NanPolicy.PROPAGATE,
        nan_scale=E8M0.nan_code,
        nan_codes=(nan, nan, nan),
        source=f"gfloat block.py, compute_scale_amax; round.py, encode.py, {BLOCKS_ON_CPU}",
        version="0.5.2",
        evidence=Evidence.MEASURED,
        by_log2=True,
        out_of_contract="" if element.has_nan else "blocks with a NaN, at which gfloat raises",
    )


FORMATS = tuple(map(_mx, MX_ELEMENTS))
