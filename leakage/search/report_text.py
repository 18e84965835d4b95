"""The text of a hunt."""

from __future__ import annotations

from collections.abc import Iterator

from flamia_ref._errors import printable
from flamia_ref.leakage.legal import Severity
from flamia_ref.leakage.search.hunt_report import HuntReport, HuntVerdict
from flamia_ref.leakage.search.setting import Setting

_WORDS = {
    HuntVerdict.LEAK: "LEAK",
    HuntVerdict.NONE_FOUND: "NONE FOUND",
    HuntVerdict.INCONCLUSIVE: "INCONCLUSIVE",
}
_SHOWN_FAILURES = 3


def render(report: HuntReport) -> str:
    """Return the report as lines of text, without a newline at the end."""
    return "\n".join(printable(line) for line in _lines(report))


def words(severity: Severity) -> str:
    """A severity as people write it."""
    return str(severity).replace("_", " ")


def shape(setting: Setting) -> str:
    """Documents, heads and mask in a line."""
    lengths = ", ".join(map(str, setting.lengths[:8]))
    more = ", ..." if len(setting.lengths) > 8 else ""
    mask = "causal" if setting.mask.causal else "full"
    left, right = setting.mask.window
    window = (
        ""
        if (left, right) == (None, None)
        else f", window {-1 if left is None else left},{-1 if right is None else right}"
    )
    heads = f"{setting.heads} heads over {setting.kv_heads}" if setting.heads > 1 else "1 head"
    passes = "forward and backward" if setting.backward else "forward"
    return (
        f"{mask}{window}, lengths {lengths}{more}, {heads}, head_dim {setting.head_dim}, {passes}"
    )


def _lines(report: HuntReport) -> Iterator[str]:
    evidence = "" if report.evidence is None else f" (evidence {report.evidence})"
    yield f"leak hunt in {report.subject}{evidence}"
    yield shape(report.setting)
    yield (
        f"{report.cases} perturbations, {report.calls} calls, {report.seconds:.1f} s, seed {report.seed}"
    )
    if report.first_found is not None:
        calls, seconds = report.first_found
        yield f"first leak after {calls} calls, {seconds:.2f} s"
    for operand, found in report.hunted.items():
        kinds = ", ".join(words(kind) for kind in found)
        yield f"    {operand}: {kinds or 'nothing that it must not reach shares a block with it'}"
    for witness in report.witnesses:
        yield f"{'leak' if witness.severity in report.counted else 'found'}: {witness.sentence}"
    if report.poison_tried:
        yield (
            f"NaN and infinity, which are no leak of finite inputs: {len(report.poison)} found in"
            f" {report.poison_tried} perturbations"
        )
    yield from (f"    {one.sentence}" for one in report.poison)
    if report.controls:
        found_controls = sum(one.found for one in report.controls)
        yield f"planted leaks: {found_controls} of {len(report.controls)} found"
    for control in report.controls:
        how = "NOT FOUND"
        if control.found:
            by = "permutation tests" if control.case is None else f"case {control.case + 1}"
            how = f"found by {by}"
        yield f"    {control.name}: {how}"
    for failure in report.failures[:_SHOWN_FAILURES]:
        yield f"failed at {failure.case}: {failure.reason}"
    yield from (f"note: {note}" for note in report.notes)
    # Beside a leak they say what else the hunt cannot speak of.
    of = "nothing is said of the rest" if report.leaks else "inconclusive"
    yield from (f"{of}: {reason}" for reason in report.reasons)
    yield f"{_WORDS[report.verdict]}: {_summary(report)}"


def _summary(report: HuntReport) -> str:
    if report.verdict is HuntVerdict.LEAK:
        counted = [one for one in report.witnesses if one.severity in report.counted]
        kinds = {one.severity for one in counted}
        of = {one.operand for one in counted}
        names = [name for name in report.operands if name in of]
        return (
            f"{', '.join(words(kind) for kind in Severity if kind in kinds)}, by changes of"
            f" {', '.join(names)}"
        )
    if report.verdict is HuntVerdict.NONE_FOUND:
        return "no output moved that must not, and every planted leak was found by the same search"
    return "nothing was found, but the search could not have shown it"
