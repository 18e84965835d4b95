"""AMD Quark fake_quantize_mx in three scale modes."""

from typing import Any

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import Arithmetic, BlockFormat, Log2, NanPolicy, ScaleRule, ZeroSign
from flamia_ref.formats.libraries.common import (
    BLOCKS_ON_CPU,
    MX_ELEMENTS,
    ROWS_OR_COLUMNS_OF_32,
)
from flamia_ref.formats.scalar import E4M3, E5M2, E8M0, FP32, ScalarFormat

_EPSILON = 0x34000000  # 2^-23, which takes the place of a scale of 0


def _mx(rule: ScaleRule, element: ScalarFormat) -> BlockFormat:
    """EVEN clamps its exponents to those of E8M0; FLOOR and CEIL keep any power of two that the type of x has."""
    changes: dict[str, Any] = (
        {"scale": E8M0, "even_overflow": True, "infinity_scale": E8M0.max_code}
        if rule is ScaleRule.EVEN
        else {
            "scale": FP32,
            "scaled": "x / scale",
            "arithmetic": Arithmetic.INPUT,
            "log2": Log2.ROUNDED,
            "by_log2": True,
            "narrow": (("by_log2", False),),
            "underflow_scale": _EPSILON,
            "infinity_scale": FP32.nan_code,  # infinite there: all values are NaN either way
        }
    )
    return BlockFormat(
        name=f"quark-mx-{rule.value}-{element.name}",
        element=element,
        rule=rule,
        block=(1, 32),
        blocks=ROWS_OR_COLUMNS_OF_32,
        nan=NanPolicy.PROPAGATE,
        nan_scale=changes["scale"].nan_code,
        zero_sign=ZeroSign.KEEP if element in (E4M3, E5M2) else ZeroSign.PLUS,
        source=f"AMD Quark hw_emulation_interface.py, fake_quantize_mx, {BLOCKS_ON_CPU}",
        version="0.13",
        evidence=Evidence.MEASURED,
        out_of_contract="x in float16, in which powers of two beyond 2^15 and 2^-24 are missing",
        **changes,
    )


FORMATS = tuple(
    _mx(rule, element)
    for rule in (ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN)
    for element in MX_ELEMENTS
)
