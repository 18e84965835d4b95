"""Block formats as data: what shares a scale, how it is chosen, how elements meet it, what odd blocks become."""

import dataclasses
import math
import operator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flamia_ref._errors import shown, unknown_name
from flamia_ref.evidence import Evidence
from flamia_ref.formats.formula import Formula, Machine
from flamia_ref.formats.rounding import RANDOM, Overflow, Rounding
from flamia_ref.formats.scalar import FP32, ScalarFormat, Specials

ALL = "all"
Extent = int | str  # a number of elements, or ALL
Block = tuple[Extent, Extent]  # rows, columns


class ScaleRule(StrEnum):
    """The scale X of a block, from its amax.

    emax and max are those of the element format; fl rounds to float32, to nearest even. All but
    QUOTIENT give powers of two in E8M0, found by integers alone, their code clamped to 0..254; FLOOR
    and CEIL also in FP32, rounded to `arithmetic`: a power that it lacks is 0, or infinite.
    """

    #: X = 2^(floor(log2 amax) - emax). OCP Microscaling Formats (MX) v1.0 section 6.3.
    FLOOR = "floor"
    #: X = 2^(ceil(log2 amax) - emax). torchao ScaleCalculationMode.CEIL.
    CEIL = "ceil"
    #: FLOOR of amax rounded, ties away, to `even_bits` bits of mantissa. torchao EVEN.
    EVEN = "even"
    #: X = 2^ceil(log2 fl(amax fl(1 / max))). torchao RCEIL, Transformer Engine, cuBLASLt.
    RCEIL = "rceil"
    #: X = 2^ceil(log2(amax / max)), of the exact quotient. cuDNN front end, cvt_amax_to_e8m0_rp.
    EXACT_RCEIL = "exact_rceil"
    #: X = the formula `quotient`, each operation rounded, in the scale format by `scale_rounding`.
    QUOTIENT = "quotient"

    @property
    def in_words(self) -> str:
        """The formula, for reports."""
        return _IN_WORDS[self]


_IN_WORDS = {
    ScaleRule.FLOOR: "2^(floor(log2 amax) - emax)",
    ScaleRule.CEIL: "2^(ceil(log2 amax) - emax)",
    ScaleRule.EVEN: "2^(floor(log2 (amax rounded to even_bits)) - emax)",
    ScaleRule.RCEIL: "2^ceil(log2 fl(amax fl(1 / max)))",
    ScaleRule.EXACT_RCEIL: "2^ceil(log2 (amax / max))",
    ScaleRule.QUOTIENT: "quotient",
}


class Arithmetic(StrEnum):
    """What each operation of a formula rounds to, to nearest even."""

    #: float32, whatever the input.
    FLOAT32 = "float32"
    #: The type of x: float32, bfloat16 or float16.
    INPUT = "input"


class Subnormals(StrEnum):
    """What becomes of a subnormal float32, as an operand or as a result."""

    #: It is kept.
    KEEP = "keep"
    #: It becomes a zero of its sign, as in XLA on CPU and in CUDA built with -use_fast_math.
    FLUSH = "flush"


class Log2(StrEnum):
    """How a library takes the log2 that it rounds to an integer: of amax, of the quotient, or of an element.

    For x in bfloat16 or float16 the rules here do the same, and may find an exponent beside the
    exact one far from powers of two. In float32 they are exact (`by_log2`).
    """

    #: It takes none, or one of a float32.
    EXACT = "exact"
    #: log2 d rounded to the type of x. torch.log2.
    ROUNDED = "rounded"
    #: ln d over ln 2, these and the quotient each rounded to the type of x. jax.numpy.log2.
    RATIO = "ratio"


class NanPolicy(StrEnum):
    """What a NaN does to the amax of its block."""

    #: amax is over the other elements, and 0 without any (fmax from 0).
    IGNORE = "ignore"
    #: amax is over the other elements, and NaN without any (IEEE 754-2019 maximumNumber).
    MAXIMUM_NUMBER = "maximum_number"
    #: amax is NaN, and the scale `nan_scale`.
    PROPAGATE = "propagate"


class NanElement(StrEnum):
    """What a NaN element becomes."""

    #: `nan_codes`, by its sign.
    CODE = "code"
    #: Its bits are rounded as those of a number with exponent field 255, and the code, beyond the
    #: format, keeps its low bits. torchao f32_to_f4_unpacked and f32_to_f6_unpacked.
    AS_NUMBER = "as_number"


class ZeroSign(StrEnum):
    """The sign of a zero code."""

    #: That of the element.
    KEEP = "keep"
    #: Plus where the element over its scale is a zero; that of the element where it rounds to one.
    PLUS_OF_ZERO = "plus_of_zero"
    #: Plus, always.
    PLUS = "plus"
    #: Minus where the element over its scale is a zero; that of the element where it rounds to one.
    MINUS_OF_ZERO = "minus_of_zero"


class PartialBlock(StrEnum):
    """What becomes of a last block that x does not fill."""

    #: It covers what is there, as if filled with zeros.
    COVER = "cover"
    #: It is refused.
    REFUSE = "refuse"


class TensorExtent(StrEnum):
    """What shares a tensor scale."""

    #: All of x.
    TENSOR = "tensor"
    #: A row of x.
    ROW = "row"


class Choice(StrEnum):
    """How one of two scales of a block is chosen: that of the smaller error, of the first if equal.

    The candidates are the scales of the quotient and of 1.5 times it, by which amax becomes 6 or 4.
    The error of an element is what `decoded` gives less x, in float32, summed over ascending
    columns. Source: Transformer Engine 4over6, after FourOverSix.
    """

    #: Sum of magnitudes.
    MAE = "mae"
    #: Sum of squares, each rounded.
    MSE = "mse"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Elements in blocks that share a scale. An element's value is code value times scale value,
    times or over the tensor scale where there is one.

    Attributes:
        name: the name in `PRESETS`, or any other.
        element: format of the elements.
        scale: format of the scales.
        rule: how a scale follows from the amax of its block.
        block: rows and columns that share a scale, where the caller does not say.
        blocks: all that `block` may be.
        partial: what becomes of a last block that x does not fill.
        arithmetic: what the operations of the formulas round to.
        subnormals: what becomes of subnormal float32 operands and results.
        tensor_scale: formula of the scale of the whole tensor, of `tensor_amax`; None without one.
        tensor_divides: a value is divided by the tensor scale, not multiplied.
        tensor_extent: what shares a tensor scale.
        prepared: formula of what takes the place of x before anything else, of `x` and
            `tensor_scale`; None for x itself.
        quotient: formula of what QUOTIENT rounds to the scale format, of `amax` and `tensor_scale`.
        scale_rounding: of that.
        exponent: power of two taken off by FLOOR, CEIL and EVEN; None for the element's emax.
        even_bits: mantissa bits of EVEN; None for the element's.
        even_overflow: an amax that EVEN rounds to 2^128 counts as infinite.
        smallest_quotient: a smaller quotient counts as 1; 0 for none.
        by_log2: the library rounds log2 of a float32, which misleads it beside powers of two; the
            rule here is the exact one. `misled_by_log2` says where.
        log2: how the library takes log2 of the amax, for FLOOR and CEIL, or of the quotient.
        element_log2: it also takes it of each element, over its scale, to find the step that it
            rounds the element to.
        smallest_amax: what a smaller amax, zero too, counts as.
        zero_below: the elements of a block with a smaller amax are +0; 0 for none.
        scale_range: least and largest code of a scale that follows from the rule.
        zero_scale: scale code of a block of zeros; None for what the rule gives.
        underflow_scale: scale code in place of 0; None for 0.
        nan: what a NaN does to the amax.
        nan_scale: scale code of an amax that is NaN.
        infinity_scale: scale code of an infinite amax; None for what the rule gives.
        scaled: formula of what becomes an element code, of `x`, `scale`, `amax` of the block and
            `tensor_scale`; None for x divided by the scale without rounding, for scales that are powers of two.
        scale_values: pairs of a scale code and what x is divided by there in place of its value, a
            power of two, 0, infinity or NaN. Without a pair a NaN code is NaN.
        rounding: of the elements.
        half_added: nearest roundings add 1/2 to the magnitude, in units of the step and in
            `arithmetic`, and cut: the value just below half of the smallest code becomes that code.
        stochastic: of the elements where random bits are given, STOCHASTIC or STOCHASTIC_SUM.
        overflow: of the elements.
        nan_codes: what +NaN, -NaN and a NaN that the scaling made become; None for the element's.
        nan_block_code: what all elements of a block become whose amax or scale is NaN, or amax is
            infinite where that has the scale of NaN and `scale_values` no other; None for what each becomes by itself.
        nan_element: what a NaN becomes, where not that.
        zero_sign: the sign of a zero code.
        choice: how one of two scales is chosen; None where there is one.
        decoded: formula of the value that `choice` compares with x, of `code`, `scale` and
            `tensor_amax`.
        signs: the diagonal of +1 and -1 of a Hadamard transform of 16 columns before anything else;
            None without one.
        row_span: how many powers of two the scale of a block may lie below the one that the rule
            gives to its whole row of blocks; it is raised to that, and a row whose own is NaN has
            no other. None for scales that stand by themselves.
        narrow: fields that have another value for x in bfloat16 and float16, and that value.
        source: where the rules are written.
        version: of the source.
        evidence: what the claim to equal the source rests on.
        nan_in_contract: whether the claim is made for blocks with a NaN.
        infinity_in_contract: whether it is made for blocks with an infinity.
        out_of_contract: other inputs for which the claim is not made.

    Raises ValueError for parts that do not fit together.
    """

    name: str
    element: ScalarFormat
    scale: ScalarFormat
    rule: ScaleRule
    block: Block
    blocks: tuple[Block, ...]
    partial: PartialBlock = PartialBlock.COVER
    arithmetic: Arithmetic = Arithmetic.FLOAT32
    subnormals: Subnormals = Subnormals.KEEP
    tensor_scale: str | None = None
    tensor_divides: bool = False
    tensor_extent: TensorExtent = TensorExtent.TENSOR
    prepared: str | None = None
    quotient: str | None = None
    scale_rounding: Rounding = Rounding.NEAREST_EVEN
    exponent: int | None = None
    even_bits: int | None = None
    even_overflow: bool = False
    smallest_quotient: float = 0.0
    by_log2: bool = False
    log2: Log2 = Log2.EXACT
    element_log2: bool = False
    smallest_amax: float = 0.0
    zero_below: float = 0.0
    scale_range: tuple[int, int] | None = None
    zero_scale: int | None = None
    underflow_scale: int | None = None
    nan: NanPolicy
    nan_scale: int | None = None
    infinity_scale: int | None = None
    scaled: str | None = None
    scale_values: tuple[tuple[int, float], ...] = ()
    rounding: Rounding = Rounding.NEAREST_EVEN
    half_added: bool = False
    stochastic: Rounding = Rounding.STOCHASTIC
    overflow: Overflow = Overflow.SATURATE
    nan_codes: tuple[int, int, int] | None = None
    nan_block_code: int | None = None
    nan_element: NanElement = NanElement.CODE
    zero_sign: ZeroSign = ZeroSign.KEEP
    choice: Choice | None = None
    decoded: str | None = None
    signs: tuple[int, ...] | None = None
    row_span: int | None = None
    narrow: tuple[tuple[str, Any], ...] = ()
    source: str
    version: str
    evidence: Evidence
    nan_in_contract: bool = True
    infinity_in_contract: bool = True
    out_of_contract: str = ""

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            given = getattr(self, field)
            if field in _OPTIONAL and given is None:
                continue
            if given not in list(choices):
                raise unknown_name(field, given, choices)
            object.__setattr__(self, field, choices(given))  # a plain string becomes the member
        for problem in self._problems():
            raise ValueError(f"{self.name}: {problem}")

    def _problems(self) -> Any:
        """What does not fit together, in words."""
        powers = self.scale.specials is Specials.POWER
        floats = self.scale == FP32 and self.rule in (ScaleRule.FLOOR, ScaleRule.CEIL)
        if self.scale.signed and not floats:
            yield f"scales have no sign; scale format {self.scale.name} has one"
        if self.rule is not ScaleRule.QUOTIENT and not powers and not floats:
            yield f"rule {self.rule.value!r} gives powers of two; its scale format is E8M0, not {self.scale.name}"
        if (self.rule is ScaleRule.QUOTIENT) != (self.quotient is not None):
            yield "a formula `quotient` goes with rule 'quotient', and only with it"
        if self.scaled is None and not powers:
            yield f"scales in {self.scale.name} are no powers of two: `scaled` must say how an element meets its scale"
        for name, allowed in _VARIABLES.items():
            formula = getattr(self, name)
            if formula is not None:
                unknown = Formula.parse(formula).variables - allowed
                if unknown:
                    yield f"formula {name} {formula!r} has {sorted(unknown)}; it may use {sorted(allowed)}"
                if self.tensor_scale is None and "tensor_scale" in Formula.parse(formula).variables:
                    yield f"formula {name} {formula!r} uses tensor_scale, and there is none"
        if self.rounding in RANDOM or self.scale_rounding in RANDOM:
            yield "rounding takes no random bits; `stochastic` is the one that does"
        if self.stochastic not in RANDOM:
            yield f"stochastic is {self.stochastic.value!r}; allowed: {', '.join(RANDOM)}"
        if self.stochastic is Rounding.STOCHASTIC_SUM and self.scaled is None:
            yield "stochastic_sum goes with a formula `scaled`"
        if self.block not in self.blocks:
            yield f"block {self.block} is not among its blocks"
        if self.row_span is not None and not (powers and 0 <= self.row_span <= 254):
            yield f"row_span is {self.row_span}; allowed: 0 to 254 with scales in E8M0, or None"
        for name in ("zero_scale", "nan_scale", "infinity_scale"):
            code = getattr(self, name)
            if code is not None and not 0 <= code <= self.scale.code_mask:
                yield f"{name} is {code}; allowed: 0 to {self.scale.code_mask}"
        if (self.nan is NanPolicy.IGNORE) == (self.nan_scale is not None):
            yield f"nan_scale is {self.nan_scale}; it goes with an amax that may be NaN, and only with it"
        low, high = self.codes_of_scales
        if not 0 <= low <= high <= self.scale.code_mask:
            yield f"scale_range is {self.scale_range}; allowed: two ascending codes up to {self.scale.code_mask}"
        if self.signs is not None and (len(self.signs) != 16 or set(self.signs) - {1, -1}):
            yield "signs are 16 of +1 and -1"
        if (self.choice is None) != (self.decoded is None) or (
            self.choice is not None and (self.tensor_scale is None or self.quotient is None)
        ):
            yield "a choice of two scales goes with `decoded`, a tensor scale and a quotient"

    def of_input(self, source: ScalarFormat) -> "BlockFormat":
        """The format as it is for x of that type: with `narrow` applied, and nothing left to apply."""
        if not self.narrow:
            return self
        changes = dict(self.narrow) if source.bits < 32 else {}
        return dataclasses.replace(self, narrow=(), **changes)

    @property
    def scales_are_powers(self) -> bool:
        """Whether a scale is a power of two."""
        return self.scale.specials is Specials.POWER

    def machine(self, source: ScalarFormat) -> Machine:
        """How the operations of the formulas round, for x of that type."""
        by_input = self.arithmetic is Arithmetic.INPUT
        return Machine(
            arithmetic=source if by_input else FP32, input=source, ftz=self.flushes_subnormals
        )

    @property
    def scaled_uses_amax(self) -> bool:
        """Whether `scaled` is a formula of the amax of the block."""
        return self.scaled is not None and "amax" in Formula.parse(self.scaled).variables

    @property
    def flushes_subnormals(self) -> bool:
        """Whether subnormal operands and results become zeros."""
        return self.subnormals is Subnormals.FLUSH

    @property
    def codes_of_scales(self) -> tuple[int, int]:
        """`scale_range`, by default all codes of finite scales."""
        return self.scale_range or (0, self.scale.max_code)

    @property
    def nan_elements(self) -> tuple[int, int, int]:
        """`nan_codes`, by default the element format's own."""
        return self.nan_codes or (self.element.nan_code,) * 3

    @property
    def can_be_nan(self) -> bool:
        """Whether a scale may be NaN."""
        given = {self.nan_scale, self.infinity_scale, self.codes_of_scales[1]}
        return self.scale.has_nan and self.scale.nan_code in given

    @property
    def nan_scale_has_value(self) -> bool:
        """Whether `scale_values` gives the scale code of NaN a value that is a number or infinite."""
        value = dict(self.scale_values).get(self.scale.nan_code, math.nan)
        return not math.isnan(value)

    @property
    def library(self) -> str:
        """The library that the name begins with."""
        return self.name.partition("-")[0]

    @property
    def has_tensor_scale(self) -> bool:
        """Whether the whole tensor has a scale."""
        return self.tensor_scale is not None

    def checked_block(self, block: Any) -> Block:
        """`block` as one of `blocks`; None is the format's own, None or -1 for an extent is "all".

        Raises ValueError, naming what is allowed.
        """
        if block is None:
            return self.block
        try:
            rows, columns = block
            wanted = (_extent(rows), _extent(columns))
        except (TypeError, ValueError):
            wanted = None
        if wanted not in self.blocks:
            allowed = ", ".join(map(str, self.blocks))
            raise ValueError(f"{self.name} has no block {shown(block)}; allowed: {allowed}")
        return wanted


_CHOICES: dict[str, type[StrEnum]] = {
    "rule": ScaleRule,
    "partial": PartialBlock,
    "arithmetic": Arithmetic,
    "subnormals": Subnormals,
    "tensor_extent": TensorExtent,
    "scale_rounding": Rounding,
    "log2": Log2,
    "nan": NanPolicy,
    "rounding": Rounding,
    "stochastic": Rounding,
    "overflow": Overflow,
    "nan_element": NanElement,
    "zero_sign": ZeroSign,
    "choice": Choice,
    "evidence": Evidence,
}
_OPTIONAL = {"choice"}
_VARIABLES = {
    "tensor_scale": {"tensor_amax"},
    "prepared": {"x", "tensor_scale"},
    "quotient": {"amax", "tensor_scale"},
    "scaled": {"x", "scale", "amax", "tensor_scale"},
    "decoded": {"code", "scale", "tensor_amax"},
}


def _extent(given: Any) -> Extent:
    if given is None or (isinstance(given, str) and given == ALL):
        return ALL
    if isinstance(given, bool):
        raise TypeError("an extent is a number of elements")
    number = operator.index(given)
    return ALL if number == -1 else number
