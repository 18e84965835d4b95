"""A known mistake as data: its name, where it can show, and what the tensors would be if it were made."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from flamia_ref.golden.files import Tensor
from flamia_ref.golden.mistakes.scene import Scene
from flamia_ref.golden.stage import Place


class Name(StrEnum):
    """The names of the mistakes, in the words of the field."""

    NEIGHBOURING_SCALE = "scale of the neighbouring block"
    TRANSPOSED_SCALES = "transposed scales"
    UNTILED_SCALES = "untiled scales"
    TILED_SCALES = "tiled scales"
    TILE_SPLIT = "128x4 tile split as 32x4"
    PLANE_ORDER = "order of scale planes"
    NO_SCALE = "no scale"
    SWAPPED_NIBBLES = "nibbles swapped"
    TRANSPOSED_CODES = "transposed codes"
    SCALE_RULE = "another scale rule"
    ROUNDING = "another rounding"
    OVERFLOW = "another overflow"
    WRONG_AXIS = "quantized along the wrong axis"
    MASK_OFF_BY_ONE = "mask off by one"
    NO_MASK = "no mask"
    CAUSAL_MASK = "causal mask"
    ALIGNMENT = "wrong alignment"
    WINDOW = "window off by one"
    NO_WINDOW = "no window"
    NO_SOFTMAX_SCALE = "no softmax scale"
    SOFTMAX_SCALE_TWICE = "softmax scale twice"
    NATURAL_EXPONENT = "natural instead of log2"
    NO_SOFTCAP = "no soft cap"
    NO_SINK = "no sink"
    P_SCALE = "P scale"
    PAIR_FORMAT = "another format of P or dS"
    EXP2 = "another exp2"
    ROW_SUM = "row sum of the wrong P"
    NO_RESCALE = "no rescale"
    NOT_NORMALISED = "not normalised"
    LSE_BASE = "base of lse"
    LSE_PART = "lse without a part"
    NO_GUARD = "no guard"
    NO_ISOLATION = "documents not isolated"
    WRONG_DOCUMENT = "cu_seqlens off by one document"
    STALE_PADDING = "stale padding"
    HEADS_BY_MODULO = "heads by modulo"
    ONE_HEAD = "one head's keys for all"
    NO_GROUP_SUM = "no sum over the group"
    NO_DELTA = "no delta"
    DELTA = "another delta"
    GRADIENT_SCALE = "softmax scale of a gradient"
    SWAPPED_GRADIENTS = "gradients swapped"
    GRADIENT_ORDER = "another order"
    P_SOURCE = "another P in dV"
    TRUNCATED = "truncated"
    SUBNORMALS = "subnormals flushed"


class Needs(StrEnum):
    """How much of a case a mistake is made in."""

    PART = "part"  # one document, one key/value head
    HEADS = "heads"  # one document, all heads
    DOCUMENTS = "documents"  # all documents, one key/value head


Made = Callable[[Scene, Place], Tensor | None]
"""The bits of a tensor of a scene with the mistake made; None where it cannot be made there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to make a mistake: what it is in a sentence, and what comes of it."""

    sentence: str
    made: Made


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistake:
    """A known mistake.

    `shows` names the stages at which it starts where every stage is given, without a document's number and for
    operands by their kind: "codes", "scales", "tiled". `variants` yields the ways to make it in a scene
    and at a tensor, the likelier ones first. `zeros`: it only turns numbers into 0; others must explain numbers.
    """

    name: Name
    shows: frozenset[str]
    variants: Callable[[Scene, Place], Iterator[Variant]]
    needs: Needs = Needs.PART
    zeros: bool = False


_KINDS = {
    "codes": ".codes",
    "scales": ".scales",
    "tiled": ".tiled",
    "transposed": ".tiled_transposed",
    "token_scales": ".token_scales",
}


def kinds(stage: str) -> frozenset[str]:
    """Return what `shows` may call a stage: its name, its tensor's, and its kind."""
    found = {stage}
    for kind, suffix in _KINDS.items():
        if stage.endswith(suffix):
            found |= {kind, f"{stage.split('.')[0]}.{kind}"}
    if stage.endswith(".tiled_transposed"):
        found.add("tiled")
    return frozenset(found)
