"""All operands of a recipe in one pass, as a kernel's prologue emits them: `prepare` and `prepare_dout`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from flamia_ref import _backend
from flamia_ref._backend import Array
from flamia_ref._errors import unknown_name
from flamia_ref.attention import inputs, smoothing
from flamia_ref.attention.computed import computed_recipe
from flamia_ref.attention.copies import (
    INPUT_USES,
    OVER_CHANNELS,
    Copy,
    Maker,
    copy_names,
    needs_high,
    uses_of,
)
from flamia_ref.attention.kernel_layouts import KernelLayout, column_wise, row_wise
from flamia_ref.attention.product import Operand, Scope, Use
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.sides import BLOCK
from flamia_ref.packing import Documents

_HIGH = Operand(format="bf16", scope=Scope.UNIT)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OperandCopy:
    """One copy of an input, and both of its orientations where the recipe uses them. A pytree once JAX is in use.

    Attributes:
        codes: [tokens, heads, channels], as the trace has them; bfloat16 ones as uint16.
        scales: as the trace has them, float32 descales among them, None where none follows from the values.
        token_scales: powers of two of whole tokens [tokens, heads, 1], or None.
        row_wise: for the uses that contract over channels, or None.
        column_wise: for the uses that contract over tokens, or None; none is made of blocks of 16 tokens.
    """

    codes: Array
    scales: Array | None
    token_scales: Array | None
    row_wise: KernelLayout | None
    column_wise: KernelLayout | None

    def __post_init__(self) -> None:
        names = ("codes", "scales", "token_scales", "row_wise", "column_wise")
        _backend.register_value_type(OperandCopy, data=names, meta=())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """The operands of a recipe. A pytree once JAX is in use.

    Attributes:
        operands: every copy by the name that its stages have, such as "q" or "k.s".
        guards: what guarded blocks take, by input: bfloat16 values before quantization, without scales. Empty for
            recipes that guard nothing, or with guard_operands "codes", whose values follow from the copies. Of a
            recipe that corrects S: the means that were taken off "q", each at the tokens of its tile, and "k" as it
            was before it was quantized.
        recipe: the recipe.
        queries, keys: the documents that they were made for, None where nobody said.
    """

    operands: Mapping[str, OperandCopy]
    guards: Mapping[str, OperandCopy]
    recipe: Recipe
    queries: Documents | None = None
    keys: Documents | None = None

    def __post_init__(self) -> None:
        meta = ("recipe", "queries", "keys")
        _backend.register_value_type(Prepared, data=("operands", "guards"), meta=meta)

    def operand(self, use: Use | str) -> OperandCopy:
        """The copy that a use takes, by its name such as "dk.q". Raises ValueError for a use that is not prepared."""
        names = {str(use): name for use, name in copy_names(self.recipe).items()}
        found = {use: name for use, name in names.items() if name in self.operands}
        if str(use) not in found:
            raise unknown_name("use of prepared operands", use, found)
        return self.operands[found[str(use)]]


def prepare(
    q: Any,
    k: Any,
    v: Any,
    recipe: Recipe | str,
    *,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
) -> Prepared:
    """The operands of q [tokens, heads, head_dim], k and v [keys, kv_heads, ...] in forward and backward.

    Each copy is quantized once; its orientations, and copies that are promoted from it, are made from its codes.

    Args: as of `forward`.

    Returns: a `Prepared` in the library of the inputs.

    Raises: as `forward`.
    """
    chosen = computed_recipe(recipe)
    given = inputs.check(
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        causal=True,
        alignment="bottom_right",
        window=None,
        softmax_scale=None,
        softcap=None,
        sink=None,
    )
    mask = given.shape.mask
    documents = {"q": mask.queries, "k": mask.keys, "v": mask.keys}
    arrays = {"q": given.q, "k": given.k, "v": given.v}
    return _Pass(arrays, documents, chosen, given.namespace, given.device).prepared()


def prepare_dout(dout: Any, recipe: Recipe | str, *, cu_seqlens: Any = None) -> Prepared:
    """The operands of dO [tokens, heads, value_dim] in the backward.

    Args:
        dout: what the products take: with gradient.normalisation "fold_into_dout" dO', in float32, as preprocessing
            leaves it, otherwise the gradient of out, which is rounded to the recipe's input format.
        recipe: a `Recipe`, or a name in `RECIPES`.
        cu_seqlens: the documents of the queries.

    Returns: a `Prepared` with the copies of dO alone, in the library of `dout`.

    Raises: ValueError or TypeError of one line.
    """
    chosen = computed_recipe(recipe)
    inputs.check_values("dout", dout, inputs.DTYPES)
    documents = Documents.from_cu_seqlens(cu_seqlens, dout.shape[0])
    if 0 in dout.shape[1:]:
        raise ValueError(f"dout has shape {dout.shape}; heads and value_dim must be at least 1")
    namespace, device = _backend.namespace(dout), _backend.device(dout)
    dout = inputs.native(_backend.plain("dout", dout))
    folded = chosen.backward.gradient.normalisation == "fold_into_dout"
    if not folded or dout.dtype != np.float32:
        bits = inputs.rounded_bits({"dout": dout})["dout"]
    else:
        values = _backend.host(dout) if _backend.on_host(dout) else dout
        bits = inputs.float32_bits(inputs.no_gradient(values))
    return _Pass({"do": bits}, {"do": documents}, chosen, namespace, device).prepared()


class _Pass:
    """One pass over some inputs, float32 bits by name, each with its documents."""

    def __init__(
        self,
        arrays: dict[str, Array],
        documents: dict[str, Documents],
        recipe: Recipe,
        compute: ModuleType,
        device: object | None,
    ) -> None:
        self.arrays, self.documents, self.recipe = arrays, documents, recipe
        self.compute, self.device = compute, device
        layout = _backend.namespace(*arrays.values())
        self.fixed_shapes = layout is not compute
        to_layout = _backend.host if self.fixed_shapes else _same
        self.makers = {
            tensor: Maker(
                each, layout, self._to_compute, to_layout, self.fixed_shapes, self._kv_heads()
            )
            for tensor, each in documents.items()
        }

    def _kv_heads(self) -> int:
        """How many; of dO alone, which has no descales, it does not matter."""
        return self.arrays["k"].shape[1] if "k" in self.arrays else 1

    def prepared(self) -> Prepared:
        operands: dict[str, OperandCopy] = {}
        guards: dict[str, OperandCopy] = {}
        for tensor, x in self.arrays.items():
            for name, (copy, uses) in self._copies(tensor, x).items():
                operands[name] = self._operand(copy, tensor, uses)
            guarded = [use for use in INPUT_USES[tensor] if needs_high(self.recipe, use)]
            if guarded and self.recipe.guard_operands == "inputs":
                if self.recipe.product(guarded[0].split(".")[0]).corrected:
                    operand = self.recipe.operand(guarded[0])
                    x = smoothing.correction(x, operand, self.documents[tensor])
                maker = self.makers[tensor]
                guards[tensor] = self._operand(maker.copy(x, _HIGH), tensor, guarded)
        return Prepared(
            operands=operands,
            guards=guards,
            recipe=self.recipe,
            queries=self.documents.get("q", self.documents.get("do")),
            keys=self.documents.get("k"),
        )

    def _copies(self, tensor: str, x: Array) -> dict[str, tuple[Copy, list[Use]]]:
        """Every copy of an input and its uses, those that are promoted after those that they are promoted from."""
        maker, names = self.makers[tensor], copy_names(self.recipe)
        found: dict[str, tuple[Copy, list[Use]]] = {}
        uses = sorted(
            uses_of(self.recipe, tensor),
            key=lambda use: self.recipe.operand(use).promoted_from is not None,
        )
        for use in uses:
            operand, name = self.recipe.operand(use), names[use]
            if name not in found:
                source = operand.promoted_from
                first = (
                    operand
                    if operand.same_codes_as is None
                    else self.recipe.operand(operand.same_codes_as)
                )
                copy = (
                    maker.copy(x, first)
                    if source is None
                    else maker.promoted(found[names[source]][0], operand)
                )
                found[name] = (copy, [])
            found[name][1].append(use)
        return found

    def _operand(self, copy: Copy, tensor: str, uses: list[Use]) -> OperandCopy:
        documents = self.documents[tensor]
        codes, scales = copy.trace()
        if copy.descales is not None:
            scales = _backend.from_bits(copy.descales, np.float32)
        over_channels = any(use in OVER_CHANNELS for use in uses)
        over_tokens = any(use not in OVER_CHANNELS for use in uses)
        over_tokens &= copy.by_token or copy.grid.size == BLOCK
        return OperandCopy(
            codes=self._out(codes),
            scales=self._out(scales),
            token_scales=self._out(copy.token_scales),
            row_wise=self._moved(row_wise(copy, documents)) if over_channels else None,
            column_wise=self._moved(column_wise(copy, documents)) if over_tokens else None,
        )

    def _moved(self, layout: KernelLayout) -> KernelLayout:
        return replace(
            layout,
            payload=self._out(layout.payload),
            scales=self._out(layout.scales),
            token_scales=self._out(layout.token_scales),
        )

    def _out(self, x: Array | None) -> Array | None:
        """An array as callers get it."""
        if x is None or self.compute is not np:
            return None if x is None else self._to_compute(x)
        return np.ascontiguousarray(x)

    def _to_compute(self, x: Array) -> Array:
        return _backend.put(x, self.compute, self.device) if self.fixed_shapes else x


def _same(x: Array) -> Array:
    return x
