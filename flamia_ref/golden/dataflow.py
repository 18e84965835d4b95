"""The tensors of a pack as a graph that follows from the recipe: what there is, in which order.

The order is that of the dataflow, and the check compares in it: the first stage that departs is
where a kernel goes wrong. A scale comes before the codes that are encoded with it.

A stage that is a list with an array for each document (s, p, ds and what is made of pairs) is
stored as one tensor a document, its name followed by ``.0``, ``.1``, ... An array of an empty
document has no elements, and is stored too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flamia_ref._errors import Registry
from flamia_ref.golden.cases import CaseSpec
from flamia_ref.golden.copies import HEADS, Copy, copies
from flamia_ref.golden.stage import Place, Role, Stage, View

if TYPE_CHECKING:
    from flamia_ref.attention import Recipe

INPUTS = ("cu_seqlens", "q", "k", "v", "dout")
"""What every case has."""
OUTPUTS = ("out", "lse")
"""What every kernel gives."""
GRADIENTS = ("dq", "dk", "dv")
"""What a kernel that has a backward gives."""


def is_gradient(name: str) -> bool:
    """Whether a result has the name of a gradient, whatever the recipe."""
    return name in (*GRADIENTS, "dsink")


_PAIRS = ("heads", "queries", "keys")
_ROWS = ("heads", "tokens")
_QUERIES = ("tokens", "heads", "head_dim")
_KEYS = ("key_tokens", "kv_heads", "head_dim")
_PRODUCTS = ("s", "o", "dp", "dv", "dq", "dk")
_EPILOGUE = {"o": ("row_max", "row_sum", "sink")}  # what a product takes beside its operands


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataflow:
    """The stages of a recipe by name, inputs and outputs among them, in the order of the dataflow."""

    stages: Mapping[str, Stage]

    def trace(self, *, backward: bool) -> tuple[str, ...]:
        """Return what a pass of the simulator is asked to trace. Tiled scales are another's layout."""
        return tuple(
            name
            for name, stage in self.stages.items()
            if stage.role is Role.STAGE and not stage.tiled and stage.backward == backward
        )

    def places(self, case: CaseSpec) -> dict[str, Place]:
        """Return every tensor that a pack can hold of a case, by name.

        A tensor that the case has not is no parent of another either.
        """
        absent = {
            one.name for one in self.stages.values() if one.needs and not getattr(case, one.needs)
        }
        found = {}
        for stage in self.stages.values():
            if stage.name in absent:
                continue
            if absent & set(stage.parents):
                parents = tuple(name for name in stage.parents if name not in absent)
                stage = replace(stage, parents=parents)
            documents = range(len(case.lengths)) if stage.per_document else (None,)
            for document in documents:
                name = stage.name if document is None else f"{stage.name}.{document}"
                shape = stage.shape(case, document)
                found[name] = Place(name=name, stage=stage, document=document, shape=shape)
        return found

    def suspects(self, stage: str, given: frozenset[str]) -> tuple[str, ...]:
        """Return the stages before `stage` that were not given, and that lead to it without passing one.

        Where there are any, naming `stage` as the culprit is an inference. Inputs, and tiled
        scales, are no suspects.
        """
        found: set[str] = set()
        waiting = list(self.stages[stage].parents)
        while waiting:
            name = waiting.pop()
            if name in found or name in given or self.stages[name].role is Role.INPUT:
                continue
            found.add(name)
            waiting.extend(self.stages[name].parents)
        return tuple(name for name in self.stages if name in found)


@cache
def dataflow(recipe: "Recipe") -> Dataflow:
    """Return the dataflow of a recipe.

    Raises ValueError for a recipe whose operands packs cannot hold.
    """
    if (recipe.input, recipe.output) != ("bf16", "bf16"):
        raise ValueError(
            f"recipe {recipe.name!r} has input {recipe.input} and output {recipe.output}; packs hold bf16"
        )
    if recipe.tiles.splits > 1:
        raise ValueError(
            f"recipe {recipe.name!r} splits the keys {recipe.tiles.splits} times; packs hold the stages of one split"
        )
    stages = _Builder(recipe).stages()
    return Dataflow(stages=Registry("stage", ((stage.name, stage) for stage in stages)))


class _Builder:
    def __init__(self, recipe: "Recipe") -> None:
        self.recipe = recipe
        self.copies = copies(recipe)

    def stages(self) -> Iterator[Stage]:
        yield Stage(name="cu_seqlens", view=View.I32, axes=("starts",), role=Role.INPUT)
        for name in INPUTS[1:]:
            axes = _KEYS if name in ("k", "v") else _QUERIES
            yield Stage(name=name, view=View.BF16, axes=axes, role=Role.INPUT)
        yield Stage(
            name="cu_seqlens_k",
            view=View.I32,
            axes=("starts",),
            role=Role.INPUT,
            needs="key_lengths",
        )
        yield Stage(name="sink", view=View.F32, axes=("sinks",), role=Role.INPUT, needs="sinks")
        yield from self._operands(backward=False)
        yield self._float("s", _PAIRS, self._taken("s"), masked_optional=True)
        descales = self._descales()
        yield self._float("row_max", _ROWS, ("s", *descales, "sink"))
        yield self._float("p", _PAIRS, ("s", *descales, "row_max"))
        yield from self._codes("p.o")
        yield self._float("row_sum", _ROWS, (*self._summed(), "row_max", "sink"))
        yield self._float("o", _QUERIES, self._taken("o"))
        if self._has_high_precision():
            values = self._copy_of("o", "v").read_by("o")
            parents = (*values, "p", *_EPILOGUE["o"])
            yield Stage(name="high_precision_out", view=View.BF16, axes=_QUERIES, parents=parents)
        yield Stage(name="out", view=View.BF16, axes=_QUERIES, parents=("o",), role=Role.OUTPUT)
        of_lse = ("row_max", "row_sum", *descales, "sink")
        yield self._float("lse", _ROWS, of_lse, role=Role.OUTPUT)
        if self.recipe.has_backward:
            yield from self._backward()

    def _backward(self) -> Iterator[Stage]:
        yield from self._operands(backward=True)
        late = self.recipe.backward.gradient.delta_source == "p_dp"
        if not late:
            yield self._float("delta", _ROWS, self._delta(), backward=True)
        yield self._float("dp", _PAIRS, self._taken("dp"), masked_optional=True, backward=True)
        own = self.recipe.backward.gradient.normalisation == "row_softmax"
        yield self._float("p.dv", _PAIRS, ("s", "sink" if own else "lse"), backward=True)
        yield from self._codes("p.dv")
        if late:
            yield self._float("delta", _ROWS, self._delta(), backward=True)
        yield self._float("ds", _PAIRS, ("p.dv", "dp", "delta"), backward=True)
        yield from self._codes("ds", "ds.dq", "ds.dk")
        yield Stage(
            name="dsink",
            view=View.F32,
            axes=("sinks",),
            parents=("sink", "s" if own else "lse", "delta"),
            role=Role.OUTPUT,
            backward=True,
            needs="sinks",
        )
        for name in GRADIENTS:
            yield Stage(
                name=name,
                view=View.BF16,
                axes=_QUERIES if name == "dq" else _KEYS,
                parents=self._taken(name),
                role=Role.OUTPUT,
                backward=True,
            )

    @staticmethod
    def _float(
        name: str,
        axes: tuple[str, ...],
        parents: tuple[str, ...],
        *,
        role: Role = Role.STAGE,
        masked_optional: bool = False,
        backward: bool = False,
    ) -> Stage:
        return Stage(
            name=name,
            view=View.F32,
            axes=axes,
            parents=parents,
            role=role,
            masked_optional=masked_optional,
            backward=backward,
        )

    def _operands(self, *, backward: bool) -> Iterator[Stage]:
        """Yield the codes of q, k, v and do that a pass makes."""
        for tensor in HEADS:
            for copy in self.copies:
                if (copy.tensor, copy.backward) == (tensor, backward):
                    yield from copy.stages(self._made_from(copy))

    def _codes(self, *names: str) -> Iterator[Stage]:
        """Yield the codes of pairs, by the names that their copies may have."""
        for copy in self.copies:
            if copy.name in names:
                values = self._pair_values(copy)
                yield from copy.stages((*values, *self._folded_into(copy)))

    def _made_from(self, copy: Copy) -> tuple[str, ...]:
        """Return the stages that a copy of an input is made from."""
        if copy.source is None:
            return self._values(copy.tensor)
        return tuple(self._copy(copy.source).values())

    def _pair_values(self, copy: Copy) -> tuple[str, ...]:
        """Return the stages that the codes of pairs are made from, but for scales that they take."""
        if copy.tensor == "ds":
            return ("ds",)
        if copy.name == "p.o":
            return ("p", "s", "row_max") if copy.operand.scope == "largest_score" else ("p",)
        if self.recipe.backward.gradient.p_for_dv == "recomputed":
            return ("p.dv",)
        return (*self._weights(), "row_max", "lse")  # brought from the one base to the other

    def _weights(self) -> tuple[str, ...]:
        """Return the stages that say what P is in O."""
        copy = self._copy("p.o")
        guarded = ("p",) if self.recipe.o.guarded else ()
        return (*guarded, *copy.values(), *self._folded_into(copy))

    def _summed(self) -> tuple[str, ...]:
        """Return the stages that the row sum adds up."""
        return ("p",) if self.recipe.softmax.row_sum_of == "p" else self._weights()

    def _delta(self) -> tuple[str, ...]:
        """Return the stages that delta is computed from."""
        dout = self._values("do")
        match self.recipe.backward.gradient.delta_source:
            case "returned_out":
                return (*dout, "out")
            case "unrounded_out":
                return (*dout, "o")
            case "high_precision_out":
                return (*dout, "high_precision_out")
            case "quantized_dout":
                copy = next(
                    one for one in self.copies if one.tensor == "do" and "dp" in one.products
                )
                return (*(copy.values() if copy.coded else dout), "out")
            case "p_dp":
                return ("p.dv", "dp", *(one for one in dout if one != "dout"))

    def _has_high_precision(self) -> bool:
        """Return whether the forward also makes an O of P in bfloat16, for delta."""
        if not self.recipe.has_backward:
            return False
        return self.recipe.backward.gradient.delta_source == "high_precision_out"

    def _copy_of(self, product: str, tensor: str) -> Copy:
        return next(one for one in self.copies if one.tensor == tensor and product in one.products)

    def _copy(self, name: str) -> Copy:
        return next(copy for copy in self.copies if copy.name == name)

    def _values(self, tensor: str, product: str = "") -> tuple[str, ...]:
        """Return the stages that hold the values of a tensor before they are codes."""
        if tensor != "do":
            return ("p.dv" if (tensor, product) == ("p", "dv") else tensor,)
        folds = self.recipe.backward.gradient.normalisation == "fold_into_dout"
        return ("dout", "lse") if folds else ("dout",)

    def _folded_into(self, copy: Copy) -> Iterator[str]:
        """Yield the scales that the values of pairs take before they become codes."""
        for other in self.copies:
            for product in other.folded:
                if product in copy.products:
                    yield other.scales

    def _descales(self) -> tuple[str, ...]:
        """Return the descales of q and k, which the factor of the scores takes: S is of codes alone."""
        of_s = (copy for copy in self.copies if copy.descaled and "s" in copy.products)
        return tuple(copy.scales for copy in of_s)

    def _taken(self, name: str) -> tuple[str, ...]:
        """Return what a product is computed from."""
        product = self.recipe.product(name)
        taken: list[str] = []
        for use, _ in self.recipe.uses():
            of_product, tensor = use.split(".")
            if of_product != name:
                continue
            copy = next(one for one in self.copies if one.tensor == tensor and name in one.products)
            taken += copy.read_by(name)
            guarded = product.guarded and self.recipe.guard_operands == "inputs"
            guarded |= product.corrected  # its start is made of the inputs
            if guarded or not copy.coded or (product.guarded and tensor not in HEADS):
                taken += self._values(tensor, name)
        return tuple(dict.fromkeys((*taken, *_EPILOGUE.get(name, ()))))


def visible_pairs(case: CaseSpec, place: Place) -> npt.NDArray[np.bool_]:
    """Return which [queries, keys] of a document's array are legal pairs."""
    if place.document is None:
        raise ValueError(f"{place.name} has no pairs; they belong to an array of one document")
    return case.visible(place.document)
