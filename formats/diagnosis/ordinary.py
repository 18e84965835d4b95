"""Formats that are one on ordinary values, so that one run stands for all of them."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref import _float32
from flamia_ref.evidence import Evidence
from flamia_ref.formats.block import (
    Arithmetic,
    BlockFormat,
    Log2,
    NanElement,
    NanPolicy,
    PartialBlock,
    ScaleRule,
    Subnormals,
    ZeroSign,
)
from flamia_ref.formats.diagnosis.runs import Bits
from flamia_ref.formats.rounding import Rounding
from flamia_ref.formats.scalar import FP32, ScalarFormat

_LEAST, _LARGEST = 2.0**-60, 2.0**60


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is true of all values of x.

    Attributes:
        finite: there is no NaN and no infinity.
        medium: besides that, all magnitudes are 0 or from 2^-60 to 2^60.
        zeros: there are zeros.
        zero_blocks: there are blocks of nothing else.
    """

    finite: bool
    medium: bool
    zeros: bool
    zero_blocks: bool

    @classmethod
    def of(cls, bits: Bits, amax: Bits) -> "Facts":
        """The facts of float32 bits, and of those of the amax of each block."""
        magnitude = bits & _float32.MAGNITUDE
        largest = magnitude.max(initial=0)
        filled = magnitude[magnitude > 0] if (magnitude == 0).any() else magnitude
        least = filled.min(initial=_float32.INFINITY)
        low, high = (np.float32(x).view(np.uint32) for x in (_LEAST, _LARGEST))
        finite = bool(largest < _float32.INFINITY)
        return cls(
            finite=finite,
            medium=finite and bool(largest <= high) and bool(least >= low),
            zeros=filled.size < magnitude.size,
            zero_blocks=bool((amax == 0).any()),
        )


def ordinary_form(block_format: BlockFormat, facts: Facts, source: ScalarFormat) -> BlockFormat:
    """The format without the data that cannot count for such values: equal for formats that give the same.

    Args:
        block_format: as it is for that input (`of_input`).
        facts: of the values. A format that takes other values (transformed, prepared) or has a
            tensor scale keeps all that it has.
        source: the type that x had.
    """
    changes: dict[str, Any] = {
        "name": "",
        "source": "",
        "version": "",
        "evidence": Evidence.SOURCE,
        "out_of_contract": "",
        "nan_in_contract": True,
        "infinity_in_contract": True,
        "by_log2": False,
        "partial": PartialBlock.COVER,
        "block": (1, 1),
        "blocks": ((1, 1),),
        "stochastic": Rounding.STOCHASTIC,
    }
    one = dataclasses.replace(block_format, **changes)
    own_values = one.signs is not None or one.prepared is not None
    if not facts.medium or own_values or one.has_tensor_scale or not one.scales_are_powers:
        return one
    if source is not FP32 or one.row_span is not None or one.choice is not None:
        return one
    changes = {
        # No NaN, no infinity, nothing beyond 2^100 or below 2^-100.
        "nan": NanPolicy.IGNORE,
        "nan_scale": None,
        "infinity_scale": None,
        "even_overflow": False,
        "arithmetic": Arithmetic.FLOAT32,
        "subnormals": Subnormals.KEEP,
        "smallest_quotient": 0.0 if one.smallest_quotient <= 2.0**-80 else one.smallest_quotient,
        "element_log2": False if one.rounding is not Rounding.TOWARD_ZERO else one.element_log2,
        "log2": Log2.EXACT,  # as it is of a float32
        "zero_below": 0.0 if one.zero_below <= _LEAST else one.zero_below,
    }
    if not facts.zero_blocks:
        low, high = one.codes_of_scales
        changes |= {
            "zero_scale": None,
            "smallest_amax": 0.0 if one.smallest_amax <= _LEAST else one.smallest_amax,
            "underflow_scale": None,
            "scale_range": None if low <= 20 and high >= 230 else one.scale_range,
            "scale_values": tuple(pair for pair in one.scale_values if 20 < pair[0] < 230),
            "nan_codes": None,
            "nan_block_code": None,
            "nan_element": NanElement.CODE,
        }
    if not facts.zeros and one.zero_sign is not ZeroSign.PLUS:
        changes["zero_sign"] = ZeroSign.KEEP
    return dataclasses.replace(one, **_as_rule(one), **changes)


def _as_rule(one: BlockFormat) -> dict[str, Any]:
    """The rule that a quotient of a medium amax amounts to.

    amax / max, amax fl(1 / max), amax rcp(max) and the exact quotient, rounded up to a power of two,
    are one for each mantissa of amax (test_ordinary.py).
    """
    if one.rule is ScaleRule.EXACT_RCEIL:
        return {"rule": ScaleRule.RCEIL}
    if one.rule is not ScaleRule.QUOTIENT:
        return {}
    element = one.element
    same = ("amax / {0:g}", "amax * (1 / {0:g})", "amax * rcp({0:g})")
    up, down = one.scale_rounding is Rounding.UP, one.scale_rounding is Rounding.TOWARD_ZERO
    plain = {"quotient": None, "scale_rounding": Rounding.NEAREST_EVEN}
    if up and one.quotient in [text.format(element.max) for text in same]:
        return {"rule": ScaleRule.RCEIL, **plain}
    if (up or down) and one.quotient == f"amax / {2**element.emax}":
        return {"rule": ScaleRule.CEIL if up else ScaleRule.FLOOR, **plain}
    return {}
