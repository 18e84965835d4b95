"""The parts of a recipe between its products, as data: softmax, gradient, tiles, schedules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np

from flamia_ref._errors import shown, unknown_name
from flamia_ref.arithmetic.special import SPECIAL_MODELS
from flamia_ref.attention.data import Data, check_name
from flamia_ref.attention.product import KEY_TILE_ORDERS, QUERY_TILE_ORDERS, TileOrder

SMALLEST_TILE, LARGEST_TILE = 32, 256
_MOST_SPLITS = 256


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

    Column k is one if `first` <= k < `stop` and k modulo `period` >= `period` - `count`. No number passes 256, the
    columns of the largest tile.
    """

    exp2: str
    period: int
    count: int
    first: int
    stop: int

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        _check_model("exp2", self.exp2)
        numbers = (self.period, self.count, self.first, self.stop)
        ordered = 0 < self.count <= self.period and 0 <= self.first < self.stop
        if not ordered or max(numbers) > LARGEST_TILE:
            period, count, first, stop = map(shown, numbers)
            raise ValueError(
                f"emulated columns have period {period}, count {count}, first {first} and stop {stop}; allowed: 0 <"
                f" count <= period <= {LARGEST_TILE} and 0 <= first < stop <= {LARGEST_TILE}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Softmax(Data):
    """The softmax between S and P.

    With a soft cap, S becomes S' = softcap tanh(S (softmax_scale / softcap)), each product and the quotient rounded,
    and c is the float32 log2(e).

    Attributes:
        exp2, log2, reciprocal, tanh: models of the special functions.
        emulated: columns whose 2^x is computed otherwise, in the forward.
        score: "folded": softmax_scale is in c. "scaled": S' = S softmax_scale, rounded, and c is the float32 log2(e).
        score_factor: how c is rounded where softmax_scale is in it.
        base: "integer_max": with t = S c, n = ceil(t), the row maximum of n, so that a rescale is an exact exponent
            add. "raw_max": of S. "scaled_max": of S c, from -3.4028235e38.
        exp2_argument: "split": x = fma(S, c, -n), and 2^x then has its exponent raised by n - base. "fused": x =
            fma(S, c, offset - base), the base in units of S c. "unfused": the same, the product rounded first.
        mask_value: a finite score that masked pairs have; they then count in the row maximum and in the row sum, and
            reach the output where no visible score is far above it. None: they are selected out.
        rescale_threshold: how far, in log2 units, the maximum may pass the base before the base follows.
        p_offset: P is 2^p_offset times the probability relative to the base, and so are the row sum and O's
            accumulator.
        row_sum: "eight_lanes": column r modulo 8 in lane r, ascending, lane 0 starting from the sum so far; then
            ((L0+L2)+(L4+L6)) + ((L1+L3)+(L5+L7)). "two_lanes": even and odd columns, each 64 ascending, these added,
            then onto the rescaled sum by a fused multiply-add; the lanes are added at the end. "ascending": onto the
            rescaled sum, one column after another.
        row_sum_of: "p": the float32 P. "codes": P as O's product takes it, without a scale that it took over.
        normalisation: "reciprocal": O times the reciprocal model. "zero_safe_reciprocal": that, of 1 for a row sum
            that is 0 or NaN. "division": O times 1 / max(row sum, 1e-30), the quotient rounded once. "quotient": O /
            row sum, rounded once.
        lse: "log2_sum": ((base - p_offset) + log2(sum)) ln 2. "log2_fma": fma(base, c, log2(sum) - p_offset) ln 2.
            "natural_fma": fma(base, ln 2, log2(sum) ln 2) - p_offset ln 2.
        combine: how the splits of a document's keys come together. "every_split": each split's share is normalised,
            then applied. "scales_first": the same, but shares that are 0 or NaN are left out. "divide_last": weights
            are applied, those of NaN left out, then their sum divides.
    """

    exp2: str
    log2: str
    reciprocal: str
    tanh: str = "mufu.sm90"
    emulated: EmulatedColumns | None = None
    score: Literal["folded", "scaled"] = "folded"
    score_factor: ScoreFactor = "exact_product"
    base: Literal["integer_max", "raw_max", "scaled_max"] = "integer_max"
    exp2_argument: Literal["split", "fused", "unfused"] = "split"
    mask_value: float | None = None
    rescale_threshold: int = 0
    p_offset: int = 0
    row_sum: Literal["eight_lanes", "two_lanes", "ascending"] = "eight_lanes"
    row_sum_of: Literal["p", "codes"] = "p"
    normalisation: Literal["reciprocal", "zero_safe_reciprocal", "division", "quotient"] = (
        "reciprocal"
    )
    lse: Literal["log2_sum", "log2_fma", "natural_fma"] = "log2_sum"
    combine: Literal["every_split", "scales_first", "divide_last"] = "every_split"

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        for function in ("exp2", "log2", "reciprocal", "tanh"):
            _check_model(function, getattr(self, function))
        for name in ("rescale_threshold", "p_offset"):
            if not 0 <= getattr(self, name) <= 64:
                raise ValueError(f"{name} is {shown(getattr(self, name))}; allowed: 0 to 64")
        if self.rescale_threshold + self.p_offset > 64:
            raise ValueError(
                f"rescale_threshold is {self.rescale_threshold} and p_offset {self.p_offset}; together they lift P and"
                " its sums by as many powers of two, so at most 64"
            )
        if self.exp2_argument == "split" and self.base != "integer_max":
            raise ValueError(
                f"exp2_argument is 'split' with base {self.base!r}; the exponent n - base is an integer only with base"
                " 'integer_max'"
            )
        if (self.lse == "log2_fma") != (self.base == "raw_max"):
            raise ValueError(
                f"lse is {self.lse!r} with base {self.base!r}; 'log2_fma' takes a base in units of S, which 'raw_max'"
                " alone is"
            )
        if self.mask_value is not None and not _is_negative(self.mask_value):
            raise ValueError(
                f"mask_value is {self.mask_value!r}; in float32 it must be finite and below 0, or None for a select"
            )


def _is_negative(x: float) -> bool:
    """Whether a number is finite and below 0 once it is rounded to float32."""
    with np.errstate(over="ignore", under="ignore"):
        return bool(-np.inf < np.float32(x) < 0)


def _check_model(function: str, given: str) -> None:
    models = [name for name, model in SPECIAL_MODELS.items() if function in model.functions]
    if given not in models:
        raise unknown_name(f"{function} model", given, models)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient(Data):
    """How the backward gets from dP to the gradients.

    Attributes:
        softmax_scale: "epilogue": it multiplies the float32 accumulators of dQ and dK. "in_ds": dS = P fma(dP,
            softmax_scale, -(delta softmax_scale)).
        score_factor: how c is rounded in the backward.
        normalisation: "fold_into_dout": P = 2^(t - b) with b = floor(lse log2 e), and dO takes the rest. "lse": P =
            2^(fma(S, c, -lse log2 e)), in a product and a sum where softmax.exp2_argument is "unfused".
        delta: how the row sums of dO times O are added up.
        delta_source: "returned_out": dO times the returned O. "unrounded_out": dO times O before its output rounding,
            which the forward keeps. "quantized_dout": the values of dO's codes in dP times the returned O. "p_dp": the
            sum over a row's pairs of P dP, rounded and added by the softmax's row-sum order, key tiles ascending; it
            costs a pass over the pairs.
        p_for_dv: "recomputed": dV's P is computed again from the codes and lse. "forward": it is the P that the forward
            rounded for O, brought from its key tile's base, which the forward keeps, to the backward's.
        p_offset: dV's P is multiplied by 2^p_offset before it is encoded.
        masked_ds: "select": dS is 0 where masked. "product": it is 0 times (dP - delta) there, NaN where that is
            infinite or NaN.
        heads: "float32_sum": one chain a query head, added in float32. "one_chain": one chain over the query heads of
            a key/value head.
        heads_order: the order of the query heads of a key/value head.
    """

    softmax_scale: Literal["epilogue", "in_ds"] = "epilogue"
    score_factor: ScoreFactor = "exact_product"
    normalisation: Literal["fold_into_dout", "lse"] = "fold_into_dout"
    delta: DeltaSum = DeltaSum.FMA_ASCENDING
    delta_source: Literal["returned_out", "unrounded_out", "quantized_dout", "p_dp"] = (
        "returned_out"
    )
    p_for_dv: Literal["recomputed", "forward"] = "recomputed"
    p_offset: int = 0
    masked_ds: Literal["select", "product"] = "select"
    heads: Literal["float32_sum", "one_chain"] = "float32_sum"
    heads_order: Literal["ascending", "descending"] = "ascending"

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        if not 0 <= self.p_offset <= 64:
            raise ValueError(f"p_offset is {shown(self.p_offset)}; allowed: 0 to 64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles(Data):
    """Rows of a query tile and columns of a key tile. Both start at the document.

    Attributes:
        query, key: how many, a multiple of 32 from 32 to 256.
        masked: whether a pair of tiles without a visible pair is "computed" with zeros, which a NaN in it reaches, or
            "skipped".
        splits: into how many runs of equally many key tiles, the last ones shorter or empty, the keys of a query tile
            are split; each has a softmax of its own, and they are combined at the end.
    """

    query: int = 128
    key: int = 128
    masked: Literal["computed", "skipped"] = "computed"
    splits: int = 1

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        for name in ("query", "key"):
            size = getattr(self, name)
            if size % SMALLEST_TILE or not SMALLEST_TILE <= size <= LARGEST_TILE:
                raise ValueError(
                    f"tiles.{name} is {shown(size)}; allowed: multiples of {SMALLEST_TILE}, the tokens of a scale and"
                    f" of an instruction, up to {LARGEST_TILE}"
                )
        if not 1 <= self.splits <= _MOST_SPLITS:
            raise ValueError(f"tiles.splits is {shown(self.splits)}; allowed: 1 to {_MOST_SPLITS}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule(Data):
    """One way in which kernels of a recipe may order their work: what differs from the recipe, None where nothing does.

    Attributes:
        name: what the schedule is called, as a recipe's name.
        o_order, dq_order: the order of the key tiles in O and in dQ.
        key_order: the order of the query tiles in dK and dV.
        heads_order: the order of the query heads of a key/value head.
        splits: as in `Tiles`.
    """

    name: str
    o_order: TileOrder | None = None
    dq_order: TileOrder | None = None
    key_order: TileOrder | None = None
    heads_order: Literal["ascending", "descending"] | None = None
    splits: int | None = None

    def __post_init__(self) -> None:
        Data.__post_init__(self)
        check_name("a schedule's name", self.name)
        for field, allowed in (("o_order", KEY_TILE_ORDERS), ("key_order", QUERY_TILE_ORDERS)):
            order = getattr(self, field)
            if order is not None and order not in allowed:
                raise ValueError(
                    f"schedule {self.name!r} has {field} = {str(order)!r}; computed are"
                    f" {', '.join(repr(str(one)) for one in allowed)}"
                )
        if self.splits is not None and not 1 <= self.splits <= _MOST_SPLITS:
            raise ValueError(
                f"schedule {self.name!r} has splits = {shown(self.splits)}; allowed: 1 to {_MOST_SPLITS}"
            )
