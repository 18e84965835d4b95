"""A recipe: everything that decides the bits of one attention path, as data.

A recipe composes three nouns: `Operand` (one use of one tensor in a matrix product), `Product` (S, O, dP, dV, dQ, dK:
two operands and an instruction) and `Softmax`; the backward adds `Gradient`. Enumerations hold only what is computed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, cast

from flamia_ref._errors import Registry, shown, unknown_name
from flamia_ref.arithmetic.instructions import INSTRUCTIONS
from flamia_ref.arithmetic.special import SPECIAL_MODELS
from flamia_ref.attention.data import Data, once, plain, typed
from flamia_ref.evidence import Evidence, weakest
from flamia_ref.formats import FORMATS, PRESETS


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


class TileOrder(StrEnum):
    """The order in which tiles are added to an accumulator."""

    ASCENDING = "ascending"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operand(Data):
    """One use of one tensor in a matrix product.

    Attributes:
        format: a preset of `flamia_ref.formats`, or a scalar format for an operand without scales.
        block: the scale block as (rows, columns) of the matrix the scales are taken from, "all" for a whole extent; one
            of the preset's. None is the preset's own, and right for an operand without scales.
        scope: where the scale comes from.
        same_codes_as: the use whose codes these are; nothing is quantized a second time.
        scale_folded_into: the use whose values take this operand's scale before they are quantized; the product then
            sees this operand with unit scales.
    """

    format: str
    block: tuple[int | Literal["all"], int | Literal["all"]] | None = None
    scope: Scope = Scope.BLOCK
    same_codes_as: Use | None = None
    scale_folded_into: Use | None = None

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Product(Data):
    """One matrix product: S, O, dP, dV, dQ or dK.

    Attributes:
        left, right: its operands.
        instruction: a name in `flamia_ref.arithmetic.INSTRUCTIONS`.
        tile_order: the order of the tiles along the contraction, one chain over all of them.
    """

    left: Operand
    right: Operand
    instruction: str
    tile_order: TileOrder = TileOrder.ASCENDING

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        INSTRUCTIONS[self.instruction]


@dataclass(frozen=True, kw_only=True, slots=True)
class Softmax(Data):
    """The softmax between S and P.

    Attributes:
        exp2, log2, reciprocal: models of the special functions.
        exp2_argument: "split": t = S c, n = ceil(t), x = fma(S, c, -n); 2^x then has its exponent raised by n - base.
        base: "integer_max": the row maximum of n, so that a rescale is an exact exponent add.
        row_sum: "eight_lanes": column r modulo 8 in lane r, ascending, lane 0 starting from the sum so far; then
            ((L0+L2)+(L4+L6)) + ((L1+L3)+(L5+L7)). It adds P before folding and quantization.
        lse: "natural": (base + log2(sum)) ln 2.
    """

    exp2: str
    log2: str
    reciprocal: str
    exp2_argument: Literal["split"] = "split"
    base: Literal["integer_max"] = "integer_max"
    row_sum: Literal["eight_lanes"] = "eight_lanes"
    lse: Literal["natural"] = "natural"

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        for function in ("exp2", "log2", "reciprocal"):
            models = [name for name, model in SPECIAL_MODELS.items() if function in model.functions]
            if getattr(self, function) not in models:
                raise unknown_name(f"{function} model", getattr(self, function), models)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient(Data):
    """How the backward gets from dP to the gradients.

    Attributes:
        softmax_scale: "epilogue": it multiplies the float32 accumulators of dQ and dK.
        normalisation: "fold_into_dout": P' = 2^(t - b) with b = floor(lse log2 e), and dO takes the rest.
        delta: "returned_out": row sums of dO' times the returned O.
        p_for_dv: "recomputed": from the forward's codes, relative to b.
    """

    softmax_scale: Literal["epilogue"] = "epilogue"
    normalisation: Literal["fold_into_dout"] = "fold_into_dout"
    delta: Literal["returned_out"] = "returned_out"
    p_for_dv: Literal["recomputed"] = "recomputed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles(Data):
    """Rows of a query tile and columns of a key tile. Both start at the document."""

    query: int = 128
    key: int = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Data):
    """One step of a recipe: what it rests on."""

    evidence: Evidence
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe(Data):
    """An attention path to the last bit. Equal data, equal bits.

    Attributes:
        name: the registry name.
        s, o, dp, dv, dq, dk: the products.
        softmax, gradient, tiles: what is between them.
        input, output: scalar formats of q, k, v, dout and of out, dq, dk, dv.
        steps: evidence and source of each part, by its dotted path ("softmax.exp2", or "s" for all of s).
    """

    name: str
    s: Product
    o: Product
    dp: Product
    dv: Product
    dq: Product
    dk: Product
    softmax: Softmax
    gradient: Gradient
    steps: Mapping[str, Step] = field(hash=False)
    tiles: Tiles = Tiles()
    input: str = "bf16"
    output: str = "bf16"

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        for scalar in (self.input, self.output):
            FORMATS[scalar]
        object.__setattr__(self, "steps", Registry("step", self.steps.items()))
        leaves = _leaves(self)
        for path in self.steps:
            if not any(f"{leaf}.".startswith(f"{path}.") for leaf in leaves):
                raise unknown_name("part with evidence", path, leaves)
        uncovered = [path for path in leaves if self._step(path) is None]
        if uncovered:
            raise ValueError(
                f"recipe {self.name!r} has no evidence for {', '.join(uncovered)}; add steps for them"
            )

    def operand(self, use: Use | str) -> Operand:
        """The operand of one use, by its name such as "dk.q"."""
        try:
            use = Use(use)
        except ValueError:
            raise unknown_name("use", use, Use) from None
        product: Product = getattr(self, use.split(".")[0])
        return product.left if use in _LEFT else product.right

    def uses(self) -> Iterator[tuple[Use, Operand]]:
        """All twelve uses with their operands, in the order of the dataflow."""
        return ((use, self.operand(use)) for use in Use)

    def evidence(self, path: str) -> Step:
        """The evidence of one part, by its dotted path."""
        step = self._step(path)
        if step is None:
            raise unknown_name("part", path, _leaves(self))
        return step

    @property
    def label(self) -> Evidence:
        """The weakest evidence of its steps: all that the recipe as a whole may claim."""
        return weakest(step.evidence for step in self.steps.values())

    def _step(self, path: str) -> Step | None:
        while path:
            if path in self.steps:
                return self.steps[path]
            path = path.rpartition(".")[0]
        return None

    def to_json(self) -> str:
        """The recipe as JSON text, keys sorted: equal recipes give equal text."""
        return json.dumps(plain(self), indent=2, sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | Mapping[str, Any]) -> Recipe:
        """The recipe that `to_json` wrote. Raises ValueError for anything else, naming the field."""
        if isinstance(text, str):
            try:
                text = json.loads(text, object_pairs_hook=once)
            except json.JSONDecodeError as error:
                raise ValueError(f"recipe is not JSON: {error}") from None
            except RecursionError:
                raise ValueError("recipe is nested too deeply to be one") from None
        return cast(Recipe, typed(Recipe, text, "recipe"))


_LEFT = {Use.S_Q, Use.O_P, Use.DP_DO, Use.DV_P, Use.DQ_DS, Use.DK_DS}


def _leaves(value: Any, path: str = "") -> list[str]:
    """Dotted paths of everything in a recipe that decides bits."""
    if not dataclasses.is_dataclass(value):
        return [path]
    names = (
        f.name
        for f in dataclasses.fields(value)
        if not (path == "" and f.name in ("name", "steps"))
    )
    return [
        leaf
        for name in names
        for leaf in _leaves(getattr(value, name), f"{path}.{name}".lstrip("."))
    ]
