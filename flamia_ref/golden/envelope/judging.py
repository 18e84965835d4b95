"""What a recipe permits of the tensors of a case, given what a kernel returned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.attention.product import Accumulation, Scope
from flamia_ref.formats import E8M0, PRESETS
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.dataflow import dataflow
from flamia_ref.golden.envelope.record import Bits, Permitted, Record, wide
from flamia_ref.golden.stage import Role

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe


def permitted(
    spec: CaseSpec,
    recipe: Recipe,
    expected: Mapping[str, Bits],
    given: Mapping[str, Bits],
    wanted: Iterable[str] | None = None,
    *,
    instruction: str | None = None,
) -> dict[str, Permitted]:
    """Return what is permitted of each tensor in `wanted`, all by default, that orders of additions can change.

    `expected` are the tensors of the pack; `given` those that a kernel gave, by name, as bits of the same shape:
    float32 as uint32, bfloat16 as uint16. Each is judged by the stages that it is computed from: the kernel's own where
    it gave them, else what the recipe permits of them.

    Raises ValueError for a recipe without envelopes, and for an unknown instruction.
    """
    check_supported(recipe)
    machine = None if instruction is None else INSTRUCTIONS[instruction]
    from flamia_ref.golden.envelope.passes import backward, forward

    places = dataflow(recipe).places(spec)
    asked = frozenset(places) if wanted is None else frozenset(wanted)
    record = Record(spec, places, {name: x for name, x in given.items() if name in places}, asked)
    later = any(
        places[name].stage.backward for name in asked if places[name].stage.role is not Role.INPUT
    )
    o = forward(spec, recipe, expected, record, machine)
    if later:
        out, lse = (given.get(name, expected[name]) for name in ("out", "lse"))
        backward(
            spec, recipe, expected, record, wide(np.asarray(out)), wide(np.asarray(lse)), o, machine
        )
    return record.found


def check_supported(recipe: Recipe) -> None:
    """Raise ValueError for a recipe whose steps have no bounds here."""
    if recipe.has_backward and recipe.backward.gradient.p_for_dv != "recomputed":
        raise ValueError(
            f"recipe {recipe.name!r} has p_for_dv {recipe.backward.gradient.p_for_dv!r}; envelopes are of a"
            " recomputed P"
        )
    if recipe.has_backward and recipe.backward.gradient.delta_source == "high_precision_out":
        raise ValueError(
            f"recipe {recipe.name!r} has delta of an O of P in bfloat16; envelopes have no such O"
        )
    softmax = recipe.softmax
    if softmax.base == "natural_max":
        raise ValueError(
            f"recipe {recipe.name!r} has base 'natural_max'; envelopes are of a P by powers of two"
        )
    if softmax.p_overflow == "zero" or softmax.p_scaling == "static_scale":
        raise ValueError(
            f"recipe {recipe.name!r} has p_overflow {softmax.p_overflow!r} and p_scaling {softmax.p_scaling!r};"
            " envelopes are of a P that is encoded as it is"
        )
    for name, product in recipe.products():
        plain = not INSTRUCTIONS[product.instruction].scalings
        sides = (product.left, product.right)
        unscaled = (Scope.UNIT, Scope.HEAD)  # descales are no part of a product
        if plain and any(one.scope not in unscaled and not one.dequantized for one in sides):
            raise ValueError(
                f"recipe {recipe.name!r} has {name}.instruction {product.instruction!r} for operands with scales;"
                " envelopes are of instructions that take them"
            )
    if recipe.softmax.row_sum == "bfloat16_butterfly":
        raise ValueError(
            f"recipe {recipe.name!r} adds up rows in bfloat16; envelopes hold float32 sums"
        )
    if recipe.s.corrected:
        raise ValueError(
            f"recipe {recipe.name!r} begins S at a product of means; envelopes begin it at 0"
        )
    if recipe.o.accumulation is Accumulation.FUSED_PARTIALS or recipe.softmax.row_sum == "octets":
        raise ValueError(
            f"recipe {recipe.name!r} rescales sums as it adds to them, in one rounding; envelopes round each step"
        )
    if recipe.softmax.p_scale != 1:
        raise ValueError(
            f"recipe {recipe.name!r} has p_scale {recipe.softmax.p_scale}; envelopes are of a P by powers of two"
        )
    for use, operand in recipe.uses():
        if operand.dequantized:
            raise ValueError(
                f"{use} is dequantized; envelopes hold codes as products take them with their scales"
            )
        pairs = use.split(".")[1] in ("p", "ds")
        if pairs and operand.format in PRESETS and PRESETS[operand.format].scale is not E8M0:
            raise ValueError(f"{use} has scales that are no powers of two; envelopes hold e8m0")
