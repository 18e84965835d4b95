"""Mistakes that real kernels had, each behind a flag of the kernels in `kernel.py`, one at a time.

A golden check must catch every one of them: `run_device.py` tries.
"""

from enum import IntEnum


class Mistake(IntEnum):
    """What a kernel does wrong. `NONE`: nothing."""

    NONE = 0
    NEIGHBOUR_SCALE = 1
    FLOOR_SCALE = 2
    MASK_OFF_BY_ONE = 3
    NO_SOFTMAX_SCALE = 4
    NATURAL_EXPONENT = 5
    V_NOT_FOLDED = 6
    DOCUMENTS_JOINED = 7
    HEADS_MODULO = 8
    DK_WITHOUT_SCALE = 9
    NO_DELTA = 10
    STALE_PADDING = 11

    @property
    def sentence(self) -> str:
        """What it is, in words."""
        return _SENTENCES[self]


_SENTENCES = {
    Mistake.NONE: "no mistake",
    Mistake.NEIGHBOUR_SCALE: "S takes the scale of the neighbouring key",
    Mistake.FLOOR_SCALE: "the exponent of the scales of P is rounded down, not up",
    Mistake.MASK_OFF_BY_ONE: "a query sees one key of the future",
    Mistake.NO_SOFTMAX_SCALE: "S is not multiplied by the softmax scale",
    Mistake.NATURAL_EXPONENT: "2^x of a score in natural units: log2(e) is missing",
    Mistake.V_NOT_FOLDED: "P does not take in V's scales before it is quantized",
    Mistake.DOCUMENTS_JOINED: "a query sees the tokens before its document",
    Mistake.HEADS_MODULO: "query head h takes key/value head h modulo their number",
    Mistake.DK_WITHOUT_SCALE: "dK is not multiplied by the softmax scale",
    Mistake.NO_DELTA: "dS is P dP, without delta",
    Mistake.STALE_PADDING: "dK and dV add the rows that lie behind the document's end",
}
