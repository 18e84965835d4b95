"""The quantized copies of q, k, v and dO that a recipe's products take, and how their stages are called."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.independent import codes, fp4, nvfp4, quantized
from tests.independent.matrices import Integers
from tests.independent.operands import Matrix, narrow
from tests.independent.quantized import Quantized

USES = {
    "q": ("s.q", "dk.q"),
    "k": ("s.k", "dq.k"),
    "v": ("o.v", "dp.v"),
    "do": ("dp.do", "dv.do"),
}
"""The uses of each input."""
_LEFT = ("s.q", "o.p", "dp.do", "dv.p", "dq.ds", "dk.ds")


def operand(recipe: Mapping[str, Any], use: str) -> Mapping[str, Any]:
    """A recipe's operand by its use."""
    side = "left" if use in _LEFT else "right"
    found: Mapping[str, Any] = recipe[use.split(".")[0]][side]
    return found


@dataclass(frozen=True, kw_only=True)
class Copies:
    """The copies of one input of one head: a copy for each use; uses may share one."""

    tensor: str
    by_use: Mapping[str, Quantized]
    is_traced: Mapping[str, bool]  # by use: whether its codes are stages

    def stages(self, uses: tuple[str, ...]) -> dict[str, Any]:
        """Codes and scales of the copies of some uses."""
        found: dict[str, Any] = {}
        shared = len({id(x) for x in self.by_use.values()}) == 1
        for use in uses:
            if use not in self.by_use or not self.is_traced[use]:
                continue
            name = self.tensor if shared else f"{self.tensor}.{use.split('.')[0]}"
            found |= quantized_stages(name, self.by_use[use])
        return found


def quantized_stages(name: str, copy: Quantized) -> dict[str, Any]:
    """Codes, of bfloat16 as 16 bits, and scales."""
    dtype = np.uint16 if copy.element is codes.BF16 else np.uint8
    found = {f"{name}.codes": copy.codes.astype(dtype)}
    if copy.scales is not None:
        found[f"{name}.scales"] = copy.scales.astype(np.uint8)
    if copy.tokens is not None and copy.scale_format == "ue4m3":
        found[f"{name}.token_scales"] = copy.tokens.astype(np.uint8)
    return found


def copies(tensor: str, values: Matrix, width: int, recipe: Mapping[str, Any]) -> Copies:
    """Quantize float32 bits [token][channel] for every use of an input."""
    made: dict[str, Quantized] = {}

    def copy(use: str) -> Quantized:
        if use not in made:
            given = operand(recipe, use)
            other, source = given["same_codes_as"], given["promoted_from"]
            if other:
                made[use] = copy(other)
            elif source:
                made[use] = fp4.promoted(copy(source), width, given["format"])
            else:
                found = _quantized(values, width, given)
                made[use] = replace(found, dequantized=given["dequantized"])
        return made[use]

    by_use = {use: copy(use) for use in USES[tensor]}
    traced = {use: x.element is not codes.BF16 for use, x in by_use.items()}
    return Copies(tensor=tensor, by_use=by_use, is_traced=traced)


def _quantized(values: Matrix, width: int, given: Mapping[str, Any]) -> Quantized:
    scope, form = given["scope"], given["format"]
    if form in fp4.PRESETS:
        return fp4.quantized(values, width, form)
    if form == nvfp4.PRESET:
        return nvfp4.quantized(values, width)
    if scope in ("block", "token"):
        return quantized.in_blocks(values, width, tuple(given["block"]), form)
    if scope == "previous_block":
        return quantized.by_previous_block(
            values, width, tuple(given["block"]), form, given["static_scale"]
        )
    element = codes.ELEMENTS[form]
    if scope == "static":
        return quantized.under_static_scale(values, element, width, given["static_scale"])
    return quantized.encoded(values, element, width)


def pair_operand(
    values: Matrix,
    width: int,
    given: Mapping[str, Any],
    *,
    is_p: bool,
) -> Quantized:
    """P or dS, float32 bits [query][key] with every factor in them, as a product takes it.

    A static scale of P is compensated by ``p_offset``, that of dS by the codes.
    """
    scope, form = given["scope"], given["format"]
    if form == nvfp4.PRESET:
        return replace(nvfp4.quantized(values, width), dequantized=given["dequantized"])
    if scope == "block":
        found = quantized.in_blocks(values, width, tuple(given["block"]), form)
        return replace(found, dequantized=given["dequantized"])
    element = codes.ELEMENTS[form]
    if scope == "static" and is_p:
        return quantized.encoded(values, element, width, given["static_scale"])
    if scope == "static":
        return quantized.under_static_scale(values, element, width, given["static_scale"])
    return quantized.encoded(values, element, width)


def half_values(copy: Quantized, width: int) -> Integers:
    """bfloat16 bits of the values of a copy."""
    return quantized.encoded(narrow_back(copy), codes.BF16, width).codes


def narrow_back(copy: Quantized) -> Matrix:
    """float32 bits of the values of a copy, rounded to bfloat16."""
    return [[x << 16 for x in row] for row in narrow(copy.values())]
