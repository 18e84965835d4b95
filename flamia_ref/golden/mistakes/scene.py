"""A part of a case that is small enough to be computed again and again: some documents, some key/value heads."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref.golden.bitwise import Aligned
from flamia_ref.golden.elements import recipe_in
from flamia_ref.golden.files import Tensor
from flamia_ref.golden.pack import Case
from flamia_ref.golden.stage import Place, Stage, View, blocks
from flamia_ref.packing import Documents, Mask

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

_ROWS = {"tokens", "key_tokens", "token_blocks", "key_token_blocks"}
_NAN = np.uint32(0x7FFFFFFF)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The documents and key/value heads of a case that are looked at, the query heads of those among them.

    `actual`: what a kernel gave of the case.
    """

    case: Case = field(compare=False)
    documents: tuple[int, ...]
    kv_heads: tuple[int, ...]
    actual: Mapping[str, Aligned] = field(default_factory=dict, compare=False)

    @property
    def heads(self) -> tuple[int, ...]:
        """The query heads."""
        group = self.group
        return tuple(one * group + place for one in self.kv_heads for place in range(group))

    @property
    def group(self) -> int:
        """Query heads of a key/value head."""
        return self.case.spec.heads // self.case.spec.kv_heads

    @property
    def cost(self) -> int:
        """Multiply-adds of one product, which the time of a run is about in proportion to."""
        spec = self.case.spec
        pairs = sum(spec.lengths[one] * spec.lengths_of_keys[one] for one in self.documents)
        return pairs * len(self.heads) * spec.head_dim

    @property
    def lengths(self) -> tuple[int, ...]:
        """Queries of each document."""
        return tuple(self.case.spec.lengths[one] for one in self.documents)

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Keys of each document."""
        return tuple(self.case.spec.lengths_of_keys[one] for one in self.documents)

    @property
    def mask(self) -> Mask:
        """The mask of the case, of these documents."""
        return replace(
            self.case.spec.mask, queries=packed(self.lengths), keys=packed(self.key_lengths)
        )

    @property
    def softmax_scale(self) -> float:
        """That of the case."""
        return self.case.spec.softmax_scale

    @property
    def recipe(self) -> "Recipe":
        """The recipe of the case."""
        return recipe_of(self.case)

    def cut(self, place: Place, array: Tensor) -> Tensor:
        """Return what of a tensor belongs here. A tensor of another document has nothing."""
        if place.document is not None and place.document not in self.documents:
            return array[:0]
        for axis, name in enumerate(place.stage.axes):
            index = self._index(name, place.stage)
            if index is not None:
                array = np.take(array, index, axis=axis)
        return array

    def expected(self, name: str) -> Tensor:
        """Return a tensor of the pack, as far as it belongs here."""
        return self.cut(self.case.places[name], self.case.tensors[name])

    def given(self, name: str) -> Tensor:
        """Return a float32 tensor as the kernel gave it, as far as it belongs here; that of the pack if it did not."""
        if name not in self.actual or self.actual[name].view is not View.F32:
            return self.expected(name)
        bits = self.cut(self.case.places[name], self.actual[name].actual)
        return bits.astype(np.uint32, copy=False).view(np.float32)

    def rows(self, length_of_keys: bool = False) -> list[slice]:
        """Return where each document is among the tokens of this scene, or among its keys."""
        offsets = packed(self.key_lengths if length_of_keys else self.lengths).offsets
        return [slice(*offsets[one : one + 2]) for one in range(len(self.documents))]

    def _index(self, axis: str, stage: Stage) -> Tensor | None:
        spec = self.case.spec
        if axis in ("heads", "sinks"):
            return np.array(self.heads)
        if axis == "kv_heads":
            return np.array(self.kv_heads)
        if axis not in _ROWS:
            return None
        lengths = spec.lengths_of_keys if axis.startswith("key") or stage.of_keys else spec.lengths
        counts = [blocks(one) if axis.endswith("blocks") else one for one in lengths]
        starts = np.concatenate([[0], np.cumsum(counts)])
        parts = [np.arange(starts[one], starts[one + 1]) for one in self.documents]
        return np.concatenate(parts).astype(np.int64)


def packed(lengths: tuple[int, ...]) -> Documents:
    """Return documents of some lengths, one after another."""
    return Documents((0, *(int(end) for end in np.cumsum(lengths))))


_LEAN: list[tuple[object, "Recipe"]] = []


def recipe_of(case: Case) -> "Recipe":
    """Return the recipe of a case without what decides no bit: schedules, and evidence but for one step a part.

    It is changed again and again, and every change is checked against all of that. The last few are kept.
    """
    for entry, kept in _LEAN:
        if entry is case.recipe:
            return kept
    recipe = recipe_in(case)
    step = recipe.evidence("tiles.query")
    parts = [
        one.name
        for one in fields(recipe)
        if one.name not in ("name", "steps", "schedules") and getattr(recipe, one.name) is not None
    ]
    lean = replace(recipe, schedules=(), steps=dict.fromkeys(parts, step))
    _LEAN[:] = [*_LEAN[-15:], (case.recipe, lean)]
    return lean


def as_bits(value: Any, view: View) -> Tensor:
    """Return what the simulator gave as a pack stores it. Values must be those of the view."""
    array = np.asarray(value)
    if view not in (View.F32, View.BF16) or (view is View.BF16 and array.dtype == np.uint16):
        return array
    numbers = array if array.dtype == np.uint32 else np.asarray(array, np.float32).view(np.uint32)
    nan = np.isnan(numbers.view(np.float32))
    bits = np.where(nan, _NAN, numbers)
    return bits if view is View.F32 else (bits >> np.uint32(16)).astype(np.uint16)


def wide(bits: Tensor) -> Tensor:
    """Return bfloat16 bits as float32 bits."""
    return bits.astype(np.uint32) << np.uint32(16)


def to_bfloat16(values: Tensor) -> Tensor:
    """Return numbers rounded to bfloat16, to nearest even, as bits. From float64 the rounding is double."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = np.isnan(np.asarray(values, np.float32))
    return np.where(nan, np.uint16(0x7FFF), rounded.astype(np.uint16))
