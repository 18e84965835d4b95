"""What all forms of a report say in the same words."""

from collections.abc import Mapping
from types import MappingProxyType

from flamia_ref.report.model import (
    CaseResult,
    Diagnosis,
    Difference,
    Report,
    Status,
    TensorResult,
    Width,
)

MEANINGS: Mapping[Status, str] = MappingProxyType(
    {
        Status.PASS: "every tensor is equal bit for bit, or inside its envelope",
        Status.BIT_MISMATCH: "bits differ where one value is permitted, or where no envelope is known",
        Status.OUTSIDE_ENVELOPE: "no order of additions that the recipe permits gives these values",
        Status.SHAPE: "a tensor has another shape than in the pack",
        Status.DTYPE: "a tensor has another type than in the pack",
        Status.LAYOUT: "the right elements, in another order",
        Status.NAN_PATTERN: "NaN where none may be, or none where one must be",
        Status.MISSING: "an output, or the whole case, was not given",
        Status.NONDETERMINISTIC: "two calls on the same inputs gave different bits (--repeats)",
        Status.LEAK: "two cases that differ in hidden tokens alone gave different bits",
        Status.FAILED: "the kernel raised, or returned no results",
        Status.UNKNOWN: "a tensor was given that the case has not",
        Status.SKIPPED: "the kernel does not take what the case needs; neither passed nor failed",
    }
)
"""What each verdict means, in one line."""

# Numbers on both sides of zero are billions of steps apart, which says nothing.
_MOST_STEPS = 4096


def word(report: Report) -> str:
    """Return PASS, FAIL, or NOTHING COMPARED where every case was skipped or there is none."""
    return {Status.PASS: "PASS", Status.SKIPPED: "NOTHING COMPARED"}.get(report.status, "FAIL")


def verdict(report: Report) -> str:
    """Return the word for a report, and how many cases there are of each status."""
    counts = {
        status: sum(case.status is status for case in report.cases)
        for status in Status
        if any(case.status is status for case in report.cases)
    }
    cases = "1 case" if len(report.cases) == 1 else f"{len(report.cases)} cases"
    parts = ", ".join(f"{count} {status}" for status, count in counts.items())
    return ": ".join(filter(None, [word(report), cases, parts]))


def departure(case: CaseResult) -> str:
    """Return at which stage a case departs, and how sure that is. The case must depart."""
    if case.suspects:
        return (
            f"first departs at {case.departs}, of the tensors given; an inference: the fault may "
            f"lie before it, in {', '.join(case.suspects)}"
        )
    first = case.first
    before = case.tensors[: case.tensors.index(first)] if first is not None else ()
    equal = "equal or inside its envelope" if any(one.inside for one in before) else "equal"
    return f"first departs at {case.departs}; every stage that leads to it is {equal}"


def diagnosis(one: Diagnosis) -> str:
    """Return a diagnosis as a sentence with what it explains."""
    known = one.sentence.removesuffix(".")
    return (
        f"{known} (explains {one.explained} of the {one.failing} elements that fail in {one.name})"
    )


def consistency(case: CaseResult) -> str:
    """Return what is known of the outputs from end to end, "" where that was not asked."""
    if case.consistent is None:
        return ""
    if case.consistent:
        return "consistent: some way that the recipe permits leads from the inputs to these outputs"
    return "not consistent: no way that the recipe permits leads from the inputs to these outputs"


def rounding(first: Difference) -> str:
    """Return what the expected element was rounded from, "" where the pack does not tell."""
    if first.before is None:
        return ""
    near = "" if first.boundary is None else f", {first.boundary:.3g} steps from the boundary"
    return f"rounded from {first.before:.9g}{near}"


def failing(one: TensorResult) -> int:
    """Return how many elements of a tensor fail."""
    return one.differing - one.inside


def steps(one: TensorResult, *, short: bool = False) -> str:
    """Return the largest distance of a tensor in representable numbers, "" where it says nothing."""
    if one.largest_steps is None:
        return ""
    if one.largest_steps > _MOST_STEPS:
        return f"over {_MOST_STEPS}" if short else ""
    if short:
        return str(one.largest_steps)
    return f"{one.largest_steps} step{'s' * (one.largest_steps != 1)} of the format"


def tensor(one: TensorResult) -> str:
    """Return the result of one tensor as a line."""
    parts = [f"{one.name}: {one.status}"]
    if one.differing:
        parts.append(f"{one.differing} of {one.elements} elements")
    if one.inside:
        parts.append(
            f"{failing(one)} of them outside" if failing(one) else "all inside the envelope"
        )
    if one.largest is not None:
        parts.append(f"largest difference {one.largest:.6g}")
    if steps(one):
        parts.append(steps(one))
    if one.envelope is not None and (
        one.envelope.relative or one.envelope.ambiguous or one.envelope.unbounded
    ):
        parts.append(width(one))
    if one.note:
        parts.append(one.note)
    return ", ".join(parts)


def width(one: TensorResult) -> str:
    """Return how wide the envelope of a tensor is. The tensor must have one."""
    if one.envelope is None:
        raise ValueError(f"{one.name} has no envelope; ask only for tensors that have one")
    return (
        f"envelope {one.envelope.relative:.2g} of the rms wide, {ambiguous(one.envelope)} ambiguous"
    )


def ambiguous(wide: Width) -> str:
    """Return how many elements may have more than one value, and how many of them were not judged."""
    return f"{wide.ambiguous}" + (f" ({wide.unbounded} not judged)" if wide.unbounded else "")


def recipe_of(report: Report, case: CaseResult) -> str:
    """Return the recipe that a case is of: the longest one of the report that ends its name, or ""."""
    named = [name for name in report.evidence if name and case.name.endswith(f".{name}")]
    if not named and len(report.evidence) == 1:
        return next(iter(report.evidence))
    return max(named, key=len, default="")
