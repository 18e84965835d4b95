"""Block formats as data: what shares a scale, how it is chosen, what odd blocks become."""

import operator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from flamia_ref._errors import shown, unknown_name
from flamia_ref.evidence import Evidence
from flamia_ref.formats.rounding import Overflow, Rounding
from flamia_ref.formats.scalar import ScalarFormat, Specials

ALL = "all"
Extent = int | str  # a number of elements, or ALL
Block = tuple[Extent, Extent]  # rows, columns


class ScaleRule(StrEnum):
    """The scale X of a block, from its amax.

    emax and max are those of the element format; fl rounds to float32, to nearest even. Scales in
    E8M0 are powers of two, found by integers alone, their code clamped to 0..254, and an element is
    its value divided by X, rounded once. Scales in another format are NVFP4's.
    """

    #: X = 2^(floor(log2 amax) - emax). OCP Microscaling Formats (MX) v1.0 section 6.3.
    FLOOR = "floor"
    #: X = 2^(ceil(log2 amax) - emax). torchao ScaleCalculationMode.CEIL.
    CEIL = "ceil"
    #: FLOOR of amax rounded, ties away, to the mantissa bits of the element. torchao EVEN.
    EVEN = "even"
    #: X = 2^ceil(log2 fl(amax fl(1 / max))). torchao RCEIL, Transformer Engine, cuBLASLt.
    RCEIL = "rceil"
    #: X = 2^ceil(log2(amax / max)), of the exact quotient. cuDNN front end, cvt_amax_to_e8m0_rp.
    EXACT_RCEIL = "exact_rceil"
    #: X = fl(amax / max) in the scale format, to nearest even, beyond its largest value to that; an
    #: element is fl(value / X) in the element format. NVFP4 without a scale of the whole tensor.
    NVFP4_ONE_LEVEL = "nvfp4_one_level"

    @property
    def gives_powers(self) -> bool:
        """Whether X is a power of two."""
        return self is not ScaleRule.NVFP4_ONE_LEVEL


class NanPolicy(StrEnum):
    """What a NaN does to its block."""

    #: amax is over the other elements (fmax); the NaN element becomes the element format's NaN.
    IGNORE = "ignore"
    #: The scale is NaN and every element becomes the element format's NaN.
    NAN_BLOCK = "nan_block"


class InfinityPolicy(StrEnum):
    """What an infinity does to its block."""

    #: The scale is the largest of its format; the infinity saturates, as under `Overflow`.
    SATURATE = "saturate"
    #: The scale is NaN and every element becomes the element format's NaN.
    NAN_BLOCK = "nan_block"


class UnderflowPolicy(StrEnum):
    """What becomes of the elements of a block whose scale code is 0: the smallest power, or UE4M3's zero."""

    #: They are divided by it like any other.
    KEEP = "keep"
    #: Numbers become zeros with their signs; a NaN stays NaN.
    FLUSH = "flush"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Elements in blocks that share a scale. An element's value is code value times scale value.

    Attributes:
        name: the name in `PRESETS`, or any other.
        element: format of the elements.
        scale: format of the scales.
        rule: how a scale follows from the amax of its block.
        block: rows and columns that share a scale, where the caller does not say.
        blocks: all that `block` may be.
        rounding: of the elements.
        overflow: of the elements.
        nan: what a NaN does to its block.
        infinity: what an infinity does to its block.
        zero_scale: scale code of a block of zeros.
        underflow: what becomes of the elements of a block whose scale code is 0.
        row_span: how many powers of two the scale of a block may lie below the one that the rule
            gives to its whole row of blocks; it is raised to that, and a row whose own is NaN has
            no other. None for scales that stand by themselves.
        source: where the rules are written.
        version: of the source.
        evidence: what the claim to equal the source rests on.
        out_of_contract: inputs for which the claim is not made.

    Raises ValueError for parts that do not fit together.
    """

    name: str
    element: ScalarFormat
    scale: ScalarFormat
    rule: ScaleRule
    block: Block
    blocks: tuple[Block, ...]
    rounding: Rounding = Rounding.NEAREST_EVEN
    overflow: Overflow = Overflow.SATURATE
    nan: NanPolicy
    infinity: InfinityPolicy
    zero_scale: int = 0
    underflow: UnderflowPolicy = UnderflowPolicy.KEEP
    row_span: int | None = None
    source: str
    version: str
    evidence: Evidence
    out_of_contract: str = ""

    def __post_init__(self) -> None:
        for field, choices in _CHOICES.items():
            given = getattr(self, field)
            if given not in list(choices):
                raise unknown_name(field, given, choices)
            object.__setattr__(self, field, choices(given))  # a plain string becomes the member
        if self.rule.gives_powers != (self.scale.specials is Specials.POWER) or self.scale.signed:
            fitting = (
                "powers of two; its scale format is E8M0"
                if self.rule.gives_powers
                else "quotients; its scale format is an unsigned one with a mantissa, as UE4M3"
            )
            raise ValueError(
                f"{self.name}: rule {self.rule.value!r} gives {fitting}, not {self.scale.name}"
            )
        if self.row_span is not None and not (self.rule.gives_powers and 0 <= self.row_span <= 254):
            raise ValueError(
                f"{self.name}: row_span is {self.row_span}; allowed: 0 to 254 with a rule that gives"
                " powers of two, or None"
            )
        if self.block not in self.blocks:
            raise ValueError(f"{self.name}: block {self.block} is not among its blocks")
        if self.rounding is Rounding.STOCHASTIC:
            raise ValueError(f"{self.name}: blocks are not rounded stochastically; use encode")
        if not 0 <= self.zero_scale <= self.scale.max_code:
            raise ValueError(
                f"{self.name}: zero_scale is {self.zero_scale}; allowed: 0 to {self.scale.max_code}"
            )

    @property
    def can_be_nan(self) -> bool:
        """Whether a scale may be NaN."""
        return self.nan is NanPolicy.NAN_BLOCK or self.infinity is InfinityPolicy.NAN_BLOCK

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
    "rounding": Rounding,
    "overflow": Overflow,
    "nan": NanPolicy,
    "infinity": InfinityPolicy,
    "underflow": UnderflowPolicy,
    "evidence": Evidence,
}


def _extent(given: Any) -> Extent:
    if given is None or (isinstance(given, str) and given == ALL):
        return ALL
    if isinstance(given, bool):
        raise TypeError("an extent is a number of elements")
    number = operator.index(given)
    return ALL if number == -1 else number
