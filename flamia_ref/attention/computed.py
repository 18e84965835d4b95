"""Which recipes this package computes: everything else is refused by the name of the part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from flamia_ref._errors import shown
from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.attention import inputs
from flamia_ref.attention.copies import INPUT_USES, OVER_CHANNELS, uses_of
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
from flamia_ref.attention.sides import taken_format
from flamia_ref.attention.smoothing import TILE
from flamia_ref.formats import BF16, E2M1, E8M0, FORMATS, PRESETS, UE4M3

_TOKEN_BLOCK = (1, "all")
_SQUARE = (32, 32)
_DEQUANTIZED = ((1, 16), (1, 32))
_OVER_KEYS = (Use.O_P, Use.DQ_DS)
_FP4 = ("sm100.tcgen05.mxf4nvf4", "sm120.mma.mxf4nvf4")
_CORRECTIONS = ("sm100.tcgen05.f16", "sm120.mma.bf16", "exact", "float32")
_INSTRUCTIONS = (
    "sm100.tcgen05.mxf8f6f4",
    "sm100.tcgen05.f8f6f4",
    "sm100.tcgen05.f16",
    "sm90.wgmma.fp8",
    "exact",
    "float32",
)
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
        if not recipe.has_backward and path.startswith("d"):
            continue
        _require(recipe, path, attrgetter(path)(recipe), allowed, _reason(path))
    if recipe.has_backward:
        dk, dv = recipe.backward.dk, recipe.backward.dv
        if dk.tile_order is not dv.tile_order:
            raise ValueError(
                f"recipe {recipe.name!r} has dk.tile_order = {shown(dk.tile_order)} and dv.tile_order ="
                f" {shown(dv.tile_order)}; one loop over query tiles adds to both, make them equal"
            )
    for name, product in recipe.products():
        _check_product(recipe, name, product)
    for tensor in INPUT_USES:
        for use in uses_of(recipe, tensor):
            _check_input(recipe, tensor, use)
    for use in _PAIRS:
        if recipe.has_use(use):
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
    fp4 = _is_fp4(product.left) and _is_fp4(product.right)
    _require(
        recipe,
        f"{name}.instruction",
        product.instruction,
        (*_FP4, "exact", "float32") if fp4 else _INSTRUCTIONS,
        "others do not take these operands with their scales",
    )
    if product.guard_instruction is not None:
        computed = ("sm100.tcgen05.f16", "exact", "float32")
        _require(recipe, f"{name}.guard_instruction", product.guard_instruction, computed)
    _check_smoothing(recipe, name, product)
    rules = INSTRUCTIONS[product.instruction]
    if product.k_order == "descending" and rules.terms is None:
        raise ValueError(
            f"recipe {recipe.name!r} has {name}.k_order = 'descending'; {rules.name} has no steps of a fixed length to"
            " reorder"
        )
    for side in ("left", "right"):
        operand: Operand = getattr(product, side)
        in_product = operand.scope not in (Scope.UNIT, Scope.HEAD)
        scaled = in_product and not operand.dequantized
        element = PRESETS[operand.format].element if scaled and operand.format in PRESETS else None
        element = element or FORMATS[taken_format(operand)]
        # An instruction that takes float32 takes their values in place of scales that are powers of two.
        plain = "fp32" in rules.operand_formats and (
            operand.format not in PRESETS or PRESETS[operand.format].scale is E8M0
        )
        if element.name not in rules.operand_formats or (
            scaled and not rules.scalings and not plain
        ):
            raise ValueError(
                f"recipe {recipe.name!r} has {name}.{side} in {operand.format}, which {rules.name} does not take"
            )


def _check_input(recipe: Recipe, tensor: str, use: Use) -> None:
    operand, path = recipe.operand(use), _path(use)
    if operand.dequantized:
        _check_dequantized(recipe, use)
        _check_sharing(recipe, tensor, use)
        return
    token = operand.block == _TOKEN_BLOCK
    if use in OVER_CHANNELS:
        folded: tuple[Use | None, ...] = (None,)
        blocks: tuple[Any, ...] = (None, _TOKEN_BLOCK, (1, 32), _SQUARE)
    else:
        folded = (_PARTNERS[use],) if token else (None,)
        blocks = (None, _TOKEN_BLOCK, (32, 1), _SQUARE)
    if operand.format in PRESETS and PRESETS[operand.format].element is E2M1:
        _require(recipe, f"{path}.promoted_from", operand.promoted_from, (None,))
        _check_fp4(recipe, use)
        blocks = ((1, 16),) if use in OVER_CHANNELS else ((16, 1),)
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
            allowed = (Scope.TOKEN, Scope.BLOCK)
        if operand.block == (16, 1):
            allowed = (Scope.BLOCK,)
        _require(recipe, f"{path}.scope", operand.scope, allowed)
    elif operand.scope is Scope.UNIT:
        _require(recipe, f"{path}.format", operand.format, ("bf16", "e4m3"))
    else:
        _require(recipe, f"{path}.format", operand.format, ("e4m3",))
    if operand.scope is Scope.HEAD:
        _check_descaled(recipe, use)
    _check_sharing(recipe, tensor, use)
    if operand.promoted_from is not None:
        others = (other for other in uses_of(recipe, tensor) if other != use)
        sources = [other for other in others if _is_fp4(recipe.operand(other))]
        _require(recipe, f"{path}.promoted_from", operand.promoted_from, sources or (None,))
        _require(recipe, f"{path}.block", operand.block, (_TOKEN_BLOCK,))


def _check_descaled(recipe: Recipe, use: Use) -> None:
    """Descales are computed where the forward takes them: into c, or into what O is divided by."""
    path = _path(use)
    if use not in (Use.S_Q, Use.S_K, Use.O_V):
        raise ValueError(
            f"recipe {recipe.name!r} has {path}.scope = 'head'; computed are descales of q and k in S and of v in O"
        )
    if use is Use.O_V:
        why = "o.right.scope is 'head', whose descale multiplies 1 / the row sum"
        allowed = ("reciprocal", "zero_safe_reciprocal", "zeroing_reciprocal", "division")
        _require(recipe, "softmax.normalisation", recipe.softmax.normalisation, allowed, why)
        _require(recipe, "softmax.base", recipe.softmax.base, ("raw_max", "integer_max"), why)
    elif recipe.softmax.lse == "scale_fma":
        raise ValueError(
            f"recipe {recipe.name!r} has {path}.scope = 'head' with softmax.lse = 'scale_fma', which takes no descales;"
            " take 'factor_fma' or 'log2_fma'"
        )
    if recipe.product(use.split(".")[0]).guarded:
        raise ValueError(
            f"recipe {recipe.name!r} has {path}.scope = 'head' in a product with guarded blocks, which take no"
            " descale; take the guard out"
        )


def _check_fp4(recipe: Recipe, use: Use) -> None:
    """FP4 is computed in S, q and k alike, and in O beside a P of the same format."""
    operand, path = recipe.operand(use), _path(use)
    product = recipe.product(use.split(".")[0])
    other = product.left if operand is product.right else product.right
    if use not in (Use.S_Q, Use.S_K, Use.O_V) or other.format != operand.format:
        raise ValueError(
            f"recipe {recipe.name!r} has {path} in {operand.format}; FP4 is computed in S, q and k alike, and in O, P"
            " and v alike"
        )
    if operand.scope is Scope.BLOCK and not _has_own_scales(operand):
        raise ValueError(
            f"recipe {recipe.name!r} has {path} in {operand.format} with scope 'block'; computed are formats with ue4m3"
            " scales and no tensor scale"
        )


def _has_own_scales(operand: Operand) -> bool:
    preset = PRESETS[operand.format]
    return preset.scale is UE4M3 and preset.tensor_scale is None


def _check_smoothing(recipe: Recipe, name: str, product: Product) -> None:
    """Smoothing is computed in S, of FP4 with scales of its blocks: of k, or of q and k."""
    allowed: dict[str, tuple[str, ...]] = {"left": ("none",), "right": ("none",)}
    fp4 = _is_fp4(product.left) and _has_own_scales(product.left)
    if name == "s" and fp4 and product.left.scope is Scope.BLOCK:
        allowed = {"left": ("none", "tile_mean"), "right": ("none", "document_mean")}
    for side, values in allowed.items():
        path, smoothing = f"{name}.{side}.smoothing", getattr(product, side).smoothing
        why = "it is computed in s alone, in FP4 with scope 'block'" if len(values) == 1 else ""
        _require(recipe, path, smoothing, values, why)
    if not product.corrected:
        return
    why = f"{name}.left.smoothing is 'tile_mean'"
    computed = product.correction_instruction
    _require(recipe, f"{name}.correction_instruction", computed, _CORRECTIONS, why)
    _require(recipe, "tiles.query", recipe.tiles.query, (32, 64, TILE), why)
    if product.guarded:
        raise ValueError(
            f"recipe {recipe.name!r} has guarded blocks in {name}, where {why}; they would need the mean, take the"
            " guard out"
        )


def _check_sharing(recipe: Recipe, tensor: str, use: Use) -> None:
    """A use takes its own codes, or those of another use of its input that makes such."""
    operand, path = recipe.operand(use), _path(use)
    others = tuple(other for other in uses_of(recipe, tensor) if other != use)
    _require(recipe, f"{path}.same_codes_as", operand.same_codes_as, (None, *others))
    if operand.same_codes_as is not None:
        other = recipe.operand(operand.same_codes_as)
        if not _one_copy(operand, other) or other.same_codes_as is not None:
            raise ValueError(
                f"recipe {recipe.name!r} has {path} take the codes of {operand.same_codes_as}, which has another"
                " format, block or scale, or takes those of a third; make them equal"
            )


def _check_dequantized(recipe: Recipe, use: Use) -> None:
    """Fake quantization is computed in blocks of one token, or of pairs of one query, by their own values."""
    operand, path = recipe.operand(use), _path(use)
    _require(recipe, f"{path}.block", operand.block, _DEQUANTIZED, "the operand is dequantized")
    _require(recipe, f"{path}.scope", operand.scope, (Scope.BLOCK,), "the operand is dequantized")
    _require(recipe, f"{path}.promoted_from", operand.promoted_from, (None,))
    if PRESETS[operand.format].tensor_scale is not None:
        raise ValueError(
            f"recipe {recipe.name!r} has {path}.format = {operand.format!r}, which has a tensor scale; a dequantized"
            " operand has those of its blocks alone"
        )
    if recipe.product(use.split(".")[0]).guarded:
        raise ValueError(
            f"recipe {recipe.name!r} has {path} dequantized in a product with guarded blocks; all of it is in bfloat16,"
            " take the guard out"
        )


def _is_fp4(operand: Operand) -> bool:
    """Whether a product takes e2m1 codes."""
    taken = operand.format in PRESETS and not operand.dequantized
    return taken and PRESETS[operand.format].element is E2M1


def _one_copy(one: Operand, other: Operand) -> bool:
    """Whether two uses can have the same codes and scales."""
    fields = ("format", "block", "scope", "static_scale", "promoted_from", "dequantized")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def _check_pairs(recipe: Recipe, use: Use) -> None:
    operand, path = recipe.operand(use), _path(use)
    if operand.dequantized:
        _check_dequantized(recipe, use)
        _require(recipe, f"{path}.same_codes_as", operand.same_codes_as, (None,))
        return
    _require(recipe, f"{path}.scale_folded_into", operand.scale_folded_into, (None,))
    blocks = ((1, 32) if use in _OVER_KEYS else (32, 1), _SQUARE)
    if operand.scope is Scope.LARGEST_SCORE or _is_fp4(operand):
        _check_largest_score(recipe, use)
    elif operand.format in PRESETS:
        _require(recipe, f"{path}.block", operand.block, blocks)
        _require(recipe, f"{path}.scope", operand.scope, (Scope.BLOCK,))
    elif operand.scope is Scope.UNIT:
        _require(recipe, f"{path}.format", operand.format, ("bf16", "e4m3"))
    else:
        _require(recipe, f"{path}.scope", operand.scope, (Scope.STATIC,))
        _require(recipe, f"{path}.format", operand.format, ("e4m3",))
    shared = (None, Use.DQ_DS) if use is Use.DK_DS else (None,)
    _require(recipe, f"{path}.same_codes_as", operand.same_codes_as, shared)
    if operand.same_codes_as is not None:
        dq, dk = recipe.backward.dq, recipe.backward.dk
        same = (operand.format, operand.block) == (dq.left.format, dq.left.block)
        folded = dk.right.scale_folded_into or dq.right.scale_folded_into
        if not same or operand.block != _SQUARE or folded or dq.guarded:
            raise ValueError(
                f"recipe {recipe.name!r} has one copy of dS for dQ and dK; it needs blocks of 32x32, nothing folded"
                " into it and no guard"
            )


def _check_largest_score(recipe: Recipe, use: Use) -> None:
    """P in FP4 is computed in O, with scales from its scores."""
    operand, path, softmax = recipe.operand(use), _path(use), recipe.softmax
    scopes = (Scope.LARGEST_SCORE,) if use is Use.O_P else (Scope.BLOCK,)
    _require(recipe, f"{path}.scope", operand.scope, scopes, "of P in O and of that alone")
    if use is not Use.O_P or not _is_fp4(operand) or not _has_own_scales(operand):
        raise ValueError(
            f"recipe {recipe.name!r} has {path} in {operand.format} with scope {operand.scope.value!r}; FP4 with ue4m3"
            " scales and no tensor scale is computed, of P in O"
        )
    why = f"{path}.scope is 'largest_score'"
    _require(recipe, f"{path}.promoted_from", operand.promoted_from, (None,), why)
    _require(recipe, f"{path}.block", operand.block, ((1, 16),), why)
    _require(recipe, "o.right.format", recipe.o.right.format, (operand.format,), why)
    _require(recipe, "softmax.base", softmax.base, ("raw_max",), why)
    _require(recipe, "softmax.exp2_argument", softmax.exp2_argument, ("fused",), why)
    _require(recipe, "softmax.emulated", softmax.emulated, (None,), why)
    _require(recipe, "softmax.row_sum_of", softmax.row_sum_of, ("p",), why)
    _require(recipe, "softmax.mask_value", softmax.mask_value, (None,), why)
    _require(recipe, "tiles.masked", recipe.tiles.masked, ("skipped",), why)
    if recipe.has_backward:
        kept = recipe.backward.gradient.p_for_dv
        _require(recipe, "gradient.p_for_dv", kept, ("recomputed",), why)


def _check_natural(recipe: Recipe) -> None:
    """A base in natural units, a P in the units of its static scale, and what P becomes out of its range."""
    softmax, left = recipe.softmax, recipe.o.left
    natural = softmax.base == "natural_max"
    if softmax.p_scaling == "static_scale":
        why = "softmax.p_scaling is 'static_scale'"
        _require(recipe, "o.left.scope", left.scope, (Scope.STATIC,), why)
        _require(recipe, "softmax.p_offset", softmax.p_offset, (0,), why)
    if softmax.p_overflow != "refused":
        why = f"softmax.p_overflow is {softmax.p_overflow!r}"
        _require(recipe, "o.left.scope", left.scope, (Scope.STATIC,), why)
        _require(recipe, "o.left.format", left.format, ("e4m3",), why)
    if not recipe.has_backward:
        return
    gradient = recipe.backward.gradient
    allowed = ("lse", "row_softmax") if natural else ("fold_into_dout", "lse")
    why = f"softmax.base is {softmax.base!r}"
    _require(recipe, "gradient.normalisation", gradient.normalisation, allowed, why)
    if natural:
        _require(recipe, "gradient.p_for_dv", gradient.p_for_dv, ("recomputed",), why)


def _check_softmax(recipe: Recipe) -> None:
    _check_natural(recipe)
    if recipe.has_backward:
        partials = (Accumulation.CHAINED, Accumulation.FLOAT32_PARTIALS)
        _require(recipe, "dq.accumulation", recipe.backward.dq.accumulation, partials)
    if recipe.o.accumulation is Accumulation.FUSED_PARTIALS:
        why = "o.accumulation is 'fused_partials', which multiplies by a factor"
        bases = ("raw_max", "scaled_max", "natural_max")
        _require(recipe, "softmax.base", recipe.softmax.base, bases, why)
        _require(recipe, "tiles.masked", recipe.tiles.masked, ("skipped",), why)
    if recipe.softmax.row_sum == "bfloat16_butterfly":
        why = "softmax.row_sum 'bfloat16_butterfly' adds up the columns of a tile of 32"
        _require(recipe, "tiles.key", recipe.tiles.key, (32,), why)
    if recipe.has_backward and recipe.backward.gradient.delta_source == "high_precision_out":
        why = "gradient.delta_source 'high_precision_out' makes an O of P in bfloat16 too"
        if (taken := taken_format(recipe.o.right)) != BF16.name:
            raise ValueError(
                f"recipe {recipe.name!r} has o.right in {taken}; computed are bf16 and dequantized operands: {why}"
            )
        _require(recipe, "tiles.masked", recipe.tiles.masked, ("skipped",), why)
    if recipe.tiles.masked == "computed":
        why = "tiles.masked is 'computed', where a tile that no row sees is zeros; 'skipped' takes every value"
        # A pair of tiles that is not computed reaches other rows through NaN codes, never through infinities.
        for use in filter(recipe.has_use, (Use.O_V, Use.DV_DO, Use.DQ_K, Use.DK_Q)):
            operand = recipe.operand(use)
            _require(recipe, f"{_path(use)}.dequantized", operand.dequantized, (False,), why)
            element, allowed = operand.format, (*PRESETS, "e4m3")
            if element not in allowed:
                raise ValueError(
                    f"recipe {recipe.name!r} has {_path(use)}.format = {shown(element)}; computed are block formats and"
                    f" 'e4m3': {why}"
                )
        for name, product in recipe.products():
            if name in ("o", "dv", "dq", "dk") and not INSTRUCTIONS[product.instruction].scalings:
                scaled = [
                    use
                    for use, operand in recipe.uses()
                    if use.split(".")[0] == name and operand.scope is not Scope.UNIT
                ]
                if scaled:  # in float32 their values can be infinite where their codes are not
                    raise ValueError(
                        f"recipe {recipe.name!r} has {name}.instruction = {product.instruction!r}, which takes the"
                        f" values of {scaled[0]}; computed are instructions that take scales: {why}"
                    )
        if not recipe.has_backward:
            return
        gradient = recipe.backward.gradient
        _require(recipe, "gradient.heads", gradient.heads, ("float32_sum",), why)
        _require(recipe, "dq.accumulation", recipe.backward.dq.accumulation, _CHAINED, why)
        _require(recipe, "gradient.masked_ds", gradient.masked_ds, ("select",), why)
