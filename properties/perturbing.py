"""Perturbation: tokens are changed, and outputs that may not depend on any of them must keep their bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flamia_ref.leakage.legal import QUERY_SIDE, LegalPairs, Severity
from flamia_ref.packing import Documents, Mask
from flamia_ref.properties.data import Inputs
from flamia_ref.properties.drawn import BLOCK, Example
from flamia_ref.properties.subject import (
    Difference,
    PropertyFailure,
    Results,
    Subject,
    first_difference,
    unequal,
)

Bools = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]

INSIDE = frozenset({Severity.FORWARD, Severity.PAST, Severity.BACKWARD})
"""Illegal dependencies within a document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What one example was worth.

    Attributes:
        elements: results that were compared.
        numbers: how many of them are no NaN, by output; outputs of which none were compared are left out.
        shared: whether a changed token and an output that may not see it are in one block of 32 tokens; None where
            nothing was changed.
        alive: whether an output that may see a changed token moved; None where nothing was changed.
    """

    elements: int
    numbers: Mapping[str, int] = field(default_factory=dict, hash=False)
    shared: bool | None = None
    alive: bool | None = None


def mask_of(inputs: Inputs) -> Mask:
    """Which keys the queries of the inputs see: causal, and by their window."""
    documents = Documents(inputs.starts)
    window = (None, None) if inputs.window is None else (inputs.window, 0)
    return Mask(documents, documents, True, window)


def perturbed(
    subject: Subject,
    example: Example,
    before: Inputs,
    after: Inputs,
    severities: frozenset[Severity],
    *,
    gradients: bool,
    cause: str = "",
) -> Observed:
    """Run both inputs; fail where an output moves by changed tokens all of which are illegal for it, in these ways.

    `cause` says what was changed, if not the example's edits. Raises PropertyFailure.
    """
    old = subject.run(before, example, gradients=gradients)
    new = subject.run(after, example, gradients=gradients)
    changed = before.changed_tokens(after)
    pairs = LegalPairs(mask_of(before))
    rows = {name: forbidden(pairs, name, changed, severities) for name in old}
    found = first_difference(old, new, rows)
    if found is not None:
        cause = cause or "; ".join(map(str, example.edits))
        why = _why(pairs, changed, found)
        message = f"{subject.name}: {cause} changes {replace(found, why=why)}"
        raise PropertyFailure(message, example)
    return Observed(
        elements=sum(int(rows[name].sum()) * old[name][0].size for name in old if len(old[name])),
        numbers=numbers_of({name: x[rows[name]] for name, x in old.items()}),
        shared=any(
            _shares(before, rows[name], tokens) for name in old for tokens in changed.values()
        ),
        alive=_moved(old, new),
    )


def forbidden(
    pairs: LegalPairs, output: str, changed: dict[str, Places], severities: frozenset[Severity]
) -> Bools:
    """The tokens of an output to which every changed token is illegal, in one of these ways."""
    tokens = (pairs.mask.queries if output in QUERY_SIDE else pairs.mask.keys).tokens
    rows = np.full(tokens, bool(changed))
    places = np.arange(tokens)[:, None]
    for operand, at in changed.items():
        spans = pairs.spans(output, operand)
        legal = (at >= spans.begin[:, None]) & (at < spans.end[:, None])
        # How bad it is depends on the document and on which side of the row a token is: the ends say it all.
        ways: Any = pairs.severity(output, places, operand, _ends(pairs, operand, at)[None, :])
        meant = np.isin(ways.astype(str), [str(one) for one in severities])
        rows &= ~legal.any(axis=1) & meant.all(axis=1)
    return rows


def _ends(pairs: LegalPairs, operand: str, at: Places) -> Places:
    """The first and the last token of each document among some."""
    documents = pairs.mask.queries if operand in QUERY_SIDE else pairs.mask.keys
    of = np.searchsorted(np.array(documents.offsets), at, side="right")
    return np.array([at[of == one][end] for one in np.unique(of) for end in (0, -1)], np.int64)


def _shares(inputs: Inputs, rows: Bools, tokens: Places) -> bool:
    """Whether a row and a changed token are in one block, counted from the document or over all documents."""
    starts = np.array(inputs.starts)

    def blocks(places: Places) -> tuple[set[tuple[int, int]], set[int]]:
        document = np.searchsorted(starts, places, side="right") - 1
        inside = (places - starts[document]) // BLOCK
        pairs = zip(document.tolist(), inside.tolist(), strict=True)
        return set(pairs), set((places // BLOCK).tolist())

    mine, theirs = blocks(np.flatnonzero(rows)), blocks(tokens)
    return bool(mine[0] & theirs[0] or mine[1] & theirs[1])


def numbers_of(results: Results) -> dict[str, int]:
    """How many results are no NaN, by output. Outputs without elements are left out."""
    nan = np.uint32(0x7F800000)
    return {
        name: int(((x & np.uint32(0x7FFFFFFF)) <= nan).sum())
        for name, x in results.items()
        if x.size
    }


def moved_outputs(old: Results, new: Results) -> set[str]:
    """The outputs of which a bit differs. A NaN equals any other."""
    return {name for name in old if name in new and unequal(old[name], new[name]).any()}


def _moved(old: Results, new: Results) -> bool:
    return bool(moved_outputs(old, new))


def _why(pairs: LegalPairs, changed: dict[str, Places], found: Difference) -> str:
    operand = next(iter(changed))
    token = changed[operand][:1]
    severity = pairs.severity(found.output, [found.place[0]], operand, token)[0]
    return f", which may not depend on it ({str(severity).replace('_', ' ')})"
