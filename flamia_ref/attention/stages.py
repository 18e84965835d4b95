"""The stages of a recipe's dataflow by name: what can be traced, and what golden packs hold, in order.

- `<operand>.codes` [tokens, heads, head_dim] of q, k, v and, from the backward, do. Where the uses of an operand
  differ, the name has the use, as `k.s.codes` and `k.dq.codes`. Operands in bfloat16 have none: they are the inputs.
- `<operand>.scales`: float32 [documents, kv_heads] for one descale a document and key/value head, else uint8
  [tokens, heads, 1] for one scale a token, [tokens, heads, ceil(head_dim / 32)] for blocks along channels, [token
  blocks, heads, head_dim] for blocks of 32 tokens, [token blocks, heads, ceil(head_dim / 32)] for blocks of 32 tokens
  and 32 channels. Token blocks start at each document. NVFP4 has 16 in place of 32.
- `s`, `p` and in the backward `dp`, `p.dv`, `ds`: float32, lists with one [heads, queries, keys] array a document.
  `s` and `dp` hold every pair, masked ones too; `p` is relative to the row maximum of its key tile, `p.dv` to the
  backward's base.
- `p.o.codes`, `p.dv.codes`, `ds.dq.codes`, `ds.dk.codes` (`ds.codes` where both are one copy): likewise, uint8, or
  uint16 for bfloat16. Their `scales`, where they follow from the values: [heads, queries, ceil(keys / 32)] for blocks
  along keys, [heads, ceil(queries / 32), keys] along queries, [heads, ceil(queries / 32), ceil(keys / 32)] along
  both.
- `row_max`, `row_sum`, `delta`: float32 [heads, tokens], in the recipe's own units.
- `o`: float32 [tokens, heads, head_dim], normalised, before output rounding.
- `high_precision_out`: float32 likewise, where delta takes it: O of P in bfloat16, rounded to bfloat16.

`out` and `lse` follow those of the forward, `dq`, `dk` and `dv` those of the backward.
"""

from __future__ import annotations

from collections.abc import Mapping

from flamia_ref.attention import inputs
from flamia_ref.attention.copies import INPUT_USES, copy_names
from flamia_ref.attention.product import Use
from flamia_ref.attention.recipe import Recipe

PAIR_USES = (Use.O_P, Use.DV_P, Use.DQ_DS, Use.DK_DS)
"""The uses of operands that are computed for pairs of tokens."""


def pair_names(recipe: Recipe) -> dict[Use, str]:
    """The stage name of each pair operand: "p.o", "p.dv", "ds.dq" and "ds.dk", or "ds" where those are one copy."""
    names = {
        use: f"{use.split('.')[1]}.{use.split('.')[0]}" for use in PAIR_USES if recipe.has_use(use)
    }
    if recipe.has_backward and recipe.backward.dk.left.same_codes_as is not None:
        names[Use.DQ_DS] = names[Use.DK_DS] = "ds"
    return names


def forward_stages(recipe: Recipe | str) -> tuple[str, ...]:
    """The stages of a recipe's forward, in the order of the dataflow. `recipe`: a `Recipe`, or a name in `RECIPES`."""
    recipe = inputs.chosen_recipe(recipe)
    return (
        *_inputs(recipe, (Use.S_Q, Use.S_K, Use.O_V)),
        "s",
        "p",
        *_pairs(recipe, Use.O_P),
        "row_max",
        "row_sum",
        "o",
        *(name for name in kept_for_backward(recipe) if name == "high_precision_out"),
    )


def backward_stages(recipe: Recipe | str) -> tuple[str, ...]:
    """The stages of a recipe's backward, in the order of the dataflow, without those of its forward; none without."""
    recipe = inputs.chosen_recipe(recipe)
    if not recipe.has_backward:
        return ()
    earlier = forward_stages(recipe)
    uses = (Use.DP_DO, Use.DV_DO, Use.DP_V, Use.DQ_K, Use.DK_Q)
    stages = (
        *_inputs(recipe, uses),
        "delta",
        "dp",
        "p.dv",
        *_pairs(recipe, Use.DV_P),
        "ds",
        *_pairs(recipe, Use.DQ_DS),
        *_pairs(recipe, Use.DK_DS),
    )
    return tuple(name for name in dict.fromkeys(stages) if name not in earlier)


def kept_for_backward(recipe: Recipe) -> tuple[str, ...]:
    """What a forward keeps for its backward besides out and lse: the names in `Forward.saved`.

    "o": float32 [tokens, heads, value channels], O before its output rounding. "high_precision_out": likewise, O of P
    in bfloat16, rounded to bfloat16. "row_base": float32 [heads, tokens, key
    tiles], what the P of each key tile is relative to, 0 where no pair of tiles was computed.
    """
    kept: list[str] = []
    if not recipe.has_backward:
        return ()
    if recipe.backward.gradient.delta_source == "unrounded_out":
        kept.append("o")
    if recipe.backward.gradient.delta_source == "high_precision_out":
        kept.append("high_precision_out")
    if recipe.backward.gradient.p_for_dv == "forward":
        kept.append("row_base")
    return tuple(kept)


def document_stages(recipe: Recipe) -> Mapping[str, tuple[int, int]]:
    """The stages that are lists, one array a document, and how many queries and keys an entry stands for."""
    blocks = dict.fromkeys(("s", "p", "dp", "p.dv", "ds"), (1, 1))
    for use, name in pair_names(recipe).items():
        blocks[f"{name}.codes"] = (1, 1)
        rows, columns = recipe.operand(use).block or (1, 1)
        blocks[f"{name}.scales"] = (int(rows), int(columns))
    return blocks


def _inputs(recipe: Recipe, uses: tuple[Use, ...]) -> list[str]:
    names = copy_names(recipe)
    found = []
    for use in uses:
        operand = recipe.operand(use)
        if operand.plain:
            continue
        found.append(f"{names[use]}.codes")
        if operand.has_scales:
            found.append(f"{names[use]}.scales")
            if operand.has_token_scales:
                found.append(f"{names[use]}.token_scales")
    return list(dict.fromkeys(found))


def _pairs(recipe: Recipe, use: Use) -> list[str]:
    name = pair_names(recipe)[use]
    return [f"{name}.codes", *([f"{name}.scales"] if recipe.operand(use).has_scales else [])]


def input_of(use: Use) -> str:
    """The input that a use takes: "q", "k", "v" or "do"."""
    return next(tensor for tensor, uses in INPUT_USES.items() if use in uses)
