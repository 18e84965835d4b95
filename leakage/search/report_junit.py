"""The JUnit form of a hunt."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from flamia_ref._errors import printable
from flamia_ref.leakage.search.hunt_report import HuntReport, HuntVerdict


def render(report: HuntReport) -> str:
    """Return the report as JUnit XML: a test for each operand and severity, for each control, and for the verdict.

    A leak is a failure; what makes the hunt inconclusive is an error; what was not shown is skipped.
    """
    name = printable(report.subject)
    cases = list(_cases(report))
    suite = ElementTree.Element("testsuite", name=f"leak hunt in {name}")
    counts = {"failure": 0, "error": 0, "skipped": 0}
    for title, outcome, message in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=printable(title))
        if outcome is not None:
            counts[outcome] += 1
            ElementTree.SubElement(case, outcome, message=printable(message))
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(counts["failure"]))
    suite.set("errors", str(counts["error"]))
    suite.set("skipped", str(counts["skipped"]))
    suite.set("time", f"{report.seconds:.3f}")
    ElementTree.indent(suite)
    text = ElementTree.tostring(suite, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _cases(report: HuntReport) -> Iterator[tuple[str, str | None, str]]:
    inconclusive = report.verdict is HuntVerdict.INCONCLUSIVE
    left = {id(one) for one in report.witnesses}
    for operand, found in report.hunted.items():
        for severity in found:
            hits = [
                one
                for one in report.witnesses
                if (one.operand, one.severity) == (operand, severity)
            ]
            left -= {id(one) for one in hits}
            counted = severity in report.counted
            message = "; ".join(one.sentence for one in hits)
            outcome = ("failure" if counted else "skipped") if hits else None
            if inconclusive and not hits:
                outcome = "skipped"
                message = f"not shown: {'; '.join(report.reasons)}"
            yield f"{operand}, {severity}", outcome, message
    for witness in report.witnesses:
        if id(witness) in left:
            counted = witness.severity in report.counted
            yield (
                f"{witness.operand}, {witness.severity}, {witness.kind}",
                "failure" if counted else "skipped",
                witness.sentence,
            )
    for control in report.controls:
        outcome = None if control.found or report.leaks else "error"
        yield f"planted leak, {control.name}", outcome, "the same search does not find it"
    yield "verdict", "error" if inconclusive else None, "; ".join(report.reasons)
