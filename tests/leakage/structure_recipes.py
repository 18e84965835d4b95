"""Recipes of a test's own: one use with a scale, or many of them at random; no recipe of the registry has these."""

import random
from dataclasses import replace
from typing import Any

from flamia_ref.attention import RECIPES, Operand, Recipe, Use
from flamia_ref.attention.product import Guard, Scope
from tests.leakage.dense import Pack

BASE = RECIPES["bf16-fa4"]
UNIT = Operand(format="bf16", scope=Scope.UNIT)
_MX = "te-mx-e4m3"
TOK, COL, TILE = (Operand(format=_MX, block=block) for block in ((1, 32), (32, 1), (32, 32)))
TENSOR = Operand(format=_MX, block=("all", 1))
TOKEN = Operand(format=_MX, block=(1, "all"), scope=Scope.TOKEN)
COL16 = Operand(format="flamia-fp4-ue4m3", block=(16, 1))
PREVIOUS = Operand(format=_MX, block=(32, 32), scope=Scope.PREVIOUS_BLOCK, static_scale=127)
PAIRS = (Use.O_P, Use.DV_P, Use.DQ_DS, Use.DK_DS)
PARTNERS = {
    Use.O_V: Use.O_P,
    Use.DV_DO: Use.DV_P,
    Use.DQ_K: Use.DQ_DS,
    Use.DK_Q: Use.DK_DS,
}
SIDES = {
    "s": (Use.S_Q, Use.S_K),
    "o": (Use.O_P, Use.O_V),
    "dp": (Use.DP_DO, Use.DP_V),
    "dv": (Use.DV_P, Use.DV_DO),
    "dq": (Use.DQ_DS, Use.DQ_K),
    "dk": (Use.DK_DS, Use.DK_Q),
}


def with_operands(operands: dict[Use, Operand], *, guarded: Any = (), **parts: Any) -> Recipe:
    """The bfloat16 recipe with other operands; `guarded`: products whose guarded blocks are."""
    changes: dict[str, Any] = {}
    for name, (left, right) in SIDES.items():
        changes[name] = replace(
            getattr(BASE, name),
            left=operands.get(left, UNIT),
            right=replace(
                operands.get(right, UNIT),
                guard=Guard.HIGH_PRECISION_WHERE_CUT if name in guarded else Guard.NONE,
            ),
            guard_instruction="sm100.tcgen05.f16" if name in guarded else None,
        )
    softmax, gradient = parts.pop("softmax", {}), parts.pop("gradient", {})
    return replace(
        BASE,
        name="of-a-test",
        **changes,
        **parts,
        softmax=replace(BASE.softmax, **softmax),
        gradient=replace(BASE.gradient, **gradient),
    )


def at_random(draw: random.Random) -> Recipe:
    """Any operand in any use, any guard, and the knobs that move dependencies."""
    operands = {}
    for use in Use:
        kinds = [UNIT, TOK, COL, TILE, TENSOR, COL16]
        kinds.append(Operand(format=_MX, block=(1, "all")) if use in PAIRS else TOKEN)
        if use not in PAIRS:
            kinds.append(PREVIOUS)
        operands[use] = draw.choice(kinds) if draw.random() < 0.6 else UNIT
    for use, partner in PARTNERS.items():
        scaled = operands[use].block is not None
        if operands[use] is TOKEN or (scaled and draw.random() < 0.15):
            operands[use] = replace(operands[use], scale_folded_into=partner)
    if draw.random() < 0.15:
        operands[Use.DP_V] = replace(
            operands[Use.O_V], same_codes_as=Use.O_V, scale_folded_into=None
        )
    if draw.random() < 0.15:
        operands[Use.DK_DS] = replace(operands[Use.DQ_DS], same_codes_as=Use.DQ_DS)
    sizes = (32, 64, 128)
    return with_operands(
        operands,
        guarded=[name for name in SIDES if draw.random() < 0.3],
        guard_operands=draw.choice(["inputs", "inputs", "codes"]),
        softmax={
            "row_sum_of": draw.choice(["p", "p", "codes"]),
            "mask_value": draw.choice([None] * 4 + [-1e4]),
        },
        gradient={
            "normalisation": draw.choice(["lse", "fold_into_dout"]),
            "delta_source": draw.choice(["returned_out", "quantized_dout", "p_dp"]),
            "p_for_dv": draw.choice(["recomputed", "recomputed", "forward"]),
        },
        tiles=replace(
            BASE.tiles,
            query=draw.choice(sizes),
            key=draw.choice(sizes),
            masked=draw.choice(["skipped", "computed"]),
        ),
    )


def pack_at_random(draw: random.Random) -> Pack:
    """A short pack under any mask."""
    queries = [
        draw.choice([0, 1, 5, 20, 30, 33, 40, 64, 70]) for _ in range(draw.choice([1, 1, 2, 3]))
    ]
    if sum(queries) > 110:
        queries = queries[:1]
    keys = list(queries)
    if draw.random() < 0.4:
        keys = [draw.choice([0, 3, 20, 32, 41, 64, 70]) for _ in queries]
        if sum(keys) > 110:
            queries, keys = queries[:1], keys[:1]
    causal, window = draw.random() < 0.7, (None, None)
    if draw.random() < 0.4:
        right = None if causal else draw.choice([None, 0, 5, 33])
        window = (draw.choice([None, 0, 3, 20, 40]), right)
    return Pack(
        queries=tuple(queries),
        keys=tuple(keys),
        causal=causal,
        window=window,
        top_left=draw.random() < 0.4,
        packed_blocks=draw.random() < 0.2,
    )
