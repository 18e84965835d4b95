"""What keeps each use of a recipe from leaking through a shared scale, and what that costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from flamia_ref._errors import shown
from flamia_ref.attention.computed import computed_recipe
from flamia_ref.attention.copies import INPUT_USES, OVER_CHANNELS
from flamia_ref.attention.product import Guard, Operand, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.sides import BLOCK, element, taken_format
from flamia_ref.formats import FORMATS
from flamia_ref.packing import Documents, Mask

_MOST_TOKENS = 2**31 - 1


class Safeguard(StrEnum):
    """How a use is kept from values that its outputs may not depend on."""

    NONE = "none"
    """A scale, or a mean, is shared by tokens that may not know of each other."""
    HIGH_PRECISION = "high precision"
    """The operand has 16 bits."""
    PER_TOKEN = "per token"
    """Scales of one token each, in a contraction over channels or where the product takes values without scales."""
    GUARDED_BLOCKS = "guarded blocks"
    """Scales are shared, and blocks with a visible and a masked pair run in bfloat16."""
    FOLDED = "folded token scale"
    """One scale a token, which the other operand takes before it is quantized."""
    PREVIOUS_BLOCK = "previous block"
    """The scale that the block before would have, from a constant in each document's first."""
    STATIC = "static"
    """A constant scale, or none."""
    ZERO_FILL = "zero-fill by select"
    """Masked pairs are 0 by select before the scale is taken, and a block holds pairs of one query or of one key."""


class BlockCounts(NamedTuple):
    """Blocks of 32 queries by 32 keys, counted in their documents.

    Attributes:
        visible: with a visible pair.
        guarded: those with a masked pair too. A key past the document's end counts as masked, a query past it does not
            count.
    """

    visible: int
    guarded: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UseSafeguard:
    """One use of a recipe.

    Attributes:
        use: the use.
        safeguard: what protects it.
        extra_operands: what the product reads besides its quantized operands: "q", "k", "v" or "do" in bfloat16.
        high_precision: the share of the product's multiply-accumulates that leaves low precision, of those in blocks
            of 32 queries by 32 keys with a visible pair.
    """

    use: Use
    safeguard: Safeguard
    extra_operands: tuple[str, ...]
    high_precision: Fraction


def safeguards(
    recipe: Recipe | str,
    *,
    lengths: Sequence[int],
    key_lengths: Sequence[int] | None = None,
    causal: bool = True,
    alignment: str = "bottom_right",
    window: Any = None,
) -> tuple[UseSafeguard, ...]:
    """The safeguard of each of the twelve uses of a recipe, and its cost for documents of these lengths.

    Args:
        recipe: a `Recipe`, or a name in `RECIPES`.
        lengths, key_lengths: queries and keys of each document; None for as many keys as queries.
        causal, alignment, window: the mask, as of `forward`.

    Raises: ValueError or TypeError of one line.
    """
    chosen = computed_recipe(recipe)
    queries, keys = documents_of(lengths, key_lengths)
    mask = Mask.of(queries, keys, causal=causal, window=window, alignment=alignment)
    counts = block_counts(mask)
    guarded = Fraction(counts.guarded, counts.visible) if counts.visible else Fraction(0)
    return tuple(_of_use(chosen, use, guarded) for use, _ in chosen.uses())


def documents_of(
    lengths: Sequence[int], key_lengths: Sequence[int] | None
) -> tuple[Documents, Documents]:
    """The documents of queries and of keys of these lengths. Raises ValueError of one line, naming the argument."""
    queries = _documents(lengths, "lengths")
    keys = queries if key_lengths is None else _documents(key_lengths, "key_lengths")
    if len(queries) != len(keys):
        raise ValueError(
            f"lengths has {len(queries)} documents and key_lengths {len(keys)}; give equally many"
        )
    return queries, keys


def _documents(lengths: Any, name: str) -> Documents:
    try:
        values = np.asarray(lengths, dtype=object)
    except ValueError:
        values = np.asarray(None)
    whole = values.ndim == 1 and all(
        isinstance(x, (int, np.integer)) and not isinstance(x, bool) and x >= 0 for x in values
    )
    if not whole or not values.size:
        raise ValueError(
            f"{name} must be whole numbers from 0 on, at least one of them; it is {shown(lengths)}"
        )
    offsets = (0, *itertools.accumulate(int(x) for x in values))
    if offsets[-1] > _MOST_TOKENS:
        raise ValueError(
            f"{name} have {shown(offsets[-1])} tokens together; allowed: up to {_MOST_TOKENS}"
        )
    return Documents(offsets)


def block_counts(mask: Mask) -> BlockCounts:
    """The blocks of a mask, by the first and last key that each query sees."""
    visible = guarded = 0
    for document in range(len(mask.queries)):
        first, last = mask.document_bounds(document)
        starts = np.arange(0, len(first), BLOCK)
        if not len(starts):
            continue
        alive = last >= 0
        # Queries of a block see runs of keys that begin and end at most one further from row to row: no gap between.
        least = np.minimum.reduceat(np.where(alive, first, np.iinfo(np.int32).max), starts)
        most = np.maximum.reduceat(last, starts)
        seen = np.where(most < 0, 0, most // BLOCK - least // BLOCK + 1)
        # A block is whole if all its queries see all its keys; one that sees none makes it no such block.
        begin = -(-np.maximum.reduceat(first, starts) // BLOCK)
        end = (np.minimum.reduceat(last, starts) + 1) // BLOCK
        whole = np.maximum(end - begin, 0)
        visible += int(seen.sum())
        guarded += int((seen - whole).sum())
    return BlockCounts(visible, guarded)


def _of_use(recipe: Recipe, use: Use, guarded: Fraction) -> UseSafeguard:
    operand = recipe.operand(use)
    product = recipe.product(use.split(".")[0])
    if _is_taken_wide(product.left) or _is_taken_wide(product.right):
        share = Fraction(1)
    else:
        share = guarded if product.guarded else Fraction(0)
    extra: tuple[str, ...] = ()
    if operand.guard is not Guard.NONE and recipe.guard_operands == "inputs":
        extra = tuple(
            tensor
            for tensor, uses in INPUT_USES.items()
            if any(other.split(".")[0] == use.split(".")[0] for other in uses)
        )
    kind = (
        _of_input(operand, use)
        if use.split(".")[1] in INPUT_USES
        else _of_pairs(recipe, operand, use)
    )
    return UseSafeguard(use=use, safeguard=kind, extra_operands=extra, high_precision=share)


def _is_wide(operand: Operand) -> bool:
    """Whether an operand has 16 bits."""
    return FORMATS[element(operand)].bits >= FORMATS["bf16"].bits


def _is_taken_wide(operand: Operand) -> bool:
    """Whether a product takes an operand in 16 bits, a dequantized one too."""
    return FORMATS[taken_format(operand)].bits >= FORMATS["bf16"].bits


_BY_SCOPE = {
    Scope.UNIT: Safeguard.STATIC,
    Scope.STATIC: Safeguard.STATIC,
    Scope.PREVIOUS_BLOCK: Safeguard.PREVIOUS_BLOCK,
}


def _of_input(operand: Operand, use: Use) -> Safeguard:
    if operand.smoothing != "none":
        return Safeguard.NONE
    if operand.guard is not Guard.NONE:
        return Safeguard.GUARDED_BLOCKS
    if operand.scale_folded_into is not None:
        return Safeguard.FOLDED
    if _is_wide(operand):
        return Safeguard.HIGH_PRECISION
    if operand.scope in _BY_SCOPE:
        return _BY_SCOPE[operand.scope]
    alone = operand.block is not None and operand.block[0] == 1
    by_itself = use in OVER_CHANNELS or operand.dequantized
    return Safeguard.PER_TOKEN if alone and by_itself else Safeguard.NONE


def _of_pairs(recipe: Recipe, operand: Operand, use: Use) -> Safeguard:
    if _is_wide(operand):
        return Safeguard.HIGH_PRECISION
    if operand.scope in _BY_SCOPE:
        return _BY_SCOPE[operand.scope]
    if use is Use.O_P:
        selected = recipe.softmax.mask_value is None
    else:
        selected = use is Use.DV_P or recipe.backward.gradient.masked_ds == "select"
    alone = operand.block is not None and 1 in operand.block
    return Safeguard.ZERO_FILL if alone and selected else Safeguard.NONE
