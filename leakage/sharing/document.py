"""The JSON form of a structure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flamia_ref.leakage.sharing.uses import UseIllegal

if TYPE_CHECKING:
    from flamia_ref.leakage.sharing.structures import Structure

SCHEMA = "flamia-ref leak structure"
SCHEMA_VERSION = 1
_MOST_DOCUMENTS = 1000  # whose lengths are listed


def render(structure: Structure) -> str:
    """Return the structure as indented JSON that ends with a newline."""
    mask = structure.mask
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "recipe": structure.recipe.name,
        "evidence": structure.recipe.label,
        "documents": len(mask.queries),
        "tokens": mask.queries.tokens,
        "keys": mask.keys.tokens,
        "lengths": _lengths(mask.queries.lengths),
        "lengths_k": _lengths(mask.keys.lengths),
        "causal": mask.causal,
        "window": list(mask.window),
        "alignment": mask.alignment,
        "grid": structure.grid,
        "legal": structure.legal,
        "uses": [
            {
                "use": one.use,
                "operand": one.operand,
                "scope": one.scope,
                "couples": one.couples,
                "shares": one.shares,
                "guarded": one.guarded,
                "folded_into": one.folded_into,
                "source": one.source,
                "where": one.where,
                "severity": one.severity,
                "illegal": _illegal(one.illegal),
            }
            for one in structure.uses
        ],
        "knobs": [{"knob": one.knob, "illegal": _illegal(one.illegal)} for one in structure.knobs],
        "illegal": [
            {
                "output": one.output,
                "input": one.input,
                "pairs": one.pairs,
                "severity": one.severity,
                "counts": dict(one.counts),
                "later": one.later,
                "earlier": one.earlier,
            }
            for one in structure.illegal
        ],
        "notes": list(structure.notes),
        "examples": [
            {name: getattr(one, name) for name in one.__slots__} for one in structure.examples
        ],
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _lengths(lengths: Sequence[int]) -> list[int] | None:
    """The lengths of documents, None of very many."""
    return list(lengths) if len(lengths) <= _MOST_DOCUMENTS else None


def _illegal(found: Sequence[UseIllegal]) -> list[dict[str, Any]]:
    return [{name: getattr(one, name) for name in one.__slots__} for one in found]
