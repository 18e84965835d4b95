"""The text form of a report: a line a case, and under a case that departs, where, how and why."""

from collections.abc import Iterator

from flamia_ref._errors import printable
from flamia_ref.report import sentences
from flamia_ref.report.model import CaseResult, Difference, Report, Status, TensorResult

_LISTED = 14
"""Tensors of a case that have a line of their own: a case that fails fits on a screen."""


def render(report: Report) -> str:
    """Return the report as lines of text, without a newline at the end."""
    lines = [f"{report.subject} against {report.pack}, numerics version {report.numerics_version}"]
    lines += [f"recipe {name}: evidence {label}" for name, label in report.evidence.items()]
    if report.environment:
        parts = (f"{name} {value}" for name, value in report.environment.items())
        lines.append(f"environment: {', '.join(parts)}")
    for case in report.cases:
        lines += case_lines(case)
    lines += [f"note: {note}" for note in report.notes]
    lines.append(sentences.verdict(report))
    # Names come from files and from kernels.
    return "\n".join(printable(line) for line in lines)


def case_lines(case: CaseResult) -> Iterator[str]:
    """Yield the lines of one case, which may hold what is not printable."""
    elements = sum(one.elements for one in case.tensors)
    yield f"{case.status:<14} {case.name}  ({len(case.tensors)} tensors, {elements} elements)"
    if case.note:
        yield f"    {case.note}"
    if case.failed and case.why:
        yield f"    this case is there for: {case.why}"
    if case.not_given:
        yield f"    not given: {', '.join(case.not_given)}"
    if case.departs is not None:
        yield f"    {sentences.departure(case)}"
    if case.first is not None and case.first.first is not None:
        yield from (f"      {line}" for line in _difference(case.first.first))
    yield from (f"    diagnosis: {sentences.diagnosis(one)}" for one in case.diagnoses)
    yield from _tensors(case)
    if sentences.consistency(case):
        yield f"    {sentences.consistency(case)}"
    if case.failed and case.command:
        yield f"    repeat: {case.command}"


def _tensors(case: CaseResult) -> Iterator[str]:
    """Yield what there is to say of the tensors that fail, and of those that pass in their envelope."""
    told = [one for one in case.tensors if one.status is not Status.PASS or one.note]
    yield from (f"    {sentences.tensor(one)}" for one in told[:_LISTED])
    if len(told) > _LISTED:
        names = ", ".join(f"{one.name} ({one.status})" for one in told[_LISTED:])
        yield f"    and {len(told) - _LISTED} more: {names}"
    within = [one for one in case.tensors if one.status is Status.PASS and one.inside]
    if within:
        parts = [f"{one.name} ({_width(one)})" for one in within[:_LISTED]]
        more = f", and {len(within) - _LISTED} more" if len(within) > _LISTED else ""
        yield (
            "    differ from the pack, inside the envelope of their inputs (its mean width over the"
            f" rms): {', '.join(parts)}{more}"
        )


def _width(one: TensorResult) -> str:
    return "unknown" if one.envelope is None else f"{one.envelope.relative:.2g}"


def _difference(first: Difference) -> Iterator[str]:
    yield ", ".join(f"{name} {number}" for name, number in first.where.items())
    if first.code is not None:
        yield f"scale: {first.element}"
        yield f"first code under it: {first.code}"
    elif first.scale is not None:
        yield f"code: {first.element}"
        yield f"scale: {first.scale}"
    else:
        yield str(first.element)
    if sentences.rounding(first):
        yield sentences.rounding(first)
