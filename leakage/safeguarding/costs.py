"""What a recipe costs: the work that leaves low precision, and the bytes that its backward needs kept."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from flamia_ref.attention.copies import INPUT_USES
from flamia_ref.attention.memory import bytes_kept
from flamia_ref.attention.protection import safeguards
from flamia_ref.attention.recipe import Recipe
from flamia_ref.packing import Documents, Mask

_OVER_VALUES = ("o", "dp", "dv")
"""Products whose multiply-accumulates are a pair's times the channels of v."""


class Costs:
    """Costs of recipes that differ in some parts, for one document of a length; each part is counted once."""

    def __init__(
        self, length: int, *, head_dim: int, value_dim: int, causal: bool, window: Any
    ) -> None:
        self.length, self.head_dim, self.value_dim = length, head_dim, value_dim
        self._settings = {"causal": causal, "window": window}
        documents = Documents((0, length))
        self.mask = Mask.of(
            documents, documents, causal=causal, window=window, alignment="bottom_right"
        )
        self._shares: dict[Any, Fraction] = {}
        self._bytes: dict[Any, int] = {}

    def shares(self, recipe: Recipe) -> Mapping[str, Fraction]:
        """The share of each product's multiply-accumulates that leaves low precision, of those in blocks of 32 queries
        by 32 keys with a visible pair."""
        keys = dict(recipe.products())
        if any(key not in self._shares for key in keys.items()):
            for one in safeguards(recipe, lengths=(self.length,), **self._settings):
                product = one.use.split(".")[0]
                self._shares[product, keys[product]] = one.high_precision
        return {name: self._shares[name, product] for name, product in keys.items()}

    def work(self, recipe: Recipe) -> Fraction:
        """The same share of all products together."""
        sizes = {
            name: self.value_dim if name in _OVER_VALUES else self.head_dim
            for name, _ in recipe.products()
        }
        found = self.shares(recipe)
        return sum((found[x] * size for x, size in sizes.items()), Fraction(0)) / sum(
            sizes.values()
        )

    def kept(self, recipe: Recipe) -> int:
        """Bytes that the backward needs kept for one head: copies of q, k and v, bfloat16 values for guarded blocks,
        and what the forward saves; 0 without a backward. dO is there anyway."""
        if not recipe.has_backward:
            return 0
        key = _kept_by(recipe)
        if key not in self._bytes:
            found = bytes_kept(
                recipe,
                lengths=(self.length,),
                head_dim=self.head_dim,
                value_dim=self.value_dim,
            )
            guards = sum(size for tensor, size in found.guards.items() if tensor != "do")
            self._bytes[key] = found.kept + guards + sum(found.saved.values())
        return self._bytes[key]


def _kept_by(recipe: Recipe) -> Any:
    """What bytes depend on."""
    uses = [use for tensor in ("q", "k", "v") for use in INPUT_USES[tensor]]
    return (
        tuple(recipe.operand(use) for use in uses),
        tuple(product.guarded for _, product in recipe.products()),
        recipe.guard_operands,
        recipe.gradient and (recipe.gradient.delta_source, recipe.gradient.p_for_dv),
    )
