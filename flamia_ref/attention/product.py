"""The matrix products of a recipe as data: which operands, in what format, by which instruction, in what order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from flamia_ref._errors import shown, unknown_name
from flamia_ref.arithmetic.catalogue import INSTRUCTIONS
from flamia_ref.attention.data import Data, added
from flamia_ref.formats import E8M0, FORMATS, PRESETS


class Use(StrEnum):
    """One operand of one matrix product: product, then tensor."""

    S_Q = "s.q"
    S_K = "s.k"
    O_P = "o.p"
    O_V = "o.v"
    DP_DO = "dp.do"
    DP_V = "dp.v"
    DV_P = "dv.p"
    DV_DO = "dv.do"
    DQ_DS = "dq.ds"
    DQ_K = "dq.k"
    DK_DS = "dk.ds"
    DK_Q = "dk.q"


class Scope(StrEnum):
    """Where the scale of an operand comes from, and so which tokens it depends on."""

    BLOCK = "block"
    """The values of the block that it scales."""
    TOKEN = "token"
    """All channels of one token and head."""
    PREVIOUS_BLOCK = "previous_block"
    """The values of the block of tokens before it in the document; `static_scale` in a document's first block."""
    HEAD = "head"
    """All tokens of one document and all heads that share a key/value head: a float32 descale of amax / 448, 1 for an
    amax of 0."""
    LARGEST_SCORE = "largest_score"
    """Of P alone: the largest score of the block's keys, by the exponential that gives P, over the largest element. P
    is divided by it before it is rounded to the scale format."""
    STATIC = "static"
    """Nothing: one constant, `static_scale`."""
    UNIT = "unit"
    """Nothing: the operand has no scale."""


class Guard(StrEnum):
    """What a use does in guarded blocks: 32 queries by 32 keys with a visible and a masked pair.

    A key past the document's end counts as masked there, a query past it does not count.
    """

    NONE = "none"
    """The same as everywhere."""
    HIGH_PRECISION_WHERE_CUT = "high_precision_where_cut"
    """The product's `guard_instruction`, on bfloat16 operands."""


class TileOrder(StrEnum):
    """The order in which tiles are added to an accumulator."""

    ASCENDING = "ascending"
    DESCENDING = "descending"
    DESCENDING_WHERE_CAUSAL = "descending_where_causal"
    """Descending with a causal mask or a window, ascending without."""
    SHIFTED = "shifted"
    """From the tile of the same index on and round: descending along keys, ascending along queries. Key tiles that are
    worked on in pairs begin with the pair that the tile is in."""

    def under(self, bounded: bool) -> TileOrder:
        """The order itself, where a mask is `bounded` (causal, or a window) or not."""
        if self is not TileOrder.DESCENDING_WHERE_CAUSAL:
            return self
        return TileOrder.DESCENDING if bounded else TileOrder.ASCENDING


KEY_TILE_ORDERS = (
    TileOrder.ASCENDING,
    TileOrder.DESCENDING,
    TileOrder.DESCENDING_WHERE_CAUSAL,
)
"""The orders of the key tiles that are computed in O; in dQ every order is."""

QUERY_TILE_ORDERS = (TileOrder.ASCENDING, TileOrder.DESCENDING, TileOrder.SHIFTED)
"""The orders of the query tiles that are computed in dK and dV."""


class Accumulation(StrEnum):
    """How the tiles along a contraction come together."""

    CHAINED = "chained"
    """One chain of the instruction over all tiles."""
    FLOAT32_PARTIALS = "float32_partials"
    """A chain from +0 for each tile, in dQ for each aligned pair of tiles from head_dim 128 on; float32 adds them."""
    FUSED_PARTIALS = "fused_partials"
    """A chain from +0 for each tile; from the second on, a fused multiply-add rescales the sum so far and adds it."""


_SCALED = (Scope.BLOCK, Scope.TOKEN, Scope.PREVIOUS_BLOCK, Scope.LARGEST_SCORE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand(Data):
    """One use of one tensor in a matrix product.

    Attributes:
        format: a preset of `flamia_ref.formats`, or a scalar format for an operand whose scale is no function of it.
        block: the scale block as (rows, columns) of the matrix the scales are taken from, "all" for a whole extent; one
            of the preset's. None is the preset's own, and right for an operand without a preset.
        scope: where the scale comes from.
        static_scale: the e8m0 code of a static scale, or of the first block's with scope "previous_block".
        same_codes_as: the use whose codes these are; nothing is quantized a second time.
        promoted_from: the use whose values these are, in this operand's element and with this operand's scale; nothing
            is quantized from the input a second time.
        scale_folded_into: the use whose values take this operand's scale before they are quantized; the product then
            sees this operand with unit scales.
        guard: what the use does in guarded blocks.
        dequantized: fake quantization: the product takes the values of the codes, rounded to bfloat16, and no scales.
        smoothing: what is taken off the values before they are quantized, with the difference rounded to bfloat16.
            "document_mean": of k in S, its mean over a document's tokens, channel by channel: float32 sums of 128
            tokens each, ascending, these added ascending, times fl(1 / tokens), rounded to bfloat16. The scores of a
            row all lose the same, so lse does, and O does not. "tile_mean": of q in S, its mean over 128 tokens, those
            of a query tile or of several, those past the document's end as zeros: a butterfly of bfloat16 additions at
            the distances of `smoothing.BUTTERFLIES`, times 1 / 128. S begins at the product of that mean and of k as it
            is before it is quantized, by `correction_instruction`, rounded to bfloat16.
    """

    format: str
    block: tuple[int | Literal["all"], int | Literal["all"]] | None = None
    scope: Scope = Scope.BLOCK
    static_scale: int | None = None
    same_codes_as: Use | None = None
    promoted_from: Use | None = None
    scale_folded_into: Use | None = None
    guard: Guard = Guard.NONE
    dequantized: bool = added(2, False)
    smoothing: Literal["none", "document_mean", "tile_mean"] = added(2, "none")

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        if self.format in PRESETS:
            object.__setattr__(self, "block", PRESETS[self.format].checked_block(self.block))
        elif self.format not in FORMATS:
            raise unknown_name("operand format", self.format, [*PRESETS, *FORMATS])
        elif self.block is not None:
            raise ValueError(
                f"{self.format} has no scales; leave the block out, it is {shown(self.block)}"
            )
        scaled = self.format in PRESETS
        if scaled != (self.scope in _SCALED):
            allowed = ", ".join(scope.value for scope in Scope if (scope in _SCALED) == scaled)
            raise ValueError(f"{self.format} has scope {self.scope.value!r}; allowed: {allowed}")
        if (self.scope in (Scope.STATIC, Scope.PREVIOUS_BLOCK)) != (self.static_scale is not None):
            raise ValueError(
                f"static_scale is {shown(self.static_scale)} with scope {self.scope.value!r}; give an e8m0 code"
                " with scope 'static' or 'previous_block', and only there"
            )
        if self.same_codes_as is not None and self.promoted_from is not None:
            raise ValueError(
                f"an operand has the codes of {self.same_codes_as} and is promoted from {self.promoted_from}; give one"
            )
        if self.static_scale is not None and not 0 <= self.static_scale <= 254:
            raise ValueError(f"static_scale is {self.static_scale}; allowed: 0 to 254")
        if self.dequantized and (not scaled or self.scale_folded_into is not None):
            raise ValueError(
                f"{self.format} is dequantized{' with a folded scale' if scaled else ''}; a product can take the values"
                " of block formats, scales included, so nothing is left to fold"
            )

    @property
    def plain(self) -> bool:
        """Whether an input is taken as it is, in bfloat16."""
        return self.format == "bf16" and self.scope is Scope.UNIT

    @property
    def has_scales(self) -> bool:
        """Whether scales follow from the values: those of blocks, or descales."""
        return self.format in PRESETS or self.scope is Scope.HEAD

    @property
    def has_token_scales(self) -> bool:
        """Whether each token has a power of two of its own besides its block scales, which are no powers of two."""
        scaled = self.scope is Scope.TOKEN and self.format in PRESETS
        return scaled and PRESETS[self.format].scale is not E8M0


@dataclass(frozen=True, kw_only=True, slots=True)
class Product(Data):
    """One matrix product: S, O, dP, dV, dQ or dK.

    Attributes:
        left, right: its operands.
        instruction: a name in `flamia_ref.arithmetic.INSTRUCTIONS`.
        guard_instruction: the instruction of guarded blocks, where an operand is guarded.
        correction_instruction: the instruction, on bfloat16 operands, of the product that the accumulator begins at,
            where the left operand has the smoothing "tile_mean".
        tile_order: the order of the tiles along the contraction.
        k_order: the order of the instruction's steps along channels, or along the tokens of one tile.
        accumulation: how tiles come together.
    """

    left: Operand
    right: Operand
    instruction: str
    guard_instruction: str | None = None
    correction_instruction: str | None = added(2, None)
    tile_order: TileOrder = TileOrder.ASCENDING
    k_order: Literal["ascending", "descending"] = "ascending"
    accumulation: Accumulation = Accumulation.CHAINED

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        INSTRUCTIONS[self.instruction]
        if self.guard_instruction is not None:
            INSTRUCTIONS[self.guard_instruction]
        if self.guarded != (self.guard_instruction is not None):
            raise ValueError(
                f"guard_instruction is {shown(self.guard_instruction)}; a product has one if an operand is guarded,"
                " and only then"
            )
        if self.correction_instruction is not None:
            INSTRUCTIONS[self.correction_instruction]
        if self.corrected != (self.correction_instruction is not None):
            raise ValueError(
                f"correction_instruction is {shown(self.correction_instruction)} with left.smoothing ="
                f" {self.left.smoothing!r}; a product has one if its left operand is smoothed by 'tile_mean', and only"
                " then"
            )

    @property
    def corrected(self) -> bool:
        """Whether the accumulator begins at the product of what was taken off the left operand."""
        return self.left.smoothing == "tile_mean"

    @property
    def guarded(self) -> bool:
        """Whether guarded blocks are computed otherwise."""
        return Guard.HIGH_PRECISION_WHERE_CUT in (self.left.guard, self.right.guard)
