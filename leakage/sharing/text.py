"""The text of a structure: a table of the uses, and what is illegal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from flamia_ref.attention.product import Use
from flamia_ref.leakage.legal import QUERY_SIDE, Severity
from flamia_ref.leakage.sharing.illegal import Illegal, worst
from flamia_ref.leakage.sharing.placement import Grid
from flamia_ref.leakage.sharing.uses import UseIllegal, UseStructure, Where

if TYPE_CHECKING:
    from flamia_ref.leakage.sharing.structures import Structure

NAMES = {
    "out": "O",
    "lse": "LSE",
    "delta": "delta",
    "dq": "dQ",
    "dk": "dK",
    "dv": "dV",
    "dout": "dO",
}
"""Outputs and inputs as they are written in the field; q, k and v as they are."""

_PRODUCTS = {"s": "S", "o": "O", "dp": "dP", "dv": "dV", "dq": "dQ", "dk": "dK"}
_TENSORS = {"q": "Q", "k": "K", "v": "V", "do": "dO", "p": "P", "ds": "dS"}
_TRANSPOSED = {Use.DV_P: "P^T", Use.DK_DS: "dS^T"}
_WORDS = {
    Severity.FORWARD: "forward",
    Severity.CROSS_DOCUMENT: "cross-document",
    Severity.PAST: "past",
    Severity.BACKWARD: "backward",
}

_PLACES = (Where.EVERY_TILE, Where.DIAGONAL, Where.BOUNDARY)
_HEADING = (
    "use",
    "operand",
    "format",
    "shares a scale",
    "illegal",
    "outputs <- inputs",
    "severity",
)


def describe(structure: Structure) -> str:
    """Return the structure as lines of text, without a newline at the end."""
    return "\n".join([*_setting(structure), "", *_table(structure), "", *_findings(structure)])


def operand_in_matmul(use: Use) -> str:
    """A use as people write it: "Q in S"."""
    product, tensor = str(use).split(".")
    return f"{_TRANSPOSED.get(use, _TENSORS[tensor])} in {_PRODUCTS[product]}"


def reached(found: Sequence[UseIllegal]) -> str:
    """What depends on what: "O, dQ <- v later; dK <- q, dO earlier"."""
    outputs: dict[tuple[str, str], list[str]] = {}
    for one in found:
        outputs.setdefault((one.input, _direction(one)), []).append(NAMES[one.output])
    inputs: dict[tuple[str, str], list[str]] = {}
    for (name, direction), of in outputs.items():
        inputs.setdefault((", ".join(of), direction), []).append(NAMES.get(name, name))
    return "; ".join(
        f"{of} <- {', '.join(names)} {direction}" for (of, direction), names in inputs.items()
    )


def _direction(one: UseIllegal) -> str:
    flags = (
        (one.earlier and one.later, "both ways"),
        (one.later and not one.earlier, "later"),
        (one.earlier and not one.later, "earlier"),
        (one.other_documents, "other documents"),
    )
    return " and ".join(text for flag, text in flags if flag)


def where(found: Sequence[UseIllegal]) -> str:
    """Where something is illegal, with the outputs where it differs between them."""
    places = dict.fromkeys(sorted((one.where for one in found), key=_PLACES.index))
    if len(places) < 2:
        return next(iter(places), "-")
    parts = []
    for place in places:
        outputs = dict.fromkeys(NAMES[one.output] for one in found if one.where is place)
        parts.append(f"{place} ({', '.join(outputs)})")
    return "; ".join(parts)


def _severity(found: Sequence[UseIllegal]) -> str:
    severities = {severity: 1 for one in found for severity in one.severities}
    return _WORDS[worst(severities)] if severities else "-"


def documents_of(structure: Structure) -> str:
    """The documents and the mask in words."""
    queries, keys = structure.mask.queries, structure.mask.keys
    text = (
        f"{len(queries)} document{'s' * (len(queries) != 1)} of {_lengths(queries.lengths)} tokens"
    )
    if not structure.mask.same_tokens:
        text += f" with {_lengths(keys.lengths)} keys, {structure.mask.alignment}"
    left, right = structure.mask.window
    text += ", causal" if structure.mask.causal else ", full"
    if (left, right) != (None, None):
        text += f", window {_side(left)}, {_side(0 if structure.mask.causal else right)}"
    if structure.grid is Grid.PACK:
        text += ", blocks from the start of the pack"
    return text


def _side(side: int | None) -> str:
    return "all" if side is None else str(side)


def _lengths(lengths: tuple[int, ...]) -> str:
    if len(lengths) <= 8:
        return ", ".join(map(str, lengths))
    return f"{min(lengths)} to {max(lengths)} ({sum(lengths)} together)"


def _setting(structure: Structure) -> Iterator[str]:
    recipe = structure.recipe
    yield f"{recipe.name}, evidence {recipe.label}: what tokens share, from the recipe's data alone"
    yield documents_of(structure)


def _table(structure: Structure) -> Iterator[str]:
    rows: list[Sequence[str]] = [_HEADING]
    for one in structure.uses:
        rows.append(
            (
                str(one.use),
                operand_in_matmul(one.use),
                _format(one),
                one.shares,
                where(one.illegal),
                reached(one.illegal) or "-",
                _severity(one.illegal),
            )
        )
    for knob in structure.knobs:
        found = (where(knob.illegal), reached(knob.illegal), _severity(knob.illegal))
        rows.append((knob.knob, "-", "-", "no scale", *found))
    yield from columns(rows)


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Rows of a table, aligned."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (entry.ljust(width) for entry, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip()


def _format(one: UseStructure) -> str:
    text = one.operand
    if one.source is not None:
        text += f", of {one.source}"
    if one.folded_into is not None:
        text += f", folded into {one.folded_into}"
    if one.guarded:
        text += ", guarded"
    return text


def _findings(structure: Structure) -> Iterator[str]:
    examples = {(one.output, one.input): one for one in reversed(structure.examples)}
    rows = []
    for one in structure.illegal:
        example = examples.get((one.output, one.input))
        counts = ", ".join(f"{count} {_WORDS[severity]}" for severity, count in one.counts.items())
        name = NAMES.get(one.input, one.input)
        row = [f"{NAMES[one.output]} <- {name}", f"{one.pairs} illegal pairs", counts]
        if example is not None:
            out = _place(structure, example.output, example.out_token)
            other = _place(structure, example.input, example.in_token)
            row.append(f"such as {NAMES[one.output]} of {out} <- {name} of {other}")
        else:
            row.append("")
        rows.append(row)
    if rows:
        yield from columns(rows)
        yield ""
    yield from (f"note: {note}" for note in structure.notes)
    yield verdict(structure.recipe.name, structure.illegal)


def verdict(name: str, illegal: Sequence[Illegal]) -> str:
    """The last line."""
    if not illegal:
        return f"{name} is legal here: no output can depend on a token that it must not see, for finite inputs."
    pairs = sum(one.pairs for one in illegal)
    severities = dict.fromkeys(severity for one in illegal for severity in one.counts)
    words = ", ".join(_WORDS[severity] for severity in sorted(severities, key=list(_WORDS).index))
    return f"{name} is ILLEGAL here: {pairs} pairs of tokens, {words}."


def _place(structure: Structure, name: str, token: int) -> str:
    documents = structure.mask.queries if name in QUERY_SIDE else structure.mask.keys
    if len(documents) == 1:
        return f"token {token}"
    document = int(np.searchsorted(documents.offsets, token, side="right")) - 1
    return f"token {token} (document {document}, {token - documents.offsets[document]})"
