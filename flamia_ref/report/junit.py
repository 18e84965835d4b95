"""The JUnit form of a report, which continuous integration reads: a suite a recipe, a test a case."""

from collections.abc import Iterable, Iterator
from xml.sax.saxutils import escape, quoteattr

from flamia_ref._errors import printable
from flamia_ref.report import sentences
from flamia_ref.report.model import CaseResult, Report, Status
from flamia_ref.report.text import case_lines

_LONGEST = 1000  # characters of an attribute
_NO_RECIPE = "golden"


def render(report: Report) -> str:
    """Return the report as JUnit XML that ends with a newline.

    A case is a test; its class is the recipe, or "golden" where the report does not know the recipe.
    All that does not pass is a failure, except what was skipped; the property `verdict` of a suite says
    whether anything was compared. No times: a report has none.
    """
    suites: dict[str, list[CaseResult]] = {}
    for case in report.cases:
        suites.setdefault(sentences.recipe_of(report, case) or _NO_RECIPE, []).append(case)
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites{_counts(report, None)}>"]
    for recipe, cases in suites.items():
        lines += _suite(report, recipe, cases)
    return "\n".join([*lines, "</testsuites>"]) + "\n"


def _suite(report: Report, recipe: str, cases: Iterable[CaseResult]) -> Iterator[str]:
    cases = tuple(cases)
    yield f"  <testsuite{_counts(report, (recipe, cases))}>"
    yield from _properties("    ", _about(report, recipe))
    for case in cases:
        yield from _case(case, recipe)
    if report.notes:
        yield f"    <system-out>{_content(report.notes)}</system-out>"
    yield "  </testsuite>"


def _counts(report: Report, part: tuple[str, tuple[CaseResult, ...]] | None) -> str:
    name, cases = part or (f"flamia-ref golden check: {report.subject}", report.cases)
    return _attributes(
        name=name,
        tests=len(cases),
        failures=sum(case.failed for case in cases),
        errors=0,
        skipped=sum(case.status is Status.SKIPPED for case in cases),
        time=0,
    )


def _about(report: Report, recipe: str) -> Iterator[tuple[str, str]]:
    yield "pack", report.pack
    yield "subject", report.subject
    yield "verdict", sentences.verdict(report)
    yield "numerics_version", str(report.numerics_version)
    if recipe in report.evidence:
        yield "evidence", report.evidence[recipe]
    for name, value in report.environment.items():
        yield f"environment.{name}", value


def _case(case: CaseResult, recipe: str) -> Iterator[str]:
    yield f"    <testcase{_attributes(name=case.name, classname=recipe, time=0)}>"
    yield from _properties("      ", _found(case))
    message = _message(case)
    if case.status is Status.SKIPPED:
        yield f"      <skipped{_attributes(message=message)}/>"
    elif case.failed:
        attributes = _attributes(message=message, type=case.status)
        yield f"      <failure{attributes}>{_content(case_lines(case))}</failure>"
    yield "    </testcase>"


def _message(case: CaseResult) -> str:
    """Return one line that says what is wrong: the best diagnosis, else where the case departs."""
    if case.diagnoses:
        return f"{case.status}: {case.diagnoses[0].sentence}"
    if case.departs is not None:
        return f"{case.status}: {sentences.departure(case)}"
    return f"{case.status}: {case.note}" if case.note else str(case.status)


def _found(case: CaseResult) -> Iterator[tuple[str, str]]:
    yield "status", str(case.status)
    if case.why:
        yield "why", case.why
    if case.flags:
        yield "flags", ", ".join(case.flags)
    if case.departs is not None:
        yield "departs", case.departs
    for one in case.diagnoses:
        yield "diagnosis", one.mistake
    if case.consistent is not None:
        yield "consistent", "true" if case.consistent else "false"
    if case.command:
        yield "command", case.command


def _properties(indent: str, pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    lines = [f"{indent}  <property{_attributes(name=name, value=value)}/>" for name, value in pairs]
    if lines:
        yield f"{indent}<properties>"
        yield from lines
        yield f"{indent}</properties>"


def _attributes(**values: object) -> str:
    return "".join(f" {name}={quoteattr(_cut(str(value)))}" for name, value in values.items())


def _cut(text: str) -> str:
    # What is not printable, which XML has no way to hold, is written as an escape.
    shown = printable(text)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


def _content(lines: Iterable[str]) -> str:
    return escape("\n".join(printable(line) for line in lines))
