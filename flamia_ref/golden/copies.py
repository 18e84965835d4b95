"""The codes of a recipe's operands: how many copies of a tensor there are, and what their scales are.

A copy is one set of codes, with its scales where they follow from data. A tensor whose uses share
one copy gives it its own name, ``q``; one with several names each by its first use: ``q.s`` and
``q.dk``. P is always named by its use, because the forward and the backward compute P differently.
An input that a use takes in bfloat16 has no codes there; P and dS have, their bfloat16 bits. A copy
that is promoted from another is made from that one's codes and scales.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flamia_ref._errors import shown
from flamia_ref.golden.stage import BLOCK, TILES, TRANSPOSED_TILES, Stage, View

if TYPE_CHECKING:
    from flamia_ref.attention import Operand, Recipe, Use

# The inputs of a forward and a backward that recipes quantize, and the axis that counts their heads.
HEADS = {"q": "heads", "k": "kv_heads", "v": "kv_heads", "do": "heads"}
# The axes of inputs over tokens, by the axis that counts their heads.
TOKENS = {"heads": "tokens", "kv_heads": "key_tokens"}
TOKEN_BLOCKS = {"heads": "token_blocks", "kv_heads": "key_token_blocks"}
_FORWARD = ("s", "o")
_OVER_CHANNELS = ("s", "dp")  # products whose contraction runs over channels, not over tokens
_PAIRS = ("heads", "queries", "keys")

# The axes of scales by their blocks: of tokens and channels, and of queries and keys.
_INPUT_SCALES: dict[object, tuple[str, str]] = {
    (1, "all"): ("tokens", "one"),
    (1, 16): ("tokens", "channel_blocks"),
    (1, 32): ("tokens", "channel_blocks"),
    (16, 1): ("token_blocks", "head_dim"),
    (32, 1): ("token_blocks", "head_dim"),
    (32, 32): ("token_blocks", "channel_blocks"),
}
_PAIR_SCALES: dict[object, tuple[str, str]] = {
    (1, 16): ("queries", "key_blocks"),
    (1, 32): ("queries", "key_blocks"),
    (32, 1): ("query_blocks", "keys"),
    (32, 32): ("query_blocks", "key_blocks"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One set of codes.

    `name` is that of the trace, `tensor` one of q, k, v, do, p, ds. `products` are those that take
    it; `folded` are those of them that find its scales in the other operand, not here. `source` is
    the copy that it is promoted from.
    """

    name: str
    tensor: str
    operand: "Operand"
    products: tuple[str, ...]
    folded: tuple[str, ...]
    source: str | None = None

    @property
    def scaled(self) -> bool:
        """Whether its scales follow from data, and so are a stage."""
        return self.operand.block is not None or self.descaled

    @property
    def descaled(self) -> bool:
        """Whether its scales are float32 descales, one for a document and key/value head."""
        return self.operand.scope == "head"

    @property
    def powers(self) -> bool:
        """Whether each token has a power of two besides its scales, which is a stage."""
        return self.operand.scope == "token" and self._scale_view() is not View.F8_E8M0

    @property
    def coded(self) -> bool:
        """Whether its codes are a stage: not those of an input that is taken as it is."""
        return not self.operand.plain or self.tensor not in HEADS

    @property
    def backward(self) -> bool:
        """Whether the backward makes it."""
        return not set(_FORWARD) & set(self.products)

    @property
    def scales(self) -> str:
        """The name of the scales."""
        return f"{self.name}.scales"

    @property
    def codes(self) -> str:
        """The name of the codes."""
        return f"{self.name}.codes"

    @property
    def token_scales(self) -> str:
        """The name of the powers of two of tokens."""
        return f"{self.name}.token_scales"

    def stages(self, parents: tuple[str, ...]) -> Iterator[Stage]:
        """Yield scales, their tiled forms, and codes, computed from `parents`."""
        if self.scaled:
            if self.powers:
                yield Stage(
                    name=self.token_scales,
                    view=View.F8_E8M0,
                    axes=(TOKENS[HEADS[self.tensor]], HEADS[self.tensor], "one"),
                    parents=parents,
                    backward=self.backward,
                    block=self._block,
                )
                parents = (*parents, self.token_scales)
            yield Stage(
                name=self.scales,
                view=self._scale_view(),
                axes=self._scale_axes(),
                parents=parents,
                backward=self.backward,
                block=self._block,
            )
            parents = (*parents, self.scales)
            for name, tiles in self._tiled():
                yield Stage(
                    name=name,
                    view=self._scale_view(),
                    axes=(HEADS[self.tensor], *tiles),
                    parents=(self.scales,),
                    backward=self.backward,
                    block=self._block,
                )
        if self.coded:
            heads = HEADS.get(self.tensor)
            yield Stage(
                name=self.codes,
                view=self._view(),
                axes=_PAIRS if heads is None else (TOKENS[heads], heads, "head_dim"),
                parents=parents,
                scales=self.scales if self.scaled else None,
                backward=self.backward,
                block=self._block,
            )

    def read_by(self, product: str) -> Iterator[str]:
        """Yield the stages that a product takes of it."""
        if self.scaled and product not in self.folded and not (self.descaled and product == "s"):
            yield self.scales
            if self.powers:
                yield self.token_scales
        if self.coded:
            yield self.codes

    def values(self) -> Iterator[str]:
        """Yield the stages that say what its values are."""
        if self.scaled:
            yield self.scales
            if self.powers:
                yield self.token_scales
        yield self.codes

    @property
    def _block(self) -> int:
        """Channels, keys or tokens to a block: 32, which an MMA scales together, but where the scales are of fewer."""
        return 16 if 16 in (self.operand.block or ()) else BLOCK

    def _scale_view(self) -> View:
        from flamia_ref.formats import PRESETS

        if self.descaled:
            return View.F32
        scale = PRESETS[self.operand.format].scale.name if self.scaled else "e8m0"
        views = {"e8m0": View.F8_E8M0, "ue4m3": View.F8_UE4M3}
        if scale not in views:
            raise ValueError(f"{self.name} has scales in {scale!r}; packs hold {', '.join(views)}")
        return views[scale]

    def _scale_axes(self) -> tuple[str, ...]:
        if self.descaled:
            return ("documents", "kv_heads")
        heads = HEADS.get(self.tensor)
        allowed = _PAIR_SCALES if heads is None else _INPUT_SCALES
        for block, axes in allowed.items():
            if self.operand.block == block:
                if heads is None:
                    return ("heads", *axes)
                of_tokens = TOKENS if axes[0] == "tokens" else TOKEN_BLOCKS
                return (of_tokens[heads], heads, axes[1])
        raise ValueError(
            f"{self.name} has scale blocks {shown(self.operand.block)}; "
            f"packs hold {', '.join(map(str, allowed))}"
        )

    def _tiled(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield name and axes of the orders in which products load the scales of an input."""
        if self.tensor not in HEADS or self.operand.dequantized or self.descaled:
            return
        rows, _, columns = self._scale_axes()
        loading = [product for product in self.products if product not in self.folded]
        over_channels = [product for product in loading if product in _OVER_CHANNELS]
        over_tokens = [product for product in loading if product not in _OVER_CHANNELS]
        if self._block != BLOCK and rows in TOKEN_BLOCKS.values():
            return  # no kernel's order of these is known here
        for products, along, wrong in (
            (over_channels, "channels", columns == "head_dim"),
            (over_tokens, "tokens", rows in TOKENS.values()),
        ):
            if products and wrong:
                raise ValueError(
                    f"{self.name} has scale blocks {shown(self.operand.block)}, and {products[0]} takes one "
                    f"scale for 32 {along}"
                )
        if over_channels:
            yield f"{self.scales}.tiled", TILES
        if over_tokens:
            yield f"{self.scales}.tiled_transposed", TRANSPOSED_TILES

    def _view(self) -> View:
        from flamia_ref.formats import PRESETS

        given = self.operand.format
        element = PRESETS[given].element.name if given in PRESETS else given
        views = {"e4m3": View.F8_E4M3}
        views |= {"e2m1": View.F4_E2M1} if self.scaled else {"bf16": View.BF16}
        if element not in views:
            raise ValueError(f"{self.name} has format {given!r}; packs hold {', '.join(views)}")
        return views[element]


def copies(recipe: "Recipe") -> list[Copy]:
    """Return every copy of q, k, v, do, p and ds, in the order of the dataflow.

    Raises ValueError where one use takes the codes of another tensor, or of a copy, or is promoted
    from such.
    """
    uses: dict[str, list[Use]] = {}
    for use, _ in recipe.uses():
        uses.setdefault(use.split(".")[1], []).append(use)
    made = []
    for tensor, of_tensor in uses.items():
        sources = {use: recipe.operand(use).same_codes_as or use for use in of_tensor}
        for use, source in sources.items():
            if sources.get(source) != source or (tensor == "p" and source != use):
                raise ValueError(f"{use} has the codes of {source}, which are not its own to take")
            own, taken = recipe.operand(use), recipe.operand(source)
            if (own.format, own.block) != (taken.format, taken.block):
                raise ValueError(f"{use} has the codes of {source}, but another format or block")
        roots = list(dict.fromkeys(sources.values()))
        one = len(roots) == 1 and tensor != "p"
        names = {root: tensor if one else f"{tensor}.{_product(root)}" for root in roots}
        for root in roots:
            members = [use for use in of_tensor if sources[use] == root]
            folded = [use for use in members if recipe.operand(use).scale_folded_into]
            promoted = recipe.operand(root).promoted_from
            if promoted is not None and (promoted == root or promoted not in roots):
                raise ValueError(
                    f"{root} is promoted from {promoted}, which is no copy of {tensor}"
                )
            made.append(
                Copy(
                    name=names[root],
                    tensor=tensor,
                    operand=recipe.operand(root),
                    products=tuple(_product(use) for use in members),
                    folded=tuple(_product(use) for use in folded),
                    source=None if promoted is None else names[promoted],
                )
            )
    return made


def _product(use: "Use") -> str:
    return use.split(".")[0]
