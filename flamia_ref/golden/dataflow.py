"""The tensors of a pack as a graph: what each holds, its shape, and what it is computed from.

The order is that of the dataflow, and the check compares in it: the first stage that departs is
where a kernel goes wrong. A scale comes before the codes that are encoded with it.

A stage that is a list with an array for each document (s, p and what is made of p) is stored as
one tensor a document, its name followed by ``.0``, ``.1``, ... An array of an empty document has
no elements, and is stored too.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref.golden.cases import CaseSpec

SCALE_ROWS = 128  # rows of a tile of scales
BLOCK = 32  # elements that share a scale in an MMA


class View(StrEnum):
    """What the stored bits of a tensor mean, by the name that safetensors has for it."""

    F8_E4M3 = "F8_E4M3"
    F8_E8M0 = "F8_E8M0"
    BF16 = "BF16"
    F32 = "F32"
    I32 = "I32"

    @property
    def storage(self) -> str:
        """The name of the dtype on disk: unsigned integers for what numpy has not."""
        return _STORAGE.get(self.value, self.value)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy type of the stored tensor."""
        return np.dtype({"U8": "u1", "U16": "u2", "F32": "f4", "I32": "i4"}[self.storage])


_STORAGE = {"F8_E4M3": "U8", "F8_E8M0": "U8", "BF16": "U16"}


class Role(StrEnum):
    """What a tensor is for whoever checks a kernel."""

    INPUT = "input"
    STAGE = "stage"
    OUTPUT = "output"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A step of the dataflow.

    `axes` name the dimensions (see `shape`). `parents` are the stages it is computed from.
    `scales` names the stage that holds the scales of these codes. `masked_optional`: a kernel may
    skip masked pairs; zero, -infinity or NaN there says that it did.
    """

    name: str
    view: View
    axes: tuple[str, ...]
    parents: tuple[str, ...] = ()
    role: Role = Role.STAGE
    scales: str | None = None
    masked_optional: bool = False

    @property
    def per_document(self) -> bool:
        """Whether the stage is a list with one array a document."""
        return not {"tokens", "starts"} & set(self.axes)

    @property
    def tiled(self) -> bool:
        """Whether the tensor is scales in the 128x4 order that kernels load."""
        return "row_tiles" in self.axes

    @property
    def layout(self) -> str:
        """The order of the elements in memory, in words."""
        order = f"row-major [{', '.join(self.axes)}]"
        return f"{order}, scales of 128x4 tiles, padding 0" if self.tiled else order

    def shape(self, case: CaseSpec, document: int | None) -> tuple[int, ...]:
        """Return the shape in a case: of one document's array where the stage is a list."""
        rows = 0 if document is None else case.lengths[document]
        blocks = case.head_dim // BLOCK
        sizes = {
            "tokens": case.tokens,
            "starts": len(case.lengths) + 1,
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "head_dim": case.head_dim,
            "one": 1,
            "queries": rows,
            "keys": rows,
            "key_blocks": -(-rows // BLOCK),
            "row_tiles": -(-rows // SCALE_ROWS),
            "column_tiles": -(-blocks // 4),
            "bytes": 512,
        }
        return tuple(sizes[axis] for axis in self.axes)


def _operand(tensor: str, heads: str) -> tuple[Stage, ...]:
    scales, codes = f"{tensor}.scales", f"{tensor}.codes"
    return (
        Stage(
            name=scales,
            view=View.F8_E8M0,
            axes=("tokens", heads, "one"),
            parents=(tensor,),
        ),
        Stage(
            name=f"{scales}.tiled",
            view=View.F8_E8M0,
            axes=(heads, "row_tiles", "column_tiles", "bytes"),
            parents=(scales,),
        ),
        Stage(
            name=codes,
            view=View.F8_E4M3,
            axes=("tokens", heads, "head_dim"),
            parents=(tensor, scales),
            scales=scales,
        ),
    )


def _input(name: str, view: View, *axes: str) -> Stage:
    return Stage(name=name, view=view, axes=axes, role=Role.INPUT)


_PAIRS = ("heads", "queries", "keys")

STAGES = MappingProxyType(
    {
        stage.name: stage
        for stage in (
            _input("cu_seqlens", View.I32, "starts"),
            _input("q", View.BF16, "tokens", "heads", "head_dim"),
            _input("k", View.BF16, "tokens", "kv_heads", "head_dim"),
            _input("v", View.BF16, "tokens", "kv_heads", "head_dim"),
            *_operand("q", "heads"),
            *_operand("k", "kv_heads"),
            *_operand("v", "kv_heads"),
            Stage(
                name="s",
                view=View.F32,
                axes=_PAIRS,
                parents=("q.scales", "q.codes", "k.scales", "k.codes"),
                masked_optional=True,
            ),
            Stage(name="row_max", view=View.F32, axes=("heads", "tokens"), parents=("s",)),
            Stage(name="p", view=View.F32, axes=_PAIRS, parents=("s", "row_max")),
            Stage(
                name="p.o.scales",
                view=View.F8_E8M0,
                axes=("heads", "queries", "key_blocks"),
                parents=("p", "v.scales"),
            ),
            Stage(
                name="p.o.codes",
                view=View.F8_E4M3,
                axes=_PAIRS,
                parents=("p", "v.scales", "p.o.scales"),
                scales="p.o.scales",
            ),
            Stage(
                name="row_sum", view=View.F32, axes=("heads", "tokens"), parents=("p", "row_max")
            ),
            Stage(
                name="o",
                view=View.F32,
                axes=("tokens", "heads", "head_dim"),
                parents=("p.o.scales", "p.o.codes", "v.codes", "row_max", "row_sum"),
            ),
            Stage(
                name="out",
                view=View.BF16,
                axes=("tokens", "heads", "head_dim"),
                parents=("o",),
                role=Role.OUTPUT,
            ),
            Stage(
                name="lse",
                view=View.F32,
                axes=("heads", "tokens"),
                parents=("row_max", "row_sum"),
                role=Role.OUTPUT,
            ),
        )
    }
)

INPUTS = tuple(name for name, stage in STAGES.items() if stage.role is Role.INPUT)
OUTPUTS = tuple(name for name, stage in STAGES.items() if stage.role is Role.OUTPUT)

# What a trace is asked for: all that the simulator names. Tiled scales are a layout of another stage.
TRACE = tuple(
    name for name, stage in STAGES.items() if stage.role is Role.STAGE and not stage.tiled
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A tensor of a case: its stage and, where the stage is a list, its document."""

    name: str
    stage: Stage
    document: int | None
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the stored tensor."""
        return math.prod(self.shape) * self.stage.view.dtype.itemsize


def places(case: CaseSpec) -> dict[str, Place]:
    """Return every tensor that a pack can hold of a case, by name, in the order of the dataflow."""
    found = {}
    for stage in STAGES.values():
        documents = range(len(case.lengths)) if stage.per_document else (None,)
        for document in documents:
            name = stage.name if document is None else f"{stage.name}.{document}"
            found[name] = Place(
                name=name, stage=stage, document=document, shape=stage.shape(case, document)
            )
    return found


def visible_pairs(case: CaseSpec, place: Place) -> npt.NDArray[np.bool_]:
    """Return which [queries, keys] of a document's array are legal pairs."""
    queries, keys = place.shape[-2:]
    pairs = np.ones((queries, keys), bool)
    return np.tril(pairs) if case.causal else pairs


def suspects(stage: str, given: frozenset[str]) -> tuple[str, ...]:
    """Return the stages before `stage` that were not given, and that lead to it without passing one.

    Where there are any, naming `stage` as the culprit is an inference. Inputs, and tiled scales,
    are no suspects.
    """
    found: set[str] = set()
    waiting = list(STAGES[stage].parents)
    while waiting:
        name = waiting.pop()
        if name not in found and name not in given and STAGES[name].role is Role.STAGE:
            found.add(name)
            waiting.extend(STAGES[name].parents)
    return tuple(name for name in STAGES if name in found)
