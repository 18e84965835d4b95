"""Operands of a recipe from codes and scales that a kernel, or anyone, gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flamia_ref._errors import shown, unknown_name
from flamia_ref.attention import inputs
from flamia_ref.attention.copies import INPUT_USES, copy_names
from flamia_ref.attention.prepared import OperandCopy, Prepared
from flamia_ref.attention.product import Operand, Scope
from flamia_ref.attention.recipe import Recipe
from flamia_ref.formats import E8M0, PRESETS


def operands_from(
    arrays: Mapping[str, Any], recipe: Recipe | str, *, guards: Mapping[str, Any] | None = None
) -> Prepared:
    """Operands from codes and scales by stage name, such as "q.codes", "q.scales", "k.s.codes", as the trace has them.

    Operands in bfloat16 have codes too here: uint16 [tokens, heads, channels]. `guards`: the bfloat16 codes of "q",
    "k", "v" or "do" that guarded blocks take. Layouts of kernels are not made.

    Raises: ValueError or TypeError of one line for unknown names, missing codes or scales, and types.
    """
    chosen = inputs.chosen_recipe(recipe)
    names = copy_names(chosen)
    by_name = {name: chosen.operand(use) for use, name in reversed(names.items())}
    found: dict[str, dict[str, Any]] = {}
    for stage, x in arrays.items():
        name, _, part = stage.rpartition(".")
        if name not in by_name or part not in _parts(by_name[name]):
            allowed = [f"{name}.{part}" for name, at in by_name.items() for part in _parts(at)]
            raise unknown_name("operand", stage, allowed)
        found.setdefault(name, {})[part] = _checked(stage, x, by_name[name], part)
    for name, parts in found.items():
        missing = [part for part in _parts(by_name[name]) if part not in parts]
        if missing:
            raise ValueError(f"operand {name!r} has no {', '.join(missing)}; give them too")
    high = {}
    for tensor, x in (guards or {}).items():
        if tensor not in INPUT_USES:
            raise unknown_name("guard", tensor, INPUT_USES)
        if np.dtype(inputs.checked_array(f"guards[{tensor!r}]", x).dtype) != np.uint16:
            raise TypeError(
                f"guards[{tensor!r}] holds {np.dtype(x.dtype).name}; it must be bfloat16 codes in uint16"
            )
        high[tensor] = _copy({"codes": x})
    return Prepared(
        operands={name: _copy(parts) for name, parts in found.items()}, guards=high, recipe=chosen
    )


def _parts(operand: Operand) -> tuple[str, ...]:
    """What a copy consists of."""
    if operand.format not in PRESETS:
        return ("codes",)
    if operand.scope is Scope.TOKEN and PRESETS[operand.format].scale is not E8M0:
        return ("codes", "scales", "token_scales")
    return ("codes", "scales")


def _checked(stage: str, x: Any, operand: Operand, part: str) -> Any:
    inputs.checked_array(stage, x)
    wide = operand.format == "bf16" and part == "codes"
    wanted = np.uint16 if wide else np.uint8
    if np.dtype(x.dtype) != wanted:
        raise TypeError(f"{stage} holds {np.dtype(x.dtype).name}; it must be {wanted.__name__}")
    if x.ndim != 3:
        raise ValueError(f"{stage} has shape {shown(tuple(x.shape))}; it must have three axes")
    return x


def _copy(parts: Mapping[str, Any]) -> OperandCopy:
    return OperandCopy(
        codes=parts["codes"],
        scales=parts.get("scales"),
        token_scales=parts.get("token_scales"),
        row_wise=None,
        column_wise=None,
    )
