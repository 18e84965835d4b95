"""The parts of a recipe between its products, as data: softmax, gradient, tiles, schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np

from flamia_ref._errors import shown, unknown_name
from flamia_ref.arithmetic.special import SPECIAL_MODELS
from flamia_ref.attention.data import Data, added, check_name
from flamia_ref.attention.product import KEY_TILE_ORDERS, QUERY_TILE_ORDERS, TileOrder

SMALLEST_TILE, LARGEST_TILE = 32, 256
_MOST_SPLITS = 256
_LARGEST_P_SCALE = 1 << 20


class DeltaSum(StrEnum):
    """How delta, the row sum of the returned O times dO, is added up."""

    FMA_ASCENDING = "fma_ascending"
    """One float32 fused multiply-add a channel, ascending from +0."""
    THREAD_VECTORS = "thread_vectors"
    """Float32 products; threads add vectors of 8 channels, then a butterfly at distance 1, 2, 4, ..."""
    HALF_PRODUCTS = "half_products"
    """Products rounded to bfloat16; 8 threads add pairs of channels, then a butterfly at distance 4, 2, 1."""


ScoreFactor = Literal["exact_product", "float64_product", "float32_product", "float32_scale"]
"""The float32 c = softmax_scale log2(e): the exact product rounded once, the float64 product of float64 factors
rounded again, the float32 product of float32 factors, or the float64 product of the float32 scale and the float64
logarithm, rounded again."""


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
    and c is the float32 log2(e); `softcap` says how else.

    Attributes:
        exp2, log2, reciprocal, tanh: models of the special functions. With the base "natural_max" those of e^x and of
            the natural logarithm.
        emulated: columns whose 2^x is computed otherwise, in the forward.
        score: "folded": softmax_scale is in c. "scaled": S' = S softmax_scale, rounded, and c is the float32 log2(e).
        score_factor: how c is rounded where softmax_scale is in it.
        softcap: "scaled": as above. "folded": S' = tanh(S (softmax_scale / softcap)), the quotient that of float32
            factors, and softcap is in c, in place of softmax_scale.
        base: "integer_max": with t = S c, n = ceil(t), the row maximum of n, so that a rescale is an exact exponent
            add. "raw_max": of S. "scaled_max": of S c, from -3.4028235e38. "natural_max": of S', which score "scaled"
            makes, NaN winning; P = e^(S' - base), the difference rounded, and a sum is rescaled by e^(old - new). A
            sink is the base and 1 the row sum before the first key tile.
        exp2_argument: "split": x = fma(S, c, -n), and 2^x then has its exponent raised by n - base. "fused": x =
            fma(S, c, offset - base), the base in units of S c. "unfused": the same, the product rounded first; with
            the base "natural_max" it stands for the two roundings of S' - base. "fused_base", with the base "raw_max"
            only: x = fma(S, c, -fma(base, c, -p_offset)).
        mask_value: a finite score that masked pairs have; they then count in the row maximum and in the row sum, and
            reach the output where no visible score is far above it. None: they are selected out.
        rescale_threshold: how far, in units of `threshold_unit`, the maximum may pass the base before the base follows.
        threshold_unit: "log2", with the base "natural_max" by the float32 of T ln 2; or "natural", with that base only.
        p_offset: P is 2^p_offset times the probability relative to the base, and so are the row sum and O's
            accumulator. 0 with the base "natural_max".
        p_scale: a factor of P, of its sums and of O's accumulator besides, by the float32 log2(p_scale) in the
            exponent: x = fma(S, c, -fma(base, c, -log2(p_scale))). 1 for none of it.
        p_scaling: "exponent": P as O's product takes it has the factor 2^p_offset alone. "static_scale": it is divided
            by its operand's static scale before it is encoded, which the product gives back.
        p_overflow: a P that passes its element. "refused": a recipe that lets it is none. "saturated": it is the
            largest value. "zero": it is 0 from where rounding to nearest would pass the largest value on.
        nan_p: whether a P that is NaN is "kept" or, with the base "natural_max" only, "zero", in both passes.
        row_sum: "eight_lanes": column r modulo 8 in lane r, ascending, lane 0 starting from the sum so far; then
            ((L0+L2)+(L4+L6)) + ((L1+L3)+(L5+L7)). "two_lanes": even and odd columns, each 64 ascending, these added,
            then onto the rescaled sum by a fused multiply-add; the lanes are added at the end. "ascending": onto the
            rescaled sum, one column after another. "by_tiles": one column after another from +0, then that onto the
            rescaled sum. "bfloat16_butterfly", of tiles of 32 keys: rounded to bfloat16, each column is added to the
            one at distance 1, the sums to those at distance 4, 2, 16 and 8, all in bfloat16; then onto the rescaled sum
            by a fused multiply-add. "octets": four lanes, each adds columns of its own onto its rescaled sum, the first
            by a fused multiply-add: lane r takes the columns from 8 r to 8 r + 7 of each 32; at the end (L0+L1) +
            (L2+L3). "quads": likewise, but lane r takes columns 2 r and 2 r + 1 of each 8, and at the
            end they are added (L0+L2) + (L1+L3). "halved_lanes": as "eight_lanes", but lanes 0 and 1 both start at the
            sum so far times half the factor that rescales it, each product rounded.
        row_sum_of: "p": the float32 P. "codes": P as O's product takes it, without a scale that it took over.
        normalisation: "reciprocal": O times the reciprocal model. "zero_safe_reciprocal": that, of 1 for a row sum
            that is 0 or NaN. "zeroing_reciprocal": that, with a factor of 0 for such a row sum. "division": O times 1 /
            max(row sum, 1e-30), the quotient rounded once. "quotient": O / row sum, rounded once. "clamped_quotient": O
            / max(row sum, 1), a NaN of the sum kept.
        lse: "log2_sum": ((base - p_offset) + log2(sum)) ln 2. "log2_fma": fma(base, c, log2(sum) - p_offset) ln 2.
            "natural_fma": fma(base, ln 2, log2(sum) ln 2) - p_offset ln 2. "natural_sum": base + ln(sum), with the
            base "natural_max" and only there. "factor_fma": fma(base, c ln 2, log2(sum times 1 / that of P) ln 2), each
            product rounded, -inf for a sum that is 0 or NaN. "scale_fma": fma(base, softmax_scale, log2(sum times 1 /
            that of P) ln 2); 1 for softmax_scale where S' has it. The last two and "log2_fma" go with the base
            "raw_max" and only there.
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
    softcap: Literal["scaled", "folded"] = added(2, "scaled")
    base: Literal["integer_max", "raw_max", "scaled_max", "natural_max"] = "integer_max"
    exp2_argument: Literal["split", "fused", "unfused", "fused_base"] = "split"
    mask_value: float | None = None
    rescale_threshold: int = 0
    threshold_unit: Literal["log2", "natural"] = added(2, "log2")
    p_offset: int = 0
    p_scale: int = added(2, 1)
    p_scaling: Literal["exponent", "static_scale"] = added(2, "exponent")
    p_overflow: Literal["refused", "saturated", "zero"] = added(2, "refused")
    nan_p: Literal["kept", "zero"] = added(2, "kept")
    row_sum: Literal[
        "eight_lanes",
        "two_lanes",
        "ascending",
        "by_tiles",
        "bfloat16_butterfly",
        "octets",
        "quads",
        "halved_lanes",
    ] = "eight_lanes"
    row_sum_of: Literal["p", "codes"] = "p"
    normalisation: Literal[
        "reciprocal",
        "zero_safe_reciprocal",
        "zeroing_reciprocal",
        "division",
        "quotient",
        "clamped_quotient",
    ] = "reciprocal"
    lse: Literal[
        "log2_sum", "log2_fma", "natural_fma", "natural_sum", "factor_fma", "scale_fma"
    ] = "log2_sum"
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
        if self.exp2_argument == "fused_base" and self.base != "raw_max":
            raise ValueError(
                f"exp2_argument is 'fused_base' with base {self.base!r}; the base is multiplied by c only with base"
                " 'raw_max'"
            )
        self._check_natural()
        if not 1 <= self.p_scale <= _LARGEST_P_SCALE:
            raise ValueError(
                f"p_scale is {shown(self.p_scale)}; allowed: whole numbers from 1 to {_LARGEST_P_SCALE}"
            )
        if self.p_scale != 1 and (self.base, self.exp2_argument, self.p_offset) != (
            "raw_max",
            "fused",
            0,
        ):
            raise ValueError(
                f"p_scale is {self.p_scale} with base {self.base!r}, exp2_argument {self.exp2_argument!r} and p_offset"
                f" {self.p_offset}; its logarithm is fused with the base of 'raw_max' and 'fused', and p_offset is 0"
            )
        if (self.lse in _OF_RAW_BASE) != (self.base == "raw_max"):
            raise ValueError(
                f"lse is {self.lse!r} with base {self.base!r}; {', '.join(map(repr, _OF_RAW_BASE))} take a base in"
                " units of S, which 'raw_max' alone is"
            )
        if self.row_sum == "halved_lanes" and self.base == "integer_max":
            raise ValueError(
                "row_sum is 'halved_lanes' with base 'integer_max'; it halves the factor that rescales a sum, which a"
                " base that shifts sums does not have"
            )
        if self.mask_value is not None and not _is_negative(self.mask_value):
            raise ValueError(
                f"mask_value is {self.mask_value!r}; in float32 it must be finite and below 0, or None for a select"
            )

    @property
    def p_log2(self) -> float:
        """log2 of what P is times the probability relative to the base."""
        return self.p_offset + math.log2(self.p_scale)

    def _check_natural(self) -> None:
        """Refuse what does not go with a base in natural units, and what goes with that alone."""
        natural = self.base == "natural_max"
        if (self.lse == "natural_sum") != natural:
            raise ValueError(
                f"lse is {self.lse!r} with base {self.base!r}; 'natural_sum' takes a base in natural units, which"
                " 'natural_max' alone is"
            )
        if not natural:
            for name, wanted in (("threshold_unit", "log2"), ("nan_p", "kept")):
                if getattr(self, name) != wanted:
                    raise ValueError(
                        f"{name} is {shown(getattr(self, name))} with base {self.base!r}; allowed: {shown(wanted)}"
                    )
            return
        of_natural: tuple[tuple[str, object], ...] = (
            ("score", "scaled"),
            ("exp2_argument", "unfused"),
            ("emulated", None),
            ("mask_value", None),
            ("p_offset", 0),
        )
        for name, only in of_natural:
            if getattr(self, name) != only:
                raise ValueError(
                    f"{name} is {shown(getattr(self, name))} with base 'natural_max'; allowed: {shown(only)}"
                )
        for function in ("exp2", "log2"):
            _check_model(_NATURAL[function], getattr(self, function))


_OF_RAW_BASE = ("log2_fma", "factor_fma", "scale_fma")
"""The forms of lse that take a base in units of S."""

_NATURAL = {"exp2": "exp", "log2": "log"}
"""The functions that stand in place of those of base 2 with a base in natural units."""


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
            softmax_scale, -(delta softmax_scale)). "times_ds": dS = (P (dP - delta)) softmax_scale, each step rounded.
        score_factor: how c is rounded in the backward.
        normalisation: "fold_into_dout": P = 2^(t - b) with b = floor(lse log2 e), and dO takes the rest. "lse": P =
            2^(fma(S, c, -lse log2 e)), in a product and a sum where softmax.exp2_argument is "unfused"; e^(S' - lse)
            with the base "natural_max". "row_softmax", with that base only: P = e^(S' - m) / l, m the row's maximum, a
            NaN winning, and l its sum of e^(S' - m), both computed again over all its keys in a pass each, key tiles
            ascending, by the softmax's row-sum order; a sink counts in both, first. lse says nothing but which rows are
            dead.
        delta: how the row sums of dO times O are added up.
        delta_source: "returned_out": dO times the returned O. "unrounded_out": dO times O before its output rounding,
            which the forward keeps. "high_precision_out": dO times what O would be with P in bfloat16 instead of
            codes, its accumulator rescaled and normalised as O's and rounded to bfloat16, which the forward keeps.
            "quantized_dout": the values of dO's codes in dP times the returned O. "p_dp": the
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

    softmax_scale: Literal["epilogue", "in_ds", "times_ds"] = "epilogue"
    score_factor: ScoreFactor = "exact_product"
    normalisation: Literal["fold_into_dout", "lse", "row_softmax"] = "fold_into_dout"
    delta: DeltaSum = DeltaSum.FMA_ASCENDING
    delta_source: Literal[
        "returned_out", "unrounded_out", "high_precision_out", "quantized_dout", "p_dp"
    ] = "returned_out"
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
