"""Operands of a recipe from codes and scales that a kernel, or anyone, gave, and the checks of such operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from flamia_ref._backend import Array
from flamia_ref._errors import shown, unknown_name
from flamia_ref.attention import inputs
from flamia_ref.attention.computed import computed_recipe
from flamia_ref.attention.copies import INPUT_USES, copy_names, needs_high
from flamia_ref.attention.prepared import OperandCopy, Prepared
from flamia_ref.attention.product import Operand, Scope
from flamia_ref.attention.recipe import Recipe
from flamia_ref.attention.stages import input_of
from flamia_ref.formats import PRESETS
from flamia_ref.packing import Documents, Mask
from flamia_ref.packing.tiles import BLOCK

_PARTS = ("codes", "scales", "token_scales")
_QUERY_INPUTS = ("q", "do")


def operands_from(
    arrays: Mapping[str, Any],
    recipe: Recipe | str,
    *,
    guards: Mapping[str, Any] | None = None,
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
) -> Prepared:
    """Operands from codes and scales by stage name, such as "q.codes", "q.scales", "k.s.codes", as the trace has them.

    Operands in bfloat16 have codes too here: uint16 [tokens, heads, channels]. `guards`: the bfloat16 codes of "q",
    "k", "v" or "do" that guarded blocks take. Layouts of kernels are not made.

    `cu_seqlens`, `cu_seqlens_k`: the documents that the scales were taken in, as in `forward`. The stages then refuse
    others; without them scales that were taken in other documents of as many blocks cannot be told.

    Raises: ValueError or TypeError of one line for unknown names, missing codes or scales, shapes and types.
    """
    chosen = computed_recipe(recipe)
    by_name = _by_name(chosen)
    found: dict[str, dict[str, Any]] = {}
    for stage, x in _mapping("arrays", arrays, "stage names such as 'q.codes'").items():
        name, _, part = stage.rpartition(".") if isinstance(stage, str) else ("", "", "")
        if name not in by_name or part not in _parts(by_name[name]):
            allowed = [f"{name}.{part}" for name, at in by_name.items() for part in _parts(at)]
            raise unknown_name("operand", stage, allowed)
        found.setdefault(name, {})[part] = x
    given = _mapping("guards", {} if guards is None else guards, "'q', 'k', 'v' or 'do'")
    operands = checked_operands(
        Prepared(
            operands={name: _copy(parts) for name, parts in found.items()},
            guards={tensor: _copy({"codes": x}) for tensor, x in given.items()},
            recipe=chosen,
        )
    )
    queries, keys = _documents(operands, cu_seqlens, cu_seqlens_k)
    check_scales(operands, queries, keys)
    return replace(operands, queries=queries, keys=keys)


def checked_operands(operands: Prepared) -> Prepared:
    """`operands` in this machine's byte order, every array of the type and shape that its use and the others give.

    Raises: ValueError or TypeError of one line.
    """
    recipe = operands.recipe
    by_name, names = _by_name(recipe), copy_names(recipe)
    copies: dict[str, OperandCopy] = {}
    shapes: dict[
        str, tuple[str, tuple[int, ...]]
    ] = {}  # of each input, and where it was first seen
    for name, given in _mapping("operands", operands.operands, "names such as 'q'").items():
        if name not in by_name:
            raise unknown_name("operand", name, by_name)
        tensor = input_of(next(use for use, one in names.items() if one == name))
        copies[name] = _checked_copy(name, given, by_name[name])
        stage, shape = shapes.setdefault(tensor, (f"{name}.codes", tuple(copies[name].codes.shape)))
        if tuple(copies[name].codes.shape) != shape:
            raise ValueError(
                f"{name}.codes has shape {tuple(copies[name].codes.shape)} and {stage} {shape}; they are codes of one"
                " input, so they must be equal"
            )
    guards: dict[str, OperandCopy] = {}
    for tensor, guard in _mapping("guards", operands.guards, "'q', 'k', 'v' or 'do'").items():
        _check_guard_is_taken(recipe, tensor)
        if tensor not in shapes:
            raise ValueError(f"guards has {tensor!r} without codes of {tensor}; give them too")
        copy = _held(f"guards[{tensor!r}]", guard)
        stage, shape = shapes[tensor]
        codes = inputs.array_of(
            f"guards[{tensor!r}]",
            copy.codes,
            np.uint16,
            shape,
            f"bfloat16 codes beside {stage} must be of shape",
        )
        guards[tensor] = replace(copy, codes=codes)
    return replace(operands, operands=copies, guards=guards)


def operand_arrays(operands: Prepared) -> Iterator[tuple[str, Array]]:
    """All arrays of operands that stages read, by the names that messages have."""
    for name, copy in operands.operands.items():
        for part in _PARTS:
            x = getattr(copy, part)
            if x is not None:
                yield f"{name}.{part}", x
    for tensor, copy in operands.guards.items():
        yield f"guards[{tensor!r}]", copy.codes


def check_scales(operands: Prepared, queries: Documents | None, keys: Documents | None) -> None:
    """Refuse scales of another shape than codes, blocks and documents give, where the documents are known."""
    for name, operand in _by_name(operands.recipe).items():
        copy = operands.operands.get(name)
        if copy is None or copy.scales is None:
            continue
        if operand.scope is Scope.HEAD:
            _check_descales(name, copy, queries if name.startswith("q") else keys)
            continue
        use = next(use for use, one in copy_names(operands.recipe).items() if one == name)
        documents = queries if input_of(use) in _QUERY_INPUTS else keys
        rows, columns = PRESETS[operand.format].checked_block(operand.block)
        tokens, heads, channels = copy.codes.shape
        blocks = 1 if columns == "all" else -(-channels // int(columns))
        if rows == 1:
            count = tokens
        elif documents is None:
            count = copy.scales.shape[0]
        else:
            size = BLOCK if rows == "all" else min(int(rows), BLOCK)
            count = sum(-(-length // size) for length in documents.lengths)
        if tuple(copy.scales.shape) != (count, heads, blocks):
            raise ValueError(
                f"{name}.scales has shape {tuple(copy.scales.shape)}; for codes {tuple(copy.codes.shape)} and blocks of"
                f" {rows}x{columns} that start at each document it must be {(count, heads, blocks)}"
            )


def _check_descales(name: str, copy: OperandCopy, documents: Documents | None) -> None:
    """Refuse descales of another shape than one for each document and key/value head."""
    shape = tuple(getattr(copy.scales, "shape", ()))
    count, heads = (*shape, 0, 0)[:2]
    fits = len(shape) == 2 and heads and copy.codes.shape[1] % heads == 0
    if not fits or (documents is not None and count != len(documents)):
        wanted = "documents" if documents is None else str(len(documents))
        raise ValueError(
            f"{name}.scales has shape {shape}; for one descale a document and key/value head it must"
            f" be ({wanted}, kv_heads), kv_heads a divisor of the {copy.codes.shape[1]} heads"
        )


def _by_name(recipe: Recipe) -> dict[str, Operand]:
    """The operand of each copy, by its first use."""
    names = copy_names(recipe)
    return {name: recipe.operand(use) for use, name in reversed(names.items())}


def _mapping(name: str, given: Any, keys: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} is {shown(given)}; it must be a mapping of {keys} to arrays")
    return given


def _parts(operand: Operand) -> tuple[str, ...]:
    """What a copy consists of."""
    if operand.scope is Scope.HEAD:
        return ("codes", "scales")
    if operand.format not in PRESETS:
        return ("codes",)
    if operand.has_token_scales:
        return ("codes", "scales", "token_scales")
    return ("codes", "scales")


def _held(name: str, copy: Any) -> OperandCopy:
    if not isinstance(copy, OperandCopy):
        raise TypeError(
            f"{name} is a {type(copy).__name__}; it must be an OperandCopy, as prepare and operands_from make it"
        )
    return copy


def _checked_copy(name: str, given: Any, operand: Operand) -> OperandCopy:
    """A copy with the parts of its operand, and no others."""
    copy = _held(f"operand {name!r}", given)
    parts = _parts(operand)
    missing = [part for part in parts if getattr(copy, part) is None]
    if missing:
        raise ValueError(f"operand {name!r} has no {', '.join(missing)}; give them too")
    surplus = [part for part in _PARTS if part not in parts and getattr(copy, part) is not None]
    if surplus:
        raise ValueError(
            f"operand {name!r} has {', '.join(surplus)}, which {operand.format} with scope"
            f" {operand.scope.value!r} does not take; leave them out"
        )
    found = {}
    for part in parts:
        wide = operand.format == "bf16" and part == "codes"
        stage = f"{name}.{part}"
        descales = operand.scope is Scope.HEAD and part == "scales"
        kind = np.float32 if descales else np.uint16 if wide else np.uint8
        found[part] = inputs.array_of(stage, getattr(copy, part), kind)
        if found[part].ndim != 3 and not descales:
            raise ValueError(
                f"{stage} has shape {shown(tuple(found[part].shape))}; it must have three axes"
            )
    if "token_scales" in found:
        wanted = (*found["codes"].shape[:2], 1)
        if tuple(found["token_scales"].shape) != wanted:
            raise ValueError(
                f"{name}.token_scales has shape {tuple(found['token_scales'].shape)}; for codes"
                f" {tuple(found['codes'].shape)} it must be (tokens, heads, 1) = {wanted}"
            )
    return replace(copy, **found)


def _check_guard_is_taken(recipe: Recipe, tensor: Any) -> None:
    if tensor not in INPUT_USES:
        raise unknown_name("guard", tensor, INPUT_USES)
    taken = [
        name for name, uses in INPUT_USES.items() if any(needs_high(recipe, use) for use in uses)
    ]
    if recipe.guard_operands != "inputs" or tensor not in taken:
        takes = ", ".join(taken) if recipe.guard_operands == "inputs" and taken else "no guards"
        raise ValueError(
            f"guards has {tensor!r}, but recipe {recipe.name!r} takes {takes}; leave it out"
        )


def _documents(
    operands: Prepared, cu_seqlens: Any, cu_seqlens_k: Any
) -> tuple[Documents | None, Documents | None]:
    """The documents of queries and of keys, None where nobody said."""
    tokens: dict[bool, int] = {}
    held: set[str] = set()
    for use, name in copy_names(operands.recipe).items():
        if name in operands.operands:
            held.add(input_of(use))
            tokens[input_of(use) in _QUERY_INPUTS] = operands.operands[name].codes.shape[0]
    queries = keys = None
    if cu_seqlens is not None:
        queries = Documents.from_cu_seqlens(cu_seqlens, tokens.get(True))
    if cu_seqlens_k is not None:
        keys = Documents.from_cu_seqlens(cu_seqlens_k, tokens.get(False), "cu_seqlens_k")
    elif cu_seqlens is not None and held - {"do"}:  # dO alone says nothing of the keys
        keys = Documents.from_cu_seqlens(cu_seqlens, tokens.get(False))
    if queries is not None and keys is not None:
        Mask(queries, keys)  # equally many
    return queries, keys


def _copy(parts: Mapping[str, Any]) -> OperandCopy:
    return OperandCopy(
        codes=parts.get("codes"),
        scales=parts.get("scales"),
        token_scales=parts.get("token_scales"),
        row_wise=None,
        column_wise=None,
    )
