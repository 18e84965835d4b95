"""Negative controls: the subject with a leak planted in front of it, which the same search has to find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from flamia_ref.attention.product import Use
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.bases import Inputs, rounded
from flamia_ref.leakage.search.outcomes import Outcome
from flamia_ref.leakage.search.setting import BLOCKS, Reach, Setting
from flamia_ref.leakage.search.subjects import Subject

Array = NDArray[Any]

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_MOST = 448.0

Grid = Literal["document", "packed", "tensor", "tail"]


@dataclass(frozen=True, kw_only=True)
class Control:
    """A planted leak: one power-of-two scale for `size` tokens of a channel of an operand, values in e4m3.

    Attributes:
        operand: what is quantized before the subject sees it.
        grid: where blocks begin: at each document, or at the first packed token; "tensor" is one block, and "tail" the
            last block of each document alone, the other tokens being left as they are.
        size: tokens of a block.
        severity: the one that a finding must have; None for any of the grid's.
    """

    operand: str
    grid: Grid
    size: int
    severity: Severity | None = None

    @property
    def name(self) -> str:
        """What it is, in words."""
        if self.grid == "tensor":
            return f"{self.operand}: one scale for all tokens"
        if self.grid == "tail":
            return f"{self.operand}: one scale for the last block of {self.size} of each document"
        start = "each document" if self.grid == "document" else "the first packed token"
        shown = "" if self.severity is None else f", seen as {self.severity}"
        return f"{self.operand}: one scale for {self.size} tokens, counted from {start}{shown}"

    def wanted(self, severity: Severity) -> bool:
        """Whether a finding of this severity is the one that was planted."""
        if self.severity is not None:
            return severity is self.severity
        return (severity is Severity.CROSS_DOCUMENT) == (self.grid in ("packed", "tensor"))

    def planted(self, inputs: Inputs, setting: Setting) -> dict[str, Array]:
        """The inputs as the subject gets them."""
        x = inputs[self.operand].astype(np.float64)
        block = self._blocks(setting)
        found = x.copy()
        for index in range(int(block.max(initial=-1)) + 1):
            rows = block == index
            found[rows] = shared_scale(x[rows])
        return {**inputs, self.operand: rounded(found)}

    def _blocks(self, setting: Setting) -> NDArray[np.int64]:
        if self.grid == "tensor":
            return np.zeros(setting.tokens, dtype=np.int64)
        if self.grid == "packed":
            return np.arange(setting.tokens) // self.size
        if self.grid == "tail":
            lengths = np.array(setting.lengths, dtype=np.int64)[setting.document]
            last = setting.place // self.size == (lengths - 1) // self.size
            return np.asarray(np.where(last, setting.document, -1))
        of_document = -(-np.array(setting.lengths, dtype=np.int64) // self.size)
        first = np.concatenate([[0], np.cumsum(of_document)[:-1]])
        return np.asarray(first[setting.document] + setting.place // self.size)


def shared_scale(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Values [tokens, ...] by way of e4m3, with one power of two over the tokens: the smallest that holds the amax."""
    amax = np.abs(x).max(axis=0, initial=0)
    mantissa, exponent = np.frexp(amax / _MOST)
    power = np.where(mantissa == 0.5, exponent - 1, exponent)
    codes = np.ldexp(x, -power).astype(np.float32).astype(_E4M3)
    return np.asarray(np.ldexp(codes.astype(np.float64), power))


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A subject with a control in front of it."""

    subject: Subject
    control: Control

    @property
    def name(self) -> str:
        """The subject's name and the control's."""
        return f"{self.subject.name} with {self.control.name}"

    @property
    def together(self) -> int:
        """As the subject's."""
        return self.subject.together

    @property
    def uses(self) -> Mapping[str, tuple[Use, ...]] | None:
        """None that counts: a control must be found by what comes out."""
        return {}

    def run(self, setting: Setting, inputs: Sequence[Inputs]) -> list[Outcome]:
        """The subject's outcomes of the planted inputs."""
        return self.subject.run(setting, [self.control.planted(one, setting) for one in inputs])


def _more(operand: str, size: int, found: Reach) -> list[Control]:
    """The last blocks of documents alone, and leaks that only a gradient shows."""
    wanted = [Control(operand=operand, grid="tail", size=size)]
    if Severity.BACKWARD in found.shareable:
        backward = Severity.BACKWARD
        wanted.append(Control(operand=operand, grid="document", size=size, severity=backward))
    return wanted


def controls_for(operand: str, found: Reach) -> tuple[Control, ...]:
    """The controls that a hunt with this operand has to find, none where no shared scale could leak."""
    wanted = []
    if found.shareable - {Severity.CROSS_DOCUMENT}:
        sizes = {
            size
            for severity, shared in found.severities.items()
            if severity is not Severity.CROSS_DOCUMENT
            for size in shared
        }
        size = _size(sizes)
        wanted.append(Control(operand=operand, grid="document", size=size))
        wanted += _more(operand, size, found)
    if Severity.CROSS_DOCUMENT in found.shareable:
        sizes = set(found.severities[Severity.CROSS_DOCUMENT])
        wanted.append(Control(operand=operand, grid="packed", size=_size(sizes)))
    elif Severity.CROSS_DOCUMENT in found.apart:
        wanted.append(Control(operand=operand, grid="tensor", size=max(BLOCKS)))
    return tuple(wanted)


def _size(sizes: set[int]) -> int:
    """32, the size of most blocks, where tokens share one of those, else the smallest that they share."""
    return 32 if 32 in sizes else min(sizes)
