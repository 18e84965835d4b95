"""Kernels that take one dense sequence, over packed documents: one call a document."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flamia_ref.packing import Documents, Mask

Array = np.ndarray[Any, Any]

ROWS = {"out": "q", "dq": "q", "dk": "k", "dv": "v"}
"""The input whose rows a result has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document of a case: its number, its lengths, and its part of q, k, v and dout [rows, heads, head_dim]."""

    index: int
    queries: int
    keys: int
    parts: Mapping[str, Array]

    def __getitem__(self, name: str) -> Array:
        """The rows of an input."""
        return self.parts[name]

    def __contains__(self, name: str) -> bool:
        """Whether the case has this input."""
        return name in self.parts


def mask_of(
    cu_seqlens: Any,
    cu_seqlens_k: Any = None,
    *,
    causal: bool,
    window: Any = None,
    alignment: str = "bottom_right",
) -> Mask:
    """The mask of a case, from the keywords of the protocol."""
    queries = Documents.from_cu_seqlens(cu_seqlens, None)
    keys = queries if cu_seqlens_k is None else Documents.from_cu_seqlens(cu_seqlens_k, None)
    return Mask.of(queries, keys, causal=causal, window=window, alignment=alignment)


def by_document(
    mask: Mask,
    tensors: Mapping[str, Array | None],
    run: Callable[[Document], Mapping[str, Array]],
    *,
    gives: tuple[str, ...],
) -> dict[str, Array]:
    """Call `run` on each document and put the results behind each other.

    A document without queries, or without keys, is not launched: its queries see nothing, so "out" and the gradients
    are 0 and "lse" is -infinity, which is what a kernel owes such rows.

    Args:
        mask: the documents.
        tensors: q, k, v and dout [tokens, heads, head_dim] by name; None for what there is not.
        run: gives arrays of one document: "out" and gradients [rows, heads, head_dim], "lse" [heads, rows], "dsink"
            [heads], which is summed.
        gives: the names that it gives.

    Returns: the arrays of all documents, "lse" [heads, tokens].
    """
    found: dict[str, list[Array]] = {name: [] for name in gives}
    present = {name: x for name, x in tensors.items() if x is not None}
    heads = present["q"].shape[1]
    for index, (rows, columns) in enumerate(zip(mask.queries, mask.keys, strict=True)):
        side = {"q": rows, "dout": rows, "k": columns, "v": columns}
        document = Document(
            index=index,
            queries=rows.stop - rows.start,
            keys=columns.stop - columns.start,
            parts={name: x[side[name]] for name, x in present.items()},
        )
        results = (
            run(document)
            if document.queries and document.keys
            else {name: _nothing(name, document, heads) for name in gives}
        )
        for name in gives:
            found[name].append(results[name])
    return {name: _joined(name, parts) for name, parts in found.items()}


def _joined(name: str, parts: list[Array]) -> Array:
    if name == "dsink":
        return np.asarray(np.sum(parts, axis=0, dtype=np.float32))
    return np.concatenate(parts, axis=1 if name == "lse" else 0)


def _nothing(name: str, document: Document, heads: int) -> Array:
    if name == "lse":
        return np.full((heads, document.queries), -np.inf, np.float32)
    if name == "dsink":
        return np.zeros(heads, np.float32)
    return np.zeros_like(document[ROWS[name]])
