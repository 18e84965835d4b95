"""The alternatives of the uses that leak: which uses change together, and what each of them can be instead."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flamia_ref.attention.copies import OVER_CHANNELS, copy_names
from flamia_ref.attention.product import Guard, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.leakage.sharing.coupling import PAIR_USES
from flamia_ref.leakage.sharing.structures import structure

_LENGTHS = (64, 20)  # a full block, a cut one, and a document of less than a block


class Alternative(StrEnum):
    """What the uses of a group are."""

    AS_IS = "as it is"
    """What the recipe says."""
    SHARED = "shared scale"
    """A scale for 32 tokens, without the safeguard that the recipe has."""
    GUARDED = "guarded blocks"
    """Blocks with a visible and a masked pair run in bfloat16, from the inputs."""
    GUARDED_CODES = "guarded blocks, codes"
    """The same, from the values of the codes, which all tokens of a scale have shaped."""
    FOLDED = "token scale"
    """One scale a token. Where the contraction runs over tokens the other operand takes it, and is quantized in blocks
    of one query or one key."""
    PREVIOUS = "previous block"
    """The scale that the block before would have, from a constant in each document's first."""
    STATIC = "static"
    """A constant scale, made for the largest value of the sample."""
    ONE_ROW = "one row a block"
    """P or dS in blocks of pairs of one query, or of one key where the contraction runs over queries."""
    HIGH_OVER_TOKENS = "bfloat16 over tokens"
    """Products over tokens run in bfloat16; those over channels take blocks of 32 channels of a token."""
    HIGH = "bfloat16"
    """The products run in bfloat16."""


GUARDS = (Alternative.GUARDED, Alternative.GUARDED_CODES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Uses that change together, as they share one quantized copy.

    Attributes:
        name: the tensor, or the use where another use of the tensor is not in the group: "k", "dq.k", "ds".
        uses: the uses.
        alternatives: what they can be, "as it is" first.
    """

    name: str
    uses: tuple[Use, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def of_pairs(self) -> bool:
        """Whether it is of P or dS."""
        return self.uses[0] in PAIR_USES


def groups_of(recipe: Recipe, *, causal: bool = True, window: Any = None) -> tuple[Group, ...]:
    """The groups of a recipe with a use whose scale lets tokens reach what they must not, as it is or without its
    guard, its folded scale or its scale of the block before."""
    found = structure(recipe, lengths=_LENGTHS, causal=causal, window=window)
    leaking = {one.use for one in found.uses if one.illegal}
    return tuple(
        Group(name=name, uses=uses, alternatives=_alternatives(recipe, uses))
        for name, uses in _copies(recipe).items()
        if any(use in leaking or _is_protected(recipe, use) for use in uses)
    )


def _is_protected(recipe: Recipe, use: Use) -> bool:
    operand = recipe.operand(use)
    return (
        operand.guard is not Guard.NONE
        or operand.scale_folded_into is not None
        or operand.scope is Scope.PREVIOUS_BLOCK
    )


def _copies(recipe: Recipe) -> dict[str, tuple[Use, ...]]:
    """The uses of each copy by a name of it, in the order of the dataflow."""
    names = copy_names(recipe)
    found: dict[str, list[Use]] = {}
    for use, operand in recipe.uses():
        if use in PAIR_USES:
            source = operand.same_codes_as or use
            name = f"pairs {source}"
        else:
            name = names[use]
        found.setdefault(name, []).append(use)
    return {_name(recipe, uses): tuple(uses) for uses in found.values()}


def _name(recipe: Recipe, uses: list[Use]) -> str:
    tensor = uses[0].split(".")[1]
    every = [use for use, _ in recipe.uses() if use.split(".")[1] == tensor]
    return tensor if len(uses) == len(every) else str(uses[0])


def _alternatives(recipe: Recipe, uses: tuple[Use, ...]) -> tuple[Alternative, ...]:
    kinds = [Alternative.AS_IS]
    if any(_is_protected(recipe, use) for use in uses):
        kinds.append(Alternative.SHARED)
    if uses[0] in PAIR_USES:
        return (*kinds, Alternative.ONE_ROW, Alternative.STATIC, Alternative.HIGH)
    kinds += [*GUARDS, Alternative.FOLDED, Alternative.PREVIOUS, Alternative.STATIC]
    over_channels = {use in OVER_CHANNELS for use in uses}
    if len(over_channels) == 2:
        kinds.append(Alternative.HIGH_OVER_TOKENS)
    return (*kinds, Alternative.HIGH)


def tensor_of(use: Use) -> str:
    """The tensor of a use: "q", "k", "v", "do", "p" or "ds"."""
    return use.split(".")[1]
