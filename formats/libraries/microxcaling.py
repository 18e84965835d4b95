"""microsoft/microxcaling _quantize_mx: floor scales, three roundings, with and without flushing."""

from typing import Any

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import Arithmetic, BlockFormat, Log2, NanPolicy, ScaleRule, ZeroSign
from flamia_ref.formats.libraries.common import (
    BLOCKS_ON_CPU,
    MX_ELEMENTS,
    ROWS_OR_COLUMNS_OF_32,
)
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import E8M0, ScalarFormat

_ROUNDINGS = {
    "nearest": Rounding.NEAREST_AWAY,
    "even": Rounding.NEAREST_EVEN,
    "floor": Rounding.TOWARD_ZERO,
}
_NORMAL = 2.0**-126
# The smallest amax whose log2, rounded to bfloat16, is -126 and not less.
_NARROW_NORMAL = 108 * 2.0**-133


def _mx(rounding: str, element: ScalarFormat, *, flush: bool) -> BlockFormat:
    narrow: list[tuple[str, Any]] = [("by_log2", False)]
    if flush:
        narrow.append(("zero_below", _NARROW_NORMAL))
    return BlockFormat(
        name=f"microxcaling-mx-{rounding}{'-flush' if flush else ''}-{element.name}",
        element=element,
        scale=E8M0,
        rule=ScaleRule.FLOOR,
        block=(1, 32),
        blocks=ROWS_OR_COLUMNS_OF_32,
        arithmetic=Arithmetic.INPUT,
        log2=Log2.ROUNDED,
        element_log2=True,
        zero_below=_NORMAL if flush else 0.0,
        rounding=_ROUNDINGS[rounding],
        half_added=rounding != "floor",
        nan=NanPolicy.PROPAGATE,
        nan_scale=E8M0.nan_code,
        infinity_scale=E8M0.nan_code,
        zero_sign=ZeroSign.PLUS_OF_ZERO,
        narrow=tuple(narrow),
        source=f"microxcaling mx/mx_ops.py, _quantize_mx, {BLOCKS_ON_CPU}",
        version="7bc4195",
        evidence=Evidence.MEASURED,
        by_log2=True,
        out_of_contract="x in float16, in which powers of two beyond 2^15 and 2^-24 are missing",
    )


FORMATS = tuple(
    _mx(rounding, element, flush=flush)
    for rounding in _ROUNDINGS
    for flush in (False, True)
    for element in MX_ELEMENTS
    if not (flush and rounding == "floor")
)
