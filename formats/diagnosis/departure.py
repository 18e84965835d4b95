"""A preset that explains only a part of an output, and where it departs."""

from dataclasses import dataclass

import numpy as np

from flamia_ref.formats.diagnosis.runs import number
from flamia_ref.formats.diagnosis.witness import Witness
from flamia_ref.formats.presets import PRESETS
from flamia_ref.formats.scalar import FP32


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """A preset that explains only a part, and the first block where the output departs from it.

    Attributes:
        preset: its name.
        same: presets that give the same on all blocks that were sampled.
        explained, of: blocks that it explains, of how many: of all, or of the sample where x is
            large and other presets explain all.
        block: its rows and columns of a block.
        at: where the first other block is.
        differing: how many of its codes are others.
        values: float32 bits of that block, row by row.
        element: the place in it of the first other code; None where only the scale is another.
        scales, codes: what the preset gives and what was given.
        like: the presets that give on this block what was given.
        why: the preset beside the first of these; None without one.
        tensor_scales: float32 bits of the tensor scale of the preset and of that given, where all
            blocks agree and these differ.
    """

    preset: str
    same: tuple[str, ...]
    explained: int
    of: int
    block: tuple[int, int]
    at: tuple[int, ...] = ()
    differing: int = 0
    values: tuple[int, ...] = ()
    element: tuple[int, int] | None = None
    scales: tuple[int, int] = (0, 0)
    codes: tuple[int, int] | None = None
    like: tuple[str, ...] = ()
    why: Witness | None = None
    tensor_scales: tuple[int, int] | None = None

    @property
    def sentence(self) -> str:
        """Where and why, in one sentence."""
        if self.tensor_scales is not None:
            ours, theirs = (f"{number(one)} ({one:08x})" for one in self.tensor_scales)
            text = f"{self.preset}: all blocks, but its tensor scale is {ours}, that given {theirs}"
            return f"{text}, about one over it." if _inverse(*self.tensor_scales) else f"{text}."
        text = f"{self.preset}: {self.explained} of {self.of} blocks; first other one {list(self.at)}: scale"
        ours, theirs = (self._scale_in_words(one) for one in self.scales)
        text += f" {ours}, given {theirs}" if ours != theirs else f" {ours} as given"
        if self.codes is not None and self.element is not None:
            x = self.values[self.element[0] * self.block[1] + self.element[1]]
            text += (
                f"; {self.differing} of {self.block[0] * self.block[1]} codes: element"
                f" {list(self.element)} {number(x)} ({x:08x}) becomes {self.codes[0]:02x},"
                f" given {self.codes[1]:02x}"
            )
        if not self.like:
            return f"{text}. No preset gives that."
        text += f". {self.like[0]} does"
        if len(self.like) > 1:
            text += f", and {len(self.like) - 1} more"
        if self.why is None:
            return f"{text}."
        return f"{text}: {self.why.step.value}: {' | '.join(self.why.settings)}."

    def _scale_in_words(self, scale: int) -> str:
        """The code of a scale; of one in float32 its value, of a negative UE4M3 its bits."""
        return number(scale) if PRESETS[self.preset].scale == FP32 else str(scale)


def _inverse(ours: int, theirs: int) -> bool:
    """Whether two float32 are one over the other, but for a few roundings."""
    one, other = (float(np.uint32(bits).view(np.float32)) for bits in (ours, theirs))
    return abs(one * other - 1) < 1e-6 and ours != theirs
