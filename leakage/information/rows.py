"""What a row of an output receives at most: the scales that it takes elements of, together."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flamia_ref.attention.product import Use
from flamia_ref.leakage.information.bounds import UseBound
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.sharing.coupling import INPUT_OF, PAIR_USES, Coupled
from flamia_ref.leakage.sharing.illegal import RETURNED
from flamia_ref.leakage.sharing.structures import Structure


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBound:
    """What a row of an output, that of one token and head, receives at most of what it must not see.

    All inputs that the row may see are fixed, whatever they are, and those that it must not see take all finite values:
    then it takes at most 2^bits values. Of what they change, it sees only scales: those of the blocks that hold legal
    and illegal tokens, each of which has so many values as its rule gives. All rows of a document before a cut, which
    must not see those after it, see the same scales: the bound holds for all of them together too.

    Attributes:
        output: "out", "lse", "dq", "dk" or "dv".
        severity: of what it must not see.
        uses: the uses by which it does.
        bits: the sum over the scales of these uses, equal ones once; 0, a proof, where nothing is illegal; None where
            there is no bound.
        unbounded: why there is none, in words.
    """

    output: str
    severity: Severity
    uses: tuple[Use, ...]
    bits: float | None
    unbounded: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SeverityBound:
    """What a row receives at most, of the output that can receive most, with one severity.

    Attributes:
        severity: the severity.
        rows: the bound of each output that can receive something; none where the bound is 0.
    """

    severity: Severity
    rows: tuple[RowBound, ...]

    @property
    def row(self) -> float | None:
        """Bits a row and head, of any output: 0 is a proof; None where there is no bound."""
        found = [one.bits for one in self.rows]
        return None if None in found else max((x for x in found if x is not None), default=0.0)

    @property
    def unbounded(self) -> str | None:
        """Why there is no bound, in words."""
        reasons = dict.fromkeys(one.unbounded for one in self.rows if one.unbounded)
        return "; ".join(reasons) or None

    @property
    def uses(self) -> tuple[Use, ...]:
        """The uses by which there is something."""
        found = {use for one in self.rows for use in one.uses}
        return tuple(use for use in Use if use in found)


def severity_bounds(bounds: Iterable[UseBound], structure: Structure) -> tuple[SeverityBound, ...]:
    """The bound of each severity, and of each output in it."""
    by_use = {one.use: one for one in bounds}
    found = []
    for severity in Severity:
        illegal = {one.output for one in structure.illegal if severity in one.counts}
        rows = [
            _row(output, severity, by_use, structure) for output in RETURNED if output in illegal
        ]
        found.append(SeverityBound(severity=severity, rows=tuple(rows)))
    return tuple(found)


def _row(
    output: str, severity: Severity, bounds: dict[Use, UseBound], structure: Structure
) -> RowBound:
    def here(one: object) -> bool:
        illegal = getattr(one, "illegal", ())
        return any(x.output == output and severity in x.severities for x in illegal)

    uses = tuple(use for use, one in bounds.items() if here(one))
    reason = _no_bound(
        [knob.knob for knob in structure.knobs if here(knob)], [bounds[use] for use in uses]
    )
    if reason is None and not _alone_in(uses, output, severity, structure):
        reason = "it comes of more than one use together"
    bits = None
    if reason is None:
        scales: dict[object, float] = {}
        for use in uses:
            key = _scales_of(use, structure)
            scales[key] = max(scales.get(key, 0.0), bounds[use].row)
        bits = math.fsum(scales.values())
    return RowBound(output=output, severity=severity, uses=uses, bits=bits, unbounded=reason)


def _no_bound(knobs: Sequence[str], uses: Sequence[UseBound]) -> str | None:
    """Why there is no bound by these."""
    if knobs:
        return f"{', '.join(knobs)} lets values of masked tokens through"
    without = [str(one.use) for one in uses if one.unbounded]
    return f"{', '.join(without)} has none" if without else None


def _alone_in(uses: tuple[Use, ...], output: str, severity: Severity, structure: Structure) -> bool:
    """Whether nothing illegal is left once the scales of these uses are constants: then only they can tell."""
    left = _with_constants(structure, frozenset(uses)).illegal
    return not any(one.output == output and severity in one.counts for one in left)


@functools.lru_cache(maxsize=32)
def _with_constants(structure: Structure, uses: frozenset[Use]) -> Structure:
    """The structure with the scales of some uses, and of those that take their codes, as constants."""
    coupling = structure.coupling
    constant = {
        use: Coupled() if use in uses or one.codes_of in uses else one
        for use, one in coupling.uses.items()
    }
    return replace(structure, coupling=replace(coupling, uses=constant))


def _scales_of(use: Use, structure: Structure) -> object:
    """What names the scales of a use: alike for two that quantize one input in the same blocks by the same rule."""
    recipe = structure.recipe
    operand = recipe.operand(use)
    while operand.same_codes_as is not None and use not in PAIR_USES:
        operand = recipe.operand(operand.same_codes_as)
    if use in PAIR_USES or (INPUT_OF[use] == "dout" and structure.coupling.lse_in_dout):
        return use
    return INPUT_OF[use], operand.format, operand.block, operand.scope, operand.static_scale
