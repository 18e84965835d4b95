"""torchao mx_formats: MXFP8, MXFP6, MXFP4 in four modes, as released in 0.18.0 and after; NVFP4."""

from typing import Any

from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import (
    BlockFormat,
    NanElement,
    NanPolicy,
    PartialBlock,
    ScaleRule,
)
from flamia_ref.formats.libraries.common import (
    BLOCKS_ON_CPU,
    MX_ELEMENTS,
    ROWS_OF_16,
    ROWS_OF_32,
    TENSORS_ON_CPU,
)
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import E2M1, E4M3, E5M2, E8M0, UE4M3, ScalarFormat

_MODES = (ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN, ScaleRule.RCEIL)


def _nan(element: ScalarFormat) -> dict[str, Any]:
    """torch keeps the sign of a NaN; torchao's own conversions to 4 and 6 bits take it for a number."""
    if element in (E4M3, E5M2):
        return {"nan_codes": (0x7F, 0xFF, 0x7F)}
    made = {"e2m1": 0x03, "e2m3": 0x0C, "e3m2": 0x0E}[element.name]
    return {"nan_codes": (made, made, made), "nan_element": NanElement.AS_NUMBER}


def _mx(rule: ScaleRule, element: ScalarFormat) -> BlockFormat:
    return BlockFormat(
        name=f"torchao-mx-{rule.value}-{element.name}",
        element=element,
        scale=E8M0,
        rule=rule,
        block=(1, 32),
        blocks=ROWS_OF_32,
        partial=PartialBlock.REFUSE,
        nan=NanPolicy.PROPAGATE,
        nan_scale=E8M0.nan_code,
        infinity_scale=E8M0.nan_code,
        even_overflow=rule is ScaleRule.EVEN,
        nan_block_code=_nan(element)["nan_codes"][2],
        source="torchao prototype/mx_formats/mx_tensor.py, to_mx",
        version="36027d8",
        evidence=Evidence.SOURCE,
        **_nan(element),
    )


def _released(rule: ScaleRule, element: ScalarFormat) -> BlockFormat:
    """0.18.0: log2 in RCEIL, and a divisor of at least 2^-126 in the others."""
    changes: dict[str, Any] = (
        {
            "rule": ScaleRule.QUOTIENT,
            "quotient": f"amax / {element.max:g}",
            "scale_rounding": Rounding.UP,
            "scale_values": ((0, 1.0),),
            "nan_block_code": _nan(element)["nan_codes"][2],
            "by_log2": True,
        }
        if rule is ScaleRule.RCEIL
        else {
            "rule": rule,
            "infinity_scale": 255 - element.emax,
            "scale_values": ((0, 2.0**-126), (255, float("inf"))),
        }
    )
    nan = _nan(element)
    if rule is not ScaleRule.RCEIL:  # infinity over infinity is NaN with a sign, on x86
        nan["nan_codes"] = (*nan["nan_codes"][:2], nan["nan_codes"][2] | element.sign_code)
    return BlockFormat(
        name=f"torchao018-mx-{rule.value}-{element.name}",
        element=element,
        scale=E8M0,
        block=(1, 32),
        blocks=ROWS_OF_32,
        partial=PartialBlock.REFUSE,
        nan=NanPolicy.PROPAGATE,
        nan_scale=E8M0.nan_code,
        source=f"torchao prototype/mx_formats/mx_tensor.py, to_mx, eager, {BLOCKS_ON_CPU}",
        version="0.18.0",
        evidence=Evidence.MEASURED,
        **changes,
        **nan,
    )


def _nvfp4(name: str, **changes: Any) -> BlockFormat:
    return BlockFormat(
        name=name,
        element=E2M1,
        scale=UE4M3,
        rule=ScaleRule.QUOTIENT,
        block=(1, 16),
        blocks=ROWS_OF_16,
        partial=PartialBlock.REFUSE,
        scale_range=(0x08, UE4M3.max_code),
        nan=NanPolicy.PROPAGATE,
        nan_scale=UE4M3.nan_code,
        source=f"torchao prototype/mx_formats/nvfp4_tensor.py, nvfp4_quantize, {TENSORS_ON_CPU}",
        version="0.18.0",
        evidence=Evidence.MEASURED,
        **changes,
    )


FORMATS = (
    *(_mx(rule, element) for rule in _MODES for element in MX_ELEMENTS),
    *(_released(rule, element) for rule in _MODES for element in MX_ELEMENTS),
    _nvfp4(
        "torchao-nvfp4",
        tensor_scale="tensor_amax / 2688",
        quotient="amax / 6 / tensor_scale",
        scaled="x * (1 / tensor_scale / scale)",
        nan_codes=(0x0C, 0x0C, 0x0B),
        nan_block_code=0x0C,
        nan_in_contract=False,
    ),
    _nvfp4(
        "torchao-nvfp4-onelevel",
        quotient="amax / 6",
        scaled="x * (1 / scale)",
        nan_codes=(0x04, 0x04, 0x04),
    ),
)
