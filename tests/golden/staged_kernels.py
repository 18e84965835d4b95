"""The simulator behind the kernel protocol stage by stage, codes in and codes out."""

from typing import Any

import numpy as np

from flamia_ref import attention
from flamia_ref.attention.copies import INPUT_USES, copy_names, needs_high

PARTS = ("codes", "scales", "token_scales")


def quantize(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any,
    recipe_json: str,
    trace: Any,
    cu_seqlens_k: Any = None,
) -> dict[str, Any]:
    recipe = attention.Recipe.from_json(recipe_json)
    made = attention.prepare(q, k, v, recipe, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    return {
        f"{name}.{part}": getattr(copy, part)
        for name, copy in made.operands.items()
        for part in PARTS
        if f"{name}.{part}" in trace
    }


def forward(
    operands: Any,
    *,
    cu_seqlens: Any,
    causal: bool,
    softmax_scale: float,
    recipe_json: str,
    trace: Any,
    recipe: str,
    layouts: Any,
    **masks: Any,
) -> dict[str, Any]:
    chosen = attention.Recipe.from_json(recipe_json)
    check_layouts(layouts, operands, chosen)
    names = [n for n in attention.forward_stages(chosen) if n in trace and computed(n)]
    found = attention.forward_from_operands(
        prepared(operands, chosen, ("s", "o")),
        cu_seqlens=cu_seqlens,
        causal=causal,
        softmax_scale=softmax_scale,
        trace=names,
        **masks,
    )
    return {**found.trace, "out": found.out, "lse": found.lse}


def backward(
    operands: Any,
    *,
    cu_seqlens: Any,
    causal: bool,
    softmax_scale: float,
    out: Any,
    lse: Any,
    dout: Any,
    recipe_json: str,
    trace: Any,
    layouts: Any,
    cu_seqlens_k: Any = None,
    alignment: str = "bottom_right",
    window: Any = None,
    softcap: Any = None,
    sink: Any = None,
) -> dict[str, Any]:
    recipe = attention.Recipe.from_json(recipe_json)
    check_layouts(layouts, operands, recipe)
    ahead = attention.Forward.from_kernel(
        out.astype(np.float32),
        lse,
        recipe,
        cu_seqlens=cu_seqlens,
        causal=causal,
        softmax_scale=softmax_scale,
        cu_seqlens_k=cu_seqlens_k,
        alignment=alignment,
        window=window,
        softcap=softcap,
        sink=sink,
    )
    found = attention.backward_from_operands(
        prepared(operands, recipe, ("s", "dp", "dq", "dk")),
        attention.preprocess(dout, ahead),
        ahead,
        trace=[n for n in attention.backward_stages(recipe) if n in trace and computed(n)],
    )
    results = {**found.trace, "dq": found.dq, "dk": found.dk, "dv": found.dv}
    return results if found.dsink is None else results | {"dsink": found.dsink}


def computed(stage: str) -> bool:
    """Whether a stage is no operand of an input."""
    return stage.split(".")[0] not in ("q", "k", "v", "do")


def prepared(operands: Any, recipe: attention.Recipe, products: tuple[str, ...]) -> Any:
    """The simulator's operands from what the kernel was given."""
    arrays = {
        name: x for name, x in operands.items() if "." in name and name.split(".")[-1] in PARTS
    }
    arrays = {name: x for name, x in arrays.items() if not name.startswith("do")}
    for use, name in copy_names(recipe).items():
        product, tensor = use.split(".")
        if tensor != "do" and product in products and f"{name}.codes" not in arrays:
            arrays[f"{name}.codes"] = operands[tensor].view(np.uint16)
    guards = {
        tensor: operands[tensor].view(np.uint16)
        for tensor in ("q", "k", "v")
        if recipe.guard_operands == "inputs"
        and any(needs_high(recipe, use) for use in INPUT_USES[tensor])
    }
    return attention.operands_from(arrays, recipe, guards=guards or None)


def check_layouts(layouts: Any, operands: Any, recipe: attention.Recipe) -> None:
    """Hold the padded payloads and scales to the operands in order."""
    assert layouts
    names = {str(use): name for use, name in copy_names(recipe).items()}
    for use, layout in layouts.items():
        codes = operands.get(f"{names[use]}.codes")
        if codes is not None:
            assert np.array_equal(layout.codes(), codes), use
            assert layout.payload.shape[1 if layout.orientation == "row_wise" else 2] % 128 == 0
        scales = layout.copied_scales()
        if scales is not None:
            assert np.array_equal(scales, operands[f"{names[use]}.scales"]), use
