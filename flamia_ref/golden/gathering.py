"""Reports of single cases brought together: from the tests of a run, and from its worker processes.

A report crosses from one process to another as its JSON text.
"""

import json
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from flamia_ref._errors import shown
from flamia_ref.report.model import CaseResult, Report

SCHEMA = "flamia-ref report"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one test found: its id, the place of its case in the pack, and the report as JSON."""

    test: str
    place: int
    report: str


def report_from_json(text: str) -> Report:
    """Return the report that `Report.to_json` wrote.

    Raises ValueError where the text is none, or has other fields than this version's.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown(text)} is no {SCHEMA}: {error}") from error
    try:
        if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
            raise ValueError(f"{shown(text)} is no {SCHEMA}")
        report: Report = _read(Report, document)
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"this is no {SCHEMA} of this version: {shown(str(error))}") from error
    return report


def gathered(tested: Iterable[Finding], *, pack: str) -> Report:
    """Return one report of all cases, in the order of the pack and, within a case, of the tests' ids.

    `pack` names it where nothing was tested. A case that several tests checked is there for each,
    with the id of the test in its note.
    """
    found = sorted(tested, key=lambda one: (one.place, one.test))
    reports = [report_from_json(one.report) for one in found]
    names = [case.name for report in reports for case in report.cases]
    cases = [
        _noted(case, one.test) if names.count(case.name) > 1 else case
        for one, report in zip(found, reports, strict=True)
        for case in report.cases
    ]
    return Report(
        pack=_listed(reports, "pack") or pack,
        subject=_listed(reports, "subject") or "no kernel",
        numerics_version=reports[0].numerics_version if reports else 0,
        evidence={name: label for report in reports for name, label in report.evidence.items()},
        environment={name: text for report in reports for name, text in report.environment.items()},
        cases=tuple(cases),
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
    )


def _noted(case: CaseResult, test: str) -> CaseResult:
    return replace(case, note="; ".join(filter(None, (case.note, f"checked by {test}"))))


def _listed(reports: Sequence[Report], field: str) -> str:
    return ", ".join(dict.fromkeys(getattr(report, field) for report in reports))


def _read(kind: Any, data: Any) -> Any:
    """Return JSON data as a value of a type that the fields of reports have."""
    if data is None:
        return None
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        plain = [one for one in arguments if one is not type(None)]
        return _read(plain[0], data) if len(plain) == 1 else data
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(_read(arguments[0], item) for item in data)
        return tuple(_read(one, item) for one, item in zip(arguments, data, strict=True))
    if origin is not None:
        return {key: _read(arguments[1], item) for key, item in data.items()}
    if is_dataclass(kind):
        make: Any = kind
        hints = get_type_hints(kind)
        names = (one.name for one in fields(kind) if one.name in data)
        return make(**{name: _read(hints[name], data[name]) for name in names})
    if issubclass(kind, Enum):
        return kind(data)
    return float(data) if kind is float else data
