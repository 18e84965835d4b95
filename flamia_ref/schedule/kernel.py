"""A kernel as the cost model sees it: the size of its tiles, and what each score goes through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flamia_ref.attention import Recipe
from flamia_ref.attention.product import Scope, Use
from flamia_ref.formats import FORMATS, PRESETS
from flamia_ref.schedule.work import Pass, Size

PRODUCTS: Mapping[Pass, tuple[str, ...]] = {
    Pass.FORWARD: ("s", "o"),
    Pass.BACKWARD: ("s", "dp", "dv", "dq", "dk"),
    Pass.BACKWARD_DQ: ("s", "dp", "dq"),
    Pass.BACKWARD_DKDV: ("s", "dp", "dv", "dk"),
}
"""The matrix products of each pass."""

BYTES: Mapping[str, float] = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
"""Bytes of an element by the rate that its product runs at."""

EMULATION = 10
"""float32 operations of an exp2 that is no special function, assumed: two that split off the integer part, a polynomial
of degree 3 to 5, and an integer addition to the exponent, as FlashAttention-4 describes it, arXiv:2603.05451."""

# Operations of a float32 lane on one score: counted from the formulas, assumed to be what kernels issue.
_FORWARD = 3.0  # scale and subtract the maximum in one, the maximum, the row sum
_BACKWARD = 3.0  # scale and subtract in one, subtract delta, multiply by P
_BLOCK_SCALE = 2.0  # the largest magnitude, and the multiplication by the reciprocal of the scale


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One launch of a recipe.

    Attributes:
        launch: the pass.
        size: queries and keys of a tile product, and the stages.
        rates: at which rate each product runs: "bf16", "fp8" or "fp4", the slower of its operands.
        exp2: special functions a score; the rest is emulated by float32 operations.
        conversions: values that are converted to 8 or 16 bits a score.
        float32: float32 operations a score, those that emulate exp2 too.
        copies: how many copies of dS are written to shared memory, one where dQ and dK take the same.
        guarded: the products whose guarded blocks are computed in bfloat16 too.
    """

    launch: Pass
    size: Size
    rates: Mapping[str, str]
    exp2: float
    conversions: float
    float32: float
    copies: int
    guarded: tuple[str, ...] = ()


def kernel_of(recipe: Recipe, launch: Pass | str, *, size: Size, emulated: float = 0.0) -> Kernel:
    """The kernel of one pass of a recipe.

    Args:
        recipe: the recipe.
        launch: the pass.
        size: its tiles.
        emulated: the share of exp2 that is computed by float32 operations, 0 to 1.

    Raises: ValueError for a pass that the recipe does not have, and a share outside 0 to 1.
    """
    launch = Pass(launch)
    if launch is not Pass.FORWARD and not recipe.has_backward:
        raise ValueError(
            f"the recipe {recipe.name!r} has no backward; only its forward can be scheduled"
        )
    if not 0 <= emulated <= 1:
        raise ValueError(f"emulated is {emulated}; it must be a share, 0 to 1")
    products = PRODUCTS[launch]
    made = {  # copies of P and of dS that the products take
        (recipe.operand(use).format, recipe.operand(use).block, use.split(".")[1]): use
        for use in (Use.O_P, Use.DV_P, Use.DQ_DS, Use.DK_DS)
        if use.split(".")[0] in products
    }
    scaled = sum(
        recipe.operand(use).scope in (Scope.BLOCK, Scope.LARGEST_SCORE) for use in made.values()
    )
    base = _FORWARD if launch is Pass.FORWARD else _BACKWARD
    return Kernel(
        launch=launch,
        size=size,
        rates={name: _rate(recipe, name) for name in products},
        exp2=1.0 - emulated,
        conversions=float(len(made)),
        float32=base + scaled * _BLOCK_SCALE + emulated * EMULATION,
        copies=sum(stage == "ds" for _, _, stage in made),
        guarded=tuple(name for name in products if recipe.product(name).guarded),
    )


def _rate(recipe: Recipe, product: str) -> str:
    """The rate of a product: of its wider operand."""
    uses = [use for use, _ in recipe.uses() if use.split(".")[0] == product]
    bits = [_bits(recipe, use) for use in uses]
    return {16: "bf16", 8: "fp8", 4: "fp4"}[max(bits)]


def _bits(recipe: Recipe, use: Use) -> int:
    """Bits of an element as the tensor core takes it."""
    operand = recipe.operand(use)
    if operand.dequantized:
        return 16
    format = operand.format
    bits = PRESETS[format].element.bits if format in PRESETS else FORMATS[format].bits
    return 16 if bits > 8 else 8 if bits > 4 else 4
