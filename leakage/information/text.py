"""The text of a report on capacity: what is a bound, what was seen, and of what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from flamia_ref.leakage.information.changes import Drawn
from flamia_ref.leakage.sharing.text import NAMES, columns, operand_in_matmul

if TYPE_CHECKING:
    from flamia_ref.leakage.information.bounds import UseBound
    from flamia_ref.leakage.information.drawing import EntropyFigure
    from flamia_ref.leakage.information.report import CapacityReport

DRAWN = {
    Drawn.SUFFIX: "suffix",
    Drawn.PAST_QUERIES: "earlier queries",
    Drawn.OTHER_DOCUMENT: "other document",
}
"""What is drawn anew, in words."""


def describe(report: CapacityReport) -> str:
    """Return the report as lines of text, without a newline at the end."""
    return "\n".join(_lines(report))


def _lines(report: CapacityReport) -> Iterator[str]:
    s = report.settings
    yield f"{report.recipe}, evidence {report.evidence}: bits that reach tokens which must not have them, of one head"
    yield ""
    yield (
        f"Bounds of a row of an output (one token, one head), for every finite input: documents of"
        f" {_listed(s.lengths)} tokens, and those drawn below, of {_listed(s.drawn)}; causal, head_dim {s.head_dim}"
    )
    yield from columns(_severities(report))
    for bound in report.severities:
        if bound.unbounded:
            yield f"no bound for {bound.severity.replace('_', '-')}: {bound.unbounded}"
    yield from _uses(report)
    yield ""
    yield (
        f"Entropy of bits that must not move, {s.samples} draws of what they must not depend on, seed {s.seed}:"
        f" a document of {s.length} tokens, cut at {s.cut}"
    )
    yield from _entropies(report.entropies)
    yield ""
    yield from _probes(report)
    yield ""
    yield verdict(report)


def _severities(report: CapacityReport) -> Iterator[Sequence[str]]:
    yield ("severity", "output", "bits a row, at most", "by", "seen")
    for one in report.severities:
        severity = one.severity.replace("_", "-")
        if not one.rows:
            yield (severity, "every", "0, proved", "-", _seen(report.of(one.severity)))
        for row in one.rows:
            yield (
                severity,
                NAMES[row.output],
                "no bound" if row.bits is None else number(row.bits),
                ", ".join(map(operand_in_matmul, row.uses)) or "-",
                _seen([x for x in report.of(one.severity) if x.output == row.output]),
            )


def _seen(entropies: Sequence[EntropyFigure]) -> str:
    lows = [one.entropy.low for one in entropies if one.leaks]
    return f"yes, at least {number(max(lows))} bits (95 %)" if lows else "no"


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths))


def _uses(report: CapacityReport) -> Iterator[str]:
    legal = [one for one in report.uses if one.legal]
    leaking = [one for one in report.uses if not one.legal]
    if leaking:
        yield ""
        yield (
            "Where a use couples tokens; bits of an element of a sample of values, by how far its block's amax can"
            " rise, and whatever the element is; of a row, by the scales that it sees:"
        )
        yield from columns(_rows(leaking))
        for one in leaking:
            if one.unbounded:
                yield f"no bound for {operand_in_matmul(one.use)}: {one.unbounded}"
    if legal:
        names = ", ".join(operand_in_matmul(one.use) for one in legal)
        yield f"Exactly 0 by the structure, a proof, by each of: {names}"


def _rows(uses: Sequence[UseBound]) -> Iterator[Sequence[str]]:
    powers = [growth.powers for growth in next((one.growths for one in uses if one.growths), ())]
    grown = [f"amax to 2^{one}" for one in powers]
    yield (
        "use", "operand", "scales", *grown, "any amax: mean", "largest", "any element",
        "a row sees", "bits a row",
    )  # fmt: skip
    for one in uses:
        if one.unbounded:
            continue
        found = {growth.powers: growth for growth in one.growths}
        yield (
            operand_in_matmul(one.use),
            one.operand,
            str(one.scales),
            *(
                f"{number(found[power].mean)} (to {number(found[power].most)})"
                if power in found
                else "-"
                for power in powers
            ),
            number(one.element_mean),
            number(one.element_most),
            number(one.element_any),
            f"{one.row_scales} scale{'s' * (one.row_scales != 1)}",
            number(one.row),
        )


def _entropies(entropies: Sequence[EntropyFigure]) -> Iterator[str]:
    rows: list[Sequence[str]] = [
        (
            "drawn", "family", "output", "rows", "severity", "different", "bits", "corrected",
            "95 %", "draws that move it",
        )
    ]  # fmt: skip
    still: dict[str, list[str]] = {}
    for one in entropies:
        e = one.entropy
        if not one.leaks:
            still.setdefault(f"{DRAWN[one.drawn]}, {one.family}", []).append(NAMES[one.output])
            continue
        full = (
            ", at the cap" if e.distinct == e.samples else ", near the cap" if e.saturated else ""
        )
        rows.append(
            (
                DRAWN[one.drawn],
                one.family,
                NAMES[one.output],
                str(one.rows),
                ", ".join(severity.replace("_", "-") for severity in one.severities),
                f"{e.distinct} of {e.samples}",
                f"{number(e.plugin)}{full}",
                number(e.corrected),
                f"{number(e.low)} to {number(e.high)}",
                f"{100 * e.rate:.0f} % ({100 * e.rate_low:.0f} to {100 * e.rate_high:.0f})",
            )
        )
    if len(rows) > 1:
        yield from columns(rows)
        yield "Each is a proof of a leak. Left end: a lower bound; right end: approximate, a sample has no upper bound."
    most = max((one.entropy.rate_high for one in entropies if not one.leaks), default=0.0)
    if still:
        yield f"0 bits, no draw moved one (at most {100 * most:.1f} % of draws do, with 95 %):"
        yield from (f"  {where}: {', '.join(names)}" for where, names in still.items())


def _probes(report: CapacityReport) -> Iterator[str]:
    yield "Probe: the next of independent tokens, one of 16 (4 bits), from out less its causal recomputation"
    rows: list[Sequence[str]] = [("row", "gain in bits", "standard error", "sequences", "differ")]
    for one in report.probes:
        rows.append(
            (
                f"{one.row} of {one.block}",
                f"{one.gain.bits:.2f}",
                f"{one.gain.error:.2f}",
                str(one.samples),
                str(one.differing),
            )
        )
    yield from columns(rows)


def verdict(report: CapacityReport) -> str:
    """The last line."""
    name = report.recipe
    if not report.consistent:
        return (
            f"{name}: bits moved that the bounds exclude; one of them is wrong. Please report it."
        )
    if report.proved:
        return f"{name}: 0 bits, proved for finite inputs, and none seen."
    if not report.leaks:
        return f"{name}: nothing but the past of a document gets through."
    if report.observed:
        return f"{name} LEAKS: bits moved that must not."
    return f"{name} can leak, by its bounds, though no draw here showed it."


def number(bits: float) -> str:
    """Bits as text."""
    if bits == 0:
        return "0"
    return "below 0.01" if bits < 0.01 else f"{bits:.2f}" if bits < 100 else f"{bits:.0f}"
