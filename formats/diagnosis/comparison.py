"""Two block formats on one input, and on the inputs at their boundaries: `compare` and `smallest`."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from flamia_ref import _float32
from flamia_ref._backend import Array
from flamia_ref._errors import shown
from flamia_ref.formats.block import BlockFormat
from flamia_ref.formats.blocks import block_extents
from flamia_ref.formats.contract import in_contract
from flamia_ref.formats.diagnosis.boundaries import Inputs, boundary_inputs
from flamia_ref.formats.diagnosis.runs import Bits, Result, claimed, run, scale_values
from flamia_ref.formats.diagnosis.tensors import (
    amaxes_of,
    blocks_at,
    blocks_of,
    floats,
    of_blocks,
    preset,
)
from flamia_ref.formats.diagnosis.witness import Kind, Witness, explain, kind_of, same_block
from flamia_ref.formats.quantizer import quantize, source_of
from flamia_ref.formats.scalar import ScalarFormat

_EXPLAINED = 3  # differing blocks of an input that are explained


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two formats on one input.

    Attributes:
        presets: their names.
        block: rows and columns of a block.
        blocks, elements: how many there are.
        blocks_differ: blocks whose scale or some code differs.
        scales_differ: blocks whose scale differs; in value where the scale formats do.
        codes_differ: elements whose code differs.
        tensor_scales: float32 bits of the tensor scale of each, the first where each row has one;
            None without one.
        not_claimed: differing blocks for which a preset does not claim what its library does.
        witnesses: the first differing blocks, and why.
    """

    presets: tuple[str, str]
    block: tuple[int, int]
    blocks: int
    elements: int
    blocks_differ: int
    scales_differ: int
    codes_differ: int
    tensor_scales: tuple[int | None, int | None]
    not_claimed: int
    witnesses: tuple[Witness, ...]

    @property
    def differ(self) -> bool:
        """Whether a scale or a code differs."""
        return bool(self.blocks_differ)

    @property
    def exit_code(self) -> int:
        """0 without a difference, 1 with one."""
        return int(self.differ)

    @property
    def sentence(self) -> str:
        """The comparison in one sentence, and the first difference in another."""
        a, b = self.presets
        of = f"of {self.blocks} blocks of {self.block[0]}x{self.block[1]}"
        if not self.differ:
            return f"{a} and {b} give the same scales and codes for all {of[3:]}."
        text = (
            f"{a} and {b} differ in {self.blocks_differ} {of}: {self.scales_differ} scales and"
            f" {self.codes_differ} of {self.elements} codes."
        )
        if self.not_claimed:
            text += f" In {self.not_claimed} of them a library may do other than its preset."
        return f"{text} First: {self.witnesses[0].sentence}"

    def to_text(self) -> str:
        """The counts, and the first differing blocks with all operations."""
        lines = [self.sentence]
        for one in self.witnesses:
            lines += ["", *one.lines()]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The comparison as JSON text."""
        data = {name: getattr(self, name) for name in self.__slots__ if name != "witnesses"}
        data["tensor_scales"] = [None if s is None else f"{s:08x}" for s in self.tensor_scales]
        data["witnesses"] = [one.to_dict() for one in self.witnesses]
        return json.dumps(data | {"sentence": self.sentence}, indent=1) + "\n"


def compare(
    x: Array,
    preset_a: str | BlockFormat,
    preset_b: str | BlockFormat,
    *,
    block: Any = None,
    tensor_amax: Any = None,
) -> Comparison:
    """How two formats differ on x, and which step of them makes it.

    Args:
        x: as in `quantize`; numpy, or JAX, which is copied to the host.
        preset_a, preset_b: formats or names in `PRESETS`, with elements in one format.
        block: rows and columns that share a scale, of both; by default that of the first format if
            the second has it, or that of the second.
        tensor_amax: as in `quantize`, for those that have a tensor scale.

    Raises:
        TypeError: as `quantize` does.
        ValueError: as `quantize` does, and for formats whose elements differ or which have no block
            in common.
    """
    formats = (preset(preset_a), preset(preset_b))
    chosen = same_block(*formats, block)
    values = floats(x, "compare")
    source = source_of(values)
    neither = not any(one.has_tensor_scale for one in formats)
    tensors = [
        quantize(
            values,
            one,
            block=chosen,
            tensor_amax=tensor_amax if one.has_tensor_scale or neither else None,
        )
        for one in formats
    ]
    extents = block_extents(chosen, values.shape)
    scales = [scale_values(t.scales, f) for t, f in zip(tensors, formats, strict=True)]
    scales_differ = scales[0] != scales[1]
    codes_differ = tensors[0].codes != tensors[1].codes
    differ = scales_differ | of_blocks(codes_differ, extents).any(axis=(-3, -1))
    places = np.argwhere(differ)
    amaxes = [amaxes_of(values, one, tensor_amax, source) for one in formats]

    explained = places[:_EXPLAINED]
    first = blocks_at(values, explained, extents)
    own = [None if one is None else blocks_of(one, explained, extents) for one in amaxes]
    witnesses = []
    for index, place in enumerate(explained):
        results = [
            Result(
                blocks_at(t.codes, place[None], extents),
                t.scales[tuple(place)].reshape(1),
                s[tuple(place)].reshape(1),
            )
            for t, s in zip(tensors, scales, strict=True)
        ]
        amax = [None if one is None else one[index : index + 1] for one in own]
        witnesses.append(
            explain(
                first[index],
                *formats,
                (amax[0], amax[1]),
                source,
                at=tuple(place.tolist()),
                results=(results[0], results[1]),
            )
        )
    return Comparison(
        presets=(formats[0].name, formats[1].name),
        block=extents,
        blocks=differ.size,
        elements=codes_differ.size,
        blocks_differ=len(places),
        scales_differ=int(scales_differ.sum()),
        codes_differ=int(codes_differ.sum()),
        tensor_scales=(_first(tensors[0].tensor_scale), _first(tensors[1].tensor_scale)),
        not_claimed=_not_claimed(values, differ, formats, chosen, tensor_amax),
        witnesses=tuple(witnesses),
    )


def _first(tensor_scale: Any) -> int | None:
    if tensor_scale is None:
        return None
    return int(np.asarray(tensor_scale, np.float32).reshape(-1)[:1].view(np.uint32)[0])


def _not_claimed(
    values: npt.NDArray[Any],
    differ: npt.NDArray[np.bool_],
    formats: tuple[BlockFormat, BlockFormat],
    block: Any,
    tensor_amax: Any,
) -> int:
    fine = np.ones(differ.shape, bool)
    for one in formats:
        claims_all = not one.by_log2 and one.nan_in_contract and one.infinity_in_contract
        if differ.any() and not claims_all:
            amax = tensor_amax if one.has_tensor_scale else None
            fine &= in_contract(values, one, block=block, tensor_amax=amax)
    return int((differ & ~fine).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundaries:
    """Two formats on the inputs at their boundaries.

    Attributes:
        presets: their names.
        dtype: the type of the inputs.
        block: rows and columns of a block.
        inputs: how many blocks were tried.
        blocks_differ: on how many of these they differ.
        not_claimed: on how many a preset does not claim to give what its library does, as where
            that rounds log2 of a float32 to an integer.
        note: what blocks that stand alone cannot show; empty for nothing.
        witnesses: the smallest block of each kind on which the scale differs, and of each on which
            only codes do: the fewest elements that are not 0, then those nearest to 1.
    """

    presets: tuple[str, str]
    dtype: str
    block: tuple[int, int]
    inputs: int
    blocks_differ: int
    not_claimed: int
    note: str = ""
    witnesses: tuple[Witness, ...]

    @property
    def differ(self) -> bool:
        """Whether a scale or a code differs."""
        return bool(self.witnesses)

    @property
    def exit_code(self) -> int:
        """0 without a difference, 1 with one."""
        return int(self.differ)

    @property
    def none_of(self) -> tuple[Kind, ...]:
        """The kinds of input on which no difference was found."""
        found = {one.kind for one in self.witnesses}
        return tuple(kind for kind in Kind if kind not in found)

    @property
    def sentence(self) -> str:
        """The result in one sentence, with the smallest input of all."""
        a, b = self.presets
        tried = f"{self.inputs} boundary inputs in {self.dtype}"
        if not self.differ:
            return f"{a} and {b}: no difference found at {tried}.{self._doubt()}"
        text = f"{a} and {b} differ at {self.blocks_differ} of {tried}.{self._doubt()}"
        return f"{text} Smallest: {self.witnesses[0].sentence}"

    def _doubt(self) -> str:
        if not self.not_claimed:
            return ""
        return f" At {self.not_claimed} a library may do other than its preset, which is exact."

    def to_text(self) -> str:
        """A difference of each kind with all operations, and the kinds without one."""
        lines = [self.sentence.partition(" Smallest: ")[0]]
        for one in self.witnesses:
            what = "scale" if one.scales_differ else "codes"
            lines += ["", f"{one.kind} input, {what}:", *(f"    {line}" for line in one.lines())]
        if self.note:
            lines += ["", self.note]
        if self.differ and self.none_of:
            lines += ["", f"no difference found on {', '.join(self.none_of)} inputs"]
        return "\n".join(lines)

    def to_json(self) -> str:
        """The result as JSON text."""
        data = {name: getattr(self, name) for name in self.__slots__ if name != "witnesses"}
        data["none_of"] = list(self.none_of)
        data["witnesses"] = [one.to_dict() for one in self.witnesses]
        return json.dumps(data | {"sentence": self.sentence}, indent=1) + "\n"


def smallest(
    preset_a: str | BlockFormat,
    preset_b: str | BlockFormat,
    *,
    block: Any = None,
    dtype: Any = np.float32,
) -> Boundaries:
    """The smallest inputs on which two formats differ, searched at the boundaries of their rules.

    Tried are blocks with one value at which a scale changes (each power of two, the largest element
    times it, the thresholds of rounded mantissas, midpoints of scale codes under amaxes of
    tensors), blocks with elements at the midpoints between codes, two units in the last place on
    either side of all these, and zeros, subnormals, infinities and NaN. That none is found is no
    proof that there is none.

    Args:
        preset_a, preset_b, block: as in `compare`.
        dtype: float32, bfloat16 or float16: the type of the inputs.

    Raises:
        TypeError: for another dtype.
        ValueError: as `compare` does.
    """
    a, b = preset(preset_a), preset(preset_b)
    chosen = same_block(a, b, block)
    kind = _dtype(dtype)
    source = source_of(np.empty(0, kind))
    shape = block_extents(chosen, (32, 32))
    owned = (a.of_input(source), b.of_input(source))
    inputs = boundary_inputs(*owned, shape[0] * shape[1], kind, source)
    best: dict[tuple[Kind, bool], tuple[tuple[Any, ...], Bits, Bits | None]] = {}
    differ = doubtful = 0
    for given in inputs:
        found = _Differences.of(given, (a, b), owned, shape, source)
        differ += len(found.blocks)
        doubtful += found.not_claimed
        for index, (key, rank) in enumerate(found.ranked()):
            if key not in best or rank < best[key][0]:
                amax = None if given.tensor_amax is None else found.amax[index : index + 1]
                best[key] = (rank, found.blocks[index], amax)
    witnesses = []
    for key in sorted(best, key=lambda key: (list(Kind).index(key[0]), not key[1])):
        _, one, amax = best[key]
        one = _shrunk(one, amax, (a, b), owned, key, source)
        witnesses.append(explain(one, a, b, (amax, amax), source))
    return Boundaries(
        presets=(a.name, b.name),
        dtype=kind.name,
        block=shape,
        inputs=sum(len(given.blocks) for given in inputs),
        blocks_differ=differ,
        not_claimed=doubtful,
        note=_note(a, b),
        witnesses=tuple(witnesses),
    )


def _note(a: BlockFormat, b: BlockFormat) -> str:
    """How two formats differ beyond a block."""
    if a.tensor_extent != b.tensor_extent and a.has_tensor_scale and b.has_tensor_scale:
        return (
            f"{a.name} has a tensor scale for each {a.tensor_extent}, {b.name} for each"
            f" {b.tensor_extent}: on x whose rows have other amaxes they differ; give x"
        )
    if a.row_span != b.row_span:
        return "the scales of a row of blocks hold each other up in one of them; give x to see it"
    return ""


def _dtype(given: Any) -> np.dtype[Any]:
    known: list[np.dtype[Any]] = [
        *map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.float16)),
    ]
    for one in known:
        if (isinstance(given, str) and given == one.name) or given is one or given == one.type:
            return one
    raise TypeError(f"dtype is float32, bfloat16 or float16, not {shown(given)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Differences:
    """Blocks on which two formats differ."""

    blocks: Bits
    amax: Bits
    scales: npt.NDArray[np.bool_]
    kinds: list[Kind]
    claimed: npt.NDArray[np.bool_]
    not_claimed: int

    @classmethod
    def of(
        cls,
        given: Inputs,
        named: tuple[BlockFormat, BlockFormat],
        owned: tuple[BlockFormat, BlockFormat],
        shape: tuple[int, int],
        source: ScalarFormat,
    ) -> "_Differences":
        blocks = given.blocks.reshape(-1, *shape)
        first, second = (run(blocks, one, given.tensor_amax, source) for one in owned)
        scales = first.values != second.values
        codes = (first.codes != second.codes).reshape(-1, shape[0] * shape[1])
        where = scales | codes.any(axis=1)
        fine = np.ones(len(blocks), bool)
        for one, result in zip(named, (first, second), strict=True):
            fine &= claimed(blocks, result.scales, one, given.tensor_amax, source)
        unsure = int((~fine).sum())
        places = codes[where].argmax(axis=1)
        blocks = blocks[where]
        elements = np.take_along_axis(
            blocks.reshape(-1, shape[0] * shape[1]), places[:, None], axis=1
        )
        by_codes = kind_of(blocks, elements[:, 0])
        by_scale = kind_of(blocks)
        amax = None if given.tensor_amax is None else given.tensor_amax[where]
        return cls(
            blocks=blocks,
            amax=np.zeros(len(blocks), np.uint32) if amax is None else amax,
            scales=scales[where],
            kinds=[
                s if c else e for s, e, c in zip(by_scale, by_codes, scales[where], strict=True)
            ],
            claimed=fine[where],
            not_claimed=unsure,
        )

    def ranked(self) -> Iterator[tuple[tuple[Kind, bool], tuple[Any, ...]]]:
        """The kind of each, and its rank: least for the smallest."""
        magnitude = (self.blocks & _float32.MAGNITUDE).reshape(
            len(self.blocks), self.blocks[0].size if len(self.blocks) else 1
        )
        filled = np.minimum((magnitude > 0).sum(axis=1), 2)
        amax = magnitude.max(axis=1, initial=0)
        far = np.abs(amax.astype(np.int64) - int(_float32.ONE))
        for index in range(len(self.blocks)):
            key = (self.kinds[index], bool(self.scales[index]))
            yield key, (not self.claimed[index], int(filled[index]), int(far[index]))


def _shrunk(
    block: Bits,
    amax: Bits | None,
    named: tuple[BlockFormat, BlockFormat],
    owned: tuple[BlockFormat, BlockFormat],
    key: tuple[Kind, bool],
    source: ScalarFormat,
) -> Bits:
    """The block with as few elements that are not 0 as show the same kind of difference."""
    flat = block.reshape(-1)
    for place in np.flatnonzero(flat)[::-1]:
        fewer = flat.copy()
        fewer[place] = 0
        given = Inputs(fewer[None], amax)
        found = _Differences.of(given, named, owned, block.shape, source)
        if len(found.blocks) and (found.kinds[0], bool(found.scales[0])) == key:
            flat = fewer
    return flat.reshape(block.shape)
