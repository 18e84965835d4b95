"""What of a recipe decides which tokens it couples: a small part of its data, use by use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flamia_ref.attention.copies import INPUT_USES
from flamia_ref.attention.product import Operand, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.smoothing import TILE
from flamia_ref.formats import PRESETS
from flamia_ref.leakage.sharing.placement import DOCUMENT, GUARD, Extent

PAIR_USES = (Use.O_P, Use.DV_P, Use.DQ_DS, Use.DK_DS)
"""Uses whose operand has a value for each pair of a query and a key."""

INPUT_OF: Mapping[Use, str] = {
    use: "dout" if tensor == "do" else tensor for tensor, uses in INPUT_USES.items() for use in uses
}
"""The input of each other use."""


def product_of(use: Use) -> str:
    """The product that a use is in."""
    return str(use).split(".")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """What shares one scale, or one mean that is taken off.

    Attributes:
        rows, columns: the block, of tokens and channels for an input, of queries and keys for pairs.
        previous: whether the scale is that of the block before.
    """

    rows: Extent
    columns: Extent
    previous: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Coupled:
    """How one use couples tokens.

    Attributes:
        sharings: one after another, each of values that the one before has rounded; none for a use without scales.
        folded_into: the use of pairs that takes the scale of each token before it is quantized.
        codes_of: the use whose codes these are.
    """

    sharings: tuple[Sharing, ...] = ()
    folded_into: Use | None = None
    codes_of: Use | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Coupling:
    """All that decides the dependencies of a recipe's results.

    Attributes:
        uses: how each use couples.
        guarded: the products whose guarded blocks are computed otherwise.
        codes: whether guarded blocks take codes, which the other tokens of a block have shaped, instead of the inputs.
        masked_scores: the rows and columns of the tiles in which masked pairs have a finite score and reach O: 0 for
            every tile; None where they are selected out.
        summed_codes: whether the row sum takes the P of O's product.
        backward: whether there are gradients; what follows and the uses of their products say nothing without.
        lse_in_dout: whether dO takes a factor of lse before it is quantized.
        delta: the source of delta.
        forward_p: whether dV takes the P of O's product.
    """

    uses: Mapping[Use, Coupled]
    guarded: frozenset[str]
    codes: bool
    masked_scores: tuple[int, int] | None
    summed_codes: bool
    backward: bool
    lse_in_dout: bool
    delta: str
    forward_p: bool

    @property
    def period(self) -> int:
        """Tokens after which the blocks of all uses, and those that are or could be guarded, begin together again."""
        extents = [
            extent
            for coupled in self.uses.values()
            for sharing in coupled.sharings
            for extent in (sharing.rows, sharing.columns)
            if isinstance(extent, int)
        ]
        return math.lcm(GUARD, *extents, *(size for size in self.masked_scores or () if size))

    @property
    def looks_back(self) -> bool:
        """Whether a scale is that of the block before."""
        return any(one.previous for coupled in self.uses.values() for one in coupled.sharings)

    def folded(self, use: Use) -> tuple[Use, ...]:
        """The uses whose scales the values of a use of pairs take before they are quantized."""
        taking = {use, self.uses[use].codes_of}
        found = (
            (one, coupled.folded_into) for one, coupled in self.uses.items() if coupled.folded_into
        )
        return tuple(one for one, into in found if into in taking)

    def alone(self, use: Use | None) -> Coupling:
        """With no other use coupling; with None, with no use at all."""
        return replace(
            self,
            uses={one: self.uses[one] if one is use else Coupled() for one in Use},
            masked_scores=self.masked_scores if use is None else None,
        )

    def guarding(self, use: Use) -> Coupling:
        """With guarded blocks, from the inputs, in the product of a use and nowhere else."""
        return replace(self, guarded=frozenset({product_of(use)}), codes=False)


def coupling_of(recipe: Recipe) -> Coupling:
    """The coupling of a recipe. Raises ValueError where a scale is folded into what has no scale to take it."""
    tiles, softmax, back = recipe.tiles, recipe.softmax, recipe.has_backward
    masked = None
    if softmax.mask_value is not None:
        masked = (tiles.query, tiles.key) if tiles.masked == "skipped" else (0, 0)
    return Coupling(
        uses={use: _coupled(recipe, use) if recipe.has_use(use) else Coupled() for use in Use},
        guarded=frozenset(name for name, product in recipe.products() if product.guarded),
        codes=recipe.guard_operands == "codes",
        masked_scores=masked,
        summed_codes=softmax.row_sum_of == "codes",
        backward=back,
        lse_in_dout=back and recipe.backward.gradient.normalisation == "fold_into_dout",
        delta=recipe.backward.gradient.delta_source if back else "returned_out",
        forward_p=back
        and (
            recipe.backward.gradient.p_for_dv == "forward"
            or recipe.backward.dv.left.same_codes_as is Use.O_P
        ),
    )


def _coupled(recipe: Recipe, use: Use) -> Coupled:
    folded = recipe.operand(use).scale_folded_into
    if folded is not None and (folded not in PAIR_USES or use in PAIR_USES):
        raise ValueError(
            f"recipe {recipe.name!r} folds the scale of {use} into {folded}; those of q, k, v and dO can go into"
            f" {', '.join(PAIR_USES)}"
        )
    return Coupled(
        sharings=_sharings(recipe, use, ()),
        folded_into=folded,
        codes_of=recipe.operand(use).same_codes_as,
    )


def _sharings(recipe: Recipe, use: Use, through: tuple[Use, ...]) -> tuple[Sharing, ...]:
    """The sharings of a use, those of the use that its codes or its values are from first."""
    operand = recipe.operand(use)
    source = operand.same_codes_as or operand.promoted_from
    if operand.promoted_from is not None and use in PAIR_USES:
        raise ValueError(
            f"recipe {recipe.name!r} has {use} promoted from {source}; q, k, v and dO can be promoted"
        )
    if source is not None and (source in through or source is use or not _alike(source, use)):
        raise ValueError(
            f"recipe {recipe.name!r} has {use} take codes or values of {source}; give a use of the same tensor that"
            " does not take them from it"
        )
    earlier = () if source is None else _sharings(recipe, source, (*through, use))
    if operand.same_codes_as is not None:
        return earlier
    return (*earlier, *_smoothed(operand), *_own(operand, use))


def _smoothed(operand: Operand) -> tuple[Sharing, ...]:
    """Tokens that lose the same mean share it as they would a scale."""
    match operand.smoothing:
        case "none":
            return ()
        case "document_mean":
            return (Sharing(rows=DOCUMENT, columns=1),)
        case "tile_mean":
            return (Sharing(rows=TILE, columns=1),)


def _alike(one: Use, other: Use) -> bool:
    return str(one).split(".")[1] == str(other).split(".")[1]


def _own(operand: Operand, use: Use) -> tuple[Sharing, ...]:
    if operand.scope is Scope.HEAD:
        return (Sharing(rows=DOCUMENT, columns=1),)
    if operand.format not in PRESETS or operand.block is None:
        return ()
    rows, columns = operand.block
    previous = operand.scope is Scope.PREVIOUS_BLOCK
    if rows == 1 and not previous and (columns == 1 or use not in PAIR_USES):
        return ()  # a scale of one token, or of one pair
    return (Sharing(rows=rows, columns=columns if use in PAIR_USES else 1, previous=previous),)
