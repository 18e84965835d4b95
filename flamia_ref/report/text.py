"""The text form of a report: a line a case, and under a case that departs, where and how."""

from collections.abc import Iterator

from flamia_ref._errors import printable
from flamia_ref.report.model import CaseResult, Difference, Report, Status, TensorResult

# Numbers on both sides of zero are billions of steps apart, which says nothing.
_MOST_STEPS = 4096


def render(report: Report) -> str:
    """Return the report as lines of text, without a newline at the end."""
    lines = [f"{report.subject} against {report.pack}, numerics version {report.numerics_version}"]
    lines += [f"recipe {name}: evidence {label}" for name, label in report.evidence.items()]
    for case in report.cases:
        lines += _case(case)
    lines += [f"note: {note}" for note in report.notes]
    lines.append(_summary(report))
    # Names come from files and from kernels.
    return "\n".join(printable(line) for line in lines)


def _summary(report: Report) -> str:
    counts = {
        status: sum(case.status is status for case in report.cases)
        for status in Status
        if any(case.status is status for case in report.cases)
    }
    parts = ", ".join(f"{count} {status}" for status, count in counts.items())
    cases = "1 case" if len(report.cases) == 1 else f"{len(report.cases)} cases"
    return f"{'PASS' if report.passed else 'FAIL'}: {cases}: {parts or 'none compared'}"


def _case(case: CaseResult) -> Iterator[str]:
    elements = sum(one.elements for one in case.tensors)
    yield f"{case.status:<14} {case.name}  ({len(case.tensors)} tensors, {elements} elements)"
    if case.note:
        yield f"    {case.note}"
    if case.not_given:
        yield f"    not given: {', '.join(case.not_given)}"
    if case.departs is not None:
        yield f"    {_departure(case)}"
    if case.first is not None and case.first.first is not None:
        yield from (f"      {line}" for line in _difference(case.first.first))
    for one in case.tensors:
        if one.status is not Status.PASS or one.note:
            yield f"    {_tensor(one)}"


def _departure(case: CaseResult) -> str:
    if case.suspects:
        return (
            f"first departs at {case.departs}, of the tensors given; an inference: the fault may "
            f"lie before it, in {', '.join(case.suspects)}"
        )
    return f"first departs at {case.departs}; every stage that leads to it is equal"


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


def _tensor(one: TensorResult) -> str:
    parts = [f"{one.name}: {one.status}"]
    if one.differing:
        parts.append(f"{one.differing} of {one.elements} elements")
    if one.largest is not None:
        parts.append(f"largest difference {one.largest:.6g}")
    if one.largest_steps is not None and one.largest_steps <= _MOST_STEPS:
        parts.append(f"{one.largest_steps} step{'s' * (one.largest_steps != 1)} of the format")
    if one.note:
        parts.append(one.note)
    return ", ".join(parts)
