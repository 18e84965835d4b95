"""Which recipes this package computes: everything else is refused by the name of the part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from flamia_ref._errors import shown
from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.attention import inputs
from flamia_ref.attention.copies import INPUT_USES, OVER_CHANNELS
from flamia_ref.attention.product import (
    KEY_TILE_ORDERS,
    QUERY_TILE_ORDERS,
    Accumulation,
    Guard,
    Operand,
    Product,
    Scope,
    TileOrder,
    Use,
)
from flamia_ref.attention.recipe import Recipe
from flamia_ref.formats import E2M1, FORMATS, PRESETS

_TOKEN_BLOCK = (1, "all")
_SQUARE = (32, 32)
_OVER_KEYS = (Use.O_P, Use.DQ_DS)
_FP4 = "sm100.tcgen05.mxf4nvf4"
_INSTRUCTIONS = ("sm100.tcgen05.mxf8f6f4", "sm100.tcgen05.f16", "exact", "float32")
_ASCENDING, _CHAINED = (TileOrder.ASCENDING,), (Accumulation.CHAINED,)

_FIXED: Mapping[str, tuple[Any, ...]] = {
    "input": ("bf16",),
    "output": ("bf16",),
    **{f"{product}.tile_order": _ASCENDING for product in ("s", "dp")},
    **{f"{product}.tile_order": QUERY_TILE_ORDERS for product in ("dv", "dk")},
    "o.tile_order": KEY_TILE_ORDERS,
    **{f"{product}.accumulation": _CHAINED for product in ("s", "dp", "dv", "dk")},
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


def computed_recipe(recipe: Recipe | str) -> Recipe:
    """The recipe that a `recipe` argument means, if this package computes it."""
    chosen = inputs.chosen_recipe(recipe)
    check_computed(chosen)
    return chosen


def check_computed(recipe: Any) -> None:
    """Refuse a recipe that this package does not compute, naming the part and what is computed, or what is none."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is {shown(recipe)}; it must be a Recipe, such as RECIPES[name]")
    for path, allowed in _FIXED.items():
        _require(recipe, path, attrgetter(path)(recipe), allowed, _reason(path))
    if recipe.dk.tile_order is not recipe.dv.tile_order:
        raise ValueError(
            f"recipe {recipe.name!r} has dk.tile_order = {shown(recipe.dk.tile_order)} and dv.tile_order ="
            f" {shown(recipe.dv.tile_order)}; one loop over query tiles adds to both, make them equal"
        )
    for name in ("s", "o", "dp", "dv", "dq", "dk"):
        _check_product(recipe, name, getattr(recipe, name))
    for tensor, uses in INPUT_USES.items():
        for use in uses:
            _check_input(recipe, tensor, use)
    for use in (Use.O_P, Use.DV_P, Use.DQ_DS, Use.DK_DS):
        _check_pairs(recipe, use)
    _check_softmax(recipe)


def _require(recipe: Recipe, path: str, value: Any, allowed: Iterable[Any], why: str = "") -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        are = "is" if len(allowed) == 1 else "are"
        raise ValueError(
            f"recipe {recipe.name!r} has {path} = {shown(value)}; computed {are}"
            f" {' or '.join(map(shown, allowed))}{f': {why}' if why else ''}"
        )


def _reason(path: str) -> str:
    """Why a fixed part has no other value."""
    if path in ("input", "output"):
        return "inputs and results are rounded as bfloat16 is"
    product, _, part = path.partition(".")
    if part == "tile_order" and product in ("s", "dp"):
        return "it is a sum over channels, which are in one tile"
    if part == "accumulation":
        return "float32 partial sums are those of O and dQ, over key tiles"
    if part.endswith("guard"):
        return "the other operand of the product has the guard, or none has"
    return ""


def _path(use: Use) -> str:
    product = use.split(".")[0]
    return f"{product}.{'left' if use in (Use.S_Q, Use.DP_DO) or use in _PAIRS else 'right'}"


_PAIRS = (Use.O_P, Use.DV_P, Use.DQ_DS, Use.DK_DS)


def _check_product(recipe: Recipe, name: str, product: Product) -> None:
    fp4 = name == "s" and _is_fp4(product.left) and _is_fp4(product.right)
    _require(
        recipe,
        f"{name}.instruction",
        product.instruction,
        (_FP4, "exact", "float32") if fp4 else _INSTRUCTIONS,
        "others do not take these operands with their scales",
    )
    if product.guard_instruction is not None:
        computed = ("sm100.tcgen05.f16", "exact", "float32")
        _require(recipe, f"{name}.guard_instruction", product.guard_instruction, computed)
    rules = INSTRUCTIONS[product.instruction]
    if product.k_order == "descending" and rules.terms is None:
        raise ValueError(
            f"recipe {recipe.name!r} has {name}.k_order = 'descending'; {rules.name} has no steps of a fixed length to"
            " reorder"
        )
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
    token = operand.block == _TOKEN_BLOCK
    if use in OVER_CHANNELS:
        folded: tuple[Use | None, ...] = (None,)
        blocks: tuple[Any, ...] = (None, _TOKEN_BLOCK, (1, 32), _SQUARE)
    else:
        folded = (_PARTNERS[use],) if token else (None,)
        blocks = (None, _TOKEN_BLOCK, (32, 1), _SQUARE)
    if operand.format in PRESETS and PRESETS[operand.format].element is E2M1:
        _require(recipe, f"{path}.promoted_from", operand.promoted_from, (None,))
        other = recipe.s.right if use is Use.S_Q else recipe.s.left
        if use not in (Use.S_Q, Use.S_K) or other.format != operand.format:
            raise ValueError(
                f"recipe {recipe.name!r} has {path} in {operand.format}; FP4 is computed in S alone, q and k alike"
            )
        blocks = ((1, 16),)
    _require(recipe, f"{path}.block", operand.block, blocks)
    _require(
        recipe,
        f"{path}.scale_folded_into",
        operand.scale_folded_into,
        folded,
        "the scale of a whole token differs along the contraction over tokens, so the other operand takes it"
        if folded[0] is not None
        else "only the scale of a whole token, in a contraction over tokens, can be taken by the other operand",
    )
    if operand.format in PRESETS:
        allowed: tuple[Scope, ...] = (Scope.TOKEN,) if token else (Scope.BLOCK,)
        if operand.block in ((32, 1), _SQUARE):
            allowed = (Scope.BLOCK, Scope.PREVIOUS_BLOCK)
        if operand.block == (1, 16):
            allowed = (Scope.TOKEN,)
        _require(recipe, f"{path}.scope", operand.scope, allowed)
    elif operand.scope is Scope.UNIT:
        _require(recipe, f"{path}.format", operand.format, ("bf16",))
    else:
        _require(recipe, f"{path}.format", operand.format, ("e4m3",))
    uses = INPUT_USES[tensor]
    earlier = tuple(other for other in uses if other != use)
    _require(recipe, f"{path}.same_codes_as", operand.same_codes_as, (None, *earlier))
    if operand.same_codes_as is not None:
        other = recipe.operand(operand.same_codes_as)
        if not _one_copy(operand, other) or other.same_codes_as is not None:
            raise ValueError(
                f"recipe {recipe.name!r} has {path} take the codes of {operand.same_codes_as}, which has another"
                " format, block or scale, or takes those of a third; make them equal"
            )
    if operand.promoted_from is not None:
        sources = [other for other in earlier if _is_fp4(recipe.operand(other))]
        _require(recipe, f"{path}.promoted_from", operand.promoted_from, sources or (None,))
        _require(recipe, f"{path}.block", operand.block, (_TOKEN_BLOCK,))


def _is_fp4(operand: Operand) -> bool:
    return operand.format in PRESETS and PRESETS[operand.format].element is E2M1


def _one_copy(one: Operand, other: Operand) -> bool:
    """Whether two uses can have the same codes and scales."""
    fields = ("format", "block", "scope", "static_scale", "promoted_from")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


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
    gradient = recipe.gradient
    if recipe.tiles.masked == "computed":
        why = "tiles.masked is 'computed', where a tile that no row sees is zeros; 'skipped' takes every value"
        # A pair of tiles that is not computed reaches other rows through NaN codes, never through infinities.
        for use in (Use.O_V, Use.DV_DO, Use.DQ_K, Use.DK_Q):
            element, allowed = recipe.operand(use).format, (*PRESETS, "e4m3")
            if element not in allowed:
                raise ValueError(
                    f"recipe {recipe.name!r} has {_path(use)}.format = {shown(element)}; computed are block formats and"
                    f" 'e4m3': {why}"
                )
        _require(recipe, "gradient.heads", gradient.heads, ("float32_sum",), why)
        _require(recipe, "dq.accumulation", recipe.dq.accumulation, _CHAINED, why)
        _require(recipe, "gradient.masked_ds", gradient.masked_ds, ("select",), why)
