"""The elements of a case in float64: what is read of a pack to say where a number comes from."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flamia_ref.golden.bitwise import values
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.copies import Copy, copies
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.pack import Case
from flamia_ref.golden.stage import BLOCK, blocks

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

Index = tuple[int, ...]

_RECIPES: list[tuple[object, "Recipe"]] = []


def recipe_in(case: Case) -> "Recipe":
    """Return the recipe of a case. The last few are kept: reading one from its data takes a tenth of a second."""
    from flamia_ref.attention import Recipe

    for entry, recipe in _RECIPES:
        if entry is case.recipe:
            return recipe
    found = Recipe.from_json(case.recipe.recipe)
    _RECIPES[:] = [*_RECIPES[-15:], (case.recipe, found)]
    return found


@dataclass(frozen=True)
class Elements:
    """The elements of a case, with its recipe and the copies of its operands."""

    case: Case
    recipe: "Recipe" = field(init=False)
    copies: tuple[Copy, ...] = field(init=False)

    def __post_init__(self) -> None:
        recipe = recipe_in(self.case)
        object.__setattr__(self, "recipe", recipe)
        object.__setattr__(self, "copies", tuple(copies(recipe)))

    @property
    def spec(self) -> CaseSpec:
        """The data of the case."""
        return self.case.spec

    def bits(self, name: str, index: Index) -> Tensor:
        """The stored bits of an element, float32 ones as uint32."""
        tensor = self.case.tensors[name]
        one = np.asarray(tensor[index])
        return one.view(np.uint32) if one.dtype == np.float32 else one

    def value(self, name: str, index: Index) -> float:
        """The number that an element stands for."""
        return float(values(self.bits(name, index)[None], self.case.places[name].stage.view)[0])

    def numbers(self, name: str, index: tuple[int | slice, ...]) -> Tensor:
        """The numbers of a part of a tensor."""
        part = np.asarray(self.case.tensors[name][index])
        bits = part.view(np.uint32) if part.dtype == np.float32 else part
        return values(bits, self.case.places[name].stage.view)

    def document(self, token: int, *, keys: bool = False) -> tuple[int, int]:
        """The document of a token, and the token's place in it."""
        starts = self.spec.key_starts if keys else self.spec.starts
        found = int(np.searchsorted(starts, token, side="right")) - 1
        return found, token - starts[found]

    def kv_head(self, head: int) -> int:
        """The key/value head of a query head."""
        return head // (self.spec.heads // self.spec.kv_heads)

    def copy(self, product: str, tensor: str) -> Copy:
        """The copy of a tensor that a product takes."""
        return next(one for one in self.copies if one.tensor == tensor and product in one.products)

    def rows(self, tensor: str, document: int) -> slice:
        """The tokens of a document, among the queries or the keys."""
        starts = self.spec.key_starts if tensor in ("k", "v") else self.spec.starts
        return slice(starts[document], starts[document + 1])

    def scale_index(self, copy: Copy, token: int, head: int, channel: int) -> Index:
        """The scale of an element of an input."""
        keys = copy.tensor in ("k", "v")
        if copy.descaled:
            return self.document(token, keys=keys)[0], head if keys else self.kv_head(head)
        axes = self.case.places[copy.scales].stage.axes
        size = self.case.places[copy.scales].stage.block
        row = token
        if axes[0].endswith("blocks"):
            document, inside = self.document(token, keys=keys)
            lengths = self.spec.lengths_of_keys if keys else self.spec.lengths
            row = sum(blocks(one, size) for one in lengths[:document]) + inside // size
        column = {"one": 0, "channel_blocks": channel // size, "head_dim": channel}[axes[2]]
        return (row, head, column)

    def input_values(self, copy: Copy, product: str, document: int, head: int) -> Tensor:
        """The values that a product takes of an input: float64 [tokens of the document, channels]."""
        rows = self.rows(copy.tensor, document)
        if not copy.coded:
            name = "dout" if copy.tensor == "do" else copy.tensor
            return self.numbers(name, (rows, head))
        found = self.numbers(copy.codes, (rows, head))
        if not copy.scaled or product in copy.folded:
            return found
        if copy.descaled:
            index = self.scale_index(copy, rows.start, head, 0)
            return (
                found
                if product == "s" or not found.size
                else found * self.value(copy.scales, index)
            )
        down = [self.scale_index(copy, t, head, 0)[0] for t in range(rows.start, rows.stop)]
        across = [self.scale_index(copy, rows.start, head, c)[2] for c in range(found.shape[1])]
        scales = self.case.tensors[copy.scales][:, head][np.ix_(down, across)]
        found = found * values(scales, self.case.places[copy.scales].stage.view)
        if copy.powers:
            found = found * self.numbers(copy.token_scales, (rows, head, 0))[:, None]
        return found

    def guarded(self, product: str, document: int) -> Tensor:
        """Which pairs of a document are in guarded blocks of a product: bool [queries, keys]."""
        seen = self.spec.visible(document)
        queries, keys = seen.shape
        if not getattr(self.recipe, product).guarded or not seen.size:
            return np.zeros(seen.shape, np.bool_)
        whole = np.zeros((blocks(queries) * BLOCK, blocks(keys) * BLOCK), np.bool_)
        whole[:queries, :keys] = seen
        tiles = whole.reshape(blocks(queries), BLOCK, blocks(keys), BLOCK)
        some = tiles.any(axis=(1, 3))
        whole[queries:] = True  # queries past the end do not count, keys past it are masked
        cut = some & ~whole.reshape(tiles.shape).all(axis=(1, 3))
        found: Tensor = np.repeat(np.repeat(cut, BLOCK, axis=0), BLOCK, axis=1)[:queries, :keys]
        return found

    def high_values(self, copy: Copy, document: int, head: int) -> Tensor | None:
        """What guarded blocks take of an input, float64 [tokens, channels]. None: not what the pack holds."""
        name = "dout" if copy.tensor == "do" else copy.tensor
        folded = (
            copy.tensor == "do" and self.recipe.backward.gradient.normalisation == "fold_into_dout"
        )
        if self.recipe.guard_operands != "inputs" or folded:
            return None
        return self.numbers(name, (self.rows(copy.tensor, document), head))

    def pair_values(self, copy: Copy, product: str, document: int, head: int) -> Tensor:
        """The values that a product takes of P or dS: float64 [queries, keys]."""
        found = self.numbers(f"{copy.codes}.{document}", (head,))
        if copy.scaled:
            rows, columns = (int(one) for one in copy.operand.block or (1, 1))
            scales = self.numbers(f"{copy.scales}.{document}", (head,))
            scales = np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)
            found = found * scales[: found.shape[0], : found.shape[1]]
        elif copy.operand.static_scale is not None:
            found = found * 2.0 ** (copy.operand.static_scale - 127)
        return found
