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

from flamia_ref._errors import Registry, unknown_name
from flamia_ref.arithmetic.special import SPECIAL_MODELS
from flamia_ref.attention.data import Data, once, plain, typed
from flamia_ref.attention.product import Operand, Product, Use
from flamia_ref.evidence import Evidence, weakest
from flamia_ref.formats import FORMATS


class DeltaSum(StrEnum):
    """How delta, the row sum of the returned O times dO, is added up."""

    FMA_ASCENDING = "fma_ascending"
    """One float32 fused multiply-add a channel, ascending from +0."""
    THREAD_VECTORS = "thread_vectors"
    """Float32 products; threads add vectors of 8 channels, then a butterfly at distance 1, 2, 4, ..."""
    HALF_PRODUCTS = "half_products"
    """Products rounded to bfloat16; 8 threads add pairs of channels, then a butterfly at distance 4, 2, 1."""


ScoreFactor = Literal["exact_product", "float64_product", "float32_product"]
"""The float32 c = softmax_scale log2(e): the exact product rounded once, the float64 product of float64 factors
rounded again, or the float32 product of float32 factors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedColumns(Data):
    """Columns of a key tile whose 2^x is computed by another model than the rest.

    Column k is one if `first` <= k < `stop` and k modulo `period` >= `period` - `count`.
    """

    exp2: str
    period: int
    count: int
    first: int
    stop: int

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        _check_model("exp2", self.exp2)
        if not (0 < self.count <= self.period and 0 <= self.first < self.stop):
            raise ValueError(
                f"emulated columns have period {self.period}, count {self.count}, first {self.first} and stop"
                f" {self.stop}; allowed: 0 < count <= period and 0 <= first < stop"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Softmax(Data):
    """The softmax between S and P.

    Attributes:
        exp2, log2, reciprocal: models of the special functions.
        emulated: columns whose 2^x is computed otherwise, in the forward.
        score_factor: how c is rounded.
        base: "integer_max": with t = S c, n = ceil(t), the row maximum of n, so that a rescale is an exact exponent
            add. "raw_max": of S. "scaled_max": of S c, from -3.4028235e38.
        exp2_argument: "split": x = fma(S, c, -n), and 2^x then has its exponent raised by n - base. "fused": x =
            fma(S, c, offset - base), the base in units of S c.
        rescale_threshold: how far, in log2 units, the maximum may pass the base before the base follows.
        p_offset: P is 2^p_offset times the probability relative to the base, and so are the row sum and O's
            accumulator.
        row_sum: "eight_lanes": column r modulo 8 in lane r, ascending, lane 0 starting from the sum so far; then
            ((L0+L2)+(L4+L6)) + ((L1+L3)+(L5+L7)). "two_lanes": even and odd columns, each half of 64 ascending, the
            halves added, then onto the rescaled sum by a fused multiply-add; the lanes are added at the end.
        normalisation: "reciprocal": O times the reciprocal model. "zero_safe_reciprocal": that, of 1 for a row sum
            that is 0 or NaN. "division": O times 1 / max(row sum, 1e-30), the quotient rounded once.
        lse: "log2_sum": ((base - p_offset) + log2(sum)) ln 2. "log2_fma": fma(base, c, log2(sum) - p_offset) ln 2.
            "natural_fma": fma(base, ln 2, log2(sum) ln 2) - p_offset ln 2.
    """

    exp2: str
    log2: str
    reciprocal: str
    emulated: EmulatedColumns | None = None
    score_factor: ScoreFactor = "exact_product"
    base: Literal["integer_max", "raw_max", "scaled_max"] = "integer_max"
    exp2_argument: Literal["split", "fused"] = "split"
    rescale_threshold: int = 0
    p_offset: int = 0
    row_sum: Literal["eight_lanes", "two_lanes"] = "eight_lanes"
    normalisation: Literal["reciprocal", "zero_safe_reciprocal", "division"] = "reciprocal"
    lse: Literal["log2_sum", "log2_fma", "natural_fma"] = "log2_sum"

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        for function in ("exp2", "log2", "reciprocal"):
            _check_model(function, getattr(self, function))
        for name in ("rescale_threshold", "p_offset"):
            if not 0 <= getattr(self, name) <= 64:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 to 64")


def _check_model(function: str, given: str) -> None:
    models = [name for name, model in SPECIAL_MODELS.items() if function in model.functions]
    if given not in models:
        raise unknown_name(f"{function} model", given, models)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient(Data):
    """How the backward gets from dP to the gradients.

    Attributes:
        softmax_scale: "epilogue": it multiplies the float32 accumulators of dQ and dK.
        score_factor: how c is rounded in the backward.
        normalisation: "fold_into_dout": P = 2^(t - b) with b = floor(lse log2 e), and dO takes the rest. "lse": P =
            2^(fma(S, c, -lse log2 e)).
        delta: how the row sums of dO times the returned O are added up.
        p_for_dv: "recomputed": dV's P is computed again from the codes and lse.
        p_offset: dV's P is multiplied by 2^p_offset before it is encoded.
        heads: "float32_sum": one chain a query head, added in float32, ascending. "one_chain": one chain over the query
            heads of a key/value head, ascending.
    """

    softmax_scale: Literal["epilogue"] = "epilogue"
    score_factor: ScoreFactor = "exact_product"
    normalisation: Literal["fold_into_dout", "lse"] = "fold_into_dout"
    delta: DeltaSum = DeltaSum.FMA_ASCENDING
    p_for_dv: Literal["recomputed"] = "recomputed"
    p_offset: int = 0
    heads: Literal["float32_sum", "one_chain"] = "float32_sum"

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        if not 0 <= self.p_offset <= 64:
            raise ValueError(f"p_offset is {self.p_offset}; allowed: 0 to 64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles(Data):
    """Rows of a query tile and columns of a key tile. Both start at the document.

    Attributes:
        query, key: how many.
        masked: whether a pair of tiles without a visible pair is "computed" with zeros, which a NaN in it reaches, or
            "skipped".
    """

    query: int = 128
    key: int = 128
    masked: Literal["computed", "skipped"] = "computed"


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
        guard_operands: what guarded blocks take: "inputs", the bfloat16 values before quantization.
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
    guard_operands: Literal["inputs"] = "inputs"
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
