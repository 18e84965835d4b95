"""Samples: the inputs of a case, and what a kernel gave for them, as a whole or in parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.dataflow import dataflow
from flamia_ref.golden.files import Stored, Tensor
from flamia_ref.golden.inputs import TENSORS
from flamia_ref.golden.stage import Place, Role, Stage, View, blocks

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe
    from flamia_ref.golden.pack import Case

Places = Mapping[str, Place]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """Inputs, and what a kernel gave for them.

    Attributes:
        name: what reports call it.
        spec: shapes, mask and options; its formulas and seeds say nothing here.
        inputs: bfloat16 bits of q, k, v and dout by name.
        given: the results by their names in a pack.
        views: what the bits of a result mean, where its source says so.
        whole: whether it is all of a case, not a part.
    """

    name: str
    spec: CaseSpec
    inputs: Mapping[str, Tensor]
    given: Mapping[str, Stored]
    views: Mapping[str, View]
    whole: bool = True

    @property
    def cost(self) -> int:
        """Pairs of a query and a key, the measure of the work."""
        return self.spec.pairs * self.spec.head_dim

    def parts(self) -> Iterator[Sample]:
        """Each document and key/value head by itself, which no recipe couples, the cheapest first; no empty ones."""
        spec = self.spec
        found = [
            (length * keys, document, head)
            for document, (length, keys) in enumerate(
                zip(spec.lengths, spec.lengths_of_keys, strict=True)
            )
            for head in range(spec.kv_heads)
            if length and keys
        ]
        for _, document, head in sorted(found):
            yield self.part(document, head)

    def part(self, document: int, head: int) -> Sample:
        """One document and key/value head with its query heads. What belongs to no single document is left out."""
        spec = self.spec
        if len(spec.lengths) == 1 and spec.kv_heads == 1:
            return self
        group = spec.heads // spec.kv_heads
        heads = slice(head * group, (head + 1) * group)
        tokens = slice(spec.starts[document], spec.starts[document + 1])
        keys = slice(spec.key_starts[document], spec.key_starts[document + 1])
        taken = {
            name: x[tokens, heads] if name in ("q", "dout") else x[keys, head : head + 1]
            for name, x in self.inputs.items()
        }
        other_keys = None if spec.key_lengths is None else (spec.key_lengths[document],)
        small = dataclasses.replace(
            spec,
            lengths=(spec.lengths[document],),
            key_lengths=other_keys,
            heads=group,
            kv_heads=1,
            sinks=spec.sinks[heads],
            plants=(),
            fills=(),
            twin=None,
        )
        return dataclasses.replace(
            self,
            name=f"document {document}, key/value head {head} of {self.name}",
            spec=small,
            inputs={name: np.ascontiguousarray(x) for name, x in taken.items()},
            given=_Cut(self, document, head, heads),
            whole=False,
        )

    def places(self, recipe: Recipe) -> Places:
        """What each tensor of a recipe is in this sample, by name, in the order of the dataflow; no inputs."""
        places = dataflow(recipe).places(self.spec)
        return {name: one for name, one in places.items() if one.stage.role is not Role.INPUT}

    def result(self, place: Place) -> Stored | None:
        """What was given for a tensor of a recipe."""
        if isinstance(self.given, _Cut):
            return self.given.of(place)
        return self.given.get(place.name)


class _Cut(Mapping[str, Stored]):
    """The results of a sample, cut to one document and key/value head when a recipe says what their axes are."""

    def __init__(self, source: Sample, document: int, head: int, heads: slice) -> None:
        self._source, self._document, self._head, self._heads = source, document, head, heads

    def _name(self, name: str) -> str:
        return f"{name[:-2]}.{self._document}" if name.endswith(".0") else name

    def __getitem__(self, name: str) -> Stored:
        return self._source.given[self._name(name)]

    def __iter__(self) -> Iterator[str]:
        lists = f".{self._document}"
        for name in self._source.given:
            stem, _, last = name.rpartition(".")
            if last.isdecimal() and stem:
                if name.endswith(lists):
                    yield f"{stem}.0"
            else:
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def of(self, place: Place) -> Stored | None:
        stage = place.stage
        if "sinks" in stage.axes or ("documents" in stage.axes and stage.role is Role.OUTPUT):
            return None  # a sum over the documents
        name = place.name if place.document is None else f"{stage.name}.{self._document}"
        one = self._source.given.get(name)
        if one is None:
            return None
        spec = self._source.spec
        shape = stage.shape(spec, None if place.document is None else self._document)
        if one.array.shape != shape:
            return one  # the comparison says so
        index = tuple(self._along(axis, stage, spec) for axis in stage.axes)
        return Stored(dtype=one.dtype, array=np.ascontiguousarray(one.array[index]))

    def _along(self, axis: str, stage: Stage, spec: CaseSpec) -> slice:
        document = self._document
        match axis:
            case "heads":
                return self._heads
            case "kv_heads":
                return slice(self._head, self._head + 1)
            case "documents":
                return slice(document, document + 1)
            case "tokens":
                return slice(spec.starts[document], spec.starts[document + 1])
            case "key_tokens":
                return slice(spec.key_starts[document], spec.key_starts[document + 1])
            case "token_blocks" | "key_token_blocks":
                lengths = spec.lengths if axis == "token_blocks" else spec.lengths_of_keys
                first = sum(blocks(length, stage.block) for length in lengths[:document])
                return slice(first, first + blocks(lengths[document], stage.block))
            case _:
                return slice(None)


def of_case(case: Case, given: Mapping[str, Stored]) -> Sample:
    """The sample of a case of a pack, with what a kernel gave for it."""
    return Sample(
        name=case.name,
        spec=_any_numbers(case.spec),
        inputs={name: case.tensors[name] for name in TENSORS},
        given={name: one for name, one in given.items() if not _is_input(case, name)},
        views={name: place.stage.view for name, place in case.places.items()},
    )


def own_results(case: Case) -> dict[str, Stored]:
    """The results that a pack itself holds of a case."""
    return {
        name: Stored(dtype=case.places[name].stage.view.storage, array=case.tensors[name])
        for name in case.tensors
        if not _is_input(case, name)
    }


def _is_input(case: Case, name: str) -> bool:
    return name in case.places and case.places[name].stage.role is Role.INPUT


def _any_numbers(spec: CaseSpec) -> CaseSpec:
    """The case, in whose results NaN may be: another recipe may well give it."""
    flags = spec.flags if "nan" in spec.flags else (*spec.flags, "nan")
    return dataclasses.replace(spec, flags=flags)


def tensor_names(sample: Sample) -> tuple[str, ...]:
    """The names of the results, those of lists once."""
    found: dict[str, Any] = {}
    for name in sample.given:
        stem, _, last = name.rpartition(".")
        found[stem if last.isdecimal() and stem else name] = None
    return tuple(found)
