"""Which presets a kernel's codes and scales follow: `identify`."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref._backend import Array
from flamia_ref.formats.diagnosis.departure import Departure
from flamia_ref.formats.diagnosis.outputs import Output, candidates
from flamia_ref.formats.diagnosis.search import Search, with_amax
from flamia_ref.formats.diagnosis.tensors import floats
from flamia_ref.formats.quantizer import source_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Identification:
    """Which presets explain the codes and scales of a kernel.

    Attributes:
        block: rows and columns of a block, as the shapes say it, or all that they may be.
        blocks: how many there are.
        sampled: blocks on which every preset was tried; those that explain them were tried on all.
        tried: presets whose formats and blocks fit.
        explained_by: those that give every block for which they make a claim.
        not_claimed: for each of these, blocks for which it makes none.
        silent: presets that make no claim for any block that was sampled.
        nearest: of the others those that explain the most, the nearest first.
        notes: where none explains every block, what is odd about the output, and which single
            changes of a preset, or of the input or output, explain every block.
    """

    block: tuple[tuple[int, int], ...]
    blocks: int
    sampled: int
    tried: tuple[str, ...]
    explained_by: tuple[str, ...]
    not_claimed: tuple[int, ...]
    silent: tuple[str, ...]
    nearest: tuple[Departure, ...]
    notes: tuple[str, ...] = ()

    @property
    def identified(self) -> bool:
        """Whether a preset explains every block."""
        return bool(self.explained_by)

    @property
    def exit_code(self) -> int:
        """0 where a preset explains every block, 1 where none does."""
        return int(not self.identified)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        if self.identified:
            return (
                f"All {self.blocks} blocks of {self._block} are those of {', '.join(self.explained_by)}"
                f" ({len(self.tried)} presets fit the formats)."
            )
        text = (
            f"None of {len(self.tried)} presets explains all {self.blocks} blocks of {self._block}."
        )
        for note in self.notes:
            text += f" {note}."
        return f"{text} Nearest: {self.nearest[0].sentence}" if self.nearest else text

    @property
    def _block(self) -> str:
        return " or ".join(f"{rows}x{columns}" for rows, columns in self.block)

    def to_text(self) -> str:
        """The presets that explain all, and where the nearest others depart."""
        lines = [self.sentence.partition(" Nearest: ")[0]]
        for name, count in zip(self.explained_by, self.not_claimed, strict=True):
            if count:
                lines.append(f"    {name} makes no claim for {count} of them")
        if self.silent:
            lines.append(f"no claim for these inputs: {', '.join(self.silent)}")
        if self.nearest:
            lines.append("others, the nearest first:")
        for one in self.nearest:
            lines.append(f"    {one.sentence}")
            if one.same:
                lines.append(f"        the same on {self.sampled} blocks: {', '.join(one.same)}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The result as JSON text."""
        data = {name: getattr(self, name) for name in self.__slots__ if name != "nearest"}
        data["nearest"] = []
        for one in self.nearest:
            near = {name: getattr(one, name) for name in one.__slots__ if name != "why"}
            near["values"] = [f"{bits:08x}" for bits in one.values]
            near["why"] = None if one.why is None else one.why.to_dict()
            data["nearest"].append(near | {"sentence": one.sentence})
        return json.dumps(data | {"sentence": self.sentence}, indent=1) + "\n"


def identify(
    x: Array,
    codes: Array,
    scales: Array,
    *,
    tensor_scale: Any = None,
    block: Any = None,
    tensor_amax: Any = None,
) -> Identification:
    """Which presets give these codes and scales for x.

    Every preset whose formats and blocks fit is tried on a sample of blocks, chosen for the amaxes
    they have; those that explain it are tried on all. Blocks for which a preset makes no claim
    (`in_contract`) are not held against it.

    Args:
        x: what was quantized, as in `quantize`.
        codes: element codes of the shape of x, one in an element: FP4 unpacked.
        scales: scale codes [..., ceil(rows / r), ceil(columns / c)], neither tiled nor padded; of
            square blocks also repeated for each row. Float32 where the scales are.
        tensor_scale: that of the kernel, if it has one: presets without are then left out, and
            theirs must equal it.
        block: rows and columns that share a scale; by default as the shapes say.
        tensor_amax: what the kernel made the tensor scale from, if not the amax of x.

    Raises:
        TypeError: for arrays of other types.
        ValueError: for shapes that no preset fits: codes that are packed, scales that are tiled.
    """
    values = floats(x, "identify")
    source = source_of(values)
    if not values.size:
        raise ValueError(f"x has shape {values.shape}: there is no block to identify")
    output = Output.of(values, codes, scales, tensor_scale)
    fitting = with_amax(candidates(values, output, block), values, tensor_amax)
    search = Search(values, output, tensor_amax, source, fitting)
    passing, failing, silent = search.screened()
    explained, not_claimed, only_tensor_scale = [], [], False
    for one in passing:
        wrong, unclaimed = search.everywhere(one)
        if wrong.any() or search.tensor_scale_differs(one):
            failing.append(one)
            only_tensor_scale |= not wrong.any()
        else:
            explained.append(one)
            not_claimed.append(unclaimed)
    notes: tuple[str, ...] = ()
    if not explained:
        notes = tuple(search.notes(failing, block, only_tensor_scale=only_tensor_scale))
    plain = [one for one in fitting if not one.repeated]
    return Identification(
        block=tuple(sorted({one.block for one in explained or fitting})),
        blocks=int(np.prod(search.grid((explained or plain or fitting)[0]))),
        sampled=max(len(sample) for sample in search.samples.values()),
        tried=tuple(one.name for one in fitting),
        explained_by=tuple(one.name for one in explained),
        not_claimed=tuple(not_claimed),
        silent=tuple(one.name for one in silent),
        nearest=tuple(search.departures(failing, explained)),
        notes=notes,
    )
