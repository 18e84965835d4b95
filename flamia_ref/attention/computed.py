"""Which recipes this package computes: everything else is refused by the name of the part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from flamia_ref._errors import shown
from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.attention.copies import INPUT_USES, OVER_CHANNELS
from flamia_ref.attention.product import (
    Accumulation,
    Guard,
    Operand,
    Product,
    Scope,
    TileOrder,
    Use,
)
from flamia_ref.attention.recipe import Recipe
from flamia_ref.formats import E4M3, FORMATS, PRESETS

_TOKEN_BLOCK = (1, "all")
_SQUARE = (32, 32)
_OVER_KEYS = (Use.O_P, Use.DQ_DS)
_E4M3_EXPONENT = E4M3.emax
_INSTRUCTIONS = ("sm100.tcgen05.mxf8f6f4", "sm100.tcgen05.f16", "exact", "float32")
_ASCENDING, _CHAINED = (TileOrder.ASCENDING,), (Accumulation.CHAINED,)

_FIXED: Mapping[str, tuple[Any, ...]] = {
    "input": ("bf16",),
    "output": ("bf16",),
    "tiles.query": (32, 64, 128),
    **{f"{product}.tile_order": _ASCENDING for product in ("s", "dp", "dv", "dk")},
    "o.tile_order": (TileOrder.ASCENDING, TileOrder.DESCENDING),
    **{f"{product}.accumulation": _CHAINED for product in ("s", "o", "dp", "dv", "dk")},
    **{f"{product}.right.guard": (Guard.NONE,) for product in ("dv", "dk")},
    **{f"{product}.left.guard": (Guard.NONE,) for product in ("s", "o", "dp", "dv", "dq", "dk")},
}
"""Values that are computed, by dotted path into a recipe."""

_PARTNERS = {
    Use.O_V: Use.O_P,
    Use.DV_DO: Use.DV_P,
    Use.DQ_K: Use.DQ_DS,
    Use.DK_Q: Use.DK_DS,
}
"""The use whose values can take the scale of a token operand."""


def check_computed(recipe: Recipe) -> None:
    """Refuse a recipe that this package does not compute, naming the part and what is computed."""
    for path, allowed in _FIXED.items():
        _require(recipe, path, attrgetter(path)(recipe), allowed)
    if recipe.tiles.query != recipe.tiles.key:
        raise ValueError(
            f"recipe {recipe.name!r} has tiles of {recipe.tiles.query} queries and {recipe.tiles.key} keys;"
            " square tiles are computed"
        )
    for name in ("s", "o", "dp", "dv", "dq", "dk"):
        _check_product(recipe, name, getattr(recipe, name))
    for tensor, uses in INPUT_USES.items():
        for use in uses:
            _check_input(recipe, tensor, use)
    for use in (Use.O_P, Use.DV_P, Use.DQ_DS, Use.DK_DS):
        _check_pairs(recipe, use)
    _check_softmax(recipe)


def _require(recipe: Recipe, path: str, value: Any, allowed: Iterable[Any]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(
            f"recipe {recipe.name!r} has {path} = {shown(value)}; computed are {' or '.join(map(shown, allowed))}"
        )


def _path(use: Use) -> str:
    product = use.split(".")[0]
    return f"{product}.{'left' if use in (Use.S_Q, Use.DP_DO) or use in _PAIRS else 'right'}"


_PAIRS = (Use.O_P, Use.DV_P, Use.DQ_DS, Use.DK_DS)


def _check_product(recipe: Recipe, name: str, product: Product) -> None:
    _require(recipe, f"{name}.instruction", product.instruction, _INSTRUCTIONS)
    if product.guard_instruction is not None:
        computed = ("sm100.tcgen05.f16", "exact", "float32")
        _require(recipe, f"{name}.guard_instruction", product.guard_instruction, computed)
    rules = INSTRUCTIONS[product.instruction]
    for side in ("left", "right"):
        operand: Operand = getattr(product, side)
        scaled = operand.scope is not Scope.UNIT
        element = PRESETS[operand.format].element if scaled and operand.format in PRESETS else None
        element = element or FORMATS[operand.format]
        if element.name not in rules.operand_formats or (scaled and not rules.scalings):
            raise ValueError(
                f"recipe {recipe.name!r} has {name}.{side} in {operand.format}, which {rules.name} does not take"
            )


def _check_input(recipe: Recipe, tensor: str, use: Use) -> None:
    operand, path = recipe.operand(use), _path(use)
    folded = operand.scale_folded_into
    if use in OVER_CHANNELS:
        _require(recipe, f"{path}.scale_folded_into", folded, (None,))
        blocks: tuple[Any, ...] = (None, _TOKEN_BLOCK, (1, 32), _SQUARE)
    elif operand.block == _TOKEN_BLOCK:
        _require(recipe, f"{path}.scale_folded_into", folded, (_PARTNERS[use],))
        blocks = (_TOKEN_BLOCK,)
    else:
        _require(recipe, f"{path}.scale_folded_into", folded, (None,))
        blocks = (None, (32, 1), _SQUARE)
    _require(recipe, f"{path}.block", operand.block, blocks)
    token = operand.block == _TOKEN_BLOCK
    if operand.format in PRESETS:
        _require(recipe, f"{path}.scope", operand.scope, (Scope.TOKEN if token else Scope.BLOCK,))
    else:
        _require(recipe, f"{path}.format", operand.format, ("bf16",))
    earlier = tuple(other for other in INPUT_USES[tensor] if other < use or other != use)
    _require(recipe, f"{path}.same_codes_as", operand.same_codes_as, (None, *earlier))
    if operand.same_codes_as is not None:
        other = recipe.operand(operand.same_codes_as)
        same = (operand.format, operand.block) == (other.format, other.block)
        if not same or other.same_codes_as is not None:
            raise ValueError(
                f"recipe {recipe.name!r} has {path} take the codes of {operand.same_codes_as}, which has another format"
                " or block, or takes those of a third; make them equal"
            )


def _check_pairs(recipe: Recipe, use: Use) -> None:
    operand, path = recipe.operand(use), _path(use)
    _require(recipe, f"{path}.scale_folded_into", operand.scale_folded_into, (None,))
    blocks = ((1, 32) if use in _OVER_KEYS else (32, 1), _SQUARE)
    if operand.format in PRESETS:
        _require(recipe, f"{path}.block", operand.block, blocks)
        _require(recipe, f"{path}.scope", operand.scope, (Scope.BLOCK,))
    elif operand.scope is Scope.UNIT:
        _require(recipe, f"{path}.format", operand.format, ("bf16",))
    else:
        _require(recipe, f"{path}.format", operand.format, ("e4m3",))
    shared = (None, Use.DQ_DS) if use is Use.DK_DS else (None,)
    _require(recipe, f"{path}.same_codes_as", operand.same_codes_as, shared)
    if operand.same_codes_as is not None:
        same = (operand.format, operand.block) == (
            recipe.dq.left.format,
            recipe.dq.left.block,
        )
        folded = recipe.dk.right.scale_folded_into or recipe.dq.right.scale_folded_into
        if not same or operand.block != _SQUARE or folded or recipe.dq.guarded:
            raise ValueError(
                f"recipe {recipe.name!r} has one copy of dS for dQ and dK; it needs blocks of 32x32, nothing folded"
                " into it and no guard"
            )


def _check_softmax(recipe: Recipe) -> None:
    softmax, gradient = recipe.softmax, recipe.gradient
    integer = softmax.base == "integer_max"
    path = "softmax.exp2_argument"
    _require(recipe, path, softmax.exp2_argument, ("split" if integer else "fused",))
    lse = {"integer_max": "log2_sum", "raw_max": "log2_fma", "scaled_max": "natural_fma"}
    _require(recipe, "softmax.lse", softmax.lse, (lse[softmax.base],))
    if integer:
        _require(recipe, "softmax.rescale_threshold", softmax.rescale_threshold, (0,))
        _require(recipe, "softmax.emulated", softmax.emulated, (None,))
    normalisation = "fold_into_dout" if integer else "lse"
    _require(recipe, "gradient.normalisation", gradient.normalisation, (normalisation,))
    reach = softmax.rescale_threshold + softmax.p_offset
    if recipe.o.left.scope is Scope.STATIC and reach > _E4M3_EXPONENT:
        raise ValueError(
            f"recipe {recipe.name!r} lets P reach 2^{reach}, rescale_threshold and p_offset together; e4m3 holds"
            f" 2^{_E4M3_EXPONENT}, lower one of them"
        )
    # P is below 2, and below 1 up to rounding where lse is in it.
    reach = gradient.p_offset + (1 if normalisation == "fold_into_dout" else 0)
    if recipe.dv.left.scope is Scope.STATIC and reach > _E4M3_EXPONENT:
        raise ValueError(
            f"recipe {recipe.name!r} lets dV's P reach 2^{reach} by gradient.p_offset = {gradient.p_offset}; e4m3 holds"
            f" 2^{_E4M3_EXPONENT}, lower it"
        )
    # A pair of tiles that is not computed reaches other rows through NaN codes, never through infinities.
    if recipe.tiles.masked == "computed":
        for use in (Use.O_V, Use.DV_DO, Use.DQ_K, Use.DK_Q):
            formats = tuple(PRESETS)
            _require(recipe, f"{_path(use)}.format", recipe.operand(use).format, formats)
        _require(recipe, "gradient.heads", gradient.heads, ("float32_sum",))
        _require(recipe, "dq.accumulation", recipe.dq.accumulation, _CHAINED)
