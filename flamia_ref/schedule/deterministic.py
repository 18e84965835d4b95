"""Orders of a deterministic backward: who adds to dQ when, as public kernels fix it, and what that is for the bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flamia_ref._errors import Registry
from flamia_ref.attention import Recipe
from flamia_ref.attention.inputs import chosen_recipe
from flamia_ref.attention.product import TileOrder
from flamia_ref.schedule.order import Order
from flamia_ref.schedule.work import Work

_FA4 = "Dao-AILab/flash-attention 01afd16, flash_attn/cute"
_DASH = "arXiv:2601.21824; SJTU-Liquid/deterministic-FA3 c510aba, hopper/tile_m_scheduler.hpp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deterministic:
    """A fixed order of additions to dQ.

    Attributes:
        name: what it is called here.
        about: one sentence.
        source: whose it is.
        assumes: what must hold for it to be as good as its authors say; "-" where nothing.
        keys: the order in which key tiles are added to the dQ of a query tile, as in `turns_of`.
        queries: the order in which a key tile goes through query tiles, as in `turns_of`: that of the sums of dK, dV.
        last_first: whether the key tiles of a head are begun from the last on.
    """

    name: str
    about: str
    source: str
    assumes: str
    keys: str
    queries: str
    last_first: bool = False

    def order(self, work: Work) -> Order:
        """In which order tiles are begun: documents, then heads, then blocks; whoever is free takes the next one."""
        block = -work.block if self.last_first else work.block
        return Order(places=np.lexsort((block, work.head, work.document)))


DETERMINISTIC = Registry[Deterministic](
    "deterministic order",
    (
        (one.name, one)
        for one in (
            Deterministic(
                name="ascending",
                about="key tiles ascending, begun in that order",
                source=f"{_FA4}, where nothing is masked; hopper/ of the same",
                assumes="-",
                keys="ascending",
                queries="ascending",
            ),
            Deterministic(
                name="spt",
                about="key tiles descending from the diagonal, the shortest begun first",
                source=f"{_FA4}, spt of causal masks and windows",
                assumes="a causal mask or a window, so that the last key tile is the shortest",
                keys="descending",
                queries="ascending",
                last_first=True,
            ),
            Deterministic(
                name="descending",
                about="key tiles ascending; each goes through its query tiles from the last on",
                source=f"{_DASH}, descending",
                assumes="a causal mask, tile products that take equally long, one document",
                keys="ascending",
                queries="descending",
            ),
            Deterministic(
                name="shifted",
                about="key tile i begins at query tile i and goes round, so that no two add to one at once",
                source=f"{_DASH}, shift",
                assumes="no mask, one document, as many query tiles as key tiles, all of them in flight at once",
                keys="shifted",
                queries="shifted",
            ),
        )
    ),
)


def recipe_in_order(recipe: Recipe | str, name: str) -> Recipe:
    """The recipe with the sums of a deterministic order: of dQ over key tiles, and of dK and dV over query tiles.

    `attention.forward` and `attention.backward` run it with the bits that this order of additions gives.

    Raises: ValueError for an unknown name, and a recipe without a backward.
    """
    order, chosen = DETERMINISTIC[name], chosen_recipe(recipe)
    parts = chosen.backward
    keys, queries = TileOrder(order.keys), TileOrder(order.queries)
    return replace(
        chosen,
        name=f"{chosen.name}, {name}",
        schedules=(),
        dq=replace(parts.dq, tile_order=keys),
        dk=replace(parts.dk, tile_order=queries),
        dv=replace(parts.dv, tile_order=queries),
    )
