"""The search for presets that explain an output, on a sample of its blocks and then on all."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref import _float32
from flamia_ref.formats.block import BlockFormat, TensorExtent
from flamia_ref.formats.diagnosis.departure import Departure
from flamia_ref.formats.diagnosis.ordinary import Facts, ordinary_form
from flamia_ref.formats.diagnosis.outputs import Candidate, Output, candidates, stray_codes
from flamia_ref.formats.diagnosis.runs import Bits, Result, claimed, run, same_scales
from flamia_ref.formats.diagnosis.steps import DATA
from flamia_ref.formats.diagnosis.tensors import amaxes_of, blocks_at, blocks_of, of_blocks
from flamia_ref.formats.diagnosis.variants import CLEARED, of_data, of_format, signs_of_scales
from flamia_ref.formats.diagnosis.witness import Witness, explain
from flamia_ref.formats.encoding import source_bits
from flamia_ref.formats.hadamard import transformed
from flamia_ref.formats.quantizer import quantize, source_of
from flamia_ref.formats.scalar import UE4M3, ScalarFormat
from flamia_ref.formats.scales import tensor_scale_bits

_NEAREST = 3  # presets that explain only a part, shown
_CONSIDERED = 8  # of which these are the ones that explain the most
_BASES = 4  # presets of which single changes are tried
_LARGE = 1 << 20  # elements
_PART = 1 << 16  # blocks at once
_FEW = 32  # blocks of these on which a preset must explain one
_SAMPLE = 160  # blocks for each way of choosing them


class Search:
    """x and a kernel's output, and what presets give there."""

    def __init__(
        self,
        values: npt.NDArray[Any],
        output: Output,
        tensor_amax: Any,
        source: ScalarFormat,
        fitting: Sequence[Candidate],
    ) -> None:
        self.values, self.output, self.source = values, output, source
        self.tensor_amax, self.fitting = tensor_amax, fitting
        self.amaxes: dict[Any, Bits | None] = {}
        self._known: dict[tuple[int, int], Facts] = {}
        self._amax_of_blocks: dict[tuple[int, int], Bits] = {}
        self._whole: dict[Any, tuple[npt.NDArray[np.bool_], npt.NDArray[Any]]] = {}
        self.samples = {one.block: self._sample(one.block) for one in fitting}
        self.score: dict[str, int] = {}
        self.agreement: dict[str, float] = {}
        self.prints: dict[str, bytes] = {}

    def grid(self, one: Candidate) -> tuple[int, ...]:
        """The shape of the scales of a block each."""
        *batch, rows, columns = self.values.shape
        return (*batch, -(-rows // one.block[0]), -(-columns // one.block[1]))

    def screened(self) -> tuple[list[Candidate], list[Candidate], list[Candidate]]:
        """Presets that explain the sample, that do not, and that make no claim for it."""
        passing, failing, silent = [], [], []
        for one in self.fitting:
            places = self.samples[one.block]
            some = places[:: max(1, len(places) // _FEW)]
            if self._turned_away(one, some) or self._explains_none(one, some):
                self.score[one.name] = 0
                failing.append(one)
                continue
            fine, right = self._tried(one, places)
            self.score[one.name] = int((right | ~fine).sum())
            if not fine.any() and len(places):
                silent.append(one)
            elif (right | ~fine).all() or one.format.row_span is not None:
                passing.append(one)
            else:
                failing.append(one)
        return passing, failing, silent

    def _tried(
        self, one: Candidate, places: npt.NDArray[Any], *, remember: bool = True
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which blocks a preset makes a claim for, and which it gives as the kernel does."""
        result, inside = self._run(one, places), self._inside(one, places)
        agree = (result.codes == blocks_at(self.output.codes, places, one.block)).mean()
        right = (result.codes == blocks_at(self.output.codes, places, one.block)) | ~inside
        ours = same_scales(result.scales, one.format)
        theirs = self._scales(one)[tuple(places.T)]
        if len(places):  # of the first try, on the same few blocks for each
            self.agreement.setdefault(one.name, float(agree + (ours == theirs).mean()))
        if remember:
            given = np.where(inside, result.codes, 0).tobytes()
            self.prints.setdefault(one.name, ours.tobytes() + given)
        amax = self._amax(one.format)
        fine = claimed(
            blocks_at(self.values, places, one.block),
            result.scales,
            one.format,
            None if amax is None else blocks_of(amax, places, one.block),
            self.source,
        )
        return fine, right.all(axis=(-2, -1)) & (ours == theirs)

    def _turned_away(self, one: Candidate, places: npt.NDArray[Any]) -> bool:
        """Whether a Hadamard transform gives other signs than the codes have: that needs no amax of all x."""
        if one.format.signs is None:
            return False
        blocks = blocks_at(self.values, places, one.block)
        turned = transformed(blocks, one.format.signs, self.source)
        codes, sign = blocks_at(self.output.codes, places, one.block), one.format.element.sign_code
        other = ((codes & sign) != 0) != ((turned & _float32.SIGN) != 0)
        return bool((other & ((codes & (sign - 1)) != 0) & ~_float32.is_nan(turned)).any())

    def _explains_none(self, one: Candidate, places: npt.NDArray[Any]) -> bool:
        """Whether a preset claims some of these blocks, and gives none of those as the kernel does."""
        fine, right = self._tried(one, places, remember=False)
        return bool(fine.any()) and not (fine & right).any() and one.format.row_span is None

    def _run(self, one: Candidate, places: npt.NDArray[Any]) -> Result:
        """What a preset gives at some places."""
        amax = self._amax(one.format)
        amax = None if amax is None else blocks_of(amax, places, one.block)
        blocks = blocks_at(self.values, places, one.block)
        return run(blocks, one.format.of_input(self.source), amax, self.source)

    def _inside(self, one: Candidate, places: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which elements of some blocks are in x, and none that fills a partial block."""
        inside = np.broadcast_to(np.uint8(1), self.values.shape)
        return blocks_at(inside, places, one.block) > 0

    def everywhere(self, one: Candidate) -> tuple[npt.NDArray[np.bool_], int]:
        """Where a preset departs, of all its blocks, and for how many of these it makes no claim."""
        owned = one.format.of_input(self.source)
        key = (ordinary_form(owned, self._facts(one.block), self.source), one.block, one.repeated)
        if key not in self._whole:
            amax = self.tensor_amax if one.format.has_tensor_scale else None
            tensor = quantize(self.values, one.format, block=one.named, tensor_amax=amax)
            wrong = of_blocks(tensor.codes != self.output.codes, one.block).any(axis=(-3, -1))
            wrong |= same_scales(tensor.scales, one.format) != self._scales(one)
            self._whole[key] = wrong | self._rows_differ(one), tensor.scales
        wrong, scales = self._whole[key]
        claims_all = not owned.by_log2 and owned.nan_in_contract and owned.infinity_in_contract
        if claims_all or not wrong.any():
            return wrong, 0
        wrong, unclaimed = wrong.copy(), 0
        places, own = np.argwhere(wrong), self._amax(one.format)
        for start in range(0, len(places), _PART):
            some = places[start : start + _PART]
            fine = claimed(
                blocks_at(self.values, some, one.block),
                scales[tuple(some.T)],
                one.format,
                None if own is None else blocks_of(own, some, one.block),
                self.source,
            )
            unclaimed += int((~fine).sum())
            wrong[tuple(some[~fine].T)] = False
        return wrong, unclaimed

    def _facts(self, block: tuple[int, int]) -> Facts:
        if block not in self._known:
            self._known[block] = Facts.of(source_bits(self.values), self._block_amax(block))
        return self._known[block]

    def _block_amax(self, block: tuple[int, int]) -> Bits:
        """float32 bits of the amax of each block, NaN the largest."""
        if block not in self._amax_of_blocks:
            magnitude = source_bits(self.values) & _float32.MAGNITUDE
            self._amax_of_blocks[block] = of_blocks(magnitude, block).max(axis=(-3, -1))
        return self._amax_of_blocks[block]

    def tensor_scale_differs(self, one: Candidate) -> tuple[int, int] | None:
        """The tensor scale of a preset and that given, where they differ."""
        given = self.output.tensor_scale
        if given is None:
            return None
        amax = self._amax(one.format)
        if amax is None:
            return None
        owned = one.format.of_input(self.source)
        if owned.tensor_extent is TensorExtent.TENSOR:
            amax = amax.reshape(-1)[:1]
        ours = tensor_scale_bits(amax.reshape(-1), owned, self.source)
        theirs = given.reshape(-1).view(np.uint32)
        if len(ours) == len(theirs):
            other = np.flatnonzero(_float32.canonical(ours) != _float32.canonical(theirs))
            place = int(other[0]) if len(other) else None
        else:  # one of a tensor for one of each row, or the other way around
            place = 0
        return None if place is None else (int(ours[place]), int(theirs[place]))

    def departures(self, failing: list[Candidate], explained: list[Candidate]) -> list[Departure]:
        """The presets that explain the most, one of each that are the same on the sample."""
        apart = {one.name: self._tensor_scales_apart(one) for one in failing}
        order = sorted(
            failing,
            key=lambda one: (
                -self.score[one.name],
                apart[one.name],
                -self.agreement.get(one.name, 0.0),
            ),
        )
        seen: dict[tuple[bytes, Any], list[Candidate]] = {}
        elements = {one.format.element for one in explained}
        for one in order:
            if not explained or (self.score[one.name] and one.format.element in elements):
                key = self.prints.get(one.name, one.name.encode()), self.tensor_scale_differs(one)
                seen.setdefault(key, []).append(one)
        groups = list(seen.values())
        enough = 0.9 * self.score[groups[0][0].name] if groups else 0.0
        groups = [
            group
            for index, group in enumerate(groups[:_CONSIDERED])
            if index < _NEAREST or self.score[group[0].name] >= enough
        ]
        of_sample = bool(explained) and self.values.size > _LARGE
        counted = []
        for group in groups:
            # The same on the sample, of all blocks the first may explain less than another.
            if not of_sample:
                group.sort(key=lambda one: int(self.everywhere(one)[0].sum()))
            first, *others = group
            if of_sample and self.score[first.name] < len(self.samples[first.block]):
                places = self.samples[first.block]
                fine, right = self._tried(first, places)
                wrong = fine & ~right
                places = places[wrong][:1]
            else:
                wrong, _ = self.everywhere(first)
                places = np.argwhere(wrong)[:1]
            counts = int((~wrong).sum()), wrong.size
            counted.append((counts, apart[first.name], first, others, places))
        counted.sort(key=lambda group: (-group[0][0] / max(group[0][1], 1), group[1]))
        return [
            self._departure(first, others, counts, places, [*explained, *order])
            for counts, _, first, others, places in counted[:_NEAREST]
        ]

    def _tensor_scales_apart(self, one: Candidate) -> int:
        """How many float32 the tensor scale of a preset and that given, or one over it, are apart."""
        pair = self.tensor_scale_differs(one)
        if pair is None:
            return 0
        with np.errstate(all="ignore"):
            inverse = np.float32(1) / np.uint32(pair[1]).view(np.float32)
        return min(abs(pair[0] - pair[1]), abs(pair[0] - int(inverse.view(np.uint32))) + 2)

    def notes(self, failing: list[Candidate], block: Any, *, only_tensor_scale: bool) -> list[str]:
        """What is odd about the output, and single changes that explain every block."""
        said = [stray_codes(self.output.codes)]
        changed = [] if only_tensor_scale else self._changed_data(block)
        best = max(
            failing,
            key=lambda one: (self.score[one.name], self.agreement.get(one.name, 0.0)),
            default=None,
        )
        # Scales in E8M0 have bit 7 too: what fits says which they are.
        if any(CLEARED in text for text in changed) or (best and best.format.scale == UE4M3):
            said.append(signs_of_scales(self.output))
        said += changed
        if not only_tensor_scale:
            said += self._changed_formats(failing)
        return [text for text in said if text]

    def _changed_data(self, block: Any) -> list[str]:
        """What of the input or the output, changed alone, makes it that of presets."""
        said = []
        for text, values, output in of_data(self.values, self.output):
            try:
                fitting = with_amax(candidates(values, output, block), values, self.tensor_amax)
            except (TypeError, ValueError):
                continue
            other = Search(values, output, self.tensor_amax, source_of(values), fitting)
            names = [
                one.name
                for one in other.screened()[0]
                if not other.everywhere(one)[0].any() and not other.tensor_scale_differs(one)
            ]
            if names:
                said.append(f"Explained {text}: all blocks are then those of {_some(names)}")
        return said

    def _changed_formats(self, failing: list[Candidate]) -> list[str]:
        """Fields of the nearest presets that, changed alone, explain every block."""
        order = sorted(
            (one for one in failing if not one.format.choice and one.format.signs is None),
            key=lambda one: (-self.score[one.name], -self.agreement.get(one.name, 0.0)),
        )
        bases: dict[bytes, Candidate] = {}
        for one in order:
            bases.setdefault(self.prints.get(one.name, one.name.encode()), one)
            if len(bases) == _BASES:
                break
        found: dict[str, list[str]] = {}
        for base in bases.values():
            places = self.samples[base.block]
            some = places[:: max(1, len(places) // _FEW)]
            for text, changed in of_format(base.format):
                one = dataclasses.replace(base, format=changed)
                if not self._gives_all(one, some) or not self._gives_all(one, places):
                    continue
                if self.tensor_scale_differs(one) or self.everywhere(one)[0].any():
                    continue
                found.setdefault(base.name, []).append(text)
        alike: dict[str, list[str]] = {}  # presets by what changes them
        for name, texts in found.items():
            alike.setdefault(" or ".join(texts), []).append(name)
        return [
            f"That of {_some(names)} with {text} explains all blocks"
            for text, names in alike.items()
        ]

    def _gives_all(self, one: Candidate, places: npt.NDArray[Any]) -> bool:
        fine, right = self._tried(one, places, remember=False)
        return bool(fine.any()) and bool((right | ~fine).all())

    def _departure(
        self,
        one: Candidate,
        others: list[Candidate],
        counts: tuple[int, int],
        places: npt.NDArray[Any],
        order: list[Candidate],
    ) -> Departure:
        same = tuple(other.name for other in others)
        explained, of = counts
        if not len(places):
            return Departure(
                preset=one.name,
                same=same,
                explained=explained,
                of=of,
                block=one.block,
                tensor_scales=self.tensor_scale_differs(one),
            )
        result = self._run(one, places)
        ours = np.where(self._inside(one, places), result.codes, 0)[0]
        theirs = blocks_at(self.output.codes, places, one.block)[0]
        others_here = np.argwhere(ours != theirs).tolist()
        element = (others_here[0][0], others_here[0][1]) if others_here else None
        block = blocks_at(self.values, places, one.block)[0]
        like = [other for other in order if other is not one and self._gives(other, one, places)]
        # Of presets that are one here, the pair that differs in the least.
        alike = [each for each in (one, *others) if self._same_there(each, one, result, places)]
        pairs = [(each, other) for other in like for each in alike]
        why = None
        if pairs:
            shown, first = min(pairs, key=lambda pair: _distance(pair[0].format, pair[1].format))
            same = tuple(each.name for each in (one, *others) if each is not shown)
            like.sort(key=lambda other: _distance(shown.format, other.format))
            why = self._why(shown, first, block, places[0])
            one = shown
        at = tuple(places[0].tolist())
        return Departure(
            preset=one.name,
            same=same,
            explained=explained,
            of=of,
            block=one.block,
            at=at,
            differing=int((ours != theirs).sum()),
            values=tuple(block.reshape(-1).tolist()),
            element=element,
            scales=(int(result.scales[0]), int(self._scales(one)[at])),
            codes=None if element is None else (int(ours[element]), int(theirs[element])),
            like=tuple(other.name for other in like),
            why=why,
        )

    def _same_there(
        self, each: Candidate, one: Candidate, result: Result, places: npt.NDArray[Any]
    ) -> bool:
        """Whether a preset gives on a block what another one gives, by its result."""
        if each is one:
            return True
        if each.block != one.block:
            return False
        own = self._run(each, places)
        return bool((own.codes == result.codes).all() and (own.values == result.values).all())

    def _gives(self, other: Candidate, one: Candidate, places: npt.NDArray[Any]) -> bool:
        # Equal codes of other elements are other values.
        if other.block != one.block or other.format.element != one.format.element:
            return False
        if self._turned_away(other, places):
            return False
        _, right = self._tried(other, places)
        return bool(right[0])

    def _why(
        self, one: Candidate, other: Candidate, block: Bits, place: npt.NDArray[Any]
    ) -> Witness | None:
        amaxes = []
        for each in (one, other):
            amax = self._amax(each.format)
            amaxes.append(None if amax is None else blocks_of(amax, place[None], each.block))
        at = tuple(place.tolist())
        try:
            return explain(block, one.format, other.format, (amaxes[0], amaxes[1]), self.source, at)
        except ValueError:  # it differs by what is outside of the block
            return None

    def _amax(self, block_format: BlockFormat) -> Bits | None:
        if not block_format.has_tensor_scale:
            return None
        owned = block_format.of_input(self.source)
        key = (owned.tensor_extent, owned.signs, owned.nan)
        if key not in self.amaxes:
            self.amaxes[key] = amaxes_of(self.values, owned, self.tensor_amax, self.source)
        return self.amaxes[key]

    def _scales(self, one: Candidate) -> npt.NDArray[Any]:
        """The kernel's scales, one a block."""
        scales = self.output.scales
        if one.repeated:
            scales = scales[..., :: one.block[0], :]
        return same_scales(scales, one.format)

    def _rows_differ(self, one: Candidate) -> npt.NDArray[np.bool_]:
        """Where the scales that are repeated for each row of a block are not the same."""
        if not one.repeated:
            return np.zeros(self.grid(one), bool)
        rows = of_blocks(self.output.scales, (one.block[0], 1))
        found: npt.NDArray[np.bool_] = (rows != rows[..., :1, :, :]).any(axis=(-3, -1))
        return found

    def _sample(self, block: tuple[int, int]) -> npt.NDArray[Any]:
        """Places of blocks with amaxes of all kinds."""
        amax = self._block_amax(block)
        flat = amax.reshape(-1)
        if flat.size <= 4 * _SAMPLE:
            return np.argwhere(np.ones(amax.shape, bool))
        mantissa = flat & np.uint32(0x7FFFFF)
        chosen = [np.linspace(0, flat.size - 1, _SAMPLE).astype(np.int64)]
        for order in (np.argsort(flat), np.argsort(mantissa)):
            chosen.append(order[np.linspace(0, flat.size - 1, _SAMPLE).astype(np.int64)])
        for odd in (flat >= _float32.INFINITY, flat < np.uint32(1 << 23)):
            chosen.append(np.flatnonzero(odd)[: _SAMPLE // 4])
        places = np.unravel_index(np.unique(np.concatenate(chosen)), amax.shape)
        return np.stack(places, axis=-1)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def _distance(a: BlockFormat, b: BlockFormat) -> int:
    """In how many fields two formats have other data, those with other elements the furthest."""
    other = [field for field in DATA if getattr(a, field) != getattr(b, field)]
    return len(other) + len(DATA) * int(a.element != b.element)


def with_amax(
    fitting: list[Candidate], values: npt.NDArray[Any], tensor_amax: Any
) -> list[Candidate]:
    """The presets that take such an amax. Raises as `quantize` does where none of those does."""
    first: Candidate | None = None
    found: list[Candidate] = []
    for one in fitting:
        if one.format.has_tensor_scale and tensor_amax is not None:
            try:  # no columns: the amax is checked, and nothing is done
                quantize(values[..., :0], one.format, block=one.named, tensor_amax=tensor_amax)
            except (TypeError, ValueError):
                first = first or one
                continue
        found.append(one)
    if first is not None and not any(one.format.has_tensor_scale for one in found):
        quantize(values, first.format, block=first.named, tensor_amax=tensor_amax)  # raises
    return found
